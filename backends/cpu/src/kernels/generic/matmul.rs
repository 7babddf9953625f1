//! `Y[n_tokens, n_out] = X[n_tokens, n_in] W^T (+ bias)` with W in any type, in row tiles.
//!
//! Two kinds, by the weight type: the block types that models are made of are multiplied as integers (`matmul_int`), the
//! plain types and the rare ones as f32 (`matmul_f32`), and so is everything if an activation is not finite, since integers
//! have no infinities. Either has one way for few tokens (decode), bound by reading W, and one for many (prefill), bound by
//! arithmetic. Products of the same activations can be run together: their activations are then quantised once, and the
//! threads meet once.
//!
//! Tasks are many more than threads and are taken as threads come free. Where a row lies in which tile matters only for
//! finding its address, therefore tiles change no result at all.

use std::ops::Range;

use tegula_quant::DType;

use super::activations::{GROUP, GROUP_FLOATS};
use super::product::Product;
use super::shared::SharedMut;
use super::{int_tasks, matmul_f32, matmul_int};
use crate::kernels::{KernelError, Kernels, expect_len, expect_scratch};
use crate::pool::Pool;

/// Most tokens for which weights are decoded on the fly.
pub(super) const DOT_TOKENS_MAX: usize = 4;
/// Most rows of a panel of decoded weights; a multiple of every micro-kernel's rows.
pub(super) const PANEL_ROWS: usize = 96;
/// Rows of the micro-kernel that is one vector wide.
pub(super) const NARROW_ROWS: usize = 12;
/// Most tokens packed at a time; more tokens go in several passes, each decoding W again, and so do as many as there is scratch for.
pub(super) const PASS_TOKENS: usize = 512;
/// Packed tokens are padded to this: the widest panel of any instruction set.
pub(super) const TOKENS_ALIGN: usize = 32;
/// Multiply-adds per token that make a decode task worth its taking, about ten microseconds.
pub(super) const TASK_WORK_MIN: usize = 64 * 1024;
/// f32 in a cache line.
pub(super) const LINE: usize = 16;

/// A run of consecutive rows of W in one chunk.
#[derive(Clone, Copy, Debug)]
pub struct RowTile {
    /// The first row; rows follow each other without padding. Any alignment.
    pub data: *const u8,
    /// The output row that it is.
    pub first_row: usize,
    /// Rows in the tile.
    pub n_rows: usize,
}

// SAFETY: the pointer is only read, while the caller of `matmul` keeps the memory as it is.
unsafe impl Send for RowTile {}
// SAFETY: as above.
unsafe impl Sync for RowTile {}

/// The arguments of a product.
#[derive(Debug)]
pub struct MatMul<'a> {
    /// The type of W.
    pub dtype: DType,
    /// Elements of a row of W; a multiple of the type's block length.
    pub n_in: usize,
    /// Rows of W.
    pub n_out: usize,
    /// The rows of W, in order and without gaps.
    pub tiles: &'a [RowTile],
    /// Rows of X and Y.
    pub n_tokens: usize,
    /// `[n_tokens, n_in]`.
    pub x: &'a [f32],
    /// `[n_out]`, added to every token.
    pub bias: Option<&'a [f32]>,
    /// `[n_tokens, n_out]`, written entirely.
    pub y: &'a mut [f32],
}

impl MatMul<'_> {
    /// f32 of scratch with which a product of this shape goes in the fewest passes, for any instruction set and up to
    /// `n_threads`.
    pub fn scratch_len(n_threads: usize, n_in: usize, n_tokens: usize) -> usize {
        Self::scratch_of(n_threads, n_in, n_tokens, PASS_TOKENS)
    }

    /// The least scratch that it can do with, in f32: that of short passes.
    pub fn scratch_min(n_threads: usize, n_in: usize, n_tokens: usize) -> usize {
        Self::scratch_of(n_threads, n_in, n_tokens, TOKENS_ALIGN)
    }

    fn scratch_of(n_threads: usize, n_in: usize, n_tokens: usize, pass: usize) -> usize {
        // A remainder of a few tokens after whole passes takes the way of few tokens.
        let few = n_in.div_ceil(GROUP) * DOT_TOKENS_MAX * GROUP_FLOATS;
        if n_tokens <= DOT_TOKENS_MAX {
            return LINE + few;
        }
        let tokens = n_tokens.min(pass).next_multiple_of(TOKENS_ALIGN);
        let ints = matmul_int::pass_scratch(n_threads, n_in, tokens);
        LINE + few.max(ints).max(matmul_f32::pass_scratch(n_threads, n_in, tokens))
    }

    /// As its tasks see it.
    pub(super) fn product(&mut self) -> Product<'_> {
        Product {
            dtype: self.dtype,
            tiles: self.tiles,
            row_bytes: self.n_in / self.dtype.block_len() * self.dtype.block_bytes(),
            n_in: self.n_in,
            first_row: 0,
            n_out: self.n_out,
            bias: self.bias,
            y: SharedMut::new(&mut *self.y),
        }
    }

    fn check(&self) -> Result<(), KernelError> {
        let block_len = self.dtype.block_len();
        if !self.n_in.is_multiple_of(block_len) {
            return Err(KernelError::Shape {
                kernel: "matmul",
                what: "n_in",
                got: self.n_in,
                allowed: "it must be a multiple of the weight type's block length",
            });
        }
        expect_len("matmul", "x", &[self.n_tokens, self.n_in], self.x.len())?;
        expect_len("matmul", "y", &[self.n_tokens, self.n_out], self.y.len())?;
        if let Some(bias) = self.bias {
            expect_len("matmul", "bias", &[self.n_out], bias.len())?;
        }
        check_tiles(self.tiles, self.n_out)
    }
}

