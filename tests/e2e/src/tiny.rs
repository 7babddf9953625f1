//! A model file of random weights, small enough to be written by every test that wants one.

use std::path::{Path, PathBuf};
use tegula_gguf::{Array, DType, GgufWriter, StringArray, Value};

/// The shape of a small llama with a byte-level tokenizer: ids 0 to 255 are bytes, then BOS and EOS.
///
/// What it generates is nonsense, but always the same nonsense: weights come from a fixed seed.
#[derive(Debug, Clone, Copy)]
pub struct TinyLlama {
    /// What the file says the model was trained on.
    pub context_length: u32,
    /// Layers.
    pub n_layer: u32,
    /// Elements of a row between layers; four heads share it.
    pub n_embd: u32,
}

impl Default for TinyLlama {
    fn default() -> Self {
        Self { context_length: 4096, n_layer: 2, n_embd: 64 }
    }
}

impl TinyLlama {
    /// Heads of queries.
    pub const N_HEAD: u32 = 4;
    /// Heads of keys and values.
    pub const N_HEAD_KV: u32 = 2;
    /// Tokens: 256 bytes, BOS, EOS.
    pub const N_VOCAB: u32 = 258;

    /// Elements of a head.
    pub fn head_dim(&self) -> u32 {
        self.n_embd / Self::N_HEAD
    }

    /// Elements of keys and values of one token, over all layers.
    pub fn kv_elements_per_token(&self) -> u64 {
        u64::from(self.n_layer * Self::N_HEAD_KV * self.head_dim() * 2)
    }

    /// Writes `name` into `folder`.
    pub fn write(&self, folder: &Path, name: &str) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, self.to_bytes()).expect("a folder to write to");
        path
    }

    /// The file.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.writer().to_bytes().expect("a valid file")
    }

    /// The file as calls of the writer, to add to.
    pub fn writer(&self) -> GgufWriter<'static> {
        let (embd, ff) = (u64::from(self.n_embd), u64::from(2 * self.n_embd));
        let kv = u64::from(Self::N_HEAD_KV * self.head_dim());
        let mut seed = 1;
        let mut out = self.metadata();
        let mut add = |name: String, dims: &[u64]| {
            let n = dims.iter().product::<u64>();
            let data = if dims.len() == 1 { ones(n) } else { random(n, embd, &mut seed) };
            let writer = std::mem::take(&mut out);
            out = writer.tensor(name, dims, DType::F32, data);
        };
        add("token_embd.weight".into(), &[embd, u64::from(Self::N_VOCAB)]);
        add("output_norm.weight".into(), &[embd]);
        for layer in 0..self.n_layer {
            for (name, dims) in [
                ("attn_norm", &[embd][..]),
                ("attn_q", &[embd, embd]),
                ("attn_k", &[embd, kv]),
                ("attn_v", &[embd, kv]),
                ("attn_output", &[embd, embd]),
                ("ffn_norm", &[embd]),
                ("ffn_gate", &[embd, ff]),
                ("ffn_up", &[embd, ff]),
                ("ffn_down", &[ff, embd]),
            ] {
                add(format!("blk.{layer}.{name}.weight"), dims);
            }
        }
        out
    }

    fn metadata(&self) -> GgufWriter<'static> {
        let out = GgufWriter::new()
            .meta("general.architecture", "llama")
            .meta("general.name", "tiny")
            .meta("llama.context_length", self.context_length)
            .meta("llama.embedding_length", self.n_embd)
            .meta("llama.block_count", self.n_layer)
            .meta("llama.feed_forward_length", 2 * self.n_embd)
            .meta("llama.attention.head_count", Self::N_HEAD)
            .meta("llama.attention.head_count_kv", Self::N_HEAD_KV)
            .meta("llama.attention.layer_norm_rms_epsilon", 1e-6f32)
            .meta("llama.rope.freq_base", 10_000.0f32);
        vocabulary(out, Self::N_VOCAB)
    }
}

/// Adds a byte-level vocabulary of `n` tokens: ids 0 to 255 are bytes, then BOS, EOS, and words that no text gives.
pub(crate) fn vocabulary(out: GgufWriter<'static>, n: u32) -> GgufWriter<'static> {
    let mut texts: Vec<String> = (0..=255).map(byte_text).collect();
    texts.extend(["<bos>".into(), "<eos>".into()]);
    texts.extend((258..n).map(|id| format!("<word {id}>")));
    let is_control = |id: u32| id == 256 || id == 257;
    let types: Vec<i32> = (0..n).map(|id| if is_control(id) { 3 } else { 1 }).collect();
    out.meta("tokenizer.ggml.model", "gpt2")
        .meta("tokenizer.ggml.pre", "gpt-2")
        .meta("tokenizer.ggml.tokens", strings(texts.iter().map(String::as_str)))
        .meta("tokenizer.ggml.token_type", types)
        .meta("tokenizer.ggml.merges", strings([]))
        .meta("tokenizer.ggml.bos_token_id", 256u32)
        .meta("tokenizer.ggml.eos_token_id", 257u32)
        .meta("tokenizer.ggml.add_bos_token", Value::Bool(true))
}

fn strings<'a>(texts: impl IntoIterator<Item = &'a str>) -> Array {
    Array::String(StringArray::from_strings(texts).expect("a few texts"))
}

/// The character that stands for a byte in byte-level vocabularies: printable bytes for themselves, the others from U+0100 on.
fn byte_text(byte: u8) -> String {
    let is_printable = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let shifted = (0..byte).filter(|b| !is_printable(*b)).count() as u32;
    let code = if is_printable(byte) { u32::from(byte) } else { 256 + shifted };
    char::from_u32(code).expect("a character").to_string()
}

fn ones(n: u64) -> Vec<u8> {
    (0..n).flat_map(|_| 1.0f32.to_le_bytes()).collect()
}

/// Uniform, of a size that keeps activations near 1: rows of `n_in` elements.
fn random(n: u64, n_in: u64, seed: &mut u64) -> Vec<u8> {
    let scale = (3.0 / n_in as f32).sqrt();
    let mut next = || {
        *seed =
            seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let unit = (*seed >> 40) as f32 / (1u32 << 23) as f32 - 1.0;
        scale * unit
    };
    (0..n).flat_map(|_| next().to_le_bytes()).collect()
}
