//! K-quants: 256 elements, with quantised scales per 16 or 32 elements.
//!
//! Each sub-block's scale is first rounded to f32 as a product of its own (`d * sc`), then multiplied with the value:
//! the order of the reference, on which the last bit depends.

use crate::block::{q2_k, q3_k, q4_k, q5_k, q6_k};
use crate::bytes::{each_block, f16_at, field};

/// `out = d * q - m` over one sub-block.
#[inline(always)]
fn scale_and_drop<const N: usize>(q: [u8; N], d: f32, m: f32, out: &mut [f32; N]) {
    for (out, q) in out.iter_mut().zip(q) {
        *out = d * f32::from(q) - m;
    }
}

/// `out = d * q` over one sub-block.
#[inline(always)]
fn scale<const N: usize>(q: [i8; N], d: f32, out: &mut [f32; N]) {
    for (out, q) in out.iter_mut().zip(q) {
        *out = d * f32::from(q);
    }
}

/// The two bits at `shift` of each byte.
#[inline(always)]
fn two_bits(qs: &[u8; 16], shift: usize) -> [u8; 16] {
    qs.map(|q| (q >> shift) & 3)
}

pub(crate) fn q2_k(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; q2_k::BYTES], out: &mut [f32; q2_k::LEN]| {
        let (d, dmin) = (f16_at::<{ q2_k::D }, _>(b), f16_at::<{ q2_k::DMIN }, _>(b));
        let qs = field::<{ q2_k::QS }, 64, _>(b).as_chunks::<16>().0;
        let scales = field::<{ q2_k::SCALES }, 16, _>(b);
        for (i, (out, &sc)) in out.as_chunks_mut::<16>().0.iter_mut().zip(scales).enumerate() {
            let q = two_bits(&qs[i / 8 * 2 + i % 2], i / 2 % 4 * 2);
            scale_and_drop(q, d * f32::from(sc & 0x0f), dmin * f32::from(sc >> 4), out);
        }
    });
}

/// The 16 signed scales of a Q3_K block.
#[inline(always)]
fn q3_k_scales(packed: &[u8; 12]) -> [i8; 16] {
    let mut out = [0; 16];
    for (i, scale) in out.iter_mut().enumerate() {
        let low = (packed[i % 8] >> (i / 8 * 4)) & 0x0f;
        let high = (packed[8 + i % 4] >> (i / 4 * 2)) & 3;
        *scale = (low | high << 4) as i8 - 32;
    }
    out
}

pub(crate) fn q3_k(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; q3_k::BYTES], out: &mut [f32; q3_k::LEN]| {
        let d = f16_at::<{ q3_k::D }, _>(b);
        let scales = q3_k_scales(field::<{ q3_k::SCALES }, 12, _>(b));
        let qs = field::<{ q3_k::QS }, 64, _>(b).as_chunks::<16>().0;
        let hmask = field::<{ q3_k::HMASK }, 32, _>(b).as_chunks::<16>().0;
        for (i, (out, sc)) in out.as_chunks_mut::<16>().0.iter_mut().zip(scales).enumerate() {
            let low = two_bits(&qs[i / 8 * 2 + i % 2], i / 2 % 4 * 2);
            let mut q = [0i8; 16];
            for ((q, low), &mask) in q.iter_mut().zip(low).zip(&hmask[i % 2]) {
                let missing = !(mask >> (i / 2)) & 1;
                *q = low as i8 - (missing << 2) as i8;
            }
            scale(q, d * f32::from(sc), out);
        }
    });
}

/// The 8 scales and 8 minima of a Q4_K or Q5_K block.
#[inline(always)]
fn scales_and_minima(packed: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let (mut scales, mut minima) = ([0; 8], [0; 8]);
    for i in 0..4 {
        let (scale, min, both) = (packed[i], packed[4 + i], packed[8 + i]);
        scales[i] = scale & 0x3f;
        minima[i] = min & 0x3f;
        scales[4 + i] = both & 0x0f | scale >> 6 << 4;
        minima[4 + i] = both >> 4 | min >> 6 << 4;
    }
    (scales, minima)
}

pub(crate) fn q4_k(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; q4_k::BYTES], out: &mut [f32; q4_k::LEN]| {
        let (d, dmin) = (f16_at::<{ q4_k::D }, _>(b), f16_at::<{ q4_k::DMIN }, _>(b));
        let (scales, minima) = scales_and_minima(field::<{ q4_k::SCALES }, 12, _>(b));
        let qs = field::<{ q4_k::QS }, 128, _>(b).as_chunks::<32>().0;
        for (i, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let q = qs[i / 2].map(|q| (q >> (i % 2 * 4)) & 0x0f);
            scale_and_drop(q, d * f32::from(scales[i]), dmin * f32::from(minima[i]), out);
        }
    });
}

pub(crate) fn q5_k(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; q5_k::BYTES], out: &mut [f32; q5_k::LEN]| {
        let (d, dmin) = (f16_at::<{ q5_k::D }, _>(b), f16_at::<{ q5_k::DMIN }, _>(b));
        let (scales, minima) = scales_and_minima(field::<{ q5_k::SCALES }, 12, _>(b));
        let qs = field::<{ q5_k::QS }, 128, _>(b).as_chunks::<32>().0;
        let qh = field::<{ q5_k::QH }, 32, _>(b);
        for (i, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let mut q = qs[i / 2].map(|q| (q >> (i % 2 * 4)) & 0x0f);
            for (q, &high) in q.iter_mut().zip(qh) {
                *q |= (high >> i & 1) << 4;
            }
            scale_and_drop(q, d * f32::from(scales[i]), dmin * f32::from(minima[i]), out);
        }
    });
}

pub(crate) fn q6_k(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; q6_k::BYTES], out: &mut [f32; q6_k::LEN]| {
        let d = f16_at::<{ q6_k::D }, _>(b);
        let ql = field::<{ q6_k::QL }, 128, _>(b).as_chunks::<16>().0;
        let qh = field::<{ q6_k::QH }, 64, _>(b).as_chunks::<16>().0;
        let scales = field::<{ q6_k::SCALES }, 16, _>(b);
        for (i, (out, &sc)) in out.as_chunks_mut::<16>().0.iter_mut().zip(scales).enumerate() {
            let (half, quarter, part) = (i / 8, i / 2 % 4, i % 2);
            let low = &ql[half * 4 + quarter % 2 * 2 + part];
            let mut q = [0i8; 16];
            for ((q, &low), &high) in q.iter_mut().zip(low).zip(&qh[half * 2 + part]) {
                let low = (low >> (quarter / 2 * 4)) & 0x0f;
                let high = (high >> (quarter * 2)) & 3;
                *q = (low | high << 4) as i8 - 32;
            }
            scale(q, d * f32::from(sc as i8), out);
        }
    });
}
