//! Where bytes lie changes rounding at most: any cap from the largest row up, any cache, any ubatch, one device or two.
//!
//! Tolerance: a tile's edge changes the order in which a few numbers are summed, so f32 and f16 caches differ by rounding. In a cache of
//! 8 or 4 bits that rounding now and then tips a value over to the next code, which weighs a step of its QuantBlock. Bounds are of the greatest
//! difference of a logit, as a share of the greatest logit; text must be the same wherever the first choice leads by more than twice that.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail by panicking"
)]

mod common;

use common::{KV_TYPES, fake_runtime, magnitude, models};
use proptest::prelude::*;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use tegula::{
    Caps, DType, EncodeOptions, Error, Model, ModelOptions, Outputs, PlanOptions, Runtime,
    Sequence, Split,
};
use tegula_e2e::{BACKENDS, RandomModel, argmax, model_file, property, runtime_with};
use test_tegula_fake::{DeviceConfig, Fake, GIB, built_plugin};

const N_DECODE: usize = 6;

/// The greatest difference of a logit as a share of the greatest one.
fn tolerance(dtypes: [DType; 2]) -> f32 {
    let of = |dtype| -> f32 {
        match dtype {
            DType::F32 => 1e-5,
            DType::F16 => 2e-3,
            DType::BF16 => 1e-2,
            DType::Q8_0 => 1e-2,
            _ => 1e-1,
        }
    };
    of(dtypes[0]).max(of(dtypes[1]))
}

