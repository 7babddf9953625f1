//! [`Weight`]: how the elements of a type are read as f32, one vector at a time: the plain types, and the block types that
//! caches are made of.
//!
//! Every block type is a sequence of sub-blocks in which `w = value * scale + min` with integers as values. A fused
//! dot product and a decoder both follow from these three; [`decode_row`] is the decoder. The products `value * scale`
//! fit 24 bits in all types here, so the single rounding of `w` is that of the definition, and decoding is exact, with
//! or without a fused multiply-add.

use super::Simd;

/// A weight type as sub-blocks of `SUB` elements with a common scale.
pub(crate) trait Weight: 'static {
    /// Elements of a block. Plain types count 32 elements as a block, and have a tail.
    const BLOCK_LEN: usize;
    /// Bytes of a block.
    const BLOCK_BYTES: usize;
    /// Elements that share a scale: 16 or 32.
    const SUB: usize;
    /// False for plain types: values are the weights.
    const SCALED: bool;
    /// Whether there is a minimum to add.
    const HAS_MIN: bool;
    /// What is worked out once for a block.
    type Scales<S: Simd>: Copy;

    /// # Safety
    /// `p` is readable for `BLOCK_BYTES`.
    unsafe fn scales<S: Simd>(s: S, p: *const u8) -> Self::Scales<S>;
    /// The scale of sub-block `sub` in all lanes.
    fn scale<S: Simd>(s: S, scales: &Self::Scales<S>, sub: usize) -> S::F;
    /// The minimum of sub-block `sub` in all lanes.
    fn min<S: Simd>(s: S, scales: &Self::Scales<S>, sub: usize) -> S::F;
    /// The values of elements `at..at + LANES` of sub-block `sub`.
    /// # Safety
    /// `p` is readable for `BLOCK_BYTES`; `sub` and `at` are inside the block.
    unsafe fn values<S: Simd>(s: S, p: *const u8, sub: usize, at: usize) -> S::F;
    /// Element `i` of the incomplete last block of a row of plain elements.
    /// # Safety
    /// `p` is readable for `i + 1` elements.
    unsafe fn element(_p: *const u8, _i: usize) -> f32 {
        0.0
    }
}

/// Decodes `len` elements from `row`, exactly. `len` is a multiple of the block length unless the type is plain.
///
/// # Safety
/// `row` is readable for `len` elements and `out` writable for `len` f32.
#[inline(always)]
pub(crate) unsafe fn decode_row<S: Simd, W: Weight>(
    s: S,
    row: *const u8,
    len: usize,
    out: *mut f32,
) {
    // SAFETY: blocks and the tail stay within `len` elements, which the caller vouches for.
    unsafe {
        let blocks = len / W::BLOCK_LEN;
        let mut p = row;
        let mut o = out;
        for _ in 0..blocks {
            let scales = W::scales(s, p);
            for sub in 0..W::BLOCK_LEN / W::SUB {
                let scale = W::scale(s, &scales, sub);
                let min = W::min(s, &scales, sub);
                for v in 0..W::SUB / S::LANES {
                    let value = W::values(s, p, sub, v * S::LANES);
                    s.store(
                        o.add(sub * W::SUB + v * S::LANES),
                        apply::<S, W>(s, value, scale, min),
                    );
                }
            }
            p = p.add(W::BLOCK_BYTES);
            o = o.add(W::BLOCK_LEN);
        }
        for i in 0..len - blocks * W::BLOCK_LEN {
            o.add(i).write(W::element(p, i));
        }
    }
}

/// `value * scale + min`, without the parts that the type does not have.
#[inline(always)]
pub(crate) fn apply<S: Simd, W: Weight>(s: S, value: S::F, scale: S::F, min: S::F) -> S::F {
    if W::HAS_MIN {
        s.fma(value, scale, min)
    } else if W::SCALED {
        s.mul(value, scale)
    } else {
        value
    }
}

