//! Norms, rope, elementwise functions, KV stores and selection against plain f64.
#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests hand KvBlocks over as pointers"
)]

mod common;

use common::{Rng, check, machines, ulps};
use tegula_cpu::kernels::{Glu, KvSlot, KvStore, RopeStyle, Unary, rope_table};
use tegula_quant::{DType, quantize};

/// Arguments that matter: a dense sweep, tiny and huge values.
fn arguments() -> Vec<f32> {
    let mut x: Vec<f32> = (-4000..=4000).map(|i| i as f32 * 0.025).collect();
    x.extend((-400..=400).map(|i| i as f32 * 0.003));
    x.extend([0.0, -0.0, 1e-30, -1e-30, 1e-8, 88.5, -87.0, 87.3]);
    x
}

fn erf(x: f64) -> f64 {
    // Series where it converges fast, continued fraction of erfc elsewhere.
    let a = x.abs();
    if a < 3.0 {
        let (mut term, mut sum) = (a, a);
        for n in 1..120 {
            term *= -a * a / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        return (2.0 / std::f64::consts::PI.sqrt() * sum).copysign(x);
    }
    let mut f = 0.0;
    for n in (1..80).rev() {
        f = f64::from(n) / 2.0 / (a + f);
    }
    (1.0 - (-a * a).exp() / std::f64::consts::PI.sqrt() / (a + f)).copysign(x)
}

fn exact(f: Unary, x: f64) -> f64 {
    match f {
        Unary::Silu => x / (1.0 + (-x).exp()),
        Unary::GeluTanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
            x / (1.0 + (-2.0 * u).exp())
        }
        Unary::GeluErf => 0.5 * x * (1.0 + erf(x / 2.0f64.sqrt())),
        Unary::GeluQuick => x / (1.0 + (-1.702 * x).exp()),
        Unary::Relu => x.max(0.0),
        Unary::ReluSquared => x.max(0.0) * x.max(0.0),
        Unary::Tanh => x.tanh(),
        Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Unary::Exp => x.exp(),
        Unary::Neg => -x,
        other => panic!("no oracle for {other:?}"),
    }
}

/// Relative bounds in units in the last place. `tanh` and `exp` are the vector functions themselves; silu and its kin add a
/// sum and a division (and lose the argument's rounding times its size where the exponential's argument is scaled:
/// 1.702 x rounded once at |x| = 50 moves the exponential by 40 ulp). The error function form is bounded absolutely,
/// by one rounding of x: left of zero `1 + erf` cancels, in its definition as well.
#[test]
fn unary_functions() {
    let x = arguments();
    for (f, allowed) in [
        (Unary::Exp, 2.0),
        (Unary::Tanh, 2.5),
        (Unary::Sigmoid, 3.5),
        (Unary::Silu, 4.0),
        (Unary::Relu, 0.0),
        (Unary::ReluSquared, 0.5),
        (Unary::Neg, 0.0),
    ] {
        for kernels in machines() {
            let mut y = vec![f32::NAN; x.len()];
            kernels.unary(f, &x, &mut y).unwrap();
            for (&x, &y) in x.iter().zip(&y) {
                let want = exact(f, f64::from(x));
                // Where `e^-x` overflows, quotients vanish a little before they are too small for f32.
                let vanished = (f64::from(y) - want).abs() <= 3e-37;
                if want.abs() > f64::from(f32::MAX) || vanished {
                    continue;
                }
                let off = ulps(y, want);
                assert!(
                    off <= allowed,
                    "{f:?}({x}) = {y}, should be {want}: {off} ulp on {}",
                    kernels.isa().name()
                );
            }
        }
    }
    for f in [Unary::GeluTanh, Unary::GeluQuick, Unary::GeluErf] {
        for kernels in machines() {
            let mut y = vec![f32::NAN; x.len()];
            kernels.unary(f, &x, &mut y).unwrap();
            let want: Vec<f64> = x.iter().map(|&x| exact(f, f64::from(x))).collect();
            check(&format!("{f:?}"), &y, &want, |i| 3e-7 * f64::from(x[i].abs()) + 1e-37);
        }
    }
}

#[test]
fn unary_limits() {
    for kernels in machines() {
        let x = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1000.0, -1000.0];
        let mut y = [0.0; 5];
        kernels.unary(Unary::Exp, &x, &mut y).unwrap();
        assert_eq!((y[0], y[1], y[3], y[4]), (f32::INFINITY, 0.0, f32::INFINITY, 0.0));
        assert!(y[2].is_nan(), "a NaN must stay visible");
        kernels.unary(Unary::Tanh, &x, &mut y).unwrap();
        assert_eq!((y[0], y[1], y[3], y[4]), (1.0, -1.0, 1.0, -1.0));
        assert!(y[2].is_nan());
        kernels.unary(Unary::Silu, &x[3..], &mut y[..2]).unwrap();
        assert_eq!((y[0], y[1]), (1000.0, 0.0));
    }
}

