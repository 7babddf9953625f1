//! Files of random weights are models: they load, they compute numbers, and the same options give the same file.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail by panicking"
)]

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use tegula::{EncodeOptions, Model, ModelOptions, Outputs, Shape};
use tegula_e2e::TinyLlama;
use tegula_gguf::{DType, Gguf};
use tegula_synth::{Options, write};

/// A shape of every part that a llama has, small, with rows of whole k-quants.
const SHAPE: &str = r#"{
    "name": "Small", "arch": "llama", "n_layer": 8, "n_embd": 256, "n_head": 4, "n_head_kv": 2, "head_dim": 64,
    "n_ff": 512, "n_vocab": 600, "n_ctx_train": 4096, "rope_base": 500000, "rope_freqs": true
}"#;

fn options(folder: &Path, quant: &str, tokenizer: Option<PathBuf>) -> Options {
    let path = folder.join("shape.json");
    std::fs::write(&path, SHAPE).unwrap();
    let shape = Shape::find(path.to_str().unwrap()).unwrap();
    Options { shape, quant: quant.parse().unwrap(), tokenizer, seed: 7, n_threads: 3 }
}

/// The logits behind a prompt.
fn logits(path: &Path) -> Vec<f32> {
    let options = ModelOptions { device: Some("cpu".into()), ..Default::default() };
    let model = Model::open(&tegula_e2e::runtime(), path, &options, &mut |_| {}).unwrap();
    let encode = EncodeOptions { add_special: true, parse_special: false };
    let prompt = model.tokenizer().encode("Roofs are made of tiles", encode);
    assert!(prompt.len() > 1, "{prompt:?}");
    let mut last = Vec::new();
    let mut keep = |_, row: &mut [f32]| {
        last = row.to_vec();
        Ok(())
    };
    model.sequence().eval(&prompt, Outputs::Last, &AtomicBool::new(false), &mut keep).unwrap();
    last
}

/// A file that does not load, or whose logits are all alike or no numbers, measures nothing.
#[test]
fn every_type_is_a_model_that_computes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    for quant in [
        "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q5_k_m", "q5_1", "q5_0", "q4_k", "q4_k_m",
        "q4_1", "q4_0", "q3_k", "q2_k", "iq4_nl", "iq4_xs",
    ] {
        let written = write(&path, &options(folder.path(), quant, None), &|_, _| {}).unwrap();
        assert_eq!(written.bytes, std::fs::metadata(&path).unwrap().len(), "{quant}");
        let logits = logits(&path);
        assert_eq!(logits.len(), 600, "{quant}");
        assert!(logits.iter().all(|x| x.is_finite() && x.abs() < 30.0), "{quant}: {logits:?}");
        let mean = logits.iter().sum::<f32>() / 600.0;
        let deviation = (logits.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / 600.0).sqrt();
        assert!(deviation > 0.2, "{quant}: deviation {deviation}");
    }
}

/// The mix has its better types where files have them: speed and size depend on it.
#[test]
fn the_mix_is_that_of_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    write(&path, &options(folder.path(), "q4_k_m", None), &|_, _| {}).unwrap();
    let file = Gguf::open(&path).unwrap();
    let dtype = |name: &str| file.tensor(name).unwrap().dtype();
    // Of 8 layers the first, the last, and every third between.
    let better: Vec<bool> =
        (0..8).map(|i| dtype(&format!("blk.{i}.ffn_down.weight")) == DType::Q6_K).collect();
    assert_eq!(better, [true, false, false, true, false, false, true, true]);
    assert_eq!(dtype("blk.0.attn_v.weight"), DType::Q6_K);
    assert_eq!(dtype("blk.1.attn_v.weight"), DType::Q4_K);
    assert_eq!(dtype("blk.0.ffn_up.weight"), DType::Q4_K);
    assert_eq!(dtype("output.weight"), DType::Q6_K);
    assert_eq!(dtype("token_embd.weight"), DType::Q4_K);
    assert_eq!(dtype("output_norm.weight"), DType::F32);
}

/// Two machines that make the same file can compare what they measured; another seed is another file.
#[test]
fn a_file_follows_from_its_options() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let bytes = |change: &dyn Fn(&mut Options)| {
        let mut options = options(folder.path(), "q4_k_m", None);
        change(&mut options);
        write(&path, &options, &|_, _| {}).unwrap();
        std::fs::read(&path).unwrap()
    };
    let first = bytes(&|_| {});
    assert!(bytes(&|options| options.n_threads = 1) == first, "other threads");
    assert!(bytes(&|options| options.seed = 8) != first, "another seed");
}

/// Another model's tokenizer goes along, filled up to the rows of the embedding.
#[test]
fn a_tokenizer_is_taken_and_filled_up() {
    let folder = tempfile::tempdir().unwrap();
    let other = TinyLlama::default().write(folder.path(), "other.gguf");
    let path = folder.path().join("model.gguf");
    write(&path, &options(folder.path(), "q8_0", Some(other.clone())), &|_, _| {}).unwrap();
    assert_eq!(logits(&path).len(), 600);
    let mut small = options(folder.path(), "q8_0", Some(other));
    small.shape.n_vocab = 200;
    let error = write(&path, &small, &|_, _| {}).unwrap_err().to_string();
    assert!(error.contains("258") && error.contains("200"), "{error}");
}
