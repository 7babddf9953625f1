//! The blocks of the KV cache: which are free, and the segments allocated so far.

use crate::memory::kv::KvShape;
use crate::{Error, Result};
use std::sync::Arc;
use tegula_plugin::{Buffer, BufferDesc, BufferUsage, Device, KvGroup};

/// The pool. Blocks are handed out lowest first, so that a short conversation stays in the first segments.
#[derive(Debug)]
pub(crate) struct KvPool {
    shape: KvShape,
    buffer_type: u32,
    group: KvGroup,
    n_segments: u32,
    /// Free blocks of allocated segments, the lowest last.
    free: Vec<u32>,
}

impl KvPool {
    /// A pool without segments.
    pub(crate) fn new(device: &Device, shape: KvShape, buffer_type: u32) -> Self {
        let n_layers = u32::try_from(shape.layers.len()).unwrap_or(u32::MAX);
        let group = KvGroup::new(device, shape.block_len, n_layers);
        Self { shape, buffer_type, group, n_segments: 0, free: Vec::new() }
    }

    /// The segments as a run is given them.
    pub(crate) fn group(&self) -> &KvGroup {
        &self.group
    }

    /// Grows `blocks` until it holds `n_tokens`. On failure `blocks` is as before; segments that were added on the way stay for the next request.
    pub(crate) fn reserve(
        &mut self,
        device: &Device,
        blocks: &mut Vec<u32>,
        n_tokens: u32,
    ) -> Result<()> {
        let wanted = n_tokens.div_ceil(self.shape.block_len) as usize;
        let before = blocks.len();
        while blocks.len() < wanted {
            match self.free.pop() {
                Some(block) => blocks.push(block),
                None => {
                    if let Err(error) = self.grow(device) {
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

    /// Allocates the next segment as the plan has it; nothing of it is kept if one of its chunks fails.
    fn grow(&mut self, device: &Device) -> Result<()> {
        let index = self.n_segments;
        if index >= self.shape.n_segments() {
            let (n_blocks, block_len) = (self.shape.n_blocks, self.shape.block_len);
            return Err(Error::KvPoolFull { n_blocks, block_len });
        }
        let packing = self.shape.pack_segment(index)?;
        let mut chunks: Vec<Arc<Buffer>> = Vec::with_capacity(packing.chunks.len());
        for size in &packing.chunks {
            let desc =
                BufferDesc { size: *size, buffer_type: self.buffer_type, usage: BufferUsage::KV };
            chunks.push(Arc::new(device.alloc(&desc)?));
        }
        let tiles: Vec<_> = packing
            .tiles
            .iter()
            .filter_map(|tile| {
                let chunk = Arc::clone(chunks.get(tile.chunk)?);
                Some((chunk, tile.offset..tile.offset + tile.size))
            })
            .collect();
        let n_blocks = self.shape.blocks_of(index);
        let first = self.group.push_segment(n_blocks, &tiles)?;
        self.n_segments += 1;
        self.release(&(first..first + n_blocks).collect::<Vec<_>>());
        log::debug!("KV segment {} of {} allocated", index + 1, self.shape.n_segments());
        Ok(())
    }
}
