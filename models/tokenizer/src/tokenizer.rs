//! [`Tokenizer`]: a checked vocabulary that encodes.

use std::collections::BTreeSet;

use crate::bpe::Bpe;
use crate::cache::TEXT_BYTES_MIN;
use crate::merge::Merger;
use crate::partition::{Fragment, Partition};
use crate::pretok::{self, PreSpec};
use crate::special::{self, TokenAttr};
use crate::spm::Spm;
use crate::texts::TextMap;
use crate::unigram::Unigram;
use crate::wordpiece::WordPiece;
use crate::{SpecialIds, Texts, TokenId, TokenizerError, Vocab, decode};

/// Names of `tokenizer.ggml.model` that are implemented.
const KNOWN_MODELS: &str = "gpt2, llama, gemma4, bert, t5";
/// Ids are u32 and the last one means "no token" inside.
const N_TOKENS_MAX: usize = u32::MAX as usize / 2;

/// What [`Tokenizer::encode`] does beside encoding text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Add BOS, EOS or a separator where the vocabulary asks for it.
    pub add_special: bool,
    /// Read text such as `<|im_start|>` as the control token. Off for text from users:
    /// with it, they could forge turns.
    pub parse_special: bool,
}

#[derive(Debug)]
enum Algorithm {
    Bpe(Bpe),
    Spm(Box<Spm>),
    WordPiece(WordPiece),
    Unigram(Box<Unigram>),
}

/// Defaults of a tokenizer model, before the file's own settings.
struct Defaults {
    ids: SpecialIds,
    add_bos: bool,
    add_eos: bool,
    add_sep: bool,
    add_space_prefix: bool,
    clean_spaces: bool,
}

/// Turns text into token ids and back.
///
/// Immutable after construction; share it between threads freely.
#[derive(Debug)]
pub struct Tokenizer {
    pub(crate) texts: Texts,
    map: TextMap,
    pub(crate) attrs: Vec<TokenAttr>,
    pub(crate) pieces: Texts,
    pub(crate) ids: SpecialIds,
    eog: BTreeSet<TokenId>,
    partition: Partition,
    algorithm: Algorithm,
    pre: String,
    pre_is_assumed: bool,
    pub(crate) add_bos: bool,
    pub(crate) add_eos: bool,
    pub(crate) add_space_prefix: bool,
    pub(crate) clean_spaces: bool,
}

impl Tokenizer {
    /// Checks a vocabulary and builds its look-up tables.
    ///
    /// # Errors
    /// Every way in which the vocabulary contradicts itself or asks for something that is not
    /// implemented has its own [`TokenizerError`]. No input panics.
    pub fn new(vocab: &Vocab) -> Result<Self, TokenizerError> {
        check_counts(vocab)?;
        let texts = named_texts(&vocab.tokens);
        let map =
            TextMap::new(&texts).map_err(|(first, second)| TokenizerError::DuplicateToken {
                text: String::from_utf8_lossy(texts.of(first)).chars().take(80).collect(),
                first,
                second,
            })?;
        let spec = pre_spec(vocab)?;
        let defaults = defaults(&vocab.model, spec);
        let ids = checked_ids(vocab.special, defaults.ids, texts.len())?;
        let add_bos = vocab.add_bos.unwrap_or(defaults.add_bos) || vocab.model == "gemma4";
        let add_eos = vocab.add_eos.unwrap_or(defaults.add_eos);
        let add_sep = vocab.add_sep.unwrap_or(defaults.add_sep);
        check_added("tokenizer.ggml.add_bos_token", "bos", add_bos, ids.bos)?;
        check_added("tokenizer.ggml.add_eos_token", "eos", add_eos, ids.eos)?;
        check_added("tokenizer.ggml.add_sep_token", "sep", add_sep, ids.sep)?;
        let mut specials = special::decide(&texts, &map, vocab.token_types.as_deref(), ids);
        let partition = Partition::new(&texts, &specials.attrs)?;
        let add_space_prefix = vocab.add_space_prefix.unwrap_or(defaults.add_space_prefix);
        let algorithm = algorithm(vocab, &texts, &map, spec, &specials, add_space_prefix)?;
        let pieces =
            decode::pieces(&texts, &specials.attrs, matches!(vocab.model.as_str(), "gpt2"));
        let pre = vocab.pre.as_deref().unwrap_or("default");
        special::mark_strips(&mut specials, &texts, &map, pre, &vocab.arch, &vocab.name);
        Ok(Self {
            pre: pre.to_owned(),
            pre_is_assumed: vocab.pre.is_none() && vocab.model == "gpt2",
            texts,
            map,
            attrs: specials.attrs,
            pieces,
            ids: specials.ids,
            eog: specials.eog,
            partition,
            algorithm,
            add_bos,
            add_eos,
            add_space_prefix,
            clean_spaces: defaults.clean_spaces,
        })
    }

