//! Heaps and pools: what devices state of their memory, what plans count on, and what is taken in the end.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on fails"
)]

mod common;

use common::assert_clean;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use tegula::memory::plan::{ChunkReport, HeapReport};
use tegula::{
    DeviceCap, Error, Limit, Model, ModelOptions, Outputs, Plan, PlanOptions, RegistryOptions,
    Runtime, RuntimeOptions, Sequence,
};
use tegula_abi::POOL_HOST;
use tegula_e2e::TinyLlama;
use test_tegula_fake::*;

/// A model of 4.6 MiB in 8 layers, beside a fake backend.
struct Bench {
    dir: tempfile::TempDir,
    fake: Installed,
    n_devices: usize,
    model: PathBuf,
}

const MODEL: TinyLlama = TinyLlama { context_length: 4096, n_layer: 8, n_embd: 128 };
const N_CTX: u32 = 256;

impl Bench {
    fn new(devices: impl IntoIterator<Item = DeviceConfig>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let fake = devices.into_iter().fold(Fake::new(), Fake::device);
        let n_devices = fake.config.devices.len();
        let fake = fake.install(dir.path()).unwrap();
        let model = MODEL.write(dir.path(), "model.gguf");
        Self { dir, fake, n_devices, model }
    }

    fn runtime(&self) -> Runtime {
        let registry =
            RegistryOptions { explicit: vec![self.fake.plugin.clone()], standard: false };
        Runtime::new(&RuntimeOptions { registry, ..Default::default() })
    }

    /// On all devices of the fake.
    fn options(&self, plan: PlanOptions) -> ModelOptions {
        let ids: Vec<String> = (0..self.n_devices).map(|index| format!("fake:{index}")).collect();
        let device = Some(ids.join(","));
        let n_ctx = plan.n_ctx.or(Some(N_CTX));
        ModelOptions {
            device,
            plan: PlanOptions { n_ctx, n_ubatch: 64, ..plan },
            ..Default::default()
        }
    }

    fn plan(&self, plan: PlanOptions) -> Result<Plan, Error> {
        Model::plan_only(&self.runtime(), &self.model, &self.options(plan))
    }

    fn open(&self, runtime: &Runtime, plan: PlanOptions) -> Result<Model, Error> {
        Model::open(runtime, &self.model, &self.options(plan), &mut |_| {})
    }
}

fn plain() -> PlanOptions {
    PlanOptions::default()
}

fn eval(sequence: &mut Sequence, tokens: &[u32]) -> Result<Vec<f32>, Error> {
    let mut last = Vec::new();
    sequence.eval(tokens, Outputs::Last, &AtomicBool::new(false), |_, row| {
        last = row.to_vec();
        Ok(())
    })?;
    Ok(last)
}

/// The last logits of a prompt that fills the context.
fn fill(model: &Model) -> Vec<f32> {
    let n_ctx = model.plan().context.n_ctx;
    let prompt: Vec<u32> = (0..n_ctx).map(|i| (i * 37 + 5) % TinyLlama::N_VOCAB).collect();
    eval(&mut model.sequence(), &prompt).unwrap()
}

/// The logits on a device without any trouble.
fn expected() -> Vec<f32> {
    let bench = Bench::new([DeviceConfig::gpu("A", 64 * MIB)]);
    fill(&bench.open(&bench.runtime(), plain()).unwrap())
}

fn heap<'a>(plan: &'a Plan, device: &str, heap: usize) -> &'a HeapReport {
    let device = plan.report.devices.iter().find(|d| d.id == device);
    &device.unwrap_or_else(|| panic!("the plan has no such device: {:?}", plan.devices)).heaps[heap]
}

fn bytes_of(chunks: &[ChunkReport], usage: &str) -> u64 {
    chunks.iter().filter(|chunk| chunk.usage == usage).map(|chunk| chunk.taken).sum()
}

