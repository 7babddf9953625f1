//! `tegula verify`, as the author of a plugin runs it: what is right passes, and what is wrong is named.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on fails"
)]

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use test_tegula_fake::{DeviceConfig, Fake, Fault, FaultKind, GIB, MIB, Point, Wrong};

/// What was built with the tests: beside them, or where a build of the workspace puts it.
fn built(file: &str) -> Option<PathBuf> {
    let exe = std::env::current_exe().unwrap();
    let found = exe.ancestors().skip(1).take(2).map(|folder| folder.join(file));
    let found = found.into_iter().find(|path| path.is_file());
    if found.is_none() {
        eprintln!("SKIPPED: no `{file}` beside the tests; build the workspace");
    }
    found
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Runs the command on a plugin, with the oracle of this build.
fn verify(plugin: &Path, args: &[&str]) -> Option<(Output, String)> {
    let (command, oracle) = (built("tegula")?, built("libtegula_reference.so")?);
    let output = Command::new(command)
        .arg("verify")
        .arg(plugin)
        .arg("--oracle")
        .arg(oracle)
        .args(args)
        .env_remove("RUST_LOG")
        .output()
        .unwrap();
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    Some((output, String::from_utf8_lossy(&text).into_owned()))
}

/// That all holds, and what a run is to say; the JSON of it.
fn check_good(plugin: &Path, args: &[&str]) -> Option<Value> {
    let (output, text) = verify(plugin, &[args, &["--json"]].concat())?;
    assert!(output.status.success(), "{}: {text}", plugin.display());
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["holds"], true, "{text}");
    Some(report)
}

/// That it is exit code 1, with all these words.
fn check_bad(plugin: &Path, args: &[&str], words: &[&str]) {
    let Some((output, text)) = verify(plugin, args) else { return };
    assert_eq!(output.status.code(), Some(1), "{words:?}: {text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is not said:\n{text}");
    }
}

/// The project's own plugins, all of the suite: what is shipped must pass what others are asked to.
#[test]
fn own_backends_pass() {
    for file in ["libtegula_cpu.so", "libtegula_reference.so"] {
        let Some(report) = built(file).and_then(|plugin| check_good(&plugin, &[])) else {
            continue;
        };
        let cases = report["devices"][0]["cases"].as_array().unwrap();
        assert!(cases.len() > 400, "{} cases", cases.len());
        let facts = report["facts"].as_array().unwrap();
        assert_eq!(facts[1]["found"], "tegula_backend_v1, tegula_layout_v1");
        assert_eq!(facts[2]["found"], "present, without a difference");
    }
}

/// An author who begins in C begins with something that is right; what it does not do is told, and no fault.
#[test]
fn the_example_in_c_passes() {
    let dir = tempfile::tempdir().unwrap();
    let plugin = dir.path().join("libtegula_cexample.so");
    compile(&["-fvisibility=hidden"], &plugin);
    let Some(report) = check_good(&plugin, &[]) else { return };
    let cases = report["devices"][0]["cases"].as_array().unwrap();
    let of = |end: &str| cases.iter().filter(|case| case["end"] == end).count();
    assert!(of("passed") >= 16 && of("unsupported") > 300, "{report:#}");
    let attention =
        cases.iter().find(|case| case["name"].as_str().unwrap().starts_with("attention"));
    assert_eq!(attention.unwrap()["why"], "attention, kv_store");
    // Its functions for all to see.
    compile(&["-fvisibility=default", "-DTEGULA_TEST", "-Dstatic="], &plugin);
    check_bad(
        &plugin,
        &["--only", "abi"],
        &["exported symbols", "FAULT", "besides the entry symbols", "backend_open"],
    );
}

fn compile(args: &[&str], plugin: &Path) {
    let root = repository();
    let mut command = Command::new("cc");
    command.args(["-std=c11", "-shared", "-fPIC"]).args(args);
    command
        .arg("-I")
        .arg(root.join("abi/include"))
        .arg(root.join("tests/abi/c_backend/c_backend.c"));
    assert!(command.arg("-o").arg(plugin).status().unwrap().success());
}

