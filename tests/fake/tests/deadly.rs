//! Plugins that end the process or never return. Each is met by a child process, which tells what a host meets; and the variable that
//! names a configuration, which is a process's.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on fails"
)]

mod common;

use common::*;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use test_tegula_fake::*;

/// The plugin that a child is to tour.
const CHILD: &str = "TEGULA_FAKE_CHILD";

/// What a child does; nothing in the test run itself.
#[test]
fn child() {
    let Some(plugin) = std::env::var_os(CHILD) else { return };
    let registry = load(&[Path::new(&plugin)]);
    let device = open(&registry, 0).unwrap();
    assert_works(&device, "a child");
    println!("toured {}", device.info().name);
}

fn spawn(plugin: &Path, environment: &[(&str, &str)]) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["child", "--exact", "--nocapture"])
        .env(CHILD, plugin)
        .envs(environment.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// A host learns of a crash by the signal, of an exit by its code: neither looks like success, or like a failure of its own.
#[test]
fn a_plugin_ends_the_process() {
    const SIGABRT: i32 = 6;
    const SIGSEGV: i32 = 11;
    for (at, kind, signal, code) in [
        (Point::Negotiate, FaultKind::Crash, Some(SIGSEGV), None),
        (Point::Open, FaultKind::Abort, Some(SIGABRT), None),
        (Point::DeviceInfo, FaultKind::Crash, Some(SIGSEGV), None),
        (Point::DeviceInfo, FaultKind::Exit { code: 3 }, None, Some(3)),
        (Point::Compile, FaultKind::Abort, Some(SIGABRT), None),
        (Point::Compile, FaultKind::Exit { code: 0 }, None, Some(0)),
        (Point::Run, FaultKind::Crash, Some(SIGSEGV), None),
        (Point::Run, FaultKind::Exit { code: 7 }, None, Some(7)),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let what = format!("{kind:?} at {at:?}");
        let fake = Fake::new().fault(Fault::new(at, kind)).install(dir.path()).unwrap();
        let output = spawn(&fake.plugin, &[]).wait_with_output().unwrap();
        assert_eq!((output.status.signal(), output.status.code()), (signal, code), "{what}");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(!text.contains("toured"), "{what}: {text}");
    }
}

/// A plugin that does not return keeps its caller: only somebody outside can end that.
#[test]
fn a_plugin_hangs() {
    for at in [Point::Negotiate, Point::DeviceInfo, Point::Compile, Point::Wait] {
        let dir = tempfile::tempdir().unwrap();
        let fault = Fault::new(at, FaultKind::Hang { seconds: 60.0 });
        let fake = Fake::new().fault(fault).install(dir.path()).unwrap();
        let mut child = spawn(&fake.plugin, &[]);
        std::thread::sleep(Duration::from_millis(500));
        assert!(child.try_wait().unwrap().is_none(), "{at:?} returned");
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(9));
    }
    // A hang that ends is only slow.
    let dir = tempfile::tempdir().unwrap();
    let fault = Fault::new(Point::Run, FaultKind::Hang { seconds: 0.3 });
    let fake = Fake::new().fault(fault).install(dir.path()).unwrap();
    let start = Instant::now();
    let output = spawn(&fake.plugin, &[]).wait_with_output().unwrap();
    assert!(output.status.success() && start.elapsed() >= Duration::from_millis(300));
}

/// A test of a command cannot write files beside a plugin it does not know; it sets the variable. What lies beside wins, so that
/// two fakes can differ.
#[test]
fn configurations_from_the_variable() {
    let dir = tempfile::tempdir().unwrap();
    let fake = Fake::new().install(dir.path()).unwrap();
    std::fs::copy(reference_plugin().unwrap(), dir.path().join("libtegula_reference.so")).unwrap();
    let beside = format!("{}.json", fake.plugin.display());
    let file = dir.path().join("elsewhere.json");
    let named = |name: &str| {
        let device = DeviceConfig::gpu(name, GIB);
        serde_json::to_string(&Fake::new().device(device).config).unwrap()
    };
    std::fs::write(&file, named("from a file")).unwrap();
    let inline = named("inline");
    let check = |value: Option<&str>, expected: &str| {
        let environment = value.map(|value| ("TEGULA_FAKE_CONFIG", value));
        let child = spawn(&fake.plugin, environment.as_slice());
        let text = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
        assert!(text.contains(expected), "{value:?}: {text}");
    };
    std::fs::write(&beside, named("from beside")).unwrap();
    check(Some(&inline), "toured from beside");
    std::fs::remove_file(&beside).unwrap();
    check(Some(&inline), "toured inline");
    check(Some(file.to_str().unwrap()), "toured from a file");
    check(None, "(reference)");
    let nowhere = dir.path().join("nowhere.json");
    let child = spawn(&fake.plugin, &[("TEGULA_FAKE_CONFIG", nowhere.to_str().unwrap())]);
    assert!(!child.wait_with_output().unwrap().status.success());
}