    /// The tokens of `text`.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Vec<TokenId> {
        // A token of natural text has about four bytes.
        let mut out = Vec::with_capacity(text.len() / 4 + 2);
        self.encode_into(text, options, &mut out);
        out
    }

    /// Appends the tokens of `text` to `out`.
    pub fn encode_into(&self, text: &str, options: EncodeOptions, out: &mut Vec<TokenId>) {
        let is_bert = matches!(self.algorithm, Algorithm::WordPiece(_));
        let add = |wanted: bool, id: Option<TokenId>| id.filter(|_| wanted && options.add_special);
        out.extend(add(self.add_bos || is_bert, self.ids.bos));
        let mut merger = Merger::default();
        if text.len() >= TEXT_BYTES_MIN {
            merger.cache.enable();
        }
        let mut after_special = true;
        self.partition.split(text, &self.attrs, options.parse_special, &mut |fragment| {
            match fragment {
                Fragment::Token(id) => out.push(id),
                Fragment::Text(text) => self.encode_text(text, after_special, &mut merger, out),
            }
            after_special = matches!(fragment, Fragment::Token(_));
        });
        if is_bert {
            out.extend(add(true, self.ids.sep));
        } else {
            out.extend(add(self.add_eos, self.ids.eos));
        }
    }

    /// The tokens of a rendered chat prompt: special text is parsed, and BOS and EOS are added where
    /// the vocabulary asks for them unless the template wrote them already.
    pub fn encode_prompt(&self, prompt: &str) -> Vec<TokenId> {
        let options = EncodeOptions { add_special: false, parse_special: true };
        let body = self.encode(prompt, options);
        let missing = |wanted: bool, id: Option<TokenId>, there: Option<&TokenId>| {
            id.filter(|id| wanted && there != Some(id))
        };
        let bos = missing(self.add_bos, self.ids.bos, body.first());
        let eos = missing(self.add_eos, self.ids.eos, body.last());
        bos.into_iter().chain(body.iter().copied()).chain(eos).collect()
    }

    fn encode_text(
        &self,
        text: &str,
        after_special: bool,
        merger: &mut Merger,
        out: &mut Vec<TokenId>,
    ) {
        let (texts, map, unk) = (&self.texts, &self.map, self.ids.unk);
        match &self.algorithm {
            Algorithm::Bpe(bpe) => bpe.encode(texts, map, unk, text, merger, out),
            Algorithm::Spm(spm) => {
                let prefix = if self.add_space_prefix && after_special { "▁" } else { "" };
                let mut escaped = String::with_capacity(text.len() + text.len() / 4 + prefix.len());
                escaped.push_str(prefix);
                for (i, part) in text.split(' ').enumerate() {
                    if i > 0 {
                        escaped.push('▁');
                    }
                    escaped.push_str(part);
                }
                spm.encode(texts, map, unk, &escaped, merger, out);
            }
            Algorithm::WordPiece(wordpiece) => wordpiece.encode(texts, map, unk, text, out),
            Algorithm::Unigram(unigram) => unigram.encode(unk, text, out),
        }
    }

    /// Number of tokens.
    pub fn n_vocab(&self) -> usize {
        self.texts.len()
    }

    /// The ids with a meaning of their own, after defaults and detection by text.
    pub fn special_ids(&self) -> SpecialIds {
        self.ids
    }

    /// The beginning-of-sequence token.
    pub fn bos(&self) -> Option<TokenId> {
        self.ids.bos
    }

    /// The end-of-sequence token.
    pub fn eos(&self) -> Option<TokenId> {
        self.ids.eos
    }

    /// Whether [`EncodeOptions::add_special`] adds BOS.
    pub fn add_bos(&self) -> bool {
        self.add_bos
    }

    /// Whether [`EncodeOptions::add_special`] adds EOS.
    pub fn add_eos(&self) -> bool {
        self.add_eos
    }

    /// Whether a generation ends with this token.
    pub fn is_eog(&self, id: TokenId) -> bool {
        self.eog.contains(&id)
    }

    /// All tokens that end a generation, ascending.
    pub fn eog_ids(&self) -> impl Iterator<Item = TokenId> {
        self.eog.iter().copied()
    }

    /// Whether the token is structure, not text.
    pub fn is_control(&self, id: TokenId) -> bool {
        self.attr(id).is_some_and(|attr| attr.has(TokenAttr::CONTROL))
    }

    /// The kinds of a token; `None` outside the vocabulary.
    pub fn attr(&self, id: TokenId) -> Option<TokenAttr> {
        self.attrs.get(id as usize).copied()
    }

    /// A token's text as the vocabulary writes it (`Ġthe`, `▁the`); `None` outside the vocabulary.
    pub fn token_text(&self, id: TokenId) -> Option<&[u8]> {
        self.texts.get(id as usize)
    }

    /// The token with exactly this text, as the vocabulary writes it.
    pub fn token_id(&self, text: &str) -> Option<TokenId> {
        self.map.get(&self.texts, text.as_bytes())
    }

    /// The name of the way text is cut into words.
    pub fn pre_tokenizer(&self) -> &str {
        &self.pre
    }

    /// Whether the file does not name its pre-tokenizer, so that `default` was taken. Text may
    /// then be cut in a way the model was not trained on; callers should say so.
    pub fn pre_is_assumed(&self) -> bool {
        self.pre_is_assumed
    }

    /// Merges left out because they name texts outside the vocabulary.
    pub fn n_merges_skipped(&self) -> usize {
        match &self.algorithm {
            Algorithm::Bpe(bpe) => bpe.n_merges_skipped(),
            _ => 0,
        }
    }

    /// How many bytes that UTF-8 uses have no token. If not 0, some text is encoded as the
    /// unknown token, or not at all where there is none.
    pub fn n_bytes_missing(&self) -> usize {
        match &self.algorithm {
            Algorithm::Bpe(bpe) => bpe.n_bytes_missing(),
            Algorithm::Spm(spm) => spm.n_bytes_missing(),
            Algorithm::WordPiece(_) | Algorithm::Unigram(_) => 0,
        }
    }
}

