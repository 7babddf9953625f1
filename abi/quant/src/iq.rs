//! IQ types: elements come in groups of 4 or 8 from codebooks, or one by one from a non-linear table of 16.
//!
//! Row indices are cut to the number of rows by their bit width or by a mask, so no bytes index outside a codebook.
//! Signs are applied last, by negation; that never changes how a product rounds.

use crate::block::{iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs, iq4_nl, iq4_xs};
use crate::bytes::{BIT_MASKS, each_block, f16_at, f16_to_f32, field};
use crate::iq_tables::{IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, IQ4_VALUES, SIGNS};

/// What IQ1 types add to or subtract from their grid.
const IQ1_DELTA: f32 = 0.125;

/// `out = d * row`, negated where a sign bit is set.
#[inline(always)]
fn signed_row<const N: usize>(row: &[i8; N], signs: u8, d: f32, out: &mut [f32; N]) {
    for ((out, &v), mask) in out.iter_mut().zip(row).zip(BIT_MASKS) {
        let product = d * f32::from(v);
        *out = if signs & mask != 0 { -product } else { product };
    }
}

/// Eight elements from two rows of four.
#[inline(always)]
fn signed_pair(rows: [&[i8; 4]; 2], signs: u8, d: f32, out: &mut [f32; 8]) {
    let mut row = [0; 8];
    for (half, four) in row.as_chunks_mut::<4>().0.iter_mut().zip(rows) {
        *half = *four;
    }
    signed_row(&row, signs, d, out);
}

/// `out = d * (row + delta)`.
#[inline(always)]
fn shifted_row(row: &[i8; 8], delta: f32, d: f32, out: &mut [f32; 8]) {
    for (out, &v) in out.iter_mut().zip(row) {
        *out = d * (f32::from(v) + delta);
    }
}

/// The nibble `i` of packed nibbles, low nibble first.
#[inline(always)]
fn nibble<const N: usize>(bytes: &[u8; N], i: usize) -> u8 {
    (bytes[i / 2] >> (i % 2 * 4)) & 0x0f
}

/// The scale of IQ2 types: `d * (0.5 + sc) / 4`.
#[inline(always)]
fn iq2_scale(d: f32, sc: u8) -> f32 {
    d * (0.5 + f32::from(sc)) * 0.25
}

/// The sign byte `k` of four 7-bit codes.
#[inline(always)]
fn sign_byte(codes: u32, k: usize) -> u8 {
    SIGNS[(codes >> (7 * k) & 0x7f) as usize]
}

/// 256 elements as groups of 32, each as four groups of 8.
#[inline(always)]
fn groups(out: &mut [f32; 256]) -> impl Iterator<Item = &mut [[f32; 8]]> {
    out.as_chunks_mut::<32>().0.iter_mut().map(|out| out.as_chunks_mut::<8>().0)
}

pub(crate) fn iq2_xxs(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; iq2_xxs::BYTES], out| {
        let d = f16_at::<{ iq2_xxs::D }, _>(b);
        let qs = field::<{ iq2_xxs::QS }, 64, _>(b).as_chunks::<8>().0;
        for (out, &[i0, i1, i2, i3, s0, s1, s2, s3]) in groups(out).zip(qs) {
            let codes = u32::from_le_bytes([s0, s1, s2, s3]);
            let d = iq2_scale(d, (codes >> 28) as u8);
            for (k, (out, row)) in out.iter_mut().zip([i0, i1, i2, i3]).enumerate() {
                signed_row(&IQ2_XXS[usize::from(row)], sign_byte(codes, k), d, out);
            }
        }
    });
}

pub(crate) fn iq2_xs(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; iq2_xs::BYTES], out: &mut [f32; 256]| {
        let d = f16_at::<{ iq2_xs::D }, _>(b);
        let qs = field::<{ iq2_xs::QS }, 64, _>(b).as_chunks::<2>().0;
        let scales = field::<{ iq2_xs::SCALES }, 8, _>(b);
        for (i, (out, &q)) in out.as_chunks_mut::<8>().0.iter_mut().zip(qs).enumerate() {
            let q = usize::from(u16::from_le_bytes(q));
            signed_row(
                &IQ2_XS[q & 511],
                SIGNS[q >> 9 & 127],
                iq2_scale(d, nibble(scales, i / 2)),
                out,
            );
        }
    });
}

pub(crate) fn iq2_s(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; iq2_s::BYTES], out: &mut [f32; 256]| {
        let d = f16_at::<{ iq2_s::D }, _>(b);
        let qs = field::<{ iq2_s::QS }, 32, _>(b);
        let signs = field::<{ iq2_s::SIGNS }, 32, _>(b);
        let qh = field::<{ iq2_s::QH }, 8, _>(b);
        let scales = field::<{ iq2_s::SCALES }, 8, _>(b);
        for (i, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let high = usize::from(qh[i / 4] >> (i % 4 * 2) & 3);
            let row = &IQ2_S[usize::from(qs[i]) | high << 8];
            signed_row(row, signs[i], iq2_scale(d, nibble(scales, i / 2)), out);
        }
    });
}

