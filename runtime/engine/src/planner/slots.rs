//! Slots: the kinds of memory that layers can go to, in the order in which they are filled.
//!
//! A device has one slot for the memory that it advises, and one more for each other heap that it can work from at speed. A layer lies in one slot
//! with its weights and its keys and values; where the first heap is full, layers go to the next slot.

use super::OpenDevice;
use crate::measure::is_far_slower;
use crate::memory::plan::MemoryTypes;
use tegula_plugin::{BufferType, DeviceInfo, DeviceKind, HeapKind};

/// Memory of one device that layers can go to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot {
    /// Index of the device.
    pub device: usize,
    /// Its buffer types.
    pub types: MemoryTypes,
    /// Whether it is what the device advises.
    pub is_advised: bool,
}

/// The slots of `devices`; those behind the first `n_filled`, which are not filled with layers, have their advised one alone. `row_bytes` is the
/// least that a buffer must hold.
pub(crate) fn slots(devices: &[OpenDevice], n_filled: usize, row_bytes: u64) -> Vec<Slot> {
    let mut out = Vec::new();
    for (device, open) in devices.iter().enumerate() {
        let info = &open.entry.info;
        let types = MemoryTypes { weights: info.type_for_weights, kv: info.type_for_kv };
        out.push(Slot { device, types, is_advised: true });
        if device < n_filled {
            out.extend(others(info, row_bytes).into_iter().map(|index| Slot {
                device,
                types: MemoryTypes { weights: index, kv: index },
                is_advised: false,
            }));
        }
    }
    out
}

/// Buffer types in heaps that nothing is advised for, one for each heap: the fastest first where that was measured, else in the device's order.
fn others(info: &DeviceInfo, row_bytes: u64) -> Vec<u32> {
    let kind = |index: u32| info.buffer_types.get(index as usize);
    let Some(advised) = kind(info.type_for_weights) else { return Vec::new() };
    let mut heaps_seen: Vec<u32> = [info.type_for_weights, info.type_for_kv]
        .into_iter()
        .filter_map(kind)
        .map(|t| t.heap)
        .collect();
    let mut found: Vec<(u32, &BufferType)> = (0u32..)
        .zip(&info.buffer_types)
        .filter(|(_, t)| can_hold_layers(info, t, row_bytes) && !is_far_slower(t, advised))
        .collect();
    let rate = |t: &BufferType| t.read_bandwidth.get().unwrap_or(0);
    found.sort_by_key(|(_, t)| std::cmp::Reverse(rate(t)));
    found.retain(|(_, t)| {
        let is_new = !heaps_seen.contains(&t.heap);
        heaps_seen.push(t.heap);
        is_new
    });
    found.into_iter().map(|(index, _)| index).collect()
}

/// Whether layers in memory of this type run at the speed of the device: host memory does for a processor or a GPU that shares it; a card would
/// read it over its bus, slower than the processor runs the layer.
fn can_hold_layers(info: &DeviceInfo, kind: &BufferType, row_bytes: u64) -> bool {
    let Some(heap) = info.heaps.get(kind.heap as usize) else { return false };
    let is_near = heap.kind == HeapKind::DEVICE_LOCAL
        || [DeviceKind::CPU, DeviceKind::INTEGRATED].contains(&info.kind);
    let holds = |limit: Option<u64>| limit.is_none_or(|limit| limit >= row_bytes);
    is_near && holds(kind.max_size.get()) && holds(heap.free.get().or(heap.total.get()))
}
