//! What the end-to-end tests share: the built programs, golden data, distances between distributions, small model files.
//!
//! * **A helper that fails is a failed test**, so helpers panic with what is wrong instead of returning errors.
//! * **What a test lacks is said**: a helper that gives `None` has printed `SKIPPED: reason`, and the test returns. Golden data is
//!   looked for beside the repository (`TEGULA_GOLDEN` overrides), models in `~/.cache/tegula/models` (`TEGULA_MODELS`).
//! * **Tests that need neither exist for everything**: [`TinyLlama`] and [`RandomModel`] write models of random weights, of any shape.
//! * `TEGULA_TEST_FULL=1` runs every case of the golden data; without it the slowest are left out.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail by panicking"
)]

mod distance;
mod drivers;
mod golden;
mod measure;
mod programs;
mod property;
mod random;
mod tiny;

pub use distance::{TopLogits, argmax, kl, logsumexp};
pub use drivers::{add_intels_opencl, intels_opencl, is_on_intels_opencl, on_ovgpu};
pub use golden::{f32s, full, golden, ids, json, model_file};
pub use measure::{Finished, finish, limited, resident, resident_peak, run, run_with_stdin};
pub use programs::{command, runtime, runtime_of, runtime_with, target_dir, tegula};
pub use property::property;
pub use random::{RandomModel, TensorShape};
pub use tiny::TinyLlama;

/// The backends that every machine can run.
pub const BACKENDS: [&str; 2] = ["reference", "cpu"];
