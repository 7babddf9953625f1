//! The figures of a model's quality, and smaller files made of larger ones.
//!
//! What a user loses if this fails: the figures by which a file is chosen, or a file that took an hour to make.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail by panicking"
)]

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use tegula::gguf::GgufWriter;
use tegula::{Caps, DType, EncodeOptions, Gguf, Model, ModelOptions, Outputs};
use tegula_e2e::{TinyLlama, run, runtime_with, tegula};
use tegula_quant::dequantize;

/// A folder with a model whose rows are long enough for every type, and a text.
struct Folder {
    dir: tempfile::TempDir,
    model: PathBuf,
}

impl Folder {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let model = TinyLlama { n_embd: 256, n_layer: 8, ..TinyLlama::default() };
        let model = model.write(dir.path(), "f32.gguf");
        let words = ["roof", "tile", "clay", "rain", "the", "of", "and", "sky", "é", "瓦"];
        let text: Vec<&str> = (0..120usize).map(|i| words[i * i % 7 + i % 4]).collect();
        fs::write(dir.path().join("text.txt"), text.join(" ")).unwrap();
        Self { dir, model }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn json(&self, args: &[&str]) -> Value {
        let finished = self.run(args);
        assert_eq!(finished.code, 0, "{args:?}: {}", finished.stderr);
        serde_json::from_str(&finished.stdout).unwrap()
    }

    fn run(&self, args: &[&str]) -> tegula_e2e::Finished {
        let mut command = tegula(args);
        command.current_dir(self.dir.path());
        run(&mut command)
    }
}

const HOW: [&str; 7] = ["--device", "cpu", "-c", "64", "--kv-type", "f32", "--json"];

fn with_how<'a>(args: &[&'a str]) -> Vec<&'a str> {
    args.iter().chain(&HOW).copied().collect()
}

/// The same figure by the plainest way: every window in a sequence of its own, every token's logits.
fn perplexity(model: &Path, text: &str, n_ctx: usize) -> (f64, usize) {
    let mut options = ModelOptions { device: Some("cpu".into()), ..ModelOptions::default() };
    options.plan.n_ctx = Some(n_ctx as u32);
    (options.plan.dtype_k, options.plan.dtype_v) = (tegula::DType::F32, tegula::DType::F32);
    let runtime = runtime_with(Caps { max_buffer: None, memory_limit: None });
    let model = Model::open(&runtime, model, &options, &mut |_| {}).unwrap();
    let encode = EncodeOptions { add_special: true, parse_special: false };
    let tokens = model.tokenizer().encode(text, encode);
    let (mut sum, mut n) = (0.0, 0);
    for window in tokens.chunks_exact(n_ctx) {
        let mut window = window.to_vec();
        window[0] = model.tokenizer().bos().unwrap();
        let mut sequence = model.sequence();
        let never = AtomicBool::new(false);
        let kept = sequence.eval(&window, Outputs::All, &never, |pos, logits| {
            let pos = pos as usize;
            if pos >= n_ctx / 2 && pos + 1 < n_ctx {
                let all: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
                sum += all.ln() - f64::from(logits[window[pos + 1] as usize]);
                n += 1;
            }
            Ok(())
        });
        kept.unwrap();
    }
    ((sum / n as f64).exp(), n)
}

/// A figure that is defined otherwise than others' cannot be compared with theirs.
#[test]
fn perplexity_is_of_the_second_halves_of_windows() {
    let folder = Folder::new();
    let text = fs::read_to_string(folder.path("text.txt")).unwrap();
    let (wanted, n) = perplexity(&folder.model, &text, 64);
    let got = folder.json(&with_how(&["perplexity", "f32.gguf", "text.txt"]));
    let value = got["perplexity"].as_f64().unwrap();
    assert!((value / wanted - 1.0).abs() < 1e-5, "{value}, not {wanted}");
    assert_eq!(got["tokens_scored"].as_u64().unwrap() as usize, n, "{got}");
    assert!(got["perplexity_error"].as_f64().unwrap() > 0.0);
    let fewer = folder.json(&with_how(&["perplexity", "f32.gguf", "text.txt", "--chunks", "2"]));
    assert_eq!((fewer["windows"].as_u64(), fewer["tokens_scored"].as_u64()), (Some(2), Some(62)));

    fs::write(folder.path("short.txt"), "roof").unwrap();
    let short = folder.run(&with_how(&["perplexity", "f32.gguf", "short.txt"]));
    assert!(short.stderr.contains("128 are needed"), "{}", short.stderr);
}