#[test]
fn binary_functions() {
    let mut rng = Rng(1);
    for n in [1, 2, 7, 8, 15, 16, 17, 33, 100] {
        let (a, b) = (rng.vec(n, 8.0), rng.vec(n, 8.0));
        let mut out = vec![f32::NAN; n];
        for kernels in machines() {
            for (glu, unary) in [
                (Glu::Silu, Unary::Silu),
                (Glu::GeluTanh, Unary::GeluTanh),
                (Glu::GeluErf, Unary::GeluErf),
                (Glu::GeluQuick, Unary::GeluQuick),
                (Glu::Relu, Unary::Relu),
                (Glu::Sigmoid, Unary::Sigmoid),
            ] {
                kernels.glu(glu, &a, &b, &mut out).unwrap();
                let want: Vec<f64> = a
                    .iter()
                    .zip(&b)
                    .map(|(&a, &b)| exact(unary, f64::from(a)) * f64::from(b))
                    .collect();
                check(&format!("{glu:?}"), &out, &want, |i| {
                    5e-7 * f64::from((a[i].abs() + 1.0) * b[i].abs())
                });
            }
            let one = |i: usize, f: fn(f64, f64) -> f64| f(f64::from(a[i]), f64::from(b[i]));
            let round = |want: &[f64]| want.iter().map(|w| 6e-8 * w.abs()).collect::<Vec<_>>();
            kernels.add(&a, &b, &mut out).unwrap();
            let want: Vec<f64> = (0..n).map(|i| one(i, |a, b| a + b)).collect();
            check("add", &out, &want, |i| round(&want)[i]);
            kernels.mul(&a, &b, &mut out).unwrap();
            let want: Vec<f64> = (0..n).map(|i| one(i, |a, b| a * b)).collect();
            check("mul", &out, &want, |i| round(&want)[i]);
            kernels.scale(-0.3, &a, &mut out).unwrap();
            let want: Vec<f64> = (0..n).map(|i| f64::from(a[i]) * f64::from(-0.3f32)).collect();
            check("scale", &out, &want, |i| round(&want)[i]);
            kernels.softcap(5.0, &a, &mut out).unwrap();
            let want: Vec<f64> = (0..n).map(|i| 5.0 * (f64::from(a[i]) / 5.0).tanh()).collect();
            check("softcap", &out, &want, |i| 4e-7 * want[i].abs());
        }
    }
}

#[test]
fn norms() {
    let mut rng = Rng(2);
    for n in [1, 3, 8, 31, 64, 77, 576, 2049] {
        let mut x = rng.vec(3 * n, 4.0);
        x[0] += 30.0;
        let (weight, bias) = (rng.vec(n, 2.0), rng.vec(n, 2.0));
        let mut out = vec![f32::NAN; 3 * n];
        // Per row: mean, root of the mean square, standard deviation, root of the sum of squares.
        let moments: Vec<[f64; 4]> = x
            .chunks_exact(n)
            .map(|row| {
                let mean = row.iter().map(|&v| f64::from(v)).sum::<f64>() / n as f64;
                let squares = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>();
                let variance =
                    row.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n as f64;
                [mean, (squares / n as f64 + 1e-5).sqrt(), (variance + 1e-5).sqrt(), squares.sqrt()]
            })
            .collect();
        let mean = |i: usize| moments[i / n][0];
        let rms = |i: usize| moments[i / n][1];
        let deviation = |i: usize| moments[i / n][2];
        let norm = |i: usize| moments[i / n][3];
        for kernels in machines() {
            for (w, b) in [(false, false), (true, false), (true, true), (false, true)] {
                let w = w.then_some(&weight[..]);
                let b = b.then_some(&bias[..]);
                let weight_at = |i: usize| w.map_or(1.0, |w| f64::from(w[i % n]));
                // Some roundings of the quotient; for layer norm of the mean too, before the division by a deviation.
                if b.is_none() {
                    kernels.rms_norm(n, 1e-5, &x, w, &mut out).unwrap();
                    let want: Vec<f64> =
                        (0..3 * n).map(|i| f64::from(x[i]) / rms(i) * weight_at(i)).collect();
                    check("rms_norm", &out, &want, |i| 6e-7 * want[i].abs());
                }
                kernels.layer_norm(n, 1e-5, &x, w, b, &mut out).unwrap();
                let want: Vec<f64> = (0..3 * n)
                    .map(|i| {
                        (f64::from(x[i]) - mean(i)) / deviation(i) * weight_at(i)
                            + b.map_or(0.0, |b| f64::from(b[i % n]))
                    })
                    .collect();
                check("layer_norm", &out, &want, |i| {
                    1e-6 * (want[i].abs() + 2.0 + rms(i) / deviation(i))
                });
            }
            kernels.l2_norm(n, 1e-6, &x, &mut out).unwrap();
            let root = |i: usize| (norm(i).powi(2) + f64::from(1e-6f32)).sqrt();
            let want: Vec<f64> = (0..3 * n).map(|i| f64::from(x[i]) / root(i)).collect();
            check("l2_norm", &out, &want, |i| 6e-7 * want[i].abs());
        }
    }
}

