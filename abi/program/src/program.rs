//! The program as data.

use crate::shape::Layers;
use crate::{OpKind, ProgramError};
use tegula_quant::DType;

/// Index of a value in [`Program::values`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

impl ValueId {
    /// As an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One dimension of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dim {
    /// Known when the program is built.
    Fixed(u64),
    /// Tokens of the run.
    NTokens,
    /// Rows of the run whose results are wanted.
    NOutputs,
}

/// Where a value comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ValueKind {
    /// Given at every run.
    Input,
    /// Bound at compile.
    Weight,
    /// Made by an op.
    Result,
}

/// A typed, shaped value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value {
    /// Where it comes from.
    pub kind: ValueKind,
    /// Element type; only weights have block types.
    pub dtype: DType,
    /// One or two dimensions, outermost first.
    pub dims: Vec<Dim>,
    /// The tensor's name for weights; a hint otherwise.
    pub name: String,
}

impl Value {
    /// Elements of a row: the last dimension, which is fixed in a verified program except for vectors of tokens (1 each).
    pub fn row_len(&self) -> u64 {
        match (self.dims.len(), self.dims.last()) {
            (2.., Some(Dim::Fixed(n))) => *n,
            (1, Some(Dim::Fixed(n))) if self.kind == ValueKind::Weight => *n,
            _ => 1,
        }
    }

    /// Rows: the first dimension of matrices and of vectors of tokens; 1 for weight vectors.
    pub fn rows(&self) -> Dim {
        match (self.dims.len(), self.kind) {
            (1, ValueKind::Weight) | (0, _) => Dim::Fixed(1),
            _ => self.dims.first().copied().unwrap_or(Dim::Fixed(1)),
        }
    }
}

/// One op.
#[derive(Debug, Clone, PartialEq)]
pub struct Op {
    /// What it does, with its parameters.
    pub kind: OpKind,
    /// The transformer layer it belongs to.
    pub layer: Option<u32>,
    /// What it reads.
    pub inputs: Vec<ValueId>,
    /// What it makes.
    pub outputs: Vec<ValueId>,
}

/// Keys and values of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvLayer {
    /// Layers of a group share block tables.
    pub group: u32,
    /// Index among the layers of the group.
    pub index: u32,
    /// Heads of keys and values.
    pub n_head_kv: u32,
    /// Elements of a key.
    pub head_dim_k: u32,
    /// Elements of a value.
    pub head_dim_v: u32,
    /// Type of stored keys.
    pub dtype_k: DType,
    /// Type of stored values.
    pub dtype_v: DType,
}

impl KvLayer {
    /// Bytes of one block's keys and values at `block_len` tokens, or `None` on overflow or a head that is no whole number of QuantBlocks.
    pub fn block_bytes(&self, block_len: u32) -> Option<(u64, u64)> {
        let side = |dtype: DType, head_dim: u32| {
            dtype
                .row_bytes(u64::from(head_dim))
                .ok()?
                .checked_mul(u64::from(self.n_head_kv))?
                .checked_mul(u64::from(block_len))
        };
        Some((side(self.dtype_k, self.head_dim_k)?, side(self.dtype_v, self.head_dim_v)?))
    }
}

/// State that one op keeps for each sequence: f32 in an order that the op says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StateLayer {
    /// Elements of one sequence's record.
    pub n_elements: u64,
}

impl StateLayer {
    /// Bytes of one sequence's record; a verified program's fit 64 bits.
    pub fn bytes(&self) -> u64 {
        self.n_elements.saturating_mul(4)
    }
}

/// A program: values, ops in an order that can be run, inputs, outputs, the layers of its KV cache and of its recurrent state.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Program {
    /// For logs.
    pub name: String,
    /// All values.
    pub values: Vec<Value>,
    /// All ops in order.
    pub ops: Vec<Op>,
    /// What every run is given, in order.
    pub inputs: Vec<ValueId>,
    /// What every run gives back, in order.
    pub outputs: Vec<ValueId>,
    /// Layers of the KV cache.
    pub kv_layers: Vec<KvLayer>,
    /// Layers of the recurrent state, each of one op.
    pub state_layers: Vec<StateLayer>,
}

impl Program {
    /// The value, or an error that names the program.
    pub fn value(&self, id: ValueId) -> Result<&Value, ProgramError> {
        self.values
            .get(id.index())
            .ok_or_else(|| self.malformed(format!("value {} of {}", id.0, self.values.len())))
    }

    /// Ids and values of all weights.
    pub fn weights(&self) -> impl Iterator<Item = (ValueId, &Value)> {
        (0..).map(ValueId).zip(&self.values).filter(|(_, value)| value.kind == ValueKind::Weight)
    }

    /// The input or output called `name`.
    pub fn find(&self, ids: &[ValueId], name: &str) -> Option<ValueId> {
        ids.iter()
            .copied()
            .find(|id| self.values.get(id.index()).is_some_and(|value| value.name == name))
    }

    /// Number of KV groups.
    pub fn n_kv_groups(&self) -> u32 {
        self.kv_layers.iter().map(|layer| layer.group + 1).max().unwrap_or(0)
    }

