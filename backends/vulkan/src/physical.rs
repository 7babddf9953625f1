//! What a device is and can, read from its driver once; and what is free, read whenever it is asked for.
//!
//! `max_size` is the least of what an allocation, a buffer and a heap may be. The range of a storage buffer does not bind: shaders
//! read through addresses of 64 bits, which were seen to be right to the last byte where bound ranges were not.

#![expect(unsafe_code, reason = "Vulkan is a C interface")]

use crate::instance::Instance;
use ash::{ext, khr, vk};
use std::ffi::CStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tegula_sdk::Result;
use tegula_sdk::abi::{DeviceKind, Figure, FigureSource};
use tegula_sdk::host_memory::HostLimits;

/// Chunks are rounded to what every driver aligns memory to.
pub(crate) const GRANULARITY: u64 = 64 << 10;

/// A memory type in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryType {
    /// Its index at the driver.
    pub(crate) index: u32,
    pub(crate) heap: u32,
    pub(crate) is_mapped: bool,
}

/// A usable device and its facts.
pub(crate) struct Physical {
    pub(crate) instance: Arc<Instance>,
    pub(crate) raw: vk::PhysicalDevice,
    pub(crate) name: String,
    pub(crate) driver: String,
    pub(crate) vendor_id: u32,
    pub(crate) device_id: u32,
    pub(crate) driver_version: u32,
    pub(crate) kind: DeviceKind,
    pub(crate) uuid: [u8; 16],
    pub(crate) cache_uuid: [u8; 16],
    pub(crate) pci: Option<[u32; 4]>,
    pub(crate) heaps: Vec<vk::MemoryHeap>,
    /// Bytes of each heap that this backend's buffers take.
    pub(crate) taken: Vec<AtomicU64>,
    pub(crate) has_budget: bool,
    /// The least of allocation and buffer.
    pub(crate) allocation_max: u64,
    /// For weights, KV and scratch.
    pub(crate) local: MemoryType,
    /// For transfers, cached by the host's processor; the same as `local` on unified memory.
    pub(crate) host: MemoryType,
    /// Device memory that the host writes directly; absent on cards without a large window.
    pub(crate) window: Option<MemoryType>,
    pub(crate) family: u32,
    pub(crate) subgroup_min: u32,
    pub(crate) subgroup: u32,
    pub(crate) timestamp_period: f32,
    /// 16x16x16 of f16 into f32, by one subgroup.
    pub(crate) has_matrices: bool,
}

/// Why a device cannot be used.
pub(crate) type Refusal = String;

