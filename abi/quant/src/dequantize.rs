//! Decoding: the checked door, and the function behind it for callers that have checked already.

use crate::{DType, LayoutError, floats, fp4, iq, kquants, legacy, ternary};

/// Decodes whole blocks from bytes to f32; see [`dequantize_row_fn`].
pub type DequantizeFn = fn(&[u8], &mut [f32]);

/// The decoder of a type, to be picked once outside a loop over rows.
///
/// The function decodes `min(src.len() / block_bytes, dst.len() / block_len)` blocks from the front of `src` to the
/// front of `dst` and touches nothing else. It accepts any bytes and any lengths, does not allocate and cannot panic;
/// whoever wants wrong lengths reported calls [`dequantize`].
pub const fn dequantize_row_fn(dtype: DType) -> DequantizeFn {
    match dtype {
        DType::F32 => floats::f32,
        DType::F16 => floats::f16,
        DType::BF16 => floats::bf16,
        DType::F64 => floats::f64,
        DType::I8 => floats::i8,
        DType::I16 => floats::i16,
        DType::I32 => floats::i32,
        DType::I64 => floats::i64,
        DType::Q4_0 => legacy::q4_0,
        DType::Q4_1 => legacy::q4_1,
        DType::Q5_0 => legacy::q5_0,
        DType::Q5_1 => legacy::q5_1,
        DType::Q8_0 => legacy::q8_0,
        DType::Q8_1 => legacy::q8_1,
        DType::Q8_K => legacy::q8_k,
        DType::Q2_K => kquants::q2_k,
        DType::Q3_K => kquants::q3_k,
        DType::Q4_K => kquants::q4_k,
        DType::Q5_K => kquants::q5_k,
        DType::Q6_K => kquants::q6_k,
        DType::IQ1_S => iq::iq1_s,
        DType::IQ1_M => iq::iq1_m,
        DType::IQ2_XXS => iq::iq2_xxs,
        DType::IQ2_XS => iq::iq2_xs,
        DType::IQ2_S => iq::iq2_s,
        DType::IQ3_XXS => iq::iq3_xxs,
        DType::IQ3_S => iq::iq3_s,
        DType::IQ4_NL => iq::iq4_nl,
        DType::IQ4_XS => iq::iq4_xs,
        DType::TQ1_0 => ternary::tq1_0,
        DType::TQ2_0 => ternary::tq2_0,
        DType::Q1_0 => ternary::q1_0,
        DType::Q2_0 => ternary::q2_0,
        DType::MXFP4 => fp4::mxfp4,
        DType::NVFP4 => fp4::nvfp4,
    }
}

/// Decodes `dst.len()` elements from the bytes of exactly that many.
///
/// Values are those of ggml's reference decoders, bit for bit (NaNs excepted: any NaN stands for any other). Integers
/// and F64 round to nearest, ties to even.
///
/// # Errors
/// [`LayoutError::NotWholeBlocks`] when `dst` is not a whole number of blocks, and [`LayoutError::WrongBytes`] when
/// `src` is not the bytes of `dst.len()` elements. `dst` is untouched then.
pub fn dequantize(dtype: DType, src: &[u8], dst: &mut [f32]) -> Result<(), LayoutError> {
    check_lengths(dtype, dst.len(), src.len())?;
    dequantize_row_fn(dtype)(src, dst);
    Ok(())
}

/// Fails unless `n_bytes` are exactly the bytes of `n_elements`.
pub(crate) fn check_lengths(
    dtype: DType,
    n_elements: usize,
    n_bytes: usize,
) -> Result<(), LayoutError> {
    let (n_elements, got) = (n_elements as u64, n_bytes as u64);
    let expected = dtype.row_bytes(n_elements)?;
    if got == expected {
        Ok(())
    } else {
        Err(LayoutError::WrongBytes { dtype, n_elements, expected, got })
    }
}
