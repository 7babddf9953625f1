//! Attention over paged KV: arguments, the split into tasks, and the combination of partial results.
//!
//! In plain words, for query head `h` of a token at position `q`, with `kv = h / group`:
//! `out = sum over visible p of softmax(cap(scale * q_h . K[kv][p])) V[kv][p]`, where position `p` is visible if `p <= q`
//! (causal) and `p > q - window` (sliding window), and a sink adds `e^sink` to the denominator only.
//!
//! Departures, each for speed or memory (the inner part is in `attention_tile`):
//! - **Online softmax**: cells are taken some at a time with a running maximum and sum, so memory does not grow with
//!   context, and KvBlocks of any length at any address are read in one pass.
//! - **One task per (sequence, kv head, some tokens)**: all query heads of the group and up to about 48 rows share each
//!   decoded K and V.
//! - **Long contexts with few tokens** give too few tasks, so positions are split too; each piece leaves maximum, sum and
//!   unnormalised output, and a second phase combines them.

use tegula_quant::DType;

use super::attention_tile::{CELLS, Piece, Tile, finish, run_piece};
use super::shared::SharedMut;
use crate::kernels::{KernelError, Kernels, expect_len, expect_scratch};
use crate::pool::Pool;

/// Rows (tokens times heads of a group) that a tile aims at.
const TILE_ROWS: usize = 48;
/// Fewest positions worth a task of their own.
const SPLIT_CELLS_MIN: usize = 256;
/// Row and column padding: the widest micro-kernel of any instruction set.
const PAD: usize = 32;
/// f32 in a cache line.
const LINE: usize = 16;

/// The tokens of one sequence in this run, and its cache.
#[derive(Clone, Copy, Debug)]
pub struct AttnSeq<'a> {
    /// KvBlocks of K by position: position `p` is cell `p % block_len` of entry `p / block_len`. Entries of which no
    /// position is visible are not read and may be null.
    pub k_blocks: &'a [*const u8],
    /// As `k_blocks`, for V.
    pub v_blocks: &'a [*const u8],
    /// Positions stored, those of this run included.
    pub n_kv: usize,
    /// The first row of `q` that belongs to the sequence.
    pub first_row: usize,
    /// Rows that belong to it.
    pub n_rows: usize,
}

// SAFETY: the pointers are only read, while the caller of `attention` keeps the memory as it is.
unsafe impl Send for AttnSeq<'_> {}
// SAFETY: as above.
unsafe impl Sync for AttnSeq<'_> {}

/// The arguments of attention.
#[derive(Debug)]
pub struct Attention<'a> {
    /// Query heads; a multiple of `n_head_kv`.
    pub n_head: usize,
    /// Heads of K and V.
    pub n_head_kv: usize,
    /// Elements of a head of Q and K.
    pub head_dim_k: usize,
    /// Elements of a head of V and of the output.
    pub head_dim_v: usize,
    /// Type of K; its block length divides `head_dim_k`.
    pub k_dtype: DType,
    /// Type of V; its block length divides `head_dim_v`.
    pub v_dtype: DType,
    /// Tokens of a KvBlock, `[n_head_kv][block_len][head_dim]`.
    pub block_len: usize,
    /// Multiplies the scores.
    pub scale: f32,
    /// `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// Positions that a token sees, its own included.
    pub window: Option<u32>,
    /// Whether later positions are hidden.
    pub causal: bool,
    /// `[n_head]` logits that take part in the denominator only.
    pub sinks: Option<&'a [f32]>,
    /// The sequences; their rows do not overlap.
    pub seqs: &'a [AttnSeq<'a>],
    /// `[n_tokens]`.
    pub positions: &'a [u32],
    /// `[n_tokens, n_head, head_dim_k]`.
    pub q: &'a [f32],
    /// `[n_tokens, n_head, head_dim_v]`. Rows of no sequence are left alone.
    pub out: &'a mut [f32],
}

/// Sizes that follow from the heads alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) group: usize,
    pub(crate) tile_tokens: usize,
    /// Stride of rows where they are the fast axis.
    pub(crate) m_pad: usize,
    /// Stride of V and output rows.
    pub(crate) v_pad: usize,
    pub(crate) dk: usize,
}

impl Sizes {
    fn new(n_head: usize, n_head_kv: usize, dk: usize, dv: usize) -> Sizes {
        let group = (n_head / n_head_kv.max(1)).max(1);
        let tile_tokens = (TILE_ROWS / group).max(1);
        let m_pad = (tile_tokens * group).next_multiple_of(PAD);
        Sizes { group, tile_tokens, m_pad, v_pad: dv.next_multiple_of(PAD), dk }
    }

