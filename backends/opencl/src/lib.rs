//! The OpenCL backend: any device of OpenCL 1.2 or later.
//!
//! Decisions:
//! * **OpenCL C 1.2 is enough.** Sub-groups and half-precision arithmetic are used where a device reports them and required nowhere: NVIDIA's driver has
//!   no fp16 arithmetic, PoCL 3.1 no sub-groups. Activations and sums are f32, and weights are decoded exactly.
//! * **No device addresses.** Core OpenCL has none, so memory is always a buffer and a 64-bit offset; a weight in several tiles is one kernel for each,
//!   and attention takes the buffers of its KV segments as arguments, in passes when there are more than fit.
//! * **Limits are read when asked,** from the device asked about, and never kept.
//! * **Weights are repacked at upload** into planes that aligned loads can fetch, row by row and exactly; see `weight::layout`.
//! * **A token is few launches.** Ops are grouped (`groups`), every launch keeps its kernel object and arguments (`launch`), nothing waits for the device
//!   between ops.
//! * **Of the `ocl` crates, the core layer** (`ocl-core`), and of that the raw functions: see `cl`.
//!
//! The plugin links libOpenCL.so.1, the loader that finds drivers (Debian: `ocl-icd-libopencl1`; to build, `ocl-icd-opencl-dev`). Where it is missing, the core
//! skips the plugin and names it.

mod attention;
mod backend;
mod bound;
mod buffer;
mod build;
mod cl;
mod context;
mod device;
mod executable;
mod experts;
mod facts;
mod groups;
mod kv;
mod launch;
mod plan;
mod profile;
mod programs;
mod queue;
mod staging;
mod state;
mod turns;
mod weight;

pub use backend::OpenCl;
pub use buffer::ClBuffer;
pub use device::OpenClDevice;
pub use executable::Executable;
pub use queue::Queue;

tegula_sdk::export_backend!(OpenCl);
