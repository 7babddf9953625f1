//! Whether a model will fit can be asked before it is downloaded: every known shape gives a plan, with the bytes that its formula gives.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail by panicking"
)]

use serde_json::Value;
use std::path::Path;
use tegula::known_shapes;
use tegula_e2e::{run, tegula};

/// What some devices allow in one buffer: 4 GiB less 8192 bytes.
const MAX_BUFFER: u64 = 4_294_959_104;
const N_CTX: u64 = 65_536;

/// `tegula plan` of a shape on a device that allows [`MAX_BUFFER`] and has memory for the largest of them.
fn plan(name: &str) -> Value {
    let n_ctx = N_CTX.to_string();
    let mut command =
        tegula(["plan", "--shapes", name, "-c", &n_ctx, "--kv-type", "f16", "--json"]);
    command.args(["--device", "cpu"]);
    command.env("TEGULA_MAX_BUFFER", MAX_BUFFER.to_string()).env("TEGULA_MEMORY_LIMIT", "1TiB");
    let out = run(&mut command);
    assert_eq!(out.code, 0, "{name}: {}", out.stderr);
    serde_json::from_str(&out.stdout).unwrap()
}

fn chunks(plan: &Value) -> impl Iterator<Item = &Value> {
    let heaps = plan["devices"].as_array().unwrap().iter().flat_map(|d| d["heaps"].as_array());
    heaps.flatten().flat_map(|heap| heap["chunks"].as_array()).flatten()
}

/// Bytes of keys and values by the formula, for shapes whose layers all have the same heads.
fn kv_bytes(name: &str) -> Option<u64> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../runtime/engine/shapes");
    let text = std::fs::read_to_string(Path::new(folder).join(format!("{name}.json"))).unwrap();
    let shape: Value = serde_json::from_str(&text).unwrap();
    let alike = ["llama", "qwen2", "gemma3"].contains(&shape["arch"].as_str().unwrap());
    let n = |field: &str| shape[field].as_u64().unwrap();
    // Keys and values, 2 bytes an element.
    alike.then(|| n("n_layer") * 2 * n("n_head_kv") * n("head_dim") * 2 * N_CTX)
}

/// A shape that cannot be planned, or whose plan breaks a limit, tells its user nothing or a lie.
#[test]
fn every_shape_is_planned_under_the_limit() {
    let names: Vec<&str> = known_shapes().collect();
    assert!(names.len() >= 16);
    for name in names {
        let plan = plan(name);
        let context = &plan["context"];
        assert_eq!(context["n_ctx"], N_CTX, "{name}: the context is honoured");
        let kv = context["kv_bytes"].as_u64().unwrap();
        assert_eq!(kv, context["kv_bytes_per_token"].as_u64().unwrap() * N_CTX, "{name}");
        if let Some(formula) = kv_bytes(name) {
            assert_eq!(kv, formula, "{name}");
        }
        let mut planned = 0;
        for chunk in chunks(&plan).filter(|chunk| chunk["max_size"].is_object()) {
            let size = chunk["size"].as_u64().unwrap();
            assert!(size <= MAX_BUFFER, "{name}: a chunk of {size} bytes of {}", chunk["usage"]);
            planned += if chunk["usage"] == "kv" { size } else { 0 };
        }
        assert_eq!(planned, kv, "{name}: chunks of the KV cache");
    }
}

/// The worked example: 7,516,192,768 bytes of KV cache that no buffer of the device holds.
#[test]
fn llama_3_2_3b_at_65536_tokens() {
    let plan = plan("llama-3.2-3b");
    assert_eq!(plan["context"]["kv_bytes"], 7_516_192_768u64);
    let kv: Vec<u64> = chunks(&plan)
        .filter(|chunk| chunk["usage"] == "kv")
        .map(|chunk| chunk["size"].as_u64().unwrap())
        .collect();
    assert!(kv.len() >= 2, "{kv:?}");
    assert!(kv.iter().all(|size| *size <= MAX_BUFFER), "{kv:?}");
    assert_eq!(kv.iter().sum::<u64>(), 7_516_192_768);
}
