//! Files of other times and lengths, derived from tiny models: what has no data of its own must be the same model, or differ where it should.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "common/interp.rs"]
mod interp;

use std::path::{Path, PathBuf};

use interp::Interp;
use tegula_arch::{ProgramOptions, load};
use tegula_gguf::{DType, Gguf, GgufWriter, Value};
use tegula_program::{OpKind, Program};

fn golden(name: &str) -> Option<PathBuf> {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/golden");
    let path = std::env::var_os("TEGULA_GOLDEN").map_or_else(|| default.into(), PathBuf::from);
    let file = path.join("tiny").join(name).join("model-f32.gguf");
    if file.is_file() {
        return Some(file);
    }
    eprintln!("SKIPPED: no {}; set TEGULA_GOLDEN to the folder of golden models", file.display());
    None
}

/// A tensor of f32, dimensions as in files: innermost first.
type Tensor = (String, Vec<u64>, Vec<f32>);

/// The file with keys set, tensors left out and others added.
fn derived(
    gguf: &Gguf,
    to: &Path,
    keys: &[(&str, Value)],
    without: impl Fn(&str) -> bool,
    added: &[Tensor],
) -> Gguf {
    let mut writer = GgufWriter::new();
    for (key, value) in gguf.metadata().iter() {
        if keys.iter().all(|(other, _)| *other != key) {
            writer = writer.meta(key, value.clone());
        }
    }
    for (key, value) in keys {
        writer = writer.meta(*key, value.clone());
    }
    for tensor in gguf.tensors().iter().filter(|tensor| !without(tensor.name())) {
        let bytes = gguf.read_tensor(tensor).unwrap();
        writer = writer.tensor(tensor.name(), tensor.dims(), tensor.dtype(), bytes);
    }
    for (name, dims, data) in added {
        let bytes: Vec<u8> = data.iter().flat_map(|x| x.to_le_bytes()).collect();
        writer = writer.tensor(name, dims, DType::F32, bytes);
    }
    std::fs::write(to, writer.to_bytes().unwrap()).unwrap();
    Gguf::open(to).unwrap()
}

fn exact() -> ProgramOptions {
    ProgramOptions { dtype_k: DType::F32, dtype_v: DType::F32, ..ProgramOptions::default() }
}

/// Logits after eight tokens.
fn logits(gguf: &Gguf) -> Vec<f64> {
    let program = load(gguf).unwrap().program(&exact()).unwrap();
    let positions: Vec<i32> = (0..8).collect();
    let tokens: Vec<i32> = positions.iter().map(|p| 40 + 7 * p).collect();
    Interp::new(&program, gguf).run(&tokens, &positions, &[3, 7]).remove(0).data
}

