//! The plan tells the truth before anything is allocated, and a file's claims never size an allocation.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail by panicking"
)]

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tegula::{Caps, DType, Error, Model, ModelOptions, Plan, PlanOptions};
use tegula_e2e::{BACKENDS, TinyLlama, limited, run, runtime_with, tegula};

fn write(model: TinyLlama) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = model.write(folder.path(), "tiny.gguf");
    (folder, path)
}

fn plan(path: &Path, device: &str, caps: Caps, plan: PlanOptions) -> Result<Plan, Error> {
    let options = ModelOptions { device: Some(device.into()), plan, ..ModelOptions::default() };
    Model::plan_only(&runtime_with(caps), path, &options)
}

/// What is said to be planned is what the chunks take; of the cache, to the byte.
#[test]
fn bytes_are_exact() {
    let tiny = TinyLlama { n_embd: 128, ..TinyLlama::default() };
    let (_folder, path) = write(tiny);
    for device in BACKENDS {
        for (dtype, bits) in
            [(DType::F32, 64), (DType::F16, 32), (DType::Q8_0, 17), (DType::Q4_0, 9)]
        {
            for n_ctx in [1, 100, 2048] {
                let options = PlanOptions {
                    n_ctx: Some(n_ctx),
                    dtype_k: dtype,
                    dtype_v: dtype,
                    ..PlanOptions::default()
                };
                let plan = plan(&path, device, Caps::default(), options).unwrap();
                let at = format!("{device} {} {n_ctx}", dtype.name());
                let context = &plan.report.context;
                // A Q8_0 block is 34 bytes for 32 elements: 17 sixteenths of a byte each; so are the others counted.
                let per_token = tiny.kv_elements_per_token() * bits / 16;
                assert_eq!(context.kv_bytes_per_token, per_token, "{at}");
                let n_blocks = u64::from(n_ctx.div_ceil(context.block_len));
                let bytes = n_blocks * u64::from(context.block_len) * per_token;
                assert_eq!(context.kv_bytes, bytes, "{at}");
                let heaps = plan.report.devices.iter().flat_map(|device| &device.heaps);
                let mut kv = 0;
                for heap in heaps {
                    let sum: u64 = heap.chunks.iter().map(|chunk| chunk.taken).sum();
                    assert_eq!(heap.planned_bytes, sum, "{at}");
                    kv +=
                        heap.chunks.iter().filter(|c| c.usage == "kv").map(|c| c.size).sum::<u64>();
                }
                assert_eq!(kv, bytes, "{at}");
            }
        }
    }
}

/// `-c` is honoured or refused with the numbers that a user needs to choose another.
#[test]
fn a_context_that_does_not_fit_is_refused_with_numbers() {
    let (_folder, path) = write(TinyLlama::default());
    let caps = Caps { max_buffer: None, memory_limit: Some(64 << 20) };
    for device in BACKENDS {
        let options = PlanOptions { n_ctx: Some(u32::MAX), ..PlanOptions::default() };
        let error = plan(&path, device, caps, options).unwrap_err();
        let Error::ContextDoesNotFit { asked, fits, per_token, budget, .. } = &error else {
            panic!("{device}: {error}");
        };
        assert_eq!(*asked, u64::from(u32::MAX));
        assert!(*fits * per_token <= *budget && *budget < 64 << 20, "{error}");
        let text = error.to_string();
        assert!(text.contains(&fits.to_string()) && text.contains("-c"), "{text}");

        // What was said to fit does fit, and loads.
        let fits = u32::try_from(*fits).unwrap();
        let options = PlanOptions { n_ctx: Some(fits / 32 * 32), ..PlanOptions::default() };
        let plan = plan(&path, device, caps, options).unwrap();
        assert_eq!(plan.report.context.n_ctx, fits / 32 * 32);
    }
}

