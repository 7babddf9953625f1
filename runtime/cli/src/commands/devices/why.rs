//! `tegula devices --why`: what `auto` takes, and what it and the selector in force decide on each device.

use crate::args::DevicesArgs;
use crate::table::table;
use anyhow::Result;
use serde::Serialize;
use tegula::selection::{POLICY, Verdict};
use tegula::{DeviceEntry, Runtime};

/// A row of the policy of `auto`.
#[derive(Debug, Serialize)]
pub(super) struct PolicyReport {
    what: &'static str,
    /// Empty is always.
    when: &'static str,
    /// Those that it takes here.
    devices: Vec<String>,
}

/// What a selector decides on one device.
#[derive(Debug, Clone, Serialize)]
pub(super) struct DecisionReport {
    pub(super) selector: String,
    /// Whether it is used, and as which of the devices to use, from 1.
    place: Option<usize>,
    reason: String,
}

/// All that is to be said.
#[derive(Debug)]
pub(super) struct Why {
    pub(super) policy: Vec<PolicyReport>,
    /// Where the selector in force comes from.
    origin: &'static str,
    /// For each selector, the devices with their kinds and what becomes of them.
    decisions: Vec<(String, Vec<(DeviceEntry, DecisionReport)>)>,
}

impl Why {
    /// What `auto` decides, and the selector in force where that is another.
    pub(super) fn of(runtime: &Runtime, args: &DevicesArgs) -> Result<Self> {
        let auto = runtime.explain(Some("auto"))?;
        let asked = runtime.explain(args.device.as_deref())?;
        let mut taken: Vec<(usize, &DeviceEntry)> =
            auto.1.iter().filter_map(|(entry, verdict)| Some((place(verdict)?, entry))).collect();
        taken.sort_by_key(|(place, _)| *place);
        let policy = POLICY.iter().map(|row| {
            let of_row = taken.iter().filter(|(_, entry)| row.kinds.contains(&entry.info.kind));
            let devices = of_row.map(|(_, entry)| entry.id()).collect();
            PolicyReport { what: row.what, when: row.when, devices }
        });
        let policy = policy.collect();
        let mut all = vec![auto];
        if asked.0 != "auto" {
            all.push(asked);
        }
        let decisions = all.into_iter().map(|(selector, verdicts)| {
            let devices = verdicts.into_iter().map(|(entry, verdict)| {
                let report = decision(&selector, &verdict);
                (entry, report)
            });
            let mut devices: Vec<_> = devices.collect();
            // What is taken first, in its order.
            devices.sort_by_key(|(_, report)| report.place.unwrap_or(usize::MAX));
            (selector, devices)
        });
        let origin = if args.device.is_some() { "--device" } else { "TEGULA_DEVICE" };
        Ok(Self { policy, origin, decisions: decisions.collect() })
    }

    /// Of one device, by its id.
    pub(super) fn of_device(&self, id: &str) -> Vec<DecisionReport> {
        let all = self.decisions.iter().flat_map(|(_, devices)| devices);
        all.filter(|(entry, _)| entry.id() == id).map(|(_, report)| report.clone()).collect()
    }

    /// The tables.
    pub(super) fn text(&self) -> String {
        let policy: Vec<Vec<String>> = (1..)
            .zip(&self.policy)
            .map(|(place, row): (u32, _)| {
                let devices = match row.devices.as_slice() {
                    [] => "-".to_owned(),
                    devices => devices.join(", "),
                };
                vec![place.to_string(), row.what.to_owned(), devices, row.when.to_owned()]
            })
            .collect();
        let mut out = format!(
            "\nwhat auto takes, in this order:\n{}\n  never: a device of rank 0, or the same hardware twice",
            indented(&table(&["", "kind", "here", "when"], &policy, &[], None))
        );
        for (selector, devices) in &self.decisions {
            let rows: Vec<Vec<String>> = devices
                .iter()
                .map(|(entry, decision)| {
                    let place = decision.place.map_or("-".to_owned(), |place| place.to_string());
                    let kind = entry.info.kind.to_string();
                    vec![place, entry.id(), kind, decision.reason.clone()]
                })
                .collect();
            let origin = match selector.as_str() {
                "auto" => String::new(),
                _ => format!(" of {}", self.origin),
            };
            out.push_str(&format!(
                "\n\nselector {selector}{origin}:\n{}",
                indented(&table(&["place", "device", "kind", "why"], &rows, &[], None))
            ));
        }
        out
    }
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
}

fn decision(selector: &str, verdict: &Verdict) -> DecisionReport {
    let (selector, reason) = (selector.to_owned(), verdict.to_string());
    DecisionReport { selector, place: place(verdict), reason }
}

fn place(verdict: &Verdict) -> Option<usize> {
    match verdict {
        Verdict::Taken { place, .. } => Some(place + 1),
        _ => None,
    }
}
