//! What reads weight matrices: embed and matmul, over every type, in tiles that are split at odd rows.

use super::{TOKENS, f32_weight, steps, tokens_by};
use crate::Result;
use crate::bounds::{EMBED, MATMUL, MATMUL_BLOCKS};
use crate::case::{Case, Step, WeightData};
use crate::data::{Rng, f32s, i32_bytes};
use crate::rounding::Weights;
use tegula_program::{DType, Dim, ProgramBuilder};

/// Rows that no vector or group divides.
const N_ROWS: u64 = 29;

/// A few blocks to a row, and not a power of two of them.
fn row_of(dtype: DType) -> u64 {
    let len = dtype.block_len() as u64;
    if len > 32 { 3 * len } else { 9 * len.max(32) }
}

pub(crate) fn embed() -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for dtype in DType::ALL {
        let name = format!("embed/{dtype}");
        let mut rng = Rng::of(&name);
        let mut b = ProgramBuilder::new(&name);
        let ids = b.input("ids", DType::I32, &[Dim::NTokens]);
        let n_in = row_of(dtype);
        let table = b.weight("table", dtype, &[N_ROWS, n_in]);
        let rows = b.embed(ids, table);
        b.output("rows", rows);
        let mut case = Case::new(&name, b.finish()?, EMBED);
        let bytes = rng.weights(dtype, N_ROWS * n_in)?;
        case.weights = vec![WeightData { name: "table".into(), bytes }];
        case.tile_rows = 7;
        let step = |n_tokens: u32| Step {
            n_tokens,
            inputs: vec![i32_bytes(&rng.ids(n_tokens, N_ROWS))],
            ..Step::default()
        };
        case.steps = TOKENS.map(step).into();
        cases.push(case);
    }
    Ok(cases)
}

/// One product.
struct Product {
    what: &'static str,
    dtype: DType,
    n_in: u64,
    n_rows: u64,
    /// 0 for one tile.
    tile_rows: u64,
    has_bias: bool,
    import: bool,
}

impl Product {
    fn case(&self) -> Result<Case> {
        let Self { what, dtype, n_in, n_rows, .. } = *self;
        let name = format!("matmul/{dtype}/{what} {n_rows}x{n_in}");
        let mut rng = Rng::of(&name);
        let mut b = ProgramBuilder::new(&name);
        let x = tokens_by(&mut b, "x", n_in);
        let weight = b.weight("w", dtype, &[n_rows, n_in]);
        let bias = self.has_bias.then(|| b.weight("bias", DType::F32, &[n_rows]));
        let y = b.matmul(x, weight, bias);
        b.output("y", y);
        let bound = if dtype.block_len() > 1 { MATMUL_BLOCKS } else { MATMUL };
        let mut case = Case::new(&name, b.finish()?, bound);
        let bytes = rng.weights(dtype, n_rows * n_in)?;
        case.weights = vec![WeightData { name: "w".into(), bytes }];
        case.weights.extend(bias.map(|_| f32_weight(&mut rng, "bias", n_rows, 5.0)));
        case.tile_rows = self.tile_rows;
        case.import = self.import;
        case.steps = steps(&mut rng, &[n_in], 3.0);
        if dtype.block_len() > 1 {
            let weights = Weights::new(dtype, &case.weights[0].bytes, n_in, 1)?;
            for step in &mut case.steps {
                let x = f32s(&step.inputs[0]);
                step.rounded = Some(weights.product(&x, step.n_tokens));
            }
        }
        Ok(case)
    }
}

pub(crate) fn matmul() -> Result<Vec<Case>> {
    let product = |what, dtype, n_in, n_rows, tile_rows| Product {
        what,
        dtype,
        n_in,
        n_rows,
        tile_rows,
        has_bias: false,
        import: false,
    };
    let mut products = Vec::new();
    for dtype in DType::ALL {
        let plain = product("in tiles", dtype, row_of(dtype), N_ROWS, 7);
        products.push(Product { has_bias: true, ..plain });
    }
    let block = |dtype: DType| dtype.block_len() as u64;
    for dtype in
        [DType::F32, DType::F16, DType::BF16, DType::Q4_0, DType::Q8_0, DType::Q4_K, DType::Q6_K]
    {
        let whole = |blocks: u64| blocks * block(dtype);
        products.push(product("one row", dtype, whole(5), 1, 0));
        products.push(product("one block", dtype, whole(1), 3, 1));
        products.push(product("wide", dtype, whole(4096 / block(dtype)), 67, 33));
        products.push(product("tall", dtype, whole(256 / block(dtype)), 515, 255));
        let imported = product("imported", dtype, whole(6), 65, 21);
        products.push(Product { import: true, ..imported });
    }
    for n_in in [1, 2, 33, 257] {
        products.push(product("odd rows", DType::F32, n_in, 5, 2));
        products.push(product("odd rows", DType::F16, n_in, 5, 2));
    }
    products.iter().map(Product::case).collect()
}
