//! Compiling programs: what an executable would take, and the executable with its weights.

use crate::backend::check_size;
use crate::buffer::Buffer;
use crate::device::{Device, DeviceInner};
use crate::error::DeviceError;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use tegula_abi::{self as abi, ScratchDesc, Slice, Status};
use tegula_program::ffi::FfiProgram;
use tegula_quant::DType;

/// Scratch pieces that are asked for at first; few programs need more than a handful.
const SCRATCH_GUESS: usize = 16;
/// More scratch pieces than any program needs; a larger count is damage.
const MAX_SCRATCH: usize = 1 << 16;

/// Bounds an executable is made for, and what it may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompileOptions {
    /// Greatest number of tokens of a run (the ubatch).
    pub n_tokens_max: u32,
    /// Greatest number of output rows of a run.
    pub n_outputs_max: u32,
    /// Greatest number of sequences of a run.
    pub n_seqs_max: u32,
    /// Greatest position + 1 of a run.
    pub n_ctx_max: u32,
    /// Index of the buffer type that scratch comes from.
    pub scratch_type: u32,
    /// Greatest scratch chunk in bytes.
    pub scratch_chunk_max: u64,
}

impl CompileOptions {
    fn raw(&self) -> abi::CompileOptions {
        abi::CompileOptions {
            struct_size: size_of::<abi::CompileOptions>(),
            n_tokens_max: self.n_tokens_max,
            n_outputs_max: self.n_outputs_max,
            n_seqs_max: self.n_seqs_max,
            n_ctx_max: self.n_ctx_max,
            scratch_type: self.scratch_type,
            reserved: 0,
            scratch_chunk_max: self.scratch_chunk_max,
        }
    }
}

/// What an executable would take, stated before it is made.
#[derive(Debug, Clone)]
pub struct ExecutableMemory {
    /// Pieces of scratch that every run must be given, in this order.
    pub scratch: Vec<ScratchDesc>,
    /// Bytes of the device's memory outside all buffers (packed weights, pipelines).
    pub device_bytes: u64,
    /// The same of the host's memory.
    pub host_bytes: u64,
}

/// Rows of a weight in a buffer.
#[derive(Debug, Clone)]
pub struct Tile {
    /// First row of the tensor in this tile.
    pub first_row: u64,
    /// Rows in this tile.
    pub n_rows: u64,
    /// The buffer that holds them.
    pub buffer: Arc<Buffer>,
    /// First byte in it.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
    /// Their layout, as [`Device::weight_layout`] gave it.
    pub layout: u32,
}

impl Tile {
    /// The tile for the boundary, checked against its buffer and the device it is used on.
    pub(crate) fn raw(
        &self,
        device: &Arc<DeviceInner>,
        operation: &'static str,
    ) -> Result<abi::WeightTile, DeviceError> {
        if !Arc::ptr_eq(device, &self.buffer.device) {
            let message = format!("a tile on {}", self.buffer.device.caller.label);
            return Err(device.caller.invalid(operation, message));
        }
        Ok(abi::WeightTile {
            struct_size: size_of::<abi::WeightTile>(),
            first_row: self.first_row,
            n_rows: self.n_rows,
            range: self.buffer.raw_range(self.offset, self.size, operation)?,
            layout: self.layout,
        })
    }
}

/// The tiles of one weight value; they cover its rows in order, without gap or overlap.
#[derive(Debug, Clone)]
pub struct WeightBinding {
    /// The value's index in the program.
    pub value: u32,
    /// Its tiles.
    pub tiles: Vec<Tile>,
}

/// Bytes of a value that is given at every run: `scalar_bytes`, times the symbolic dimensions it has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IoShape {
    pub(crate) value: u32,
    scalar_bytes: u64,
    n_tokens_dims: u32,
    n_outputs_dims: u32,
}

impl IoShape {
    /// Bytes in a run. `None` on overflow.
    pub(crate) fn bytes(&self, n_tokens: u32, n_outputs: u32) -> Option<u64> {
        u64::from(n_tokens)
            .checked_pow(self.n_tokens_dims)?
            .checked_mul(u64::from(n_outputs).checked_pow(self.n_outputs_dims)?)?
            .checked_mul(self.scalar_bytes)
    }
}

/// Bytes of one block of keys and of values, per token of the block length, for each layer of a KV group.
#[derive(Debug, Clone, Default)]
pub(crate) struct KvShape {
    pub(crate) layers: Vec<(u64, u64)>,
}

