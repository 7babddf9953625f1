//! Attention on the host, over the core's tiles as they lie.
//!
//! For each sequence, KV head and run of query rows one pass over the blocks: a block's keys and values are decoded once for all query heads that share
//! them, and partial results are combined by running maximum and sum. So neither the cache nor the scores of a whole context are ever copied or held, a
//! layer may lie in any number of tiles, and stored types cost only their decoding.

use crate::buffer::Buffer;
use crate::kernels::{Kernels, Matrix};
use crate::kv::{Addresses, GroupPlaces, SeqPlaces, Side};
use crate::pool::Pool;
use std::sync::{Mutex, PoisonError};
use tegula_sdk::program::KvLayer;
use tegula_sdk::{Error, Result, Run};

/// Tokens of one task.
const TOKENS: usize = 32;
/// Below this many multiply-adds a second thread costs more than it wins.
const ALONE: usize = 400_000;

/// Parameters of the op.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Params {
    pub(crate) n_head: usize,
    pub(crate) scale: f32,
    pub(crate) softcap: f32,
    pub(crate) window: usize,
}

/// Working memory of one thread.
#[derive(Debug, Default)]
pub(crate) struct Work {
    q: Vec<f32>,
    k: Vec<f32>,
    kt: Vec<f32>,
    v: Vec<f32>,
    scores: Vec<f32>,
    acc: Vec<f32>,
    top: Vec<f32>,
    sum: Vec<f32>,
}

/// Bytes of [`Work`] at most, for one thread.
pub(crate) fn work_bytes(layer: &KvLayer, n_head: u32) -> u64 {
    let rep = u64::from(n_head / layer.n_head_kv.max(1));
    let (dk, dv, block) = (u64::from(layer.head_dim_k), u64::from(layer.head_dim_v), 32);
    let rows = rep * TOKENS as u64;
    4 * (rows * (dk + block + dv + 2) + block * (2 * dk + dv))
}

fn refill(vec: &mut Vec<f32>, len: usize, value: f32) {
    vec.clear();
    vec.resize(len, value);
}

/// One task: rows of a sequence, one KV head.
struct Task<'a> {
    seq: &'a SeqPlaces,
    k: &'a Addresses,
    v: &'a Addresses,
    head: usize,
    tokens: std::ops::Range<usize>,
}

/// What all tasks share.
struct Shared<'a> {
    kernels: Kernels,
    params: Params,
    sides: (Side, Side),
    block_len: usize,
    q: &'a [f32],
    sinks: Option<&'a [f32]>,
}

/// Output rows that tasks write, each to places of its own.
struct Output {
    ptr: *mut f32,
    len: usize,
}

#[expect(unsafe_code, reason = "tasks write disjoint parts of one output")]
mod output {
    use super::Output;

    // SAFETY: tasks write disjoint parts.
    unsafe impl Sync for Output {}

    impl Output {
        /// # Safety
        /// No other reference to these elements is alive.
        #[expect(clippy::mut_from_ref, reason = "the caller keeps parts apart")]
        pub(super) unsafe fn part(&self, begin: usize, len: usize) -> Option<&mut [f32]> {
            if begin.checked_add(len)? > self.len {
                return None;
            }
            // SAFETY: inside the output; nobody else uses the part by the caller's word.
            Some(unsafe { std::slice::from_raw_parts_mut(self.ptr.add(begin), len) })
        }
    }
}

