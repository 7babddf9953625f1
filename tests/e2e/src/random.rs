//! Models of random shape, with weights of random types: for properties that must hold for every model.
//!
//! A file is written either with its weights, which have to be small then, or as its header alone in a sparse file of the right length:
//! enough for a plan, of any size, without a byte of disk.

use crate::tiny;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tegula_gguf::{DType, GgufWriter};

/// A model's shape.
#[derive(Debug, Clone, PartialEq)]
pub struct RandomModel {
    /// `llama`, `qwen2` or `gemma3`.
    pub arch: &'static str,
    /// Layers.
    pub n_layer: u32,
    /// Elements of the residual stream.
    pub n_embd: u32,
    /// Query heads.
    pub n_head: u32,
    /// Key and value heads; divides `n_head`.
    pub n_head_kv: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Elements between the halves of the MLP.
    pub n_ff: u32,
    /// Tokens; at least 258.
    pub n_vocab: u32,
    /// What the file says the model was trained on.
    pub n_ctx_train: u32,
    /// Whether the embedding is the output matrix too.
    pub tied: bool,
    /// Types that matrices take in turn; one whose rows are no whole number of QuantBlocks is F16 instead.
    pub dtypes: Vec<DType>,
    /// Of the weights.
    pub seed: u64,
}

impl Default for RandomModel {
    fn default() -> Self {
        Self {
            arch: "llama",
            n_layer: 2,
            n_embd: 64,
            n_head: 4,
            n_head_kv: 2,
            head_dim: 32,
            n_ff: 128,
            n_vocab: 258,
            n_ctx_train: 4096,
            tied: true,
            dtypes: vec![DType::F32],
            seed: 1,
        }
    }
}

/// A tensor of a model: name, dimensions (elements of a row first) and type.
pub type TensorShape = (String, Vec<u64>, DType);

impl RandomModel {
    /// Every tensor, in file order.
    pub fn tensors(&self) -> Vec<TensorShape> {
        let mut out = Tensors { dtypes: &self.dtypes, all: Vec::new() };
        let [n_embd, n_ff, head_dim] = [self.n_embd, self.n_ff, self.head_dim].map(u64::from);
        let n_q = u64::from(self.n_head) * head_dim;
        let n_kv = u64::from(self.n_head_kv) * head_dim;
        out.matrix("token_embd.weight".into(), n_embd, self.n_vocab.into());
        for il in 0..self.n_layer {
            let name = |part: &str| format!("blk.{il}.{part}");
            out.vector(name("attn_norm.weight"), n_embd);
            for (part, n_rows) in [("attn_q", n_q), ("attn_k", n_kv), ("attn_v", n_kv)] {
                out.matrix(name(&format!("{part}.weight")), n_embd, n_rows);
                if self.arch == "qwen2" {
                    out.vector(name(&format!("{part}.bias")), n_rows);
                }
            }
            out.matrix(name("attn_output.weight"), n_q, n_embd);
            if self.arch == "gemma3" {
                out.vector(name("attn_q_norm.weight"), head_dim);
                out.vector(name("attn_k_norm.weight"), head_dim);
                out.vector(name("post_attention_norm.weight"), n_embd);
                out.vector(name("post_ffw_norm.weight"), n_embd);
            }
            out.vector(name("ffn_norm.weight"), n_embd);
            out.matrix(name("ffn_gate.weight"), n_embd, n_ff);
            out.matrix(name("ffn_up.weight"), n_embd, n_ff);
            out.matrix(name("ffn_down.weight"), n_ff, n_embd);
        }
        out.vector("output_norm.weight".into(), n_embd);
        if !self.tied {
            out.matrix("output.weight".into(), n_embd, self.n_vocab.into());
        }
        out.all
    }

    /// Bytes of a row and rows of each tensor; a vector is one row.
    pub fn rows(&self) -> BTreeMap<String, (u64, u64)> {
        let rows = |(name, dims, dtype): TensorShape| {
            let bytes = dtype.row_bytes(dims[0]).expect("whole QuantBlocks");
            (name, (bytes, dims.get(1).copied().unwrap_or(1)))
        };
        self.tensors().into_iter().map(rows).collect()
    }

    /// Bytes of all tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.rows().values().map(|(bytes, n)| bytes * n).sum()
    }

    /// Bytes of the keys or values of one token in one layer.
    pub fn kv_row_bytes(&self, dtype: DType) -> u64 {
        let n = u64::from(self.n_head_kv) * u64::from(self.head_dim);
        dtype.row_bytes(n).expect("whole QuantBlocks")
    }

    /// Writes the model with its weights.
    pub fn write(&self, folder: &Path) -> PathBuf {
        let path = folder.join("random.gguf");
        let mut random = Random(self.seed);
        let mut out = self.metadata();
        for (name, dims, dtype) in self.tensors() {
            let data = random.tensor(&dims, dtype);
            out = out.tensor(name, &dims, dtype, data);
        }
        fs::write(&path, out.to_bytes().expect("a valid file")).expect("a folder to write to");
        path
    }

    /// Writes the header and leaves the rest of the file a hole.
    pub fn write_sparse(&self, folder: &Path) -> PathBuf {
        let path = folder.join("sparse.gguf");
        let mut out = self.metadata();
        for (name, dims, dtype) in self.tensors() {
            out = out.tensor_shape(name, &dims, dtype);
        }
        let (header, len) = out.to_header().expect("a valid header");
        fs::write(&path, header).expect("a folder to write to");
        let file = fs::OpenOptions::new().write(true).open(&path).expect("the file just written");
        file.set_len(len).expect("a file system with holes");
        path
    }

    fn metadata(&self) -> GgufWriter<'static> {
        let key = |part: &str| format!("{}.{part}", self.arch);
        let out = GgufWriter::new()
            .meta("general.architecture", self.arch)
            .meta("general.name", "random")
            .meta(key("context_length"), self.n_ctx_train)
            .meta(key("embedding_length"), self.n_embd)
            .meta(key("block_count"), self.n_layer)
            .meta(key("feed_forward_length"), self.n_ff)
            .meta(key("attention.head_count"), self.n_head)
            .meta(key("attention.head_count_kv"), self.n_head_kv)
            .meta(key("attention.key_length"), self.head_dim)
            .meta(key("attention.value_length"), self.head_dim)
            .meta(key("attention.layer_norm_rms_epsilon"), 1e-6f32)
            .meta(key("attention.sliding_window"), 32u32)
            .meta(key("rope.freq_base"), 10_000.0f32);
        tiny::vocabulary(out, self.n_vocab)
    }
}

