//! Ops with recurrent state, on every instruction set, against f64 over the whole sequence. A failure here is a model that forgets what it
//! read, or answers differently when its prompt is cut elsewhere.
#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests hand records over as pointers"
)]

mod common;

use common::{Rng, check, machines, random_blocks};
use tegula_cpu::kernels::{
    ConvState, GatedDelta, HeadPairs, KernelError, Kernels, RowTile, StateSeq,
};
use tegula_cpu::pool::Pool;
use tegula_quant::DType;

/// Rows of each run of two sequences, that of the first before those of the second.
const RUNS: [[usize; 2]; 5] = [[1, 70], [2, 0], [0, 1], [67, 1], [1, 3]];

/// The sequences of a run whose records are `records`.
fn seqs(records: &mut [Vec<f32>; 2], run: usize) -> Vec<StateSeq> {
    let mut first_row = 0;
    let seqs = records.iter_mut().enumerate().map(|(i, record)| {
        let is_new = RUNS[..run].iter().all(|rows| rows[i] == 0);
        let seq = StateSeq { record: record.as_mut_ptr(), is_new, first_row, n_rows: RUNS[run][i] };
        first_row += seq.n_rows;
        seq
    });
    seqs.collect()
}

/// Rows that sequence `i` has had before run `run`.
fn before(i: usize, run: usize) -> usize {
    RUNS[..run].iter().map(|rows| rows[i]).sum()
}

/// A run's rows of both sequences.
fn rows_of(all: &[Vec<f32>; 2], run: usize, row: usize) -> Vec<f32> {
    let part = |i: usize| {
        let first = before(i, run) * row;
        all[i][first..first + RUNS[run][i] * row].to_vec()
    };
    [part(0), part(1)].concat()
}

fn total(i: usize) -> usize {
    before(i, RUNS.len())
}

#[test]
fn convolutions_over_runs() {
    let pools = [Pool::new(1).unwrap(), Pool::new(3).unwrap()];
    for (dtype, m, kernel, has_bias) in
        [(DType::F32, 300, 4, true), (DType::F16, 67, 2, false), (DType::BF16, 1, 9, true)]
    {
        let mut rng = Rng(m as u64);
        let (bytes, w) = random_blocks(&mut rng, dtype, m * kernel);
        let row_bytes = kernel * dtype.block_bytes();
        let cut = m.div_ceil(2);
        let tile = |first_row: usize, n_rows| RowTile {
            data: bytes[first_row * row_bytes..].as_ptr(),
            first_row,
            n_rows,
        };
        let tiles = [tile(0, cut), tile(cut, m - cut)];
        let tiles = if m == cut { &tiles[..1] } else { &tiles[..] };
        let x = [rng.vec(total(0) * m, 2.0), rng.vec(total(1) * m, 2.0)];
        let bias = rng.vec(m, 1.0);
        let want = |i: usize, t: usize, c: usize| {
            let taps = (0..kernel).filter(|j| t + j + 1 >= kernel);
            let taps = taps.map(|j| {
                f64::from(w[c * kernel + j]) * f64::from(x[i][(t + j + 1 - kernel) * m + c])
            });
            taps.sum::<f64>() + if has_bias { f64::from(bias[c]) } else { 0.0 }
        };
        for kernels in machines() {
            for pool in &pools {
                let mut records =
                    [vec![f32::NAN; (kernel - 1) * m], vec![f32::NAN; (kernel - 1) * m]];
                for (run, n_rows) in RUNS.iter().enumerate() {
                    let x = rows_of(&x, run, m);
                    let mut y = vec![f32::NAN; x.len()];
                    let seqs = seqs(&mut records, run);
                    let mut args = ConvState {
                        m,
                        kernel,
                        dtype,
                        tiles,
                        bias: has_bias.then_some(&bias),
                        seqs: &seqs,
                        x: &x,
                        y: &mut y,
                    };
                    let mut scratch =
                        vec![f32::NAN; ConvState::scratch_len(pool.n_threads(), kernel)];
                    // SAFETY: the records and tiles live and have these sizes.
                    unsafe { kernels.conv_state(pool, &mut args, &mut scratch) }.unwrap();
                    let rows = (0..2).flat_map(|i| (0..n_rows[i]).map(move |t| (i, t)));
                    let want: Vec<f64> = rows
                        .flat_map(|(i, t)| (0..m).map(move |c| (i, t, c)))
                        .map(|(i, t, c)| want(i, before(i, run) + t, c))
                        .collect();
                    let what =
                        format!("{dtype} {m} by {kernel}, run {run}, {}", kernels.isa().name());
                    // At most ten terms below 5.
                    check(&what, &y, &want, |_| 10.0 * 5.0 * f64::from(f32::EPSILON));
                }
            }
        }
    }
}

