//! Real models against exact logits: what a user gets is what the model's weights say.
//!
//! The golden data has every logit at the end of two prompts, and the twenty greatest with the logsumexp elsewhere; there, the
//! distance is a lower bound (see `TopLogits::kl_at_least`), which is close to the whole since the listed logits carry nearly all
//! probability. `TEGULA_TEST_FULL=1` runs all prompts of all models.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail by panicking"
)]

use serde_json::Value;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use tegula::{
    DType, EncodeOptions, GenerateOptions, Model, ModelOptions, Outputs, PlanOptions, Runtime,
    Sampler, SamplerOptions, Sequence,
};
use tegula_e2e::{
    TopLogits, argmax, f32s, full, golden, ids, is_on_intels_opencl, json, kl, model_file, runtime,
    runtime_of,
};

/// A model, and what the peer's defaults lose on it (KL, mean over all prompts and over decoding).
struct Case {
    name: &'static str,
    file: &'static str,
    peer_prompt: f64,
    peer_decode: f64,
}

const SMOLLM2: Case = Case {
    name: "smollm2-135m-q4_1",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    peer_prompt: 3.6e-3,
    peer_decode: 2.3e-3,
};
const GEMMA3: Case = Case {
    name: "gemma-3-270m-q4_k_m",
    file: "gemma-3-270m-q4_k_m.gguf",
    peer_prompt: 6.2e-3,
    peer_decode: 3.8e-3,
};
const QWEN2: Case = Case {
    name: "qwen2.5-coder-0.5b-q4_k_m",
    file: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    peer_prompt: 1.2e-3,
    peer_decode: 3.9e-4,
};

const ALL: &[&str] = &["english", "german", "code", "chat", "chinese_emoji", "long"];

/// With keys and values in f32 everything is computed in f32.
const KL_MEAN_F32: f64 = 1e-5;
/// And no single logarithm of a probability is off by more; the exact computation's own noise is below 1e-4.
const ABS_DIFF_F32: f64 = 1e-2;
/// A greedy choice between logits closer than this is a tie.
const MARGIN_MIN: f64 = 0.01;
/// Prompts up to this length give logits at every position; of longer ones, at every sixteenth.
const SHORT_MAX: usize = 128;

#[test]
fn smollm2_on_cpu() {
    check(&SMOLLM2, "cpu", DType::F32, ALL, 64);
}

#[test]
fn smollm2_on_cpu_with_kv_in_f16() {
    check(&SMOLLM2, "cpu", DType::F16, ALL, if full() { 64 } else { 16 });
}

#[test]
fn smollm2_on_reference() {
    check(&SMOLLM2, "reference", DType::F32, &["chat"], 8);
}

#[test]
fn gemma3_on_cpu() {
    let prompts = if full() { ALL } else { &["chat", "long"] };
    check(&GEMMA3, "cpu", DType::F32, prompts, if full() { 64 } else { 32 });
}

#[test]
fn gemma3_on_cpu_with_kv_in_f16() {
    let prompts = if full() { ALL } else { &["english"] };
    check(&GEMMA3, "cpu", DType::F16, prompts, if full() { 64 } else { 16 });
}

#[test]
fn qwen2_on_cpu() {
    let prompts = if full() { ALL } else { &["english"] };
    check(&QWEN2, "cpu", DType::F32, prompts, if full() { 64 } else { 16 });
}

#[test]
fn qwen2_on_cpu_with_kv_in_f16() {
    let prompts = if full() { ALL } else { &["english"] };
    check(&QWEN2, "cpu", DType::F16, prompts, if full() { 64 } else { 16 });
}

#[test]
fn smollm2_on_openvino() {
    check_driver(&SMOLLM2, "openvino", DType::F32, ALL, if full() { 64 } else { 16 });
}

#[test]
fn smollm2_on_openvino_with_kv_in_q8_0() {
    check_driver(&SMOLLM2, "openvino", DType::Q8_0, &["english"], if full() { 64 } else { 16 });
}

#[test]
fn gemma3_on_openvino() {
    let prompts = if full() { ALL } else { &["chat"] };
    check_driver(&GEMMA3, "openvino", DType::F32, prompts, if full() { 64 } else { 16 });
}

#[test]
fn qwen2_on_openvino() {
    let prompts = if full() { ALL } else { &["english"] };
    check_driver(&QWEN2, "openvino", DType::F32, prompts, if full() { 64 } else { 16 });
}

/// Drivers that compute on the processor take minutes for what a GPU takes in no time: the shortest prompt.
fn on_gpus(case: &Case, backend: &str) {
    check_driver(case, backend, DType::F32, &["chat"], 4);
}

#[test]
fn smollm2_on_vulkan() {
    on_gpus(&SMOLLM2, "vulkan");
}

#[test]
fn gemma3_on_vulkan() {
    on_gpus(&GEMMA3, "vulkan");
}

#[test]
fn qwen2_on_vulkan() {
    on_gpus(&QWEN2, "vulkan");
}

