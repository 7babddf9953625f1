//! A plugin for tests: real computation by another backend, behind whatever identity, limits and faults a test asks for.
//!
//! It is a shim between two sets of the boundary's tables. It opens a real plugin (the reference backend unless told otherwise),
//! forwards every call to that one's first device, and changes what the configuration says: how many devices there are and what
//! they state, what memory they truly have, and which call fails how. Results are the real backend's, so a test can compare logits.
//!
//! # Configuration
//! JSON, of type [`Config`]; every field has a default, so `{}` is a plain backend of id `fake` with one device. It is read again at every
//! negotiation and every open, from the first of
//! * `<file of the plugin>.json`, beside the plugin;
//! * the variable `TEGULA_FAKE_CONFIG`: a path, or the JSON itself if it begins with `{`.
//!
//! Two fakes in one process are two copies of the file with a configuration beside each; [`Fake::install`] makes such a copy:
//!
//! ```no_run
//! use test_tegula_fake::*;
//! let fake = Fake::new()
//!     .device(DeviceConfig::gpu("A", 4 * GIB).max_size(64 * MIB))
//!     .fault(Fault::new(Point::Alloc, FaultKind::error("out_of_memory")).nth(3))
//!     .install(std::path::Path::new("/tmp/plugins"))?;
//! println!("{} {:?}", fake.plugin.display(), fake.stats()?);
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! The same as JSON:
//!
//! ```json
//! {
//!   "devices": [{
//!     "name": "A", "kind": "discrete",
//!     "heaps": [{"kind": "device_local", "pool": 16, "total": 4294967296, "free": 4294967296}],
//!     "buffer_types": [{"name": "device_local", "heap": 0, "max_size": 67108864}]
//!   }],
//!   "faults": [{"at": "alloc", "nth": 3, "kind": {"error": {"status": "out_of_memory"}}}],
//!   "stats_file": "/tmp/plugins/stats.json"
//! }
//! ```
//!
//! # What it watches
//! It is strict where real drivers are lax: handles that are not alive, ranges outside their buffer, tiles that are not aligned as
//! was asked, a buffer freed under an executable, two threads in one queue, a device closed with things left on it. Each is an
//! error of the call where it has one, and a line of [`Stats::violations`] in any case.
//!
//! # Decisions
//! * **Buffers keep the inner backend's handles**, so that the arrays of a run, which name them, cross unchanged; what is known of a
//!   buffer is in a book beside. Devices, queues and executables are the shim's own.
//! * **Every device is the inner backend's first**, opened once for each, so that two fake devices share nothing but the processor.
//! * **Faults count from the open of a backend**; a negotiation counts over the life of the library.

#![expect(unsafe_code, reason = "a shim between two sets of the boundary's tables")]

mod backend;
mod books;
mod builder;
mod config;
mod device;
mod entry;
mod failure;
mod faults;
mod inner;
mod program;
mod queue;
mod statement;
mod stats;

pub use builder::{Fake, Installed, built_plugin, reference_plugin};
pub use config::{
    BufferTypeConfig, Code, Config, DeviceConfig, Fault, FaultKind, Fig, GIB, HeapConfig, KIB,
    LayoutConfig, MIB, Point, Refusal, TypeFor, Wrong,
};
#[doc(hidden)]
pub use entry::tegula_backend_v1;
pub use stats::{DeviceStats, FAKE_STATS, FakeCounts, FakeStatsTable, Stats, UsageStats};
