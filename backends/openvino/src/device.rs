//! The device: buffers, weight layouts, and what a program takes.

#![expect(unsafe_code, reason = "imports are memory that the core owns")]

use crate::between::is_between;
use crate::buffer::{Buffer, SharedBuffer};
use crate::emit;
use crate::engine::Engine;
use crate::executable::{Executable, memory};
use crate::queue::Queue;
use std::sync::Arc;
use tegula_sdk::abi::{BufferDesc, CompileOptions, LAYOUT_NATIVE, WeightLayout};
use tegula_sdk::host_memory::HostBuffer;
use tegula_sdk::program::Program;
use tegula_sdk::{Device, Error, Memory, Result, Weight, WeightBinding};

/// An open device of OpenVINO.
pub struct OpenVinoDevice {
    pub(crate) engine: Arc<Engine>,
}

/// Buffer type of a GPU that both sides address.
pub(crate) const SHARED: u32 = 0;
/// Buffer type of a GPU that is the host's alone: weights are read there when models are compiled.
pub(crate) const HOST: u32 = 1;

impl OpenVinoDevice {
    /// That a buffer type is the host's own memory.
    fn host_type(&self, buffer_type: u32) -> Result<()> {
        let host = if self.engine.context.is_some() { HOST } else { 0 };
        match buffer_type == host {
            true => Ok(()),
            false if buffer_type < host => {
                Err(Error::unsupported("memory of the GPU cannot be imported"))
            }
            false => Err(Error::not_found(format!("buffer type {buffer_type} of {}", host + 1))),
        }
    }
}

impl Device for OpenVinoDevice {
    type Buffer = Buffer;
    type Executable = Executable;
    type Queue = Queue;

    fn alloc(&self, desc: &BufferDesc) -> Result<Buffer> {
        match (&self.engine.context, desc.buffer_type) {
            (Some(context), SHARED) => {
                SharedBuffer::alloc(context, desc.size, self.engine.max_size).map(Buffer::Shared)
            }
            _ => {
                self.host_type(desc.buffer_type)?;
                HostBuffer::alloc(desc.size).map(Buffer::Host)
            }
        }
    }

    unsafe fn import(&self, desc: &BufferDesc, ptr: *const u8) -> Result<Buffer> {
        self.host_type(desc.buffer_type)?;
        // SAFETY: passed on unchanged.
        unsafe { HostBuffer::import(ptr, desc.size) }.map(Buffer::Host)
    }

    fn map(&self, buffer: &Buffer) -> Result<*mut u8> {
        buffer.map()
    }

    /// GGUF's own rows, at any address: they are read where they lie, when models are compiled and when a table is read row by row.
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
        Ok(program.ops.iter().map(|op| is_between(&op.kind) || emit::can(&op.kind)).collect())
    }

    fn memory(&self, program: &Program, options: &CompileOptions) -> Result<Memory> {
        memory(program, options, self.engine.pool.n_threads())
    }

    fn compile(
        &self,
        program: Program,
        options: &CompileOptions,
        weights: Vec<WeightBinding<Buffer>>,
    ) -> Result<Executable> {
        Executable::new(program, options, weights, Arc::clone(&self.engine))
    }

    fn queue(&self) -> Result<Queue> {
        Ok(Queue::default())
    }
}
