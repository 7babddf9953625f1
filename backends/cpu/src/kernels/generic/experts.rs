//! Products with the experts that each token chose: `Y[slot] = X[slot] W_e^T (+ bias_e)`, where slot `i * k + j` is the `j`th choice `e`
//! of token `i`, and W holds the rows of one expert after another.
//!
//! In plain words: slots are sorted by expert, and each expert that somebody chose is a product of its own, of its rows of W with the
//! slots that chose it. So rows of W that nobody chose are not read, and those of a chosen expert once a pass. What makes it fast:
//! - **One meeting of the threads.** The tasks of all experts, and of all products of the same choices, are one run of the pool.
//! - **The same kernels as `matmul`.** An expert with few slots is multiplied as few tokens are (`int_dot`, `dot`), one with many
//!   as a matrix (`int_gemm`, `gemm`); tiles may be cut anywhere, within an expert too.
//! - **Few tokens quantise their rows once**, however many experts read them; with many tokens each slot has its own form, which
//!   costs little beside its product.

use tegula_quant::DType;

use super::activations::{GROUP, GROUP_FLOATS};
use super::experts_run::{Job, Lists, Way, run};
use super::matmul::{DOT_TOKENS_MAX, LINE, PASS_TOKENS, RowTile, TOKENS_ALIGN, check_tiles};
use super::product::{Input, Product};
use super::shared::SharedMut;
use super::{int_tasks, matmul_f32};
use crate::kernels::{KernelError, Kernels, expect_len, expect_scratch};
use crate::pool::Pool;

/// Most products of the same choices that are run together.
pub const EXPERT_PRODUCTS_MAX: usize = 2;

/// The choices of some tokens.
#[derive(Clone, Copy, Debug)]
pub struct Choices<'a> {
    /// Experts that there are.
    pub n_expert: usize,
    /// Experts of a token.
    pub k: usize,
    /// `[n_tokens, k]`.
    pub ids: &'a [i32],
    /// Elements of a row of W.
    pub n_in: usize,
    /// `[n_tokens, n_in]`, one row for all of a token's experts, or `[n_tokens, k, n_in]`, one for each.
    pub x: &'a [f32],
}

/// W of one product, with its results.
#[derive(Debug)]
pub struct ExpertWeights<'a> {
    /// The type of W.
    pub dtype: DType,
    /// Rows of one expert.
    pub n_rows: usize,
    /// The rows of W, in order and without gaps: `n_expert * n_rows`.
    pub tiles: &'a [RowTile],
    /// Rows of `[n_expert, n_rows]` f32, in order and without gaps.
    pub bias: Option<&'a [RowTile]>,
    /// `[n_tokens, k, n_rows]`, written entirely.
    pub y: &'a mut [f32],
}

/// Slots of a pass, padded.
fn pass_tokens(n_slots: usize) -> usize {
    n_slots.clamp(1, PASS_TOKENS).next_multiple_of(TOKENS_ALIGN)
}

impl Choices<'_> {
    /// f32 of scratch that products of this shape need, for any instruction set and up to `n_threads`.
    pub fn scratch_len(
        n_threads: usize,
        n_expert: usize,
        k: usize,
        n_in: usize,
        n_tokens: usize,
    ) -> usize {
        let n_slots = n_tokens.saturating_mul(k);
        let lists = Lists::len(n_expert, n_slots).next_multiple_of(LINE);
        let groups = n_in.div_ceil(GROUP);
        let most = match n_tokens <= DOT_TOKENS_MAX {
            true => n_slots.saturating_mul(groups * GROUP_FLOATS),
            false => {
                let tokens = pass_tokens(n_slots);
                let packed = tokens.saturating_mul(n_in.max(groups * GROUP_FLOATS));
                let thread =
                    matmul_f32::thread_scratch(tokens).max(int_tasks::thread_scratch(tokens));
                packed.saturating_add(n_threads * thread)
            }
        };
        (2 * LINE).saturating_add(lists).saturating_add(most)
    }

    /// Slots that read one row of X.
    fn sharing(&self) -> usize {
        if self.x.len() == self.ids.len() * self.n_in { 1 } else { self.k }
    }

    fn check(&self) -> Result<(), KernelError> {
        const KERNEL: &str = "matmul_experts";
        let shape = |what, got, allowed| KernelError::Shape { kernel: KERNEL, what, got, allowed };
        if self.k == 0 || !self.ids.len().is_multiple_of(self.k) {
            return Err(shape("k", self.k, "it must divide the number of ids"));
        }
        if u32::try_from(self.ids.len()).is_err() {
            return Err(shape("the number of ids", self.ids.len(), "slots are 32 bits wide"));
        }
        let sharing = self.sharing();
        expect_len(KERNEL, "x", &[self.ids.len() / sharing, self.n_in], self.x.len())?;
        let known = |id: &i32| usize::try_from(*id).is_ok_and(|id| id < self.n_expert);
        match self.ids.iter().find(|id| !known(id)) {
            Some(id) => {
                let got = usize::try_from(*id).unwrap_or(usize::MAX);
                Err(shape("an expert", got, "ids are below the number of experts"))
            }
            None => Ok(()),
        }
    }
}

