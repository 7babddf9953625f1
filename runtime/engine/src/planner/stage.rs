//! One stage on its device: where weights, KV cache and scratch go.

use crate::memory::plan::{ChunkSource, MemoryTypes, WeightChunk, WeightTile, WeightsPlan};
use crate::memory::tiling::{ChunkLimits, Item, TileSpec, pack, pack_file};
use crate::partition::Stage;
use crate::runtime::DeviceEntry;
use crate::{Error, Result};
use tegula_gguf::{Gguf, Shard};
use tegula_plugin::{
    BufferType, CompileOptions, Device, DeviceError, DeviceErrorKind, ExecutableMemory, Heap,
    WeightDesc, weight_use,
};
use tegula_program::ffi::FfiProgram;
use tegula_program::{Dim, OpKind, Program, Value, ValueId};

/// `max_size` assumed where a device cannot say: what every Vulkan driver must be able to bind.
const MAX_SIZE_BLIND: u64 = 128 << 20;

/// A buffer type with its limits as the tilings need them.
pub(crate) struct Place<'a> {
    pub(crate) index: u32,
    pub(crate) buffer_type: &'a BufferType,
    pub(crate) heap: &'a Heap,
    pub(crate) limits: ChunkLimits,
}

impl<'a> Place<'a> {
    /// The buffer type at `index` of a device.
    pub(crate) fn new(entry: &'a DeviceEntry, index: u32) -> Result<Self> {
        let buffer_type = entry.buffer_type(index)?;
        let heap = entry.info.heaps.get(buffer_type.heap as usize).ok_or_else(|| {
            Error::NoDevice(format!("{}: buffer type {index} names no heap", entry.id()))
        })?;
        let max_size = max_size(entry, buffer_type);
        let preferred = buffer_type.preferred_chunk.get().unwrap_or(max_size);
        let limits = ChunkLimits { max_size, preferred: preferred.clamp(1, max_size.max(1)) };
        Ok(Self { index, buffer_type, heap, limits })
    }

    /// Bytes of the heap that a buffer of `size` takes: backends round up to their granularity.
    pub(crate) fn taken(&self, size: u64) -> u64 {
        size.checked_next_multiple_of(self.buffer_type.granularity.max(1)).unwrap_or(u64::MAX)
    }

    /// Bytes that all chunks of weights take, those in the mapped file too.
    pub(crate) fn taken_by(&self, weights: &WeightsPlan) -> u64 {
        let taken = |chunk: &WeightChunk| match chunk.source {
            ChunkSource::File { .. } => chunk.size,
            ChunkSource::Alloc => self.taken(chunk.size),
        };
        weights.chunks.iter().map(taken).fold(0, u64::saturating_add)
    }
}

/// A buffer type's limit, or the floor that is assumed, with a warning, where the device cannot say.
pub(crate) fn max_size(entry: &DeviceEntry, buffer_type: &BufferType) -> u64 {
    buffer_type.max_size.get().unwrap_or_else(|| {
        log::warn!(
            "{}: the greatest buffer is unknown; {MAX_SIZE_BLIND} bytes are assumed (TEGULA_MAX_BUFFER overrides)",
            entry.id()
        );
        MAX_SIZE_BLIND
    })
}

/// Where a device keeps what.
pub(crate) struct Places<'a> {
    pub(crate) weights: Place<'a>,
    pub(crate) kv: Place<'a>,
    pub(crate) scratch: Place<'a>,
}

impl<'a> Places<'a> {
    /// With weights and KV cache in buffers of these types.
    pub(crate) fn new(entry: &'a DeviceEntry, memory: MemoryTypes) -> Result<Self> {
        Ok(Self {
            weights: Place::new(entry, memory.weights)?,
            kv: Place::new(entry, memory.kv)?,
            scratch: Place::new(entry, entry.info.type_for_scratch)?,
        })
    }

    /// As the device advises.
    pub(crate) fn advised(entry: &'a DeviceEntry) -> Result<Self> {
        let info = &entry.info;
        Self::new(entry, MemoryTypes { weights: info.type_for_weights, kv: info.type_for_kv })
    }
}

/// Rows of a weight; a vector is one row.
pub(crate) fn rows_of(value: &Value) -> u64 {
    match value.rows() {
        Dim::Fixed(n) => n,
        _ => 1,
    }
}

/// A weight as its device is told of it.
pub(crate) fn weight_desc(program: &Program, id: ValueId, value: &Value) -> WeightDesc {
    let (mut uses, mut rows_per_expert) = (0, 0);
    for op in &program.ops {
        for (position, input) in op.inputs.iter().enumerate() {
            if *input == id {
                uses |= match (&op.kind, position) {
                    (OpKind::Matmul, 1) => weight_use::MATMUL,
                    (OpKind::Embed, 1) => weight_use::EMBED,
                    (OpKind::MatmulExperts { n_expert }, 1) => {
                        rows_per_expert = rows_of(value) / u64::from((*n_expert).max(1));
                        weight_use::EXPERTS
                    }
                    _ => weight_use::VECTOR,
                };
            }
        }
    }
    let (n_in, n_rows) = (value.row_len(), rows_of(value));
    WeightDesc { dtype: value.dtype, uses, n_in, n_rows, rows_per_expert }
}

