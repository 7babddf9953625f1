//! Rope: which tables a program needs, and the frequencies they are made of.
//!
//! Every layer turns its queries and keys by the same angles, so a table of cosines and sines is made once a run for each distinct set of parameters.

use crate::kernels::{KernelError, rope_table};
use tegula_sdk::program::{OpKind, ValueId};

/// One table: its parameters, and the frequency of each pair.
#[derive(Debug, Clone)]
pub(crate) struct RopeTable {
    /// The op's parameters, without style and head size, which do not change angles.
    key: OpKind,
    pub(crate) positions: ValueId,
    factors: Option<ValueId>,
    pub(crate) n_rot: usize,
    /// Radians a position, for each pair.
    frequencies: Vec<f64>,
    attn_factor: f64,
}

impl RopeTable {
    /// The table of a rope op; `factors` are the values of its third input. `None` for another op.
    pub(crate) fn new(kind: &OpKind, inputs: &[ValueId], factors: Option<&[f32]>) -> Option<Self> {
        let OpKind::Rope { n_rot, attn_factor, .. } = *kind else { return None };
        Some(Self {
            key: angles_only(kind),
            positions: *inputs.get(1)?,
            factors: inputs.get(2).copied(),
            n_rot: n_rot as usize,
            frequencies: frequencies(kind, factors),
            attn_factor: f64::from(attn_factor),
        })
    }

    /// Whether a rope op turns by this table.
    pub(crate) fn serves(&self, kind: &OpKind, inputs: &[ValueId]) -> bool {
        self.key == angles_only(kind)
            && inputs.get(1) == Some(&self.positions)
            && inputs.get(2).copied() == self.factors
    }

    /// Fills `table` (`[positions, n_rot]`).
    pub(crate) fn fill(&self, positions: &[i32], table: &mut [f32]) -> Result<(), KernelError> {
        rope_table(&self.frequencies, self.attn_factor, positions, table)
    }
}

/// The op with what does not change angles set alike.
fn angles_only(kind: &OpKind) -> OpKind {
    let mut key = *kind;
    if let OpKind::Rope { style, head_dim, .. } = &mut key {
        *style = tegula_sdk::program::RopeStyle::Neox;
        *head_dim = 0;
    }
    key
}

/// Radians a position for each pair, as `tegula_abi::RopeParams` defines them.
fn frequencies(kind: &OpKind, factors: Option<&[f32]>) -> Vec<f64> {
    let OpKind::Rope {
        n_rot, n_ctx_orig, base, freq_scale, ext_factor, beta_fast, beta_slow, ..
    } = *kind
    else {
        return Vec::new();
    };
    let (n, base) = (f64::from(n_rot), f64::from(base));
    let pair = |beta: f32| {
        let turns = f64::from(n_ctx_orig) / (2.0 * std::f64::consts::PI * f64::from(beta));
        n * turns.ln() / (2.0 * base.ln())
    };
    let low = pair(beta_fast).floor().max(0.0);
    let high = pair(beta_slow).ceil().min(n - 1.0);
    (0..n_rot / 2)
        .map(|i| {
            let divisor = factors.and_then(|f| f.get(i as usize)).map_or(1.0, |f| f64::from(*f));
            let full = base.powf(-2.0 * f64::from(i) / n) / divisor;
            if ext_factor == 0.0 {
                return full * f64::from(freq_scale);
            }
            let ramp = ((f64::from(i) - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
            let mix = f64::from(ext_factor) * (1.0 - ramp);
            full * f64::from(freq_scale) * (1.0 - mix) + full * mix
        })
        .collect()
}
