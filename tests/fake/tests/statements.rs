//! What devices state, true or not: believed where it can be, bounded where it cannot, and held against what they do.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on fails"
)]

mod common;

use common::*;
use tegula_plugin::*;
use test_tegula_fake::*;

fn desc(size: u64) -> BufferDesc {
    BufferDesc { size, buffer_type: 0, usage: BufferUsage::WEIGHTS }
}

fn with_device<R>(device: DeviceConfig, f: impl FnOnce(&Device, &Registry) -> R) -> R {
    let dir = tempfile::tempdir().unwrap();
    let fake = Fake::new().device(device).install(dir.path()).unwrap();
    let registry = load(&[&fake.plugin]);
    let device = open(&registry, 0).unwrap_or_else(|e| panic!("{e}"));
    let out = f(&device, &registry);
    drop((device, registry));
    assert_clean(&fake, "a device");
    out
}

/// A configuration without devices is the inner backend under another name, and its work.
#[test]
fn a_plain_fake_is_the_inner_backend() {
    let dir = tempfile::tempdir().unwrap();
    let fake = Fake::new().install(dir.path()).unwrap();
    let reference = reference_plugin().unwrap();
    let registry = load(&[&fake.plugin, &reference]);
    let (ours, theirs) = (&registry.backends[0].devices()[0], &registry.backends[1].devices()[0]);
    assert_eq!((&*ours.backend, &ours.name, ours.rank), ("fake", &theirs.name, 1));
    assert_eq!(ours.buffer_types, theirs.buffer_types);
    assert_eq!(ours.heaps[0].total, theirs.heaps[0].total);
    assert_works(&open(&registry, 0).unwrap(), "a plain fake");
}

/// The fake wraps a fast backend as well, where a test needs the speed or that backend's own ways.
#[test]
fn around_another_plugin() {
    let Ok(cpu) = built_plugin("libtegula_cpu.so") else {
        eprintln!("SKIPPED: libtegula_cpu.so is not built");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let fake = Fake::new().inner(&cpu).device(DeviceConfig::gpu("A", GIB)).install(dir.path());
    let fake = fake.unwrap();
    assert_works(&open(&load(&[&fake.plugin]), 0).unwrap(), "around the fast backend");
    assert_clean(&fake, "around the fast backend");
}

/// Identity crosses as it is stated: whoever tells two cards apart, or finds one twice, depends on it.
#[test]
fn identities() {
    let dir = tempfile::tempdir().unwrap();
    let uuid = "00112233-4455-6677-8899-aabbccddeeff";
    let card = |name: &str, rank| {
        DeviceConfig::gpu(name, GIB).with(|d| {
            (d.uuid, d.pci) = (Some(uuid.into()), Some("0000:03:00.0".into()));
            (d.vendor, d.vendor_id, d.rank) = ("Acme".into(), 0x1234, rank);
        })
    };
    let x = Fake::new().id("x").device(card("A", 5)).device(DeviceConfig::integrated("B", GIB));
    let y = Fake::new().id("y").device(card("A again", 2)).device(DeviceConfig::host("C", GIB));
    let (x, y) = (x.install(dir.path()).unwrap(), y.install(dir.path()).unwrap());
    let registry = load(&[&x.plugin, &y.plugin]);
    let ids: Vec<_> =
        registry.backends.iter().flat_map(Backend::devices).map(DeviceInfo::id).collect();
    assert_eq!(ids, ["x:0", "x:1", "y:0", "y:1"]);
    let device = |backend: usize, index: usize| &registry.backends[backend].devices()[index];
    let (a, again) = (device(0, 0), device(1, 0));
    assert_eq!((a.uuid, &a.pci, a.vendor_id), (again.uuid, &again.pci, Some(0x1234)));
    assert_eq!(a.uuid.unwrap()[..3], [0x00, 0x11, 0x22]);
    assert_eq!((a.rank, again.rank, a.vendor.as_str()), (5, 2, "Acme"));
    let kinds = [a.kind, device(0, 1).kind, device(1, 1).kind];
    assert_eq!(kinds, [DeviceKind::DISCRETE, DeviceKind::INTEGRATED, DeviceKind::CPU]);
    for (backend, index) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let backend = &registry.backends[backend];
        assert_works(
            &Device::open(backend, index, DeviceOptions::default()).unwrap(),
            "one of four",
        );
    }
}