/// What is asked for and is not there must not look like success.
#[test]
fn what_cannot_be_checked_is_no_success() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("libtegula_text.so");
    std::fs::write(&text, "no library").unwrap();
    check_bad(&text, &[], &["not an ELF file"]);
    check_bad(&dir.path().join("gone.so"), &[], &["gone.so is no file"]);
    let Some(plugin) = built("libtegula_reference.so") else { return };
    check_bad(&plugin, &["--only", "mathmul"], &["no part `mathmul`", "matmul"]);
    check_bad(
        &plugin,
        &["--device", "7", "--only", "norm"],
        &["there is no device 7; there are: 0"],
    );
}

fn fake() -> Fake {
    Fake::new().device(DeviceConfig::host("A", GIB))
}

/// A sound fake, so that what the lies below are found by is the lie.
#[test]
fn a_sound_fake_passes() {
    let dir = tempfile::tempdir().unwrap();
    let plugin = fake().install(dir.path()).unwrap().plugin;
    check_good(&plugin, &["--only", "elementwise", "--only", "limits", "--only", "errors"]);
}

/// Each lie and fault is found, and named, by the part of the suite that looks for it.
#[test]
fn lies_and_faults_are_named() {
    let matmul: &[&str] = &["--only", "matmul"];
    let limits: &[&str] = &["--only", "limits"];
    let lying = DeviceConfig::host("A", GIB).buffer_type(0, |t| t.real_max_size = Some(64 * MIB));
    let contradicting = DeviceConfig::host("A", GIB).heap(0, |heap| heap.free = (2 * GIB).into());
    let wrong = |how| Fault::new(Point::Run, FaultKind::WrongResult { how }).always();
    for (what, fake, args, words) in [
        (
            "max_size is too high",
            Fake::new().device(lying),
            limits,
            &["limits/both ends", "FAILED", "67108864"][..],
        ),
        (
            "free > total",
            Fake::new().device(contradicting),
            limits,
            &["limits/what is stated agrees", "free"],
        ),
        (
            "wrong sign",
            fake().fault(wrong(Wrong::Negated)),
            matmul,
            &["fake:0 matmul/F32", "error 4.0e0 of 1.0e-11 allowed to matmul"],
        ),
        (
            "not a number",
            fake().fault(wrong(Wrong::Nan)),
            matmul,
            &["fake:0 matmul/F32", "is NaN, the oracle says"],
        ),
        (
            "null without error",
            fake().fault(Fault::new(Point::Alloc, FaultKind::Null).always()),
            matmul,
            &["matmul/F32", "it returned no buffer without an error"],
        ),
        (
            "a panic",
            fake().fault(Fault::new(Point::Compile, FaultKind::Panic)),
            matmul,
            &["matmul/F32", "program_compile", "panic"],
        ),
        (
            "a crash",
            fake().fault(Fault::new(Point::Run, FaultKind::Crash).nth(3)),
            matmul,
            &["the plugin ended the process: signal 11", "during matmul/"],
        ),
        (
            "a crash while it is opened",
            fake().fault(Fault::new(Point::Open, FaultKind::Crash)),
            matmul,
            &["signal 11", "during load/opening the plugin"],
        ),
        (
            "an exit that looks like success",
            fake().fault(Fault::new(Point::Compile, FaultKind::Exit { code: 0 })),
            matmul,
            &["the plugin ended the process: exit code 0", "during matmul/"],
        ),
        (
            "a hang",
            fake().fault(Fault::new(Point::Run, FaultKind::Hang { seconds: 60.0 })),
            &["--only", "matmul", "--timeout", "5"],
            &["did not come back for 5 s during matmul/"],
        ),
        (
            "a device that cannot say what it is",
            fake().fault(Fault::new(Point::DeviceInfo, FaultKind::error("driver")).always()),
            matmul,
            &["device fake:0", "FAULT", "cannot be used"],
        ),
        (
            "another revision",
            fake().with(|config| config.revisions = [90, 91]),
            matmul,
            &["not checked", "speaks revisions 90..=91"],
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let plugin = fake.install(dir.path()).unwrap().plugin;
        println!("{what}");
        check_bad(&plugin, args, words);
    }
}
