//! How much memory each heap and each pool gives, and what a plan takes of it.
//!
//! A pool is physical memory: the host's is one, however many devices and heaps are carved from it. What a plan takes is counted against its
//! heap, which is what a device may have, and against the pool, which is what there is: so a device that states too little limits itself alone,
//! and unified memory is counted once.

use super::OpenDevice;
use super::free::FreeMemory;
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

/// A heap or a pool.
#[derive(Debug, Default)]
struct Account {
    /// Free bytes, if known.
    free: Option<u64>,
    taken: u64,
    /// Bytes of KV cache, and of what grows with it, for each token.
    per_token: u64,
    /// The first device that takes of it, for errors.
    device: Option<usize>,
    /// The slots whose layers take of it.
    slots: Vec<usize>,
}

/// Who takes bytes, and where.
#[derive(Clone, Copy)]
pub(crate) struct Taker<'a> {
    /// Index of the device.
    pub device: usize,
    /// The slot whose layers need the bytes.
    pub slot: usize,
    /// The buffer type they are in.
    pub place: &'a Place<'a>,
}

/// The heaps and pools of the devices of a plan.
#[derive(Debug)]
pub(crate) struct Budget {
    heaps: Vec<Vec<Account>>,
    pools: Vec<(Key, Account)>,
    names: Vec<String>,
    /// For each device, the heap that it carves from the host's memory.
    host_heaps: Vec<Option<usize>>,
}

impl Budget {
    pub(crate) fn new(devices: &[OpenDevice], free: &FreeMemory) -> Self {
        let mut out = Self {
            heaps: Vec::new(),
            pools: Vec::new(),
            names: Vec::new(),
            host_heaps: Vec::new(),
        };
        for (index, open) in devices.iter().enumerate() {
            out.names.push(open.entry.id());
            let is_hosts = |heap: &tegula_plugin::Heap| heap.pool == POOL_HOST;
            out.host_heaps.push(open.entry.info.heaps.iter().position(is_hosts));
            let mut heaps = Vec::new();
            for (number, heap) in (0u32..).zip(&open.entry.info.heaps) {
                let bytes = free.heap(index, number).and_then(|heap| heap.bytes);
                heaps.push(Account { free: bytes, ..Account::default() });
                let pool = out.pool(key(index, heap.pool));
                // Each heap is held to its own statement, so the pool is the greatest of them.
                pool.free = pool.free.max(bytes);
            }
            out.heaps.push(heaps);
        }
        // Of its own memory the host knows best.
        if let Some(host) = free.host {
            out.pool(Key::Host).free = Some(host);
        }
        out
    }

    fn pool(&mut self, key: Key) -> &mut Account {
        let index = self.pools.iter().position(|(known, _)| *known == key);
        let index = index.unwrap_or_else(|| {
            self.pools.push((key, Account::default()));
            self.pools.len() - 1
        });
        &mut self.pools[index].1
    }

    fn charge(&mut self, by: Taker<'_>, add: impl Fn(&mut Account)) {
        let charge = |account: &mut Account| account.charge(by.device, by.slot, &add);
        charge(self.pool(key(by.device, by.place.heap.pool)));
        let heaps = self.heaps.get_mut(by.device);
        if let Some(heap) = heaps.and_then(|h| h.get_mut(by.place.buffer_type.heap as usize)) {
            charge(heap);
        }
    }

    /// Takes bytes.
    pub(crate) fn take(&mut self, by: Taker<'_>, bytes: u64) {
        if bytes > 0 {
            self.charge(by, |account| account.taken = account.taken.saturating_add(bytes));
        }
    }

    /// Takes bytes for each token of the context.
    pub(crate) fn take_per_token(&mut self, by: Taker<'_>, bytes: u64) {
        if bytes > 0 {
            self.charge(by, |account| account.per_token = account.per_token.saturating_add(bytes));
        }
    }

