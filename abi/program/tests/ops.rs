//! Ops over experts and ops with state: what the builder and the verifier accept, and that nothing is lost over the boundary.

#![allow(clippy::unwrap_used, unsafe_code, reason = "a test that cannot go on fails")]

use tegula_program::ffi::{FfiProgram, read_program};
use tegula_program::{
    Activation, DType, Dim, GatedDelta, HeadOrder, Norm, OpKind, Program, ProgramBuilder, Router,
    RouterGating, RouterGroups, ValueId,
};

const ROUTER: Router = Router { k: 2, gating: RouterGating::Sigmoid, normalise: true, scale: 2.5 };
const GROUPS: RouterGroups = RouterGroups { n_group: 3, n_group_used: 2, n_score: 2 };
const HEADS: GatedDelta = GatedDelta {
    n_head_k: 2,
    n_head_v: 4,
    head_dim_k: 8,
    head_dim_v: 16,
    order: HeadOrder::Tiled,
    scale: 0.25,
};

fn x(b: &mut ProgramBuilder, name: &str, n: u64) -> ValueId {
    b.input(name, DType::F32, &[Dim::NTokens, Dim::Fixed(n)])
}

/// Every op of this file once, with parameters that are not their defaults.
fn whole() -> Program {
    let mut b = ProgramBuilder::new("ops");
    let x32 = x(&mut b, "x", 32);
    let router = b.weight("router", DType::F32, &[6, 32]);
    let bias = b.weight("bias", DType::F32, &[6]);
    let up = b.weight("up", DType::Q8_0, &[6 * 32, 32]);
    let up_bias = b.weight("up.bias", DType::F32, &[6, 32]);
    let down = b.weight("down", DType::Q4_0, &[6 * 32, 32]);
    let logits = b.matmul(x32, router, None);
    let (ids, weights) = b.router_topk(logits, Some(bias), ROUTER);
    let h = b.matmul_experts(x32, up, ids, Some(up_bias), 6);
    let h = b.glu_clamped(h, h, 1.5, 7.0);
    let h = b.matmul_experts(h, down, ids, None, 6);
    let h = b.combine_experts(h, weights);
    let number = b.weight("number", DType::F32, &[1]);
    let h = b.mul(h, number);
    let kernel = b.weight("conv", DType::F32, &[32, 4]);
    let h = b.conv_state(h, kernel, None);
    let h = b.unary(Activation::Softplus, h);
    let q = b.slice_groups(h, 16, 2, 8);
    let q = b.l2_norm(q, Norm { eps: 1e-6, n: 8 });
    let (_, more) = b.router_topk_grouped(logits, Some(bias), ROUTER, GROUPS);
    let h2 = b.concat_groups(more, 1, h, 16);
    let h2 = b.slice_groups(h2, 17, 1, 16);
    let h = b.add(h, h2);
    let v = b.concat(h, h);
    let g = b.slice(h, 0, 4);
    let y = b.gated_delta([q, q, v, g, g], HEADS);
    b.output("y", y);
    b.finish().unwrap()
}

