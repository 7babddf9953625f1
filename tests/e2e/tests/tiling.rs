//! Cutting weights, keys and values into chunks changes where bytes lie, never what is computed.
//!
//! Real weights are used where the sizes matter (an embedding of 28.7 MiB under a cap of 1 MiB); a small random model, which no
//! machine lacks, everywhere else.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail by panicking"
)]

use std::path::Path;
use std::sync::atomic::AtomicBool;
use tegula::{
    Caps, DType, EncodeOptions, Error, Model, ModelOptions, Outputs, PlanOptions, PlanReport,
    Sequence,
};
use tegula_e2e::{BACKENDS, TinyLlama, argmax, kl, model_file, runtime_with};

const MIB: u64 = 1 << 20;

fn open(path: &Path, device: &str, max_buffer: Option<u64>, plan: PlanOptions) -> Model {
    let runtime = runtime_with(Caps { max_buffer, memory_limit: None });
    let options = ModelOptions { device: Some(device.into()), plan, ..ModelOptions::default() };
    let opened = Model::open(&runtime, path, &options, &mut |_| {});
    opened.unwrap_or_else(|e| panic!("{device} {max_buffer:?}: {e}"))
}

fn try_eval(sequence: &mut Sequence, tokens: &[u32]) -> Result<Vec<f32>, Error> {
    let mut logits = Vec::new();
    sequence.eval(tokens, Outputs::Last, &AtomicBool::new(false), |_, row| {
        logits = row.to_vec();
        Ok(())
    })?;
    Ok(logits)
}

fn eval(sequence: &mut Sequence, tokens: &[u32]) -> Vec<f32> {
    try_eval(sequence, tokens).unwrap()
}

/// The first `n` greedy tokens after a prompt.
fn greedy(model: &Model, prompt: &[u32], n: usize) -> Vec<u32> {
    let mut sequence = model.sequence();
    let mut tokens = vec![argmax(&eval(&mut sequence, prompt))];
    while tokens.len() < n {
        let last = tokens[tokens.len() - 1];
        tokens.push(argmax(&eval(&mut sequence, &[last])));
    }
    tokens
}

/// Every chunk under the cap; gives the number of chunks that hold tiles of `tensor`.
fn check_chunks(report: &PlanReport, max: u64, tensor: &str) -> usize {
    let chunks = report.devices.iter().flat_map(|device| &device.heaps).flat_map(|h| &h.chunks);
    let mut n_holding = 0;
    for chunk in chunks.filter(|chunk| chunk.max_size.is_some()) {
        assert!(chunk.size <= max, "{} of {} bytes", chunk.usage, chunk.size);
        n_holding += usize::from(chunk.tiles.iter().any(|tile| tile.tensor == tensor));
    }
    n_holding
}

/// Text that does not repeat, for prompts of any length.
fn words(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * i + 7 * i) % 251 + 3).collect()
}

fn tiny(folder: &tempfile::TempDir) -> std::path::PathBuf {
    TinyLlama { n_embd: 128, ..TinyLlama::default() }.write(folder.path(), "tiny.gguf")
}

/// A device that allows small buffers only, or no mapped ones, must not give other text.
#[test]
fn caps_and_mapping_change_no_token() {
    let Some(path) = model_file("SmolLM2-135M-Instruct.Q4_1.gguf") else { return };
    let prompts = ["The capital of France is", "Once upon a time, a lighthouse keeper"];
    let mut expected: Option<Vec<Vec<u32>>> = None;
    for (max_buffer, mmap) in
        [(None, true), (None, false), (Some(MIB), true), (Some(MIB), false), (Some(4 * MIB), true)]
    {
        let plan = PlanOptions { n_ctx: Some(512), mmap, ..PlanOptions::default() };
        let model = open(&path, "cpu", max_buffer, plan);
        if let Some(max) = max_buffer {
            let n = check_chunks(&model.plan().report, max, "token_embd.weight");
            // 28.7 MiB in 49,152 rows; no chunk holds more than the cap, so there are at least as many as it goes into them.
            let tensor = model.file().gguf().tensor("token_embd.weight").unwrap();
            assert!(n as u64 >= tensor.n_bytes().div_ceil(max), "{n} chunks of {max} bytes");
        }
        let tokens: Vec<Vec<u32>> = prompts
            .iter()
            .map(|prompt| {
                let options = EncodeOptions { add_special: true, parse_special: true };
                greedy(&model, &model.tokenizer().encode(prompt, options), 32)
            })
            .collect();
        let expected = expected.get_or_insert_with(|| tokens.clone());
        assert_eq!(tokens, *expected, "cap {max_buffer:?}, mmap {mmap}");
    }
}

/// How a prompt is cut must not show: not in the answer, not in the context it may use.
#[test]
fn any_ubatch_gives_the_same_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let path = tiny(&folder);
    for device in BACKENDS {
        let mut expected: Option<Vec<u32>> = None;
        for n_ubatch in [1, 7, 64, 512] {
            let plan = PlanOptions { n_ctx: Some(1024), n_ubatch, ..PlanOptions::default() };
            let tokens = greedy(&open(&path, device, None, plan), &words(300), 16);
            let expected = expected.get_or_insert_with(|| tokens.clone());
            assert_eq!(tokens, *expected, "{device}, ubatch {n_ubatch}");
        }
    }
}

