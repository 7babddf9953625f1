//! What the suite found, for a person who has to act on it.

use super::line::{Case, Device, End, Fact, Line, Plugin};
use crate::table::{table, terminal_width, wrap};
use serde::Serialize;
use std::time::Duration;

/// Cases that are named where a list is for orientation only.
const NAMED_MAX: usize = 4;

/// Everything that was told.
#[derive(Debug, Default, Serialize)]
pub(super) struct Report {
    /// Whether everything holds.
    pub(super) holds: bool,
    seconds: f64,
    plugin: Option<Plugin>,
    /// Why the suite did not run.
    refused: Option<String>,
    /// How the plugin ended the process, and during what.
    ended: Option<String>,
    facts: Vec<Fact>,
    devices: Vec<DeviceReport>,
    /// The part that is running.
    #[serde(skip)]
    part: String,
}

#[derive(Debug, Serialize)]
struct DeviceReport {
    #[serde(flatten)]
    device: Device,
    cases: Vec<Case>,
}

impl Report {
    /// Takes a line in.
    pub(super) fn add(&mut self, line: Line) {
        match line {
            Line::Refused { reason } => self.refused = Some(reason),
            Line::Opened(plugin) => self.plugin = Some(plugin),
            Line::Fact(fact) => self.facts.push(fact),
            Line::Device(device) => {
                self.devices.push(DeviceReport { device, cases: Vec::new() });
            }
            Line::Part { name } => self.part = name,
            Line::End(mut case) => {
                case.part.clone_from(&self.part);
                if let Some(device) = self.devices.last_mut() {
                    device.cases.push(case);
                }
            }
            Line::Begin { .. } | Line::Done => {}
        }
    }

    /// Decides whether all holds. `ended` tells of a process that did not come to its end.
    pub(super) fn close(&mut self, ended: Option<String>, time: Duration) {
        self.ended = ended;
        self.seconds = time.as_secs_f64();
        self.holds = self.n_faults() == 0;
    }

    /// Number of things that are not as they should be.
    pub(super) fn n_faults(&self) -> usize {
        let facts = self.facts.iter().filter(|fact| !fact.is_good).count();
        let cases = self.cases().filter(|(_, case)| !case.is_good).count();
        facts + cases + usize::from(self.refused.is_some()) + usize::from(self.ended.is_some())
    }

    fn cases(&self) -> impl Iterator<Item = (&Device, &Case)> {
        self.devices
            .iter()
            .flat_map(|report| report.cases.iter().map(|case| (&report.device, case)))
    }

    /// As text.
    pub(super) fn text(&self) -> String {
        let mut out = Vec::new();
        if let Some(plugin) = &self.plugin {
            out.push(format!("{} {}  {}", plugin.id, plugin.version, plugin.description));
            out.push(format!("  {}", plugin.path));
            out.extend(plugin.oracle.as_ref().map(|oracle| format!("oracle: {oracle}")));
        }
        if !self.facts.is_empty() {
            out.push("\nabi".to_owned());
            let row = |fact: &Fact| {
                let mark = if fact.is_good { "ok" } else { "FAULT" };
                vec![format!("  {}", fact.what), mark.to_owned(), fact.found.clone()]
            };
            let rows: Vec<_> = self.facts.iter().map(row).collect();
            let lines = table(&["", "", ""], &rows, &[], None);
            out.extend(lines.lines().skip(1).map(ToOwned::to_owned));
        }
        for report in &self.devices {
            out.push(report.text());
        }
        let faults: Vec<_> = self.cases().filter(|(_, case)| !case.is_good).collect();
        if !faults.is_empty() {
            out.push("\nfaults".to_owned());
        }
        for (device, case) in faults {
            out.push(wrap(&format!("  {} {}", device.id, told(case)), terminal_width(), 4));
        }
        if let Some(reason) = &self.refused {
            out.push(format!("\nnot checked: {reason}"));
        }
        if let Some(ended) = &self.ended {
            out.push(format!("\n{ended}; what comes after it was not checked"));
        }
        let verdict = match self.n_faults() {
            0 => "everything holds".to_owned(),
            1 => "1 fault".to_owned(),
            n => format!("{n} faults"),
        };
        out.push(format!("\n{verdict}, in {:.1} s", self.seconds));
        out.join("\n")
    }
}