/// Weights in the order of the files, each in the layout that the device asks for.
pub(crate) fn plan_weights(
    stage: &Stage,
    gguf: &Gguf,
    device: &Device,
    at: &Place<'_>,
    mmap: bool,
) -> Result<WeightsPlan> {
    let mut order = Vec::new();
    for (id, value) in stage.program.weights() {
        let tensor = gguf.required_tensor(&value.name)?;
        order.push((tensor.shard(), tensor.offset(), id, value, tensor));
    }
    order.sort_by_key(|(shard, offset, ..)| (*shard, *offset));
    let mut out = WeightsPlan::default();
    let mut in_file: Vec<Vec<(Item, u64, ValueId)>> = vec![Vec::new(); gguf.shards().len()];
    let mut allocated = Vec::new();
    for (shard, _, id, value, tensor) in order {
        let desc = weight_desc(&stage.program, id, value);
        let layout = device.weight_layout(&desc)?;
        let mut item = Item {
            name: value.name.clone(),
            n_rows: desc.n_rows,
            rows_per_group: u64::from(layout.rows_per_group.max(1)),
            group_bytes: layout.group_bytes,
            alignment: layout.alignment.max(1),
            rows_per_expert: desc.rows_per_expert,
        };
        let usable = |(file, range): &(&Shard, std::ops::Range<u64>)| {
            mmap && layout.is_native() && is_importable(at, file, range, &item)
        };
        let range = gguf.file_range(tensor).filter(usable).map(|(_, range)| range);
        match (range, in_file.get_mut(shard)) {
            (Some(range), Some(items)) => items.push((item, range.start, id)),
            _ => {
                item.alignment = item.alignment.max(at.buffer_type.alignment);
                allocated.push((item, layout.layout, id));
            }
        }
    }
    for (shard, items) in in_file.into_iter().enumerate() {
        pack_shard(&mut out, shard, items, at)?;
    }
    let items: Vec<Item> = allocated.iter().map(|(item, ..)| item.clone()).collect();
    let packing = pack(&items, at.limits)?;
    let first = out.chunks.len();
    let chunk = |size: &u64| WeightChunk { size: *size, source: ChunkSource::Alloc };
    out.chunks.extend(packing.chunks.iter().map(chunk));
    out.tiles.extend(packing.tiles.iter().filter_map(|tile| {
        let (_, layout, value) = allocated.get(tile.item)?;
        Some(weight_tile(tile, *value, *layout, first))
    }));
    Ok(out)
}

/// Whether a tensor can be read where the mapped file has it: aligned as its layout asks, cut as the limits want it, and far enough from the file's end that a chunk
/// of whole import units around it is still inside the mapping, which ends with the page that holds the last byte.
fn is_importable(at: &Place<'_>, file: &Shard, range: &std::ops::Range<u64>, item: &Item) -> bool {
    let unit = at.buffer_type.import_alignment.max(1);
    let mapped = file.file_len.next_multiple_of(tegula_plugin::FileMap::PAGE);
    let end = range.end.checked_next_multiple_of(unit);
    at.buffer_type.import
        && range.start.is_multiple_of(item.alignment)
        && item.is_cut_in_file(range.start, unit, at.limits.max_size)
        && end.is_some_and(|end| end <= mapped)
}

fn pack_shard(
    out: &mut WeightsPlan,
    shard: usize,
    items: Vec<(Item, u64, ValueId)>,
    at: &Place<'_>,
) -> Result<()> {
    let values: Vec<ValueId> = items.iter().map(|(_, _, id)| *id).collect();
    let (items, begins): (Vec<Item>, Vec<u64>) =
        items.into_iter().map(|(item, begin, _)| (item, begin)).unzip();
    let packing = pack_file(&items, &begins, at.buffer_type.import_alignment, at.limits)?;
    let first = out.chunks.len();
    for (size, begin) in packing.chunks.iter().zip(&packing.file_begins) {
        let source = ChunkSource::File { shard, begin: *begin };
        out.chunks.push(WeightChunk { size: *size, source });
    }
    out.tiles.extend(packing.tiles.iter().filter_map(|tile| {
        Some(weight_tile(tile, *values.get(tile.item)?, tegula_abi::LAYOUT_NATIVE, first))
    }));
    Ok(())
}

fn weight_tile(tile: &TileSpec, value: ValueId, layout: u32, first_chunk: usize) -> WeightTile {
    WeightTile {
        value,
        first_row: tile.first_row,
        n_rows: tile.n_rows,
        chunk: first_chunk + tile.chunk,
        offset: tile.offset,
        size: tile.size,
        layout,
    }
}

/// The bounds that all stages of a model are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub(crate) n_ubatch: u32,
    pub(crate) n_outputs: u32,
    pub(crate) n_seqs: u32,
    pub(crate) n_ctx: u32,
}

impl Bounds {
    /// For a device whose scratch comes from buffer type `scratch_type`. A run has no more sequences than tokens.
    pub(crate) fn options(self, scratch_type: u32, scratch_chunk_max: u64) -> CompileOptions {
        CompileOptions {
            n_tokens_max: self.n_ubatch,
            n_outputs_max: self.n_outputs.clamp(1, self.n_ubatch.max(1)),
            n_seqs_max: self.n_seqs.clamp(1, self.n_ubatch.max(1)),
            n_ctx_max: self.n_ctx,
            scratch_type,
            scratch_chunk_max,
        }
    }
}

/// What a stage's executable takes; `Err` inside holds the backend's words when one value does not fit a chunk.
pub(crate) fn plan_memory(
    ffi: &FfiProgram,
    device: &Device,
    at: &Place<'_>,
    bounds: Bounds,
) -> Result<Result<ExecutableMemory, DeviceError>> {
    match device.memory(ffi, &bounds.options(at.index, at.limits.max_size)) {
        Ok(memory) => Ok(Ok(memory)),
        Err(error) if error.kind == DeviceErrorKind::TooBig => Ok(Err(error)),
        Err(error) => Err(error.into()),
    }
}
