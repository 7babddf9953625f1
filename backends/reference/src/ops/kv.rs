//! The paged KV cache: where a head of a position lies, and how it is stored.

use crate::buffer::Bytes;
use crate::values::{Values, zeros};
use tegula_sdk::host_memory::HostBuffer;
use tegula_sdk::program::KvLayer;
use tegula_sdk::quant::{DType, dequantize, quantize};
use tegula_sdk::{Error, KvGroup, Result, Seq};

/// The layer that an op names.
pub(crate) fn layer(values: &Values<'_>, kv_layer: u32) -> Result<KvLayer> {
    let layer = values.program().kv_layers.get(kv_layer as usize).copied();
    layer.ok_or_else(|| Error::invalid(format!("no KV layer {kv_layer}")))
}

/// The keys or the values of one layer.
pub(crate) struct KvSide<'a> {
    group: KvGroup<'a, HostBuffer>,
    group_index: u32,
    layer: u32,
    side: usize,
    dtype: DType,
    n_head_kv: u32,
    pub(crate) head_dim: u32,
    row_bytes: u64,
    block_bytes: u64,
}

impl<'a> KvSide<'a> {
    pub(crate) fn keys(values: &Values<'a>, layer: &KvLayer) -> Result<Self> {
        Self::new(values, layer, 0, (layer.dtype_k, layer.head_dim_k))
    }

    pub(crate) fn values(values: &Values<'a>, layer: &KvLayer) -> Result<Self> {
        Self::new(values, layer, 1, (layer.dtype_v, layer.head_dim_v))
    }

    fn new(
        values: &Values<'a>,
        layer: &KvLayer,
        side: usize,
        (dtype, head_dim): (DType, u32),
    ) -> Result<Self> {
        let group = values.kv_group(layer.group)?;
        if layer.index >= group.n_layers {
            let (index, n) = (layer.index, group.n_layers);
            return Err(Error::invalid(format!("layer {index} of a KV group of {n}")));
        }
        let bytes = layer.block_bytes(group.block_len);
        let (k, v) = bytes.ok_or_else(|| Error::invalid("a KvBlock of more than 2^64 bytes"))?;
        Ok(Self {
            group,
            group_index: layer.group,
            layer: layer.index,
            side,
            dtype,
            n_head_kv: layer.n_head_kv,
            head_dim,
            row_bytes: dtype.row_bytes(head_dim.into())?,
            block_bytes: if side == 0 { k } else { v },
        })
    }

    /// The bytes of one head at one position: row `[head][position % block_len]` of its KvBlock.
    fn row(&self, seq: &Seq<'_>, pos: u64, head: u32) -> Result<Bytes<'a>> {
        let (blocks, first_pos) = seq.blocks(self.group_index)?;
        let block_len = u64::from(self.group.block_len);
        let place = pos.checked_sub(first_pos.into());
        let block = place.and_then(|p| blocks.get(usize::try_from(p / block_len).ok()?));
        let (Some(place), Some(block)) = (place, block) else {
            let end = u64::from(first_pos) + blocks.len() as u64 * block_len;
            return Err(Error::invalid(format!(
                "position {pos} is in no KvBlock: the table covers {first_pos}..{end}"
            )));
        };
        let row = u64::from(head) * block_len + place % block_len;
        self.block(*block)?.part(row * self.row_bytes, self.row_bytes)
    }

    /// The bytes of a KvBlock, in the tile of the segment that holds it.
    fn block(&self, block: u32) -> Result<Bytes<'a>> {
        let segments = self.group.segments;
        let after = segments.partition_point(|segment| segment.first_block <= block);
        let found = after.checked_sub(1).and_then(|i| Some((i, segments.get(i)?)));
        let found = found.filter(|(_, segment)| block - segment.first_block < segment.n_blocks);
        let Some((index, segment)) = found else {
            let n = segments.len();
            return Err(Error::invalid(format!("KvBlock {block} is in none of {n} segments")));
        };
        let offset = u64::from(block - segment.first_block).checked_mul(self.block_bytes);
        let offset = offset.ok_or_else(|| Error::invalid("a segment of more than 2^64 bytes"))?;
        let tile = self.group.tile(index, self.layer, self.side)?;
        Bytes::of(&tile)?.part(offset, self.block_bytes)
    }

    /// One head at positions `begin..end`, decoded: `[end - begin, head_dim]`.
    pub(crate) fn load(&self, seq: &Seq<'_>, head: u32, begin: u64, end: u64) -> Result<Vec<f32>> {
        let mut out: Vec<f32> = zeros((end - begin).saturating_mul(self.head_dim.into()))?;
        let mut raw: Vec<u8> = zeros(self.row_bytes)?;
        for (pos, out) in (begin..end).zip(out.chunks_exact_mut(self.head_dim as usize)) {
            self.row(seq, pos, head)?.read(&mut raw)?;
            dequantize(self.dtype, &raw, out)?;
        }
        Ok(out)
    }

    /// All heads at one position, encoded head by head.
    fn store(&self, seq: &Seq<'_>, pos: u64, heads: &[f32]) -> Result<()> {
        let mut raw: Vec<u8> = zeros(self.row_bytes)?;
        for (head, row) in (0..self.n_head_kv).zip(heads.chunks_exact(self.head_dim as usize)) {
            quantize(self.dtype, row, &mut raw)?;
            self.row(seq, pos, head)?.write(&raw)?;
        }
        Ok(())
    }
}

/// Stores the run's keys and values `[n_tokens, n_head_kv * head_dim]` at their positions.
pub(crate) fn store(values: &Values<'_>, kv_layer: u32, k: &[f32], v: &[f32]) -> Result<()> {
    let layer = layer(values, kv_layer)?;
    let keys = KvSide::keys(values, &layer)?;
    let vals = KvSide::values(values, &layer)?;
    let row = |side: &KvSide<'_>| (layer.n_head_kv as usize).saturating_mul(side.head_dim as usize);
    let mut rows = k.chunks_exact(row(&keys)).zip(v.chunks_exact(row(&vals)));
    for seq in values.seqs()? {
        for (t, (k, v)) in (0..seq.n_tokens).zip(&mut rows) {
            let pos = u64::from(seq.first_pos) + u64::from(t);
            keys.store(&seq, pos, k)?;
            vals.store(&seq, pos, v)?;
        }
    }
    Ok(())
}
