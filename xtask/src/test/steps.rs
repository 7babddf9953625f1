//! The steps that are one check each: a command or a chore that passes or fails.

use super::outcome::Outcome;
use crate::{codegen, process, tidy};
use anyhow::Result;
use std::process::{Command, ExitCode};

pub(crate) fn format() -> Outcome {
    cargo(&mut process::cargo(["fmt", "--all", "--check"]))
}

pub(crate) fn tidy() -> Outcome {
    chore("`cargo xtask tidy` has findings", tidy::run())
}

pub(crate) fn codegen() -> Outcome {
    let root = process::root();
    match codegen::stale(&root) {
        Ok(stale) if stale.is_empty() => Outcome::passed(),
        Ok(stale) => Outcome { failures: stale, ..Outcome::default() },
        Err(error) => Outcome::failed(format!("{error:#}")),
    }
}

pub(crate) fn clippy() -> Outcome {
    cargo(&mut process::cargo(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))
}

/// Licences, sources and duplicates; advisories need the network and fail for reasons outside a change, so they are the
/// business of the scheduled job.
pub(crate) fn deny() -> Outcome {
    if !process::succeeds("cargo-deny", &["--version"]) {
        return Outcome::skipped("cargo-deny is not installed: cargo install --locked cargo-deny");
    }
    cargo(&mut process::cargo(["deny", "--offline", "check", "bans", "licenses", "sources"]))
}

/// The command, the plugins and the tests, in the profile of the tests.
///
/// The targets are those of the test run, so that both resolve to the same features and nothing is built twice; plugins
/// come out as `.so` files here, which a build of the tests alone does not promise.
pub(crate) fn build() -> Outcome {
    cargo(&mut process::cargo(["build", "--workspace", "--lib", "--bins", "--tests", "--examples"]))
}

/// Libraries only: the crate `tegula` and the command of the same name would write to one place.
pub(crate) fn rustdoc() -> Outcome {
    let mut command = process::cargo(["doc", "--workspace", "--no-deps", "--lib"]);
    cargo(command.env("RUSTDOCFLAGS", "-D warnings"))
}

fn cargo(command: &mut Command) -> Outcome {
    println!("$ {}", process::shown(command));
    match process::run(command) {
        Ok(()) => Outcome::passed(),
        Err(error) => Outcome::failed(format!("{error:#}")),
    }
}

fn chore(failed: &str, result: Result<ExitCode>) -> Outcome {
    match result {
        Ok(ExitCode::SUCCESS) => Outcome::passed(),
        Ok(_) => Outcome::failed(failed),
        Err(error) => Outcome::failed(format!("{error:#}")),
    }
}
