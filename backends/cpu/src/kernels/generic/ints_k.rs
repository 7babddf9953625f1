//! The types of 256 elements as [`IntWeight`]s, with quantised scales per 16 or 32 of them.

use super::Words;
use super::ints::{IQ4_VALUES, IntWeight, Scales, nibbles};

/// The twelve bytes of 6-bit scales and minima of Q4_K and Q5_K, times `d` and `-dmin`.
///
/// Bytes 0 to 3 hold scales 0 to 3 in their low six bits, bytes 4 to 7 the minima; bytes 8 to 11 hold the low four
/// bits of scales and minima 4 to 7, whose top two bits sit above the six of bytes 0 to 7. Four of them are handled as
/// one word.
///
/// # Safety
/// `p` is readable for 16 bytes: `d`, `dmin`, scales.
#[inline(always)]
unsafe fn scales_k4<S: Words>(s: S, p: *const u8) -> Scales<S> {
    // SAFETY: the caller promises 16 readable bytes.
    unsafe {
        let words = p.add(4).cast::<[u32; 3]>().read_unaligned().map(u32::from_le);
        let [a, b, c] = words;
        let join = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let scales = join(a & 0x3f3f_3f3f, (c & 0x0f0f_0f0f) | ((a >> 2) & 0x3030_3030));
        let mins = join(b & 0x3f3f_3f3f, ((c >> 4) & 0x0f0f_0f0f) | ((b >> 2) & 0x3030_3030));
        let d = s.splat_f16(p);
        let dmin = s.mul(s.splat_f16(p.add(2)), s.splat(-1.0));
        let scale = s.mul(s.to_float(s.bytes(scales)), d);
        Scales { scale: [scale; 2], min: s.mul(s.to_float(s.bytes(mins)), dmin) }
    }
}

/// Nibbles of sixteen elements: sub-blocks 2j and 2j + 1 of 32 are the low and high halves of the same 32 bytes.
///
/// # Safety
/// `p` is readable for 128 bytes.
#[inline(always)]
unsafe fn nibbles_k<S: Words, const AT: usize>(s: S, p: *const u8) -> S::I {
    // SAFETY: `AT` is below 16.
    unsafe { nibbles(s, p.add(32 * (AT / 4 % 4) + 16 * (AT % 2)), AT / 2 % 2 == 1) }
}

/// `q * (d * scale) - dmin * min`.
#[expect(non_camel_case_types, reason = "the field's own names")]
pub(crate) struct Q4_K;

impl IntWeight for Q4_K {
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 144;
    const SUB: usize = 32;
    const OFFSET: i16 = 0;
    const HAS_MIN: bool = true;

    #[inline(always)]
    unsafe fn scales<S: Words>(s: S, p: *const u8, _runs: usize) -> Scales<S> {
        // SAFETY: the scales are inside the block, which the caller promises.
        unsafe { scales_k4(s, p) }
    }
    #[inline(always)]
    unsafe fn words<S: Words, const AT: usize>(s: S, p: *const u8) -> S::I {
        // SAFETY: the nibbles are inside the block, which the caller promises.
        unsafe { nibbles_k::<S, AT>(s, p.add(16)) }
    }
}

/// As Q4_K; the fifth bit of element `i` of sub-block `sub` is bit `sub` of byte `i` of 32.
#[expect(non_camel_case_types, reason = "the field's own names")]
pub(crate) struct Q5_K;

impl IntWeight for Q5_K {
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 176;
    const SUB: usize = 32;
    const OFFSET: i16 = 0;
    const HAS_MIN: bool = true;

    #[inline(always)]
    unsafe fn scales<S: Words>(s: S, p: *const u8, _runs: usize) -> Scales<S> {
        // SAFETY: the scales are inside the block, which the caller promises.
        unsafe { scales_k4(s, p) }
    }
    #[inline(always)]
    unsafe fn words<S: Words, const AT: usize>(s: S, p: *const u8) -> S::I {
        // SAFETY: both parts are inside the block, which the caller promises.
        unsafe {
            let bits = s.widen_u8(p.add(16 + 16 * (AT % 2)));
            let fifth = match AT / 2 {
                0 => s.wshl::<4>(bits),
                1 => s.wshl::<3>(bits),
                2 => s.wshl::<2>(bits),
                3 => s.wshl::<1>(bits),
                4 => bits,
                5 => s.wshr::<1>(bits),
                6 => s.wshr::<2>(bits),
                _ => s.wshr::<3>(bits),
            };
            s.ior(nibbles_k::<S, AT>(s, p.add(48)), s.iand(fifth, s.wsplat(16)))
        }
    }
}

/// `(q - 32) * (d * scale)`, with q of six bits and sixteen signed 8-bit scales. Each half of 128 elements is four runs of
/// 32; run `r` takes the low or high (`r / 2`) nibble of the bytes at `32 * (r % 2)`, and bits `2r` and `2r + 1` of 32 common
/// bytes.
#[expect(non_camel_case_types, reason = "the field's own names")]
pub(crate) struct Q6_K;

impl IntWeight for Q6_K {
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 210;
    const SUB: usize = 16;
    const OFFSET: i16 = 32;
    const HAS_MIN: bool = false;

