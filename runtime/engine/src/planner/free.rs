//! How much memory each heap gives, as far as the plan may count on it.
//!
//! * A heap that states what is free gives that.
//! * One that only states how much there is in all gives that less a margin, which is said: drivers of several kinds know no better.
//! * One that states neither gives nothing known; a plan that needs it is refused unless it is forced.
//! * Unified memory of which a device states far less than the host has free gives what it states, and both numbers are said; an operator's limit
//!   for that device counts instead, up to what the host has.

use super::OpenDevice;
use crate::memory::units::format_size;
use crate::runtime::Runtime;
use tegula_plugin::{DeviceKind, FigureSource, Heap, POOL_HOST};

/// Share of a heap that is taken to be in use where only its total is known: desktops and drivers take about so much.
const MARGIN_SHARE: u64 = 8;
/// Unified memory that states less than one in so many of what the host has free is worth a word.
const FAR_BELOW: u64 = 4;

/// What the plan counts on in one heap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HeapFree {
    /// Bytes, if anything is known.
    pub bytes: Option<u64>,
    /// Why they are not what the heap states.
    pub origin: Origin,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    Stated,
    /// From the total.
    Assumed,
    /// Stated, and far below what the host has free.
    FarBelowHost,
    /// An operator's limit instead of a statement far below what the host has free.
    Raised,
}

/// What the plan counts on.
#[derive(Debug)]
pub(crate) struct FreeMemory {
    /// For each device of the plan, its heaps.
    pub devices: Vec<Vec<HeapFree>>,
    /// Bytes of the host's memory, as the host's processor states them.
    pub host: Option<u64>,
}

impl FreeMemory {
    pub(crate) fn read(runtime: &Runtime, devices: &[OpenDevice]) -> Self {
        let host = host_free(runtime, devices);
        let of_device = |open: &OpenDevice| {
            let limit = runtime.limit_naming(&open.entry.info.id());
            let is_cpu = open.entry.info.kind == DeviceKind::CPU;
            open.entry.info.heaps.iter().map(|heap| of_heap(heap, is_cpu, host, limit)).collect()
        };
        Self { devices: devices.iter().map(of_device).collect(), host }
    }

    /// One heap's.
    pub(crate) fn heap(&self, device: usize, heap: u32) -> Option<HeapFree> {
        self.devices.get(device)?.get(heap as usize).copied()
    }

    /// What is to be said of device `index`; `split` is where the layers went, in words. A device that got none is worth a word where it was
    /// its own statement that left it out.
    pub(crate) fn notes(
        &self,
        index: usize,
        open: &OpenDevice,
        is_used: bool,
        split: &str,
    ) -> Vec<String> {
        let id = open.entry.id();
        let heaps = self.devices.get(index).into_iter().flatten().zip(&open.entry.info.heaps);
        let note = |(number, (free, heap)): (usize, (&HeapFree, &Heap))| {
            let bytes = format_size(free.bytes?);
            let stated = heap.free.get().map(format_size).unwrap_or_default();
            let host = self.host.map(format_size).unwrap_or_default();
            match free.origin {
                Origin::Stated => None,
                Origin::Assumed if !is_used => None,
                Origin::Assumed => Some(format!(
                    "{id}: what is free of heap {number} is unknown; {bytes} are assumed, its {} less 1/{MARGIN_SHARE} (--memory-limit {id}=SIZE to state it)",
                    heap.total.get().map(format_size).unwrap_or_default(),
                )),
                Origin::FarBelowHost => Some(format!(
                    "{id} says that {stated} are free for it in the host's memory, of which {host} are free; the plan keeps to what it says: {split} (--memory-limit {id}=SIZE to give it more)"
                )),
                Origin::Raised => Some(format!(
                    "{id} says that {stated} are free for it in the host's memory, of which {host} are free; {bytes} are counted on, as --memory-limit says: {split}"
                )),
            }
        };
        heaps.enumerate().filter_map(note).collect()
    }
}

fn of_heap(heap: &Heap, is_cpu: bool, host: Option<u64>, limit: Option<u64>) -> HeapFree {
    let Some(free) = heap.free.get() else {
        let margin = |total: u64| total - total / MARGIN_SHARE;
        let bytes = heap.total.get().map(margin);
        return HeapFree { bytes, origin: Origin::Assumed };
    };
    let is_cap = heap.free.source == FigureSource::OVERRIDE;
    match host {
        Some(host) if heap.pool == POOL_HOST && !is_cpu && !is_cap && free < host / FAR_BELOW => {
            match limit {
                // A limit below what is stated lowered it already.
                Some(limit) => HeapFree { bytes: Some(limit.min(host)), origin: Origin::Raised },
                None => HeapFree { bytes: Some(free), origin: Origin::FarBelowHost },
            }
        }
        _ => HeapFree { bytes: Some(free), origin: Origin::Stated },
    }
}

/// The host's free memory as the processor among `devices` states it, else as any processor of the runtime does.
fn host_free(runtime: &Runtime, devices: &[OpenDevice]) -> Option<u64> {
    let stated = |info: &tegula_plugin::DeviceInfo| {
        let heaps = info.heaps.iter().filter(|heap| heap.pool == POOL_HOST);
        let is_cpu = info.kind == DeviceKind::CPU;
        is_cpu.then(|| heaps.filter_map(|heap| heap.free.get()).max()).flatten()
    };
    let selected = devices.iter().filter_map(|open| stated(&open.entry.info)).max();
    selected.or_else(|| runtime.devices().iter().filter_map(|entry| stated(&entry.info)).max())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tegula_plugin::{Figure, HeapKind};

    /// An unknown figure must be neither nothing nor everything, and a device's word about unified memory must not pass unheard.
    #[test]
    fn figures_count_as_far_as_they_are_known() {
        const GIB: u64 = 1 << 30;
        let known = |gib: u64| Figure::known(gib * GIB, FigureSource::DRIVER);
        let unknown = Figure::UNKNOWN;
        let capped = Figure::known(GIB, FigureSource::OVERRIDE);
        // Total, free, whether in the host's pool, the host's free, a limit; what counts and why.
        let table = [
            (known(8), known(6), false, Some(52), None, Some(6), Origin::Stated),
            (known(8), unknown, false, Some(52), None, Some(7), Origin::Assumed),
            (unknown, unknown, false, Some(52), None, None, Origin::Assumed),
            (known(64), known(1), true, Some(52), None, Some(1), Origin::FarBelowHost),
            (known(64), known(1), true, Some(52), Some(20), Some(20), Origin::Raised),
            (known(64), known(1), true, Some(52), Some(99), Some(52), Origin::Raised),
            (known(64), known(20), true, Some(52), None, Some(20), Origin::Stated),
            (known(64), known(1), true, None, Some(20), Some(1), Origin::Stated),
            (known(64), capped, true, Some(52), Some(1), Some(1), Origin::Stated),
            (known(64), known(1), false, Some(52), Some(20), Some(1), Origin::Stated),
        ];
        for (i, (total, free, is_host, host, limit, bytes, origin)) in table.into_iter().enumerate()
        {
            let pool = if is_host { POOL_HOST } else { 16 };
            let heap = Heap { kind: HeapKind::DEVICE_LOCAL, pool, total, free };
            let gib = |n: Option<u64>| n.map(|n| n * GIB);
            let got = of_heap(&heap, false, gib(host), gib(limit));
            assert_eq!(got, HeapFree { bytes: gib(bytes), origin }, "row {i}");
        }
    }
}
