//! The OpenCL backend on real drivers with small limits: the command, as a user runs it.
//!
//! PoCL is limited by `POCL_MEMORY_LIMIT`, Intel's CPU runtime (`TEGULA_INTEL_OPENCL`, the folder of `libintelocl.so`) by a forced maximum allocation.
//! What is not installed is skipped, and told.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail by panicking"
)]

use serde_json::Value;
use std::process::Command;
use tegula_e2e::{add_intels_opencl, full, intels_opencl, model_file, target_dir, tegula};

const MODEL: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// A driver.
#[derive(Clone, Copy, PartialEq)]
enum Driver {
    Pocl,
    Intel,
}

/// The command with a driver alone in sight.
fn with_driver(driver: Driver, args: &[&str]) -> Option<Command> {
    if !target_dir().join("libtegula_opencl.so").is_file() {
        eprintln!("SKIPPED: the OpenCL backend is not built; run: cargo build -p tegula-opencl");
        return None;
    }
    let mut command = tegula(args);
    if driver == Driver::Intel {
        add_intels_opencl(&mut command, &intels_opencl()?, true);
    }
    Some(command)
}

/// The selector of the driver's device, which `tegula devices` lists.
fn device(driver: Driver) -> Option<String> {
    let output = with_driver(driver, &["devices", "--json"])?.output().unwrap();
    let listed: Value = serde_json::from_slice(&output.stdout).unwrap();
    let backends = listed["backends"].as_array().unwrap();
    let devices = backends.iter().filter_map(|backend| backend["devices"].as_array()).flatten();
    let wanted = if driver == Driver::Pocl { "Portable Computing" } else { "Intel" };
    let found = devices.into_iter().find(|device| {
        device["id"].as_str().unwrap().starts_with("opencl:")
            && device["driver"].as_str().unwrap().contains(wanted)
    });
    if found.is_none() {
        eprintln!("SKIPPED: no OpenCL device of {wanted}");
    }
    Some(found?["id"].as_str().unwrap().to_owned())
}

/// Greedy text of a few tokens.
fn text(driver: Driver, device: &str, env: &[(&str, &str)], args: &[&str]) -> Option<String> {
    let model = model_file(MODEL)?;
    let mut all = vec!["run", model.to_str().unwrap(), "--device", device, "--temp", "0"];
    all.extend(["-n", "6", "-c", "4096", "-q", "-p", "The capital of France is"]);
    all.extend(args);
    let mut command = with_driver(driver, &all)?;
    for (key, value) in env {
        command.env(key, value);
    }
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{env:?} {args:?}: {errors}");
    Some(String::from_utf8(output.stdout).unwrap())
}

/// A model of 98 MiB and a KV cache of 90 MiB through a device that gives less at once, by the driver's own limit or by an operator's: the
/// same text as without.
fn check(driver: Driver, env: &[(&str, &str)]) {
    let Some(device) = device(driver) else { return };
    let Some(free) = text(driver, &device, &[], &[]) else { return };
    assert!(free.contains("Paris"), "{free}");
    let limited = text(driver, &device, env, &[]).unwrap();
    assert_eq!(limited, free, "{env:?}");
    let caps: &[&str] =
        if full() { &["1MiB", "2MiB", "4MiB", "16MiB", "64MiB"] } else { &["1MiB"] };
    for cap in caps {
        let capped = text(driver, &device, &[], &["--max-buffer", cap]).unwrap();
        assert_eq!(capped, free, "{cap}");
    }
}

#[test]
fn pocl_runs_what_is_larger_than_a_buffer() {
    check(Driver::Pocl, &[("POCL_MEMORY_LIMIT", "1")]);
}

#[test]
fn intel_runs_what_is_larger_than_a_buffer() {
    check(Driver::Intel, &[("CL_CONFIG_CPU_FORCE_MAX_MEM_ALLOC_SIZE", "16777216B")]);
}
