//! Loading and unloading leaves nothing behind. Alone in its file, since it counts what the process has.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

mod common;

use common::*;
use tegula_plugin::{BufferDesc, BufferUsage, Device, DeviceOptions};

/// Mappings of the plugin, open files and threads.
fn census(plugin: &str) -> (usize, usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let count = |dir: &str| std::fs::read_dir(dir).unwrap().count();
    let maps = maps.lines().filter(|line| line.contains(plugin)).count();
    (maps, count("/proc/self/fd"), count("/proc/self/task"))
}

/// A host that reloads its models for weeks must not run out of mappings, files or threads.
#[test]
fn a_thousand_times() {
    let dir = tempfile::tempdir().unwrap();
    let path = example(dir.path(), "libtegula_cexample.so");
    let desc = BufferDesc { size: 4096, buffer_type: 0, usage: BufferUsage::WEIGHTS };
    let once = || {
        let registry = load(&[&path]);
        let device = Device::open(&registry.backends[0], 0, DeviceOptions::default()).unwrap();
        let (buffer, mut queue) = (device.alloc(&desc).unwrap(), device.queue().unwrap());
        // The last handle keeps the plugin mapped, whatever else is dropped.
        drop((registry, device));
        queue.write(&buffer, 0, &[7; 64]).unwrap();
        assert!(census("libtegula_cexample").0 > 0);
    };
    once();
    let before = census("libtegula_cexample");
    assert_eq!(before.0, 0, "the plugin is still mapped");
    for _ in 0..1000 {
        once();
    }
    assert_eq!(census("libtegula_cexample"), before);
}
