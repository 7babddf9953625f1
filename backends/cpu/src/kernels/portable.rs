//! The binding for any machine: vectors of 8 lanes as arrays, which the compiler maps to what it has (SSE2, NEON).
//!
//! On a machine without a fused multiply-add in its base instruction set, `fma` rounds twice: calling the C library's
//! exact `fmaf` would be a hundred times slower, and the kernels are bounded for either.

use super::generic::{Kernel, Pairs, PairsKernel, Simd, Words, WordsKernel};

/// The token of the portable path; it exists everywhere.
#[derive(Clone, Copy, Debug)]
pub struct Portable;

/// Eight f32.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
pub struct F8([f32; 8]);

/// Eight 32-bit integers.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
pub struct I8([i32; 8]);

/// Runs `kernel` on the portable vectors.
pub fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Portable)
}

/// As [`run`].
pub(crate) fn run_pairs<K: PairsKernel>(kernel: K) {
    kernel.run(Portable);
}

/// As [`run`].
pub(crate) fn run_words<K: WordsKernel>(kernel: K) {
    kernel.run(Portable);
}

/// The two words of a lane.
#[inline(always)]
fn words(x: i32) -> [i16; 2] {
    [x as i16, (x >> 16) as i16]
}

/// The lane of two words.
#[inline(always)]
fn lane(low: i16, high: i16) -> i32 {
    i32::from(low) & 0xffff | i32::from(high) << 16
}

#[inline(always)]
fn wmap(a: I8, f: impl Fn(i16) -> i16) -> I8 {
    I8(a.0.map(|x| {
        let [low, high] = words(x);
        lane(f(low), f(high))
    }))
}

impl Pairs for Portable {
    #[inline(always)]
    fn dot_pairs(self, acc: I8, a: I8, b: I8) -> I8 {
        I8(std::array::from_fn(|i| {
            let ([a, c], [b, d]) = (words(a.0[i]), words(b.0[i]));
            let (low, high) = (i32::from(a) * i32::from(b), i32::from(c) * i32::from(d));
            acc.0[i].wrapping_add(low.wrapping_add(high))
        }))
    }
    #[inline(always)]
    unsafe fn load_pairs(self, p: *const i16) -> I8 {
        // SAFETY: the caller promises eight readable i32.
        let words = unsafe { p.cast::<[[i16; 2]; 8]>().read_unaligned() };
        I8(words.map(|[low, high]| lane(low, high)))
    }
    #[inline(always)]
    unsafe fn splat_pair(self, p: *const i16) -> I8 {
        // SAFETY: the caller promises two readable i16.
        let [low, high] = unsafe { p.cast::<[i16; 2]>().read_unaligned() };
        I8([lane(low, high); 8])
    }
}