/// A model that was trained on any number of tokens starts, with as many as fit.
#[test]
fn a_claimed_context_of_2_31_is_what_fits() {
    let (_folder, path) =
        write(TinyLlama { context_length: (1 << 31) - 1, ..TinyLlama::default() });
    for device in BACKENDS {
        let caps = Caps { max_buffer: None, memory_limit: Some(64 << 20) };
        let plan = plan(&path, device, caps, PlanOptions::default()).unwrap();
        let context = &plan.report.context;
        assert!(context.n_ctx > 1000, "{context:?}");
        for heap in plan.report.devices.iter().flat_map(|device| &device.heaps) {
            assert!(heap.planned_bytes - heap.mapped_bytes <= 64 << 20, "{}", heap.planned_bytes);
        }

        // Without a limit, through the command: fast, and in little memory, whatever the machine has.
        let args = ["plan", path.to_str().unwrap(), "--device", device, "--json"];
        let out = run(&mut limited(50 << 20, &args));
        assert_eq!(out.code, 0, "{}", out.stderr);
        assert!(out.time < Duration::from_secs(1), "{:?}", out.time);
        let report: Value = serde_json::from_str(&out.stdout).unwrap();
        assert_eq!(report["context"]["n_ctx_train"], i32::MAX, "{device}");
        let n_ctx = report["context"]["n_ctx"].as_u64().unwrap();
        assert!((16..=i32::MAX as u64).contains(&n_ctx), "{n_ctx}");
    }
}

/// Memory follows the context in use, not the one that the file claims.
#[test]
fn memory_does_not_grow_with_the_claimed_context() {
    let peak = |context_length: u32| {
        let (_folder, path) = write(TinyLlama { context_length, ..TinyLlama::default() });
        let mut command = tegula(["run", path.to_str().unwrap(), "-p", "abc", "-n", "4"]);
        command.args(["-c", "512", "--json", "--device", "cpu", "--temperature", "0"]);
        let out = run(&mut command);
        assert_eq!(out.code, 0, "{}", out.stderr);
        let report: Value = serde_json::from_str(&out.stdout).unwrap();
        report["peak_memory_bytes"].as_u64().unwrap()
    };
    let (small, large) = (peak(512), peak((1 << 31) - 1));
    assert!(large.abs_diff(small) < 4 << 20, "{small} bytes for 512 tokens, {large} for 2^31 - 1");
}

/// A device that is too small is said to be, before anything is loaded.
#[test]
fn a_model_that_does_not_fit_is_refused_with_numbers() {
    // 1.2 MB of weights; the limit leaves room for everything else.
    let (_folder, path) = write(TinyLlama { n_layer: 8, ..TinyLlama::default() });
    for device in BACKENDS {
        for mmap in [true, false] {
            let caps = Caps { max_buffer: None, memory_limit: Some(1 << 20) };
            let options = PlanOptions { n_ctx: Some(32), mmap, ..PlanOptions::default() };
            let error = plan(&path, device, caps, options).unwrap_err();
            assert!(matches!(error, Error::ModelDoesNotFit { .. }), "{device}: {error}");
            let text = error.to_string();
            assert!(text.contains(device) && text.contains("is free"), "{text}");
            assert!(text.contains("MiB"), "{text}");
        }
    }
}

/// A row is the least that a chunk must hold; a cap below that is an error with both numbers, not a panic or a loop.
#[test]
fn a_cap_below_a_row_is_refused_with_numbers() {
    let (_folder, path) = write(TinyLlama { n_embd: 512, ..TinyLlama::default() });
    for device in BACKENDS {
        for max_buffer in [1, 64, 1024] {
            let caps = Caps { max_buffer: Some(max_buffer), memory_limit: None };
            let options = PlanOptions { n_ctx: Some(32), ..PlanOptions::default() };
            let error = plan(&path, device, caps, options).unwrap_err();
            let text = error.to_string();
            assert!(
                matches!(error, Error::RowTooBig { .. } | Error::ScratchTooBig { .. }),
                "{device} {max_buffer}: {text}"
            );
            assert!(text.contains(&max_buffer.to_string()) && text.contains("TEGULA_MAX_BUFFER"));
        }
    }
}

/// A typo in a cap must not mean "no cap".
#[test]
fn malformed_caps_are_errors() {
    let (_folder, path) = write(TinyLlama::default());
    for name in ["TEGULA_MAX_BUFFER", "TEGULA_MEMORY_LIMIT"] {
        for value in ["", "0", "lots", "1MB", "-1", "1e9", "99999999999999999999"] {
            let mut command = tegula(["plan", path.to_str().unwrap()]);
            let out = run(command.env(name, value));
            assert_eq!(out.code, 1, "{name}={value}");
            assert!(out.stderr.contains(name) && out.stderr.contains("512MiB"), "{}", out.stderr);
        }
        let mut command = tegula(["plan", path.to_str().unwrap()]);
        let out = run(command.env(name, "64MiB"));
        assert_eq!(out.code, 0, "{}", out.stderr);
        assert!(out.stdout.contains("override"), "a cap shows in the plan: {}", out.stdout);
    }
}
