//! Chooses a token from logits: a chain of named stages ending in a choice.
//!
//! Stages run in the field's usual order: repeat penalty, top-k, softmax, top-p, min-p, temperature, draw. Temperature 0 is greedy: the
//! greatest logit after the penalty, the lowest id among equals. The same seed, options and logits give the same tokens on every machine.

use crate::{Error, Result};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// The chain's settings. The defaults are llama.cpp's, which users of GGUF files know.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplerOptions {
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// Keeps the k greatest; 0 keeps all.
    pub top_k: u32,
    /// Keeps the fewest whose probabilities sum to p; 1 keeps all.
    pub top_p: f32,
    /// Keeps those with at least p times the greatest probability; 0 keeps all.
    pub min_p: f32,
    /// Divides positive logits (multiplies negative ones) of recent tokens; 1 is none.
    pub repeat_penalty: f32,
    /// How many tokens back the penalty looks.
    pub repeat_last_n: usize,
    /// Seed of the draw.
    pub seed: u64,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        Self {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            seed: 0,
        }
    }
}

impl SamplerOptions {
    /// Refuses settings that would make every draw meaningless.
    pub fn validate(&self) -> Result<()> {
        let rules = [
            ("--temperature", self.temperature >= 0.0 && self.temperature.is_finite(), "0 or more"),
            ("--top-p", self.top_p > 0.0 && self.top_p <= 1.0, "above 0 and at most 1"),
            ("--min-p", (0.0..=1.0).contains(&self.min_p), "0 to 1"),
            (
                "--repeat-penalty",
                self.repeat_penalty > 0.0 && self.repeat_penalty.is_finite(),
                "above 0",
            ),
        ];
        for (name, ok, allowed) in rules {
            if !ok {
                return Err(Error::Option { name, why: format!("must be {allowed}") });
            }
        }
        Ok(())
    }
}

/// A sampler with its own random stream.
#[derive(Debug)]
pub struct Sampler {
    options: SamplerOptions,
    rng: ChaCha8Rng,
    candidates: Vec<(f32, u32)>,
    recent: Vec<u32>,
}

impl Sampler {
    /// A sampler that starts its stream at the options' seed.
    pub fn new(options: SamplerOptions) -> Result<Self> {
        options.validate()?;
        Ok(Self {
            options,
            rng: ChaCha8Rng::seed_from_u64(options.seed),
            candidates: Vec::new(),
            recent: Vec::new(),
        })
    }

    /// Tells the sampler of a token that is now in the sequence, prompt tokens too.
    pub fn accept(&mut self, token: u32) {
        if self.options.repeat_last_n == 0 {
            return;
        }
        if self.recent.len() >= self.options.repeat_last_n {
            self.recent.remove(0);
        }
        self.recent.push(token);
    }

    /// Chooses from one row of logits. `pos` is named in the error when a logit is no number.
    pub fn sample(&mut self, logits: &mut [f32], pos: u32) -> Result<u32> {
        self.penalise(logits);
        if self.options.temperature == 0.0 {
            return greedy(logits, pos);
        }
        self.candidates.clear();
        for (id, logit) in (0u32..).zip(logits.iter()) {
            if logit.is_nan() {
                return Err(Error::NotANumber { pos });
            }
            self.candidates.push((*logit, id));
        }
        let falling = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        let k = self.options.top_k as usize;
        if k > 0 && k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(k - 1, falling);
            self.candidates.truncate(k);
        }
        self.candidates.sort_unstable_by(falling);
        self.cut();
        self.draw(pos)
    }

    fn penalise(&self, logits: &mut [f32]) {
        if self.options.repeat_penalty == 1.0 {
            return;
        }
        let mut seen = self.recent.clone();
        seen.sort_unstable();
        seen.dedup();
        for id in seen {
            if let Some(logit) = logits.get_mut(id as usize) {
                if *logit > 0.0 {
                    *logit /= self.options.repeat_penalty;
                } else {
                    *logit *= self.options.repeat_penalty;
                }
            }
        }
    }

    /// top-p and min-p over the sorted candidates, at temperature 1.
    fn cut(&mut self) {
        let Some(greatest) = self.candidates.first().map(|(logit, _)| *logit) else { return };
        let weight = |logit: f32| f64::from(logit - greatest).exp();
        if self.options.top_p < 1.0 {
            let total: f64 = self.candidates.iter().map(|(logit, _)| weight(*logit)).sum();
            let mut sum = 0.0;
            let enough = f64::from(self.options.top_p) * total;
            let keep = self.candidates.iter().position(|(logit, _)| {
                sum += weight(*logit);
                sum >= enough
            });
            self.candidates.truncate(keep.map_or(self.candidates.len(), |last| last + 1));
        }
        if self.options.min_p > 0.0 {
            let least = f64::from(self.options.min_p);
            let keep = self.candidates.partition_point(|(logit, _)| weight(*logit) >= least);
            self.candidates.truncate(keep.max(1));
        }
    }

    fn draw(&mut self, pos: u32) -> Result<u32> {
        let (greatest, first) = *self.candidates.first().ok_or(Error::NotANumber { pos })?;
        let temperature = f64::from(self.options.temperature);
        let weight = |logit: f32| (f64::from(logit - greatest) / temperature).exp();
        let total: f64 = self.candidates.iter().map(|(logit, _)| weight(*logit)).sum();
        // 53 random bits make a number in 0..1 that every machine computes alike.
        let mut left = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64 * total;
        for (logit, id) in &self.candidates {
            left -= weight(*logit);
            if left < 0.0 {
                return Ok(*id);
            }
        }
        Ok(first)
    }
}

