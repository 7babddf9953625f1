//! What the kernel tests share: random data, the machines to test, and comparison with a stated bound.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a part of several test programs"
)]

use tegula_cpu::kernels::{Isa, Kernels};
use tegula_quant::{DType, dequantize, quantize, quantize_row_fn};

/// SplitMix64: small, seeded, good enough for data.
pub struct Rng(pub u64);

impl Rng {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in -1..1.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    pub fn vec(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.unit() * scale).collect()
    }
}

/// Every instruction set of this machine, the portable one included.
pub fn machines() -> Vec<Kernels> {
    Isa::available().map(|isa| Kernels::with_isa(isa).unwrap()).collect()
}

/// `n` elements of `dtype` (whole blocks) and their exact values. Types without an encoder get random blocks, drawn
/// again until their values are finite and of one magnitude.
pub fn random_blocks(rng: &mut Rng, dtype: DType, n: usize) -> (Vec<u8>, Vec<f32>) {
    let (len, size) = (dtype.block_len(), dtype.block_bytes());
    let mut bytes = vec![0; n / len * size];
    let mut values = vec![0.0; n];
    for (block, out) in bytes.chunks_exact_mut(size).zip(values.chunks_exact_mut(len)) {
        loop {
            if quantize_row_fn(dtype).is_some() {
                let source = rng.vec(len, 2.0);
                quantize(dtype, &source, block).unwrap();
            } else {
                block.iter_mut().for_each(|b| *b = rng.bits() as u8);
            }
            dequantize(dtype, block, out).unwrap();
            let greatest = out.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            if out.iter().all(|v| v.is_finite())
                && (quantize_row_fn(dtype).is_some() || (1e-3..1e3).contains(&greatest))
            {
                break;
            }
        }
    }
    (bytes, values)
}

/// Every element within its own bound.
pub fn check(what: &str, got: &[f32], want: &[f64], bound: impl Fn(usize) -> f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(g) - w).abs();
        assert!(
            error <= bound(i),
            "{what}: element {i} is {g}, should be {w}, off by {error:e}, allowed {:e}",
            bound(i)
        );
    }
}

/// Units in the last place of an f32 between `got` and `want`.
pub fn ulps(got: f32, want: f64) -> f64 {
    let rounded = want as f32;
    if got == rounded || (got.is_nan() && rounded.is_nan()) {
        return 0.0;
    }
    let magnitude = rounded.abs().max(f32::MIN_POSITIVE);
    let ulp = f64::from(f32::from_bits(magnitude.to_bits() + 1)) - f64::from(magnitude);
    (f64::from(got) - want).abs() / ulp
}

/// What the rounding of activations to 16 bits may cost, for the types that are multiplied as integers: each is off by up
/// to half a step, evenly, and six standard deviations of the sum are allowed. A step is 2^-14 of the power of two below
/// the greatest of 32.
pub fn rounding(dtype: DType, x: &[f32], w: &[f32]) -> f64 {
    use DType::{IQ4_NL, IQ4_XS, MXFP4, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};
    if !matches!(
        dtype,
        Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 | Q3_K | Q4_K | Q5_K | Q6_K | IQ4_NL | IQ4_XS | MXFP4
    ) {
        return 0.0;
    }
    let mut variance = 0.0;
    for (x, w) in x.chunks(32).zip(w.chunks(32)) {
        let greatest = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let step = f64::from(greatest).log2().floor().exp2() / 16384.0;
        let squares: f64 = w.iter().map(|&w| f64::from(w) * f64::from(w)).sum();
        variance += step * step / 12.0 * squares;
    }
    6.0 * variance.sqrt()
}
