//! `tegula plan` and `tegula devices` of models and devices that are not here, with the backends that were built.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde_json::Value;
use std::process::{Command, Output};

fn tegula(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tegula"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("TEGULA_") && text != "TEGULA_BACKEND_PATH" {
            command.env_remove(name);
        }
    }
    command.args(args).output().unwrap()
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Whether there is a device to plan for; these tests do not build one.
fn has_device(test: &str) -> bool {
    let devices = json(&tegula(&["devices", "--json"]));
    let found =
        devices["backends"].as_array().unwrap().iter().any(|backend| {
            backend["id"] == "cpu" && backend["devices"] != Value::Array(Vec::new())
        });
    if !found {
        eprintln!("SKIPPED {test}: no backend beside the command; build tegula-cpu first");
    }
    found
}

const SHAPE: [&str; 5] = ["plan", "--shapes", "llama-3.2-3b", "-c", "65536"];

/// A cache larger than one buffer may be is planned over several, to the byte.
#[test]
fn a_cache_larger_than_a_buffer_is_planned() {
    if !has_device("a_cache_larger_than_a_buffer_is_planned") {
        return;
    }
    let limit = 4_294_959_104u64;
    let max_buffer = limit.to_string();
    let caps = ["--device", "cpu", "--max-buffer", &max_buffer, "--memory-limit", "cpu:0=24GiB"];
    let report = json(&tegula(&[&SHAPE[..], &caps, &["--json"]].concat()));
    assert_eq!(report["context"]["kv_bytes"], 7_516_192_768u64);
    assert_eq!(report["context"]["n_ctx"], 65536);
    let chunks = report["devices"][0]["heaps"][0]["chunks"].as_array().unwrap();
    let size = |chunk: &&Value| chunk["size"].as_u64().unwrap();
    assert!(chunks.iter().all(|chunk| size(&chunk) <= limit));
    let kv: Vec<u64> = chunks.iter().filter(|c| c["usage"] == "kv").map(|c| size(&c)).collect();
    assert!(kv.len() >= 2, "{kv:?}");
    assert_eq!(kv.iter().sum::<u64>(), 7_516_192_768);
}

/// A refusal says what would be accepted, and that is.
#[test]
fn what_a_refusal_proposes_is_accepted() {
    if !has_device("what_a_refusal_proposes_is_accepted") {
        return;
    }
    let caps = ["--device", "cpu", "--memory-limit", "6GiB", "--no-mmap"];
    let refused = tegula(&[&SHAPE[..], &caps].concat());
    assert_eq!(refused.status.code(), Some(1));
    let text = String::from_utf8(refused.stderr).unwrap();
    let proposed: Vec<&str> = text.lines().filter(|line| line.starts_with("  -c")).collect();
    assert!(proposed.len() >= 3, "{text}");
    assert!(text.contains("--kv-type q8_0") && text.contains("--kv-type q4_0"), "{text}");
    for line in proposed {
        let flags: Vec<&str> = line.split("  (").next().unwrap().split_whitespace().collect();
        let output = tegula(&[&SHAPE[..3], &caps, &flags].concat());
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Options that mean nothing together are wrong usage, not something else than was meant.
#[test]
fn wrong_usage_is_refused() {
    for (args, code, says) in [
        (&["plan"][..], 2, "MODEL"),
        (&["plan", "m.gguf", "--shapes", "llama-3.2-3b"], 2, "--shapes"),
        (&["plan", "m.gguf", "--quant", "f16"], 2, "--quant"),
        (&["plan", "--shapes", "llama-3.2-3b", "--quant", "q9"], 2, "q4_k_m"),
        (&["plan", "--shapes", "llama-3.2-3b", "--max-buffer", "cpu=lots"], 2, "lots"),
        (&["plan", "--shapes", "llama-9"], 1, "llama-3.2-3b"),
        (&["plan", "--shapes", "/nowhere/shape.json"], 1, "/nowhere/shape.json"),
        (&["plan", "--shapes", "llama-3.2-3b", "--max-buffer", "none:7=1GiB"], 1, "none:7"),
    ] {
        let output = tegula(args);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {text}");
        assert!(text.contains(says), "{args:?}: {text}");
    }
}

/// A picture is one whole document, and every device has its reason.
#[test]
fn pictures_and_reasons() {
    if !has_device("pictures_and_reasons") {
        return;
    }
    let output = tegula(&["plan", "--shapes", "gemma-3-270m", "-c", "512", "--svg", "-"]);
    let svg = String::from_utf8(output.stdout).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"), "{svg:.80}");
    let report = json(&tegula(&["devices", "--why", "--device", "!cpu,reference", "--json"]));
    let backends = report["backends"].as_array().unwrap();
    for device in backends.iter().flat_map(|backend| backend["devices"].as_array().unwrap()) {
        let why = device["why"].as_array().unwrap();
        assert_eq!(why.len(), 2, "{device}");
        assert_eq!(why[0]["selector"], "auto");
        let excluded = why[1]["reason"].as_str().unwrap().contains("excluded");
        assert_eq!(excluded, device["id"].as_str().unwrap().starts_with("cpu"), "{device}");
    }
}
