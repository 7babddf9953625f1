//! Allocates what the plan says, and tells a device's untrue limit from memory that is really gone.
//!
//! The first contradiction between the plan and a device ends in an error with both numbers: what the plan counts on because the device
//! stated it, and what the device says when it is asked. Bytes that are not in the plan are not asked for at all.

use crate::planner::OpenDevice;
use crate::{Error, Result};
use tegula_plugin::{Buffer, BufferDesc, BufferUsage, Device, DeviceErrorKind};

/// Chunks are not halved below this when a device keeps failing under its stated limit.
const LEARNED_FLOOR: u64 = 1 << 20;

/// The planned bytes of one device for one purpose, and what was taken of them.
#[derive(Debug)]
pub(crate) struct Allowance {
    device: Device,
    buffer_type: u32,
    usage: BufferUsage,
    /// Greatest buffer that the plan was made for, if it was known.
    max_size: Option<u64>,
    /// Bytes that were free when the plan was made, if that was known.
    free: Option<u64>,
    books: Books,
}

impl Allowance {
    /// `planned` bytes of a buffer type of `open`, under what was stated of it when the plan was made.
    pub(crate) fn new(
        open: &OpenDevice,
        buffer_type: u32,
        usage: BufferUsage,
        planned: u64,
    ) -> Self {
        let info = &open.entry.info;
        let kind = info.buffer_types.get(buffer_type as usize);
        let heap = kind.and_then(|kind| info.heaps.get(kind.heap as usize));
        Self {
            device: open.device.clone(),
            buffer_type,
            usage,
            max_size: kind.and_then(|kind| kind.max_size.get()),
            free: heap.and_then(|heap| heap.free.get()),
            books: Books { planned, taken: 0 },
        }
    }

    /// The device.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Allocates a chunk of the plan.
    pub(crate) fn alloc(&mut self, size: u64) -> Result<Buffer> {
        let Self { buffer_type, usage, .. } = *self;
        let device = || self.device.info().id();
        let books = self.books.take(size).ok_or_else(|| Error::NotInPlan {
            device: device(),
            usage: usage.to_string(),
            asked: size,
            taken: self.books.taken,
            planned: self.books.planned,
        })?;
        let desc = BufferDesc { size, buffer_type, usage };
        let buffer = self.device.alloc(&desc).map_err(|source| {
            let kinds = [DeviceErrorKind::TooBig, DeviceErrorKind::OutOfMemory];
            let refused = kinds.contains(&source.kind);
            Error::Alloc {
                device: device(),
                buffer_type,
                asked: size,
                max_size: self.max_size,
                free: self.free,
                learned: refused.then(|| smaller_limit(&self.device, &desc)).flatten(),
                source: Box::new(source),
            }
        })?;
        self.books = books;
        Ok(buffer)
    }

    /// Bytes taken so far.
    pub(crate) fn taken(&self) -> u64 {
        self.books.taken
    }

    /// Goes back to an earlier [`Allowance::taken`]: the chunks since then were freed.
    pub(crate) fn rewind(&mut self, taken: u64) {
        self.books.taken = self.books.taken.min(taken);
    }

    /// Counts on other bytes from here on, `rest` beside those taken, and on chunks of at most `max_size`: the plan was changed.
    pub(crate) fn replan(&mut self, rest: u64, max_size: u64) {
        self.books.planned = self.books.taken.saturating_add(rest);
        self.max_size = Some(max_size);
    }
}

/// Bytes planned and taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Books {
    planned: u64,
    taken: u64,
}

impl Books {
    /// The books with `bytes` more taken, if they were planned.
    fn take(self, bytes: u64) -> Option<Self> {
        let taken = self.taken.checked_add(bytes)?;
        (taken <= self.planned).then_some(Self { taken, ..self })
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What no plan has counted must not be taken: it is what another program, or the rest of this model, needs.
    #[test]
    fn bytes_beyond_the_plan_are_refused() {
        let books = |planned, taken| Books { planned, taken };
        assert_eq!(books(10, 0).take(10), Some(books(10, 10)));
        assert_eq!(books(10, 4).take(6), Some(books(10, 10)));
        assert_eq!(books(10, 4).take(7), None);
        assert_eq!(books(0, 0).take(1), None);
        assert_eq!(books(u64::MAX, 5).take(u64::MAX), None);
        let error = Error::NotInPlan {
            device: "fake:0".into(),
            usage: "kv".into(),
            asked: 7,
            taken: 4,
            planned: 10,
        };
        let text = error.to_string();
        assert!(["7", "4", "10", "kv", "fake:0"].iter().all(|part| text.contains(part)), "{text}");
    }
}
