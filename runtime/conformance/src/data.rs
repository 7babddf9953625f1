//! Random data from a seed: activations, ids, and weights of every type with scales of one magnitude.

use crate::Result;
use tegula_quant::{DType, dequantize, quantize, quantize_row_fn};

/// SplitMix64: small, seeded, good enough for data.
pub(crate) struct Rng(u64);

impl Rng {
    /// The generator of a case: its name is its seed, so that a case gives the same data alone and in a suite.
    pub(crate) fn of(name: &str) -> Self {
        // FNV-1a.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        Self(hash)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in -1..1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Below `n`, which is more than 0.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.bits() % n.max(1)
    }

    /// `n` numbers in `-scale..scale`.
    pub(crate) fn vec(&mut self, n: u64, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.unit() * scale).collect()
    }

    /// `n` ids below `most`, the first and the last possible among them.
    pub(crate) fn ids(&mut self, n: u32, most: u64) -> Vec<i32> {
        let id = |id: u64| i32::try_from(id).unwrap_or(i32::MAX);
        (0..n)
            .map(|i| match i {
                0 => id(most - 1),
                1 => 0,
                _ => id(self.below(most)),
            })
            .collect()
    }

    /// `items` in another order.
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            let j = usize::try_from(self.below(i as u64 + 1)).unwrap_or(0);
            items.swap(i, j);
        }
    }

    /// `n` elements of `dtype`, a whole number of QuantBlocks, finite and of one magnitude.
    pub(crate) fn weights(&mut self, dtype: DType, n: u64) -> Result<Vec<u8>> {
        let (len, size) = (dtype.block_len(), dtype.block_bytes());
        let n_blocks = usize::try_from(n).unwrap_or(usize::MAX) / len;
        let mut bytes = vec![0; n_blocks.saturating_mul(size)];
        for block in bytes.chunks_exact_mut(size) {
            self.block(dtype, block)?;
        }
        Ok(bytes)
    }

    fn block(&mut self, dtype: DType, block: &mut [u8]) -> Result<()> {
        if quantize_row_fn(dtype).is_some() {
            let source = self.vec(dtype.block_len() as u64, 2.0);
            return Ok(quantize(dtype, &source, block)?);
        }
        // Random bits of wide numbers would differ by hundreds of magnitudes, so that all but the greatest would be lost in a sum.
        let small = self.unit() * 100.0;
        match dtype {
            DType::I16 => block.copy_from_slice(&(small as i16).to_le_bytes()),
            DType::I32 => block.copy_from_slice(&(small as i32).to_le_bytes()),
            DType::I64 => block.copy_from_slice(&(small as i64).to_le_bytes()),
            DType::F64 => block.copy_from_slice(&f64::from(small).to_le_bytes()),
            _ => self.random_block(dtype, block)?,
        }
        Ok(())
    }

    /// Random bits, drawn again until their values are finite and of one magnitude.
    fn random_block(&mut self, dtype: DType, block: &mut [u8]) -> Result<()> {
        let mut values = vec![0.0; dtype.block_len()];
        loop {
            block.iter_mut().for_each(|byte| *byte = self.bits() as u8);
            dequantize(dtype, block, &mut values)?;
            let greatest = values.iter().fold(0.0f32, |most, v| most.max(v.abs()));
            let is_finite = values.iter().all(|v| v.is_finite());
            // One element alone may be 0; what a block of many is made of is what its scales say.
            let is_sane = (1e-3..1e3).contains(&greatest) || dtype.block_len() == 1;
            if is_finite && is_sane {
                return Ok(());
            }
        }
    }
}

pub(crate) fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub(crate) fn i32_bytes(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub(crate) fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

pub(crate) fn i32s(bytes: &[u8]) -> Vec<i32> {
    bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect()
}
