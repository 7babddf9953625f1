//! What users of such programs met, one test each: what must happen instead.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail by panicking"
)]

mod common;

use common::{KIB, KV_TYPES, fake_runtime};
use serde_json::Value;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use tegula::memory::plan::ChunkReport;
use tegula::{Caps, DType, Error, Model, ModelOptions, Outputs, Plan, PlanOptions, Sequence};
use tegula_e2e::{BACKENDS, RandomModel, kl, run, runtime, tegula};
use test_tegula_fake::{DeviceConfig, Fake, GIB, MIB, built_plugin};

fn options(device: &str, plan: PlanOptions) -> ModelOptions {
    ModelOptions { device: Some(device.into()), plan, ..ModelOptions::default() }
}

fn words(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * i + 7 * i) % 251).collect()
}

fn eval(sequence: &mut Sequence, tokens: &[u32]) -> Vec<f32> {
    let mut last = Vec::new();
    let go_on = AtomicBool::new(false);
    let done = sequence.eval(tokens, Outputs::Last, &go_on, |_, row| {
        last = row.to_vec();
        Ok(())
    });
    done.unwrap();
    last
}

fn chunks<'a>(plan: &'a Plan, usage: &'a str) -> Vec<&'a ChunkReport> {
    let heaps = plan.report.devices.iter().flat_map(|device| &device.heaps);
    heaps.flat_map(|heap| &heap.chunks).filter(|chunk| chunk.usage == usage).collect()
}

/// The last row of logits after `n` tokens in each of two conversations, on one fake device; and the plan.
fn on_fake(device: DeviceConfig, path: &Path, plan: &PlanOptions, n: u32) -> (Plan, Vec<Vec<f32>>) {
    let folder = tempfile::tempdir().unwrap();
    // The fast backend computes: hundreds of MiB of keys and values are filled.
    let fake = Fake::new().inner(&built_plugin("libtegula_cpu.so").unwrap()).device(device);
    let fake = fake.install(folder.path()).unwrap();
    let runtime = fake_runtime(&[&fake], Caps::default());
    let plan = PlanOptions { n_parallel: 2, ..plan.clone() };
    let model = Model::open(&runtime, path, &options("fake:0", plan), &mut |_| {});
    let model = model.unwrap_or_else(|e| panic!("{e}"));
    let mut sequences = [model.sequence(), model.sequence()];
    let rows = sequences.iter_mut().map(|sequence| eval(sequence, &words(n))).collect();
    let plan = model.plan().clone();
    drop((sequences, model, runtime));
    let stats = fake.stats().unwrap();
    assert!(stats.is_empty() && stats.violations.is_empty(), "{stats:?}");
    for usage in ["weights", "kv", "scratch"] {
        let planned = chunks(&plan, usage).into_iter().filter(|chunk| chunk.source == "allocated");
        let planned: u64 = planned.map(|chunk| chunk.size).sum();
        let taken = stats.usage(usage).bytes;
        // Keys and values are allocated as far as the context is used.
        let is_all = usage != "kv" || 2 * n >= plan.context.n_ctx;
        assert!(if is_all { taken == planned } else { taken <= planned }, "{usage}: {taken}");
    }
    (plan, rows)
}

/// A cache of 200 MiB on a device that gives 64 MiB at once: at least four buffers, none over the limit, the same logits.
#[test]
fn a_cache_of_200_mib_on_64_mib_buffers() {
    let folder = tempfile::tempdir().unwrap();
    // 64 KiB of keys and values for each token.
    let model = RandomModel {
        n_layer: 8,
        n_head: 8,
        n_head_kv: 8,
        head_dim: 256,
        ..RandomModel::default()
    };
    let path = model.write(folder.path());
    let plan = PlanOptions { n_ctx: Some(3200), n_ubatch: 128, ..PlanOptions::default() };
    let (whole, expected) = on_fake(DeviceConfig::gpu("A", 4 * GIB), &path, &plan, 1600);
    assert_eq!(whole.report.context.kv_bytes, 200 * MIB);
    let capped = DeviceConfig::gpu("A", 4 * GIB).max_size(64 * MIB);
    let (plan, rows) = on_fake(capped, &path, &plan, 1600);
    let kv = chunks(&plan, "kv");
    assert!(kv.len() >= 4 && kv.iter().all(|chunk| chunk.size <= 64 * MIB), "{}", kv.len());
    assert_eq!(plan.report.context.kv_bytes, 200 * MIB);
    assert_eq!(rows, expected);
}

