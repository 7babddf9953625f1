//! Every call of the boundary fails in every way, and the host says what happened, loses nothing and goes on.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on fails"
)]

mod common;

use common::*;
use std::time::Instant;
use tegula_plugin::{DeviceError, DeviceErrorKind as Kind, SkipReason};
use test_tegula_fake::*;

fn error(at: Point) -> Fault {
    let message = Some(format!("asked for at {at:?}"));
    let kind = FaultKind::Error { status: "driver".into(), native_code: Some(-5), message };
    Fault::new(at, kind)
}

/// A device that offers everything, imports included.
fn everything() -> Fake {
    Fake::new().device(DeviceConfig::host("A", GIB))
}

/// The first tour fails as expected, everything is given back, and the second tour, which the fault does not strike, works.
fn check(fault: Fault, expect: impl Fn(&DeviceError) -> bool) {
    let dir = tempfile::tempdir().unwrap();
    let what = format!("{fault:?}");
    // A panic ends the device's handle for the host, and a new one works; a lost device is lost.
    let survives =
        fault.kind != FaultKind::DeviceLost && fault.kind != FaultKind::error("device_lost");
    let fake = everything().fault(fault).install(dir.path()).unwrap();
    let registry = load(&[&fake.plugin]);
    let result = open(&registry, 0).and_then(|device| tour(&device).map(drop));
    let error = result.expect_err(&what);
    assert!(expect(&error), "{what}: {error:?}");
    let device = open(&registry, 0);
    if survives {
        assert_works(&device.unwrap(), &what);
    } else if let Ok(device) = device {
        let again = tour(&device).unwrap_err();
        assert!(again.kind == Kind::DeviceLost || again.kind == error.kind, "{what}: {again}");
    }
    drop(registry);
    assert_clean(&fake, &what);
}

/// A user of a failing driver reads which call failed, where, and the driver's own number.
#[test]
fn every_call_fails_with_its_name_and_code() {
    for (at, operation) in [
        (Point::DeviceOpen, "device_open"),
        (Point::Alloc, "buffer_alloc"),
        (Point::Import, "buffer_import"),
        (Point::Map, "buffer_map"),
        (Point::WeightLayout, "weight_layout"),
        (Point::Supports, "program_supports"),
        (Point::Memory, "program_memory"),
        (Point::Compile, "program_compile"),
        (Point::QueueCreate, "queue_create"),
        (Point::Write, "queue_write"),
        (Point::Read, "queue_read"),
        (Point::Copy, "queue_copy"),
        (Point::Upload, "queue_upload"),
        (Point::Run, "queue_run"),
        (Point::Wait, "queue_wait"),
    ] {
        check(error(at), |e| {
            let text = format!("asked for at {at:?}");
            (e.kind, e.operation, e.native_code) == (Kind::Driver, operation, Some(-5))
                && *e.message == *text
                && e.to_string().contains("fake:0")
        });
    }
}

/// Work that fails after it was submitted is told at the wait for it, not lost.
#[test]
fn deferred_failures_show_at_the_wait() {
    for at in [Point::Upload, Point::Run, Point::Write, Point::Copy, Point::Read] {
        check(error(at).deferred(), |e| {
            e.operation == "queue_wait" && e.message.contains(&format!("{at:?}"))
        });
    }
}

