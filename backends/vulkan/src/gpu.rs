//! An open logical device: its functions, its one queue, and what is known of its life.
//!
//! Facts of a device lie here and nowhere else: two logical devices of one process share nothing, so that each keeps its own pinned memory.

#![expect(unsafe_code, reason = "Vulkan is a C interface")]

use crate::error::failed;
use crate::physical::Physical;
use crate::pipelines::Pipelines;
use crate::staging::Ring;
use ash::{ext, khr, vk};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tegula_sdk::abi::Status;
use tegula_sdk::{Error, Result};

/// A logical device.
pub(crate) struct Gpu {
    pub(crate) physical: Arc<Physical>,
    pub(crate) device: ash::Device,
    /// Submissions to it take turns.
    queue: Mutex<vk::Queue>,
    is_lost: AtomicBool,
    /// The next buffer's.
    pub(crate) buffer_ids: AtomicU64,
    pub(crate) pipelines: Pipelines,
    pub(crate) ring: Mutex<Ring>,
    /// Workgroups that fill the device, roughly: what attention is split for.
    pub(crate) fill: u32,
}

/// A lock whose holder panicked is taken all the same: what it guards is checked by the driver.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gpu {
    pub(crate) fn open(physical: &Arc<Physical>) -> Result<Arc<Self>> {
        let priorities = [1.0];
        let queues = [vk::DeviceQueueCreateInfo::default()
            .queue_family_index(physical.family)
            .queue_priorities(&priorities)];
        let core = vk::PhysicalDeviceFeatures::default().shader_int64(true).shader_int16(true);
        let mut f11 =
            vk::PhysicalDeviceVulkan11Features::default().storage_buffer16_bit_access(true);
        let mut f12 = vk::PhysicalDeviceVulkan12Features::default()
            .buffer_device_address(true)
            .timeline_semaphore(true);
        let mut matrices =
            vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default().cooperative_matrix(true);
        let mut extensions = Vec::new();
        if physical.has_budget {
            extensions.push(ext::memory_budget::NAME.as_ptr());
        }
        if physical.has_matrices {
            f12 = f12.shader_float16(true).vulkan_memory_model(true);
            extensions.push(khr::cooperative_matrix::NAME.as_ptr());
        }
        let mut info = vk::DeviceCreateInfo::default()
            .queue_create_infos(&queues)
            .enabled_features(&core)
            .enabled_extension_names(&extensions)
            .push_next(&mut f11)
            .push_next(&mut f12);
        if physical.has_matrices {
            info = info.push_next(&mut matrices);
        }
        // SAFETY: the device is of the instance, which `physical` keeps; the chain lives for the call and names what was found there.
        let device = unsafe { physical.instance.raw.create_device(physical.raw, &info, None) };
        let device = device.map_err(|code| failed("vkCreateDevice", code))?;
        // SAFETY: the family and its first queue were asked for above.
        let queue = unsafe { device.get_device_queue(physical.family, 0) };
        let pipelines = match Pipelines::new(&device, physical) {
            Ok(pipelines) => pipelines,
            Err(error) => {
                // SAFETY: nothing was made of the device.
                unsafe { device.destroy_device(None) };
                return Err(error);
            }
        };
        let fill = if physical.subgroup < 32 { 8 } else { 1024 };
        Ok(Arc::new(Self {
            physical: Arc::clone(physical),
            device,
            queue: Mutex::new(queue),
            is_lost: AtomicBool::new(false),
            buffer_ids: AtomicU64::new(1),
            pipelines,
            ring: Mutex::new(Ring::default()),
            fill,
        }))
    }

    /// A driver's answer, noting when it says that the device is gone.
    pub(crate) fn check<T>(&self, what: &str, result: Result<T, vk::Result>) -> Result<T> {
        result.map_err(|code| {
            if code == vk::Result::ERROR_DEVICE_LOST {
                self.mark_lost();
            }
            failed(what, code)
        })
    }

    /// From now on every call says that the device is lost.
    pub(crate) fn mark_lost(&self) {
        if !self.is_lost.swap(true, Ordering::AcqRel) {
            log::error!("{}: the device is lost", self.physical.name);
        }
    }

    /// Refuses work for a device that is gone.
    pub(crate) fn alive(&self) -> Result<()> {
        if self.is_lost.load(Ordering::Acquire) {
            let message = format!("{} was lost earlier", self.physical.name);
            return Err(Error {
                native: Some(vk::Result::ERROR_DEVICE_LOST.as_raw().into()),
                ..Error::new(Status::DEVICE_LOST, message)
            });
        }
        Ok(())
    }

    /// Submits one recorded command buffer; `timeline` becomes `value` when it is done.
    pub(crate) fn submit(
        &self,
        commands: vk::CommandBuffer,
        timeline: &Timeline,
        value: u64,
    ) -> Result<()> {
        self.alive()?;
        let (values, signals, buffers) = ([value], [timeline.raw], [commands]);
        let mut semaphores =
            vk::TimelineSemaphoreSubmitInfo::default().signal_semaphore_values(&values);
        let info = vk::SubmitInfo::default()
            .command_buffers(&buffers)
            .signal_semaphores(&signals)
            .push_next(&mut semaphores);
        let queue = lock(&self.queue);
        // SAFETY: all handles are of this device; the lock makes this the only use of the queue.
        let result = unsafe { self.device.queue_submit(*queue, &[info], vk::Fence::null()) };
        drop(queue);
        self.check("vkQueueSubmit", result)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.pipelines.save_with(&self.device, &self.physical);
        // SAFETY: everything made of the device holds it, so nothing else is left; each is destroyed once, the device last. An error of the wait
        // leaves nothing to do but that.
        unsafe {
            let _ = self.device.device_wait_idle();
            lock(&self.ring).free(&self.device, &self.physical);
            self.pipelines.destroy(&self.device);
            self.device.destroy_device(None);
        }
    }
}

/// A semaphore that counts up: the fence of a queue.
pub(crate) struct Timeline {
    gpu: Arc<Gpu>,
    raw: vk::Semaphore,
}

impl Timeline {
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let mut kind =
            vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
        let info = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
        // SAFETY: the chain lives for the call.
        let raw = unsafe { gpu.device.create_semaphore(&info, None) };
        Ok(Self { raw: gpu.check("vkCreateSemaphore", raw)?, gpu: Arc::clone(gpu) })
    }

    /// What was reached.
    pub(crate) fn reached(&self) -> Result<u64> {
        // SAFETY: the semaphore is alive.
        let value = unsafe { self.gpu.device.get_semaphore_counter_value(self.raw) };
        self.gpu.check("vkGetSemaphoreCounterValue", value)
    }

    /// Waits for `value`.
    pub(crate) fn wait(&self, value: u64, timeout_ns: u64) -> Result<()> {
        self.gpu.alive()?;
        let (semaphores, values) = ([self.raw], [value]);
        let info = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        // SAFETY: the semaphore is alive; the arrays live for the call.
        let result = unsafe { self.gpu.device.wait_semaphores(&info, timeout_ns) };
        self.gpu.check("vkWaitSemaphores", result)
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        // SAFETY: whoever owns it waited for the work that signals it.
        unsafe { self.gpu.device.destroy_semaphore(self.raw, None) };
    }
}
