//! Small files made in memory: metadata and tensors of zeros, changed one fact at a time.

use tegula_arch::{ArchError, Model, load};
use tegula_gguf::{DType, Gguf, GgufWriter, Value};

/// What a file will hold; shapes are outermost first.
#[derive(Clone)]
pub(crate) struct Tiny {
    arch: &'static str,
    metadata: Vec<(String, Value)>,
    tensors: Vec<(String, Vec<u64>, DType)>,
}

const N_VOCAB: u64 = 16;
const N_EMBD: u64 = 32;
const N_HEAD: u64 = 4;
const N_HEAD_KV: u64 = 2;
const N_FF: u64 = 48;

impl Tiny {
    /// What all architectures have; heads of `head_dim`.
    fn new(arch: &'static str, n_layer: u64, head_dim: u64) -> Self {
        let empty = Self { arch, metadata: Vec::new(), tensors: Vec::new() };
        let mut tiny = empty
            .meta("general.architecture", arch)
            .meta("block_count", n_layer as u32)
            .meta("embedding_length", N_EMBD as u32)
            .meta("context_length", 128u32)
            .meta("feed_forward_length", N_FF as u32)
            .meta("attention.head_count", N_HEAD as u32)
            .meta("attention.head_count_kv", N_HEAD_KV as u32)
            .meta("attention.layer_norm_rms_epsilon", 1e-5f32)
            .tensor("token_embd.weight", &[N_VOCAB, N_EMBD], DType::Q8_0)
            .tensor("output_norm.weight", &[N_EMBD], DType::F32);
        for il in 0..n_layer {
            let (q, kv) = (N_HEAD * head_dim, N_HEAD_KV * head_dim);
            tiny = tiny
                .layer_tensor(il, "attn_norm.weight", &[N_EMBD], DType::F32)
                .layer_tensor(il, "attn_q.weight", &[q, N_EMBD], DType::F16)
                .layer_tensor(il, "attn_k.weight", &[kv, N_EMBD], DType::F16)
                .layer_tensor(il, "attn_v.weight", &[kv, N_EMBD], DType::F16)
                .layer_tensor(il, "attn_output.weight", &[N_EMBD, q], DType::F16)
                .layer_tensor(il, "ffn_norm.weight", &[N_EMBD], DType::F32)
                .layer_tensor(il, "ffn_gate.weight", &[N_FF, N_EMBD], DType::F16)
                .layer_tensor(il, "ffn_up.weight", &[N_FF, N_EMBD], DType::F16)
                .layer_tensor(il, "ffn_down.weight", &[N_EMBD, N_FF], DType::F16);
        }
        tiny
    }

    pub(crate) fn llama(n_layer: u64) -> Self {
        let tiny = Self::new("llama", n_layer, N_EMBD / N_HEAD);
        tiny.tensor("output.weight", &[N_VOCAB, N_EMBD], DType::Q8_0)
    }

    pub(crate) fn qwen2(n_layer: u64) -> Self {
        let head_dim = N_EMBD / N_HEAD;
        let mut tiny = Self::new("qwen2", n_layer, head_dim);
        for il in 0..n_layer {
            tiny = tiny
                .layer_tensor(il, "attn_q.bias", &[N_HEAD * head_dim], DType::F32)
                .layer_tensor(il, "attn_k.bias", &[N_HEAD_KV * head_dim], DType::F32)
                .layer_tensor(il, "attn_v.bias", &[N_HEAD_KV * head_dim], DType::F32);
        }
        tiny.tensor("output.weight", &[N_VOCAB, N_EMBD], DType::Q8_0)
    }

    /// Tied embeddings, heads of 16.
    pub(crate) fn gemma3(n_layer: u64) -> Self {
        let head_dim = 16;
        let mut tiny = Self::new("gemma3", n_layer, head_dim)
            .meta("attention.key_length", head_dim as u32)
            .meta("attention.value_length", head_dim as u32)
            .meta("attention.sliding_window", 24u32)
            .meta("rope.freq_base", 1e6f32);
        for il in 0..n_layer {
            tiny = tiny
                .layer_tensor(il, "attn_q_norm.weight", &[head_dim], DType::F32)
                .layer_tensor(il, "attn_k_norm.weight", &[head_dim], DType::F32)
                .layer_tensor(il, "post_attention_norm.weight", &[N_EMBD], DType::F32)
                .layer_tensor(il, "post_ffw_norm.weight", &[N_EMBD], DType::F32);
        }
        tiny
    }

    fn full(&self, key: &str) -> String {
        if key.starts_with("general.") { key.into() } else { format!("{}.{key}", self.arch) }
    }

    /// Sets a key of the architecture, or a `general.` one.
    pub(crate) fn meta(mut self, key: &str, value: impl Into<Value>) -> Self {
        self = self.without_meta(key);
        self.metadata.push((self.full(key), value.into()));
        self
    }

    pub(crate) fn without_meta(mut self, key: &str) -> Self {
        let key = self.full(key);
        self.metadata.retain(|(known, _)| *known != key);
        self
    }

    /// Sets a tensor.
    pub(crate) fn tensor(mut self, name: &str, dims: &[u64], dtype: DType) -> Self {
        self = self.without_tensor(name);
        self.tensors.push((name.into(), dims.to_vec(), dtype));
        self
    }

    fn layer_tensor(self, il: u64, part: &str, dims: &[u64], dtype: DType) -> Self {
        self.tensor(&format!("blk.{il}.{part}"), dims, dtype)
    }

    pub(crate) fn without_tensor(mut self, name: &str) -> Self {
        self.tensors.retain(|(known, ..)| known != name);
        self
    }

    /// The model, through a whole file.
    pub(crate) fn load(&self) -> Result<Model, ArchError> {
        let mut writer = GgufWriter::new();
        for (key, value) in &self.metadata {
            writer = writer.meta(key.clone(), value.clone());
        }
        for (name, dims, dtype) in &self.tensors {
            let n_rows: u64 = dims.iter().rev().skip(1).product();
            let n_bytes = n_rows * dtype.row_bytes(*dims.last().unwrap()).unwrap();
            let file_dims: Vec<u64> = dims.iter().rev().copied().collect();
            writer = writer.tensor(name, &file_dims, *dtype, vec![0; n_bytes as usize]);
        }
        load(&Gguf::parse(&writer.to_bytes().unwrap(), "tiny.gguf").unwrap())
    }
}
