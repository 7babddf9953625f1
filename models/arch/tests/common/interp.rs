//! A plain interpreter of programs: one sequence, f64, every formula written out as `tegula_abi::OpCode` states it.
//!
//! It proves the architectures before and apart from any backend, so it shares nothing with one and takes no short cut. Every
//! value is a matrix of f64, which holds ids and positions exactly. Wrong programs panic.

use std::collections::{BTreeMap, HashMap};
use std::f64::consts::PI;

use tegula_gguf::Gguf;
use tegula_program::{
    Activation, DType, HeadOrder, Op, OpKind, Program, RopeStyle, RouterGating, ValueId, ValueKind,
};

/// Rows of `n` elements each.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Mat {
    pub(crate) n: usize,
    pub(crate) data: Vec<f64>,
}

impl Mat {
    fn ids(ids: &[i32]) -> Self {
        Self { n: 1, data: ids.iter().map(|id| f64::from(*id)).collect() }
    }

    pub(crate) fn rows(&self) -> impl Iterator<Item = &[f64]> {
        self.data.chunks_exact(self.n)
    }

    fn row(&self, i: f64) -> &[f64] {
        &self.data[i as usize * self.n..][..self.n]
    }

    fn map(&self, f: impl Fn(f64) -> f64) -> Self {
        Self { n: self.n, data: self.data.iter().map(|x| f(*x)).collect() }
    }

    fn from_rows(n: usize, rows: impl Iterator<Item = Vec<f64>>) -> Self {
        Self { n, data: rows.flatten().collect() }
    }

    /// `f(a, b)` by element; b may be one row.
    fn zip(&self, b: &Self, f: impl Fn(f64, f64) -> f64) -> Self {
        let pairs = self.data.iter().zip(b.data.iter().cycle());
        Self { n: self.n, data: pairs.map(|(a, b)| f(*a, *b)).collect() }
    }
}

/// Keys and values by position.
type Kv = BTreeMap<i64, (Vec<f64>, Vec<f64>)>;

/// A program with its weights and the cache of one sequence.
pub(crate) struct Interp<'a> {
    program: &'a Program,
    values: HashMap<ValueId, Mat>,
    kv: Vec<Kv>,
    state: Vec<Vec<f64>>,
}

impl<'a> Interp<'a> {
    /// Reads and decodes all weights from the file's bytes.
    pub(crate) fn new(program: &'a Program, gguf: &Gguf) -> Self {
        let exact = |dtype| dtype == DType::F32;
        assert!(program.kv_layers.iter().all(|kv| exact(kv.dtype_k) && exact(kv.dtype_v)));
        let weights = program.weights().map(|(id, value)| {
            let tensor = gguf.required_tensor(&value.name).unwrap();
            let bytes = gguf.read_tensor(tensor).unwrap();
            let mut decoded = vec![0f32; tensor.n_elements() as usize];
            tegula_quant::dequantize(tensor.dtype(), &bytes, &mut decoded).unwrap();
            let data = decoded.into_iter().map(f64::from).collect();
            (id, Mat { n: value.row_len() as usize, data })
        });
        let state = program.state_layers.iter().map(|s| vec![0.0; s.n_elements as usize]);
        let kv = vec![Kv::new(); program.kv_layers.len()];
        Self { program, values: weights.collect(), kv, state: state.collect() }
    }

    /// Runs the program once and gives its outputs.
    pub(crate) fn run(
        &mut self,
        tokens: &[i32],
        positions: &[i32],
        output_rows: &[i32],
    ) -> Vec<Mat> {
        for (id, given) in self.program.inputs.iter().zip([tokens, positions, output_rows]) {
            self.values.insert(*id, Mat::ids(given));
        }
        let positions: Vec<i64> = positions.iter().map(|p| i64::from(*p)).collect();
        for op in &self.program.ops {
            let made = self.op(op, &positions);
            assert_eq!(made.len(), op.outputs.len(), "{op:?}");
            self.values.extend(op.outputs.iter().copied().zip(made));
        }
        let outputs = self.program.outputs.iter().map(|id| self.values[id].clone()).collect();
        // Nothing may survive a run but weights and the cache.
        let program = self.program;
        self.values.retain(|id, _| program.value(*id).unwrap().kind == ValueKind::Weight);
        outputs
    }