/// The size that works best and the greatest possible are two numbers: a tensor between them is one allocation, many small ones share.
#[test]
fn preferred_and_greatest_size_are_two_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let model = RandomModel { n_vocab: 1000, n_layer: 4, ..RandomModel::default() };
    let path = model.write(folder.path());
    let embedding = 1000 * 64 * 4;
    let (preferred, greatest) = (96 * KIB, 512 * KIB);
    assert!(preferred < embedding && embedding < greatest);
    let device = DeviceConfig::gpu("A", GIB).max_size(greatest);
    let device = device.buffer_type(0, |own| own.preferred_chunk = preferred.into());
    let plan = PlanOptions { n_ctx: Some(64), ..PlanOptions::default() };
    let (plan, _) = on_fake(device, &path, &plan, 20);
    let weights = chunks(&plan, "weights");
    let n_tiles: usize = weights.iter().map(|chunk| chunk.tiles.len()).sum();
    assert_eq!(n_tiles, model.tensors().len(), "nothing is split");
    let (large, small): (Vec<&ChunkReport>, Vec<&ChunkReport>) =
        weights.into_iter().partition(|chunk| chunk.size > preferred);
    assert_eq!(large.len(), 1);
    assert_eq!((large[0].size, &*large[0].tiles[0].tensor), (embedding, "token_embd.weight"));
    let small_bytes: u64 = small.iter().map(|chunk| chunk.size).sum();
    assert!(small.len() as u64 <= 2 * small_bytes.div_ceil(preferred), "{} chunks", small.len());
}

/// Scratch obeys the limit as everything does, with a cache of any type: a smaller ubatch, said in the plan, or a refusal before loading.
#[test]
fn scratch_over_the_limit_lowers_the_ubatch() {
    let folder = tempfile::tempdir().unwrap();
    let model = RandomModel { n_ff: 1024, ..RandomModel::default() };
    let path = model.write(folder.path());
    let inner = built_plugin("libtegula_cpu.so").unwrap();
    for dtype in [DType::Q8_0, DType::Q4_0, DType::F16] {
        let plan = PlanOptions {
            n_ctx: Some(1024),
            dtype_k: dtype,
            dtype_v: dtype,
            n_ubatch: 512,
            ..PlanOptions::default()
        };
        let (whole, expected) = on_fake(DeviceConfig::gpu("A", GIB), &path, &plan, 300);
        assert_eq!((whole.n_ubatch, &whole.ubatch_reason), (512, &None));
        let largest = chunks(&whole, "scratch").iter().map(|chunk| chunk.size).max().unwrap();
        let cap = MIB;
        assert!(largest > cap, "{largest} bytes of scratch are no case");
        let device = DeviceConfig::gpu("A", GIB).max_size(cap);
        let (capped, rows) = on_fake(device, &path, &plan, 300);
        let reason = capped.ubatch_reason.as_deref().unwrap_or_default();
        assert!(capped.n_ubatch < 512 && reason.contains(&cap.to_string()), "{reason}");
        assert!(chunks(&capped, "scratch").iter().all(|chunk| chunk.size <= cap));
        for (row, expected) in rows.iter().zip(&expected) {
            assert!(kl(expected, row) < 1e-6, "{}: {:e}", dtype.name(), kl(expected, row));
        }
        // Not even one token: the working area of a thread is larger than a row.
        let device = DeviceConfig::gpu("A", GIB).max_size(4200);
        let fake = Fake::new().inner(&inner).device(device).install(folder.path()).unwrap();
        let runtime = fake_runtime(&[&fake], Caps::default());
        let error = Model::plan_only(&runtime, &path, &options("fake:0", plan)).unwrap_err();
        let Error::ScratchTooBig { device, cause } = &error else { panic!("{error}") };
        assert!(cause.asked > cause.limit && device == "fake:0", "{error}");
        assert!(error.to_string().contains("4200"), "{error}");
    }
}

