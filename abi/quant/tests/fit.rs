//! Encoders that search: less error than those that do not, on any input, without touching anything else.
//!
//! What a user would lose: the quality of a file that is smaller than its original, or the process that makes it.

use proptest::prelude::*;
use tegula_quant::{DType, dequantize, fit, fit_row_fn, quantize};

/// Values like those of a trained matrix: normal, a few far out.
fn weights(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut unit = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u32 << 24) as f32
    };
    let mut normal = || (0..12).map(|_| unit()).sum::<f32>() - 6.0;
    (0..n).map(|i| 0.02 * normal() * if i % 97 == 3 { 4.0 } else { 1.0 }).collect()
}

/// The sum of squared errors, each times what it costs.
fn error(x: &[f32], decoded: &[f32], costs: &[f32]) -> f64 {
    let terms = x.iter().zip(decoded).zip(costs);
    terms.map(|((x, y), w)| f64::from(*w) * f64::from(x - y).powi(2)).sum()
}

/// `importance * sqrt(mean square + x^2)` over runs of `block`.
fn costs(x: &[f32], block: usize, importance: &[f32]) -> Vec<f32> {
    let mut out = Vec::new();
    for (x, importance) in x.chunks(block).zip(importance.chunks(block)) {
        let mean_square = x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
        out.extend(x.iter().zip(importance).map(|(x, w)| w * (mean_square + x * x).sqrt()));
    }
    out
}

fn decoded(dtype: DType, x: &[f32], encode: impl Fn(&mut [u8])) -> Vec<f32> {
    let mut bytes = vec![0; dtype.row_bytes(x.len() as u64).unwrap_or(0) as usize];
    encode(&mut bytes);
    let mut out = vec![0.0; x.len()];
    assert!(dequantize(dtype, &bytes, &mut out).is_ok());
    out
}

fn fitted(dtype: DType, x: &[f32], importance: Option<&[f32]>) -> Vec<f32> {
    decoded(dtype, x, |bytes| assert!(fit(dtype, x, importance, bytes).is_ok()))
}

#[test]
fn searching_loses_less_than_rounding() {
    let n = 256 * 16;
    let ones = vec![1.0; n];
    for seed in 1..6 {
        let x = weights(seed, n);
        let w = costs(&x, 32, &ones);
        let searched = |dtype| error(&x, &fitted(dtype, &x, None), &w);
        let rounded = |dtype| {
            let plain = decoded(dtype, &x, |bytes| assert!(quantize(dtype, &x, bytes).is_ok()));
            error(&x, &plain, &w)
        };
        for (dtype, most) in
            [(DType::Q4_0, 0.95), (DType::Q4_1, 0.95), (DType::Q5_0, 0.99), (DType::Q5_1, 0.99)]
        {
            let ratio = searched(dtype) / rounded(dtype);
            println!("{dtype}: {ratio:.3} of the error of rounding");
            assert!(ratio < most, "{dtype}: {ratio}");
        }
        // Scales of six bits cost little of what a minimum and eight sub-blocks gain over one scale at the same size.
        let (q4, q5, q6) = (searched(DType::Q4_K), searched(DType::Q5_K), searched(DType::Q6_K));
        println!(
            "Q4_K: {:.3} of Q4_0, Q5_K: {:.3} of Q5_0, Q6_K: {:.3} of Q5_K",
            q4 / searched(DType::Q4_0),
            q5 / searched(DType::Q5_0),
            q6 / q5
        );
        assert!(q4 < 0.95 * searched(DType::Q4_0) && q5 < 0.95 * searched(DType::Q5_0));
        assert!(q5 < 0.3 * q4 && q6 < 0.4 * q5);
    }
}

/// An importance file is worth its making only if the columns that it names get better.
#[test]
fn important_columns_are_met_better() {
    let x = weights(9, 256 * 8);
    let importance: Vec<f32> = (0..x.len()).map(|i| if i % 8 == 5 { 50.0 } else { 0.1 }).collect();
    let of_important = |decoded: &[f32]| -> f64 {
        let pairs = x.iter().zip(decoded).enumerate().filter(|(i, _)| i % 8 == 5);
        pairs.map(|(_, (x, y))| f64::from(x - y).powi(2)).sum()
    };
    for dtype in
        [DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1, DType::Q4_K, DType::Q5_K, DType::Q6_K]
    {
        let (without, with) = (fitted(dtype, &x, None), fitted(dtype, &x, Some(&importance)));
        let ratio = of_important(&with) / of_important(&without);
        println!("{dtype}: {ratio:.3} of the error");
        assert!(ratio < 0.8, "{dtype}: {ratio}");
    }
}

/// Blocks of nothing, of one value, or of one sign are in every file.
#[test]
fn plain_blocks_are_met() {
    for dtype in DType::ALL.into_iter().filter(|dtype| fit_row_fn(*dtype).is_some()) {
        for value in [0.0, 1.0, -3.0, 1e-3] {
            let out = fitted(dtype, &[value; 256], None);
            let worst = out.iter().map(|y| (y - value).abs()).fold(0.0, f32::max);
            assert!(worst <= value.abs() * 4e-3, "{dtype} of {value}: off by {worst}");
        }
        let rising: Vec<f32> = (0..256).map(|i| 1.0 + i as f32 / 256.0).collect();
        let worst = fitted(dtype, &rising, None)
            .iter()
            .zip(&rising)
            .map(|(y, x)| (y - x).abs())
            .fold(0.0, f32::max);
        assert!(worst < 0.16, "{dtype}: off by {worst}");
    }
}

#[test]
fn wrong_lengths_are_refused() {
    let x = [0.5; 256];
    let mut bytes = [7; 144];
    assert!(fit(DType::Q4_K, &x[..255], None, &mut bytes).is_err());
    assert!(fit(DType::Q4_K, &x, Some(&x[..255]), &mut bytes).is_err());
    assert!(fit(DType::Q4_K, &x, None, &mut bytes[..143]).is_err());
    assert!(fit(DType::IQ2_XS, &x, None, &mut bytes).is_err());
    assert!(bytes == [7; 144]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn fitting_never_panics_and_keeps_to_whole_blocks(
        dtype in proptest::sample::select(DType::ALL.to_vec()),
        src in proptest::collection::vec(any::<u32>().prop_map(f32::from_bits), 0..600),
        importance in proptest::option::of(proptest::collection::vec(any::<u32>().prop_map(f32::from_bits), 0..600)),
        n in 0usize..900,
    ) {
        const UNTOUCHED: u8 = 0xa5;
        let Some(encode) = fit_row_fn(dtype) else { return Ok(()) };
        let mut dst = vec![UNTOUCHED; n];
        encode(&src, importance.as_deref(), &mut dst);
        let blocks = (src.len() / dtype.block_len()).min(n / dtype.block_bytes());
        prop_assert!(dst[blocks * dtype.block_bytes()..].iter().all(|b| *b == UNTOUCHED));
    }
}
