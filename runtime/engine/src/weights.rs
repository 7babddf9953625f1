//! Brings weights to the device exactly as the plan says: ranges of the mapped file where it says so, uploads elsewhere.

use crate::alloc::Allowance;
use crate::file::ModelFile;
use crate::memory::plan::{ChunkSource, Plan, StagePlan};
use crate::planner::{OpenDevice, weight_desc};
use crate::{Error, Result};
use std::sync::Arc;
use tegula_plugin::{Buffer, BufferDesc, BufferUsage, FileMap, Queue, Tile, WeightBinding};
use tegula_program::{Program, ValueId};

/// How far loading is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of weights in place.
    pub done: u64,
    /// Bytes of weights in all.
    pub total: u64,
}

/// Loads the weights of one stage after the other.
pub(crate) struct Loader<'a> {
    file: &'a ModelFile,
    maps: &'a [Arc<FileMap>],
    progress: &'a mut dyn FnMut(Progress),
    now: Progress,
}

impl<'a> Loader<'a> {
    /// `progress` is called at once, and after every tile.
    pub(crate) fn new(
        file: &'a ModelFile,
        maps: &'a [Arc<FileMap>],
        plan: &Plan,
        progress: &'a mut dyn FnMut(Progress),
    ) -> Self {
        let tiles = plan.stages.iter().flat_map(|stage| &stage.weights.tiles);
        let now = Progress { done: 0, total: tiles.map(|tile| tile.size).sum() };
        progress(now);
        Self { file, maps, progress, now }
    }

    /// Makes the chunks of a stage and fills them.
    pub(crate) fn stage(
        &mut self,
        program: &Program,
        part: &StagePlan,
        open: &OpenDevice,
        queue: &mut Queue,
    ) -> Result<Vec<WeightBinding>> {
        let plan = &part.weights;
        let chunks = make_chunks(part, self.maps, open)?;
        let mut bindings: Vec<WeightBinding> = Vec::new();
        for tile in &plan.tiles {
            let source = plan.chunks.get(tile.chunk).ok_or_else(missing)?.source;
            let placed = Tile {
                first_row: tile.first_row,
                n_rows: tile.n_rows,
                buffer: Arc::clone(chunks.get(tile.chunk).ok_or_else(missing)?),
                offset: tile.offset,
                size: tile.size,
                layout: tile.layout,
            };
            if source == ChunkSource::Alloc {
                self.upload(program, tile.value, &placed, queue)?;
            }
            self.now.done += tile.size;
            (self.progress)(self.now);
            match bindings.last_mut() {
                Some(binding) if binding.value == tile.value.0 => binding.tiles.push(placed),
                _ => bindings.push(WeightBinding { value: tile.value.0, tiles: vec![placed] }),
            }
        }
        Ok(bindings)
    }

    fn upload(&self, program: &Program, id: ValueId, tile: &Tile, queue: &mut Queue) -> Result<()> {
        let value = program.value(id)?;
        let tensor = self.file.gguf().required_tensor(&value.name)?;
        let (_, range) = self.file.gguf().file_range(tensor).ok_or_else(missing)?;
        let desc = weight_desc(program, id, value);
        let row = value.dtype.row_bytes(desc.n_in).map_err(|_| missing())?;
        let begin = range.start + tile.first_row * row;
        let map = self.maps.get(tensor.shard()).ok_or_else(missing)?;
        let range = begin as usize..(begin + tile.n_rows * row) as usize;
        let bytes = map.bytes().get(range.clone()).ok_or_else(missing)?;
        queue.upload(&desc, tile, bytes)?;
        // The device has it: without this, loading would hold the model in memory twice.
        map.forget(range);
        Ok(())
    }
}

fn missing() -> Error {
    Error::Overflow { what: "an index of the plan".into() }
}

/// Maps the model's files.
pub(crate) fn map_shards(file: &ModelFile) -> Result<Vec<Arc<FileMap>>> {
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
    part: &StagePlan,
    maps: &[Arc<FileMap>],
    open: &OpenDevice,
) -> Result<Vec<Arc<Buffer>>> {
    let buffer_type = part.memory.weights;
    let planned = part.weights.bytes(false);
    let mut allowance = Allowance::new(open, buffer_type, BufferUsage::WEIGHTS, planned);
    let mut chunks = Vec::with_capacity(part.weights.chunks.len());
    for chunk in &part.weights.chunks {
        let desc = BufferDesc { size: chunk.size, buffer_type, usage: BufferUsage::WEIGHTS };
        let buffer = match chunk.source {
            ChunkSource::Alloc => allowance.alloc(chunk.size)?,
            ChunkSource::File { shard, begin } => {
                let map = maps.get(shard).ok_or_else(missing)?;
                let begin = begin as usize;
                let owner: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::clone(map) as _;
                open.device.import(&desc, owner, begin..begin + chunk.size as usize)?
            }
        };
        chunks.push(Arc::new(buffer));
    }
    Ok(chunks)
}