/// Conversations side by side must not cost the memory of as many contexts, and one more than was asked for is told so.
#[test]
fn parallel_sequences_share_the_cache() {
    let bench = Bench::new([DeviceConfig::gpu("A", 64 * MIB)]);
    let alone = bench.plan(plain()).unwrap();
    for n_parallel in 1..=8 {
        let runtime = bench.runtime();
        let model = bench.open(&runtime, PlanOptions { n_parallel, ..plain() }).unwrap();
        let report = &model.plan().report;
        assert_eq!(report.context.kv_bytes, alone.report.context.kv_bytes, "{n_parallel}");
        assert_eq!(report.context.n_ctx, N_CTX);
        let row = u64::from(TinyLlama::N_VOCAB) * 4;
        let parallel = &report.parallel;
        assert_eq!((parallel.n_seqs, parallel.n_outputs), (n_parallel, n_parallel));
        assert_eq!(parallel.logits_bytes, u64::from(n_parallel) * row);
        assert_eq!(
            bytes_of(&heap(model.plan(), "fake:0", 1).chunks, "logits"),
            parallel.logits_bytes
        );

        let mut sequences: Vec<Sequence> = (0..n_parallel).map(|_| model.sequence()).collect();
        let rows: Vec<_> = sequences.iter_mut().map(|s| eval(s, &[1, 2, 3]).unwrap()).collect();
        assert!(rows.iter().all(|row| *row == rows[0]), "{n_parallel}");
        let mut further = model.sequence();
        let error = eval(&mut further, &[1]).unwrap_err();
        assert!(matches!(error, Error::TooManySequences { .. }), "{error}");
        assert!(error.to_string().contains("--parallel"), "{error}");
        sequences[0].truncate(0);
        assert_eq!(eval(&mut further, &[1, 2, 3]).unwrap(), rows[0]);
        drop((sequences, further, model, runtime));
        assert_clean(&bench.fake, "parallel");
    }
}

/// What a device rounds up is memory that others do not get: it is planned, and what is planned is taken, to the byte.
#[test]
fn rounding_to_the_granularity_is_planned() {
    let expected = expected();
    for (granularity, alignment) in [(1, 64), (64 * KIB, 64), (256 * KIB, 4096), (MIB, 256)] {
        let device = DeviceConfig::gpu("A", 64 * MIB).buffer_type(0, |t| {
            (t.granularity, t.alignment, t.max_size) = (granularity, alignment, MIB.into());
        });
        let bench = Bench::new([device.clone()]);
        let runtime = bench.runtime();
        let model = bench.open(&runtime, plain()).unwrap();
        assert_eq!(fill(&model), expected, "granularity {granularity}");
        let heap = heap(model.plan(), "fake:0", 0);
        for chunk in &heap.chunks {
            assert_eq!(chunk.taken, chunk.size.next_multiple_of(granularity));
            assert!(chunk.tiles.iter().all(|tile| tile.offset.is_multiple_of(alignment)));
        }
        let planned = heap.planned_bytes;
        let asked: u64 = heap.chunks.iter().map(|chunk| chunk.size).sum();
        drop((model, runtime));
        let stats = assert_clean(&bench.fake, &format!("granularity {granularity}"));
        assert_eq!(stats.devices[0].bytes_peak, planned, "granularity {granularity}");

        // A device with room for the bytes but not for their rounding is refused before it fails.
        if granularity == MIB {
            let room = asked * 17 / 16;
            assert!(room < planned, "{asked} {planned}");
            let small = device.heap(0, |h| (h.total, h.free) = (room.into(), room.into()));
            let error = Bench::new([small]).plan(plain()).map(drop).unwrap_err();
            assert!(matches!(error, Error::ModelDoesNotFit { .. }), "{error}");
        }
    }
}

