//! Attention against a plain f64 softmax over all visible positions. A failure here is a model that forgets, or that sees
//! its own future.
#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests hand KvBlocks over as pointers"
)]

mod common;

use common::{Rng, check, machines, random_blocks};
use tegula_cpu::kernels::{Attention, AttnSeq};
use tegula_cpu::pool::Pool;
use tegula_quant::DType;

#[derive(Clone, Copy)]
struct Case {
    heads: (usize, usize),
    dims: (usize, usize),
    dtypes: (DType, DType),
    block_len: usize,
    /// Per sequence: cached positions and rows, the rows being the last positions.
    seqs: &'static [(usize, usize)],
    softcap: Option<f32>,
    window: Option<u32>,
    causal: bool,
    sinks: bool,
    threads: usize,
}

const BASE: Case = Case {
    heads: (6, 2),
    dims: (64, 64),
    dtypes: (DType::F16, DType::F16),
    block_len: 16,
    seqs: &[(50, 17)],
    softcap: None,
    window: None,
    causal: true,
    sinks: false,
    threads: 3,
};

/// One sequence's K or V as separate blocks, with the values `[block][head][cell][dim]`.
fn cache(
    rng: &mut Rng,
    dtype: DType,
    n_blocks: usize,
    block_values: usize,
) -> (Vec<Vec<u8>>, Vec<Vec<f32>>) {
    (0..n_blocks).map(|_| random_blocks(rng, dtype, block_values)).unzip()
}

fn check_case(case: &Case) {
    let Case { heads: (n_head, n_head_kv), dims: (dk, dv), block_len, .. } = *case;
    let mut rng = Rng((n_head * 1000 + dk * 10 + block_len) as u64);
    let n_tokens: usize = case.seqs.iter().map(|s| s.1).sum();
    let q = rng.vec(n_tokens * n_head * dk, 1.5);
    let sinks = case.sinks.then(|| rng.vec(n_head, 3.0));
    let scale = 1.0 / (dk as f32).sqrt();
    let mut positions = Vec::new();
    let mut caches = Vec::new();
    for &(n_kv, n_rows) in case.seqs {
        positions.extend((n_kv - n_rows..n_kv).map(|p| p as u32));
        let n_blocks = n_kv.div_ceil(block_len);
        let k = cache(&mut rng, case.dtypes.0, n_blocks, n_head_kv * block_len * dk);
        let v = cache(&mut rng, case.dtypes.1, n_blocks, n_head_kv * block_len * dv);
        caches.push((k, v));
    }

    let mut want = vec![0.0f64; n_tokens * n_head * dv];
    let mut row = 0;
    for (&(n_kv, n_rows), (k, v)) in case.seqs.iter().zip(&caches) {
        for _ in 0..n_rows {
            for h in 0..n_head {
                let kv_head = h / (n_head / n_head_kv);
                let at = |values: &[Vec<f32>], p: usize, d: usize, dim: usize| {
                    f64::from(
                        values[p / block_len][(kv_head * block_len + p % block_len) * dim + d],
                    )
                };
                let position = positions[row] as usize;
                let visible: Vec<usize> = (0..n_kv)
                    .filter(|&p| !case.causal || p <= position)
                    .filter(|&p| case.window.is_none_or(|w| p + w as usize > position))
                    .collect();
                let scores: Vec<f64> = visible
                    .iter()
                    .map(|&p| {
                        let q = &q[(row * n_head + h) * dk..];
                        let score: f64 =
                            (0..dk).map(|d| f64::from(q[d]) * at(&k.1, p, d, dk)).sum();
                        let score = score * f64::from(scale);
                        case.softcap.map_or(score, |c| f64::from(c) * (score / f64::from(c)).tanh())
                    })
                    .collect();
                let sink = sinks.as_ref().map_or(0.0, |s| f64::from(s[h]).exp());
                let total: f64 = scores.iter().map(|s| s.exp()).sum::<f64>() + sink;
                for d in 0..dv {
                    let sum: f64 = visible
                        .iter()
                        .zip(&scores)
                        .map(|(&p, s)| s.exp() * at(&v.1, p, d, dv))
                        .sum();
                    want[(row * n_head + h) * dv + d] = if total > 0.0 { sum / total } else { 0.0 };
                }
            }
            row += 1;
        }
    }

    let pool = Pool::new(case.threads).unwrap();
    // With as much scratch as is wanted, and as little as does.
    let sizes = [Attention::scratch_len, Attention::scratch_min];
    for (kernels, scratch_size) in machines().into_iter().flat_map(|k| sizes.map(|size| (k, size)))
    {
        let tables: Vec<(Vec<*const u8>, Vec<*const u8>)> = caches
            .iter()
            .map(|(k, v)| {
                (k.0.iter().map(|b| b.as_ptr()).collect(), v.0.iter().map(|b| b.as_ptr()).collect())
            })
            .collect();
        let mut first_row = 0;
        let seqs: Vec<AttnSeq<'_>> = case
            .seqs
            .iter()
            .zip(&tables)
            .map(|(&(n_kv, n_rows), (k_blocks, v_blocks))| {
                let seq = AttnSeq { k_blocks, v_blocks, n_kv, first_row, n_rows };
                first_row += n_rows;
                seq
            })
            .collect();
        let mut out = vec![f32::NAN; want.len()];
        let mut scratch = vec![f32::NAN; scratch_size(case.threads, n_head, n_head_kv, dk, dv)];
        let mut args = Attention {
            n_head,
            n_head_kv,
            head_dim_k: dk,
            head_dim_v: dv,
            k_dtype: case.dtypes.0,
            v_dtype: case.dtypes.1,
            block_len,
            scale,
            softcap: case.softcap,
            window: case.window,
            causal: case.causal,
            sinks: sinks.as_deref(),
            seqs: &seqs,
            positions: &positions,
            q: &q,
            out: &mut out,
        };
        // SAFETY: the tables name blocks of the size that the arguments say.
        unsafe { kernels.attention(&pool, &mut args, &mut scratch) }.unwrap();
        // Scores are below about 15 and off by a few 1e-6 (64 terms), so are probabilities, relatively; values are below 3.
        let what = format!("{:?} {:?} on {}", case.heads, case.seqs, kernels.isa().name());
        check(&what, &out, &want, |_| 2e-5);
    }
}