    fn op(&mut self, op: &Op, positions: &[i64]) -> Vec<Mat> {
        let inputs: Vec<&Mat> = op.inputs.iter().map(|id| &self.values[id]).collect();
        let x = inputs[0];
        let third = inputs.get(2).copied();
        if let Some(made) = experts(op, &inputs) {
            return made;
        }
        let one = match op.kind {
            OpKind::Embed => gather(inputs[1], x),
            OpKind::GatherRows => gather(x, inputs[1]),
            OpKind::RmsNorm { eps, n } => {
                let weight = inputs.get(1).copied();
                norm(x, n, |_| 0.0, eps, weight, None)
            }
            OpKind::LayerNorm { eps, n } => norm(x, n, mean, eps, Some(inputs[1]), third),
            OpKind::Matmul => matmul(x, inputs[1], third),
            OpKind::Rope { .. } => rope(&op.kind, x, positions, third),
            OpKind::KvStore { kv_layer } => {
                let pairs = x.rows().zip(inputs[1].rows());
                let stored: Vec<_> = pairs.map(|(k, v)| (k.to_vec(), v.to_vec())).collect();
                self.kv[kv_layer as usize].extend(positions.iter().copied().zip(stored));
                return Vec::new();
            }
            OpKind::Attention { .. } => self.attention(&op.kind, x, positions, inputs.get(1)),
            OpKind::Glu { activation: f } => x.zip(inputs[1], |gate, up| activate(f, gate) * up),
            OpKind::Unary { activation: f } => x.map(|x| activate(f, x)),
            OpKind::Add => x.zip(inputs[1], |a, b| a + b),
            OpKind::Mul => x.zip(inputs[1], |a, b| a * b),
            OpKind::Scale { factor } => x.map(|x| x * f64::from(factor)),
            OpKind::Softcap { cap } => x.map(|x| softcap(x, cap)),
            OpKind::Slice { begin, len } => {
                let (begin, len) = (begin as usize, len as usize);
                Mat::from_rows(len, x.rows().map(|row| row[begin..begin + len].to_vec()))
            }
            OpKind::Concat => {
                let pairs = x.rows().zip(inputs[1].rows());
                Mat::from_rows(x.n + inputs[1].n, pairs.map(|(a, b)| [a, b].concat()))
            }
            OpKind::L2Norm { eps, n } => {
                let group = |x: &[f64]| {
                    let root = (dot(x, x) + f64::from(eps)).sqrt();
                    x.iter().map(|e| e / root).collect::<Vec<_>>()
                };
                Mat { n: x.n, data: x.data.chunks_exact(n as usize).flat_map(group).collect() }
            }
            OpKind::SliceGroups { group, begin, len } => {
                let (begin, len) = (begin as usize, len as usize);
                let groups = x.data.chunks_exact(group as usize);
                let data = groups.flat_map(|group| group[begin..begin + len].to_vec()).collect();
                Mat { n: x.n / group as usize * len, data }
            }
            OpKind::GluClamped { alpha, limit } => {
                let (alpha, limit) = (f64::from(alpha), f64::from(limit));
                x.zip(inputs[1], |gate, up| {
                    let gate = gate.min(limit);
                    gate / (1.0 + (-alpha * gate).exp()) * (up.clamp(-limit, limit) + 1.0)
                })
            }
            OpKind::ConvState { state_layer } => {
                conv(&mut self.state[state_layer as usize], x, inputs[1], third)
            }
            OpKind::GatedDelta { state_layer, .. } => {
                gated_delta(&mut self.state[state_layer as usize], &op.kind, &inputs)
            }
            OpKind::ConcatGroups { group_a: p, group_b: q } => {
                let rows = x.rows().zip(inputs[1].rows()).map(|(a, b)| {
                    // An a of one group serves all.
                    let groups = a.chunks_exact(p as usize).cycle().zip(b.chunks_exact(q as usize));
                    groups.flat_map(|(a, b)| [a, b].concat()).collect()
                });
                Mat::from_rows(inputs[1].n / q as usize * (p + q) as usize, rows)
            }
            OpKind::MatmulExperts { .. }
            | OpKind::RouterTopk { .. }
            | OpKind::RouterTopkGrouped { .. }
            | OpKind::CombineExperts => unreachable!("done above"),
            OpKind::Argmax => greatest(x, 1).0,
            OpKind::TopK { k } => {
                let (ids, values) = greatest(x, k as usize);
                return vec![ids, values];
            }
        };
        vec![one]
    }

