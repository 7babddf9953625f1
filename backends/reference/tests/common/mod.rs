//! The host's side of the boundary for tests: calls the plugin's tables through raw pointers, as the core does.

use std::ptr::{null, null_mut};
use tegula_sdk::abi::{self, Status};
use tegula_sdk::program::ffi::FfiProgram;
use tegula_sdk::program::{Program, ValueKind};

/// What a failed call says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) status: Status,
    pub(crate) message: String,
    pub(crate) asked: u64,
    pub(crate) limit: u64,
}

/// Calls a function of a table with an error record.
pub(crate) fn call(f: impl FnOnce(*mut abi::ErrorRecord) -> Status) -> Result<(), Failure> {
    let mut text = [0u8; 512];
    let mut record = abi::ErrorRecord {
        struct_size: size_of::<abi::ErrorRecord>(),
        status: Status::OK,
        has: 0,
        native_code: 0,
        asked: 0,
        limit: 0,
        free: 0,
        message: text.as_mut_ptr(),
        message_cap: text.len(),
        message_len: 0,
    };
    let status = f(&raw mut record);
    if status == Status::OK {
        return Ok(());
    }
    let (asked, limit, len) = (record.asked, record.limit, record.message_len);
    assert_eq!(record.status, status);
    Err(Failure { status, message: String::from_utf8_lossy(&text[..len]).into(), asked, limit })
}

pub(crate) fn sized<T: Default>(set: impl FnOnce(&mut T)) -> T {
    let mut value = T::default();
    set(&mut value);
    value
}

/// What the entry function of a plugin answers, and the backend's table.
pub(crate) fn negotiate(entry: abi::BackendEntry, revisions: (u32, u32)) -> (Status, abi::Plugin) {
    // The plugin keeps the host for as long as it is loaded: for ever, here.
    let host: &'static abi::Host = Box::leak(Box::new(abi::Host {
        struct_size: size_of::<abi::Host>(),
        revision_min: revisions.0,
        revision_max: revisions.1,
        ctx: null_mut(),
        log: None,
        log_level_max: abi::LogLevel::OFF,
        version: abi::Str::of("test"),
        extension: None,
    }));
    let empty = abi::Str { ptr: null(), len: 0 };
    let mut plugin = abi::Plugin {
        struct_size: size_of::<abi::Plugin>(),
        revision_min: 0,
        revision_max: 0,
        id: empty,
        version: empty,
        description: empty,
        backend: null(),
    };
    // SAFETY: both structs are valid, and the host lives for ever.
    let status = unsafe { entry(host, &raw mut plugin) };
    (status, plugin)
}

/// An open device with a queue.
pub(crate) struct Rig {
    pub(crate) backend: &'static abi::BackendTable,
    pub(crate) table: &'static abi::DeviceTable,
    pub(crate) handle: *mut abi::BackendHandle,
    pub(crate) device: *mut abi::DeviceHandle,
    pub(crate) queue: *mut abi::QueueHandle,
}

impl Rig {
    pub(crate) fn new() -> Self {
        let (status, plugin) = negotiate(tegula_reference::tegula_backend_v1, (1, 1));
        assert_eq!(status, Status::OK);
        let (mut handle, mut device, mut queue) = (null_mut(), null_mut(), null_mut());
        let options =
            abi::DeviceOptions { struct_size: size_of::<abi::DeviceOptions>(), n_threads: 1 };
        // SAFETY: tables are static; every pointer is to a local of the right type.
        unsafe {
            let backend = &*plugin.backend;
            let table = &*backend.device;
            call(|e| backend.open.unwrap()(&raw mut handle, e)).unwrap();
            let open = backend.device_open.unwrap();
            call(|e| open(handle, 0, &raw const options, &raw mut device, e)).unwrap();
            call(|e| table.queue_create.unwrap()(device, &raw mut queue, e)).unwrap();
            Self { backend, table, handle, device, queue }
        }
    }

    pub(crate) fn buffer_type(&self) -> abi::BufferTypeInfo {
        let mut info: abi::BufferTypeInfo = sized(|i: &mut abi::BufferTypeInfo| {
            i.struct_size = size_of::<abi::BufferTypeInfo>();
        });
        let ask = self.backend.buffer_type_info.unwrap();
        // SAFETY: the handle is live and `info` a valid struct.
        call(|e| unsafe { ask(self.handle, 0, 0, &raw mut info, e) }).unwrap();
        info
    }

