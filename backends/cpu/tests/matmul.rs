//! Matmul against f64 sums over exactly decoded weights. A failure here is a model that answers nonsense, or subtly
//! worse than its file allows.
#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests hand weights over as pointers"
)]

mod common;

use common::{Rng, check, machines, random_blocks, rounding};
use tegula_cpu::kernels::{KernelError, Kernels, MatMul, RowTile};
use tegula_cpu::pool::Pool;
use tegula_quant::DType;

struct Case {
    dtype: DType,
    n_in: usize,
    n_out: usize,
    /// Rows where a new tile starts.
    cuts: &'static [usize],
    n_tokens: usize,
    bias: bool,
}

/// Weights in separate allocations, one per tile, so that a read across a tile's end is a read out of bounds.
fn tiles(case: &Case, bytes: &[u8]) -> (Vec<Vec<u8>>, Vec<RowTile>) {
    let row_bytes = case.n_in / case.dtype.block_len() * case.dtype.block_bytes();
    let mut ends: Vec<usize> = case.cuts.iter().copied().filter(|&c| c < case.n_out).collect();
    ends.push(case.n_out);
    let mut first = 0;
    let (mut chunks, mut tiles) = (Vec::new(), Vec::new());
    for end in ends {
        let chunk = bytes[first * row_bytes..end * row_bytes].to_vec();
        tiles.push(RowTile { data: chunk.as_ptr(), first_row: first, n_rows: end - first });
        chunks.push(chunk);
        first = end;
    }
    (chunks, tiles)
}

fn run(
    kernels: Kernels,
    pool: &Pool,
    case: &Case,
    tiles: &[RowTile],
    x: &[f32],
    bias: Option<&[f32]>,
) -> Vec<f32> {
    let Case { dtype, n_in, n_out, n_tokens, .. } = *case;
    // How many tokens go at a time follows from the scratch, and the result must not.
    let mut results = [MatMul::scratch_len, MatMul::scratch_min].map(|needed| {
        let mut y = vec![f32::NAN; n_tokens * n_out];
        let mut scratch = vec![f32::NAN; needed(pool.n_threads(), n_in, n_tokens)];
        let args = MatMul { dtype, n_in, n_out, tiles, n_tokens, x, bias, y: &mut y };
        // SAFETY: the tiles are those of `tiles`, whose chunks live in the caller.
        unsafe { kernels.matmul(pool, args, &mut scratch) }.unwrap();
        y
    });
    let [roomy, tight] = &mut results;
    let are_same = roomy.iter().zip(&*tight).all(|(a, b)| a == b || a.is_nan() && b.is_nan());
    assert!(are_same, "{dtype} {n_in}x{n_out}, {n_tokens} tokens: {roomy:?} {tight:?}");
    std::mem::take(roomy)
}

fn check_case(pool: &Pool, case: &Case) {
    let mut rng = Rng(case.n_in as u64 * 31 + case.n_out as u64 * 7 + case.n_tokens as u64);
    let (bytes, w) = random_blocks(&mut rng, case.dtype, case.n_in * case.n_out);
    let (_chunks, tiles) = tiles(case, &bytes);
    let x = rng.vec(case.n_tokens * case.n_in, 3.0);
    let bias = case.bias.then(|| rng.vec(case.n_out, 5.0));
    let (mut want, mut bound) = (Vec::new(), Vec::new());
    for x in x.chunks_exact(case.n_in) {
        for (o, w) in w.chunks_exact(case.n_in).enumerate() {
            let sum: f64 = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
            let b = bias.as_ref().map_or(0.0, |b| f64::from(b[o]));
            want.push(sum + b);
            // The matrix path adds `n_in` terms one after the other. Each addition rounds by half a unit of a partial
            // sum that is at most the sum of magnitudes, and roundings add up like a random walk. Scales are factored
            // out in decode, so the magnitude of a term is that of its block's greatest weight.
            let mut magnitude = b.abs();
            let len = case.dtype.block_len().max(32);
            for (x, w) in x.chunks(len).zip(w.chunks(len)) {
                let greatest = f64::from(w.iter().fold(0.0f32, |m, w| m.max(w.abs())));
                magnitude += greatest * x.iter().map(|x| f64::from(x.abs())).sum::<f64>();
            }
            bound.push(
                rounding(case.dtype, x, w)
                    + (1.0 + 0.5 * (case.n_in as f64).sqrt()) * f64::from(f32::EPSILON) * magnitude,
            );
        }
    }
    for kernels in machines() {
        let got = run(kernels, pool, case, &tiles, &x, bias.as_deref());
        let what = format!(
            "{} {}x{} tokens {} tiles {} threads {} on {}",
            case.dtype,
            case.n_in,
            case.n_out,
            case.n_tokens,
            tiles.len(),
            pool.n_threads(),
            kernels.isa().name()
        );
        check(&what, &got, &want, |i| bound[i]);
    }
}

