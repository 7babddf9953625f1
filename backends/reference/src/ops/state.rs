//! Ops that keep state: each sequence's record is read, carried over its tokens one by one, and written back.

use super::matmul::dot;
use crate::buffer::Bytes;
use crate::values::{Values, zeros};
use crate::weight::Matrix;
use tegula_sdk::program::HeadOrder;
use tegula_sdk::{Error, Result, Seq};

/// A layer's record of one sequence, decoded.
struct Record<'a> {
    bytes: Bytes<'a>,
    elements: Vec<f32>,
}

impl<'a> Record<'a> {
    /// Zeros for a sequence that begins with this run.
    fn load(values: &Values<'a>, layer: u32, seq: &Seq<'_>) -> Result<Self> {
        let n = values.program().state_layers.get(layer as usize).map_or(0, |s| s.n_elements);
        let bytes = Bytes::of(&values.state()?.record(seq.state_slot, layer)?)?;
        let bytes = bytes.part(0, n.saturating_mul(4))?;
        let mut elements: Vec<f32> = zeros(n)?;
        if seq.first_pos > 0 {
            let mut raw: Vec<u8> = zeros(n * 4)?;
            bytes.read(&mut raw)?;
            for (element, raw) in elements.iter_mut().zip(raw.as_chunks().0) {
                *element = f32::from_le_bytes(*raw);
            }
        }
        Ok(Self { bytes, elements })
    }

    fn store(&self) -> Result<()> {
        let mut raw: Vec<u8> = zeros(self.elements.len() as u64 * 4)?;
        for (raw, element) in raw.as_chunks_mut().0.iter_mut().zip(&self.elements) {
            *raw = element.to_le_bytes();
        }
        self.bytes.write(&raw)
    }
}

/// The rows of a sequence in a value with rows of `row_len`.
fn rows_of(seq: &Seq<'_>, row_len: usize) -> std::ops::Range<usize> {
    let (first, n) = (seq.first_token as usize, seq.n_tokens as usize);
    first * row_len..(first + n) * row_len
}

/// No two sequences of a run may carry one record.
fn check_slots(seqs: &[Seq<'_>]) -> Result<()> {
    for (i, seq) in seqs.iter().enumerate() {
        if seqs.iter().skip(i + 1).any(|other| other.state_slot == seq.state_slot) {
            return Err(Error::invalid(format!("two sequences have slot {}", seq.state_slot)));
        }
    }
    Ok(())
}

/// Each column of `x` convolved over time with its row of `weight`.
pub(crate) fn conv(
    values: &Values<'_>,
    layer: u32,
    x: &[f32],
    weight: &Matrix,
    bias: Option<&[f32]>,
) -> Result<Vec<f32>> {
    let m = usize::try_from(weight.n_rows).unwrap_or(usize::MAX);
    let mut out: Vec<f32> = zeros(x.len() as u64)?;
    let seqs = values.seqs()?;
    check_slots(&seqs)?;
    for seq in seqs.iter().filter(|seq| seq.n_tokens > 0) {
        let rows = rows_of(seq, m);
        let mut record = Record::load(values, layer, seq)?;
        // The rows before and those of this run, one behind the other.
        let before = record.elements.len();
        let mut window: Vec<f32> = zeros((before + rows.len()) as u64)?;
        window[..before].copy_from_slice(&record.elements);
        window[before..].copy_from_slice(&x[rows.clone()]);
        let mut kernels = weight.rows()?;
        for column in 0..m {
            let kernel = kernels.get(column as u64)?;
            let bias = bias.map_or(0.0, |bias| f64::from(bias[column]));
            for (t, out) in out[rows.clone()].chunks_exact_mut(m).enumerate() {
                let taps = window.iter().skip(t * m + column).step_by(m);
                let sum = kernel.iter().zip(taps).map(|(w, x)| f64::from(*w) * f64::from(*x));
                out[column] = (sum.sum::<f64>() + bias) as f32;
            }
        }
        record.elements.copy_from_slice(&window[window.len() - before..]);
        record.store()?;
    }
    Ok(out)
}

/// The heads of a gated delta rule.
pub(crate) struct GatedDelta {
    pub(crate) n_head_k: u32,
    pub(crate) n_head_v: u32,
    pub(crate) head_dim_k: u32,
    pub(crate) head_dim_v: u32,
    pub(crate) order: HeadOrder,
    pub(crate) scale: f32,
}

impl GatedDelta {
    /// The head of queries and keys of head `h` of values.
    fn head_k(&self, h: u32) -> usize {
        let head = match self.order {
            HeadOrder::Grouped => h / (self.n_head_v / self.n_head_k),
            HeadOrder::Tiled => h % self.n_head_k,
        };
        head as usize
    }
}

/// The recurrence as `GatedDeltaParams` states it: token by token, head by head, row of S by row of S.
pub(crate) fn gated_delta(
    values: &Values<'_>,
    layer: u32,
    [q, k, v, g, beta]: &[Vec<f32>; 5],
    heads: &GatedDelta,
) -> Result<Vec<f32>> {
    let (dk, dv) = (heads.head_dim_k as usize, heads.head_dim_v as usize);
    let (n_k, n_v) = (heads.n_head_k as usize, heads.n_head_v as usize);
    let mut out: Vec<f32> = zeros(v.len() as u64)?;
    let seqs = values.seqs()?;
    check_slots(&seqs)?;
    for seq in seqs.iter().filter(|seq| seq.n_tokens > 0) {
        let mut record = Record::load(values, layer, seq)?;
        let first = seq.first_token as usize;
        for row in first..first + seq.n_tokens as usize {
            for (h, state) in (0..).zip(record.elements.chunks_exact_mut(dv * dk)) {
                let (at_k, at_v) = (row * n_k + heads.head_k(h), row * n_v + h as usize);
                let (q, k) = (&q[at_k * dk..][..dk], &k[at_k * dk..][..dk]);
                let (decay, beta) = (f64::from(g[at_v]).exp(), f64::from(beta[at_v]));
                let (v, out) = (&v[at_v * dv..][..dv], &mut out[at_v * dv..][..dv]);
                for ((s, v), out) in state.chunks_exact_mut(dk).zip(v).zip(out) {
                    let d = beta * (f64::from(*v) - decay * dot(s, k));
                    for (s, k) in s.iter_mut().zip(k) {
                        *s = (decay * f64::from(*s) + d * f64::from(*k)) as f32;
                    }
                    *out = (f64::from(heads.scale) * dot(s, q)) as f32;
                }
            }
        }
        record.store()?;
    }
    Ok(out)
}
