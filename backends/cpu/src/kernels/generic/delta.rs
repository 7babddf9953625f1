//! The gated delta rule (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", equation 10): each head has a state S of
//! `[head_dim_v][head_dim_k]` in the sequence's record, changed in place by each token:
//!
//! ```text
//! d = beta (v - exp(g) S k)
//! S = exp(g) S + d k^T
//! y = scale S q
//! ```
//!
//! A row of S meets its own element of v and all of k and q, and no other row. So a task owns some rows of one head of one sequence and
//! takes them through all tokens: four at a time, which stay in the first-level cache and share the loads of k and q. Decays are worked
//! out for a slab of tokens before its rows, since all rows need them.

use std::ops::Range;

use super::shared::SharedMut;
use super::state::{StateSeq, WORK_SHARED_MIN, check_seqs, piece};
use super::{Kernel, Simd};
use crate::kernels::{KernelError, Kernels, expect_len};
use crate::pool::Pool;

/// Rows of S that go through the tokens together.
const ROWS: usize = 4;
/// Tokens whose decays are worked out at once.
const SLAB: usize = 64;

/// Which head of queries and keys a head of values goes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadPairs {
    /// Neighbours share: head h goes with `h / (n_head_v / n_head_k)`.
    Grouped,
    /// Head h goes with `h % n_head_k`.
    Tiled,
}

/// The arguments of the rule.
#[derive(Debug)]
pub struct GatedDelta<'a> {
    /// Heads of queries and keys.
    pub n_head_k: usize,
    /// Heads of values; a multiple of `n_head_k`.
    pub n_head_v: usize,
    /// Elements of a query and of a key.
    pub head_dim_k: usize,
    /// Elements of a value.
    pub head_dim_v: usize,
    /// Which heads go together.
    pub pairs: HeadPairs,
    /// Multiplies the result.
    pub scale: f32,
    /// The sequences, whose rows are those of the arguments in order.
    pub seqs: &'a [StateSeq],
    /// `[n, n_head_k * head_dim_k]`.
    pub q: &'a [f32],
    /// `[n, n_head_k * head_dim_k]`.
    pub k: &'a [f32],
    /// `[n, n_head_v * head_dim_v]`.
    pub v: &'a [f32],
    /// `[n, n_head_v]`: the logarithm of the decay.
    pub g: &'a [f32],
    /// `[n, n_head_v]`.
    pub beta: &'a [f32],
    /// `[n, n_head_v * head_dim_v]`, written entirely.
    pub y: &'a mut [f32],
}

impl GatedDelta<'_> {
    fn head_k(&self, head: usize) -> usize {
        match self.pairs {
            HeadPairs::Grouped => head / (self.n_head_v / self.n_head_k),
            HeadPairs::Tiled => head % self.n_head_k,
        }
    }

    /// Fails unless all fits; gives the number of rows.
    fn check(&self) -> Result<usize, KernelError> {
        const KERNEL: &str = "gated_delta";
        if self.n_head_k == 0 || self.n_head_v == 0 || !self.n_head_v.is_multiple_of(self.n_head_k)
        {
            return Err(KernelError::Shape {
                kernel: KERNEL,
                what: "the number of value heads",
                got: self.n_head_v,
                allowed: "it must be a positive multiple of that of key heads",
            });
        }
        let n = self.g.len() / self.n_head_v;
        let (row_k, row_v) = ([self.n_head_k, self.head_dim_k], [self.n_head_v, self.head_dim_v]);
        expect_len(KERNEL, "q", &[n, row_k[0], row_k[1]], self.q.len())?;
        expect_len(KERNEL, "k", &[n, row_k[0], row_k[1]], self.k.len())?;
        expect_len(KERNEL, "v", &[n, row_v[0], row_v[1]], self.v.len())?;
        expect_len(KERNEL, "y", &[n, row_v[0], row_v[1]], self.y.len())?;
        expect_len(KERNEL, "g", &[n, self.n_head_v], self.g.len())?;
        expect_len(KERNEL, "beta", &[n, self.n_head_v], self.beta.len())?;
        check_seqs(KERNEL, self.seqs, n)?;
        Ok(n)
    }
}

