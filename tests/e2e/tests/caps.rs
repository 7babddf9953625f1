//! Operators' caps on the devices of this machine: a model's text is the same under each, as a user runs it. Drivers with limits of their own have
//! a test of their own (`opencl.rs`).

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

use tegula_e2e::{full, model_file, runtime_of, tegula};

const MODELS: [&str; 3] = [
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma-3-270m-q4_k_m.gguf",
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
];

/// Greedy text of a few tokens.
fn text(model: &str, device: &str, cap: Option<&str>) -> Option<String> {
    let model = model_file(model)?;
    let mut command = tegula(["run", model.to_str()?, "--device", device, "--temp", "0", "-q"]);
    command.args(["-n", "6", "-c", "1024", "-p", "The capital of France is"]);
    if let Some(cap) = cap {
        command.env("TEGULA_MAX_BUFFER", cap);
    }
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{device} {cap:?}: {errors}");
    Some(String::from_utf8(output.stdout).unwrap())
}

/// Models of 98 to 491 MB through buffers of 1 MiB and up.
fn check(backend: &str) {
    let Some((_, ids)) = runtime_of(backend) else { return };
    // The processor takes no time for it.
    let (models, caps): (&[&str], &[&str]) = match full() || backend == "cpu" {
        true => (&MODELS, &["1MiB", "2MiB", "4MiB", "16MiB", "64MiB"]),
        false => (&MODELS[..1], &["1MiB"]),
    };
    for id in ids {
        for model in models {
            let Some(free) = text(model, &id, None) else { continue };
            assert!(free.trim().len() > 4, "{id}: {free:?}");
            for cap in caps {
                let capped = text(model, &id, Some(cap)).unwrap_or_default();
                assert_eq!(capped, free, "{model} on {id}, buffers of {cap}");
            }
        }
    }
}

#[test]
fn on_the_processor() {
    check("cpu");
}

#[test]
fn on_vulkan() {
    check("vulkan");
}

#[test]
fn on_opencl() {
    check("opencl");
}

#[test]
fn on_openvino() {
    check("openvino");
}
