//! Types of one or two bits per element with a single scale: TQ1_0, TQ2_0, Q1_0, Q2_0.

use crate::block::{q1_0, q2_0, tq1_0, tq2_0};
use crate::bytes::{each_block, f16_at, field, spread_bits};

/// Powers that move base-3 digit `n` to the top of a byte, modulo 256.
const POWERS_OF_3: [u8; 5] = [1, 3, 9, 27, 81];

/// Digit after digit of all bytes of a group, scaled.
#[inline(always)]
fn base3(bytes: &[u8], d: f32, out: &mut [f32]) {
    for (out, power) in out.chunks_exact_mut(bytes.len()).zip(POWERS_OF_3) {
        for (out, &byte) in out.iter_mut().zip(bytes) {
            // What is left after the digits before it is a fraction of 256; three times that has the digit on top.
            let digit = (u16::from(byte.wrapping_mul(power)) * 3) >> 8;
            *out = d * f32::from(digit as i16 - 1);
        }
    }
}

pub(crate) fn tq1_0(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; tq1_0::BYTES], out: &mut [f32; tq1_0::LEN]| {
        let d = f16_at::<{ tq1_0::D }, _>(b);
        let (first, rest) = out.split_at_mut(160);
        let (second, third) = rest.split_at_mut(80);
        base3(field::<{ tq1_0::QS }, 32, _>(b), d, first);
        base3(field::<{ tq1_0::QS + 32 }, 16, _>(b), d, second);
        base3(field::<{ tq1_0::QH }, 4, _>(b), d, third);
    });
}

pub(crate) fn tq2_0(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; tq2_0::BYTES], out: &mut [f32; tq2_0::LEN]| {
        let d = f16_at::<{ tq2_0::D }, _>(b);
        let qs = field::<{ tq2_0::QS }, 64, _>(b).as_chunks::<32>().0;
        for (i, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (out, &q) in out.iter_mut().zip(&qs[i / 4]) {
                *out = d * f32::from(((q >> (i % 4 * 2)) & 3) as i8 - 1);
            }
        }
    });
}

pub(crate) fn q1_0(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; q1_0::BYTES], out: &mut [f32; q1_0::LEN]| {
        let d = f16_at::<{ q1_0::D }, _>(b);
        let bits = spread_bits::<16, 128>(field::<{ q1_0::QS }, 16, _>(b));
        for (out, bit) in out.iter_mut().zip(bits) {
            *out = if bit == 0 { -d } else { d };
        }
    });
}

pub(crate) fn q2_0(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; q2_0::BYTES], out: &mut [f32; q2_0::LEN]| {
        let d = f16_at::<{ q2_0::D }, _>(b);
        let qs = field::<{ q2_0::QS }, 16, _>(b);
        for (out, &q) in out.as_chunks_mut::<4>().0.iter_mut().zip(qs) {
            *out = [q & 3, q >> 2 & 3, q >> 4 & 3, q >> 6].map(|q| f32::from(q as i8 - 1) * d);
        }
    });
}
