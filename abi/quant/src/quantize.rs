//! Encoding to the types that a KV cache or a test writes: plain floats and the types of 32 elements.
//!
//! The rules are those of ggml's reference encoders (`quantize_row_*_ref`): the reciprocal of the *unrounded* scale
//! multiplies, Q8_0 rounds half away from zero, Q4 and Q5 add one half and truncate. Finite input encodes to the same
//! bytes; NaN and infinity encode to something, without a panic, since C leaves those conversions undefined.

use crate::block::{q4_0, q4_1, q5_0, q5_1, q8_0};
use crate::bytes::{BIT_MASKS, f32_to_f16};
use crate::dequantize::check_lengths;
use crate::{DType, LayoutError};

/// Encodes f32 to whole blocks of bytes; see [`quantize_row_fn`].
pub type QuantizeFn = fn(&[f32], &mut [u8]);

/// Names of the types that [`quantize`] writes.
const ENCODABLE: &str = "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1";

/// The encoder of a type, to be picked once outside a loop over rows, or `None` where there is none.
///
/// The function encodes as many whole blocks as both slices hold and touches nothing else. It accepts any lengths and
/// values, does not allocate and cannot panic.
pub const fn quantize_row_fn(dtype: DType) -> Option<QuantizeFn> {
    Some(match dtype {
        DType::F32 => to_f32,
        DType::F16 => to_f16,
        DType::BF16 => to_bf16,
        DType::Q8_0 => to_q8_0,
        DType::Q4_0 => to_q4_0,
        DType::Q4_1 => to_q4_1,
        DType::Q5_0 => to_q5_0,
        DType::Q5_1 => to_q5_1,
        _ => return None,
    })
}

/// Encodes all of `src` to the bytes of exactly that many elements.
///
/// # Errors
/// [`LayoutError::NotEncodable`] for a type without an encoder, [`LayoutError::NotWholeBlocks`] when `src` is not
/// a whole number of blocks, and [`LayoutError::WrongBytes`] when `dst` is not the bytes of `src.len()` elements.
/// `dst` is untouched then.
pub fn quantize(dtype: DType, src: &[f32], dst: &mut [u8]) -> Result<(), LayoutError> {
    let Some(encode) = quantize_row_fn(dtype) else {
        return Err(LayoutError::NotEncodable { dtype, allowed: ENCODABLE });
    };
    check_lengths(dtype, src.len(), dst.len())?;
    encode(src, dst);
    Ok(())
}

/// Calls `encode` for each whole block of elements and its bytes; stops at the shorter side.
#[inline(always)]
fn each_block<const N: usize, const B: usize>(
    src: &[f32],
    dst: &mut [u8],
    encode: impl Fn(&[f32; N]) -> [u8; B],
) {
    for (values, block) in src.as_chunks::<N>().0.iter().zip(dst.as_chunks_mut::<B>().0) {
        *block = encode(values);
    }
}

fn to_f32(src: &[f32], dst: &mut [u8]) {
    each_block(src, dst, |&[v]: &[f32; 1]| v.to_bits().to_le_bytes());
}

fn to_f16(src: &[f32], dst: &mut [u8]) {
    each_block(src, dst, |&[v]: &[f32; 1]| f32_to_f16(v).to_le_bytes());
}

/// Rounds to nearest, ties to even; a NaN keeps its upper bits and becomes quiet.
fn to_bf16(src: &[f32], dst: &mut [u8]) {
    each_block(src, dst, |&[v]: &[f32; 1]| {
        let bits = v.to_bits();
        // Cannot overflow where it is used: the largest such pattern is negative infinity, 0xff80_0000.
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let quiet = bits >> 16 | 0x40;
        (if v.is_nan() { quiet as u16 } else { rounded as u16 }).to_le_bytes()
    });
}

