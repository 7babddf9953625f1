//! The boundary between Tegula's core and its backends.
//!
//! This crate is `repr(C)` tables and nothing else: a backend in C is written from the header generated
//! from it (`include/tegula_backend.h`), a backend in Rust through `tegula-sdk`, which makes these tables from safe traits.
//!
//! # Rules of the boundary
//!
//! * **One symbol.** A plugin exports [`ENTRY_SYMBOL`], of type [`BackendEntry`]. It negotiates ([`Host`] in,
//!   [`Plugin`] out), makes no driver call and returns within milliseconds. Rust plugins also export
//!   [`LAYOUT_SYMBOL`], the recursive layout of the tables they were compiled with.
//! * **Growth is appending.** Every struct that crosses by pointer starts with `struct_size`, set by whoever filled it
//!   in. A reader uses a field only if it ends within the size that the writer stated, and otherwise takes
//!   the default that the field's comment names. Small structs passed or embedded by value ([`Str`], [`Figure`], [`BufferRange`]) are frozen instead.
//!   Arrays cross as [`Slice`], whose `stride` is the writer's element size, so that elements can grow as well.
//! * **Open enums.** Enumerations are transparent integers with constants. A value that the reader does not know is an error value or
//!   "something newer", never undefined behaviour.
//! * **Ownership never crosses.** What is borrowed for the call is read only during the call; results go to memory of the caller's.
//!   Handles are freed by the side that made them, through the table's own function, exactly once.
//! * **Errors** are a [`Status`] and, where the caller gave one, a filled [`ErrorRecord`]. Nothing unwinds,
//!   aborts or exits across the boundary.
//! * **Threads.** Backend and device functions may be called from any thread at any time, concurrently. A queue is
//!   used by one thread at a time. Buffers may be freed only when no submitted work uses them.
//! * **Crossed once per run.** The core calls [`DeviceTable::queue_run`] once per ubatch, never per op.
//! * **Sizes** are bytes in `u64`; `struct_size`, lengths and strides are `usize`.
//! * **Draft.** Revision numbers below [`FROZEN_FROM`] may change in any way between releases; each change has its line in `abi/CHANGELOG.md`.

#![expect(unsafe_code, reason = "this crate is the boundary: raw pointers in, raw pointers out")]

mod backend;
mod crossing;
mod device;
mod error;
mod layout;
mod program;
mod run;
mod types;

pub use backend::*;
pub use crossing::*;
pub use device::*;
pub use error::*;
pub use layout::*;
pub use program::*;
pub use run::*;
pub use types::*;

/// The revision of the tables in this crate. A plugin states the range it can serve; the core takes the
/// greatest revision both know.
pub const REVISION: u32 = 3;
/// The oldest revision that this crate's reader still understands.
pub const REVISION_MIN: u32 = 1;
/// Revisions from here on only append. Until a table reaches it, v1 is a draft.
pub const FROZEN_FROM: u32 = 100;

/// The symbol every plugin exports; a [`BackendEntry`].
pub const ENTRY_SYMBOL: &str = "tegula_backend_v1";
/// The symbol Rust plugins export as well; a [`LayoutEntry`].
pub const LAYOUT_SYMBOL: &str = "tegula_layout_v1";