/// What a program is to the checks of a run.
#[derive(Debug, Default)]
pub(crate) struct Signature {
    pub(crate) inputs: Vec<IoShape>,
    pub(crate) outputs: Vec<IoShape>,
    pub(crate) kv: Vec<KvShape>,
    /// Bytes of a record of each state layer.
    pub(crate) state: Vec<u64>,
    /// Index, type, elements of a row and rows of each weight value.
    weights: Vec<(u32, Option<DType>, u64, u64)>,
}

/// A compiled program. Keeps its buffers alive. Any thread; its safe runs exclude each other.
#[derive(Debug)]
pub struct Executable {
    handle: NonNull<abi::ExecutableHandle>,
    pub(crate) device: Arc<DeviceInner>,
    pub(crate) signature: Signature,
    pub(crate) options: CompileOptions,
    memory: ExecutableMemory,
    /// Held during a run. For each KV group the generation whose tables were checked, then that of the state.
    pub(crate) running: Mutex<Vec<u64>>,
    /// The arrays behind `weights`, which live as long as the executable.
    _tiles: Vec<Vec<abi::WeightTile>>,
    _buffers: Vec<Arc<Buffer>>,
}

// SAFETY: an executable's handle may be used from any thread, and runs exclude each other by `running`; tile arrays are never changed.
unsafe impl Send for Executable {}
// SAFETY: as above.
unsafe impl Sync for Executable {}

impl Drop for Executable {
    fn drop(&mut self) {
        if let Some(free) = self.device.table().executable_free {
            // SAFETY: the handle is this device's, freed once; safe runs are waited for, unsafe ones leave that to their callers.
            unsafe { free(self.device.handle.as_ptr(), self.handle.as_ptr()) }
        }
    }
}

impl Executable {
    /// What it was stated to take.
    pub fn memory(&self) -> &ExecutableMemory {
        &self.memory
    }

    /// The bounds it was made for.
    pub fn options(&self) -> &CompileOptions {
        &self.options
    }

    pub(crate) fn handle(&self) -> *mut abi::ExecutableHandle {
        self.handle.as_ptr()
    }
}

impl Device {
    /// What compiling the program would take.
    ///
    /// # Errors
    /// TooBig, with the limit, when one value would exceed a scratch chunk: ask again with fewer tokens.
    pub fn memory(
        &self,
        program: &FfiProgram,
        options: &CompileOptions,
    ) -> Result<ExecutableMemory, DeviceError> {
        const WHAT: &str = "program_memory";
        let mut cap = SCRATCH_GUESS;
        loop {
            let (status, raw, mut scratch) = self.ask_memory(program, options, cap)?;
            let len = raw.scratch_len;
            let caller = &self.inner.caller;
            if len > MAX_SCRATCH || (status == Status::OK) != (len <= cap) {
                return Err(
                    caller.bad_answer(WHAT, format!("{len} pieces of scratch in room for {cap}"))
                );
            }
            if status != Status::OK {
                cap = len;
                continue;
            }
            scratch.truncate(len);
            for piece in &mut scratch {
                piece.alignment = piece.alignment.max(1);
                if !piece.alignment.is_power_of_two() || piece.size > options.scratch_chunk_max {
                    let message = format!(
                        "a piece of scratch of {} bytes aligned to {}, a chunk has {}",
                        piece.size, piece.alignment, options.scratch_chunk_max
                    );
                    return Err(caller.bad_answer(WHAT, message));
                }
            }
            let (device_bytes, host_bytes) = (raw.device_bytes, raw.host_bytes);
            return Ok(ExecutableMemory { scratch, device_bytes, host_bytes });
        }
    }

    fn ask_memory(
        &self,
        program: &FfiProgram,
        options: &CompileOptions,
        cap: usize,
    ) -> Result<(Status, abi::ExecutableMemory, Vec<ScratchDesc>), DeviceError> {
        const WHAT: &str = "program_memory";
        let inner = &self.inner;
        let call = inner.caller.function(inner.table().program_memory, WHAT)?;
        let mut scratch = vec![ScratchDesc::default(); cap];
        let options = options.raw();
        let mut raw = abi::ExecutableMemory {
            struct_size: size_of::<abi::ExecutableMemory>(),
            scratch: scratch.as_mut_ptr(),
            scratch_cap: cap,
            scratch_len: 0,
            device_bytes: 0,
            host_bytes: 0,
        };
        let status = inner.caller.call_or(WHAT, Status::SHORT_BUFFER, |err| {
            // SAFETY: a function of the plugin's table, with its own handle; program, options and array live for the call.
            unsafe {
                call(inner.handle.as_ptr(), program.as_abi(), &raw const options, &raw mut raw, err)
            }
        })?;
        check_size(&inner.caller, WHAT, raw.struct_size, size_of::<abi::ExecutableMemory>())?;
        Ok((status, raw, scratch))
    }

