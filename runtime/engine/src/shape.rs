//! Shapes: the hyperparameters of a model without its weights, enough to ask whether it will fit.
//!
//! A shape becomes the header of a GGUF file in memory, with the tensors that the architecture reads, in the types of a quantisation
//! recipe, and is planned by the code that plans files. Nothing about sizes is computed here a second time.

mod kinds;

pub use kinds::{DeltaNet, Experts, Gemma4};

use crate::{Error, Result};
use serde::Deserialize;
use std::io::Read;
use std::str::FromStr;
use tegula_gguf::{Gguf, GgufWriter};
use tegula_program::DType;

/// A shape file is a few hundred bytes; a longer one is another file.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// As many as the architectures take; checked before a table of tensors is made.
const N_LAYER_MAX: u32 = 4096;

const KNOWN: [(&str, &str); 18] = [
    ("gemma-3-270m", include_str!("../shapes/gemma-3-270m.json")),
    ("gemma-3-1b", include_str!("../shapes/gemma-3-1b.json")),
    ("gemma-3-4b", include_str!("../shapes/gemma-3-4b.json")),
    ("gemma-3-12b", include_str!("../shapes/gemma-3-12b.json")),
    ("gemma-3-27b", include_str!("../shapes/gemma-3-27b.json")),
    ("gemma-4-e2b", include_str!("../shapes/gemma-4-e2b.json")),
    ("llama-3.2-1b", include_str!("../shapes/llama-3.2-1b.json")),
    ("llama-3.2-3b", include_str!("../shapes/llama-3.2-3b.json")),
    ("llama-3.1-8b", include_str!("../shapes/llama-3.1-8b.json")),
    ("llama-3.1-70b", include_str!("../shapes/llama-3.1-70b.json")),
    ("mistral-7b-v0.3", include_str!("../shapes/mistral-7b-v0.3.json")),
    ("qwen2.5-0.5b", include_str!("../shapes/qwen2.5-0.5b.json")),
    ("qwen2.5-1.5b", include_str!("../shapes/qwen2.5-1.5b.json")),
    ("qwen2.5-7b", include_str!("../shapes/qwen2.5-7b.json")),
    ("qwen2.5-14b", include_str!("../shapes/qwen2.5-14b.json")),
    ("qwen2.5-32b", include_str!("../shapes/qwen2.5-32b.json")),
    ("qwen3.6-35b-a3b", include_str!("../shapes/qwen3.6-35b-a3b.json")),
    ("smollm2-135m", include_str!("../shapes/smollm2-135m.json")),
];

/// The names that [`Shape::find`] knows.
pub fn known_shapes() -> impl Iterator<Item = &'static str> {
    KNOWN.iter().map(|(name, _)| *name)
}

/// The types of a model's weights: a recipe that files are made by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Quant {
    /// The mix of that name: Q4_K, with Q6_K for the output matrix and, in half of the layers, for `attn_v` and `ffn_down`.
    #[default]
    Q4KM,
    /// The same with Q5_K.
    Q5KM,
    /// One type for every matrix; Q6_K for the output matrix where that type has fewer bits.
    Plain(DType),
}

impl Quant {
    /// `q4_k_m`, as [`Quant::from_str`] reads it.
    pub fn name(self) -> String {
        match self {
            Self::Q4KM => "q4_k_m".to_owned(),
            Self::Q5KM => "q5_k_m".to_owned(),
            Self::Plain(dtype) => dtype.name().to_ascii_lowercase(),
        }
    }

    /// The type of a matrix with rows of `n_in` elements. `layer` is `None` outside the layers.
    fn of_matrix(self, part: &str, layer: Option<u32>, shape: &Shape, n_in: u64) -> DType {
        self.of_tensor(part, layer, shape.n_layer, shape.tied_embeddings, n_in)
    }

