//! A model on a device that fails, through the runtime: a typed error each time, nothing left behind, and the next attempt works.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on fails"
)]

mod common;

use common::{assert_clean, model_file};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use tegula::{
    Error, Model, ModelOptions, Outputs, PlanOptions, RegistryOptions, Runtime, RuntimeOptions,
    Sequence,
};
use tegula_plugin::{DeviceError, DeviceErrorKind as Kind};
use test_tegula_fake::*;

const N_PROMPT: u32 = 252;
const N_DECODE: usize = 8;

fn runtime(fake: &Installed) -> Runtime {
    let explicit = vec![fake.plugin.clone()];
    let registry = RegistryOptions { explicit, standard: false };
    Runtime::new(&RuntimeOptions { registry, ..Default::default() })
}

fn options() -> ModelOptions {
    ModelOptions {
        device: Some("fake:0".into()),
        plan: PlanOptions { n_ctx: Some(1024), n_ubatch: 64, ..Default::default() },
        ..Default::default()
    }
}

fn open(runtime: &Runtime, file: &Path) -> Result<Model, Error> {
    Model::open(runtime, file, &options(), &mut |_| {})
}

/// Evaluates and gives the last row of logits.
fn eval(sequence: &mut Sequence, tokens: &[u32]) -> Result<Vec<f32>, Error> {
    let mut last = Vec::new();
    let go_on = AtomicBool::new(false);
    sequence.eval(tokens, Outputs::Last, &go_on, |_, row| {
        last = row.to_vec();
        Ok(())
    })?;
    Ok(last)
}

fn prompt() -> Vec<u32> {
    (0..N_PROMPT).map(|i| 3 + i * 37 % 500).collect()
}

