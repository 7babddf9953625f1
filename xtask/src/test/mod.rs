//! `cargo xtask test`: every check and every test, in one order, everywhere.
//!
//! * **A failing step hides no later one**; only what cannot run without the build is left out when that fails.
//! * **What is skipped is counted.** A test without its model, device or tool prints `SKIPPED: reason` and ends; it counts as
//!   skipped, not as passed. So does a step that this machine cannot run.
//! * **One profile.** Everything is built once, in `dev`, which optimises the crates that compute.
//!
//! The last line is `N passed, N failed, N skipped`: tests, and the steps that are not tests, one each.

mod outcome;
mod steps;
mod suite;

use crate::{machine, models};
use anyhow::Result;
use outcome::{Outcome, Report};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

/// How much to run.
#[derive(clap::Args, Default)]
pub(crate) struct Flags {
    /// Leave out what takes long and seldom fails alone: fetching models, examples in documentation, rustdoc.
    #[arg(long)]
    quick: bool,
}

/// Runs all steps, prints the summary, and fails if anything did.
pub(crate) fn run(flags: &Flags) -> Result<ExitCode> {
    let mut report = Report::default();
    report.add("machine", timed(machine_step));
    // The tests and this program look into the same folder, whichever variable named it.
    let folder = models::folder()?;
    if flags.quick {
        report
            .add("models", skipped("--quick: nothing is fetched; models that are there are used"));
    } else {
        report.add("models", timed(models_step));
    }
    report.add("format", timed(steps::format));
    report.add("tidy", timed(steps::tidy));
    report.add("codegen", timed(steps::codegen));
    report.add("clippy", timed(steps::clippy));
    report.add("deny", timed(steps::deny));
    let is_built = report.add("build", timed(steps::build));
    for (name, step, is_long) in later_steps(&folder) {
        let left_out = if !is_built && name != "rustdoc" {
            Some("not run: the build failed")
        } else if is_long && flags.quick {
            Some("left out: --quick")
        } else {
            None
        };
        report.add(name, left_out.map_or_else(|| timed(step), skipped));
    }
    print!("\n{report}");
    Ok(if report.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A step: its name, what it does, and whether `--quick` leaves it out.
type Step<'a> = (&'static str, Box<dyn FnOnce() -> Outcome + 'a>, bool);

fn later_steps(models: &Path) -> [Step<'_>; 3] {
    [
        ("tests", Box::new(move || suite::tests(models)), false),
        ("doc tests", Box::new(move || suite::doc_tests(models)), true),
        ("rustdoc", Box::new(steps::rustdoc), true),
    ]
}

fn timed(step: impl FnOnce() -> Outcome) -> (Outcome, f64) {
    let start = Instant::now();
    let outcome = step();
    (outcome, start.elapsed().as_secs_f64())
}

fn skipped(reason: &str) -> (Outcome, f64) {
    (Outcome::skipped(reason), 0.0)
}

fn machine_step() -> Outcome {
    let unmet = machine::provide();
    if unmet.is_empty() {
        Outcome::passed()
    } else {
        Outcome { skips: unmet, ..Outcome::default() }
    }
}

/// A model that cannot be fetched here skips its tests; one that is not what it should be is a failure.
fn models_step() -> Outcome {
    let fetched = match models::ensure_all() {
        Ok(fetched) => fetched,
        Err(error) => return Outcome::failed(format!("{error:#}")),
    };
    let mut outcome = Outcome::default();
    for (name, result) in fetched {
        match result {
            Ok(path) => {
                println!("{}", path.display());
                outcome.n_passed += 1;
            }
            Err(error) if error.is_unavailable() => outcome.skips.push(format!("{name}: {error}")),
            Err(error) => outcome.failures.push(format!("{name}: {error}")),
        }
    }
    outcome
}
