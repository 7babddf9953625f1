//! What is alive, by device, and what the host did that it must not.

use crate::failure::{Failure, Result};
use crate::stats::{DeviceStats, Stats};
use std::collections::HashMap;
use tegula_abi::{self as abi, BufferRange, BufferUsage};

/// Violations that are told; a host that goes on does not fill the memory with them.
const MAX_VIOLATIONS: usize = 100;

/// A live buffer.
#[derive(Debug, Clone)]
pub(crate) struct Live {
    pub(crate) device: u32,
    /// Bytes as asked for.
    pub(crate) size: u64,
    /// Bytes as counted: rounded up, none for imports.
    pub(crate) counted: u64,
    pub(crate) buffer_type: u32,
    pub(crate) heap: u32,
    pub(crate) imported: bool,
    /// Executables that read weights from it.
    pub(crate) bound: u32,
}

/// The book of a backend.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    pub(crate) stats: Stats,
    buffers: HashMap<usize, Live>,
}

impl Ledger {
    pub(crate) fn new(n_devices: usize) -> Self {
        let stats = Stats {
            backends: 1,
            devices: vec![DeviceStats::default(); n_devices],
            violations: Vec::new(),
        };
        Self { stats, buffers: HashMap::new() }
    }

    /// A device's figures. Indices were checked when the device was opened; a stranger's are lost.
    pub(crate) fn device(&mut self, index: u32) -> &mut DeviceStats {
        let index = index as usize;
        if index >= self.stats.devices.len() {
            self.stats.devices.resize_with(index + 1, DeviceStats::default);
        }
        &mut self.stats.devices[index]
    }

    /// Bytes allocated on a device, in one heap or in all.
    pub(crate) fn live_bytes(&self, device: u32, heap: Option<u32>) -> u64 {
        let is_meant =
            |live: &&Live| live.device == device && heap.is_none_or(|heap| heap == live.heap);
        self.buffers.values().filter(is_meant).map(|live| live.counted).sum()
    }

    pub(crate) fn violation(&mut self, what: impl Into<String>) {
        if self.stats.violations.len() < MAX_VIOLATIONS {
            self.stats.violations.push(what.into());
        }
    }

    /// Notes a violation that is also the failure of a call.
    pub(crate) fn refuse(&mut self, what: impl Into<String>) -> Failure {
        let what = what.into();
        self.violation(&what);
        Failure::invalid(what)
    }

    pub(crate) fn add_buffer(
        &mut self,
        handle: *const abi::BufferHandle,
        live: Live,
        usage: BufferUsage,
    ) {
        let (counted, imported) = (live.counted, live.imported);
        let device = self.device(live.device);
        device.buffers += 1;
        device.bytes += counted;
        device.bytes_peak = device.bytes_peak.max(device.bytes);
        if imported {
            device.imports += 1;
        } else {
            device.allocs += 1;
            let name = usage.to_string();
            let usage = device.usage.entry(name).or_default();
            usage.allocs += 1;
            usage.bytes += counted;
            usage.largest = usage.largest.max(counted);
        }
        self.buffers.insert(handle.addr(), live);
    }

    /// Forgets a buffer that is freed; false if it is not alive and must not be freed.
    pub(crate) fn remove_buffer(&mut self, handle: *const abi::BufferHandle) -> bool {
        let Some(live) = self.buffers.remove(&handle.addr()) else {
            self.violation(format!("a buffer was freed that is not alive: {handle:p}"));
            return false;
        };
        if live.bound > 0 {
            self.violation(format!("a buffer was freed under {} executables", live.bound));
        }
        let device = self.device(live.device);
        device.buffers -= 1;
        device.bytes -= live.counted;
        true
    }

    /// A live buffer of a device.
    pub(crate) fn buffer(&mut self, device: u32, handle: *const abi::BufferHandle) -> Result<Live> {
        match self.buffers.get(&handle.addr()) {
            Some(live) if live.device == device => Ok(live.clone()),
            Some(live) => {
                let other = live.device;
                Err(self.refuse(format!("a buffer of device {other} on device {device}")))
            }
            None => Err(self.refuse(format!("a buffer that is not alive: {handle:p}"))),
        }
    }

    /// A range of a live buffer, which `write` says whether to change.
    pub(crate) fn range(&mut self, device: u32, range: &BufferRange, write: bool) -> Result<Live> {
        let live = self.buffer(device, range.buffer)?;
        let end = range.offset.checked_add(range.size);
        if end.is_none_or(|end| end > live.size) {
            let (size, offset) = (range.size, range.offset);
            return Err(
                self.refuse(format!("{size} bytes at {offset} of a buffer of {}", live.size))
            );
        }
        if write && live.imported {
            return Err(self.refuse("a write to imported memory"));
        }
        Ok(live)
    }

    /// Binds or unbinds the buffers of an executable.
    pub(crate) fn bind(&mut self, handles: &[usize], bound: bool) {
        for handle in handles {
            if let Some(live) = self.buffers.get_mut(handle) {
                live.bound = if bound { live.bound + 1 } else { live.bound.saturating_sub(1) };
            }
        }
    }
}