/// Types that are read through the same scalar decoder as the others, and whose random bits are seldom of one magnitude.
fn is_wide(dtype: DType) -> bool {
    matches!(dtype, DType::I16 | DType::I32 | DType::I64 | DType::F64)
}

const TOKENS: [usize; 7] = [1, 2, 3, 5, 8, 17, 64];

#[test]
fn every_type_and_path() {
    let pool = Pool::new(3).unwrap();
    for dtype in DType::ALL {
        let n_in = dtype.block_len().max(32) * if dtype.block_len() > 32 { 3 } else { 9 };
        if is_wide(dtype) {
            continue;
        }
        for n_tokens in TOKENS.into_iter().chain([4, 9]) {
            check_case(
                &pool,
                &Case {
                    dtype,
                    n_in,
                    n_out: 29,
                    cuts: &[7, 8, 21],
                    n_tokens,
                    bias: n_tokens % 2 == 1,
                },
            );
        }
    }
}

#[test]
fn odd_shapes() {
    for n_threads in [1, 2, 5] {
        let pool = Pool::new(n_threads).unwrap();
        for (n_in, n_out) in [(1, 1), (7, 3), (33, 13), (70, 101), (300, 97), (521, 12)] {
            for n_tokens in TOKENS {
                for dtype in [DType::F32, DType::F16, DType::BF16] {
                    check_case(
                        &pool,
                        &Case { dtype, n_in, n_out, cuts: &[1, 2, 50], n_tokens, bias: true },
                    );
                }
            }
        }
        for (n_in, n_out) in [(32, 5), (576, 193), (1536, 97)] {
            for n_tokens in TOKENS {
                check_case(
                    &pool,
                    &Case {
                        dtype: DType::Q4_1,
                        n_in,
                        n_out,
                        cuts: &[95, 97],
                        n_tokens,
                        bias: false,
                    },
                );
            }
        }
    }
}

#[test]
fn more_tokens_than_one_pass() {
    let pool = Pool::new(2).unwrap();
    for n_tokens in [512, 513, 1030] {
        check_case(
            &pool,
            &Case { dtype: DType::Q8_0, n_in: 64, n_out: 17, cuts: &[3], n_tokens, bias: true },
        );
    }
}

/// With rows of the identity as X, every result is one weight: decoding must be exact to the bit, on both paths.
#[test]
fn weights_are_decoded_exactly() {
    let pool = Pool::new(2).unwrap();
    for dtype in DType::ALL {
        if is_wide(dtype) {
            continue;
        }
        let n_in = dtype.block_len().max(32);
        let mut rng = Rng(9);
        let case = Case { dtype, n_in, n_out: 24, cuts: &[5], n_tokens: n_in, bias: false };
        let (bytes, w) = random_blocks(&mut rng, dtype, n_in * case.n_out);
        let (_chunks, tiles) = tiles(&case, &bytes);
        let identity: Vec<f32> =
            (0..n_in * n_in).map(|i| if i / n_in == i % n_in { 1.0 } else { 0.0 }).collect();
        for kernels in machines() {
            let got = run(kernels, &pool, &case, &tiles, &identity, None);
            for (t, got) in got.chunks_exact(case.n_out).enumerate() {
                for (o, &got) in got.iter().enumerate() {
                    let want = w[o * n_in + t];
                    assert_eq!(
                        got,
                        want,
                        "{dtype} row {o} element {t} on {}",
                        kernels.isa().name()
                    );
                }
            }
        }
    }
}

/// A tensor in one tile and the same tensor in many give the same bits.
#[test]
fn tiles_change_nothing() {
    let pool = Pool::new(2).unwrap();
    let mut rng = Rng(4);
    let (bytes, _) = random_blocks(&mut rng, DType::Q4_K, 512 * 40);
    for n_tokens in [1, 4, 6] {
        let x = rng.vec(512 * n_tokens, 1.0);
        let case =
            |cuts| Case { dtype: DType::Q4_K, n_in: 512, n_out: 40, cuts, n_tokens, bias: false };
        for kernels in machines() {
            let (_a, one) = tiles(&case(&[]), &bytes);
            let (_b, many) = tiles(&case(&[1, 5, 6, 11, 39]), &bytes);
            assert_eq!(
                run(kernels, &pool, &case(&[]), &one, &x, None),
                run(kernels, &pool, &case(&[]), &many, &x, None)
            );
        }
    }
}

