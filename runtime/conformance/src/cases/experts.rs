//! Mixtures of experts: the router's choices, products with a few experts' rows in tiles that are cut across experts, and their sum.

use super::{TOKENS, f32_weight, simple, steps, tokens_by};
use crate::Result;
use crate::bounds::{ACTIVATION, ELEMENTWISE, MATMUL, MATMUL_BLOCKS};
use crate::case::{Case, Step, WeightData};
use crate::data::{Rng, f32_bytes, f32s, i32_bytes, i32s};
use crate::rounding::Weights;
use tegula_program::{DType, Dim, ProgramBuilder, Router, RouterGating, RouterGroups};

pub(crate) fn cases() -> Result<Vec<Case>> {
    let mut out = Vec::new();
    products(&mut out)?;
    routers(&mut out)?;
    for (k, m) in [(1u64, 1u64), (1, 67), (2, 96), (8, 33), (3, 2048)] {
        let name = format!("combine_experts/{k} of {m}");
        out.push(simple(&name, MATMUL, (&[k * m, k], 2.0), &[], |b, x, _| {
            vec![b.combine_experts(x[0], x[1])]
        })?);
    }
    for (n, alpha, limit) in [(1u64, 1.702, 7.0), (67, 1.702, 7.0), (1000, 0.5, 1.5)] {
        let name = format!("glu_clamped/{n} within {limit}");
        out.push(simple(&name, ACTIVATION, (&[n, n], 12.0), &[], |b, x, _| {
            vec![b.glu_clamped(x[0], x[1], alpha, limit)]
        })?);
    }
    out.push(simple("mul/a weight of one number", ELEMENTWISE, (&[67], 3.0), &[1], |b, x, w| {
        vec![b.mul(x[0], w[0])]
    })?);
    Ok(out)
}

/// A product with experts.
#[derive(Clone, Copy)]
struct Product {
    what: &'static str,
    dtype: DType,
    n_expert: u32,
    k: u32,
    n_rows: u64,
    n_in: u64,
    /// Each expert of a row has an x of its own.
    by_slot: bool,
    has_bias: bool,
    tile_rows: u64,
    import: bool,
}

fn products(out: &mut Vec<Case>) -> Result<()> {
    let plain = Product {
        what: "in odd tiles",
        dtype: DType::F32,
        n_expert: 5,
        k: 2,
        n_rows: 29,
        n_in: 96,
        by_slot: false,
        has_bias: false,
        tile_rows: 7,
        import: false,
    };
    let dtypes = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::Q4_0,
        DType::Q8_0,
        DType::MXFP4,
        DType::Q4_K,
        DType::Q6_K,
    ];
    let mut products = Vec::new();
    for dtype in dtypes {
        let n_in = 96.max(dtype.block_len() as u64 * 2);
        for by_slot in [false, true] {
            products.push(Product { dtype, n_in, by_slot, has_bias: by_slot, ..plain });
        }
        products.push(Product { what: "imported", dtype, n_in, import: true, ..plain });
    }
    let odd = Product { what: "odd sizes", n_in: 33, n_rows: 1, ..plain };
    products.push(Product { n_expert: 1, k: 1, tile_rows: 0, ..odd });
    products.push(Product { n_expert: 3, k: 3, n_rows: 5, by_slot: true, tile_rows: 4, ..odd });
    products.push(Product { n_expert: 128, k: 8, n_rows: 3, tile_rows: 17, has_bias: true, ..odd });
    let whole = Product { what: "whole experts a tile", tile_rows: 2 * 29, ..plain };
    products.push(whole);
    products.push(Product { dtype: DType::Q8_0, tile_rows: 29, by_slot: true, ..whole });
    for product in products {
        out.push(product.case()?);
    }
    Ok(())
}

impl Product {
    fn case(&self) -> Result<Case> {
        let Self { what, dtype, n_expert, k, n_rows, n_in, .. } = *self;
        let name = format!(
            "matmul_experts/{dtype}/{what}, {k} of {n_expert} of {n_rows} by {n_in}, tiles of {}{}{}",
            self.tile_rows,
            if self.by_slot { ", x by expert" } else { "" },
            if self.has_bias { ", bias" } else { "" },
        );
        let mut rng = Rng::of(&name);
        let mut b = ProgramBuilder::new(&name);
        let n_x = if self.by_slot { n_in * u64::from(k) } else { n_in };
        let x = tokens_by(&mut b, "x", n_x);
        let ids = b.input("ids", DType::I32, &[Dim::NTokens, Dim::Fixed(k.into())]);
        let stack = n_rows * u64::from(n_expert);
        let weight = b.weight("w", dtype, &[stack, n_in]);
        let dims = [n_expert.into(), n_rows];
        let bias = self.has_bias.then(|| b.weight("bias", DType::F32, &dims));
        let y = b.matmul_experts(x, weight, ids, bias, n_expert);
        b.output("y", y);
        let is_plain = dtype.block_len() == 1;
        let bound = if is_plain { MATMUL } else { MATMUL_BLOCKS };
        let mut case = Case::new(&name, b.finish()?, bound);
        case.weights =
            vec![WeightData { name: "w".into(), bytes: rng.weights(dtype, stack * n_in)? }];
        case.weights.extend(bias.map(|_| f32_weight(&mut rng, "bias", stack, 5.0)));
        (case.tile_rows, case.import) = (self.tile_rows, self.import);
        let step = |n_tokens: u32| Step {
            n_tokens,
            inputs: vec![
                f32_bytes(&rng.vec(n_x * u64::from(n_tokens), 3.0)),
                // Any experts in any order, one twice in a row too: the op does not ask where they come from.
                i32_bytes(&rng.ids(n_tokens * k, n_expert.into())),
            ],
            ..Step::default()
        };
        case.steps = TOKENS.map(step).into();
        if !is_plain {
            let weights = Weights::new(dtype, &case.weights[0].bytes, n_in, n_expert)?;
            let sharing = if self.by_slot { 1 } else { k };
            for step in &mut case.steps {
                let (x, ids) = (f32s(&step.inputs[0]), i32s(&step.inputs[1]));
                step.rounded = Some(weights.experts(&x, &ids, sharing, step.n_tokens));
            }
        }
        Ok(case)
    }
}