impl Physical {
    /// Reads a device; the inner error says what it lacks.
    pub(crate) fn read(
        instance: &Arc<Instance>,
        raw: vk::PhysicalDevice,
    ) -> Result<Result<Self, Refusal>> {
        let extensions = instance.extensions(raw)?;
        let has = |name: &CStr| {
            extensions.iter().any(|extension| extension.extension_name_as_c_str() == Ok(name))
        };
        let mut id = vk::PhysicalDeviceVulkan11Properties::default();
        let mut driver = vk::PhysicalDeviceVulkan12Properties::default();
        let mut pci = vk::PhysicalDevicePCIBusInfoPropertiesEXT::default();
        let mut sizes = vk::PhysicalDeviceSubgroupSizeControlProperties::default();
        let mut buffers = vk::PhysicalDeviceMaintenance4Properties::default();
        let mut properties =
            vk::PhysicalDeviceProperties2::default().push_next(&mut id).push_next(&mut driver);
        let has_pci = has(ext::pci_bus_info::NAME);
        let has_sizes = has(ext::subgroup_size_control::NAME);
        let has_limit = has(khr::maintenance4::NAME);
        if has_pci {
            properties = properties.push_next(&mut pci);
        }
        if has_sizes {
            properties = properties.push_next(&mut sizes);
        }
        if has_limit {
            properties = properties.push_next(&mut buffers);
        }
        // SAFETY: the device is of this instance; the chain lives for the call.
        unsafe { instance.raw.get_physical_device_properties2(raw, &mut properties) };
        let properties = properties.properties;
        let name = text(properties.device_name_as_c_str().ok());
        if properties.api_version < vk::API_VERSION_1_2 {
            return Ok(Err(format!("{name}: its driver is older than Vulkan 1.2")));
        }
        if let Some(missing) = missing_features(instance, raw, &id) {
            return Ok(Err(format!("{name}: its driver lacks {missing}")));
        }
        // SAFETY: as above.
        let memory = unsafe { instance.raw.get_physical_device_memory_properties(raw) };
        let kind = match properties.device_type {
            vk::PhysicalDeviceType::DISCRETE_GPU => DeviceKind::DISCRETE,
            vk::PhysicalDeviceType::INTEGRATED_GPU => DeviceKind::INTEGRATED,
            vk::PhysicalDeviceType::CPU => DeviceKind::CPU,
            _ => DeviceKind::OTHER,
        };
        let Some((local, host, window)) = memory_types(&memory, kind) else {
            return Ok(Err(format!("{name}: no memory that host and device both reach")));
        };
        // SAFETY: as above.
        let families = unsafe { instance.raw.get_physical_device_queue_family_properties(raw) };
        let Some(family) = queue_family(&families) else {
            return Ok(Err(format!("{name}: no queue that computes")));
        };
        let heaps = memory.memory_heaps_as_slice().to_vec();
        let buffer_max = if has_limit { buffers.max_buffer_size } else { u64::MAX };
        let subgroup_min = match sizes.min_subgroup_size {
            0 => id.subgroup_size,
            n => n.min(id.subgroup_size),
        };
        let driver_name = text(driver.driver_name_as_c_str().ok());
        let driver_info = text(driver.driver_info_as_c_str().ok());
        Ok(Ok(Self {
            name,
            driver: format!("{driver_name} {driver_info}"),
            vendor_id: properties.vendor_id,
            device_id: properties.device_id,
            driver_version: properties.driver_version,
            kind,
            uuid: id.device_uuid,
            cache_uuid: properties.pipeline_cache_uuid,
            pci: has_pci.then_some([pci.pci_domain, pci.pci_bus, pci.pci_device, pci.pci_function]),
            taken: heaps.iter().map(|_| AtomicU64::new(0)).collect(),
            heaps,
            has_budget: has(ext::memory_budget::NAME),
            allocation_max: id.max_memory_allocation_size.min(buffer_max),
            local,
            host,
            window,
            family,
            subgroup_min,
            subgroup: id.subgroup_size,
            timestamp_period: properties.limits.timestamp_period,
            has_matrices: has(khr::cooperative_matrix::NAME)
                && crate::matrices::are_usable(
                    instance,
                    raw,
                    id.subgroup_size,
                    properties.limits.max_compute_shared_memory_size,
                ),
            instance: Arc::clone(instance),
            raw,
        }))
    }

    /// Whether the host's memory is the device's too.
    pub(crate) fn is_unified(&self) -> bool {
        self.local == self.host
    }

    /// Whether a heap is carved from the host's memory.
    pub(crate) fn is_host_heap(&self, heap: u32) -> bool {
        let is_local = self
            .heaps
            .get(heap as usize)
            .is_some_and(|heap| heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL));
        !is_local || matches!(self.kind, DeviceKind::CPU | DeviceKind::INTEGRATED)
    }

    /// Bytes of a heap, as the driver says.
    pub(crate) fn heap_size(&self, heap: u32) -> u64 {
        self.heaps.get(heap as usize).map_or(0, |heap| heap.size)
    }

    /// The greatest buffer of a memory type.
    pub(crate) fn max_size(&self, kind: MemoryType) -> u64 {
        self.allocation_max.min(self.heap_size(kind.heap)) / GRANULARITY * GRANULARITY
    }

    /// Bytes of a heap that are taken by this backend.
    pub(crate) fn taken(&self, heap: u32) -> u64 {
        self.taken.get(heap as usize).map_or(0, |taken| taken.load(Ordering::Relaxed))
    }

    /// What is free in a heap now. The driver's budget where it states one; else, of memory that is the host's, what the host has
    /// free within the heap's size; else nobody knows.
    pub(crate) fn free(&self, heap: u32) -> Figure {
        let size = self.heap_size(heap);
        let own = size.saturating_sub(self.taken(heap));
        let host = || HostLimits::read().free.get().unwrap_or(u64::MAX);
        if self.has_budget {
            let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
            let mut memory = vk::PhysicalDeviceMemoryProperties2::default().push_next(&mut budget);
            // SAFETY: the device is of this instance, and has the extension.
            unsafe {
                self.instance.raw.get_physical_device_memory_properties2(self.raw, &mut memory);
            }
            let at = (heap as usize).min(vk::MAX_MEMORY_HEAPS - 1);
            let free = budget.heap_budget[at].saturating_sub(budget.heap_usage[at]).min(size);
            if self.is_host_heap(heap) {
                return Figure::known(free.min(host()).min(own), FigureSource::DERIVED);
            }
            return Figure::known(free, FigureSource::DRIVER);
        }
        if self.is_host_heap(heap) {
            return Figure::known(own.min(host()), FigureSource::DERIVED);
        }
        Figure::UNKNOWN
    }
}

