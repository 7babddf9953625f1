//! What the tests share: a writer without checks, a small valid file, and where models are.

#![allow(dead_code, reason = "each test binary uses a part of this")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::path::PathBuf;

use tegula_gguf::{Array, DType, GgufWriter, Value};

/// Bytes of a GGUF file, well-formed or not.
#[derive(Clone, Default)]
pub(crate) struct Raw(pub(crate) Vec<u8>);

impl Raw {
    /// A GGUF 3 header with these counts.
    pub(crate) fn new(n_tensors: u64, n_kv: u64) -> Raw {
        Raw(b"GGUF".to_vec()).u32(3).u64(n_tensors).u64(n_kv)
    }

    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Raw {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn u32(self, n: u32) -> Raw {
        self.bytes(&n.to_le_bytes())
    }

    pub(crate) fn u64(self, n: u64) -> Raw {
        self.bytes(&n.to_le_bytes())
    }

    pub(crate) fn string(self, text: &[u8]) -> Raw {
        self.u64(text.len() as u64).bytes(text)
    }

    /// A key and the id of its type; the value follows.
    pub(crate) fn key(self, key: &str, value_type: u32) -> Raw {
        self.string(key.as_bytes()).u32(value_type)
    }

    /// An array key: element type and length; the elements follow.
    pub(crate) fn array(self, key: &str, element_type: u32, len: u64) -> Raw {
        self.key(key, 9).u32(element_type).u64(len)
    }

    /// An entry of the tensor table.
    pub(crate) fn tensor(self, name: &str, dims: &[u64], type_id: u32, offset: u64) -> Raw {
        let raw = self.string(name.as_bytes()).u32(dims.len() as u32);
        dims.iter().fold(raw, |raw, dim| raw.u64(*dim)).u32(type_id).u64(offset)
    }

    /// Zeros up to the next multiple of 32, and `n` more as data.
    pub(crate) fn data(mut self, n: usize) -> Raw {
        self.0.resize(self.0.len().next_multiple_of(32) + n, 0);
        self
    }
}

/// A valid file with every kind of value and four tensors of different types.
pub(crate) fn sample() -> GgufWriter<'static> {
    let nested = Array::Array(vec![
        Array::U8(vec![1, 2]),
        Array::Array(vec![Array::F64(vec![0.5]), Array::U8(vec![])]),
    ]);
    GgufWriter::new()
        .meta("general.architecture", "llama")
        .meta("general.name", "sample")
        .meta("llama.context_length", 4096u64)
        .meta("llama.block_count", 2u32)
        .meta("llama.attention.head_count_kv", vec![4u32, 2])
        .meta("llama.rope.freq_base", 10000f32)
        .meta("v.u8", 200u8)
        .meta("v.i8", -3i8)
        .meta("v.u16", 60000u16)
        .meta("v.i16", -300i16)
        .meta("v.i32", -70000i32)
        .meta("v.i64", i64::MIN)
        .meta("v.f64", 1e300f64)
        .meta("v.bool", true)
        .meta("v.bools", vec![true, false])
        .meta("v.f32s", vec![1.5f32, -0.0])
        .meta("v.i32s", vec![1i32, 3, -1])
        .meta("v.nested", nested)
        .meta("tokenizer.ggml.tokens", Value::strings(["<s>", "", "\u{2581}the"]).unwrap())
        .meta("v.raw", Value::strings([&b"\xff"[..], b"ok"]).unwrap())
        .tensor("token_embd.weight", &[32, 3], DType::Q8_0, (0..102u8).collect::<Vec<u8>>())
        .tensor("blk.0.attn_q.weight", &[256, 2], DType::Q4_K, vec![7u8; 288])
        .tensor("blk.0.ffn_gate_exps.weight", &[2, 3, 2, 1], DType::F16, vec![1u8; 24])
        .tensor("output_norm.weight", &[5], DType::F32, vec![2u8; 20])
}

/// The folder of the golden data, or `None`, said aloud.
pub(crate) fn golden() -> Option<PathBuf> {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/golden");
    let folder = std::env::var_os("TEGULA_GOLDEN").map_or(default.into(), PathBuf::from);
    if folder.is_dir() {
        return Some(folder);
    }
    eprintln!("SKIPPED: no golden data at {}", folder.display());
    None
}

/// The real model called `name`, or `None`, said aloud.
pub(crate) fn model(name: &str) -> Option<PathBuf> {
    let default = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/tegula/models"));
    let folder = std::env::var_os("TEGULA_MODELS").map(PathBuf::from).or_else(default)?;
    let path = folder.join(name);
    if path.is_file() {
        return Some(path);
    }
    eprintln!("SKIPPED: no model at {}", path.display());
    None
}

/// Every `.gguf` file below `folder`.
pub(crate) fn gguf_files(folder: &std::path::Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in folder.read_dir().unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "gguf") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}
