//! The k-quants as [`Weight`]s: 256 elements, with quantised scales per 16 or 32 of them.

use super::Simd;
use super::weight::Weight;

/// Scales and (negated) minima of up to 16 sub-blocks, in memory: each is then one broadcast load.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Table {
    scale: [f32; 16],
    min: [f32; 16],
}

/// The twelve bytes of 6-bit scales and minima of Q4_K and Q5_K, times `d` and `-dmin`.
///
/// Bytes 0 to 3 hold scales 0 to 3 in their low six bits, bytes 4 to 7 the minima; bytes 8 to 11 hold the low four
/// bits of scales and minima 4 to 7, whose top two bits sit above the six of bytes 0 to 7. Four of them are handled as
/// one word.
///
/// # Safety
/// `p` is readable for 16 bytes: `d`, `dmin`, scales.
#[inline(always)]
unsafe fn table_k4<S: Simd>(s: S, p: *const u8) -> Table {
    // SAFETY: the caller promises 16 readable bytes; the arrays hold at least one vector each.
    unsafe {
        let words = p.add(4).cast::<[u32; 3]>().read_unaligned().map(u32::from_le);
        let [a, b, c] = words;
        let scales = [a & 0x3f3f_3f3f, (c & 0x0f0f_0f0f) | ((a >> 2) & 0x3030_3030), 0, 0];
        let mins = [b & 0x3f3f_3f3f, ((c >> 4) & 0x0f0f_0f0f) | ((b >> 2) & 0x3030_3030), 0, 0];
        let scales = scales.map(u32::to_le);
        let mins = mins.map(u32::to_le);
        let d = s.splat_f16(p);
        let dmin = s.mul(s.splat_f16(p.add(2)), s.splat(-1.0));
        let mut table = Table { scale: [0.0; 16], min: [0.0; 16] };
        s.store(table.scale.as_mut_ptr(), s.mul(s.to_float(s.load_u8(scales.as_ptr().cast())), d));
        s.store(table.min.as_mut_ptr(), s.mul(s.to_float(s.load_u8(mins.as_ptr().cast())), dmin));
        table
    }
}

/// The common part of the three: a table of scales.
macro_rules! k_quant {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, sub: $sub:literal, min: $has_min:literal,
     |$s:ident, $p:ident| $table:expr, values: |$sub_at:ident, $at:ident| $values:expr) => {
        $(#[$doc])*
        #[expect(non_camel_case_types, reason = "the field's own names")]
        pub(crate) struct $name;
        impl Weight for $name {
            const BLOCK_LEN: usize = 256;
            const BLOCK_BYTES: usize = $bytes;
            const SUB: usize = $sub;
            const SCALED: bool = true;
            const HAS_MIN: bool = $has_min;
            type Scales<S: Simd> = Table;

            #[inline(always)]
            unsafe fn scales<S: Simd>($s: S, $p: *const u8) -> Table {
                // SAFETY: the scales are inside the block, which the caller promises.
                unsafe { $table }
            }
            #[inline(always)]
            fn scale<S: Simd>(s: S, scales: &Table, sub: usize) -> S::F {
                s.splat(scales.scale[sub % 16])
            }
            #[inline(always)]
            fn min<S: Simd>(s: S, scales: &Table, sub: usize) -> S::F {
                s.splat(scales.min[sub % 16])
            }
            #[inline(always)]
            unsafe fn values<S: Simd>($s: S, $p: *const u8, $sub_at: usize, $at: usize) -> S::F {
                // SAFETY: the values are inside the block, which the caller promises.
                unsafe { $s.to_float($values) }
            }
        }
    };
}

/// Nibbles of sub-block `sub`: sub-blocks 2j and 2j + 1 are the low and high halves of the same 32 bytes. Shift and mask
/// instead of a branch: where `sub` is a constant after unrolling, the compiler drops the one that is idle.
///
/// # Safety
/// `p` is readable for 128 bytes.
#[inline(always)]
unsafe fn nibbles_k<S: Simd>(s: S, p: *const u8, sub: usize, at: usize) -> S::I {
    // SAFETY: `sub / 2` is at most 3 and `at + LANES` at most 32.
    let bytes = unsafe { s.load_u8(p.add(32 * (sub / 2) + at)) };
    s.iand(s.ishr(bytes, 4 * (sub % 2) as u32), s.isplat(15))
}

k_quant!(
    /// `q * (d * scale) - dmin * min`.
    Q4_K, 144, sub: 32, min: true, |s, p| table_k4(s, p),
    values: |sub, at| nibbles_k(s, p.add(16), sub, at)
);

k_quant!(
    /// As Q4_K; the fifth bit of element `i` of sub-block `sub` is bit `sub` of byte `i` of 32.
    Q5_K, 176, sub: 32, min: true, |s, p| table_k4(s, p),
    values: |sub, at| {
        let high = s.iand(s.ishr(s.load_u8(p.add(16 + at)), sub as u32), s.isplat(1));
        s.ior(nibbles_k(s, p.add(48), sub, at), s.ishl(high, 4))
    }
);

/// Sixteen signed 8-bit scales times the f16 at the end of the block.
///
/// # Safety
/// `p` is readable for a block of Q6_K.
#[inline(always)]
unsafe fn table_q6<S: Simd>(s: S, p: *const u8) -> Table {
    // SAFETY: scales are bytes 192 to 207 and `d` is bytes 208 and 209 of the block.
    unsafe {
        let d = s.splat_f16(p.add(208));
        let mut table = Table { scale: [0.0; 16], min: [0.0; 16] };
        for v in 0..16 / S::LANES {
            let scales = s.to_float(s.load_i8(p.add(192 + v * S::LANES)));
            s.store(table.scale.as_mut_ptr().add(v * S::LANES), s.mul(scales, d));
        }
        table
    }
}

k_quant!(
    /// `(q - 32) * (d * scale)`, with q of six bits. Each half of 128 elements is four runs of 32; run `r` takes the low
    /// or high (`r / 2`) nibble of the bytes at `32 * (r % 2)`, and bits `2r` and `2r + 1` of 32 common bytes. The
    /// offset is taken from the integers, since `q * (d * scale)` alone would not fit 24 bits.
    Q6_K, 210, sub: 16, min: false, |s, p| table_q6(s, p),
    values: |sub, at| {
        let (half, run, at) = (sub / 8, sub % 8 / 2, sub % 2 * 16 + at);
        let bytes = s.load_u8(p.add(64 * half + 32 * (run % 2) + at));
        let low = s.iand(s.ishr(bytes, 4 * (run / 2) as u32), s.isplat(15));
        let top = s.iand(s.ishr(s.load_u8(p.add(128 + 32 * half + at)), 2 * run as u32), s.isplat(3));
        s.isub(s.ior(low, s.ishl(top, 4)), s.isplat(32))
    }
);