pub(crate) fn text(text: Option<&CStr>) -> String {
    text.map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The first thing that the shaders need and the device lacks.
fn missing_features(
    instance: &Instance,
    raw: vk::PhysicalDevice,
    subgroups: &vk::PhysicalDeviceVulkan11Properties<'_>,
) -> Option<&'static str> {
    let mut f11 = vk::PhysicalDeviceVulkan11Features::default();
    let mut f12 = vk::PhysicalDeviceVulkan12Features::default();
    let mut features =
        vk::PhysicalDeviceFeatures2::default().push_next(&mut f11).push_next(&mut f12);
    // SAFETY: the device is of this instance; the chain lives for the call.
    unsafe { instance.raw.get_physical_device_features2(raw, &mut features) };
    let core = features.features;
    let ops = subgroups.subgroup_supported_operations;
    let needed = vk::SubgroupFeatureFlags::BASIC
        | vk::SubgroupFeatureFlags::ARITHMETIC
        | vk::SubgroupFeatureFlags::SHUFFLE;
    let computes = subgroups.subgroup_supported_stages.contains(vk::ShaderStageFlags::COMPUTE);
    [
        (core.shader_int64 == vk::TRUE, "64-bit integers in shaders"),
        (core.shader_int16 == vk::TRUE, "16-bit integers in shaders"),
        (f11.storage_buffer16_bit_access == vk::TRUE, "16-bit storage"),
        (f12.buffer_device_address == vk::TRUE, "buffer device addresses"),
        (f12.timeline_semaphore == vk::TRUE, "timeline semaphores"),
        (ops.contains(needed) && computes, "subgroup arithmetic and shuffles"),
        (subgroups.subgroup_size >= 4, "subgroups of 4 and more"),
    ]
    .into_iter()
    .find_map(|(has, what)| (!has).then_some(what))
}

/// Types for buffers of the device, for transfers, and for small records that the host writes into device memory.
fn memory_types(
    memory: &vk::PhysicalDeviceMemoryProperties,
    kind: DeviceKind,
) -> Option<(MemoryType, MemoryType, Option<MemoryType>)> {
    use vk::MemoryPropertyFlags as Flags;
    let mapped = Flags::HOST_VISIBLE | Flags::HOST_COHERENT;
    let find = |all: Flags, none: Flags| {
        let types = memory.memory_types_as_slice().iter().enumerate();
        let fits = |flags: Flags| flags.contains(all) && !flags.intersects(none);
        let heap_size =
            |heap: u32| memory.memory_heaps.get(heap as usize).map_or(0, |heap| heap.size);
        // The largest heap, and of equals the type that the driver lists first, which is the one it prefers.
        let best = types.filter(|(_, kind)| fits(kind.property_flags)).reduce(|best, next| {
            if heap_size(next.1.heap_index) > heap_size(best.1.heap_index) { next } else { best }
        });
        best.map(|(index, kind)| MemoryType {
            index: u32::try_from(index).unwrap_or(0),
            heap: kind.heap_index,
            is_mapped: kind.property_flags.contains(mapped),
        })
    };
    let special = Flags::PROTECTED | Flags::LAZILY_ALLOCATED;
    let cached = find(mapped | Flags::HOST_CACHED, special);
    if matches!(kind, DeviceKind::CPU | DeviceKind::INTEGRATED) {
        let all = Flags::DEVICE_LOCAL | mapped;
        let unified = find(all | Flags::HOST_CACHED, special).or_else(|| find(all, special));
        if let Some(unified) = unified {
            return Some((unified, unified, Some(unified)));
        }
    }
    let local = find(Flags::DEVICE_LOCAL, special | Flags::HOST_VISIBLE)
        .or_else(|| find(Flags::DEVICE_LOCAL, special))?;
    let host = find(mapped | Flags::HOST_CACHED, special | Flags::DEVICE_LOCAL)
        .or(cached)
        .or_else(|| find(mapped, special))?;
    let window = find(Flags::DEVICE_LOCAL | mapped, special);
    Some((local, host, window))
}

/// A family that only computes is scheduled apart from graphics; any that computes will do.
fn queue_family(families: &[vk::QueueFamilyProperties]) -> Option<u32> {
    let find = |not: vk::QueueFlags| {
        families.iter().position(|family| {
            let flags = family.queue_flags;
            flags.contains(vk::QueueFlags::COMPUTE)
                && !flags.intersects(not)
                && family.queue_count > 0
        })
    };
    let at = find(vk::QueueFlags::GRAPHICS).or_else(|| find(vk::QueueFlags::empty()));
    at.and_then(|at| u32::try_from(at).ok())
}
