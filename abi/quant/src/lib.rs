//! GGUF's element and block types: layouts, sizes and exact decoding.
//!
//! Everything that touches tensor bytes goes through this crate: the GGUF reader sizes tensors with
//! [`DType::row_bytes`], backends decode with [`dequantize_row_fn`] or read blocks at the offsets in [`block`], and
//! the KV cache encodes with [`quantize_row_fn`], weights are encoded with [`fit_row_fn`].
//!
//! Decisions:
//!
//! - *Exact.* Decoding gives the bits of ggml's reference decoders, and encoding the bytes of its reference encoders.
//!   Golden vectors in `tests/data` hold both to that. Encoding weights is another task: [`fit`] searches what loses least.
//! - *Total.* Bytes and lengths are hostile input. No function here panics on any of them: the checked doors return
//!   [`LayoutError`], the row functions work on the whole blocks that fit. There is no `unsafe`.
//! - *Portable and plain.* Loops over fixed-size arrays that the compiler vectorises for the target. Kernels for
//!   particular instruction sets belong to backends, and are tested against this crate.
//! - *Pure.* Nothing allocates (errors about names excepted), blocks or keeps state; every function may be called from
//!   any thread.
//!
//! A row is a run of QuantBlocks without padding. `elements` and `bytes` below are those of one QuantBlock, `bits` is
//! their ratio per element:
//!
//! | id | name | elements | bytes | bits | encodes | what it is |
//! |---:|---|---:|---:|---:|---|---|
//! | 0 | F32 | 1 | 4 | 32 | yes | IEEE 754 binary32 |
//! | 1 | F16 | 1 | 2 | 16 | yes | IEEE 754 binary16 |
//! | 2 | Q4_0 | 32 | 18 | 4.5 | yes | 4-bit, symmetric, one f16 scale per 32 |
//! | 3 | Q4_1 | 32 | 20 | 5 | yes | 4-bit with an f16 scale and an f16 minimum per 32 |
//! | 6 | Q5_0 | 32 | 22 | 5.5 | yes | 5-bit, symmetric, one f16 scale per 32 |
//! | 7 | Q5_1 | 32 | 24 | 6 | yes | 5-bit with an f16 scale and an f16 minimum per 32 |
//! | 8 | Q8_0 | 32 | 34 | 8.5 | yes | 8-bit, symmetric, one f16 scale per 32 |
//! | 9 | Q8_1 | 32 | 36 | 9 |  | Like `Q8_0` with the scaled sum of the block; an activation format, not a weight format |
//! | 10 | Q2_K | 256 | 84 | 2.625 |  | 2-bit k-quant: 16 sub-blocks of 16 with 4-bit scales and minima |
//! | 11 | Q3_K | 256 | 110 | 3.438 |  | 3-bit k-quant: 16 sub-blocks of 16 with 6-bit signed scales |
//! | 12 | Q4_K | 256 | 144 | 4.5 | weights | 4-bit k-quant: 8 sub-blocks of 32 with 6-bit scales and minima |
//! | 13 | Q5_K | 256 | 176 | 5.5 | weights | 5-bit k-quant: 8 sub-blocks of 32 with 6-bit scales and minima |
//! | 14 | Q6_K | 256 | 210 | 6.562 | weights | 6-bit k-quant: 16 sub-blocks of 16 with 8-bit signed scales |
//! | 15 | Q8_K | 256 | 292 | 9.125 |  | 8-bit with an f32 scale and sums of 16; an activation format, not a weight format |
//! | 16 | IQ2_XXS | 256 | 66 | 2.062 |  | 2.06 bits: grid of 256 rows of 8, 7-bit sign codes |
//! | 17 | IQ2_XS | 256 | 74 | 2.312 |  | 2.31 bits: grid of 512 rows of 8, 7-bit sign codes |
//! | 18 | IQ3_XXS | 256 | 98 | 3.062 |  | 3.06 bits: grid of 256 rows of 4, 7-bit sign codes |
//! | 19 | IQ1_S | 256 | 50 | 1.562 |  | 1.56 bits: ternary grid of 2048 rows of 8 with a shift per 32 |
//! | 20 | IQ4_NL | 32 | 18 | 4.5 |  | 4-bit through a fixed non-linear table, one f16 scale per 32 |
//! | 21 | IQ3_S | 256 | 110 | 3.438 |  | 3.44 bits: grid of 512 rows of 4, explicit signs |
//! | 22 | IQ2_S | 256 | 82 | 2.562 |  | 2.56 bits: grid of 1024 rows of 8, explicit signs |
//! | 23 | IQ4_XS | 256 | 136 | 4.25 |  | 4.25 bits: the table of `IQ4_NL` with 6-bit scales per 32 |
//! | 24 | I8 | 1 | 1 | 8 |  | Signed 8-bit integer |
//! | 25 | I16 | 1 | 2 | 16 |  | Signed 16-bit integer |
//! | 26 | I32 | 1 | 4 | 32 |  | Signed 32-bit integer |
//! | 27 | I64 | 1 | 8 | 64 |  | Signed 64-bit integer |
//! | 28 | F64 | 1 | 8 | 64 |  | IEEE 754 binary64 |
//! | 29 | IQ1_M | 256 | 56 | 1.75 |  | 1.75 bits: the grid of `IQ1_S` with a shift per 8 |
//! | 30 | BF16 | 1 | 2 | 16 | yes | bfloat16: the upper half of a binary32 |
//! | 34 | TQ1_0 | 256 | 54 | 1.688 |  | Ternary, five digits per byte |
//! | 35 | TQ2_0 | 256 | 66 | 2.062 |  | Ternary, two bits per element |
//! | 39 | MXFP4 | 32 | 17 | 4.25 |  | OCP microscaling FP4 (E2M1) with one E8M0 scale per 32 |
//! | 40 | NVFP4 | 64 | 36 | 4.5 |  | FP4 (E2M1) with one unsigned E4M3 scale per 16 |
//! | 41 | Q1_0 | 128 | 18 | 1.125 |  | One bit per element: plus or minus the f16 scale, per 128 |
//! | 42 | Q2_0 | 64 | 18 | 2.25 |  | Two bits per element, one f16 scale per 64 |
//!
//! Q8_1 and Q8_K are formats of activations inside ggml; files do not normally hold them. Their sizes are those of
//! ggml's C structs.

#![forbid(unsafe_code)]

pub mod block;
mod bytes;
mod dequantize;
mod dtype;
mod error;
mod fit;
mod floats;
mod fp4;
mod iq;
mod iq_tables;
mod kquants;
mod legacy;
mod quantize;
mod ternary;

pub use dequantize::{DequantizeFn, dequantize, dequantize_row_fn};
pub use dtype::DType;
pub use error::LayoutError;
pub use fit::{FitFn, fit, fit_row_fn};
pub use quantize::{QuantizeFn, quantize, quantize_row_fn};
