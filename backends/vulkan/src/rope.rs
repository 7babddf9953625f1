//! Tables of rope: for each distinct set of parameters, by how much of a turn each pair goes on with each position.
//!
//! Frequencies are turns in units of 2^-64, so that the device multiplies by a position in integers and is exact at any position.

use tegula_sdk::program::{OpKind, Program, RopeStyle, ValueId};

/// One table.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    /// The op's parameters, without what does not change angles.
    key: OpKind,
    pub(crate) factors: Option<ValueId>,
    /// Offset among the constants, in bytes.
    pub(crate) offset: u64,
}

/// The tables of a program.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tables {
    pub(crate) tables: Vec<Table>,
    bytes: u64,
}

impl Tables {
    pub(crate) fn new(program: &Program) -> Self {
        let mut out = Self::default();
        for op in &program.ops {
            let OpKind::Rope { n_rot, .. } = op.kind else { continue };
            if out.find(&op.kind, &op.inputs).is_none() {
                let factors = op.inputs.get(2).copied();
                let key = angles_only(&op.kind);
                out.tables.push(Table { key, factors, offset: out.bytes });
                out.bytes += u64::from(n_rot / 2) * 8;
            }
        }
        out
    }

    /// Bytes of all.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The table of a rope op.
    pub(crate) fn find(&self, kind: &OpKind, inputs: &[ValueId]) -> Option<&Table> {
        let (key, factors) = (angles_only(kind), inputs.get(2).copied());
        self.tables.iter().find(|table| table.key == key && table.factors == factors)
    }
}

impl Table {
    /// The frequencies as words, low half first.
    pub(crate) fn words(&self, factors: Option<&[f32]>) -> Vec<u32> {
        let turns = frequencies(&self.key, factors).into_iter().map(|radians| {
            let turns = radians / (2.0 * std::f64::consts::PI);
            // The fraction of a turn; whole turns do not show at whole positions.
            ((turns - turns.floor()) * 18_446_744_073_709_551_616.0) as u64
        });
        turns.flat_map(|turns| [turns as u32, (turns >> 32) as u32]).collect()
    }
}

/// The op with what does not change angles set alike.
fn angles_only(kind: &OpKind) -> OpKind {
    let mut key = *kind;
    if let OpKind::Rope { style, head_dim, attn_factor, .. } = &mut key {
        *style = RopeStyle::Neox;
        *head_dim = 0;
        *attn_factor = 1.0;
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
    let of_pair = |i: u32| {
        let factor = factors.and_then(|f| f.get(i as usize)).map_or(1.0, |f| f64::from(*f));
        let full = base.powf(-2.0 * f64::from(i) / n) / factor;
        if ext_factor == 0.0 {
            return full * f64::from(freq_scale);
        }
        let ramp = ((f64::from(i) - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
        let mix = f64::from(ext_factor) * (1.0 - ramp);
        full * f64::from(freq_scale) * (1.0 - mix) + full * mix
    };
    (0..n_rot / 2).map(of_pair).collect()
}
