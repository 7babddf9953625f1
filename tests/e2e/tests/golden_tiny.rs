//! Every architecture and quantised type against exact logits, on every backend, with and without a cap on buffers.
//!
//! The models are small and random, so a fault in any op, layout or tiling shows as a large distance at the first position. The
//! exact logits are those of the dequantised weights. Activations have 16 bits or more, so quantised files must be as close as f32
//! ones: a distance of the size that 8-bit activations have (`llama_cpp_default` in the data) is a fault. One thing is not as close: where
//! two experts are about equal to a router, the rounding of an activation may choose the other one, and that token's logits are then
//! far away. So quantised files of models with experts are held to it by their median on devices that round.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail by panicking"
)]

use serde_json::Value;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use tegula::{
    Caps, DType, Error, Model, ModelOptions, Outputs, PlanOptions, RegistryOptions, Runtime,
    RuntimeOptions,
};
use tegula_e2e::{
    BACKENDS, TopLogits, argmax, f32s, full, golden, ids, json, kl, runtime_of, runtime_with,
    target_dir,
};

/// The folders whose architectures are implemented.
const CASES: [&str; 32] = [
    "cohere",
    "cohere2",
    "deepseek_v2",
    "gemma2",
    "glm4",
    "granite",
    "granitemoe",
    "lfm2",
    "olmo2",
    "olmoe",
    "phithree",
    "smollm3",
    "starcoder2",
    "gemma4",
    "gpt_oss",
    "mixtral",
    "qwen2_moe",
    "qwen3",
    "qwen3_5",
    "qwen3_5_256",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_moe_256",
    "qwen3_next",
    "llama256",
    "llama_bias",
    "llama_rope3",
    "mistral",
    "qwen2",
    "qwen2_256",
    "gemma3",
    "gemma3_256",
];

/// f32 arithmetic in another order gives 1e-11 or so; f16 files have the same exact weights.
const KL_MAX: f64 = 1e-5;

/// A greedy choice between logits closer than this is a tie.
const MARGIN_MIN: f64 = 0.01;

#[test]
fn reference() {
    check("reference", None, &CASES);
}

#[test]
fn reference_with_buffers_of_64_kib() {
    check("reference", Some(64 << 10), &CASES);
}

#[test]
fn cpu() {
    check("cpu", None, &CASES);
}

/// A second device that has nothing to do changes nothing.
#[test]
fn cpu_and_reference() {
    check("cpu,reference", None, &["qwen3_5_moe"]);
}

/// A thread of this backend works in an area of its own, which is one buffer and takes 304 KiB.
#[test]
fn cpu_with_buffers_of_320_kib() {
    check("cpu", Some(320 << 10), &CASES);
}

/// A few folders for devices that need a driver, which may be a processor's, and slow: clamped experts with biases, experts with recurrent
/// state, and layers that share their keys.
const FEW: [&str; 3] = ["gpt_oss", "qwen3_5_moe", "gemma4"];

#[test]
fn vulkan() {
    on_driver("vulkan");
}

#[test]
fn opencl() {
    on_driver("opencl");
}

#[test]
fn openvino() {
    on_driver("openvino");
}

/// Heads that share a part are put together by an op that these backends lack: the core gives it to the processor.
#[test]
fn what_a_device_lacks_runs_on_the_next() {
    let Some(root) = golden("tiny") else { return };
    // It builds the processor's backend where that is stale.
    drop(runtime_with(Caps { max_buffer: None, memory_limit: None }));
    for backend in ["vulkan", "opencl"] {
        let Some((_, ids)) = runtime_of(backend) else { continue };
        let file = |id| target_dir().join(format!("libtegula_{id}.so"));
        let registry =
            RegistryOptions { explicit: vec![file(backend), file("cpu")], standard: false };
        let runtime = Runtime::new(&RuntimeOptions { registry, ..Default::default() });
        let (file, device) = ("deepseek_v2/model-f32.gguf", format!("{},cpu", ids[0]));
        let model = open(&runtime, &root.join(file), &device).unwrap();
        assert_eq!(model.plan().report.devices.len(), 2, "{device}");
        drop(model);
        check_on(&runtime, &device, None, &["deepseek_v2"]);
    }
}

