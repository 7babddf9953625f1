//! [`GgufError`]: what is wrong with a file, where, and what would be right.
//!
//! Every message is one line that begins with the file. Keys, names and bytes that come from a file are quoted with
//! escapes and cut to a readable length, so that a hostile file cannot write to a terminal through an error. Causes are
//! part of the message and not of the `source` chain, so that printing the chain does not say things twice.

use std::path::PathBuf;

use tegula_quant::{DType, LayoutError};

use crate::ValueType;

/// A file that cannot be read as GGUF, or metadata that is not what the caller needs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are named and each variant says what it means")]
pub enum GgufError {
    /// The operating system refused.
    #[error("{}: cannot {action}: {cause}", .file.display())]
    Io { file: PathBuf, action: &'static str, cause: std::io::Error },

    /// A directory, device or pipe.
    #[error("{}: this is {what}, not a model file; give the path of a .gguf file", .file.display())]
    NotAFile { file: PathBuf, what: &'static str },

    /// Zero bytes long.
    #[error("{}: the file is empty; the download probably failed", .file.display())]
    Empty { file: PathBuf },

    /// The first four bytes are not `GGUF`. `begins` holds the first bytes, escaped.
    #[error("{}: this is not a GGUF file: it begins with \"{begins}\"{hint}", .file.display())]
    NotGguf { file: PathBuf, begins: String, hint: &'static str },

    /// A GGUF file of the other byte order.
    #[error("{}: this is a big-endian GGUF {version} file; only little-endian files can be read. Convert it with \
             gguf-py's gguf_convert_endian, or download the little-endian one", .file.display())]
    BigEndian { file: PathBuf, version: u32 },

    /// A GGUF version other than 2 and 3.
    #[error("{}: this is GGUF version {version}; versions 2 and 3 can be read{hint}", .file.display())]
    UnsupportedVersion { file: PathBuf, version: u32, hint: &'static str },

    /// The file ends before something that it announces.
    #[error("{}: {field} at byte {offset} needs {needed} bytes, but only {left} are left: the file is truncated \
             or corrupt", .file.display())]
    Truncated { file: PathBuf, field: String, offset: u64, needed: u128, left: u64 },

    /// A count or length above one of the [`Limits`](crate::Limits).
    #[error("{}: {field} at byte {offset} asks for {asked} {unit}; at most {allowed} are allowed ({limit})",
            .file.display())]
    LimitExceeded {
        file: PathBuf,
        field: String,
        offset: u64,
        asked: u64,
        allowed: u64,
        unit: &'static str,
        limit: &'static str,
    },

    /// The memory for something within the limits is not there.
    #[error("{}: no memory for the {asked} bytes of {field}", .file.display())]
    OutOfMemory { file: PathBuf, field: String, asked: u64 },

    /// A key or tensor name that is empty, too long or not UTF-8.
    #[error("{}: {field} at byte {offset} is {problem}", .file.display())]
    BadName { file: PathBuf, field: String, offset: u64, problem: &'static str },

    /// A metadata value type that GGUF does not have.
    #[error("{}: {field} at byte {offset} is type {id}; GGUF has types 0 to 12", .file.display())]
    UnknownValueType { file: PathBuf, field: String, offset: u64, id: u32 },

    /// A bool that is neither 0 nor 1.
    #[error("{}: {field} at byte {offset} is a bool with the value {got}; only 0 and 1 are bools", .file.display())]
    BadBool { file: PathBuf, field: String, offset: u64, got: u8 },

    /// One metadata key twice.
    #[error("{}: the key {key:?} appears twice, at bytes {first} and {second}", .file.display())]
    DuplicateKey { file: PathBuf, key: String, first: u64, second: u64 },

    /// A key the caller needs is absent.
    #[error("{}: the metadata has no key {key:?} ({expected} is needed)", .file.display())]
    MissingKey { file: PathBuf, key: String, expected: &'static str },

    /// A key holds another type than the caller needs.
    #[error("{}: the key {key:?} holds {got}, but {expected} is needed", .file.display())]
    WrongType { file: PathBuf, key: String, expected: &'static str, got: String },

    /// A key holds a number or text that the wanted type cannot hold.
    #[error("{}: the key {key:?} holds {got}, which is not {expected}", .file.display())]
    OutOfRange { file: PathBuf, key: String, expected: &'static str, got: String },

    /// A per-layer array of another length than the caller needs.
    #[error("{}: the key {key:?} holds {got} elements, but {expected} are needed", .file.display())]
    WrongLength { file: PathBuf, key: String, expected: u64, got: u64 },

    /// `general.alignment` is unusable.
    #[error("{}: general.alignment is {got}; it must be a power of two from 8 to 1048576", .file.display())]
    BadAlignment { file: PathBuf, got: u32 },

    /// One entry of the tensor table is unsound. `offset` is where the entry begins.
    #[error("{}: tensor {tensor:?} (entry at byte {offset}) {problem}", .file.display())]
    BadTensor { file: PathBuf, tensor: String, offset: u64, problem: TensorProblem },

    /// One tensor name twice; the files are the same unless the model is split.
    #[error("{}: the tensor {tensor:?} is already in {}", .file.display(), .first.display())]
    DuplicateTensor { file: PathBuf, tensor: String, first: PathBuf },

    /// Two tensors share bytes. Offsets count from the start of the data section.
    #[error("{}: tensors {first:?} and {second:?} overlap: the first ends at data byte {first_end}, the second \
             begins at {second_start}", .file.display())]
    OverlappingTensors {
        file: PathBuf,
        first: String,
        second: String,
        first_end: u64,
        second_start: u64,
    },

    /// A tensor the caller needs is absent.
    #[error("{}: the model has no tensor {tensor:?}", .file.display())]
    MissingTensor { file: PathBuf, tensor: String },

    /// The files of a split model do not fit together.
    #[error("{}: {problem}", .file.display())]
    BadShard { file: PathBuf, problem: ShardProblem },
}

/// What is wrong with one entry of a tensor table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are named and each variant says what it means")]
pub enum TensorProblem {
    /// Tensors have 1 to 4 dimensions.
    #[error("has {got} dimensions; 1 to 4 are allowed")]
    DimCount { got: u32 },

    /// A dimension of zero; `dim` counts from 0.
    #[error("has the size 0 in dimension {dim}; every dimension must be at least 1")]
    ZeroDim { dim: usize },

    /// The product of the dimensions, or the bytes, do not fit in 64 bits.
    #[error("has dimensions {dims:?} of {dtype}: the size does not fit in 64 bits")]
    SizeOverflow { dims: Vec<u64>, dtype: DType },

    /// The element type is unknown or retired.
    #[error(
        "has the element type id {id}, which is unknown; the file is newer than this program, or corrupt"
    )]
    UnknownDType { id: u32 },

    /// Rows do not hold whole QuantBlocks.
    #[error("cannot be laid out: {0}")]
    Layout(LayoutError),

    /// The offset is not a multiple of the file's alignment.
    #[error(
        "has its data at offset {offset}, which is not a multiple of the file's alignment {alignment}"
    )]
    Misaligned { offset: u64, alignment: u32 },

    /// The data ends after the file. `end` is `None` where it does not fit in 64 bits.
    #[error(
        "needs {n_bytes} bytes at data offset {offset} (data begins at byte {data_offset}), but the file has \
             {file_len} bytes: the download is incomplete, or the file is corrupt"
    )]
    OutOfBounds { offset: u64, n_bytes: u64, data_offset: u64, file_len: u64 },