fn check_counts(vocab: &Vocab) -> Result<(), TokenizerError> {
    let n_tokens = vocab.tokens.len();
    if n_tokens == 0 {
        return Err(TokenizerError::EmptyVocab);
    }
    if n_tokens > N_TOKENS_MAX {
        return Err(TokenizerError::TooManyTokens { n_tokens, max: N_TOKENS_MAX });
    }
    for (array, found) in [
        ("tokenizer.ggml.scores", vocab.scores.as_ref().map(Vec::len)),
        ("tokenizer.ggml.token_type", vocab.token_types.as_ref().map(Vec::len)),
    ] {
        if let Some(found) = found.filter(|&n| n != n_tokens) {
            return Err(TokenizerError::CountMismatch { array, found, expected: n_tokens });
        }
    }
    let bad = vocab.scores.iter().flatten().position(|s| s.is_nan());
    bad.map_or(Ok(()), |id| Err(TokenizerError::BadScore { id: id as TokenId }))
}

/// Tokens without text get a name, so that they do not match everywhere.
fn named_texts(tokens: &Texts) -> Texts {
    let mut texts = Texts::with_capacity(tokens.len(), 8 * tokens.len());
    for (id, text) in tokens.iter().enumerate() {
        if text.is_empty() {
            texts.push(format!("[EMPTY_{id}]").as_bytes());
        } else {
            texts.push(text);
        }
    }
    texts
}

