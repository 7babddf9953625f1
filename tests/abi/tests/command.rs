//! What `tegula devices` says of folders in which something is wrong: it ends well, names each file with its reason, and lists
//! what works.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod common;

use common::{built, install};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// The command, if it is built: building it is the business of a build of the workspace.
fn devices(folders: &[&Path], variables: &[(&str, &str)]) -> Option<(Value, String)> {
    let Some(command) = built("tegula") else {
        eprintln!("SKIPPED: no `tegula` beside the tests; build the workspace");
        return None;
    };
    let path: Vec<_> = folders.iter().map(|folder| folder.to_str().unwrap()).collect();
    let output = Command::new(command)
        .args(["devices", "--json"])
        .env("TEGULA_BACKEND_PATH", path.join(":"))
        .env_remove("RUST_LOG")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{:?}: {stderr}", output.status);
    Some((serde_json::from_slice(&output.stdout).unwrap(), stderr))
}

fn backends(report: &Value) -> Vec<&str> {
    let list = report["backends"].as_array().unwrap();
    list.iter().map(|backend| backend["id"].as_str().unwrap()).collect()
}

/// The reason for a file, by its name.
fn reason<'a>(report: &'a Value, folder: &Path, file: &str) -> &'a str {
    let path = folder.canonicalize().unwrap().join(file);
    let skipped = report["skipped"].as_array().unwrap();
    let entry = skipped.iter().find(|entry| entry["path"].as_str() == path.to_str());
    let entry = entry.unwrap_or_else(|| panic!("{file} is not listed: {skipped:?}"));
    entry["reason"].as_str().unwrap()
}

/// Compiles one line of C.
fn cc(folder: &Path, file: &str, code: &str, args: &[&str]) {
    let source = folder.join(file).with_extension("c");
    std::fs::write(&source, code).unwrap();
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC"]).arg(&source).args(args).arg("-o").arg(folder.join(file));
    assert!(command.status().unwrap().success(), "{file} does not compile");
    std::fs::remove_file(source).unwrap();
}

const ENTRY: &str = "int tegula_backend_v1(const void *host, unsigned *out)";

/// A folder of everything that can be wrong with a file.
fn fill(folder: &Path) {
    let whole = std::fs::read(install(folder, "old")).unwrap();
    let write = |file: &str, bytes: &[u8]| std::fs::write(folder.join(file), bytes).unwrap();
    write("libtegula_empty.so", b"");
    write("libtegula_text.so", b"#!/bin/sh\necho install me first\n");
    write("libtegula_half.so", &whole[..whole.len() / 2]);
    write("libtegula_page.so", b"<!DOCTYPE html><title>404 Not Found</title>");
    cc(folder, "libtegula_other.so", "int nothing(void) { return 0; }", &[]);
    cc(folder, "libgone.so", "int gone(void) { return 0; }", &["-Wl,-soname,libgone.so.3"]);
    let needs = format!("int gone(void); {ENTRY} {{ (void)host; (void)out; return gone(); }}");
    let gone = folder.join("libgone.so");
    cc(folder, "libtegula_needs.so", &needs, &[gone.to_str().unwrap()]);
    std::fs::remove_file(gone).unwrap();
    // Revisions 7 to 9, which the host does not speak: two words after `struct_size`.
    let future = format!("{ENTRY} {{ (void)host; out[2] = 7; out[3] = 9; return 8; }}");
    cc(folder, "libtegula_future.so", &future, &[]);
    install(folder, "layout");
    install(folder, "panic");
}

#[test]
fn each_wrong_file_has_its_reason() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (folder, copies) = (first.path(), second.path());
    fill(folder);
    install(copies, "old");
    let Some((report, stderr)) = devices(&[folder, copies], &[("TEGULA_TEST_PANIC", "open")])
    else {
        return;
    };
    for (file, expected) in [
        ("libtegula_empty.so", "the file is empty"),
        ("libtegula_text.so", "not an ELF file"),
        ("libtegula_page.so", "not an ELF file"),
        ("libtegula_half.so", "truncated"),
        ("libtegula_other.so", "does not export tegula_backend_v1"),
        ("libtegula_needs.so", "needs libgone.so.3, which was not found"),
        ("libtegula_future.so", "speaks revisions 7..=9"),
        ("libtegula_layout.so", "its tables differ"),
        ("libtegula_panic.so", "told to panic in open"),
    ] {
        let said = reason(&report, folder, file);
        assert!(said.contains(expected), "{file}: {said:?} does not say {expected:?}\n{stderr}");
    }
    let said = reason(&report, copies, "libtegula_old.so");
    assert!(said.contains("a second backend \"old\""), "{said}");
    let listed = backends(&report);
    assert!(listed.contains(&"old"), "{listed:?}");
    if built("libtegula_cpu.so").is_some() {
        assert!(listed.contains(&"cpu"), "the processor is lost: {listed:?}");
    }
    // Nothing of this is a message of a crash.
    assert!(!stderr.contains("RUST_BACKTRACE"), "{stderr}");
}

/// A device that panics when it is asked what it is costs that device; the others are listed.
#[test]
fn a_panicking_device_is_listed_as_faulty() {
    let dir = tempfile::tempdir().unwrap();
    install(dir.path(), "panic");
    let Some((report, _)) = devices(&[dir.path()], &[]) else { return };
    let list = report["backends"].as_array().unwrap();
    let backend = list.iter().find(|backend| backend["id"] == "panic").unwrap();
    let faulty = backend["faulty"].as_array().unwrap();
    let indices: Vec<_> = faulty.iter().map(|fault| fault["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [1, 2, 3]);
    assert!(faulty[0]["error"].as_str().unwrap().contains("told to panic in DeviceInfo"));
    assert_eq!(backend["devices"].as_array().unwrap().len(), 17);
}

/// `RUST_LOG` reaches a plugin under the plugin's name, and only when asked.
#[test]
fn the_log_of_a_plugin_is_the_log_of_the_command() {
    let dir = tempfile::tempdir().unwrap();
    install(dir.path(), "old");
    install(dir.path(), "panic");
    for (filter, expected, unwanted) in [
        ("tegula_old=info", "opened with tables of another revision", "opening"),
        ("tegula_panic=debug", "opening", "opened with tables"),
        ("off", "", "opening"),
    ] {
        let Some((_, stderr)) = devices(&[dir.path()], &[("RUST_LOG", filter)]) else { return };
        assert!(stderr.contains(expected), "{filter}: {stderr}");
        assert!(!stderr.contains(unwanted), "{filter}: {stderr}");
    }
}

/// Plugins for tests lie beside the command in a build folder, and are never found there.
#[test]
fn plugins_for_tests_are_not_found_by_users() {
    let dir = tempfile::tempdir().unwrap();
    let Some((report, _)) = devices(&[dir.path()], &[]) else { return };
    for id in ["old", "newer", "layout", "panic"] {
        assert!(!backends(&report).contains(&id), "{id}");
    }
}
