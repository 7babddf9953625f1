//! Every allocation fails once: in a load, in a prompt, while tokens are generated. An error with its numbers each time, nothing lost,
//! and the same process goes on.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail by panicking"
)]

mod common;

use common::{KIB, fake_runtime};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use tegula::{Caps, Error, Model, ModelOptions, Outputs, PlanOptions, Runtime, Sequence, Split};
use tegula_e2e::{RandomModel, argmax};
use test_tegula_fake::{
    BufferTypeConfig, DeviceConfig, DeviceStats, Fake, Fault, FaultKind, Installed, MIB, Point,
    Refusal, Stats,
};

const N_PROMPT: u32 = 60;
const N_DECODE: usize = 20;

/// Devices, and how the model is spread over them.
#[derive(Clone)]
struct Setup {
    name: &'static str,
    devices: Vec<DeviceConfig>,
    split: Split,
    /// What the host asks of a device that may fail.
    points: &'static [Point],
}

fn setups() -> Vec<Setup> {
    // Four KiB hold 32 tokens of keys of a layer: the cache grows in the prompt and while tokens are generated.
    let small_kv = |device: DeviceConfig| {
        device.with(|device| {
            let kv = device.buffer_types[0].clone();
            device.type_for.kv = device.buffer_types.len() as u32;
            device.buffer_types.push(BufferTypeConfig { max_size: (4 * KIB).into(), ..kv });
        })
    };
    let card = |name| small_kv(DeviceConfig::gpu(name, 64 * MIB).max_size(32 * KIB));
    let host = |name| {
        let device = DeviceConfig::host(name, 64 * MIB).max_size(32 * KIB);
        small_kv(device.buffer_type(0, |own| own.import_alignment = 4096))
    };
    let one = |name, device| Setup {
        name,
        devices: vec![device],
        split: Split::Fill,
        points: &[Point::Alloc],
    };
    vec![
        one("a card", card("A")),
        Setup {
            devices: vec![card("A"), card("B")],
            split: Split::Proportions(vec![1.0, 1.0]),
            ..one("two cards", card("A"))
        },
        Setup { points: &[Point::Alloc, Point::Import], ..one("weights in the file", host("A")) },
        Setup {
            devices: vec![card("A"), host("B")],
            split: Split::Proportions(vec![1.0, 1.0]),
            points: &[Point::Alloc, Point::Import],
            ..one("a card and mapped weights", card("A"))
        },
    ]
}

impl Setup {
    fn options(&self) -> ModelOptions {
        let ids: Vec<String> = (0..self.devices.len()).map(|n| format!("fake:{n}")).collect();
        let plan = PlanOptions {
            n_ctx: Some(256),
            n_ubatch: 8,
            split: self.split.clone(),
            ..PlanOptions::default()
        };
        ModelOptions { device: Some(ids.join(",")), plan, ..ModelOptions::default() }
    }

    fn fake(&self) -> Fake {
        self.devices.iter().cloned().fold(Fake::new(), Fake::device)
    }
}

fn eval(sequence: &mut Sequence, tokens: &[u32]) -> Result<Vec<f32>, Error> {
    let mut last = Vec::new();
    sequence.eval(tokens, Outputs::Last, &AtomicBool::new(false), |_, row| {
        last = row.to_vec();
        Ok(())
    })?;
    Ok(last)
}

/// A prompt and 20 tokens more; the call that fails is made again on the same sequence.
fn decode(model: &Model) -> (Vec<Vec<f32>>, Option<Error>) {
    let mut sequence = model.sequence();
    let (mut rows, mut met) = (Vec::new(), None);
    let mut next: Vec<u32> = (0..N_PROMPT).map(|i| 3 + i * 37 % 200).collect();
    for _ in 0..=N_DECODE {
        let before = sequence.n_past();
        let row = eval(&mut sequence, &next).or_else(|error| {
            assert!(met.replace(error).is_none(), "it failed twice");
            // Blocks are reserved before anything is computed.
            assert_eq!(sequence.n_past(), before, "a refused evaluation leaves no trace");
            eval(&mut sequence, &next)
        });
        let row = row.unwrap_or_else(|e| panic!("after {met:?}: {e}"));
        next = vec![argmax(&row)];
        rows.push(row);
    }
    (rows, met)
}

fn open(runtime: &Runtime, setup: &Setup, path: &Path) -> Result<Model, Error> {
    Model::open(runtime, path, &setup.options(), &mut |_| {})
}

fn clean(fake: &Installed, what: &str) -> Stats {
    let stats = fake.stats().unwrap_or_else(|e| panic!("{what}: {e}"));
    assert!(stats.is_empty(), "{what}: left behind: {stats:?}");
    assert_eq!(stats.violations, Vec::<String>::new(), "{what}");
    stats
}

fn held(device: &DeviceStats) -> [u64; 5] {
    [device.buffers, device.bytes, device.executables, device.queues, device.open]
}

