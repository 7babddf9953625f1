//! The table of an open device: buffers, weights, executables and queues.

use crate::types::open_enum;
use crate::{DType, ErrorRecord, Program, RunArgs, Slice, Status};
use abi_stable::StableAbi;

macro_rules! handle {
    ($($(#[$meta:meta])* $name:ident)*) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Debug, StableAbi)]
        pub struct $name {
            _opaque: [u8; 0],
        }
    )*};
}

handle! {
    /// The plugin's open device behind a pointer. Any thread.
    DeviceHandle
    /// One allocation of a device. Any thread.
    BufferHandle
    /// A compiled program. Any thread, but one run at a time.
    ExecutableHandle
    /// An order of work on a device. One thread at a time.
    QueueHandle
}

open_enum! {
    /// What a buffer will hold; a hint for placement and for the driver's usage bits.
    BufferUsage: u32 {
        /// Not stated.
        ANY = 0,
        /// Weights: written once, read by every run.
        WEIGHTS = 1,
        /// Keys and values.
        KV = 2,
        /// Scratch of executables.
        SCRATCH = 3,
        /// Transfers between host and device.
        STAGING = 4,
    }
}

/// An allocation wish.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct BufferDesc {
    /// Set by the host.
    pub struct_size: usize,
    /// Bytes; more than 0.
    pub size: u64,
    /// Index of the buffer type. Memory of exactly this type is returned, or an error.
    pub buffer_type: u32,
    /// What it will hold.
    pub usage: BufferUsage,
}

/// Bytes inside a buffer. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy, StableAbi)]
pub struct BufferRange {
    /// The buffer; null where a field allows "none".
    pub buffer: *mut BufferHandle,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

impl BufferRange {
    /// No buffer.
    pub const NONE: Self = Self { buffer: std::ptr::null_mut(), offset: 0, size: 0 };
}

/// A weight matrix as the core holds it: `n_rows` rows of `n_in` elements in GGUF's row layout.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct WeightDesc {
    /// Set by the host.
    pub struct_size: usize,
    /// Element or block type.
    pub dtype: DType,
    /// Bits of [`weight_use`].
    pub uses: u32,
    /// Elements of a row (input features).
    pub n_in: u64,
    /// Rows (output features, vocabulary; experts times rows for expert stacks).
    pub n_rows: u64,
    /// Rows of one expert, for expert stacks: a layout's groups of rows do not cross from one expert to the next, so `rows_per_group`
    /// divides it. Default: 0, which is no stack.
    pub rows_per_expert: u64,
}

/// Which ops read a weight, so that a backend repacks only what no other op reads row by row.
pub mod weight_use {
    /// The right side of matmul.
    pub const MATMUL: u32 = 1;
    /// The table of embed.
    pub const EMBED: u32 = 2;
    /// Norm weights, biases, rope factors, kernels of convolutions: read element by element.
    pub const VECTOR: u32 = 4;
    /// The stack of matmul_experts: a few experts' rows are read in each run.
    pub const EXPERTS: u32 = 8;
}

/// [`WeightLayout::layout`] of GGUF's own rows: such weights are used where they lie, from a file mapping too.
pub const LAYOUT_NATIVE: u32 = 0;

/// How a device wants a weight laid out; stated before anything is allocated, so that the plan is true.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct WeightLayout {
    /// In: the caller's size. Out: bytes filled.
    pub struct_size: usize,
    /// [`LAYOUT_NATIVE`], or a number of the backend's own.
    pub layout: u32,
    /// Rows are split between tiles only at multiples of this. Expert stacks are split between experts
    /// where an expert fits a chunk, which is quick; a backend computes rightly for any split.
    pub rows_per_group: u32,
    /// Bytes that a group of rows takes; the last group may be short of rows, not of bytes.
    pub group_bytes: u64,
    /// Alignment of a tile's first byte.
    pub alignment: u64,
}

/// One tile of a weight: rows `first_row .. first_row + n_rows` at `range`. A weight of one dimension counts as a matrix
/// of one row, here, in [`WeightDesc`] and in [`WeightLayout`]: its only tile has `first_row` 0 and `n_rows` 1.
#[repr(C)]
#[derive(Debug, Clone, Copy, StableAbi)]
pub struct WeightTile {
    /// Set by the host.
    pub struct_size: usize,
    /// First row of the tensor in this tile.
    pub first_row: u64,
    /// Rows in this tile.
    pub n_rows: u64,
    /// Where they lie.
    pub range: BufferRange,
    /// The layout they have, as weight_layout gave it.
    pub layout: u32,
}