/// Nobody's figure is no figure: what is unknown is said, assumed where that is sensible, and else refused until somebody states it.
#[test]
fn unknown_memory_is_stated_assumed_or_refused() {
    let expected = expected();
    let unknown_free =
        |total: u64| DeviceConfig::gpu("A", total).heap(0, |h| h.free = Fig::unknown());
    // The usual driver that knows the total alone.
    let bench = Bench::new([unknown_free(64 * MIB)]);
    let plan = bench.plan(plain()).unwrap();
    let first = heap(&plan, "fake:0", 0);
    assert_eq!((first.free.state.as_str(), first.assumed_free), ("unknown", Some(56 * MIB)));
    assert!(plan.report.notes[0].contains("56.00 MiB"), "{:?}", plan.report.notes);
    assert_eq!(fill(&bench.open(&bench.runtime(), plain()).unwrap()), expected);
    let error = Bench::new([unknown_free(5 * MIB)]).plan(plain()).map(drop).unwrap_err();
    assert!(matches!(error, Error::ModelDoesNotFit { .. }), "{error}");

    // One that knows nothing.
    let device = unknown_free(64 * MIB).heap(0, |h| h.total = Fig::unknown());
    let bench = Bench::new([device]);
    let runtime = bench.runtime();
    let error = bench.open(&runtime, plain()).unwrap_err();
    assert!(matches!(error, Error::MemoryUnknown { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("fake:0") && text.contains("--force"), "{text}");
    assert!(text.contains("--memory-limit"), "{text}");
    assert_eq!(
        fill(&bench.open(&runtime, PlanOptions { force: true, ..plain() }).unwrap()),
        expected
    );
    let limit = DeviceCap::parse("--memory-limit", Limit::Memory, "fake:0=32MiB").unwrap();
    let stated = bench.runtime().with_device_caps(&[limit]).unwrap();
    assert_eq!(fill(&bench.open(&stated, plain()).unwrap()), expected);

    // Through the command: refused with a code, and loaded when it is forced or stated.
    for (args, limit, code) in [
        (&[][..], None, 1),
        (&["--force"], None, 0),
        (&[], Some("32MiB"), 0),
        (&[], Some("1MiB"), 1),
    ] {
        let model = bench.model.to_str().unwrap();
        let mut command = tegula_e2e::tegula(["plan", model, "--device", "fake:0", "-c", "64"]);
        command.args(args).env("TEGULA_BACKEND_PATH", bench.dir.path());
        if let Some(limit) = limit {
            command.env("TEGULA_MEMORY_LIMIT", limit);
        }
        let out = tegula_e2e::run(&mut command);
        assert_eq!(out.code, code, "{args:?} {limit:?}: {} {}", out.stdout, out.stderr);
        if code == 0 && limit.is_none() {
            assert!(out.stdout.contains("unknown"), "{}", out.stdout);
        }
    }
}

/// A plan that does not fit is refused; who forces it is told what was wrong, and gets what was asked for.
#[test]
fn a_plan_that_does_not_fit_is_forced_only_when_asked() {
    // The device says less than it has.
    let device = DeviceConfig::gpu("A", 64 * MIB)
        .heap(0, |h| (h.free, h.budget) = ((3 * MIB).into(), Some(64 * MIB)));
    let bench = Bench::new([device]);
    let error = bench.plan(plain()).map(drop).unwrap_err();
    assert!(matches!(error, Error::ModelDoesNotFit { .. }), "{error}");
    let model = bench.open(&bench.runtime(), PlanOptions { force: true, ..plain() }).unwrap();
    assert!(model.plan().report.notes[0].contains("3.00 MiB"), "{:?}", model.plan().report.notes);
    assert_eq!(fill(&model), expected());
}

fn integrated(free: u64, total: u64) -> DeviceConfig {
    let device = DeviceConfig::integrated("igpu", total);
    device.heap(0, |h| (h.free, h.budget) = (free.into(), Some(total)))
}

/// A GPU that says far too little of unified memory takes little of the model: that must be said with both numbers, and can be overruled.
#[test]
fn unified_memory_that_is_stated_too_low_is_told() {
    let devices = || [integrated(3 * MIB, 64 * MIB), DeviceConfig::host("cpu", 52 * MIB)];
    let bench = Bench::new(devices());
    let plan = bench.plan(plain()).unwrap();
    assert_eq!(plan.devices, ["fake:0", "fake:1"]);
    let note = plan.report.notes.join("\n");
    for part in
        ["fake:0", "3.00 MiB", "52.00 MiB", "layers 0 to", "to 7 on fake:1", "--memory-limit"]
    {
        assert!(note.contains(part), "{part}: {note}");
    }
    let first = heap(&plan, "fake:0", 0);
    let taken = ["weights", "kv", "scratch"].map(|usage| bytes_of(&first.chunks, usage));
    assert!(taken.iter().sum::<u64>() <= 3 * MIB, "{taken:?}");
    assert_eq!(fill(&bench.open(&bench.runtime(), plain()).unwrap()), expected());

    let limit = DeviceCap::parse("--memory-limit", Limit::Memory, "fake:0=20MiB").unwrap();
    let overruled = bench.runtime().with_device_caps(&[limit]).unwrap();
    let model = bench.open(&overruled, plain()).unwrap();
    assert_eq!(model.plan().devices, ["fake:0"]);
    assert!(model.plan().report.notes[0].contains("20.00 MiB"), "{:?}", model.plan().report.notes);
    assert_eq!(fill(&model), expected());

    // One that says what the host says is not spoken of.
    let honest = Bench::new([integrated(50 * MIB, 64 * MIB), DeviceConfig::host("cpu", 52 * MIB)]);
    assert_eq!(honest.plan(plain()).unwrap().report.notes, [""; 0]);
}

/// An integrated GPU whose memory is in several heaps, in the proportion 32 to 64.
fn carved(heaps: &[u64]) -> DeviceConfig {
    let mut device = DeviceConfig::gpu("apu", 0).with(|d| d.kind = "integrated".into());
    let (staging_heap, staging) = (device.heaps.remove(1), device.buffer_types.remove(1));
    (device.heaps, device.buffer_types) = (Vec::new(), Vec::new());
    for (index, bytes) in (0u32..).zip(heaps) {
        let pool = 16 + u64::from(index);
        let (total, free) = ((*bytes).into(), (*bytes).into());
        device.heaps.push(HeapConfig { pool, total, free, ..Default::default() });
        device.buffer_types.push(BufferTypeConfig {
            name: format!("memory {index}"),
            heap: index,
            max_size: (*bytes).into(),
            ..Default::default()
        });
    }
    device.type_for.staging = device.heaps.len() as u32;
    device.buffer_types.push(BufferTypeConfig { heap: device.type_for.staging, ..staging });
    device.heaps.push(staging_heap);
    device
}

/// Memory in several heaps is all of it used, in order, and none is asked for more than it has.
#[test]
fn a_second_heap_is_used_when_the_first_is_full() {
    let expected = expected();
    // Sizes of heaps, and which of them take weights.
    let table: [(&[u64], &[usize]); 5] = [
        (&[32 * MIB, 64 * MIB], &[0]),
        (&[3200 * KIB, 6400 * KIB], &[0, 1]),
        (&[3200 * KIB, 10 * KIB, 6400 * KIB], &[0, 2]),
        (&[2200 * KIB, 2400 * KIB, 6400 * KIB], &[0, 1, 2]),
        (&[1200, 6400 * KIB], &[]),
    ];
    for (sizes, used) in table {
        let bench = Bench::new([carved(sizes)]);
        let plan = match bench.plan(plain()) {
            Ok(plan) => plan,
            Err(error) => {
                assert!(used.is_empty(), "{sizes:?}: {error}");
                continue;
            }
        };
        for (index, size) in sizes.iter().enumerate() {
            let heap = heap(&plan, "fake:0", index);
            assert_eq!(heap.total.value, Some(*size), "every heap is reported");
            assert!(heap.planned_bytes <= *size, "{sizes:?}: heap {index}");
            let takes = bytes_of(&heap.chunks, "weights") > 0;
            assert_eq!(takes, used.contains(&index), "{sizes:?}: heap {index}");
        }
        let runtime = bench.runtime();
        let model = bench.open(&runtime, plain()).unwrap();
        assert_eq!(fill(&model), expected, "{sizes:?}");
        drop((model, runtime));
        let stats = assert_clean(&bench.fake, "heaps");
        assert_eq!(stats.devices[0].queues, 0);
    }

    // A card does not run layers out of the host's memory, however much there is.
    let card = DeviceConfig::gpu("card", 3 * MIB);
    let error = Bench::new([card]).plan(plain()).map(drop).unwrap_err();
    assert!(matches!(error, Error::ModelDoesNotFit { .. }), "{error}");
}

/// Memory that two devices share is counted once: a model that fits twice on paper must not fill the machine.
#[test]
fn unified_memory_is_counted_once() {
    let shared = |bytes: u64| {
        let host = DeviceConfig::host("cpu", bytes).buffer_type(0, |t| t.import = false);
        Bench::new([integrated(bytes, bytes), host])
    };
    for split in ["fill", "1,1", "layer"] {
        let split: tegula::Split = split.parse().unwrap();
        let bench = shared(8 * MIB);
        let options = PlanOptions { split: split.clone(), ..plain() };
        // The longest context that fits, of both devices together.
        let options = ModelOptions {
            plan: PlanOptions { n_ctx: None, n_ubatch: 32, ..options },
            device: Some("fake:0,fake:1".into()),
            ..Default::default()
        };
        let plan = Model::plan_only(&bench.runtime(), &bench.model, &options).unwrap();
        let heaps = plan.report.devices.iter().flat_map(|device| &device.heaps);
        let planned: u64 = heaps.map(|heap| heap.planned_bytes).sum();
        assert!(planned <= 8 * MIB && planned > 4 * MIB, "{split:?}: {planned}");
        let error = shared(4 * MIB).plan(PlanOptions { split, ..plain() }).unwrap_err();
        assert!(matches!(error, Error::ModelDoesNotFit { .. }), "{error}");
    }
    assert_eq!(shared(8 * MIB).plan(plain()).unwrap().report.devices[0].heaps[0].pool, "host");
    assert_eq!(POOL_HOST, 1);
}

/// A second model on a full device is refused with the numbers, and takes nothing of what the first one was promised.
#[test]
fn a_second_model_leaves_the_first_alone() {
    let probe = Bench::new([DeviceConfig::gpu("A", 64 * MIB)]);
    let all = heap(&probe.plan(plain()).unwrap(), "fake:0", 0).planned_bytes;
    let kv = probe.plan(plain()).unwrap().report.context.kv_bytes;
    for (left, use_first) in [(100 * KIB, true), (100 * KIB, false), (4600 * KIB + kv, false)] {
        let size = (all + left) * 33 / 32;
        let bench = Bench::new([DeviceConfig::gpu("A", size)]);
        let runtime = bench.runtime();
        let first = bench.open(&runtime, plain()).unwrap();
        if use_first {
            fill(&first);
        }
        let second = bench.open(&runtime, plain());
        let error = second.map(drop).unwrap_err();
        let (Error::ModelDoesNotFit { .. } | Error::ContextDoesNotFit { .. }) = &error else {
            panic!("{error}");
        };
        assert!(error.to_string().contains("iB"), "{error}");
        assert_eq!(fill(&first), expected(), "{left} left");
        drop(first);
        // What it was promised is free again.
        assert_eq!(fill(&bench.open(&runtime, plain()).unwrap()), expected());
    }
}

/// Memory of the host that work on devices takes is in the plan, for each device its own, loading included.
#[test]
fn the_hosts_part_is_planned_for_each_device() {
    let bench = Bench::new(["A", "B", "C"].map(|name| DeviceConfig::gpu(name, 64 * MIB)));
    let plan = bench.plan(PlanOptions { split: "1,1,1".parse().unwrap(), ..plain() }).unwrap();
    assert_eq!(plan.devices.len(), 3);
    let crossing = 64 * u64::from(MODEL.n_embd) * 4;
    for (index, device) in plan.report.devices.iter().enumerate() {
        let host = &device.heaps[1];
        // The last device gives the logits, the others give rows to the next one.
        let is_last = index == 2;
        assert_eq!(bytes_of(&host.chunks, "activations"), if is_last { 0 } else { crossing });
        let logits = bytes_of(&host.chunks, "logits");
        assert_eq!(logits, if is_last { plan.logits_bytes } else { 0 });
        // The largest tensor of a layer, which is uploaded in one piece.
        let largest = u64::from(MODEL.n_embd) * u64::from(2 * MODEL.n_embd) * 4;
        let upload = bytes_of(&host.loading, "staging");
        assert!(upload >= largest, "{}: {upload}", device.id);
        assert_eq!(host.peak_bytes, host.planned_bytes + upload);
    }
    // A device that uses the file where it lies uploads nothing.
    let host = Bench::new([DeviceConfig::host("cpu", 64 * MIB)]).plan(plain()).unwrap();
    assert!(host.report.devices[0].heaps[0].loading.is_empty());

    // No device of these sees the host's memory: it is in the plan all the same.
    let blind = DeviceConfig::gpu("A", 64 * MIB).heap(1, |h| h.pool = 17);
    let plan = Bench::new([blind]).plan(plain()).unwrap();
    let host = heap(&plan, "host", 0);
    assert_eq!(bytes_of(&host.chunks, "logits"), plan.logits_bytes);
}

/// A rule about weights moves their ops, and what lies between them, to the device it names; the rest stays.
#[test]
fn placed_weights_take_what_lies_between_with_them() {
    let expected = expected();
    let bench = Bench::new([DeviceConfig::gpu("A", 64 * MIB), DeviceConfig::host("cpu", 64 * MIB)]);
    let place = vec![r"blk\.[01]\.ffn_(gate|up|down)\.=fake:1".parse().unwrap()];
    let runtime = bench.runtime();
    let model = bench.open(&runtime, PlanOptions { place, ..plain() }).unwrap();
    let stages = &model.plan().report.stages;
    let devices: Vec<&str> = stages.iter().map(|stage| stage.device.as_str()).collect();
    assert_eq!(devices, ["fake:0", "fake:1", "fake:0", "fake:1", "fake:0"]);
    assert_eq!(fill(&model), expected);
    drop((model, runtime));
    assert_clean(&bench.fake, "placed");

    // A model without experts loads as it is.
    let plan = bench.plan(PlanOptions { cpu_experts: 4, ..plain() }).unwrap();
    assert_eq!(plan.devices, ["fake:0"]);
}
