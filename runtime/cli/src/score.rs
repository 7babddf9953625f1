//! A text cut into windows whose second halves are scored: what the quality of a model is measured on.
//!
//! The windows are those of llama.cpp's `llama-perplexity`, so that figures can be compared: the text is tokenised once, with the tokens that the model
//! begins texts with and without reading control tokens; windows follow each other without overlap, what is left at the end is dropped; where
//! the model begins texts with BOS, the first token of every window is replaced by it; tokens of the first half are context, the others are
//! scored, each by the logits before it.

use crate::output;
use anyhow::{Context, Result, bail};
use std::io::Read;
use std::path::Path;
use tegula::{EncodeOptions, Model, Outputs, Sequence};

/// Rows of logits computed at once; enough to keep a device busy.
pub(crate) const ROWS: u32 = 64;
/// Tokens of a window where nobody says otherwise: that of the figures that people publish.
pub(crate) const N_CTX_DEFAULT: u32 = 512;

/// The windows of a text.
pub(crate) struct Windows {
    tokens: Vec<u32>,
    bos: Option<u32>,
    n_ctx: usize,
    /// Windows that are scored.
    pub(crate) n: usize,
}

impl Windows {
    /// At most `n_max` windows of `n_ctx` tokens of the file; `-` is stdin.
    pub(crate) fn new(model: &Model, file: &Path, n_ctx: u32, n_max: Option<u32>) -> Result<Self> {
        let text = read(file)?;
        let tokenizer = model.file().tokenizer();
        let options = EncodeOptions { add_special: true, parse_special: false };
        let tokens = tokenizer.encode(&text, options);
        let bos = tokenizer.bos().filter(|_| tokenizer.add_bos());
        let n_ctx = n_ctx as usize;
        if n_ctx < 4 {
            bail!("windows of {n_ctx} tokens are too short: give -c 4 or more");
        }
        if tokens.len() < 2 * n_ctx {
            bail!(
                "{} has {} tokens; {} are needed for two windows of {n_ctx}: give a longer text, or -c {}",
                file.display(),
                tokens.len(),
                2 * n_ctx,
                tokens.len() / 2
            );
        }
        let n = (tokens.len() / n_ctx).min(n_max.map_or(usize::MAX, |n| n as usize));
        Ok(Self { tokens, bos, n_ctx, n })
    }

    /// Tokens of window `i`.
    pub(crate) fn window(&self, i: usize) -> Vec<u32> {
        let mut out: Vec<u32> =
            self.tokens.iter().skip(i * self.n_ctx).take(self.n_ctx).copied().collect();
        if let (Some(bos), Some(first)) = (self.bos, out.first_mut()) {
            *first = bos;
        }
        out
    }

    /// Lets the sequence forget all, and evaluates the context of a window. False once Ctrl-C was pressed.
    pub(crate) fn begin(&self, sequence: &mut Sequence, window: &[u32]) -> Result<bool> {
        sequence.truncate(0);
        let context = window.get(..self.n_ctx / 2).unwrap_or_default();
        Ok(sequence.eval(context, Outputs::Last, &output::CANCEL, |_, _| Ok(()))?)
    }

    /// The rest of a window in pieces of at most `ROWS`: what is evaluated, and for each of its tokens the one after it, which its logits are scored
    /// by. The window's last token is only the latter.
    pub(crate) fn pieces<'a>(
        &self,
        window: &'a [u32],
    ) -> impl Iterator<Item = (&'a [u32], &'a [u32])> {
        let first = self.n_ctx / 2;
        let evaluated = window.get(first..window.len().saturating_sub(1)).unwrap_or_default();
        let next = window.get(first + 1..).unwrap_or_default();
        evaluated.chunks(ROWS as usize).zip(next.chunks(ROWS as usize))
    }
}

fn read(file: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    if file == Path::new("-") {
        std::io::stdin().read_to_end(&mut bytes).context("stdin")?;
    } else {
        bytes = std::fs::read(file).with_context(|| file.display().to_string())?;
    }
    String::from_utf8(bytes).with_context(|| {
        format!("{} is not UTF-8; convert it first (for example with iconv)", file.display())
    })
}

/// Logarithms of the probabilities that logits stand for.
pub(crate) fn log_softmax(logits: &[f32], out: &mut Vec<f64>) {
    let greatest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - greatest).exp()).sum();
    let norm = greatest + sum.ln();
    out.clear();
    out.extend(logits.iter().map(|logit| f64::from(*logit) - norm));
}

/// Numbers of which the mean and its uncertainty are asked for.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Mean {
    n: u64,
    sum: f64,
    sum_squares: f64,
}

impl Mean {
    pub(crate) fn add(&mut self, x: f64) {
        self.n += 1;
        self.sum += x;
        self.sum_squares += x * x;
    }

    pub(crate) fn n(&self) -> u64 {
        self.n
    }

    pub(crate) fn value(&self) -> f64 {
        self.sum / self.n as f64
    }

    /// The standard deviation of the mean; 0 of fewer than two numbers.
    pub(crate) fn error(&self) -> f64 {
        if self.n < 2 {
            return 0.0;
        }
        let variance = self.sum_squares / self.n as f64 - self.value().powi(2);
        (variance.max(0.0) / (self.n - 1) as f64).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::{Mean, log_softmax};

    /// Whoever compares two models by these numbers must not compare roundings.
    #[test]
    fn means_and_probabilities_agree_with_cases_worked_by_hand() {
        let mut mean = Mean::default();
        [1.0, 2.0, 4.0, 5.0].iter().for_each(|x| mean.add(*x));
        assert_eq!((mean.n(), mean.value()), (4, 3.0));
        // The variance is 2.5, over three.
        assert!((mean.error() - (2.5f64 / 3.0).sqrt()).abs() < 1e-12);
        let mut out = vec![9.0];
        log_softmax(&[1000.0, 1000.0, 1000.0 + 2f32.ln()], &mut out);
        let wanted = [0.25f64.ln(), 0.25f64.ln(), 0.5f64.ln()];
        assert!(out.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-4), "{out:?}");
    }
}
