//! [`Simd`]: the vector operations that the algorithms need, and [`Kernel`], how an algorithm meets an instruction set.
//!
//! A value of a type that implements [`Simd`] is a token: it exists only on a machine whose instruction set the type
//! names, therefore arithmetic through it is safe, and only loads and stores through pointers are not. An algorithm is
//! a struct of its arguments with an `#[inline(always)]` [`Kernel::run`]; each binding owns one function marked
//! `#[target_feature]` that calls it, so the whole algorithm is compiled for that instruction set. Everything below
//! `run` is `#[inline(always)]` too, and closures are avoided there, since a function that is not inlined would be
//! compiled for the base instruction set.

/// An algorithm with its arguments, to be compiled once for each instruction set.
pub trait Kernel {
    /// What the algorithm returns.
    type Output;
    /// Runs on the vectors of `s`. Implementations are `#[inline(always)]`.
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// As [`Kernel`], for algorithms on pairs of 16-bit integers.
pub trait PairsKernel {
    /// Runs on the vectors of `s`. Implementations are `#[inline(always)]`.
    fn run<S: Pairs>(self, s: S);
}

/// As [`Kernel`], for algorithms that unpack small integers.
pub trait WordsKernel {
    /// Runs on the vectors of `s`. Implementations are `#[inline(always)]`.
    fn run<S: Words>(self, s: S);
}

/// Vectors of [`Simd::LANES`] f32 or i32 values. `LANES` is 8 or 16.
pub trait Simd: Copy + Send + Sync + 'static {
    /// A vector of f32.
    type F: Copy;
    /// A vector of 32-bit integers.
    type I: Copy;
    /// Lanes of a vector.
    const LANES: usize;
    /// Rows of the matrix micro-kernel whose width is two vectors: as many as the registers hold.
    const GEMM_ROWS: usize;

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::F;
    /// `a + b`.
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`.
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`.
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`.
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, with one rounding where the machine can.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a > b ? a : b`, hence `b` where either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a < b ? a : b`, hence `b` where either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a > b ? yes : no`.
    fn select_gt(self, a: Self::F, b: Self::F, yes: Self::F, no: Self::F) -> Self::F;
    /// Absolute value.
    fn abs(self, a: Self::F) -> Self::F;
    /// The magnitude of `mag` with the sign of `sign`.
    fn copysign(self, mag: Self::F, sign: Self::F) -> Self::F;
    /// Nearest integer, ties to even; `|a|` is below 2^22.
    fn round(self, a: Self::F) -> Self::F;
    /// Nearest integer, ties to even; `|a|` is below 2^22.
    fn to_int(self, a: Self::F) -> Self::I;
    /// Exact for `|a|` up to 2^24.
    fn to_float(self, a: Self::I) -> Self::F;
    /// `2^n` for `n` in -126..=127.
    fn exp2i(self, n: Self::I) -> Self::F;
    /// Sum of the lanes, pairwise.
    fn sum(self, a: Self::F) -> f32;
    /// Greatest lane; a NaN lane may be ignored.
    fn max_lane(self, a: Self::F) -> f32;

