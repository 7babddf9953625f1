//! The C header: clean C11 and C++, and of the same layout as the Rust tables.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

mod common;

use common::*;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

/// A C author's struct that differs from ours in one offset sends calls to wrong functions.
#[test]
fn offsets_in_c_are_those_in_rust() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../abi");
    let snapshot = std::fs::read_to_string(root.join("tests/offsets.txt")).unwrap();
    let mut code = String::from("#include \"tegula_backend.h\"\n");
    let (mut ty, mut n) = (String::new(), 0);
    for line in snapshot.lines() {
        let words: Vec<_> = line.split_whitespace().collect();
        match words[..] {
            [name, "size", size, "align", _] => {
                ty = match name {
                    "Slice" => "TegulaSlice_Value".to_owned(),
                    "Text" => "TegulaText_16".to_owned(),
                    name => format!("Tegula{name}"),
                };
                // Only for plugins in Rust.
                if name != "LayoutRecord" {
                    writeln!(code, "static_assert(sizeof({ty}) == {size}, \"{ty}\");").unwrap();
                }
            }
            [offset, field] if ty != "TegulaLayoutRecord" => {
                writeln!(
                    code,
                    "static_assert(offsetof({ty}, {field}) == {offset}, \"{ty}.{field}\");"
                )
                .unwrap();
                n += 1;
            }
            _ => {}
        }
    }
    assert!(n > 150, "{n} fields");
    let dir = tempfile::tempdir().unwrap();
    for (compiler, standard, file) in [("cc", "-std=c11", "x.c"), ("c++", "-std=c++11", "x.cpp")] {
        let source = dir.path().join(file);
        let assert = if compiler == "cc" { "#include <assert.h>\n" } else { "" };
        std::fs::write(&source, format!("{assert}{code}")).unwrap();
        let output = Command::new(compiler)
            .args([standard, "-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only", "-I"])
            .arg(root.join("include"))
            .arg(&source)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{compiler}: {said}");
    }
}

/// Other symbols of a plugin could stand in for another plugin's.
#[test]
fn the_example_exports_one_symbol() {
    let dir = tempfile::tempdir().unwrap();
    let path = example(dir.path(), "libtegula_cexample.so");
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(path).output().unwrap();
    let symbols = String::from_utf8_lossy(&output.stdout);
    let names: Vec<_> = symbols.lines().filter_map(|l| l.split_whitespace().last()).collect();
    assert_eq!(names, ["tegula_backend_v1"]);
}