    /// A writer was given data of another size than the shape has.
    #[error("was given {got} bytes of data; its shape has {n_bytes}")]
    DataLength { got: u64, n_bytes: u64 },
}

/// Why the files of a split model do not fit together. Shard numbers count from 1, as in file names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are named and each variant says what it means")]
pub enum ShardProblem {
    /// `split.no` and `split.count` contradict each other.
    #[error(
        "split.no is {no} and split.count is {count}; split.no counts from 0 and must be below split.count"
    )]
    Numbers { no: u64, count: u64 },

    /// More shards than [`Limits::n_shards_max`](crate::Limits).
    #[error("split.count is {count}; at most {allowed} shards are allowed (n_shards_max)")]
    TooMany { count: u64, allowed: u64 },

    /// The name has no `-00001-of-00003.gguf`, so the others cannot be found.
    #[error(
        "this is shard {number} of {count}, but its name does not end in -{number:05}-of-{count:05}.gguf, so the \
             other shards cannot be found; rename it back, or merge the shards into one file"
    )]
    Unnamed { number: u64, count: u64 },

    /// The name and the metadata disagree.
    #[error(
        "the name says shard {named} of {named_count}, the metadata says shard {number} of {count}; \
             the file was renamed or copied over another"
    )]
    Renamed { named: u64, named_count: u64, number: u64, count: u64 },

    /// A sibling is not there.
    #[error("shard {number} of {count} is missing; put {:?} beside the others", .name)]
    Missing { number: u64, count: u64, name: String },

    /// A file in the place of a shard has no split metadata.
    #[error(
        "this file is in the place of shard {number} of {count}, but it is not part of a split model"
    )]
    NotSplit { number: u64, count: u64 },

    /// Two names lead to one file.
    #[error("shards {first} and {second} are the same file, {}", .target.display())]
    SameFile { first: u64, second: u64, target: PathBuf },

    /// Shards of different models.
    #[error(
        "{key} is {got} here and {expected} in shard {of}; the shards belong to different models"
    )]
    Disagree { key: &'static str, got: String, expected: String, of: u64 },

    /// `split.tensors.count` is not what the shards hold.
    #[error("split.tensors.count is {announced}, but the {count} shards hold {found} tensors")]
    TensorCount { announced: u64, found: u64, count: u64 },

    /// A split model given as bytes, where no sibling can be found.
    #[error("this is shard {number} of {count}; a split model can only be opened by path")]
    InMemory { number: u64, count: u64 },
}

/// `text` cut to a length that an error message can carry.
pub(crate) fn clip(text: &str) -> String {
    const CHARS_MAX: usize = 80;
    match text.char_indices().nth(CHARS_MAX) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", text.get(..end).unwrap_or_default()),
    }
}

/// What a value is, for the `got` of an error: its type and, where it is short, itself.
pub(crate) fn describe(value_type: ValueType, shown: &str) -> String {
    format!("{} {}", value_type.with_article(), clip(shown))
}
