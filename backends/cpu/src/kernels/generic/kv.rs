//! Writing new tokens' K or V rows into KvBlocks, with conversion to the cache's type.
//!
//! A KvBlock of one layer's K (or V) is `[n_head_kv][block_len][head_dim]`, contiguous: attention reads one head's
//! tokens at a time, so a head's rows follow each other.

use tegula_quant::{DType, quantize_row_fn};

use super::{Kernel, Simd};
use crate::kernels::{KernelError, Kernels, expect_len};

/// Where a token's row goes.
#[derive(Clone, Copy, Debug)]
pub struct KvSlot {
    /// The base of the KvBlock. Any alignment.
    pub block: *mut u8,
    /// The token's place in it, below the block's length.
    pub offset: usize,
}

/// The arguments of a store.
#[derive(Debug)]
pub struct KvStore<'a> {
    /// The cache's type.
    pub dtype: DType,
    /// Heads of a row.
    pub n_head_kv: usize,
    /// Elements of a head; a multiple of the type's block length.
    pub head_dim: usize,
    /// Tokens of a KvBlock.
    pub block_len: usize,
    /// `[n_tokens, n_head_kv, head_dim]`.
    pub rows: &'a [f32],
    /// One per token, all different.
    pub slots: &'a [KvSlot],
}

/// Binary16 by vectors; the other types go through their encoders.
struct StoreF16<'a> {
    from: &'a [f32],
    to: *mut u8,
}

impl Kernel for StoreF16<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = self.from.len();
        let whole = n / S::LANES * S::LANES;
        for i in (0..whole).step_by(S::LANES) {
            // SAFETY: `i + LANES <= n`, and the destination holds `n` halves.
            unsafe { s.store_f16(self.to.add(2 * i), s.load(self.from.as_ptr().add(i))) }
        }
        for i in whole..n {
            let bits = half::f16::from_f32(self.from[i]).to_bits().to_le_bytes();
            // SAFETY: as above.
            unsafe { self.to.add(2 * i).cast::<[u8; 2]>().write(bits) }
        }
    }
}

impl Kernels {
    /// Writes every token's row into its slot, rounding to the cache's type.
    ///
    /// # Errors
    /// [`KernelError`] when the lengths do not fit, a slot's offset is outside its block, or the type has no encoder.
    /// Nothing is written then.
    ///
    /// # Safety
    /// Every block is writable for `n_head_kv * block_len` rows of `head_dim` elements of `dtype`, and nobody else
    /// accesses the slots meanwhile.
    pub unsafe fn kv_store(self, args: &KvStore<'_>) -> Result<(), KernelError> {
        let KvStore { dtype, n_head_kv, head_dim, block_len, rows, slots } = *args;
        let Some(encode) = quantize_row_fn(dtype) else {
            return Err(KernelError::NotEncodable { dtype });
        };
        expect_len("kv_store", "rows", &[slots.len(), n_head_kv, head_dim], rows.len())?;
        if head_dim == 0 || !head_dim.is_multiple_of(dtype.block_len()) {
            let allowed = "it must be a positive multiple of the cache type's block length";
            return Err(KernelError::Shape {
                kernel: "kv_store",
                what: "head_dim",
                got: head_dim,
                allowed,
            });
        }
        if let Some(slot) = slots.iter().find(|s| s.offset >= block_len) {
            let allowed = "it must be below the block's length";
            return Err(KernelError::Shape {
                kernel: "kv_store",
                what: "offset",
                got: slot.offset,
                allowed,
            });
        }
        let head_bytes = head_dim / dtype.block_len() * dtype.block_bytes();
        let mut heads = rows.chunks_exact(head_dim);
        for slot in slots {
            for (head, from) in heads.by_ref().take(n_head_kv).enumerate() {
                // SAFETY: head and offset are inside the block, which the caller vouches for.
                let to = unsafe { slot.block.add((head * block_len + slot.offset) * head_bytes) };
                if dtype == DType::F16 {
                    self.dispatch(StoreF16 { from, to });
                } else {
                    // SAFETY: as above; `head_bytes` are those of `head_dim` elements.
                    encode(from, unsafe { std::slice::from_raw_parts_mut(to, head_bytes) });
                }
            }
        }
        Ok(())
    }
}
