//! Plugins of other revisions: what was built years ago, or for a core that does not exist yet, still works; what only pretends
//! to be of this revision is refused by name.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::{install, load};
use tegula_plugin::{
    BufferDesc, BufferUsage, Device, DeviceErrorKind, DeviceOptions, SkipReason, WeightDesc,
    weight_use,
};
use tegula_program::ffi::FfiProgram;
use tegula_program::{Dim, ProgramBuilder};
use tegula_quant::DType;

/// A user who updates the core keeps the plugin of the graphics card, and the other way round.
#[test]
fn shorter_and_longer_tables_work() {
    for (name, other) in [("old", "newer"), ("newer", "old")] {
        let dir = tempfile::tempdir().unwrap();
        install(dir.path(), name);
        install(dir.path(), other);
        let registry = load(&[dir.path()]);
        assert_eq!(registry.backends.len(), 2, "{}", registry.describe_empty());
        let backend = registry.backend(name).unwrap();
        assert_eq!((backend.revision(), backend.version()), (1, "0.0.1"));
        let info = &backend.devices()[0];
        assert_eq!(
            (info.id(), info.name.as_str()),
            (format!("{name}:0"), "a device of another day")
        );
        assert!(backend.faulty().is_empty() && info.contradictions.is_empty(), "{info:?}");
        assert_eq!(info.buffer_types[0].max_size.get(), Some(1 << 20));
        // What it never heard of has its default: 0 asks for no alignment, unknown stays unknown.
        assert_eq!(info.buffer_types[0].import_alignment, 1);
        assert_eq!(info.heaps[0].free.get(), None);
        round_trip(&Device::open(backend, 0, DeviceOptions::default()).unwrap());
    }
}

fn round_trip(device: &Device) {
    let desc = BufferDesc { size: 4096, buffer_type: 0, usage: BufferUsage::WEIGHTS };
    let (a, b) = (device.alloc(&desc).unwrap(), device.alloc(&desc).unwrap());
    a.map().unwrap();
    let mut queue = device.queue().unwrap();
    let data: Vec<u8> = (0..=255).collect();
    queue.write(&a, 100, &data).unwrap();
    queue.copy(&a.span(100, 256).unwrap(), &b.span(3840, 256).unwrap()).unwrap();
    let mut back = vec![0; 256];
    queue.read(&b, 3840, &mut back).unwrap();
    assert_eq!(back, data);
    let error = device.alloc(&BufferDesc { size: 2 << 20, ..desc }).unwrap_err();
    assert_eq!((error.kind, error.asked), (DeviceErrorKind::TooBig, Some(2 << 20)));
    // Optional functions that it does not have are "not supported", and nothing is called.
    let owner = std::sync::Arc::new(vec![0u8; 64]);
    let error = device.import(&desc, owner, 0..64).unwrap_err();
    assert_eq!(error.kind, DeviceErrorKind::Unsupported);
    // What it cannot run it says, so that the core puts it elsewhere.
    let mut p = ProgramBuilder::new("scale");
    let x = p.input("x", DType::F32, &[Dim::NTokens, Dim::Fixed(4)]);
    let y = p.scale(x, 2.0);
    p.output("y", y);
    let program = FfiProgram::new(&p.finish().unwrap());
    assert_eq!(device.supports(&program).unwrap(), [false]);
    let weight = WeightDesc {
        dtype: DType::F32,
        uses: weight_use::MATMUL,
        n_in: 4,
        n_rows: 4,
        rows_per_expert: 0,
    };
    let error = device.weight_layout(&weight).unwrap_err();
    assert_eq!(error.kind, DeviceErrorKind::Unsupported);
    assert!(error.to_string().contains("this device runs no programs"), "{error}");
    assert!(!device.is_lost());
}

/// A table that was edited without a new revision would send calls to wrong functions; its author is told which.
#[test]
fn another_layout_of_the_same_revision_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let plugin = install(dir.path(), "layout");
    let sound = install(dir.path(), "old");
    let registry = load(&[&plugin, &sound]);
    assert_eq!(registry.backends.len(), 1, "the plugin beside it is lost");
    let reason = &registry.skipped[0].reason;
    assert!(matches!(reason, SkipReason::Layout { .. }), "{reason}");
    let said = reason.to_string();
    assert!(said.contains("rebuild the plugin"), "{said}");
    assert!(said.contains("tegula-layout-plugin"), "it does not say what differs: {said}");
    let lines = said.lines().count();
    assert!((2..=20).contains(&lines), "{lines} lines are no message:\n{said}");
}