/// Some rows of one head of one sequence.
struct DeltaTask<'a> {
    args: &'a GatedDelta<'a>,
    y: SharedMut<'a, f32>,
    seq: StateSeq,
    head: usize,
    /// Rows of S.
    rows: Range<usize>,
}

impl Kernel for DeltaTask<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (a, seq) = (self.args, self.seq);
        let (dk, dv) = (a.head_dim_k, a.head_dim_v);
        // SAFETY: the record holds `[n_head_v][dv][dk]`, of which these rows are this task's own.
        let state = unsafe { seq.record.add(self.head * dv * dk) };
        if seq.is_new {
            // SAFETY: as above.
            unsafe { state.add(self.rows.start * dk).write_bytes(0, self.rows.len() * dk) };
        }
        let mut decay = [0.0f32; SLAB];
        for first in (0..seq.n_rows).step_by(SLAB) {
            let tokens = first..seq.n_rows.min(first + SLAB);
            for (decay, t) in decay.iter_mut().zip(tokens.clone()) {
                *decay = a.g[(seq.first_row + t) * a.n_head_v + self.head].exp();
            }
            let mut row = self.rows.start;
            while row < self.rows.end {
                // SAFETY: these rows lie in S.
                unsafe {
                    let state = state.add(row * dk);
                    if self.rows.end - row >= ROWS {
                        self.slab::<S, ROWS>(s, state, row, tokens.clone(), &decay);
                        row += ROWS;
                    } else {
                        self.slab::<S, 1>(s, state, row, tokens.clone(), &decay);
                        row += 1;
                    }
                }
            }
        }
    }
}

impl DeltaTask<'_> {
    /// Takes `R` rows of S, from `row` on, through some tokens of the sequence.
    ///
    /// # Safety
    /// `state` is valid for the rows, which are this task's own.
    #[inline(always)]
    unsafe fn slab<S: Simd, const R: usize>(
        &self,
        s: S,
        state: *mut f32,
        row: usize,
        tokens: Range<usize>,
        decay: &[f32; SLAB],
    ) {
        let a = self.args;
        let (dk, dv, head_k) = (a.head_dim_k, a.head_dim_v, a.head_k(self.head));
        // SAFETY: the arguments have rows for all tokens (checked), and S has these rows.
        unsafe {
            let mut rows = [state; R];
            for (r, row) in rows.iter_mut().enumerate() {
                *row = row.add(r * dk);
            }
            for (t, &decay) in tokens.zip(decay) {
                let token = self.seq.first_row + t;
                let at_k = (token * a.n_head_k + head_k) * dk;
                let (q, k) = (a.q.as_ptr().add(at_k), a.k.as_ptr().add(at_k));
                let at_v = token * a.n_head_v + self.head;
                let v = a.v.as_ptr().add(at_v * dv + row);
                let y = self.y.as_mut_ptr().add(at_v * dv + row);
                let known = dots::<S, R>(s, rows, k, dk);
                let mut d = [0.0; R];
                for (r, d) in d.iter_mut().enumerate() {
                    *d = a.beta[at_v] * (v.add(r).read() - decay * known[r]);
                }
                let out = turn::<S, R>(s, rows, (q, k), decay, d, dk);
                for (r, out) in out.iter().enumerate() {
                    y.add(r).write(a.scale * out);
                }
            }
        }
    }
}

