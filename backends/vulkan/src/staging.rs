//! Pinned host memory through which transfers go: a ring of a few slots for each logical device, made when first needed, never more.

#![expect(unsafe_code, reason = "Vulkan is a C interface")]

use crate::gpu::{Gpu, Timeline};
use crate::memory::Raw;
use crate::physical::Physical;
use std::sync::Arc;
use tegula_sdk::{Error, Result};

/// Bytes of a slot: large enough that a copy runs at the bus's speed.
pub(crate) const SLOT_BYTES: u64 = 16 << 20;
/// One is filled while others are on their way.
const SLOTS: usize = 3;

/// The slots of a device.
#[derive(Default)]
pub(crate) struct Ring {
    slots: Vec<Slot>,
    next: usize,
    /// Bytes that went through, for tests that count.
    pub(crate) bytes: u64,
}

/// A piece of pinned memory.
pub(crate) struct Slot {
    pub(crate) raw: Raw,
    /// The work that used it last.
    pub(crate) busy: Option<(Arc<Timeline>, u64)>,
}

impl Ring {
    /// The next slot, once the work that used it is done.
    pub(crate) fn take(&mut self, gpu: &Gpu) -> Result<&mut Slot> {
        if self.slots.len() < SLOTS {
            let raw = Raw::new(&gpu.device, &gpu.physical, SLOT_BYTES, gpu.physical.host)?;
            self.slots.push(Slot { raw, busy: None });
            self.next = self.slots.len() - 1;
        }
        let at = self.next;
        self.next = (at + 1) % SLOTS;
        let slot = self.slots.get_mut(at).ok_or_else(|| Error::invalid("no staging slot"))?;
        if let Some((timeline, value)) = slot.busy.take() {
            timeline.wait(value, u64::MAX)?;
        }
        Ok(slot)
    }

    /// Forgets a queue that is going; its work is done.
    pub(crate) fn forget(&mut self, timeline: &Arc<Timeline>) {
        for slot in &mut self.slots {
            if slot.busy.as_ref().is_some_and(|(busy, _)| Arc::ptr_eq(busy, timeline)) {
                slot.busy = None;
            }
        }
    }

    /// Pinned bytes that it has.
    pub(crate) fn pinned(&self) -> u64 {
        self.slots.len() as u64 * SLOT_BYTES
    }

    /// # Safety
    /// The device is idle.
    pub(crate) unsafe fn free(&mut self, device: &ash::Device, physical: &Physical) {
        for mut slot in self.slots.drain(..) {
            // SAFETY: by the caller's word.
            unsafe { slot.raw.free(device, physical) };
        }
    }
}