    /// What ops refer to beside values.
    pub(crate) fn layers(&self) -> Layers<'_> {
        Layers { kv: &self.kv_layers, state: &self.state_layers }
    }

    pub(crate) fn malformed(&self, why: String) -> ProgramError {
        ProgramError::Malformed { program: self.name.clone(), why }
    }

    /// Checks everything a backend relies on: ids in range, every value made once and before it is read, shapes and
    /// types of every op, KV layers numbered without gap, one op for each state layer.
    pub fn verify(&self) -> Result<(), ProgramError> {
        let mut made = vec![false; self.values.len()];
        for (value, made) in self.values.iter().zip(&mut made) {
            *made = value.kind != ValueKind::Result;
            self.verify_value(value)?;
        }
        for id in &self.inputs {
            if self.value(*id)?.kind != ValueKind::Input {
                return Err(self.malformed(format!("input {} is no input value", id.0)));
            }
        }
        if self.inputs.len() != self.values.iter().filter(|v| v.kind == ValueKind::Input).count() {
            return Err(self.malformed("the inputs list and the input values differ".into()));
        }
        self.verify_kv_layers()?;
        self.verify_state_layers()?;
        for (index, op) in self.ops.iter().enumerate() {
            self.verify_op(index, op, &mut made)?;
        }
        for id in &self.outputs {
            if self.value(*id)?.kind != ValueKind::Result || !made[id.index()] {
                return Err(self.malformed(format!("output {} is made by no op", id.0)));
            }
        }
        Ok(())
    }

    fn verify_value(&self, value: &Value) -> Result<(), ProgramError> {
        let fault = |why: &str| Err(self.malformed(format!("value `{}`: {why}", value.name)));
        if value.dims.is_empty() || value.dims.len() > 2 {
            return fault("needs one or two dimensions");
        }
        // Sizes are kept below 2^40 elements a side so that every later product of two of them fits 128 bits
        // and, times an element size, is checked against 64.
        let too_large = |dim: &Dim| matches!(dim, Dim::Fixed(n) if *n == 0 || *n > 1 << 40);
        if value.dims.iter().any(too_large) {
            return fault("has a dimension of 0 or above 2^40");
        }
        if value.dims.len() == 2 && !matches!(value.dims[1], Dim::Fixed(_)) {
            return fault("has a last dimension that is not fixed");
        }
        match value.kind {
            ValueKind::Weight if value.dims.iter().any(|d| !matches!(d, Dim::Fixed(_))) => {
                fault("is a weight with a symbolic dimension")
            }
            ValueKind::Input | ValueKind::Result
                if !matches!(value.dtype, DType::F32 | DType::I32) =>
            {
                fault("is an activation of a type other than F32 and I32")
            }
            _ => Ok(()),
        }
    }

    fn verify_kv_layers(&self) -> Result<(), ProgramError> {
        let mut next = Vec::new();
        for (i, layer) in self.kv_layers.iter().enumerate() {
            let group = layer.group as usize;
            if group > next.len() {
                return Err(self.malformed(format!("KV layer {i} skips group {}", next.len())));
            }
            if group == next.len() {
                next.push(0u32);
            }
            if layer.index != next[group] {
                return Err(self.malformed(format!("KV layer {i} is out of order in its group")));
            }
            next[group] += 1;
            let ok = [layer.dtype_k, layer.dtype_v].iter().all(|dtype| {
                matches!(dtype, DType::F32 | DType::F16 | DType::BF16 | DType::Q8_0 | DType::Q4_0)
            });
            if !ok
                || layer.n_head_kv == 0
                || layer.block_bytes(1).is_none_or(|(k, v)| k == 0 || v == 0)
            {
                return Err(self.malformed(format!(
                    "KV layer {i}: {} heads of {} x {} and {} x {} cannot be stored",
                    layer.n_head_kv,
                    layer.dtype_k.name(),
                    layer.head_dim_k,
                    layer.dtype_v.name(),
                    layer.head_dim_v
                )));
            }
        }
        Ok(())
    }

    fn verify_state_layers(&self) -> Result<(), ProgramError> {
        let mut users = vec![0u32; self.state_layers.len()];
        for op in &self.ops {
            let named = op.kind.state_layer().and_then(|layer| users.get_mut(layer as usize));
            named.into_iter().for_each(|n| *n += 1);
        }
        for (i, (layer, users)) in self.state_layers.iter().zip(users).enumerate() {
            if users != 1 || layer.n_elements == 0 || layer.n_elements > 1 << 40 {
                let n = layer.n_elements;
                let why = format!("state layer {i} of {n} elements is named by {users} ops");
                return Err(self.malformed(why));
            }
        }
        Ok(())
    }

    fn verify_op(&self, index: usize, op: &Op, made: &mut [bool]) -> Result<(), ProgramError> {
        let fault = |why: String| ProgramError::Op {
            program: self.name.clone(),
            op: index,
            name: op.kind.name(),
            why,
        };
        let mut inputs = Vec::with_capacity(op.inputs.len());
        for id in &op.inputs {
            let value = self.value(*id)?;
            if !made[id.index()] {
                return Err(fault(format!("reads value {} before it is made", id.0)));
            }
            inputs.push(value);
        }
        let types = crate::shape::infer(&op.kind, &inputs, self.layers()).map_err(fault)?;
        if types.len() != op.outputs.len() {
            return Err(fault(format!("makes {} values, not {}", types.len(), op.outputs.len())));
        }
        for (id, (dtype, dims)) in op.outputs.iter().zip(types) {
            let value = self.value(*id)?;
            if value.kind != ValueKind::Result || made[id.index()] {
                return Err(fault(format!("makes value {}, which is not its to make", id.0)));
            }
            if value.dtype != dtype || value.dims != dims {
                return Err(fault(format!(
                    "makes {dims:?} of {}, declared as {:?} of {}",
                    dtype.name(),
                    value.dims,
                    value.dtype.name()
                )));
            }
            made[id.index()] = true;
        }
        Ok(())
    }
}
