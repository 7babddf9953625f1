//! Programs as text, and what metadata change in them. `UPDATE_EXPECT=1 cargo test` rewrites the snapshots.
//!
//! What a user loses if this fails: nothing yet, but a change of an architecture went unseen: read the difference.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "common/tiny.rs"]
mod tiny;

use std::path::Path;

use tegula_arch::{ProgramOptions, Results};
use tegula_gguf::DType;
use tegula_program::{OpKind, Program, Rope, RopeStyle};
use tiny::Tiny;

fn check_snapshot(name: &str, tiny: &Tiny) {
    let program = tiny.load().unwrap().program(&ProgramOptions::default()).unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/snapshots/{name}.txt"));
    let got = program.to_string();
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        std::fs::write(&path, &got).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(expected == got, "{} is not:\n{got}", path.display());
}

#[test]
fn snapshots() {
    check_snapshot("llama", &Tiny::llama(2));
    check_snapshot(
        "llama_biases_rope_factors",
        &Tiny::llama(1)
            .tensor("rope_freqs.weight", &[4], DType::F32)
            .tensor("blk.0.attn_k.bias", &[16], DType::F32)
            .tensor("blk.0.attn_output.bias", &[32], DType::F32)
            .tensor("blk.0.ffn_up.bias", &[48], DType::F32)
            .meta("attention.sliding_window", 4096u32),
    );
    check_snapshot("qwen2", &Tiny::qwen2(1));
    check_snapshot("gemma3", &Tiny::gemma3(2).meta("attention.sliding_window_pattern", 2u32));
}

fn ropes(program: &Program) -> Vec<Rope> {
    let rope = |kind: &OpKind| match *kind {
        OpKind::Rope {
            style,
            head_dim,
            n_rot,
            n_ctx_orig,
            base,
            freq_scale,
            ext_factor,
            attn_factor,
            beta_fast,
            beta_slow,
        } => Some(Rope {
            style,
            head_dim,
            n_rot,
            n_ctx_orig,
            base,
            freq_scale,
            ext_factor,
            attn_factor,
            beta_fast,
            beta_slow,
        }),
        _ => None,
    };
    program.ops.iter().filter_map(|op| rope(&op.kind)).collect()
}

fn default_program(tiny: &Tiny) -> Program {
    tiny.load().unwrap().program(&ProgramOptions::default()).unwrap()
}

/// A model with a longer context than it was trained on forgets its order of words if its scaling is misread.
#[test]
fn rope_scaling() {
    let llama = || Tiny::llama(1);
    let scaled =
        |kind: &str| llama().meta("rope.scaling.type", kind).meta("rope.scaling.factor", 4f32);
    let plain = Rope::new(RopeStyle::Adjacent, 8, 8, 10_000.0);
    let linear = Rope { freq_scale: 0.25, ..plain };
    let yarn = Rope { n_ctx_orig: 32, ext_factor: 1.0, ..linear };
    let magnitude = 0.1 * 4f32.ln() + 1.0;
    let yarn_file = || scaled("yarn").meta("rope.scaling.original_context_length", 32u32);
    let cases = [
        (llama(), plain),
        (llama().meta("rope.freq_base", 5e5f32), Rope { base: 5e5, ..plain }),
        (llama().meta("rope.dimension_count", 4u32), Rope { n_rot: 4, ..plain }),
        (llama().meta("rope.scale_linear", 4f32), linear),
        (llama().meta("rope.scaling.factor", 4f32), linear),
        (llama().meta("rope.scaling.factor", 0f32), plain),
        (scaled("linear"), linear),
        (scaled("none"), plain),
        (yarn_file(), Rope { attn_factor: magnitude, ..yarn }),
        (scaled("yarn"), Rope { attn_factor: magnitude, n_ctx_orig: 128, ..yarn }),
        (
            yarn_file().meta("rope.scaling.attn_factor", 2f32),
            Rope { attn_factor: 2.0 * magnitude, ..yarn },
        ),
        (
            yarn_file()
                .meta("rope.scaling.yarn_beta_fast", 16f32)
                .meta("rope.scaling.yarn_beta_slow", 2f32),
            Rope { attn_factor: magnitude, beta_fast: 16.0, beta_slow: 2.0, ..yarn },
        ),
        (
            yarn_file().meta("rope.scaling.yarn_ext_factor", 0f32),
            Rope { attn_factor: 1.0, ext_factor: 0.0, ..yarn },
        ),
    ];
    for (i, (tiny, expected)) in cases.iter().enumerate() {
        assert_eq!(ropes(&default_program(tiny)), [*expected; 2], "case {i}");
    }
}

