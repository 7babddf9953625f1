//! The algorithms, written once over [`Simd`]; see `portable` and `x86_64` for the bindings.

pub mod attention;
pub(crate) mod attention_tile;
pub(crate) mod dot;
pub mod elementwise;
pub(crate) mod gemm;
pub mod kv;
pub(crate) mod math;
pub mod matmul;
pub mod norm;
pub mod rope;
pub mod select;
pub(crate) mod shared;
pub mod simd;
pub(crate) mod source;
pub(crate) mod weight;
pub(crate) mod weight_k;

pub use simd::{Kernel, Simd};