/// A plain type: values are read by one load.
macro_rules! plain {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, $load:ident, |$p:ident| $element:expr) => {
        $(#[$doc])*
        pub(crate) struct $name;
        impl Weight for $name {
            const BLOCK_LEN: usize = 32;
            const BLOCK_BYTES: usize = 32 * $bytes;
            const SUB: usize = 32;
            const SCALED: bool = false;
            const HAS_MIN: bool = false;
            type Scales<S: Simd> = ();

            #[inline(always)]
            unsafe fn scales<S: Simd>(_s: S, _p: *const u8) {}
            #[inline(always)]
            fn scale<S: Simd>(s: S, _scales: &(), _sub: usize) -> S::F {
                s.splat(1.0)
            }
            #[inline(always)]
            fn min<S: Simd>(s: S, _scales: &(), _sub: usize) -> S::F {
                s.splat(0.0)
            }
            #[inline(always)]
            unsafe fn values<S: Simd>(s: S, p: *const u8, _sub: usize, at: usize) -> S::F {
                // SAFETY: `at` is inside the block, which the caller promises.
                unsafe { s.$load(p.add($bytes * at).cast()) }
            }
            #[inline(always)]
            unsafe fn element(p: *const u8, i: usize) -> f32 {
                // SAFETY: element `i` is readable, which the caller promises.
                let $p = unsafe { p.add($bytes * i).cast::<[u8; $bytes]>().read() };
                $element
            }
        }
    };
}

plain!(
    /// IEEE 754 binary32.
    F32, 4, load, |b| f32::from_le_bytes(b)
);
plain!(
    /// IEEE 754 binary16.
    F16, 2, load_f16, |b| crate::kernels::portable::f16_to_f32(u16::from_le_bytes(b))
);
plain!(
    /// bfloat16.
    BF16, 2, load_bf16, |b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)
);

/// Nibble `at..at + LANES` of 16 bytes: the low halves are elements 0 to 15 and the high halves 16 to 31.
///
/// # Safety
/// `p` is readable for 16 bytes and `at + LANES` is at most 32.
#[inline(always)]
unsafe fn nibbles<S: Simd>(s: S, p: *const u8, at: usize) -> S::I {
    // SAFETY: `at % 16 + LANES` is at most 16.
    let bytes = unsafe { s.load_u8(p.add(at % 16)) };
    if at < 16 { s.iand(bytes, s.isplat(15)) } else { s.ishr(bytes, 4) }
}

/// A type of 32 elements with an f16 scale at its start. `min` is the multiple of the scale
/// that is added, or none.
macro_rules! legacy {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, min: $has_min:literal, |$s:ident, $p:ident, $d:ident| $min:expr,
     values: |$at:ident| $values:expr) => {
        $(#[$doc])*
        pub(crate) struct $name;
        impl Weight for $name {
            const BLOCK_LEN: usize = 32;
            const BLOCK_BYTES: usize = $bytes;
            const SUB: usize = 32;
            const SCALED: bool = true;
            const HAS_MIN: bool = $has_min;
            type Scales<S: Simd> = (S::F, S::F);

            #[inline(always)]
            unsafe fn scales<S: Simd>($s: S, $p: *const u8) -> (S::F, S::F) {
                // SAFETY: the scales are inside the block, which the caller promises.
                unsafe {
                    let $d = $s.splat_f16($p);
                    ($d, $min)
                }
            }
            #[inline(always)]
            fn scale<S: Simd>(_s: S, scales: &(S::F, S::F), _sub: usize) -> S::F {
                scales.0
            }
            #[inline(always)]
            fn min<S: Simd>(_s: S, scales: &(S::F, S::F), _sub: usize) -> S::F {
                scales.1
            }
            #[inline(always)]
            unsafe fn values<S: Simd>($s: S, $p: *const u8, _sub: usize, $at: usize) -> S::F {
                // SAFETY: `at` is inside the block, which the caller promises.
                unsafe { $s.to_float($values) }
            }
        }
    };
}

legacy!(
    /// `(q - 8) * d`: 16 bytes of nibbles after the scale.
    Q4_0, 18, min: true, |s, p, d| s.mul(d, s.splat(-8.0)),
    values: |at| nibbles(s, p.add(2), at)
);
legacy!(
    /// `q * d` with signed bytes.
    Q8_0, 34, min: false, |s, p, d| d,
    values: |at| s.load_i8(p.add(2 + at))
);