#[test]
fn rope() {
    let mut rng = Rng(3);
    let positions = [0, 1, 17, 4095, 100_000];
    for (head_dim, n_rot, n_head) in [(64, 64, 3), (80, 32, 2), (10, 6, 1), (36, 34, 2)] {
        let factors = rng.vec(n_rot / 2, 0.4).into_iter().map(|f| f + 1.0).collect::<Vec<_>>();
        for freq_factors in [None, Some(&factors[..])] {
            let frequencies: Vec<f64> = (0..n_rot / 2)
                .map(|p| {
                    let factor = freq_factors.map_or(1.0, |f| f64::from(f[p]));
                    0.5 * 10_000f64.powf(-2.0 * p as f64 / n_rot as f64) / factor
                })
                .collect();
            let mut table = vec![0.0; positions.len() * n_rot];
            rope_table(&frequencies, 1.25, &positions, &mut table).unwrap();
            let x = rng.vec(positions.len() * n_head * head_dim, 2.0);
            for (kernels, style) in machines()
                .into_iter()
                .flat_map(|k| [(k, RopeStyle::Interleaved), (k, RopeStyle::Halves)])
            {
                let mut got = x.clone();
                kernels.rope(style, n_rot, n_head, head_dim, &table, &mut got).unwrap();
                let mut want: Vec<f64> = x.iter().copied().map(f64::from).collect();
                for (i, head) in want.chunks_exact_mut(head_dim).enumerate() {
                    for (p, frequency) in frequencies.iter().enumerate() {
                        let (a, b) = match style {
                            RopeStyle::Interleaved => (2 * p, 2 * p + 1),
                            _ => (p, p + n_rot / 2),
                        };
                        let angle = f64::from(positions[i / n_head]) * frequency;
                        let (sin, cos) = angle.sin_cos();
                        let (va, vb) = (head[a], head[b]);
                        head[a] = 1.25 * (va * cos - vb * sin);
                        head[b] = 1.25 * (va * sin + vb * cos);
                    }
                }
                // Values below 2 times 1.25: cosine, product and sum round once each.
                check(&format!("rope {style:?} {head_dim}/{n_rot}"), &got, &want, |_| 6e-7);
            }
        }
    }
}

#[test]
fn kv_store_writes_its_slots_and_nothing_else() {
    let mut rng = Rng(5);
    let (n_head_kv, head_dim, block_len) = (3, 96, 7);
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0] {
        let head_bytes = head_dim / dtype.block_len() * dtype.block_bytes();
        let rows = rng.vec(4 * n_head_kv * head_dim, 3.0);
        let places = [(0, 6), (1, 0), (1, 1), (0, 2)];
        let mut want = vec![vec![0xa5u8; n_head_kv * block_len * head_bytes]; 2];
        for (row, (block, offset)) in rows.chunks_exact(n_head_kv * head_dim).zip(places) {
            for (head, values) in row.chunks_exact(head_dim).enumerate() {
                let at = (head * block_len + offset) * head_bytes;
                quantize(dtype, values, &mut want[block][at..at + head_bytes]).unwrap();
            }
        }
        for kernels in machines() {
            let mut blocks = vec![vec![0xa5u8; n_head_kv * block_len * head_bytes]; 2];
            let bases: Vec<*mut u8> = blocks.iter_mut().map(|b| b.as_mut_ptr()).collect();
            let slots = places.map(|(block, offset)| KvSlot { block: bases[block], offset });
            let args =
                KvStore { dtype, n_head_kv, head_dim, block_len, rows: &rows, slots: &slots };
            // SAFETY: the bases are blocks of the size that the arguments say.
            unsafe { kernels.kv_store(&args) }.unwrap();
            assert_eq!(blocks, want, "{dtype} on {}", kernels.isa().name());
            let outside = [KvSlot { block: bases[0], offset: 7 }];
            let args = KvStore { rows: &rows[..n_head_kv * head_dim], slots: &outside, ..args };
            // SAFETY: refused before anything is written.
            assert!(unsafe { kernels.kv_store(&args) }.is_err());
        }
    }
}