    /// The same of a model with `n_layer` layers, whose embedding may be its output matrix too.
    pub(crate) fn of_tensor(
        self,
        part: &str,
        layer: Option<u32>,
        n_layer: u32,
        is_tied: bool,
        n_in: u64,
    ) -> DType {
        let is_output = part == "output" || (part == "token_embd" && is_tied);
        let is_better = match part {
            "attn_v" | "ffn_down" | "ffn_down_exps" | "ffn_down_shexp" => {
                layer.is_some_and(|layer| more_bits(layer, n_layer))
            }
            _ => is_output,
        };
        let wanted = match self {
            Self::Q4KM | Self::Q5KM if is_better => DType::Q6_K,
            // Values are a part of it, and queries and keys with them.
            Self::Q4KM if part == "attn_qkv" => DType::Q5_K,
            Self::Q5KM if part == "attn_qkv" => DType::Q6_K,
            Self::Q4KM => DType::Q4_K,
            Self::Q5KM => DType::Q5_K,
            Self::Plain(dtype) if is_output && bits(dtype) < bits(DType::Q6_K) => DType::Q6_K,
            Self::Plain(dtype) => dtype,
        };
        if n_in.is_multiple_of(wanted.block_len() as u64) {
            return wanted;
        }
        // Rows that are no whole number of large QuantBlocks get the next better type of small ones, else none.
        let smaller = match wanted {
            DType::Q4_K => DType::Q5_0,
            DType::Q5_K => DType::Q5_1,
            DType::Q2_K | DType::Q3_K | DType::IQ4_XS => DType::IQ4_NL,
            _ => DType::Q8_0,
        };
        if n_in.is_multiple_of(smaller.block_len() as u64) { smaller } else { DType::F16 }
    }
}

/// Bits of 256 elements.
fn bits(dtype: DType) -> usize {
    dtype.block_bytes() * 8 * 256 / dtype.block_len().max(1)
}

/// The layers whose errors cost most: the first and the last eighth, and every third of the others.
fn more_bits(layer: u32, n_layer: u32) -> bool {
    let eighth = n_layer / 8;
    layer < eighth || layer >= 7 * n_layer / 8 || (layer - eighth) % 3 == 2
}

impl FromStr for Quant {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let name = text.trim().to_ascii_lowercase();
        match name.as_str() {
            "q4_k_m" => return Ok(Self::Q4KM),
            "q5_k_m" => return Ok(Self::Q5KM),
            _ => {}
        }
        // Types of activations and numbers of no use for weights have no files.
        const NO_WEIGHTS: [DType; 7] =
            [DType::I8, DType::I16, DType::I32, DType::I64, DType::F64, DType::Q8_1, DType::Q8_K];
        let dtype = DType::from_name(&name).filter(|dtype| !NO_WEIGHTS.contains(dtype));
        dtype.map(Self::Plain).ok_or_else(|| Error::Option {
            name: "--quant",
            why: format!(
                "`{text}` is neither q4_k_m nor q5_k_m nor a type such as f16, q8_0, q6_k or q4_0"
            ),
        })
    }
}

/// The hyperparameters of a model. In a shape file this is one JSON object with these fields.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Shape {
    /// A name for people.
    pub name: String,
    /// Where the numbers are from.
    #[serde(default)]
    pub provenance: Option<String>,
    /// `general.architecture`.
    pub arch: String,
    /// Transformer layers.
    pub n_layer: u32,
    /// Elements of the residual stream.
    pub n_embd: u32,
    /// Query heads.
    pub n_head: u32,
    /// Key and value heads.
    pub n_head_kv: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Elements between the two halves of the MLP.
    pub n_ff: u32,
    /// Rows of the embedding.
    pub n_vocab: u32,
    /// Positions the model was trained on.
    pub n_ctx_train: u32,
    /// Whether the embedding is the output matrix too.
    #[serde(default)]
    pub tied_embeddings: bool,
    /// Positions that a query of a sliding-window layer sees.
    #[serde(default)]
    pub window: Option<u32>,
    /// Base of rope's frequencies.
    #[serde(default)]
    pub rope_base: Option<f32>,
    /// Whether the model has a divisor for each frequency.
    #[serde(default)]
    pub rope_freqs: bool,
    /// Epsilon of the norms.
    #[serde(default = "rms_eps")]
    pub rms_eps: f32,
    /// Elements of a head that rope turns, where not all.
    #[serde(default)]
    pub n_rot: Option<u32>,
    /// Experts in place of the MLP.
    #[serde(default)]
    pub experts: Option<Experts>,
    /// Gated delta nets in place of most attention.
    #[serde(default)]
    pub delta_net: Option<DeltaNet>,
    /// Gemma 4's kinds of layers.
    #[serde(default)]
    pub gemma4: Option<Gemma4>,
}

