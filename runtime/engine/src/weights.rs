//! Brings weights to the device exactly as the plan says: ranges of the mapped file where it says so, uploads elsewhere.

use crate::file::ModelFile;
use crate::memory::plan::{ChunkSource, WeightsPlan};
use crate::planner::{rows_of, uses_of};
use crate::runtime::DeviceEntry;
use crate::{Error, Result};
use std::sync::Arc;
use tegula_plugin::{
    Buffer, BufferDesc, BufferUsage, Device, FileMap, Queue, Tile, WeightBinding, WeightDesc,
};
use tegula_program::Program;

/// How far loading is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of weights in place.
    pub done: u64,
    /// Bytes of weights in all.
    pub total: u64,
}

/// Maps the files, makes the chunks and fills them; `progress` is called after every tile.
pub(crate) fn load(
    file: &ModelFile,
    program: &Program,
    plan: &WeightsPlan,
    entry: &DeviceEntry,
    device: &Device,
    queue: &mut Queue,
    progress: &mut dyn FnMut(Progress),
) -> Result<Vec<WeightBinding>> {
    let maps = map_shards(file)?;
    let chunks = make_chunks(plan, &maps, entry.info.type_for_weights, device)?;
    let total = plan.tiles.iter().map(|tile| tile.size).sum();
    let mut done = 0;
    progress(Progress { done, total });
    let mut bindings: Vec<WeightBinding> = Vec::new();
    for tile in &plan.tiles {
        let missing = || Error::Overflow { what: "the plan's indices".into() };
        let buffer = chunks.get(tile.chunk).ok_or_else(missing)?;
        let placed = Tile {
            first_row: tile.first_row,
            n_rows: tile.n_rows,
            buffer: Arc::clone(buffer),
            offset: tile.offset,
            size: tile.size,
            layout: tile.layout,
        };
        let source = plan.chunks.get(tile.chunk).ok_or_else(missing)?.source;
        if source == ChunkSource::Alloc {
            let value = program.values.get(tile.value.index()).ok_or_else(missing)?;
            let tensor = file.gguf().required_tensor(&value.name)?;
            let (_, range) = file.gguf().file_range(tensor).ok_or_else(missing)?;
            let desc = WeightDesc {
                dtype: value.dtype,
                uses: uses_of(program, tile.value),
                n_in: value.row_len(),
                n_rows: rows_of(value),
            };
            let row = value.dtype.row_bytes(desc.n_in).map_err(|_| missing())?;
            let begin = range.start + tile.first_row * row;
            let map = maps.get(tensor.shard()).ok_or_else(missing)?;
            let bytes = map.bytes().get(begin as usize..(begin + tile.n_rows * row) as usize);
            queue.upload(&desc, &placed, bytes.ok_or_else(missing)?)?;
        }
        done += tile.size;
        progress(Progress { done, total });
        match bindings.last_mut() {
            Some(binding) if binding.value == tile.value.0 => binding.tiles.push(placed),
            _ => bindings.push(WeightBinding { value: tile.value.0, tiles: vec![placed] }),
        }
    }
    Ok(bindings)
}

fn map_shards(file: &ModelFile) -> Result<Vec<Arc<FileMap>>> {
    let open = |shard: &tegula_gguf::Shard| {
        let path = &shard.path;
        let map = FileMap::open(path);
        let map = map.map_err(|source| Error::Io { path: path.to_owned(), source })?;
        if (map.bytes().len() as u64) < shard.file_len {
            let source = std::io::Error::other("the file became shorter while it was being loaded");
            return Err(Error::Io { path: path.to_owned(), source });
        }
        Ok(Arc::new(map))
    };
    file.gguf().shards().iter().map(open).collect()
}

fn make_chunks(
    plan: &WeightsPlan,
    maps: &[Arc<FileMap>],
    buffer_type: u32,
    device: &Device,
) -> Result<Vec<Arc<Buffer>>> {
    let mut chunks = Vec::with_capacity(plan.chunks.len());
    for chunk in &plan.chunks {
        let desc = BufferDesc { size: chunk.size, buffer_type, usage: BufferUsage::WEIGHTS };
        let buffer = match chunk.source {
            ChunkSource::Alloc => device.alloc(&desc)?,
            ChunkSource::File { shard, begin } => {
                let map = maps.get(shard).ok_or_else(|| Error::Overflow {
                    what: format!("shard {shard} of the plan"),
                })?;
                let begin = begin as usize;
                let owner: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::clone(map) as _;
                device.import(&desc, owner, begin..begin + chunk.size as usize)?
            }
        };
        chunks.push(Arc::new(buffer));
    }
    Ok(chunks)
}