/// Statements that contradict each other are lowered to what can be true, and told.
#[test]
fn lies_are_bounded() {
    type Change = fn(&mut DeviceConfig);
    let max = |d: &DeviceInfo| d.buffer_types[0].max_size.get();
    let free = |d: &DeviceInfo| d.heaps[0].free.get();
    let chunk = |d: &DeviceInfo| d.buffer_types[0].preferred_chunk.get();
    type Get = fn(&DeviceInfo) -> Option<u64>;
    let table: [(Change, Get, Option<u64>, usize); 8] = [
        (|d| d.buffer_types[0].max_size = u64::MAX.into(), max, Some(GIB), 1),
        (|d| d.buffer_types[0].max_size = (2 * GIB).into(), max, Some(GIB), 1),
        (|d| d.buffer_types[0].max_size = Fig::unknown(), max, None, 0),
        (|d| d.buffer_types[0].max_size = 0.into(), max, Some(0), 1),
        (|d| d.heaps[0].free = (3 * GIB).into(), free, Some(GIB), 1),
        (|d| d.heaps[0].free = Fig::unknown(), free, None, 0),
        (
            |d| {
                let (state, source) = (9.into(), 99.into());
                d.heaps[0].free = Fig::Whole { value: 7, state, source };
            },
            free,
            None,
            0,
        ),
        (|d| d.buffer_types[0].preferred_chunk = (4 * GIB).into(), chunk, Some(GIB), 1),
    ];
    for (i, (change, get, expected, n_notes)) in table.into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let fake = Fake::new().device(DeviceConfig::gpu("A", GIB).with(change));
        let registry = load(&[&fake.install(dir.path()).unwrap().plugin]);
        let device = &registry.backends[0].devices()[0];
        assert_eq!(
            (get(device), device.contradictions.len()),
            (expected, n_notes),
            "row {i}: {device:?}"
        );
    }
}

/// Statements that leave nothing to assume take the device out of use, by name, before anything is indexed by them.
#[test]
fn nonsense_takes_the_device_out() {
    type Change = fn(&mut DeviceConfig);
    let table: [(Change, &str); 7] = [
        (|d| d.buffer_types[0].alignment = 48, "alignment 48"),
        (|d| d.buffer_types[0].import_alignment = 1 << 40, "import alignment"),
        (|d| d.buffer_types[0].heap = 7, "lies in heap 7"),
        (|d| d.type_for.kv = 2, "advises buffer type 2 for the KV cache"),
        (|d| d.n_heaps = Some(1000), "1000 heaps"),
        (|d| d.n_buffer_types = Some(u32::MAX), "buffer types"),
        (|d| d.n_heaps = Some(3), "not found"),
    ];
    for (change, expected) in table {
        let dir = tempfile::tempdir().unwrap();
        let fake = Fake::new().device(DeviceConfig::gpu("A", GIB).with(change));
        let registry = load(&[&fake.install(dir.path()).unwrap().plugin]);
        let faulty = registry.backends[0].faulty();
        let said = faulty.first().map(|f| f.error.to_string()).unwrap_or_default();
        assert!(said.contains(expected), "{said:?} does not say {expected:?}");
    }
}

