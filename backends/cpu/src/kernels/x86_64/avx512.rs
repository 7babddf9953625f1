//! AVX-512F: vectors of 16 lanes, 32 registers, so the matrix micro-kernel has twice the rows too.

use std::arch::x86_64::*;

use super::avx2::transpose_8x8;
use crate::kernels::generic::{Kernel, Pairs, PairsKernel, Simd};

/// Proof that AVX-512F is present, with AVX2, FMA and F16C, and AVX512-VNNI where `VNNI`.
#[derive(Clone, Copy, Debug)]
pub struct Avx512<const VNNI: bool>(());

/// Whether this machine has what the binding needs.
pub fn detected() -> bool {
    is_x86_feature_detected!("avx512f") && super::avx2::detected()
}

/// Runs `kernel`, compiled for this instruction set.
///
/// # Safety
/// [`detected`] has returned true.
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
pub unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512::<false>(()))
}

/// Whether AVX512-VNNI is there too, with the 256-bit forms that unpacking uses.
pub fn detected_vnni() -> bool {
    detected() && is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512vl")
}

/// Runs `kernel` with AVX512-VNNI.
///
/// # Safety
/// [`detected_vnni`] has returned true.
#[target_feature(enable = "avx512f,avx2,fma,f16c,avx512vnni")]
pub(crate) unsafe fn run_pairs_vnni<K: PairsKernel>(kernel: K) {
    kernel.run(Avx512::<true>(()));
}

/// One method per line: its name, arguments and the expression of intrinsics that it is.
macro_rules! methods {
    ($( fn $name:ident($($arg:ident: $ty:ty),*) -> $out:ty = $body:expr; )*) => { $(
        #[inline(always)]
        fn $name(self, $($arg: $ty),*) -> $out {
            // SAFETY: a value of `Avx512` exists only where AVX-512F has been detected.
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

impl Pairs for Avx512<true> {
    methods! {
        fn dot_pairs(acc: __m512i, a: __m512i, b: __m512i) -> __m512i = _mm512_dpwssd_epi32(acc, a, b);
    }
    memory! {
        fn load_pairs(p: *const i16) -> __m512i = _mm512_loadu_si512(p.cast());
        fn splat_pair(p: *const i16) -> __m512i = _mm512_set1_epi32(p.cast::<i32>().read_unaligned());
    }
}

impl<const VNNI: bool> Simd for Avx512<VNNI> {
    type F = __m512;
    type I = __m512i;
    const LANES: usize = 16;
    const GEMM_ROWS: usize = 12;

    methods! {
        fn splat(x: f32) -> __m512 = _mm512_set1_ps(x);
        fn add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        fn sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        fn mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        fn div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        fn max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
        fn min(a: __m512, b: __m512) -> __m512 = _mm512_min_ps(a, b);
        fn select_gt(a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 =
            _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b), no, yes);
        fn abs(a: __m512) -> __m512 = _mm512_abs_ps(a);
        fn copysign(mag: __m512, sign: __m512) -> __m512 = {
            let bit = _mm512_set1_epi32(i32::MIN);
            let sign = _mm512_and_si512(bit, _mm512_castps_si512(sign));
            _mm512_castsi512_ps(_mm512_or_si512(_mm512_andnot_si512(bit, _mm512_castps_si512(mag)), sign))
        };
        fn round(a: __m512) -> __m512 = _mm512_roundscale_ps::<0>(a);
        fn to_int(a: __m512) -> __m512i = _mm512_cvtps_epi32(a);
        fn to_float(a: __m512i) -> __m512 = _mm512_cvtepi32_ps(a);
        fn exp2i(n: __m512i) -> __m512 =
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_add_epi32(n, _mm512_set1_epi32(127))));
        fn sum(a: __m512) -> f32 = _mm512_reduce_add_ps(a);
        fn max_lane(a: __m512) -> f32 = _mm512_reduce_max_ps(a);

        fn prefetch(p: *const u8) -> () = _mm_prefetch::<_MM_HINT_T0>(p.cast());
        fn isplat(x: i32) -> __m512i = _mm512_set1_epi32(x);
        fn iadd(a: __m512i, b: __m512i) -> __m512i = _mm512_add_epi32(a, b);
        fn isub(a: __m512i, b: __m512i) -> __m512i = _mm512_sub_epi32(a, b);
        fn iand(a: __m512i, b: __m512i) -> __m512i = _mm512_and_si512(a, b);
        fn ior(a: __m512i, b: __m512i) -> __m512i = _mm512_or_si512(a, b);
        fn ishr(a: __m512i, n: u32) -> __m512i = _mm512_srl_epi32(a, _mm_cvtsi32_si128(n as i32));
        fn ishl(a: __m512i, n: u32) -> __m512i = _mm512_sll_epi32(a, _mm_cvtsi32_si128(n as i32));
    }

    memory! {
        fn load(p: *const f32) -> __m512 = _mm512_loadu_ps(p);
        fn store(p: *mut f32, a: __m512) -> () = _mm512_storeu_ps(p, a);
        fn load_f16(p: *const u8) -> __m512 = _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()));
        fn load_bf16(p: *const u8) -> __m512 =
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()))));
        fn store_f16(p: *mut u8, a: __m512) -> () =
            _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a));
        fn splat_f16(p: *const u8) -> __m512 =
            _mm512_cvtph_ps(_mm256_set1_epi16(p.cast::<i16>().read_unaligned()));
        fn load_u8(p: *const u8) -> __m512i = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
        fn load_i8(p: *const u8) -> __m512i = _mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()));
        fn transpose(src: *const f32, src_row: usize, dst: *mut f32, dst_row: usize) -> () = {
            transpose_8x8(src, src_row, dst, dst_row);
            transpose_8x8(src.add(8), src_row, dst.add(8 * dst_row), dst_row);
            transpose_8x8(src.add(8 * src_row), src_row, dst.add(8), dst_row);
            transpose_8x8(src.add(8 * src_row + 8), src_row, dst.add(8 * dst_row + 8), dst_row);
        };
    }
}