/// One weight three times as large as a buffer may be: its rows lie in several, and the product is the same; one row too large is refused at load.
#[test]
fn a_weight_three_times_the_limit() {
    let folder = tempfile::tempdir().unwrap();
    for dtype in [DType::F32, DType::Q8_0, DType::Q4_K] {
        let model = RandomModel {
            n_embd: 256,
            n_vocab: 6144,
            tied: false,
            dtypes: vec![dtype],
            ..RandomModel::default()
        };
        let path = model.write(folder.path());
        let plan = PlanOptions { n_ctx: Some(64), n_ubatch: 8, ..PlanOptions::default() };
        let (row, n_rows) = model.rows()["output.weight"];
        let cap = row * n_rows / 3;
        for device in [DeviceConfig::gpu("A", GIB), DeviceConfig::host("A", GIB)] {
            let (_, expected) = on_fake(device.clone(), &path, &plan, 20);
            let (plan, rows) = on_fake(device.max_size(cap), &path, &plan, 20);
            let holding = |tensor: &str| {
                let holds = |c: &&&ChunkReport| c.tiles.iter().any(|t| t.tensor == tensor);
                chunks(&plan, "weights").iter().filter(holds).count()
            };
            assert!(holding("output.weight") >= 3 && holding("token_embd.weight") >= 3);
            for (row, expected) in rows.iter().zip(&expected) {
                let differs = row.iter().zip(expected).map(|(a, b)| (a - b).abs());
                let greatest = expected.iter().fold(0f32, |max, x| max.max(x.abs()));
                assert!(differs.fold(0f32, f32::max) <= 1e-5 * greatest, "{}", dtype.name());
            }
        }
        let too_small = DeviceConfig::gpu("A", GIB).max_size(row - 1);
        let fake = Fake::new().device(too_small).install(folder.path()).unwrap();
        let runtime = fake_runtime(&[&fake], Caps::default());
        let error = Model::open(&runtime, &path, &options("fake:0", plan), &mut |_| {});
        let error = error.unwrap_err();
        assert!(matches!(error, Error::RowTooBig { .. }), "{error}");
    }
}

/// Cells of the cache by trained context, `-c` and conversations at a time: one context, never a multiple of it.
#[test]
fn planned_cells() {
    let folder = tempfile::tempdir().unwrap();
    // Trained context, `-c`, cells. Blocks have 32 tokens.
    let table: [(u32, Option<u32>, u64); 8] = [
        (131_072, None, 131_072),
        (131_072, Some(4096), 4096),
        (131_072, Some(100), 128),
        (131_072, Some(1), 32),
        (4096, None, 4096),
        (4096, Some(8192), 8192),
        (100, None, 128),
        (1, None, 32),
    ];
    for (n_ctx_train, n_ctx, cells) in table {
        let model = RandomModel { n_layer: 1, n_ctx_train, ..RandomModel::default() };
        let path = model.write(folder.path());
        let path = path.to_str().unwrap();
        for n_parallel in [None, Some(1), Some(2), Some(4), Some(8)] {
            let mut command = tegula(["plan", path, "--json", "--device", "cpu"]);
            let numbers = [("-c", n_ctx), ("--parallel", n_parallel)];
            for (flag, number) in numbers.into_iter().filter_map(|(f, n)| Some((f, n?))) {
                command.args([flag, &number.to_string()]);
            }
            let out = run(&mut command);
            assert_eq!(out.code, 0, "{}", out.stderr);
            let report: Value = serde_json::from_str(&out.stdout).unwrap();
            let number = |name: &str| report["context"][name].as_u64().unwrap();
            let planned = number("kv_bytes") / number("kv_bytes_per_token");
            let what = format!("trained {n_ctx_train}, -c {n_ctx:?}, {n_parallel:?} at a time");
            assert_eq!(planned, cells, "{what}");
            assert_eq!(number("n_ctx"), u64::from(n_ctx.unwrap_or(n_ctx_train)), "{what}");
        }
    }
}

