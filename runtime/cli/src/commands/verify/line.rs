//! What the process that runs the suite tells the one that waits for it: a JSON object to the line, on stdout.
//!
//! A plugin may write to stdout as well, and leave a line unended. So each of our lines begins with a byte that text does not have;
//! whatever stands before it, or in lines without it, is the plugin's.

use serde::{Deserialize, Serialize};
use std::io::Write as _;
use tegula_conformance::{Outcome, Verdict};

/// ASCII's record separator.
const MARK: u8 = 0x1e;

/// One message.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Line {
    /// The plugin gave no backend, or the suite cannot run.
    Refused {
        /// Why.
        reason: String,
    },
    /// The plugin is open.
    Opened(Plugin),
    /// What there is to know of the boundary.
    Fact(Fact),
    /// The lines that follow are about this device.
    Device(Device),
    /// The cases that follow belong to this part of the suite, by the name that `--only` knows.
    Part {
        /// Which.
        name: String,
    },
    /// Something begins.
    Begin {
        /// What.
        case: String,
    },
    /// It is decided.
    End(Case),
    /// All of it is done, and the plugin is closed.
    Done,
}

/// What was opened, and what it is measured against.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Plugin {
    pub(super) id: String,
    pub(super) version: String,
    pub(super) description: String,
    pub(super) path: String,
    /// Id, version and path.
    pub(super) oracle: Option<String>,
}

/// A property of the negotiation.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Fact {
    pub(super) what: String,
    pub(super) found: String,
    pub(super) is_good: bool,
}

/// A device of the plugin.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Device {
    pub(super) id: String,
    pub(super) name: String,
}

/// How a case ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum End {
    Passed,
    Unsupported,
    Skipped,
    Failed,
}

/// A verdict.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Case {
    pub(super) name: String,
    /// The part of the suite; known to whoever reads the lines.
    #[serde(default)]
    pub(super) part: String,
    pub(super) end: End,
    /// Of a case that passed, its greatest error.
    pub(super) error: Option<f64>,
    /// Of any other, why.
    pub(super) why: Option<String>,
    /// What the lists of expectations say of it.
    pub(super) note: Option<String>,
    pub(super) is_good: bool,
}

impl Case {
    pub(super) fn of(verdict: &Verdict) -> Self {
        let (end, error, why) = match &verdict.outcome {
            Outcome::Passed(error) => (End::Passed, Some(*error), None),
            Outcome::Unsupported(what) => (End::Unsupported, None, Some(what.clone())),
            Outcome::Skipped(why) => (End::Skipped, None, Some(why.clone())),
            Outcome::Failed(how) => (End::Failed, None, Some(how.clone())),
        };
        let (note, is_good) = (verdict.note.clone(), verdict.is_good);
        Self { name: verdict.name.clone(), part: String::new(), end, error, why, note, is_good }
    }

    /// The op or kind of promise that it is about.
    pub(super) fn subject(&self) -> &str {
        self.name.split('/').next().unwrap_or_default()
    }
}

/// Tells the waiting process.
pub(super) fn tell(line: &Line) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(&[MARK])?;
    serde_json::to_writer(&mut out, line)?;
    out.write_all(b"\n")
}

/// Takes a line apart: the plugin's own words, and the message.
pub(super) fn read(bytes: &[u8]) -> (&[u8], Option<Line>) {
    let Some(at) = bytes.iter().position(|byte| *byte == MARK) else { return (bytes, None) };
    let (words, message) = bytes.split_at(at);
    match serde_json::from_slice(message.get(1..).unwrap_or_default()) {
        Ok(line) => (words, Some(line)),
        Err(_) => (bytes, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plugin that prints would hide the verdicts, or be taken for one.
    #[test]
    fn words_of_a_plugin_are_kept_apart() {
        let line = b"half a line\x1e{\"event\":\"begin\",\"case\":\"matmul/F32\"}";
        let (words, message) = read(line);
        assert_eq!(words, b"half a line");
        assert!(matches!(message, Some(Line::Begin { case }) if case == "matmul/F32"));
        for words in [&b"{\"event\":\"done\"}"[..], b"\x1ebroken", b""] {
            let (kept, message) = read(words);
            assert!(kept == words && message.is_none());
        }
    }
}
