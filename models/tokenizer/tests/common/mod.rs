//! Where test data lies, and loud skipping when it does not.
#![allow(dead_code, reason = "each test file uses a part")]

use std::path::{Path, PathBuf};

use serde_json::Value;
use tegula_tokenizer::{Tokenizer, Vocab};

/// A folder of the golden data, or `None` (said aloud) without it.
pub(crate) fn golden(part: &str) -> Option<PathBuf> {
    let root = std::env::var_os("TEGULA_GOLDEN").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/golden")),
        PathBuf::from,
    );
    present(root.join(part))
}

/// The file of a vocabulary, among the vocabularies or the models.
pub(crate) fn vocab_file(name: &str) -> Option<PathBuf> {
    if name.starts_with("ggml-vocab-") {
        return present(golden("vocab")?.join(name));
    }
    let models = std::env::var_os("TEGULA_MODELS")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/tegula/models")))?;
    present(models.join(name))
}

fn present(path: PathBuf) -> Option<PathBuf> {
    if path.exists() {
        return Some(path);
    }
    eprintln!("SKIPPED: {} is not there", path.display());
    None
}

pub(crate) fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// One JSON value a line.
pub(crate) fn json_lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

pub(crate) fn load_vocab(path: &Path) -> Vocab {
    let file = tegula_gguf::GgufFile::open(path).unwrap();
    Vocab::from_gguf(file.metadata()).unwrap()
}

pub(crate) fn load(path: &Path) -> Tokenizer {
    Tokenizer::new(&load_vocab(path)).unwrap()
}

/// `{"text": …}` or `{"b64": …}` as bytes.
pub(crate) fn bytes(value: &Value) -> Vec<u8> {
    match value.get("text") {
        Some(text) => text.as_str().unwrap().as_bytes().to_vec(),
        None => base64(value["b64"].as_str().unwrap()),
    }
}

fn base64(text: &str) -> Vec<u8> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut out, mut bits, mut n_bits) = (Vec::new(), 0u32, 0);
    for digit in text.bytes().filter(|&b| b != b'=') {
        bits = bits << 6 | DIGITS.iter().position(|&d| d == digit).unwrap() as u32;
        n_bits += 6;
        if n_bits >= 8 {
            n_bits -= 8;
            out.push((bits >> n_bits) as u8);
        }
    }
    out
}

pub(crate) fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}
