//! The traits an author implements, and what they are given.

use crate::{Error, Result, Run};
use std::ops::Deref;
use std::ptr::NonNull;
use std::time::Duration;
use tegula_abi as abi;
use tegula_program::{Program, ValueId};
use tegula_quant::DType;

/// A backend: the drivers it loaded and the devices it found.
pub trait Backend: Sized + Send + Sync + 'static {
    /// The id users type: lower case, `[a-z0-9_]+`.
    const ID: &'static str;
    /// One line for people.
    const DESCRIPTION: &'static str;
    /// Its open devices.
    type Device: Device;

    /// Loads drivers and lists devices. May be slow, may fail.
    fn open() -> Result<Self>;
    /// Number of devices; fixed.
    fn n_devices(&self) -> u32;
    /// Identity of a device. `struct_size` is set by the thunk.
    fn device_info(&self, index: u32) -> Result<abi::DeviceInfo>;
    /// A heap, with what is free now.
    fn heap_info(&self, index: u32, heap: u32) -> Result<abi::HeapInfo>;
    /// A buffer type, with its true `max_size`.
    fn buffer_type_info(&self, index: u32, buffer_type: u32) -> Result<abi::BufferTypeInfo>;
    /// Makes a device usable.
    fn open_device(&self, index: u32, options: &abi::DeviceOptions) -> Result<Self::Device>;
    /// An extension table by name, static; null if unknown.
    fn extension(_name: &str) -> *const std::ffi::c_void {
        std::ptr::null()
    }
}

/// An open device. Called from any thread.
pub trait Device: Sized + Send + Sync + 'static {
    /// One allocation.
    type Buffer: Send + Sync + 'static;
    /// A compiled program.
    type Executable: Send + 'static;
    /// An order of work.
    type Queue: Queue<Self>;

    /// Allocates memory of exactly the type asked for. TOO_BIG over `max_size`.
    fn alloc(&self, desc: &abi::BufferDesc) -> Result<Self::Buffer>;

    /// Makes a read-only buffer of host memory without a copy.
    ///
    /// # Safety
    /// `desc.size` bytes at `ptr` are readable for as long as the buffer lives.
    unsafe fn import(&self, desc: &abi::BufferDesc, ptr: *const u8) -> Result<Self::Buffer> {
        let _ = (desc, ptr);
        Err(Error::unsupported("host memory cannot be imported"))
    }

    /// The host's address of a mapped buffer.
    fn map(&self, buffer: &Self::Buffer) -> Result<*mut u8> {
        let _ = buffer;
        Err(Error::unsupported("buffers of this device are not mapped"))
    }

    /// The layout a weight should have.
    fn weight_layout(&self, weight: &Weight) -> Result<abi::WeightLayout>;
    /// For each op of the program, whether the device can run it.
    fn supports(&self, program: &Program) -> Result<Vec<bool>>;
    /// What compiling would take.
    fn memory(&self, program: &Program, options: &abi::CompileOptions) -> Result<Memory>;
    /// Compiles.
    fn compile(
        &self,
        program: Program,
        options: &abi::CompileOptions,
        weights: Vec<WeightBinding<Self::Buffer>>,
    ) -> Result<Self::Executable>;
    /// Makes a queue; fences start at 0.
    fn queue(&self) -> Result<Self::Queue>;
}