fn furthest(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

fn f32s(gguf: &Gguf, name: &str) -> Vec<f32> {
    let bytes = gguf.read_tensor(gguf.required_tensor(name).unwrap()).unwrap();
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// `attn_kv_b` of a layer from its halves: for every head the rows of its keys, which `attn_k_b` has as columns, and those of its values.
fn together(gguf: &Gguf, il: usize) -> Tensor {
    let (n_head, rank, nope, dim_v) = (4, 32, 16, 16);
    let k_b = f32s(gguf, &format!("blk.{il}.attn_k_b.weight"));
    let v_b = f32s(gguf, &format!("blk.{il}.attn_v_b.weight"));
    let mut data = Vec::new();
    for h in 0..n_head {
        for i in 0..nope {
            data.extend((0..rank).map(|r| k_b[(h * rank + r) * nope + i]));
        }
        data.extend_from_slice(&v_b[h * dim_v * rank..][..dim_v * rank]);
    }
    let rows = (n_head * (nope + dim_v)) as u64;
    (format!("blk.{il}.attn_kv_b.weight"), vec![rank as u64, rows], data)
}

/// Files of DeepSeek from before the latent cache are still around: they are the same model.
#[test]
fn deepseek_without_a_latent_cache() {
    let Some(file) = golden("deepseek_v2") else { return };
    let (gguf, dir) = (Gguf::open(file).unwrap(), tempfile::tempdir().unwrap());
    let kv_b: Vec<_> = (0..3).map(|il| together(&gguf, il)).collect();
    let keys = [
        ("deepseek2.attention.key_length", 32u32.into()),
        ("deepseek2.attention.value_length", 16u32.into()),
        ("deepseek2.attention.head_count_kv", 4u32.into()),
    ];
    let without = |name: &str| name.contains("attn_k_b") || name.contains("attn_v_b");
    let old = derived(&gguf, &dir.path().join("old.gguf"), &keys, without, &kv_b);
    let apart = furthest(&logits(&gguf), &logits(&old));
    assert!(apart < 1e-9, "{apart:e}");
    let cache = |gguf: &Gguf| load(gguf).unwrap().program(&exact()).unwrap().kv_layers[0];
    let (new, old) = (cache(&gguf), cache(&old));
    assert_eq!((new.n_head_kv, new.head_dim_k, new.head_dim_v), (1, 48, 32));
    assert_eq!((old.n_head_kv, old.head_dim_k, old.head_dim_v), (4, 32, 16));
}

/// The largest DeepSeeks would send tokens to experts that they were never trained to go to.
#[test]
fn deepseek_searches_the_best_groups() {
    let Some(file) = golden("deepseek_v2") else { return };
    let (gguf, dir) = (Gguf::open(file).unwrap(), tempfile::tempdir().unwrap());
    let grouped = |n_used: u32, gating: u32| {
        let keys = [
            ("deepseek2.expert_group_count", 2u32.into()),
            ("deepseek2.expert_group_used_count", n_used.into()),
            ("deepseek2.expert_gating_func", gating.into()),
        ];
        derived(&gguf, &dir.path().join("groups.gguf"), &keys, |_| false, &[])
    };
    let plain = logits(&gguf);
    // All groups searched are all experts; one of two is not.
    assert!(furthest(&plain, &logits(&grouped(2, 1))) < 1e-12);
    assert!(furthest(&plain, &logits(&grouped(1, 1))) > 1e-3);
    for (gating, wanted) in [(1, 1), (2, 2)] {
        let program = load(&grouped(1, gating)).unwrap().program(&exact()).unwrap();
        let score = |kind: &OpKind| match kind {
            OpKind::RouterTopkGrouped { n_score, .. } => Some(*n_score),
            _ => None,
        };
        let scores: Vec<_> = program.ops.iter().filter_map(|op| score(&op.kind)).collect();
        assert_eq!(scores, [wanted; 2], "gating {gating}");
    }
}

/// With a longer context the scores of attention grow, and rope's magnitude stays: the other way round gives fluent nonsense.
#[test]
fn deepseek_with_yarn_scales_scores() {
    let Some(file) = golden("deepseek_v2") else { return };
    let (gguf, dir) = (Gguf::open(file).unwrap(), tempfile::tempdir().unwrap());
    let keys = [
        ("deepseek2.rope.scaling.type", "yarn".into()),
        ("deepseek2.rope.scaling.factor", 40.0f32.into()),
        ("deepseek2.rope.scaling.original_context_length", 256u32.into()),
        ("deepseek2.rope.scaling.yarn_log_multiplier", 0.0707f32.into()),
    ];
    let long = derived(&gguf, &dir.path().join("yarn.gguf"), &keys, |_| false, &[]);
    let program = load(&long).unwrap().program(&exact()).unwrap();
    let (mut n_ropes, mut n_attentions) = (0, 0);
    // (0.0707 ln 40 + 1)^2 / sqrt(32).
    let wanted = (0.0707f32 * 40f32.ln() + 1.0).powi(2) / 32f32.sqrt();
    for op in &program.ops {
        match op.kind {
            OpKind::Rope { attn_factor, ext_factor, n_ctx_orig, .. } => {
                n_ropes += 1;
                assert_eq!((attn_factor, ext_factor, n_ctx_orig), (1.0, 1.0, 256));
            }
            OpKind::Attention { scale, .. } => {
                n_attentions += 1;
                assert!((scale / wanted - 1.0).abs() < 1e-5, "{scale} is not {wanted}");
            }
            _ => {}
        }
    }
    assert_eq!((n_ropes, n_attentions), (6, 3));
}

/// Keys are stored turned: a program whose rope is for short contexts is wrong in long ones, and the other way round.
#[test]
fn phi3_has_the_rope_of_its_context() {
    let Some(file) = golden("phithree") else { return };
    let (gguf, dir) = (Gguf::open(file).unwrap(), tempfile::tempdir().unwrap());
    let keys = [
        ("phi3.context_length", 8192u32.into()),
        ("phi3.rope.scaling.type", "longrope".into()),
        ("phi3.rope.scaling.attn_factor", 1.19f32.into()),
    ];
    let factors = |what: &str, n: f32| {
        (format!("rope_factors_{what}.weight"), vec![8], vec![n; 8]) // n_rot / 2
    };
    let added = [factors("short", 1.0), factors("long", 7.0)];
    let phi = derived(&gguf, &dir.path().join("phi.gguf"), &keys, |_| false, &added);
    let read = |n_ctx: Option<u32>| -> Program {
        load(&phi).unwrap().program(&ProgramOptions { n_ctx, ..exact() }).unwrap()
    };
    // 1024 tokens were seen before the scaling; without a context it is all that the model was trained on.
    for (n_ctx, wanted) in [(Some(1024), "short"), (Some(1025), "long"), (None, "long")] {
        let program = read(n_ctx);
        let names: Vec<_> = program.weights().map(|(_, w)| w.name.clone()).collect();
        let factors: Vec<_> = names.iter().filter(|name| name.starts_with("rope_")).collect();
        assert_eq!(factors, [&format!("rope_factors_{wanted}.weight")], "{n_ctx:?}");
        let magnitude = |kind: &OpKind| match kind {
            OpKind::Rope { attn_factor, .. } => Some(*attn_factor),
            _ => None,
        };
        let magnitudes = program.ops.iter().filter_map(|op| magnitude(&op.kind));
        assert!(magnitudes.into_iter().all(|factor| factor == 1.19));
    }
}
