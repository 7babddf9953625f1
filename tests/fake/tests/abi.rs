//! Plugins of other revisions and with other structs: used where that is safe, refused with both numbers where it is not.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on fails"
)]
#![expect(unsafe_code, reason = "opens the plugin as a C host would")]

mod common;

use common::*;
use tegula_abi as abi;
use tegula_plugin::{DeviceErrorKind, HostAccess};
use test_tegula_fake::*;

fn with(change: impl FnOnce(&mut Config)) -> Fake {
    Fake::new().device(DeviceConfig::host("A", GIB)).with(change)
}

fn sized(name: &str, delta: i64) -> Fake {
    with(|config| config.struct_sizes = [(name.to_owned(), delta)].into())
}

/// What of a plugin is not used: the file, the device, or a call; `None` if all works.
fn refusal(fake: &Fake) -> Option<String> {
    let dir = tempfile::tempdir().unwrap();
    let fake = fake.install(dir.path()).unwrap();
    let registry = load(&[&fake.plugin]);
    if let Some(skipped) = registry.skipped.first() {
        return Some(skipped.reason.to_string());
    }
    if let Some(faulty) = registry.backends[0].faulty().first() {
        return Some(faulty.error.to_string());
    }
    tour(&open(&registry, 0).unwrap()).err().map(|e| e.to_string())
}

/// A user who mixes versions gets a working plugin or a message with both versions, never calls on wrong slots.
#[test]
fn revisions() {
    for (revisions, works) in [
        ([1, 1], true),
        ([0, 1], true),
        ([1, 2], true),
        ([1, 9], true),
        ([3, 9], true),
        ([4, 9], false),
        ([0, 0], false),
        ([3, 2], false),
    ] {
        for refuses_revisions in [true, false] {
            let said = refusal(&with(|config| {
                config.revisions = revisions;
                config.refuses_revisions = refuses_revisions;
            }));
            let expected = format!("speaks revisions {}..={}", revisions[0], revisions[1]);
            match said {
                None => assert!(works, "{revisions:?}"),
                Some(said) => assert!(!works && said.contains(&expected), "{revisions:?}: {said}"),
            }
        }
    }
}

/// Tables may grow at their end and lack what is optional; anything else is named, with sizes.
#[test]
fn struct_sizes() {
    let longer = ["backend_table", "device_table"];
    for (name, delta, expected) in [
        ("backend_table", 16, None),
        ("device_table", 64, None),
        // Its last function is optional.
        ("backend_table", -8, None),
        ("backend_table", -16, Some("backend table has")),
        ("device_table", -8, Some("device table has")),
        ("plugin", -8, Some("bytes of its answer")),
        ("plugin", 8, Some("bytes of its answer")),
        ("device_info", -8, Some("device_info: the plugin broke the interface's contract")),
        ("device_info", 8, Some("device_info: the plugin broke")),
        ("heap_info", -8, Some("heap_info: the plugin broke")),
        ("buffer_type_info", -32, Some("buffer_type_info: the plugin broke")),
        ("weight_layout", -8, Some("weight_layout: the plugin broke")),
        ("executable_memory", -8, Some("program_memory: the plugin broke")),
        ("executable_memory", 8, Some("program_memory: the plugin broke")),
    ] {
        let said = refusal(&sized(name, delta));
        match (&said, expected) {
            (None, None) => {}
            (Some(said), Some(expected)) if said.contains(expected) => {}
            _ => panic!("{name} {delta}: {said:?}"),
        }
    }
    // A newer plugin is longer and says so; an old host reads the part it knows.
    let newer = with(|config| {
        config.revisions = [1, 9];
        config.struct_sizes = longer.map(|name| (name.to_owned(), 40)).into();
    });
    assert_eq!(refusal(&newer), None);
}

