//! Generates text: prompt in, whole characters out as they come.

use crate::sampler::Sampler;
use crate::sequence::{Outputs, Sequence};
use crate::{Error, Result};
use serde::Serialize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tegula_tokenizer::Detokenizer;

/// When to stop.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GenerateOptions {
    /// Tokens at most; `None` goes on to the end of the context.
    pub n_predict: Option<u32>,
    /// Goes on past end-of-generation tokens.
    pub ignore_eog: bool,
    /// Gives control tokens as text too.
    pub special: bool,
}

/// Why generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// The model said that it is done.
    EndOfGeneration,
    /// As many tokens as asked for.
    Length,
    /// The context is full.
    ContextFull,
    /// The caller cancelled.
    Cancelled,
}

/// What a generation did and how long it took.
#[derive(Debug, Clone, Serialize)]
pub struct Generation {
    /// The generated tokens, an end-of-generation token included.
    pub tokens: Vec<u32>,
    /// The text of them.
    pub text: String,
    /// Why it ended.
    pub stop: StopReason,
    /// Prompt tokens evaluated.
    pub n_prompt: u32,
    /// Time for the prompt.
    #[serde(serialize_with = "as_ms")]
    pub prompt_ms: Duration,
    /// Tokens evaluated one by one after the first.
    pub n_decoded: u32,
    /// Time for those, sampling included.
    #[serde(serialize_with = "as_ms")]
    pub decode_ms: Duration,
}

fn as_ms<S: serde::Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_secs_f64() * 1e3)
}

impl Generation {
    /// Prompt tokens a second.
    pub fn prompt_rate(&self) -> f64 {
        f64::from(self.n_prompt) / self.prompt_ms.as_secs_f64().max(1e-9)
    }

    /// Generated tokens a second.
    pub fn decode_rate(&self) -> f64 {
        f64::from(self.n_decoded) / self.decode_ms.as_secs_f64().max(1e-9)
    }
}

/// Evaluates `prompt` after what the sequence holds, then generates until a stop. `on_text` is given whole
/// characters as they become certain. `cancel` is looked at between tokens and between pieces of the prompt, and may be set from any thread or signal handler.
///
/// The sequence afterwards holds the prompt and every generated token but the last, which was not evaluated.
pub fn generate(
    sequence: &mut Sequence,
    prompt: &[u32],
    sampler: &mut Sampler,
    options: GenerateOptions,
    cancel: &AtomicBool,
    mut on_text: impl FnMut(&str),
) -> Result<Generation> {
    let model = sequence.model().clone();
    let tokenizer = model.tokenizer();
    let mut detokenizer = Detokenizer::new(tokenizer, options.special);
    let mut out = Generation {
        tokens: Vec::new(),
        text: String::new(),
        stop: StopReason::Length,
        n_prompt: 0,
        prompt_ms: Duration::ZERO,
        n_decoded: 0,
        decode_ms: Duration::ZERO,
    };
    if prompt.is_empty() {
        return Err(Error::Option { name: "prompt", why: "it has no tokens".into() });
    }
    if options.n_predict == Some(0) {
        return Ok(out);
    }
    for token in prompt {
        sampler.accept(*token);
    }
    let begin = Instant::now();
    let mut next = None;
    let finished = sequence.eval(prompt, Outputs::Last, cancel, |pos, logits| {
        next = Some(sampler.sample(logits, pos)?);
        Ok(())
    })?;
    out.n_prompt = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    out.prompt_ms = begin.elapsed();
    let begin = Instant::now();
    if !finished {
        out.stop = StopReason::Cancelled;
    }
    while let Some(token) = next.take() {
        out.tokens.push(token);
        if tokenizer.is_eog(token) && !options.ignore_eog {
            out.stop = StopReason::EndOfGeneration;
            break;
        }
        sampler.accept(token);
        let text = detokenizer.push(token)?;
        if !text.is_empty() {
            on_text(text);
            out.text.push_str(text);
        }
        let n = u32::try_from(out.tokens.len()).unwrap_or(u32::MAX);
        out.stop = match () {
            () if options.n_predict.is_some_and(|most| n >= most) => StopReason::Length,
            () if cancel.load(Ordering::Relaxed) => StopReason::Cancelled,
            () if sequence.n_left() == 0 => StopReason::ContextFull,
            () => {
                sequence.eval(&[token], Outputs::Last, cancel, |pos, logits| {
                    next = Some(sampler.sample(logits, pos)?);
                    Ok(())
                })?;
                out.n_decoded += 1;
                StopReason::Cancelled
            }
        };
    }
    let rest = detokenizer.finish();
    if !rest.is_empty() {
        on_text(&rest);
        out.text.push_str(&rest);
    }
    out.decode_ms = begin.elapsed();
    Ok(out)
}