    /// All lanes `x`.
    fn isplat(self, x: i32) -> Self::I;
    /// Wrapping `a + b`.
    fn iadd(self, a: Self::I, b: Self::I) -> Self::I;
    /// Wrapping `a - b`.
    fn isub(self, a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise and.
    fn iand(self, a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise or.
    fn ior(self, a: Self::I, b: Self::I) -> Self::I;
    /// Logical shift right by `n < 32`.
    fn ishr(self, a: Self::I, n: u32) -> Self::I;
    /// Shift left by `n < 32`.
    fn ishl(self, a: Self::I, n: u32) -> Self::I;

    /// Asks for the cache line at `p`, which need not be readable.
    fn prefetch(self, p: *const u8);
    /// # Safety
    /// `p` is readable for `LANES` f32, at any alignment.
    unsafe fn load(self, p: *const f32) -> Self::F;
    /// # Safety
    /// `p` is writable for `LANES` f32, at any alignment.
    unsafe fn store(self, p: *mut f32, a: Self::F);
    /// # Safety
    /// `p` is readable for `2 * LANES` bytes: IEEE 754 binary16, little endian.
    unsafe fn load_f16(self, p: *const u8) -> Self::F;
    /// # Safety
    /// `p` is readable for `2 * LANES` bytes: bfloat16, little endian.
    unsafe fn load_bf16(self, p: *const u8) -> Self::F;
    /// Rounds to nearest, ties to even.
    /// # Safety
    /// `p` is writable for `2 * LANES` bytes.
    unsafe fn store_f16(self, p: *mut u8, a: Self::F);
    /// One binary16 in all lanes.
    /// # Safety
    /// `p` is readable for 2 bytes.
    unsafe fn splat_f16(self, p: *const u8) -> Self::F;
    /// `LANES` bytes, each zero-extended.
    /// # Safety
    /// `p` is readable for `LANES` bytes.
    unsafe fn load_u8(self, p: *const u8) -> Self::I;
    /// `LANES` bytes, each sign-extended.
    /// # Safety
    /// `p` is readable for `LANES` bytes.
    unsafe fn load_i8(self, p: *const u8) -> Self::I;
    /// Transposes a square of `LANES` by `LANES`: `dst[j * dst_row + i] = src[i * src_row + j]`.
    /// # Safety
    /// `src` is readable and `dst` writable for `LANES` rows of `LANES` f32 at these strides (in f32).
    unsafe fn transpose(self, src: *const f32, src_row: usize, dst: *mut f32, dst_row: usize);
}

/// Products of 16-bit integers: each of the [`Simd::LANES`] lanes of an integer vector is read as a pair of them.
pub trait Pairs: Simd {
    /// `acc + a.low * b.low + a.high * b.high` in each lane, wrapping.
    fn dot_pairs(self, acc: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// # Safety
    /// `p` is readable for `LANES` i32, at any alignment.
    unsafe fn load_pairs(self, p: *const i16) -> Self::I;
    /// One pair in all lanes.
    /// # Safety
    /// `p` is readable for 4 bytes, at any alignment.
    unsafe fn splat_pair(self, p: *const i16) -> Self::I;
}

/// Unpacking of small integers to sixteen 16-bit ones, which are a vector of eight pairs: `LANES` is 8.
pub trait Words: Pairs {
    /// Sixteen bytes, each zero-extended.
    /// # Safety
    /// `p` is readable for 16 bytes.
    unsafe fn widen_u8(self, p: *const u8) -> Self::I;
    /// Sixteen bytes, each sign-extended.
    /// # Safety
    /// `p` is readable for 16 bytes.
    unsafe fn widen_i8(self, p: *const u8) -> Self::I;
    /// For each of 16 bytes the entry of `table` that its low or high half names, as a word.
    /// # Safety
    /// `p` is readable for 16 bytes.
    unsafe fn look_up(self, p: *const u8, high: bool, table: &[i8; 16]) -> Self::I;
    /// # Safety
    /// `p` is writable for 32 bytes, at any alignment.
    unsafe fn store_words(self, p: *mut i16, a: Self::I);
    /// All words `x`.
    fn wsplat(self, x: i16) -> Self::I;
    /// Wrapping `a - b`.
    fn wsub(self, a: Self::I, b: Self::I) -> Self::I;
    /// Logical shift right by `N < 16`.
    fn wshr<const N: i32>(self, a: Self::I) -> Self::I;
    /// Shift left by `N < 16`.
    fn wshl<const N: i32>(self, a: Self::I) -> Self::I;
    /// 16 in word `i` where bit `i` of `bits` is set, otherwise 0.
    fn sixteens(self, bits: u16) -> Self::I;
    /// The f16 at eight places `stride` bytes apart.
    /// # Safety
    /// Two bytes are readable at each place.
    unsafe fn gather_f16(self, p: *const u8, stride: usize) -> Self::F;
    /// Eight f16, the first in the low bits of `low`.
    fn halves(self, low: u64, high: u64) -> Self::F;
    /// The eight bytes of `x`, each zero-extended, the lowest first.
    fn bytes(self, x: u64) -> Self::I;
    /// Two vectors of 32-bit integers in -32768..=32767 as one of words, in order.
    fn narrow(self, a: Self::I, b: Self::I) -> Self::I;
}
