//! Every op against values that were computed by hand, through the boundary. If one of these is wrong, every backend is
//! measured against a wrong oracle.

#![expect(unsafe_code, reason = "calls the boundary's tables")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, its helpers too")]

#[expect(dead_code, reason = "each test crate uses a part of it")]
mod common;

use common::{Call, Rig, Seq, Session, Setup, f32_bytes, f32s, i32_bytes, noise, steps, whole};
use std::f32::consts::LN_2;
use tegula_sdk::program::{
    Activation, DType, Dim, KvLayer, Norm, ProgramBuilder, Rope, RopeStyle, ValueId,
};
use tegula_sdk::quant::dequantize;

enum Data {
    F(&'static [f32]),
    I(&'static [i32]),
}
use Data::{F, I};

impl Data {
    fn bytes(&self) -> Vec<u8> {
        match self {
            F(values) => f32_bytes(values),
            I(values) => i32_bytes(values),
        }
    }
}

/// One op over two tokens.
struct Case {
    what: &'static str,
    /// Elements of a row; 0 for a vector.
    inputs: Vec<(u64, Data)>,
    /// Dimensions and elements.
    weights: Vec<(&'static [u64], Vec<f32>)>,
    op: fn(&mut ProgramBuilder, &[ValueId], &[ValueId]) -> Vec<ValueId>,
    expected: Vec<Data>,
}

fn check(case: &Case) {
    let mut b = ProgramBuilder::new(case.what);
    let inputs = case.inputs.iter().map(|(row, data)| match data {
        F(_) => b.input("x", DType::F32, &[Dim::NTokens, Dim::Fixed(*row)]),
        I(_) => b.input("i", DType::I32, &[Dim::NTokens]),
    });
    let inputs: Vec<_> = inputs.collect();
    let names = ["w0", "w1"];
    let weights =
        names.iter().zip(&case.weights).map(|(name, (dims, _))| b.weight(name, DType::F32, dims));
    let weights: Vec<_> = weights.collect();
    for output in (case.op)(&mut b, &inputs, &weights) {
        b.output("y", output);
    }
    let program = b.finish().unwrap();
    let bytes: Vec<_> =
        names.iter().zip(&case.weights).map(|(name, (_, w))| (*name, f32_bytes(w))).collect();
    let rig = Rig::new();
    let setup = Setup {
        program: &program,
        weights: &bytes,
        split: &whole,
        kv: &[],
        n_tokens_max: 2,
        n_ctx_max: 2,
    };
    let mut session = Session::new(&rig, &setup).unwrap();
    for on_device in [false, true] {
        let got = session.run(&Call {
            n_tokens: 2,
            n_outputs: 0,
            inputs: case.inputs.iter().map(|(_, data)| data.bytes()).collect(),
            seqs: vec![],
            outputs: case.expected.iter().map(|data| data.bytes().len()).collect(),
            on_device,
        });
        for (got, expected) in got.unwrap().iter().zip(&case.expected) {
            match expected {
                I(_) => assert_eq!(*got, expected.bytes(), "{}", case.what),
                F(expected) => close(case.what, &f32s(got), expected, 3e-7),
            }
        }
    }
}

fn close(what: &str, got: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let near = (got - expected).abs() <= tolerance * expected.abs().max(1.0);
        assert!(near || got == expected, "{what}: element {i} is {got}, not {expected}");
    }
}

const NAN: f32 = f32::NAN;

#[test]
fn rows_and_matrices() {
    check(&Case {
        what: "embed",
        inputs: vec![(0, I(&[2, 0]))],
        weights: vec![(&[3, 2], vec![1., 2., 3., 4., 5., 6.])],
        op: |b, x, w| vec![b.embed(x[0], w[0])],
        expected: vec![F(&[5., 6., 1., 2.])],
    });
    check(&Case {
        what: "matmul with bias",
        inputs: vec![(2, F(&[1., 2., 3., 4.]))],
        weights: vec![(&[3, 2], vec![1., 0., 0., 1., 1., 1.]), (&[3], vec![10., 20., 30.])],
        op: |b, x, w| vec![b.matmul(x[0], w[0], Some(w[1]))],
        expected: vec![F(&[11., 22., 33., 13., 24., 37.])],
    });
    check(&Case {
        what: "slice, and an output that two names share",
        inputs: vec![(3, F(&[1., 2., 3., 4., 5., 6.]))],
        weights: vec![],
        op: |b, x, _| {
            let y = b.slice(x[0], 1, 2);
            vec![y, y]
        },
        expected: vec![F(&[2., 3., 5., 6.]), F(&[2., 3., 5., 6.])],
    });
    check(&Case {
        what: "concat",
        inputs: vec![(1, F(&[1., 2.])), (2, F(&[3., 4., 5., 6.]))],
        weights: vec![],
        op: |b, x, _| vec![b.concat(x[0], x[1])],
        expected: vec![F(&[1., 3., 4., 2., 5., 6.])],
    });
    check(&Case {
        what: "gather_rows",
        inputs: vec![(2, F(&[1., 2., 3., 4.])), (0, I(&[1, 1]))],
        weights: vec![],
        op: |b, x, _| vec![b.gather_rows(x[0], x[1])],
        expected: vec![F(&[3., 4., 3., 4.])],
    });
    check(&Case {
        what: "argmax: the first of equals, never a NaN",
        inputs: vec![(4, F(&[1., 7., 7., 3., NAN, -9., -8., NAN]))],
        weights: vec![],
        op: |b, x, _| vec![b.argmax(x[0])],
        expected: vec![I(&[1, 2])],
    });
    check(&Case {
        what: "top_k: falling, the first of equals before",
        inputs: vec![(4, F(&[1., 7., 9., 7., NAN, -0.0, 0.0, -1.]))],
        weights: vec![],
        op: |b, x, _| {
            let (ids, values) = b.top_k(x[0], 3);
            vec![ids, values]
        },
        expected: vec![I(&[2, 1, 3, 1, 2, 3]), F(&[9., 7., 7., 0., 0., -1.])],
    });
}

#[test]
fn norms() {
    check(&Case {
        what: "rms_norm of groups",
        inputs: vec![(4, F(&[3., 4., 1., 1., 0., 0., -2., 2.]))],
        weights: vec![(&[2], vec![2., 0.5])],
        op: |b, x, w| vec![b.rms_norm(x[0], Some(w[0]), Norm { eps: 1e-30, n: 2 })],
        expected: vec![F(&[1.6970563, 0.56568545, 2., 0.5, 0., 0., -2., 0.5])],
    });
    check(&Case {
        what: "rms_norm without weight; eps counts",
        inputs: vec![(1, F(&[1., 3.]))],
        weights: vec![],
        op: |b, x, _| vec![b.rms_norm(x[0], None, Norm { eps: 3.0, n: 1 })],
        expected: vec![F(&[0.5, 0.8660254])],
    });
    check(&Case {
        what: "layer_norm",
        inputs: vec![(2, F(&[1., 3., 10., 10.]))],
        weights: vec![(&[2], vec![2., 3.]), (&[2], vec![1., 1.])],
        op: |b, x, w| vec![b.layer_norm(x[0], w[0], Some(w[1]), Norm { eps: 1e-30, n: 2 })],
        expected: vec![F(&[-1., 4., 1., 1.])],
    });
}

#[test]
fn elementwise() {
    check(&Case {
        what: "add a row",
        inputs: vec![(2, F(&[1., 2., 3., 4.]))],
        weights: vec![(&[2], vec![10., 20.])],
        op: |b, x, w| vec![b.add(x[0], w[0])],
        expected: vec![F(&[11., 22., 13., 24.])],
    });
    check(&Case {
        what: "multiply, then scale",
        inputs: vec![(2, F(&[1., 2., 3., 4.])), (2, F(&[2., 3., 4., 5.]))],
        weights: vec![],
        op: |b, x, _| {
            let product = b.mul(x[0], x[1]);
            vec![b.scale(product, -0.5)]
        },
        expected: vec![F(&[-1., -3., -6., -10.])],
    });
    check(&Case {
        what: "softcap",
        inputs: vec![(2, F(&[2., -2., 0., 1e30]))],
        weights: vec![],
        op: |b, x, _| vec![b.softcap(x[0], 2.0)],
        expected: vec![F(&[1.5231884, -1.5231884, 0., 2.])],
    });
    check(&Case {
        what: "glu",
        inputs: vec![(2, F(&[-1., 2., 3., 0.])), (2, F(&[3., 4., -1., 5.]))],
        weights: vec![],
        op: |b, x, _| vec![b.glu(Activation::Relu, x[0], x[1])],
        expected: vec![F(&[0., 8., -3., 0.])],
    });
    const X: &[f32] = &[1., -1., 0., -100.];
    macro_rules! unary {
        ($($activation:ident => $expected:expr;)*) => {$(
            check(&Case {
                what: stringify!($activation),
                inputs: vec![(2, F(X))],
                weights: vec![],
                op: |b, x, _| vec![b.unary(Activation::$activation, x[0])],
                expected: vec![F(&$expected)],
            });
        )*};
    }
    unary! {
        Silu => [0.7310586, -0.26894143, 0., 0.];
        GeluTanh => [0.841_192, -0.158_808, 0., 0.];
        GeluErf => [0.8413447, -0.1586553, 0., 0.];
        Relu => [1., 0., 0., 0.];
        Sigmoid => [0.7310586, 0.26894143, 0.5, 0.];
        Tanh => [0.7615942, -0.7615942, 0., -1.];
    }
}

/// Heads of 4 with base 4: the pairs turn by 1 and 0.5 per position.
fn base_4(style: RopeStyle) -> Rope {
    Rope::new(style, 4, 4, 4.0)
}

#[test]
fn rope() {
    const X: &[f32] = &[1., 0., 0., 1., 1., 0., 0., 1.];
    check(&Case {
        what: "neox",
        inputs: vec![(4, F(X)), (0, I(&[1, 0]))],
        weights: vec![],
        op: |b, x, _| vec![b.rope(x[0], x[1], None, base_4(RopeStyle::Neox))],
        expected: vec![F(&[0.5403023, -0.47942554, 0.84147098, 0.87758256, 1., 0., 0., 1.])],
    });
    check(&Case {
        what: "adjacent, at half the frequency and twice the magnitude",
        inputs: vec![(4, F(X)), (0, I(&[2, 0]))],
        weights: vec![],
        op: |b, x, _| {
            let rope = Rope { freq_scale: 0.5, attn_factor: 2.0, ..base_4(RopeStyle::Adjacent) };
            vec![b.rope(x[0], x[1], None, rope)]
        },
        expected: vec![F(&[1.0806046, 1.682_942, -0.958_851_1, 1.7551651, 2., 0., 0., 2.])],
    });
    check(&Case {
        what: "part of the head, with factors",
        inputs: vec![(4, F(&[1., 0., 5., 6., 1., 0., 5., 6.])), (0, I(&[1, 2]))],
        weights: vec![(&[1], vec![2.])],
        op: |b, x, w| {
            let rope = Rope { n_rot: 2, ..base_4(RopeStyle::Neox) };
            vec![b.rope(x[0], x[1], Some(w[0]), rope)]
        },
        expected: vec![F(&[0.87758256, 0.47942554, 5., 6., 0.5403023, 0.84147098, 5., 6.])],
    });
    // With 100 tokens: pair(16) = -0.008, so low = 0; pair(4) = 1.99, so high = 2. Pair 0 keeps its frequency 1, pair 1
    // is mixed half and half of 0.5 / 4 and 0.5: 0.3125. The magnitude is what `attn_factor` says and no more.
    check(&Case {
        what: "YaRN",
        inputs: vec![(4, F(X)), (0, I(&[1, 0]))],
        weights: vec![],
        op: |b, x, _| {
            let rope = Rope {
                n_ctx_orig: 100,
                freq_scale: 0.25,
                ext_factor: 1.0,
                beta_fast: 16.0,
                beta_slow: 4.0,
                ..base_4(RopeStyle::Adjacent)
            };
            vec![b.rope(x[0], x[1], None, rope)]
        },
        expected: vec![F(&[0.5403023, 0.84147098, -0.30743851, 0.95156795, 1., 0., 0., 1.])],
    });
}

struct AttentionCase {
    what: &'static str,
    /// Query heads, two elements each, for token 0 and token 1.
    q: [f32; 8],
    sinks: Option<[f32; 2]>,
    softcap: f32,
    window: u32,
    expected: [f32; 8],
}

/// Two tokens, two query heads over one head of keys (1, 0) and (0, 0), values (3, 0) and (0, 3). With a first query element
/// of ln 2 the second token weighs its values 2 to 1.
#[test]
fn attention() {
    const Q: [f32; 8] = [0., 0., LN_2, 0., 0., 0., LN_2, 0.];
    let cases = [
        AttentionCase {
            what: "plain",
            q: Q,
            sinks: None,
            softcap: 0.0,
            window: 0,
            expected: [3., 0., 3., 0., 1.5, 1.5, 2., 1.],
        },
        AttentionCase {
            what: "a window of one",
            q: Q,
            sinks: None,
            softcap: 0.0,
            window: 1,
            expected: [3., 0., 3., 0., 0., 3., 0., 3.],
        },
        AttentionCase {
            what: "a window of two",
            q: Q,
            sinks: None,
            softcap: 0.0,
            window: 2,
            expected: [3., 0., 3., 0., 1.5, 1.5, 2., 1.],
        },
        AttentionCase {
            what: "softcap 1: scores become their tanh",
            q: [0., 0., 0.853_988, 0., 0., 0., 0.853_988, 0.],
            sinks: None,
            softcap: 1.0,
            window: 0,
            expected: [3., 0., 3., 0., 1.5, 1.5, 2., 1.],
        },
        AttentionCase {
            what: "sinks of weight 1 and 2, in the sum and not in the values",
            q: Q,
            sinks: Some([0., LN_2]),
            softcap: 0.0,
            window: 0,
            expected: [1.5, 0., 1.5, 0., 1., 1., 1.2, 0.6],
        },
    ];
    for case in cases {
        let mut b = ProgramBuilder::new(case.what);
        let q = b.input("q", DType::F32, &[Dim::NTokens, Dim::Fixed(4)]);
        let k = b.input("k", DType::F32, &[Dim::NTokens, Dim::Fixed(2)]);
        let v = b.input("v", DType::F32, &[Dim::NTokens, Dim::Fixed(2)]);
        let kv = b.kv_layer(kv_layer(1, 2, DType::F32));
        b.kv_store(kv, k, v);
        let sinks = case.sinks.map(|_| b.weight("sinks", DType::F32, &[2]));
        let y = b.attention(kv, q, sinks, 2, 1.0, case.softcap, case.window);
        b.output("y", y);
        let program = b.finish().unwrap();
        let weights: Vec<_> = case.sinks.iter().map(|sinks| ("sinks", f32_bytes(sinks))).collect();
        let rig = Rig::new();
        let setup = Setup {
            program: &program,
            weights: &weights,
            split: &whole,
            kv: &[(2, vec![1])],
            n_tokens_max: 2,
            n_ctx_max: 2,
        };
        let got = Session::new(&rig, &setup).unwrap().run(&Call {
            n_tokens: 2,
            n_outputs: 0,
            inputs: vec![
                f32_bytes(&case.q),
                f32_bytes(&[1., 0., 0., 0.]),
                f32_bytes(&[3., 0., 0., 3.]),
            ],
            seqs: vec![Seq { n_tokens: 2, first_pos: 0, tables: vec![(vec![0], 0)] }],
            outputs: vec![32],
            on_device: false,
        });
        close(case.what, &f32s(&got.unwrap()[0]), &case.expected, 1e-6);
    }
}

fn kv_layer(n_head_kv: u32, head_dim: u32, dtype: DType) -> KvLayer {
    KvLayer {
        group: 0,
        index: 0,
        n_head_kv,
        head_dim_k: head_dim,
        head_dim_v: head_dim,
        dtype_k: dtype,
        dtype_v: dtype,
    }
}

/// A model whose weights are cut elsewhere must say the same, to the bit, in every type that a file can hold.
#[test]
fn weights_of_every_type_give_the_same_however_they_are_tiled() {
    const N_ROWS: u64 = 11;
    for dtype in DType::ALL {
        let n_in = 2 * dtype.block_len().max(5);
        let row_bytes = usize::try_from(dtype.row_bytes(n_in as u64).unwrap()).unwrap();
        // Bytes below 64 make finite scales in every type.
        let bytes: Vec<u8> =
            (0..row_bytes * 11).map(|i| u8::try_from(i * i % 61 + i % 3).unwrap()).collect();
        let x = noise(1, 3 * n_in);
        let mut b = ProgramBuilder::new(dtype.name());
        let input = b.input("x", DType::F32, &[Dim::NTokens, Dim::Fixed(n_in as u64)]);
        let ids = b.input("ids", DType::I32, &[Dim::NTokens]);
        let w = b.weight("w", dtype, &[N_ROWS, n_in as u64]);
        let y = b.matmul(input, w, None);
        let rows = b.embed(ids, w);
        b.output("y", y);
        b.output("rows", rows);
        let program = b.finish().unwrap();
        let weights = [("w", bytes.clone())];
        let rig = Rig::new();
        let run = |split: common::Split<'_>| {
            let setup = Setup {
                program: &program,
                weights: &weights,
                split,
                kv: &[],
                n_tokens_max: 3,
                n_ctx_max: 3,
            };
            let outputs = vec![3 * 11 * 4, 3 * n_in * 4];
            let inputs = vec![f32_bytes(&x), i32_bytes(&[10, 0, 5])];
            let call =
                Call { n_tokens: 3, n_outputs: 0, inputs, seqs: vec![], outputs, on_device: false };
            Session::new(&rig, &setup).unwrap().run(&call).unwrap()
        };
        let one = run(&whole);
        for step in [1, 3, 5, 10] {
            assert!(run(&steps(step)) == one, "{dtype} in tiles of {step} rows");
        }
        let mut decoded = vec![0.0; 11 * n_in];
        for (raw, row) in bytes.chunks(row_bytes).zip(decoded.chunks_mut(n_in)) {
            dequantize(dtype, raw, row).unwrap();
        }
        let expected: Vec<f32> =
            [10, 0, 5].iter().flat_map(|r| &decoded[r * n_in..][..n_in]).copied().collect();
        assert_eq!(one[1], f32_bytes(&expected), "{dtype}");
        for (i, got) in f32s(&one[0]).iter().enumerate() {
            let (x, w) = (&x[i / 11 * n_in..][..n_in], &decoded[i % 11 * n_in..][..n_in]);
            let terms = || x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
            let size = terms().map(f64::abs).sum::<f64>();
            assert!(size.is_finite(), "{dtype}");
            assert!((f64::from(*got) - terms().sum::<f64>()).abs() <= size * 1e-7, "{dtype}");
        }
    }
}

/// A conversation must go on the same wherever its keys and values lie, in every type of the cache.
#[test]
fn the_cache_gives_the_same_however_it_is_cut() {
    const HEADS: usize = 2;
    const DIM: usize = 32;
    let mut exact = Vec::new();
    // Largest errors against f32 for values within 1: half a step of the type, with room for the softmax.
    for (dtype, tolerance) in [
        (DType::F32, 0.0),
        (DType::F16, 1e-3),
        (DType::BF16, 8e-3),
        (DType::Q8_0, 8e-3),
        (DType::Q4_0, 0.15),
    ] {
        let mut b = ProgramBuilder::new("cache");
        let n = Dim::Fixed((HEADS * DIM) as u64);
        let q = b.input("q", DType::F32, &[Dim::NTokens, n]);
        let k = b.input("k", DType::F32, &[Dim::NTokens, n]);
        let v = b.input("v", DType::F32, &[Dim::NTokens, n]);
        let kv = b.kv_layer(kv_layer(2, 32, dtype));
        b.kv_store(kv, k, v);
        let y = b.attention(kv, q, None, 2, 0.2, 0.0, 0);
        b.output("y", y);
        let program = b.finish().unwrap();
        let rig = Rig::new();
        // Seven tokens of one sequence and two of another, then one more of each.
        let run = |segments: Vec<u32>, block_len: u32, first: Vec<u32>, second: Vec<u32>| {
            let setup = Setup {
                program: &program,
                weights: &[],
                split: &whole,
                kv: &[(block_len, segments)],
                n_tokens_max: 9,
                n_ctx_max: 8,
            };
            let mut session = Session::new(&rig, &setup).unwrap();
            let mut out = Vec::new();
            for (seed, tokens, pos) in [(1, [7, 2], [0, 0]), (2, [1, 1], [7, 2])] {
                let n = (tokens[0] + tokens[1]) as usize * HEADS * DIM;
                let seq = |i: usize, blocks: &Vec<u32>| Seq {
                    n_tokens: tokens[i],
                    first_pos: pos[i],
                    tables: vec![(blocks.clone(), 0)],
                };
                let outputs = session.run(&Call {
                    n_tokens: tokens[0] + tokens[1],
                    n_outputs: 0,
                    inputs: (0..3).map(|i| f32_bytes(&noise(seed * 10 + i, n))).collect(),
                    seqs: vec![seq(0, &first), seq(1, &second)],
                    outputs: vec![n * 4],
                    on_device: false,
                });
                out.extend(f32s(&outputs.unwrap()[0]));
            }
            out
        };
        let one = run(vec![4], 4, vec![0, 1], vec![2]);
        for (segments, block_len, first, second) in [
            (vec![1, 1, 1], 4, vec![0, 1], vec![2]),
            (vec![2, 1], 4, vec![2, 0], vec![1]),
            (vec![1, 3], 8, vec![3], vec![0]),
            (vec![5, 1, 6], 1, vec![11, 3, 5, 4, 0, 1, 2, 10], vec![9, 6, 7]),
        ] {
            let name = format!("{dtype} in segments {segments:?} of blocks of {block_len}");
            assert!(run(segments, block_len, first, second) == one, "{name}");
        }
        if dtype == DType::F32 {
            exact.clone_from(&one);
        }
        close(dtype.name(), &one, &exact, tolerance);
    }
}
