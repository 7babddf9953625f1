//! What a run of the suite found.

use crate::Expectations;
use std::fmt;

/// What a case did.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// Within its bound; the greatest error of its outputs.
    Passed(f64),
    /// The device says it cannot do it; what it refuses.
    Unsupported(String),
    /// It lacks what it needs, such as free memory; the reason.
    Skipped(String),
    /// Wrong, and how.
    Failed(String),
}

/// What a case did, held against what was expected of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// The case.
    pub name: String,
    /// What it did.
    pub outcome: Outcome,
    /// Whether that is as it should be.
    pub is_good: bool,
    /// What the lists say of it, or what is wrong with them.
    pub note: Option<String>,
}

impl Verdict {
    pub(crate) fn new(name: &str, outcome: Outcome, expectations: &Expectations) -> Self {
        let (unsupported, failure) = (expectations.unsupported(name), expectations.failure(name));
        let (is_good, note) = match (&outcome, unsupported, failure) {
            (Outcome::Skipped(_), ..) => (true, None),
            (Outcome::Unsupported(_), Some(reason), _) => (true, Some(reason.to_owned())),
            (Outcome::Unsupported(_), None, _) if !expectations.is_strict() => (true, None),
            (Outcome::Unsupported(_), None, _) => {
                (false, Some("not on the list of what this backend does not support".to_owned()))
            }
            (_, Some(_), _) => {
                (false, Some("listed as not supported, and accepted: change the list".to_owned()))
            }
            (Outcome::Failed(_), None, Some(reason)) => (true, Some(reason.to_owned())),
            (Outcome::Passed(_), None, Some(_)) => {
                (false, Some("listed as a known failure, and passes: change the list".to_owned()))
            }
            (Outcome::Failed(_), None, None) => (false, None),
            (Outcome::Passed(_), None, None) => (true, None),
        };
        Self { name: name.to_owned(), outcome, is_good, note }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.name)?;
        match &self.outcome {
            Outcome::Passed(error) if *error > 0.0 => write!(f, "passed, error {error:.1e}")?,
            Outcome::Passed(_) => f.write_str("passed")?,
            Outcome::Unsupported(what) => write!(f, "not supported: {what}")?,
            Outcome::Skipped(why) => write!(f, "skipped: {why}")?,
            Outcome::Failed(how) => write!(f, "FAILED: {how}")?,
        }
        self.note.as_ref().map_or(Ok(()), |note| write!(f, " ({note})"))
    }
}

/// All verdicts over a device.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// In the order of the suite.
    pub verdicts: Vec<Verdict>,
}

impl Report {
    /// The verdicts that are not as they should be.
    pub fn faults(&self) -> impl Iterator<Item = &Verdict> {
        self.verdicts.iter().filter(|verdict| !verdict.is_good)
    }

    /// What was skipped, with the reason.
    pub fn skipped(&self) -> impl Iterator<Item = &Verdict> {
        self.verdicts.iter().filter(|verdict| matches!(verdict.outcome, Outcome::Skipped(_)))
    }

    /// The greatest error of a case that passed.
    pub fn worst(&self) -> f64 {
        self.verdicts.iter().fold(0.0, |worst, verdict| match verdict.outcome {
            Outcome::Passed(error) => error.max(worst),
            _ => worst,
        })
    }

    pub(crate) fn append(&mut self, mut other: Self) {
        self.verdicts.append(&mut other.verdicts);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Entry;

    /// A list that hides regressions, or keeps entries that nobody needs, is worse than none.
    #[test]
    fn lists_are_held_against_what_happens() {
        let entry = |backend, case| Entry { backend, case, reason: "known" };
        let unsupported = [entry("x", "rope/"), entry("y", "matmul/")];
        let failures = [entry("x", "matmul/Q4")];
        let strict = Expectations::listed("x", &unsupported, &failures);
        let open = Expectations::unknown();
        let failed = || Outcome::Failed("how".into());
        let refused = || Outcome::Unsupported("what".into());
        let skipped = || Outcome::Skipped("why".into());
        for (expectations, name, outcome, expected) in [
            (&strict, "matmul/F32", Outcome::Passed(0.0), true),
            (&strict, "matmul/F32", failed(), false),
            (&strict, "matmul/F32", refused(), false),
            (&strict, "matmul/F32", skipped(), true),
            (&strict, "matmul/Q4_K", failed(), true),
            (&strict, "matmul/Q4_K", Outcome::Passed(0.0), false),
            (&strict, "matmul/Q4_K", refused(), false),
            (&strict, "rope/neox", refused(), true),
            (&strict, "rope/neox", Outcome::Passed(0.0), false),
            (&strict, "rope/neox", failed(), false),
            (&open, "rope/neox", refused(), true),
            (&open, "rope/neox", failed(), false),
        ] {
            let verdict = Verdict::new(name, outcome, expectations);
            assert_eq!(verdict.is_good, expected, "{verdict}");
        }
    }
}
