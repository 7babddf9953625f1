//! What a GPU says of itself through OpenVINO's properties.

use crate::device::{HOST, SHARED};
use crate::ov::Core;
use tegula_sdk::abi::{
    BufferTypeInfo, DeviceInfo, DeviceKind, Figure, FigureSource, HeapInfo, HeapKind, HostAccess,
    POOL_HOST, Text,
};
use tegula_sdk::host_memory::{HostLimits, device as host};
use tegula_sdk::{Error, Result};

/// The greatest buffer of a GPU that does not say: every OpenCL device must give this much in one piece.
const FLOOR: u64 = 128 << 20;
/// Below backends that drive the same GPU without a compiler in between.
const RANK: u32 = 40;
const INTEL: u32 = 0x8086;
/// Alignment of tiles: a cache line.
const ALIGNMENT: u64 = 64;
const PAGE: u64 = 4096;
/// Chunks of this size waste little and leave the device room to place them.
const PREFERRED_CHUNK: u64 = 256 << 20;

/// A GPU by OpenVINO's name for it.
pub(crate) struct Gpu<'a> {
    pub(crate) core: &'a Core,
    pub(crate) name: &'a str,
}

impl Gpu<'_> {
    fn number(&self, key: &str) -> Option<u64> {
        self.core.property(self.name, key).ok()?.trim().parse().ok().filter(|n| *n > 0)
    }

    fn text(&self, key: &str) -> String {
        self.core.property(self.name, key).unwrap_or_default()
    }

    fn is_integrated(&self) -> bool {
        self.text("DEVICE_TYPE").eq_ignore_ascii_case("integrated")
    }

    /// Identity: by UUID and PCI address, because OpenVINO's own numbers change with what is plugged in.
    pub(crate) fn info(&self) -> DeviceInfo {
        let uuid = uuid(&self.text("DEVICE_UUID"));
        let kind = if self.is_integrated() { DeviceKind::INTEGRATED } else { DeviceKind::DISCRETE };
        DeviceInfo {
            kind,
            has_uuid: u32::from(uuid.is_some()),
            uuid: uuid.unwrap_or_default(),
            pci: Text::new(&pci(&self.text("DEVICE_PCI_INFO")).unwrap_or_default()),
            vendor_id: INTEL,
            n_heaps: if self.is_integrated() { 1 } else { 2 },
            n_buffer_types: 2,
            type_for_weights: HOST,
            type_for_kv: SHARED,
            type_for_scratch: SHARED,
            type_for_staging: SHARED,
            rank: RANK,
            name: Text::new(&self.text("FULL_DEVICE_NAME")),
            vendor: Text::new("Intel"),
            driver: Text::new(&format!("OpenVINO {}", Core::version())),
            ..DeviceInfo::default()
        }
    }

    /// The greatest buffer, never "no limit".
    pub(crate) fn max_size(&self) -> Figure {
        let device = match self.number("GPU_DEVICE_MAX_ALLOC_MEM_SIZE") {
            Some(max) => (max, FigureSource::DRIVER),
            None => (FLOOR, FigureSource::DERIVED),
        };
        // Shared memory is the host's too.
        let host = HostLimits::read().max_size.get().map(|max| (max, FigureSource::DERIVED));
        let (max, source) =
            host.map_or(device, |host| if host.0 < device.0 { host } else { device });
        Figure::known(max, source)
    }

    /// Heap 0 is the host's memory, where buffers lie; heap 1 a discrete GPU's own, where compiled models lie.
    pub(crate) fn heap(&self, index: u32) -> Result<HeapInfo> {
        let total = self.number("GPU_DEVICE_TOTAL_MEM_SIZE");
        match index {
            0 => {
                let mut heap = host::heap_info();
                heap.pool = POOL_HOST;
                if let Some(total) = total.filter(|_| self.is_integrated()) {
                    let (all, free) = (heap.total.get(), heap.free.get());
                    if all.is_none_or(|all| total < all) {
                        heap.total = Figure::known(total, FigureSource::DRIVER);
                        let used = used(&self.text("GPU_MEMORY_STATISTICS"));
                        let left = total.saturating_sub(used);
                        if free.is_none_or(|free| left < free) {
                            heap.free = Figure::known(left, FigureSource::DERIVED);
                        }
                    }
                }
                Ok(heap)
            }
            1 if !self.is_integrated() => {
                let used = used(&self.text("GPU_MEMORY_STATISTICS"));
                let known = |n| Figure::known(n, FigureSource::DRIVER);
                Ok(HeapInfo {
                    kind: HeapKind::DEVICE_LOCAL,
                    pool: 2,
                    total: total.map_or(Figure::UNKNOWN, known),
                    free: total.map_or(Figure::UNKNOWN, |total| {
                        Figure::known(total.saturating_sub(used), FigureSource::DERIVED)
                    }),
                    ..HeapInfo::default()
                })
            }
            _ => Err(Error::not_found(format!("heap {index}"))),
        }
    }

    pub(crate) fn buffer_type(&self, index: u32) -> Result<BufferTypeInfo> {
        match index {
            SHARED => {
                let max_size = self.max_size();
                let chunk = max_size.get().map_or(FLOOR, |max| max.min(PREFERRED_CHUNK));
                Ok(BufferTypeInfo {
                    heap: 0,
                    host_access: HostAccess::MAPPED,
                    max_size,
                    alignment: ALIGNMENT,
                    granularity: PAGE,
                    preferred_chunk: Figure::known(chunk, FigureSource::DERIVED),
                    read_bandwidth: Figure::UNKNOWN,
                    import_alignment: 1,
                    name: Text::new("usm_host"),
                    ..BufferTypeInfo::default()
                })
            }
            HOST => Ok(host::buffer_type_info()),
            _ => Err(Error::not_found(format!("buffer type {index} of 2"))),
        }
    }
}

