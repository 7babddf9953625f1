//! The open device: buffers, layouts, and programs.

#![expect(unsafe_code, reason = "reads through a queue, which takes raw pointers")]

use crate::executable::Executable;
use crate::frame::Frame;
use crate::gpu::Gpu;
use crate::layout::Format;
use crate::memory::Buffer;
use crate::physical::{MemoryType, Physical};
use crate::pipelines::Kernel;
use crate::push::Push;
use crate::queue::Queue;
use crate::shaders::Shader;
use crate::weight::is_vector_type;
use std::sync::Arc;
use tegula_sdk::abi::{BufferDesc, CompileOptions, LAYOUT_NATIVE, WeightLayout, weight_use};
use tegula_sdk::program::Program;
use tegula_sdk::{Device, Error, Memory, Queue as _, Range, Result, Weight, WeightBinding};

/// An open device.
pub struct VulkanDevice {
    pub(crate) gpu: Arc<Gpu>,
}

/// The memory types that buffers may be of, in the order of the boundary.
pub(crate) fn buffer_types(physical: &Physical) -> Vec<(MemoryType, &'static str)> {
    if physical.is_unified() {
        return vec![(physical.local, "unified")];
    }
    vec![(physical.local, "device_local"), (physical.host, "pinned")]
}

impl VulkanDevice {
    pub(crate) fn open(physical: &Arc<Physical>) -> Result<Self> {
        let gpu = Gpu::open(physical)?;
        log::info!(
            "{}: subgroups of {}{}",
            physical.name,
            physical.subgroup,
            if physical.has_matrices { ", cooperative matrices" } else { "" }
        );
        Ok(Self { gpu })
    }

    /// Pinned bytes of the staging ring, and bytes that went through it.
    pub fn staging(&self) -> (u64, u64) {
        let ring = crate::gpu::lock(&self.gpu.ring);
        (ring.pinned(), ring.bytes)
    }

    /// Writes `word` at byte `at` of a buffer and gives what is read there then, both by the device: whether it reaches the place is
    /// tried, not believed.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for a place that is not whole and inside; what the driver says otherwise.
    pub fn touch(&self, buffer: &Buffer, at: u64, word: u32) -> Result<u32> {
        if !at.is_multiple_of(4) {
            return Err(Error::invalid(format!("a word at {at}")));
        }
        let place = buffer.address(at, 4)?;
        let seen = Buffer::new(&self.gpu, 64, self.gpu.physical.host)?;
        let kernel = Kernel::new(Shader::Probe, &[]);
        let mut queue = Queue::new(&self.gpu)?;
        let to = seen.raw.address;
        queue.dispatch(&kernel, &Push::new().u64(place).u64(place).u64(to).u32(word))?;
        // A run of its own: what was written is read back from memory.
        queue.dispatch(&kernel, &Push::new().u64(to + 8).u64(place).u64(to).u32(word))?;
        let mut bytes = [0u8; 4];
        let range = Range { buffer: &seen, offset: 0, size: 4 };
        // SAFETY: the bytes live until the wait.
        let fence = unsafe { queue.read(range, bytes.as_mut_ptr()) }?;
        queue.wait(fence, None)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// As if the driver had said that the device is gone: for tests of what follows.
    pub fn lose(&self) {
        self.gpu.mark_lost();
    }
}

impl Device for VulkanDevice {
    type Buffer = Buffer;
    type Executable = Executable;
    type Queue = Queue;

    fn alloc(&self, desc: &BufferDesc) -> Result<Buffer> {
        let types = buffer_types(&self.gpu.physical);
        let Some((kind, _)) = types.get(desc.buffer_type as usize) else {
            let n = types.len();
            return Err(Error::not_found(format!("buffer type {} of {n}", desc.buffer_type)));
        };
        Buffer::new(&self.gpu, desc.size, *kind)
    }

    fn map(&self, buffer: &Buffer) -> Result<*mut u8> {
        Ok(buffer.raw.host_range(0, buffer.raw.size)?.0)
    }

    /// Vectors, biases of experts and kernels of convolutions as they are; matrices in the backend's own layout.
    fn weight_layout(&self, weight: &Weight) -> Result<WeightLayout> {
        let native = weight.dtype.row_bytes(weight.n_in)?;
        if weight.uses & weight_use::VECTOR != 0 {
            if !is_vector_type(weight.dtype) || weight.uses != weight_use::VECTOR {
                return Err(Error::unsupported(format!("vectors of {}", weight.dtype)));
            }
            return Ok(WeightLayout {
                layout: LAYOUT_NATIVE,
                rows_per_group: 1,
                group_bytes: native,
                alignment: 16,
                ..WeightLayout::default()
            });
        }
        let format = Format::of(weight.dtype);
        Ok(WeightLayout {
            layout: format.layout(),
            rows_per_group: 1,
            group_bytes: format.planes(weight.n_in)?.bytes as u64,
            alignment: 64,
            ..WeightLayout::default()
        })
    }

    fn supports(&self, program: &Program) -> Result<Vec<bool>> {
        Ok(program.ops.iter().map(|op| Executable::supports(&self.gpu, program, op)).collect())
    }

    fn memory(&self, program: &Program, options: &CompileOptions) -> Result<Memory> {
        Ok(Frame::new(&self.gpu, program, options)?.memory(&self.gpu, program, options))
    }

    fn compile(
        &self,
        program: Program,
        options: &CompileOptions,
        weights: Vec<WeightBinding<Buffer>>,
    ) -> Result<Executable> {
        self.gpu.alive()?;
        Executable::new(&self.gpu, program, options, weights)
    }

    fn queue(&self) -> Result<Queue> {
        Queue::new(&self.gpu)
    }
}