struct Heads {
    n_head_k: usize,
    n_head_v: usize,
    dk: usize,
    dv: usize,
    pairs: HeadPairs,
}

/// The inputs of one sequence: q, k, v, g, beta.
type Inputs = [Vec<f32>; 5];

fn delta_inputs(rng: &mut Rng, heads: &Heads, n: usize) -> Inputs {
    let mut k = rng.vec(n * heads.n_head_k * heads.dk, 1.0);
    for k in k.chunks_exact_mut(heads.dk) {
        let norm = k.iter().map(|k| k * k).sum::<f32>().sqrt();
        k.iter_mut().for_each(|k| *k /= norm);
    }
    let q = rng.vec(n * heads.n_head_k * heads.dk, 1.0);
    let v = rng.vec(n * heads.n_head_v * heads.dv, 1.0);
    let g = rng.vec(n * heads.n_head_v, 1.0).iter().map(|g| g - 1.0).collect();
    let beta = rng.vec(n * heads.n_head_v, 0.5).iter().map(|b| b + 0.5).collect();
    [q, k, v, g, beta]
}

/// The rule as it is written, in f64.
fn delta_oracle(heads: &Heads, [q, k, v, g, beta]: &Inputs, scale: f32, n: usize) -> Vec<f64> {
    let Heads { n_head_k, n_head_v, dk, dv, .. } = *heads;
    let mut state = vec![0.0f64; n_head_v * dv * dk];
    let mut out = vec![0.0; n * n_head_v * dv];
    for t in 0..n {
        for h in 0..n_head_v {
            let head_k = match heads.pairs {
                HeadPairs::Grouped => h / (n_head_v / n_head_k),
                HeadPairs::Tiled => h % n_head_k,
            };
            let (at_k, at_v) = ((t * n_head_k + head_k) * dk, t * n_head_v + h);
            for r in 0..dv {
                let s = &mut state[(h * dv + r) * dk..][..dk];
                s.iter_mut().for_each(|s| *s *= f64::from(g[at_v]).exp());
                let known: f64 = s.iter().zip(&k[at_k..]).map(|(s, k)| s * f64::from(*k)).sum();
                let d = f64::from(beta[at_v]) * (f64::from(v[at_v * dv + r]) - known);
                s.iter_mut().zip(&k[at_k..]).for_each(|(s, k)| *s += d * f64::from(*k));
                let y: f64 = s.iter().zip(&q[at_k..]).map(|(s, q)| s * f64::from(*q)).sum();
                out[at_v * dv + r] = f64::from(scale) * y;
            }
        }
    }
    out
}

