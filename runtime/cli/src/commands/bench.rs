//! `tegula bench`: how fast a model runs here.
//!
//! A case is a prompt of some tokens, or some tokens generated one by one (by several sequences together, if asked), after a depth of tokens that are in the KV cache already. The first
//! run of a case is told apart: it pays for what is set up once, which a user waits for and a median hides.

use crate::args::BenchArgs;
use crate::output;
use crate::table::{table, terminal_width};
use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;
use serde::Serialize;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tegula::memory::units::format_size;
use tegula::{BatchItem, Model, Outputs, Sampler, SamplerOptions, Sequence};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Prompt,
    Generate,
}

/// What is measured.
#[derive(Debug, Clone, Copy, Serialize)]
struct Spec {
    kind: Kind,
    /// Of each sequence.
    n_tokens: u32,
    /// Of each sequence.
    depth: u32,
    /// Sequences evaluated together.
    n_seqs: u32,
}

/// One case and what it took.
#[derive(Debug, Serialize)]
struct Case {
    #[serde(flatten)]
    spec: Spec,
    /// Tokens a second of the first run, which is not among the samples.
    first: f64,
    /// Tokens a second of each run after it.
    samples: Vec<f64>,
    median: f64,
    min: f64,
    max: f64,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    device: String,
    threads: Option<u32>,
    kv_type_k: &'static str,
    kv_type_v: &'static str,
    /// Bytes of all weights; a generated token reads about as many.
    weight_bytes: u64,
    load_ms: f64,
    peak_memory_bytes: Option<u64>,
    cases: Vec<Case>,
}

pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    let cases = cases(args);
    let tokens =
        |spec: &Spec| (u64::from(spec.n_tokens) + u64::from(spec.depth)) * u64::from(spec.n_seqs);
    let longest = cases.iter().map(tokens).max();
    let longest =
        longest.filter(|n| *n > 0).context("nothing to measure: give -p N or -n N above 0")?;
    let longest = u32::try_from(longest).context("the tokens of one case are over 2^32")?;
    let mut options = args.load.how.options(1);
    let n_seqs = cases.iter().map(|spec| spec.n_seqs).max().unwrap_or(1);
    options.plan.n_parallel = options.plan.n_parallel.max(n_seqs);
    let n_ctx = *options.plan.n_ctx.get_or_insert(longest);
    if n_ctx < longest {
        bail!(
            "a case takes {longest} tokens, the context is {n_ctx}: give -c {longest}, or shorter cases"
        );
    }
    let (model, load) = output::load_with(&args.load, &options)?;
    output::catch_ctrl_c()?;
    let bar = ProgressBar::new(cases.len() as u64 * u64::from(args.repeat + 1));
    let (n_cases, mut results) = (cases.len(), Vec::new());
    for spec in cases {
        let Spec { kind, n_tokens, depth, n_seqs } = spec;
        bar.println(format!("{} x {n_seqs}: {n_tokens} tokens at depth {depth}", kind.name()));
        match measure(&model, spec, args.repeat, &bar)? {
            Some(case) => results.push(case),
            None => break,
        }
    }
    bar.finish_and_clear();
    if results.len() < n_cases {
        eprintln!("interrupted: {} of {n_cases} cases were measured", results.len());
    }
    let report = Report {
        model: model.file().path().display().to_string(),
        device: model.plan().device_names(),
        threads: args.load.how.threads,
        kv_type_k: options.plan.dtype_k.name(),
        kv_type_v: options.plan.dtype_v.name(),
        weight_bytes: model.plan().report.model.tensor_bytes,
        load_ms: load.as_secs_f64() * 1e3,
        peak_memory_bytes: output::peak_memory(),
        cases: results,
    };
    if args.json { output::print_json(&report) } else { print(&report) }
}

/// All prompts and generations at all depths, in the order they were named.
fn cases(args: &BenchArgs) -> Vec<Spec> {
    let kinds =
        [(Kind::Prompt, &args.prompt, &[1][..]), (Kind::Generate, &args.generate, &args.sequences)];
    let mut out = Vec::new();
    for depth in &args.depth {
        for (kind, counts, sequences) in kinds {
            for n_seqs in sequences {
                let spec = |n: &u32| Spec { kind, n_tokens: *n, depth: *depth, n_seqs: *n_seqs };
                out.extend(counts.iter().filter(|n| **n > 0).map(spec));
            }
        }
    }
    out
}

/// Runs a case once more than `repeat` times; `None` once Ctrl-C was pressed.
fn measure(model: &Model, spec: Spec, repeat: u32, bar: &ProgressBar) -> Result<Option<Case>> {
    let mut sequences: Vec<Sequence> = (0..spec.n_seqs).map(|_| model.sequence()).collect();
    let mut tokens = Tokens { state: 1, n_vocab: model.info().n_vocab.max(1) };
    for sequence in &mut sequences {
        if !sequence.eval(
            &tokens.take(spec.depth),
            Outputs::Last,
            &output::CANCEL,
            |_, _| Ok(()),
        )? {
            return Ok(None);
        }
    }
    let prompt = tokens.take(spec.n_tokens.max(spec.n_seqs));
    let mut rates = Vec::new();
    for _ in 0..=repeat {
        sequences.iter_mut().for_each(|sequence| sequence.truncate(spec.depth));
        let time = match (spec.kind, &mut sequences[..]) {
            (Kind::Prompt, [sequence]) => prompt_time(sequence, &prompt)?,
            _ => generate_time(model, &mut sequences, &prompt, spec.n_tokens)?,
        };
        // What was cut short took less time than its tokens would have.
        if output::CANCEL.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let all = f64::from(spec.n_tokens) * f64::from(spec.n_seqs);
        rates.push(all / time.as_secs_f64().max(1e-9));
        bar.inc(1);
    }
    let first = rates.remove(0);
    let samples = rates;
    let mut sorted = samples.clone();
    sorted.sort_by(f64::total_cmp);
    let (min, max) = (sorted.first().copied(), sorted.last().copied());
    Ok(Some(Case {
        spec,
        first,
        median: median(&sorted),
        min: min.unwrap_or(first),
        max: max.unwrap_or(first),
        samples,
    }))
}

