//! The algorithms, written once over [`Simd`]; see `portable` and `x86_64` for the bindings.

pub(crate) mod activations;
pub mod attention;
pub(crate) mod attention_tile;
pub mod conv;
pub mod delta;
pub(crate) mod dot;
pub mod elementwise;
pub mod experts;
pub(crate) mod experts_run;
pub(crate) mod gemm;
pub(crate) mod int_dot;
pub(crate) mod int_gemm;
pub(crate) mod int_tasks;
pub(crate) mod ints;
pub(crate) mod ints_k;
pub mod kv;
pub(crate) mod math;
pub mod matmul;
pub(crate) mod matmul_f32;
pub(crate) mod matmul_int;
pub mod norm;
pub(crate) mod product;
pub mod rope;
pub mod router;
pub mod select;
pub(crate) mod shared;
pub mod simd;
pub(crate) mod source;
pub mod state;
pub(crate) mod weight;

pub use simd::{Kernel, Pairs, PairsKernel, Simd, Words, WordsKernel};
