//! What a machine must have before everything builds and every test runs: found, installed where that is safe, or named.
//!
//! * System packages are installed only by root on a Debian-like system, which is what a fresh container or a server of
//!   continuous integration is. On anybody's own machine no package is installed: the missing thing and the command that would
//!   install it are printed, and what needs it is skipped.
//! * What a package manager need not own (a shader compiler, drivers from PyPI) goes into the user's cache folder,
//!   on any machine, and nothing outside it is touched.

mod instrument;
mod packages;
mod shader_compiler;
mod wheels;

use crate::process;
use anyhow::Result;
use std::process::ExitCode;

/// Provides everything, and says what could not be had.
pub(crate) fn run() -> Result<ExitCode> {
    let unmet = provide();
    for line in &unmet {
        eprintln!("missing: {line}");
    }
    Ok(if unmet.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Installs what is missing, where allowed; gives one line for each need that stays unmet.
pub(crate) fn provide() -> Vec<String> {
    let mut unmet = packages::provide();
    unmet.extend(shader_compiler::provide().err().map(|error| format!("{error:#}")));
    unmet.extend(wheels::provide());
    let instrument = instrument::provide().err();
    unmet.extend(instrument.map(|error| {
        format!("the instrument in tests/ovgpu: OpenVINO's GPU path is not tested; {error:#}")
    }));
    unmet
}

/// Whether this is root on a system with apt.
fn may_install() -> bool {
    let id = process::clean("id").arg("-u").output();
    let is_root = id.is_ok_and(|out| out.status.success() && out.stdout.trim_ascii() == b"0");
    is_root && process::succeeds("apt-get", &["--version"])
}
