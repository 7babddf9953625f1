//! The recurrent state of a model's sequences: which slots are free, and for each stage the records allocated so far.

use crate::alloc::Allowance;
use crate::memory::state::StateShape;
use crate::memory::tiling::TileSpec;
use crate::planner::OpenDevice;
use crate::promises::Promise;
use crate::runtime::Runtime;
use crate::{Error, Result};
use std::sync::Arc;
use tegula_plugin::{Buffer, BufferUsage, StatePool};

/// One stage's part: the layers it runs.
#[derive(Debug)]
pub(crate) struct StageState {
    allowance: Allowance,
    shape: StateShape,
    pool: StatePool,
    /// Memory for the slots that are not there yet.
    promise: Promise,
}

impl StageState {
    pub(crate) fn new(
        runtime: &Runtime,
        open: &OpenDevice,
        shape: StateShape,
        buffer_type: u32,
    ) -> Result<Self> {
        let n_layers = u32::try_from(shape.layers.len()).unwrap_or(u32::MAX);
        let pool = StatePool::new(&open.device, n_layers);
        let planned = shape.planned_bytes()?;
        let promise = runtime.promises().make(open.device.info(), buffer_type, planned);
        let allowance = Allowance::new(open, buffer_type, BufferUsage::KV, planned);
        Ok(Self { allowance, shape, pool, promise })
    }

    /// The records as a run is given them; `None` for a stage without state.
    pub(crate) fn pool(&self) -> Option<&StatePool> {
        (!self.shape.layers.is_empty()).then_some(&self.pool)
    }

    /// Allocates slots until `n` exist. Nothing of a slot is kept if one of its chunks fails.
    fn grow_to(&mut self, n: u32) -> Result<()> {
        while self.pool().is_some() && self.pool.n_slots() < n {
            let packing = self.shape.pack_slot()?;
            let mut chunks: Vec<Arc<Buffer>> = Vec::with_capacity(packing.chunks.len());
            let taken = self.allowance.taken();
            for size in &packing.chunks {
                match self.allowance.alloc(*size) {
                    Ok(chunk) => chunks.push(Arc::new(chunk)),
                    Err(error) => {
                        self.allowance.rewind(taken);
                        return Err(error);
                    }
                }
            }
            let record = |tile: &TileSpec| {
                let chunk = Arc::clone(chunks.get(tile.chunk)?);
                Some((chunk, tile.offset..tile.offset + tile.size))
            };
            let records: Vec<_> = packing.tiles.iter().filter_map(record).collect();
            self.pool.push_slot(&records)?;
            self.promise.keep(packing.chunks.iter().sum());
        }
        Ok(())
    }
}

/// The slots that all sequences of a model share. A slot has the same id on every stage. Its records are not cleared when it changes hands: a
/// sequence begins at position 0, where ops begin with zeros.
#[derive(Debug)]
pub(crate) struct SlotPool {
    n_slots: u32,
    stages: Vec<StageState>,
    /// Slots that exist on every stage: ids below it.
    n_made: u32,
    /// Those of them that no sequence holds.
    free: Vec<u32>,
}

impl SlotPool {
    /// A pool of at most `n_slots` slots.
    pub(crate) fn new(n_slots: u32, stages: Vec<StageState>) -> Self {
        Self { n_slots, stages, n_made: 0, free: Vec::new() }
    }

    /// The stages' parts.
    pub(crate) fn stages(&self) -> &[StageState] {
        &self.stages
    }

    /// Whether the model keeps any state.
    pub(crate) fn is_used(&self) -> bool {
        self.stages.iter().any(|stage| stage.pool().is_some())
    }

    /// A slot for a sequence that begins; `None` for a model without state.
    pub(crate) fn take(&mut self) -> Result<Option<u32>> {
        if !self.is_used() {
            return Ok(None);
        }
        if let Some(slot) = self.free.pop() {
            return Ok(Some(slot));
        }
        if self.n_made >= self.n_slots {
            return Err(Error::TooManySequences { n_parallel: self.n_slots });
        }
        for stage in &mut self.stages {
            stage.grow_to(self.n_made + 1)?;
        }
        self.n_made += 1;
        Ok(Some(self.n_made - 1))
    }

    /// Gives a slot back.
    pub(crate) fn release(&mut self, slot: u32) {
        self.free.push(slot);
    }
}
