//! The backend: one device, one heap, one type of buffer, all of them the host's.

use crate::ReferenceDevice;
use tegula_sdk::abi::{
    BufferTypeInfo, DeviceInfo, DeviceKind, DeviceOptions, Figure, FigureSource, HeapInfo,
    HeapKind, HostAccess, POOL_HOST, Text, buffer_type_flag,
};
use tegula_sdk::host_memory::HostLimits;
use tegula_sdk::{Backend, Error, Result};

/// Alignment of tiles: a cache line.
const ALIGNMENT: u64 = 64;
/// The kernel maps whole pages.
const PAGE: u64 = 4096;
/// Chunks of any size work alike here; of this one, what a last chunk leaves unused is little.
const PREFERRED_CHUNK: u64 = 1 << 30;

/// The processor, as `/proc/cpuinfo` describes it.
#[derive(Debug)]
pub struct Reference {
    name: String,
    vendor: String,
}

impl Backend for Reference {
    const ID: &'static str = "reference";
    const DESCRIPTION: &'static str = "the slow oracle on the host's processor";
    type Device = ReferenceDevice;

    fn open() -> Result<Self> {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let name = cpuinfo_field(&cpuinfo, "model name").unwrap_or(std::env::consts::ARCH);
        let vendor = cpuinfo_field(&cpuinfo, "vendor_id").unwrap_or_default();
        Ok(Self { name: format!("{name} (reference)"), vendor: vendor.into() })
    }

    fn n_devices(&self) -> u32 {
        1
    }

    fn device_info(&self, index: u32) -> Result<DeviceInfo> {
        only("device", index)?;
        Ok(DeviceInfo {
            kind: DeviceKind::CPU,
            n_heaps: 1,
            n_buffer_types: 1,
            name: Text::new(&self.name),
            vendor: Text::new(&self.vendor),
            driver: Text::new(concat!("tegula-reference ", env!("CARGO_PKG_VERSION"))),
            ..DeviceInfo::default()
        })
    }

    fn heap_info(&self, index: u32, heap: u32) -> Result<HeapInfo> {
        only("device", index)?;
        only("heap", heap)?;
        let limits = HostLimits::read();
        Ok(HeapInfo {
            kind: HeapKind::HOST,
            pool: POOL_HOST,
            total: limits.total,
            free: limits.free,
            ..HeapInfo::default()
        })
    }

    fn buffer_type_info(&self, index: u32, buffer_type: u32) -> Result<BufferTypeInfo> {
        only("device", index)?;
        only("buffer type", buffer_type)?;
        let max_size = HostLimits::read().max_size;
        let chunk = max_size.get().map_or(PREFERRED_CHUNK, |max| max.min(PREFERRED_CHUNK));
        Ok(BufferTypeInfo {
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
        })
    }

    fn open_device(&self, index: u32, _options: &DeviceOptions) -> Result<ReferenceDevice> {
        only("device", index)?;
        Ok(ReferenceDevice)
    }
}

/// There is one of everything.
pub(crate) fn only(what: &str, index: u32) -> Result<()> {
    match index {
        0 => Ok(()),
        _ => Err(Error::not_found(format!("{what} {index}: there is only {what} 0"))),
    }
}

/// The first `name : value` of `/proc/cpuinfo`. Processors without the field exist.
fn cpuinfo_field<'a>(cpuinfo: &'a str, name: &str) -> Option<&'a str> {
    let fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    let value = fields.into_iter().find(|(key, _)| key.trim() == name)?.1.trim();
    (!value.is_empty()).then_some(value)
}