    pub(crate) fn alloc(&self, size: u64) -> Result<*mut abi::BufferHandle, Failure> {
        let desc = abi::BufferDesc {
            struct_size: size_of::<abi::BufferDesc>(),
            size,
            ..Default::default()
        };
        let mut buffer = null_mut();
        let alloc = self.table.buffer_alloc.unwrap();
        // SAFETY: the device is live and the pointers are to locals.
        call(|e| unsafe { alloc(self.device, &raw const desc, &raw mut buffer, e) })?;
        Ok(buffer)
    }

    pub(crate) fn free(&self, buffer: *mut abi::BufferHandle) {
        // SAFETY: tests free each buffer once.
        unsafe { self.table.buffer_free.unwrap()(self.device, buffer) };
    }

    /// Waits for a fence and checks that a later one is refused.
    fn wait(&self, fence: u64) {
        let wait = self.table.queue_wait.unwrap();
        // SAFETY: the queue is live.
        call(|e| unsafe { wait(self.queue, fence, u64::MAX, e) }).unwrap();
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // SAFETY: each handle is freed once, the inner ones first.
        unsafe {
            self.table.queue_free.unwrap()(self.queue);
            self.table.close.unwrap()(self.device);
            self.backend.close.unwrap()(self.handle);
        }
    }
}

/// Rows of the tiles of a weight with that many rows: first row and count.
pub(crate) type Split<'a> = &'a dyn Fn(u64) -> Vec<(u64, u64)>;

/// All rows in one tile.
pub(crate) fn whole(n_rows: u64) -> Vec<(u64, u64)> {
    vec![(0, n_rows)]
}

/// Tiles of `step` rows, the last one shorter.
pub(crate) fn steps(step: u64) -> impl Fn(u64) -> Vec<(u64, u64)> {
    move |n_rows| {
        let starts = (0..n_rows).step_by(usize::try_from(step).unwrap());
        starts.map(|first| (first, step.min(n_rows - first))).collect()
    }
}

/// What a session is made of.
pub(crate) struct Setup<'a> {
    pub(crate) program: &'a Program,
    /// Bytes by the weight's name.
    pub(crate) weights: &'a [(&'a str, Vec<u8>)],
    pub(crate) split: Split<'a>,
    /// For each KV group: tokens of a block, and the number of blocks in each segment.
    pub(crate) kv: &'a [(u32, Vec<u32>)],
    pub(crate) n_tokens_max: u32,
    pub(crate) n_ctx_max: u32,
}

/// A sequence of a run: tokens, first position, and for each KV group its blocks and the first of their positions.
#[derive(Clone)]
pub(crate) struct Seq {
    pub(crate) n_tokens: u32,
    pub(crate) first_pos: u32,
    pub(crate) tables: Vec<(Vec<u32>, u32)>,
}

/// A run.
#[derive(Clone)]
pub(crate) struct Call {
    pub(crate) n_tokens: u32,
    pub(crate) n_outputs: u32,
    pub(crate) inputs: Vec<Vec<u8>>,
    pub(crate) seqs: Vec<Seq>,
    /// Bytes of each output.
    pub(crate) outputs: Vec<usize>,
    /// Outputs lie in a buffer instead of the host's memory.
    pub(crate) on_device: bool,
}

/// A compiled program with its weights, scratch and KV cache.
pub(crate) struct Session<'a> {
    rig: &'a Rig,
    executable: *mut abi::ExecutableHandle,
    buffers: Vec<*mut abi::BufferHandle>,
    scratch: Vec<abi::BufferRange>,
    kv: Vec<(abi::KvGroup, Vec<abi::KvSegment>, Vec<abi::BufferRange>)>,
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        // SAFETY: freed once, before the buffers it uses; null is allowed.
        unsafe { self.rig.table.executable_free.unwrap()(self.rig.device, self.executable) };
        self.buffers.iter().for_each(|buffer| self.rig.free(*buffer));
    }
}

impl<'a> Session<'a> {
    pub(crate) fn new(rig: &'a Rig, setup: &Setup<'_>) -> Result<Self, Failure> {
        let mut session = Self {
            rig,
            executable: null_mut(),
            buffers: Vec::new(),
            scratch: Vec::new(),
            kv: Vec::new(),
        };
        let options = abi::CompileOptions {
            struct_size: size_of::<abi::CompileOptions>(),
            n_tokens_max: setup.n_tokens_max,
            n_outputs_max: setup.n_tokens_max,
            n_seqs_max: 4,
            n_ctx_max: setup.n_ctx_max,
            scratch_type: 0,
            reserved: 0,
            scratch_chunk_max: 1 << 30,
        };
        let program = FfiProgram::new(setup.program);
        session.make_scratch(&program, &options)?;
        session.make_kv(setup)?;
        let tiles = session.upload(setup)?;
        let bindings: Vec<_> = tiles
            .iter()
            .map(|(value, tiles)| abi::WeightBinding {
                struct_size: size_of::<abi::WeightBinding>(),
                value: *value,
                tiles: abi::Slice::of(tiles),
            })
            .collect();
        let bindings = abi::Slice::of(&bindings);
        let compile = rig.table.program_compile.unwrap();
        let out = &raw mut session.executable;
        // SAFETY: everything pointed to lives during the call, buffers for longer.
        call(|e| unsafe {
            compile(rig.device, program.as_abi(), &raw const options, &raw const bindings, out, e)
        })?;
        Ok(session)
    }