/// The greatest logit's id, the lowest among equals.
pub fn greedy(logits: &[f32], pos: u32) -> Result<u32> {
    let mut best: Option<(f32, u32)> = None;
    for (id, logit) in (0u32..).zip(logits) {
        if logit.is_nan() {
            return Err(Error::NotANumber { pos });
        }
        if best.is_none_or(|(greatest, _)| *logit > greatest) {
            best = Some((*logit, id));
        }
    }
    best.map(|(_, id)| id).ok_or(Error::NotANumber { pos })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(options: SamplerOptions, logits: &[f32], n: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(options).unwrap();
        (0..n).map(|_| sampler.sample(&mut logits.to_vec(), 0).unwrap()).collect()
    }

    /// `--seed` must reproduce a text, and another seed must not.
    #[test]
    fn seeds_reproduce() {
        let logits: Vec<f32> = (0..100).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
        let with = |seed| SamplerOptions { seed, top_k: 0, top_p: 1.0, ..Default::default() };
        assert_eq!(draws(with(7), &logits, 50), draws(with(7), &logits, 50));
        assert_ne!(draws(with(7), &logits, 50), draws(with(8), &logits, 50));
    }

    /// Each stage keeps exactly the tokens its name promises.
    #[test]
    fn stages_keep_what_they_should() {
        let logits: Vec<f32> = [0.5f32, 0.25, 0.125, 0.0625, 0.0625].map(f32::ln).to_vec();
        let all = SamplerOptions {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            ..Default::default()
        };
        let table = [
            (all, 5),
            (SamplerOptions { top_k: 2, ..all }, 2),
            (SamplerOptions { top_p: 0.7, ..all }, 2),
            (SamplerOptions { top_p: 0.76, ..all }, 3),
            (SamplerOptions { min_p: 0.2, ..all }, 3),
            (SamplerOptions { temperature: 0.0, ..all }, 1),
            (SamplerOptions { temperature: 1e-4, ..all }, 1),
        ];
        for (options, kept) in table {
            let mut seen = draws(options, &logits, 2000);
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen, (0..kept).collect::<Vec<u32>>(), "{options:?}");
        }
        let firsts = draws(all, &logits, 20_000).iter().filter(|id| **id == 0).count();
        assert!((9_500..10_500).contains(&firsts), "{firsts} of 20,000 at probability 1/2");
    }

    /// A repeated token must lose to its runner-up once penalised, whatever its sign.
    #[test]
    fn repeats_are_penalised() {
        for logits in [[2.0f32, 1.9], [-1.0, -1.05]] {
            let options =
                SamplerOptions { temperature: 0.0, repeat_penalty: 1.2, ..Default::default() };
            let mut sampler = Sampler::new(options).unwrap();
            assert_eq!(sampler.sample(&mut logits.to_vec(), 0).unwrap(), 0);
            sampler.accept(0);
            assert_eq!(sampler.sample(&mut logits.to_vec(), 0).unwrap(), 1);
        }
    }

    /// A NaN is a fault to report, not a token to print.
    #[test]
    fn nan_and_nonsense_are_errors() {
        for temperature in [0.0, 1.0] {
            let options = SamplerOptions { temperature, ..Default::default() };
            let mut sampler = Sampler::new(options).unwrap();
            assert!(sampler.sample(&mut [0.0, f32::NAN], 3).is_err());
            assert!(sampler.sample(&mut [], 3).is_err());
        }
        for options in [
            SamplerOptions { temperature: -1.0, ..Default::default() },
            SamplerOptions { temperature: f32::NAN, ..Default::default() },
            SamplerOptions { top_p: 0.0, ..Default::default() },
            SamplerOptions { min_p: 1.5, ..Default::default() },
            SamplerOptions { repeat_penalty: 0.0, ..Default::default() },
        ] {
            assert!(Sampler::new(options).is_err(), "{options:?}");
        }
    }
}
