//! What a device says of itself.
//!
//! Identity and abilities are read when devices are listed. Sizes are read each time somebody asks, from the device asked about: PoCL's limits
//! follow the machine's free memory, and two devices of a process have two answers.

use crate::cl::{DeviceId, PlatformId};
use ocl_core::ffi;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use tegula_sdk::abi::{
    BufferTypeInfo, DeviceInfo, DeviceKind, Figure, FigureSource, HeapInfo, HeapKind, HostAccess,
    POOL_HOST, Text, buffer_type_flag,
};
use tegula_sdk::host_memory::HostLimits;
use tegula_sdk::{Error, Result};

/// cl_khr_device_uuid.
const CL_DEVICE_UUID_KHR: u32 = 0x106A;
/// cl_khr_pci_bus_info: domain, bus, device, function.
const CL_DEVICE_PCI_BUS_INFO_KHR: u32 = 0x410F;
/// Of OpenCL 2.1.
const CL_DEVICE_MAX_NUM_SUB_GROUPS: u32 = 0x105C;
/// cl_nv_device_attribute_query; slot is `device << 3 | function`.
const CL_DEVICE_PCI_BUS_ID_NV: u32 = 0x4008;
const CL_DEVICE_PCI_SLOT_ID_NV: u32 = 0x4009;
const CL_DEVICE_PCI_DOMAIN_ID_NV: u32 = 0x400A;
/// cl_amd_device_attribute_query: KiB free, then KiB of the greatest free piece.
const CL_DEVICE_GLOBAL_FREE_MEMORY_AMD: u32 = 0x4039;

/// Among devices of one kind below a backend that was written for them (Vulkan), above nothing at all.
const RANK_GPU: u32 = 40;
/// The pool of a device's own memory.
const POOL_DEVICE: u64 = 2;
/// Chunks of this size keep the number of buffers low, of which a kernel takes only a few.
const PREFERRED_CHUNK: u64 = 1 << 30;
/// A cache line, and what vectors of 16 floats want.
pub(crate) const ALIGNMENT: u64 = 64;

/// Index of the buffer type that kernels work on.
pub(crate) const TYPE_DEVICE: u32 = 0;
/// Index of the buffer type of pinned host memory, mapped for its whole life and read by transfers only.
pub(crate) const TYPE_PINNED: u32 = 1;

/// A device that can run what this backend has.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub(crate) id: DeviceId,
    pub(crate) name: String,
    pub(crate) vendor: String,
    /// Platform and driver with their versions.
    pub(crate) driver: String,
    /// Everything that a compiled program depends on.
    pub(crate) build_key: String,
    kind: DeviceKind,
    vendor_id: u32,
    uuid: Option<[u8; 16]>,
    pci: String,
    /// A processor: its memory is the host's, and there is nothing to stage.
    pub(crate) is_cpu: bool,
    /// Kernels for processors, where work-items are loops and local memory is memory. `TEGULA_OPENCL_KERNELS=gpu` takes the others
    /// there too, so that they can be tested without a GPU.
    pub(crate) cpu_kernels: bool,
    /// Its memory is the host's.
    is_unified: bool,
    pub(crate) has_fp16: bool,
    pub(crate) has_subgroups: bool,
    pub(crate) work_group_max: usize,
    pub(crate) local_bytes: u64,
    pub(crate) compute_units: u32,
    has_free_amd: bool,
}