/// A model is no distance from itself, and a smaller file is as far away as its type is coarse.
#[test]
fn distances_grow_as_types_shrink() {
    let folder = Folder::new();
    let kl = |model: &str| folder.json(&with_how(&["kl", model, "f32.gguf", "text.txt"]));
    let same = kl("f32.gguf");
    assert_eq!((same["kl_max"].as_f64(), same["same_top"].as_f64()), (Some(0.0), Some(1.0)));
    assert_eq!(same["log_ratio"].as_f64(), Some(0.0));
    let mut before = 0.0;
    for quant in ["q8_0", "q6_k", "q5_k_m", "q5_1", "q4_k_m", "q4_0"] {
        let out = format!("{quant}.gguf");
        let made =
            folder.json(&["quantize", "f32.gguf", &out, "--quant", quant, "--json", "-t", "2"]);
        assert!(made["bytes"].as_u64() < made["bytes_before"].as_u64(), "{made}");
        let distance = kl(&out)["kl_mean"].as_f64().unwrap();
        println!("{quant}: KL mean {distance:.2e}");
        // Types of about the same bits may change places.
        assert!(distance > before * 0.7, "{quant}: {distance:e} after {before:e}");
        assert!(distance < 0.2, "{quant}: {distance:e}");
        before = distance;
    }
}

fn types(path: PathBuf) -> impl Fn(&str) -> String {
    let gguf = Gguf::open(path).unwrap();
    move |name| gguf.tensor(name).unwrap().dtype().to_string()
}

/// Norms in four bits, or an output matrix of the worst type, are what makes a small file useless.
#[test]
fn each_tensor_gets_the_type_of_the_mix() {
    let folder = Folder::new();
    folder.json(&["quantize", "f32.gguf", "mix.gguf", "--json"]);
    let of = types(folder.path("mix.gguf"));
    for (name, wanted) in [
        ("token_embd.weight", "Q6_K"), // the output matrix too
        ("output_norm.weight", "F32"),
        ("blk.0.attn_norm.weight", "F32"),
        ("blk.0.attn_q.weight", "Q4_K"),
        ("blk.0.attn_v.weight", "Q6_K"),
        ("blk.1.attn_v.weight", "Q4_K"),
        ("blk.3.ffn_down.weight", "Q6_K"),
        ("blk.7.ffn_down.weight", "Q6_K"),
    ] {
        assert_eq!(of(name), wanted, "{name}");
    }
    let of = |path: &str| Gguf::open(folder.path(path)).unwrap();
    let (before, after) = (of("f32.gguf"), of("mix.gguf"));
    for (key, value) in before.metadata().iter() {
        assert_eq!(after.metadata().get(key), Some(value), "{key}");
    }
    assert_eq!(after.metadata().get_u32("general.file_type").unwrap(), 15);
}