/// Gemma's local layers with the global base, or the reverse, lose all that is far back.
#[test]
fn gemma3_layers() {
    let facts = |tiny: &Tiny| -> Vec<(u32, f32, f32)> {
        let program = default_program(tiny);
        let windows = program.ops.iter().filter_map(|op| match op.kind {
            OpKind::Attention { window, .. } => Some(window),
            _ => None,
        });
        let ropes = ropes(&program);
        windows.zip(ropes.chunks(2)).map(|(w, r)| (w, r[0].base, r[0].freq_scale)).collect()
    };
    let (local, global) = ((24, 1e4, 1.0), (0, 1e6, 1.0));
    let base = || Tiny::gemma3(7);
    let [l, g] = [local, global];
    assert_eq!(facts(&base()), [l, l, l, l, l, g, l]);
    let pattern = "attention.sliding_window_pattern";
    assert_eq!(facts(&base().meta(pattern, 3u32)), [l, l, g, l, l, g, l]);
    assert_eq!(facts(&base().meta(pattern, 0u32)), [l; 7]);
    assert_eq!(facts(&base().meta(pattern, 1u32)), [g; 7]);
    let array = vec![true, false, false, true, false, false, true];
    assert_eq!(facts(&base().meta(pattern, array)), [l, g, g, l, g, g, l]);
    assert_eq!(facts(&base().without_meta("attention.sliding_window")), [g; 7]);
    let scaled = base()
        .meta("rope.scaling.type", "linear")
        .meta("rope.scaling.factor", 8f32)
        .meta("rope.freq_base_swa", 5e3f32);
    let (l, g) = ((24, 5e3, 1.0), (0, 1e6, 0.125));
    assert_eq!(facts(&scaled), [l, l, l, l, l, g, l]);
}

#[test]
fn gemma3_scores() {
    let attention = |tiny: &Tiny| {
        default_program(tiny).ops.iter().find_map(|op| match op.kind {
            OpKind::Attention { scale, softcap, .. } => Some((scale, softcap)),
            _ => None,
        })
    };
    assert_eq!(attention(&Tiny::gemma3(1)), Some((0.25, 0.0)));
    assert_eq!(attention(&Tiny::gemma3(62)), Some((1.0 / 8f32.sqrt(), 0.0)));
    let said =
        Tiny::gemma3(1).meta("attention.scale", 0.5f32).meta("attn_logit_softcapping", 50f32);
    assert_eq!(attention(&said), Some((0.5, 50.0)));
    let capped = default_program(&Tiny::gemma3(1).meta("final_logit_softcapping", 30f32));
    assert_eq!(capped.ops.last().map(|op| op.kind), Some(OpKind::Softcap { cap: 30.0 }));
}

