//! A pool of short command buffers, reused once the work in them is done.

#![expect(unsafe_code, reason = "Vulkan is a C interface")]

use crate::gpu::Gpu;
use ash::vk;
use std::sync::Arc;
use tegula_sdk::{Error, Result};

/// Command buffers of one owner, which is used by one thread at a time.
pub(crate) struct Commands {
    gpu: Arc<Gpu>,
    pool: vk::CommandPool,
    /// Each with the fence value after which it is free.
    buffers: Vec<(vk::CommandBuffer, u64)>,
}

impl Commands {
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let info = vk::CommandPoolCreateInfo::default()
            .flags(vk::CommandPoolCreateFlags::RESET_COMMAND_BUFFER)
            .queue_family_index(gpu.physical.family);
        // SAFETY: the struct lives for the call.
        let pool = unsafe { gpu.device.create_command_pool(&info, None) };
        let pool = gpu.check("vkCreateCommandPool", pool)?;
        Ok(Self { gpu: Arc::clone(gpu), pool, buffers: Vec::new() })
    }

    /// A new command buffer, for the caller to keep as long as the pool lives.
    pub(crate) fn allocate(&self) -> Result<vk::CommandBuffer> {
        let info = vk::CommandBufferAllocateInfo::default()
            .command_pool(self.pool)
            .level(vk::CommandBufferLevel::PRIMARY)
            .command_buffer_count(1);
        // SAFETY: the pool is alive and used by this thread alone.
        let made = unsafe { self.gpu.device.allocate_command_buffers(&info) };
        let made = self.gpu.check("vkAllocateCommandBuffers", made)?;
        made.first().copied().ok_or_else(|| Error::invalid("no command buffer"))
    }

    /// Records a command buffer that is used once; it is free again after fence `value`. `reached` are those done.
    pub(crate) fn once(
        &mut self,
        reached: u64,
        value: u64,
        record: impl FnOnce(&ash::Device, vk::CommandBuffer),
    ) -> Result<vk::CommandBuffer> {
        let free = self.buffers.iter().position(|(_, busy)| *busy <= reached);
        let commands = match free.and_then(|at| self.buffers.get_mut(at)) {
            Some((commands, busy)) => {
                *busy = value;
                *commands
            }
            None => {
                let commands = self.allocate()?;
                self.buffers.push((commands, value));
                commands
            }
        };
        self.record(commands, |device, commands| {
            record(device, commands);
            Ok(())
        })?;
        Ok(commands)
    }

    /// Records `commands` anew. What earlier submissions wrote is visible to it.
    pub(crate) fn record(
        &self,
        commands: vk::CommandBuffer,
        record: impl FnOnce(&ash::Device, vk::CommandBuffer) -> Result<()>,
    ) -> Result<()> {
        let device = &self.gpu.device;
        // SAFETY: the buffer is of this pool and not in flight; barriers are plain structs.
        unsafe {
            let begun =
                device.begin_command_buffer(commands, &vk::CommandBufferBeginInfo::default());
            self.gpu.check("vkBeginCommandBuffer", begun)?;
            barrier(device, commands);
            let recorded = record(device, commands);
            barrier(device, commands);
            let ended = device.end_command_buffer(commands);
            recorded?;
            self.gpu.check("vkEndCommandBuffer", ended)
        }
    }
}

/// Everything before is done and visible to everything after, the host included.
///
/// # Safety
/// `commands` is being recorded.
pub(crate) unsafe fn barrier(device: &ash::Device, commands: vk::CommandBuffer) {
    use vk::{AccessFlags as Access, PipelineStageFlags as Stage};
    let stages = Stage::COMPUTE_SHADER | Stage::TRANSFER;
    let barrier = vk::MemoryBarrier::default()
        .src_access_mask(Access::MEMORY_WRITE)
        .dst_access_mask(Access::MEMORY_READ | Access::MEMORY_WRITE);
    // SAFETY: by the caller's word.
    unsafe {
        device.cmd_pipeline_barrier(
            commands,
            stages,
            stages | Stage::DRAW_INDIRECT | Stage::HOST,
            vk::DependencyFlags::empty(),
            &[barrier],
            &[],
            &[],
        );
    }
}

impl Drop for Commands {
    fn drop(&mut self) {
        // SAFETY: whoever owns the pool waited for its work; its buffers go with it.
        unsafe { self.gpu.device.destroy_command_pool(self.pool, None) };
    }
}
