//! Products with chosen experts, on every instruction set, against f64 sums over exactly decoded weights. A failure here is a mixture of
//! experts that answers nonsense, or reads a hundred times what it has to.
#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests hand weights over as pointers"
)]

mod common;

use common::{Rng, check, machines, random_blocks, rounding};
use tegula_cpu::kernels::{Choices, ExpertWeights, KernelError, Kernels, RowTile};
use tegula_cpu::pool::Pool;
use tegula_quant::DType;

struct Case {
    /// Type and rows of an expert, of each product.
    products: &'static [(DType, usize)],
    n_expert: usize,
    k: usize,
    n_in: usize,
    n_tokens: usize,
    by_slot: bool,
    bias: bool,
    /// Rows of a tile.
    tile_rows: usize,
}

/// Rows in allocations of their own, so that a read across a tile's end is a read out of bounds. Tiles whose rows nobody chose lie
/// nowhere: a read of them ends the test.
fn tiles(
    bytes: &[u8],
    (n_rows, tile_rows, row_bytes): (usize, usize, usize),
    is_read: impl Fn(usize) -> bool,
) -> (Vec<Vec<u8>>, Vec<RowTile>) {
    let (mut chunks, mut tiles) = (Vec::new(), Vec::new());
    for first_row in (0..n_rows).step_by(tile_rows) {
        let end = n_rows.min(first_row + tile_rows);
        let chunk = bytes[first_row * row_bytes..end * row_bytes].to_vec();
        let is_read = (first_row..end).any(&is_read);
        let data = if is_read { chunk.as_ptr() } else { std::ptr::without_provenance(64) };
        tiles.push(RowTile { data, first_row, n_rows: end - first_row });
        chunks.push(chunk);
    }
    (chunks, tiles)
}

/// One stack of experts with what it should make.
struct Stack {
    dtype: DType,
    n_rows: usize,
    tiles: Vec<RowTile>,
    bias: Vec<RowTile>,
    want: Vec<f64>,
    bound: Vec<f64>,
    /// What the tiles point to.
    _chunks: (Vec<Vec<u8>>, Vec<Vec<u8>>),
}

impl Stack {
    fn new(case: &Case, (dtype, n_rows): (DType, usize), x: &[f32], ids: &[i32]) -> Self {
        let (n_in, n_expert) = (case.n_in, case.n_expert);
        let mut rng = Rng(n_rows as u64);
        let (bytes, w) = random_blocks(&mut rng, dtype, n_in * n_rows * n_expert);
        let bias = rng.vec(n_rows * n_expert, 5.0);
        let (mut want, mut bound) = (Vec::new(), Vec::new());
        for (slot, id) in ids.iter().enumerate() {
            let row = if case.by_slot { slot } else { slot / case.k };
            let x = &x[row * n_in..][..n_in];
            for i in 0..n_rows {
                let at = *id as usize * n_rows + i;
                let w = &w[at * n_in..][..n_in];
                let bias = if case.bias { f64::from(bias[at]) } else { 0.0 };
                let sum: f64 = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                want.push(sum + bias);
                let mut magnitude = bias.abs();
                for (x, w) in x.chunks(32).zip(w.chunks(32)) {
                    let greatest = f64::from(w.iter().fold(0.0f32, |m, w| m.max(w.abs())));
                    magnitude += greatest * x.iter().map(|x| f64::from(x.abs())).sum::<f64>();
                }
                // A scale may be shared by more than 32: factors of 2 for what lies beside.
                let roundings = 2.0 * (1.0 + 0.5 * (n_in as f64).sqrt());
                bound.push(rounding(dtype, x, w) + roundings * f64::from(f32::EPSILON) * magnitude);
            }
        }
        let row_bytes = n_in / dtype.block_len() * dtype.block_bytes();
        let is_chosen = |row: usize| ids.iter().any(|id| *id as usize == row / n_rows);
        let shape = (n_rows * n_expert, case.tile_rows, row_bytes);
        let (chunks, tiles) = tiles(&bytes, shape, is_chosen);
        let bytes: Vec<u8> = bias.iter().flat_map(|b| b.to_le_bytes()).collect();
        let is_chosen = |expert: usize| ids.iter().any(|id| *id as usize == expert);
        let (biases, bias) = self::tiles(&bytes, (n_expert, 3, n_rows * 4), is_chosen);
        Self { dtype, n_rows, tiles, bias, want, bound, _chunks: (chunks, biases) }
    }
}

