//! `tegula run`: continues a text.

use crate::args::RunArgs;
use crate::output;
use anyhow::{Context, Result};
use serde_json::json;
use std::path::Path;
use tegula::{ChatInput, ChatTime, EncodeOptions, GenerateOptions, Model, Sampler, generate};

pub(crate) fn run(args: &RunArgs) -> Result<()> {
    let text = text(args)?;
    // Before the model is loaded, so that wrong settings are told at once.
    let sampling = args.sample.options();
    let mut sampler = Sampler::new(sampling)?;
    let (model, load) = output::load(&args.load, 1)?;
    let prompt = prompt(&model, &text, args.chat)?;
    let options = GenerateOptions {
        n_predict: args.sample.n_predict,
        ignore_eog: args.ignore_eos,
        special: false,
    };
    output::catch_ctrl_c()?;
    let mut sequence = model.sequence();
    let mut written = Ok(());
    let generation =
        generate(&mut sequence, &prompt, &mut sampler, options, &output::CANCEL, |text| {
            if !args.json && written.is_ok() {
                written = output::stream(text);
                if written.is_err() {
                    // Nobody reads any more.
                    output::CANCEL.store(true, std::sync::atomic::Ordering::SeqCst);
                }
            }
        })?;
    written?;
    if args.json {
        let load_ms = load.as_secs_f64() * 1e3;
        output::print_json(&json!({
            "device": model.plan().device_names(),
            "seed": sampling.seed,
            "prompt_tokens": prompt,
            "generation": generation,
            "load_ms": load_ms,
            "prompt_tokens_per_s": generation.prompt_rate(),
            "tokens_per_s": generation.decode_rate(),
            "peak_memory_bytes": output::peak_memory(),
        }))?;
    } else {
        output::stream("\n")?;
    }
    if !args.quiet {
        output::print_timings(load, &generation, args.sample.drawn_seed(&sampling));
    }
    Ok(())
}

/// The text to continue, from wherever it comes.
fn text(args: &RunArgs) -> Result<String> {
    let stdin = Path::new("-");
    let (text, name) = match (&args.prompt, &args.file) {
        (Some(text), _) if Path::new(text) != stdin => (text.clone(), "-p"),
        (None, Some(path)) if path != stdin => {
            let text = std::fs::read_to_string(path);
            (text.with_context(|| format!("-f: {}", path.display()))?, "-f")
        }
        (None, None) => anyhow::bail!("no prompt: give -p TEXT or -f FILE"),
        _ => (std::io::read_to_string(std::io::stdin()).context("stdin")?, "stdin"),
    };
    if text.is_empty() {
        anyhow::bail!("{name}: the text is empty; there is nothing to continue");
    }
    Ok(text)
}

/// The prompt's tokens: the text itself, or as a user's message in the model's template.
fn prompt(model: &Model, text: &str, chat: bool) -> Result<Vec<u32>> {
    if !chat {
        let options = EncodeOptions { add_special: true, parse_special: true };
        return Ok(model.tokenizer().encode(text, options));
    }
    let messages = json!([{"role": "user", "content": text}]);
    let rendered = super::template::render(model.file(), &messages, true)?;
    Ok(model.tokenizer().encode_prompt(&rendered))
}

/// What `--chat` and `tegula chat` render with.
pub(crate) fn chat_input(
    messages: &serde_json::Value,
    add_generation_prompt: bool,
) -> ChatInput<'_> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let seconds = now.map(|d| i64::try_from(d.as_secs()).unwrap_or(0)).unwrap_or(0);
    ChatInput {
        messages,
        tools: None,
        add_generation_prompt,
        extra: None,
        now: ChatTime::from_unix(seconds),
    }
}
