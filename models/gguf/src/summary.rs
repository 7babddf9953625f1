//! [`Summary`]: what a model is, in the few numbers a person asks for first.

use std::fmt;

use tegula_quant::DType;

use crate::{Gguf, GgufError};

/// The tensors of one type in a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DTypeShare {
    /// The type.
    pub dtype: DType,
    /// Tensors of the type.
    pub n_tensors: u64,
    /// Elements of those tensors.
    pub n_params: u64,
    /// Bytes of those tensors.
    pub n_bytes: u64,
}

/// Facts about a model for people and tools; `Display` prints them on a few lines.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Summary {
    /// `general.architecture`.
    pub architecture: Option<String>,
    /// `general.name`.
    pub name: Option<String>,
    /// `<architecture>.context_length`: tokens the model was trained with, as the file claims.
    pub n_ctx_train: Option<u64>,
    /// `<architecture>.block_count`.
    pub n_layer: Option<u64>,
    /// `<architecture>.embedding_length`.
    pub n_embd: Option<u64>,
    /// Elements of `tokenizer.ggml.tokens`.
    pub n_vocab: Option<u64>,
    /// Elements of all tensors.
    pub n_params: u64,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Bytes of all files.
    pub file_bytes: u64,
    /// Number of tensors.
    pub n_tensors: u64,
    /// Number of files.
    pub n_shards: u64,
    /// Number of metadata keys.
    pub n_kv: u64,
    /// GGUF version of the first file.
    pub version: u32,
    /// Types in use, the one with most bytes first.
    pub dtypes: Vec<DTypeShare>,
}

impl Gguf {
    /// Gathers the facts.
    ///
    /// # Errors
    /// [`GgufError::WrongType`] and [`GgufError::OutOfRange`] where one of the keys used has an unusable value.
    pub fn summary(&self) -> Result<Summary, GgufError> {
        let metadata = self.metadata();
        let architecture = metadata.opt_str("general.architecture")?.map(str::to_owned);
        let of_arch = |key: &str| match &architecture {
            Some(architecture) => metadata.opt_u64(&format!("{architecture}.{key}")),
            None => Ok(None),
        };
        let dtypes = self.dtype_shares();
        // All tensors lie in files without overlap; the sums of files that fit on disks fit in 64 bits.
        let sum =
            |part: fn(&DTypeShare) -> u64| dtypes.iter().map(part).fold(0, u64::saturating_add);
        Ok(Summary {
            name: metadata.opt_str("general.name")?.map(str::to_owned),
            n_ctx_train: of_arch("context_length")?,
            n_layer: of_arch("block_count")?,
            n_embd: of_arch("embedding_length")?,
            n_vocab: metadata.opt_strings("tokenizer.ggml.tokens")?.map(|t| t.len() as u64),
            n_params: sum(|share| share.n_params),
            tensor_bytes: sum(|share| share.n_bytes),
            file_bytes: self
                .shards()
                .iter()
                .fold(0, |sum, shard| sum.saturating_add(shard.file_len)),
            n_tensors: self.tensors().len() as u64,
            n_shards: self.shards().len() as u64,
            n_kv: metadata.len() as u64,
            version: self.shards().first().map_or(0, |shard| shard.version),
            architecture,
            dtypes,
        })
    }

    fn dtype_shares(&self) -> Vec<DTypeShare> {
        let mut shares: Vec<DTypeShare> = Vec::new();
        for tensor in self.tensors() {
            let dtype = tensor.dtype();
            let index =
                shares.iter().position(|share| share.dtype == dtype).unwrap_or(shares.len());
            if index == shares.len() {
                shares.push(DTypeShare { dtype, n_tensors: 0, n_params: 0, n_bytes: 0 });
            }
            if let Some(share) = shares.get_mut(index) {
                share.n_tensors += 1;
                share.n_params = share.n_params.saturating_add(tensor.n_elements());
                share.n_bytes = share.n_bytes.saturating_add(tensor.n_bytes());
            }
        }
        shares.sort_by_key(|share| (std::cmp::Reverse(share.n_bytes), share.dtype));
        shares
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text =
            |text: &Option<String>| text.as_ref().map_or("-".to_owned(), |t| format!("{t:?}"));
        let number = |n: Option<u64>| n.map_or("-".to_owned(), |n| n.to_string());
        writeln!(f, "name          {}", text(&self.name))?;
        writeln!(f, "architecture  {}", text(&self.architecture))?;
        writeln!(f, "parameters    {} in {} tensors", self.n_params, self.n_tensors)?;
        writeln!(f, "n_layer       {}", number(self.n_layer))?;
        writeln!(f, "n_embd        {}", number(self.n_embd))?;
        writeln!(f, "n_vocab       {}", number(self.n_vocab))?;
        writeln!(f, "n_ctx_train   {}", number(self.n_ctx_train))?;
        let (files, s) = (self.n_shards, if self.n_shards == 1 { "" } else { "s" });
        writeln!(f, "size          {} bytes in {files} file{s}", self.file_bytes)?;
        writeln!(f, "format        GGUF {}, {} metadata keys", self.version, self.n_kv)?;
        for share in &self.dtypes {
            let (dtype, n) = (share.dtype, share.n_tensors);
            writeln!(f, "  {dtype:<8} {n:>6} tensors {:>16} bytes", share.n_bytes)?;
        }
        Ok(())
    }
}
