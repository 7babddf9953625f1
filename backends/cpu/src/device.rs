//! The device: buffers of host memory, threads and kernels.

use crate::executable::{Executable, plan_scratch};
use crate::kernels::Kernels;
use crate::pool::{Pool, default_threads};
use crate::queue::Queue;
use std::sync::Arc;
use tegula_sdk::abi::{BufferDesc, CompileOptions, LAYOUT_NATIVE, Status, WeightLayout};
use tegula_sdk::host_memory::HostBuffer;
use tegula_sdk::host_memory::device::only;
use tegula_sdk::program::Program;
use tegula_sdk::{Device, Error, Memory, Result, Weight, WeightBinding};

/// What executables need of the device.
#[derive(Debug, Clone)]
pub(crate) struct Workers {
    pub(crate) kernels: Kernels,
    pub(crate) pool: Arc<Pool>,
}

/// The processor with its threads.
#[derive(Debug)]
pub struct CpuDevice {
    workers: Workers,
}

impl CpuDevice {
    /// `n_threads` 0 takes as many as can really run at once.
    pub(crate) fn open(n_threads: u32) -> Result<Self> {
        let n = if n_threads == 0 { default_threads() } else { n_threads as usize };
        let pool = Pool::new(n).map_err(|e| Error::new(Status::DRIVER, e.to_string()))?;
        let kernels = Kernels::detect();
        log::info!("{n} threads, {}", kernels.isa().name());
        Ok(Self { workers: Workers { kernels, pool: Arc::new(pool) } })
    }
}

impl Device for CpuDevice {
    type Buffer = HostBuffer;
    type Executable = Executable;
    type Queue = Queue;

    fn alloc(&self, desc: &BufferDesc) -> Result<HostBuffer> {
        only("buffer type", desc.buffer_type)?;
        HostBuffer::alloc(desc.size)
    }

    unsafe fn import(&self, desc: &BufferDesc, ptr: *const u8) -> Result<HostBuffer> {
        only("buffer type", desc.buffer_type)?;
        // SAFETY: passed on unchanged.
        unsafe { HostBuffer::import(ptr, desc.size) }
    }

    fn map(&self, buffer: &HostBuffer) -> Result<*mut u8> {
        buffer.map()
    }

    /// GGUF's own rows: the kernels read them at any address, so weights stay in the file's mapping. Vectors are read as
    /// f32 slices and want their alignment.
    fn weight_layout(&self, weight: &Weight) -> Result<WeightLayout> {
        Ok(WeightLayout {
            layout: LAYOUT_NATIVE,
            rows_per_group: 1,
            group_bytes: weight.dtype.row_bytes(weight.n_in)?,
            alignment: 4,
            ..WeightLayout::default()
        })
    }

    fn supports(&self, program: &Program) -> Result<Vec<bool>> {
        Ok(vec![true; program.ops.len()])
    }

    fn memory(&self, program: &Program, options: &CompileOptions) -> Result<Memory> {
        let n_threads = self.workers.pool.n_threads();
        let (plan, host_bytes) = plan_scratch(program, options, n_threads)?;
        Ok(Memory { scratch: plan.chunks, device_bytes: 0, host_bytes })
    }

    fn compile(
        &self,
        program: Program,
        options: &CompileOptions,
        weights: Vec<WeightBinding<HostBuffer>>,
    ) -> Result<Executable> {
        Executable::new(program, options, weights, self.workers.clone())
    }

    fn queue(&self) -> Result<Queue> {
        Ok(Queue::default())
    }
}