/// `out[n_tokens, n_head * dv]` from `q[n_tokens, n_head * dk]` and what is stored.
#[expect(clippy::too_many_arguments, reason = "the op's operands and where it runs, each once")]
pub(crate) fn attention(
    run: &Run<'_, Buffer>,
    places: &GroupPlaces,
    layer: &KvLayer,
    params: Params,
    q: &[f32],
    sinks: Option<&[f32]>,
    out: &mut [f32],
    (pool, kernels, work): (&Pool, Kernels, &[Mutex<Work>]),
) -> Result<()> {
    let sides = (Side::new(layer, 0)?, Side::new(layer, 1)?);
    let mut addresses = Vec::with_capacity(places.seqs.len());
    for seq in &places.seqs {
        let k = Addresses::new(run, layer, (0, &sides.0), places.block_len, seq)?;
        let v = Addresses::new(run, layer, (1, &sides.1), places.block_len, seq)?;
        addresses.push((k, v));
    }
    let mut tasks = Vec::new();
    let mut cost = 0;
    for (seq, (k, v)) in places.seqs.iter().zip(&addresses) {
        cost += seq.n_tokens
            * (seq.first_pos + seq.n_tokens)
            * params.n_head
            * (sides.0.dim + sides.1.dim);
        // The last rows see most: they begin, so that threads end together.
        for begin in (0..seq.n_tokens).step_by(TOKENS).rev() {
            let tokens = begin..(begin + TOKENS).min(seq.n_tokens);
            let task = |head| Task { seq, k, v, head, tokens: tokens.clone() };
            tasks.extend((0..sides.0.n_head).map(task));
        }
    }
    let shared = Shared { kernels, params, sides, block_len: places.block_len, q, sinks };
    let output = Output { ptr: out.as_mut_ptr(), len: out.len() };
    let failed = Mutex::new(None);
    let one = |i: usize| {
        let own = work.iter().find_map(|work| work.try_lock().ok());
        let mut spare = Work::default();
        let result = match own {
            Some(mut own) => shared.task(&tasks[i], &mut own, &output),
            None => shared.task(&tasks[i], &mut spare, &output),
        };
        if let Err(error) = result {
            *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        }
    };
    if cost < ALONE {
        (0..tasks.len()).for_each(one);
    } else {
        pool.run(tasks.len(), &one);
    }
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

impl Shared<'_> {
    fn task(&self, task: &Task<'_>, work: &mut Work, output: &Output) -> Result<()> {
        let (dk, dv) = (self.sides.0.dim, self.sides.1.dim);
        let rep = self.params.n_head / self.sides.0.n_head;
        let rows = task.tokens.len() * rep;
        self.begin(task, work, rep)?;
        let block_len = self.block_len;
        let first = self.sees_from(task.seq.first_pos + task.tokens.start);
        let last = task.seq.first_pos + task.tokens.end - 1;
        for block in first / block_len..=last / block_len {
            let begin = block * block_len;
            let n = block_len.min(last + 1 - begin);
            let missing = || Error::invalid(format!("positions from {begin} on have no KvBlock"));
            let keys = task.k.rows(block, &self.sides.0, task.head, block_len, n);
            let values = task.v.rows(block, &self.sides.1, task.head, block_len, n);
            let (keys, values) = keys.zip(values).ok_or_else(missing)?;
            self.kernels.decode(self.sides.0.dtype, keys, &mut work.k[..n * dk]);
            self.kernels.decode(self.sides.1.dtype, values, &mut work.v[..n * dv]);
            self.scores(work, rows, n);
            self.weigh(task, work, rep, begin, n);
            let p = Matrix { data: &work.scores, stride: block_len };
            let v = Matrix { data: &work.v, stride: dv };
            self.kernels.product((rows, dv, n), p, v, &mut work.acc, dv);
        }
        self.end(task, work, rep, output)
    }

    /// The first position that a query at `pos` sees.
    fn sees_from(&self, pos: usize) -> usize {
        match self.params.window {
            0 => 0,
            window => (pos + 1).saturating_sub(window),
        }
    }

    /// Scaled queries, and the state of the running softmax: a sink is one more score, of value zero.
    fn begin(&self, task: &Task<'_>, work: &mut Work, rep: usize) -> Result<()> {
        let (dk, dv) = (self.sides.0.dim, self.sides.1.dim);
        let rows = task.tokens.len() * rep;
        work.q.clear();
        for t in task.tokens.clone() {
            let at = ((task.seq.first_token + t) * self.params.n_head + task.head * rep) * dk;
            let row = self.q.get(at..at + rep * dk);
            let row = row.ok_or_else(|| Error::invalid("fewer queries than the run has rows"))?;
            work.q.extend(row.iter().map(|q| q * self.params.scale));
        }
        refill(&mut work.acc, rows * dv, 0.0);
        refill(&mut work.top, rows, f32::NEG_INFINITY);
        refill(&mut work.sum, rows, 0.0);
        if let Some(sinks) = self.sinks {
            let sinks = sinks.get(task.head * rep..(task.head + 1) * rep);
            let sinks = sinks.ok_or_else(|| Error::invalid("fewer sinks than heads"))?;
            for row in 0..rows {
                work.top[row] = sinks[row % rep];
                work.sum[row] = 1.0;
            }
        }
        work.k.resize(self.block_len * dk, 0.0);
        work.kt.resize(self.block_len * dk, 0.0);
        work.v.resize(self.block_len * dv, 0.0);
        work.scores.resize(rows * self.block_len, 0.0);
        Ok(())
    }

    /// `scores[rows, n]`, capped.
    fn scores(&self, work: &mut Work, rows: usize, n: usize) {
        let (dk, stride) = (self.sides.0.dim, self.block_len);
        let q = Matrix { data: &work.q, stride: dk };
        if rows < 8 {
            let k = Matrix { data: &work.k, stride: dk };
            self.kernels.dots((rows, n, dk), q, k, &mut work.scores, stride);
        } else {
            for (j, key) in work.k.chunks_exact(dk).take(n).enumerate() {
                for (d, value) in key.iter().enumerate() {
                    work.kt[d * stride + j] = *value;
                }
            }
            work.scores[..rows * stride].fill(0.0);
            let k = Matrix { data: &work.kt, stride };
            self.kernels.product((rows, n, dk), q, k, &mut work.scores, stride);
        }
        let cap = self.params.softcap;
        if cap != 0.0 {
            for row in work.scores.chunks_exact_mut(stride).take(rows) {
                for score in &mut row[..n] {
                    *score = cap * (*score / cap).tanh();
                }
            }
        }
    }

    /// Scores become weights under each row's running maximum; what a row does not see weighs nothing.
    fn weigh(&self, task: &Task<'_>, work: &mut Work, rep: usize, begin: usize, n: usize) {
        let dv = self.sides.1.dim;
        for (row, scores) in work.scores.chunks_exact_mut(self.block_len).enumerate() {
            let Some(top) = work.top.get_mut(row) else { break };
            let pos = task.seq.first_pos + task.tokens.start + row / rep;
            let low = self.sees_from(pos).saturating_sub(begin).min(n);
            let high = (pos + 1).saturating_sub(begin).min(n).max(low);
            scores[..low].fill(0.0);
            scores[high..n].fill(0.0);
            let seen = &mut scores[low..high];
            let most = seen.iter().fold(f32::NEG_INFINITY, |most, s| most.max(*s));
            if seen.is_empty() || most == f32::NEG_INFINITY {
                seen.fill(0.0);
                continue;
            }
            if most > *top {
                let factor = (*top - most).exp();
                work.sum[row] *= factor;
                work.acc[row * dv..(row + 1) * dv].iter_mut().for_each(|x| *x *= factor);
                *top = most;
            }
            work.sum[row] += self.kernels.exponentials(seen, *top);
        }
    }

    fn end(&self, task: &Task<'_>, work: &Work, rep: usize, output: &Output) -> Result<()> {
        let dv = self.sides.1.dim;
        for (i, t) in task.tokens.clone().enumerate() {
            let at = ((task.seq.first_token + t) * self.params.n_head + task.head * rep) * dv;
            // SAFETY: this token and head belong to this task alone.
            #[expect(unsafe_code, reason = "tasks write disjoint parts of one output")]
            let out = unsafe { output.part(at, rep * dv) };
            let out =
                out.ok_or_else(|| Error::invalid("an output with fewer rows than the run"))?;
            for (g, out) in out.chunks_exact_mut(dv).enumerate() {
                let row = i * rep + g;
                let factor = 1.0 / work.sum[row];
                for (out, acc) in out.iter_mut().zip(&work.acc[row * dv..]) {
                    *out = acc * factor;
                }
            }
        }
        Ok(())
    }
}
