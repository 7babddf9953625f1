//! Random QuantBlocks of a given deviation.
//!
//! All bits of a block but its scale are random. What deviation a scale of 1 gives is measured by decoding some blocks, not derived, so that any
//! type with a scale can be made alike.

use crate::random::Bits;
use anyhow::{Result, bail};
use half::{bf16, f16};
use tegula_quant::{DType, block, dequantize};

/// Blocks that are decoded to measure their deviation.
const SAMPLES: usize = 64;
/// Values of the table that plain floats are drawn from.
const TABLE: usize = 1 << 12;

/// How random bits become rows of one type.
pub(crate) enum Maker {
    /// Plain floats, as bytes of one value after the other, drawn from a table.
    Table { values: Vec<u8>, size: usize },
    /// Blocks with f16 fields at these offsets, that are set to one of two bit patterns.
    Blocks { bytes: usize, fields: Vec<(usize, [[u8; 2]; 2])> },
}

/// Offset of an f16 field, and what it is in relation to the scale.
type Field = (usize, f32);

/// The f16 fields of a block, and whether its scale changes its sign from block to block: where codes lie unevenly around 0, that makes the mean 0.
fn fields(dtype: DType) -> Option<(Vec<Field>, bool)> {
    // A minimum is the mean of the codes times the scale, so that the mean of the values is 0.
    Some(match dtype {
        DType::Q4_0 => (vec![(block::q4_0::D, 1.0)], true),
        DType::Q4_1 => (vec![(block::q4_1::D, 1.0), (block::q4_1::M, -7.5)], false),
        DType::Q5_0 => (vec![(block::q5_0::D, 1.0)], true),
        DType::Q5_1 => (vec![(block::q5_1::D, 1.0), (block::q5_1::M, -15.5)], false),
        DType::Q8_0 => (vec![(block::q8_0::D, 1.0)], true),
        DType::Q2_K => (vec![(block::q2_k::D, 1.0), (block::q2_k::DMIN, 1.5)], false),
        DType::Q3_K => (vec![(block::q3_k::D, 1.0)], true),
        DType::Q4_K => (vec![(block::q4_k::D, 1.0), (block::q4_k::DMIN, 7.5)], false),
        DType::Q5_K => (vec![(block::q5_k::D, 1.0), (block::q5_k::DMIN, 15.5)], false),
        DType::Q6_K => (vec![(block::q6_k::D, 1.0)], true),
        DType::IQ4_NL => (vec![(block::iq4_nl::D, 1.0)], true),
        DType::IQ4_XS => (vec![(block::iq4_xs::D, 1.0)], true),
        _ => return None,
    })
}

impl Maker {
    /// For values of mean 0 and this deviation.
    pub(crate) fn new(dtype: DType, deviation: f32) -> Result<Self> {
        let table = |bytes: fn(f32) -> Vec<u8>| {
            let values = (0..TABLE).map(|i| deviation * quantile((i as f32 + 0.5) / TABLE as f32));
            let values: Vec<u8> = values.flat_map(bytes).collect();
            Self::Table { size: values.len() / TABLE, values }
        };
        match dtype {
            DType::F32 => return Ok(table(|x| x.to_le_bytes().to_vec())),
            DType::F16 => return Ok(table(|x| f16::from_f32(x).to_le_bytes().to_vec())),
            DType::BF16 => return Ok(table(|x| bf16::from_f32(x).to_le_bytes().to_vec())),
            _ => {}
        }
        let Some((fields, alternates)) = fields(dtype) else {
            bail!("random weights of type {} cannot be made", dtype.name());
        };
        let bytes = dtype.block_bytes();
        let with_scale = |scale: f32| {
            let pattern = |factor: f32| {
                let value = f16::from_f32(scale * factor);
                let other = if alternates { -value } else { value };
                [value.to_le_bytes(), other.to_le_bytes()]
            };
            let fields = fields.iter().map(|(offset, factor)| (*offset, pattern(*factor)));
            Self::Blocks { bytes, fields: fields.collect() }
        };
        let mut sample = vec![0; SAMPLES * bytes];
        with_scale(1.0).fill(&mut sample, &mut Bits::new(0, "sample", 0));
        let mut values = vec![0.0; SAMPLES * dtype.block_len()];
        dequantize(dtype, &sample, &mut values)?;
        let square: f64 = values.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
        let unit = (square / values.len() as f64).sqrt() as f32;
        Ok(with_scale(deviation / unit))
    }

    /// Fills `out`, a whole number of blocks or values.
    pub(crate) fn fill(&self, out: &mut [u8], bits: &mut Bits) {
        match self {
            Self::Table { values, size: 2 } => draw::<2>(values, out, bits),
            Self::Table { values, .. } => draw::<4>(values, out, bits),
            Self::Blocks { bytes, fields } => {
                bits.fill(out);
                for block in out.chunks_exact_mut(*bytes) {
                    // A random bit that is overwritten in a moment decides.
                    let sign = fields.first().map_or(0, |(at, _)| usize::from(block[*at] & 1));
                    for (offset, patterns) in fields {
                        block[*offset..offset + 2].copy_from_slice(&patterns[sign]);
                    }
                }
            }
        }
    }
}

/// Fills `out` with values of `N` bytes from a table, 12 bits of randomness for each and 5 values a word.
fn draw<const N: usize>(table: &[u8], out: &mut [u8], bits: &mut Bits) {
    let (table, _) = table.as_chunks::<N>();
    let (values, _) = out.as_chunks_mut::<N>();
    for word in values.chunks_mut(5) {
        let mut random = bits.next();
        for value in word {
            *value = table[random as usize % TABLE];
            random >>= 12;
        }
    }
}

/// The value below which a share `p` of a normal distribution lies, to two digits: `5.5556 (1 - ((1 - p) / p)^0.1186)` from the middle upwards.
fn quantile(p: f32) -> f32 {
    if p < 0.5 {
        return -quantile(1.0 - p);
    }
    5.5556 * (1.0 - ((1.0 - p) / p).powf(0.1186))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Weights of another deviation would give logits that are no numbers, or all alike.
    #[test]
    fn rows_have_the_deviation_asked_for() {
        for dtype in DType::ALL {
            let floats = [DType::F32, DType::F16, DType::BF16].contains(&dtype);
            if !floats && fields(dtype).is_none() {
                assert!(Maker::new(dtype, 1.0).is_err());
                continue;
            }
            for deviation in [0.5, 0.01] {
                let maker = Maker::new(dtype, deviation).unwrap();
                let n = 1 << 15;
                let mut row = vec![0; n / dtype.block_len() * dtype.block_bytes()];
                maker.fill(&mut row, &mut Bits::new(7, "w", 3));
                let mut values = vec![0.0; n];
                dequantize(dtype, &row, &mut values).unwrap();
                let mean = values.iter().sum::<f32>() / n as f32;
                let square = values.iter().map(|x| x * x).sum::<f32>() / n as f32;
                let off = (square.sqrt() / deviation - 1.0).abs();
                assert!(off < 0.1, "{}: {} for {deviation}", dtype.name(), square.sqrt());
                assert!(mean.abs() < 0.1 * deviation, "{}: mean {mean}", dtype.name());
            }
        }
    }
}
