//! Errors of loading a vocabulary and of decoding ids.
//!
//! Each case carries what was found, what is allowed and where, so that a
//! message alone tells whether the file or the caller is at fault.

use crate::TokenId;

/// Why a vocabulary cannot become a [`crate::Tokenizer`], or why ids cannot be decoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The file's metadata cannot be read as a vocabulary; the message names file and key.
    #[error(transparent)]
    Gguf(#[from] tegula_gguf::GgufError),
    /// The vocabulary has no tokens.
    #[error("the vocabulary is empty (tokenizer.ggml.tokens has no entries)")]
    EmptyVocab,
    /// The vocabulary has more tokens than ids can name.
    #[error("the vocabulary has {n_tokens} tokens; at most {max} are supported")]
    TooManyTokens {
        /// Tokens found.
        n_tokens: usize,
        /// Tokens allowed.
        max: usize,
    },
    /// `tokenizer.ggml.model` names an algorithm that is not implemented.
    #[error("unknown tokenizer model '{model}'; known: {known}")]
    UnknownModel {
        /// The name found.
        model: String,
        /// The names that work.
        known: &'static str,
    },
    /// `tokenizer.ggml.pre` names a way of splitting that is not implemented.
    #[error(
        "unknown pre-tokenizer '{pre}' (tokenizer.ggml.pre): text would be split wrongly, so the \
         model is refused; known: {known}"
    )]
    UnknownPre {
        /// The name found.
        pre: String,
        /// The names that work, separated by commas.
        known: String,
    },
    /// A byte-pair vocabulary without its merges.
    #[error(
        "the tokenizer model '{model}' needs tokenizer.ggml.merges, which the file does not have"
    )]
    MissingMerges {
        /// The tokenizer model.
        model: String,
    },
    /// Two arrays that must run in parallel have different lengths.
    #[error("{array} has {found} entries, but the vocabulary has {expected} tokens")]
    CountMismatch {
        /// The array's GGUF key.
        array: &'static str,
        /// Entries found.
        found: usize,
        /// Entries expected.
        expected: usize,
    },
    /// A special token's id lies outside the vocabulary.
    #[error("the {role} token has id {id}, but the vocabulary has {n_vocab} tokens")]
    SpecialIdOutOfRange {
        /// `bos`, `eos`, ...
        role: &'static str,
        /// The id found.
        id: u32,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// A token shall be added to each text, but the file does not say which.
    #[error("{flag} is true, but the vocabulary has no {role} token")]
    MissingSpecial {
        /// The flag's GGUF key.
        flag: &'static str,
        /// `bos`, `eos`, ...
        role: &'static str,
    },
    /// Two ids have the same text, so text does not determine ids.
    #[error("tokens {first} and {second} have the same text {text:?}")]
    DuplicateToken {
        /// The text, shortened and made printable.
        text: String,
        /// The lower id.
        first: TokenId,
        /// The higher id.
        second: TokenId,
    },
    /// A score is not a number, so merges have no order.
    #[error("the score of token {id} is not a number")]
    BadScore {
        /// The token.
        id: TokenId,
    },
    /// The normalisation table of a unigram vocabulary is damaged.
    #[error("tokenizer.ggml.precompiled_charsmap is damaged: {reason}")]
    BadCharsmap {
        /// What is wrong.
        reason: &'static str,
    },
    /// Special tokens could not be indexed.
    #[error("the special tokens cannot be indexed: {reason}")]
    SpecialTokens {
        /// The index's own words.
        reason: String,
    },
    /// An id handed in for decoding is outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {n_vocab} tokens")]
    TokenOutOfRange {
        /// The id.
        id: TokenId,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
}
