//! The CPU backend: kernels and threads.
//!
//! Values are f32 everywhere. Products with weights of a block type round their activations to 16-bit integers with a scale
//! for each 32, and multiply exactly from there: integers at the machine's speed for integers, and results some ten thousand
//! times nearer to an exact evaluation, in the square, than the customary 8-bit activations give. Plain weights are multiplied
//! as f32. The speed comes from real matrix blocking in prefill and from reading weights in place in decode.

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
