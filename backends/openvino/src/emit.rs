//! Ops of a program as layers of an OpenVINO model.

use crate::ir::{Fill, Ir, OPEN, Port};
use crate::ov::Element;
use crate::partition::ModelStep;
use crate::weights::{Form, ROWS_MIN};
use std::collections::HashMap;
use tegula_sdk::program::{Activation, Dim, Op, OpKind, Program, Value, ValueId, ValueKind};
use tegula_sdk::quant::DType;
use tegula_sdk::{Error, Result};

/// Whether a model can do an op.
pub(crate) fn can(kind: &OpKind) -> bool {
    matches!(
        kind,
        OpKind::RmsNorm { .. }
            | OpKind::LayerNorm { .. }
            | OpKind::Matmul
            | OpKind::Glu { .. }
            | OpKind::Unary { .. }
            | OpKind::Add
            | OpKind::Mul
            | OpKind::Scale { .. }
            | OpKind::Softcap { .. }
            | OpKind::Slice { .. }
            | OpKind::Concat
            | OpKind::GatherRows
    )
}

/// Products that are summed first where a matrix has few rows.
const LANES: u64 = 32;

/// Writes one model of a program.
pub(crate) struct Emitter<'a> {
    program: &'a Program,
    ir: Ir,
    ports: HashMap<ValueId, Port>,
    /// No constant is larger: matrices are cut along their rows.
    constant_max: u64,
}

/// A model's text, with the places of its constants.
pub(crate) fn model(program: &Program, step: &ModelStep, constant_max: u64) -> Result<Ir> {
    let mut emitter = Emitter { program, ir: Ir::default(), ports: HashMap::new(), constant_max };
    for id in &step.inputs {
        let value = program.value(*id)?;
        let port = emitter.ir.parameter(element(value), &dims(value)?);
        emitter.ports.insert(*id, port);
    }
    for op in step.ops.iter().filter_map(|i| program.ops.get(*i)) {
        let made = emitter.op(op)?;
        for (id, port) in op.outputs.iter().zip(made) {
            emitter.ports.insert(*id, port);
        }
    }
    for id in &step.outputs {
        let port = emitter.value(*id)?;
        emitter.ir.result(port);
    }
    Ok(emitter.ir)
}

/// The element type of a value that is no weight.
pub(crate) fn element(value: &Value) -> Element {
    match value.dtype {
        DType::I32 => Element::I32,
        _ => Element::F32,
    }
}

/// A value's dimensions; those of the run are open.
pub(crate) fn dims(value: &Value) -> Result<Vec<i64>> {
    value
        .dims
        .iter()
        .map(|dim| match dim {
            Dim::Fixed(n) => signed(*n),
            _ => Ok(OPEN),
        })
        .collect()
}

fn signed(n: u64) -> Result<i64> {
    i64::try_from(n).map_err(|_| Error::invalid(format!("a dimension of {n}")))
}

