//! KV store and attention, which only make sense together: what is stored in one run is read in the next.
//!
//! Block ids are shuffled over segments, so that nothing is where its position suggests; sequences take turns, join runs and
//! leave them; a window gives blocks back, which are then used by others.

use crate::Result;
use crate::bounds::ATTENTION;
use crate::case::{Case, KvPool, SeqStep, Step};
use crate::data::{Rng, f32_bytes};
use tegula_program::{DType, Dim, KvLayer, ProgramBuilder};

/// The sequences of a run, in the order of their rows, and their tokens.
type Turns = &'static [(usize, u32)];

/// One sequence: a prompt in pieces, then tokens.
const ALONE: &[Turns] = &[&[(0, 17)], &[(0, 1)], &[(0, 3)], &[(0, 1)]];
/// Sequences that join, leave, and change places.
const TOGETHER: &[Turns] = &[
    &[(0, 17), (1, 3), (2, 1)],
    &[(2, 5), (0, 1)],
    &[(1, 1), (2, 1), (0, 1)],
    &[(3, 33), (1, 7)],
    &[(3, 1)],
];
/// Full ubatches, then tokens far behind.
const LONG: &[Turns] = &[&[(0, 64)], &[(0, 64)], &[(0, 64), (1, 3)], &[(1, 61)], &[(0, 1), (1, 1)]];

#[derive(Clone, Copy)]
struct Spec {
    what: &'static str,
    n_head: u32,
    n_head_kv: u32,
    dims: (u32, u32),
    dtypes: (DType, DType),
    block_len: u32,
    window: u32,
    softcap: f32,
    has_sinks: bool,
    /// Layers; every second one is of a group with a window.
    n_layers: u32,
    plan: &'static [Turns],
}

const PLAIN: Spec = Spec {
    what: "plain",
    n_head: 9,
    n_head_kv: 3,
    dims: (64, 64),
    dtypes: (DType::F16, DType::F16),
    block_len: 16,
    window: 0,
    softcap: 0.0,
    has_sinks: false,
    n_layers: 1,
    plan: TOGETHER,
};

const STORED: [DType; 5] = [DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0];
const HEADS: [(u32, u32); 6] = [(1, 1), (2, 1), (2, 2), (9, 3), (9, 9), (9, 1)];
const BLOCK_LENS: [u32; 4] = [16, 1, 5, 32];

pub(crate) fn cases() -> Result<Vec<Case>> {
    let mut specs = Vec::new();
    for (i, dtype) in STORED.into_iter().enumerate() {
        for (j, dim) in [32, 64, 80, 128, 256].into_iter().enumerate() {
            if dim % dtype.block_len() as u32 != 0 {
                continue;
            }
            let (n_head, n_head_kv) = HEADS[(i + j) % HEADS.len()];
            let block_len = BLOCK_LENS[(2 * i + j) % BLOCK_LENS.len()];
            let (dims, dtypes) = ((dim, dim), (dtype, dtype));
            specs.push(Spec { n_head, n_head_kv, block_len, dims, dtypes, ..PLAIN });
        }
    }
    for (n_head, n_head_kv) in HEADS {
        specs.push(Spec { what: "alone", n_head, n_head_kv, plan: ALONE, ..PLAIN });
    }
    let mixed = Spec { what: "mixed types", ..PLAIN };
    for (k, v) in [(3, 1), (1, 4), (0, 3), (2, 0)] {
        specs.push(Spec { dtypes: (STORED[k], STORED[v]), ..mixed });
    }
    for dims in [(64, 32), (80, 48), (192, 128), (32, 256)] {
        specs.push(Spec { what: "keys and values of two sizes", dims, ..PLAIN });
    }
    let long = Spec { what: "long", plan: LONG, ..PLAIN };
    for dtype in STORED {
        specs.push(Spec { dtypes: (dtype, dtype), ..long });
        specs.push(Spec { dtypes: (dtype, dtype), window: 50, what: "long, window 50", ..long });
    }
    for (what, window) in
        [("window 1", 1), ("window 5", 5), ("window 32", 32), ("window 1000", 1000)]
    {
        specs.push(Spec { what, window, plan: LONG, block_len: 8, ..PLAIN });
        specs.push(Spec { what, window, ..PLAIN });
    }
    for (what, softcap) in [("softcap 2", 2.0), ("softcap 50", 50.0)] {
        specs.push(Spec { what, softcap, ..PLAIN });
    }
    specs.push(Spec { what: "sinks", has_sinks: true, ..PLAIN });
    specs.push(Spec {
        what: "sinks of one head",
        has_sinks: true,
        n_head: 1,
        n_head_kv: 1,
        ..PLAIN
    });
    let all = Spec { softcap: 20.0, has_sinks: true, window: 20, plan: LONG, ..PLAIN };
    specs.push(Spec { what: "window, softcap and sinks", ..all });
    specs.push(Spec { what: "layers of two groups", n_layers: 4, window: 12, ..PLAIN });
    specs.iter().map(Spec::case).collect()
}