/// On the first device of a backend that needs a driver.
fn on_driver(backend: &str) {
    if let Some((runtime, ids)) = runtime_of(backend) {
        check_on(&runtime, &ids[0], None, if full() { &CASES } else { &FEW });
    }
}

fn check(device: &str, max_buffer: Option<u64>, cases: &[&str]) {
    let runtime = runtime_with(Caps { max_buffer, memory_limit: None });
    check_on(&runtime, device, max_buffer, cases);
}

fn check_on(runtime: &Runtime, device: &str, max_buffer: Option<u64>, cases: &[&str]) {
    let Some(root) = golden("tiny") else { return };
    for case in cases {
        let folder = root.join(case);
        let facts = json(folder.join("case.json"));
        for file in facts["files"].as_object().unwrap().keys() {
            let name = file.strip_prefix("model-").unwrap().strip_suffix(".gguf").unwrap();
            let model = match open(runtime, &folder.join(file), device) {
                // The oracle has every op; another device's author says which are still missing.
                Err(error @ Error::OpsUnsupported { .. })
                    if !BACKENDS.iter().any(|own| device.starts_with(own)) =>
                {
                    println!("SKIPPED: {device} {case} {file}: {error}");
                    continue;
                }
                opened => opened.unwrap_or_else(|e| panic!("{case} {file}: {e}")),
            };
            if let Some(max) = max_buffer {
                let devices = &model.plan().report.devices;
                let chunks = devices.iter().flat_map(|d| &d.heaps).flat_map(|heap| &heap.chunks);
                for chunk in chunks.filter(|chunk| chunk.max_size.is_some()) {
                    assert!(chunk.size <= max, "{case} {file}: {chunk:?}");
                }
            }
            for (prompt, golden) in facts["prompts"].as_object().unwrap() {
                if let Some(reference) = reference_of(golden, name) {
                    let at = format!("{device} {case} {file} {prompt}");
                    // Weights that are not quantised are multiplied with activations as they are, by every device.
                    let is_rounded = device != "reference" && !std::ptr::eq(reference, golden);
                    let may_flip = is_rounded && has_experts(&facts["config"]);
                    check_prompt(&model, &folder, (golden, reference), may_flip, &at);
                }
            }
        }
    }
}

fn open(runtime: &Runtime, path: &Path, device: &str) -> Result<Model, Error> {
    let plan = PlanOptions {
        n_ctx: Some(256),
        dtype_k: DType::F32,
        dtype_v: DType::F32,
        n_outputs: 16,
        ..PlanOptions::default()
    };
    let options = ModelOptions { device: Some(device.into()), plan, ..ModelOptions::default() };
    Model::open(runtime, path, &options, &mut |_| {})
}

/// The part of a prompt's data that a weight file is held against: the prompt's own, or that of the quantised type.
fn reference_of<'a>(golden: &'a Value, file: &str) -> Option<&'a Value> {
    if golden["applies_to"].as_array().unwrap().iter().any(|name| name == file) {
        return Some(golden);
    }
    golden["quantised"].get(file)
}

/// Whether a router chooses among experts.
fn has_experts(config: &Value) -> bool {
    let is_count = |(key, value): (&String, &Value)| {
        key.ends_with("experts") && value.as_u64().is_some_and(|n| n > 0)
    };
    config.as_object().unwrap().iter().any(is_count)
}

