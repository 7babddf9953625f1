//! One file per command.

pub(crate) mod bench;
pub(crate) mod chat;
pub(crate) mod devices;
pub(crate) mod inspect;
pub(crate) mod kl;
pub(crate) mod logits;
pub(crate) mod perplexity;
pub(crate) mod plan;
pub(crate) mod pull;
pub(crate) mod quantize;
pub(crate) mod run;
pub(crate) mod template;
pub(crate) mod tokenize;
pub(crate) mod verify;
