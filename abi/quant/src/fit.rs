//! Encoding of weights: for every block the scales are searched that lose least, as a weight is written once and read for years.
//!
//! What is least is the weighted sum of squared errors, `sum w (x - x')^2` with `w = importance * sqrt(mean square + x^2)`: a model feels an
//! error in proportion to how large activations of that column are, which an importance file tells, and large weights carry more of a product
//! than small ones. Without a file all columns are equally important.
//!
//! The search is the same everywhere: several scales are tried, values are rounded to levels, the scale that fits these levels best follows by
//! least squares, and the two steps alternate while the error falls. Scales are rounded to what the block stores *before* the last choice of
//! levels, so that levels make up for it.

mod affine;
mod kquants;
mod symmetric;

use crate::dequantize::check_lengths;
use crate::{DType, LayoutError, quantize_row_fn};

/// Encodes a row of weights; see [`fit_row_fn`].
pub type FitFn = fn(&[f32], Option<&[f32]>, &mut [u8]);

/// Names of the types that [`fit`] writes.
const FITTABLE: &str = "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K";

/// The encoder of a type for weights, to be picked once outside a loop over rows, or `None` where there is none.
///
/// The function takes a row, the importance of each of its columns (at least 0) or `None`, and the row's bytes. It encodes as many whole blocks as
/// all of them hold and touches nothing else. It accepts any lengths and values, does not allocate and cannot panic.
pub const fn fit_row_fn(dtype: DType) -> Option<FitFn> {
    Some(match dtype {
        // Half a step of 8 bits is less than what a search would save of it.
        DType::F32 | DType::F16 | DType::BF16 | DType::Q8_0 => match dtype {
            DType::F32 => |x, _, out| plain(DType::F32, x, out),
            DType::F16 => |x, _, out| plain(DType::F16, x, out),
            DType::BF16 => |x, _, out| plain(DType::BF16, x, out),
            _ => |x, _, out| plain(DType::Q8_0, x, out),
        },
        DType::Q4_0 => symmetric::to_q4_0,
        DType::Q5_0 => symmetric::to_q5_0,
        DType::Q4_1 => affine::to_q4_1,
        DType::Q5_1 => affine::to_q5_1,
        DType::Q4_K => kquants::to_q4_k,
        DType::Q5_K => kquants::to_q5_k,
        DType::Q6_K => kquants::to_q6_k,
        _ => return None,
    })
}

/// Encodes a row of weights to the bytes of exactly that many elements. `importance` has an element for each column.
///
/// # Errors
/// [`LayoutError::NotEncodable`] for a type without an encoder, [`LayoutError::NotWholeBlocks`], [`LayoutError::WrongBytes`], and
/// [`LayoutError::WrongImportance`]. `dst` is untouched then.
pub fn fit(
    dtype: DType,
    src: &[f32],
    importance: Option<&[f32]>,
    dst: &mut [u8],
) -> Result<(), LayoutError> {
    let Some(encode) = fit_row_fn(dtype) else {
        return Err(LayoutError::NotEncodable { dtype, allowed: FITTABLE });
    };
    check_lengths(dtype, src.len(), dst.len())?;
    if let Some(got) = importance.map(<[f32]>::len).filter(|got| *got != src.len()) {
        let (n_elements, got) = (src.len() as u64, got as u64);
        return Err(LayoutError::WrongImportance { n_elements, got });
    }
    encode(src, importance, dst);
    Ok(())
}

fn plain(dtype: DType, src: &[f32], dst: &mut [u8]) {
    if let Some(encode) = quantize_row_fn(dtype) {
        encode(src, dst);
    }
}

/// Calls `encode` with the values and weights of each whole block, and its bytes.
#[inline(always)]
fn each_block<const N: usize, const B: usize>(
    src: &[f32],
    importance: Option<&[f32]>,
    dst: &mut [u8],
    encode: impl Fn(&[f32; N], &[f32; N]) -> [u8; B],
) {
    let blocks = src.as_chunks::<N>().0.iter().zip(dst.as_chunks_mut::<B>().0);
    match importance {
        None => {
            for (values, block) in blocks {
                *block = encode(values, &[1.0; N]);
            }
        }
        Some(importance) => {
            for ((values, block), importance) in blocks.zip(importance.as_chunks::<N>().0) {
                *block = encode(values, importance);
            }
        }
    }
}

/// What errors of these values cost.
#[inline(always)]
fn costs<const N: usize>(x: &[f32; N], importance: &[f32; N]) -> [f32; N] {
    let mean_square = x.iter().map(|x| x * x).sum::<f32>() / N as f32;
    let mut out = [0.0; N];
    for ((out, x), importance) in out.iter_mut().zip(x).zip(importance) {
        *out = importance * (mean_square + x * x).sqrt();
    }
    // Columns that no activation touched would leave a block of them without any shape.
    if out.iter().sum::<f32>() > 0.0 { out } else { [1.0; N] }
}

/// The nearest integer, of values below 2^22; others give something.
#[inline(always)]
fn nearest(v: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23: the adder rounds
    (v + MAGIC) - MAGIC
}

/// The nearest integer within bounds; a NaN becomes the lower one.
#[inline(always)]
fn level(v: f32, low: f32, high: f32) -> f32 {
    let v = if v > low { v } else { low };
    nearest(if v < high { v } else { high })
}

/// `1 / d`, or 0 where that is no number.
#[inline(always)]
fn reciprocal(d: f32) -> f32 {
    let id = 1.0 / d;
    if id.is_finite() { id } else { 0.0 }
}

/// The f16 of least magnitude that is not below the scale: small scales are far apart, and what they multiply is bounded.
#[inline(always)]
fn stored_above(v: f32) -> f32 {
    let bits = crate::bytes::f32_to_f16(v);
    let next = crate::bytes::f16_to_f32(bits.wrapping_add(1));
    let near = crate::bytes::f16_to_f32(bits);
    if near.abs() < v.abs() && next.is_finite() { next } else { near }
}

/// What an f16 stores of a scale.
#[inline(always)]
fn stored(v: f32) -> f32 {
    crate::bytes::f16_to_f32(crate::bytes::f32_to_f16(v))
}