/// `sum of rows[r][i] * k[i]`.
///
/// # Safety
/// All are readable for `n`.
#[inline(always)]
unsafe fn dots<S: Simd, const R: usize>(
    s: S,
    rows: [*mut f32; R],
    k: *const f32,
    n: usize,
) -> [f32; R] {
    // SAFETY: places stay below `n`.
    unsafe {
        // Two sums for each row: one alone would wait for its own last addition.
        let mut sums = [[s.splat(0.0); 2]; R];
        let step = 2 * S::LANES;
        let whole = n / step * step;
        for i in (0..whole).step_by(step) {
            let kv = [s.load(k.add(i)), s.load(k.add(i + S::LANES))];
            for (row, sums) in rows.iter().zip(&mut sums) {
                sums[0] = s.fma(s.load(row.add(i)), kv[0], sums[0]);
                sums[1] = s.fma(s.load(row.add(i + S::LANES)), kv[1], sums[1]);
            }
        }
        let mut out = [0.0; R];
        for r in 0..R {
            out[r] = s.sum(s.add(sums[r][0], sums[r][1]));
            for i in whole..n {
                out[r] += rows[r].add(i).read() * k.add(i).read();
            }
        }
        out
    }
}

/// `rows[r] = decay * rows[r] + d[r] * k`; gives `sum of rows[r][i] * q[i]` after it.
///
/// # Safety
/// All are valid for `n`; rows do not overlap.
#[inline(always)]
unsafe fn turn<S: Simd, const R: usize>(
    s: S,
    rows: [*mut f32; R],
    (q, k): (*const f32, *const f32),
    decay: f32,
    d: [f32; R],
    n: usize,
) -> [f32; R] {
    // SAFETY: places stay below `n`.
    unsafe {
        let (mut sums, decays) = ([s.splat(0.0); R], s.splat(decay));
        let whole = n / S::LANES * S::LANES;
        for i in (0..whole).step_by(S::LANES) {
            let (qv, kv) = (s.load(q.add(i)), s.load(k.add(i)));
            for r in 0..R {
                let at = rows[r].add(i);
                let turned = s.fma(s.splat(d[r]), kv, s.mul(decays, s.load(at)));
                s.store(at, turned);
                sums[r] = s.fma(turned, qv, sums[r]);
            }
        }
        let mut out = [0.0; R];
        for r in 0..R {
            out[r] = s.sum(sums[r]);
            for i in whole..n {
                let at = rows[r].add(i);
                let turned = decay * at.read() + d[r] * k.add(i).read();
                at.write(turned);
                out[r] += turned * q.add(i).read();
            }
        }
        out
    }
}

impl Kernels {
    /// The rule, on the threads of `pool`; records become the states after the last token.
    ///
    /// # Errors
    /// [`KernelError`] when lengths, heads or sequences do not fit each other (nothing is written then), or when a task panicked.
    ///
    /// # Safety
    /// Records are valid for `n_head_v * head_dim_v * head_dim_k` f32, each of them once, and nobody else touches them meanwhile.
    pub unsafe fn gated_delta(
        self,
        pool: &Pool,
        args: &mut GatedDelta<'_>,
    ) -> Result<(), KernelError> {
        let n_tokens = args.check()?;
        let y = SharedMut::new(std::mem::take(&mut args.y));
        let args = &*args;
        let (n_head, dv) = (args.n_head_v, args.head_dim_v);
        let n_heads = args.seqs.len() * n_head;
        let work = n_tokens.saturating_mul(n_head * dv * args.head_dim_k);
        let is_much = work >= WORK_SHARED_MIN;
        // A head is one task, or several where heads alone would leave threads without work.
        let wanted = if is_much { (4 * pool.n_threads()).div_ceil(n_heads.max(1)) } else { 1 };
        let rows = dv.div_ceil(wanted).next_multiple_of(ROWS);
        let parts = dv.div_ceil(rows.max(1));
        let task = |_: usize, task: usize| {
            let (head, rows) = (task / parts, piece(task % parts, rows, dv));
            let seq = args.seqs[head / n_head];
            if seq.n_rows > 0 {
                self.dispatch(DeltaTask { args, y, seq, head: head % n_head, rows });
            }
        };
        let n_tasks = n_heads * parts;
        if is_much {
            return Ok(pool.run(n_tasks, task)?);
        }
        (0..n_tasks).for_each(|index| task(0, index));
        Ok(())
    }
}