/// The largest version `OpenCL <major>.<minor> ...` in a version string.
fn version(text: &str) -> Option<(u32, u32)> {
    let digits = text.split_whitespace().find(|word| word.contains('.'))?;
    let (major, minor) = digits.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

impl Facts {
    /// Reads a device, or says why it cannot be used.
    pub(crate) fn read(platform: PlatformId, id: DeviceId) -> Result<Self> {
        let name = id.text(ffi::CL_DEVICE_NAME)?;
        let unusable = |why: &str| Err(Error::unsupported(format!("device `{name}`: {why}")));
        let types = id.number(ffi::CL_DEVICE_TYPE)?;
        let flag = |property| id.number(property).map(|value| value != 0);
        if !flag(ffi::CL_DEVICE_AVAILABLE)? {
            return unusable("is not available");
        }
        if !flag(ffi::CL_DEVICE_COMPILER_AVAILABLE)? {
            return unusable("has no compiler");
        }
        if !flag(ffi::CL_DEVICE_ENDIAN_LITTLE)? {
            return unusable("is big-endian, which GGUF is not");
        }
        let device_version = id.text(ffi::CL_DEVICE_VERSION)?;
        let c_version = id.text(ffi::CL_DEVICE_OPENCL_C_VERSION)?;
        if version(&device_version).is_none_or(|version| version < (1, 2)) {
            return unusable(&format!("speaks {device_version}, 1.2 is the least"));
        }
        let extensions = id.text(ffi::CL_DEVICE_EXTENSIONS)?;
        let has = |extension: &str| extensions.split_whitespace().any(|e| e == extension);
        let is_cpu = types & ffi::CL_DEVICE_TYPE_CPU != 0;
        let is_unified = is_cpu || flag(ffi::CL_DEVICE_HOST_UNIFIED_MEMORY).unwrap_or(false);
        let kind = if is_cpu {
            DeviceKind::CPU
        } else if types & ffi::CL_DEVICE_TYPE_GPU == 0 {
            DeviceKind::ACCELERATOR
        } else if is_unified {
            DeviceKind::INTEGRATED
        } else {
            DeviceKind::DISCRETE
        };
        let platform_text = |property| platform.text(property).unwrap_or_default();
        let driver_version = id.text(ffi::CL_DRIVER_VERSION)?;
        let platform_name = platform_text(ffi::CL_PLATFORM_NAME);
        let platform_version = platform_text(ffi::CL_PLATFORM_VERSION);
        let driver = format!("{platform_name} {driver_version} ({device_version})");
        let build_key = format!(
            "{platform_name}\n{platform_version}\n{name}\n{device_version}\n{c_version}\n{driver_version}\n{extensions}"
        );
        let small = |property| id.number(property).map(|v| u32::try_from(v).unwrap_or(u32::MAX));
        Ok(Self {
            vendor: id.text(ffi::CL_DEVICE_VENDOR)?,
            vendor_id: small(ffi::CL_DEVICE_VENDOR_ID)?,
            uuid: if has("cl_khr_device_uuid") { uuid(id) } else { None },
            pci: pci(id, &has).unwrap_or_default(),
            has_fp16: has("cl_khr_fp16"),
            // Part of OpenCL 3 where this number is not 0; before, an extension that needs OpenCL C 2.
            has_subgroups: version(&device_version).is_some_and(|version| version >= (3, 0))
                && id.number(CL_DEVICE_MAX_NUM_SUB_GROUPS).is_ok_and(|n| n > 0),
            work_group_max: id
                .number(ffi::CL_DEVICE_MAX_WORK_GROUP_SIZE)
                .map(|n| usize::try_from(n).unwrap_or(1))?,
            local_bytes: id.number(ffi::CL_DEVICE_LOCAL_MEM_SIZE)?,
            compute_units: small(ffi::CL_DEVICE_MAX_COMPUTE_UNITS)?.max(1),
            has_free_amd: has("cl_amd_device_attribute_query"),
            id,
            name,
            driver,
            build_key,
            kind,
            is_cpu,
            cpu_kernels: is_cpu
                && std::env::var_os("TEGULA_OPENCL_KERNELS").is_none_or(|v| v != "gpu"),
            is_unified,
        })
    }

    pub(crate) fn device_info(&self) -> DeviceInfo {
        DeviceInfo {
            kind: self.kind,
            has_uuid: self.uuid.is_some().into(),
            uuid: self.uuid.unwrap_or_default(),
            pci: Text::new(&self.pci),
            vendor_id: self.vendor_id,
            n_heaps: if self.is_unified { 1 } else { 2 },
            n_buffer_types: 2,
            type_for_weights: TYPE_DEVICE,
            type_for_kv: TYPE_DEVICE,
            type_for_scratch: TYPE_DEVICE,
            type_for_staging: TYPE_PINNED,
            // The host's processor has a backend of its own; through a driver it is for those who name it.
            rank: if self.is_cpu { 0 } else { RANK_GPU },
            name: Text::new(&self.name),
            vendor: Text::new(&self.vendor),
            driver: Text::new(&self.driver),
            ..DeviceInfo::default()
        }
    }

    /// Bytes of the device's memory in all, as the driver says now.
    fn total(&self) -> Result<u64> {
        self.id.number(ffi::CL_DEVICE_GLOBAL_MEM_SIZE)
    }

    /// The greatest buffer: what one allocation may be, what there is, and what the device can address.
    pub(crate) fn max_size(&self) -> Result<u64> {
        let most = self.id.number(ffi::CL_DEVICE_MAX_MEM_ALLOC_SIZE)?.min(self.total()?);
        let bits = self.id.number(ffi::CL_DEVICE_ADDRESS_BITS)?;
        Ok(if bits < 64 { most.min((1 << bits) - 1) } else { most })
    }

    fn heap_of(&self, buffer_type: u32) -> u32 {
        if self.is_unified { 0 } else { buffer_type }
    }

    pub(crate) fn heap_info(&self, heap: u32) -> Result<HeapInfo> {
        let known = |value, source| Figure::known(value, source);
        match heap {
            0 => {
                let total = self.total()?;
                let free = self.free(total);
                let (kind, pool) = if self.is_unified {
                    (HeapKind::HOST, POOL_HOST)
                } else {
                    (HeapKind::DEVICE_LOCAL, POOL_DEVICE)
                };
                let total = known(total, FigureSource::DRIVER);
                Ok(HeapInfo { kind, pool, total, free, ..HeapInfo::default() })
            }
            1 if !self.is_unified => {
                let limits = HostLimits::read();
                let (kind, pool) = (HeapKind::HOST, POOL_HOST);
                let (total, free) = (limits.total, limits.free);
                Ok(HeapInfo { kind, pool, total, free, ..HeapInfo::default() })
            }
            _ => Err(Error::not_found(format!("heap {heap} of `{}`", self.name))),
        }
    }

    /// OpenCL has no query for free memory. What is left of the total after what this process holds is derived; memory shared with the host is
    /// free as the host says, which counts what was granted and has no page yet; AMD's driver can be asked.
    fn free(&self, total: u64) -> Figure {
        let held = held(self.id, 0);
        let left = total.saturating_sub(held);
        if self.is_unified {
            return match HostLimits::read().free.get() {
                Some(free) => Figure::known(free.min(left), FigureSource::DERIVED),
                None => Figure::UNKNOWN,
            };
        }
        if self.has_free_amd
            && let Ok(bytes) = self.id.bytes(CL_DEVICE_GLOBAL_FREE_MEMORY_AMD)
            && let Some(kib) = bytes.first_chunk::<8>()
        {
            let free = u64::from_ne_bytes(*kib).saturating_mul(1024).min(total);
            return Figure::known(free, FigureSource::DRIVER);
        }
        Figure::known(left, FigureSource::DERIVED)
    }

    pub(crate) fn buffer_type_info(&self, buffer_type: u32) -> Result<BufferTypeInfo> {
        let max_size = self.max_size()?;
        let (host_access, flags, name) = match buffer_type {
            TYPE_DEVICE => (HostAccess::NONE, 0, "device"),
            TYPE_PINNED => (HostAccess::MAPPED, buffer_type_flag::PINNED, "pinned"),
            _ => {
                let name = &self.name;
                return Err(Error::not_found(format!("buffer type {buffer_type} of `{name}`")));
            }
        };
        Ok(BufferTypeInfo {
            heap: self.heap_of(buffer_type),
            host_access,
            flags,
            max_size: Figure::known(max_size, FigureSource::DRIVER),
            alignment: ALIGNMENT,
            granularity: 1,
            preferred_chunk: Figure::known(max_size.min(PREFERRED_CHUNK), FigureSource::DERIVED),
            read_bandwidth: Figure::UNKNOWN,
            import_alignment: 1,
            name: Text::new(name),
            ..BufferTypeInfo::default()
        })
    }

    /// Bytes free for a buffer type now, if anybody knows.
    pub(crate) fn free_now(&self, buffer_type: u32) -> Option<u64> {
        self.heap_info(self.heap_of(buffer_type)).ok()?.free.get()
    }

    /// Notes bytes of a buffer that was allocated.
    pub(crate) fn hold(&self, buffer_type: u32, size: u64) {
        let mut table = table();
        let entry = table.entry((self.id.key(), self.heap_of(buffer_type))).or_default();
        *entry = entry.saturating_add(size);
    }

    /// Notes bytes of a buffer that was freed.
    pub(crate) fn release(&self, buffer_type: u32, size: u64) {
        let mut table = table();
        let entry = table.entry((self.id.key(), self.heap_of(buffer_type))).or_default();
        *entry = entry.saturating_sub(size);
    }
}

/// Bytes that this process holds, by device and heap: the accounts of all runtimes in the process, which share the devices.
static HELD: LazyLock<Mutex<Table>> = LazyLock::new(Mutex::default);

type Table = HashMap<(usize, u32), u64>;

fn table() -> MutexGuard<'static, Table> {
    // Numbers cannot be half written: a panic elsewhere does not spoil them.
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

fn held(id: DeviceId, heap: u32) -> u64 {
    table().get(&(id.key(), heap)).copied().unwrap_or(0)
}

fn uuid(id: DeviceId) -> Option<[u8; 16]> {
    let bytes = id.bytes(CL_DEVICE_UUID_KHR).ok()?;
    let uuid = *bytes.first_chunk::<16>()?;
    // A driver that has the extension and no answer must not make all its devices one.
    uuid.iter().any(|byte| *byte != 0).then_some(uuid)
}

fn pci(id: DeviceId, has: &dyn Fn(&str) -> bool) -> Option<String> {
    let address = |domain: u32, bus: u32, device: u32, function: u32| {
        format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    };
    if has("cl_khr_pci_bus_info")
        && let Ok(bytes) = id.bytes(CL_DEVICE_PCI_BUS_INFO_KHR)
        && let ([domain, bus, device, function, ..], _) = bytes.as_chunks::<4>()
    {
        let [domain, bus, device, function] =
            [domain, bus, device, function].map(|n| u32::from_ne_bytes(*n));
        return Some(address(domain, bus, device, function));
    }
    if has("cl_nv_device_attribute_query") {
        let number = |property| u32::try_from(id.number(property).ok()?).ok();
        let slot = number(CL_DEVICE_PCI_SLOT_ID_NV)?;
        let domain = number(CL_DEVICE_PCI_DOMAIN_ID_NV).unwrap_or(0);
        return Some(address(domain, number(CL_DEVICE_PCI_BUS_ID_NV)?, slot >> 3, slot & 7));
    }
    None
}