struct Tensors<'a> {
    dtypes: &'a [DType],
    all: Vec<TensorShape>,
}

impl Tensors<'_> {
    fn matrix(&mut self, name: String, n_in: u64, n_rows: u64) {
        let wanted = self.dtypes[self.all.len() % self.dtypes.len()];
        let fits = n_in.is_multiple_of(wanted.block_len() as u64);
        self.all.push((name, vec![n_in, n_rows], if fits { wanted } else { DType::F16 }));
    }

    fn vector(&mut self, name: String, n: u64) {
        self.all.push((name, vec![n], DType::F32));
    }
}

/// A linear congruential generator: the same weights on every machine.
struct Random(u64);

impl Random {
    fn byte(&mut self) -> u8 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 56) as u8
    }

    /// Uniform from -1 to 1.
    fn unit(&mut self) -> f32 {
        let word = u32::from_le_bytes([self.byte(), self.byte(), self.byte(), 0]);
        word as f32 / (1u32 << 23) as f32 - 1.0
    }

    /// Weights that keep activations near 1; vectors near 1, as norms have them.
    fn tensor(&mut self, dims: &[u64], dtype: DType) -> Vec<u8> {
        let n: u64 = dims.iter().product();
        if dims.len() == 1 {
            return (0..n).flat_map(|_| (1.0 + self.unit() / 8.0).to_le_bytes()).collect();
        }
        let scale = (3.0 / dims[0] as f32).sqrt();
        match dtype {
            DType::F32 => (0..n).flat_map(|_| (scale * self.unit()).to_le_bytes()).collect(),
            DType::F16 => (0..n).flat_map(|_| f16(scale * self.unit()).to_le_bytes()).collect(),
            DType::BF16 => {
                let high = |x: f32| [x.to_le_bytes()[2], x.to_le_bytes()[3]];
                (0..n).flat_map(|_| high(scale * self.unit())).collect()
            }
            quantised => self.quantised(n, scale, quantised),
        }
    }

    /// Random codes under one scale; the divisor is about the greatest code.
    fn quantised(&mut self, n: u64, scale: f32, dtype: DType) -> Vec<u8> {
        // First byte of each f16 in a QuantBlock, and what it is worth.
        let scales: &[(usize, f32)] = match dtype {
            DType::Q4_0 => &[(0, 8.0)],
            DType::Q4_1 => &[(0, 8.0), (2, -1.0)],
            DType::Q5_0 => &[(0, 16.0)],
            DType::Q8_0 => &[(0, 127.0)],
            DType::Q4_K => &[(0, 480.0), (2, 64.0)],
            DType::Q5_K => &[(0, 960.0), (2, 64.0)],
            DType::Q6_K => &[(208, 4096.0)],
            other => panic!("no random weights of type {}", other.name()),
        };
        let block_bytes = dtype.block_bytes();
        let n_blocks = n as usize / dtype.block_len();
        let mut out: Vec<u8> = (0..n_blocks * block_bytes).map(|_| self.byte()).collect();
        for block in out.chunks_exact_mut(block_bytes) {
            for (at, divisor) in scales {
                block[*at..at + 2].copy_from_slice(&f16(scale / divisor).to_le_bytes());
            }
        }
        out
    }
}

/// The bits of the f16 next to zero from `x`, for magnitudes from 2^-14 to 65504; smaller ones become zero.
fn f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let exponent = (bits >> 23 & 0xff) as i32 - 127 + 15;
    if exponent <= 0 {
        return sign;
    }
    sign | (exponent as u16) << 10 | (bits >> 13 & 0x3ff) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Weights that are zero, or no numbers, would make every comparison of logits an empty one.
    #[test]
    fn weights_are_of_the_size_that_was_meant() {
        for (bits, value) in [(0x3c00, 1.0), (0xc000, -2.0), (0x2e66, 0.1), (0, 1e-6)] {
            assert_eq!(f16(value), bits, "{value}");
        }
        let mut random = Random(7);
        let units: Vec<f32> = (0..1000).map(|_| random.unit()).collect();
        assert!(units.iter().all(|x| (-1.0..=1.0).contains(x)));
        assert!(units.iter().sum::<f32>().abs() < 60.0);
        let model = RandomModel { tied: false, ..RandomModel::default() };
        let by_rows: u64 = model.rows().values().map(|(bytes, n)| bytes * n).sum();
        let elements: u64 = model.tensors().iter().map(|(_, d, _)| d.iter().product::<u64>()).sum();
        assert_eq!(by_rows, 4 * elements);
    }
}