    fn attention(&self, kind: &OpKind, q: &Mat, positions: &[i64], sinks: Option<&&Mat>) -> Mat {
        let OpKind::Attention { kv_layer, n_head, scale, softcap: cap, window } = *kind else {
            unreachable!("called for attention only")
        };
        let (kv, facts) = (&self.kv[kv_layer as usize], &self.program.kv_layers[kv_layer as usize]);
        let (dim_k, dim_v) = (facts.head_dim_k as usize, facts.head_dim_v as usize);
        let n_head_per_kv = n_head / facts.n_head_kv;
        let rows = q.rows().zip(positions).map(|(q, p)| {
            let first = if window == 0 { 0 } else { p + 1 - i64::from(window) };
            let seen: Vec<_> = kv.range(first..=*p).map(|(_, kv)| kv).collect();
            let head = |h: usize| {
                let q = &q[h * dim_k..][..dim_k];
                let h_kv = h / n_head_per_kv as usize;
                let score = |k: &[f64]| softcap(dot(q, k) * f64::from(scale), cap);
                let mut weights: Vec<f64> =
                    seen.iter().map(|(k, _)| score(&k[h_kv * dim_k..][..dim_k])).collect();
                // A sink is one more score whose value is zero.
                weights.extend(sinks.map(|sinks| sinks.data[h]));
                softmax(&mut weights);
                let mut out = vec![0.0; dim_v];
                for (w, (_, v)) in weights.iter().zip(&seen) {
                    out.iter_mut().zip(&v[h_kv * dim_v..]).for_each(|(out, v)| *out += w * v);
                }
                out
            };
            (0..n_head as usize).flat_map(head).collect()
        });
        Mat::from_rows(n_head as usize * dim_v, rows)
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn mean(x: &[f64]) -> f64 {
    x.iter().sum::<f64>() / x.len() as f64
}

fn softcap(x: f64, cap: f32) -> f64 {
    let cap = f64::from(cap);
    if cap == 0.0 { x } else { cap * (x / cap).tanh() }
}

pub(crate) fn softmax(x: &mut [f64]) {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    x.iter_mut().for_each(|x| *x = (*x - max).exp());
    let sum: f64 = x.iter().sum();
    x.iter_mut().for_each(|x| *x /= sum);
}

fn gather(table: &Mat, ids: &Mat) -> Mat {
    Mat::from_rows(table.n, ids.data.iter().map(|id| table.row(*id).to_vec()))
}

fn norm(
    x: &Mat,
    n: u32,
    centre: fn(&[f64]) -> f64,
    eps: f32,
    weight: Option<&Mat>,
    bias: Option<&Mat>,
) -> Mat {
    let group = |x: &[f64]| {
        let centred: Vec<f64> = x.iter().map(|e| e - centre(x)).collect();
        let root = (dot(&centred, &centred) / f64::from(n) + f64::from(eps)).sqrt();
        let scaled = centred.iter().enumerate().map(|(i, e)| {
            e / root * weight.map_or(1.0, |w| w.data[i]) + bias.map_or(0.0, |b| b.data[i])
        });
        scaled.collect::<Vec<_>>()
    };
    Mat { n: x.n, data: x.data.chunks_exact(n as usize).flat_map(group).collect() }
}

fn matmul(x: &Mat, weight: &Mat, bias: Option<&Mat>) -> Mat {
    let n_rows = weight.data.len() / weight.n;
    let row = |x: &[f64]| {
        let sums = weight.rows().enumerate();
        sums.map(|(i, w)| dot(x, w) + bias.map_or(0.0, |b| b.data[i])).collect()
    };
    Mat::from_rows(n_rows, x.rows().map(row))
}

fn rope(kind: &OpKind, x: &Mat, positions: &[i64], factors: Option<&Mat>) -> Mat {
    let OpKind::Rope { style, head_dim, n_rot, attn_factor, .. } = *kind else {
        unreachable!("called for rope only")
    };
    let half = n_rot as usize / 2;
    let mut data = x.data.clone();
    for (row, p) in data.chunks_exact_mut(x.n).zip(positions) {
        for head in row.chunks_exact_mut(head_dim as usize) {
            for i in 0..half {
                let (a, b) = match style {
                    RopeStyle::Adjacent => (2 * i, 2 * i + 1),
                    RopeStyle::Neox => (i, i + half),
                };
                let frequency = frequency(kind, i, factors.map_or(1.0, |f| f.data[i]));
                let (sin, cos) = (*p as f64 * frequency).sin_cos();
                let (xa, xb) = (head[a], head[b]);
                head[a] = (xa * cos - xb * sin) * f64::from(attn_factor);
                head[b] = (xa * sin + xb * cos) * f64::from(attn_factor);
            }
        }
    }
    Mat { n: x.n, data }
}

/// Radians per position of pair `i`. YaRN keeps the frequencies that turn more than `beta_fast` times within the original
/// context, scales those that turn fewer than `beta_slow` times, and mixes between.
fn frequency(kind: &OpKind, i: usize, factor: f64) -> f64 {
    let OpKind::Rope { n_rot, n_ctx_orig, base, freq_scale, ext_factor, .. } = *kind else {
        unreachable!("called for rope only")
    };
    let OpKind::Rope { beta_fast, beta_slow, .. } = *kind else { unreachable!("as above") };
    let (n_rot, base) = (f64::from(n_rot), f64::from(base));
    let kept = base.powf(-2.0 * i as f64 / n_rot) / factor;
    let scaled = kept * f64::from(freq_scale);
    if ext_factor == 0.0 {
        return scaled;
    }
    let pair_of = |rotations: f32| {
        n_rot * (f64::from(n_ctx_orig) / (f64::from(rotations) * 2.0 * PI)).ln() / (2.0 * base.ln())
    };
    let low = pair_of(beta_fast).floor().max(0.0);
    let high = pair_of(beta_slow).ceil().min(n_rot - 1.0);
    let ramp = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
    let mix = (1.0 - ramp) * f64::from(ext_factor);
    scaled * (1.0 - mix) + kept * mix
}

fn activate(f: Activation, x: f64) -> f64 {
    match f {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        Activation::GeluErf => 0.5 * x * (1.0 + erf(x / 2f64.sqrt())),
        Activation::Relu => x.max(0.0),
        Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Activation::Tanh => x.tanh(),
        Activation::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
    }
}

/// By its power series, which loses no digit that matters before erf is 1 to all digits.
fn erf(x: f64) -> f64 {
    if x.abs() > 5.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        let n = f64::from(n);
        term *= -x * x / n;
        sum += term / (2.0 * n + 1.0);
    }
    sum * 2.0 / PI.sqrt()
}

/// The ops over experts.
fn experts(op: &Op, inputs: &[&Mat]) -> Option<Vec<Mat>> {
    let x = inputs[0];
    match op.kind {
        OpKind::MatmulExperts { n_expert } => {
            let (weight, ids, bias) = (inputs[1], inputs[2], inputs.get(3));
            let n_rows = weight.data.len() / weight.n / n_expert as usize;
            let row = |(x, ids): (&[f64], &[f64])| {
                let slot = |(j, e): (usize, &f64)| {
                    let x = if x.len() == weight.n { x } else { &x[j * weight.n..][..weight.n] };
                    let out = |i: usize| {
                        let at = *e * n_rows as f64 + i as f64;
                        dot(x, weight.row(at)) + bias.map_or(0.0, |b| b.data[at as usize])
                    };
                    (0..n_rows).map(out).collect::<Vec<_>>()
                };
                ids.iter().enumerate().flat_map(slot).collect()
            };
            Some(vec![Mat::from_rows(ids.n * n_rows, x.rows().zip(ids.rows()).map(row))])
        }
        OpKind::RouterTopk { k, gating, normalise, scale }
        | OpKind::RouterTopkGrouped { k, gating, normalise, scale, .. } => {
            let (mut ids, mut weights) = (Vec::new(), Vec::new());
            for row in x.rows() {
                let mut p = row.to_vec();
                match gating {
                    RouterGating::Softmax => softmax(&mut p),
                    RouterGating::Sigmoid => {
                        p.iter_mut().for_each(|p| *p = 1.0 / (1.0 + (-*p).exp()));
                    }
                    RouterGating::SoftmaxSelected => {}
                }
                let biased = p.iter().enumerate();
                let biased = biased.map(|(i, p)| p + inputs.get(1).map_or(0.0, |b| b.data[i]));
                let mut scores = Mat { n: p.len(), data: biased.collect() };
                if let OpKind::RouterTopkGrouped { n_group, n_group_used, n_score, .. } = op.kind {
                    let len = p.len() / n_group as usize;
                    let groups = Mat { n: len, data: scores.data.clone() };
                    let sums = greatest(&groups, n_score as usize).1;
                    let sums = sums.rows().map(|best| best.iter().sum()).collect();
                    let sums = Mat { n: n_group as usize, data: sums };
                    let used = greatest(&sums, n_group_used as usize).0.data;
                    for (i, score) in scores.data.iter_mut().enumerate() {
                        if !used.contains(&((i / len) as f64)) {
                            *score = f64::NEG_INFINITY;
                        }
                    }
                }
                let chosen = greatest(&scores, k as usize).0.data;
                let mut w: Vec<f64> = chosen.iter().map(|e| p[*e as usize]).collect();
                if gating == RouterGating::SoftmaxSelected {
                    softmax(&mut w);
                }
                let sum = if normalise { w.iter().sum::<f64>().max(1e-20) } else { 1.0 };
                weights.extend(w.iter().map(|w| w / sum * f64::from(scale)));
                ids.extend(chosen);
            }
            let mat = |data| Mat { n: k as usize, data };
            Some(vec![mat(ids), mat(weights)])
        }
        OpKind::CombineExperts => {
            let m = x.n / inputs[1].n;
            let row = |(x, w): (&[f64], &[f64])| {
                let mut sum = vec![0.0; m];
                for (x, w) in x.chunks_exact(m).zip(w) {
                    sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += w * x);
                }
                sum
            };
            Some(vec![Mat::from_rows(m, x.rows().zip(inputs[1].rows()).map(row))])
        }
        _ => None,
    }
}

