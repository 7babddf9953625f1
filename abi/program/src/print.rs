//! Programs as text, one op a line, for people and for snapshots.

use crate::{Dim, Program, ValueId, ValueKind};
use std::fmt;

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(n) => write!(f, "{n}"),
            Self::NTokens => f.write_str("n_tokens"),
            Self::NOutputs => f.write_str("n_outputs"),
        }
    }
}

impl Program {
    fn label(&self, id: ValueId) -> String {
        match self.values.get(id.index()) {
            Some(value) if value.kind == ValueKind::Result => format!("%{}", id.0),
            Some(value) => value.name.clone(),
            None => format!("?{}", id.0),
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "program {}", self.name)?;
        for (i, kv) in self.kv_layers.iter().enumerate() {
            writeln!(
                f,
                "  kv {i}: group {} index {} heads {} k {}x{} v {}x{}",
                kv.group,
                kv.index,
                kv.n_head_kv,
                kv.dtype_k.name(),
                kv.head_dim_k,
                kv.dtype_v.name(),
                kv.head_dim_v
            )?;
        }
        for (i, state) in self.state_layers.iter().enumerate() {
            writeln!(f, "  state {i}: {} f32", state.n_elements)?;
        }
        for op in &self.ops {
            let inputs: Vec<_> = op.inputs.iter().map(|id| self.label(*id)).collect();
            write!(f, "  ")?;
            for id in &op.outputs {
                let dims = self.values.get(id.index()).map(|v| v.dims.as_slice()).unwrap_or(&[]);
                let dims: Vec<_> = dims.iter().map(ToString::to_string).collect();
                write!(f, "{}: [{}] ", self.label(*id), dims.join(", "))?;
            }
            if !op.outputs.is_empty() {
                write!(f, "= ")?;
            }
            writeln!(f, "{:?}({})", op.kind, inputs.join(", "))?;
        }
        let outputs: Vec<_> = self.outputs.iter().map(|id| self.label(*id)).collect();
        writeln!(f, "  return {}", outputs.join(", "))
    }
}
