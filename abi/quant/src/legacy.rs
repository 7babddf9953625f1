//! Types of 32 elements with one scale: Q4_0 to Q8_1, and Q8_K, which differs by its length and f32 scale only.
//!
//! Products and sums are separate operations, never fused: this is what the reference formulas round to.

use crate::block::{q4_0, q4_1, q5_0, q5_1, q8_0, q8_1, q8_k};
use crate::bytes::{each_block, f16_at, field, spread_bits};

/// Values 0 to 15 of packed nibbles: all low nibbles, then all high ones.
#[inline(always)]
fn nibbles(qs: &[u8; 16]) -> [u8; 32] {
    let mut out = [0; 32];
    let (lows, highs) = out.split_at_mut(16);
    for ((&q, low), high) in qs.iter().zip(lows).zip(highs) {
        *low = q & 0x0f;
        *high = q >> 4;
    }
    out
}

/// Values 0 to 31: nibbles with a fifth bit from `qh`.
#[inline(always)]
fn five_bits(qs: &[u8; 16], qh: &[u8; 4]) -> [u8; 32] {
    let mut out = nibbles(qs);
    for (q, high) in out.iter_mut().zip(spread_bits::<4, 32>(qh)) {
        *q |= high << 4;
    }
    out
}

/// `out = d * (q - zero)`.
#[inline(always)]
fn scale(q: &[u8; 32], zero: i32, d: f32, out: &mut [f32; 32]) {
    for (out, &q) in out.iter_mut().zip(q) {
        *out = (i32::from(q) - zero) as f32 * d;
    }
}

/// `out = d * q + m`.
#[inline(always)]
fn scale_and_shift(q: &[u8; 32], d: f32, m: f32, out: &mut [f32; 32]) {
    for (out, &q) in out.iter_mut().zip(q) {
        *out = f32::from(q) * d + m;
    }
}

/// `out = d * q` for signed bytes.
#[inline(always)]
fn scale_i8<const N: usize>(qs: &[u8; N], d: f32, out: &mut [f32; N]) {
    for (out, &q) in out.iter_mut().zip(qs) {
        *out = f32::from(q as i8) * d;
    }
}

pub(crate) fn q4_0(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; q4_0::BYTES], out| {
        scale(&nibbles(field::<{ q4_0::QS }, 16, _>(b)), 8, f16_at::<{ q4_0::D }, _>(b), out);
    });
}

pub(crate) fn q4_1(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; q4_1::BYTES], out| {
        let (d, m) = (f16_at::<{ q4_1::D }, _>(b), f16_at::<{ q4_1::M }, _>(b));
        scale_and_shift(&nibbles(field::<{ q4_1::QS }, 16, _>(b)), d, m, out);
    });
}

pub(crate) fn q5_0(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; q5_0::BYTES], out| {
        let q = five_bits(field::<{ q5_0::QS }, 16, _>(b), field::<{ q5_0::QH }, 4, _>(b));
        scale(&q, 16, f16_at::<{ q5_0::D }, _>(b), out);
    });
}

pub(crate) fn q5_1(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; q5_1::BYTES], out| {
        let (d, m) = (f16_at::<{ q5_1::D }, _>(b), f16_at::<{ q5_1::M }, _>(b));
        let q = five_bits(field::<{ q5_1::QS }, 16, _>(b), field::<{ q5_1::QH }, 4, _>(b));
        scale_and_shift(&q, d, m, out);
    });
}

pub(crate) fn q8_0(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; q8_0::BYTES], out| {
        scale_i8(field::<{ q8_0::QS }, { q8_0::LEN }, _>(b), f16_at::<{ q8_0::D }, _>(b), out);
    });
}

pub(crate) fn q8_1(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; q8_1::BYTES], out| {
        scale_i8(field::<{ q8_1::QS }, { q8_1::LEN }, _>(b), f16_at::<{ q8_1::D }, _>(b), out);
    });
}

pub(crate) fn q8_k(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; q8_k::BYTES], out| {
        let d = f32::from_le_bytes(*field::<{ q8_k::D }, 4, _>(b));
        scale_i8(field::<{ q8_k::QS }, { q8_k::LEN }, _>(b), d, out);
    });
}