#[test]
fn smollm2_on_opencl() {
    on_gpus(&SMOLLM2, "opencl");
}

#[test]
fn smollm2_on_intels_opencl() {
    if is_on_intels_opencl("smollm2_on_intels_opencl") {
        on_gpus(&SMOLLM2, "opencl");
    }
}

#[test]
fn gemma3_on_opencl() {
    on_gpus(&GEMMA3, "opencl");
}

#[test]
fn gemma3_on_intels_opencl() {
    if is_on_intels_opencl("gemma3_on_intels_opencl") {
        on_gpus(&GEMMA3, "opencl");
    }
}

#[test]
fn qwen2_on_intels_opencl() {
    if is_on_intels_opencl("qwen2_on_intels_opencl") {
        on_gpus(&QWEN2, "opencl");
    }
}

#[test]
fn qwen2_on_opencl() {
    on_gpus(&QWEN2, "opencl");
}

/// On every device that a backend finds here.
fn check_driver(case: &Case, backend: &str, kv: DType, prompts: &[&str], n_decode: usize) {
    let Some((runtime, ids)) = runtime_of(backend) else { return };
    for id in ids {
        check_on(&runtime, case, &id, kv, prompts, n_decode);
    }
}

/// Distances at many positions.
#[derive(Default)]
struct Distances {
    kl: Vec<f64>,
    abs_diff_max: f64,
}

impl Distances {
    fn add(&mut self, exact: &TopLogits, ours: &[f32]) {
        self.kl.push(exact.kl_at_least(ours));
        self.abs_diff_max = self.abs_diff_max.max(exact.abs_diff_max(ours));
    }

    fn mean(&self) -> f64 {
        self.kl.iter().sum::<f64>() / self.kl.len().max(1) as f64
    }

    fn max(&self) -> f64 {
        self.kl.iter().copied().fold(0.0, f64::max)
    }
}

fn check(case: &Case, device: &str, kv: DType, prompts: &[&str], n_decode: usize) {
    check_on(&runtime(), case, device, kv, prompts, n_decode);
}

fn check_on(
    runtime: &Runtime,
    case: &Case,
    device: &str,
    kv: DType,
    prompts: &[&str],
    n_decode: usize,
) {
    let Some(folder) = golden("real") else { return };
    let Some(path) = model_file(case.file) else { return };
    let plan = PlanOptions {
        n_ctx: Some(2048),
        dtype_k: kv,
        dtype_v: kv,
        n_outputs: u32::try_from(SHORT_MAX).unwrap(),
        ..PlanOptions::default()
    };
    let options = ModelOptions { device: Some(device.into()), plan, ..ModelOptions::default() };
    let model = Model::open(runtime, &path, &options, &mut |_| {}).unwrap();
    let mut run = Run {
        folder,
        model,
        is_exact: kv == DType::F32,
        name: case.name,
        prompt: Distances::default(),
        decode: Distances::default(),
        last: Vec::new(),
    };
    for prompt in prompts {
        run.check_prompt(prompt, n_decode);
    }
    let (prompt, decode) = (&run.prompt, &run.decode);
    println!(
        "{} {device} kv {}: prompt KL mean {:.2e} max {:.2e}, decode KL mean {:.2e} max {:.2e}, ends {}, greatest difference {:.1e}",
        case.name,
        kv.name(),
        prompt.mean(),
        prompt.max(),
        decode.mean(),
        decode.max(),
        run.ends(),
        prompt.abs_diff_max.max(decode.abs_diff_max),
    );
    let (prompt_bound, decode_bound) = if run.is_exact {
        (KL_MEAN_F32, KL_MEAN_F32)
    } else {
        (case.peer_prompt / 2.0, case.peer_decode / 2.0)
    };
    assert!(prompt.mean() < prompt_bound, "prompt: KL mean {:e}", prompt.mean());
    assert!(decode.mean() < decode_bound, "decode: KL mean {:e}", decode.mean());
    assert!(run.last.iter().all(|kl| *kl < prompt_bound), "ends of prompts: {}", run.ends());
    if run.is_exact {
        assert!(prompt.abs_diff_max < ABS_DIFF_F32, "prompt: {:e}", prompt.abs_diff_max);
        assert!(decode.abs_diff_max < ABS_DIFF_F32, "decode: {:e}", decode.abs_diff_max);
    }
}

struct Run {
    folder: PathBuf,
    model: Model,
    is_exact: bool,
    name: &'static str,
    prompt: Distances,
    decode: Distances,
    /// Distances over the whole vocabulary, where all logits are known.
    last: Vec<f64>,
}

impl Run {
    fn ends(&self) -> String {
        self.last.iter().map(|kl| format!("{kl:.2e}")).collect::<Vec<_>>().join(" ")
    }

