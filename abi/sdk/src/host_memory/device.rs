//! The host as a device: identity, heap and buffer type, alike for every backend that computes on the host's processor.

use super::HostLimits;
use crate::abi::{
    BufferTypeInfo, DeviceInfo, DeviceKind, Figure, FigureSource, HeapInfo, HeapKind, HostAccess,
    POOL_HOST, Text, buffer_type_flag,
};
use crate::{Error, Result};

/// Alignment of tiles: a cache line.
pub const ALIGNMENT: u64 = 64;
/// The kernel maps whole pages.
const PAGE: u64 = 4096;
/// Chunks of any size work alike on the host; of this one, what a last chunk leaves unused is little.
const PREFERRED_CHUNK: u64 = 1 << 30;

/// The processor as the system describes it.
#[derive(Debug, Clone, Default)]
pub struct Processor {
    /// Its name, or the architecture where the system tells none.
    pub name: String,
    /// Its vendor; may be empty.
    pub vendor: String,
}

impl Processor {
    /// Reads `/proc/cpuinfo`.
    pub fn read() -> Self {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let name = field(&cpuinfo, "model name").unwrap_or(std::env::consts::ARCH);
        Self { name: name.into(), vendor: field(&cpuinfo, "vendor_id").unwrap_or_default().into() }
    }

    /// Its identity as device 0 of a backend, with one heap and one buffer type.
    pub fn device_info(&self, driver: &str, rank: u32) -> DeviceInfo {
        DeviceInfo {
            kind: DeviceKind::CPU,
            n_heaps: 1,
            n_buffer_types: 1,
            rank,
            name: Text::new(&self.name),
            vendor: Text::new(&self.vendor),
            driver: Text::new(driver),
            ..DeviceInfo::default()
        }
    }
}

/// The host's memory as heap 0.
pub fn heap_info() -> HeapInfo {
    let limits = HostLimits::read();
    HeapInfo {
        kind: HeapKind::HOST,
        pool: POOL_HOST,
        total: limits.total,
        free: limits.free,
        ..HeapInfo::default()
    }
}

/// The host's memory as buffer type 0: mapped, and able to import host memory at any address.
pub fn buffer_type_info() -> BufferTypeInfo {
    let max_size = HostLimits::read().max_size;
    let chunk = max_size.get().map_or(PREFERRED_CHUNK, |max| max.min(PREFERRED_CHUNK));
    BufferTypeInfo {
        heap: 0,
        host_access: HostAccess::MAPPED,
        flags: buffer_type_flag::IMPORT,
        max_size,
        alignment: ALIGNMENT,
        granularity: PAGE,
        preferred_chunk: Figure::known(chunk, FigureSource::DERIVED),
        read_bandwidth: Figure::UNKNOWN,
        import_alignment: 1,
        name: Text::new("host"),
        ..BufferTypeInfo::default()
    }
}

/// There is one of everything.
pub fn only(what: &str, index: u32) -> Result<()> {
    match index {
        0 => Ok(()),
        _ => Err(Error::not_found(format!("{what} {index}: there is only {what} 0"))),
    }
}

/// The first `name : value` of `/proc/cpuinfo`. Processors without the field exist.
fn field<'a>(cpuinfo: &'a str, name: &str) -> Option<&'a str> {
    let fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    let value = fields.into_iter().find(|(key, _)| key.trim() == name)?.1.trim();
    (!value.is_empty()).then_some(value)
}