fn run(
    kernels: Kernels,
    pool: &Pool,
    case: &Case,
    stacks: &[Stack],
    (x, ids): (&[f32], &[i32]),
) -> Result<Vec<Vec<f32>>, KernelError> {
    let Case { n_expert, k, n_in, n_tokens, .. } = *case;
    let len = Choices::scratch_len(pool.n_threads(), n_expert, k, n_in, n_tokens);
    let mut scratch = vec![f32::NAN; len];
    let choices = Choices { n_expert, k, ids, n_in, x };
    let mut out: Vec<_> = stacks.iter().map(|s| vec![f32::NAN; s.n_rows * ids.len()]).collect();
    let weights = stacks.iter().zip(&mut out).map(|(stack, y)| ExpertWeights {
        dtype: stack.dtype,
        n_rows: stack.n_rows,
        tiles: &stack.tiles,
        bias: case.bias.then_some(&stack.bias),
        y,
    });
    let mut weights: Vec<_> = weights.collect();
    // SAFETY: tiles of rows that are read are those of the stacks, whose chunks live.
    unsafe { kernels.matmul_experts(pool, &choices, &mut weights, &mut scratch) }?;
    drop(weights);
    Ok(out)
}

fn data(case: &Case) -> (Vec<f32>, Vec<i32>) {
    let mut rng = Rng(case.n_in as u64 + 31 * case.n_tokens as u64);
    let n_slots = case.n_tokens * case.k;
    let n_x = if case.by_slot { n_slots } else { case.n_tokens };
    let x = rng.vec(n_x * case.n_in, 3.0);
    // One expert is never chosen, the last is by all.
    let ids = (0..n_slots).map(|slot| match slot % case.k {
        0 => case.n_expert as i32 - 1,
        _ => 1 + rng.below(case.n_expert - 1) as i32,
    });
    (x, ids.collect())
}

#[test]
fn products_with_the_chosen_experts() {
    const INTS: &[(DType, usize)] = &[(DType::Q4_K, 37), (DType::Q8_0, 101)];
    const MIXED: &[(DType, usize)] = &[(DType::Q6_K, 29), (DType::F16, 30)];
    const FLOATS: &[(DType, usize)] = &[(DType::F32, 29), (DType::IQ2_XS, 17)];
    let pools = [Pool::new(1).unwrap(), Pool::new(3).unwrap()];
    for products in [INTS, MIXED, FLOATS] {
        for (n_expert, k, n_tokens) in
            [(5, 2, 1), (8, 3, 4), (5, 2, 7), (40, 4, 33), (4, 2, 300), (3, 2, 600)]
        {
            for (by_slot, bias, tile_rows) in [(false, true, 19), (true, false, 1000)] {
                let n_in = 512;
                let case = Case { products, n_expert, k, n_in, n_tokens, by_slot, bias, tile_rows };
                let (x, ids) = data(&case);
                let of = |product: &(DType, usize)| Stack::new(&case, *product, &x, &ids);
                let stacks: Vec<_> = case.products.iter().map(of).collect();
                for kernels in machines() {
                    for pool in &pools {
                        let got = run(kernels, pool, &case, &stacks, (&x, &ids)).unwrap();
                        for (got, stack) in got.iter().zip(&stacks) {
                            let what = format!(
                                "{} of {n_expert}, {n_tokens} tokens by {k}, {} threads on {}",
                                stack.dtype,
                                pool.n_threads(),
                                kernels.isa().name()
                            );
                            check(&what, got, &stack.want, |i| stack.bound[i]);
                        }
                    }
                }
            }
        }
    }
}

const SMALL: Case = Case {
    products: &[(DType::Q8_0, 8)],
    n_expert: 4,
    k: 2,
    n_in: 64,
    n_tokens: 9,
    by_slot: false,
    bias: false,
    tile_rows: 8,
};

/// An activation that overflowed must show in its own token's results, and in no other's.
#[test]
fn what_is_not_finite_stays_where_it_is() {
    let pool = Pool::new(2).unwrap();
    let (mut x, ids) = data(&SMALL);
    let stack = [Stack::new(&SMALL, SMALL.products[0], &x, &ids)];
    x[3 * 64 + 5] = f32::INFINITY;
    for kernels in machines() {
        let got = run(kernels, &pool, &SMALL, &stack, (&x, &ids)).unwrap().remove(0);
        for (slot, row) in got.chunks_exact(8).enumerate() {
            let is_finite = row.iter().all(|y| y.is_finite());
            assert_eq!(is_finite, slot / 2 != 3, "slot {slot} on {}", kernels.isa().name());
        }
    }
}

/// Ids come from a value that an op made, or that the host gave: they must not reach memory outside W.
#[test]
fn ids_that_name_no_expert_are_refused() {
    let pool = Pool::new(1).unwrap();
    let (x, ids) = data(&SMALL);
    let stack = [Stack::new(&SMALL, SMALL.products[0], &x, &ids)];
    for bad in [-1, 4, i32::MIN, i32::MAX] {
        let mut ids = ids.clone();
        ids[7] = bad;
        let result = run(Kernels::detect(), &pool, &SMALL, &stack, (&x, &ids));
        assert!(matches!(result, Err(KernelError::Shape { .. })), "{bad}: {result:?}");
    }
}
