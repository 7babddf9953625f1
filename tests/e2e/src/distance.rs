//! How far our logits are from the exact ones. Everything in f64, natural logarithm.

use serde_json::Value;

/// `ln Σ exp(logit)`.
pub fn logsumexp(logits: &[f32]) -> f64 {
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    assert!(greatest.is_finite(), "the greatest logit is {greatest}");
    let greatest = f64::from(greatest);
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - greatest).exp()).sum();
    greatest + sum.ln()
}

/// KL(exact || ours) over the whole vocabulary.
pub fn kl(exact: &[f32], ours: &[f32]) -> f64 {
    assert_eq!(exact.len(), ours.len(), "the vocabularies differ");
    let (of_exact, of_ours) = (logsumexp(exact), logsumexp(ours));
    exact
        .iter()
        .zip(ours)
        .map(|(p, q)| {
            let log_p = f64::from(*p) - of_exact;
            log_p.exp() * (log_p - (f64::from(*q) - of_ours))
        })
        .sum()
}

/// The id of the greatest logit, the lowest of equals.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = (0u32, f32::NEG_INFINITY);
    for (id, logit) in (0u32..).zip(logits) {
        if *logit > best.1 {
            best = (id, *logit);
        }
    }
    best.0
}

/// Probability below which the tail of [`TopLogits`] says nothing: its figures have five decimals.
const TAIL_MIN: f64 = 1e-3;

/// The greatest exact logits of a position, with the logsumexp of all.
#[derive(Debug)]
pub struct TopLogits {
    logsumexp: f64,
    top: Vec<(u32, f64)>,
}

impl TopLogits {
    /// From `logsumexp` and `[[id, logit], ...]`.
    pub fn new(logsumexp: &Value, top: &Value) -> Self {
        let pair = |pair: &Value| {
            let id = u32::try_from(pair[0].as_u64().expect("an id")).expect("a small id");
            (id, pair[1].as_f64().expect("a logit"))
        };
        Self {
            logsumexp: logsumexp.as_f64().expect("a logsumexp"),
            top: top.as_array().expect("pairs of id and logit").iter().map(pair).collect(),
        }
    }

    /// A lower bound of KL(exact || ours): that of the distributions over the listed ids and "any other", since merging
    /// outcomes never increases KL. Where nearly all probability is listed, "any other" is smaller than the rounding of the
    /// list, and the distributions given that the id is listed are compared instead.
    pub fn kl_at_least(&self, ours: &[f32]) -> f64 {
        let our_logsumexp = logsumexp(ours);
        let log_p = self.top.iter().map(|(_, logit)| logit - self.logsumexp);
        let log_q = self.top.iter().map(|(id, _)| f64::from(ours[*id as usize]) - our_logsumexp);
        let pairs: Vec<(f64, f64)> = log_p.zip(log_q).collect();
        let listed_p: f64 = pairs.iter().map(|(p, _)| p.exp()).sum();
        let listed_q: f64 = pairs.iter().map(|(_, q)| q.exp()).sum();
        let listed: f64 =
            pairs.iter().map(|(p, q)| p.exp() * (p - q - listed_p.ln() + listed_q.ln())).sum();
        let (tail_p, tail_q) = (1.0 - listed_p, 1.0 - listed_q);
        if tail_p < TAIL_MIN || tail_q <= 0.0 {
            return listed;
        }
        listed + listed_p * (listed_p / listed_q).ln() + tail_p * (tail_p / tail_q).ln()
    }

    /// The greatest difference of a listed logarithm of a probability.
    pub fn abs_diff_max(&self, ours: &[f32]) -> f64 {
        let our_logsumexp = logsumexp(ours);
        self.top
            .iter()
            .map(|(id, logit)| {
                let ours = f64::from(ours[*id as usize]) - our_logsumexp;
                (logit - self.logsumexp - ours).abs()
            })
            .fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A distance that is wrong would let a wrong kernel pass.
    #[test]
    fn distances_agree_with_a_case_worked_by_hand() {
        // p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4): KL = 1/2 ln 2 - 1/4 ln 2.
        let (ln2, p, q) = (std::f32::consts::LN_2, [1.0, 0.5, 0.5], [0.5, 1.0, 0.5f32]);
        let logits = |scores: [f32; 3]| scores.map(|score| score.ln() + 3.0 * ln2);
        let expected = 0.25 * f64::from(ln2);
        assert!((kl(&logits(p), &logits(q)) - expected).abs() < 1e-7);
        assert!(kl(&logits(p), &logits(p)).abs() < 1e-12);
        assert_eq!(argmax(&logits(q)), 1);

        // Listing two of three loses nothing here: the third is alone in "any other".
        let exact = logits(p);
        let top = TopLogits::new(
            &json!(logsumexp(&exact)),
            &json!([[0, f64::from(exact[0])], [1, f64::from(exact[1])]]),
        );
        assert!((top.kl_at_least(&logits(q)) - expected).abs() < 1e-7);
        assert!(top.kl_at_least(&exact).abs() < 1e-12);
        assert!((top.abs_diff_max(&logits(q)) - f64::from(ln2)).abs() < 1e-6);
    }
}
