//! What is alive: for tests that want to see everything given back.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tegula_abi::Status;

/// What an open backend holds, over its devices.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// 1 while the backend is open.
    pub backends: u64,
    /// Each device.
    pub devices: Vec<DeviceStats>,
    /// What the host did that the boundary forbids, in words.
    pub violations: Vec<String>,
}

/// What one device holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStats {
    /// Open handles of it.
    pub open: u64,
    /// Live queues.
    pub queues: u64,
    /// Live executables.
    pub executables: u64,
    /// Live buffers, imports included.
    pub buffers: u64,
    /// Bytes of live buffers, as rounded to the granularity, without imports.
    pub bytes: u64,
    /// The most bytes that were live at once.
    pub bytes_peak: u64,
    /// Allocations asked for so far, failed ones included.
    pub alloc_calls: u64,
    /// Allocations so far.
    pub allocs: u64,
    /// Imports so far.
    pub imports: u64,
    /// Uploads so far.
    pub uploads: u64,
    /// Runs so far.
    pub runs: u64,
    /// Allocations so far, by what they were for (`weights`, `kv`, `scratch`, `staging`, `any`).
    pub usage: BTreeMap<String, UsageStats>,
}

/// Allocations for one purpose.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageStats {
    /// How many.
    pub allocs: u64,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Bytes of the largest.
    pub largest: u64,
}

impl Stats {
    /// Whether nothing is left: no backend, device, queue, executable, buffer or byte.
    pub fn is_empty(&self) -> bool {
        self.backends == 0
            && self
                .devices
                .iter()
                .all(|d| (d.open, d.queues, d.executables, d.buffers, d.bytes) == (0, 0, 0, 0, 0))
    }

    /// Allocations for one purpose, over all devices.
    pub fn usage(&self, name: &str) -> UsageStats {
        let mut out = UsageStats::default();
        for usage in self.devices.iter().filter_map(|device| device.usage.get(name)) {
            out.allocs += usage.allocs;
            out.bytes += usage.bytes;
            out.largest = out.largest.max(usage.largest);
        }
        out
    }

    pub(crate) fn counts(&self) -> FakeCounts {
        let sum = |of: fn(&DeviceStats) -> u64| self.devices.iter().map(of).sum();
        FakeCounts {
            struct_size: size_of::<FakeCounts>(),
            backends: self.backends,
            devices: sum(|d| d.open),
            queues: sum(|d| d.queues),
            executables: sum(|d| d.executables),
            buffers: sum(|d| d.buffers),
            bytes: sum(|d| d.bytes),
            bytes_peak: sum(|d| d.bytes_peak),
            allocs: sum(|d| d.allocs),
            violations: self.violations.len() as u64,
        }
    }
}

/// Name of the extension that gives [`FakeStatsTable`].
pub const FAKE_STATS: &str = "tegula.fake_stats.v1";

/// The extension's table. Static in the plugin.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct FakeStatsTable {
    /// Set by the plugin.
    pub struct_size: usize,
    /// Counts of the backend that was opened last; NOT_FOUND if none is open.
    pub read: unsafe extern "C" fn(out: *mut FakeCounts) -> Status,
}

/// Sums of [`Stats`] over the devices.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "as the fields of DeviceStats")]
pub struct FakeCounts {
    pub struct_size: usize,
    pub backends: u64,
    pub devices: u64,
    pub queues: u64,
    pub executables: u64,
    pub buffers: u64,
    pub bytes: u64,
    pub bytes_peak: u64,
    pub allocs: u64,
    pub violations: u64,
}
