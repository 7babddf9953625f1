//! For authors of backends in Rust: implement [`Backend`], [`Device`] and [`Queue`], then `export_backend!(MyBackend)`.
//!
//! The macro exports the plugin's two symbols and makes the boundary's tables from the traits. Every thunk catches panics and
//! turns them, like errors, into a status with a record; nothing unwinds into the host. Log through the `log` crate: records reach the
//! host's log with the plugin's own targets.
//!
//! What the traits may rely on, because the core promises it: programs are verified; bindings fit their values; buffers
//! and tiles outlive the executables that hold them ([`Held`]); a queue is used by one thread at a time; block tables cover every position of a run.
//!
//! `backends/reference` is the template to copy.

#![expect(unsafe_code, reason = "thunks translate raw pointers of the boundary to the safe traits")]

mod device;
mod error;
mod host;
pub mod host_memory;
mod run;
pub mod scratch;
mod thunks;

pub use device::{
    Backend, Device, Held, Memory, Queue, Range, Tile, Upload, Weight, WeightBinding,
};
pub use error::{Error, Result};
pub use run::{KvGroup, Operand, Run, Seq, StatePool};
pub use tegula_abi as abi;
pub use tegula_program as program;
pub use tegula_quant as quant;

#[doc(hidden)]
pub use thunks::negotiate;

/// Exports a [`Backend`] as a plugin. Once per crate, at its root.
#[macro_export]
macro_rules! export_backend {
    ($backend:ty) => {
        /// The plugin's entry; see `tegula_abi::BackendEntry`.
        ///
        /// # Safety
        /// As the boundary says: `host` and `out` are valid, `host` for as long as the plugin is loaded.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn tegula_backend_v1(
            host: *const $crate::abi::Host,
            out: *mut $crate::abi::Plugin,
        ) -> $crate::abi::Status {
            // SAFETY: passed on unchanged.
            unsafe { $crate::negotiate::<$backend>(host, out, env!("CARGO_PKG_VERSION")) }
        }

        /// The layout of the tables this plugin was compiled with.
        #[unsafe(no_mangle)]
        pub extern "C" fn tegula_layout_v1() -> *const $crate::abi::LayoutRecord {
            &$crate::abi::LAYOUT_RECORD
        }
    };
}