#[test]
fn shapes() {
    for heads in [(1, 1), (2, 1), (3, 1), (9, 3), (8, 2), (5, 1), (6, 1), (14, 2), (4, 4), (60, 1)]
    {
        for seqs in [&[(1, 1)][..], &[(50, 1)], &[(50, 2)], &[(50, 17)], &[(97, 64)]] {
            check_case(&Case { heads, seqs, ..BASE });
        }
    }
}

#[test]
fn dimensions_and_block_lengths() {
    for dims in [(64, 64), (80, 96), (40, 24), (13, 7), (128, 32)] {
        for block_len in [1, 5, 16, 64, 256] {
            for seqs in [&[(130, 1)][..], &[(61, 9)]] {
                let dtypes = (DType::F32, DType::F16);
                check_case(&Case { dims, block_len, seqs, dtypes, ..BASE });
            }
        }
    }
}

#[test]
fn cache_types() {
    for k in [DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0, DType::Q5_1] {
        for v in [DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0, DType::Q5_1] {
            for seqs in [&[(70, 1)][..], &[(70, 5)]] {
                check_case(&Case { dtypes: (k, v), seqs, ..BASE });
            }
        }
    }
}

#[test]
fn masks_caps_and_sinks() {
    for seqs in [&[(1, 1)][..], &[(120, 1)], &[(120, 40)], &[(33, 33)], &[(300, 7)]] {
        for window in [None, Some(1), Some(5), Some(48), Some(49), Some(1000)] {
            for causal in [true, false] {
                check_case(&Case { seqs, window, causal, ..BASE });
            }
            check_case(&Case { seqs, window, softcap: Some(2.0), sinks: true, ..BASE });
        }
    }
}

/// Several sequences of different length in one run, and contexts long enough to be split over threads.
#[test]
fn sequences_and_splits() {
    for threads in [1, 2, 8] {
        check_case(&Case { seqs: &[(5, 1), (200, 1), (31, 31), (64, 2)], threads, ..BASE });
        check_case(&Case { seqs: &[(1500, 1)], heads: (3, 1), threads, sinks: true, ..BASE });
        check_case(&Case { seqs: &[(1500, 2), (700, 1)], heads: (4, 1), threads, ..BASE });
        check_case(&Case { seqs: &[(1100, 1)], heads: (2, 1), window: Some(600), threads, ..BASE });
    }
}
