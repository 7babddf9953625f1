//! AVX2 with FMA and F16C: vectors of 8 lanes, 16 registers; and the same with one of the two encodings of the VNNI
//! instructions, which add products of pairs in one step instead of two.

use std::arch::x86_64::*;

use crate::kernels::generic::{Kernel, Pairs, PairsKernel, Simd, Words, WordsKernel};

/// Without VNNI.
pub const PLAIN: u8 = 0;
/// With AVX-VNNI, the encoding of machines without AVX-512.
pub const AVX_VNNI: u8 = 1;
/// With AVX512-VNNI and AVX512-VL.
pub const AVX512_VNNI: u8 = 2;

/// Proof that AVX2, FMA and F16C are present, with what `VNNI` names.
#[derive(Clone, Copy, Debug)]
pub struct Avx2<const VNNI: u8>(());

/// Whether this machine has what the binding needs.
pub fn detected() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

/// Runs `kernel`, compiled for this instruction set.
///
/// # Safety
/// [`detected`] has returned true.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2::<PLAIN>(()))
}

/// Whether AVX-VNNI is there too.
pub fn detected_vnni() -> bool {
    detected() && is_x86_feature_detected!("avxvnni")
}

/// One method per line: its name, arguments and the expression of intrinsics that it is.
macro_rules! methods {
    ($( fn $name:ident($($arg:ident: $ty:ty),*) -> $out:ty = $body:expr; )*) => { $(
        #[inline(always)]
        fn $name(self, $($arg: $ty),*) -> $out {
            // SAFETY: a value of `Avx2` exists only where AVX2, FMA and F16C have been detected.
            unsafe { $body }
        }
    )* };
}

/// As `methods`, for those that access memory.
macro_rules! memory {
    ($( fn $name:ident($($arg:ident: $ty:ty),*) -> $out:ty = $body:expr; )*) => { $(
        #[inline(always)]
        unsafe fn $name(self, $($arg: $ty),*) -> $out {
            // SAFETY: the token proves the instruction set; the caller promises the memory (see `Simd`).
            unsafe { $body }
        }
    )* };
}

/// A door for each kind of kernel and encoding of VNNI.
macro_rules! doors {
    ($( fn $name:ident<$kernel:ident>($vnni:ident, $features:literal); )*) => { $(
        /// # Safety
        /// The machine has the features that the function enables.
        #[target_feature(enable = $features)]
        pub(crate) unsafe fn $name<K: $kernel>(kernel: K) {
            kernel.run(Avx2::<$vnni>(()));
        }
    )* };
}

doors! {
    fn run_pairs<PairsKernel>(PLAIN, "avx2,fma,f16c");
    fn run_words<WordsKernel>(PLAIN, "avx2,fma,f16c");
    fn run_pairs_vnni<PairsKernel>(AVX_VNNI, "avx2,fma,f16c,avxvnni");
    fn run_words_vnni<WordsKernel>(AVX_VNNI, "avx2,fma,f16c,avxvnni");
    fn run_words_512<WordsKernel>(AVX512_VNNI, "avx2,fma,f16c,avx512f,avx512vl,avx512vnni");
}

impl<const VNNI: u8> Pairs for Avx2<VNNI> {
    methods! {
        fn dot_pairs(acc: __m256i, a: __m256i, b: __m256i) -> __m256i = match VNNI {
            AVX_VNNI => _mm256_dpwssd_avx_epi32(acc, a, b),
            AVX512_VNNI => _mm256_dpwssd_epi32(acc, a, b),
            _ => _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)),
        };
    }
    memory! {
        fn load_pairs(p: *const i16) -> __m256i = _mm256_loadu_si256(p.cast());
        fn splat_pair(p: *const i16) -> __m256i = _mm256_set1_epi32(p.cast::<i32>().read_unaligned());
    }
}

/// The same vector, as one of which the compiler knows nothing. It would otherwise see that masks and shifts of widened
/// bytes can be done before the widening, and do it: twice the widenings, and an 8-bit shift that takes two instructions.
#[inline]
#[target_feature(enable = "avx2")]
fn opaque(mut a: __m256i) -> __m256i {
    // SAFETY: no instruction at all.
    unsafe {
        std::arch::asm!("/* {0} */", inout(ymm_reg) a, options(pure, nomem, nostack, preserves_flags));
    }
    a
}