pub(crate) fn iq3_xxs(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; iq3_xxs::BYTES], out| {
        let d = f16_at::<{ iq3_xxs::D }, _>(b);
        let qs = field::<{ iq3_xxs::QS }, 64, _>(b).as_chunks::<8>().0;
        let codes = field::<{ iq3_xxs::SCALES_AND_SIGNS }, 32, _>(b).as_chunks::<4>().0;
        for ((out, qs), &codes) in groups(out).zip(qs).zip(codes) {
            let codes = u32::from_le_bytes(codes);
            let d = d * (0.5 + (codes >> 28) as f32) * 0.5;
            for (k, (out, &[r0, r1])) in out.iter_mut().zip(qs.as_chunks::<2>().0).enumerate() {
                let rows = [&IQ3_XXS[usize::from(r0)], &IQ3_XXS[usize::from(r1)]];
                signed_pair(rows, sign_byte(codes, k), d, out);
            }
        }
    });
}

pub(crate) fn iq3_s(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; iq3_s::BYTES], out: &mut [f32; 256]| {
        let d = f16_at::<{ iq3_s::D }, _>(b);
        let qs = field::<{ iq3_s::QS }, 64, _>(b).as_chunks::<2>().0;
        let qh = field::<{ iq3_s::QH }, 8, _>(b);
        let signs = field::<{ iq3_s::SIGNS }, 32, _>(b);
        let scales = field::<{ iq3_s::SCALES }, 4, _>(b);
        for (i, (out, &[r0, r1])) in out.as_chunks_mut::<8>().0.iter_mut().zip(qs).enumerate() {
            let high = usize::from(qh[i / 4] >> (i % 4 * 2));
            let rows = [
                &IQ3_S[usize::from(r0) | (high & 1) << 8],
                &IQ3_S[usize::from(r1) | (high >> 1 & 1) << 8],
            ];
            let d = d * f32::from(1 + 2 * nibble(scales, i / 4));
            signed_pair(rows, signs[i], d, out);
        }
    });
}

pub(crate) fn iq1_s(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; iq1_s::BYTES], out| {
        let d = f16_at::<{ iq1_s::D }, _>(b);
        let qs = field::<{ iq1_s::QS }, 32, _>(b).as_chunks::<4>().0;
        let qh = field::<{ iq1_s::QH }, 16, _>(b).as_chunks::<2>().0;
        for ((out, qs), &qh) in groups(out).zip(qs).zip(qh) {
            let qh = u16::from_le_bytes(qh);
            let d = d * f32::from(2 * (qh >> 12 & 7) + 1);
            let delta = if qh & 0x8000 != 0 { -IQ1_DELTA } else { IQ1_DELTA };
            for (k, (out, &low)) in out.iter_mut().zip(qs).enumerate() {
                let high = usize::from(qh >> (3 * k) & 7);
                shifted_row(&IQ1_S[usize::from(low) | high << 8], delta, d, out);
            }
        }
    });
}

/// The scale words of an IQ1_M block, and the f16 that their top nibbles form.
#[inline(always)]
fn iq1_m_scales(packed: &[u8; 8]) -> ([u16; 4], f32) {
    let mut words = [0; 4];
    for (word, &bytes) in words.iter_mut().zip(packed.as_chunks::<2>().0) {
        *word = u16::from_le_bytes(bytes);
    }
    let [a, b, c, d] = words.map(|word| word >> 12);
    (words, f16_to_f32(a | b << 4 | c << 8 | d << 12))
}

pub(crate) fn iq1_m(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; iq1_m::BYTES], out: &mut [f32; 256]| {
        let qs = field::<{ iq1_m::QS }, 32, _>(b);
        let qh = field::<{ iq1_m::QH }, 16, _>(b);
        let (words, d) = iq1_m_scales(field::<{ iq1_m::SCALES }, 8, _>(b));
        for (i, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let high = nibble(qh, i);
            let delta = if high & 8 != 0 { -IQ1_DELTA } else { IQ1_DELTA };
            let sc = words[i / 8] >> (i / 2 % 4 * 3) & 7;
            let row = &IQ1_S[usize::from(qs[i]) | usize::from(high & 7) << 8];
            shifted_row(row, delta, d * f32::from(2 * sc + 1), out);
        }
    });
}

/// 32 elements of the non-linear table: low nibbles first, then high ones.
#[inline(always)]
fn iq4(qs: &[u8; 16], d: f32, out: &mut [f32; 32]) {
    let table = IQ4_VALUES.map(|v| d * f32::from(v));
    let (lows, highs) = out.split_at_mut(16);
    for ((&q, low), high) in qs.iter().zip(lows).zip(highs) {
        *low = table[usize::from(q & 0x0f)];
        *high = table[usize::from(q >> 4)];
    }
}

pub(crate) fn iq4_nl(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; iq4_nl::BYTES], out: &mut [f32; iq4_nl::LEN]| {
        iq4(field::<{ iq4_nl::QS }, 16, _>(b), f16_at::<{ iq4_nl::D }, _>(b), out);
    });
}

pub(crate) fn iq4_xs(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; iq4_xs::BYTES], out: &mut [f32; iq4_xs::LEN]| {
        let d = f16_at::<{ iq4_xs::D }, _>(b);
        let scales_h = u16::from_le_bytes(*field::<{ iq4_xs::SCALES_H }, 2, _>(b));
        let scales_l = field::<{ iq4_xs::SCALES_L }, 4, _>(b);
        let qs = field::<{ iq4_xs::QS }, 128, _>(b).as_chunks::<16>().0;
        for (i, (out, qs)) in out.as_chunks_mut::<32>().0.iter_mut().zip(qs).enumerate() {
            let high = (scales_h >> (2 * i) & 3) as i8;
            let sc = nibble(scales_l, i) as i8 | high << 4;
            iq4(qs, d * f32::from(sc - 32), out);
        }
    });
}
