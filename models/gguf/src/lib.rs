//! GGUF files: header, metadata and tensor table of untrusted files.
//!
//! - **A model file is hostile input.** Every count and length is compared with the bytes that remain in the file, and
//!   with [`Limits`], before anything is allocated for it. All arithmetic on file data is checked. The cost of refusing
//!   a file is bounded by [`Limits::header_bytes_max`], whatever the file claims.
//! - **Only headers are read.** [`Gguf::open`] reads metadata and tensor tables through a buffer and touches no tensor
//!   data. The runtime maps the data with the facts given here ([`Gguf::file_range`]); that is why this crate needs no
//!   `unsafe`.
//! - **What is accepted is sound.** A [`TensorInfo`] that exists has 1 to 4 dimensions without zeros, whole
//!   QuantBlocks, an aligned offset, and bytes that lie inside its file and inside no other tensor. Code above this
//!   crate checks none of that again.
//! - **What is refused is explained.** Each [`GgufError`] names the file and the field, with the byte offset where
//!   there is one, what was asked and what is allowed. Text from a file is quoted and escaped in messages.
//! - **Little-endian GGUF 2 and 3.** Version 1 and big-endian files are recognised and refused by name, as are other
//!   file types that people download by mistake.
//!
//! [`GgufFile`] is one file, [`Gguf`] is a model: one file or all shards of a split one. [`GgufWriter`] writes.
//! The format is described in the ggml project's `docs/gguf.md`.

#![forbid(unsafe_code)]

mod access;
mod array;
mod error;
mod file;
mod header;
mod index;
mod limits;
mod metadata;
mod model;
mod reader;
mod shards;
mod summary;
mod tensor_info;
mod value;
mod write;

pub use access::{FromValue, Mismatch};
pub use array::{Array, StringArray};
pub use error::{GgufError, ShardProblem, TensorProblem};
pub use file::GgufFile;
pub use limits::Limits;
pub use metadata::Metadata;
pub use model::{Gguf, Shard};
pub use summary::{DTypeShare, Summary};
pub use tensor_info::TensorInfo;
pub use value::{Value, ValueType};
pub use write::GgufWriter;

pub use tegula_quant::DType;

/// Alignment of tensor data where a file has no `general.alignment`.
pub const DEFAULT_ALIGNMENT: u32 = 32;
