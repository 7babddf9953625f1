//! Ops that keep state: sequences that take turns, join and leave runs, and slots that hold what another sequence left.
//!
//! The same tokens go through two layers of each op, one sequence as a prompt in a few long runs and another token by token, so that what they make
//! must agree with the oracle's in every division. Records lie in buffers full of sentinels: a sequence that begins must not read them.

use super::{f32_weight, simple};
use crate::Result;
use crate::bounds::{CONV, DELTA, NORM};
use crate::case::{Case, SeqStep, Step};
use crate::data::{Rng, f32_bytes};
use tegula_program::{DType, Dim, GatedDelta, HeadOrder, Norm, ProgramBuilder, ValueId};

/// The sequences of a run, in the order of their rows: sequence, slot, tokens. A sequence keeps its slot.
type Turns = &'static [(usize, u32, u32)];

/// One sequence: a prompt in pieces, tokens, and a second sequence in the slot of the first.
const ALONE: &[Turns] =
    &[&[(0, 0, 17)], &[(0, 0, 1)], &[(0, 0, 2)], &[(0, 0, 1)], &[(1, 0, 2)], &[(1, 0, 5)]];
/// Sequences that join, leave, and change places.
const TOGETHER: &[Turns] = &[
    &[(0, 2, 17), (1, 0, 3), (2, 1, 1)],
    &[(2, 1, 5), (0, 2, 1)],
    &[(1, 0, 1), (2, 1, 1), (0, 2, 1)],
    &[(3, 1, 65), (1, 0, 1)],
    &[(3, 1, 1)],
];
/// A token a run, from the first one on.
const TOKENS: &[Turns] = {
    const ONE: Turns = &[(0, 0, 1)];
    &[ONE; 7]
};
const PLANS: [(&str, &[Turns]); 3] =
    [("alone", ALONE), ("together", TOGETHER), ("token by token", TOKENS)];

pub(crate) fn cases() -> Result<Vec<Case>> {
    let mut out = Vec::new();
    for (what, plan) in PLANS {
        for (channels, kernel, has_bias) in
            [(1u64, 2u64, false), (33, 4, true), (8192, 4, false), (96, 3, false), (67, 9, true)]
        {
            out.push(conv_case(what, plan, channels, kernel, has_bias)?);
        }
        for (n_head_k, n_head_v, head_dim_k, head_dim_v, order) in [
            (1, 1, 1, 1, HeadOrder::Grouped),
            (2, 4, 16, 16, HeadOrder::Grouped),
            (2, 4, 16, 16, HeadOrder::Tiled),
            (3, 9, 33, 5, HeadOrder::Tiled),
            (2, 2, 128, 128, HeadOrder::Grouped),
            (1, 4, 64, 96, HeadOrder::Grouped),
        ] {
            let scale = 1.0 / (head_dim_k as f32).sqrt();
            let heads = GatedDelta { n_head_k, n_head_v, head_dim_k, head_dim_v, order, scale };
            out.push(delta_case(what, plan, heads)?);
        }
    }
    for (row, n) in [(1u64, 1u32), (33, 33), (9 * 64, 64), (2 * 80, 80), (4 * 128, 128)] {
        let name = format!("l2_norm/{row} by {n}");
        let norm = Norm { eps: 1e-6, n };
        out.push(simple(&name, NORM, (&[row], 3.0), &[], |b, x, _| vec![b.l2_norm(x[0], norm)])?);
    }
    let tiny = Norm { eps: 1e-6, n: 96 };
    for (what, scale) in [("tiny rows", 1e-4), ("rows of zeros", 0.0)] {
        let name = format!("l2_norm/{what}");
        out.push(simple(&name, NORM, (&[96], scale), &[], |b, x, _| vec![b.l2_norm(x[0], tiny)])?);
    }
    Ok(out)
}

