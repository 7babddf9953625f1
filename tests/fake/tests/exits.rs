//! The end of a process: whatever of a model is alive by then, and in whatever order things are dropped, it ends with its own exit code: no
//! signal from a driver's destructor, no wait for a thread that decodes.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on fails"
)]

mod common;

use common::model_file;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use test_tegula_fake::*;

/// Longer than any of it takes; a process that is still there hangs.
const LIMIT: Duration = Duration::from_secs(60);

/// A program or library of `examples/`, which a test of the whole crate builds.
fn example(file: &str) -> Option<PathBuf> {
    let folder = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().join("examples");
    let path = folder.join(file);
    if !path.is_file() {
        eprintln!("SKIPPED: no {file}; `cargo build -p tegula-fake --examples` makes it");
        return None;
    }
    Some(path)
}

fn backends(dir: &Path) -> Vec<(&'static str, PathBuf)> {
    let fake = Fake::new().device(DeviceConfig::gpu("A", GIB)).install(dir).unwrap();
    let mut all = vec![("fake", fake.plugin)];
    for (name, file) in [("reference", "libtegula_reference.so"), ("cpu", "libtegula_cpu.so")] {
        match built_plugin(file) {
            Ok(plugin) => all.push((name, plugin)),
            Err(error) => eprintln!("SKIPPED: {error}"),
        }
    }
    all
}

/// Runs the host to its end; it must be a good one. Gives what it printed.
fn check(what: &str, command: &mut Command) -> String {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begin = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > LIMIT {
            drop(child.kill());
            panic!("{what}: it hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    let status = (output.status.signal(), output.status.code());
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(status, (None, Some(0)), "{what}: {said}");
    assert!(said.is_empty(), "{what}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Each way to end, with each backend. "end of main" tells that it ended there, and not before.
#[test]
fn every_exit_path() {
    let (Some(host), Some(model)) = (example("exit_host"), model_file()) else { return };
    let dir = tempfile::tempdir().unwrap();
    for (backend, plugin) in backends(dir.path()) {
        for (scenario, returns) in [
            ("dropped in order", true),
            ("model after runtime", true),
            ("sequence last", true),
            ("sequence last, on a thread", true),
            ("two runtimes", true),
            ("leaked", true),
            ("static", true),
            ("in a thread's local", true),
            ("decoding", true),
            ("exit", false),
            ("exit while decoding", false),
            ("_exit while decoding", false),
        ] {
            let what = format!("{backend}: {scenario}");
            let printed = check(&what, Command::new(&host).arg(&plugin).arg(&model).arg(scenario));
            assert_eq!(printed.contains("end of main"), returns, "{what}");
        }
    }
}

/// The core in a library that is closed before the process ends, as a host of plugins of its own does it: with everything dropped, and
/// with a model alive, whose backend then stays.
#[test]
fn the_core_is_closed_first() {
    let (Some(host), Some(core), Some(model)) =
        (example("exit_host"), example("libexit_core.so"), model_file())
    else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    for (backend, plugin) in backends(dir.path()) {
        for scenario in
            ["dropped in order", "sequence last", "leaked", "static", "in a thread's local"]
        {
            let what = format!("{backend}: {scenario}, and the core closed");
            let mut command = Command::new(&host);
            let printed = check(&what, command.arg(&core).arg(&plugin).arg(&model).arg(scenario));
            assert!(printed.contains("end of main"), "{what}");
        }
    }
}
