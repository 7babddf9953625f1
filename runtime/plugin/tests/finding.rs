//! Which plugins are found: from any working directory, through links, once each, and never from the working directory.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

mod common;

use common::*;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use tegula_plugin::{Registry, RegistryOptions, SkipReason};

/// What other tests run in a process of its own: prints what the standard search path gives.
#[test]
#[ignore = "started by the other tests, with another environment"]
fn child() {
    let registry = Registry::load(&RegistryOptions::default());
    for backend in &registry.backends {
        println!("BACKEND {} {}", backend.id(), backend.path().display());
    }
    for skipped in &registry.skipped {
        println!("SKIPPED {}: {}", skipped.path.display(), skipped.reason);
    }
    println!("{}", registry.describe_empty());
}

/// Runs [`child`] from a program file, in a folder, with a value of `TEGULA_BACKEND_PATH`.
fn listing(program: &Path, cwd: &Path, variable: Option<&str>) -> String {
    let mut command = Command::new(program);
    command.args(["--exact", "child", "--ignored", "--nocapture"]).current_dir(cwd);
    match variable {
        Some(value) => command.env("TEGULA_BACKEND_PATH", value),
        None => command.env_remove("TEGULA_BACKEND_PATH"),
    };
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A folder for an install prefix, on the file system that the test is on.
fn prefix_dir() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// An install prefix with this test as its program. A link, not a copy: a program that was just written may be busy.
fn prefix(root: &Path) -> PathBuf {
    let bin = root.join("bin");
    std::fs::create_dir_all(&bin).unwrap();
    let program = bin.join("tegula-test");
    std::fs::hard_link(std::env::current_exe().unwrap(), &program).unwrap();
    program
}

/// Users start programs from anywhere, by links; the plugins are where the program's own file is.
#[test]
fn relative_to_the_core() {
    for place in ["bin", "bin/backends", "bin/tegula/backends", "lib/tegula/backends"] {
        let root = prefix_dir();
        let program = prefix(root.path());
        std::fs::create_dir_all(root.path().join(place)).unwrap();
        example(&root.path().join(place), "libtegula_cexample.so");
        let elsewhere = tempfile::tempdir().unwrap();
        let link = elsewhere.path().join("tg");
        symlink(&program, &link).unwrap();
        for (program, cwd) in
            [(&program, "/"), (&link, "/"), (&link, elsewhere.path().to_str().unwrap())]
        {
            let said = listing(program, Path::new(cwd), None);
            assert!(said.contains("BACKEND cexample "), "{place}, {}: {said}", program.display());
        }
    }
}

/// A plugin that lies in the folder a user happens to be in is never run, however the variable is written.
#[test]
fn never_the_working_directory() {
    let root = prefix_dir();
    let program = prefix(root.path());
    let cwd = tempfile::tempdir().unwrap();
    std::fs::create_dir(cwd.path().join("backends")).unwrap();
    example(cwd.path(), "libtegula_cexample.so");
    example(&cwd.path().join("backends"), "libtegula_other.so");
    for variable in [None, Some(""), Some(":"), Some("."), Some("backends"), Some("./backends:")] {
        let said = listing(&program, cwd.path(), variable);
        assert!(!said.contains("BACKEND "), "{variable:?}: {said}");
        let refused = variable.is_some_and(|v| !v.is_empty());
        assert_eq!(said.contains("folder not searched"), refused, "{variable:?}: {said}");
    }
    let said = listing(&program, Path::new("/"), Some(cwd.path().to_str().unwrap()));
    assert!(said.contains("BACKEND cexample "), "{said}");
}

/// Somebody without any backend learns where to put one.
#[test]
fn nothing_found_is_explained() {
    let root = prefix_dir();
    let program = prefix(root.path());
    std::fs::write(root.path().join("bin/libtegula_bad.so"), "x").unwrap();
    let said = listing(&program, Path::new("/"), None);
    let folder = root.path().canonicalize().unwrap();
    for part in [
        "no backend could be loaded; folders tried:".to_owned(),
        format!("{}/bin (beside the core)", folder.display()),
        format!("{}/lib/tegula/backends (install prefix, not there)", folder.display()),
        "libtegula_bad.so: not an ELF file".to_owned(),
    ] {
        assert!(said.contains(&part), "{said:?} does not say {part:?}");
    }
}

/// The usual copy, under the same name in another folder, is not opened: its destructors could end what the live one needs.
#[test]
fn copy_under_the_same_name_is_not_opened() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let first = example(a.path(), "libtegula_cexample.so");
    let mark = b.path().join("opened");
    let code = format!(
        "#include <stdio.h>\n__attribute__((constructor)) static void f(void) {{ fclose(fopen(\"{}\", \"w\")); }}\n#include \"c_backend.c\"\n",
        mark.display()
    );
    let copy = library(b.path(), "libtegula_cexample.so", &code, &[]);
    let registry = load(&[&first, &copy]);
    assert_eq!(registry.backends.len(), 1);
    let said = registry.skipped[0].reason.to_string();
    assert!(
        said.contains("a second backend \"cexample\"") && said.contains(first.to_str().unwrap()),
        "{said}"
    );
    assert!(!mark.exists(), "it was opened");
    assert_eq!(load(&[&copy]).backends.len(), 1);
    assert!(mark.exists(), "the mark shows nothing");
}

/// The same plugin twice gives one instance, whichever comes first, and nothing of it breaks when the other is dropped.
#[test]
fn same_plugin_twice() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let first = example(a.path(), "libtegula_cexample.so");
    let copy = b.path().join("libtegula_copy.so");
    std::fs::copy(&first, &copy).unwrap();
    let link = b.path().join("libtegula_link.so");
    symlink(&first, &link).unwrap();
    for (paths, same_file, used) in [
        ([&first, &copy], false, &first),
        ([&copy, &first], false, &copy),
        ([&first, &link], true, &first),
        ([&link, &first], true, &first),
        ([&link, &copy], false, &first),
    ] {
        let registry = load(&[paths[0], paths[1]]);
        assert_eq!(registry.backends.len(), 1, "{paths:?}");
        assert_eq!(registry.backends[0].path(), used.canonicalize().unwrap());
        let reason = &registry.skipped[0].reason;
        assert_eq!(matches!(reason, SkipReason::SameFile { .. }), same_file, "{reason}");
        let first = paths[0].canonicalize().unwrap();
        assert!(reason.to_string().contains(first.to_str().unwrap()) || same_file, "{reason}");
        assert_eq!(registry.backends[0].heaps(0).unwrap().len(), 1, "the live one still works");
    }
    // Two registries share one mapping; dropping either leaves the other's handles whole.
    let (one, two) = (load(&[&first]), load(&[&first]));
    drop(one);
    assert_eq!(two.backends[0].heaps(0).unwrap().len(), 1);
}