impl DeviceReport {
    /// A row for each group, then what was not done and why.
    fn text(&self) -> String {
        let mut out = vec![format!("\n{}  {}", self.device.id, self.device.name)];
        let mut groups: Vec<(&str, &str)> = Vec::new();
        for case in &self.cases {
            let group = (case.part.as_str(), case.subject());
            if !groups.contains(&group) {
                groups.push(group);
            }
        }
        if groups.is_empty() {
            return out.join("\n");
        }
        let rows: Vec<_> = groups.iter().map(|(part, subject)| self.row(part, subject)).collect();
        let header = [
            "  part",
            "of it",
            "cases",
            "passed",
            "unsupported",
            "skipped",
            "expected failures",
            "faults",
            "greatest error",
        ];
        out.push(table(&header, &rows, &[2, 3, 4, 5, 6, 7, 8], terminal_width()));
        for (title, end) in [("unsupported", End::Unsupported), ("skipped", End::Skipped)] {
            out.extend(self.listed(title, |case| case.end == end && case.is_good));
        }
        out.extend(
            self.listed("expected failures", |case| case.end == End::Failed && case.is_good),
        );
        out.join("\n")
    }

    fn row(&self, part: &str, subject: &str) -> Vec<String> {
        let is_of = |case: &&Case| case.part == part && case.subject() == subject;
        let cases: Vec<_> = self.cases.iter().filter(is_of).collect();
        let count = |is: &dyn Fn(&Case) -> bool| cases.iter().filter(|case| is(case)).count();
        let errors = cases.iter().filter_map(|case| case.error);
        let worst = errors.fold(0.0f64, f64::max);
        vec![
            format!("  {part}"),
            if subject == part { String::new() } else { subject.to_owned() },
            cases.len().to_string(),
            count(&|case| case.end == End::Passed && case.is_good).to_string(),
            count(&|case| case.end == End::Unsupported).to_string(),
            count(&|case| case.end == End::Skipped).to_string(),
            count(&|case| case.end == End::Failed && case.is_good).to_string(),
            count(&|case| !case.is_good).to_string(),
            if worst > 0.0 { format!("{worst:.1e}") } else { "-".to_owned() },
        ]
    }

    /// Cases with the same reason in one line.
    fn listed(&self, title: &str, is: impl Fn(&Case) -> bool) -> Vec<String> {
        let mut reasons: Vec<(String, Vec<&str>)> = Vec::new();
        for case in self.cases.iter().filter(|case| is(case)) {
            let reason = case.note.as_ref().or(case.why.as_ref()).cloned().unwrap_or_default();
            match reasons.iter_mut().find(|(known, _)| *known == reason) {
                Some((_, names)) => names.push(&case.name),
                None => reasons.push((reason, vec![&case.name])),
            }
        }
        let mut out = Vec::new();
        if !reasons.is_empty() {
            out.push(format!("  {title}:"));
        }
        for (reason, names) in reasons {
            let shown = names.get(..NAMED_MAX.min(names.len())).unwrap_or_default().join("; ");
            let more = match names.len().saturating_sub(NAMED_MAX) {
                0 => String::new(),
                n => format!("; and {n} more"),
            };
            out.push(wrap(&format!("    {reason}: {shown}{more}"), terminal_width(), 6));
        }
        out
    }
}

fn told(case: &Case) -> String {
    let end = match case.end {
        End::Passed => "passed",
        End::Unsupported => "not supported",
        End::Skipped => "skipped",
        End::Failed => "FAILED",
    };
    let why = case.why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    let note = case.note.as_ref().map(|note| format!(" ({note})")).unwrap_or_default();
    format!("{}: {end}{why}{note}", case.name)
}
