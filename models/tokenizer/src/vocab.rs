//! A vocabulary as a file states it, before any of it is believed.
//!
//! [`Vocab`] is plain data: [`crate::Tokenizer::new`] checks it. It can be
//! filled by hand (tests, other formats) or from GGUF metadata.

use std::borrow::Cow;

use tegula_gguf::{Array, Metadata, StringArray};

use crate::{Texts, TokenId, TokenizerError};

/// The facts of a tokenizer, field by field as GGUF's `tokenizer.*` keys have them.
///
/// `None` means that the file does not say; [`crate::Tokenizer::new`] then takes the
/// default of the tokenizer model and pre-tokenizer.
#[derive(Debug, Clone, Default)]
pub struct Vocab {
    /// `tokenizer.ggml.model`: `gpt2`, `llama`, `gemma4`, `bert` or `t5`.
    pub model: String,
    /// `tokenizer.ggml.pre`
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`; the position is the id.
    pub tokens: Texts,
    /// `tokenizer.ggml.scores`, one a token.
    pub scores: Option<Vec<f32>>,
    /// `tokenizer.ggml.token_type`, one a token: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    pub token_types: Option<Vec<i32>>,
    /// `tokenizer.ggml.merges`: two texts with a space between, best first.
    pub merges: Option<Texts>,
    /// The ids with a meaning of their own.
    pub special: SpecialIds,
    /// `tokenizer.ggml.add_bos_token`
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_sep_token`
    pub add_sep: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.ggml.remove_extra_whitespaces`
    pub remove_extra_whitespaces: Option<bool>,
    /// `tokenizer.ggml.normalizer.lowercase`
    pub lowercase: Option<bool>,
    /// `tokenizer.ggml.normalizer.strip_accents`
    pub strip_accents: Option<bool>,
    /// `tokenizer.ggml.precompiled_charsmap`, the normalisation of unigram vocabularies.
    pub precompiled_charsmap: Option<Vec<u8>>,
    /// `general.architecture`; some architectures strip spaces around special tokens.
    pub arch: String,
    /// `general.name`, for the same reason.
    pub name: String,
    /// `tokenizer.chat_template`
    pub chat_template: Option<String>,
    /// `tokenizer.chat_template.NAME`, by name.
    pub named_chat_templates: Vec<(String, String)>,
}

/// Ids with a meaning of their own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are GGUF's tokenizer.ggml.*_token_id keys")]
pub struct SpecialIds {
    pub bos: Option<TokenId>,
    pub eos: Option<TokenId>,
    pub eot: Option<TokenId>,
    pub eom: Option<TokenId>,
    pub unk: Option<TokenId>,
    pub sep: Option<TokenId>,
    pub pad: Option<TokenId>,
    pub mask: Option<TokenId>,
    pub fim_pre: Option<TokenId>,
    pub fim_suf: Option<TokenId>,
    pub fim_mid: Option<TokenId>,
    pub fim_pad: Option<TokenId>,
    pub fim_rep: Option<TokenId>,
    pub fim_sep: Option<TokenId>,
}

impl SpecialIds {
    /// The fields by name.
    pub(crate) fn fields_mut(&mut self) -> [(&'static str, &mut Option<TokenId>); 14] {
        [
            ("bos", &mut self.bos),
            ("eos", &mut self.eos),
            ("eot", &mut self.eot),
            ("eom", &mut self.eom),
            ("unknown", &mut self.unk),
            ("seperator", &mut self.sep),
            ("padding", &mut self.pad),
            ("mask", &mut self.mask),
            ("fim_pre", &mut self.fim_pre),
            ("fim_suf", &mut self.fim_suf),
            ("fim_mid", &mut self.fim_mid),
            ("fim_pad", &mut self.fim_pad),
            ("fim_rep", &mut self.fim_rep),
            ("fim_sep", &mut self.fim_sep),
        ]
    }
}

/// Keys that older files use for the fill-in-the-middle ids.
const OLD_KEYS: [(&str, &str); 4] = [
    ("fim_pre", "tokenizer.ggml.prefix_token_id"),
    ("fim_suf", "tokenizer.ggml.suffix_token_id"),
    ("fim_mid", "tokenizer.ggml.middle_token_id"),
    ("seperator", "tokenizer.ggml.separator_token_id"),
];

const TEMPLATE: &str = "tokenizer.chat_template";

impl Vocab {
    /// Reads the `tokenizer.*` keys of a GGUF file.
    ///
    /// # Errors
    /// [`TokenizerError::Gguf`] if `tokenizer.ggml.model` or `tokenizer.ggml.tokens` is missing, or a key
    /// has another type than the format says. The values themselves are checked by [`crate::Tokenizer::new`].
    pub fn from_gguf(meta: &Metadata) -> Result<Self, TokenizerError> {
        let text = |key: &str| meta.optional::<&str>(key).map(|t| t.map(str::to_owned));
        let flag = |key: &str| meta.optional::<bool>(key);
        Ok(Self {
            model: meta.required::<&str>("tokenizer.ggml.model")?.to_owned(),
            pre: text("tokenizer.ggml.pre")?,
            tokens: to_texts(meta.required::<&StringArray>("tokenizer.ggml.tokens")?),
            scores: scores(meta)?,
            token_types: meta
                .optional::<Cow<'_, [i32]>>("tokenizer.ggml.token_type")?
                .map(Cow::into_owned),
            merges: meta.optional::<&StringArray>("tokenizer.ggml.merges")?.map(to_texts),
            special: special_ids(meta)?,
            add_bos: flag("tokenizer.ggml.add_bos_token")?,
            add_eos: flag("tokenizer.ggml.add_eos_token")?,
            add_sep: flag("tokenizer.ggml.add_sep_token")?,
            add_space_prefix: flag("tokenizer.ggml.add_space_prefix")?,
            remove_extra_whitespaces: flag("tokenizer.ggml.remove_extra_whitespaces")?,
            lowercase: flag("tokenizer.ggml.normalizer.lowercase")?,
            strip_accents: flag("tokenizer.ggml.normalizer.strip_accents")?,
            precompiled_charsmap: charsmap(meta)?,
            arch: text("general.architecture")?.unwrap_or_default(),
            name: text("general.name")?.unwrap_or_default(),
            chat_template: text(TEMPLATE)?,
            named_chat_templates: named_templates(meta)?,
        })
    }
}

fn to_texts(strings: &StringArray) -> Texts {
    (0..strings.len()).filter_map(|i| strings.get(i)).collect()
}

/// Scores are floats; some converters wrote integers.
fn scores(meta: &Metadata) -> Result<Option<Vec<f32>>, TokenizerError> {
    const KEY: &str = "tokenizer.ggml.scores";
    match meta.optional::<&Array>(KEY)? {
        Some(Array::I32(whole)) => Ok(Some(whole.iter().map(|&s| s as f32).collect())),
        _ => Ok(meta.optional::<Cow<'_, [f32]>>(KEY)?.map(Cow::into_owned)),
    }
}

/// The blob is an array of signed or unsigned bytes.
fn charsmap(meta: &Metadata) -> Result<Option<Vec<u8>>, TokenizerError> {
    const KEY: &str = "tokenizer.ggml.precompiled_charsmap";
    match meta.optional::<&Array>(KEY)? {
        Some(Array::I8(signed)) => Ok(Some(signed.iter().map(|&b| b.cast_unsigned()).collect())),
        _ => Ok(meta.optional::<Cow<'_, [u8]>>(KEY)?.map(Cow::into_owned)),
    }
}

/// Ids of -1 and 2³² - 1 are how some converters write that there is none.
fn special_ids(meta: &Metadata) -> Result<SpecialIds, TokenizerError> {
    let read = |key: &str| -> Result<Option<TokenId>, TokenizerError> {
        let Some(value) = meta.get(key) else { return Ok(None) };
        match value.integer() {
            Some(-1) => Ok(None),
            _ => Ok(meta.optional::<u32>(key)?.filter(|&id| id != u32::MAX)),
        }
    };
    let mut ids = SpecialIds::default();
    for (name, id) in ids.fields_mut() {
        *id = read(&format!("tokenizer.ggml.{name}_token_id"))?;
        if let Some((_, old)) = OLD_KEYS.iter().find(|(field, _)| *field == name)
            && id.is_none()
        {
            *id = read(old)?;
        }
    }
    Ok(ids)
}

fn named_templates(meta: &Metadata) -> Result<Vec<(String, String)>, TokenizerError> {
    let mut templates = Vec::new();
    for (key, _) in meta.iter() {
        let Some(name) = key.strip_prefix(TEMPLATE).and_then(|rest| rest.strip_prefix('.')) else {
            continue;
        };
        if let Some(source) = meta.optional::<&str>(key)? {
            templates.push((name.to_owned(), source.to_owned()));
        }
    }
    Ok(templates)
}