impl<const VNNI: u8> Words for Avx2<VNNI> {
    methods! {
        fn wsplat(x: i16) -> __m256i = _mm256_set1_epi16(x);
        fn wsub(a: __m256i, b: __m256i) -> __m256i = _mm256_sub_epi16(a, b);
        fn sixteens(bits: u16) -> __m256i = {
            let own = _mm256_setr_epi16(
                1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, i16::MIN,
            );
            let set = _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16(bits as i16), own), own);
            _mm256_and_si256(set, _mm256_set1_epi16(16))
        };
        fn halves(low: u64, high: u64) -> __m256 =
            _mm256_cvtph_ps(_mm_set_epi64x(high as i64, low as i64));
        fn bytes(x: u64) -> __m256i = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(x as i64));
        fn narrow(a: __m256i, b: __m256i) -> __m256i =
            _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(a, b));
    }
    #[inline(always)]
    fn wshr<const N: i32>(self, a: __m256i) -> __m256i {
        // SAFETY: a value of `Avx2` exists only where AVX2 has been detected.
        unsafe { _mm256_srli_epi16::<N>(a) }
    }
    #[inline(always)]
    fn wshl<const N: i32>(self, a: __m256i) -> __m256i {
        // SAFETY: as above.
        unsafe { _mm256_slli_epi16::<N>(a) }
    }
    memory! {
        fn widen_u8(p: *const u8) -> __m256i = opaque(_mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast())));
        fn widen_i8(p: *const u8) -> __m256i = _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast()));
        fn gather_f16(p: *const u8, stride: usize) -> __m256 = {
            // A macro, because a closure would be compiled without AVX.
            macro_rules! at {
                ($i:literal) => {
                    p.add($i * stride).cast::<i16>().read_unaligned()
                };
            }
            _mm256_cvtph_ps(_mm_setr_epi16(at!(0), at!(1), at!(2), at!(3), at!(4), at!(5), at!(6), at!(7)))
        };
        fn look_up(p: *const u8, high: bool, table: &[i8; 16]) -> __m256i = {
            let bytes = _mm_loadu_si128(p.cast());
            let bytes = if high { _mm_srli_epi16::<4>(bytes) } else { bytes };
            let nibbles = _mm_and_si128(bytes, _mm_set1_epi8(15));
            _mm256_cvtepi8_epi16(_mm_shuffle_epi8(_mm_loadu_si128(table.as_ptr().cast()), nibbles))
        };
        fn store_words(p: *mut i16, a: __m256i) -> () = _mm256_storeu_si256(p.cast(), a);
    }
}

impl<const VNNI: u8> Simd for Avx2<VNNI> {
    type F = __m256;
    type I = __m256i;
    const LANES: usize = 8;
    const GEMM_ROWS: usize = 6;

