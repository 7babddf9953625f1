//! Allocates what the plan says, and tells a device's untrue limit from memory that is really gone.

use crate::{Error, Result};
use tegula_plugin::{Buffer, BufferDesc, Device, DeviceErrorKind};

/// Chunks are not halved below this when a device keeps failing under its stated limit.
const LEARNED_FLOOR: u64 = 1 << 20;

/// Allocates a chunk of the plan.
pub(crate) fn alloc(device: &Device, desc: &BufferDesc) -> Result<Buffer> {
    device.alloc(desc).map_err(|source| {
        let refused = matches!(source.kind, DeviceErrorKind::TooBig | DeviceErrorKind::OutOfMemory);
        let learned = refused.then(|| smaller_limit(device, desc)).flatten();
        Error::Alloc {
            device: device.info().id(),
            buffer_type: desc.buffer_type,
            asked: desc.size,
            learned,
            source: Box::new(source),
        }
    })
}

/// Half of what failed, if the device had said that it would work and says that the memory is there.
fn smaller_limit(device: &Device, desc: &BufferDesc) -> Option<u64> {
    let info = device.info();
    let kind = info.buffer_types.get(desc.buffer_type as usize)?;
    let heaps = device.heaps().ok()?;
    let free = heaps.get(kind.heap as usize).and_then(|heap| heap.free.get());
    let said_it_works = kind.max_size.get().is_none_or(|max| desc.size <= max);
    let is_there = free.is_none_or(|free| desc.size <= free);
    let half = desc.size / 2;
    (said_it_works && is_there && half >= LEARNED_FLOOR).then_some(half)
}
