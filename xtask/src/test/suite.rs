//! The tests themselves, run and counted.
//!
//! With cargo-nextest each test is a process of its own, so a plugin that takes its process down costs one test; its JUnit
//! report keeps the output of tests that passed, which is where they say what they skipped. Without it, `cargo test`
//! runs the same tests, and its text is read.

use super::outcome::Outcome;
use crate::process;
use anyhow::{Context as _, Result};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitStatus};

/// What a test writes, at the start of a line, when it lacks what it needs.
const SKIPPED: &str = "SKIPPED: ";

/// All tests but those in documentation.
pub(crate) fn tests(models: &Path) -> Outcome {
    let result = if process::succeeds("cargo-nextest", &["nextest", "--version"]) {
        nextest(models)
    } else {
        println!(
            "cargo-nextest is not installed; `cargo test` runs instead, without time limits for single tests"
        );
        let args = [
            "test",
            "--workspace",
            "--lib",
            "--bins",
            "--tests",
            "--examples",
            "--no-fail-fast",
            "--",
            "--show-output",
        ];
        libtest(process::cargo(args).env("TEGULA_MODELS", models))
    };
    result.unwrap_or_else(|error| Outcome::failed(format!("{error:#}")))
}

/// The examples in documentation.
pub(crate) fn doc_tests(models: &Path) -> Outcome {
    let mut command =
        process::cargo(["test", "--workspace", "--doc", "--no-fail-fast", "--", "--show-output"]);
    libtest(command.env("TEGULA_MODELS", models))
        .unwrap_or_else(|error| Outcome::failed(format!("{error:#}")))
}

fn nextest(models: &Path) -> Result<Outcome> {
    let junit = process::target_folder()?.join("nextest/default/junit.xml");
    // The report of an earlier run must not stand in for one that this run failed to write.
    let _ = fs::remove_file(&junit);
    let mut command = process::cargo([
        "nextest",
        "run",
        "--workspace",
        "--lib",
        "--bins",
        "--tests",
        "--examples",
    ]);
    command.args(["--profile", "default", "--no-fail-fast"]).env("TEGULA_MODELS", models);
    println!("$ {}", process::shown(&command));
    let status =
        command.status().with_context(|| format!("cannot start `{}`", process::shown(&command)))?;
    let outcome = match fs::read_to_string(&junit) {
        Ok(text) => from_junit(&text).with_context(|| junit.display().to_string())?,
        Err(_) => Outcome::default(),
    };
    Ok(with_status(outcome, &command, status))
}

fn libtest(command: &mut Command) -> Result<Outcome> {
    println!("$ {}", process::shown(command));
    let (status, text) = process::tee(command)?;
    Ok(with_status(from_libtest(&text), command, status))
}

/// A run that failed without a failed test failed nevertheless: it did not build, or a process of it died.
fn with_status(mut outcome: Outcome, command: &Command, status: ExitStatus) -> Outcome {
    if !status.success() && outcome.failures.is_empty() {
        outcome.failures.push(format!("`{}` failed ({status})", process::shown(command)));
    }
    outcome
}

/// Counts the test cases of a JUnit report: failed, else skipped if it says so anywhere, else passed.
fn from_junit(xml: &str) -> Result<Outcome> {
    let document = roxmltree::Document::parse(xml)?;
    let mut outcome = Outcome::default();
    for case in document.descendants().filter(|node| node.has_tag_name("testcase")) {
        let name = [case.attribute("classname"), case.attribute("name")]
            .map(Option::unwrap_or_default)
            .join(" ");
        let is_failed =
            case.children().any(|node| node.has_tag_name("failure") || node.has_tag_name("error"));
        if let Some(skip) = case.children().find(|node| node.has_tag_name("skipped")) {
            outcome
                .skips
                .push(format!("{name}: {}", skip.attribute("message").unwrap_or("ignored")));
            continue;
        }
        let texts = case
            .children()
            .filter(|node| node.has_tag_name("system-out") || node.has_tag_name("system-err"));
        let reasons: Vec<&str> =
            texts.filter_map(|node| node.text()).flat_map(skip_reasons).collect();
        count(&mut outcome, &name, is_failed, &reasons);
    }
    Ok(outcome)
}

