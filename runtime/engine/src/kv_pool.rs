//! The blocks of the KV cache: which are free, and for each stage the segments allocated so far.

use crate::alloc::Allowance;
use crate::memory::kv::KvShape;
use crate::memory::tiling::TileSpec;
use crate::planner::OpenDevice;
use crate::promises::Promise;
use crate::runtime::Runtime;
use crate::{Error, Result};
use std::sync::Arc;
use tegula_plugin::{Buffer, BufferUsage, KvGroup};

/// One stage's part of the cache: the layers it runs.
#[derive(Debug)]
pub(crate) struct StageKv {
    runtime: Runtime,
    allowance: Allowance,
    shape: KvShape,
    group: KvGroup,
    /// Memory for the segments that are not there yet.
    promise: Promise,
    /// What a chunk may have: the plan's limit until the device fails below it.
    max_size: u64,
}

impl StageKv {
    pub(crate) fn new(
        runtime: &Runtime,
        open: &OpenDevice,
        shape: KvShape,
        buffer_type: u32,
    ) -> Result<Self> {
        let n_layers = u32::try_from(shape.layers.len()).unwrap_or(u32::MAX);
        let group = KvGroup::new(&open.device, shape.block_len, n_layers);
        let planned = shape.bytes_taken(1)?;
        let promise = runtime.promises().make(open.device.info(), buffer_type, planned);
        let max_size = shape.max_size();
        let allowance = Allowance::new(open, buffer_type, BufferUsage::KV, planned);
        Ok(Self { runtime: runtime.clone(), allowance, shape, group, promise, max_size })
    }

    /// The segments as a run is given them; `None` for a stage without a KV cache.
    pub(crate) fn group(&self) -> Option<&KvGroup> {
        (!self.shape.layers.is_empty()).then_some(&self.group)
    }

    /// Allocates segments until blocks `0..n_blocks` exist, as planned unless the device breaks its word about `max_size`: then in smaller
    /// chunks, which is said, and remembered for later plans. Nothing of a segment is kept if one of its chunks fails.
    fn grow_to(&mut self, n_blocks: u32) -> Result<()> {
        while self.group().is_some() && self.group.n_blocks() < n_blocks {
            match self.push_segment() {
                Err(Error::Alloc {
                    device,
                    buffer_type,
                    asked,
                    learned: Some(limit),
                    source,
                    ..
                }) if self.shape.segment_blocks_under(limit) > 0 => {
                    log::warn!(
                        "{device}: {asked} bytes failed below the limit it states ({source}); KV chunks of at most {limit} bytes are tried"
                    );
                    self.runtime.learn(&device, buffer_type, limit);
                    self.max_size = limit;
                    let rest = self.shape.planned_bytes_from(self.group.n_blocks(), limit)?;
                    self.allowance.replan(rest, limit);
                }
                other => other?,
            }
        }
        Ok(())
    }

    fn push_segment(&mut self) -> Result<()> {
        let first = self.group.n_blocks();
        let left = self.shape.n_blocks.saturating_sub(first);
        let n_blocks = self.shape.segment_blocks_under(self.max_size).min(left);
        let packing = self.shape.pack_blocks(first, n_blocks, self.max_size)?;
        let taken = self.allowance.taken();
        let mut chunks: Vec<Arc<Buffer>> = Vec::with_capacity(packing.chunks.len());
        for size in &packing.chunks {
            let chunk = self.allowance.alloc(*size);
            // The chunks before it are freed with the list.
            let chunk = chunk.inspect_err(|_| self.allowance.rewind(taken))?;
            chunks.push(Arc::new(chunk));
        }
        let tile = |tile: &TileSpec| {
            let chunk = Arc::clone(chunks.get(tile.chunk)?);
            Some((chunk, tile.offset..tile.offset + tile.size))
        };
        let tiles: Vec<_> = packing.tiles.iter().filter_map(tile).collect();
        self.group.push_segment(n_blocks, &tiles)?;
        self.promise.keep(self.shape.block_bytes().saturating_mul(n_blocks.into()));
        log::debug!(
            "KV blocks {first}..{} of {} on {}",
            first + n_blocks,
            self.shape.n_blocks,
            self.allowance.device().info().id()
        );
        Ok(())
    }
}

/// The pool of blocks that all sequences of a model share. A block has the same id on every stage.
#[derive(Debug)]
pub(crate) struct KvPool {
    block_len: u32,
    n_blocks: u32,
    /// Sequences that may hold blocks at a time, and those that do.
    n_seqs_max: u32,
    n_seqs: u32,
    stages: Vec<StageKv>,
    /// Blocks that exist on every stage: ids below it.
    n_made: u32,
    /// Those of them that no sequence holds, the lowest last, so that a short conversation stays in the first segments.
    free: Vec<u32>,
}

impl KvPool {
    /// A pool of at most `n_blocks` blocks, for as many sequences.
    pub(crate) fn new(
        block_len: u32,
        n_blocks: u32,
        n_seqs_max: u32,
        stages: Vec<StageKv>,
    ) -> Self {
        Self { block_len, n_blocks, n_seqs_max, n_seqs: 0, stages, n_made: 0, free: Vec::new() }
    }

    /// The stages' parts.
    pub(crate) fn stages(&self) -> &[StageKv] {
        &self.stages
    }

    /// Grows `blocks` until it holds `n_tokens`. On failure `blocks` is as before; segments that were allocated on the way stay for the next request.
    pub(crate) fn reserve(&mut self, blocks: &mut Vec<u32>, n_tokens: u32) -> Result<()> {
        let wanted = n_tokens.div_ceil(self.block_len.max(1)) as usize;
        let before = blocks.len();
        let is_new = before == 0 && wanted > 0;
        if is_new && self.n_seqs >= self.n_seqs_max {
            return Err(Error::TooManySequences { n_parallel: self.n_seqs_max });
        }
        while blocks.len() < wanted {
            match self.free.pop() {
                Some(block) => blocks.push(block),
                None => {
                    if let Err(error) = self.make_block() {
                        let taken = blocks.split_off(before);
                        self.put_back(&taken);
                        return Err(error);
                    }
                }
            }
        }
        self.n_seqs += u32::from(is_new);
        Ok(())
    }

    /// Gives blocks back; `is_last` if the sequence that held them holds none after that.
    pub(crate) fn release(&mut self, blocks: &[u32], is_last: bool) {
        self.put_back(blocks);
        if is_last && !blocks.is_empty() {
            self.n_seqs = self.n_seqs.saturating_sub(1);
        }
    }

    fn put_back(&mut self, blocks: &[u32]) {
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
