//! A ring of pinned host memory through which transfers go, so that they run beside the host's work and at the bus's full speed.
//!
//! Bounded: a transfer that finds no room waits for the oldest one. Places are counted by bytes that only grow; what lies before `freed` is free.

use crate::buffer::ClBuffer;
use crate::context::Shared;
use crate::facts::TYPE_PINNED;
use std::sync::Arc;
use tegula_sdk::abi::{BufferDesc, BufferUsage};
use tegula_sdk::host_memory::HostBuffer;
use tegula_sdk::{Error, Result};

/// Bytes of the ring.
const CAPACITY: u64 = 16 << 20;
/// The greatest piece of a transfer.
pub(crate) const PIECE: u64 = 4 << 20;
const ALIGNMENT: u64 = 64;

/// The ring of one queue.
#[derive(Debug)]
pub(crate) struct Ring {
    /// Kept for its memory.
    _memory: Memory,
    ptr: Address,
    used: u64,
    freed: u64,
}

/// What the ring is made of.
#[derive(Debug)]
#[expect(dead_code, reason = "held to be freed with the ring, never read")]
enum Memory {
    Pinned(ClBuffer),
    /// On a processor: no buffer of the driver, so that no limit of its binds.
    Host(HostBuffer),
}

/// An address of host memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Address(pub(crate) *mut u8);

#[expect(unsafe_code, reason = "an address is no data")]
// SAFETY: the memory belongs to no thread.
unsafe impl Send for Address {}

impl Ring {
    pub(crate) fn new(shared: &Arc<Shared>) -> Result<Self> {
        let (memory, ptr) = if shared.facts.is_cpu {
            let host = HostBuffer::alloc(CAPACITY)?;
            let ptr = host.map()?;
            (Memory::Host(host), ptr)
        } else {
            let (buffer_type, usage) = (TYPE_PINNED, BufferUsage::STAGING);
            let struct_size = size_of::<BufferDesc>();
            let desc = BufferDesc { struct_size, size: CAPACITY, buffer_type, usage };
            let buffer = ClBuffer::alloc(shared, &desc)?;
            let ptr = buffer.mapped();
            let ptr = ptr.ok_or_else(|| Error::invalid("staging that is not mapped"))?;
            (Memory::Pinned(buffer), ptr)
        };
        Ok(Self { _memory: memory, ptr: Address(ptr), used: 0, freed: 0 })
    }

    /// Room for `size` bytes in one piece; `None` if the ring is full.
    pub(crate) fn take(&mut self, size: u64) -> Option<Address> {
        let mut begin = self.used.next_multiple_of(ALIGNMENT);
        if begin % CAPACITY + size > CAPACITY {
            begin = begin.next_multiple_of(CAPACITY);
        }
        if size > CAPACITY || begin + size - self.freed > CAPACITY {
            return None;
        }
        self.used = begin + size;
        let at = usize::try_from(begin % CAPACITY).ok()?;
        Some(Address(self.ptr.0.wrapping_add(at)))
    }

    /// What has been taken so far, to be given to [`Ring::free`] once it is no longer read.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// Everything taken before `used` is free again.
    pub(crate) fn free(&mut self, used: u64) {
        self.freed = self.freed.max(used);
    }
}