fn rms_eps() -> f32 {
    1e-5
}

impl Shape {
    /// A known shape by name, or one from a file where `name` ends in `.json`.
    ///
    /// # Errors
    /// [`Error::Option`] with the known names, or with what is wrong in the file; [`Error::Io`].
    pub fn find(name: &str) -> Result<Self> {
        if name.to_ascii_lowercase().ends_with(".json") {
            let io = |source| Error::Io { path: name.into(), source };
            let file = std::fs::File::open(name).map_err(io)?;
            let mut text = String::new();
            file.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(io)?;
            return Self::parse(&text).map_err(|why| fault(format!("{name}: {why}")));
        }
        let known = KNOWN.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        let Some((_, text)) = known else {
            let known: Vec<_> = known_shapes().collect();
            return Err(fault(format!(
                "`{name}` is none of the known shapes ({}), and no path of a .json file",
                known.join(", ")
            )));
        };
        Self::parse(text).map_err(fault)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let shape: Self = serde_json::from_str(text).map_err(|error| error.to_string())?;
        if !(1..=N_LAYER_MAX).contains(&shape.n_layer) {
            return Err(format!(
                "n_layer is {}; it must be from 1 to {N_LAYER_MAX}",
                shape.n_layer
            ));
        }
        Ok(shape)
    }

    /// A GGUF header with these hyperparameters and the tensors that the architecture reads.
    pub(crate) fn gguf(&self, quant: Quant) -> Result<Gguf> {
        let (header, file_len) = self.writer(quant).to_header()?;
        Ok(Gguf::from_header(&header, format!("shape {}", self.name), file_len)?)
    }

    /// The beginning of a GGUF file of this shape: its metadata but for a tokenizer, and its tensors without their data.
    pub fn writer(&self, quant: Quant) -> GgufWriter<'static> {
        let key = |part: &str| format!("{}.{part}", self.arch);
        let name = format!("{} ({})", self.name, quant.name());
        let mut out = GgufWriter::new()
            .meta("general.architecture", self.arch.as_str())
            .meta("general.name", name.as_str())
            .meta(key("block_count"), self.n_layer)
            .meta(key("context_length"), self.n_ctx_train)
            .meta(key("embedding_length"), self.n_embd)
            .meta(key("attention.head_count"), self.n_head)
            .meta(key("attention.head_count_kv"), self.n_head_kv)
            .meta(key("attention.key_length"), self.head_dim)
            .meta(key("attention.value_length"), self.head_dim)
            .meta(key("attention.layer_norm_rms_epsilon"), self.rms_eps);
        if let Some(window) = self.window {
            out = out.meta(key("attention.sliding_window"), window);
        }
        if let Some(base) = self.rope_base {
            out = out.meta(key("rope.freq_base"), base);
        }
        out = kinds::metadata(out, self);
        let mut tensors = Tensors { out, shape: self, quant };
        tensors.all();
        tensors.out
    }
}

fn fault(why: String) -> Error {
    Error::Option { name: "--shapes", why }
}

/// Writes the tensor table.
struct Tensors<'a> {
    out: GgufWriter<'static>,
    shape: &'a Shape,
    quant: Quant,
}