/// The tiling of one weight value of a program. The tiles cover its rows in order, without gap or overlap.
#[repr(C)]
#[derive(Debug, Clone, Copy, StableAbi)]
pub struct WeightBinding {
    /// Set by the host.
    pub struct_size: usize,
    /// The value's index in the program.
    pub value: u32,
    /// Its tiles; live as long as the executable.
    pub tiles: Slice<WeightTile>,
}

/// Rows to be written into a tile, repacked as the layout asks.
#[repr(C)]
#[derive(Debug, Clone, Copy, StableAbi)]
pub struct WeightUpload {
    /// Set by the host.
    pub struct_size: usize,
    /// The whole tensor.
    pub desc: *const WeightDesc,
    /// Which rows, and where to.
    pub tile: *const WeightTile,
    /// The rows in GGUF layout; lives until the fence is reached.
    pub src: *const u8,
    /// Bytes of `src`.
    pub src_size: u64,
}

/// Bounds an executable is made for, and what it may use.
#[repr(C)]
#[derive(Debug, Clone, Copy, StableAbi)]
pub struct CompileOptions {
    /// Set by the host.
    pub struct_size: usize,
    /// Greatest n_tokens of a run (the ubatch).
    pub n_tokens_max: u32,
    /// Greatest n_outputs of a run.
    pub n_outputs_max: u32,
    /// Greatest number of sequences of a run.
    pub n_seqs_max: u32,
    /// Greatest position + 1 of a run.
    pub n_ctx_max: u32,
    /// Buffer type that scratch comes from.
    pub scratch_type: u32,
    /// Unused; keeps `scratch_chunk_max` aligned.
    pub reserved: u32,
    /// Greatest scratch chunk: the buffer type's `max_size`, or an operator's cap below it.
    pub scratch_chunk_max: u64,
}

/// A piece of scratch that every run must be given.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct ScratchDesc {
    /// Bytes.
    pub size: u64,
    /// Alignment of its first byte.
    pub alignment: u64,
}

/// What an executable would take, stated before it is made.
#[repr(C)]
#[derive(Debug, Clone, Copy, StableAbi)]
pub struct ExecutableMemory {
    /// In: the caller's size. Out: bytes filled.
    pub struct_size: usize,
    /// The caller's array for the scratch pieces; may be null to ask for the number.
    pub scratch: *mut ScratchDesc,
    /// Elements that `scratch` can take.
    pub scratch_cap: usize,
    /// Out: pieces needed. SHORT_BUFFER is returned when there are more than `scratch_cap`.
    pub scratch_len: usize,
    /// Out: bytes of the device's memory that compiling takes outside all buffers (packed weights, pipelines).
    pub device_bytes: u64,
    /// Out: the same of the host's memory.
    pub host_bytes: u64,
}

