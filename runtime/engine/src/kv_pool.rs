//! The blocks of the KV cache: which are free, and for each stage the segments allocated so far.

use crate::alloc::alloc;
use crate::memory::kv::KvShape;
use crate::{Error, Result};
use std::sync::Arc;
use tegula_plugin::{Buffer, BufferDesc, BufferUsage, Device, KvGroup};

/// One stage's part of the cache: the layers it runs.
#[derive(Debug)]
pub(crate) struct StageKv {
    device: Device,
    shape: KvShape,
    buffer_type: u32,
    group: KvGroup,
    n_segments: u32,
}

impl StageKv {
    pub(crate) fn new(device: &Device, shape: KvShape, buffer_type: u32) -> Self {
        let n_layers = u32::try_from(shape.layers.len()).unwrap_or(u32::MAX);
        let group = KvGroup::new(device, shape.block_len, n_layers);
        Self { device: device.clone(), shape, buffer_type, group, n_segments: 0 }
    }

    /// The segments as a run is given them; `None` for a stage without a KV cache.
    pub(crate) fn group(&self) -> Option<&KvGroup> {
        (!self.shape.layers.is_empty()).then_some(&self.group)
    }

    /// Allocates segments as planned until blocks `0..n_blocks` exist. Nothing of a segment is kept if one of its chunks fails.
    fn grow_to(&mut self, n_blocks: u32) -> Result<()> {
        while self.group().is_some() && self.group.n_blocks() < n_blocks {
            let packing = self.shape.pack_segment(self.n_segments)?;
            let mut chunks: Vec<Arc<Buffer>> = Vec::with_capacity(packing.chunks.len());
            for size in &packing.chunks {
                let desc = BufferDesc {
                    size: *size,
                    buffer_type: self.buffer_type,
                    usage: BufferUsage::KV,
                };
                chunks.push(Arc::new(alloc(&self.device, &desc)?));
            }
            let tiles: Vec<_> = packing
                .tiles
                .iter()
                .filter_map(|tile| {
                    let chunk = Arc::clone(chunks.get(tile.chunk)?);
                    Some((chunk, tile.offset..tile.offset + tile.size))
                })
                .collect();
            self.group.push_segment(self.shape.blocks_of(self.n_segments), &tiles)?;
            self.n_segments += 1;
            log::debug!(
                "KV segment {} of {} on {}",
                self.n_segments,
                self.shape.n_segments(),
                self.device.info().id()
            );
        }
        Ok(())
    }
}

/// The pool of blocks that all sequences of a model share. A block has the same id on every stage.
#[derive(Debug)]
pub(crate) struct KvPool {
    block_len: u32,
    n_blocks: u32,
    stages: Vec<StageKv>,
    /// Blocks that exist on every stage: ids below it.
    n_made: u32,
    /// Those of them that no sequence holds, the lowest last, so that a short conversation stays in the first segments.
    free: Vec<u32>,
}

impl KvPool {
    /// A pool of at most `n_blocks` blocks.
    pub(crate) fn new(block_len: u32, n_blocks: u32, stages: Vec<StageKv>) -> Self {
        Self { block_len, n_blocks, stages, n_made: 0, free: Vec::new() }
    }

    /// The stages' parts.
    pub(crate) fn stages(&self) -> &[StageKv] {
        &self.stages
    }

    /// Grows `blocks` until it holds `n_tokens`. On failure `blocks` is as before; segments that were allocated on the way stay for the next request.
    pub(crate) fn reserve(&mut self, blocks: &mut Vec<u32>, n_tokens: u32) -> Result<()> {
        let wanted = n_tokens.div_ceil(self.block_len.max(1)) as usize;
        let before = blocks.len();
        while blocks.len() < wanted {
            match self.free.pop() {
                Some(block) => blocks.push(block),
                None => {
                    if let Err(error) = self.make_block() {
                        let taken = blocks.split_off(before);
                        self.release(&taken);
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }

    /// Gives blocks back.
    pub(crate) fn release(&mut self, blocks: &[u32]) {
        if !blocks.is_empty() {
            self.free.extend_from_slice(blocks);
            self.free.sort_unstable_by(|a, b| b.cmp(a));
        }
    }

    /// Makes the next block exist on every stage.
    fn make_block(&mut self) -> Result<()> {
        if self.n_made >= self.n_blocks {
            return Err(Error::KvPoolFull { n_blocks: self.n_blocks, block_len: self.block_len });
        }
        for stage in &mut self.stages {
            stage.grow_to(self.n_made + 1)?;
        }
        self.free.push(self.n_made);
        self.n_made += 1;
        Ok(())
    }
}