/// An order of work on a device. One thread at a time. Work may be done at once or later; a method returns the fence value that is reached
/// when it is done, and values only grow.
pub trait Queue<D: Device>: Send + 'static {
    /// Copies host memory to a buffer.
    ///
    /// # Safety
    /// `src` holds `dst.size` bytes until the fence is reached.
    unsafe fn write(&mut self, dst: Range<'_, D::Buffer>, src: *const u8) -> Result<u64>;

    /// Copies a buffer to host memory.
    ///
    /// # Safety
    /// `dst` holds `src.size` bytes until the fence is reached.
    unsafe fn read(&mut self, src: Range<'_, D::Buffer>, dst: *mut u8) -> Result<u64>;

    /// Copies between two buffers.
    fn copy(&mut self, src: Range<'_, D::Buffer>, dst: Range<'_, D::Buffer>) -> Result<u64>;

    /// Writes rows of a weight into a tile in the device's layout.
    ///
    /// # Safety
    /// `upload.src` is readable until the fence is reached.
    unsafe fn upload(&mut self, upload: &Upload<'_, D::Buffer>) -> Result<u64>;

    /// Runs an executable once.
    ///
    /// # Safety
    /// Host memory named in the run is valid until the fence is reached.
    unsafe fn run(
        &mut self,
        executable: &mut D::Executable,
        run: &Run<'_, D::Buffer>,
    ) -> Result<u64>;

    /// Waits until the fence is at least `fence`, and gives the error of work that failed. `None` waits for ever.
    fn wait(&mut self, fence: u64, timeout: Option<Duration>) -> Result<()>;
}

/// A buffer that the core keeps alive for longer than whatever holds this.
pub struct Held<B>(NonNull<B>);

impl<B> Held<B> {
    /// # Safety
    /// `ptr` is null or a live buffer that outlives the value.
    pub(crate) unsafe fn new(ptr: *mut abi::BufferHandle) -> Result<Self> {
        NonNull::new(ptr.cast()).map(Self).ok_or_else(|| Error::invalid("a null buffer"))
    }
}

impl<B> Clone for Held<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for Held<B> {}

impl<B> Deref for Held<B> {
    type Target = B;
    fn deref(&self) -> &B {
        // SAFETY: live by the contract of `new`; buffers are only ever shared.
        unsafe { self.0.as_ref() }
    }
}

// SAFETY: a Held is a shared reference, sendable exactly if the buffer may be shared.
unsafe impl<B: Sync> Send for Held<B> {}
// SAFETY: as above.
unsafe impl<B: Sync> Sync for Held<B> {}

/// Bytes inside a buffer.
pub struct Range<'a, B> {
    /// The buffer.
    pub buffer: &'a B,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

impl<B> Clone for Range<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for Range<'_, B> {}

impl<'a, B> Range<'a, B> {
    /// # Safety
    /// The buffer is null or lives for `'a`.
    pub(crate) unsafe fn new(range: &abi::BufferRange) -> Result<Self> {
        // SAFETY: null or live by the caller's word.
        let buffer = unsafe { range.buffer.cast::<B>().as_ref() };
        let buffer = buffer.ok_or_else(|| Error::invalid("a range without a buffer"))?;
        Ok(Self { buffer, offset: range.offset, size: range.size })
    }
}

/// A weight matrix in GGUF rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weight {
    /// Element or block type.
    pub dtype: DType,
    /// Bits of `abi::weight_use`.
    pub uses: u32,
    /// Elements of a row.
    pub n_in: u64,
    /// Rows.
    pub n_rows: u64,
    /// Rows of one expert, where the weight is a stack of experts; 0 where it is none.
    pub rows_per_expert: u64,
}

/// One tile of a weight, for as long as the executable lives.
pub struct Tile<B> {
    /// First row of the tensor in this tile.
    pub first_row: u64,
    /// Rows in this tile.
    pub n_rows: u64,
    /// The chunk.
    pub buffer: Held<B>,
    /// First byte in the chunk.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
    /// The layout, as `weight_layout` gave it.
    pub layout: u32,
}

/// The tiles of one weight value, in order of rows.
pub struct WeightBinding<B> {
    /// The value.
    pub value: ValueId,
    /// Its tiles.
    pub tiles: Vec<Tile<B>>,
}

/// Rows to be written into a tile.
pub struct Upload<'a, B> {
    /// The whole tensor.
    pub weight: Weight,
    /// First row.
    pub first_row: u64,
    /// Rows.
    pub n_rows: u64,
    /// Where to.
    pub dst: Range<'a, B>,
    /// The layout to write.
    pub layout: u32,
    /// The rows in GGUF layout.
    pub src: *const u8,
    /// Bytes of `src`.
    pub src_size: u64,
}

/// What an executable takes.
#[derive(Debug, Clone, Default)]
pub struct Memory {
    /// Pieces of scratch every run is given.
    pub scratch: Vec<abi::ScratchDesc>,
    /// Bytes of device memory taken by compiling, outside all buffers.
    pub device_bytes: u64,
    /// Bytes of host memory taken by compiling, outside all buffers.
    pub host_bytes: u64,
}
