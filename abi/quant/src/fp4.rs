//! Four-bit floats: MXFP4 and NVFP4.
//!
//! Both hold E2M1 values. The table is doubled so that it is whole numbers, and the scale is halved in return: every
//! product is exact either way, except where a halved MXFP4 scale is subnormal, where the reference does the same.

use crate::block::{mxfp4, nvfp4};
use crate::bytes::{each_block, field};

/// E2M1 values, doubled. Code 8 is a negative zero in E2M1; the reference decodes it as plus zero.
pub(crate) const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// `2^(e - 128)`, half of an E8M0 scale; the two smallest are subnormal. Code 255, NaN in OCP's document, is `2^127`
/// as in the reference.
const fn e8m0_half(e: u8) -> f32 {
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e as u32 - 1) << 23 })
}

/// Half of an unsigned E4M3 scale (bias 7). The top bit is ignored; code 0x7f, NaN in E4M3, counts as zero.
const fn ue4m3_half(code: u8) -> f32 {
    let (exponent, mantissa) = ((code >> 3 & 0x0f) as u32, (code & 7) as u32);
    if code == 0x7f {
        0.0
    } else if exponent == 0 {
        mantissa as f32 / 1024.0
    } else {
        f32::from_bits((exponent + 127 - 7 - 1) << 23 | mantissa << 20)
    }
}

/// The table times the scale: 16 products instead of one per element, and the same bits.
#[inline(always)]
fn scaled_table(d: f32) -> [f32; 16] {
    E2M1_DOUBLED.map(|v| f32::from(v) * d)
}

/// Low nibbles to the first half of `out`, high nibbles to the second.
#[inline(always)]
fn look_up(table: &[f32; 16], qs: &[u8], out: &mut [f32]) {
    let (lows, highs) = out.split_at_mut(out.len() / 2);
    for ((&q, low), high) in qs.iter().zip(lows).zip(highs) {
        *low = table[usize::from(q & 0x0f)];
        *high = table[usize::from(q >> 4)];
    }
}

pub(crate) fn mxfp4(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; mxfp4::BYTES], out: &mut [f32; mxfp4::LEN]| {
        look_up(&scaled_table(e8m0_half(b[mxfp4::E])), field::<{ mxfp4::QS }, 16, _>(b), out);
    });
}

pub(crate) fn nvfp4(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; nvfp4::BYTES], out: &mut [f32; nvfp4::LEN]| {
        let scales = field::<{ nvfp4::D }, 4, _>(b);
        let qs = field::<{ nvfp4::QS }, 32, _>(b).as_chunks::<8>().0;
        for ((out, qs), &d) in out.as_chunks_mut::<16>().0.iter_mut().zip(qs).zip(scales) {
            look_up(&scaled_table(ue4m3_half(d)), qs, out);
        }
    });
}