/// The functions of an open device. Static in the plugin. Required unless marked `(optional)`.
#[repr(C)]
#[derive(Debug, StableAbi)]
pub struct DeviceTable {
    /// Set by the plugin.
    pub struct_size: usize,
    /// Frees the device; all its buffers, executables and queues are freed before.
    pub close: Option<unsafe extern "C" fn(device: *mut DeviceHandle)>,
    /// Allocates; contents are undefined. TOO_BIG over `max_size`, OUT_OF_MEMORY below it; null is never returned with OK.
    pub buffer_alloc: Option<
        unsafe extern "C" fn(
            device: *const DeviceHandle,
            desc: *const BufferDesc,
            out: *mut *mut BufferHandle,
            err: *mut ErrorRecord,
        ) -> Status,
    >,
    /// (optional) Makes a read-only buffer of host memory that outlives it, without a copy. Default: not offered.
    pub buffer_import: Option<
        unsafe extern "C" fn(
            device: *const DeviceHandle,
            desc: *const BufferDesc,
            ptr: *const u8,
            out: *mut *mut BufferHandle,
            err: *mut ErrorRecord,
        ) -> Status,
    >,
    /// Frees a buffer.
    pub buffer_free:
        Option<unsafe extern "C" fn(device: *const DeviceHandle, buffer: *mut BufferHandle)>,
    /// (optional) The host's address of a MAPPED buffer, valid until it is freed. Default: nothing is mapped.
    pub buffer_map: Option<
        unsafe extern "C" fn(
            device: *const DeviceHandle,
            buffer: *const BufferHandle,
            out: *mut *mut u8,
            err: *mut ErrorRecord,
        ) -> Status,
    >,
    /// The layout the device wants a weight in. UNSUPPORTED for a type it cannot read.
    pub weight_layout: Option<
        unsafe extern "C" fn(
            device: *const DeviceHandle,
            desc: *const WeightDesc,
            out: *mut WeightLayout,
            err: *mut ErrorRecord,
        ) -> Status,
    >,
    /// Writes 1 for every op of the program that the device can run and 0 for the rest; `out_len` is the number of ops.
    pub program_supports: Option<
        unsafe extern "C" fn(
            device: *const DeviceHandle,
            program: *const Program,
            out: *mut u8,
            out_len: usize,
            err: *mut ErrorRecord,
        ) -> Status,
    >,
    /// What compiling the program would take. TOO_BIG, with the limit, when one value would exceed a scratch chunk: the core then
    /// asks again with fewer tokens.
    pub program_memory: Option<
        unsafe extern "C" fn(
            device: *const DeviceHandle,
            program: *const Program,
            options: *const CompileOptions,
            out: *mut ExecutableMemory,
            err: *mut ErrorRecord,
        ) -> Status,
    >,
    /// Compiles. `weights` has one binding for each weight value; buffers and tiles outlive the executable. The program is borrowed.
    pub program_compile: Option<
        unsafe extern "C" fn(
            device: *const DeviceHandle,
            program: *const Program,
            options: *const CompileOptions,
            weights: *const Slice<WeightBinding>,
            out: *mut *mut ExecutableHandle,
            err: *mut ErrorRecord,
        ) -> Status,
    >,
    /// Frees an executable with no run in flight.
    pub executable_free: Option<
        unsafe extern "C" fn(device: *const DeviceHandle, executable: *mut ExecutableHandle),
    >,
    /// Makes a queue. Its fence starts at 0.
    pub queue_create: Option<
        unsafe extern "C" fn(
            device: *const DeviceHandle,
            out: *mut *mut QueueHandle,
            err: *mut ErrorRecord,
        ) -> Status,
    >,
    /// Waits for all work of the queue and frees it.
    pub queue_free: Option<unsafe extern "C" fn(queue: *mut QueueHandle)>,
    /// Copies host memory to a buffer. `src` lives until `fence` is reached. Work of a queue runs in order.
    pub queue_write: Option<
        unsafe extern "C" fn(
            queue: *mut QueueHandle,
            dst: BufferRange,
            src: *const u8,
            fence: *mut u64,
            err: *mut ErrorRecord,
        ) -> Status,
    >,
    /// Copies a buffer to host memory, which holds it once `fence` is reached.
    pub queue_read: Option<
        unsafe extern "C" fn(
            queue: *mut QueueHandle,
            src: BufferRange,
            dst: *mut u8,
            fence: *mut u64,
            err: *mut ErrorRecord,
        ) -> Status,
    >,
    /// Copies `src.size` bytes between two buffers of the device that do not overlap.
    pub queue_copy: Option<
        unsafe extern "C" fn(
            queue: *mut QueueHandle,
            src: BufferRange,
            dst: BufferRange,
            fence: *mut u64,
            err: *mut ErrorRecord,
        ) -> Status,
    >,
    /// Writes rows of a weight into a tile in the device's layout.
    pub queue_upload: Option<
        unsafe extern "C" fn(
            queue: *mut QueueHandle,
            upload: *const WeightUpload,
            fence: *mut u64,
            err: *mut ErrorRecord,
        ) -> Status,
    >,
    /// Runs an executable once. `args` and its arrays are borrowed for the call; host memory named in bindings lives until `fence` is reached.
    pub queue_run: Option<
        unsafe extern "C" fn(
            queue: *mut QueueHandle,
            executable: *mut ExecutableHandle,
            args: *const RunArgs,
            fence: *mut u64,
            err: *mut ErrorRecord,
        ) -> Status,
    >,
    /// Waits until the queue's fence is at least `fence`; an error of the work up to there is returned here, once. `timeout_ns` `u64::MAX` is for ever.
    pub queue_wait: Option<
        unsafe extern "C" fn(
            queue: *mut QueueHandle,
            fence: u64,
            timeout_ns: u64,
            err: *mut ErrorRecord,
        ) -> Status,
    >,
}

// SAFETY: a table is static, immutable data; its functions are callable from any thread by contract.
unsafe impl Send for DeviceTable {}
// SAFETY: as above.
unsafe impl Sync for DeviceTable {}