/// Loads and decodes with one fault; what failed is done again. Gives the rows of logits, the error that was met, and the books.
fn run(
    folder: &Path,
    setup: &Setup,
    fault: Option<Fault>,
    path: &Path,
) -> (Vec<Vec<f32>>, Option<Error>, Stats) {
    let what = format!("{}: {fault:?}", setup.name);
    let fake = fault.into_iter().fold(setup.fake(), Fake::fault).install(folder).unwrap();
    let runtime = fake_runtime(&[&fake], Caps::default());
    let (model, failed) = match open(&runtime, setup, path) {
        Ok(model) => (model, None),
        Err(error) => {
            for device in fake.stats().map(|stats| stats.devices).unwrap_or_default() {
                assert_eq!(held(&device), [0; 5], "{what}: a failed load holds on to a device");
            }
            let again = open(&runtime, setup, path);
            (again.unwrap_or_else(|e| panic!("{what}: the next load: {e}")), Some(error))
        }
    };
    let (rows, met) = decode(&model);
    drop((model, runtime));
    (rows, failed.or(met), clean(&fake, &what))
}

/// For each k up to the last allocation, fail the k-th.
#[test]
fn every_allocation_fails_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = RandomModel::default().write(folder.path());
    let mut expected: Option<Vec<Vec<f32>>> = None;
    for setup in setups() {
        let (rows, met, plain) = run(folder.path(), &setup, None, &path);
        assert!(met.is_none(), "{met:?}");
        let expected = expected.get_or_insert_with(|| rows.clone());
        assert_eq!(rows, *expected, "{}", setup.name);
        let kv = plain.usage("kv").allocs;
        assert!(kv >= 8, "{}: {kv} chunks of keys and values are no growth", setup.name);
        for (point, at) in setup.points.iter().flat_map(|point| {
            (0u32..).zip(&plain.devices).map(move |(index, device)| (*point, (index, device)))
        }) {
            let (index, device) = at;
            let n = if point == Point::Alloc { device.alloc_calls } else { device.imports };
            for k in 1..=n {
                let fault = Fault::new(point, FaultKind::error("out_of_memory"));
                let fault = fault.nth(k).device(index);
                let (rows, met, stats) = run(folder.path(), &setup, Some(fault), &path);
                let what = format!("{}: {point:?} {k} of {n} on device {index}", setup.name);
                let error = met.unwrap_or_else(|| panic!("{what}: it was not met"));
                match (&error, point) {
                    (Error::Alloc { asked, .. }, Point::Alloc) => assert!(*asked > 0, "{what}"),
                    (Error::Device(own), Point::Import) => {
                        assert_eq!(own.operation, "buffer_import", "{what}");
                    }
                    _ => panic!("{what}: {error:?}"),
                }
                assert_eq!(rows, *expected, "{what}: other logits");
                for (now, plain) in stats.devices.iter().zip(&plain.devices) {
                    assert_eq!(now.bytes_peak, plain.bytes_peak, "{what}: a chunk is kept");
                }
            }
            // One more is never asked for.
            let fault = Fault::new(point, FaultKind::error("out_of_memory"));
            let (_, met, _) =
                run(folder.path(), &setup, Some(fault.nth(n + 1).device(index)), &path);
            assert!(met.is_none(), "{}: {met:?}", setup.name);
        }
        let calls = plain.devices.iter().map(|own| own.alloc_calls + own.imports);
        println!("{}: {} allocations and imports", setup.name, calls.sum::<u64>());
    }
}

/// A device that gives less than it states, below what is worth trying again: the error holds the plan's numbers and the device's.
#[test]
fn a_contradiction_names_both_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let path = RandomModel::default().write(folder.path());
    let card = || DeviceConfig::gpu("A", 64 * MIB);
    let native = Refusal { status: "out_of_memory".into(), native_code: Some(-2) };
    let cases: [(&str, DeviceConfig, &[&str]); 4] = [
        (
            "a buffer smaller than stated",
            card().buffer_type(0, |own| own.real_max_size = Some(10_000)),
            &["limit 10000 bytes", "buffers of up to 67108864 bytes"],
        ),
        (
            "in the driver's words",
            card().buffer_type(0, |own| {
                own.real_max_size = Some(10_000);
                own.refusal = native;
            }),
            &["driver code -2", "buffers of up to 67108864 bytes"],
        ),
        (
            "less memory than stated",
            card().heap(0, |heap| heap.budget = Some(150 * KIB)),
            &["free", "67108864 bytes free"],
        ),
        (
            "less than nobody could state",
            card().heap(0, |heap| {
                heap.free = test_tegula_fake::Fig::unknown();
                heap.budget = Some(150 * KIB);
            }),
            &["free", "buffers of up to 67108864 bytes", "how much is free was unknown"],
        ),
    ];
    for (name, device, expected) in cases {
        let setup = Setup { devices: vec![device], ..setups().remove(0) };
        let fake = setup.fake().install(folder.path()).unwrap();
        let runtime = fake_runtime(&[&fake], Caps::default());
        let error = open(&runtime, &setup, &path).unwrap_err();
        let Error::Alloc { asked, .. } = &error else { panic!("{name}: {error}") };
        let text = error.to_string();
        assert!(text.contains(&asked.to_string()) && text.contains("fake:0"), "{name}: {text}");
        for part in expected {
            assert!(text.contains(part), "{name}: `{part}` is not in: {text}");
        }
        drop(runtime);
        clean(&fake, name);
    }
}