/// A parameter that is lost on the way makes a backend compute something else than the model says.
#[test]
fn ops_cross_the_boundary_whole() {
    let program = whole();
    assert_eq!(program.state_layers.iter().map(|s| s.n_elements).collect::<Vec<_>>(), [96, 512]);
    let flat = FfiProgram::new(&program);
    // SAFETY: the program and its flat form live until the end.
    assert_eq!(unsafe { read_program(flat.as_abi()) }.unwrap(), program);
    let text = program.to_string();
    for line in [
        "state 1: 512 f32",
        "RouterTopk { k: 2, gating: Sigmoid",
        "n_group: 3, n_group_used: 2, n_score: 2 }",
        "ConcatGroups { group_a: 1, group_b: 16 }",
        "order: Tiled",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}

fn refused(why: &str, write: impl FnOnce(&mut ProgramBuilder)) {
    let mut b = ProgramBuilder::new("wrong");
    write(&mut b);
    let error = b.finish().unwrap_err().to_string();
    assert!(error.contains(why), "{error:?} does not say {why:?}");
}

/// What a backend relies on is checked before it compiles: sizes that do not fit would be reads outside of buffers.
#[test]
fn sizes_that_do_not_fit_are_refused() {
    refused("5 experts", |b| {
        let (x, w) = (x(b, "x", 32), b.weight("w", DType::F32, &[6 * 8, 32]));
        let (ids, _) = b.router_topk(x, None, ROUTER);
        b.matmul_experts(x, w, ids, None, 5);
    });
    refused("rows of 96", |b| {
        let (x, w) = (x(b, "x", 96), b.weight("w", DType::F32, &[6 * 8, 32]));
        let (ids, _) = b.router_topk(x, None, ROUTER);
        b.matmul_experts(x, w, ids, None, 6);
    });
    refused("33 of 32 experts", |b| {
        let x = x(b, "x", 32);
        b.router_topk(x, None, Router { k: 33, ..ROUTER });
    });
    refused("rows of 32 and 5 weights", |b| {
        let (x, w) = (x(b, "x", 32), x(b, "w", 5));
        b.combine_experts(x, w);
    });
    refused("groups of 5", |b| {
        let x = x(b, "x", 32);
        b.slice_groups(x, 5, 0, 1);
    });
    refused("columns 6 + 3 of groups of 8", |b| {
        let x = x(b, "x", 32);
        b.slice_groups(x, 8, 6, 3);
    });
    refused("2 and 4 groups", |b| {
        let (a, x) = (x(b, "a", 8), x(b, "x", 32));
        b.concat_groups(a, 4, x, 8);
    });
    refused("rows of 32 are no multiple of groups of 0", |b| {
        let x = x(b, "x", 32);
        b.concat_groups(x, 8, x, 0);
    });
    refused("32 experts in 5 groups", |b| {
        let x = x(b, "x", 32);
        b.router_topk_grouped(x, None, ROUTER, RouterGroups { n_group: 5, ..GROUPS });
    });
    refused("5 of 4 groups", |b| {
        let x = x(b, "x", 32);
        let groups = RouterGroups { n_group: 4, n_group_used: 5, n_score: 2 };
        b.router_topk_grouped(x, None, ROUTER, groups);
    });
    refused("9 of the 8 experts of 1 groups", |b| {
        let x = x(b, "x", 32);
        let groups = RouterGroups { n_group: 4, n_group_used: 1, n_score: 2 };
        b.router_topk_grouped(x, None, Router { k: 9, ..ROUTER }, groups);
    });
    refused("kernels of 1", |b| {
        let (x, w) = (x(b, "x", 32), b.weight("w", DType::F32, &[32, 1]));
        b.conv_state(x, w, None);
    });
    refused("is not [n_tokens, 32]", |b| {
        let (x, w) = (x(b, "x", 32), b.weight("w", DType::F32, &[32, 4]));
        let rows = b.input("rows", DType::I32, &[Dim::NOutputs]);
        let x = b.gather_rows(x, rows);
        b.conv_state(x, w, None);
    });
    refused("3 heads of values over 2", |b| {
        let x = x(b, "x", 16);
        b.gated_delta([x; 5], GatedDelta { n_head_v: 3, ..HEADS });
    });
    refused("`x` is not [n_tokens, 64]", |b| {
        let x = x(b, "x", 16);
        b.gated_delta([x; 5], HEADS);
    });
}

/// Two ops on one state would each overwrite what the other left, in an order that no backend keeps.
#[test]
fn a_state_belongs_to_one_op() {
    let mut program = whole();
    let conv = program.ops.iter().find(|op| op.kind.state_layer() == Some(0)).unwrap().clone();
    program.ops.retain(|op| op.kind.state_layer() != Some(0));
    assert!(program.verify().is_err());
    let mut program = whole();
    let n = program.values.len();
    let mut value = program.values[conv.outputs[0].index()].clone();
    value.name = "again".into();
    program.values.push(value);
    let again = ValueId(u32::try_from(n).unwrap());
    program.ops.push(tegula_program::Op { outputs: vec![again], ..conv });
    let error = program.verify().unwrap_err().to_string();
    assert!(error.contains("state layer 0 of 96 elements is named by 2 ops"), "{error}");
    let mut program = whole();
    program.state_layers[1].n_elements += 1;
    assert!(program.verify().is_err());
    let is_delta = |op: &&mut tegula_program::Op| matches!(op.kind, OpKind::GatedDelta { .. });
    program.state_layers.truncate(1);
    assert!(program.ops.iter_mut().find(is_delta).is_some());
    assert!(program.verify().is_err());
}
