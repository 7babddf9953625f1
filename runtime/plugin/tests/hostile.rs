//! Files and plugins that are not what they say: each is skipped with a reason, and the process lives.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

mod common;

use common::*;
use std::path::Path;
use tegula_plugin::{BufferDesc, BufferUsage, Device, DeviceErrorKind, DeviceOptions, SkipReason};

/// A user who downloads half a plugin gets a message, not a dead process.
#[test]
fn truncated_files() {
    let dir = tempfile::tempdir().unwrap();
    let whole = std::fs::read(example(dir.path(), "libtegula_cexample.so")).unwrap();
    let cut = dir.path().join("libtegula_cut.so");
    let step = 97;
    for len in (0..whole.len()).step_by(step).chain(whole.len() - 65..whole.len()) {
        std::fs::write(&cut, &whole[..len]).unwrap();
        let registry = load(&[&cut]);
        assert!(registry.backends.is_empty(), "{len} of {} bytes", whole.len());
        let reason = &registry.skipped[0].reason;
        assert!(matches!(reason, SkipReason::Elf(_)), "{len} bytes: {reason}");
    }
}

/// Each kind of wrong file is named, so that the user knows what to do.
#[test]
fn wrong_files() {
    let dir = tempfile::tempdir().unwrap();
    let whole = std::fs::read(example(dir.path(), "libtegula_cexample.so")).unwrap();
    let patched = |at: usize, bytes: &[u8]| {
        let mut out = whole.clone();
        out[at..at + bytes.len()].copy_from_slice(bytes);
        out
    };
    let path = dir.path().join("libtegula_x.so");
    for (bytes, expected) in [
        (Vec::new(), "the file is empty"),
        (b"INPUT(libtegula_cpu.so)".to_vec(), "not an ELF file"),
        (b"\x7fEL".to_vec(), "not an ELF file"),
        (patched(4, &[1]), "class 1"),
        (patched(5, &[2]), "byte order 2"),
        (patched(18, &[0xf3, 0]), "built for processor 243"),
        (patched(16, &[2, 0]), "not a shared library (ELF type 2)"),
        (patched(32, &[0xff; 8]), "damaged"),
        (patched(40, &[0xff; 6]), "truncated: the section header table"),
        (patched(56, &[0xff, 0xff]), "truncated: the program header table"),
        (patched(56, &[0, 0]), "no dynamic section"),
    ] {
        std::fs::write(&path, bytes).unwrap();
        let said = reason(&path);
        assert!(said.contains(expected), "{said:?} does not say {expected:?}");
    }
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    let registry = load(&[dir.path()]);
    assert_eq!(
        registry.backends.len(),
        1,
        "a folder named like a plugin is no reason to lose the others"
    );
    assert!(registry.skipped[0].reason.to_string().contains("not a regular file"));
}

/// A library that only looks like a plugin by its name is none of our business: it is not opened, and nobody is alarmed.
#[test]
fn library_that_is_no_plugin() {
    let dir = tempfile::tempdir().unwrap();
    let mark = dir.path().join("opened");
    let code = format!(
        "#include <stdio.h>\n__attribute__((constructor)) static void f(void) {{ fclose(fopen(\"{}\", \"w\")); }}\nint tegula_backend_v2(void);\nint tegula_backend_v2(void) {{ return 1; }}\n",
        mark.display()
    );
    for (file, hash) in [("libtegula_a.so", "gnu"), ("libtegula_b.so", "sysv")] {
        library(
            dir.path(),
            file,
            &code,
            &[&format!("-Wl,--hash-style={hash}"), "-fvisibility=default"],
        );
    }
    let registry = load(&[dir.path()]);
    assert_eq!(registry.skipped.len(), 2);
    for skipped in &registry.skipped {
        assert!(skipped.reason.to_string().contains("does not export tegula_backend_v1"));
    }
    assert!(!mark.exists(), "it was opened to find out");
    let path = tegula_plugin::SearchPath {
        dirs: vec![(dir.path().into(), tegula_plugin::Origin::Core)],
        ..Default::default()
    };
    let registry = tegula_plugin::Registry::load_from(path);
    assert!(
        registry.skipped.iter().all(|s| s.level == log::Level::Debug),
        "{:?}",
        registry.skipped
    );
}

/// Linkers of some systems write only the old hash table.
#[test]
fn both_hash_tables() {
    for style in ["gnu", "sysv", "both"] {
        let dir = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/faulty.c");
        let out = dir.path().join("libtegula_x.so");
        cc(&source, &out, &["-DFAULT=(void)0", &format!("-Wl,--hash-style={style}")]);
        assert_eq!(load(&[&out]).backends.len(), 1, "{style}");
    }
}