impl Words for Portable {
    #[inline(always)]
    unsafe fn widen_u8(self, p: *const u8) -> I8 {
        // SAFETY: the caller promises sixteen readable bytes.
        let bytes = unsafe { p.cast::<[[u8; 2]; 8]>().read() };
        I8(bytes.map(|[low, high]| lane(i16::from(low), i16::from(high))))
    }
    #[inline(always)]
    unsafe fn widen_i8(self, p: *const u8) -> I8 {
        // SAFETY: the caller promises sixteen readable bytes.
        let bytes = unsafe { p.cast::<[[i8; 2]; 8]>().read() };
        I8(bytes.map(|[low, high]| lane(i16::from(low), i16::from(high))))
    }
    #[inline(always)]
    unsafe fn look_up(self, p: *const u8, high: bool, table: &[i8; 16]) -> I8 {
        // SAFETY: the caller promises sixteen readable bytes.
        let bytes = unsafe { p.cast::<[[u8; 2]; 8]>().read() };
        let shift = if high { 4 } else { 0 };
        let at = |byte: u8| i16::from(table[usize::from(byte >> shift & 15)]);
        I8(bytes.map(|[low, high]| lane(at(low), at(high))))
    }
    #[inline(always)]
    unsafe fn store_words(self, p: *mut i16, a: I8) {
        // SAFETY: the caller promises sixteen writable words.
        unsafe { p.cast::<[[i16; 2]; 8]>().write_unaligned(a.0.map(words)) }
    }
    #[inline(always)]
    fn wsplat(self, x: i16) -> I8 {
        I8([lane(x, x); 8])
    }
    #[inline(always)]
    fn wsub(self, a: I8, b: I8) -> I8 {
        imap2(a, b, |a, b| {
            let ([a, c], [b, d]) = (words(a), words(b));
            lane(a.wrapping_sub(b), c.wrapping_sub(d))
        })
    }
    #[inline(always)]
    fn wshr<const N: i32>(self, a: I8) -> I8 {
        wmap(a, |x| ((x as u16) >> N) as i16)
    }
    #[inline(always)]
    fn wshl<const N: i32>(self, a: I8) -> I8 {
        wmap(a, |x| x << N)
    }
    #[inline(always)]
    fn sixteens(self, bits: u16) -> I8 {
        let bit = |i: usize| (bits as usize >> i & 1) as i16 * 16;
        I8(std::array::from_fn(|i| lane(bit(2 * i), bit(2 * i + 1))))
    }
    #[inline(always)]
    unsafe fn gather_f16(self, p: *const u8, stride: usize) -> F8 {
        // SAFETY: the caller promises two readable bytes at each place.
        F8(std::array::from_fn(|i| f16_to_f32(unsafe { read_u16(p.add(i * stride)) })))
    }
    #[inline(always)]
    fn halves(self, low: u64, high: u64) -> F8 {
        let all = u128::from(low) | u128::from(high) << 64;
        F8(std::array::from_fn(|i| f16_to_f32((all >> (16 * i)) as u16)))
    }
    #[inline(always)]
    fn bytes(self, x: u64) -> I8 {
        I8(x.to_le_bytes().map(i32::from))
    }
    #[inline(always)]
    fn narrow(self, a: I8, b: I8) -> I8 {
        let at = |i: usize| if i < 8 { a.0[i % 8] } else { b.0[i % 8] } as i16;
        I8(std::array::from_fn(|i| lane(at(2 * i), at(2 * i + 1))))
    }
}

#[inline(always)]
fn map2(a: F8, b: F8, f: impl Fn(f32, f32) -> f32) -> F8 {
    F8(std::array::from_fn(|i| f(a.0[i], b.0[i])))
}

#[inline(always)]
fn imap2(a: I8, b: I8, f: impl Fn(i32, i32) -> i32) -> I8 {
    I8(std::array::from_fn(|i| f(a.0[i], b.0[i])))
}

#[inline(always)]
fn mul_add(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
        a.mul_add(b, c)
    } else {
        a * b + c
    }
}

/// binary16 to f32, exactly: a half is a float whose exponent is off by 112, which one multiplication repairs, for
/// subnormals too; infinities and NaNs keep their all-ones exponent.
#[inline(always)]
pub(crate) fn f16_to_f32(h: u16) -> f32 {
    let magnitude = u32::from(h & 0x7fff) << 13;
    let special = if h & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    let scaled = f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23);
    f32::from_bits((scaled.to_bits() | special) | (u32::from(h & 0x8000) << 16))
}

#[inline(always)]
unsafe fn read_u16(p: *const u8) -> u16 {
    // SAFETY: the caller promises two readable bytes.
    u16::from_le(unsafe { p.cast::<u16>().read_unaligned() })
}

impl Simd for Portable {
    type F = F8;
    type I = I8;
    const LANES: usize = 8;
    const GEMM_ROWS: usize = 6;