/// Each kind of failure reaches the caller as that kind: programs decide by it, people by the text.
#[test]
fn kinds() {
    let code = |number: i64| FaultKind::error(number);
    let table: [(Point, FaultKind, Kind); 15] = [
        (Point::Alloc, FaultKind::error("out_of_memory"), Kind::OutOfMemory),
        (Point::Alloc, FaultKind::error("too_big"), Kind::TooBig),
        (Point::Compile, FaultKind::error("unsupported"), Kind::Unsupported),
        (Point::Run, FaultKind::error("device_lost"), Kind::DeviceLost),
        (Point::Run, FaultKind::DeviceLost, Kind::DeviceLost),
        (Point::Upload, FaultKind::DeviceLost, Kind::DeviceLost),
        (Point::Compile, FaultKind::Panic, Kind::Panic),
        (Point::Run, FaultKind::Panic, Kind::Panic),
        (Point::Run, code(77), Kind::Unknown(77)),
        (Point::Run, code(-1), Kind::Unknown(-1)),
        (Point::Alloc, FaultKind::Null, Kind::BadAnswer),
        (Point::DeviceOpen, FaultKind::Null, Kind::BadAnswer),
        (Point::Compile, FaultKind::Null, Kind::BadAnswer),
        (Point::QueueCreate, FaultKind::Null, Kind::BadAnswer),
        (Point::Map, FaultKind::Null, Kind::BadAnswer),
    ];
    for (at, kind, expected) in table {
        check(Fault::new(at, kind), |e| e.kind == expected);
    }
    check(Fault::new(Point::WeightLayout, FaultKind::Null), |e| e.kind == Kind::BadAnswer);
    let lost = Fault::new(Point::Run, FaultKind::DeviceLost).deferred();
    check(lost, |e| (e.kind, e.operation) == (Kind::DeviceLost, "queue_wait"));
}

/// A record without text, or with text that lies about itself, is printed in one line and reads no foreign memory.
#[test]
fn texts_are_not_trusted() {
    let status: Code = "driver".into();
    let silent = FaultKind::NoErrorText { status: status.clone() };
    check(Fault::new(Point::Run, silent), |e| e.kind == Kind::Driver && e.message.is_empty());
    check(Fault::new(Point::Run, FaultKind::BadText { status }), |e| {
        e.kind == Kind::Driver && !e.to_string().chars().any(char::is_control)
    });
    let message = Some("x".repeat(10_000));
    let long = FaultKind::Error { status: "driver".into(), native_code: None, message };
    check(Fault::new(Point::Run, long), |e| (500..=512).contains(&e.message.len()));
}

/// A fault counts the calls it is about: the k-th, on the device it names.
#[test]
fn the_kth_call_of_one_device() {
    let dir = tempfile::tempdir().unwrap();
    let fault = Fault::new(Point::Alloc, FaultKind::error("out_of_memory")).nth(2).device(1);
    let device = |name| DeviceConfig::gpu(name, GIB);
    let fake = Fake::new().device(device("A")).device(device("B")).fault(fault);
    let fake = fake.install(dir.path()).unwrap();
    let registry = load(&[&fake.plugin]);
    let (a, b) = (open(&registry, 0).unwrap(), open(&registry, 1).unwrap());
    assert_works(&a, "device 0 is not meant");
    let error = tour(&b).unwrap_err();
    assert_eq!((error.kind, &*error.device), (Kind::OutOfMemory, "fake:1 B"));
    assert_works(&b, "call 2 is over");
    drop((registry, a, b));
    let stats = assert_clean(&fake, "two devices");
    assert_eq!(stats.devices[1].alloc_calls, stats.devices[1].allocs + 1);
}

/// Wrong results cannot be told from right ones at the boundary: the fake exists so that tests above it can have them.
#[test]
fn wrong_results() {
    for (how, is_wrong) in [
        (Wrong::Nan, (|_, got| f32::is_nan(got)) as fn(f32, f32) -> bool),
        (Wrong::Negated, |want, got| want == -got),
        (Wrong::Zero, |_, got| got == 0.0),
    ] {
        for run in [0, 1] {
            let dir = tempfile::tempdir().unwrap();
            let fault = Fault::new(Point::Run, FaultKind::WrongResult { how }).nth(run as u64 + 1);
            let fake = everything().fault(fault).install(dir.path()).unwrap();
            let registry = load(&[&fake.plugin]);
            let outputs = tour(&open(&registry, 0).unwrap()).unwrap();
            assert_eq!(outputs[1 - run], expected(), "{how:?}");
            let mut pairs = expected().into_iter().zip(outputs[run].iter().copied());
            assert!(pairs.all(|(want, got)| is_wrong(want, got)), "{how:?}: {outputs:?}");
        }
    }
}