    methods! {
        fn splat(x: f32) -> __m256 = _mm256_set1_ps(x);
        fn add(a: __m256, b: __m256) -> __m256 = _mm256_add_ps(a, b);
        fn sub(a: __m256, b: __m256) -> __m256 = _mm256_sub_ps(a, b);
        fn mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        fn div(a: __m256, b: __m256) -> __m256 = _mm256_div_ps(a, b);
        fn fma(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        fn max(a: __m256, b: __m256) -> __m256 = _mm256_max_ps(a, b);
        fn min(a: __m256, b: __m256) -> __m256 = _mm256_min_ps(a, b);
        fn select_gt(a: __m256, b: __m256, yes: __m256, no: __m256) -> __m256 =
            _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_GT_OQ>(a, b));
        fn abs(a: __m256) -> __m256 = _mm256_andnot_ps(_mm256_set1_ps(-0.0), a);
        fn copysign(mag: __m256, sign: __m256) -> __m256 = {
            let bit = _mm256_set1_ps(-0.0);
            _mm256_or_ps(_mm256_andnot_ps(bit, mag), _mm256_and_ps(bit, sign))
        };
        fn round(a: __m256) -> __m256 = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);
        fn to_int(a: __m256) -> __m256i = _mm256_cvtps_epi32(a);
        fn to_float(a: __m256i) -> __m256 = _mm256_cvtepi32_ps(a);
        fn exp2i(n: __m256i) -> __m256 =
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127))));
        fn sum(a: __m256) -> f32 = {
            let four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        };
        fn max_lane(a: __m256) -> f32 = {
            let four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        };

        fn prefetch(p: *const u8) -> () = _mm_prefetch::<_MM_HINT_T0>(p.cast());
        fn isplat(x: i32) -> __m256i = _mm256_set1_epi32(x);
        fn iadd(a: __m256i, b: __m256i) -> __m256i = _mm256_add_epi32(a, b);
        fn isub(a: __m256i, b: __m256i) -> __m256i = _mm256_sub_epi32(a, b);
        fn iand(a: __m256i, b: __m256i) -> __m256i = _mm256_and_si256(a, b);
        fn ior(a: __m256i, b: __m256i) -> __m256i = _mm256_or_si256(a, b);
        fn ishr(a: __m256i, n: u32) -> __m256i = _mm256_srl_epi32(a, _mm_cvtsi32_si128(n as i32));
        fn ishl(a: __m256i, n: u32) -> __m256i = _mm256_sll_epi32(a, _mm_cvtsi32_si128(n as i32));
    }

    memory! {
        fn load(p: *const f32) -> __m256 = _mm256_loadu_ps(p);
        fn store(p: *mut f32, a: __m256) -> () = _mm256_storeu_ps(p, a);
        fn load_f16(p: *const u8) -> __m256 = _mm256_cvtph_ps(_mm_loadu_si128(p.cast()));
        fn load_bf16(p: *const u8) -> __m256 =
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))));
        fn store_f16(p: *mut u8, a: __m256) -> () =
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a));
        fn splat_f16(p: *const u8) -> __m256 =
            _mm256_cvtph_ps(_mm_set1_epi16(p.cast::<i16>().read_unaligned()));
        fn load_u8(p: *const u8) -> __m256i = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
        fn load_i8(p: *const u8) -> __m256i = _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()));
        fn transpose(src: *const f32, src_row: usize, dst: *mut f32, dst_row: usize) -> () =
            transpose_8x8(src, src_row, dst, dst_row);
    }
}

/// Pairs of rows, then pairs of pairs, then halves: 24 shuffles for 64 values.
///
/// # Safety
/// AVX2 is present; eight rows of eight f32 are readable at `src` and writable at `dst`.
#[inline(always)]
pub(super) unsafe fn transpose_8x8(src: *const f32, src_row: usize, dst: *mut f32, dst_row: usize) {
    // SAFETY: the caller's promise covers every access below.
    unsafe {
        // A row as two halves, the upper one from four rows below: the last step of the transposition for free. A macro,
        // because a closure would be compiled without AVX.
        macro_rules! row {
            ($i:expr) => {{
                let p = src.add(($i & 3) * src_row + ($i & 4));
                let low = _mm256_castps128_ps256(_mm_loadu_ps(p));
                _mm256_insertf128_ps::<1>(low, _mm_loadu_ps(p.add(4 * src_row)))
            }};
        }
        let mut half = 0;
        while half < 8 {
            let (r0, r1, r2, r3) = (row!(half), row!(half + 1), row!(half + 2), row!(half + 3));
            let a = _mm256_unpacklo_ps(r0, r1);
            let b = _mm256_unpackhi_ps(r0, r1);
            let c = _mm256_unpacklo_ps(r2, r3);
            let d = _mm256_unpackhi_ps(r2, r3);
            let out = dst.add(half * dst_row);
            _mm256_storeu_ps(out, _mm256_shuffle_ps::<0x44>(a, c));
            _mm256_storeu_ps(out.add(dst_row), _mm256_shuffle_ps::<0xee>(a, c));
            _mm256_storeu_ps(out.add(2 * dst_row), _mm256_shuffle_ps::<0x44>(b, d));
            _mm256_storeu_ps(out.add(3 * dst_row), _mm256_shuffle_ps::<0xee>(b, d));
            half += 4;
        }
    }
}
