//! What can go wrong, for whoever called: what was asked, what is allowed, where, and what to do next.

use crate::memory::units::{SizeError, format_size};
use std::path::PathBuf;

/// Result of everything the runtime does.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure of the runtime.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model file is damaged or not a GGUF file.
    #[error(transparent)]
    Gguf(#[from] tegula_gguf::GgufError),
    /// The model's architecture or hyperparameters cannot be used.
    #[error(transparent)]
    Arch(#[from] tegula_arch::ArchError),
    /// A program that was cut into stages does not hold together: a bug in the runtime.
    #[error(transparent)]
    Program(#[from] tegula_program::ProgramError),
    /// The model's tokenizer cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] tegula_tokenizer::TokenizerError),
    /// The model's chat template failed.
    #[error(transparent)]
    Template(#[from] tegula_tokenizer::TemplateError),
    /// A backend or device failed.
    #[error(transparent)]
    Device(#[from] tegula_plugin::DeviceError),
    /// A chunk of the plan could not be allocated: the plan and the device contradict each other.
    #[error("{source}; the plan counts on {}", counted_on(*max_size, *free))]
    Alloc {
        /// The device.
        device: String,
        /// Index of its buffer type.
        buffer_type: u32,
        /// Bytes of the chunk.
        asked: u64,
        /// Greatest buffer that the plan was made for: stated, capped or learned; `None` if nobody could say.
        max_size: Option<u64>,
        /// Bytes that were free when the plan was made; `None` if nobody could say.
        free: Option<u64>,
        /// The limit to try next, if the device failed below the limit it states while memory is free.
        learned: Option<u64>,
        /// The device's own error.
        source: Box<tegula_plugin::DeviceError>,
    },
    /// More memory of a device would be taken than the plan has for that purpose: a bug in the runtime.
    #[error(
        "{device}: {asked} bytes for {usage} are not in the plan, which has {planned} for it, of which {taken} are taken; this is a bug in the runtime"
    )]
    NotInPlan {
        /// The device.
        device: String,
        /// What for.
        usage: String,
        /// Bytes of the chunk.
        asked: u64,
        /// Bytes taken before.
        taken: u64,
        /// Bytes planned.
        planned: u64,
    },
    /// No device could be used.
    #[error("{0}")]
    NoDevice(String),
    /// A device selector is malformed or names nothing.
    #[error("device `{selector}`: {why}\n{available}")]
    Selector {
        /// The part that is wrong.
        selector: String,
        /// Why.
        why: String,
        /// The devices that exist, one a line.
        available: String,
    },
    /// A file could not be read or mapped.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A size in an option or environment variable cannot be read.
    #[error("{name}: {source}")]
    Size {
        /// The option or variable.
        name: &'static str,
        /// Why.
        source: SizeError,
    },
    /// An option's value makes no sense.
    #[error("{name}: {why}")]
    Option {
        /// The option.
        name: &'static str,
        /// What is wrong, and what is allowed.
        why: String,
    },
    /// One indivisible row is larger than a buffer may be.
    #[error(
        "`{tensor}`: a row takes {asked} bytes, but a buffer of this device holds at most {limit}; raise TEGULA_MAX_BUFFER or use another device"
    )]
    RowTooBig {
        /// The tensor.
        tensor: String,
        /// Bytes of the row.
        asked: u64,
        /// `max_size` of the buffer type.
        limit: u64,
    },
    /// The context asked for does not fit.
    #[error(
        "a context of {asked} tokens needs {} ({per_token} bytes a token of KV cache and what goes with it), and {} is free for it: at most {fits} tokens fit{}",
        format_size(*bytes), format_size(*budget),
        would_fit(remedies, "Lower -c, use a smaller KV type (--kv-type), or free memory")
    )]
    ContextDoesNotFit {
        /// Tokens asked for.
        asked: u64,
        /// Bytes they need.
        bytes: u64,
        /// Bytes of one token.
        per_token: u64,
        /// Bytes free for the cache.
        budget: u64,
        /// Tokens that fit.
        fits: u64,
        /// Plans near this one that do fit, as options and what they give.
        remedies: Vec<String>,
    },
    /// Weights and scratch alone are more than a device has free.
    #[error(
        "{device}: the model needs {} beside its KV cache ({needed} bytes), and {} is free ({free} bytes){}",
        format_size(*needed), format_size(*free),
        would_fit(remedies, "Use a smaller quantisation, more devices (--device), or free memory")
    )]
    ModelDoesNotFit {
        /// The device.
        device: String,
        /// Bytes of weights, scratch and whatever else does not depend on the context.
        needed: u64,
        /// Bytes free.
        free: u64,
        /// What would fit, as options and what they give.
        remedies: Vec<String>,
    },
    /// Nobody knows how much memory a device has.
    #[error(
        "{device}: it states neither how much of its memory is free nor how much it has, and the model needs {} of it beside the KV cache ({needed} bytes): whether that fits cannot be told. State it (--memory-limit {device}=SIZE, or TEGULA_MEMORY_LIMIT), or load without knowing (--force)",
        format_size(*needed)
    )]
    MemoryUnknown {
        /// The device.
        device: String,
        /// Bytes of weights, scratch and whatever else does not depend on the context.
        needed: u64,
    },
    /// The device cannot run an op of the model.
    #[error(
        "{device} cannot run {ops}, which this model needs; choose another device (tegula devices lists them)"
    )]
    OpsUnsupported {
        /// The device.
        device: String,
        /// The ops' names.
        ops: String,
    },
    /// Even one token at a time needs more scratch in one piece than a buffer may hold.
    #[error(
        "{device}: scratch for one token does not fit a buffer: {cause}; raise TEGULA_MAX_BUFFER or TEGULA_MEMORY_LIMIT"
    )]
    ScratchTooBig {
        /// The device.
        device: String,
        /// The backend's words, with both numbers.
        cause: Box<tegula_plugin::DeviceError>,
    },
    /// The sequence reached the end of its context.
    #[error(
        "the context is full: {n_ctx} tokens, {used} used, {asked} more asked; start with a larger -c"
    )]
    ContextFull {
        /// Tokens of the context.
        n_ctx: u32,
        /// Tokens used.
        used: u32,
        /// Tokens asked for.
        asked: u32,
    },
    /// Every KvBlock of the pool is in use by sequences.
    #[error(
        "the KV cache is full: all {n_blocks} blocks of {block_len} tokens are in use by sequences; end one, or load with a larger -c"
    )]
    KvPoolFull {
        /// Blocks of the pool.
        n_blocks: u32,
        /// Tokens of a block.
        block_len: u32,
    },
    /// As many sequences as were asked for are in use.
    #[error(
        "{n_parallel} of at most {n_parallel} sequences are in use; end one, or load with a larger --parallel"
    )]
    TooManySequences {
        /// Sequences at a time.
        n_parallel: u32,
    },
    /// A sequence of another model.
    #[error("the sequence belongs to another model than the one that is to evaluate it")]
    OtherModel,
    /// A token id is not in the vocabulary.
    #[error("token id {id} is not in the vocabulary of {n_vocab}")]
    TokenOutOfRange {
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        n_vocab: u32,
    },
    /// Vocabulary and embedding disagree.
    #[error("{}: the tokenizer has {tokenizer} tokens but `token_embd.weight` has {rows} rows; the file is inconsistent", path.display())]
    VocabMismatch {
        /// The file.
        path: PathBuf,
        /// Tokens of the tokenizer.
        tokenizer: u64,
        /// Rows of the embedding.
        rows: u64,
    },
    /// A number of bytes passes 2^64.
    #[error("{what} pass 2^64; the model's shapes cannot be right")]
    Overflow {
        /// What was being computed.
        what: String,
    },
    /// The model gave a logit that is no number.
    #[error(
        "the model computed a logit that is not a number (token position {pos}); the weights or the device are faulty"
    )]
    NotANumber {
        /// Position of the token.
        pos: u32,
    },
    /// An earlier failure left the model unusable.
    #[error("the model stopped after an earlier failure: {0}")]
    Poisoned(String),
}

/// What the plan took for true when it was made.
fn counted_on(max_size: Option<u64>, free: Option<u64>) -> String {
    let buffers = match max_size {
        Some(bytes) => format!("buffers of up to {bytes} bytes"),
        None => "buffers of a size that nobody could state".to_owned(),
    };
    match free {
        Some(bytes) => format!("{buffers} and {bytes} bytes free, as they were when it was made"),
        None => format!("{buffers}; how much is free was unknown"),
    }
}

/// The end of a refusal: what would fit, one a line, or advice where nothing was found.
fn would_fit(remedies: &[String], advice: &str) -> String {
    if remedies.is_empty() {
        return format!(". {advice}");
    }
    format!(". What would fit:\n  {}", remedies.join("\n  "))
}
