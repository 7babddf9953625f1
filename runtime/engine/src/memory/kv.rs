//! The KV cache: paged, in segments that are allocated as sequences grow.
//!
//! A KvBlock is a run of [`KvShape::block_len`] tokens. A segment is a run of blocks; for each layer its keys are one tile and its values another, and
//! the tiles of a segment are packed into as few chunks as `max_size` allows. A segment is short enough that one layer's tile fits a chunk, so a layer
//! larger than a buffer is split by having several segments. Sequences share one pool: a sequence's context is a limit, not a reservation.

use crate::Error;
use crate::memory::tiling::{ChunkLimits, Item, Packing, pack};
use tegula_program::KvLayer;

/// Tokens of a block. Long enough that a block of one head is a worthwhile inner loop, short enough that half-filled ones waste little.
pub const BLOCK_LEN: u32 = 32;

/// Segments the whole context is divided into when the limits allow: growth comes in eighths.
const SEGMENTS: u32 = 8;

/// Fewest tokens of a segment, unless the context or the limits are smaller: fewer would mean a table of many tiny tiles.
const SEGMENT_TOKENS_MIN: u32 = 256;

/// How the cache of one program is cut up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvShape {
    /// Layers, in program order.
    pub layers: Vec<KvLayer>,
    /// Tokens of a block.
    pub block_len: u32,
    /// Blocks of a full segment.
    pub segment_blocks: u32,
    /// Blocks in all.
    pub n_blocks: u32,
    limits: ChunkLimits,
    alignment: u64,
}

/// Tokens of a block such that a block of any of `layers` fits a buffer of `max_size`, or an error if one token does not.
pub fn block_len(layers: &[KvLayer], max_size: u64) -> Result<u32, Error> {
    let token = |layer: &KvLayer| layer.block_bytes(1).map_or(u64::MAX, |(k, v)| k.max(v));
    let widest = layers.iter().map(token).max().unwrap_or(0).max(1);
    let mut block_len = BLOCK_LEN;
    while block_len > 1 && widest.saturating_mul(u64::from(block_len)) > max_size {
        block_len /= 2;
    }
    if widest.saturating_mul(u64::from(block_len)) > max_size {
        return Err(Error::RowTooBig {
            tensor: "the keys of one token in one layer".into(),
            asked: widest,
            limit: max_size,
        });
    }
    Ok(block_len)
}

/// Bytes of one token over all `layers`, keys and values.
pub fn bytes_per_token(layers: &[KvLayer]) -> u64 {
    let both = |layer: &KvLayer| layer.block_bytes(1).map_or(0, |(k, v)| k.saturating_add(v));
    layers.iter().map(both).fold(0, u64::saturating_add)
}

impl KvShape {
    /// Cuts the cache for `n_ctx` tokens of `layers`, in blocks of `block_len` as [`block_len`] gave it, under the limits of the device's buffers.
    pub fn new(
        layers: &[KvLayer],
        n_ctx: u32,
        block_len: u32,
        limits: ChunkLimits,
        alignment: u64,
    ) -> Self {
        let block_len = block_len.max(1);
        let token = |layer: &KvLayer| layer.block_bytes(1).map_or(u64::MAX, |(k, v)| k.max(v));
        let widest = layers.iter().map(token).max().unwrap_or(0).max(1);
        let n_blocks = n_ctx.max(1).div_ceil(block_len);
        let least = (SEGMENT_TOKENS_MIN / block_len).max(1);
        let wanted = n_blocks.div_ceil(SEGMENTS).max(least).min(n_blocks);
        let block = widest.saturating_mul(u64::from(block_len));
        let possible = u32::try_from(limits.max_size / block).unwrap_or(u32::MAX);
        Self {
            layers: layers.to_vec(),
            block_len,
            segment_blocks: wanted.min(possible).max(1),
            n_blocks,
            limits,
            alignment,
        }
    }

    /// Number of segments when all are there.
    pub fn n_segments(&self) -> u32 {
        self.n_blocks.div_ceil(self.segment_blocks)
    }

    /// Blocks of segment `index`; the last may be shorter.
    pub fn blocks_of(&self, index: u32) -> u32 {
        let first = index.saturating_mul(self.segment_blocks);
        self.segment_blocks.min(self.n_blocks.saturating_sub(first))
    }

    /// Bytes of one block over all layers, keys and values.
    pub fn block_bytes(&self) -> u64 {
        let both = |layer: &KvLayer| layer.block_bytes(self.block_len).map_or(0, |(k, v)| k + v);
        self.layers.iter().map(both).sum()
    }

    /// Bytes of the whole cache, without padding between tiles.
    pub fn bytes(&self) -> Result<u64, Error> {
        self.block_bytes()
            .checked_mul(u64::from(self.n_blocks))
            .ok_or_else(|| Error::Overflow { what: "the bytes of the KV cache".into() })
    }

    /// Bytes that all chunks of the whole cache take where sizes are rounded up to `granularity`.
    pub fn bytes_taken(&self, granularity: u64) -> Result<u64, Error> {
        let of_segment = |index: u32| -> Result<u64, Error> {
            let chunks = self.pack_segment(index)?.chunks;
            let taken = |size: u64| size.checked_next_multiple_of(granularity.max(1));
            Ok(chunks
                .into_iter()
                .fold(0, |sum: u64, size| sum.saturating_add(taken(size).unwrap_or(u64::MAX))))
        };
        // All segments but the last are alike.
        let Some(last) = self.n_segments().checked_sub(1) else { return Ok(0) };
        let others = if last == 0 { 0 } else { of_segment(0)?.saturating_mul(last.into()) };
        Ok(others.saturating_add(of_segment(last)?))
    }

