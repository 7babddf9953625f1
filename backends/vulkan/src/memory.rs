//! Buffers: one allocation each, with a device address, mapped where the type says so.

#![expect(unsafe_code, reason = "Vulkan is a C interface")]

use crate::gpu::Gpu;
use crate::physical::{MemoryType, Physical};
use ash::vk;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tegula_sdk::{Error, Result};

/// A buffer and its memory, without an owner: what [`Buffer`] and the staging ring are made of.
pub(crate) struct Raw {
    pub(crate) handle: vk::Buffer,
    memory: vk::DeviceMemory,
    /// Address on the device.
    pub(crate) address: u64,
    /// Address on the host.
    pub(crate) mapped: Option<NonNull<u8>>,
    /// Bytes asked for.
    pub(crate) size: u64,
    taken: u64,
    heap: u32,
}

// SAFETY: handles and addresses belong to no thread; whoever writes through `mapped` orders that with the device's work.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

impl Raw {
    /// Allocates exactly the type asked for.
    pub(crate) fn new(
        device: &ash::Device,
        physical: &Physical,
        size: u64,
        kind: MemoryType,
    ) -> Result<Self> {
        let most = physical.max_size(kind);
        if size > most {
            return Err(Error::too_big("a Vulkan buffer", size, most));
        }
        let free = physical.free(kind.heap).get();
        if free.is_some_and(|free| size > free) {
            return Err(Error::out_of_memory("a Vulkan buffer", size, free));
        }
        let of_size = |error: Error| Error {
            asked: Some(size),
            limit: Some(most),
            free: error.free.or(free),
            message: format!("{} ({size} bytes asked, {most} possible)", error.message),
            ..error
        };
        let usage = vk::BufferUsageFlags::STORAGE_BUFFER
            | vk::BufferUsageFlags::TRANSFER_SRC
            | vk::BufferUsageFlags::TRANSFER_DST
            | vk::BufferUsageFlags::INDIRECT_BUFFER
            | vk::BufferUsageFlags::SHADER_DEVICE_ADDRESS;
        let info = vk::BufferCreateInfo::default().size(size.next_multiple_of(16)).usage(usage);
        // SAFETY: the struct lives for the call.
        let handle = unsafe { device.create_buffer(&info, None) }
            .map_err(|code| of_size(crate::error::failed("vkCreateBuffer", code)))?;
        let mut raw = Self {
            handle,
            memory: vk::DeviceMemory::null(),
            address: 0,
            mapped: None,
            size,
            taken: 0,
            heap: kind.heap,
        };
        match raw.back(device, physical, kind) {
            Ok(()) => Ok(raw),
            Err((what, code)) => {
                // SAFETY: nobody else has seen the buffer.
                unsafe { raw.free(device, physical) };
                Err(of_size(crate::error::failed(what, code)))
            }
        }
    }

    fn back(
        &mut self,
        device: &ash::Device,
        physical: &Physical,
        kind: MemoryType,
    ) -> Result<(), (&'static str, vk::Result)> {
        // SAFETY: the buffer was just made.
        let needs = unsafe { device.get_buffer_memory_requirements(self.handle) };
        if needs.memory_type_bits >> kind.index & 1 == 0 {
            return Err(("vkGetBufferMemoryRequirements", vk::Result::ERROR_FEATURE_NOT_PRESENT));
        }
        let mut flags =
            vk::MemoryAllocateFlagsInfo::default().flags(vk::MemoryAllocateFlags::DEVICE_ADDRESS);
        let info = vk::MemoryAllocateInfo::default()
            .allocation_size(needs.size)
            .memory_type_index(kind.index)
            .push_next(&mut flags);
        // SAFETY: the chain lives for the call; memory is bound once, and mapped once, whole.
        unsafe {
            let memory = device.allocate_memory(&info, None);
            self.memory = memory.map_err(|code| ("vkAllocateMemory", code))?;
            self.taken = needs.size;
            if let Some(taken) = physical.taken.get(self.heap as usize) {
                taken.fetch_add(self.taken, Ordering::Relaxed);
            }
            let bound = device.bind_buffer_memory(self.handle, self.memory, 0);
            bound.map_err(|code| ("vkBindBufferMemory", code))?;
            if kind.is_mapped {
                let none = vk::MemoryMapFlags::empty();
                let ptr = device.map_memory(self.memory, 0, vk::WHOLE_SIZE, none);
                self.mapped = NonNull::new(ptr.map_err(|code| ("vkMapMemory", code))?.cast());
            }
            let info = vk::BufferDeviceAddressInfo::default().buffer(self.handle);
            self.address = device.get_buffer_device_address(&info);
        }
        Ok(())
    }

