//! [`ArchError`]: why a file is no model that can be run, with what was found and what would be right.
//!
//! Messages begin with the file. Text from a file is quoted with escapes and cut, so that a hostile file cannot write to a
//! terminal through an error.

use std::path::PathBuf;

use tegula_gguf::{DType, GgufError};
use tegula_program::ProgramError;

/// A model that cannot be built from a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are named and each variant says what it means")]
pub enum ArchError {
    /// A metadata key is absent or of another type than needed.
    #[error(transparent)]
    Gguf(#[from] GgufError),

    /// No file here knows the architecture.
    #[error("{}: the architecture {arch:?} is not supported; supported are {known}", .file.display())]
    UnknownArchitecture { file: PathBuf, arch: String, known: String },

    /// The architecture is known, this variant of it is not.
    #[error("{}: {what} not supported yet by the architecture {arch} ({key} is {got})", .file.display())]
    Unsupported { file: PathBuf, arch: &'static str, what: &'static str, key: String, got: String },

    /// A hyperparameter outside its range, or in conflict with another.
    #[error("{}: {key} is {got}; {allowed}", .file.display())]
    BadHparam { file: PathBuf, key: String, got: String, allowed: String },

    /// A tensor that the architecture needs is not in the file. `expected` is outermost first.
    #[error("{}: the tensor {tensor:?} of shape {expected} is missing; the file is incomplete or of another \
             architecture than it says", .file.display())]
    MissingTensor { file: PathBuf, tensor: String, expected: String },

    /// A tensor's shape is not what the hyperparameters say. Shapes are outermost first.
    #[error("{}: the tensor {tensor:?} has shape {got:?}, but the metadata say {expected:?} (outermost first)",
            .file.display())]
    WrongShape { file: PathBuf, tensor: String, expected: Vec<u64>, got: Vec<u64> },

    /// A tensor of a type that its use cannot read.
    #[error("{}: the tensor {tensor:?} is of type {got}, but {expected} is needed", .file.display())]
    WrongDType { file: PathBuf, tensor: String, expected: &'static str, got: DType },

    /// The program does not verify: options that the model cannot have, such as a KV type that its heads do not fill.
    #[error("{}: {source}", .file.display())]
    Program { file: PathBuf, source: ProgramError },
}

/// At most 80 characters of text from a file.
pub(crate) fn clip(text: &str) -> String {
    const CHARS_MAX: usize = 80;
    match text.char_indices().nth(CHARS_MAX) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", text.get(..end).unwrap_or_default()),
    }
}