/// Counts the tests of `cargo test -- --show-output`, likewise.
fn from_libtest(text: &str) -> Outcome {
    let mut results: Vec<(&str, bool)> = Vec::new();
    let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut shown = "";
    let mut outcome = Outcome::default();
    for line in text.lines() {
        if let Some(name) =
            line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----"))
        {
            shown = name;
        } else if let Some((name, result)) =
            line.strip_prefix("test ").and_then(|rest| rest.rsplit_once(" ... "))
        {
            match result {
                "ok" => results.push((name, false)),
                "FAILED" => results.push((name, true)),
                result if result.starts_with("ignored") => {
                    outcome.skips.push(format!("{name}: {result}"));
                }
                _ => {}
            }
        } else if line.starts_with("test result: ") {
            // Names are unique within one test binary, which ends here.
            for (name, is_failed) in results.drain(..) {
                count(
                    &mut outcome,
                    name,
                    is_failed,
                    reasons.get(name).map(Vec::as_slice).unwrap_or_default(),
                );
            }
            reasons.clear();
        } else if let Some(reason) = line.strip_prefix(SKIPPED) {
            reasons.entry(shown).or_default().push(reason);
        }
    }
    // A binary that died has tests that passed before it did; the exit code tells of the rest.
    for (name, is_failed) in results {
        count(&mut outcome, name, is_failed, &[]);
    }
    outcome
}

fn skip_reasons(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| line.trim_start().strip_prefix(SKIPPED))
}

fn count(outcome: &mut Outcome, name: &str, is_failed: bool, reasons: &[&str]) {
    if is_failed {
        outcome.failures.push(name.to_owned());
    } else if reasons.is_empty() {
        outcome.n_passed += 1;
    } else {
        let mut reasons = reasons.to_vec();
        reasons.dedup();
        outcome.skips.push(format!("{name}: {}", reasons.join("; ")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_junit_report_is_counted() {
        let xml = r#"<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="nextest-run" tests="5" failures="1" errors="0">
  <testsuite name="tegula-gguf::real" tests="5">
    <testcase name="passes" classname="tegula-gguf::real"><system-err>a word of SKIPPED: in a line</system-err></testcase>
    <testcase name="lacks" classname="tegula-gguf::real">
      <system-out>running 1 test</system-out>
      <system-err>SKIPPED: no model at &lt;here&gt;
SKIPPED: no model at &lt;here&gt;
</system-err>
    </testcase>
    <testcase name="fails" classname="tegula-gguf::real">
      <failure type="test failure">panicked</failure><system-err>SKIPPED: half of it</system-err>
    </testcase>
    <testcase name="quiet" classname="tegula-gguf::real" />
    <testcase name="later" classname="tegula-gguf::real"><skipped /></testcase>
  </testsuite>
</testsuites>"#;
        let expected = Outcome {
            n_passed: 2,
            failures: vec!["tegula-gguf::real fails".into()],
            skips: vec![
                "tegula-gguf::real lacks: no model at <here>".into(),
                "tegula-gguf::real later: ignored".into(),
            ],
        };
        assert_eq!(from_junit(xml).unwrap(), expected);
        assert!(from_junit("<testsuites>").is_err());
    }

    #[test]
    fn the_text_of_cargo_test_is_counted() {
        let text = "
running 4 tests
test a::passes ... ok
test a::lacks ... ok
test a::fails ... FAILED
test a::later ... ignored, needs an hour

successes:

---- a::lacks stdout ----
SKIPPED: no device

failures:

---- a::fails stdout ----
SKIPPED: half of it
thread panicked

test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

running 1 test
test a::lacks ... ok

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";
        let outcome = from_libtest(text);
        assert_eq!(outcome.n_passed, 2);
        assert_eq!(outcome.failures, ["a::fails"]);
        assert_eq!(outcome.skips, ["a::later: ignored, needs an hour", "a::lacks: no device"]);
    }

    #[test]
    fn a_run_that_dies_is_a_failure() {
        let mut command = Command::new("false");
        let status = command.status().unwrap();
        assert_eq!(with_status(Outcome::default(), &command, status).failures.len(), 1);
        let outcome = Outcome::failed("a::fails");
        assert_eq!(with_status(outcome, &command, status).failures, ["a::fails"]);
    }
}
