//! The plan's peak is what becomes resident: within 10 %, with the whole cache in use.
//!
//! What is counted: weights (mapped ones are resident once every row was read), keys and values, scratch, logits, and what compiling takes. What is
//! not: the program itself, its libraries and threads, the file's header and the vocabulary, which are there before anything is planned. That base is
//! measured in the same process, once the plan is made.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail by panicking"
)]

use serde_json::Value;
use std::path::Path;
use tegula_e2e::{RandomModel, command, full, model_file, run, target_dir};
use test_tegula_fake::{DeviceConfig, Fake, GIB};

/// What is told of the plan may be off by this share of it; and by this much, the grain in which the heap's pages and stacks come.
const SHARE: u64 = 10;
const GRAIN: u64 = 1 << 20;

/// What the program says of a run; `on` is a device, and where it is no standard one, its plugin.
fn measure(path: &Path, on: &[&str], n_ctx: u32, dtype: &str, n_tokens: u32) -> Value {
    target_dir();
    let mut command = command(env!("CARGO_BIN_EXE_peak"));
    command.arg(path).args([on[0], &n_ctx.to_string(), dtype, &n_tokens.to_string()]);
    let out = run(command.args(&on[1..]));
    assert_eq!(out.code, 0, "{}", out.stderr);
    serde_json::from_str(&out.stdout).unwrap()
}

fn check(path: &Path, n_ctx: u32, dtype: &str, n_tokens: u32) {
    let report = measure(path, &["cpu"], n_ctx, dtype, n_tokens);
    let number = |name: &str| report[name].as_u64().unwrap();
    let (taken, planned) = (number("peak") - number("base"), number("planned_peak"));
    let what = format!("-c {n_ctx} {dtype}: {taken} bytes resident, {planned} planned: {report}");
    println!("{what}");
    assert!(taken.abs_diff(planned) <= planned / SHARE + GRAIN, "{what}");
}

/// A cache far greater than the weights, filled by conversations that share it.
#[test]
fn a_great_cache() {
    let folder = tempfile::tempdir().unwrap();
    // 16 KiB of f16 keys and values for each token.
    let model = RandomModel {
        n_layer: 8,
        n_head: 8,
        n_head_kv: 8,
        head_dim: 64,
        n_ctx_train: 8192,
        ..RandomModel::default()
    };
    let path = model.write(folder.path());
    for dtype in ["F16", "F32"] {
        check(&path, 8192, dtype, 512);
    }
}

/// Weights far greater than the cache, and with every case asked for, a cache greater than the weights.
#[test]
fn a_real_model() {
    let Some(path) = model_file("SmolLM2-135M-Instruct.Q4_1.gguf") else { return };
    for dtype in ["F16", "F32"] {
        check(&path, 512, dtype, 512);
        if full() {
            check(&path, 8192, dtype, 512);
        }
    }
}

/// Memory that a GPU shares with the host holds a model once: the file's pages do not stay beside what was made of them.
#[test]
fn a_model_on_unified_memory_is_resident_once() {
    let folder = tempfile::tempdir().unwrap();
    let model = RandomModel {
        n_layer: 4,
        n_embd: 1024,
        n_ff: 4096,
        n_vocab: 4096,
        ..RandomModel::default()
    };
    let path = model.write(folder.path());
    let fake = Fake::new().device(DeviceConfig::integrated("A", GIB)).install(folder.path());
    let report = measure(&path, &["fake:0", fake.unwrap().plugin.to_str().unwrap()], 64, "F16", 64);
    let planned = |usage: &str| report["planned"][usage].as_u64().unwrap();
    let (loaded, weights) = (report["loaded"].as_u64().unwrap(), planned("weights"));
    assert!(weights >= 64 << 20, "{report}");
    let rest = planned("scratch") + planned("logits") + planned("activations") + planned("compile");
    assert!(loaded >= weights, "the fake's memory is this process's: {report}");
    assert!(loaded <= weights + 15 * weights / 100 + rest, "{report}");
}