fn prompt_time(sequence: &mut Sequence, prompt: &[u32]) -> Result<Duration> {
    let begin = Instant::now();
    sequence.eval(prompt, Outputs::Last, &output::CANCEL, |_, _| Ok(()))?;
    Ok(begin.elapsed())
}

/// Greedy generation of `n` tokens by each sequence, all together, the choice of each token included.
fn generate_time(
    model: &Model,
    sequences: &mut [Sequence],
    first: &[u32],
    n: u32,
) -> Result<Duration> {
    let options = SamplerOptions { temperature: 0.0, ..SamplerOptions::default() };
    let mut sampler = Sampler::new(options)?;
    let mut next = first.to_vec();
    let begin = Instant::now();
    for _ in 0..n {
        if output::CANCEL.load(Ordering::Relaxed) {
            break;
        }
        let tokens = next.clone();
        let mut items: Vec<BatchItem<'_>> = sequences
            .iter_mut()
            .zip(tokens.chunks(1))
            .map(|(sequence, token)| BatchItem::new(sequence, token))
            .collect();
        model.eval_batch(&mut items, &output::CANCEL, |item, pos, logits| {
            if let Some(next) = next.get_mut(item) {
                *next = sampler.sample(logits, pos)?;
            }
            Ok(())
        })?;
        if let Some(refusal) = items.iter_mut().find_map(|item| item.refusal.take()) {
            return Err(refusal.into());
        }
    }
    Ok(begin.elapsed())
}

/// The middle of sorted numbers; of the two in the middle, their mean.
fn median(sorted: &[f64]) -> f64 {
    let at = |i: usize| sorted.get(i).copied().unwrap_or(f64::NAN);
    let half = sorted.len() / 2;
    if sorted.len() % 2 == 1 {
        at(half)
    } else {
        f64::midpoint(at(half.saturating_sub(1)), at(half))
    }
}

/// Token ids that look like nothing in particular, the same in every run.
struct Tokens {
    state: u64,
    n_vocab: u32,
}

impl Tokens {
    fn take(&mut self, n: u32) -> Vec<u32> {
        (0..n)
            .map(|_| {
                // Knuth's linear congruential generator for 64 bits, of which the upper bits are random enough.
                self.state = self
                    .state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                u32::try_from(self.state >> 33).unwrap_or(0) % self.n_vocab
            })
            .collect()
    }
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Prompt => "prompt",
            Self::Generate => "generate",
        }
    }
}

fn print(report: &Report) -> Result<()> {
    let threads = report.threads.map(|n| format!(", {n} threads")).unwrap_or_default();
    output::print(&format!(
        "{}\n{}{threads}, KV {}/{}, load {:.0} ms, weights {}{}\n",
        report.model,
        report.device,
        report.kv_type_k,
        report.kv_type_v,
        report.load_ms,
        format_size(report.weight_bytes),
        report
            .peak_memory_bytes
            .map(|n| format!(", peak memory {}", format_size(n)))
            .unwrap_or_default(),
    ))?;
    let rows: Vec<Vec<String>> = report.cases.iter().map(|case| row(case, report)).collect();
    let header = [
        "case",
        "seqs",
        "tokens",
        "depth",
        "t/s",
        "least",
        "most",
        "first",
        "ms/token",
        "weights GB/s",
    ];
    output::print(&table(&header, &rows, &[1, 2, 3, 4, 5, 6, 7, 8, 9], terminal_width()))
}

fn row(case: &Case, report: &Report) -> Vec<String> {
    // A run of several tokens reads the weights once: a bandwidth of each token would say nothing.
    let bandwidth = match (case.spec.kind, case.spec.n_seqs) {
        #[expect(clippy::cast_precision_loss, reason = "bytes of weights are far below 2^53")]
        (Kind::Generate, 1) => format!("{:.1}", report.weight_bytes as f64 * case.median / 1e9),
        _ => String::new(),
    };
    vec![
        case.spec.kind.name().to_owned(),
        case.spec.n_seqs.to_string(),
        case.spec.n_tokens.to_string(),
        case.spec.depth.to_string(),
        format!("{:.1}", case.median),
        format!("{:.1}", case.min),
        format!("{:.1}", case.max),
        format!("{:.1}", case.first),
        format!("{:.2}", 1e3 / case.median.max(1e-9)),
        bandwidth,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A wrong middle would be believed.
    #[test]
    fn the_median_is_the_middle() {
        for (sorted, expected) in
            [(&[3.0][..], 3.0), (&[1.0, 2.0][..], 1.5), (&[1.0, 2.0, 9.0][..], 2.0)]
        {
            assert!((median(sorted) - expected).abs() < 1e-12, "{sorted:?}");
        }
    }

    /// Ids over the vocabulary would be refused; the same ids each time make runs comparable.
    #[test]
    fn tokens_are_the_same_each_time_and_within_the_vocabulary() {
        let take = |n_vocab| Tokens { state: 1, n_vocab }.take(100);
        assert_eq!(take(50), take(50));
        assert!(take(50).iter().all(|id| *id < 50) && take(1).iter().all(|id| *id == 0));
    }
}
