//! What commands share: loading with a progress bar, Ctrl-C, timings, writing to stdout.

use crate::args::LoadArgs;
use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tegula::memory::units::format_size;
use tegula::{
    Caps, DeviceCap, Generation, IsolationOptions, Model, ModelOptions, PlanReport, Runtime,
    RuntimeOptions,
};
use tegula_plugin::SkipReason;

/// Set by Ctrl-C; generation looks at it between tokens.
pub(crate) static CANCEL: AtomicBool = AtomicBool::new(false);

/// From now on the first Ctrl-C sets [`CANCEL`]; one more while it is set ends the process as usual.
pub(crate) fn catch_ctrl_c() -> Result<()> {
    ctrlc::set_handler(|| {
        if CANCEL.swap(true, Ordering::SeqCst) {
            // The user insists: nothing is waited for.
            end_interrupted();
        }
    })
    .context("Ctrl-C cannot be caught")
}

#[expect(clippy::exit, reason = "a second Ctrl-C must end the process whatever it is doing")]
fn end_interrupted() -> ! {
    std::process::exit(130)
}

/// This program, even while its file is replaced by an update.
const OWN_FILE: &str = "/proc/self/exe";

/// A runtime under the caps of the environment, and those of single devices.
pub(crate) fn runtime(caps: &[DeviceCap]) -> Result<Runtime> {
    let options = RuntimeOptions {
        caps: Caps::from_env()?,
        isolation: IsolationOptions::from_env(OWN_FILE.into())?,
        ..RuntimeOptions::default()
    };
    Ok(Runtime::new(&options).with_device_caps(caps)?)
}

/// A loaded model that gives `n_outputs` rows of logits a run, and the time that took. A bar shows progress on a terminal.
pub(crate) fn load(args: &LoadArgs, n_outputs: u32) -> Result<(Model, Duration)> {
    load_with(args, &args.how.options(n_outputs))
}

/// The same with options that a command has made its own of.
pub(crate) fn load_with(args: &LoadArgs, options: &ModelOptions) -> Result<(Model, Duration)> {
    open(&runtime(&args.how.caps())?, &args.model, options)
}

/// A bar on stderr where that is a terminal.
pub(crate) fn bar(len: u64, template: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(template);
    ProgressBar::new(len).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// A loaded model, of several in one runtime, and the time that loading took.
pub(crate) fn open(
    runtime: &Runtime,
    model: &Path,
    options: &ModelOptions,
) -> Result<(Model, Duration)> {
    let path = crate::models::find(model)?;
    let begin = Instant::now();
    let bar = bar(0, "loading {bar:40} {bytes}/{total_bytes}");
    let model = Model::open(runtime, path, options, &mut |progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.done);
    });
    bar.finish_and_clear();
    let model = model?;
    tell_lost(runtime, &model);
    tell_limits(&model.plan().report, options);
    Ok((model, begin.elapsed()))
}

/// Says what the model runs on where a backend is missing that would have ended the process; which one, the log has said.
fn tell_lost(runtime: &Runtime, model: &Model) {
    let skipped = &runtime.registry().skipped;
    if skipped.iter().any(|skipped| matches!(skipped.reason, SkipReason::Probe(_))) {
        eprintln!(
            "note: the model runs on {}; see `tegula devices` for what was skipped",
            model.plan().device_names()
        );
    }
}

/// Says once where memory made less of the model than its user may expect.
fn tell_limits(plan: &PlanReport, options: &ModelOptions) {
    let context = &plan.context;
    if options.plan.n_ctx.is_none() && context.n_ctx < context.n_ctx_train {
        eprintln!("note: the context is {} tokens, {}", context.n_ctx, context.reason);
    }
    if let Some(reason) = &plan.ubatch.reason {
        log::info!("{} tokens of a prompt are computed at once: {reason}", plan.ubatch.n_tokens);
    }
}

/// The process's greatest resident memory, where the system tells.
pub(crate) fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// A line of timings on stderr, and one with the seed where that was drawn and is needed to do the same again.
pub(crate) fn print_timings(load: Duration, generation: &Generation, seed: Option<u64>) {
    let peak = peak_memory().map(|bytes| format!(", peak memory {}", format_size(bytes)));
    eprintln!(
        "load {:.0} ms, prompt {} tokens at {:.1} t/s, generation {} tokens at {:.1} t/s{}",
        load.as_secs_f64() * 1e3,
        generation.n_prompt,
        generation.prompt_rate(),
        generation.n_decoded,
        generation.decode_rate(),
        peak.unwrap_or_default(),
    );
    if let Some(seed) = seed.filter(|_| !generation.tokens.is_empty()) {
        eprintln!("drawn at random: --seed {seed}");
    }
}

/// Writes a piece of generated text at once.
pub(crate) fn stream(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Prints a value as JSON on a line of its own.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer_pretty(&mut out, value)?;
    writeln!(out)?;
    Ok(())
}

/// Prints text on stdout, with an error instead of a panic when nobody reads it.
pub(crate) fn print(text: &str) -> Result<()> {
    Ok(writeln!(std::io::stdout().lock(), "{text}")?)
}

/// An error and its causes in one line; causes that the message before already tells are left out.
pub(crate) fn explain(error: &anyhow::Error) -> String {
    let mut out = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !out.contains(&cause) {
            out.push_str(": ");
            out.push_str(&cause);
        }
    }
    out
}

/// Whether the reader of stdout went away (`| head`), which is no failure.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let io = cause.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        let json =
            cause.downcast_ref::<serde_json::Error>().and_then(serde_json::Error::io_error_kind);
        io.or(json) == Some(std::io::ErrorKind::BrokenPipe)
    })
}

#[cfg(test)]
mod tests {
    use super::explain;

    /// A reader would look for the difference between two sentences that are the same.
    #[test]
    fn causes_are_told_once() {
        let error =
            anyhow::anyhow!("cannot open").context("a.gguf: cannot open").context("shard 2");
        assert_eq!(explain(&error), "shard 2: a.gguf: cannot open");
    }
}
