//! Each architecture against logits that other software computed from the same weights.
//!
//! What a user loses if this fails: the model's text. A wrong rope style, norm, scale or window still gives fluent nonsense,
//! and no later test of a backend can tell, since all backends run the same program.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "common/interp.rs"]
mod interp;

use std::path::{Path, PathBuf};

use interp::{Interp, softmax};
use serde_json::Value as Json;
use tegula_arch::{ProgramOptions, Results, load};
use tegula_gguf::{DType, Gguf};

/// The references are f32 computations: they are 1e-13 to 2e-11 from the interpreter's f64.
const KL_MAX: f64 = 1e-9;

fn golden() -> Option<PathBuf> {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/golden");
    let path = std::env::var_os("TEGULA_GOLDEN").map_or_else(|| default.into(), PathBuf::from);
    if path.join("tiny").is_dir() {
        return Some(path);
    }
    eprintln!("SKIPPED: no golden models at {}; set TEGULA_GOLDEN to their folder", path.display());
    None
}

fn case(dir: &Path) -> Json {
    serde_json::from_slice(&std::fs::read(dir.join("case.json")).unwrap()).unwrap()
}

fn ints(json: &Json) -> Vec<i32> {
    json.as_array().unwrap().iter().map(|n| n.as_i64().unwrap() as i32).collect()
}

fn floats(path: &Path) -> Vec<f64> {
    let bytes = std::fs::read(path).unwrap();
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect()
}

/// KL(expected || got) of two rows of logits.
fn kl(expected: &[f64], got: &[f64]) -> f64 {
    let [mut p, mut q] = [expected.to_vec(), got.to_vec()];
    softmax(&mut p);
    softmax(&mut q);
    p.iter().zip(&q).map(|(p, q)| if *p > 0.0 { p * (p / q).ln() } else { 0.0 }).sum()
}

fn exact(results: Results) -> ProgramOptions {
    ProgramOptions {
        dtype_k: DType::F32,
        dtype_v: DType::F32,
        results,
        ..ProgramOptions::default()
    }
}

/// The greatest KL over the prompt's rows, with the prompt fed in runs of these lengths and then the rest.
fn worst_kl(file: &Path, prompt: &Json, logits: &Path, runs: &[usize]) -> f64 {
    let gguf = Gguf::open(file).unwrap();
    let program = load(&gguf).unwrap().program(&exact(Results::Logits)).unwrap();
    let mut interp = Interp::new(&program, &gguf);
    let (ids, wanted) = (ints(&prompt["ids"]), ints(&prompt["positions"]));
    let (mut begin, mut got) = (0, Vec::new());
    for len in runs.iter().copied().chain([ids.len()]) {
        let end = ids.len().min(begin + len);
        let positions: Vec<i32> = (begin as i32..end as i32).collect();
        let rows = wanted.iter().filter(|p| positions.contains(p)).map(|p| p - begin as i32);
        let rows: Vec<i32> = rows.collect();
        got.extend(interp.run(&ids[begin..end], &positions, &rows).remove(0).data);
        begin = end;
    }
    let expected = floats(logits);
    assert_eq!(expected.len(), got.len(), "{}", file.display());
    let n_vocab = expected.len() / wanted.len();
    let rows = expected.chunks_exact(n_vocab).zip(got.chunks_exact(n_vocab));
    rows.map(|(expected, got)| kl(expected, got)).fold(0.0, |worst, kl| {
        assert!(kl.is_finite(), "{}", file.display());
        f64::max(worst, kl)
    })
}

/// Every file of a case whose logits are there, one line each.
fn check(name: &str) {
    let Some(golden) = golden() else { return };
    let dir = golden.join("tiny").join(name);
    let case = case(&dir);
    let mut n_checked = 0;
    for file in case["files"].as_object().unwrap().keys() {
        let quant = file.trim_start_matches("model-").trim_end_matches(".gguf");
        for (prompt_name, prompt) in case["prompts"].as_object().unwrap() {
            let applies = prompt["applies_to"].as_array().unwrap().iter().any(|to| to == quant);
            let logits = match applies {
                true => dir.join(format!("{prompt_name}.logits.f32")),
                false => dir.join(format!("{quant}.{prompt_name}.logits.f32")),
            };
            if !logits.is_file() {
                continue;
            }
            // Once as a prefill, once mostly token by token: windows and the cache are then used as in a chat.
            let token_by_token = [vec![7], vec![1; 20]].concat();
            for runs in [Vec::new(), token_by_token] {
                let worst = worst_kl(&dir.join(file), prompt, &logits, &runs);
                eprintln!(
                    "{name} {quant} {prompt_name} in {} runs: KL {worst:.1e}",
                    runs.len() + 1
                );
                assert!(worst < KL_MAX, "{name} {quant} {prompt_name}: KL {worst:e}");
                n_checked += 1;
            }
        }
    }
    assert!(n_checked > 0, "no file of {name} has logits");
}

