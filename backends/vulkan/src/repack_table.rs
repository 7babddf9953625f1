//! Types without a form of their own: codes into a table of 16 values, found again from the decoded elements.

use crate::layout::Planes;
use crate::repack::{pack, part, put};
use half::f16;
use tegula_sdk::quant::block::{
    iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs, iq4_nl, iq4_xs, mxfp4, nvfp4, q1_0, q2_0,
    q2_k, q3_k, tq1_0, tq2_0,
};
use tegula_sdk::quant::{DType, dequantize_row_fn};

/// Q2_K: numbers of 2 bits, scale and minimum of each 16.
pub(crate) fn minimum_row(src: &[u8], planes: &Planes, out: &mut [u8]) {
    for (i, b) in src.as_chunks::<{ q2_k::BYTES }>().0.iter().enumerate() {
        let (d, dmin) = (half_at(b, q2_k::D), half_at(b, q2_k::DMIN));
        let (qs, scales) = (part::<64>(b, q2_k::QS), part::<16>(b, q2_k::SCALES));
        for j in 0..8 {
            let codes = std::array::from_fn(|l| qs[32 * (j / 4) + l] >> (2 * (j % 4)) & 3);
            put(out, 16 * (8 * i + j), pack(&codes));
            for side in 0..2 {
                let sc = scales[2 * j + side];
                let at = planes.second + 16 * (8 * i + j) + 4 * side;
                put(out, at, (d * f32::from(sc & 15)).to_le_bytes());
                put(out, at + 8, (-(dmin * f32::from(sc >> 4))).to_le_bytes());
            }
        }
    }
}

/// Any other type: each element is its scale times a value of the table.
pub(crate) fn table_row(
    dtype: DType,
    table: &[i8; 16],
    n_in: usize,
    planes: &Planes,
    src: &[u8],
    out: &mut [u8],
) {
    let mut row = vec![0.0f32; n_in];
    dequantize_row_fn(dtype)(src, &mut row);
    let per_block = dtype.block_len() / 16;
    let blocks = src.chunks_exact(dtype.block_bytes());
    let scales = blocks.flat_map(|block| (0..per_block).map(move |i| scale(dtype, block, i)));
    let mut codes = [0u8; 32];
    for (i, (elements, scale)) in row.as_chunks::<16>().0.iter().zip(scales).enumerate() {
        let values = table.map(|value| scale * f32::from(value));
        let half = i % 2 * 16;
        for (code, x) in codes.iter_mut().skip(half).zip(elements) {
            *code = nearest(&values, *x);
        }
        put(out, planes.second + 4 * i, scale.to_le_bytes());
        if half == 16 {
            put(out, 16 * (i / 2), pack(&codes));
        }
    }
}

/// The first of the values nearest to `x`; one of them is `x` or a rounding away from it.
fn nearest(values: &[f32; 16], x: f32) -> u8 {
    let mut best = (f32::INFINITY, 0u8);
    for (code, value) in (0u8..).zip(values) {
        let distance = (value - x).abs();
        if distance < best.0 {
            best = (distance, code);
        }
    }
    best.1
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes(part(block, at)).to_f32()
}

fn byte(block: &[u8], at: usize) -> u8 {
    block.get(at).copied().unwrap_or(0)
}

fn word(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(part(block, at))
}

/// Nibble `i` of packed nibbles at `at`, low nibble first.
fn nibble(block: &[u8], at: usize, i: usize) -> u8 {
    byte(block, at + i / 2) >> (i % 2 * 4) & 15
}

