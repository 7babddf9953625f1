//! The conformance suite: whether a backend computes what the oracle computes, and keeps the promises of the boundary.
//!
//! Everything goes through the real door: a plugin that was opened by [`tegula_plugin::Registry`], its device, compile and run. So
//! a backend in any language is measured alike, and the suite can be run by a command as well as by tests.
//!
//! Decisions:
//!
//! - *Cases are data.* A [`Case`] is a small program, its weights, its KV pool and a few runs, made from a seed; [`GROUPS`] lists how they
//!   are made. One function runs them all, on the device under test and on the oracle.
//! - *Bounds have reasons.* The error allowed to each op stands in [`bounds::BOUNDS`], with where it comes from.
//! - *Unsupported is not failed.* What a backend says it cannot do, and what it is known to do wrong, are two lists
//!   ([`Expectations`]), each entry with its reason. A known failure that passes is a failure: the list must shrink.
//! - *Every byte around is watched.* Operands, tiles, KV blocks and scratch lie between sentinel bytes, and memory is filled with them
//!   before it is used, so that writes out of bounds and reads of memory that nobody wrote show.
//! - *No backend is named.* Who is measured against whom is for the caller to say.
//! - *What is bound where must not matter.* Every run happens twice, with operands in host memory and in buffers.

#![forbid(unsafe_code)]

pub mod bounds;
mod case;
mod cases;
mod checks;
mod compare;
mod data;
mod expectations;
mod report;
mod rounding;
mod session;
mod suite;

pub use case::{Case, KvPool, SeqStep, Step, WeightData};
pub use checks::{CHECKS, Check};
pub use expectations::{Entry, Expectations};
pub use report::{Outcome, Report, Verdict};
pub use rounding::Rounded;
pub use session::{Place, Rig, Session};
pub use suite::{
    Event, GROUPS, Group, check_group, check_group_watched, run_checks, run_checks_watched, verify,
};

/// What stands between a case and its result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// The backend, or the core over it.
    #[error(transparent)]
    Device(#[from] tegula_plugin::DeviceError),
    /// A case whose program does not verify: a fault of the suite.
    #[error("the case itself is wrong: {0}")]
    Program(#[from] tegula_program::ProgramError),
    /// A case whose data do not fit its types: a fault of the suite.
    #[error("the case itself is wrong: {0}")]
    Layout(#[from] tegula_quant::LayoutError),
    /// A result or behaviour other than promised.
    #[error("{0}")]
    Wrong(String),
}

/// Result of a step of the suite.
pub type Result<T, E = Fault> = std::result::Result<T, E>;

/// A broken promise.
pub(crate) fn wrong<T>(what: impl Into<String>) -> Result<T> {
    Err(Fault::Wrong(what.into()))
}