/// "Cannot open shared object file" sends users looking at the plugin; what they need is the name of the missing library.
#[test]
fn missing_library() {
    let dir = tempfile::tempdir().unwrap();
    let dep = library(
        dir.path(),
        "libgone.so",
        "int gone(void);\nint gone(void) { return 1; }\n",
        &["-fvisibility=default", "-Wl,-soname,libgone.so.7"],
    );
    let code = "int gone(void);\n__attribute__((visibility(\"default\"))) int tegula_backend_v1(void);\nint tegula_backend_v1(void) { return gone(); }\n";
    let plugin = library(dir.path(), "libtegula_x.so", code, &[dep.to_str().unwrap()]);
    std::fs::remove_file(dep).unwrap();
    let said = reason(&plugin);
    assert!(said.starts_with("needs libgone.so.7, which was not found"), "{said}");
    let plugin = library(dir.path(), "libtegula_y.so", code, &[]);
    let said = reason(&plugin);
    assert!(said.contains("undefined symbol: gone"), "{said}");
}

/// Negotiations that go wrong: the reason names what, and the example beside it still loads.
#[test]
fn negotiations() {
    let dir = tempfile::tempdir().unwrap();
    let sound = example(dir.path(), "libtegula_cexample.so");
    let path = dir.path().join("libtegula_x.so");
    for (fault, expected) in [
        (
            "out->revision_min=7;out->revision_max=9",
            "speaks revisions 7..=9 of the backend interface, this core 1..=3",
        ),
        ("out->revision_min=9;out->revision_max=7", "speaks revisions 9..=7"),
        (
            "out->revision_min=5;out->revision_max=6;return TEGULA_STATUS_INCOMPATIBLE",
            "speaks revisions 5..=6",
        ),
        ("return TEGULA_STATUS_PANIC", "the plugin's entry failed: panic"),
        ("return (TegulaStatus)-77", "the plugin's entry failed: unknown(-77)"),
        ("out->struct_size=16", "it filled 16 bytes"),
        ("out->struct_size=4096", "it filled 4096 bytes"),
        ("out->id.len=0", "its id"),
        ("out->id.ptr=NULL", "its id"),
        ("out->id.ptr=(const uint8_t*)\"../../../\"", "its id"),
        ("out->id.len=(size_t)-1", "its id"),
        ("out->version.ptr=NULL", "its version is no text"),
        ("out->backend=NULL", "no backend table"),
        (
            "out->backend=(const TegulaBackendTable*)((const char*)&backend+1)",
            "backend table is misaligned",
        ),
        ("backend.struct_size=24", "backend table has 24 bytes"),
        ("backend.device=NULL", "no device table"),
        ("device.struct_size=0", "device table has 0 bytes"),
        ("backend.heap_info=NULL", "the backend table has no heap_info"),
        ("device.queue_run=NULL", "the device table has no queue_run"),
        ("backend.open=open_nothing", "it returned no backend without an error"),
        ("backend.open=open_no_driver", "x: open: driver error, driver code -9: no driver here"),
        ("backend.device_count=many_devices", "4000000000 devices"),
    ] {
        let fault = format!("out->id=(TegulaStr)STR(\"x\");{fault}");
        faulty(dir.path(), "libtegula_x.so", &fault);
        let said = reason(&path);
        assert!(said.contains(expected), "{fault}: {said:?} does not say {expected:?}");
        let both = load(&[&path, &sound]);
        assert_eq!(both.backends.len(), 1, "{fault}");
    }
}

/// A layout is compared when both sides speak of the same thing, and never followed when it is not there.
#[test]
fn layout_records() {
    let dir = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/faulty.c");
    for (layout, expected) in [
        ("return NULL", Some("layout record is null")),
        ("return (const Record*)((const char*)&record+1)", Some("null or misaligned")),
        ("record.struct_size=8", Some("layout record has 8 bytes")),
        ("(void)0", Some("has no layout")),
        ("record.format=(TegulaStr)STR(\"other-1\")", None),
        ("record.format.ptr=NULL", None),
        ("record.revision=1", None),
    ] {
        let path = dir.path().join("libtegula_x.so");
        cc(&source, &path, &["-DFAULT=(void)0", &format!("-DLAYOUT={layout}")]);
        match expected {
            None => assert_eq!(load(&[&path]).backends.len(), 1, "{layout}"),
            Some(expected) => {
                let said = reason(&path);
                assert!(said.contains(expected), "{layout}: {said}");
            }
        }
    }
}