/// The scale of the `i`th 16 elements of a block, as the decoder computes it.
fn scale(dtype: DType, b: &[u8], i: usize) -> f32 {
    let iq2 = |d: f32, sc: u8| d * (0.5 + f32::from(sc)) * 0.25;
    match dtype {
        DType::Q3_K => {
            let at = q3_k::SCALES;
            let low = byte(b, at + i % 8) >> (i / 8 * 4) & 15;
            let high = byte(b, at + 8 + i % 4) >> (i / 4 * 2) & 3;
            half_at(b, q3_k::D) * f32::from((low | high << 4) as i8 - 32)
        }
        DType::IQ2_XXS => {
            let codes = u32::from_le_bytes(part(b, iq2_xxs::QS + 8 * (i / 2) + 4));
            iq2(half_at(b, iq2_xxs::D), (codes >> 28) as u8)
        }
        DType::IQ2_XS => iq2(half_at(b, iq2_xs::D), nibble(b, iq2_xs::SCALES, i)),
        DType::IQ2_S => iq2(half_at(b, iq2_s::D), nibble(b, iq2_s::SCALES, i)),
        DType::IQ3_XXS => {
            let codes = u32::from_le_bytes(part(b, iq3_xxs::SCALES_AND_SIGNS + 4 * (i / 2)));
            half_at(b, iq3_xxs::D) * (0.5 + (codes >> 28) as f32) * 0.5
        }
        DType::IQ3_S => half_at(b, iq3_s::D) * f32::from(1 + 2 * nibble(b, iq3_s::SCALES, i / 2)),
        DType::IQ1_S => {
            let qh = word(b, iq1_s::QH + 2 * (i / 2));
            half_at(b, iq1_s::D) * f32::from(2 * (qh >> 12 & 7) + 1) / 8.0
        }
        DType::IQ1_M => {
            let words: [u16; 4] = std::array::from_fn(|k| word(b, iq1_m::SCALES + 2 * k));
            let [w, x, y, z] = words.map(|word| word >> 12);
            let d = f16::from_bits(w | x << 4 | y << 8 | z << 12).to_f32();
            d * f32::from(2 * (words[i / 4 % 4] >> (i % 4 * 3) & 7) + 1) / 8.0
        }
        DType::IQ4_NL => half_at(b, iq4_nl::D),
        DType::IQ4_XS => {
            let high = (word(b, iq4_xs::SCALES_H) >> (2 * (i / 2)) & 3) as i8;
            let sc = nibble(b, iq4_xs::SCALES_L, i / 2) as i8 | high << 4;
            half_at(b, iq4_xs::D) * f32::from(sc - 32)
        }
        DType::MXFP4 => {
            let e = byte(b, mxfp4::E);
            f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (u32::from(e) - 1) << 23 })
        }
        DType::NVFP4 => nvfp4_scale(byte(b, nvfp4::D + i)),
        DType::TQ1_0 => half_at(b, tq1_0::D),
        DType::TQ2_0 => half_at(b, tq2_0::D),
        DType::Q1_0 => half_at(b, q1_0::D),
        DType::Q2_0 => half_at(b, q2_0::D),
        _ => 0.0,
    }
}

/// Half of an unsigned E4M3 scale, as the decoder has it: the top bit is ignored, but for code 0x7f, which counts as zero.
fn nvfp4_scale(code: u8) -> f32 {
    let (exponent, mantissa) = (u32::from(code >> 3 & 15), u32::from(code & 7));
    match (code, exponent) {
        (0x7f, _) => 0.0,
        (_, 0) => mantissa as f32 / 1024.0,
        _ => f32::from_bits((exponent + 127 - 7 - 1) << 23 | mantissa << 20),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Format, table};
    use crate::repack::Repack;

    /// A weight that is only nearly what the file says changes what a model answers.
    #[test]
    fn every_table_type_keeps_its_values() {
        let mut state = 1u64;
        let mut byte = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u8
        };
        let types = DType::ALL.into_iter().filter(|dtype| Format::of(*dtype) == Format::Table);
        for dtype in types {
            let n = 2 * dtype.block_len().max(256);
            let bytes = usize::try_from(dtype.row_bytes(n as u64).unwrap()).unwrap();
            for _ in 0..20 {
                let src: Vec<u8> = (0..bytes).map(|_| byte()).collect();
                let mut wanted = vec![0.0f32; n];
                dequantize_row_fn(dtype)(&src, &mut wanted);
                let repack = Repack::new(dtype, n as u64).unwrap();
                let mut packed = vec![0u8; repack.packed_bytes()];
                repack.rows(&src, &mut packed);
                let (codes, scales) = packed.split_at(n / 2);
                let table = table(dtype);
                for (i, wanted) in wanted.into_iter().enumerate() {
                    let scale = f32::from_le_bytes(part(scales, i / 16 * 4));
                    let code = codes[i / 2] >> (4 * (i % 2)) & 15;
                    let got = scale * f32::from(table[usize::from(code)]);
                    // Infinite and absent scales have no values to keep.
                    assert!(
                        got == wanted || !wanted.is_finite() || !scale.is_finite(),
                        "{dtype} {i}: {got} for {wanted}"
                    );
                }
            }
        }
    }
}
