//! Kinds of attention in a program: layers that agree in shapes, types and window share kernels, and the numbers of each run.

use crate::gpu::Gpu;
use tegula_sdk::program::{KvLayer, OpKind, Program};
use tegula_sdk::quant::DType;
use tegula_sdk::{Error, Result};

/// Query rows (tokens times heads) of a workgroup.
const ROWS_MAX: u32 = 16;
/// Up to so many tokens each is a tile of its own: they are of different sequences, or few.
const FEW_TOKENS: u32 = 8;
/// Shared memory that the kernel may take; every device has as much.
const SHARED_MAX: u32 = 30 << 10;
/// Invocations of the kernel.
const THREADS: u32 = 128;
/// Greatest number of pieces that keys are split into, as the combining kernel has it.
pub(crate) const SPLITS_MAX: u32 = 256;
/// Fewest keys of a piece.
const SPLIT_KEYS_MIN: u32 = 128;

/// A kind of attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Kind {
    /// Shapes, types and group; the index is not looked at.
    pub(crate) layer: KvLayer,
    pub(crate) n_head: u32,
    pub(crate) window: u32,
    /// Query heads of a workgroup.
    pub(crate) heads: u32,
    /// Tokens of a tile when there are many.
    pub(crate) tokens: u32,
    /// Keys at a time.
    pub(crate) keys: u32,
}

/// The number of a stored type in the shaders.
pub(crate) fn type_number(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
        DType::Q8_0 => 3,
        _ => 4,
    }
}

impl Kind {
    /// The kind of an op; `None` where no workgroup has room for its heads.
    pub(crate) fn new(layer: &KvLayer, n_head: u32, window: u32) -> Option<Self> {
        let layer = KvLayer { index: 0, ..*layer };
        let per_head = n_head / layer.n_head_kv.max(1);
        let (dk, dv) = (layer.head_dim_k.div_ceil(8) * 8, layer.head_dim_v.div_ceil(8) * 8);
        if dk > 1024 || dv > 8 * THREADS {
            return None;
        }
        for keys in [32, 16, 8] {
            // From the most rows that fit; heads that share keys stay together where they can.
            for rows in (1..=ROWS_MAX).rev() {
                let heads = (1..=rows.min(per_head)).rev().find(|n| per_head.is_multiple_of(*n))?;
                let tokens = rows / heads;
                let rows = heads * tokens;
                let groups = rows.div_ceil(4);
                let sums = 4 * groups * dv;
                let floats = rows * dk + (keys * (dk + 4)).max(sums) + rows * (keys + 8) + 8 * keys;
                let is_whole = heads == per_head.min(ROWS_MAX) || per_head > ROWS_MAX;
                if 4 * floats <= SHARED_MAX
                    && groups * (dv / 8) <= THREADS
                    && (is_whole || keys == 8)
                {
                    return Some(Self { layer, n_head, window, heads, tokens, keys });
                }
            }
        }
        None
    }

    /// Tokens of a tile in a run.
    pub(crate) fn tile_tokens(&self, n_tokens: u32) -> u32 {
        if n_tokens <= FEW_TOKENS { 1 } else { self.tokens }
    }

    /// Workgroups beside each other for one tile.
    pub(crate) fn columns(&self) -> u32 {
        self.n_head / self.heads
    }

    /// Bytes of one token's share of one split.
    pub(crate) fn part_bytes(&self) -> u64 {
        4 * u64::from(self.n_head) * u64::from(self.layer.head_dim_v + 2)
    }

    /// Pieces of the keys, and keys of each, for a run of `n_tiles` tiles that see up to `n_keys` keys. `parts` are the token-splits that scratch
    /// has room for.
    pub(crate) fn splits(
        &self,
        gpu: &Gpu,
        n_tiles: u32,
        n_tokens: u32,
        n_keys: u32,
        parts: u64,
    ) -> (u32, u32) {
        let whole = (1, n_keys.next_multiple_of(32).max(32));
        let groups = n_tiles.saturating_mul(self.columns()).max(1);
        let room = u32::try_from(parts / u64::from(n_tokens.max(1))).unwrap_or(u32::MAX);
        let wanted = (gpu.fill / groups).min(n_keys / SPLIT_KEYS_MIN).min(SPLITS_MAX).min(room);
        if wanted < 2 {
            return whole;
        }
        let len = n_keys.div_ceil(wanted).next_multiple_of(32);
        match n_keys.div_ceil(len) {
            0 | 1 => whole,
            n => (n, len),
        }
    }
}

/// The kinds of a program, and the kind of each attention op (by op).
pub(crate) fn kinds(program: &Program) -> Result<(Vec<Kind>, Vec<Option<usize>>)> {
    let mut kinds: Vec<Kind> = Vec::new();
    let mut of_op = vec![None; program.ops.len()];
    for (op, slot) in program.ops.iter().zip(&mut of_op) {
        let OpKind::Attention { kv_layer, n_head, window, .. } = op.kind else { continue };
        let layer = program.kv_layers.get(kv_layer as usize);
        let layer = layer.ok_or_else(|| Error::invalid("a KV layer that is not there"))?;
        let kind = Kind::new(layer, n_head, window);
        let kind = kind.ok_or_else(|| Error::unsupported("attention over heads this large"))?;
        let at = kinds.iter().position(|other| *other == kind).unwrap_or_else(|| {
            kinds.push(kind);
            kinds.len() - 1
        });
        *slot = Some(at);
    }
    Ok((kinds, of_op))
}
