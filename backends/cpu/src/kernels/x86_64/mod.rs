//! Bindings for x86-64. A token is made only after `is_x86_feature_detected!` has found its instruction set.

pub mod avx2;
pub mod avx512;
