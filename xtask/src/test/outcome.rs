//! What a step gave, and what all of them give together.

use std::fmt;

/// The result of one step: how much passed, and a line for each thing that failed or was skipped.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) n_passed: usize,
    pub(crate) failures: Vec<String>,
    pub(crate) skips: Vec<String>,
}

impl Outcome {
    /// One check that passed.
    pub(crate) fn passed() -> Self {
        Self { n_passed: 1, ..Self::default() }
    }

    /// One check that failed.
    pub(crate) fn failed(why: impl Into<String>) -> Self {
        Self { failures: vec![why.into()], ..Self::default() }
    }

    /// One check that did not run.
    pub(crate) fn skipped(why: impl Into<String>) -> Self {
        Self { skips: vec![why.into()], ..Self::default() }
    }

    fn word(&self) -> String {
        match (self.failures.len(), self.skips.len()) {
            (0, 0) => "ok".to_owned(),
            (0, _) if self.n_passed == 0 => "SKIPPED".to_owned(),
            (0, n) => format!("ok, {n} skipped"),
            (_, _) => "FAILED".to_owned(),
        }
    }
}

/// The steps so far, in their order.
#[derive(Default)]
pub(crate) struct Report {
    steps: Vec<(&'static str, Outcome, f64)>,
}

impl Report {
    /// Adds a step and tells its result; gives whether nothing in it failed.
    pub(crate) fn add(&mut self, name: &'static str, (outcome, seconds): (Outcome, f64)) -> bool {
        println!("== {name}: {} ({seconds:.1} s)", outcome.word());
        for line in &outcome.failures {
            eprintln!("FAILED: {line}");
        }
        let is_good = outcome.failures.is_empty();
        self.steps.push((name, outcome, seconds));
        is_good
    }

    /// Whether nothing failed.
    pub(crate) fn is_good(&self) -> bool {
        self.steps.iter().all(|(_, outcome, _)| outcome.failures.is_empty())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, outcome, seconds) in &self.steps {
            writeln!(
                f,
                "{name:<10} {seconds:>8.1} s  {:>5} passed  {}",
                outcome.n_passed,
                outcome.word()
            )?;
        }
        let total: f64 = self.steps.iter().map(|(_, _, seconds)| seconds).sum();
        writeln!(f, "{:<10} {total:>8.1} s", "all")?;
        for (name, outcome, _) in &self.steps {
            for line in &outcome.skips {
                writeln!(f, "SKIPPED: {name}: {line}")?;
            }
        }
        for (name, outcome, _) in &self.steps {
            for line in &outcome.failures {
                writeln!(f, "FAILED: {name}: {line}")?;
            }
        }
        let sum = |count: fn(&Outcome) -> usize| {
            self.steps.iter().map(|(_, outcome, _)| count(outcome)).sum::<usize>()
        };
        let (n_passed, n_failed) =
            (sum(|outcome| outcome.n_passed), sum(|outcome| outcome.failures.len()));
        writeln!(
            f,
            "{n_passed} passed, {n_failed} failed, {} skipped",
            sum(|outcome| outcome.skips.len())
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_counts_everything_once() {
        let mut report = Report::default();
        assert!(report.add("format", (Outcome::passed(), 0.5)));
        let outcome = Outcome {
            n_passed: 7,
            failures: vec!["a::b".into()],
            skips: vec!["c: no model".into(), "d".into()],
        };
        assert!(!report.add("tests", (outcome, 2.0)));
        report.add("deny", (Outcome::skipped("not installed"), 0.0));
        let text = report.to_string();
        assert_eq!(text.lines().last(), Some("8 passed, 1 failed, 3 skipped"));
        assert!(
            text.contains("\nSKIPPED: tests: c: no model\n")
                && text.contains("\nFAILED: tests: a::b\n"),
            "{text}"
        );
        assert!(!report.is_good());
    }
}
