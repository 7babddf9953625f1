//! Activations as 16-bit integers: what the integer products multiply weights with.
//!
//! Each run of 32 activations gets a scale that is a power of two, such that the greatest magnitude lies in 16384..32768. So:
//! - **Errors are small.** An activation is off by at most 2^-15 of the greatest of its run, 1e-5 of the run's root mean
//!   square as a rule: between the 8-bit activations that are customary and f32, 60,000 times nearer to f32 in the square.
//! - **Products are exact.** Sums of 32 products with weights of up to 8 bits fit 32-bit integers, and a power of two
//!   times a weight's scale rounds no further. Activations of up to 14 significant bits lose nothing at all.
//!
//! A row whose values are not all finite has no such form; the caller computes it in f32 instead.

use super::Words;

/// Activations of a group; every block length of the integer types divides it.
pub(crate) const GROUP: usize = 256;
/// Activations that share a scale.
pub(crate) const RUN: usize = 32;

/// 256 activations of a row. Those past the row's end are zero.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Activations {
    pub(crate) words: [i16; GROUP],
    /// The scale of each run of 32.
    pub(crate) scale: [f32; 8],
    /// The sum of each run of 32, scaled.
    pub(crate) sum: [f32; 8],
    /// The scale of each run of 16.
    pub(crate) scale16: [f32; 16],
    /// The sum of each run of 16, scaled.
    pub(crate) sum16: [f32; 16],
}

/// Size of a group in f32.
pub(crate) const GROUP_FLOATS: usize = size_of::<Activations>() / 4;

impl Activations {
    pub(crate) const ZERO: Activations = Activations {
        words: [0; GROUP],
        scale: [0.0; 8],
        sum: [0.0; 8],
        scale16: [0.0; 16],
        sum16: [0.0; 16],
    };
}

/// Quantises up to 256 activations, a multiple of 32; gives whether all are finite.
///
/// # Safety
/// `x` is readable for `n` f32; `n` is a multiple of 32 and at most 256.
#[inline(always)]
pub(crate) unsafe fn quantize_group<S: Words>(
    s: S,
    x: *const f32,
    n: usize,
    out: &mut Activations,
) -> bool {
    // SAFETY: runs stay below `n`, and `n` below the size of a group.
    unsafe {
        // Zero times a finite number is zero, and NaN times anything else.
        let mut finite = s.splat(0.0);
        for run in 0..n / RUN {
            let mut v = [s.splat(0.0); 4];
            for (i, v) in v.iter_mut().enumerate() {
                *v = s.load(x.add(RUN * run + 8 * i));
                finite = s.fma(*v, s.splat(0.0), finite);
            }
            let low = s.max(s.abs(v[0]), s.abs(v[1]));
            let high = s.max(s.abs(v[2]), s.abs(v[3]));
            let max = s.max_lane(s.max(low, high));
            // The exponent that makes the maximum a number of 15 bits, kept where both factors are normal.
            let exponent = ((max.to_bits() >> 23) as i32 - 127 - 14).clamp(-126, 126);
            let scale = f32::from_bits(((127 + exponent) as u32) << 23);
            let inverse = s.splat(f32::from_bits(((127 - exponent) as u32) << 23));
            let words = out.words.as_mut_ptr().add(RUN * run);
            for half in 0..2 {
                // A maximum just below a power of two would round up to it, one more than fits.
                let most = s.splat(32767.0);
                let a = s.to_int(s.min(s.mul(v[2 * half], inverse), most));
                let b = s.to_int(s.min(s.mul(v[2 * half + 1], inverse), most));
                s.store_words(words.add(16 * half), s.narrow(a, b));
                // Integers below 2^20: exact in f32, in any order.
                let sum = s.sum(s.to_float(s.iadd(a, b))) * scale;
                out.sum16[2 * run + half] = sum;
                out.scale16[2 * run + half] = scale;
            }
            out.scale[run] = scale;
            out.sum[run] = out.sum16[2 * run] + out.sum16[2 * run + 1];
        }
        for run in n / RUN..GROUP / RUN {
            out.words[RUN * run..RUN * (run + 1)].fill(0);
            (out.scale[run], out.sum[run]) = (0.0, 0.0);
            out.scale16[2 * run..2 * run + 2].fill(0.0);
            out.sum16[2 * run..2 * run + 2].fill(0.0);
        }
        s.sum(finite) == 0.0
    }
}