    /// Compiles the program with its weights, which stay alive with the executable.
    ///
    /// # Errors
    /// InvalidArgument for tiles that do not cover a weight, lie outside their buffer or on another device; what the backend says.
    pub fn compile(
        &self,
        program: &FfiProgram,
        options: &CompileOptions,
        weights: &[WeightBinding],
    ) -> Result<Executable, DeviceError> {
        const WHAT: &str = "program_compile";
        let inner = &self.inner;
        let signature = Signature::of(program).map_err(|m| inner.caller.invalid(WHAT, m))?;
        signature.check_weights(weights).map_err(|m| inner.caller.invalid(WHAT, m))?;
        let memory = self.memory(program, options)?;
        let mut tiles = Vec::with_capacity(weights.len());
        for weight in weights {
            let raw = weight.tiles.iter().map(|tile| tile.raw(inner, WHAT));
            tiles.push(raw.collect::<Result<Vec<_>, _>>()?);
        }
        let bindings: Vec<_> = weights
            .iter()
            .zip(&tiles)
            .map(|(weight, tiles)| abi::WeightBinding {
                struct_size: size_of::<abi::WeightBinding>(),
                value: weight.value,
                tiles: Slice::of(tiles),
            })
            .collect();
        let (raw, slice) = (options.raw(), Slice::of(&bindings));
        let call = inner.caller.function(inner.table().program_compile, WHAT)?;
        let mut handle = std::ptr::null_mut();
        inner.caller.call(WHAT, |err| {
            // SAFETY: a function of the plugin's table, with its own handle; everything lives for the call, tiles and buffers as long as the executable.
            unsafe {
                let (device, program) = (inner.handle.as_ptr(), program.as_abi());
                call(device, program, &raw const raw, &raw const slice, &raw mut handle, err)
            }
        })?;
        let handle = inner.caller.handle(WHAT, "executable", handle)?;
        let buffers = weights.iter().flat_map(|w| &w.tiles).map(|t| Arc::clone(&t.buffer));
        Ok(Executable {
            handle,
            device: Arc::clone(inner),
            running: Mutex::new(vec![0; signature.kv.len() + 1]),
            signature,
            options: *options,
            memory,
            _tiles: tiles,
            _buffers: distinct(buffers),
        })
    }
}

/// Each buffer once; thousands of tiles lie in a few of them.
fn distinct(buffers: impl Iterator<Item = Arc<Buffer>>) -> Vec<Arc<Buffer>> {
    let mut buffers: Vec<_> = buffers.collect();
    buffers.sort_by_key(|b| Arc::as_ptr(b) as usize);
    buffers.dedup_by(|a, b| Arc::ptr_eq(a, b));
    buffers
}

impl Signature {
    fn of(program: &FfiProgram) -> Result<Self, String> {
        let flat = program.as_abi();
        let mut out = Self::default();
        // SAFETY: the arrays belong to `program`, which is borrowed.
        let (inputs, outputs) = unsafe { (flat.inputs.frozen(), flat.outputs.frozen()) };
        for id in inputs.unwrap_or_default() {
            out.inputs.push(io_shape(flat, *id)?);
        }
        for id in outputs.unwrap_or_default() {
            out.outputs.push(io_shape(flat, *id)?);
        }
        for i in 0..flat.values.len {
            // SAFETY: as above.
            let Some(value) = (unsafe { flat.values.get(i) }) else { continue };
            if value.kind == abi::ValueKind::WEIGHT {
                let dims = value.dims.get(..value.n_dims as usize).unwrap_or_default();
                let n_in = dims.last().and_then(|d| u64::try_from(*d).ok()).unwrap_or(0);
                let mut rows = dims.iter().rev().skip(1).map(|d| u64::try_from(*d).ok());
                // A weight of one dimension is one row.
                let n_rows = rows.try_fold(1u64, |n, d| n.checked_mul(d?));
                let n_rows = n_rows.ok_or_else(|| format!("value {i} has rows without number"))?;
                let id = u32::try_from(i).map_err(|_| "more values than ids")?;
                out.weights.push((id, DType::from_id(value.dtype.0), n_in, n_rows));
            }
        }
        for i in 0..flat.kv_layers.len {
            // SAFETY: as above.
            let Some(layer) = (unsafe { flat.kv_layers.get(i) }) else { continue };
            out.add_kv_layer(&layer)?;
        }
        for i in 0..flat.state_layers.len {
            // SAFETY: as above.
            let layer = unsafe { flat.state_layers.get(i) };
            let bytes = layer.and_then(|layer| layer.n_elements.checked_mul(4));
            out.state.push(bytes.ok_or_else(|| format!("state layer {i} of no known size"))?);
        }
        Ok(out)
    }