#[test]
fn delta_rule_over_runs() {
    let pools = [Pool::new(1).unwrap(), Pool::new(3).unwrap()];
    for heads in [
        Heads { n_head_k: 2, n_head_v: 4, dk: 128, dv: 128, pairs: HeadPairs::Grouped },
        Heads { n_head_k: 3, n_head_v: 9, dk: 33, dv: 5, pairs: HeadPairs::Tiled },
        Heads { n_head_k: 1, n_head_v: 1, dk: 1, dv: 3, pairs: HeadPairs::Grouped },
        Heads { n_head_k: 1, n_head_v: 2, dk: 24, dv: 70, pairs: HeadPairs::Tiled },
    ] {
        let Heads { n_head_k, n_head_v, dk, dv, pairs } = heads;
        let scale = 0.25;
        let mut rng = Rng(dk as u64);
        let inputs = [0, 1].map(|i| delta_inputs(&mut rng, &heads, total(i)));
        let want = [0, 1].map(|i| delta_oracle(&heads, &inputs[i], scale, total(i)));
        for kernels in machines() {
            for pool in &pools {
                let mut records = [(); 2].map(|()| vec![f32::NAN; n_head_v * dv * dk]);
                for (run, n_rows) in RUNS.iter().enumerate() {
                    let rows = [n_head_k * dk, n_head_k * dk, n_head_v * dv, n_head_v, n_head_v];
                    let part = |j: usize| {
                        let both = [inputs[0][j].clone(), inputs[1][j].clone()];
                        rows_of(&both, run, rows[j])
                    };
                    let [q, k, v, g, beta] = [part(0), part(1), part(2), part(3), part(4)];
                    let mut y = vec![f32::NAN; v.len()];
                    let seqs = seqs(&mut records, run);
                    let mut args = GatedDelta {
                        n_head_k,
                        n_head_v,
                        head_dim_k: dk,
                        head_dim_v: dv,
                        pairs,
                        scale,
                        seqs: &seqs,
                        q: &q,
                        k: &k,
                        v: &v,
                        g: &g,
                        beta: &beta,
                        y: &mut y,
                    };
                    // SAFETY: the records live and have this size.
                    unsafe { kernels.gated_delta(pool, &mut args) }.unwrap();
                    let row = n_head_v * dv;
                    let want: Vec<f64> = (0..2)
                        .flat_map(|i| {
                            let first = before(i, run) * row;
                            want[i][first..first + n_rows[i] * row].to_vec()
                        })
                        .collect();
                    let what = format!(
                        "{n_head_v} heads of {dk} by {dv}, run {run}, {}",
                        kernels.isa().name()
                    );
                    // State is of the size of v, and a result a sum of dk products with q; what one token rounds fades with the decay.
                    let bound = 8.0 * (dk as f64).sqrt() * f64::from(f32::EPSILON);
                    check(&what, &y, &want, |_| bound);
                }
            }
        }
    }
}

/// Rows outside the run, or of two sequences, would be written by two tasks at once.
#[test]
fn sequences_that_do_not_fit_are_refused() {
    let pool = Pool::new(1).unwrap();
    let (x, w, mut record) = ([0.0f32; 12], [0.0f32; 8], [0.0f32; 4]);
    let tiles = [RowTile { data: w.as_ptr().cast(), first_row: 0, n_rows: 4 }];
    for (first_row, n_rows) in [(1, 2), (0, 2), (0, 4), (0, usize::MAX)] {
        let record = record.as_mut_ptr();
        let seqs = [StateSeq { record, is_new: true, first_row, n_rows }];
        let mut y = [0.0f32; 12];
        let mut args = ConvState {
            m: 4,
            kernel: 2,
            dtype: DType::F32,
            tiles: &tiles,
            bias: None,
            seqs: &seqs,
            x: &x,
            y: &mut y,
        };
        let mut scratch = vec![0.0; ConvState::scratch_len(1, 2)];
        // SAFETY: the record and the tile live; refused arguments are not followed.
        let result = unsafe { Kernels::detect().conv_state(&pool, &mut args, &mut scratch) };
        assert!(
            matches!(result, Err(KernelError::Shape { .. } | KernelError::Length { .. })),
            "{first_row} {n_rows}: {result:?}"
        );
    }
}