/// Weights are not put into memory that was measured to be slow where faster memory could hold them, and that is said.
#[test]
fn slow_memory_is_not_used_for_weights() {
    let folder = tempfile::tempdir().unwrap();
    let (plugins, cache) = (folder.path().join("plugins"), folder.path().join("cache"));
    let card = |slow: f64| {
        // A quarter of a buffer is measured, and not less than 4 MiB: too little for staging, so that this is between two types.
        DeviceConfig::gpu("A", GIB).max_size(16 * MIB).with(|device| {
            let fast = device.buffer_types[0].clone();
            device.buffer_types[1].max_size = (64 * KIB).into();
            device.buffer_types[0].name = "slow".into();
            device.buffer_types[0].slow_ms_per_mib = slow;
            device.buffer_types.push(fast);
            let last = &mut device.buffer_types[2];
            (last.name, last.heap) = ("fast".into(), 0);
        })
    };
    let model = RandomModel::default().write(folder.path());
    let model = model.to_str().unwrap();
    let tegula_with = |args: &[&str]| {
        let mut command = tegula(args);
        command.env("TEGULA_BACKEND_PATH", &plugins).env("XDG_CACHE_HOME", &cache);
        let out = run(&mut command);
        assert_eq!(out.code, 0, "{args:?}: {}", out.stderr);
        out
    };
    let types_of_weights = || {
        let out = tegula_with(&["plan", model, "--device", "fake:0", "--json", "-c", "64"]);
        let report: Value = serde_json::from_str(&out.stdout).unwrap();
        let heaps = report["devices"][0]["heaps"].as_array().unwrap();
        let chunks = heaps.iter().flat_map(|heap| heap["chunks"].as_array().unwrap());
        let weights = chunks.filter(|chunk| chunk["usage"] == "weights");
        let names: Vec<String> =
            weights.map(|chunk| chunk["buffer_type"].as_str().unwrap().to_owned()).collect();
        assert!(!names.is_empty());
        (names, out.stderr)
    };
    let inner = built_plugin("libtegula_cpu.so").unwrap();
    for (slow, expected) in [(0.0, "slow"), (30.0, "fast")] {
        let fake = Fake::new().inner(&inner).device(card(slow));
        fake.install(&plugins).unwrap();
        // Not measured, it is what the backend advises.
        let _ = std::fs::remove_dir_all(&cache);
        let (names, _) = types_of_weights();
        assert!(names.iter().all(|name| name == "slow"), "{names:?}");
        tegula_with(&["devices", "--measure", "--device", "fake:0"]);
        let (names, stderr) = types_of_weights();
        assert!(names.iter().all(|name| name == expected), "{slow}: {names:?}");
        let told = stderr.contains("slow") && stderr.contains("fast") && stderr.contains("/s");
        assert_eq!(told, expected == "fast", "{stderr}");
    }
}

/// What a type of keys or values may cost: the distance of the next token's distribution from that with a cache of f16.
fn kl_max(dtype: DType) -> f64 {
    match dtype {
        DType::F32 | DType::F16 => 1e-5,
        DType::BF16 => 5e-4,
        DType::Q8_0 => 5e-4,
        _ => 1e-1,
    }
}

/// Every type of keys with every type of values, for heads of every size, on every backend: it runs, and loses what its precision loses.
#[test]
fn keys_and_values_of_every_type() {
    let folder = tempfile::tempdir().unwrap();
    for head_dim in [64, 128, 256] {
        let model = RandomModel { head_dim, n_head: 2, n_head_kv: 1, ..RandomModel::default() };
        let path = model.write(folder.path());
        for device in BACKENDS {
            let runtime = runtime();
            let logits = |dtype_k, dtype_v| {
                let plan =
                    PlanOptions { n_ctx: Some(96), dtype_k, dtype_v, ..PlanOptions::default() };
                let model = Model::open(&runtime, &path, &options(device, plan), &mut |_| {});
                eval(&mut model.unwrap_or_else(|e| panic!("{e}")).sequence(), &words(70))
            };
            let exact = logits(DType::F16, DType::F16);
            let mut worst = std::collections::BTreeMap::new();
            for k in KV_TYPES {
                for v in KV_TYPES {
                    let row = logits(k, v);
                    assert!(row.iter().all(|logit| logit.is_finite()));
                    let (distance, most) = (kl(&exact, &row), kl_max(k).max(kl_max(v)));
                    let what = format!("{device}, heads of {head_dim}, K {k:?}, V {v:?}");
                    assert!(distance < most, "{what}: KL {distance:e}");
                    assert!((k, v) == (DType::F16, DType::F16) || distance > 0.0, "{what}");
                    let worst = worst.entry(most.to_string()).or_insert(0f64);
                    *worst = worst.max(distance);
                }
            }
            println!("{device}, heads of {head_dim}: {worst:?}");
        }
    }
    // A head that is no whole number of QuantBlocks is refused before anything is loaded.
    let path = RandomModel { head_dim: 48, ..RandomModel::default() }.write(folder.path());
    for device in BACKENDS {
        for (k, v) in [(DType::Q8_0, DType::F16), (DType::F16, DType::Q4_0)] {
            let plan = PlanOptions { dtype_k: k, dtype_v: v, ..PlanOptions::default() };
            let error = Model::plan_only(&runtime(), &path, &options(device, plan)).unwrap_err();
            let text = error.to_string().to_ascii_lowercase();
            let name = if k == DType::F16 { v } else { k }.name().to_ascii_lowercase();
            assert!(text.contains(&name) && text.contains("48"), "{text}");
        }
    }
}