#[test]
fn llama_of_all_quantised_types() {
    check("llama256");
}

#[test]
fn llama_with_biases() {
    check("llama_bias");
}

#[test]
fn llama_with_rope_factors() {
    check("llama_rope3");
}

#[test]
fn mistral() {
    check("mistral");
}

#[test]
fn qwen2() {
    check("qwen2");
    check("qwen2_256");
}

#[test]
fn gemma3() {
    check("gemma3");
    check("gemma3_256");
}

#[test]
fn mixtral() {
    check("mixtral");
}

#[test]
fn qwen2_moe() {
    check("qwen2_moe");
}

#[test]
fn qwen3() {
    check("qwen3");
    check("qwen3_moe");
    check("qwen3_moe_256");
}

#[test]
fn gpt_oss() {
    check("gpt_oss");
}

#[test]
fn delta_nets() {
    check("qwen3_next");
    check("qwen3_5");
    check("qwen3_5_256");
    check("qwen3_5_moe");
}

#[test]
fn gemma4() {
    check("gemma4");
}

#[test]
fn llama_like() {
    check("granite");
    check("olmo2");
    check("phithree");
    check("smollm3");
    check("starcoder2");
}

#[test]
fn llama_like_with_experts() {
    check("granitemoe");
    check("olmoe");
}

#[test]
fn norms_after() {
    check("gemma2");
    check("glm4");
}

#[test]
fn side_by_side() {
    check("cohere");
    check("cohere2");
}

#[test]
fn latent_attention() {
    check("deepseek_v2");
}

#[test]
fn short_convolutions() {
    check("lfm2");
}

/// The published models, whose files lack keys that the tiny ones have. Some need 5 GiB of memory and a minute.
#[test]
#[ignore = "a minute and 5 GiB; run it after a change of an architecture or of hyperparameters"]
fn published_models() {
    let Some(golden) = golden() else { return };
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
    let models = std::env::var_os("TEGULA_MODELS")
        .map_or_else(|| home().join(".cache/tegula/models"), PathBuf::from);
    let files = [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-q4_1"),
        ("gemma-3-270m-q4_k_m.gguf", "gemma-3-270m-q4_k_m"),
        ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "qwen2.5-coder-0.5b-q4_k_m"),
    ];
    for (file, name) in files {
        let file = models.join(file);
        if !file.is_file() {
            eprintln!("SKIPPED: no {}; set TEGULA_MODELS to the folder of models", file.display());
            continue;
        }
        let path = golden.join(format!("real/{name}__english"));
        let mut prompt: Json =
            serde_json::from_slice(&std::fs::read(path.with_added_extension("json")).unwrap())
                .unwrap();
        let last = ints(&prompt["positions"]).last().copied();
        prompt["positions"] = vec![last].into();
        let worst = worst_kl(&file, &prompt, &path.with_added_extension("last.f32"), &[]);
        eprintln!("{name}: KL {worst:.1e}");
        assert!(worst < KL_MAX, "{name}: KL {worst:e}");
    }
}

/// Greedy decoding on the device must choose what the logits say, or its text differs from the sampler's.
#[test]
fn other_results_agree_with_logits() {
    let Some(golden) = golden() else { return };
    let file = golden.join("tiny/qwen2/model-f32.gguf");
    let gguf = Gguf::open(&file).unwrap();
    let model = load(&gguf).unwrap();
    let run = |results| {
        let program = model.program(&exact(results)).unwrap();
        Interp::new(&program, &gguf).run(&[5, 6, 7], &[0, 1, 2], &[2, 0])
    };
    let logits = run(Results::Logits).remove(0);
    let greatest = |row: &[f64]| {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        (row.iter().position(|x| *x == max).unwrap() as f64, max)
    };
    let (ids, maxima): (Vec<_>, Vec<_>) = logits.rows().map(greatest).unzip();
    assert_eq!(run(Results::Argmax)[0].data, ids);
    let top = run(Results::TopK(3));
    assert_eq!(top[0].rows().map(|row| row[0]).collect::<Vec<_>>(), ids);
    assert_eq!(top[1].rows().map(|row| row[0]).collect::<Vec<_>>(), maxima);
    let hidden = run(Results::Hidden).remove(0);
    assert_eq!((hidden.n, hidden.data.len()), (64, 2 * 64));
}
