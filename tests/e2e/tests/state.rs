//! Models with recurrent state: as many sequences as planned, each with a state of its own, counted before it is allocated.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

use std::sync::atomic::AtomicBool;
use tegula::{Caps, DType, Error, Model, ModelOptions, Outputs, PlanOptions, Sequence, Shape};
use tegula_e2e::{golden, runtime_with};

/// The only backend that has every op.
const DEVICE: &str = "reference";

fn options(n_parallel: u32) -> ModelOptions {
    let plan = PlanOptions {
        n_ctx: Some(64),
        dtype_k: DType::F32,
        dtype_v: DType::F32,
        n_outputs: 8,
        n_parallel,
        ..PlanOptions::default()
    };
    ModelOptions { device: Some(DEVICE.into()), plan, ..ModelOptions::default() }
}

fn open(n_parallel: u32, max_buffer: Option<u64>) -> Option<Result<Model, Error>> {
    let path = golden("tiny")?.join("qwen3_5/model-f32.gguf");
    let runtime = runtime_with(Caps { max_buffer, memory_limit: None });
    Some(Model::open(&runtime, path, &options(n_parallel), &mut |_| {}))
}

fn eval(sequence: &mut Sequence, tokens: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
    let mut rows = Vec::new();
    sequence.eval(tokens, Outputs::All, &AtomicBool::new(false), |_, logits| {
        rows.push(logits.to_vec());
        Ok(())
    })?;
    Ok(rows)
}

/// Two conversations at a time must not hear each other, and one that begins anew must not remember the last.
#[test]
fn sequences_keep_their_state_apart() {
    let (Some(model), tokens) = (open(2, None), [7, 8, 9, 10, 11, 12]) else { return };
    let model = model.unwrap();
    let alone = eval(&mut model.sequence(), &tokens).unwrap();
    let (mut a, mut b) = (model.sequence(), model.sequence());
    let mut rows = Vec::new();
    for pair in tokens.chunks(2) {
        rows.extend(eval(&mut a, pair).unwrap());
        eval(&mut b, &[400, 3, 77]).unwrap();
    }
    assert_eq!(rows, alone);
    // Going back is not possible: all is forgotten, and the same tokens give the same again.
    a.truncate(4);
    assert_eq!(a.n_past(), 0);
    assert_eq!(eval(&mut a, &tokens).unwrap(), alone);
    a.truncate(6);
    assert_eq!(a.n_past(), 6);
}

/// One sequence more than planned is refused by number and the others go on; a dropped one makes room.
#[test]
fn no_more_sequences_than_planned() {
    let Some(model) = open(2, None) else { return };
    let model = model.unwrap();
    let (mut a, mut b, mut c) = (model.sequence(), model.sequence(), model.sequence());
    eval(&mut a, &[1]).unwrap();
    eval(&mut b, &[1]).unwrap();
    let error = eval(&mut c, &[1]).unwrap_err();
    assert!(matches!(error, Error::TooManySequences { n_parallel: 2 }), "{error}");
    drop(a);
    assert_eq!(eval(&mut c, &[2]).unwrap().len(), 1);
    assert_eq!(eval(&mut b, &[2]).unwrap().len(), 1);
}

/// The plan counts a record for each sequence; one that no buffer can hold is refused before anything is allocated.
#[test]
fn the_plan_counts_every_record() {
    // Three delta nets: 3 rows of 128 columns, and 4 heads of 16 x 16.
    const SEQUENCE: u64 = 3 * (3 * 128 + 4 * 16 * 16) * 4;
    for n_parallel in [1, 3] {
        let Some(model) = open(n_parallel, None) else { return };
        let report = model.unwrap().plan().report.clone();
        assert_eq!(report.context.state_bytes_per_sequence, SEQUENCE);
        let heaps = report.devices.iter().flat_map(|device| &device.heaps);
        let chunks = heaps.flat_map(|heap| &heap.chunks).filter(|chunk| chunk.usage == "state");
        let tiles: Vec<_> = chunks.flat_map(|chunk| &chunk.tiles).collect();
        assert_eq!(tiles.iter().map(|t| t.size).sum::<u64>(), SEQUENCE * u64::from(n_parallel));
        assert_eq!(tiles.len(), 6 * n_parallel as usize);
        assert_eq!(tiles[1].tensor, "state.0.gated_delta");
    }
    let Some(Err(error)) = open(1, Some(4095)) else { panic!("a record of 4096 bytes fits 4095") };
    assert!(matches!(error, Error::RowTooBig { .. } | Error::ScratchTooBig { .. }), "{error}");
}

/// "Will it fit" for models that nobody has downloaded yet: keys and values for the layers that attend, state for the others.
#[test]
fn large_models_are_planned_from_their_shapes() {
    let runtime =
        runtime_with(Caps { max_buffer: Some(4_294_959_104), memory_limit: Some(48 << 30) });
    for (name, per_token, state) in
        [("qwen3.6-35b-a3b", 20_480, 65_863_680), ("gemma-4-e2b", 18_432, 0)]
    {
        let shape = Shape::find(name).unwrap();
        let plan = PlanOptions { n_ctx: Some(65_536), ..PlanOptions::default() };
        let wish = ModelOptions { device: Some(DEVICE.into()), plan, ..ModelOptions::default() };
        let plan = Model::plan_shape(&runtime, &shape, tegula::Quant::default(), &wish).unwrap();
        let context = &plan.report.context;
        assert_eq!(context.kv_bytes_per_token, per_token, "{name}");
        assert_eq!(context.kv_bytes, per_token * 65_536, "{name}");
        assert_eq!(context.state_bytes_per_sequence, state, "{name}");
        let heaps = plan.report.devices.iter().flat_map(|device| &device.heaps);
        for chunk in heaps.flat_map(|heap| &heap.chunks).filter(|c| c.max_size.is_some()) {
            assert!(chunk.size <= 4_294_959_104, "{name}: {chunk:?}");
        }
    }
}