/// 32 hexadecimal digits, with or without separators.
fn uuid(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|d| d as u8).collect();
    let mut out = [0; 16];
    for (out, pair) in out.iter_mut().zip(digits.chunks_exact(2)) {
        *out = pair[0] << 4 | pair[1];
    }
    (digits.len() == 32 && out != [0; 16]).then_some(out)
}

/// `{domain: 0 bus: 0 device: 0x2 function: 0}` as `0000:00:02.0`.
fn pci(text: &str) -> Option<String> {
    let field = |name: &str| {
        let rest = text.split(name).nth(1)?.trim_start_matches([':', ' ']);
        let word: String = rest.chars().take_while(char::is_ascii_alphanumeric).collect();
        match word.strip_prefix("0x") {
            Some(digits) => u32::from_str_radix(digits, 16).ok(),
            None => word.parse().ok(),
        }
    };
    let (domain, bus) = (field("domain")?, field("bus")?);
    let (device, function) = (field("device")?, field("function")?);
    // A driver that does not know says all zeros, which is the host bridge's address.
    let known = (domain, bus, device, function) != (0, 0, 0, 0);
    known.then(|| format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
}

/// The sum of what OpenVINO has allocated, from `{cl_mem:0,usm_device:1234,...}`.
fn used(text: &str) -> u64 {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter_map(|word| word.parse::<u64>().ok()).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A wrong identity lets `auto` run one GPU twice, or the operator exclude another than the one named.
    #[test]
    fn identities_are_read_from_texts() {
        assert_eq!(
            pci("{domain: 0 bus: 0 device: 0x2 function: 0}").as_deref(),
            Some("0000:00:02.0")
        );
        assert_eq!(pci("{domain: 0 bus: 0 device: 0x0 function: 0}"), None);
        assert_eq!(pci(""), None);
        let id = uuid("86800000010000000000000000000001").unwrap();
        assert_eq!((id[0], id[4], id[15]), (0x86, 0x01, 0x01));
        assert_eq!(uuid("8680"), None);
        assert_eq!(uuid(&"0".repeat(32)), None);
        assert_eq!(used("{cl_mem:16,usm_host:4096}"), 4112);
    }
}
