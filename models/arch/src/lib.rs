//! Model architectures: from a GGUF file's metadata and tensor table to a [`Program`](tegula_program::Program).
//!
//! [`load`] reads hyperparameters and checks every tensor the architecture needs; [`Model::program`] writes the program.
//!
//! - **One file per architecture** (`models/`), readable from top to bottom next to its paper, with shapes in comments. Parts
//!   that are the same everywhere are in `layers/`. The registry is the only list of architectures.
//! - **The program is the list of tensors.** Model code asks for a weight by name and shape while it writes formulas; the first
//!   that is missing or different ends `load` with an error. There is no second list that could disagree.
//! - **Every number in a file is hostile.** Each hyperparameter has a range (`hparams.rs`); products are computed in 64
//!   bits from numbers that are small enough. The trained context length is a fact for people and rope scaling: nothing is
//!   ever sized by it.
//! - **No device here.** A program says what to compute; where tensors lie and how they are cut is decided elsewhere.
//! - **The vocabulary is the embedding's rows.** Metadata about it may disagree and is not read; whether the tokenizer fits is
//!   checked by whoever has both.
//!
//! # Programs
//! Inputs, in this order: `tokens` i32\[n_tokens\], `positions` i32\[n_tokens\], `output_rows` i32\[n_outputs\] (which rows of
//! the run are wanted). The output is chosen by [`Results`]. Weights are named as in the file, matrices are
//! `[n_rows, n_in]`, which is the file's order of dimensions reversed.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod error;
mod graph;
mod hparams;
mod layers;
mod model;
mod models;
mod registry;
mod rope;
mod tensors;
mod window;

pub use error::ArchError;
pub use model::{Model, ModelInfo, ProgramOptions, Results, load};
pub use registry::known_architectures;
pub use tensors::TensorSpec;