/// Fails unless the tiles make `n_rows` rows.
pub(super) fn check_tiles(tiles: &[RowTile], n_rows: usize) -> Result<(), KernelError> {
    let mut next = 0;
    for (index, tile) in tiles.iter().enumerate() {
        if tile.first_row != next {
            return Err(KernelError::Tiles { index, expected: next, got: tile.first_row });
        }
        next = next.saturating_add(tile.n_rows);
    }
    if next != n_rows {
        return Err(KernelError::Tiles { index: tiles.len(), expected: next, got: n_rows });
    }
    Ok(())
}

/// Tokens of each pass over `n_tokens`: as many as `room` f32 hold, if `needed` are needed for some.
pub(super) fn pass_tokens(n_tokens: usize, room: usize, needed: impl Fn(usize) -> usize) -> usize {
    let mut tokens = n_tokens.clamp(1, PASS_TOKENS).next_multiple_of(TOKENS_ALIGN);
    while tokens > TOKENS_ALIGN && needed(tokens) > room {
        tokens -= TOKENS_ALIGN;
    }
    tokens
}

/// The pieces of `rows` that lie in one tile each: the address of the first row, its number, and the count.
pub(super) fn pieces(
    tiles: &[RowTile],
    row_bytes: usize,
    rows: Range<usize>,
) -> impl Iterator<Item = (*const u8, usize, usize)> {
    let first = tiles.partition_point(|t| t.first_row + t.n_rows <= rows.start);
    tiles[first..].iter().take_while(move |t| t.first_row < rows.end).map(move |t| {
        let from = rows.start.max(t.first_row);
        let to = rows.end.min(t.first_row + t.n_rows);
        (t.data.wrapping_add((from - t.first_row) * row_bytes), from, to - from)
    })
}

impl Kernels {
    /// `Y = X W^T + bias` on the threads of `pool`.
    ///
    /// `scratch` holds at least [`MatMul::scratch_min`] for the pool's threads, and with [`MatMul::scratch_len`] W is read least
    /// often; its contents do not matter.
    ///
    /// # Errors
    /// [`KernelError`] when lengths, tiles or `n_in` do not fit each other (nothing is written then), or when a task
    /// panicked.
    ///
    /// # Safety
    /// Every tile is readable for `n_rows` rows of `n_in` elements of `dtype`, and is not written meanwhile.
    pub unsafe fn matmul(
        self,
        pool: &Pool,
        mut args: MatMul<'_>,
        scratch: &mut [f32],
    ) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.matmuls(pool, std::slice::from_mut(&mut args), scratch) }
    }

    /// Several products of the same activations: `x`, `n_in` and `n_tokens` are those of the first.
    ///
    /// # Errors
    /// As [`Kernels::matmul`], and [`KernelError::Shape`] when activations differ.
    ///
    /// # Safety
    /// As [`Kernels::matmul`], for each.
    pub unsafe fn matmuls(
        self,
        pool: &Pool,
        products: &mut [MatMul<'_>],
        scratch: &mut [f32],
    ) -> Result<(), KernelError> {
        let Some(first) = products.first() else { return Ok(()) };
        let (x, n_in, n_tokens) = (first.x, first.n_in, first.n_tokens);
        for args in &*products {
            args.check()?;
            if !std::ptr::eq(args.x, x) || args.n_in != n_in || args.n_tokens != n_tokens {
                return Err(KernelError::Shape {
                    kernel: "matmul",
                    what: "n_in",
                    got: args.n_in,
                    allowed: "products that are run together have the same activations",
                });
            }
        }
        let needed = MatMul::scratch_min(pool.n_threads(), n_in, n_tokens);
        expect_scratch("matmul", needed, scratch.len())?;
        if n_tokens == 0 {
            return Ok(());
        }
        for products in products.chunks_mut(matmul_int::PRODUCTS_MAX) {
            let as_ints = matmul_int::run(self, pool, products, scratch)?;
            for args in products.iter_mut().filter(|a| a.n_out > 0) {
                if !(as_ints && int_tasks::has(args.dtype)) {
                    matmul_f32::run(self, pool, args, scratch)?;
                }
            }
        }
        Ok(())
    }
}