    #[inline(always)]
    fn splat(self, x: f32) -> F8 {
        F8([x; 8])
    }
    #[inline(always)]
    fn add(self, a: F8, b: F8) -> F8 {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: F8, b: F8) -> F8 {
        map2(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: F8, b: F8) -> F8 {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: F8, b: F8) -> F8 {
        map2(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: F8, b: F8, c: F8) -> F8 {
        F8(std::array::from_fn(|i| mul_add(a.0[i], b.0[i], c.0[i])))
    }
    #[inline(always)]
    fn max(self, a: F8, b: F8) -> F8 {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: F8, b: F8) -> F8 {
        map2(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn select_gt(self, a: F8, b: F8, yes: F8, no: F8) -> F8 {
        F8(std::array::from_fn(|i| if a.0[i] > b.0[i] { yes.0[i] } else { no.0[i] }))
    }
    #[inline(always)]
    fn abs(self, a: F8) -> F8 {
        F8(a.0.map(f32::abs))
    }
    #[inline(always)]
    fn copysign(self, mag: F8, sign: F8) -> F8 {
        map2(mag, sign, f32::copysign)
    }
    #[inline(always)]
    fn round(self, a: F8) -> F8 {
        // Adding 1.5 * 2^23 leaves no fraction bits, so the addition itself rounds to nearest even.
        F8(a.0.map(|x| (x + 12_582_912.0) - 12_582_912.0))
    }
    #[inline(always)]
    fn to_int(self, a: F8) -> I8 {
        I8(a.0.map(|x| (x + 12_582_912.0).to_bits().wrapping_sub(0x4b40_0000) as i32))
    }
    #[inline(always)]
    fn to_float(self, a: I8) -> F8 {
        F8(a.0.map(|x| x as f32))
    }
    #[inline(always)]
    fn exp2i(self, n: I8) -> F8 {
        F8(n.0.map(|n| f32::from_bits((n.wrapping_add(127) as u32) << 23)))
    }
    #[inline(always)]
    fn sum(self, a: F8) -> f32 {
        let [a, b, c, d, e, f, g, h] = a.0;
        ((a + e) + (b + f)) + ((c + g) + (d + h))
    }
    #[inline(always)]
    fn max_lane(self, a: F8) -> f32 {
        a.0.into_iter().fold(f32::NEG_INFINITY, |m, x| if x > m { x } else { m })
    }

    #[inline(always)]
    fn isplat(self, x: i32) -> I8 {
        I8([x; 8])
    }
    #[inline(always)]
    fn iadd(self, a: I8, b: I8) -> I8 {
        imap2(a, b, i32::wrapping_add)
    }
    #[inline(always)]
    fn isub(self, a: I8, b: I8) -> I8 {
        imap2(a, b, i32::wrapping_sub)
    }
    #[inline(always)]
    fn iand(self, a: I8, b: I8) -> I8 {
        imap2(a, b, |a, b| a & b)
    }
    #[inline(always)]
    fn ior(self, a: I8, b: I8) -> I8 {
        imap2(a, b, |a, b| a | b)
    }
    #[inline(always)]
    fn ishr(self, a: I8, n: u32) -> I8 {
        I8(a.0.map(|x| ((x as u32) >> (n & 31)) as i32))
    }
    #[inline(always)]
    fn ishl(self, a: I8, n: u32) -> I8 {
        I8(a.0.map(|x| x << (n & 31)))
    }

    #[inline(always)]
    fn prefetch(self, _p: *const u8) {}
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> F8 {
        // SAFETY: the caller promises eight readable f32.
        F8(unsafe { p.cast::<[f32; 8]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, a: F8) {
        // SAFETY: the caller promises eight writable f32.
        unsafe { p.cast::<[f32; 8]>().write_unaligned(a.0) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> F8 {
        // SAFETY: the caller promises sixteen readable bytes.
        F8(unsafe { p.cast::<[u16; 8]>().read_unaligned() }.map(|h| f16_to_f32(u16::from_le(h))))
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> F8 {
        // SAFETY: the caller promises sixteen readable bytes.
        F8(unsafe { p.cast::<[u16; 8]>().read_unaligned() }
            .map(|h| f32::from_bits(u32::from(u16::from_le(h)) << 16)))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8, a: F8) {
        let halves = a.0.map(|x| half::f16::from_f32(x).to_bits().to_le());
        // SAFETY: the caller promises sixteen writable bytes.
        unsafe { p.cast::<[u16; 8]>().write_unaligned(halves) }
    }
    #[inline(always)]
    unsafe fn splat_f16(self, p: *const u8) -> F8 {
        // SAFETY: the caller promises two readable bytes.
        F8([f16_to_f32(unsafe { read_u16(p) }); 8])
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> I8 {
        // SAFETY: the caller promises eight readable bytes.
        I8(unsafe { p.cast::<[u8; 8]>().read() }.map(i32::from))
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8) -> I8 {
        // SAFETY: the caller promises eight readable bytes.
        I8(unsafe { p.cast::<[i8; 8]>().read() }.map(i32::from))
    }
    #[inline(always)]
    unsafe fn transpose(self, src: *const f32, src_row: usize, dst: *mut f32, dst_row: usize) {
        for i in 0..8 {
            for j in 0..8 {
                // SAFETY: the caller promises eight rows of eight f32 at these strides.
                unsafe { dst.add(j * dst_row + i).write(src.add(i * src_row + j).read()) }
            }
        }
    }
}
