//! The codebooks of the IQ types as text for a program.
//!
//! The tables have one home, the decoder: they are read out of it by decoding blocks made of row numbers, with a scale that leaves the
//! grid's own whole numbers.

use super::layout::Layout;
use tegula_quant::block::{iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs};
use tegula_quant::{DType, dequantize_row_fn};

/// `#define GRID` and its table; nothing for a layout without one.
pub(crate) fn prelude(layout: Layout) -> String {
    let (dtype, n_rows, row_len, d) = match layout {
        Layout::IQ1_S | Layout::IQ1_M => (DType::IQ1_S, 2048, 8, 1.0),
        Layout::IQ2_XXS => (DType::IQ2_XXS, 256, 8, 8.0),
        Layout::IQ2_XS => (DType::IQ2_XS, 512, 8, 8.0),
        Layout::IQ2_S => (DType::IQ2_S, 1024, 8, 8.0),
        Layout::IQ3_XXS => (DType::IQ3_XXS, 256, 4, 4.0),
        Layout::IQ3_S => (DType::IQ3_S, 512, 4, 1.0),
        _ => return String::new(),
    };
    let per_block = 256 / row_len;
    let mut words = Vec::new();
    for first in (0..n_rows).step_by(per_block) {
        let block = block_of_rows(dtype, first, per_block, d);
        let mut values = [0f32; 256];
        dequantize_row_fn(dtype)(&block, &mut values);
        // The IQ1 decoder adds an eighth to what the grid says.
        let shift = if dtype == DType::IQ1_S { 0.125 } else { 0.0 };
        let bytes = values.map(|v| (v - shift) as i8 as u8);
        words.extend(bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)));
    }
    let words: Vec<_> = words.iter().map(|word| format!("{word:#x}u")).collect();
    format!(
        "__constant uint grid_words[{}] = {{{}}};\n#define GRID grid_words\n",
        words.len(),
        words.join(",")
    )
}

/// A block whose rows are `first`, `first + 1`, ..., without signs.
fn block_of_rows(dtype: DType, first: usize, n: usize, d: f32) -> Vec<u8> {
    let mut block = vec![0u8; dtype.block_bytes()];
    let mut or = |at: usize, bits: usize| {
        if let Some(byte) = block.get_mut(at) {
            *byte |= bits as u8;
        }
    };
    let scale = half::f16::from_f32(d).to_le_bytes();
    for (i, byte) in scale.into_iter().enumerate() {
        // All of these types begin with their scale.
        or(i, byte.into());
    }
    for i in 0..n {
        let row = first + i;
        match dtype {
            DType::IQ2_XXS => or(iq2_xxs::QS + i / 4 * 8 + i % 4, row),
            DType::IQ2_XS => {
                or(iq2_xs::QS + 2 * i, row & 255);
                or(iq2_xs::QS + 2 * i + 1, row >> 8);
            }
            DType::IQ2_S => {
                or(iq2_s::QS + i, row & 255);
                or(iq2_s::QH + i / 4, (row >> 8) << (i % 4 * 2));
            }
            DType::IQ3_XXS => or(iq3_xxs::QS + i, row),
            DType::IQ3_S => {
                or(iq3_s::QS + i, row & 255);
                or(iq3_s::QH + i / 8, (row >> 8) << (i % 8));
            }
            _ => {
                let high = (row >> 8) << (i % 4 * 3);
                or(iq1_s::QS + i, row & 255);
                or(iq1_s::QH + i / 4 * 2, high & 255);
                or(iq1_s::QH + i / 4 * 2 + 1, high >> 8);
            }
        }
    }
    block
}
