//! The worst files within the limits, and the worst outside of them, opened in a process of its own whose peak memory
//! is read from `/proc`. A user who opens a bad file must not lose the machine to it.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use common::Raw;
use tegula_gguf::Gguf;

const CHILD: &str = "TEGULA_GGUF_TEST_CHILD";
const MB_MAX: u64 = 50;

/// Does nothing unless started by [`check`], which names a file to open.
#[test]
fn child() {
    let Some(path) = std::env::var_os(CHILD) else { return };
    let start = std::time::Instant::now();
    let result = Gguf::open(path);
    let ms = start.elapsed().as_millis();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    let kib = peak.split_whitespace().nth(1).unwrap();
    let outcome = result.map_or_else(|error| error.to_string(), |_| "opened".to_owned());
    println!("\nRESULT {ms} {kib} {outcome}");
}

fn check(name: &str, path: &Path, says: &str) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture", "--test-threads=1"])
        .env(CHILD, path)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let result = text.lines().find_map(|line| line.strip_prefix("RESULT ")).unwrap_or_default();
    let fields: Vec<&str> = result.splitn(3, ' ').collect();
    let [ms, kib, outcome] = fields.as_slice() else { unreachable!("{name}: no result in {text}") };
    let (ms, kib): (u64, u64) = (ms.parse().unwrap(), kib.parse().unwrap());
    eprintln!("{name}: {ms} ms, {kib} KiB, {outcome}");
    assert!(outcome.contains(says), "{name}: {outcome:?} lacks {says:?}");
    assert!(Duration::from_millis(ms) < Duration::from_secs(1), "{name} took {ms} ms");
    assert!(kib * 1024 < MB_MAX * 1_000_000, "{name} took {kib} KiB");
}

/// Writes `raw` and makes the file `len` bytes long without using the disk.
fn sparse(path: &Path, raw: &Raw, len: u64) {
    let mut file = OpenOptions::new().write(true).create_new(true).open(path).unwrap();
    file.write_all(&raw.0).unwrap();
    file.set_len(len).unwrap();
}

#[test]
fn sparse_files_that_claim_terabytes_cost_nothing() {
    const LEN: u64 = 1 << 42;
    let folder = tempfile::tempdir().unwrap();
    let one = || Raw::new(0, 1);
    for (name, raw, says) in [
        ("strings", one().array("k", 8, 1 << 38), "(header_bytes_max)"),
        ("strings at the cap", one().array("k", 8, 1 << 22), "(header_bytes_max)"),
        ("a string", one().key("k", 8).u64(1 << 41), "(header_bytes_max)"),
        ("a string of 16 MiB", one().key("k", 8).u64(16 << 20), "opened"),
        ("bytes", one().array("k", 0, 1 << 41), "(header_bytes_max)"),
        ("u64s", one().array("k", 10, 1 << 38), "(header_bytes_max)"),
        ("arrays", one().array("k", 9, 1 << 37), "(header_bytes_max)"),
        ("arrays within the header", one().array("k", 9, 2_000_000), "(n_nested_arrays_max)"),
        ("arrays within the cap", one().array("k", 9, 65_536), "opened"),
        ("tensors", Raw::new(1 << 36, 0), "(header_bytes_max)"),
        ("keys", Raw::new(0, 1 << 37), "(header_bytes_max)"),
        ("empty strings", one().array("k", 8, 4_000_000), "opened"),
    ] {
        let path = folder.path().join(format!("{name}.gguf"));
        sparse(&path, &raw, LEN);
        check(name, &path, says);
    }
}

/// Everything at its cap at once: this is accepted, and is the most that a file can cost.
#[test]
fn the_largest_header_allowed_is_affordable() {
    const N_KEYS: u64 = 16_384;
    const N_TENSORS: u64 = 65_536;
    let mut raw = Raw::new(N_TENSORS, N_KEYS);
    for index in 0..N_KEYS - 3 {
        raw = raw.key(&format!("{index:x}"), 8).string(b"");
    }
    raw = raw.array("arrays", 9, 65_536);
    for _ in 0..65_536 {
        raw = raw.u32(0).u64(1).bytes(&[0]);
    }
    raw = raw.key("text", 8).string(&vec![b'x'; 16 << 20]);
    let table: u64 = N_TENSORS * (8 + 5 + 4 + 8 + 4 + 8);
    let left = (32 << 20) - raw.0.len() as u64 - table - 64;
    raw = raw.array("strings", 8, left / 9);
    for _ in 0..left / 9 {
        raw = raw.u64(1).bytes(b"s");
    }
    for index in 0..N_TENSORS {
        raw = raw.tensor(&format!("{index:05x}"), &[8], 0, index * 32);
    }
    let raw = raw.data(N_TENSORS as usize * 32);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("largest.gguf");
    std::fs::write(&path, &raw.0).unwrap();
    check("largest", &path, "opened");
}