    fn add_kv_layer(&mut self, layer: &abi::KvLayer) -> Result<(), String> {
        let side = |dtype: abi::DType, head_dim: u32| {
            let row = DType::from_id(dtype.0)?.row_bytes(u64::from(head_dim)).ok()?;
            row.checked_mul(u64::from(layer.n_head_kv))
        };
        let bytes =
            side(layer.dtype_k, layer.head_dim_k).zip(side(layer.dtype_v, layer.head_dim_v));
        let bytes = bytes.ok_or_else(|| format!("a KV layer of no known size: {layer:?}"))?;
        let (group, index) = (layer.group as usize, layer.index as usize);
        // verify() of the program numbers groups and layers without gaps; the bound keeps a broken one from allocating.
        if group > 1 << 12 || index > 1 << 12 {
            return Err(format!("KV layer {index} of group {group}"));
        }
        if self.kv.len() <= group {
            self.kv.resize_with(group + 1, KvShape::default);
        }
        if let Some(shape) = self.kv.get_mut(group) {
            if shape.layers.len() <= index {
                shape.layers.resize(index + 1, (0, 0));
            }
            if let Some(slot) = shape.layers.get_mut(index) {
                *slot = bytes;
            }
        }
        Ok(())
    }

    /// One binding for each weight, whose tiles cover its rows in order, in the bytes that rows of their own layout take.
    fn check_weights(&self, weights: &[WeightBinding]) -> Result<(), String> {
        if weights.len() != self.weights.len() {
            return Err(format!("{} bindings for {} weights", weights.len(), self.weights.len()));
        }
        let mut sorted: Vec<_> = weights.iter().collect();
        sorted.sort_by_key(|w| w.value);
        for (binding, (value, dtype, n_in, n_rows)) in sorted.iter().zip(&self.weights) {
            if binding.value != *value {
                return Err(format!("no binding for the weight with value {value}"));
            }
            let row = dtype.and_then(|dtype| dtype.row_bytes(*n_in).ok());
            let mut next = 0u64;
            for tile in &binding.tiles {
                if tile.first_row != next || tile.n_rows == 0 {
                    return Err(format!(
                        "value {value}: a tile at row {}, row {next} is next",
                        tile.first_row
                    ));
                }
                next = next.checked_add(tile.n_rows).ok_or("rows overflow")?;
                let bytes = row.and_then(|row| row.checked_mul(tile.n_rows));
                if tile.layout == abi::LAYOUT_NATIVE && bytes != Some(tile.size) {
                    return Err(format!(
                        "value {value}: {} rows in {} bytes",
                        tile.n_rows, tile.size
                    ));
                }
            }
            if next != *n_rows {
                return Err(format!("value {value}: tiles of {next} rows, it has {n_rows}"));
            }
        }
        Ok(())
    }
}

fn io_shape(program: &abi::Program, id: u32) -> Result<IoShape, String> {
    // SAFETY: the values belong to a program that the caller borrows.
    let value = unsafe { program.values.get(id as usize) };
    let value = value.ok_or_else(|| format!("no value {id}"))?;
    let dtype = DType::from_id(value.dtype.0).filter(|dtype| dtype.block_len() == 1);
    let dtype = dtype.ok_or_else(|| format!("value {id} of type {}", value.dtype.0))?;
    let mut shape = IoShape {
        value: id,
        scalar_bytes: dtype.block_bytes() as u64,
        n_tokens_dims: 0,
        n_outputs_dims: 0,
    };
    for dim in value.dims.get(..value.n_dims as usize).unwrap_or_default() {
        match *dim {
            abi::DIM_N_TOKENS => shape.n_tokens_dims += 1,
            abi::DIM_N_OUTPUTS => shape.n_outputs_dims += 1,
            n => {
                let bytes = u64::try_from(n).ok().and_then(|n| shape.scalar_bytes.checked_mul(n));
                shape.scalar_bytes =
                    bytes.ok_or_else(|| format!("value {id} has dimension {n}"))?;
            }
        }
    }
    Ok(shape)
}