impl Emitter<'_> {
    fn value(&self, id: ValueId) -> Result<Port> {
        let port = self.ports.get(&id).copied();
        port.ok_or_else(|| Error::invalid(format!("value {} is not in its model", id.0)))
    }

    /// An operand: a value of the model, or a vector of weights.
    fn operand(&mut self, id: ValueId) -> Result<Port> {
        let value = self.program.value(id)?;
        if value.kind != ValueKind::Weight || self.ports.contains_key(&id) {
            return self.value(id);
        }
        let n = value.row_len();
        let fill = Fill::Weight { value: id, part: 0, first_row: 0, n_rows: 1 };
        let port = self.ir.constant(Element::F32, &[signed(n)?], n.saturating_mul(4), fill)?;
        self.ports.insert(id, port);
        Ok(port)
    }

    fn row_len(&self, id: ValueId) -> Result<i64> {
        signed(self.program.value(id)?.row_len())
    }

    fn op(&mut self, op: &Op) -> Result<Vec<Port>> {
        let at = |i: usize| op.inputs.get(i).copied();
        let first = at(0).ok_or_else(|| Error::invalid("an op without inputs"))?;
        if op.kind == OpKind::Matmul {
            return self.matmul_op(op);
        }
        let x = self.operand(first)?;
        let second = match at(1) {
            Some(id) => Some(self.operand(id)?),
            None => None,
        };
        let both =
            |second: Option<Port>| second.ok_or_else(|| Error::invalid("an op with one input"));
        let made = match op.kind {
            OpKind::RmsNorm { eps, n } => self.rms_norm(first, x, second, eps, n.into())?,
            OpKind::LayerNorm { eps, n } => {
                let bias = match at(2) {
                    Some(id) => Some(self.operand(id)?),
                    None => None,
                };
                self.layer_norm(first, x, (both(second)?, bias), eps, n.into())?
            }
            OpKind::Glu { activation } => {
                let gate = self.activation(activation, x)?;
                self.ir.simple("Multiply", &[gate, both(second)?])
            }
            OpKind::Unary { activation } => self.activation(activation, x)?,
            OpKind::Add => self.ir.simple("Add", &[x, both(second)?]),
            OpKind::Mul => self.ir.simple("Multiply", &[x, both(second)?]),
            OpKind::Scale { factor } => {
                let factor = self.ir.scalar(factor)?;
                self.ir.simple("Multiply", &[x, factor])
            }
            OpKind::Softcap { cap } => {
                let cap = self.ir.scalar(cap)?;
                let inner = self.ir.simple("Divide", &[x, cap]);
                let inner = self.ir.simple("Tanh", &[inner]);
                self.ir.simple("Multiply", &[inner, cap])
            }
            OpKind::Slice { begin, len } => {
                let begin = i64::from(begin);
                self.ir.slice(x, 1, begin, begin + i64::from(len), 1)?
            }
            OpKind::Concat => self.ir.concat(&[x, both(second)?], 1),
            OpKind::GatherRows => {
                let axis = self.ir.i64s(&[0])?;
                self.ir.op("Gather", "opset8", "batch_dims=\"0\"", &[x, both(second)?, axis])
            }
            _ => return Err(Error::unsupported(format!("{} in a model", op.kind.name()))),
        };
        Ok(vec![made])
    }

    /// `x / sqrt(mean(x^2) + eps) * weight`, in the form that plugins run as one kernel.
    fn rms_norm(
        &mut self,
        id: ValueId,
        x: Port,
        weight: Option<Port>,
        eps: f32,
        n: i64,
    ) -> Result<Port> {
        let row = self.row_len(id)?;
        let x = self.grouped(x, row, n)?;
        let axis = self.ir.i64s(&[-1])?;
        let square = self.ir.simple("Multiply", &[x, x]);
        let mean = self.ir.op("ReduceMean", "opset1", "keep_dims=\"true\"", &[square, axis]);
        let eps = self.ir.scalar(eps)?;
        let mean = self.ir.simple("Add", &[mean, eps]);
        let root = self.ir.simple("Sqrt", &[mean]);
        let one = self.ir.scalar(1.0)?;
        let scale = self.ir.simple("Divide", &[one, root]);
        let mut y = self.ir.simple("Multiply", &[x, scale]);
        if let Some(weight) = weight {
            y = self.ir.simple("Multiply", &[y, weight]);
        }
        self.ungrouped(y, row, n)
    }

    fn layer_norm(
        &mut self,
        id: ValueId,
        x: Port,
        (weight, bias): (Port, Option<Port>),
        eps: f32,
        n: i64,
    ) -> Result<Port> {
        let row = self.row_len(id)?;
        let x = self.grouped(x, row, n)?;
        let axis = self.ir.i64s(&[-1])?;
        let data = format!("eps=\"{eps:e}\" normalize_variance=\"true\" eps_mode=\"INSIDE_SQRT\"");
        let mut y = self.ir.op("MVN", "opset6", &data, &[x, axis]);
        y = self.ir.simple("Multiply", &[y, weight]);
        if let Some(bias) = bias {
            y = self.ir.simple("Add", &[y, bias]);
        }
        self.ungrouped(y, row, n)
    }

    /// Rows of `row` as groups of `n`.
    fn grouped(&mut self, x: Port, row: i64, n: i64) -> Result<Port> {
        if n == row { Ok(x) } else { self.ir.reshape(x, &[0, -1, n]) }
    }

    fn ungrouped(&mut self, x: Port, row: i64, n: i64) -> Result<Port> {
        if n == row { Ok(x) } else { self.ir.reshape(x, &[0, row]) }
    }

    fn activation(&mut self, activation: Activation, x: Port) -> Result<Port> {
        let (kind, opset, data) = match activation {
            Activation::Silu => ("Swish", "opset4", ""),
            Activation::GeluTanh => return self.gelu_tanh(x),
            Activation::GeluErf => ("Gelu", "opset7", "approximation_mode=\"ERF\""),
            Activation::Relu => ("ReLU", "opset1", ""),
            Activation::Sigmoid => ("Sigmoid", "opset1", ""),
            Activation::Tanh => ("Tanh", "opset1", ""),
            Activation::Softplus => ("SoftPlus", "opset4", ""),
        };
        Ok(self.ir.op(kind, opset, data, &[x]))
    }

    /// `0.5 x (1 + tanh(u))` as `x sigmoid(2 u)`: the same number without the sum that cancels where the result is small, which
    /// OpenVINO's own Gelu computes as written.
    fn gelu_tanh(&mut self, x: Port) -> Result<Port> {
        let root = (2.0 / std::f64::consts::PI).sqrt();
        let linear = self.ir.scalar((2.0 * root) as f32)?;
        let cubic = self.ir.scalar((2.0 * root * 0.044_715) as f32)?;
        let square = self.ir.simple("Multiply", &[x, x]);
        let factor = self.ir.simple("Multiply", &[square, cubic]);
        let factor = self.ir.simple("Add", &[factor, linear]);
        let inner = self.ir.simple("Multiply", &[x, factor]);
        let gate = self.ir.simple("Sigmoid", &[inner]);
        Ok(self.ir.simple("Multiply", &[x, gate]))
    }

    fn matmul_op(&mut self, op: &Op) -> Result<Vec<Port>> {
        let [x, weight, ..] = op.inputs[..] else {
            return Err(Error::invalid("a product without a weight"));
        };
        let x = self.operand(x)?;
        let value = self.program.value(weight)?;
        let (n_in, Dim::Fixed(n_rows)) = (value.row_len(), value.rows()) else {
            return Err(Error::invalid("a weight of open size"));
        };
        let form = Form::of(value.dtype, n_rows);
        let is_narrow = form == Form::F32 && n_rows < ROWS_MIN && n_in % LANES == 0;
        if is_narrow && op.inputs.len() == 2 {
            let w = self.matrix(weight, form, (0, n_rows), n_in)?;
            return Ok(vec![self.narrow(x, w, signed(n_in)?, signed(n_rows)?)?]);
        }
        let step = rows_at_most(form, n_rows, n_in, self.constant_max)?;
        let mut pieces = Vec::new();
        let mut first_row = 0;
        while first_row < n_rows {
            let rows = step.min(n_rows - first_row);
            let w = self.matrix(weight, form, (first_row, rows), n_in)?;
            pieces.push(self.ir.matmul(x, w, true));
            first_row += rows;
        }
        let mut y = match pieces[..] {
            [one] => one,
            _ => self.ir.concat(&pieces, 1),
        };
        if let Some(bias) = op.inputs.get(2) {
            let bias = self.operand(*bias)?;
            y = self.ir.simple("Add", &[y, bias]);
        }
        Ok(vec![y])
    }

    /// A product with a matrix of few rows, summed in two steps: a kernel for one row adds up a long row in few sums, which loses
    /// digits that a product with many rows keeps.
    fn narrow(&mut self, x: Port, w: Port, n_in: i64, n_rows: i64) -> Result<Port> {
        let x = self.ir.reshape(x, &[0, 1, n_in])?;
        let products = self.ir.simple("Multiply", &[x, w]);
        let lanes = LANES as i64;
        let products = self.ir.reshape(products, &[0, n_rows, n_in / lanes, lanes])?;
        let axis = self.ir.i64s(&[-1])?;
        let sums = self.ir.op("ReduceSum", "opset1", "keep_dims=\"false\"", &[products, axis]);
        Ok(self.ir.op("ReduceSum", "opset1", "keep_dims=\"false\"", &[sums, axis]))
    }

    /// Rows of a weight matrix as f32, decompressed in the pattern that plugins recognise.
    fn matrix(
        &mut self,
        value: ValueId,
        form: Form,
        (first_row, n_rows): (u64, u64),
        n_in: u64,
    ) -> Result<Port> {
        let sizes = form.parts(n_rows, n_in);
        let sizes = sizes.ok_or_else(|| Error::invalid("a weight of more than 2^64 bytes"))?;
        let fill = |part| Fill::Weight { value, part, first_row, n_rows };
        let (rows, columns) = (signed(n_rows)?, signed(n_in)?);
        let Form::Grouped { code, group, has_zero } = form else {
            let element = match form {
                Form::Plain(element) => element,
                _ => Element::F32,
            };
            let w = self.ir.constant(element, &[rows, columns], sizes[0], fill(0))?;
            return Ok(if element == Element::F32 { w } else { self.ir.convert(w, Element::F32) });
        };
        let (groups, group) = (signed(n_in / group)?, signed(group)?);
        let q = self.ir.constant(code.element(), &[rows, groups, group], sizes[0], fill(0))?;
        let mut w = self.ir.convert(q, Element::F32);
        if has_zero {
            let zero = self.ir.constant(Element::F32, &[rows, groups, 1], sizes[2], fill(2))?;
            w = self.ir.simple("Subtract", &[w, zero]);
        }
        let scale = self.ir.constant(Element::F32, &[rows, groups, 1], sizes[1], fill(1))?;
        w = self.ir.simple("Multiply", &[w, scale]);
        self.ir.reshape(w, &[rows, columns])
    }
}

/// Rows of a piece so that no part of it is over `max` bytes.
///
/// # Errors
/// TOO_BIG where one row alone is.
fn rows_at_most(form: Form, n_rows: u64, n_in: u64, max: u64) -> Result<u64> {
    let row = form.parts(1, n_in).map_or(u64::MAX, |parts| parts.into_iter().max().unwrap_or(0));
    if row > max {
        return Err(Error::too_big("one row of a weight", row, max));
    }
    Ok((max / row.max(1)).clamp(1, n_rows))
}
