//! The device: buffers, weight layouts, and what a program takes.

use crate::Queue;
use crate::executable::{Executable, working_bytes};
use tegula_sdk::abi::{BufferDesc, CompileOptions, LAYOUT_NATIVE, WeightLayout};
use tegula_sdk::host_memory::HostBuffer;
use tegula_sdk::host_memory::device::only;
use tegula_sdk::program::Program;
use tegula_sdk::{Device, Memory, Result, Weight, WeightBinding, scratch};

/// The processor. It has no state: every queue and buffer stands for itself.
#[derive(Debug)]
pub struct ReferenceDevice;

impl Device for ReferenceDevice {
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

    /// GGUF's own rows, split anywhere, at any address: rows are decoded from copies.
    fn weight_layout(&self, weight: &Weight) -> Result<WeightLayout> {
        Ok(WeightLayout {
            layout: LAYOUT_NATIVE,
            rows_per_group: 1,
            group_bytes: weight.dtype.row_bytes(weight.n_in)?,
            alignment: 1,
            ..WeightLayout::default()
        })
    }

    fn supports(&self, program: &Program) -> Result<Vec<bool>> {
        Ok(vec![true; program.ops.len()])
    }

    fn memory(&self, program: &Program, options: &CompileOptions) -> Result<Memory> {
        Ok(Memory {
            scratch: scratch::plan(program, options, &[])?.chunks,
            device_bytes: 0,
            host_bytes: working_bytes(program, options)?,
        })
    }

    fn compile(
        &self,
        program: Program,
        options: &CompileOptions,
        weights: Vec<WeightBinding<HostBuffer>>,
    ) -> Result<Executable> {
        Executable::new(program, options, weights)
    }

    fn queue(&self) -> Result<Queue> {
        Ok(Queue::default())
    }
}