/// A prompt and some decoding; what failed is tried once more on the same sequence. Gives all rows of logits, and the error that was met.
fn decode(model: &Model) -> (Vec<Vec<f32>>, Option<Error>) {
    let mut sequence = model.sequence();
    let (mut rows, mut met) = (Vec::new(), None);
    let mut next = prompt();
    for _ in 0..=N_DECODE {
        // A prompt is evaluated in pieces; those before the one that failed are kept.
        let before = sequence.n_past();
        let row = eval(&mut sequence, &next).or_else(|error| {
            let done = (sequence.n_past() - before) as usize;
            assert!(met.replace(error).is_none(), "it failed twice");
            eval(&mut sequence, &next[done..])
        });
        let row = row.unwrap_or_else(|e| panic!("after {met:?}: {e}"));
        let best = (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
        next = vec![best as u32];
        rows.push(row);
    }
    (rows, met)
}

/// The device's failure behind an error.
fn device_error(error: &Error) -> &DeviceError {
    match error {
        Error::Device(own) => own,
        Error::Alloc { source, .. } => source,
        other => panic!("no failure of a device: {other}"),
    }
}

fn gpu() -> DeviceConfig {
    DeviceConfig::gpu("A", 64 * MIB)
}

/// All rows of logits on a device without faults, and what it took.
fn plain(device: DeviceConfig, file: &Path) -> (Vec<Vec<f32>>, Stats) {
    let dir = tempfile::tempdir().unwrap();
    let fake = Fake::new().device(device).install(dir.path()).unwrap();
    let (rows, met) = decode(&open(&runtime(&fake), file).unwrap());
    assert!(met.is_none(), "{met:?}");
    (rows, assert_clean(&fake, "a device without faults"))
}

/// Loads and decodes with one fault. A load that fails is tried again on the same runtime. Gives the error, if the fault was met at all.
fn survive(device: &DeviceConfig, fault: &Fault, file: &Path, rows: &[Vec<f32>]) -> Option<Error> {
    let dir = tempfile::tempdir().unwrap();
    let what = format!("{fault:?}");
    let fake = Fake::new().device(device.clone()).fault(fault.clone());
    let fake = fake.install(dir.path()).unwrap();
    let runtime = runtime(&fake);
    let (model, mut met) = match open(&runtime, file) {
        Ok(model) => (model, None),
        Err(error) => {
            let held = fake.stats().map(|stats| stats.devices[0].clone()).unwrap_or_default();
            let left = (held.buffers, held.executables, held.queues, held.open);
            assert_eq!(left, (0, 0, 0, 0), "{what}: a failed load holds on to the device");
            (open(&runtime, file).unwrap_or_else(|e| panic!("{what}: again: {e}")), Some(error))
        }
    };
    let (again, error) = decode(&model);
    assert_eq!(again, rows, "{what}: other logits");
    met = met.or(error);
    drop((model, runtime));
    assert_clean(&fake, &what);
    met
}

/// Every allocation of a load and of decoding fails once: an error with its kind, nothing is lost, and the same process goes on, in the same
/// conversation if the model was loaded.
#[test]
fn every_allocation_fails_once() {
    let Some(file) = model_file() else { return };
    let device = gpu().max_size(64 * KIB);
    let (rows, stats) = plain(device.clone(), &file);
    let n = stats.devices[0].alloc_calls;
    assert!(n > 15, "{stats:?}");
    for k in 1..=n {
        let fault = Fault::new(Point::Alloc, FaultKind::error("out_of_memory")).nth(k);
        let met = survive(&device, &fault, &file, &rows);
        let met = met.unwrap_or_else(|| panic!("allocation {k} of {n} was not asked for"));
        let e = device_error(&met);
        assert_eq!((e.kind, e.operation), (Kind::OutOfMemory, "buffer_alloc"), "{k}");
    }
    let beyond = Fault::new(Point::Alloc, FaultKind::error("out_of_memory")).nth(n + 1);
    assert!(survive(&device, &beyond, &file, &rows).is_none());
}

/// The same for everything else that a load or a run calls, at its first calls and some later ones.
#[test]
fn every_call_fails_once() {
    let Some(file) = model_file() else { return };
    let imports = DeviceConfig::host("A", 64 * MIB);
    let (on_gpu, _) = plain(gpu(), &file);
    let (on_host, stats) = plain(imports.clone(), &file);
    assert_eq!(on_gpu, on_host);
    assert!(stats.devices[0].imports > 0, "{stats:?}");
    for at in [
        Point::DeviceOpen,
        Point::WeightLayout,
        Point::Supports,
        Point::Memory,
        Point::QueueCreate,
        Point::Upload,
        Point::Compile,
        Point::Import,
        Point::Run,
        Point::Wait,
    ] {
        let device = if at == Point::Import { &imports } else { &gpu() };
        let mut n_met = 0;
        for k in [1, 2, 4, 9] {
            let fault = Fault::new(at, FaultKind::error("driver")).nth(k);
            let met = survive(device, &fault, &file, &on_gpu);
            n_met += usize::from(met.is_some());
            if let Some(error) = met {
                assert_eq!(device_error(&error).kind, Kind::Driver, "{error}");
            }
        }
        assert!(n_met > 0, "{at:?} is never called");
    }
    for at in [Point::Upload, Point::Run] {
        let fault = Fault::new(at, FaultKind::error("driver")).deferred();
        let met = survive(&gpu(), &fault, &file, &on_gpu).unwrap();
        assert_eq!(device_error(&met).operation, "queue_wait", "{met}");
    }
}

/// A KV cache larger than any buffer is tiled over several, and the model says the same words.
#[test]
fn the_kv_cache_is_tiled_under_the_cap() {
    let Some(file) = model_file() else { return };
    let (uncapped, stats) = plain(gpu(), &file);
    assert!(stats.usage("kv").allocs < 4, "{stats:?}");
    for cap in [64 * KIB, 32 * KIB] {
        let (capped, stats) = plain(gpu().max_size(cap), &file);
        for usage in ["kv", "weights", "scratch"] {
            let usage = stats.usage(usage);
            assert!(usage.largest <= cap, "{stats:?}");
        }
        let kv = stats.usage("kv");
        assert!(kv.allocs >= 4 && kv.bytes > cap, "{stats:?}");
        assert_eq!(capped, uncapped, "cap {cap}");
    }
}

/// Weights that are repacked give the same logits, over one chunk or many.
#[test]
fn repacked_weights() {
    let Some(file) = model_file() else { return };
    let (rows, _) = plain(gpu(), &file);
    for (rows_per_group, pad, cap) in [(8, 24, 64 * MIB), (16, 40, 64 * KIB), (512, 8, 256 * KIB)] {
        let device = gpu().max_size(cap).with(|d| {
            d.weight_layout = LayoutConfig::Grouped { rows_per_group, pad };
        });
        let (repacked, stats) = plain(device, &file);
        assert!(stats.devices[0].uploads > 0);
        assert_eq!(repacked, rows, "{rows_per_group} {pad} {cap}");
    }
}

/// Weights that must be aligned better than a file aligns them are not used where the file has them.
#[test]
fn alignment_of_mapped_weights() {
    let Some(file) = model_file() else { return };
    let (rows, _) = plain(gpu(), &file);
    for alignment in [1, 64, 256, 4096] {
        let device = DeviceConfig::host("A", 64 * MIB).with(|d| d.weight_alignment = alignment);
        let (aligned, _) = plain(device, &file);
        assert_eq!(aligned, rows, "aligned to {alignment}");
    }
}

/// Import of whole pages only, as drivers ask for it: what of a file is no whole page is allocated, and the model loads.
#[test]
fn alignment_of_imports() {
    let Some(file) = model_file() else { return };
    let (rows, _) = plain(gpu(), &file);
    for import_alignment in [64, 4096] {
        let device = DeviceConfig::host("A", 64 * MIB);
        let (aligned, _) =
            plain(device.buffer_type(0, |t| t.import_alignment = import_alignment), &file);
        assert_eq!(aligned, rows, "imports aligned to {import_alignment}");
    }
}

/// A device that promises more than it gives: the error names the promise's numbers, or the driver's code, and nothing stays behind.
#[test]
fn broken_promises() {
    let Some(file) = model_file() else { return };
    let native = Refusal { status: "driver".into(), native_code: Some(-61) };
    for (device, kind, numbers) in [
        (
            gpu().buffer_type(0, |t| t.real_max_size = Some(100 * KIB)),
            Kind::TooBig,
            "limit 102400 bytes",
        ),
        (
            gpu().buffer_type(0, |t| {
                t.real_max_size = Some(100 * KIB);
                t.refusal = native.clone();
            }),
            Kind::Driver,
            "driver code -61",
        ),
        (gpu().with(|d| d.budget_bytes = Some(300 * KIB)), Kind::OutOfMemory, "free"),
        (gpu().heap(0, |h| h.budget = Some(0)), Kind::OutOfMemory, "free 0 bytes"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let fake = Fake::new().device(device).install(dir.path()).unwrap();
        let runtime = runtime(&fake);
        let error = open(&runtime, &file).unwrap_err();
        assert_eq!(device_error(&error).kind, kind, "{error}");
        assert!(error.to_string().contains(numbers), "{error}");
        drop(runtime);
        assert_clean(&fake, numbers);
    }
}

/// Devices that leave no room, or state figures that make no sense together, end a load with an error at most: never with a panic, or
/// with anything left on the device.
#[test]
fn absurd_devices() {
    let Some(file) = model_file() else { return };
    let (rows, _) = plain(gpu(), &file);
    let lie = |value: u64| Fig::Whole { value, state: "known".into(), source: "driver".into() };
    for (name, device, loads) in [
        ("no byte in one buffer", gpu().max_size(0), false),
        ("one byte in one buffer", gpu().max_size(1), false),
        ("less than a row", gpu().max_size(200), false),
        ("nothing free", gpu().heap(0, |h| h.free = 0.into()), false),
        ("nothing at all", gpu().heap(0, |h| (h.total, h.free) = (0.into(), 0.into())), false),
        ("more than there is", gpu().heap(0, |h| h.total = lie(u64::MAX)), true),
        ("a preferred chunk of 0", gpu().buffer_type(0, |t| t.preferred_chunk = 0.into()), true),
        ("a preferred chunk of 1", gpu().buffer_type(0, |t| t.preferred_chunk = 1.into()), true),
        (
            "alignment beyond the cap",
            gpu().max_size(64 * KIB).buffer_type(0, |t| t.alignment = MIB),
            true,
        ),
        ("great granularity", gpu().buffer_type(0, |t| t.granularity = MIB), true),
        ("granularity beyond all", gpu().buffer_type(0, |t| t.granularity = u64::MAX), false),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let fake = Fake::new().device(device).install(dir.path()).unwrap();
        let runtime = runtime(&fake);
        match open(&runtime, &file) {
            Ok(model) => {
                assert!(loads, "{name}: it was loaded");
                assert_eq!(decode(&model).0, rows, "{name}");
            }
            Err(error) => assert!(!loads, "{name}: {error}"),
        }
        drop(runtime);
        assert_clean(&fake, name);
    }
}

/// What nobody could say is not taken for nothing, nor for everything: the greatest buffer is assumed, free memory must be stated or forced.
#[test]
fn unknown_figures() {
    let Some(file) = model_file() else { return };
    let (rows, _) = plain(gpu(), &file);
    assert_eq!(plain(gpu().max_size(Fig::unknown()), &file).0, rows);
    let device = gpu().max_size(Fig::unknown()).heap(0, |h| {
        (h.total, h.free) = (Fig::unknown(), Fig::unknown());
    });
    let dir = tempfile::tempdir().unwrap();
    let fake = Fake::new().device(device).install(dir.path()).unwrap();
    let runtime = runtime(&fake);
    let error = open(&runtime, &file).unwrap_err();
    assert!(matches!(error, Error::MemoryUnknown { .. }), "{error}");
    let mut options = options();
    options.plan.force = true;
    let model = Model::open(&runtime, &file, &options, &mut |_| {}).unwrap();
    assert_eq!(decode(&model).0, rows);
}

/// A lost device ends its sequences with that kind of error and no other device's; a new runtime has it again.
#[test]
fn a_lost_device() {
    let Some(file) = model_file() else { return };
    let (rows, _) = plain(gpu(), &file);
    for deferred in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let lost = Fault::new(Point::Run, FaultKind::DeviceLost).device(0).nth(6);
        let lost = Fault { deferred, ..lost };
        let fake = Fake::new().device(gpu()).device(gpu()).fault(lost).install(dir.path()).unwrap();
        let runtime = runtime(&fake);
        let model = open(&runtime, &file).unwrap();
        let mut sequence = model.sequence();
        eval(&mut sequence, &prompt()).unwrap();
        let mut errors = (0..4).filter_map(|_| eval(&mut sequence, &[5]).err());
        let first = errors.next().unwrap();
        assert_eq!(device_error(&first).kind, Kind::DeviceLost, "{first}");
        assert!(errors.all(|e| device_error(&e).kind == Kind::DeviceLost));
        let other = ModelOptions { device: Some("fake:1".into()), ..options() };
        let other = Model::open(&runtime, &file, &other, &mut |_| {}).unwrap();
        assert_eq!(decode(&other).0, rows, "the other device");
        drop((sequence, model, other, runtime));
        assert_clean(&fake, "a lost device");
        let runtime = self::runtime(&fake);
        drop(open(&runtime, &file).unwrap());
    }
}

/// Ops that the device lacks are told when the model is opened, before anything is allocated.
#[test]
fn unsupported_ops_are_named() {
    let Some(file) = model_file() else { return };
    let dir = tempfile::tempdir().unwrap();
    let device = gpu().with(|d| d.unsupported_ops = vec!["rope".into(), "glu".into()]);
    let fake = Fake::new().device(device).install(dir.path()).unwrap();
    let runtime = runtime(&fake);
    let error = open(&runtime, &file).unwrap_err().to_string();
    assert!(error.contains("rope") || error.contains("glu"), "{error}");
    drop(runtime);
    let stats = assert_clean(&fake, "unsupported");
    assert_eq!(stats.devices[0].alloc_calls, 0);
}

/// Logits that are no numbers are an error, not an answer.
#[test]
fn logits_that_are_no_numbers() {
    let Some(file) = model_file() else { return };
    let dir = tempfile::tempdir().unwrap();
    let wrong = Fault::new(Point::Run, FaultKind::WrongResult { how: Wrong::Nan }).always();
    let fake = Fake::new().device(gpu()).fault(wrong).install(dir.path()).unwrap();
    let model = open(&runtime(&fake), &file).unwrap();
    let mut sampler = tegula::Sampler::new(Default::default()).unwrap();
    let mut sequence = model.sequence();
    let options = tegula::GenerateOptions { n_predict: Some(4), ..Default::default() };
    let cancel = AtomicBool::new(false);
    let result = tegula::generate(&mut sequence, &[5, 6], &mut sampler, options, &cancel, |_| {});
    assert!(matches!(result, Err(Error::NotANumber { .. })), "{result:?}");
}

/// A device that gives less than it states is found out by the KV cache too, which is allocated last: the next load plans around it.
#[test]
fn a_broken_promise_about_the_kv_cache() {
    let Some(file) = model_file() else { return };
    let dir = tempfile::tempdir().unwrap();
    let device = gpu().buffer_type(0, |t| t.real_max_size = Some(2 * MIB));
    let fake = Fake::new().device(device).install(dir.path()).unwrap();
    let runtime = runtime(&fake);
    let mut options = options();
    options.plan.n_ctx = Some(65_536);
    let attempt = || {
        let model = Model::open(&runtime, &file, &options, &mut |_| {})?;
        eval(&mut model.sequence(), &prompt())
    };
    // One attempt for each halving from the first chunk to what the device gives.
    let attempts = [attempt(), attempt(), attempt()];
    assert!(attempts.iter().any(Result::is_ok), "{:?}", attempts.map(|a| a.map(drop)));
}
