//! Several ops in a row: values in scratch, values that are outputs and read again, rows that nobody wants, and shapes that do not
//! depend on the run.

use super::{TOKENS, f32_weight, simple, steps, tokens_by};
use crate::Result;
use crate::bounds::{CHAIN, CHAIN_BLOCKS};
use crate::case::{Case, Step, WeightData};
use crate::data::{Rng, f32_bytes, i32_bytes};
use tegula_program::{Activation, DType, Dim, Norm, ProgramBuilder, Rope, RopeStyle};

pub(crate) fn cases() -> Result<Vec<Case>> {
    let mut out =
        vec![residual("chain/residual layers", 9)?, logits()?, fixed_rows()?, made_positions()?];
    out.push(experts()?);
    out.push(simple(
        "chain/an output that is read again",
        CHAIN,
        (&[96], 3.0),
        &[96],
        |b, x, w| {
            let y = b.mul(x[0], w[0]);
            let z = b.unary(Activation::Silu, y);
            vec![y, z, b.add(z, y)]
        },
    )?);
    out.push(simple("chain/one output under two names", CHAIN, (&[96], 3.0), &[], |b, x, _| {
        let y = b.scale(x[0], 2.0);
        vec![y, y]
    })?);
    out.push(simple("chain/a result that nobody reads", CHAIN, (&[96], 3.0), &[], |b, x, _| {
        let _ = b.scale(x[0], 3.0);
        vec![b.scale(x[0], 2.0)]
    })?);
    Ok(out)
}

/// `n_layers` of norm, product, gated unit and residual sum: places in scratch are taken again and again.
pub(crate) fn residual(name: &str, n_layers: u32) -> Result<Case> {
    const N: u64 = 96;
    let mut rng = Rng::of(name);
    let mut b = ProgramBuilder::new(name);
    let mut x = tokens_by(&mut b, "x", N);
    let mut weights = Vec::new();
    for layer in 0..n_layers {
        b.layer(Some(layer));
        let mut product = |b: &mut ProgramBuilder, x, what: &str| -> Result<_> {
            let name = format!("{what}{layer}");
            let bytes = rng.weights(DType::Q8_0, N * N)?;
            weights.push(WeightData { name: name.clone(), bytes });
            let weight = b.weight(&name, DType::Q8_0, &[N, N]);
            Ok(b.matmul(x, weight, None))
        };
        let norm = b.rms_norm(x, None, Norm { eps: 1e-5, n: 96 });
        let gate = product(&mut b, norm, "gate")?;
        let up = product(&mut b, norm, "up")?;
        let hidden = b.glu(Activation::Silu, gate, up);
        let down = product(&mut b, hidden, "down")?;
        x = b.add(x, down);
    }
    b.output("y", x);
    let mut case = Case::new(name, b.finish()?, CHAIN_BLOCKS);
    case.weights = weights;
    case.tile_rows = 41;
    case.steps = steps(&mut rng, &[N], 3.0);
    Ok(case)
}

/// The end of every model, with runs that want no row: pieces of a prompt.
fn logits() -> Result<Case> {
    const N_EMBD: u64 = 96;
    const N_VOCAB: u64 = 67;
    let name = "chain/logits of the rows that are wanted";
    let mut rng = Rng::of(name);
    let mut b = ProgramBuilder::new(name);
    let x = tokens_by(&mut b, "x", N_EMBD);
    let rows = b.input("rows", DType::I32, &[Dim::NOutputs]);
    let norm = b.weight("norm", DType::F32, &[N_EMBD]);
    let table = b.weight("output", DType::F16, &[N_VOCAB, N_EMBD]);
    let wanted = b.gather_rows(x, rows);
    let wanted = b.rms_norm(wanted, Some(norm), Norm { eps: 1e-6, n: 96 });
    let logits = b.matmul(wanted, table, None);
    let capped = b.softcap(logits, 30.0);
    let best = b.argmax(capped);
    let (ids, values) = b.top_k(capped, 5);
    for (name, value) in [("logits", capped), ("best", best), ("ids", ids), ("values", values)] {
        b.output(name, value);
    }
    let mut case = Case::new(name, b.finish()?, CHAIN);
    case.weights = vec![
        f32_weight(&mut rng, "norm", N_EMBD, 2.0),
        WeightData { name: "output".into(), bytes: rng.weights(DType::F16, N_VOCAB * N_EMBD)? },
    ];
    case.tile_rows = 23;
    for (n_tokens, n_outputs) in [(64, 5), (17, 0), (3, 3), (1, 1), (1, 0), (64, 64)] {
        case.steps.push(Step {
            n_tokens,
            n_outputs,
            inputs: vec![
                f32_bytes(&rng.vec(N_EMBD * u64::from(n_tokens), 3.0)),
                i32_bytes(&rng.ids(n_outputs, n_tokens.into())),
            ],
            ..Step::default()
        });
    }
    Ok(case)
}