    /// Scratch of one thread: queries, K, V, scores, and the state of a piece.
    pub(crate) fn thread(&self) -> usize {
        self.dk * self.m_pad
            + CELLS * (self.dk + self.v_pad + self.m_pad)
            + 3 * self.m_pad
            + self.state()
    }

    /// Maximum, sum and output of a piece.
    pub(crate) fn state(&self) -> usize {
        self.m_pad * (2 + self.v_pad)
    }
}

/// Pieces that may be waiting to be combined; `split` never makes more.
fn pieces_max(n_threads: usize) -> usize {
    5 * n_threads
}

impl Attention<'_> {
    /// f32 of scratch that any run with these heads needs, whatever its tokens and contexts, for any instruction set
    /// and up to `n_threads`: with it positions are not split, so that long contexts with few tokens may leave threads idle.
    pub fn scratch_min(
        n_threads: usize,
        n_head: usize,
        n_head_kv: usize,
        head_dim_k: usize,
        head_dim_v: usize,
    ) -> usize {
        let sizes = Sizes::new(n_head, n_head_kv, head_dim_k, head_dim_v);
        LINE + n_threads * sizes.thread()
    }

    /// f32 of scratch with which all threads have work.
    pub fn scratch_len(
        n_threads: usize,
        n_head: usize,
        n_head_kv: usize,
        head_dim_k: usize,
        head_dim_v: usize,
    ) -> usize {
        let sizes = Sizes::new(n_head, n_head_kv, head_dim_k, head_dim_v);
        let least = Self::scratch_min(n_threads, n_head, n_head_kv, head_dim_k, head_dim_v);
        least + pieces_max(n_threads) * sizes.state()
    }

    fn check(&self) -> Result<(), KernelError> {
        let shape = |what, got, allowed| {
            Err(KernelError::Shape { kernel: "attention", what, got, allowed })
        };
        if self.n_head_kv == 0 || self.n_head == 0 || !self.n_head.is_multiple_of(self.n_head_kv) {
            return shape("n_head", self.n_head, "it must be a positive multiple of n_head_kv");
        }
        for (what, dim, dtype) in [
            ("head_dim_k", self.head_dim_k, self.k_dtype),
            ("head_dim_v", self.head_dim_v, self.v_dtype),
        ] {
            if dim == 0 || !dim.is_multiple_of(dtype.block_len()) {
                return shape(
                    what,
                    dim,
                    "it must be a positive multiple of the cache type's block length",
                );
            }
        }
        if self.block_len == 0 {
            return shape("block_len", 0, "it must be positive");
        }
        let n_tokens = self.positions.len();
        expect_len("attention", "q", &[n_tokens, self.n_head, self.head_dim_k], self.q.len())?;
        expect_len("attention", "out", &[n_tokens, self.n_head, self.head_dim_v], self.out.len())?;
        if let Some(sinks) = self.sinks {
            expect_len("attention", "sinks", &[self.n_head], sinks.len())?;
        }
        for seq in self.seqs {
            if seq.first_row.checked_add(seq.n_rows).is_none_or(|end| end > n_tokens) {
                return shape(
                    "a sequence's last row",
                    seq.first_row.saturating_add(seq.n_rows),
                    "it has no row in q",
                );
            }
            let n_blocks = seq.n_kv.div_ceil(self.block_len);
            if seq.k_blocks.len() < n_blocks || seq.v_blocks.len() < n_blocks {
                return shape("n_kv", seq.n_kv, "the block tables must cover it");
            }
            if seq.n_kv >= 1 << 24 {
                return shape("n_kv", seq.n_kv, "positions are compared as f32, exact below 2^24");
            }
        }
        Ok(())
    }

    /// Tiles of one kv head over all sequences.
    fn tiles(&self, sizes: &Sizes) -> usize {
        self.seqs.iter().map(|s| s.n_rows.div_ceil(sizes.tile_tokens)).sum()
    }

    /// Tile `index` of one kv head, with the positions that any of its rows sees.
    fn tile(&self, sizes: &Sizes, kv_head: usize, mut index: usize) -> Option<Tile<'_>> {
        for seq in self.seqs {
            let n = seq.n_rows.div_ceil(sizes.tile_tokens);
            if index >= n {
                index -= n;
                continue;
            }
            let first = index * sizes.tile_tokens;
            let n_tokens = sizes.tile_tokens.min(seq.n_rows - first);
            let first_row = seq.first_row + first;
            let positions = &self.positions[first_row..first_row + n_tokens];
            let pos_min = positions.iter().copied().min().unwrap_or(0) as usize;
            let pos_max = positions.iter().copied().max().unwrap_or(0) as usize;
            let end = if self.causal { seq.n_kv.min(pos_max + 1) } else { seq.n_kv };
            let start =
                self.window.map_or(0, |w| (pos_min + 1).saturating_sub(w as usize)).min(end);
            return Some(Tile {
                seq,
                kv_head,
                first_row,
                positions,
                pos_min,
                pos_max,
                cells: start..end,
            });
        }
        None
    }
}