/// Only byte-level vocabularies have a pre-tokenizer; others ignore the key, as its writers expect.
fn pre_spec(vocab: &Vocab) -> Result<Option<&'static PreSpec>, TokenizerError> {
    match vocab.model.as_str() {
        "gpt2" => {
            let pre = vocab.pre.as_deref().unwrap_or("default");
            let unknown =
                || TokenizerError::UnknownPre { pre: pre.to_owned(), known: pretok::known_names() };
            pretok::find(pre).map(Some).ok_or_else(unknown)
        }
        "llama" | "gemma4" | "bert" | "t5" => Ok(None),
        other => Err(TokenizerError::UnknownModel { model: other.to_owned(), known: KNOWN_MODELS }),
    }
}

/// The defaults that writers of GGUF files rely on. Ids outside the vocabulary do not apply.
fn defaults(model: &str, spec: Option<&PreSpec>) -> Defaults {
    let none = SpecialIds::default();
    let base = Defaults {
        ids: none,
        add_bos: false,
        add_eos: false,
        add_sep: false,
        add_space_prefix: false,
        clean_spaces: false,
    };
    match (model, spec) {
        ("llama", _) => Defaults {
            ids: SpecialIds { bos: Some(1), eos: Some(2), unk: Some(0), ..none },
            add_bos: true,
            add_space_prefix: true,
            ..base
        },
        ("bert", _) => {
            let ids = SpecialIds {
                unk: Some(100),
                bos: Some(101),
                sep: Some(102),
                pad: Some(0),
                mask: Some(103),
                ..none
            };
            Defaults { ids, add_bos: true, add_sep: true, clean_spaces: true, ..base }
        }
        ("t5", _) => Defaults {
            ids: SpecialIds { eos: Some(1), unk: Some(2), pad: Some(0), ..none },
            add_eos: true,
            ..base
        },
        ("gpt2", Some(spec)) => Defaults {
            ids: SpecialIds { bos: spec.has_default_bos.then_some(11), eos: Some(11), ..none },
            add_bos: spec.add_bos,
            add_sep: spec.add_sep,
            clean_spaces: spec.clean_spaces,
            ..base
        },
        ("gemma4", _) => Defaults { add_bos: true, clean_spaces: true, ..base },
        _ => base,
    }
}

fn checked_ids(
    mut stated: SpecialIds,
    mut defaults: SpecialIds,
    n_vocab: usize,
) -> Result<SpecialIds, TokenizerError> {
    for ((role, id), (_, default)) in stated.fields_mut().into_iter().zip(defaults.fields_mut()) {
        match *id {
            Some(id) if id as usize >= n_vocab => {
                return Err(TokenizerError::SpecialIdOutOfRange { role, id, n_vocab });
            }
            Some(_) => {}
            None => *id = default.filter(|&d| (d as usize) < n_vocab),
        }
    }
    Ok(stated)
}

fn check_added(
    flag: &'static str,
    role: &'static str,
    wanted: bool,
    id: Option<TokenId>,
) -> Result<(), TokenizerError> {
    if wanted && id.is_none() { Err(TokenizerError::MissingSpecial { flag, role }) } else { Ok(()) }
}

fn algorithm(
    vocab: &Vocab,
    texts: &Texts,
    map: &TextMap,
    spec: Option<&'static PreSpec>,
    specials: &special::Specials,
    add_space_prefix: bool,
) -> Result<Algorithm, TokenizerError> {
    let no_scores;
    let scores = match &vocab.scores {
        Some(scores) => scores,
        None => {
            no_scores = vec![0.0; texts.len()];
            &no_scores
        }
    };
    let merges = || {
        let missing = TokenizerError::MissingMerges { model: vocab.model.clone() };
        vocab.merges.as_ref().ok_or(missing)
    };
    Ok(match (vocab.model.as_str(), spec) {
        ("gpt2", Some(spec)) => Algorithm::Bpe(Bpe::byte_level(texts, map, merges()?, spec)),
        ("gemma4", _) => Algorithm::Bpe(Bpe::char_level(texts, map, merges()?)),
        ("bert", _) => Algorithm::WordPiece(WordPiece::new(vocab.lowercase, vocab.strip_accents)),
        ("t5", _) => Algorithm::Unigram(Box::new(Unigram::new(
            texts,
            &specials.attrs,
            scores,
            vocab.precompiled_charsmap.as_deref().unwrap_or_default(),
            add_space_prefix,
            vocab.remove_extra_whitespaces.unwrap_or(false),
        )?)),
        _ => Algorithm::Spm(Box::new(Spm::new(texts, map, scores))),
    })
}