    fn alloc(&mut self, size: u64) -> Result<*mut abi::BufferHandle, Failure> {
        let buffer = self.rig.alloc(size)?;
        self.buffers.push(buffer);
        Ok(buffer)
    }

    fn make_scratch(
        &mut self,
        program: &FfiProgram,
        options: &abi::CompileOptions,
    ) -> Result<(), Failure> {
        let mut pieces = [abi::ScratchDesc::default(); 16];
        let mut memory = abi::ExecutableMemory {
            struct_size: size_of::<abi::ExecutableMemory>(),
            scratch: pieces.as_mut_ptr(),
            scratch_cap: pieces.len(),
            scratch_len: 0,
            device_bytes: 0,
            host_bytes: 0,
        };
        let (ask, device) = (self.rig.table.program_memory.unwrap(), self.rig.device);
        // SAFETY: everything pointed to lives during the call.
        call(|e| unsafe { ask(device, program.as_abi(), options, &raw mut memory, e) })?;
        assert!(memory.host_bytes > 0);
        for piece in &pieces[..memory.scratch_len] {
            let buffer = self.alloc(piece.size + 64)?;
            self.scratch.push(abi::BufferRange { buffer, offset: 64, size: piece.size });
        }
        Ok(())
    }

    fn make_kv(&mut self, setup: &Setup<'_>) -> Result<(), Failure> {
        for (group, (block_len, segments)) in (0..).zip(setup.kv) {
            let layers: Vec<_> =
                setup.program.kv_layers.iter().filter(|layer| layer.group == group).collect();
            let (mut first_block, mut ranges, mut table) = (0, Vec::new(), Vec::new());
            for n_blocks in segments {
                table.push(abi::KvSegment { first_block, n_blocks: *n_blocks });
                first_block += n_blocks;
                for layer in &layers {
                    let (k, v) = layer.block_bytes(*block_len).unwrap();
                    for bytes in [k, v] {
                        let size = bytes * u64::from(*n_blocks);
                        let buffer = self.alloc(size + 7)?;
                        ranges.push(abi::BufferRange { buffer, offset: 7, size });
                    }
                }
            }
            let kv = abi::KvGroup {
                struct_size: size_of::<abi::KvGroup>(),
                generation: 1,
                block_len: *block_len,
                n_layers: u32::try_from(layers.len()).unwrap(),
                segments: abi::Slice::of(&table),
                tiles: abi::Slice::of(&ranges),
            };
            self.kv.push((kv, table, ranges));
        }
        Ok(())
    }

    /// Writes the weights tile by tile, each into a buffer of its own at an odd address.
    fn upload(&mut self, setup: &Setup<'_>) -> Result<Vec<(u32, Vec<abi::WeightTile>)>, Failure> {
        let mut out = Vec::new();
        for (name, bytes) in setup.weights {
            let index = setup
                .program
                .values
                .iter()
                .position(|value| value.kind == ValueKind::Weight && value.name == *name);
            let index = index.unwrap();
            let value = &setup.program.values[index];
            let desc = abi::WeightDesc {
                struct_size: size_of::<abi::WeightDesc>(),
                dtype: abi::DType(value.dtype.id()),
                uses: 0,
                n_in: value.row_len(),
                n_rows: match value.rows() {
                    tegula_sdk::program::Dim::Fixed(n) => n,
                    _ => unreachable!(),
                },
                rows_per_expert: 0,
            };
            let row_bytes = value.dtype.row_bytes(desc.n_in).unwrap();
            assert_eq!(bytes.len() as u64, row_bytes * desc.n_rows, "{name}");
            let mut tiles = Vec::new();
            for (first_row, n_rows) in (setup.split)(desc.n_rows) {
                let size = n_rows * row_bytes;
                let buffer = self.alloc(size + 3)?;
                let tile = abi::WeightTile {
                    struct_size: size_of::<abi::WeightTile>(),
                    first_row,
                    n_rows,
                    range: abi::BufferRange { buffer, offset: 3, size },
                    layout: abi::LAYOUT_NATIVE,
                };
                let rows = bytes
                    .get(usize::try_from(first_row * row_bytes).unwrap()..)
                    .unwrap_or_default();
                let upload = abi::WeightUpload {
                    struct_size: size_of::<abi::WeightUpload>(),
                    desc: &raw const desc,
                    tile: &raw const tile,
                    src: rows.as_ptr(),
                    src_size: rows.len() as u64,
                };
                let mut fence = 0;
                let (queue, write) = (self.rig.queue, self.rig.table.queue_upload.unwrap());
                // SAFETY: everything pointed to lives during the call.
                call(|e| unsafe { write(queue, &raw const upload, &raw mut fence, e) })?;
                self.rig.wait(fence);
                tiles.push(tile);
            }
            out.push((u32::try_from(index).unwrap(), tiles));
        }
        Ok(out)
    }