impl Kernels {
    /// Attention of every sequence's rows, on the threads of `pool`.
    ///
    /// `scratch` holds at least [`Attention::scratch_min`] for the pool's threads, and better [`Attention::scratch_len`]; its contents do not
    /// matter.
    ///
    /// # Errors
    /// [`KernelError`] when shapes do not fit (nothing is written then), or when a task panicked.
    ///
    /// # Safety
    /// Every KvBlock that holds a visible position is readable for `n_head_kv * block_len` rows of its type and is not
    /// written meanwhile.
    pub unsafe fn attention(
        self,
        pool: &Pool,
        args: &mut Attention<'_>,
        scratch: &mut [f32],
    ) -> Result<(), KernelError> {
        args.check()?;
        let (dk, dv) = (args.head_dim_k, args.head_dim_v);
        let threads = pool.n_threads();
        let needed = Attention::scratch_min(threads, args.n_head, args.n_head_kv, dk, dv);
        expect_scratch("attention", needed, scratch.len())?;
        let sizes = Sizes::new(args.n_head, args.n_head_kv, dk, dv);
        let skip = scratch.as_ptr().align_offset(4 * LINE).min(LINE);
        let (own, pieces) = scratch[skip..].split_at_mut(threads * sizes.thread());
        let n_pieces = pieces.len() / sizes.state().max(1);
        let (own, pieces) = (SharedMut::new(own), SharedMut::new(pieces));
        let out = SharedMut::new(std::mem::take(&mut args.out));
        let args = &*args;

        let tiles = args.tiles(&sizes);
        let units = tiles * args.n_head_kv;
        let splits = splits(args, threads, units, n_pieces);
        pool.run(units * splits, |worker, task| {
            // Late tiles see the most positions, so they go first.
            let (unit, split) = ((units * splits - 1 - task) / splits, task % splits);
            let Some(tile) = args.tile(&sizes, unit % args.n_head_kv, unit / args.n_head_kv) else {
                return;
            };
            // SAFETY: a worker number is in use once at a time, so this part of the scratch is the task's own.
            let own = unsafe { own.slice(worker * sizes.thread(), sizes.thread()) };
            let (own, state) = own.split_at_mut(sizes.thread() - sizes.state());
            let cells = part(tile.cells.clone(), splits, split);
            if splits == 1 {
                self.dispatch(run_piece(
                    self,
                    args,
                    &sizes,
                    &tile,
                    cells,
                    own,
                    Piece::new(&sizes, state),
                ));
                // SAFETY: the rows and heads of the tile are this task's own.
                self.dispatch(unsafe { finish(args, &sizes, &tile, state, 1, out) });
            } else {
                // SAFETY: every task has its own place, below `n_pieces` (see `splits`).
                let state =
                    unsafe { pieces.slice((unit * splits + split) * sizes.state(), sizes.state()) };
                self.dispatch(run_piece(
                    self,
                    args,
                    &sizes,
                    &tile,
                    cells,
                    own,
                    Piece::new(&sizes, state),
                ));
            }
        })?;
        if splits > 1 {
            pool.run(units, |_, unit| {
                let Some(tile) = args.tile(&sizes, unit % args.n_head_kv, unit / args.n_head_kv)
                else {
                    return;
                };
                // SAFETY: the pieces of a unit and its rows of the output are this task's own.
                unsafe {
                    let state = pieces.slice(unit * splits * sizes.state(), splits * sizes.state());
                    self.dispatch(finish(args, &sizes, &tile, state, splits, out));
                }
            })?;
        }
        Ok(())
    }
}

/// Into how many pieces the positions of each tile are cut: as many as keep the threads busy, none shorter than is
/// worth it, and `units * splits` at most `n_pieces`, for which there is room, unless it is one.
fn splits(args: &Attention<'_>, threads: usize, units: usize, n_pieces: usize) -> usize {
    if threads == 1 || units == 0 || units >= 2 * threads {
        return 1;
    }
    let longest = args.seqs.iter().map(|s| s.n_kv).max().unwrap_or(0);
    let visible = args.window.map_or(longest, |w| longest.min(w as usize));
    let wanted = (3 * threads).div_ceil(units).min(visible / SPLIT_CELLS_MIN);
    wanted.min(n_pieces / units).max(1)
}

/// Piece `split` of `splits` of the cells; the last ones may be empty.
fn part(cells: std::ops::Range<usize>, splits: usize, split: usize) -> std::ops::Range<usize> {
    let len = cells.len().div_ceil(splits).next_multiple_of(CELLS);
    let start = (cells.start + split * len).min(cells.end);
    start..(start + len).min(cells.end)
}
