//! `tegula kl`: how far a model's predictions are from those of another, such as those of a quantised file from its original's.
//!
//! Both models run side by side, so that nothing is stored between them: a piece of a window in the one, then in the other.

use crate::args::KlArgs;
use crate::output;
use crate::score::{self, Mean, Windows, log_softmax};
use anyhow::{Result, bail};
use serde::Serialize;
use std::sync::atomic::Ordering;
use tegula::{Model, Outputs};

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    base: String,
    device: String,
    n_ctx: u32,
    windows: usize,
    tokens_scored: u64,
    /// KL(base || model), in nats.
    kl_mean: f64,
    kl_mean_error: f64,
    kl_median: f64,
    kl_p90: f64,
    kl_p99: f64,
    kl_max: f64,
    /// The share of positions whose likeliest token is the same.
    same_top: f64,
    perplexity: f64,
    perplexity_base: f64,
    /// Mean of the logarithm of the quotient of the two.
    log_ratio: f64,
    log_ratio_error: f64,
}

/// What is summed up.
#[derive(Debug, Default)]
struct Sums {
    distances: Vec<f64>,
    kl: Mean,
    nll: Mean,
    nll_base: Mean,
    log_ratio: Mean,
    n_same_top: u64,
}

impl Sums {
    /// One position: logarithms of probabilities, and the token that comes.
    fn add(&mut self, base: &[f64], model: &[f64], next: u32) {
        let kl: f64 = base.iter().zip(model).map(|(p, q)| p.exp() * (p - q)).sum();
        // Rounding of equal distributions may give less than 0.
        self.distances.push(kl.max(0.0));
        self.kl.add(kl.max(0.0));
        let of = |logs: &[f64]| -logs.get(next as usize).copied().unwrap_or(f64::NEG_INFINITY);
        self.nll.add(of(model));
        self.nll_base.add(of(base));
        self.log_ratio.add(of(model) - of(base));
        self.n_same_top += u64::from(greatest(base) == greatest(model));
    }

    /// The distance that this share of positions is within.
    fn within(&self, share: f64) -> f64 {
        let last = self.distances.len().saturating_sub(1);
        let at = (share * last as f64).round() as usize;
        self.distances.get(at.min(last)).copied().unwrap_or(f64::NAN)
    }
}

fn greatest(logs: &[f64]) -> Option<usize> {
    (0..logs.len()).max_by(|a, b| logs[*a].total_cmp(&logs[*b]).then(b.cmp(a)))
}

pub(crate) fn run(args: &KlArgs) -> Result<()> {
    let mut options = args.load.how.options(score::ROWS);
    let n_ctx = *options.plan.n_ctx.get_or_insert(score::N_CTX_DEFAULT);
    let runtime = output::runtime(&args.load.how.caps())?;
    let (base, _) = output::open(&runtime, &args.base, &options)?;
    let (model, _) = output::open(&runtime, &args.load.model, &options)?;
    let windows = same_windows(&base, &model, args, n_ctx)?;
    output::catch_ctrl_c()?;
    let (sums, done) = compare(&base, &model, &windows)?;
    if done < windows.n {
        eprintln!("interrupted: {done} of {} windows were scored in full", windows.n);
    }
    let report = Report {
        model: model.file().path().display().to_string(),
        base: base.file().path().display().to_string(),
        device: model.plan().device_names(),
        n_ctx,
        windows: done,
        tokens_scored: sums.kl.n(),
        kl_mean: sums.kl.value(),
        kl_mean_error: sums.kl.error(),
        kl_median: sums.within(0.5),
        kl_p90: sums.within(0.9),
        kl_p99: sums.within(0.99),
        kl_max: sums.within(1.0),
        same_top: sums.n_same_top as f64 / sums.kl.n() as f64,
        perplexity: sums.nll.value().exp(),
        perplexity_base: sums.nll_base.value().exp(),
        log_ratio: sums.log_ratio.value(),
        log_ratio_error: sums.log_ratio.error(),
    };
    if args.json { output::print_json(&report) } else { print(&report) }
}