    /// # Safety
    /// No work of the device uses the buffer any more, and nobody uses it again.
    pub(crate) unsafe fn free(&mut self, device: &ash::Device, physical: &Physical) {
        // SAFETY: by the caller's word; null handles are ignored, and memory that is freed is unmapped with it.
        unsafe {
            device.destroy_buffer(self.handle, None);
            device.free_memory(self.memory, None);
        }
        if let Some(taken) = physical.taken.get(self.heap as usize) {
            taken.fetch_sub(self.taken, Ordering::Relaxed);
        }
    }

    /// Copies from the host to a mapped buffer.
    ///
    /// # Safety
    /// `src` holds `size` bytes, and no work in flight uses them on the device.
    pub(crate) unsafe fn write(&self, at: u64, src: *const u8, size: u64) -> Result<()> {
        let (to, size) = self.host_range(at, size)?;
        // SAFETY: `to` is `size` bytes of the mapping, `src` as many by the caller's word.
        unsafe { std::ptr::copy(src, to, size) };
        Ok(())
    }

    /// Copies from a mapped buffer to the host.
    ///
    /// # Safety
    /// `dst` holds `size` bytes, and no work in flight writes them on the device.
    pub(crate) unsafe fn read(&self, at: u64, dst: *mut u8, size: u64) -> Result<()> {
        let (from, size) = self.host_range(at, size)?;
        // SAFETY: `from` is `size` bytes of the mapping, `dst` as many by the caller's word.
        unsafe { std::ptr::copy(from, dst, size) };
        Ok(())
    }

    /// The host's address of `size` bytes at `at`.
    pub(crate) fn host_range(&self, at: u64, size: u64) -> Result<(*mut u8, usize)> {
        self.check(at, size)?;
        let mapped = self.mapped.ok_or_else(|| Error::invalid("a buffer that is not mapped"))?;
        let at = usize::try_from(at).map_err(|_| Error::invalid("an offset over 2^63"))?;
        let size = usize::try_from(size).map_err(|_| Error::invalid("a size over 2^63"))?;
        // SAFETY: inside the mapping, or one past its end.
        Ok((unsafe { mapped.as_ptr().add(at) }, size))
    }

    /// That a range lies inside.
    pub(crate) fn check(&self, at: u64, size: u64) -> Result<()> {
        match at.checked_add(size) {
            Some(end) if end <= self.size => Ok(()),
            _ => Err(Error::invalid(format!(
                "{size} bytes at {at} are outside a buffer of {}",
                self.size
            ))),
        }
    }
}

/// A buffer of the core, or of an executable.
pub struct Buffer {
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) raw: Raw,
    /// Like no other buffer's of the device, before or after: handles and addresses come again, and commands that were recorded with one
    /// of a buffer that is gone must not run.
    pub(crate) id: u64,
}

impl Buffer {
    pub(crate) fn new(gpu: &Arc<Gpu>, size: u64, kind: MemoryType) -> Result<Self> {
        gpu.alive()?;
        let raw = Raw::new(&gpu.device, &gpu.physical, size, kind)?;
        let id = gpu.buffer_ids.fetch_add(1, Ordering::Relaxed);
        Ok(Self { gpu: Arc::clone(gpu), raw, id })
    }

    /// The device address of a range that lies inside.
    pub(crate) fn address(&self, at: u64, size: u64) -> Result<u64> {
        self.raw.check(at, size)?;
        Ok(self.raw.address + at)
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes at {:#x})", self.raw.size, self.raw.address)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let gpu = Arc::clone(&self.gpu);
        // SAFETY: the core frees a buffer once the work that uses it is done.
        unsafe { self.raw.free(&gpu.device, &gpu.physical) };
    }
}
