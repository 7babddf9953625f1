//! What is known of a backend: what it does not support, and what it is known to do wrong.
//!
//! The two lists are never mixed. The first is permanent, and says what a user of the backend cannot have; the second is a list of work and
//! shrinks. An entry covers all cases whose names begin with its words.

/// Cases, and why they are here.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// Id of the backend.
    pub backend: &'static str,
    /// The beginning of the names of the cases.
    pub case: &'static str,
    /// Why.
    pub reason: &'static str,
}

/// What to expect of the backend under test.
#[derive(Debug, Clone)]
pub struct Expectations {
    unsupported: Vec<Entry>,
    failures: Vec<Entry>,
    is_strict: bool,
}

impl Expectations {
    /// Of a backend that is known: what it refuses must be on the first list, what it does wrong on the second. Entries of
    /// other backends are skipped.
    pub fn listed(backend: &str, unsupported: &[Entry], failures: &[Entry]) -> Self {
        let own = |list: &[Entry]| {
            list.iter().copied().filter(|entry| entry.backend == backend).collect::<Vec<_>>()
        };
        Self { unsupported: own(unsupported), failures: own(failures), is_strict: true }
    }

    /// Of a backend that nobody knows: whatever it says it does not support is believed.
    pub fn unknown() -> Self {
        Self { unsupported: Vec::new(), failures: Vec::new(), is_strict: false }
    }

    /// Why the case is not supported, if that is known.
    pub(crate) fn unsupported(&self, case: &str) -> Option<&'static str> {
        find(&self.unsupported, case)
    }

    /// Why the case fails, if that is known.
    pub(crate) fn failure(&self, case: &str) -> Option<&'static str> {
        find(&self.failures, case)
    }

    /// Whether what is not supported must be on the list.
    pub(crate) fn is_strict(&self) -> bool {
        self.is_strict
    }
}

fn find(list: &[Entry], case: &str) -> Option<&'static str> {
    list.iter().find(|entry| case.starts_with(entry.case)).map(|entry| entry.reason)
}
