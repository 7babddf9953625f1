//! The small tools every decoder is made of: whole blocks, fields at fixed offsets, f16, bits.
//!
//! Blocks and fields are fixed-size arrays, so that loops over them have lengths known at compile time: no bounds
//! checks remain, and nothing in a block's bytes can make a decoder panic.

/// Calls `decode` for each whole block and its elements; stops at the shorter side.
#[inline(always)]
pub(crate) fn each_block<const B: usize, const N: usize>(
    src: &[u8],
    dst: &mut [f32],
    decode: impl Fn(&[u8; B], &mut [f32; N]),
) {
    for (block, out) in src.as_chunks::<B>().0.iter().zip(dst.as_chunks_mut::<N>().0) {
        decode(block, out);
    }
}

/// The `N` bytes at offset `O` of a block; a field outside the block does not compile.
#[inline(always)]
pub(crate) const fn field<const O: usize, const N: usize, const B: usize>(
    block: &[u8; B],
) -> &[u8; N] {
    const { assert!(O + N <= B, "the field is outside the block") };
    match block.split_at(O).1.first_chunk::<N>() {
        Some(field) => field,
        None => unreachable!(),
    }
}

/// The f16 at offset `O` of a block.
#[inline(always)]
pub(crate) const fn f16_at<const O: usize, const B: usize>(block: &[u8; B]) -> f32 {
    f16_to_f32(u16::from_le_bytes(*field::<O, 2, B>(block)))
}

/// Converts binary16 bits to binary32, exactly.
///
/// `half` picks F16C at run time, by a check and a call per value. This form is selects only: it inlines, and loops
/// over it vectorise. Subnormals go through an integer conversion, because scales of k-quants are often subnormal in
/// f16, and shortcuts through subnormal f32 are slow, or wrong where a process flushes them to zero.
#[inline(always)]
pub(crate) const fn f16_to_f32(bits: u16) -> f32 {
    const REBIAS: u32 = (127 - 15) << 23;
    const STEP: f32 = 1.0 / 16_777_216.0; // 2^-24, the smallest subnormal
    let sign = (bits as u32 & 0x8000) << 16;
    let magnitude = bits as u32 & 0x7fff;
    let widened = magnitude << 13;
    let normal = widened + REBIAS;
    let special = widened | 0x7f80_0000;
    let subnormal = (magnitude as i32 as f32 * STEP).to_bits();
    let finite = if magnitude < 0x0400 { subnormal } else { normal };
    f32::from_bits(sign | if magnitude >= 0x7c00 { special } else { finite })
}

/// Converts binary32 to binary16 bits, to nearest, ties to even; a NaN stays one and becomes quiet.
///
/// Selects only, for the reasons of [`f16_to_f32`]. Below the smallest normal, adding one half lets the f32 adder
/// round: the last mantissa bit of a sum in 0.5..1 is worth 2^-24, the step of f16 subnormals.
#[inline(always)]
pub(crate) const fn f32_to_f16(v: f32) -> u16 {
    const REBIAS: u32 = (127 - 15) << 23;
    const SMALLEST_NORMAL: u32 = (127 - 14) << 23;
    const TOO_LARGE: u32 = (127 + 16) << 23;
    const INFINITY: u32 = 0x7f80_0000;
    let sign = (v.to_bits() >> 16) & 0x8000;
    let magnitude = v.to_bits() & 0x7fff_ffff;
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    // A carry out of the mantissa steps the exponent, up to infinity, as it should.
    let rounded = magnitude.wrapping_add(0x0fff + (magnitude >> 13 & 1));
    let normal = rounded.wrapping_sub(REBIAS) >> 13;
    let nan = 0x7e00 | magnitude >> 13 & 0x03ff;
    let special = if magnitude > INFINITY { nan } else { 0x7c00 };
    let finite = if magnitude < SMALLEST_NORMAL { subnormal } else { normal };
    (sign | if magnitude >= TOO_LARGE { special } else { finite }) as u16
}

/// The bits of each byte as 0 or 1, lowest bit first. Masks instead of shifts: SSE2 has no shift per lane.
#[inline(always)]
pub(crate) fn spread_bits<const N: usize, const BITS: usize>(bytes: &[u8; N]) -> [u8; BITS] {
    const { assert!(BITS == 8 * N) };
    let mut out = [0; BITS];
    for (bits, &byte) in out.as_chunks_mut::<8>().0.iter_mut().zip(bytes) {
        for (bit, mask) in bits.iter_mut().zip(BIT_MASKS) {
            *bit = u8::from(byte & mask != 0);
        }
    }
    out
}

/// `1 << i` for the bits of a byte.
pub(crate) const BIT_MASKS: [u8; 8] = [1, 2, 4, 8, 16, 32, 64, 128];

#[cfg(test)]
mod tests {
    use super::*;

    /// A wrong scale conversion would corrupt every quantised model.
    #[test]
    fn f16_agrees_with_half_on_all_bit_patterns() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
            assert!(
                ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                "{bits:#06x}: {ours} instead of {theirs}"
            );
        }
    }

    /// Every KV cache entry and every scale that is written goes through this rounding.
    #[test]
    fn f32_to_f16_agrees_with_half_around_every_value_and_every_tie() {
        for bits in 0..0x7c00 {
            let (here, next) = (f16_to_f32(bits), f16_to_f32(bits + 1).min(65536.0));
            let tie = (here + next) / 2.0;
            for v in [here, tie.next_down(), tie, tie.next_up()] {
                for v in [v, -v] {
                    let (ours, theirs) = (f32_to_f16(v), half::f16::from_f32(v).to_bits());
                    assert_eq!(ours, theirs, "{v:?}");
                }
            }
        }
        for v in [f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 65536.0, 1e-45, -1e-45] {
            assert_eq!(f32_to_f16(v), half::f16::from_f32(v).to_bits(), "{v:?}");
        }
        for nan in [0x7f80_0001, 0xff80_0001, 0x7fc0_0000, 0xffff_ffff] {
            assert!(f16_to_f32(f32_to_f16(f32::from_bits(nan))).is_nan());
        }
    }
}
