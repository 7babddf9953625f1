//! Chat templates: from messages to the prompt a model was trained on.
//!
//! Templates are Jinja programs out of model files, written for Python. They
//! run here with the semantics of Hugging Face's `apply_chat_template`: values
//! print as Python prints them, strings and dictionaries have Python's methods,
//! block tags swallow their line, and `raise_exception` and `strftime_now` exist.
//!
//! A template is hostile input. Its source, its output, its depth and its work
//! are limited, and the work includes the bytes it creates; a template that
//! exceeds a limit is an error. It reaches nothing but its arguments. One hole
//! remains: the engine does not charge for adding lists, so a template that
//! doubles a list dozens of times can still exhaust the machine.
//!
//! Where Python would fail only over the form of its input, rendering goes on:
//! `tools` is undefined when there are none, and a template that fails (but not
//! one that refuses) is tried again with text parts joined, with tool arguments
//! in their other form, and at last with undefined variables as empty text.

mod builtin;
mod json;
mod python;
mod relax;
mod time;

use std::borrow::Cow;
use std::collections::HashSet;
use std::io::{self, Write};

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, UndefinedBehavior, Value};

pub use builtin::TemplateOrigin;
pub use time::ChatTime;

/// Longest template source, in bytes. The longest published ones have some tens of KiB.
pub const SOURCE_BYTES_MAX: usize = 1 << 20;
/// Longest prompt, in bytes.
pub const OUTPUT_BYTES_MAX: usize = 64 << 20;
/// Work that any template may do: instructions, and 64-byte units of created data.
const FUEL_BASE: u64 = 500_000;
/// Stack of the thread that renders. A template can nest values as deep as its work limit lets it,
/// and dropping them takes stack for every level.
const STACK_BYTES: usize = 128 << 20;
/// Depth of macros, includes and recursive loops.
const RECURSION_MAX: usize = 64;

/// Why a template does not compile or render.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The source is too long.
    #[error("the chat template has {found} bytes; at most {max} are allowed")]
    SourceTooLong {
        /// Bytes found.
        found: usize,
        /// Bytes allowed.
        max: usize,
    },
    /// The source is not a template.
    #[error("chat template line {line}: {message}")]
    Syntax {
        /// The line, from 1.
        line: usize,
        /// What the parser says.
        message: String,
    },
    /// The template itself refuses the messages, by `raise_exception`.
    #[error("the chat template refuses these messages (line {line}): {message}")]
    Refused {
        /// The line, from 1.
        line: usize,
        /// The template's own words.
        message: String,
    },
    /// The template failed on these messages.
    #[error("chat template line {line}: {message}")]
    Render {
        /// The line, from 1; 0 if unknown.
        line: usize,
        /// What went wrong.
        message: String,
    },
    /// The template did more work than allowed.
    #[error("the chat template exceeds its work limit of {fuel} units (line {line})")]
    TooMuchWork {
        /// The limit.
        fuel: u64,
        /// The line, from 1; 0 if unknown.
        line: usize,
    },
    /// The prompt is too long.
    #[error("the chat template writes more than {max} bytes")]
    OutputTooLong {
        /// Bytes allowed.
        max: usize,
    },
    /// The file has no template of that name.
    #[error("there is no chat template '{name}'; the file has: {known}")]
    UnknownName {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: String,
    },
}

