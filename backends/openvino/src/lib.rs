//! The OpenVINO backend: programs as OpenVINO models.
//!
//! | file | what |
//! |---|---|
//! | `library` | finding and opening OpenVINO |
//! | `ov` | its C interface as owned objects and results; errors with their cause first |
//! | `backend`, `device`, `gpu`, `engine` | devices and what they can give; what executables share |
//! | `buffer` | host memory, and remote tensors that host and GPU address |
//! | `partition` | cutting a program into models and what is done between them |
//! | `emit`, `ir`, `weights` | models as text with constants that stay compressed |
//! | `model` | a compiled model and its request |
//! | `between`, `kv`, `attention`, `kernels`, `rope` | what is done between models on the host |
//! | `executable`, `slots`, `tiles`, `queue` | runs |

mod attention;
mod backend;
mod between;
mod buffer;
mod device;
mod emit;
mod engine;
mod executable;
mod gpu;
mod ir;
mod kernels;
mod kv;
mod library;
mod model;
mod ov;
mod partition;
mod pool;
mod queue;
mod rope;
mod slots;
mod tiles;
mod weights;

pub use backend::OpenVino;
pub use buffer::Buffer;
pub use device::OpenVinoDevice;
pub use executable::Executable;
pub use queue::Queue;

tegula_sdk::export_backend!(OpenVino);
