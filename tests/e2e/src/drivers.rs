//! Drivers that a test must be started with: what a process has loaded, it keeps.

use crate::programs::command;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Tells a test that it was started with the driver.
const STARTED: &str = "TEST_HAS_INTELS_OPENCL";

/// The folder of Intel's OpenCL runtime for processors: `TEGULA_INTEL_OPENCL`, or where `cargo xtask setup` puts it. Told where it is absent.
pub fn intels_opencl() -> Option<PathBuf> {
    let named = std::env::var_os("TEGULA_INTEL_OPENCL").map(PathBuf::from);
    let folder = named.unwrap_or_else(|| crate::golden::cache().join("intel-opencl/lib"));
    if folder.join("libintelocl.so").is_file() {
        return Some(folder);
    }
    eprintln!("SKIPPED: no libintelocl.so in {}; run: cargo xtask setup", folder.display());
    None
}

/// With Intel's runtime as the only OpenCL driver, or beside the others.
pub fn add_intels_opencl(command: &mut Command, folder: &Path, is_only: bool) {
    command.env("LD_LIBRARY_PATH", folder);
    command.env("OCL_ICD_FILENAMES", folder.join("libintelocl.so"));
    if is_only {
        command.env("OCL_ICD_VENDORS", "/nonexistent");
    }
}

/// Runs the test `name` of this program with Intel's runtime as its only OpenCL driver. In that run it is true, and the test goes on.
///
/// # Panics
/// If the test fails there.
pub fn is_on_intels_opencl(name: &str) -> bool {
    if std::env::var_os(STARTED).is_some() {
        return true;
    }
    let Some(folder) = intels_opencl() else { return false };
    let mut test = Command::new(std::env::current_exe().expect("the test's own file"));
    add_intels_opencl(&mut test, &folder, true);
    test.args(["--exact", name, "--nocapture"]).env(STARTED, "1");
    let output = test.output().expect("the test again");
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    let text = String::from_utf8_lossy(&text);
    // What it skips is counted with the others.
    eprintln!("{text}");
    assert!(output.status.success(), "{name} with Intel's OpenCL failed");
    false
}

/// A command under the instrument that shows Intel's OpenCL runtime as a GPU to OpenVINO; none where it was not made, which is told.
pub fn on_ovgpu(program: &Path, args: &[&OsStr]) -> Option<Command> {
    let settings = crate::golden::cache().join("ovgpu/env.sh");
    if !settings.is_file() {
        eprintln!("SKIPPED: no {}; run: cargo xtask setup", settings.display());
        return None;
    }
    let mut bash = command("bash");
    bash.args(["-c", ". \"$0\"; exec \"$@\""]).arg(settings).arg(program).args(args);
    Some(bash)
}