fn conv_case(
    what: &str,
    plan: &[Turns],
    channels: u64,
    kernel: u64,
    has_bias: bool,
) -> Result<Case> {
    let bias = if has_bias { ", bias" } else { "" };
    let name = format!("conv_state/{what}, {channels} columns by {kernel}{bias}");
    let mut rng = Rng::of(&name);
    let mut b = ProgramBuilder::new(&name);
    let x = super::tokens_by(&mut b, "x", channels);
    let mut weights = Vec::new();
    let mut y = x;
    for layer in 0..2 {
        let (w, bias) = (format!("w{layer}"), format!("bias{layer}"));
        weights.push(f32_weight(&mut rng, &w, channels * kernel, 1.0));
        let w = b.weight(&w, DType::F32, &[channels, kernel]);
        let bias = has_bias.then(|| {
            weights.push(f32_weight(&mut rng, &bias, channels, 1.0));
            b.weight(&bias, DType::F32, &[channels])
        });
        y = b.conv_state(y, w, bias);
        b.output(&format!("y{layer}"), y);
    }
    let mut case = Case::new(&name, b.finish()?, CONV);
    case.weights = weights;
    case.tile_rows = channels.div_ceil(2);
    fill(&mut case, plan, |n_tokens| {
        vec![f32_bytes(&rng.vec(channels * u64::from(n_tokens), 2.0))]
    });
    Ok(case)
}

fn delta_case(what: &str, plan: &[Turns], heads: GatedDelta) -> Result<Case> {
    let GatedDelta { n_head_k, n_head_v, head_dim_k, head_dim_v, order, .. } = heads;
    let name = format!(
        "gated_delta/{what}, {n_head_k} heads of {head_dim_k} for {n_head_v} of {head_dim_v}, {order:?}"
    );
    let mut rng = Rng::of(&name);
    let mut b = ProgramBuilder::new(&name);
    let mut inputs: Vec<(u64, ValueId)> = Vec::new();
    for layer in 0..2 {
        let (qk, v) = (n_head_k * head_dim_k, n_head_v * head_dim_v);
        let rows = [("q", qk), ("k", qk), ("v", v), ("g", n_head_v), ("beta", n_head_v)];
        let ids = rows.map(|(part, n)| {
            let dims = [Dim::NTokens, Dim::Fixed(n.into())];
            let id = b.input(&format!("{part}{layer}"), DType::F32, &dims);
            inputs.push((n.into(), id));
            id
        });
        // Keys of length 1, as models have them: others would let the state grow without bound.
        let [q, k, v, g, beta] = ids;
        let k = b.l2_norm(k, Norm { eps: 1e-6, n: head_dim_k });
        let y = b.gated_delta([q, k, v, g, beta], heads);
        b.output(&format!("y{layer}"), y);
    }
    let mut case = Case::new(&name, b.finish()?, DELTA);
    fill(&mut case, plan, |n_tokens| {
        let row = |(i, (n, _)): (usize, &(u64, ValueId))| {
            let row = rng.vec(n * u64::from(n_tokens), 1.0);
            // Decays from none to nearly all; strengths between 0 and 1.
            let row: Vec<f32> = match i % 5 {
                3 => row.iter().map(|x| -(x + 1.0) * 2.0).collect(),
                4 => row.iter().map(|x| (x + 1.0) / 2.0).collect(),
                _ => row,
            };
            f32_bytes(&row)
        };
        inputs.iter().enumerate().map(row).collect()
    });
    Ok(case)
}

/// The runs of a plan.
fn fill(case: &mut Case, plan: &[Turns], mut inputs: impl FnMut(u32) -> Vec<Vec<u8>>) {
    let mut positions = [0u32; 4];
    for turns in plan {
        let mut step = Step::default();
        for (seq, slot, n_tokens) in turns.iter().copied() {
            let first_pos = positions[seq];
            positions[seq] += n_tokens;
            step.seqs.push(SeqStep { n_tokens, first_pos, slot, tables: Vec::new() });
            step.n_tokens += n_tokens;
        }
        step.inputs = inputs(step.n_tokens);
        case.steps.push(step);
    }
    case.n_ctx_max = positions.into_iter().max().unwrap_or(1);
}
