//! Copies between host and device, and within the device, to the byte.

use super::PASSED;
use crate::data::Rng;
use crate::report::Outcome;
use crate::session::{Guarded, Rig};
use crate::{Result, wrong};
use std::sync::Arc;
use tegula_plugin::{Backend, BufferDesc, BufferUsage};

/// Places and sizes that no alignment divides.
const PLACES: [(u64, u64); 7] =
    [(0, 1), (1, 1), (3, 17), (64, 64), (1021, 3), (0, 4096), (4095, 1)];

pub(super) fn odd_places(backend: &Backend, index: u32, _: &Backend) -> Result<Outcome> {
    let mut rig = Rig::open(backend, index)?;
    let mut rng = Rng::of("transfers");
    let n_types = u32::try_from(rig.device.info().buffer_types.len()).unwrap_or(0);
    for buffer_type in 0..n_types {
        let kind = (buffer_type, BufferUsage::ANY);
        let from = Guarded::alloc(&mut rig, kind, 4096, 1)?;
        let to = Guarded::alloc(&mut rig, kind, 4096, 1)?;
        let mut wanted =
            [vec![crate::session::SENTINEL; 4096], vec![crate::session::SENTINEL; 4096]];
        for (at, size) in PLACES {
            let bytes: Vec<u8> = (0..size).map(|_| rng.bits() as u8).collect();
            let range = at as usize..(at + size) as usize;
            rig.queue.write(&from.buffer, from.offset + at, &bytes)?;
            wanted[0][range.clone()].copy_from_slice(&bytes);
            // To another place than where it came from.
            let other = 4096 - at - size;
            let (src, dst) = (
                from.buffer.span(from.offset + at, size)?,
                to.buffer.span(to.offset + other, size)?,
            );
            rig.queue.copy(&src, &dst)?;
            wanted[1][other as usize..(other + size) as usize].copy_from_slice(&bytes);
            for (memory, wanted) in [&from, &to].into_iter().zip(&wanted) {
                if memory.read(&mut rig.queue)? != *wanted {
                    return wrong(format!("{size} bytes to {at} or {other} went elsewhere"));
                }
                memory.check(&mut rig.queue, "a transfer")?;
            }
        }
        rig.queue.write(&from.buffer, from.offset, &[])?;
    }
    Ok(PASSED)
}

/// Imported memory is what the host has, keeps its owner, and is never written.
pub(super) fn imports(backend: &Backend, index: u32, _: &Backend) -> Result<Outcome> {
    let mut rig = Rig::open(backend, index)?;
    let kinds: Vec<_> = (0..).zip(rig.device.info().buffer_types.clone()).collect();
    for (buffer_type, kind) in kinds.into_iter().filter(|(_, kind)| kind.import) {
        let alignment = usize::try_from(kind.import_alignment).unwrap_or(1);
        let mut rng = Rng::of("imports");
        let bytes: Vec<u8> = (0..4096 + 2 * alignment).map(|_| rng.bits() as u8).collect();
        let begin = bytes.as_ptr().align_offset(alignment).min(alignment);
        let size = 4096usize.next_multiple_of(alignment);
        let owner = Arc::new(bytes);
        let range = begin..(begin + size).min(owner.len());
        let desc = BufferDesc { size: 0, buffer_type, usage: BufferUsage::WEIGHTS };
        let buffer = rig.device.import(&desc, owner.clone(), range.clone())?;
        let mut back = vec![0; range.len()];
        rig.queue.read(&buffer, 0, &mut back)?;
        if back != owner[range] {
            return wrong("imported bytes read back as others");
        }
        if rig.queue.write(&buffer, 0, &[1]).is_ok() {
            return wrong("imported memory was written");
        }
        drop(buffer);
        if Arc::strong_count(&owner) != 1 {
            return wrong("an import that was freed keeps its owner");
        }
    }
    Ok(PASSED)
}