/// `1 / d`, or 0 for a block of zeros.
#[inline(always)]
fn reciprocal(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// Largest magnitude. Eight running maxima instead of one, so that the loop vectorises.
#[inline(always)]
fn max_magnitude(values: &[f32; 32]) -> f32 {
    let mut lanes = [0.0f32; 8];
    for eight in values.as_chunks::<8>().0 {
        for (lane, v) in lanes.iter_mut().zip(eight) {
            let v = v.abs();
            *lane = if v > *lane { v } else { *lane };
        }
    }
    lanes.into_iter().fold(0.0, f32::max)
}

/// The first value of largest magnitude, with its sign; plus zero for zeros of any sign.
#[inline(always)]
fn extreme(values: &[f32; 32]) -> f32 {
    let max = max_magnitude(values);
    // Both signs rarely tie. Looking for each without stopping vectorises, unlike looking for the first.
    let plus = values.iter().fold(false, |found, v| found | (*v == max));
    let minus = values.iter().fold(false, |found, v| found | (*v == -max));
    match (plus, minus) {
        _ if max == 0.0 => 0.0,
        (true, true) => values.iter().copied().find(|v| v.abs() == max).unwrap_or(max),
        (false, _) => -max,
        (true, false) => max,
    }
}

/// Smallest and largest value. Where zeros of both signs tie, the first in order counts: its sign is stored.
#[inline(always)]
fn range(values: &[f32; 32]) -> (f32, f32) {
    let (mut low, mut high) = ([f32::MAX; 8], [f32::MIN; 8]);
    for eight in values.as_chunks::<8>().0 {
        for ((low, high), &v) in low.iter_mut().zip(&mut high).zip(eight) {
            *low = if v < *low { v } else { *low };
            *high = if v > *high { v } else { *high };
        }
    }
    let low = low.into_iter().fold(f32::MAX, f32::min);
    let high = high.into_iter().fold(f32::MIN, f32::max);
    let first = |bound: f32| {
        if bound != 0.0 {
            return bound;
        }
        values.iter().copied().find(|v| *v == bound).unwrap_or(bound)
    };
    (first(low), first(high))
}

/// Rounds down a value in `0.0..4_194_304.0`, by the float adder.
///
/// `as i32` saturates, which costs a scalar conversion per element. Adding 2^23 leaves the nearest integer in the
/// mantissa; where that is above the value, one less is the floor.
#[inline(always)]
fn floor_small(v: f32) -> u32 {
    const TWO_TO_23: f32 = 8_388_608.0;
    let nearest = v + TWO_TO_23;
    let above = nearest - TWO_TO_23 > v;
    (nearest.to_bits() & 0x007f_ffff).wrapping_sub(u32::from(above))
}

/// Rounds half away from zero, as C's `roundf` does, and keeps the result within -127 and 127.
///
/// Adding the float just under one half to the magnitude, then rounding down, is exact: the sum reaches the next
/// integer if and only if the value is at or past the half.
#[inline(always)]
fn round_half_away(v: f32) -> i8 {
    const JUST_BELOW_HALF: f32 = 0.499_999_97;
    let raised = v.abs() + JUST_BELOW_HALF;
    let magnitude = floor_small(if raised < 127.0 { raised } else { 127.0 }) as i32;
    let minus = v.to_bits() as i32 >> 31;
    ((magnitude ^ minus) - minus) as i8
}

/// Packs values below 16: element `j` in the low nibble of byte `j`, element `j + 16` in the high one.
#[inline(always)]
pub(crate) fn pack_nibbles(q: &[u8; 32], out: &mut [u8]) {
    let (lows, highs) = q.split_at(16);
    for ((out, low), high) in out.iter_mut().zip(lows).zip(highs) {
        *out = low & 0x0f | high << 4;
    }
}

/// The fifth bits of values below 32, element 0 lowest.
#[inline(always)]
pub(crate) fn fifth_bits(q: &[u8; 32]) -> [u8; 4] {
    let mut out = [0; 4];
    for (out, eight) in out.iter_mut().zip(q.as_chunks::<8>().0) {
        for (q, mask) in eight.iter().zip(BIT_MASKS) {
            *out |= if q & 0x10 != 0 { mask } else { 0 };
        }
    }
    out
}

/// `trunc((v - min) * id + offset)`, kept within `0..=max`.
#[inline(always)]
fn levels(values: &[f32; 32], min: f32, id: f32, offset: f32, max: f32) -> [u8; 32] {
    values.map(|v| {
        let level = (v - min) * id + offset;
        let level = if level > 0.0 { level } else { 0.0 };
        floor_small(if level < max { level } else { max }) as u8
    })
}

#[inline(always)]
pub(crate) fn put_f16<const B: usize>(block: &mut [u8; B], offset: usize, v: f32) {
    let bytes = f32_to_f16(v).to_le_bytes();
    for (out, byte) in block.iter_mut().skip(offset).zip(bytes) {
        *out = byte;
    }
}

fn to_q8_0(src: &[f32], dst: &mut [u8]) {
    each_block(src, dst, |values: &[f32; q8_0::LEN]| {
        let d = max_magnitude(values) / 127.0;
        let id = reciprocal(d);
        let mut block = [0; q8_0::BYTES];
        put_f16(&mut block, q8_0::D, d);
        for (out, v) in block[q8_0::QS..].iter_mut().zip(values) {
            *out = round_half_away(v * id) as u8;
        }
        block
    });
}

fn to_q4_0(src: &[f32], dst: &mut [u8]) {
    each_block(src, dst, |values: &[f32; q4_0::LEN]| {
        let d = extreme(values) / -8.0;
        let q = levels(values, 0.0, reciprocal(d), 8.5, 15.0);
        let mut block = [0; q4_0::BYTES];
        put_f16(&mut block, q4_0::D, d);
        pack_nibbles(&q, &mut block[q4_0::QS..]);
        block
    });
}

fn to_q4_1(src: &[f32], dst: &mut [u8]) {
    each_block(src, dst, |values: &[f32; q4_1::LEN]| {
        let (min, max) = range(values);
        let d = (max - min) / 15.0;
        let q = levels(values, min, reciprocal(d), 0.5, 15.0);
        let mut block = [0; q4_1::BYTES];
        put_f16(&mut block, q4_1::D, d);
        put_f16(&mut block, q4_1::M, min);
        pack_nibbles(&q, &mut block[q4_1::QS..]);
        block
    });
}

fn to_q5_0(src: &[f32], dst: &mut [u8]) {
    each_block(src, dst, |values: &[f32; q5_0::LEN]| {
        let d = extreme(values) / -16.0;
        let q = levels(values, 0.0, reciprocal(d), 16.5, 31.0);
        let mut block = [0; q5_0::BYTES];
        put_f16(&mut block, q5_0::D, d);
        block[q5_0::QH..q5_0::QS].copy_from_slice(&fifth_bits(&q));
        pack_nibbles(&q, &mut block[q5_0::QS..]);
        block
    });
}

fn to_q5_1(src: &[f32], dst: &mut [u8]) {
    each_block(src, dst, |values: &[f32; q5_1::LEN]| {
        let (min, max) = range(values);
        let d = (max - min) / 31.0;
        let q = levels(values, min, reciprocal(d), 0.5, 31.0);
        let mut block = [0; q5_1::BYTES];
        put_f16(&mut block, q5_1::D, d);
        put_f16(&mut block, q5_1::M, min);
        block[q5_1::QH..q5_1::QS].copy_from_slice(&fifth_bits(&q));
        pack_nibbles(&q, &mut block[q5_1::QS..]);
        block
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A KV cache in Q8_0 would drift from ggml's by one level per wrong tie.
    #[test]
    fn rounding_agrees_with_round() {
        let near_halves = (-1016..=1016i32).flat_map(|n| {
            let half = n as f32 / 8.0;
            [half.next_down(), half, half.next_up()]
        });
        for v in near_halves.chain([0.0, -0.0, f32::MIN_POSITIVE, 1e-40]) {
            assert_eq!(round_half_away(v), v.round() as i8, "{v:?}");
        }
    }
}