    /// Memory of the process itself, for a device and a slot of it: of the host's pool, and of the device's own heap in that pool, which is where
    /// the plan shows it. A heap of which nothing is known is not in use because of it.
    fn charge_host(&mut self, device: usize, slot: usize, add: impl Fn(&mut Account)) {
        self.pool(Key::Host).charge(device, slot, &add);
        let heap = self.host_heaps.get(device).copied().flatten();
        let heaps = self.heaps.get_mut(device);
        let heap = heap.and_then(|heap| heaps?.get_mut(heap)).filter(|heap| heap.free.is_some());
        if let Some(heap) = heap {
            heap.charge(device, slot, &add);
        }
    }

    /// Takes bytes of the host's memory.
    pub(crate) fn take_host(&mut self, device: usize, slot: usize, bytes: u64) {
        if bytes > 0 {
            let add = |account: &mut Account| account.taken = account.taken.saturating_add(bytes);
            self.charge_host(device, slot, add);
        }
    }

    /// Takes bytes of the host's memory, for each token of the context.
    pub(crate) fn take_host_per_token(&mut self, device: usize, slot: usize, bytes: u64) {
        if bytes > 0 {
            let add =
                |account: &mut Account| account.per_token = account.per_token.saturating_add(bytes);
            self.charge_host(device, slot, add);
        }
    }

    fn accounts(&self) -> impl Iterator<Item = &Account> {
        self.heaps.iter().flatten().chain(self.pools.iter().map(|(_, account)| account))
    }

    /// For each heap and pool that is over its budget at a context of `n_ctx`, the slots that take of it.
    pub(crate) fn over(&self, n_ctx: u32) -> impl Iterator<Item = &[usize]> {
        let is_over = move |account: &&Account| {
            let growing = account.per_token.saturating_mul(u64::from(n_ctx));
            let needed = account.taken.saturating_add(growing);
            account.usable().is_some_and(|usable| needed > usable)
        };
        self.accounts().filter(is_over).map(|account| account.slots.as_slice())
    }

    /// That of every heap in use something is known.
    ///
    /// # Errors
    /// [`Error::MemoryUnknown`].
    pub(crate) fn check_known(&self) -> Result<()> {
        for (device, heaps) in self.heaps.iter().enumerate() {
            let unknown = |heap: &&Account| heap.device.is_some() && heap.free.is_none();
            if let Some(heap) = heaps.iter().find(unknown) {
                let device = self.names.get(device).cloned().unwrap_or_default();
                return Err(Error::MemoryUnknown { device, needed: heap.taken });
            }
        }
        Ok(())
    }

    /// Tokens whose KV cache fits every heap and pool, `None` if none with KV cache says what is free; and the bytes that bind.
    ///
    /// # Errors
    /// [`Error::ModelDoesNotFit`] if there is no room even without a context.
    pub(crate) fn tokens_that_fit(&self) -> Result<Option<Fit>> {
        let mut fit: Option<Fit> = None;
        for account in self.accounts() {
            let Some(usable) = account.usable() else { continue };
            let name = account.device.and_then(|device| self.names.get(device)).cloned();
            let left = usable.checked_sub(account.taken).ok_or_else(|| Error::ModelDoesNotFit {
                device: name.unwrap_or_else(|| "the host's memory".into()),
                needed: account.taken,
                free: account.free.unwrap_or(0),
                remedies: Vec::new(),
            })?;
            if account.per_token == 0 {
                continue;
            }
            let tokens = left / account.per_token;
            if fit.is_none_or(|fit| tokens < fit.tokens) {
                fit = Some(Fit { tokens, budget: left, per_token: account.per_token });
            }
        }
        Ok(fit)
    }
}

impl Account {
    fn charge(&mut self, device: usize, slot: usize, add: impl Fn(&mut Self)) {
        add(self);
        self.device.get_or_insert(device);
        if !self.slots.contains(&slot) {
            self.slots.push(slot);
        }
    }

    fn usable(&self) -> Option<u64> {
        self.free.map(|free| free - free / RESERVE_SHARE)
    }
}

fn key(device: usize, pool: u64) -> Key {
    if pool == POOL_HOST { Key::Host } else { Key::Device(device, pool) }
}
