//! Which template a model is prompted with, and the one written here.
//!
//! A model without a template is not prompted with somebody else's format: the
//! answers would be bad and nothing would say why. Only Gemma 2 and 3, whose
//! small files are published without one and whose format is documented by its
//! maker, has a built-in. [`TemplateOrigin`] tells the caller which it is.

use super::{ChatTemplate, TemplateError};
use crate::{Tokenizer, Vocab};

/// Where a template is from.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum TemplateOrigin {
    /// Handed in by the caller.
    Given,
    /// `tokenizer.chat_template` of the model's file.
    File,
    /// `tokenizer.chat_template.NAME` of the model's file.
    FileNamed(String),
    /// Written here, since the file has none; the name of the format. Callers should say so.
    BuiltIn(&'static str),
}

/// The turns of Gemma 2 and 3. Gemma has no system turn; system text stands in front of the first
/// user's text, two newlines apart. Images and tools are outside the format.
const GEMMA: &str = "\
{{- bos_token -}}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
    {%- if message.content is string -%}
        {%- set text = message.content -%}
    {%- else -%}
        {%- set text = message.content | map(attribute='text') | join -%}
    {%- endif -%}
    {%- if message.role in ['system', 'developer'] -%}
        {%- set ns.system = ns.system ~ (text | trim) ~ '\\n\\n' -%}
    {%- elif message.role in ['user', 'assistant', 'model'] -%}
        {{- '<start_of_turn>' ~ ('user' if message.role == 'user' else 'model') ~ '\\n' -}}
        {{- (ns.system if message.role == 'user' else '') ~ (text | trim) ~ '<end_of_turn>\\n' -}}
        {%- if message.role == 'user' -%}{%- set ns.system = '' -%}{%- endif -%}
    {%- else -%}
        {{- raise_exception('the built-in gemma format has no role ' ~ message.role) -}}
    {%- endif -%}
{%- endfor -%}
{%- if ns.system -%}
    {{- raise_exception('the built-in gemma format has no place for system text after the last user message') -}}
{%- endif -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
";

impl ChatTemplate {
    /// The format written here for an architecture, as its name and source; `None` if there is none.
    pub fn builtin_for(arch: &str) -> Option<(&'static str, &'static str)> {
        match arch {
            "gemma2" | "gemma3" => Some(("gemma", GEMMA)),
            _ => None,
        }
    }

    /// The template of a model: the file's one (`name` picks among several), else the built-in one
    /// of the architecture. `None` if the model has neither, as base models do.
    ///
    /// # Errors
    /// [`TemplateError::UnknownName`] if `name` is not in the file, and the errors of [`ChatTemplate::new`].
    pub fn of_model(
        vocab: &Vocab,
        tokenizer: &Tokenizer,
        name: Option<&str>,
    ) -> Result<Option<Self>, TemplateError> {
        let text = |id: Option<u32>| {
            let text = id.and_then(|id| tokenizer.token_text(id)).unwrap_or_default();
            String::from_utf8_lossy(text).into_owned()
        };
        let (bos, eos) = (text(tokenizer.bos()), text(tokenizer.eos()));
        let (source, origin) = if let Some(name) = name {
            let named = vocab.named_chat_templates.iter().find(|(n, _)| n == name);
            let (_, source) = named.ok_or_else(|| unknown_name(vocab, name))?;
            (source.as_str(), TemplateOrigin::FileNamed(name.to_owned()))
        } else if let Some(source) = &vocab.chat_template {
            (source.as_str(), TemplateOrigin::File)
        } else if let Some((format, source)) = Self::builtin_for(&vocab.arch) {
            (source, TemplateOrigin::BuiltIn(format))
        } else {
            return Ok(None);
        };
        Self::with_origin(source, &bos, &eos, origin).map(Some)
    }
}

fn unknown_name(vocab: &Vocab, name: &str) -> TemplateError {
    let names: Vec<&str> = vocab.named_chat_templates.iter().map(|(n, _)| n.as_str()).collect();
    let known = if names.is_empty() { "no named ones".to_owned() } else { names.join(", ") };
    TemplateError::UnknownName { name: name.to_owned(), known }
}