impl Tensors<'_> {
    fn all(&mut self) {
        let s = self.shape;
        let [n_embd, head_dim] = [s.n_embd, s.head_dim].map(u64::from);
        self.matrix("token_embd", None, n_embd, s.n_vocab.into());
        if s.rope_freqs {
            self.vector("rope_freqs.weight".into(), head_dim / 2);
        }
        if let Some(gemma4) = s.gemma4 {
            self.gemma4_inputs(gemma4);
        }
        for il in 0..s.n_layer {
            match (s.delta_net, s.gemma4) {
                (Some(delta_net), _) => self.hybrid_layer(il, delta_net),
                (None, Some(gemma4)) => self.gemma4_layer(il, gemma4),
                (None, None) => self.plain_layer(il),
            }
        }
        self.vector("output_norm.weight".into(), n_embd);
        if !s.tied_embeddings {
            self.matrix("output", None, n_embd, s.n_vocab.into());
        }
    }

    /// Attention and an MLP.
    fn plain_layer(&mut self, il: u32) {
        let s = self.shape;
        let [n_embd, head_dim] = [s.n_embd, s.head_dim].map(u64::from);
        let n_q = u64::from(s.n_head) * head_dim;
        let n_kv = u64::from(s.n_head_kv) * head_dim;
        let (gemma, biases) = (s.arch == "gemma3", s.arch == "qwen2");
        let name = |part: &str| format!("blk.{il}.{part}");
        self.vector(name("attn_norm.weight"), n_embd);
        for (part, n_rows) in [("attn_q", n_q), ("attn_k", n_kv), ("attn_v", n_kv)] {
            self.matrix(part, Some(il), n_embd, n_rows);
            if biases {
                self.vector(name(&format!("{part}.bias")), n_rows);
            }
        }
        self.matrix("attn_output", Some(il), n_q, n_embd);
        if gemma {
            self.vector(name("attn_q_norm.weight"), head_dim);
            self.vector(name("attn_k_norm.weight"), head_dim);
            self.vector(name("post_attention_norm.weight"), n_embd);
            self.vector(name("post_ffw_norm.weight"), n_embd);
        }
        self.vector(name("ffn_norm.weight"), n_embd);
        self.mlp(il, s.n_ff.into());
    }

    fn mlp(&mut self, il: u32, n_ff: u64) {
        let n_embd = self.shape.n_embd.into();
        self.matrix("ffn_gate", Some(il), n_embd, n_ff);
        self.matrix("ffn_up", Some(il), n_embd, n_ff);
        self.matrix("ffn_down", Some(il), n_ff, n_embd);
    }

    fn matrix(&mut self, part: &str, layer: Option<u32>, n_in: u64, n_rows: u64) {
        let name = match layer {
            Some(layer) => format!("blk.{layer}.{part}.weight"),
            None => format!("{part}.weight"),
        };
        let dtype = self.quant.of_matrix(part, layer, self.shape, n_in);
        self.out = std::mem::take(&mut self.out).tensor_shape(name, &[n_in, n_rows], dtype);
    }

    fn vector(&mut self, name: String, n: u64) {
        self.floats(name, &[n]);
    }

    /// A tensor that files keep in F32; sizes are innermost first.
    fn floats(&mut self, name: String, dims: &[u64]) {
        self.out = std::mem::take(&mut self.out).tensor_shape(name, dims, DType::F32);
    }

    /// The matrices of all experts, `[n_in, n_rows, n_expert]`, in the type that one matrix of the part would have.
    fn stack(&mut self, part: &str, il: u32, dims: &[u64; 3]) {
        let dtype = self.quant.of_matrix(part, Some(il), self.shape, dims[0]);
        let name = format!("blk.{il}.{part}_exps.weight");
        self.out = std::mem::take(&mut self.out).tensor_shape(name, dims, dtype);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// A shape that its own architecture refuses answers nothing; one with another number of parameters answers wrongly.
    #[test]
    fn known_shapes_are_models() {
        // Parameters in millions, as published, where that is known to three digits.
        let published = [
            ("gemma-3-270m", 268.1),
            ("gemma-3-1b", 999.9),
            ("llama-3.2-1b", 1235.8),
            ("llama-3.2-3b", 3212.7),
            ("llama-3.1-8b", 8030.3),
            ("llama-3.1-70b", 70553.7),
            ("mistral-7b-v0.3", 7248.0),
            ("qwen2.5-0.5b", 494.0),
            ("qwen2.5-1.5b", 1543.7),
            ("qwen2.5-7b", 7615.6),
            ("qwen2.5-14b", 14770.0),
            ("qwen2.5-32b", 32763.9),
            ("smollm2-135m", 134.5),
        ];
        for name in known_shapes() {
            for quant in ["q4_k_m", "q5_k_m", "q8_0", "q4_0", "f16"].map(|q| q.parse().unwrap()) {
                let gguf = Shape::find(name).unwrap().gguf(quant).unwrap();
                let model = tegula_arch::load(&gguf).unwrap();
                assert_eq!(model.unused_tensors(), [""; 0], "{name}");
                let millions = model.info().n_params as f64 / 1e6;
                if let Some((_, expected)) = published.iter().find(|(known, _)| *known == name) {
                    let off = (millions - expected).abs() / expected;
                    assert!(off < 1e-3, "{name}: {millions} where {expected} were published");
                }
            }
        }
    }

    /// The recipe stands for files that people have: here is one, byte for byte.
    #[test]
    fn the_recipe_is_that_of_files() {
        let folder = std::env::var_os("TEGULA_MODELS").map(std::path::PathBuf::from);
        let home = || Some(std::path::PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
        let folder = folder.or_else(|| Some(home()?.join("tegula/models"))).unwrap_or_default();
        let path = folder.join("gemma-3-270m-q4_k_m.gguf");
        if !path.exists() {
            eprintln!("SKIPPED: {} is not there", path.display());
            return;
        }
        let types = |gguf: &Gguf| -> BTreeMap<String, (DType, Vec<u64>)> {
            let fact = |t: &tegula_gguf::TensorInfo| (t.dtype(), t.dims().to_vec());
            gguf.tensors().iter().map(|t| (t.name().to_owned(), fact(t))).collect()
        };
        let file = Gguf::open(&path).unwrap();
        let shape = Shape::find("gemma-3-270m").unwrap().gguf(Quant::Q4KM).unwrap();
        assert_eq!(types(&shape), types(&file));
    }

    /// A shape with a typing error must not be planned as another.
    #[test]
    fn wrong_shapes_are_refused() {
        let good = KNOWN[0].1;
        assert!(Shape::parse(good).is_ok());
        for (from, to) in [
            ("\"n_layer\": 18", "\"n_layer\": 0"),
            ("\"n_layer\": 18", "\"n_layer\": 4000000000"),
            ("\"n_layer\": 18", "\"n_layers\": 18"),
            ("\"n_layer\": 18", "\"n_layer\": -1"),
            ("{", "["),
        ] {
            let text = good.replacen(from, to, 1);
            assert_ne!(text, good);
            assert!(Shape::parse(&text).is_err(), "{to}");
        }
        let huge = good.replace("\"n_vocab\": 262144", "\"n_vocab\": 4294967295");
        let gguf = Shape::parse(&huge).unwrap().gguf(Quant::Plain(DType::F16)).unwrap();
        assert!(tegula_arch::load(&gguf).is_err());
        let error = Shape::find("llama-9").unwrap_err().to_string();
        assert!(error.contains("llama-3.2-3b"), "{error}");
        for text in ["q5_k_l", "i32", "q8_1", "f64", ""] {
            assert!(text.parse::<Quant>().is_err(), "{text}");
        }
        assert_eq!("Q4_K_M".parse::<Quant>().unwrap(), Quant::Q4KM);
    }
}