    /// Bytes of all chunks for the blocks from `first` on, cut under another limit than the planned one.
    pub fn planned_bytes_from(&self, first: u32, max_size: u64) -> Result<u64, Error> {
        let left = u64::from(self.n_blocks.saturating_sub(first));
        let n = self.segment_blocks_under(max_size).max(1);
        let bytes_of = |n_blocks: u32| -> Result<u64, Error> {
            Ok(self.pack_blocks(first, n_blocks, max_size)?.chunks.iter().sum())
        };
        // Segments of the same length are packed alike.
        let (n_full, rest) = (left / u64::from(n), (left % u64::from(n)) as u32);
        let full = if n_full > 0 { bytes_of(n)? } else { 0 };
        let rest = if rest > 0 { bytes_of(rest)? } else { 0 };
        full.checked_mul(n_full)
            .and_then(|full| full.checked_add(rest))
            .ok_or_else(|| Error::Overflow { what: "the bytes of the KV cache".into() })
    }

    /// The tiles of segment `index` as planned: for each layer keys, then values, as one indivisible item each.
    pub fn pack_segment(&self, index: u32) -> Result<Packing, Error> {
        let first = index.saturating_mul(self.segment_blocks);
        self.pack_blocks(first, self.blocks_of(index), self.limits.max_size)
    }

    /// The tiles of a segment of `n_blocks` blocks from `first` on, in chunks of at most `max_size`.
    pub fn pack_blocks(&self, first: u32, n_blocks: u32, max_size: u64) -> Result<Packing, Error> {
        let mut items = Vec::with_capacity(self.layers.len() * 2);
        for (i, layer) in self.layers.iter().enumerate() {
            let (k, v) = layer.block_bytes(self.block_len).ok_or_else(|| Error::Overflow {
                what: format!("the bytes of a KvBlock of layer {i}"),
            })?;
            for (side, block) in [("k", k), ("v", v)] {
                items.push(Item {
                    name: format!("kv.{i}.{side}[{first}]"),
                    n_rows: 1,
                    rows_per_group: 1,
                    group_bytes: block
                        .checked_mul(u64::from(n_blocks))
                        .ok_or_else(|| Error::Overflow { what: format!("{n_blocks} KvBlocks") })?,
                    alignment: self.alignment,
                    rows_per_expert: 0,
                });
            }
        }
        // All tiles of a segment live and die together, so they share chunks up to the limit itself.
        pack(&items, ChunkLimits { max_size, preferred: max_size })
    }

    /// Blocks of a segment such that a layer's tile fits `max_size`; 0 if not even one block's does.
    pub fn segment_blocks_under(&self, max_size: u64) -> u32 {
        let side =
            |layer: &KvLayer| layer.block_bytes(self.block_len).map_or(u64::MAX, |(k, v)| k.max(v));
        let widest = self.layers.iter().map(side).max().unwrap_or(0).max(1);
        u32::try_from(max_size / widest).unwrap_or(u32::MAX).min(self.segment_blocks)
    }

    /// The limit that chunks are planned under.
    pub fn max_size(&self) -> u64 {
        self.limits.max_size
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tegula_program::DType;

    fn layers(n: u32, n_head_kv: u32, head_dim: u32, dtype: DType) -> Vec<KvLayer> {
        (0..n)
            .map(|index| KvLayer {
                group: 0,
                index,
                n_head_kv,
                head_dim_k: head_dim,
                head_dim_v: head_dim,
                dtype_k: dtype,
                dtype_v: dtype,
            })
            .collect()
    }

    /// The failure this project exists for: 7,516,192,768 bytes on a device of 4,294,959,104 per buffer.
    #[test]
    fn llama_3_2_3b_at_65536_tokens_tiles() {
        let limits = ChunkLimits { max_size: 4_294_959_104, preferred: 4_294_959_104 };
        let shape = KvShape::new(&layers(28, 8, 128, DType::F16), 65_536, BLOCK_LEN, limits, 64);
        assert_eq!(shape.bytes().unwrap(), 7_516_192_768);
        let chunks: Vec<u64> =
            (0..shape.n_segments()).flat_map(|i| shape.pack_segment(i).unwrap().chunks).collect();
        assert!(chunks.len() >= 2);
        assert!(chunks.iter().all(|size| *size <= 4_294_959_104));
        assert_eq!(chunks.iter().sum::<u64>(), 7_516_192_768);
    }

    /// Whatever the cap, the pool holds the whole context and no tile passes the cap.
    #[test]
    fn every_cap_holds_the_whole_context() {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0] {
            for max_size in [1536u64, 65_536, 1 << 20, 1 << 30] {
                for n_ctx in [1, 31, 512, 8192, 131_072] {
                    let limits = ChunkLimits { max_size, preferred: max_size };
                    let layers = layers(3, 3, 64, dtype);
                    let block_len = block_len(&layers, max_size).unwrap();
                    let shape = KvShape::new(&layers, n_ctx, block_len, limits, 64);
                    let blocks: u32 = (0..shape.n_segments()).map(|i| shape.blocks_of(i)).sum();
                    assert_eq!(blocks, shape.n_blocks);
                    assert!(blocks * shape.block_len >= n_ctx);
                    for i in [0, shape.n_segments() - 1] {
                        let packing = shape.pack_segment(i).unwrap();
                        assert!(packing.chunks.iter().all(|size| *size <= max_size));
                        assert_eq!(packing.tiles.len(), 6);
                    }
                }
            }
        }
    }
}
