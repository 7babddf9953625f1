//! How much memory each pool gives, and what a plan takes of it.
//!
//! A pool is physical memory: the host's is one, however many devices and heaps are carved from it, so unified memory is counted once.

use super::OpenDevice;
use super::stage::Place;
use crate::memory::context::Fit;
use crate::{Error, Result};
use tegula_plugin::POOL_HOST;

/// Share of free memory that is left alone, so that the rest of the system keeps breathing.
const RESERVE_SHARE: u64 = 32;

/// A pool: the host's, or one of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Key {
    Host,
    Device(usize, u64),
}

#[derive(Debug)]
struct Pool {
    key: Key,
    /// Free bytes, if known.
    free: Option<u64>,
    taken: u64,
    /// Bytes of KV cache for each token.
    per_token: u64,
    /// The first device that takes of it, for errors and for moving layers.
    device: usize,
}

/// The pools of the devices of a plan.
#[derive(Debug)]
pub(crate) struct Budget {
    pools: Vec<Pool>,
    names: Vec<String>,
}

impl Budget {
    pub(crate) fn new(devices: &[OpenDevice]) -> Result<Self> {
        let mut out = Self { pools: Vec::new(), names: Vec::new() };
        for (index, open) in devices.iter().enumerate() {
            out.names.push(open.entry.id());
            for heap in &open.entry.info.heaps {
                let key = key(index, heap.pool);
                let free = heap.free.get();
                match out.pools.iter_mut().find(|pool| pool.key == key) {
                    // Two statements about the same memory: the lower one is safe.
                    Some(pool) => {
                        pool.free = match (pool.free, free) {
                            (Some(a), Some(b)) => Some(a.min(b)),
                            (a, b) => a.or(b),
                        };
                    }
                    None => {
                        out.pools.push(Pool { key, free, taken: 0, per_token: 0, device: index });
                    }
                }
            }
        }
        Ok(out)
    }

    fn pool(&mut self, key: Key, device: usize) -> Option<&mut Pool> {
        let pool = self.pools.iter_mut().find(|pool| pool.key == key)?;
        if pool.taken == 0 && pool.per_token == 0 {
            pool.device = device;
        }
        Some(pool)
    }

    /// Takes bytes of the pool that a device's buffer type lies in.
    pub(crate) fn take(&mut self, device: usize, place: &Place<'_>, bytes: u64) {
        if let Some(pool) = self.pool(key(device, place.heap.pool), device) {
            pool.taken = pool.taken.saturating_add(bytes);
        }
    }

    /// Takes bytes of the KV cache, for each token of the context.
    pub(crate) fn take_per_token(&mut self, device: usize, place: &Place<'_>, bytes: u64) {
        if let Some(pool) = self.pool(key(device, place.heap.pool), device) {
            pool.per_token = pool.per_token.saturating_add(bytes);
        }
    }

    /// Takes bytes of the host's memory, if a device of the plan has it in view.
    pub(crate) fn take_host(&mut self, bytes: u64) {
        if let Some(pool) = self.pools.iter_mut().find(|pool| pool.key == Key::Host) {
            pool.taken = pool.taken.saturating_add(bytes);
        }
    }

    /// Takes bytes of the host's memory, for each token of the context.
    pub(crate) fn take_host_per_token(&mut self, bytes: u64) {
        if let Some(pool) = self.pools.iter_mut().find(|pool| pool.key == Key::Host) {
            pool.per_token = pool.per_token.saturating_add(bytes);
        }
    }

    /// The device whose pool is over its budget at a context of `n_ctx`.
    pub(crate) fn first_over(&self, n_ctx: u32) -> Option<usize> {
        let over = |pool: &&Pool| {
            let needed = pool.taken.saturating_add(pool.per_token.saturating_mul(u64::from(n_ctx)));
            pool.usable().is_some_and(|usable| needed > usable)
        };
        self.pools.iter().find(over).map(|pool| pool.device)
    }

    /// Tokens whose KV cache fits every pool, `None` if no pool with KV cache says what is free; and the bytes that bind.
    pub(crate) fn tokens_that_fit(&self) -> Result<Option<Fit>> {
        let mut fit: Option<Fit> = None;
        for pool in &self.pools {
            let Some(usable) = pool.usable() else { continue };
            let left = usable.checked_sub(pool.taken).ok_or_else(|| Error::ModelDoesNotFit {
                device: self.names.get(pool.device).cloned().unwrap_or_default(),
                needed: pool.taken,
                free: pool.free.unwrap_or(0),
                remedies: Vec::new(),
            })?;
            if pool.per_token == 0 {
                continue;
            }
            let tokens = left / pool.per_token;
            if fit.is_none_or(|fit| tokens < fit.tokens) {
                fit = Some(Fit { tokens, budget: left, per_token: pool.per_token });
            }
        }
        Ok(fit)
    }
}

impl Pool {
    fn usable(&self) -> Option<u64> {
        self.free.map(|free| free - free / RESERVE_SHARE)
    }
}

fn key(device: usize, pool: u64) -> Key {
    if pool == POOL_HOST { Key::Host } else { Key::Device(device, pool) }
}
