//! The device: buffers, weight layouts, executables and queues.

use crate::attention::{Shape, layer_of};
use crate::bound::is_vector_type;
use crate::buffer::ClBuffer;
use crate::context::Shared;
use crate::executable::{Executable, device_bytes};
use crate::experts;
use crate::facts::{ALIGNMENT, Facts};
use crate::plan::plan;
use crate::queue::Queue;
use crate::state;
use crate::weight::layout::Rows;
use std::sync::Arc;
use tegula_sdk::abi::{BufferDesc, CompileOptions, LAYOUT_NATIVE, WeightLayout, weight_use};
use tegula_sdk::program::{Op, OpKind, Program, ValueKind};
use tegula_sdk::{Device, Error, Memory, Result, Weight, WeightBinding};

/// An open device.
#[derive(Debug)]
pub struct OpenClDevice {
    shared: Arc<Shared>,
}

impl OpenClDevice {
    pub(crate) fn open(facts: Facts) -> Result<Self> {
        log::info!(
            "{}: {}, {} compute units, sub-groups {}, fp16 {}",
            facts.name,
            facts.driver,
            facts.compute_units,
            if facts.has_subgroups { "yes" } else { "no" },
            if facts.has_fp16 { "yes" } else { "no" },
        );
        Ok(Self { shared: Arc::new(Shared::open(facts)?) })
    }

    fn supports_op(&self, program: &Program, op: &Op) -> bool {
        let fits = op.inputs.iter().chain(&op.outputs).all(|id| {
            program.value(*id).is_ok_and(|value| match value.kind {
                ValueKind::Weight => match value.rows() {
                    tegula_sdk::program::Dim::Fixed(n) => {
                        Rows::new(value.dtype, value.row_len(), n).is_ok()
                    }
                    _ => false,
                },
                _ => value.row_len() < 1 << 30,
            })
        });
        let facts = &self.shared.facts;
        fits && match (op.kind, layer_of(program, op)) {
            (OpKind::Attention { n_head, .. }, Some((_, layer))) => {
                [false, true].iter().all(|many| Shape::new(facts, &layer, n_head, *many).is_some())
            }
            (OpKind::KvStore { .. }, Some(_)) => true,
            (
                OpKind::Embed
                | OpKind::RmsNorm { .. }
                | OpKind::LayerNorm { .. }
                | OpKind::Matmul
                | OpKind::Rope { .. }
                | OpKind::Glu { .. }
                | OpKind::Unary { .. }
                | OpKind::Add
                | OpKind::Mul
                | OpKind::Scale { .. }
                | OpKind::Softcap { .. }
                | OpKind::Slice { .. }
                | OpKind::Concat
                | OpKind::GatherRows
                | OpKind::Argmax
                | OpKind::TopK { .. }
                | OpKind::CombineExperts
                | OpKind::L2Norm { .. }
                | OpKind::SliceGroups { .. }
                | OpKind::GluClamped { .. },
                _,
            ) => true,
            (OpKind::MatmulExperts { .. } | OpKind::RouterTopk { .. }, _) => {
                experts::fits(facts, program, op)
            }
            (OpKind::ConvState { .. } | OpKind::GatedDelta { .. }, _) => {
                state::Form::new(facts, program, op).is_some()
            }
            (OpKind::Attention { .. } | OpKind::KvStore { .. }, None) => false,
            // Not written yet: the core runs them on another device.
            (OpKind::ConcatGroups { .. } | OpKind::RouterTopkGrouped { .. }, _) => false,
        }
    }
}

impl Device for OpenClDevice {
    type Buffer = ClBuffer;
    type Executable = Executable;
    type Queue = Queue;

    fn alloc(&self, desc: &BufferDesc) -> Result<ClBuffer> {
        ClBuffer::alloc(&self.shared, desc)
    }

    fn map(&self, buffer: &ClBuffer) -> Result<*mut u8> {
        let mapped = buffer.mapped();
        mapped.ok_or_else(|| Error::unsupported("buffers of the device's memory are not mapped"))
    }

    /// Vectors as they are, matrices in planes; rows are independent.
    fn weight_layout(&self, weight: &Weight) -> Result<WeightLayout> {
        let rows = Rows::of(weight)?;
        let is_vector = weight.uses & weight_use::VECTOR != 0;
        if is_vector && !is_vector_type(weight.dtype) {
            return Err(Error::unsupported(format!("a vector of {}", weight.dtype)));
        }
        let (layout, group_bytes) = if is_vector {
            (LAYOUT_NATIVE, weight.dtype.row_bytes(weight.n_in)?)
        } else {
            (rows.layout.number(), rows.stride)
        };
        let (rows_per_group, alignment) = (1, ALIGNMENT);
        Ok(WeightLayout { layout, rows_per_group, group_bytes, alignment, ..Default::default() })
    }

    fn supports(&self, program: &Program) -> Result<Vec<bool>> {
        Ok(program.ops.iter().map(|op| self.supports_op(program, op)).collect())
    }

    fn memory(&self, program: &Program, options: &CompileOptions) -> Result<Memory> {
        let plan = plan(&self.shared.facts, program, options)?;
        let device_bytes = device_bytes(program, options);
        Ok(Memory { scratch: plan.scratch.chunks, device_bytes, host_bytes: device_bytes })
    }

    fn compile(
        &self,
        program: Program,
        options: &CompileOptions,
        weights: Vec<WeightBinding<ClBuffer>>,
    ) -> Result<Executable> {
        Executable::new(self.shared.clone(), program, options, &weights)
    }

    fn queue(&self) -> Result<Queue> {
        Queue::new(self.shared.clone())
    }
}