/// The windows of the text, which both models must cut into the same tokens.
fn same_windows(base: &Model, model: &Model, args: &KlArgs, n_ctx: u32) -> Result<Windows> {
    let (n_base, n_model) = (base.info().n_vocab, model.info().n_vocab);
    if n_base != n_model {
        bail!(
            "the base has {n_base} tokens and the model {n_model}: only models of one vocabulary can be compared"
        );
    }
    if args.file.as_os_str() == "-" {
        bail!("the text is read for each of the two models: give a file instead of -");
    }
    let windows = Windows::new(base, &args.file, n_ctx, args.chunks)?;
    let others = Windows::new(model, &args.file, n_ctx, args.chunks)?;
    if windows.n != others.n || (0..windows.n).any(|i| windows.window(i) != others.window(i)) {
        bail!(
            "the two models cut the text into different tokens: only models of one vocabulary can be compared"
        );
    }
    Ok(windows)
}

fn compare(base: &Model, model: &Model, windows: &Windows) -> Result<(Sums, usize)> {
    let template = "{wide_bar} window {pos} of {len}, {msg}, {eta} left";
    let bar = output::bar(windows.n as u64, template);
    let (mut of_base, mut of_model) = (base.sequence(), model.sequence());
    let (mut sums, mut logs, mut done) = (Sums::default(), Vec::new(), 0);
    let mut rows: Vec<Vec<f64>> = vec![Vec::new(); score::ROWS as usize];
    'windows: for i in 0..windows.n {
        let window = windows.window(i);
        if !windows.begin(&mut of_base, &window)? || !windows.begin(&mut of_model, &window)? {
            break;
        }
        for (piece, next) in windows.pieces(&window) {
            let mut kept = rows.iter_mut();
            of_base.eval(piece, Outputs::All, &output::CANCEL, |_, logits| {
                if let Some(row) = kept.next() {
                    log_softmax(logits, row);
                }
                Ok(())
            })?;
            let mut pairs = rows.iter().zip(next);
            of_model.eval(piece, Outputs::All, &output::CANCEL, |_, logits| {
                log_softmax(logits, &mut logs);
                if let Some((row, next)) = pairs.next() {
                    sums.add(row, &logs, *next);
                }
                Ok(())
            })?;
            if output::CANCEL.load(Ordering::SeqCst) {
                break 'windows;
            }
        }
        done = i + 1;
        bar.set_message(format!("KL {:.5}", sums.kl.value()));
        bar.inc(1);
    }
    bar.finish_and_clear();
    sums.distances.sort_unstable_by(f64::total_cmp);
    Ok((sums, done))
}

fn print(report: &Report) -> Result<()> {
    output::print(&format!(
        "KL mean {:.6} ± {:.6}, median {:.6}, 90 % {:.6}, 99 % {:.6}, max {:.6}",
        report.kl_mean,
        report.kl_mean_error,
        report.kl_median,
        report.kl_p90,
        report.kl_p99,
        report.kl_max
    ))?;
    output::print(&format!(
        "same likeliest token {:.2} % ({} tokens of {} windows of {})",
        report.same_top * 100.0,
        report.tokens_scored,
        report.windows,
        report.n_ctx
    ))?;
    output::print(&format!(
        "perplexity {:.4}, of the base {:.4}, ln of the quotient {:.5} ± {:.5}",
        report.perplexity, report.perplexity_base, report.log_ratio, report.log_ratio_error
    ))
}

#[cfg(test)]
mod tests {
    use super::Sums;

    /// A distance of the wrong sign or direction would praise the wrong quantisation.
    #[test]
    fn distances_agree_with_a_case_worked_by_hand() {
        let logs = |p: [f64; 3]| p.map(f64::ln);
        let (base, model) = (logs([0.5, 0.25, 0.25]), logs([0.25, 0.5, 0.25]));
        let mut sums = Sums::default();
        sums.add(&base, &model, 0);
        sums.add(&base, &base, 2);
        // KL = 1/2 ln 2 - 1/4 ln 2.
        let ln2 = std::f64::consts::LN_2;
        sums.distances.sort_unstable_by(f64::total_cmp);
        assert!((sums.within(1.0) - 0.25 * ln2).abs() < 1e-12);
        assert_eq!((sums.within(0.0), sums.n_same_top), (0.0, 1));
        assert!((sums.log_ratio.value() - 0.5 * ln2).abs() < 1e-12);
    }
}