/// The original of this model does not round the ranges of YaRN, which its file has no key for: with rounded ranges it is farther from the
/// original than any rounding would take it, and no farther than with the peer. Only the greatest logits are known, so ours is a lower bound.
#[test]
fn ranges_of_yarn_are_rounded_as_by_the_peer() {
    let Some(root) = golden("tiny") else { return };
    let folder = root.join("flagged_gpt_oss_yarn_notrunc");
    let facts = json(folder.join("case.json"));
    let runtime = runtime_with(Caps { max_buffer: None, memory_limit: None });
    let model = open(&runtime, &folder.join("model-f16.gguf"), "cpu").unwrap();
    for (prompt, golden) in facts["prompts"].as_object().unwrap() {
        let exact = Exact::of(golden, golden, &folder, model.info().n_vocab as usize);
        let (mut worst, never) = (0.0, AtomicBool::new(false));
        let kept = model.sequence().eval(&ids(&golden["ids"]), Outputs::All, &never, |pos, row| {
            worst = exact.kl(pos, row).unwrap_or(0.0).max(worst);
            Ok(())
        });
        kept.unwrap();
        // The peer's weights of f32, since ours multiply those of f16 exactly.
        let peer = golden["llama_cpp"]["f32_kvf32_nofa"]["kl_max"].as_f64().unwrap();
        println!("{prompt}: KL max {worst:.2e}, the peer's {peer:.2e}");
        assert!(worst > KL_MAX && worst < 1.05 * peer, "{prompt}: {worst:e}, the peer's {peer:e}");
    }
}

fn check_prompt(
    model: &Model,
    folder: &Path,
    (golden, reference): (&Value, &Value),
    may_flip: bool,
    at: &str,
) {
    let tokens = ids(&golden["ids"]);
    let exact = Exact::of(golden, reference, folder, model.info().n_vocab as usize);
    let (mut distances, mut next) = (Vec::new(), 0);
    let mut sequence = model.sequence();
    let never = AtomicBool::new(false);
    sequence
        .eval(&tokens, Outputs::All, &never, |pos, logits| {
            if let Some(distance) = exact.kl(pos, logits) {
                distances.push(distance);
            }
            next = argmax(logits);
            Ok(())
        })
        .unwrap();
    assert_eq!(distances.len(), exact.positions.len(), "{at}: positions are left");
    distances.sort_by(f64::total_cmp);
    let (median, worst) = (distances[distances.len() / 2], distances[distances.len() - 1]);
    println!("{at}: KL median {median:.1e}, max {worst:.1e}");
    let peer = |figure: &str| reference["llama_cpp_default"][figure].as_f64();
    let peer_max = peer("kl_max").unwrap_or(KL_MAX);
    let worst_max = if may_flip { peer_max } else { KL_MAX.min(peer_max) };
    let median_max = KL_MAX.min(peer("kl_median").unwrap_or(KL_MAX));
    assert!(median < median_max, "{at}: KL median {median:e}, allowed {median_max:e}");
    assert!(worst < worst_max, "{at}: KL max {worst:e}, allowed {worst_max:e}");

    let margins = reference["greedy_margin"].as_array().unwrap();
    for (i, (token, margin)) in ids(&reference["greedy"]).into_iter().zip(margins).enumerate() {
        let is_tie = margin.as_f64().unwrap() < MARGIN_MIN;
        assert!(next == token || is_tie, "{at}: greedy token {i} is {next}, not {token}");
        let evaluated = sequence.eval(&[token], Outputs::Last, &never, |_, logits| {
            next = argmax(logits);
            Ok(())
        });
        evaluated.unwrap();
    }
}

/// What is known of the exact logits of a prompt: all of them, or the greatest.
struct Exact {
    positions: Vec<u32>,
    full: Option<Vec<Vec<f32>>>,
    top: Vec<TopLogits>,
}

impl Exact {
    fn of(golden: &Value, reference: &Value, folder: &Path, n_vocab: usize) -> Self {
        let full = reference["full_logits"].as_str().map(|name| {
            f32s(folder.join(name)).chunks_exact(n_vocab).map(<[f32]>::to_vec).collect()
        });
        let tops = reference["top20"].as_array().unwrap();
        let sums = reference["logsumexp"].as_array().unwrap();
        let top = sums.iter().zip(tops).map(|(sum, top)| TopLogits::new(sum, top)).collect();
        Self { positions: ids(&golden["positions"]), full, top }
    }

    /// The distance at a position, or its lower bound; `None` where nothing is known.
    fn kl(&self, pos: u32, ours: &[f32]) -> Option<f64> {
        let i = self.positions.iter().position(|at| *at == pos)?;
        Some(match &self.full {
            Some(full) => kl(&full[i], ours),
            None => self.top[i].kl_at_least(ours),
        })
    }
}
