//! Attention over the paged KV cache: for each query the scores of all keys it sees, a softmax in two passes, the mean of values.

use super::kv::{self, KvSide};
use super::matmul::dot;
use crate::values::{Values, zeros};
use tegula_sdk::{Error, Result};

/// Parameters of an attention op.
pub(crate) struct Params {
    /// Query heads; a multiple of the layer's n_head_kv.
    pub(crate) n_head: u32,
    /// Multiplies every score.
    pub(crate) scale: f32,
    /// Scores become `softcap * tanh(score / softcap)`; 0 for none.
    pub(crate) softcap: f32,
    /// A query at p sees positions above `p - window`; 0 for all up to p.
    pub(crate) window: u32,
}

impl Params {
    /// The first position that a query at `pos` sees.
    fn first_seen(&self, pos: u64) -> u64 {
        if self.window == 0 { 0 } else { (pos + 1).saturating_sub(self.window.into()) }
    }
}

/// `[n_tokens, n_head * head_dim_v]` for queries `[n_tokens, n_head * head_dim_k]`. Keys and values of a head are decoded once
/// per sequence and serve all its tokens and all query heads that read it.
pub(crate) fn attention(
    values: &Values<'_>,
    kv_layer: u32,
    q: &[f32],
    sinks: Option<&[f32]>,
    params: &Params,
) -> Result<Vec<f32>> {
    let layer = kv::layer(values, kv_layer)?;
    let (keys, vals) = (KvSide::keys(values, &layer)?, KvSide::values(values, &layer)?);
    let (dk, dv) = (layer.head_dim_k as usize, layer.head_dim_v as usize);
    let n_head = params.n_head as usize;
    let per_kv = n_head / layer.n_head_kv as usize;
    let mut out: Vec<f32> = zeros((q.len() / dk * dv) as u64)?;
    for seq in values.seqs()?.iter().filter(|seq| seq.n_tokens > 0) {
        let first_pos = u64::from(seq.first_pos);
        let begin = params.first_seen(first_pos);
        let end = first_pos + u64::from(seq.n_tokens);
        let mut head = Head { begin, scores: zeros(end - begin)?, sum: zeros(dv as u64)? };
        for head_kv in 0..layer.n_head_kv {
            let k = keys.load(seq, head_kv, begin, end)?;
            let v = vals.load(seq, head_kv, begin, end)?;
            for t in 0..u64::from(seq.n_tokens) {
                for h in (0..per_kv).map(|h| head_kv as usize * per_kv + h) {
                    let row = (u64::from(seq.first_token) + t) as usize * n_head + h;
                    let q = &q[row * dk..][..dk];
                    let sink = sinks.and_then(|sinks| sinks.get(h)).copied();
                    let out = &mut out[row * dv..][..dv];
                    head.attend(params, first_pos + t, q, (&k, &v), sink, out)?;
                }
            }
        }
    }
    Ok(out)
}

/// Room for the work on one head.
struct Head {
    /// Position of the first key.
    begin: u64,
    scores: Vec<f64>,
    sum: Vec<f64>,
}

impl Head {
    /// One query at `pos` over one head. A sink is one more score, neither scaled nor capped, whose value is zero.
    fn attend(
        &mut self,
        params: &Params,
        pos: u64,
        q: &[f32],
        (k, v): (&[f32], &[f32]),
        sink: Option<f32>,
        out: &mut [f32],
    ) -> Result<()> {
        let first = (params.first_seen(pos) - self.begin) as usize;
        let last = (pos - self.begin) as usize;
        let scores = self.scores.get_mut(first..=last);
        let scores = scores.ok_or_else(|| Error::invalid(format!("no key at {pos}")))?;
        for (score, k) in scores.iter_mut().zip(k.chunks_exact(q.len()).skip(first)) {
            *score = dot(q, k) * f64::from(params.scale);
            if params.softcap != 0.0 {
                let cap = f64::from(params.softcap);
                *score = cap * (*score / cap).tanh();
            }
        }
        let sink = sink.map_or(f64::NEG_INFINITY, f64::from);
        let max = scores.iter().copied().fold(sink, f64::max);
        let mut total = (sink - max).exp();
        self.sum.fill(0.0);
        for (score, v) in scores.iter().zip(v.chunks_exact(out.len()).skip(first)) {
            let weight = (score - max).exp();
            total += weight;
            for (sum, v) in self.sum.iter_mut().zip(v) {
                *sum += weight * f64::from(*v);
            }
        }
        for (out, sum) in out.iter_mut().zip(&self.sum) {
            *out = (sum / total) as f32;
        }
        Ok(())
    }
}
