//! A model file as far as it can be used without a device: architecture, tokenizer, chat template.

use crate::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tegula_gguf::Gguf;
use tegula_tokenizer::{ChatTemplate, TemplateError, Tokenizer, Vocab};

/// An opened model file: everything but its weights.
#[derive(Debug)]
pub struct ModelFile {
    path: PathBuf,
    gguf: Gguf,
    arch: tegula_arch::Model,
    tokenizer: Arc<Tokenizer>,
    /// The vocabulary's templates without its tokens.
    templates: Vocab,
}

impl ModelFile {
    /// Reads headers, hyperparameters, vocabulary and template; of a split model, any of its files may be named.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let gguf = Gguf::open(&path)?;
        let arch = tegula_arch::load(&gguf)?;
        let vocab = Vocab::from_gguf(gguf.metadata())?;
        let tokenizer = Arc::new(Tokenizer::new(&vocab)?);
        let templates = Vocab {
            arch: vocab.arch,
            chat_template: vocab.chat_template,
            named_chat_templates: vocab.named_chat_templates,
            ..Vocab::default()
        };
        let rows = u64::from(arch.info().n_vocab);
        if tokenizer.n_vocab() as u64 != rows {
            let tokenizer = tokenizer.n_vocab() as u64;
            return Err(Error::VocabMismatch { path, tokenizer, rows });
        }
        Ok(Self { path, gguf, arch, tokenizer, templates })
    }

    /// The file named at [`ModelFile::open`].
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Metadata and tensor table.
    pub fn gguf(&self) -> &Gguf {
        &self.gguf
    }

    /// The architecture and its hyperparameters.
    pub fn arch(&self) -> &tegula_arch::Model {
        &self.arch
    }

    /// The tokenizer; share it freely.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Compiles the chat template: the file's own, or a built-in one for the few architectures that have it; its origin tells
    /// which. `None` if the model has neither, as base models do. A broken template is an error only here, since text can be continued without it.
    pub fn chat_template(&self) -> Result<Option<ChatTemplate>, TemplateError> {
        ChatTemplate::of_model(&self.templates, &self.tokenizer, None)
    }
}
