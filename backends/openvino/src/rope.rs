//! Rope: tables of cosines and sines, and turning rows by them.
//!
//! Angles are products of positions and frequencies in f64 and are rounded only as cosines and sines, which OpenVINO's own arithmetic in f32 could
//! not keep at large positions. A table serves all layers of the same parameters.

use tegula_sdk::program::{OpKind, RopeStyle};
use tegula_sdk::{Error, Result};

/// The frequencies of one set of parameters, and the table of the run.
#[derive(Debug)]
pub(crate) struct Table {
    key: OpKind,
    factors: Vec<f32>,
    frequencies: Vec<f64>,
    attn_factor: f64,
    positions: Vec<i32>,
    /// For each position, cosines of all pairs, then sines.
    angles: Vec<f32>,
}

/// The op with what does not change angles set alike.
fn angles_only(kind: &OpKind) -> OpKind {
    let mut key = *kind;
    if let OpKind::Rope { style, head_dim, .. } = &mut key {
        *style = RopeStyle::Neox;
        *head_dim = 0;
    }
    key
}

/// Bytes of a table.
pub(crate) fn table_bytes(n_rot: u32, n_tokens: u32) -> u64 {
    u64::from(n_tokens) * (u64::from(n_rot) * 4 + 4)
}

impl Table {
    /// The table of a rope op.
    pub(crate) fn new(kind: &OpKind, factors: &[f32]) -> Self {
        let attn_factor = match *kind {
            OpKind::Rope { attn_factor, .. } => attn_factor,
            _ => 1.0,
        };
        Self {
            key: angles_only(kind),
            factors: factors.to_vec(),
            frequencies: frequencies(kind, factors),
            attn_factor: attn_factor.into(),
            positions: Vec::new(),
            angles: Vec::new(),
        }
    }

    /// Whether a rope op turns by this table.
    pub(crate) fn serves(&self, kind: &OpKind, factors: &[f32]) -> bool {
        self.key == angles_only(kind) && self.factors == factors
    }

    /// Makes the table, unless it is that of the last positions.
    fn fill(&mut self, positions: &[i32]) -> Result<()> {
        if self.positions == positions {
            return Ok(());
        }
        if let Some(wrong) = positions.iter().find(|p| **p < 0) {
            return Err(Error::invalid(format!("position {wrong}")));
        }
        let half = self.frequencies.len();
        self.angles.clear();
        self.angles.resize(positions.len() * half * 2, 0.0);
        for (row, position) in self.angles.chunks_exact_mut((half * 2).max(1)).zip(positions) {
            let (cosines, sines) = row.split_at_mut(half);
            for ((cos, sin), frequency) in cosines.iter_mut().zip(sines).zip(&self.frequencies) {
                let (s, c) = (f64::from(*position) * frequency).sin_cos();
                *cos = (c * self.attn_factor) as f32;
                *sin = (s * self.attn_factor) as f32;
            }
        }
        self.positions.clear();
        self.positions.extend_from_slice(positions);
        Ok(())
    }

    /// Turns the heads of `x` into `out`.
    pub(crate) fn turn(
        &mut self,
        kind: &OpKind,
        positions: &[i32],
        x: &[f32],
        out: &mut [f32],
    ) -> Result<()> {
        let OpKind::Rope { style, head_dim, n_rot, .. } = *kind else {
            return Err(Error::invalid("not a rope"));
        };
        self.fill(positions)?;
        let (head_dim, n_rot, half) = (head_dim as usize, n_rot as usize, n_rot as usize / 2);
        if positions.is_empty() {
            return Ok(());
        }
        let row = x.len() / positions.len();
        let rows = x.chunks_exact(row).zip(out.chunks_exact_mut(row));
        for ((x, out), angles) in rows.zip(self.angles.chunks_exact(n_rot)) {
            let (cos, sin) = angles.split_at(half);
            for (x, out) in x.chunks_exact(head_dim).zip(out.chunks_exact_mut(head_dim)) {
                match style {
                    RopeStyle::Neox => {
                        let (a, b) = x[..n_rot].split_at(half);
                        let (p, q) = out[..n_rot].split_at_mut(half);
                        for i in 0..half {
                            p[i] = a[i] * cos[i] - b[i] * sin[i];
                            q[i] = a[i] * sin[i] + b[i] * cos[i];
                        }
                    }
                    RopeStyle::Adjacent => {
                        for i in 0..half {
                            let (a, b) = (x[2 * i], x[2 * i + 1]);
                            out[2 * i] = a * cos[i] - b * sin[i];
                            out[2 * i + 1] = a * sin[i] + b * cos[i];
                        }
                    }
                }
                out[n_rot..].copy_from_slice(&x[n_rot..]);
            }
        }
        Ok(())
    }
}

/// Radians a position for each pair, as `tegula_abi::RopeParams` defines them.
fn frequencies(kind: &OpKind, factors: &[f32]) -> Vec<f64> {
    let OpKind::Rope {
        n_rot, n_ctx_orig, base, freq_scale, ext_factor, beta_fast, beta_slow, ..
    } = *kind
    else {
        return Vec::new();
    };
    let (n, base, scale) = (f64::from(n_rot), f64::from(base), f64::from(freq_scale));
    let pair = |beta: f32| {
        let turns = f64::from(n_ctx_orig) / (2.0 * std::f64::consts::PI * f64::from(beta));
        n * turns.ln() / (2.0 * base.ln())
    };
    let of_pair = |i: u32| {
        let factor = factors.get(i as usize).map_or(1.0, |f| f64::from(*f));
        let full = base.powf(-2.0 * f64::from(i) / n) / factor;
        if ext_factor == 0.0 {
            return full * scale;
        }
        let low = pair(beta_fast).floor().max(0.0);
        let high = pair(beta_slow).ceil().min(n - 1.0);
        let ramp = ((f64::from(i) - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
        let mix = f64::from(ext_factor) * (1.0 - ramp);
        full * scale * (1.0 - mix) + full * mix
    };
    (0..n_rot / 2).map(of_pair).collect()
}
