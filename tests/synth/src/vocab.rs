//! The tokenizer of a file: that of another model, or one whose tokens are bytes, with as many tokens as the shape has.

use anyhow::{Context as _, Result, bail};
use std::path::Path;
use tegula_gguf::{Array, Gguf, GgufWriter, StringArray, Value};

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
/// Types of tokens: normal, control, unused.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const UNUSED: i32 = 5;
/// Padding of a sentencepiece vocabulary must never be the best merge.
const SCORE_UNUSED: f32 = -1e9;

/// Adds the tokenizer of the model at `path`, with unused tokens up to `n_vocab`.
pub(crate) fn copied(
    mut out: GgufWriter<'static>,
    path: &Path,
    n_vocab: usize,
) -> Result<GgufWriter<'static>> {
    let model = Gguf::open(path)?;
    let metadata = model.metadata();
    let Some(Value::Array(Array::String(tokens))) = metadata.get(TOKENS) else {
        bail!("{}: no tokenizer", path.display());
    };
    if tokens.len() > n_vocab {
        bail!(
            "{}: its tokenizer has {} tokens, and the shape only {n_vocab}; take one of a smaller vocabulary",
            path.display(),
            tokens.len()
        );
    }
    for (key, value) in metadata.iter().filter(|(key, _)| key.starts_with("tokenizer.")) {
        let value = match (key, value) {
            (TOKENS, _) => {
                let known = tokens.iter().map(<[u8]>::to_vec);
                let names = (tokens.len()..n_vocab).map(|id| unused(id).into_bytes());
                strings(known.chain(names))?
            }
            (TYPES, Value::Array(Array::I32(types))) => {
                let mut types = types.clone();
                types.resize(n_vocab, UNUSED);
                Value::Array(Array::I32(types))
            }
            (SCORES, Value::Array(Array::F32(scores))) => {
                let mut scores = scores.clone();
                scores.resize(n_vocab, SCORE_UNUSED);
                Value::Array(Array::F32(scores))
            }
            (_, value) => value.clone(),
        };
        out = out.meta(key, value);
    }
    Ok(out)
}

/// Adds a tokenizer of 256 bytes, BOS and EOS, and unused tokens up to `n_vocab`.
pub(crate) fn bytes(out: GgufWriter<'static>, n_vocab: usize) -> Result<GgufWriter<'static>> {
    if n_vocab < 258 {
        bail!("the shape has {n_vocab} tokens; bytes, BOS and EOS take 258");
    }
    let special = ["<|bos|>".to_owned(), "<|eos|>".to_owned()];
    let texts = (0..=255).map(byte_text).chain(special).chain((258..n_vocab).map(unused));
    let types = (0..n_vocab).map(|id| match id {
        0..256 => NORMAL,
        256 | 257 => CONTROL,
        _ => UNUSED,
    });
    Ok(out
        .meta("tokenizer.ggml.model", "gpt2")
        .meta("tokenizer.ggml.pre", "gpt-2")
        .meta(TOKENS, strings(texts.map(String::into_bytes))?)
        .meta(TYPES, types.collect::<Vec<i32>>())
        .meta("tokenizer.ggml.merges", strings([])?)
        .meta("tokenizer.ggml.bos_token_id", 256u32)
        .meta("tokenizer.ggml.eos_token_id", 257u32)
        .meta("tokenizer.ggml.add_bos_token", Value::Bool(true)))
}

fn unused(id: usize) -> String {
    format!("<unused{id}>")
}

fn strings(texts: impl IntoIterator<Item = Vec<u8>>) -> Result<Value> {
    let texts = StringArray::from_strings(texts).context("texts of more than 4 GiB")?;
    Ok(Value::Array(Array::String(texts)))
}

/// The character that stands for a byte in byte-level vocabularies: printable bytes for themselves, the others from U+0100 on.
fn byte_text(byte: u8) -> String {
    let is_printable = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let shifted = (0..byte).filter(|b| !is_printable(*b)).count() as u32;
    let code = if is_printable(byte) { u32::from(byte) } else { 256 + shifted };
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER).to_string()
}
