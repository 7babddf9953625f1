//! Records of plugins arrive in the host's logger. Alone in its file, since a process has one logger.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

mod common;

use common::*;
use std::sync::Mutex;

struct Collect(Mutex<Vec<String>>);

impl log::Log for Collect {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }
    fn log(&self, record: &log::Record<'_>) {
        let line = format!("{} {} {}", record.level(), record.target(), record.args());
        self.0.lock().unwrap().push(line);
    }
    fn flush(&self) {}
}

/// `RUST_LOG=tegula_cexample=debug` shows what the plugin says, under the plugin's name; a panicking logger hurts nobody.
#[test]
fn records_arrive() {
    static LOGGER: Collect = Collect(Mutex::new(Vec::new()));
    log::set_logger(&LOGGER).unwrap();
    log::set_max_level(log::LevelFilter::Debug);
    let dir = tempfile::tempdir().unwrap();
    let path = example(dir.path(), "libtegula_cexample.so");
    assert_eq!(load(&[&path]).backends.len(), 1);
    let lines = std::mem::take(&mut *LOGGER.0.lock().unwrap());
    assert!(lines.iter().any(|l| l == "DEBUG tegula_cexample::c opened"), "{lines:?}");
    log::set_max_level(log::LevelFilter::Info);
    drop(load(&[&path]));
    assert_eq!(
        *LOGGER.0.lock().unwrap(),
        Vec::<String>::new(),
        "a level that nobody wants was sent"
    );
}