#[test]
fn argmax_and_top_k() {
    let mut rng = Rng(6);
    for n in [1, 5, 31, 64, 65, 1000, 4099] {
        let mut x = rng.vec(n, 10.0);
        // Equal values and NaN: order must not depend on the vector length.
        if n > 40 {
            x[n / 2] = 9.999;
            x[n / 3] = 9.999;
            x[3] = f32::NAN;
        }
        let mut order: Vec<usize> = (0..n).filter(|&i| !x[i].is_nan()).collect();
        order.sort_by(|&a, &b| x[b].total_cmp(&x[a]).then(a.cmp(&b)));
        for kernels in machines() {
            assert_eq!(kernels.argmax(&x), order.first().copied(), "argmax of {n}");
            for k in [1, 2, 5, 40, 100] {
                let (mut values, mut indices) = (vec![0.0; k], vec![0; k]);
                kernels.top_k(&x, &mut values, &mut indices).unwrap();
                for i in 0..k {
                    let want =
                        order.get(i).map_or((f32::NEG_INFINITY, u32::MAX), |&o| (x[o], o as u32));
                    assert_eq!((values[i], indices[i]), want, "top {k} of {n}, place {i}");
                }
            }
        }
    }
    for kernels in machines() {
        assert_eq!(kernels.argmax(&[]), None);
        assert_eq!(kernels.argmax(&[f32::NAN; 70]), None);
        assert_eq!(kernels.argmax(&[f32::NEG_INFINITY; 3]), Some(0));
    }
}

/// Half a unit off in a router's weight is nothing; another expert is another model.
#[test]
fn routers_choose_the_greatest() {
    use tegula_cpu::kernels::{Gating, Router, RouterGroups};
    let nan = f32::NAN;
    let logits = [0.5f32, 2.0, nan, 2.0, -1.0, f32::NEG_INFINITY, 0.5, 3.0];
    for kernels in machines() {
        for (gating, k, want) in [
            (Gating::Sigmoid, 3, vec![7, 1, 3]),
            (Gating::SoftmaxSelected, 5, vec![7, 1, 3, 0, 6]),
            (Gating::Sigmoid, 8, vec![7, 1, 3, 0, 6, 4, 5, 2]),
        ] {
            let router = Router {
                n_expert: 8,
                k,
                gating,
                normalise: false,
                scale: 2.0,
                bias: None,
                groups: RouterGroups::ONE,
            };
            let (mut ids, mut weights) = (vec![9; k], vec![0.0; k]);
            let mut scratch = vec![0.0; Router::scratch_len(8)];
            kernels.router_topk(&router, &logits, &mut ids, &mut weights, &mut scratch).unwrap();
            assert_eq!(ids, want, "{gating:?} on {}", kernels.isa().name());
            let p = |id: usize| f64::from(logits[id]);
            let sum: f64 = want.iter().map(|id| (p(*id as usize) - 3.0).exp()).sum();
            for (weight, id) in weights.iter().zip(&want) {
                let p = match gating {
                    Gating::Sigmoid => 1.0 / (1.0 + (-p(*id as usize)).exp()),
                    _ => (p(*id as usize) - 3.0).exp() / sum,
                };
                assert!(p.is_nan() == weight.is_nan());
                assert!(p.is_nan() || (f64::from(*weight) - 2.0 * p).abs() < 1e-6, "{weight} {p}");
            }
        }
    }
}

#[test]
fn clamped_units_and_sums_of_experts() {
    let mut rng = Rng(77);
    for n in [1, 7, 67, 128] {
        let (gate, up) = (rng.vec(n, 12.0), rng.vec(n, 12.0));
        let (x, weights) = (rng.vec(2 * 3 * n, 2.0), rng.vec(2 * 3, 1.0));
        for kernels in machines() {
            let mut out = vec![0.0; n];
            kernels.glu_clamped(1.702, 7.0, &gate, &up, &mut out).unwrap();
            let unit = |i: usize| {
                let (a, b) = (f64::from(gate[i]).min(7.0), f64::from(up[i]).clamp(-7.0, 7.0));
                a / (1.0 + (-f64::from(1.702f32) * a).exp()) * (b + 1.0)
            };
            let want: Vec<f64> = (0..n).map(unit).collect();
            check("glu_clamped", &out, &want, |i| 1e-6 * (want[i].abs() + 1e-3));
            let mut out = vec![0.0; 2 * n];
            kernels.combine_experts(n, &x, &weights, &mut out).unwrap();
            let sum = |i: usize| {
                let row = i / n;
                let part = |j: usize| {
                    f64::from(weights[row * 3 + j]) * f64::from(x[(row * 3 + j) * n + i % n])
                };
                (0..3).map(part).sum()
            };
            let want: Vec<f64> = (0..2 * n).map(sum).collect();
            check("combine_experts", &out, &want, |_| 1e-6);
        }
    }
}
