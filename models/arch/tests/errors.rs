//! What is said about files that cannot be run: one fact changed, one message.
//!
//! What a user loses if this fails: the reason, or with it the process.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "common/tiny.rs"]
mod tiny;

use tegula_arch::{ProgramOptions, Results};
use tegula_gguf::{DType, Value};
use tiny::Tiny;

fn check(tiny: &Tiny, expected: &str) {
    match tiny.load() {
        Ok(_) => panic!("loads, instead of: {expected}"),
        Err(error) => assert_eq!(error.to_string(), format!("tiny.gguf: {expected}")),
    }
}

#[test]
fn architectures() {
    let known = tegula_arch::known_architectures().collect::<Vec<_>>().join(", ");
    assert!(known.starts_with("cohere2, command-r, deepseek2, gemma2"), "{known}");
    check(
        &Tiny::llama(1).meta("general.architecture", "mamba\u{1b}[2J"),
        &format!(r#"the architecture "mamba\u{{1b}}[2J" is not supported; supported are {known}"#),
    );
    check(
        &Tiny::llama(1).without_meta("general.architecture"),
        r#"the metadata has no key "general.architecture" (a string in UTF-8 is needed)"#,
    );
    check(
        &Tiny::gemma3(1).meta("expert_count", 8u32),
        "mixture of experts is not supported yet by the architecture gemma3 (gemma3.expert_count is 8)",
    );
    check(
        &Tiny::gemma3(1).meta("attention.causal", false),
        "attention to later tokens is not supported yet by the architecture gemma3 (gemma3.attention.causal is false)",
    );
    check(
        &Tiny::qwen2(1).meta("rope.scaling.type", "longrope"),
        "this rope scaling is not supported yet by the architecture qwen2 (qwen2.rope.scaling.type is longrope)",
    );
}

#[test]
fn hyperparameters() {
    let llama = || Tiny::llama(1);
    let cases = [
        (llama().meta("block_count", 0u32), "llama.block_count is 0; it must be from 1 to 4096"),
        (
            llama().meta("block_count", u32::MAX),
            "llama.block_count is 4294967295; it must be from 1 to 4096",
        ),
        (
            llama().without_meta("block_count"),
            r#"the metadata has no key "llama.block_count" (a u32 is needed)"#,
        ),
        (
            llama().meta("block_count", -1i32),
            r#"the key "llama.block_count" holds an i32 -1, which is not a u32"#,
        ),
        (
            llama().meta("embedding_length", 0u32),
            "llama.embedding_length is 0; it must be from 1 to 1048576",
        ),
        (
            llama().meta("context_length", 0u32),
            "llama.context_length is 0; it must be from 1 to 4294967295",
        ),
        (
            llama().meta("attention.head_count", 0u32),
            "llama.attention.head_count is 0; it must be from 1 to 16384",
        ),
        (
            llama().meta("attention.head_count_kv", 0u32),
            "llama.attention.head_count_kv is 0; it must be from 1 to 16384",
        ),
        (
            llama().meta("attention.head_count_kv", 3u32),
            "llama.attention.head_count_kv is 3; it must divide the 4 heads of queries",
        ),
        (
            llama().meta("attention.head_count_kv", vec![2u32, 2]),
            r#"the key "llama.attention.head_count_kv" holds 2 elements, but 1 are needed"#,
        ),
        (
            llama().meta("attention.head_count", 5u32).without_meta("attention.head_count_kv"),
            "llama.attention.key_length is absent; it is needed where 32 elements do not split over 5 heads",
        ),
        (
            llama().without_meta("feed_forward_length"),
            "llama.feed_forward_length is absent; the architecture needs it",
        ),
        (
            llama().meta("feed_forward_length", 1u32 << 31),
            "llama.feed_forward_length is 2147483648; it must be from 1 to 16777216",
        ),
        (
            llama().meta("attention.key_length", 1u32 << 20),
            "llama.attention.key_length is 1048576; it must be from 1 to 16384",
        ),
        (
            llama().meta("attention.key_length", 7u32),
            "llama.rope.dimension_count is 7; rope turns pairs, so it must be even (where the key is absent, it is the \
             length of a head)",
        ),
        (
            llama().meta("rope.dimension_count", 10u32),
            "llama.rope.dimension_count is 10; it must be from 1 to 8",
        ),
        (
            llama().meta("attention.layer_norm_rms_epsilon", f32::NAN),
            "llama.attention.layer_norm_rms_epsilon is NaN; it must be from 0 to 1",
        ),
        (
            llama().meta("rope.scaling.factor", f32::INFINITY),
            "llama.rope.scaling.factor is inf; it must be from 0 to 1000000",
        ),
        (
            llama().meta("rope.scaling.factor", 1e-20f32),
            "llama.rope.scaling.factor is 0.00000000000000000001; it must be 0 or at least 1e-6",
        ),
        (
            llama().meta("rope.freq_base", 0f32),
            "llama.rope.freq_base is 0; it must be from 1 to 1000000000000000000000000000000",
        ),
        (
            llama().meta("rope.freq_base", 10_000u32),
            r#"the key "llama.rope.freq_base" holds a u32, but an f32 is needed"#,
        ),
    ];
    for (tiny, expected) in &cases {
        check(tiny, expected);
    }
}

#[test]
fn tensors() {
    let gone = "the file is incomplete or of another architecture than it says";
    check(
        &Tiny::llama(2).without_tensor("blk.1.attn_k.weight"),
        &format!(r#"the tensor "blk.1.attn_k.weight" of shape [16, 32] is missing; {gone}"#),
    );
    check(
        &Tiny::llama(1).without_tensor("token_embd.weight"),
        &format!(r#"the tensor "token_embd.weight" of shape [n_vocab, 32] is missing; {gone}"#),
    );
    check(
        &Tiny::qwen2(1).without_tensor("blk.0.attn_q.bias"),
        &format!(r#"the tensor "blk.0.attn_q.bias" of shape [32] is missing; {gone}"#),
    );
    // More layers are said than there are: nothing may be built for the thousands that are not.
    check(
        &Tiny::llama(1).meta("block_count", 4096u32),
        &format!(r#"the tensor "blk.1.attn_norm.weight" of shape [32] is missing; {gone}"#),
    );
    let shape = |tensor: &str, got: &str, expected: &str| {
        format!(
            "the tensor {tensor:?} has shape {got}, but the metadata say {expected} (outermost first)"
        )
    };
    check(
        &Tiny::llama(1).tensor("blk.0.ffn_down.weight", &[48, 32], DType::F16),
        &shape("blk.0.ffn_down.weight", "[48, 32]", "[32, 48]"),
    );
    check(
        &Tiny::llama(1).tensor("output_norm.weight", &[33], DType::F32),
        &shape("output_norm.weight", "[33]", "[32]"),
    );
    check(
        &Tiny::llama(1).tensor("output.weight", &[2, 16, 32], DType::F16),
        &shape("output.weight", "[2, 16, 32]", "[16, 32]"),
    );
    check(
        &Tiny::llama(1).tensor("rope_freqs.weight", &[8], DType::F32),
        &shape("rope_freqs.weight", "[8]", "[4]"),
    );
    check(
        &Tiny::llama(1).tensor("output_norm.weight", &[32], DType::F16),
        r#"the tensor "output_norm.weight" is of type F16, but F32 is needed"#,
    );
    check(
        &Tiny::llama(1).tensor("output.weight", &[16, 32], DType::I32),
        r#"the tensor "output.weight" is of type I32, but F32, F16, BF16 or a quantised weight type is needed"#,
    );
}

/// Choices that this model cannot have.
#[test]
fn options() {
    let model = Tiny::llama(1).load().unwrap();
    let program = |options| model.program(&options).map(|_| ()).map_err(|error| error.to_string());
    let default = ProgramOptions::default();
    assert_eq!(program(default), Ok(()));
    assert_eq!(
        program(ProgramOptions { dtype_k: DType::Q8_0, ..default }),
        Err("tiny.gguf: program `llama`: KV layer 0: 2 heads of Q8_0 x 8 and F16 x 8 cannot be stored".into())
    );
    assert_eq!(
        program(ProgramOptions { results: Results::TopK(17), ..default }),
        Err("tiny.gguf: program `llama`, op 21 (top_k): the 17 greatest of 16".into())
    );
}

/// A crash, a panic or a loop that never ends, for any value of any key.
#[test]
fn hostile_values() {
    let keys = [
        "block_count",
        "embedding_length",
        "context_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.scale",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "attention.causal",
        "attn_logit_softcapping",
        "expert_count",
        "final_logit_softcapping",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.scale_linear",
        "rope.scaling.attn_factor",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_beta_fast",
    ];
    let integers = [0, 1, 2, 3, 255, 1 << 14, 1 << 31, u64::from(u32::MAX), u64::MAX];
    let floats = [0.0, -0.0, -1.0, f32::MIN_POSITIVE, f32::MAX, f32::INFINITY, f32::NAN];
    let values: Vec<Value> = integers
        .into_iter()
        .map(Value::from)
        .chain(floats.into_iter().map(Value::from))
        .chain([Value::from(-1i64), true.into(), "yarn".into()])
        .chain([Value::from(vec![0u32, 1]), vec![u32::MAX; 2].into(), Vec::<u32>::new().into()])
        .collect();
    for base in [Tiny::llama(2), Tiny::qwen2(2), Tiny::gemma3(2)] {
        let mut n_loaded = 0;
        for (key, value) in keys.iter().flat_map(|key| values.iter().map(move |v| (key, v))) {
            let yarn =
                base.clone().meta("rope.scaling.type", "yarn").meta("rope.scaling.factor", 2f32);
            for tiny in [base.clone(), yarn].map(|tiny| tiny.meta(key, value.clone())) {
                let Ok(model) = tiny.load() else { continue };
                model.program(&ProgramOptions::default()).unwrap();
                n_loaded += 1;
            }
        }
        assert!(n_loaded > 0, "no value is harmless: the file itself is wrong");
    }
}
