//! [`Model`]: a file's model, and the programs it can be run as.

use std::collections::HashSet;
use std::path::Path;

use tegula_gguf::{DType, Gguf};
use tegula_program::Program;

use crate::error::clip;
use crate::graph::{Graph, tensors_of};
use crate::hparams::Keys;
use crate::registry::{Architecture, find, known_architectures};
use crate::tensors::TensorTable;
use crate::{ArchError, TensorSpec};

/// What a model is, for people and for sizing. Where layers differ, numbers are the greatest of all layers.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ModelInfo {
    /// `general.architecture`.
    pub arch: &'static str,
    /// `general.name`, as the file has it: text from elsewhere.
    pub name: Option<String>,
    /// Transformer layers.
    pub n_layer: u32,
    /// Elements of the residual stream.
    pub n_embd: u32,
    /// Query heads.
    pub n_head: u32,
    /// Key and value heads.
    pub n_head_kv: u32,
    /// Elements of a key.
    pub head_dim_k: u32,
    /// Elements of a value.
    pub head_dim_v: u32,
    /// Elements between the two halves of the MLP.
    pub n_ff: u32,
    /// Tokens that have an embedding, and scores in a row of logits.
    pub n_vocab: u32,
    /// Positions the model was trained on. Files may say anything here, up to 2^32 - 1: size nothing by it.
    pub n_ctx_train: u32,
    /// Positions that a query of a sliding-window layer sees.
    pub window: Option<u32>,
    /// Whether the embedding is the output matrix too.
    pub tied_embeddings: bool,
    /// Elements of all tensors that the model reads.
    pub n_params: u64,
}

/// What a program gives back; one output of that name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Results {
    /// `logits` f32\[n_outputs, n_vocab\]: raw scores.
    #[default]
    Logits,
    /// `hidden` f32\[n_outputs, n_embd\]: the residual stream after the final norm.
    Hidden,
    /// `argmax` i32\[n_outputs\]: the token of the greatest score, the first of equals.
    Argmax,
    /// `top_ids` i32\[n_outputs, k\] and `top_logits` f32\[n_outputs, k\]: the k greatest scores.
    TopK(u32),
}

/// Choices that are not the model's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProgramOptions {
    /// Type of stored keys: F32, F16, BF16, Q8_0 or Q4_0, where a head is a whole number of QuantBlocks.
    pub dtype_k: DType,
    /// Type of stored values.
    pub dtype_v: DType,
    /// What the program gives back.
    pub results: Results,
    /// Positions that a sequence has at most; `None` where that is not known, which counts as all that the model was trained on.
    /// It matters to models whose rope is another one for long contexts.
    pub n_ctx: Option<u32>,
}

impl Default for ProgramOptions {
    fn default() -> Self {
        Self { dtype_k: DType::F16, dtype_v: DType::F16, results: Results::Logits, n_ctx: None }
    }
}

/// A model whose tensors are all there with the right shapes and types. It holds no data of the file.
#[derive(Debug)]
pub struct Model {
    architecture: Box<dyn Architecture>,
    info: ModelInfo,
    table: TensorTable,
    tensors: Vec<TensorSpec>,
}

/// Reads hyperparameters and checks tensors.
///
/// # Errors
/// Any [`ArchError`]; of several faults, the first.
pub fn load(gguf: &Gguf) -> Result<Model, ArchError> {
    let metadata = gguf.metadata();
    let table = TensorTable::new(gguf);
    let asked = metadata.get_str("general.architecture")?;
    let Some((arch, read)) = find(asked) else {
        let known = known_architectures().collect::<Vec<_>>().join(", ");
        let file = table.file();
        return Err(ArchError::UnknownArchitecture { file, arch: clip(asked), known });
    };
    let architecture = read(&Keys { arch, metadata, tensors: &table })?;

    // Heads of any length can be stored as F32, so that only the file's own faults show here.
    let options =
        ProgramOptions { dtype_k: DType::F32, dtype_v: DType::F32, ..ProgramOptions::default() };
    let tensors = tensors_of(&build(arch, &*architecture, &table, &options)?);
    let name = metadata.opt_str("general.name")?.map(clip);
    let info = info(arch, name, &*architecture, &tensors);
    Ok(Model { architecture, info, table, tensors })
}

impl Model {
    /// What the model is.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// The file it was read from; of a split model, the first.
    pub fn file(&self) -> &Path {
        self.table.path()
    }

    /// The tensors that its programs read, each once, in the order of their first use.
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// Tensors of the file that no program reads, by name. Not an error: files carry tensors for other uses.
    pub fn unused_tensors(&self) -> Vec<&str> {
        let used: HashSet<_> = self.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        self.table.names().filter(|name| !used.contains(name)).collect()
    }

    /// The verified program for these choices.
    ///
    /// # Errors
    /// [`ArchError::Program`] where the model cannot have them: a KV type that its heads do not fill, or more than
    /// `n_vocab` results.
    pub fn program(&self, options: &ProgramOptions) -> Result<Program, ArchError> {
        build(self.info.arch, &*self.architecture, &self.table, options)
    }
}

fn build(
    arch: &str,
    architecture: &dyn Architecture,
    table: &TensorTable,
    options: &ProgramOptions,
) -> Result<Program, ArchError> {
    let mut g = Graph::new(arch, table, options);
    let hidden = architecture.hidden(&mut g);
    g.ops.layer(None);
    if options.results == Results::Hidden {
        g.ops.output("hidden", hidden);
        return g.finish();
    }
    let logits = architecture.logits(&mut g, hidden);
    match options.results {
        Results::Logits | Results::Hidden => g.ops.output("logits", logits),
        Results::Argmax => {
            let ids = g.ops.argmax(logits);
            g.ops.output("argmax", ids);
        }
        Results::TopK(k) => {
            let (ids, values) = g.ops.top_k(logits, k);
            g.ops.output("top_ids", ids);
            g.ops.output("top_logits", values);
        }
    }
    g.finish()
}

fn info(
    arch: &'static str,
    name: Option<String>,
    architecture: &dyn Architecture,
    tensors: &[TensorSpec],
) -> ModelInfo {
    let hparams = architecture.hparams();
    let greatest = |of: fn(&crate::hparams::LayerHparams) -> u32| {
        hparams.layers.iter().map(of).max().unwrap_or(0)
    };
    // The shapes are those of the file's tensors, whose products the reader has checked.
    let n_elements = |tensor: &TensorSpec| tensor.dims.iter().product::<u64>();
    ModelInfo {
        arch,
        name,
        n_layer: u32::try_from(hparams.layers.len()).unwrap_or(u32::MAX),
        n_embd: hparams.n_embd,
        n_head: greatest(|layer| layer.n_head),
        n_head_kv: greatest(|layer| layer.n_head_kv),
        head_dim_k: hparams.head_dim_k,
        head_dim_v: hparams.head_dim_v,
        n_ff: greatest(|layer| layer.n_ff),
        n_vocab: hparams.n_vocab,
        n_ctx_train: hparams.n_ctx_train,
        window: architecture.window(),
        tied_embeddings: !tensors.iter().any(|tensor| tensor.name == "output.weight"),
        n_params: tensors.iter().map(n_elements).fold(0, u64::saturating_add),
    }
}
