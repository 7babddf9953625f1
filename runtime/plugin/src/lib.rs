//! Finds, checks and opens backend plugins; safe handles over their tables.
//!
//! This is the only crate that opens shared objects, and the only part of the core that calls over the boundary; nothing above
//! it holds a raw handle. [`Registry::load`] never fails: what could not be used is in its list of [`Skipped`] files, each with a reason.
//!
//! Decisions:
//!
//! - *A search path is a trust decision*, since opening a library runs its code. Folders are absolute: named by the caller, by
//!   `TEGULA_BACKEND_PATH` (not under secure execution), or found from the file that holds this crate's code. The working directory
//!   is never one of them. See [`SearchPath`].
//! - *Look before opening.* A truncated library kills the process inside `dlopen`, so every file is first read as ELF (the `elf`
//!   module), and a file that does not export the entry symbol is never opened: a library that only looks like a plugin by
//!   its name runs no constructor of ours or its own.
//! - *One mapping, one negotiation.* Copies of a plugin share a backend id and only the first is used; the same file under two names
//!   is opened once. Libraries are opened `RTLD_NOW | RTLD_LOCAL`, so no plugin resolves its symbols in another.
//! - *Libraries are unloaded when their last handle is dropped.* Each handle holds its parent by `Arc`: a library outlives its backend,
//!   that its devices, those their buffers, executables and queues. Plugins must have joined their threads when `close` returns.
//! - *Answers are not believed.* Null behind OK, unknown codes, short structs, figures that contradict each other and
//!   indices out of range are errors or recorded [`DeviceInfo::contradictions`]; a device that panicked or was lost is not called again, except to free.
//! - *Host memory is only borrowed.* The safe functions of [`Queue`] wait until the device is done with the caller's slices; the
//!   `unsafe` ones return a [`Fence`] and leave that duty to the caller.
//! - *No process-wide state* but one interned host record for each backend id, since a library that is mapped once may be
//!   given to several registries and keeps a pointer to it.
//!
//! Between looking at a file and opening it stands a [`probe::Gate`], if the caller has one: it may try the file in a child process first,
//! for which [`probe`] has the child's side.

#![expect(unsafe_code, reason = "the loader: calls through the boundary's tables")]

mod backend;
mod buffer;
mod device;
mod elf;
mod error;
mod executable;
mod info;
mod library;
mod map;
mod negotiate;
pub mod probe;
mod queue;
mod registry;
mod run;
pub mod search;
mod state;

pub use backend::{Backend, FaultyDevice};
pub use buffer::{Buffer, BufferDesc, BufferSpan};
pub use device::{Device, DeviceOptions, WeightDesc, WeightLayout};
pub use elf::{ElfError, exported_symbols};
pub use error::{DeviceError, DeviceErrorKind, SkipReason};
pub use executable::{CompileOptions, Executable, ExecutableMemory, Tile, WeightBinding};
pub use info::{BufferType, DeviceInfo, Heap};
pub use map::FileMap;
pub use probe::{Gate, ProbeEnd, ProbeFailure, ProbeStage};
pub use queue::{Fence, Queue};
pub use registry::{Registry, RegistryOptions, Skipped};
pub use run::{BlockTable, InputData, KvGroup, OutputData, RunArgs, SeqSpan};
pub use search::{Origin, SearchPath};
pub use state::StatePool;
pub use tegula_abi::{
    BufferUsage, DeviceKind, ENTRY_SYMBOL, Figure, FigureSource, FigureState, HeapKind, HostAccess,
    LAYOUT_SYMBOL, POOL_HOST, REVISION, REVISION_MIN, ScratchDesc, weight_use,
};