/// A mistake must cost a line, and never the file that is there.
#[test]
fn what_cannot_be_quantised_is_refused() {
    let folder = Folder::new();
    folder.json(&["quantize", "f32.gguf", "q4.gguf", "--quant", "q4_0", "--json"]);
    let there = fs::read(folder.path("q4.gguf")).unwrap();
    fs::write(folder.path("importance.dat"), b"no importances").unwrap();
    for (args, why) in [
        (&["q4.gguf", "again.gguf", "--quant", "q5_0"][..], "take the original"),
        (&["f32.gguf", "q4.gguf", "--quant", "q8_0"], "is there already"),
        (&["f32.gguf", "new.gguf", "--quant", "iq2_xs"], "cannot be written"),
        (&["f32.gguf", "no/folder.gguf"], "cannot create"),
        (&["f32.gguf", "new.gguf", "--importance", "importance.dat"], "neither GGUF"),
    ] {
        let finished = folder.run(&[&["quantize"][..], args].concat());
        assert_eq!(finished.code, 1, "{args:?}");
        assert!(finished.stderr.contains(why), "{args:?}: {}", finished.stderr);
    }
    assert!(there == fs::read(folder.path("q4.gguf")).unwrap(), "a refusal changed the file");
    let left = fs::read_dir(folder.dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = left.filter(|name| name.to_string_lossy().contains("new")).collect();
    assert!(left.is_empty(), "{left:?}");
    let forced = ["quantize", "f32.gguf", "q4.gguf", "--quant", "q8_0", "--force", "--json"];
    assert_eq!(folder.json(&forced)["quant"], "q8_0");
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// An importance file of one tensor.
fn importance(path: &Path, tensor: &str, sums: &[f32]) {
    let writer = GgufWriter::new()
        .meta("general.type", "imatrix")
        .tensor(format!("{tensor}.in_sum2"), &[sums.len() as u64, 1], DType::F32, bytes_of(sums))
        .tensor(format!("{tensor}.counts"), &[1, 1], DType::F32, bytes_of(&[3.0]));
    fs::write(path, writer.to_bytes().unwrap()).unwrap();
}

/// The squared error of the columns that matter, of a tensor in a file.
fn error(original: &Gguf, file: &Path, tensor: &str, matters: impl Fn(usize) -> bool) -> f64 {
    let decode = |gguf: &Gguf| {
        let info = gguf.required_tensor(tensor).unwrap();
        let mut out = vec![0.0; info.n_elements() as usize];
        dequantize(info.dtype(), &gguf.read_tensor(info).unwrap(), &mut out).unwrap();
        out
    };
    let (before, after) = (decode(original), decode(&Gguf::open(file).unwrap()));
    let pairs = before.iter().zip(&after).enumerate().filter(|(i, _)| matters(i % 256));
    pairs.map(|(_, (x, y))| f64::from(x - y).powi(2)).sum()
}

/// An importance file is an hour of somebody's machine: it must reach the tensors that it names.
#[test]
fn an_importance_file_reaches_its_tensors() {
    let folder = Folder::new();
    let (tensor, other) = ("blk.0.attn_q.weight", "blk.0.attn_k.weight");
    let matters = |column: usize| column.is_multiple_of(8);
    let sums: Vec<f32> = (0..256).map(|i| if matters(i) { 900.0 } else { 1.0 }).collect();
    importance(&folder.path("importance.gguf"), tensor, &sums);
    let quantize = |out: &str, more: &[&str]| {
        folder.json(&[&["quantize", "f32.gguf", out, "--json"][..], more].concat())
    };
    quantize("without.gguf", &[]);
    let with = quantize("with.gguf", &["--importance", "importance.gguf"]);
    let named: Vec<_> = with["tensors"].as_array().unwrap().iter().collect();
    let named = named.into_iter().filter(|tensor| tensor["has_importance"] == true);
    assert_eq!(named.map(|tensor| tensor["name"].clone()).collect::<Vec<_>>(), [tensor]);
    let original = Gguf::open(&folder.model).unwrap();
    let of = |file: &str, tensor: &str| error(&original, &folder.path(file), tensor, matters);
    let (before, after) = (of("without.gguf", tensor), of("with.gguf", tensor));
    assert!(after < 0.8 * before, "{after} after {before}");
    assert_eq!(of("without.gguf", other), of("with.gguf", other));

    importance(&folder.path("wrong.gguf"), tensor, &sums[..128]);
    let wrong = ["quantize", "f32.gguf", "wrong-out.gguf", "--importance", "wrong.gguf"];
    let finished = folder.run(&wrong);
    assert!(finished.stderr.contains("it is of another model"), "{}", finished.stderr);
}