/// The state is the rows before this run, the oldest first.
fn conv(state: &mut Vec<f64>, x: &Mat, weight: &Mat, bias: Option<&Mat>) -> Mat {
    let kernel = weight.n;
    let all = Mat { n: x.n, data: [state.as_slice(), &x.data].concat() };
    let rows = (0..x.data.len() / x.n).map(|t| {
        let column = |c: usize| {
            let taps = (0..kernel).map(|j| weight.row(c as f64)[j] * all.row((t + j) as f64)[c]);
            taps.sum::<f64>() + bias.map_or(0.0, |b| b.data[c])
        };
        (0..x.n).map(column).collect()
    });
    let out = Mat::from_rows(x.n, rows);
    *state = all.data[all.data.len() - state.len()..].to_vec();
    out
}

fn gated_delta(state: &mut [f64], kind: &OpKind, inputs: &[&Mat]) -> Mat {
    let OpKind::GatedDelta { n_head_k, n_head_v, head_dim_k, head_dim_v, order, scale, .. } = *kind
    else {
        unreachable!("called for the gated delta rule only")
    };
    let (dk, dv, heads) = (head_dim_k as usize, head_dim_v as usize, n_head_v as usize);
    let mut data = Vec::new();
    for t in 0..inputs[0].data.len() / inputs[0].n {
        let row = |i: usize| inputs[i].row(t as f64);
        for h in 0..heads {
            let h_k = match order {
                HeadOrder::Grouped => h / (n_head_v / n_head_k) as usize,
                HeadOrder::Tiled => h % n_head_k as usize,
            };
            let (q, k) = (&row(0)[h_k * dk..][..dk], &row(1)[h_k * dk..][..dk]);
            let (v, g, beta) = (&row(2)[h * dv..][..dv], row(3)[h], row(4)[h]);
            for (i, s) in state[h * dv * dk..][..dv * dk].chunks_exact_mut(dk).enumerate() {
                s.iter_mut().for_each(|s| *s *= g.exp());
                let d = beta * (v[i] - dot(s, k));
                s.iter_mut().zip(k).for_each(|(s, k)| *s += d * k);
                data.push(f64::from(scale) * dot(s, q));
            }
        }
    }
    Mat { n: heads * dv, data }
}

/// Ids and values of the k greatest of each row, the first of equals before.
fn greatest(x: &Mat, k: usize) -> (Mat, Mat) {
    let (mut ids, mut values) = (Vec::new(), Vec::new());
    for row in x.rows() {
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
        ids.extend(order.iter().take(k).map(|i| *i as f64));
        values.extend(order.iter().take(k).map(|i| row[*i]));
    }
    (Mat { n: k, data: ids }, Mat { n: k, data: values })
}