fn routers(out: &mut Vec<Case>) -> Result<()> {
    let gatings = [RouterGating::Softmax, RouterGating::Sigmoid, RouterGating::SoftmaxSelected];
    for (i, gating) in gatings.into_iter().enumerate() {
        for (j, (n_expert, k)) in
            [(1u64, 1u32), (5, 5), (8, 2), (60, 4), (128, 8), (256, 8)].into_iter().enumerate()
        {
            let normalise = (i + j) % 2 == 0;
            let router = Router { k, gating, normalise, scale: [1.0, 2.5][j % 2] };
            out.push(router_case("distinct", n_expert, router, j % 3 == 1, 4.0)?);
        }
        let router = Router { k: 3, gating, normalise: true, scale: 1.0 };
        // All equal: the first ones are chosen. Far apart: all weight on one.
        out.push(router_case("equal", 16, router, false, 0.0)?);
        out.push(router_case("far apart", 16, router, false, 60.0)?);
        for (has_bias, scale) in [(false, 4.0), (true, 4.0), (false, 0.0)] {
            out.push(grouped_case((160, 6), (8, 3, 1), gating, has_bias, scale)?);
            out.push(grouped_case((256, 8), (8, 4, 2), gating, has_bias, scale)?);
            out.push(grouped_case((12, 4), (6, 2, 2), gating, has_bias, scale)?);
        }
    }
    Ok(())
}

/// `k` of the experts of `used` of `n_group` groups, whose scores are the sums of their `n_score` best.
fn grouped_case(
    (n_expert, k): (u64, u32),
    (n_group, n_group_used, n_score): (u32, u32, u32),
    gating: RouterGating,
    has_bias: bool,
    scale: f32,
) -> Result<Case> {
    let name = format!(
        "router_topk_grouped/{gating:?}/{k} of {n_expert}, {n_group_used} of {n_group} groups by {n_score}{}{}",
        if has_bias { ", biased" } else { "" },
        if scale == 0.0 { ", equal" } else { "" },
    );
    let mut rng = Rng::of(&name);
    let mut b = ProgramBuilder::new(&name);
    let logits = tokens_by(&mut b, "logits", n_expert);
    let bias = has_bias.then(|| b.weight("bias", DType::F32, &[n_expert]));
    let router = Router { k, gating, normalise: true, scale: 2.5 };
    let groups = RouterGroups { n_group, n_group_used, n_score };
    let (ids, weights) = b.router_topk_grouped(logits, bias, router, groups);
    b.output("ids", ids);
    b.output("weights", weights);
    let mut case = Case::new(&name, b.finish()?, ACTIVATION);
    case.weights.extend(bias.map(|_| f32_weight(&mut rng, "bias", n_expert, 1.0)));
    case.steps = steps(&mut rng, &[n_expert], scale);
    Ok(case)
}

fn router_case(
    what: &str,
    n_expert: u64,
    router: Router,
    has_bias: bool,
    scale: f32,
) -> Result<Case> {
    let Router { k, gating, normalise, .. } = router;
    let name = format!(
        "router_topk/{gating:?}/{what}, {k} of {n_expert}{}{}",
        if normalise { ", normalised" } else { "" },
        if has_bias { ", biased" } else { "" },
    );
    let mut rng = Rng::of(&name);
    let mut b = ProgramBuilder::new(&name);
    let logits = tokens_by(&mut b, "logits", n_expert);
    let bias = has_bias.then(|| b.weight("bias", DType::F32, &[n_expert]));
    let (ids, weights) = b.router_topk(logits, bias, router);
    b.output("ids", ids);
    b.output("weights", weights);
    let mut case = Case::new(&name, b.finish()?, ACTIVATION);
    case.weights.extend(bias.map(|_| f32_weight(&mut rng, "bias", n_expert, 1.0)));
    case.steps = steps(&mut rng, &[n_expert], scale);
    Ok(case)
}
