//! Files as the field's own tools write them: all of them must open, fast, and with the facts those tools report.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::time::{Duration, Instant};

use common::{gguf_files, golden, model};
use tegula_gguf::{DType, Gguf};

/// A tensor as another reader sees it: name, dimensions, type, offset from the start of the file, bytes.
type Expected = (&'static str, &'static [u64], DType, u64, u64);

struct Facts {
    file: &'static str,
    architecture: &'static str,
    n_params: u64,
    n_kv: u64,
    n_vocab: u64,
    n_tensors: usize,
    tensors: &'static [Expected],
}

fn check(facts: &Facts) {
    let Some(path) = model(facts.file) else { return };
    let start = Instant::now();
    let gguf = Gguf::open(&path).unwrap();
    let took = start.elapsed();
    let summary = gguf.summary().unwrap();
    eprintln!("{}: opened in {took:?}\n{summary}", facts.file);
    assert_eq!(summary.architecture.as_deref(), Some(facts.architecture));
    assert_eq!(summary.n_params, facts.n_params);
    assert_eq!(summary.n_kv, facts.n_kv);
    assert_eq!(summary.n_vocab, Some(facts.n_vocab));
    assert_eq!(gguf.tensors().len(), facts.n_tensors);
    for (name, dims, dtype, start, n_bytes) in facts.tensors {
        let tensor = gguf.required_tensor(name).unwrap();
        let (_, range) = gguf.file_range(tensor).unwrap();
        let got = (tensor.dims(), tensor.dtype(), range.start, tensor.n_bytes());
        assert_eq!(got, (*dims, *dtype, *start, *n_bytes), "{name} of {}", facts.file);
    }
    let tokens = gguf.metadata().get_strings("tokenizer.ggml.tokens").unwrap();
    assert!(tokens.is_utf8() && tokens.memory_bytes() < 4 << 20, "{}", tokens.memory_bytes());
    // Twenty times what it takes, so that a busy machine passes and a quadratic reader does not.
    assert!(took < Duration::from_secs(1), "{} took {took:?}", facts.file);
}

#[test]
fn smollm2_opens() {
    check(&Facts {
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        architecture: "llama",
        n_params: 134_515_008,
        n_kv: 33,
        n_vocab: 49_152,
        n_tensors: 272,
        tensors: &[
            ("token_embd.weight", &[576, 49152], DType::Q8_0, 1785664, 30081024),
            ("blk.0.attn_norm.weight", &[576], DType::F32, 31866688, 2304),
            ("blk.22.attn_norm.weight", &[576], DType::F32, 65113408, 2304),
            ("blk.9.attn_v.weight", &[576, 192], DType::Q4_1, 98291008, 69120),
            ("output_norm.weight", &[576], DType::F32, 98360128, 2304),
        ],
    });
}

#[test]
fn gemma3_opens() {
    check(&Facts {
        file: "gemma-3-270m-q4_k_m.gguf",
        architecture: "gemma3",
        n_params: 268_098_176,
        n_kv: 33,
        n_vocab: 262_144,
        n_tensors: 236,
        tensors: &[
            ("output_norm.weight", &[640], DType::F32, 6525120, 2560),
            ("token_embd.weight", &[640, 262144], DType::Q8_0, 6527680, 178257920),
            ("blk.8.post_ffw_norm.weight", &[640], DType::F32, 218747072, 2560),
            ("blk.17.post_attention_norm.weight", &[640], DType::F32, 253107904, 2560),
            ("blk.17.post_ffw_norm.weight", &[640], DType::F32, 253110464, 2560),
        ],
    });
}

#[test]
fn qwen2_5_opens() {
    check(&Facts {
        file: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        architecture: "qwen2",
        n_params: 630_167_424,
        n_kv: 26,
        n_vocab: 151_936,
        n_tensors: 291,
        tensors: &[
            ("output.weight", &[896, 151936], DType::Q8_0, 5947776, 144643072),
            ("token_embd.weight", &[896, 151936], DType::Q5_0, 150590848, 93592576),
            ("blk.19.attn_v.weight", &[896, 128], DType::Q8_0, 367668096, 121856),
            ("blk.9.attn_v.weight", &[896, 128], DType::Q8_0, 491274624, 121856),
            ("output_norm.weight", &[896], DType::F32, 491396480, 3584),
        ],
    });
}

#[test]
fn golden_files_open() {
    let Some(golden) = golden() else { return };
    let files = gguf_files(&golden);
    assert!(!files.is_empty(), "no .gguf files in {}", golden.display());
    for path in &files {
        let gguf = Gguf::open(path).unwrap_or_else(|error| unreachable!("{error}"));
        let summary = gguf.summary().unwrap();
        assert!(summary.architecture.is_some(), "{}", path.display());
        let is_vocab = path.to_string_lossy().contains("vocab");
        assert_eq!(gguf.tensors().is_empty(), is_vocab, "{}", path.display());
    }
    eprintln!("{} golden files opened", files.len());
}
