//! Operators' caps on the drivers of this machine: SmolLM2's text is the same under each, as a user runs it. OpenCL's two drivers have a test of
//! their own (`opencl.rs`).

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

use tegula_e2e::{full, model_file, runtime_of, tegula};

const MODEL: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// Greedy text of a few tokens.
fn text(device: &str, cap: Option<&str>) -> Option<String> {
    let model = model_file(MODEL)?;
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

/// A model of 98 MiB through buffers of 1 MiB and up.
fn check(backend: &str) {
    let Some((_, ids)) = runtime_of(backend) else { return };
    let caps: &[&str] =
        if full() { &["1MiB", "2MiB", "4MiB", "16MiB", "64MiB"] } else { &["1MiB"] };
    for id in ids {
        let Some(free) = text(&id, None) else { return };
        assert!(free.contains("Paris"), "{id}: {free}");
        for cap in caps {
            assert_eq!(text(&id, Some(cap)).as_deref(), Some(&*free), "{id}, buffers of {cap}");
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
fn on_openvino() {
    check("openvino");
}
