//! OpenVINO's GPU path, as a user runs it, on the instrument in `tests/ovgpu`: the text of the processor's device, with weights and cache in
//! several buffers.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail by panicking"
)]

use serde_json::Value;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use tegula_e2e::{RandomModel, full, model_file, on_ovgpu, run, target_dir, tegula};

/// Greedy tokens on a device.
fn tokens(command: &mut Command) -> Vec<u64> {
    let out = run(command);
    assert_eq!(out.code, 0, "{}", out.stderr);
    let report: Value = serde_json::from_str(&out.stdout).unwrap();
    let tokens = report["generation"]["tokens"].as_array().unwrap();
    tokens.iter().map(|token| token.as_u64().unwrap()).collect()
}

fn check(model: &Path, n: u32, max_alloc: u64) {
    if !target_dir().join("libtegula_openvino.so").is_file() {
        eprintln!(
            "SKIPPED: the OpenVINO backend is not built; run: cargo build -p tegula-openvino"
        );
        return;
    }
    let (model, n) = (model.to_str().unwrap(), n.to_string());
    let words = |device| {
        let prompt = "The capital of France is";
        ["run", model, "-p", prompt, "-n", &n, "--temp", "0", "-c", "512", "--ignore-eos", "-q"]
            .into_iter()
            .chain(["--json", "--device", device])
            .map(OsStr::new)
            .collect::<Vec<_>>()
    };
    let program = target_dir().join("tegula");
    let Some(mut gpu) = on_ovgpu(&program, &words("openvino:1")) else { return };
    gpu.env("FAKEGPU_MAX_ALLOC", max_alloc.to_string());
    assert_eq!(tokens(&mut gpu), tokens(&mut tegula(words("openvino:0"))));
}

#[test]
fn the_gpu_says_what_the_processor_says() {
    let folder = tempfile::tempdir().unwrap();
    let model = RandomModel { n_layer: 2, n_vocab: 512, ..RandomModel::default() };
    check(&model.write(folder.path()), 12, 64 << 10);
}

/// A minute to compile, and a second a token.
#[test]
fn a_real_model_says_the_same() {
    if !full() {
        eprintln!("SKIPPED: 1 test: TEGULA_TEST_FULL=1 runs it");
        return;
    }
    let Some(model) = model_file("SmolLM2-135M-Instruct.Q4_1.gguf") else { return };
    check(&model, 8, 64 << 20);
}