/// Integers have no infinities: a model that has gone wrong must show it, and the rows beside it must not suffer. Zeros, and
/// magnitudes at either end of the range of f32, are ordinary numbers.
#[test]
fn activations_at_the_edges() {
    let pool = Pool::new(2).unwrap();
    for dtype in [DType::Q4_0, DType::Q8_0, DType::Q4_K, DType::Q6_K] {
        for n_tokens in [1, 3, 20] {
            let case = Case { dtype, n_in: 512, n_out: 13, cuts: &[4], n_tokens, bias: false };
            let mut rng = Rng(77);
            let (bytes, w) = random_blocks(&mut rng, dtype, case.n_in * case.n_out);
            let (_chunks, tiles) = tiles(&case, &bytes);
            for (factor, what) in [
                (0.0, None),
                (1e-30, None),
                (1e30, None),
                (1.0, Some(f32::NAN)),
                (1.0, Some(f32::INFINITY)),
            ] {
                let mut x = rng.vec(n_tokens * case.n_in, factor);
                // The first of three runs counts, the others are ordinary.
                if let Some(what) = what {
                    x[70] = what;
                }
                for kernels in machines() {
                    let got = run(kernels, &pool, &case, &tiles, &x, None);
                    for (t, (x, got)) in
                        x.chunks_exact(case.n_in).zip(got.chunks_exact(case.n_out)).enumerate()
                    {
                        for (w, &got) in w.chunks_exact(case.n_in).zip(got) {
                            let want: f64 =
                                x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
                            let scale: f64 =
                                x.iter().zip(w).map(|(&x, &w)| f64::from(x * w).abs()).sum();
                            let fits = (f64::from(got) - want).abs() <= 1e-4 * scale + 1e-38;
                            assert!(
                                fits || (!want.is_finite() && !got.is_finite()),
                                "{dtype} token {t}: {got}, not {want}"
                            );
                        }
                    }
                }
            }
        }
    }
}

/// Products that are run together give the same bits as each alone: which of them share a pass is no part of a result.
#[test]
fn together_as_alone() {
    let pool = Pool::new(2).unwrap();
    let mut rng = Rng(5);
    let types = [DType::Q4_1, DType::F16, DType::Q6_K];
    for n_tokens in [1, 2, 7] {
        let x = rng.vec(256 * n_tokens, 2.0);
        let cases = types.map(|dtype| Case {
            dtype,
            n_in: 256,
            n_out: 31,
            cuts: &[],
            n_tokens,
            bias: false,
        });
        let bytes = types.map(|dtype| random_blocks(&mut rng, dtype, 256 * 31).0);
        for kernels in machines() {
            let alone: Vec<Vec<f32>> = cases
                .iter()
                .zip(&bytes)
                .map(|(case, bytes)| run(kernels, &pool, case, &tiles(case, bytes).1, &x, None))
                .collect();
            let mut ys = vec![vec![f32::NAN; 31 * n_tokens]; 3];
            let tiles =
                [0, 1, 2].map(|i| [RowTile { data: bytes[i].as_ptr(), first_row: 0, n_rows: 31 }]);
            let mut products: Vec<MatMul<'_>> = ys
                .iter_mut()
                .zip(types)
                .zip(&tiles)
                .map(|((y, dtype), tiles)| MatMul {
                    dtype,
                    n_in: 256,
                    n_out: 31,
                    tiles,
                    n_tokens,
                    x: &x,
                    bias: None,
                    y,
                })
                .collect();
            let mut scratch = vec![f32::NAN; MatMul::scratch_len(pool.n_threads(), 256, n_tokens)];
            // SAFETY: the tiles lie in `bytes`.
            unsafe { kernels.matmuls(&pool, &mut products, &mut scratch) }.unwrap();
            assert_eq!(ys, alone, "{n_tokens} tokens on {}", kernels.isa().name());
        }
    }
}

#[test]
fn wrong_arguments_are_refused() {
    let pool = Pool::new(1).unwrap();
    let kernels = Kernels::detect();
    let (w, x) = ([0.0f32; 64], [0.0f32; 16]);
    let tile = |first_row, n_rows| RowTile { data: w.as_ptr().cast(), first_row, n_rows };
    let refuse = |dtype, n_in, tiles: &[RowTile], y: &mut [f32]| {
        let args = MatMul { dtype, n_in, n_out: 4, tiles, n_tokens: 1, x: &x, bias: None, y };
        // SAFETY: the arguments are refused before any weight is read.
        unsafe { kernels.matmul(&pool, args, &mut []) }.unwrap_err()
    };
    let tiles = [tile(0, 2), tile(2, 2)];
    assert!(matches!(
        refuse(DType::Q4_0, 16, &tiles, &mut [0.0; 4]),
        KernelError::Shape { what: "n_in", .. }
    ));
    assert!(matches!(
        refuse(DType::F32, 15, &tiles, &mut [0.0; 4]),
        KernelError::Length { what: "x", .. }
    ));
    assert!(matches!(
        refuse(DType::F32, 16, &tiles, &mut [0.0; 5]),
        KernelError::Length { what: "y", .. }
    ));
    assert!(matches!(
        refuse(DType::F32, 16, &tiles[..1], &mut [0.0; 4]),
        KernelError::Tiles { .. }
    ));
    assert!(matches!(
        refuse(DType::F32, 16, &[tile(0, 2), tile(3, 1)], &mut [0.0; 4]),
        KernelError::Tiles { .. }
    ));
}
