//! Memory that loaded models will still take: KV cache that is planned and not yet allocated.
//!
//! A device cannot know of it, so what it states to be free is lowered by it. Else a second model would be given memory that the first one was
//! promised, and the first would fail in the middle of a conversation.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tegula_plugin::{DeviceInfo, FigureState, POOL_HOST};

/// The promises of a runtime. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Promises {
    list: Arc<Mutex<List>>,
}

#[derive(Debug, Default)]
struct List {
    next_id: u64,
    open: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    id: u64,
    /// The device's id and its heap.
    device: String,
    heap: u32,
    is_host: bool,
    bytes: u64,
}

/// Bytes promised to one holder; what is left of them is free again when it is dropped.
#[derive(Debug)]
pub(crate) struct Promise {
    of: Promises,
    id: u64,
}

impl Promises {
    fn lock(&self) -> MutexGuard<'_, List> {
        // Its numbers are whole at every moment.
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Promises `bytes` of the heap that buffer type `buffer_type` of a device lies in.
    pub(crate) fn make(&self, info: &DeviceInfo, buffer_type: u32, bytes: u64) -> Promise {
        let heap = info.buffer_types.get(buffer_type as usize).map_or(0, |kind| kind.heap);
        let is_host = info.heaps.get(heap as usize).is_some_and(|heap| heap.pool == POOL_HOST);
        let mut list = self.lock();
        let id = list.next_id;
        list.next_id += 1;
        list.open.push(Entry { id, device: info.id(), heap, is_host, bytes });
        Promise { of: self.clone(), id }
    }

    /// Lowers what a device's heaps state to be free by what was promised of them. The host's memory is the same whoever states it.
    pub(crate) fn apply(&self, info: &mut DeviceInfo) {
        let id = info.id();
        let list = self.lock();
        for (index, heap) in (0u32..).zip(&mut info.heaps) {
            let concerns = |entry: &&Entry| {
                let same_heap = entry.device == id && entry.heap == index;
                same_heap || (entry.is_host && heap.pool == POOL_HOST)
            };
            let bytes = list.open.iter().filter(concerns).map(|entry| entry.bytes);
            let bytes = bytes.fold(0, u64::saturating_add);
            if heap.free.state == FigureState::KNOWN {
                heap.free.value = heap.free.value.saturating_sub(bytes);
            }
        }
    }
}

impl Promise {
    /// So many bytes were taken: what the device states to be free lacks them now.
    pub(crate) fn keep(&self, bytes: u64) {
        let mut list = self.of.lock();
        if let Some(entry) = list.open.iter_mut().find(|entry| entry.id == self.id) {
            entry.bytes = entry.bytes.saturating_sub(bytes);
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.of.lock().open.retain(|entry| entry.id != self.id);
    }
}
