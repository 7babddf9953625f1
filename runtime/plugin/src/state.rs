//! The recurrent state of sequences: one record for each layer in each slot, wherever the core has put it.

use crate::buffer::Buffer;
use crate::device::{Device, DeviceInner};
use crate::error::DeviceError;
use crate::run::next_generation;
use std::ops::Range;
use std::sync::Arc;
use tegula_abi::{self as abi, BufferRange, Slice};

const WHAT: &str = "state_slot";

/// Slots of recurrent state. Grown and shrunk between runs; keeps its buffers alive. Which slot belongs to which sequence is the caller's
/// business; a sequence that begins at position 0 may take any slot as it is.
#[derive(Debug)]
pub struct StatePool {
    device: Arc<DeviceInner>,
    n_layers: u32,
    n_slots: u32,
    pub(crate) generation: u64,
    tiles: Vec<BufferRange>,
    buffers: Vec<Arc<Buffer>>,
    /// What a run points to; renewed with the tiles.
    raw: Box<abi::StatePool>,
}

// SAFETY: the raw buffers in `tiles` are kept by `buffers` and may be used from any thread; `raw` points into `tiles` only.
unsafe impl Send for StatePool {}
// SAFETY: as above.
unsafe impl Sync for StatePool {}

impl StatePool {
    /// A pool without slots for a program of `n_layers` state layers.
    pub fn new(device: &Device, n_layers: u32) -> Self {
        let raw = abi::StatePool {
            struct_size: size_of::<abi::StatePool>(),
            generation: 0,
            n_slots: 0,
            n_layers,
            tiles: Slice::of(&[]),
        };
        let mut pool = Self {
            device: Arc::clone(&device.inner),
            n_layers,
            n_slots: 0,
            generation: 0,
            tiles: Vec::new(),
            buffers: Vec::new(),
            raw: Box::new(raw),
        };
        pool.renew();
        pool
    }

    /// Adds a slot: the record of each layer. Returns its id.
    ///
    /// # Errors
    /// InvalidArgument for another number of records, one outside its buffer, on another device or in an imported buffer.
    pub fn push_slot(&mut self, records: &[(Arc<Buffer>, Range<u64>)]) -> Result<u32, DeviceError> {
        let caller = &self.device.caller;
        let next = self
            .n_slots
            .checked_add(1)
            .filter(|_| records.len() as u64 == u64::from(self.n_layers));
        let Some(next) = next else {
            let message = format!("{} records for {} state layers", records.len(), self.n_layers);
            return Err(caller.invalid(WHAT, message));
        };
        let mut raw = Vec::with_capacity(records.len());
        for (buffer, range) in records {
            if !Arc::ptr_eq(&buffer.device, &self.device)
                || range.end < range.start
                || buffer.is_read_only()
            {
                let message = format!("a record {range:?} on {}", buffer.device.caller.label);
                return Err(caller.invalid(WHAT, message));
            }
            raw.push(buffer.raw_range(range.start, range.end - range.start, WHAT)?);
        }
        self.tiles.extend(raw);
        self.buffers.extend(records.iter().map(|(buffer, _)| Arc::clone(buffer)));
        let slot = self.n_slots;
        self.n_slots = next;
        self.renew();
        Ok(slot)
    }

    /// Takes the last slot away, and with it the hold on its buffers.
    pub fn pop_slot(&mut self) -> bool {
        let Some(left) = self.n_slots.checked_sub(1) else { return false };
        self.n_slots = left;
        let n = left as usize * self.n_layers as usize;
        self.tiles.truncate(n);
        self.buffers.truncate(n);
        self.renew();
        true
    }

    /// Number of its slots; their ids are `0..n_slots`.
    pub fn n_slots(&self) -> u32 {
        self.n_slots
    }

    fn renew(&mut self) {
        self.generation = next_generation();
        self.raw.generation = self.generation;
        self.raw.n_slots = self.n_slots;
        self.raw.tiles = Slice::of(&self.tiles);
    }

    /// For a run; lives as long as the pool is not changed.
    pub(crate) fn raw(&self) -> *const abi::StatePool {
        &raw const *self.raw
    }

    /// That it lies on `device` and its records have the bytes that the program's layers take.
    pub(crate) fn check(&self, device: &Arc<DeviceInner>, layers: &[u64]) -> Result<(), String> {
        if !Arc::ptr_eq(&self.device, device) {
            return Err(format!("a recurrent state on {}", self.device.caller.label));
        }
        if self.n_layers as usize != layers.len() {
            let (has, wanted) = (self.n_layers, layers.len());
            return Err(format!("a state of {has} layers, the program has {wanted}"));
        }
        for (tile, bytes) in self.tiles.iter().zip(layers.iter().cycle()) {
            if tile.size != *bytes {
                return Err(format!("a record of {} bytes for {bytes}", tile.size));
            }
        }
        Ok(())
    }
}