/// A backend that fails before it has devices is skipped with its reason, and the others are used.
#[test]
fn faults_before_there_is_a_device() {
    for (fault, expected) in [
        (error(Point::Negotiate), "the plugin's entry failed: driver"),
        (Fault::new(Point::Negotiate, FaultKind::Panic), "the plugin's entry failed: panic"),
        (Fault::new(Point::Negotiate, FaultKind::Null), "it gives no backend table"),
        (error(Point::Open), "fake: open: driver error, driver code -5: asked for at Open"),
        (Fault::new(Point::Open, FaultKind::Panic), "the plugin panicked"),
        (Fault::new(Point::Open, FaultKind::Null), "it returned no backend without an error"),
        (error(Point::DeviceCount), "asked for at DeviceCount"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let what = format!("{fault:?}");
        let fake = Fake::new().fault(fault).install(dir.path()).unwrap();
        let other = Fake::new().id("other").install(dir.path()).unwrap();
        let registry = load(&[&fake.plugin, &other.plugin]);
        let said = registry.skipped[0].reason.to_string();
        assert!(said.contains(expected), "{what}: {said}");
        assert_works(&open(&registry, 0).unwrap(), "the other backend");
    }
    let none = Fake::new().with(|config| config.inner = Some("nowhere/libtegula_x.so".into()));
    let dir = tempfile::tempdir().unwrap();
    let registry = load(&[&none.install(dir.path()).unwrap().plugin]);
    let reason = &registry.skipped[0].reason;
    assert!(matches!(reason, SkipReason::Backend(e) if e.kind == Kind::NotFound), "{reason}");
}

/// A device that cannot say what it is does not take the others with it.
#[test]
fn faulty_devices() {
    for at in [Point::DeviceInfo, Point::HeapInfo, Point::BufferTypeInfo] {
        for kind in [FaultKind::error("driver"), FaultKind::Panic, FaultKind::Null] {
            // An empty answer of a heap is one without figures; an empty device has no buffer types to advise.
            let is_usable = kind == FaultKind::Null && at != Point::DeviceInfo;
            let fault = Fault::new(at, kind).device(0).always();
            let what = format!("{fault:?}");
            let device = |name| DeviceConfig::gpu(name, GIB);
            let fake = Fake::new().device(device("A")).device(device("B")).fault(fault);
            let dir = tempfile::tempdir().unwrap();
            let registry = load(&[&fake.install(dir.path()).unwrap().plugin]);
            let backend = &registry.backends[0];
            let faulty: Vec<u32> = backend.faulty().iter().map(|f| f.index).collect();
            assert_eq!(faulty, if is_usable { vec![] } else { vec![0] }, "{what}");
            assert_works(&open(&registry, 1).unwrap(), &what);
        }
    }
}

/// Slow calls are slow and right: what measures bandwidth has something to measure.
#[test]
fn slow_calls_and_slow_memory() {
    let timed = |fake: Fake| {
        let dir = tempfile::tempdir().unwrap();
        let fake = fake.install(dir.path()).unwrap();
        let registry = load(&[&fake.plugin]);
        let device = open(&registry, 0).unwrap();
        let start = Instant::now();
        assert_works(&device, "slow");
        start.elapsed().as_millis()
    };
    let slow = Fault::new(Point::Wait, FaultKind::Slow { ms: 150.0, ms_per_mib: 0.0 });
    assert!(timed(everything().fault(slow)) >= 150);
    // The weights are 5 KiB, read by two runs, and written once.
    let memory = DeviceConfig::gpu("A", GIB).buffer_type(0, |t| t.slow_ms_per_mib = 10_000.0);
    assert!(timed(Fake::new().device(memory)) >= 140);
}