impl Spec {
    /// The group of a layer, and its window: with several layers the first group sees everything.
    fn group(&self, layer: u32) -> (u32, u32) {
        match (self.n_layers, layer % 2) {
            (1, _) => (0, self.window),
            (_, 0) => (0, 0),
            _ => (1, self.window),
        }
    }

    fn n_groups(&self) -> u32 {
        self.n_layers.min(2)
    }

    fn case(&self) -> Result<Case> {
        let (dk, dv) = self.dims;
        let (k, v) = self.dtypes;
        let name = format!(
            "attention/{k} {v}/{}, {} over {} heads of {dk} and {dv}, KvBlocks of {}, {} runs",
            self.what,
            self.n_head,
            self.n_head_kv,
            self.block_len,
            self.plan.len()
        );
        let mut rng = Rng::of(&name);
        let mut b = ProgramBuilder::new(&name);
        let widths = [self.n_head * dk, self.n_head_kv * dk, self.n_head_kv * dv].map(u64::from);
        let mut weights = Vec::new();
        for layer in 0..self.n_layers {
            let mut input = |what: &str, n| {
                let dims = [Dim::NTokens, Dim::Fixed(n)];
                b.input(&format!("{what}{layer}"), DType::F32, &dims)
            };
            let [q, k_rows, v_rows] =
                [input("q", widths[0]), input("k", widths[1]), input("v", widths[2])];
            let (group, window) = self.group(layer);
            let kv = b.kv_layer(KvLayer {
                group,
                index: 0,
                n_head_kv: self.n_head_kv,
                head_dim_k: dk,
                head_dim_v: dv,
                dtype_k: k,
                dtype_v: v,
            });
            let sinks = self.has_sinks.then(|| {
                let name = format!("sinks{layer}");
                weights.push(super::f32_weight(&mut rng, &name, self.n_head.into(), 3.0));
                b.weight(&name, DType::F32, &[self.n_head.into()])
            });
            b.kv_store(kv, k_rows, v_rows);
            let scale = 1.0 / (dk as f32).sqrt();
            let y = b.attention(kv, q, sinks, self.n_head, scale, self.softcap, window);
            b.output(&format!("y{layer}"), y);
        }
        let mut case = Case::new(&name, b.finish()?, ATTENTION);
        case.weights = weights;
        self.fill(&mut case, &mut rng, &widths);
        Ok(case)
    }

    /// The KV pools and the runs.
    fn fill(&self, case: &mut Case, rng: &mut Rng, widths: &[u64; 3]) {
        let mut pools = Vec::new();
        for group in 0..self.n_groups() {
            let tokens: u32 = self.plan.iter().copied().flatten().map(|(_, n)| n).sum();
            // A part of a block for each sequence, and blocks that nobody uses.
            let n_blocks = tokens.div_ceil(self.block_len) + 4 + 3;
            let first = n_blocks / 3;
            case.kv.push(KvPool {
                block_len: self.block_len,
                segments: vec![first, 1, n_blocks - first - 1],
            });
            let mut free: Vec<u32> = (0..n_blocks).collect();
            rng.shuffle(&mut free);
            let window = if self.n_layers == 1 || group == 1 { self.window } else { 0 };
            pools.push(Pool {
                block_len: self.block_len,
                window,
                free,
                tables: Default::default(),
            });
        }
        let mut positions = [0u32; 4];
        for turns in self.plan {
            let mut step = Step::default();
            for (seq, n_tokens) in turns.iter().copied() {
                let first_pos = positions[seq];
                positions[seq] += n_tokens;
                let tables =
                    pools.iter_mut().map(|pool| pool.grow(seq, first_pos, n_tokens)).collect();
                step.seqs.push(SeqStep { n_tokens, first_pos, slot: 0, tables });
                step.n_tokens += n_tokens;
            }
            for _ in 0..self.n_layers {
                // Queries of different lengths: some attend to all keys alike, some to one.
                for (width, scale) in widths.iter().zip([6.0, 2.0, 2.0]) {
                    let row = rng.vec(width * u64::from(step.n_tokens), scale);
                    step.inputs.push(f32_bytes(&row));
                }
            }
            case.steps.push(step);
        }
        case.n_ctx_max = positions.into_iter().max().unwrap_or(1);
    }
}

/// Blocks of one group, and the tables of its sequences.
struct Pool {
    block_len: u32,
    window: u32,
    free: Vec<u32>,
    /// By sequence: its blocks, and the position of the first.
    tables: [(Vec<u32>, u32); 4],
}

impl Pool {
    /// The table of a sequence that gets tokens. Blocks that its window has left are given back and come first to whoever asks next.
    fn grow(&mut self, seq: usize, first_pos: u32, n_tokens: u32) -> (Vec<u32>, u32) {
        let (blocks, begin) = &mut self.tables[seq];
        if self.window > 0 {
            let oldest = (first_pos + 1).saturating_sub(self.window);
            while *begin + self.block_len <= oldest && !blocks.is_empty() {
                self.free.push(blocks.remove(0));
                *begin += self.block_len;
            }
        }
        let end = first_pos + n_tokens;
        while *begin + blocks.len() as u32 * self.block_len < end {
            blocks.extend(self.free.pop());
        }
        (blocks.clone(), *begin)
    }
}
