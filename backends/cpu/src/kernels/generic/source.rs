//! [`Source`]: how rows of a weight or cache type are read, vectorised ([`Fused`]) or through the type's scalar decoder
//! ([`Decoded`]).

use std::marker::PhantomData;

use tegula_quant::{DType, dequantize_row_fn};

use super::Simd;
use super::dot::dot_rows;
use super::weight::{self, Weight, decode_row};

/// How rows of one weight type are read.
pub(crate) trait Source: Copy + Send + Sync {
    /// Decodes `len` elements from element `k` of a row; `k` is a multiple of 32 and of the block length.
    /// # Safety
    /// The row is readable up to element `k + len`, `out` is writable for `len` f32, and `len` is a multiple of the block
    /// length.
    unsafe fn decode<S: Simd>(self, s: S, row: *const u8, k: usize, len: usize, out: *mut f32);
    /// Dot products of rows of `n` elements; what lies `ahead` bytes after each is wanted next.
    /// # Safety
    /// Each of `rows` is readable for `n` elements and each of `x` for `n` f32.
    unsafe fn dot<S: Simd, const R: usize, const T: usize>(
        self,
        s: S,
        rows: [*const u8; R],
        x: [*const f32; T],
        n: usize,
        ahead: usize,
    ) -> [[f32; T]; R];
}

/// A type with vectorised decoding.
pub(crate) struct Fused<W>(PhantomData<fn() -> W>);

impl<W> Fused<W> {
    pub(crate) const NEW: Self = Fused(PhantomData);
}

impl<W> Clone for Fused<W> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<W> Copy for Fused<W> {}

impl<W: Weight> Source for Fused<W> {
    #[inline(always)]
    unsafe fn decode<S: Simd>(self, s: S, row: *const u8, k: usize, len: usize, out: *mut f32) {
        // SAFETY: the caller's promise; whole blocks precede `k`.
        unsafe { decode_row::<S, W>(s, row.add(k / W::BLOCK_LEN * W::BLOCK_BYTES), len, out) }
    }
    #[inline(always)]
    unsafe fn dot<S: Simd, const R: usize, const T: usize>(
        self,
        s: S,
        rows: [*const u8; R],
        x: [*const f32; T],
        n: usize,
        ahead: usize,
    ) -> [[f32; T]; R] {
        // SAFETY: the caller's promise.
        unsafe { dot_rows::<S, W, R, T>(s, rows, x, n, ahead) }
    }
}

/// Any other type: decoded piece by piece into the first-level cache by the type's scalar decoder.
#[derive(Clone, Copy)]
pub(crate) struct Decoded {
    pub(crate) dtype: DType,
}

/// Elements of a piece; a multiple of every block length.
const PIECE: usize = 1024;

impl Source for Decoded {
    #[inline(always)]
    unsafe fn decode<S: Simd>(self, _s: S, row: *const u8, k: usize, len: usize, out: *mut f32) {
        let (block_len, block_bytes) = (self.dtype.block_len(), self.dtype.block_bytes());
        // SAFETY: the row is readable up to `k + len`, whole blocks both; `out` is writable for `len`.
        let (bytes, out) = unsafe {
            (
                std::slice::from_raw_parts(
                    row.add(k / block_len * block_bytes),
                    len / block_len * block_bytes,
                ),
                std::slice::from_raw_parts_mut(out, len),
            )
        };
        dequantize_row_fn(self.dtype)(bytes, out);
    }
    #[inline(always)]
    unsafe fn dot<S: Simd, const R: usize, const T: usize>(
        self,
        s: S,
        rows: [*const u8; R],
        x: [*const f32; T],
        n: usize,
        _ahead: usize,
    ) -> [[f32; T]; R] {
        let mut piece = [0.0f32; PIECE];
        let mut out = [[0.0; T]; R];
        for (row, sums) in rows.iter().zip(&mut out) {
            for k in (0..n).step_by(PIECE) {
                let len = PIECE.min(n - k);
                // SAFETY: `k + len <= n`; the piece holds `len`.
                unsafe {
                    self.decode(s, *row, k, len, piece.as_mut_ptr());
                    let mut at = x;
                    for t in &mut at {
                        *t = t.add(k);
                    }
                    let part =
                        dot_rows::<S, weight::F32, 1, T>(s, [piece.as_ptr().cast()], at, len, 0);
                    for (sum, part) in sums.iter_mut().zip(part[0]) {
                        *sum += part;
                    }
                }
            }
        }
        out
    }
}