    /// Runs once and gives the outputs' bytes.
    pub(crate) fn run(&mut self, run: &Call) -> Result<Vec<Vec<u8>>, Failure> {
        let rig = self.rig;
        let mut outputs: Vec<Vec<u8>> = run.outputs.iter().map(|n| vec![0xAA; *n]).collect();
        let bind = |bytes: *mut u8, len: usize| abi::Binding {
            struct_size: size_of::<abi::Binding>(),
            value: 0,
            range: abi::BufferRange::NONE,
            host: bytes,
            host_size: len as u64,
        };
        let inputs: Vec<_> =
            run.inputs.iter().map(|input| bind(input.as_ptr().cast_mut(), input.len())).collect();
        let mut bound: Vec<_> =
            outputs.iter_mut().map(|output| bind(output.as_mut_ptr(), output.len())).collect();
        if run.on_device {
            for binding in &mut bound {
                let buffer = self.alloc(binding.host_size)?;
                binding.range = abi::BufferRange { buffer, offset: 0, size: binding.host_size };
                binding.host = null_mut();
            }
        }
        let tables: Vec<Vec<_>> = run.seqs.iter().map(block_tables).collect();
        let mut first_token = 0;
        let seqs = run.seqs.iter().zip(&tables).map(|(seq, tables)| {
            let span = abi::SeqSpan {
                struct_size: size_of::<abi::SeqSpan>(),
                first_token,
                n_tokens: seq.n_tokens,
                first_pos: seq.first_pos,
                reserved: 0,
                tables: tables.as_ptr(),
                state_slot: 0,
                reserved_end: 0,
            };
            first_token += seq.n_tokens;
            span
        });
        let seqs: Vec<_> = seqs.collect();
        let kv: Vec<_> = self.kv.iter().map(|(group, ..)| *group).collect();
        let args = abi::RunArgs {
            struct_size: size_of::<abi::RunArgs>(),
            n_tokens: run.n_tokens,
            n_outputs: run.n_outputs,
            inputs: abi::Slice::of(&inputs),
            outputs: abi::Slice::of(&bound),
            scratch: abi::Slice::of(&self.scratch),
            seqs: abi::Slice::of(&seqs),
            kv: abi::Slice::of(&kv),
            state: null_mut(),
        };
        let mut fence = 0;
        let launch = rig.table.queue_run.unwrap();
        // SAFETY: everything pointed to lives until the fence is reached.
        call(|e| unsafe {
            launch(rig.queue, self.executable, &raw const args, &raw mut fence, e)
        })?;
        rig.wait(fence);
        for (binding, output) in bound.iter().zip(&mut outputs) {
            if !binding.range.buffer.is_null() {
                let read = rig.table.queue_read.unwrap();
                // SAFETY: the output holds as many bytes as the range.
                call(|e| unsafe {
                    read(rig.queue, binding.range, output.as_mut_ptr(), &raw mut fence, e)
                })?;
            }
        }
        Ok(outputs)
    }
}

fn block_tables(seq: &Seq) -> Vec<abi::BlockTable> {
    let table = |(blocks, first_pos): &(Vec<u32>, u32)| abi::BlockTable {
        blocks: blocks.as_ptr(),
        n_blocks: u32::try_from(blocks.len()).unwrap(),
        first_pos: *first_pos,
    };
    seq.tables.iter().map(table).collect()
}

pub(crate) fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub(crate) fn i32_bytes(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub(crate) fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Numbers in -1..1 that look random and are the same everywhere.
pub(crate) fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}
