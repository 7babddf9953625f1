//! [`IntWeight`]: weight types as small integers with scales, for the integer products, and the types of 32 elements.
//!
//! As in `weight`, `w = value * scale + min`, with a scale for 16 or 32 elements. Here values come as 16-bit words, sixteen at
//! a time and in order, which meet activations of the same form: a byte of two nibbles is widened once, and gives sixteen
//! elements by a mask and sixteen by a shift.

use super::Words;

/// Scales of 256 elements as vectors of eight.
pub(crate) struct Scales<S: Words> {
    /// One for each 32 elements (the first vector), or for each 16 (both).
    pub(crate) scale: [S::F; 2],
    /// What is added to each element of a run of 32.
    pub(crate) min: S::F,
}

/// A weight type as integers.
pub(crate) trait IntWeight: 'static {
    /// Elements of a block: 32 or 256.
    const BLOCK_LEN: usize;
    /// Bytes of a block.
    const BLOCK_BYTES: usize;
    /// Elements that share a scale: 16 or 32.
    const SUB: usize;
    /// What is subtracted from the integers that `words` gives. Not together with a minimum.
    const OFFSET: i16;
    /// Whether there is a minimum to add.
    const HAS_MIN: bool;

    /// The scales of `runs` times 32 elements, at most 256, from the start of a block; the rest are zero.
    /// # Safety
    /// `p` is readable for the blocks of these elements.
    unsafe fn scales<S: Words>(s: S, p: *const u8, runs: usize) -> Scales<S>;
    /// The integers of elements `16 * AT..16 * (AT + 1)` of a block.
    /// # Safety
    /// `p` is readable for `BLOCK_BYTES`; the elements are inside the block.
    unsafe fn words<S: Words, const AT: usize>(s: S, p: *const u8) -> S::I;
}

/// The f16 at `p` and at `runs - 1` places `stride` bytes apart after it, zeros after these.
///
/// # Safety
/// Two bytes are readable at each place.
#[inline(always)]
unsafe fn halves<S: Words>(s: S, p: *const u8, stride: usize, runs: usize) -> S::F {
    // SAFETY: the caller's promise.
    unsafe {
        if runs == 8 {
            return s.gather_f16(p, stride);
        }
        let mut both = [0u64; 2];
        for b in 0..runs {
            let half = u16::from_le(p.add(b * stride).cast::<u16>().read_unaligned());
            both[b / 4 % 2] |= u64::from(half) << (16 * (b % 4));
        }
        s.halves(both[0], both[1])
    }
}

/// Nibbles of 16 bytes: the low halves are elements 0 to 15 and the high halves 16 to 31.
///
/// # Safety
/// `p` is readable for 16 bytes.
#[inline(always)]
pub(crate) unsafe fn nibbles<S: Words>(s: S, p: *const u8, high: bool) -> S::I {
    // SAFETY: the caller's promise.
    let bytes = unsafe { s.widen_u8(p) };
    if high { s.wshr::<4>(bytes) } else { s.iand(bytes, s.wsplat(15)) }
}

/// The fifth bits of sixteen elements, in place.
///
/// # Safety
/// `p` is readable for 2 bytes.
#[inline(always)]
unsafe fn fifth_bits<S: Words>(s: S, p: *const u8) -> S::I {
    // SAFETY: the caller's promise.
    s.sixteens(u16::from_le(unsafe { p.cast::<u16>().read_unaligned() }))
}

/// A type of 32 elements with an f16 scale at its start, and where `min` says so an f16 minimum after it.
macro_rules! int32 {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, offset: $offset:literal, min: $min:literal,
     words: |$s:ident, $p:ident, $at:ident| $words:expr) => {
        $(#[$doc])*
        pub(crate) struct $name;
        impl IntWeight for $name {
            const BLOCK_LEN: usize = 32;
            const BLOCK_BYTES: usize = $bytes;
            const SUB: usize = 32;
            const OFFSET: i16 = $offset;
            const HAS_MIN: bool = $min;

            #[inline(always)]
            unsafe fn scales<S: Words>(s: S, p: *const u8, runs: usize) -> Scales<S> {
                // SAFETY: the scales are inside their blocks, which the caller promises.
                unsafe {
                    let scale = halves(s, p, $bytes, runs);
                    let min = if $min { halves(s, p.add(2), $bytes, runs) } else { s.splat(0.0) };
                    Scales { scale: [scale; 2], min }
                }
            }
            #[inline(always)]
            unsafe fn words<S: Words, const AT: usize>($s: S, $p: *const u8) -> S::I {
                let $at = AT % 2;
                // SAFETY: the words are inside the block, which the caller promises.
                unsafe { $words }
            }
        }
    };
}

int32!(
    /// `(q - 8) * d`: 16 bytes of nibbles after the scale.
    Q4_0, 18, offset: 8, min: false,
    words: |s, p, at| nibbles(s, p.add(2), at == 1)
);
int32!(
    /// `q * d + m`.
    Q4_1, 20, offset: 0, min: true,
    words: |s, p, at| nibbles(s, p.add(4), at == 1)
);
int32!(
    /// `(q - 16) * d`: four bytes of fifth bits, then the nibbles.
    Q5_0, 22, offset: 16, min: false,
    words: |s, p, at| s.ior(nibbles(s, p.add(6), at == 1), fifth_bits(s, p.add(2 + 2 * at)))
);
int32!(
    /// `q * d + m`.
    Q5_1, 24, offset: 0, min: true,
    words: |s, p, at| s.ior(nibbles(s, p.add(8), at == 1), fifth_bits(s, p.add(4 + 2 * at)))
);
int32!(
    /// `q * d` with signed bytes.
    Q8_0, 34, offset: 0, min: false,
    words: |s, p, at| s.widen_i8(p.add(2 + 16 * at))
);

/// Values of the 16 codes of IQ4_NL and IQ4_XS.
pub(crate) const IQ4_VALUES: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Values of the 16 codes of MXFP4, doubled.
const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

int32!(
    /// `table[q] * d`.
    #[expect(non_camel_case_types, reason = "the field's own names")]
    IQ4_NL, 18, offset: 0, min: false,
    words: |s, p, at| s.look_up(p.add(2), at == 1, &IQ4_VALUES)
);

/// `table[q] * 2^(e - 128)`: an exponent, then nibbles.
pub(crate) struct MXFP4;

impl IntWeight for MXFP4 {
    const BLOCK_LEN: usize = 32;
    const BLOCK_BYTES: usize = 17;
    const SUB: usize = 32;
    const OFFSET: i16 = 0;
    const HAS_MIN: bool = false;

    #[inline(always)]
    unsafe fn scales<S: Words>(s: S, p: *const u8, runs: usize) -> Scales<S> {
        let mut scale = [0.0f32; 8];
        for (run, scale) in scale.iter_mut().enumerate().take(runs) {
            // SAFETY: the first byte of each block is inside it.
            let e = u32::from(unsafe { p.add(run * Self::BLOCK_BYTES).read() });
            // The two smallest are subnormal.
            *scale = f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 });
        }
        // SAFETY: the array holds eight.
        let scale = unsafe { s.load(scale.as_ptr()) };
        Scales { scale: [scale; 2], min: s.splat(0.0) }
    }
    #[inline(always)]
    unsafe fn words<S: Words, const AT: usize>(s: S, p: *const u8) -> S::I {
        // SAFETY: the nibbles are inside the block, which the caller promises.
        unsafe { s.look_up(p.add(1), AT % 2 == 1, &E2M1_DOUBLED) }
    }
}