/// Where a model runs.
#[derive(Debug, Clone)]
enum Place {
    /// A backend as it is.
    Backend(&'static str),
    /// The fake around one, with one device or layers split over two.
    Fake { inner: &'static str, n_devices: usize },
    /// The fake with two devices, some weights pinned to the second.
    Pinned { inner: &'static str, rule: &'static str },
}

#[derive(Debug, Clone)]
struct Case {
    model: RandomModel,
    place: Place,
    /// Where between the least cap and the largest tensor: 0 to 1, or none.
    cap: Option<f64>,
    mmap: bool,
    dtypes: [DType; 2],
    n_prompt: u32,
    n_ctx_more: u32,
    n_ubatch: u32,
}

fn cases() -> impl Strategy<Value = Case> {
    let place = prop_oneof![
        2 => prop::sample::select(BACKENDS.to_vec()).prop_map(Place::Backend),
        2 => (prop::sample::select(BACKENDS.to_vec()), 1usize..=2)
            .prop_map(|(inner, n_devices)| Place::Fake { inner, n_devices }),
        1 => (
            prop::sample::select(BACKENDS.to_vec()),
            prop::sample::select(vec![
                r"fake|blk\.0\.ffn_=fake:1",
                r"fake|blk\..*\.attn_(q|output)=fake:1",
                r"fake|output|token_embd=fake:1",
            ]),
        )
            .prop_map(|(inner, rule)| Place::Pinned { inner, rule: &rule[5..] }),
    ];
    let wishes = (
        prop::option::weighted(0.85, 0.0..1.0f64),
        any::<bool>(),
        prop::sample::select(KV_TYPES.to_vec()),
        prop::sample::select(KV_TYPES.to_vec()),
        magnitude(8.5),
        magnitude(9.0),
        prop::sample::select(vec![1u32, 3, 16, 64, 512]),
    );
    (models(true), place, wishes).prop_map(|(model, place, wishes)| {
        let (cap, mmap, k, v, n_prompt, n_ctx_more, n_ubatch) = wishes;
        Case { model, place, cap, mmap, dtypes: [k, v], n_prompt, n_ctx_more, n_ubatch }
    })
}

/// The last row of logits.
fn eval(sequence: &mut Sequence, tokens: &[u32]) -> Vec<f32> {
    let mut last = Vec::new();
    let go_on = AtomicBool::new(false);
    let done = sequence.eval(tokens, Outputs::Last, &go_on, |_, row| {
        last = row.to_vec();
        Ok(())
    });
    done.unwrap();
    last
}

/// Logits after a prompt and after each token of `said`; without `said`, the greedy tokens are taken.
fn rows(
    model: &Model,
    prompt: &[u32],
    said: Option<&[u32]>,
    n: usize,
) -> (Vec<Vec<f32>>, Vec<u32>) {
    let mut sequence = model.sequence();
    let mut rows = vec![eval(&mut sequence, prompt)];
    let mut tokens = vec![argmax(&rows[0])];
    while tokens.len() < n {
        let at = tokens.len() - 1;
        let next = said.map_or(tokens[at], |said| said[at]);
        let row = eval(&mut sequence, &[next]);
        tokens.push(argmax(&row));
        rows.push(row);
    }
    (rows, tokens)
}

/// The same words, and logits within the tolerance.
fn compare(plain: (&[Vec<f32>], &[u32]), tiled: (&[Vec<f32>], &[u32]), tolerance: f32) -> f32 {
    let mut worst = 0f32;
    for (at, (a, b)) in plain.0.iter().zip(tiled.0).enumerate() {
        let greatest = a.iter().fold(0f32, |max, x| max.max(x.abs()));
        let differs = a.iter().zip(b).fold(0f32, |max, (x, y)| max.max((x - y).abs()));
        worst = worst.max(differs / greatest);
        assert!(differs <= tolerance * greatest, "token {at}: {differs} of {greatest}");
        let first = a[plain.1[at] as usize];
        let others = a.iter().enumerate().filter(|(id, _)| *id != plain.1[at] as usize);
        let second = others.fold(f32::NEG_INFINITY, |max, (_, x)| max.max(*x));
        if first - second > 2.0 * tolerance * greatest {
            assert_eq!(plain.1[at], tiled.1[at], "token {at}");
        }
    }
    worst
}

fn plan(case: &Case) -> PlanOptions {
    let n_ctx = case.n_prompt + N_DECODE as u32 + case.n_ctx_more;
    PlanOptions {
        n_ctx: Some(n_ctx),
        dtype_k: case.dtypes[0],
        dtype_v: case.dtypes[1],
        n_ubatch: case.n_ubatch,
        mmap: case.mmap,
        ..PlanOptions::default()
    }
}

/// The runtime and options of a place under a cap.
fn prepare(case: &Case, folder: &Path, cap: Option<u64>) -> (Runtime, ModelOptions) {
    let mut options = ModelOptions { plan: plan(case), ..ModelOptions::default() };
    let (inner, n_devices) = match case.place {
        Place::Backend(name) => {
            options.device = Some(name.into());
            let runtime = runtime_with(Caps { max_buffer: cap, memory_limit: None });
            return (runtime, options);
        }
        Place::Fake { inner, n_devices } => (inner, n_devices),
        Place::Pinned { inner, rule } => {
            options.plan.place = vec![rule.parse().unwrap()];
            (inner, 2)
        }
    };
    if n_devices > 1 && options.plan.place.is_empty() {
        options.plan.split = Split::Proportions(vec![1.0, 1.0]);
    }
    let ids = ["fake:0", "fake:1"];
    options.device = Some(ids[..n_devices].join(","));
    let plugin = built_plugin(&format!("libtegula_{inner}.so")).unwrap();
    // One card, one device in the host's memory: uploads on the first, the mapped file on the second.
    let cards = [DeviceConfig::gpu("A", GIB), DeviceConfig::host("B", GIB)];
    let cards = cards.into_iter().take(n_devices).map(|card| match cap {
        Some(bytes) => card.max_size(bytes),
        None => card,
    });
    let fake = cards.fold(Fake::new(), Fake::device).inner(&plugin);
    let fake = fake.install(folder).unwrap();
    (fake_runtime(&[&fake], Caps::default()), options)
}

/// The least power of two, times the largest row, that a plan can be made under; every cap below is refused by a row or a scratch value.
fn least_cap(case: &Case, folder: &Path, path: &Path) -> u64 {
    let mut cap = case.model.rows().values().map(|(bytes, _)| *bytes).max().unwrap();
    loop {
        let (runtime, options) = prepare(case, folder, Some(cap));
        match Model::plan_only(&runtime, path, &options) {
            Ok(_) => return cap,
            Err(Error::RowTooBig { asked, limit, .. }) => {
                assert!(asked > limit);
                cap = cap.max(asked);
            }
            Err(Error::ScratchTooBig { .. }) => {}
            Err(other) => panic!("a cap of {cap}: {other}"),
        }
        cap *= 2;
        assert!(cap < 1 << 24, "no cap is enough");
    }
}

fn check(case: &Case, folder: &Path) -> f32 {
    let path = case.model.write(folder);
    let prompt: Vec<u32> =
        (0..case.n_prompt).map(|i| (i * i + 7 * i) % case.model.n_vocab).collect();
    // The first run: the same backend, whole, one device.
    let inner = match case.place {
        Place::Backend(name)
        | Place::Fake { inner: name, .. }
        | Place::Pinned { inner: name, .. } => name,
    };
    let whole = Case { place: Place::Backend(inner), ..case.clone() };
    let (runtime, options) = prepare(&whole, folder, None);
    let model = Model::open(&runtime, &path, &options, &mut |_| {}).unwrap();
    let plain = rows(&model, &prompt, None, N_DECODE);
    drop((model, runtime));
    let cap = case.cap.map(|share| {
        let least = least_cap(case, folder, &path) as f64;
        let most = (case.model.tensor_bytes() as f64).max(2.0 * least);
        (least * (most / least).powf(share)) as u64
    });
    let (runtime, options) = prepare(case, folder, cap);
    let model = Model::open(&runtime, &path, &options, &mut |_| {});
    let model = model.unwrap_or_else(|e| panic!("cap {cap:?}: {e}"));
    let report = &model.plan().report;
    let chunks = report.devices.iter().flat_map(|device| &device.heaps).flat_map(|h| &h.chunks);
    for chunk in chunks.filter(|chunk| chunk.max_size.is_some()) {
        assert!(cap.is_none_or(|cap| chunk.size <= cap), "{} of {}", chunk.usage, chunk.size);
    }
    let tiled = rows(&model, &prompt, Some(&plain.1), N_DECODE);
    compare((&plain.0, &plain.1), (&tiled.0, &tiled.1), tolerance(case.dtypes))
}

/// Random models under random caps.
#[test]
fn tiling_changes_rounding_at_most() {
    let folder = tempfile::tempdir().unwrap();
    let worst = std::cell::RefCell::new(std::collections::BTreeMap::new());
    property("tiling_changes_rounding_at_most", [60, 1500], cases(), |case| {
        let differs = check(&case, folder.path());
        let mut worst = worst.borrow_mut();
        let of_type = worst.entry(tolerance(case.dtypes).to_string()).or_insert(0f32);
        *of_type = of_type.max(differs);
    });
    println!("greatest differences by tolerance: {:?}", worst.borrow());
}

/// The same with a real model, whose embedding is larger than most caps.
#[test]
fn tiling_of_a_real_model() {
    let Some(path) = model_file("SmolLM2-135M-Instruct.Q4_1.gguf") else { return };
    let strategy = (
        // From what one thread works in on this backend, 304 KiB, to more than the largest tensor.
        18.4..26.0f64,
        prop::sample::select(KV_TYPES.to_vec()),
        prop::sample::select(KV_TYPES.to_vec()),
        prop::sample::select(vec![64u32, 200, 600]),
        prop::sample::select(vec![16u32, 512]),
    );
    property("tiling_of_a_real_model", [2, 24], strategy, |(power, k, v, n_ctx, n_ubatch)| {
        let plan = PlanOptions {
            n_ctx: Some(n_ctx),
            dtype_k: k,
            dtype_v: v,
            n_ubatch,
            ..PlanOptions::default()
        };
        let run = |max_buffer: Option<u64>, said: Option<&[u32]>| {
            let runtime = runtime_with(Caps { max_buffer, memory_limit: None });
            let options = ModelOptions {
                device: Some("cpu".into()),
                plan: plan.clone(),
                ..ModelOptions::default()
            };
            let model = Model::open(&runtime, &path, &options, &mut |_| {}).unwrap();
            let how = EncodeOptions { add_special: true, parse_special: true };
            let prompt = model.tokenizer().encode("The lighthouse keeper's daughter said", how);
            rows(&model, &prompt, said, 12)
        };
        let plain = run(None, None);
        let tiled = run(Some(power.exp2() as u64), Some(&plain.1));
        let differs = compare((&plain.0, &plain.1), (&tiled.0, &tiled.1), tolerance([k, v]));
        println!("2^{power:.1} bytes, {} {}: {differs:.1e}", k.name(), v.name());
    });
}