/// Each type of cache runs on each backend and loses what its precision loses, no more.
#[test]
fn kv_types_lose_what_their_precision_loses() {
    let folder = tempfile::tempdir().unwrap();
    let path = tiny(&folder);
    for device in BACKENDS {
        let mut exact = Vec::new();
        for (dtype, kl_max) in [
            (DType::F32, 1e-9),
            (DType::F16, 1e-5),
            (DType::BF16, 1e-3),
            (DType::Q8_0, 1e-3),
            (DType::Q4_0, 1e-1),
        ] {
            let plan = PlanOptions {
                n_ctx: Some(512),
                dtype_k: dtype,
                dtype_v: dtype,
                ..PlanOptions::default()
            };
            let model = open(&path, device, None, plan);
            let logits = eval(&mut model.sequence(), &words(100));
            if exact.is_empty() {
                exact.clone_from(&logits);
            }
            let distance = kl(&exact, &logits);
            println!("{device} kv {}: KL {distance:.1e}", dtype.name());
            assert!(distance < kl_max, "{device} kv {}: KL {distance:e}", dtype.name());
            assert!(dtype == DType::F32 || distance > 0.0, "{} was not used", dtype.name());
        }
    }
}

/// A cache that grows by segments, each of several chunks under a cap, is one cache: nothing is lost at their seams.
#[test]
fn a_prompt_over_many_segments_is_one_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let path = tiny(&folder);
    let mut exact: Option<Vec<f32>> = None;
    for (device, max_buffer) in [
        ("reference", None),
        ("reference", Some(64 << 10)),
        ("reference", Some(16 << 10)),
        ("cpu", None),
        ("cpu", Some(MIB / 2)),
    ] {
        let plan = PlanOptions {
            n_ctx: Some(2048),
            dtype_k: DType::F32,
            dtype_v: DType::F32,
            ..PlanOptions::default()
        };
        let model = open(&path, device, max_buffer, plan);
        let context = &model.plan().report.context;
        assert!(600 > 2 * context.segment_tokens, "{} tokens a segment", context.segment_tokens);
        if let Some(max) = max_buffer {
            check_chunks(&model.plan().report, max, "");
        }
        let mut sequence = model.sequence();
        // Two calls: the second begins inside a segment and ends two or more later.
        eval(&mut sequence, &words(300)[..150]);
        let logits = eval(&mut sequence, &words(600)[150..]);
        let distance = kl(exact.get_or_insert_with(|| logits.clone()), &logits);
        assert!(distance < 1e-9, "{device} {max_buffer:?}: KL {distance:e}");
    }
}

/// Two conversations on one model must not see each other.
#[test]
fn interleaved_sequences_are_as_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = tiny(&folder);
    for device in BACKENDS {
        // Room for both in the pool: a sequence takes blocks as it grows, wherever they are free.
        let plan = PlanOptions { n_ctx: Some(512), n_parallel: 2, ..PlanOptions::default() };
        let model = open(&path, device, None, plan);
        let prompts = [words(40), words(90)[45..].to_vec()];
        let alone = prompts.each_ref().map(|prompt| greedy(&model, prompt, 48));
        let mut sequences = [model.sequence(), model.sequence()];
        let mut together = [Vec::new(), Vec::new()];
        for i in 0..2 {
            together[i].push(argmax(&eval(&mut sequences[i], &prompts[i])));
        }
        while together[1].len() < 48 {
            for i in 0..2 {
                let last = together[i][together[i].len() - 1];
                together[i].push(argmax(&eval(&mut sequences[i], &[last])));
            }
        }
        assert_eq!(together, alone, "{device}");
    }
}

/// A service that ends conversations can begin new ones, and one that does not is told what is full.
#[test]
fn dropped_sequences_give_their_blocks_back() {
    let folder = tempfile::tempdir().unwrap();
    let plan = PlanOptions { n_ctx: Some(96), n_parallel: 2, ..PlanOptions::default() };
    let model = open(&tiny(&folder), "cpu", None, plan);
    let block_len = model.plan().report.context.block_len as usize;
    assert_eq!(96 % block_len, 0);
    let expected = eval(&mut model.sequence(), &words(96));
    for round in 0..3 {
        let mut first = model.sequence();
        let mut second = model.sequence();
        eval(&mut first, &words(96 - block_len));
        eval(&mut second, &words(block_len));
        let full = try_eval(&mut second, &words(1)).unwrap_err();
        assert!(matches!(full, Error::KvPoolFull { .. }), "round {round}: {full}");
        let n_blocks = (96 / block_len).to_string();
        assert!(full.to_string().contains(&n_blocks), "{full}");
        assert_eq!(second.n_past() as usize, block_len, "a refused evaluation leaves no trace");
        // What a truncated or dropped sequence held is free at once.
        first.truncate(1);
        eval(&mut second, &words(1));
        drop((first, second));
        let mut whole = model.sequence();
        assert_eq!(eval(&mut whole, &words(96)), expected, "round {round}");
        let full = try_eval(&mut whole, &words(1)).unwrap_err();
        assert!(
            matches!(full, Error::ContextFull { n_ctx: 96, used: 96, asked: 1 }),
            "round {round}: {full}"
        );
    }
    let error = try_eval(&mut model.sequence(), &[TinyLlama::N_VOCAB]).unwrap_err();
    assert!(matches!(error, Error::TokenOutOfRange { .. }), "{error}");
}