/// Memory is as large as the configuration says, whatever was stated, and free bytes fall and rise with it.
#[test]
fn memory_is_finite() {
    let type0 =
        |change: fn(&mut BufferTypeConfig)| DeviceConfig::gpu("A", GIB).buffer_type(0, change);
    with_device(type0(|t| t.granularity = 4096), |device, _| {
        let free = || device.heaps().unwrap()[0].free.get().unwrap();
        let buffer = device.alloc(&desc(5000)).unwrap();
        assert_eq!(free(), GIB - 8192);
        drop(buffer);
        assert_eq!(free(), GIB);
    });
    // Stated a GiB, given a MiB: with the limit, or with a driver's word only.
    with_device(type0(|t| t.real_max_size = Some(MIB)), |device, _| {
        let error = device.alloc(&desc(MIB + 1)).unwrap_err();
        assert_eq!(
            (error.kind, error.asked, error.limit),
            (DeviceErrorKind::TooBig, Some(MIB + 1), Some(MIB))
        );
        assert!(device.alloc(&desc(MIB)).is_ok());
    });
    let native = type0(|t| {
        t.real_max_size = Some(MIB);
        t.refusal = Refusal { status: "out_of_memory".into(), native_code: Some(-61) };
    });
    with_device(native, |device, _| {
        let error = device.alloc(&desc(MIB + 1)).unwrap_err();
        assert_eq!((error.kind, error.native_code), (DeviceErrorKind::OutOfMemory, Some(-61)));
    });
    for (device, budget) in [
        (DeviceConfig::gpu("A", 4 * MIB), 4 * MIB),
        (DeviceConfig::gpu("A", GIB).with(|d| d.budget_bytes = Some(2 * MIB)), 2 * MIB),
        (DeviceConfig::gpu("A", GIB).heap(0, |h| h.budget = Some(3 * MIB)), 3 * MIB),
    ] {
        with_device(device, |device, _| {
            let kept: Vec<_> =
                (0..budget / MIB).map(|_| device.alloc(&desc(MIB)).unwrap()).collect();
            let error = device.alloc(&desc(1)).unwrap_err();
            assert_eq!(
                (error.kind, error.asked, error.free),
                (DeviceErrorKind::OutOfMemory, Some(1), Some(0))
            );
            drop(kept);
            assert!(device.alloc(&desc(budget)).is_ok());
        });
    }
}

/// A limit belongs to a device, not to the process: two devices asked in both orders and from two threads each give their own.
#[test]
fn limits_are_per_device() {
    let dir = tempfile::tempdir().unwrap();
    let device = |name, cap| DeviceConfig::gpu(name, GIB).max_size(cap);
    let fake = Fake::new().device(device("A", 32 * MIB)).device(device("B", 256 * MIB));
    let fake = fake.install(dir.path()).unwrap();
    for order in [[0, 1], [1, 0]] {
        let registry = load(&[&fake.plugin]);
        let ask = |index: u32| {
            let device = open(&registry, index).unwrap();
            let stated = device.info().buffer_types[0].max_size.get().unwrap();
            let over = device.alloc(&desc(stated + 1)).unwrap_err();
            assert_eq!((over.kind, over.limit), (DeviceErrorKind::TooBig, Some(stated)));
            assert!(device.alloc(&desc(stated)).is_ok());
            stated
        };
        let expected = |index: u32| [32 * MIB, 256 * MIB][index as usize];
        for index in order {
            assert_eq!(ask(index), expected(index));
        }
        std::thread::scope(|scope| {
            let threads = order.map(|index| (index, scope.spawn(move || ask(index))));
            for (index, thread) in threads {
                assert_eq!(thread.join().unwrap(), expected(index));
            }
        });
    }
    assert_clean(&fake, "two devices");
}

/// Memory that the host cannot reach is not reached: not by mapping, not by import, on any device that says so.
#[test]
fn memory_that_is_not_mapped() {
    with_device(DeviceConfig::gpu("A", GIB), |device, _| {
        let buffer = device.alloc(&desc(64)).unwrap();
        assert_eq!(buffer.map().unwrap_err().kind, DeviceErrorKind::Unsupported);
        let owner = std::sync::Arc::new(vec![0u8; 64]);
        let error = device.import(&desc(0), owner, 0..64).unwrap_err();
        assert_eq!(error.kind, DeviceErrorKind::Unsupported);
    });
}

/// An op that a device lacks is told before anything is compiled, and compiling all the same is refused.
#[test]
fn unsupported_ops() {
    for op in [Code::from("matmul"), Code::from(4)] {
        let device = DeviceConfig::gpu("A", GIB).with(|d| d.unsupported_ops = vec![op]);
        with_device(device, |device, _| {
            let error = tour(device).unwrap_err();
            assert_eq!(
                (error.kind, error.operation),
                (DeviceErrorKind::Unsupported, "program_compile")
            );
        });
    }
}

/// Weights in groups with padding between them, as repacking backends want them: results are the same.
#[test]
fn grouped_weights() {
    for (rows_per_group, pad) in [(1, 0), (8, 0), (8, 24), (16, 40), (64, 8)] {
        let device = DeviceConfig::gpu("A", GIB).with(|d| {
            d.weight_layout = LayoutConfig::Grouped { rows_per_group, pad };
            d.weight_alignment = 256;
        });
        with_device(device, |device, _| assert_works(device, &format!("{rows_per_group} {pad}")));
    }
}
