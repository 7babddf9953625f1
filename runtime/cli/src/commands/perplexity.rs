//! `tegula perplexity`: how well a model predicts a text.

use crate::args::PerplexityArgs;
use crate::output;
use crate::score::{self, Mean, Windows, log_softmax};
use anyhow::Result;
use serde::Serialize;
use std::sync::atomic::Ordering;
use tegula::Outputs;

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    device: String,
    n_ctx: u32,
    windows: usize,
    tokens_scored: u64,
    perplexity: f64,
    /// One standard deviation.
    perplexity_error: f64,
    /// Mean negative logarithm of a token's probability, in nats.
    nll: f64,
    nll_error: f64,
}

pub(crate) fn run(args: &PerplexityArgs) -> Result<()> {
    let mut options = args.load.how.options(score::ROWS);
    let n_ctx = *options.plan.n_ctx.get_or_insert(score::N_CTX_DEFAULT);
    let (model, _) = output::load_with(&args.load, &options)?;
    let windows = Windows::new(&model, &args.file, n_ctx, args.chunks)?;
    output::catch_ctrl_c()?;
    let bar = output::bar(windows.n as u64, "{wide_bar} window {pos} of {len}, {msg}, {eta} left");
    let mut sequence = model.sequence();
    let (mut nll, mut logs, mut done) = (Mean::default(), Vec::new(), 0);
    'windows: for i in 0..windows.n {
        let window = windows.window(i);
        if !windows.begin(&mut sequence, &window)? {
            break;
        }
        for (piece, next) in windows.pieces(&window) {
            let mut next = next.iter();
            sequence.eval(piece, Outputs::All, &output::CANCEL, |_, logits| {
                log_softmax(logits, &mut logs);
                let log = next.next().and_then(|id| logs.get(*id as usize));
                nll.add(-log.copied().unwrap_or(f64::NEG_INFINITY));
                Ok(())
            })?;
            if output::CANCEL.load(Ordering::SeqCst) {
                break 'windows;
            }
        }
        done = i + 1;
        bar.set_message(format!("perplexity {:.4}", nll.value().exp()));
        bar.inc(1);
    }
    bar.finish_and_clear();
    if done < windows.n {
        eprintln!("interrupted: {done} of {} windows were scored in full", windows.n);
    }
    let perplexity = nll.value().exp();
    let report = Report {
        model: model.file().path().display().to_string(),
        device: model.plan().device_names(),
        n_ctx,
        windows: done,
        tokens_scored: nll.n(),
        perplexity,
        perplexity_error: nll.error() * perplexity,
        nll: nll.value(),
        nll_error: nll.error(),
    };
    if args.json {
        return output::print_json(&report);
    }
    output::print(&format!(
        "perplexity {:.4} ± {:.4} ({} tokens of {} windows of {n_ctx})",
        report.perplexity, report.perplexity_error, report.tokens_scored, report.windows
    ))
}