impl ExpertWeights<'_> {
    fn stack(&mut self, n_in: usize) -> Stack<'_> {
        let all = Product {
            dtype: self.dtype,
            tiles: self.tiles,
            row_bytes: n_in / self.dtype.block_len() * self.dtype.block_bytes(),
            n_in,
            first_row: 0,
            n_out: self.n_rows,
            bias: None,
            y: SharedMut::new(&mut *self.y),
        };
        Stack { all, bias: self.bias }
    }

    fn check(&self, choices: &Choices<'_>) -> Result<(), KernelError> {
        const KERNEL: &str = "matmul_experts";
        if !choices.n_in.is_multiple_of(self.dtype.block_len()) {
            return Err(KernelError::Shape {
                kernel: KERNEL,
                what: "n_in",
                got: choices.n_in,
                allowed: "it must be a multiple of the weight type's block length",
            });
        }
        expect_len(KERNEL, "y", &[choices.ids.len(), self.n_rows], self.y.len())?;
        let rows = choices.n_expert.saturating_mul(self.n_rows);
        check_tiles(self.tiles, rows)?;
        let Some(bias) = self.bias else { return Ok(()) };
        check_tiles(bias, choices.n_expert)?;
        match bias.iter().find(|tile| !tile.data.addr().is_multiple_of(align_of::<f32>())) {
            Some(tile) => Err(KernelError::Shape {
                kernel: KERNEL,
                what: "the address of a bias",
                got: tile.data.addr(),
                allowed: "it must be a multiple of 4",
            }),
            None => Ok(()),
        }
    }
}

/// One of the products that are run together: W, and the biases of its experts.
#[derive(Clone, Copy)]
pub(super) struct Stack<'a> {
    all: Product<'a>,
    bias: Option<&'a [RowTile]>,
}

impl<'a> Stack<'a> {
    /// The product with an expert's rows.
    pub(super) fn expert(&self, expert: usize) -> Product<'a> {
        let n = self.all.n_out;
        let bias = self.bias.and_then(|tiles| {
            let tile = &tiles[tiles.partition_point(|t| t.first_row + t.n_rows <= expert)];
            let data = tile.data.wrapping_add((expert - tile.first_row) * n * size_of::<f32>());
            // SAFETY: tiles hold all experts' biases (checked, and the promise of the caller of the kernel), aligned (checked).
            (n > 0).then(|| unsafe { std::slice::from_raw_parts(data.cast::<f32>(), n) })
        });
        Product { first_row: expert * n, bias, ..self.all }
    }

    /// Rows of an expert.
    pub(super) fn n_out(&self) -> usize {
        self.all.n_out
    }
}

impl Kernels {
    /// The products of the same choices with up to [`EXPERT_PRODUCTS_MAX`] stacks of experts, on the threads of `pool`.
    ///
    /// `scratch` holds at least [`Choices::scratch_len`] for the pool's threads; its contents do not matter.
    ///
    /// # Errors
    /// [`KernelError`] when lengths, tiles, ids or `n_in` do not fit each other (nothing is written then), or when a task panicked.
    ///
    /// # Safety
    /// Every tile of W is readable for `n_rows` rows of `n_in` elements of its type, every tile of a bias for `n_rows` rows of as many f32 as an
    /// expert has rows; none is written meanwhile.
    pub unsafe fn matmul_experts(
        self,
        pool: &Pool,
        choices: &Choices<'_>,
        weights: &mut [ExpertWeights<'_>],
        scratch: &mut [f32],
    ) -> Result<(), KernelError> {
        choices.check()?;
        for weights in &*weights {
            weights.check(choices)?;
        }
        let Choices { n_expert, k, ids, n_in, x } = *choices;
        let n_tokens = ids.len() / k;
        let needed = Choices::scratch_len(pool.n_threads(), n_expert, k, n_in, n_tokens);
        expect_scratch("matmul_experts", needed, scratch.len())?;
        if ids.is_empty() {
            return Ok(());
        }
        let skip = scratch.as_ptr().align_offset(4 * LINE).min(LINE);
        let lists_len = Lists::len(n_expert, ids.len()).next_multiple_of(LINE);
        let (lists, work) = scratch[skip..].split_at_mut(lists_len);
        let few = n_tokens <= DOT_TOKENS_MAX;
        let tokens_padded = pass_tokens(ids.len());
        let entry_max = if few { DOT_TOKENS_MAX } else { tokens_padded };
        let mut lists = Lists::fill(lists, ids, n_expert, entry_max);
        let (input, sharing) = (Input { x, n_in }, choices.sharing());
        for weights in weights.chunks_mut(EXPERT_PRODUCTS_MAX) {
            let mut as_ints = true;
            for way in [Way::Ints, Way::Floats] {
                let mut all = weights.iter_mut();
                let stacks = std::array::from_fn(|_| {
                    let w = all.next()?;
                    let is_mine = (as_ints && int_tasks::has(w.dtype)) == (way == Way::Ints);
                    (is_mine && w.n_rows > 0).then(|| w.stack(n_in))
                });
                let (kernels, stacks) = (self, &stacks);
                let job = Job { kernels, pool, way, stacks, input, sharing, few, tokens_padded };
                // An activation that is not finite has no integer form: all is computed in f32 then.
                as_ints &= run(&job, &mut lists, work)?;
            }
        }
        Ok(())
    }
}
