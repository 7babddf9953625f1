//! The Vulkan backend: compute shaders on any driver of Vulkan 1.2 and up, discrete, integrated, or a processor behind lavapipe.
//!
//! # Decisions
//! * **Addresses, not bindings.** Shaders read and write through 64-bit device addresses; a buffer's size is bound by what can be allocated and
//!   not by `maxStorageBufferRange`. There are no descriptors at all.
//! * **Own layout.** Weights are repacked when they are uploaded (`layout.rs`), exactly, so that loads are aligned and coalesced.
//! * **Recorded once.** A shape's commands are recorded when it first runs; what changes from run to run lies in a small record
//!   (`params.rs`). A generated token is one submit.
//! * **Few barriers.** Ops are joined into steps (`plan.rs`), and a barrier stands only where a dispatch reads what another wrote (`record.rs`).
//! * **f32, except where told.** Everything accumulates in f32 and nothing is rounded below it, but for prompts on devices with
//!   cooperative matrices: there activations and decoded weights are rounded to f16. `TEGULA_VULKAN_MATRICES=0` turns that off.
//! * **Errors are values.** Every `VkResult` becomes a typed error with its code; a device that says it is lost is not called again.
//!
//! # Environment
//! `TEGULA_VULKAN_VALIDATION=1` turns on the validation layer, `TEGULA_VULKAN_PROFILE=1` logs where runs spend their time,
//! `TEGULA_VULKAN_MATRICES=0` keeps products of prompts in f32.

mod backend;
mod cache_file;
mod commands;
mod device;
mod error;
mod executable;
mod experts;
mod frame;
mod gpu;
mod instance;
mod kinds;
mod layout;
mod matrices;
mod memory;
mod params;
mod physical;
mod pipelines;
mod plan;
mod product;
mod profile;
mod push;
mod queue;
mod record;
mod repack;
mod repack_table;
mod rope;
mod rows;
mod shaders;
mod staging;
mod state;
mod steps;
mod warm;
mod weight;

pub use backend::Vulkan;
pub use device::VulkanDevice;
pub use executable::Executable;
pub use layout::Format;
pub use memory::Buffer;
pub use queue::Queue;

tegula_sdk::export_backend!(Vulkan);