    #[inline(always)]
    unsafe fn scales<S: Words>(s: S, p: *const u8, _runs: usize) -> Scales<S> {
        // SAFETY: scales are bytes 192 to 207 and `d` is bytes 208 and 209 of the block.
        unsafe {
            let d = s.splat_f16(p.add(208));
            let low = s.mul(s.to_float(s.load_i8(p.add(192))), d);
            let high = s.mul(s.to_float(s.load_i8(p.add(200))), d);
            Scales { scale: [low, high], min: s.splat(0.0) }
        }
    }
    #[inline(always)]
    unsafe fn words<S: Words, const AT: usize>(s: S, p: *const u8) -> S::I {
        let (half, run, at) = (AT / 8 % 2, AT % 8 / 2, 16 * (AT % 2));
        // SAFETY: both parts are inside the block, which the caller promises.
        unsafe {
            let low = nibbles(s, p.add(64 * half + 32 * (run % 2) + at), run >= 2);
            let bits = s.widen_u8(p.add(128 + 32 * half + at));
            let top = match run {
                0 => s.wshl::<4>(bits),
                1 => s.wshl::<2>(bits),
                2 => bits,
                _ => s.wshr::<2>(bits),
            };
            s.ior(low, s.iand(top, s.wsplat(0x30)))
        }
    }
}

/// `(q - 4) * (d * (scale - 32))`: two bits of each element as in bytes `32 * half + i`, at `2 * run`, and the third as bit
/// `4 * half + run` of 32 common bytes; 16 scales of six bits.
#[expect(non_camel_case_types, reason = "the field's own names")]
pub(crate) struct Q3_K;

impl IntWeight for Q3_K {
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 110;
    const SUB: usize = 16;
    const OFFSET: i16 = 4;
    const HAS_MIN: bool = false;

    /// Low four bits of scale `i`: byte `i % 8`, by `i / 8`; high two bits: byte `8 + i % 4`, at `2 * (i / 4)`. Eight scales are
    /// handled as one word.
    #[inline(always)]
    unsafe fn scales<S: Words>(s: S, p: *const u8, _runs: usize) -> Scales<S> {
        // SAFETY: scales are bytes 96 to 107 and `d` is bytes 108 and 109 of the block.
        unsafe {
            let low = u64::from_le(p.add(96).cast::<u64>().read_unaligned());
            let high = u64::from(u32::from_le(p.add(104).cast::<u32>().read_unaligned()));
            let (nibble, two) = (0x0f0f_0f0f_0f0f_0f0f, 0x0303_0303);
            let pair = |shift: u32| (high >> shift & two) << 4 | (high >> (shift + 2) & two) << 36;
            let d = s.splat_f16(p.add(108));
            let thirty_two = s.isplat(32);
            let first = s.isub(s.bytes(low & nibble | pair(0)), thirty_two);
            let second = s.isub(s.bytes(low >> 4 & nibble | pair(4)), thirty_two);
            let scale = [s.mul(s.to_float(first), d), s.mul(s.to_float(second), d)];
            Scales { scale, min: s.splat(0.0) }
        }
    }
    #[inline(always)]
    unsafe fn words<S: Words, const AT: usize>(s: S, p: *const u8) -> S::I {
        let (half, run, at) = (AT / 8 % 2, AT % 8 / 2, 16 * (AT % 2));
        // SAFETY: both parts are inside the block, which the caller promises.
        unsafe {
            let bits = s.widen_u8(p.add(32 + 32 * half + at));
            let low = match run {
                0 => bits,
                1 => s.wshr::<2>(bits),
                2 => s.wshr::<4>(bits),
                _ => s.wshr::<6>(bits),
            };
            let bits = s.widen_u8(p.add(at));
            let third = match 4 * half + run {
                0 => s.wshl::<2>(bits),
                1 => s.wshl::<1>(bits),
                2 => bits,
                3 => s.wshr::<1>(bits),
                4 => s.wshr::<2>(bits),
                5 => s.wshr::<3>(bits),
                6 => s.wshr::<4>(bits),
                _ => s.wshr::<5>(bits),
            };
            s.ior(s.iand(low, s.wsplat(3)), s.iand(third, s.wsplat(4)))
        }
    }
}

/// `table[q] * (d * (scale - 32))`: eight scales of six bits, and per 32 elements 16 bytes of nibbles.
#[expect(non_camel_case_types, reason = "the field's own names")]
pub(crate) struct IQ4_XS;

impl IntWeight for IQ4_XS {
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 136;
    const SUB: usize = 32;
    const OFFSET: i16 = 0;
    const HAS_MIN: bool = false;

    /// High two bits of scale `i` at `2 * i` of a word, low four bits as nibble `i` of four bytes.
    #[inline(always)]
    unsafe fn scales<S: Words>(s: S, p: *const u8, _runs: usize) -> Scales<S> {
        // SAFETY: the first eight bytes of the block are `d` and the scales.
        unsafe {
            let high = u64::from(u16::from_le(p.add(2).cast::<u16>().read_unaligned()));
            let low = u64::from(u32::from_le(p.add(4).cast::<u32>().read_unaligned()));
            let mut scales = 0u64;
            for i in 0..8 {
                scales |= (low >> (4 * i) & 15 | (high >> (2 * i) & 3) << 4) << (8 * i);
            }
            let scale = s.to_float(s.isub(s.bytes(scales), s.isplat(32)));
            Scales { scale: [s.mul(scale, s.splat_f16(p)); 2], min: s.splat(0.0) }
        }
    }
    #[inline(always)]
    unsafe fn words<S: Words, const AT: usize>(s: S, p: *const u8) -> S::I {
        // SAFETY: the nibbles are inside the block, which the caller promises.
        unsafe { s.look_up(p.add(8 + 16 * (AT / 2)), AT % 2 == 1, &IQ4_VALUES) }
    }
}
