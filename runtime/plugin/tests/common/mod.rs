//! Builds plugins with the system's C compiler.

#![allow(dead_code, reason = "each test file uses its part")]

use std::path::{Path, PathBuf};
use std::process::Command;
use tegula_plugin::{Registry, SearchPath};

fn repo(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// Compiles a shared object; `args` are the compiler's.
pub(crate) fn cc(source: &Path, out: &Path, args: &[&str]) {
    let status = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror", "-shared", "-fPIC"])
        .args(["-fvisibility=hidden", "-I"])
        .arg(repo("abi/include"))
        .arg("-I")
        .arg(repo("tests/abi/c_backend"))
        .arg(source)
        .args(args)
        .arg("-o")
        .arg(out)
        .status()
        .expect("a C compiler called cc");
    assert!(status.success(), "{} does not compile with {args:?}", source.display());
}

/// The worked example backend as `libtegula_<id>.so` in `dir`.
pub(crate) fn example(dir: &Path, file: &str) -> PathBuf {
    let out = dir.join(file);
    cc(&repo("tests/abi/c_backend/c_backend.c"), &out, &[]);
    out
}

/// The example with a fault.
pub(crate) fn faulty(dir: &Path, file: &str, fault: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/faulty.c");
    let out = dir.join(file);
    cc(&source, &out, &[&format!("-DFAULT={fault}")]);
    out
}

/// A library from a line of C.
pub(crate) fn library(dir: &Path, file: &str, code: &str, args: &[&str]) -> PathBuf {
    let source = dir.join(file).with_extension("c");
    std::fs::write(&source, code).unwrap();
    let out = dir.join(file);
    cc(&source, &out, args);
    out
}

/// The registry of these files and folders, and nothing else.
pub(crate) fn load(paths: &[&Path]) -> Registry {
    let paths: Vec<_> = paths.iter().map(|p| p.to_path_buf()).collect();
    Registry::load_from(SearchPath::build(&paths, None, false, None))
}

/// What the only file said.
pub(crate) fn reason(path: &Path) -> String {
    let registry = load(&[path]);
    assert!(registry.backends.is_empty(), "{} was loaded", path.display());
    assert_eq!(registry.skipped.len(), 1, "{:?}", registry.skipped);
    registry.skipped[0].reason.to_string()
}