/// A plugin without a function that every backend has is refused by the function's name; optional ones are done without.
#[test]
fn missing_functions() {
    let without = |name: &str| with(|config| config.missing.push(name.into()));
    for name in ["backend.device_open", "device.queue_run", "device.buffer_free", "device.close"] {
        let said = refusal(&without(name)).unwrap();
        let function = name.split_once('.').unwrap().1;
        assert!(said.contains(&format!("has no {function}")), "{said}");
    }
    assert_eq!(refusal(&without("backend.extension")), None);
    assert_eq!(refusal(&without("device.buffer_import")), None);
    assert!(refusal(&without("device.buffer_map")).unwrap().contains("not mapped"));
    let dir = tempfile::tempdir().unwrap();
    let registry = load(&[&without("device.buffer_map").install(dir.path()).unwrap().plugin]);
    let device = &registry.backends[0].devices()[0];
    assert_eq!(device.buffer_types[0].host_access, HostAccess::NONE);
    assert_eq!(device.contradictions.len(), 1, "{:?}", device.contradictions);
}

/// A configuration that cannot be read is no plain backend: a mistyped fault would make its test pass.
#[test]
fn wrong_configurations_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let fake = Fake::new().install(dir.path()).unwrap();
    let beside = format!("{}.json", fake.plugin.display());
    for text in [
        "{",
        r#"{"devces": []}"#,
        r#"{"faults": [{"at": "alloc", "nht": 3, "kind": "null"}]}"#,
        r#"{"faults": [{"at": "alocate", "kind": "null"}]}"#,
        r#"{"faults": [{"at": "alloc", "kind": {"error": {"status": "driver", "code": 3}}}]}"#,
        r#"{"missing": ["device.nothing"]}"#,
    ] {
        std::fs::write(&beside, text).unwrap();
        let registry = load(&[&fake.plugin]);
        let said = registry.skipped[0].reason.to_string();
        assert!(said.contains("invalid_argument"), "{text}: {said}");
    }
    let strange = FaultKind::error("no_such_status");
    let fake = Fake::new().fault(Fault::new(Point::Open, strange)).install(dir.path()).unwrap();
    let registry = load(&[&fake.plugin]);
    assert!(registry.skipped[0].reason.to_string().contains("`no_such_status`"));
    std::fs::write(&beside, "{}").unwrap();
}

/// What is alive can be asked while it is.
#[test]
fn the_extension_tells_what_is_alive() {
    let dir = tempfile::tempdir().unwrap();
    let fake = Fake::new().device(DeviceConfig::gpu("A", GIB)).install(dir.path()).unwrap();
    let registry = load(&[&fake.plugin]);
    let device = open(&registry, 0).unwrap();
    let usage = tegula_plugin::BufferUsage::KV;
    let desc = tegula_plugin::BufferDesc { size: 4096, buffer_type: 0, usage };
    let buffer = device.alloc(&desc).unwrap();
    // SAFETY: the file is open already, and its symbols are what the boundary and the extension say. The host's record is not used
    // by a fake that opens nothing.
    let counts = unsafe {
        let library = libloading::os::unix::Library::new(&fake.plugin).unwrap();
        let entry = *library.get::<abi::BackendEntry>(abi::ENTRY_SYMBOL).unwrap();
        let host = abi::Host {
            struct_size: size_of::<abi::Host>(),
            revision_min: 1,
            revision_max: 1,
            ctx: std::ptr::null_mut(),
            log: None,
            log_level_max: abi::LogLevel::OFF,
            version: abi::Str::of(""),
            extension: None,
        };
        let host = Box::leak(Box::new(host));
        let mut plugin: abi::Plugin = std::mem::zeroed();
        plugin.struct_size = size_of::<abi::Plugin>();
        assert_eq!(entry(host, &raw mut plugin), abi::Status::OK);
        let extension = (*plugin.backend).extension.unwrap();
        assert!(extension(abi::Str::of("tegula.nothing.v1")).is_null());
        let table = extension(abi::Str::of(FAKE_STATS)).cast::<FakeStatsTable>();
        let mut counts = FakeCounts::default();
        assert_eq!(((*table).read)(&raw mut counts), abi::Status::OK);
        counts
    };
    assert_eq!((counts.backends, counts.devices, counts.buffers), (1, 1, 1));
    assert_eq!((counts.bytes, counts.allocs, counts.violations), (4096, 1, 0));
    drop(buffer);
    let error = tour(&device).map(drop);
    assert!(error.is_ok(), "{error:?}");
    let again = device.alloc(&tegula_plugin::BufferDesc { size: 2 * GIB, ..desc }).unwrap_err();
    assert_eq!(again.kind, DeviceErrorKind::TooBig);
}
