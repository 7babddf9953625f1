//! The CPU backend: kernels and threads.
//!
//! Activations are f32 everywhere; weights of any type are decoded exactly to f32 and multiplied with fused
//! multiply-adds. Nothing is rounded to 8-bit activations, so that the logits follow an exact f32 evaluation; the speed
//! comes from real matrix blocking in prefill and from fused decoding in decode.

pub mod kernels;
pub mod pool;
