//! The Tegula inference runtime: from a GGUF file to text, on whatever device is there, within what its memory truly gives.
//!
//! ```no_run
//! use std::sync::atomic::AtomicBool;
//! use tegula::{EncodeOptions, GenerateOptions, Model, Runtime, Sampler};
//!
//! let runtime = Runtime::new(&Default::default());
//! let model = Model::open(&runtime, "model.gguf", &Default::default(), &mut |_| {})?;
//! let options = EncodeOptions { add_special: true, parse_special: false };
//! let prompt = model.tokenizer().encode("Once upon a time", options);
//! let mut sequence = model.sequence();
//! let mut sampler = Sampler::new(Default::default())?;
//! let options = GenerateOptions { n_predict: Some(64), ..Default::default() };
//! tegula::generate(&mut sequence, &prompt, &mut sampler, options, &AtomicBool::new(false), |text| {
//!     print!("{text}");
//! })?;
//! # Ok::<(), tegula::Error>(())
//! ```
//!
//! Decisions:
//! * **The plan comes first and is what runs.** [`Model::plan_only`] tells every byte before anything is allocated; [`Model::open`] allocates
//!   the plan's chunks and nothing else on a device. Only the KV cache is allocated later, segment by planned segment.
//! * **Limits are the device's.** Everything larger than the device's `max_size` is tiled; nothing is cached per process.
//! * **No failure leaves by a panic.** Every input from outside ends in a value of [`Error`].
//! * The core names no backend: which exist is what the plugin search finds.

#![forbid(unsafe_code)]

mod alloc;
mod batch;
mod engine;
mod error;
mod file;
mod generate;
mod isolation;
mod kv_pool;
pub mod measure;
pub mod memory;
mod model;
mod partition;
mod planner;
mod promises;
pub mod requantize;
mod runtime;
mod sampler;
pub mod selection;
mod sequence;
mod shape;
mod state_pool;
mod weights;

pub use batch::BatchItem;
pub use error::{Error, Result};
pub use file::ModelFile;
pub use generate::{GenerateOptions, Generation, StopReason, generate};
pub use isolation::{ISOLATION_VARIABLE, Isolation, IsolationOptions, PROBE_LIMIT_VARIABLE};
pub use memory::plan::{MemoryTypes, Plan, PlanReport};
pub use model::{Model, ModelOptions};
pub use planner::{PlaceRule, PlanOptions, Split};
pub use runtime::{Caps, DeviceCap, DeviceEntry, Limit, Runtime, RuntimeOptions, format_uuid};
pub use sampler::{Sampler, SamplerOptions, greedy};
pub use sequence::{Outputs, Sequence};
pub use shape::{DeltaNet, Experts, Gemma4, Quant, Shape, known_shapes};
pub use tegula_arch::ModelInfo;
pub use tegula_gguf::{self as gguf, Gguf};
pub use tegula_plugin::{DeviceInfo, RegistryOptions};
pub use tegula_program::DType;
pub use tegula_tokenizer::{
    ChatInput, ChatTemplate, ChatTime, EncodeOptions, TemplateOrigin, Tokenizer,
};
pub use weights::Progress;
