//! The CPU backend: kernels and threads.
//!
//! Activations are f32 everywhere; weights of any type are decoded exactly to f32 and multiplied with fused
//! multiply-adds. Nothing is rounded to 8-bit activations, so that the logits follow an exact f32 evaluation; the speed
//! comes from real matrix blocking in prefill and from fused decoding in decode.

mod backend;
#[expect(unsafe_code, reason = "imports are memory that the core owns")]
mod device;
mod executable;
pub mod kernels;
mod kv;
mod ops;
pub mod pool;
mod queue;
mod rope;
mod weight;

pub use backend::Cpu;
pub use device::CpuDevice;
pub use executable::Executable;
pub use queue::Queue;

tegula_sdk::export_backend!(Cpu);