/// An older plugin whose table ends before the optional tail, and one without optional functions, work.
#[test]
fn shorter_tables_work() {
    let dir = tempfile::tempdir().unwrap();
    for fault in
        ["backend.struct_size=offsetof(TegulaBackendTable,extension)", "device.buffer_map=NULL"]
    {
        let path = faulty(dir.path(), "libtegula_x.so", fault);
        let registry = load(&[&path]);
        assert_eq!(registry.backends.len(), 1, "{fault}: {}", registry.describe_empty());
    }
}

/// A device that contradicts itself is used with the safe reading, or not at all, and either is told.
#[test]
fn contradictions() {
    let dir = tempfile::tempdir().unwrap();
    let heap = "heap.struct_size=sizeof heap;heap.total=known(1000,1);heap.free=known(5000,1);backend.heap_info=other_heap";
    let typ = "backend.buffer_type_info=other_type";
    let info = "backend.device_info=other_info";
    for (fault, note, refused) in [
        (heap.to_owned(), "heap 0 has 5000 bytes free of 1000", ""),
        (
            format!("type.max_size=known((uint64_t)-1,1);{typ}"),
            "buffer type 0 allows 18446744073709551615 bytes",
            "",
        ),
        (
            format!("type.flags=TEGULA_BUFFER_TYPE_FLAG_IMPORT;{typ}"),
            "the backend has no import",
            "",
        ),
        ("device.buffer_map=NULL".to_owned(), "the backend maps nothing", ""),
        (format!("type.alignment=48;{typ}"), "", "alignment 48"),
        (format!("type.heap=3;{typ}"), "", "lies in heap 3, there are 1"),
        (format!("info.n_heaps=4000000000u;{info}"), "", "4000000000 heaps"),
        (format!("info.type_for_kv=2;{info}"), "", "advises buffer type 2 for the KV cache"),
        (format!("info.struct_size=9;{info}"), "", "filled 9 bytes"),
    ] {
        let path = faulty(dir.path(), "libtegula_x.so", &fault);
        let registry = load(&[&path]);
        let backend = &registry.backends[0];
        if refused.is_empty() {
            let device = &backend.devices()[0];
            assert!(device.contradictions.iter().any(|n| n.contains(note)), "{fault}: {device:?}");
            let (heap, kind) = (device.heaps[0], &device.buffer_types[0]);
            assert!(heap.free.get() <= heap.total.get(), "{fault}");
            assert!(kind.max_size.get() <= heap.total.get(), "{fault}");
        } else {
            assert!(backend.devices().is_empty(), "{fault}");
            let said = backend.faulty()[0].error.to_string();
            assert!(said.contains(refused), "{fault}: {said}");
        }
    }
}

/// Answers to calls that break the contract are errors of this call, never a null pointer that is used.
#[test]
fn broken_calls() {
    let dir = tempfile::tempdir().unwrap();
    let desc = BufferDesc { size: 64, buffer_type: 0, usage: BufferUsage::ANY };
    // A name for each: while a library is mapped, its name stands for it, whatever the file became.
    let open = |fault: &str| {
        let file = format!("libtegula_{}.so", fault.split_once('=').unwrap().1);
        let path = faulty(dir.path(), &file, fault);
        let registry = load(&[&path]);
        Device::open(&registry.backends[0], 0, DeviceOptions::default()).unwrap()
    };
    let error = open("device.buffer_alloc=alloc_nothing").alloc(&desc).unwrap_err();
    assert_eq!((error.kind, error.asked), (DeviceErrorKind::BadAnswer, Some(64)));
    assert!(error.to_string().contains("no buffer without an error"), "{error}");

    let error = open("device.buffer_alloc=alloc_mystery").alloc(&desc).unwrap_err();
    assert_eq!(error.kind, DeviceErrorKind::Unknown(99), "{error}");

    let error = open("device.buffer_map=map_nothing").alloc(&desc).unwrap().map().unwrap_err();
    assert_eq!(error.kind, DeviceErrorKind::BadAnswer, "{error}");

    let device = open("device.queue_write=write_lost");
    let (buffer, mut queue) = (device.alloc(&desc).unwrap(), device.queue().unwrap());
    let error = queue.write(&buffer, 0, &[1; 8]).unwrap_err();
    assert_eq!(error.kind, DeviceErrorKind::DeviceLost);
    assert!(device.is_lost() && device.alloc(&desc).is_err(), "a lost device is called again");

    let device = open("device.queue_write=write_back");
    let (buffer, mut queue) = (device.alloc(&desc).unwrap(), device.queue().unwrap());
    queue.write(&buffer, 0, &[1; 8]).unwrap_err();

    let device = open("device.queue_wait=wait_never");
    let (buffer, mut queue) = (device.alloc(&desc).unwrap(), device.queue().unwrap());
    let error = queue.write(&buffer, 0, &[1; 8]).unwrap_err();
    assert!(error.to_string().contains("timed out") && device.is_lost(), "{error}");
}