/// What a template is rendered with.
#[derive(Debug, Clone, Copy)]
pub struct ChatInput<'a> {
    /// An array of messages: objects with `role`, `content` and what else the template knows.
    pub messages: &'a serde_json::Value,
    /// An array of tool descriptions.
    pub tools: Option<&'a serde_json::Value>,
    /// End with the beginning of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Further variables, such as `enable_thinking`. They win over the ones above.
    pub extra: Option<&'a serde_json::Map<String, serde_json::Value>>,
    /// The time that `strftime_now` tells.
    pub now: ChatTime,
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    bos: String,
    eos: String,
    origin: TemplateOrigin,
}

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// Compiles a template. `bos` and `eos` are the texts of the model's tokens, empty if it has none.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`] and [`TemplateError::SourceTooLong`].
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self, TemplateError> {
        Self::with_origin(source, bos, eos, TemplateOrigin::Given)
    }

    pub(crate) fn with_origin(
        source: &str,
        bos: &str,
        eos: &str,
        origin: TemplateOrigin,
    ) -> Result<Self, TemplateError> {
        if source.len() > SOURCE_BYTES_MAX {
            let (found, max) = (source.len(), SOURCE_BYTES_MAX);
            return Err(TemplateError::SourceTooLong { found, max });
        }
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax.map_err(|e| syntax_error(&e))?);
        env.set_undefined_behavior(UndefinedBehavior::Lenient);
        env.set_recursion_limit(RECURSION_MAX);
        python::install(&mut env);
        env.add_template_owned(NAME, python::adapt_source(source)).map_err(|e| syntax_error(&e))?;
        Ok(Self { env, bos: bos.to_owned(), eos: eos.to_owned(), origin })
    }

    /// Where the template is from.
    pub fn origin(&self) -> &TemplateOrigin {
        &self.origin
    }

    /// Renders the prompt. Encode it with [`crate::Tokenizer::encode_prompt`], since templates write
    /// BOS themselves or leave it to the tokenizer.
    ///
    /// # Errors
    /// [`TemplateError::Refused`] with the template's own words, and the other cases of rendering.
    pub fn render(&self, input: &ChatInput<'_>) -> Result<String, TemplateError> {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
            let failed = |message: String| TemplateError::Render { line: 0, message };
            thread
                .spawn_scoped(scope, || self.render_here(input))
                .map_err(|e| failed(format!("the rendering thread cannot start: {e}")))?
                .join()
                .unwrap_or_else(|_| Err(failed("the template engine failed".to_owned())))
        })
    }

    /// Renders on this thread, with other forms of the input where the first fails.
    fn render_here(&self, input: &ChatInput<'_>) -> Result<String, TemplateError> {
        let mut result = self.attempt(input, input.messages, false);
        // A template that refuses means it; one that trips over the form of its input may take another.
        let mut messages = Cow::Borrowed(input.messages);
        for relax in [relax::join_text_parts, relax::arguments_as_text, relax::arguments_as_objects]
        {
            if !matches!(result, Err(TemplateError::Render { .. })) {
                return result;
            }
            if let Some(relaxed) = relax(&messages) {
                result = self.attempt(input, &relaxed, false);
                messages = Cow::Owned(relaxed);
            }
        }
        if matches!(result, Err(TemplateError::Render { .. }))
            && let Ok(prompt) = self.attempt(input, input.messages, true)
        {
            return Ok(prompt);
        }
        result
    }

    /// Renders once. With `fill`, variables that nobody defines are empty text instead of undefined.
    fn attempt(
        &self,
        input: &ChatInput<'_>,
        messages: &serde_json::Value,
        fill: bool,
    ) -> Result<String, TemplateError> {
        let n_input_bytes = size(messages) + input.tools.map_or(0, size);
        // Each byte of input may be copied some dozens of times.
        let fuel = FUEL_BASE.saturating_add(n_input_bytes);
        let mut env = self.env.clone();
        env.set_fuel(Some(fuel));
        let now = input.now;
        env.add_function("strftime_now", move |format: &str| now.format(format));
        let mut output = Capped { bytes: Vec::new(), is_full: false };
        let rendered = env.get_template(NAME).and_then(|template| {
            let mut variables = self.variables(input, messages);
            if fill {
                let known: HashSet<String> = variables.iter().map(|(k, _)| k.clone()).collect();
                let globals: HashSet<&str> = env.globals().map(|(name, _)| name).collect();
                let missing = template.undeclared_variables(false).into_iter();
                let missing = missing
                    .filter(|name| !known.contains(name) && !globals.contains(name.as_str()));
                variables.extend(missing.map(|name| (name, Value::from(""))));
            }
            template.render_captured_to(Value::from_pairs(variables), &mut output).map(drop)
        });
        match rendered {
            Ok(()) => Ok(String::from_utf8_lossy(&output.bytes).into_owned()),
            Err(_) if output.is_full => Err(TemplateError::OutputTooLong { max: OUTPUT_BYTES_MAX }),
            Err(error) => Err(render_error(&error, fuel)),
        }
    }

    fn variables(
        &self,
        input: &ChatInput<'_>,
        messages: &serde_json::Value,
    ) -> Vec<(String, Value)> {
        let mut variables: Vec<(String, Value)> = vec![
            ("messages".into(), json::to_value(messages)),
            ("add_generation_prompt".into(), input.add_generation_prompt.into()),
            ("bos_token".into(), self.bos.as_str().into()),
            ("eos_token".into(), self.eos.as_str().into()),
        ];
        if let Some(tools) = input.tools {
            variables.push(("tools".into(), json::to_value(tools)));
        }
        for (name, value) in input.extra.into_iter().flatten() {
            variables.push((name.clone(), json::to_value(value)));
        }
        variables
    }
}

/// The size of a value's text, roughly.
fn size(value: &serde_json::Value) -> u64 {
    use serde_json::Value as Json;
    match value {
        Json::String(s) => s.len() as u64 + 2,
        Json::Array(items) => items.iter().map(size).sum::<u64>() + 2,
        Json::Object(map) => map.iter().map(|(k, v)| k.len() as u64 + 4 + size(v)).sum::<u64>() + 2,
        _ => 8,
    }
}

/// Collects output up to the limit.
struct Capped {
    bytes: Vec<u8>,
    is_full: bool,
}

impl Write for Capped {
    fn write(&mut self, part: &[u8]) -> io::Result<usize> {
        if part.len() > OUTPUT_BYTES_MAX.saturating_sub(self.bytes.len()) {
            self.is_full = true;
            return Err(io::Error::other("the output limit is reached"));
        }
        self.bytes.extend_from_slice(part);
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The engine's words about an error, without its position.
fn words(error: &minijinja::Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}

fn syntax_error(error: &minijinja::Error) -> TemplateError {
    TemplateError::Syntax { line: error.line().unwrap_or(0), message: words(error) }
}

fn render_error(error: &minijinja::Error, fuel: u64) -> TemplateError {
    let line = error.line().unwrap_or(0);
    // Errors inside macros and calls are wrapped; the innermost one is the cause.
    let mut cause: &dyn std::error::Error = error;
    let mut message = words(error);
    loop {
        if let Some(python::Raised(message)) = cause.downcast_ref() {
            return TemplateError::Refused { line, message: message.clone() };
        }
        if let Some(inner) = cause.downcast_ref::<minijinja::Error>() {
            if inner.kind() == ErrorKind::OutOfFuel {
                return TemplateError::TooMuchWork { fuel, line };
            }
            message = words(inner);
        }
        match cause.source() {
            Some(source) => cause = source,
            None => return TemplateError::Render { line, message },
        }
    }
}