/// The last layer of a mixture of experts, with runs that want no row: pieces of a prompt.
fn experts() -> Result<Case> {
    const N_EMBD: u64 = 96;
    const N_FF: u64 = 33;
    let (n_expert, k) = (5u32, 2u32);
    let name = "chain/experts of the rows that are wanted";
    let mut rng = Rng::of(name);
    let mut b = ProgramBuilder::new(name);
    let x = tokens_by(&mut b, "x", N_EMBD);
    let rows = b.input("rows", DType::I32, &[Dim::NOutputs]);
    let ids = b.input("ids", DType::I32, &[Dim::NOutputs, Dim::Fixed(k.into())]);
    let shares = b.input("shares", DType::F32, &[Dim::NOutputs, Dim::Fixed(k.into())]);
    let stack = |n: u64| n * u64::from(n_expert);
    let up = b.weight("up", DType::F32, &[stack(N_FF), N_EMBD]);
    let down = b.weight("down", DType::F32, &[stack(N_EMBD), N_FF]);
    let wanted = b.gather_rows(x, rows);
    let hidden = b.matmul_experts(wanted, up, ids, None, n_expert);
    let hidden = b.unary(Activation::Silu, hidden);
    let made = b.matmul_experts(hidden, down, ids, None, n_expert);
    let sum = b.combine_experts(made, shares);
    b.output("y", sum);
    let mut case = Case::new(name, b.finish()?, CHAIN);
    case.weights = vec![
        f32_weight(&mut rng, "up", stack(N_FF) * N_EMBD, 1.0),
        f32_weight(&mut rng, "down", stack(N_EMBD) * N_FF, 1.0),
    ];
    case.tile_rows = 23;
    for (n_tokens, n_outputs) in [(64, 5), (17, 0), (3, 3), (1, 0), (64, 64)] {
        case.steps.push(Step {
            n_tokens,
            n_outputs,
            inputs: vec![
                f32_bytes(&rng.vec(N_EMBD * u64::from(n_tokens), 3.0)),
                i32_bytes(&rng.ids(n_outputs, n_tokens.into())),
                i32_bytes(&rng.ids(n_outputs * k, n_expert.into())),
                f32_bytes(&rng.vec(u64::from(n_outputs * k), 1.0)),
            ],
            ..Step::default()
        });
    }
    Ok(case)
}

/// Values of a fixed number of rows, more than the run has tokens: what a projector gives.
fn fixed_rows() -> Result<Case> {
    const ROWS: u64 = 40;
    const N: u64 = 64;
    let name = "chain/more rows than tokens";
    let mut rng = Rng::of(name);
    let mut b = ProgramBuilder::new(name);
    let x = b.input("x", DType::F32, &[Dim::Fixed(ROWS), Dim::Fixed(N)]);
    let positions = b.input("positions", DType::I32, &[Dim::Fixed(ROWS)]);
    let weight = b.weight("w", DType::F32, &[N, N]);
    let turned = b.rope(x, positions, None, Rope::new(RopeStyle::Neox, 32, 32, 10_000.0));
    let y = b.matmul(turned, weight, None);
    let best = b.argmax(y);
    b.output("y", y);
    b.output("best", best);
    let mut case = Case::new(name, b.finish()?, CHAIN);
    case.weights = vec![f32_weight(&mut rng, "w", N * N, 1.0)];
    let inputs = vec![f32_bytes(&rng.vec(ROWS * N, 3.0)), i32_bytes(&rng.ids(40, 1000))];
    case.steps = vec![Step { n_tokens: 1, inputs, ..Step::default() }];
    Ok(case)
}

/// Positions, and ids, that an op makes instead of the host.
fn made_positions() -> Result<Case> {
    const N: u64 = 64;
    let name = "chain/positions and ids that an op makes";
    let mut rng = Rng::of(name);
    let mut b = ProgramBuilder::new(name);
    let x = tokens_by(&mut b, "x", N);
    let table = b.weight("table", DType::F32, &[N, N]);
    let best = b.argmax(x);
    let rows = b.embed(best, table);
    let y = b.rope(rows, best, None, Rope::new(RopeStyle::Adjacent, 32, 16, 100.0));
    b.output("y", y);
    let mut case = Case::new(name, b.finish()?, CHAIN);
    case.n_ctx_max = 64;
    case.weights = vec![f32_weight(&mut rng, "table", N * N, 1.0)];
    let step = |n_tokens: u32| Step {
        n_tokens,
        inputs: vec![f32_bytes(&rng.vec(N * u64::from(n_tokens), 3.0))],
        ..Step::default()
    };
    case.steps = TOKENS.map(step).into();
    Ok(case)
}