/// Layers of different sizes, and a tensor for another use.
#[test]
fn facts_of_a_model() {
    let model = Tiny::llama(2)
        .meta("general.name", "Tiny")
        .meta("attention.head_count_kv", vec![2u32, 1])
        .meta("feed_forward_length", vec![48u32, 16])
        .meta("context_length", i32::MAX as u32)
        .tensor("blk.1.attn_k.weight", &[8, 32], DType::F16)
        .tensor("blk.1.attn_v.weight", &[8, 32], DType::F16)
        .tensor("blk.1.ffn_gate.weight", &[16, 32], DType::F16)
        .tensor("blk.1.ffn_up.weight", &[16, 32], DType::F16)
        .tensor("blk.1.ffn_down.weight", &[32, 16], DType::F16)
        .tensor("blk.0.attn_rot_embd", &[4], DType::F32)
        .load()
        .unwrap();
    let info = model.info();
    assert_eq!((info.arch, info.name.as_deref()), ("llama", Some("Tiny")));
    assert_eq!((info.n_layer, info.n_embd, info.n_head, info.n_head_kv), (2, 32, 4, 2));
    assert_eq!((info.head_dim_k, info.head_dim_v, info.n_ff, info.n_vocab), (8, 8, 48, 16));
    assert_eq!(
        (info.n_ctx_train, info.window, info.tied_embeddings),
        (i32::MAX as u32, None, false)
    );
    assert_eq!(model.unused_tensors(), ["blk.0.attn_rot_embd"]);

    // Embedding, output, final norm; then per layer norms, queries and output, keys and values, MLP.
    let layer = |n_kv: u64, n_ff: u64| 2 * 32 + 2 * 32 * 32 + 2 * n_kv * 32 + 3 * n_ff * 32;
    assert_eq!(info.n_params, 2 * 16 * 32 + 32 + layer(16, 48) + layer(8, 16));

    let program = model.program(&ProgramOptions::default()).unwrap();
    let heads: Vec<_> = program.kv_layers.iter().map(|kv| (kv.group, kv.n_head_kv)).collect();
    assert_eq!(heads, [(0, 2), (0, 1)]);
    assert_eq!(program.weights().count(), model.tensors().len());
}

/// One matrix for both uses, bound and stored once.
#[test]
fn tied_embeddings() {
    let model = Tiny::llama(1).without_tensor("output.weight").load().unwrap();
    assert!(model.info().tied_embeddings);
    let program = model.program(&ProgramOptions::default()).unwrap();
    let (table, _) =
        program.weights().find(|(_, value)| value.name == "token_embd.weight").unwrap();
    let readers: Vec<_> = program.ops.iter().filter(|op| op.inputs.contains(&table)).collect();
    assert_eq!(
        readers.iter().map(|op| op.kind).collect::<Vec<_>>(),
        [OpKind::Embed, OpKind::Matmul]
    );
}

/// Inputs and outputs are a promise to the runtime.
#[test]
fn inputs_and_outputs() {
    let cases = [
        (Results::Logits, vec!["logits: [n_outputs, 16]"]),
        (Results::Hidden, vec!["hidden: [n_outputs, 32]"]),
        (Results::Argmax, vec!["argmax: [n_outputs]"]),
        (Results::TopK(5), vec!["top_ids: [n_outputs, 5]", "top_logits: [n_outputs, 5]"]),
    ];
    for model in [Tiny::llama(1), Tiny::qwen2(1), Tiny::gemma3(1)].map(|tiny| tiny.load().unwrap())
    {
        for (results, expected) in &cases {
            let options = ProgramOptions { results: *results, ..ProgramOptions::default() };
            let program = model.program(&options).unwrap();
            let describe = |id: &tegula_program::ValueId| {
                let value = program.value(*id).unwrap();
                let dims: Vec<_> = value.dims.iter().map(ToString::to_string).collect();
                format!("{}: [{}]", value.name, dims.join(", "))
            };
            let inputs: Vec<_> = program.inputs.iter().map(describe).collect();
            assert_eq!(
                inputs,
                ["tokens: [n_tokens]", "positions: [n_tokens]", "output_rows: [n_outputs]"]
            );
            assert_eq!(program.outputs.iter().map(describe).collect::<Vec<_>>(), *expected);
        }
    }
}
