//! The backend: which devices there are, and what each states.

use crate::device::{VulkanDevice, buffer_types};
use crate::error::failed;
use crate::instance::Instance;
use crate::physical::{GRANULARITY, Physical};
use std::sync::Arc;
use tegula_sdk::abi::{
    BufferTypeInfo, DeviceInfo, DeviceKind, DeviceOptions, Figure, FigureSource, HeapInfo,
    HeapKind, HostAccess, POOL_HOST, Text, buffer_type_flag,
};
use tegula_sdk::{Backend, Error, Result};

/// Graphics cards are taken before what runs on the processor; a processor behind a Vulkan driver only when it is named.
const RANK_GPU: u32 = 50;
const RANK_NAMED_ONLY: u32 = 0;
/// Alignment of tiles: above what any device asks of a storage buffer, and enough for every load.
const ALIGNMENT: u64 = 256;
/// Greater chunks are no faster, and a last one that is half empty costs little.
const PREFERRED_CHUNK: u64 = 1 << 30;

/// The devices of the system's Vulkan drivers.
pub struct Vulkan {
    instance: Option<Arc<Instance>>,
    devices: Vec<Arc<Physical>>,
}

impl Vulkan {
    fn device(&self, index: u32) -> Result<&Arc<Physical>> {
        self.devices.get(index as usize).ok_or_else(|| {
            Error::not_found(format!("Vulkan device {index}: there are {}", self.devices.len()))
        })
    }

    /// Messages of the validation layer so far; it is on when `TEGULA_VULKAN_VALIDATION` is 1.
    pub fn validation_messages(&self) -> u64 {
        self.instance.as_ref().map_or(0, |instance| instance.messages())
    }
}

#[expect(unsafe_code, reason = "lists devices")]
fn list(instance: &Arc<Instance>) -> Result<Vec<Arc<Physical>>> {
    // SAFETY: a plain query of a live instance.
    let found = unsafe { instance.raw.enumerate_physical_devices() };
    let found = match found {
        Ok(found) => found,
        Err(ash::vk::Result::ERROR_INITIALIZATION_FAILED) => Vec::new(),
        Err(code) => return Err(failed("vkEnumeratePhysicalDevices", code)),
    };
    if found.is_empty() {
        log::info!("no Vulkan devices: no driver found one");
    }
    let mut devices = Vec::new();
    for raw in found {
        match Physical::read(instance, raw)? {
            Ok(device) => devices.push(Arc::new(device)),
            Err(why) => log::warn!("not usable: {why}"),
        }
    }
    Ok(devices)
}

impl Backend for Vulkan {
    const ID: &'static str = "vulkan";
    const DESCRIPTION: &'static str = "compute shaders on Vulkan 1.2 devices";
    type Device = VulkanDevice;

    fn open() -> Result<Self> {
        let instance = Instance::open()?;
        let devices = match &instance {
            Some(instance) => list(instance)?,
            None => Vec::new(),
        };
        Ok(Self { instance, devices })
    }

    fn n_devices(&self) -> u32 {
        u32::try_from(self.devices.len()).unwrap_or(u32::MAX)
    }

    fn device_info(&self, index: u32) -> Result<DeviceInfo> {
        let device = self.device(index)?;
        let is_unified = device.is_unified();
        let pci = device.pci.map(|[domain, bus, slot, function]| {
            format!("{domain:04x}:{bus:02x}:{slot:02x}.{function:x}")
        });
        let is_gpu = matches!(device.kind, DeviceKind::DISCRETE | DeviceKind::INTEGRATED);
        Ok(DeviceInfo {
            kind: device.kind,
            has_uuid: 1,
            uuid: device.uuid,
            pci: Text::new(pci.as_deref().unwrap_or("")),
            vendor_id: device.vendor_id,
            n_heaps: if is_unified { 1 } else { 2 },
            n_buffer_types: if is_unified { 1 } else { 2 },
            type_for_weights: 0,
            type_for_kv: 0,
            type_for_scratch: 0,
            type_for_staging: u32::from(!is_unified),
            rank: if is_gpu { RANK_GPU } else { RANK_NAMED_ONLY },
            name: Text::new(&device.name),
            vendor: Text::new(vendor(device.vendor_id)),
            driver: Text::new(&device.driver),
            ..DeviceInfo::default()
        })
    }

    fn heap_info(&self, index: u32, heap: u32) -> Result<HeapInfo> {
        let device = self.device(index)?;
        let types = buffer_types(device);
        let (kind, _) =
            types.get(heap as usize).ok_or_else(|| Error::not_found(format!("heap {heap}")))?;
        let is_host = device.is_host_heap(kind.heap);
        // A pool for each heap of its own memory, above all that heaps of the host could be called.
        let pool = if is_host { POOL_HOST } else { POOL_HOST + 1 + u64::from(kind.heap) };
        Ok(HeapInfo {
            kind: if is_host { HeapKind::HOST } else { HeapKind::DEVICE_LOCAL },
            pool,
            total: Figure::known(device.heap_size(kind.heap), FigureSource::DRIVER),
            free: device.free(kind.heap),
            ..HeapInfo::default()
        })
    }

    fn buffer_type_info(&self, index: u32, buffer_type: u32) -> Result<BufferTypeInfo> {
        let device = self.device(index)?;
        let types = buffer_types(device);
        let Some((kind, name)) = types.get(buffer_type as usize) else {
            return Err(Error::not_found(format!("buffer type {buffer_type}")));
        };
        let max_size = device.max_size(*kind);
        let is_pinned = device.is_host_heap(kind.heap);
        Ok(BufferTypeInfo {
            // Heaps are listed as the types are.
            heap: buffer_type,
            host_access: if kind.is_mapped && (is_pinned || device.is_unified()) {
                HostAccess::MAPPED
            } else {
                HostAccess::NONE
            },
            flags: if is_pinned { buffer_type_flag::PINNED } else { 0 },
            max_size: Figure::known(max_size, FigureSource::DRIVER),
            alignment: ALIGNMENT,
            granularity: GRANULARITY,
            preferred_chunk: Figure::known(max_size.min(PREFERRED_CHUNK), FigureSource::DERIVED),
            read_bandwidth: Figure::UNKNOWN,
            import_alignment: 1,
            name: Text::new(name),
            ..BufferTypeInfo::default()
        })
    }

    fn open_device(&self, index: u32, _options: &DeviceOptions) -> Result<VulkanDevice> {
        VulkanDevice::open(self.device(index)?)
    }
}

fn vendor(id: u32) -> &'static str {
    match id {
        0x10de => "NVIDIA",
        0x1002 | 0x1022 => "AMD",
        0x8086 => "Intel",
        0x13b5 => "Arm",
        0x5143 => "Qualcomm",
        0x106b => "Apple",
        0x10005 => "Mesa",
        _ => "",
    }
}