    fn check_prompt(&mut self, prompt: &str, n_decode: usize) {
        let golden = json(self.folder.join(format!("{}__{prompt}.json", self.name)));
        let tokens = ids(&golden["ids"]);
        self.check_tokens(&golden, &tokens, prompt);
        let last = golden["full_logits_last_prompt_pos"].as_str();
        let last = last.map(|name| f32s(self.folder.join(name)));

        if tokens.len() > SHORT_MAX {
            self.check_piecewise(&golden, &tokens);
        }
        // As one batch, the way a user's prompt runs.
        let mut sequence = self.model.sequence();
        let mut logits = Vec::new();
        if tokens.len() <= SHORT_MAX {
            let exact = top_logits(&golden["logsumexp"], &golden["top20"]);
            eval(&mut sequence, &tokens, Outputs::All, |pos, row| {
                self.prompt.add(&exact[pos as usize], row);
                logits.clear();
                logits.extend_from_slice(row);
            });
        } else {
            eval(&mut sequence, &tokens, Outputs::Last, |_, row| logits = row.to_vec());
        }
        if let Some(last) = last {
            self.last.push(kl(&last, &logits));
        }
        self.check_greedy(&golden, sequence, argmax(&logits), n_decode, prompt);
        if self.is_exact && prompt == "english" {
            self.check_generate(&golden, &tokens, n_decode);
        }
    }

    /// A tokenizer that differs would make every number below meaningless to a user.
    fn check_tokens(&self, golden: &Value, tokens: &[u32], prompt: &str) {
        let options = EncodeOptions {
            add_special: golden["add_special"] == true,
            parse_special: golden["parse_special"] == true,
        };
        let text = golden["text"].as_str().unwrap();
        assert_eq!(self.model.tokenizer().encode(text, options), tokens, "{prompt}");
    }

    /// A long prompt in pieces that end where logits are known.
    fn check_piecewise(&mut self, golden: &Value, tokens: &[u32]) {
        let exact = top_logits(&golden["logsumexp"], &golden["top20"]);
        let mut sequence = self.model.sequence();
        let mut begin = 0;
        for (exact, pos) in exact.iter().zip(ids(&golden["positions"])) {
            let end = pos as usize + 1;
            eval(&mut sequence, &tokens[begin..end], Outputs::Last, |_, row| {
                self.prompt.add(exact, row);
            });
            begin = end;
        }
        assert_eq!(begin, tokens.len());
    }

    /// Decodes token by token along the exact greedy choice, which ours must be too wherever it is no tie.
    fn check_greedy(
        &mut self,
        golden: &Value,
        mut sequence: Sequence,
        mut next: u32,
        n_decode: usize,
        prompt: &str,
    ) {
        let exact = top_logits(&golden["greedy_logsumexp"], &golden["greedy_top20"]);
        let margins = golden["greedy_margin"].as_array().unwrap();
        let greedy = ids(&golden["greedy"]);
        for (i, (token, exact)) in greedy.iter().zip(&exact).enumerate().take(n_decode) {
            let is_tie = margins[i].as_f64().unwrap() < MARGIN_MIN;
            assert!(
                next == *token || is_tie || !self.is_exact,
                "{prompt}: token {i} is {next}, not {token}"
            );
            eval(&mut sequence, &[*token], Outputs::Last, |_, row| {
                self.decode.add(exact, row);
                next = argmax(row);
            });
        }
    }

    /// `generate` gives the same tokens and their text.
    fn check_generate(&self, golden: &Value, tokens: &[u32], n: usize) {
        let greedy = ids(&golden["greedy"]);
        let margins = golden["greedy_margin"].as_array().unwrap();
        let is_tie = |margin: &Value| margin.as_f64().unwrap() < MARGIN_MIN;
        let n = margins.iter().position(is_tie).unwrap_or(greedy.len()).min(n);
        let mut sampler =
            Sampler::new(SamplerOptions { temperature: 0.0, ..Default::default() }).unwrap();
        let options = GenerateOptions {
            n_predict: Some(u32::try_from(n).unwrap()),
            ignore_eog: true,
            special: true,
        };
        let (never, mut streamed) = (AtomicBool::new(false), String::new());
        let mut sequence = self.model.sequence();
        let generation =
            tegula::generate(&mut sequence, tokens, &mut sampler, options, &never, |text| {
                streamed.push_str(text);
            })
            .unwrap();
        assert_eq!(generation.tokens, greedy[..n]);
        assert_eq!(generation.text, streamed);
        let text = self.model.tokenizer().detokenize(&greedy[..n], false, true).unwrap();
        assert_eq!(generation.text.as_bytes(), text);
    }
}

fn top_logits(sums: &Value, tops: &Value) -> Vec<TopLogits> {
    let pairs = sums.as_array().unwrap().iter().zip(tops.as_array().unwrap());
    pairs.map(|(sum, top)| TopLogits::new(sum, top)).collect()
}

fn eval(
    sequence: &mut Sequence,
    tokens: &[u32],
    outputs: Outputs,
    mut on_row: impl FnMut(u32, &[f32]),
) {
    let finished = sequence.eval(tokens, outputs, &AtomicBool::new(false), |pos, row| {
        on_row(pos, row);
        Ok(())
    });
    assert!(finished.unwrap());
}
