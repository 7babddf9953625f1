//! Tokenizers and chat templates as GGUF files describe them.
//!
//! - **A file is hostile input.** [`Vocab`] holds what a file states; [`Tokenizer::new`] believes
//!   nothing of it unchecked. No vocabulary, text or list of ids panics.
//! - **Ids equal those of the reference.** A model sees ids, so text must be cut exactly as in
//!   training. Where sources disagree, llama.cpp's result is right, since published files are tested
//!   with it. An unknown way of cutting text is an error and never a guess.
//! - **Special text is opt-in.** `<|im_start|>` in a user's text stays text unless
//!   [`EncodeOptions::parse_special`] is set.
//! - **No state.** A [`Tokenizer`] is immutable and shared; what a generation needs to remember is
//!   in its [`Detokenizer`].
//!
//! The crate reads no file itself and knows nothing of models beyond their vocabulary.
#![forbid(unsafe_code)]

mod bpe;
mod bytes;
mod cache;
mod charsmap;
mod chat;
mod classes;
mod decode;
mod error;
mod joins;
mod merge;
mod partition;
mod pretok;
mod special;
mod spm;
mod texts;
mod tokenizer;
mod unigram;
mod vocab;
mod wordpiece;

pub use chat::{
    ChatInput, ChatTemplate, ChatTime, OUTPUT_BYTES_MAX, SOURCE_BYTES_MAX, TemplateError,
    TemplateOrigin,
};
pub use decode::Detokenizer;
pub use error::TokenizerError;
pub use special::TokenAttr;
pub use texts::Texts;
pub use tokenizer::{EncodeOptions, Tokenizer};
pub use vocab::{SpecialIds, Vocab};

/// The number of a token in its vocabulary.
pub type TokenId = u32;
