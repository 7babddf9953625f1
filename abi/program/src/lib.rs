//! Programs: the typed op graph that models build and backends compile.
//!
//! A [`Program`] says *what* to compute and names no device. Models write it with [`ProgramBuilder`], the core
//! hands it over the boundary as [`ffi::FfiProgram`], backends read it back with [`ffi::read_program`] and may trust it:
//! [`Program::verify`] has checked every shape, type and id.
//!
//! Decisions:
//! * Ops are LLM-level and fused where every backend would fuse (attention with mask and softmax, gated units), so that a
//!   program of a 30-layer model has a few hundred ops and a graph-level backend can still recognise everything.
//! * Two dimensions are symbolic, the tokens of a run and its wanted rows, so that one program serves every step.
//! * Shapes are row-major, outermost first: activations `[n_tokens, n]`, weights `[n_rows, n_in]`.

#![deny(missing_docs)]

mod builder;
mod error;
#[expect(unsafe_code, reason = "reads and writes the boundary's flat arrays")]
pub mod ffi;
mod op;
mod print;
mod program;
mod shape;

pub use builder::{GatedDelta, Norm, ProgramBuilder, Rope, Router, RouterGroups};
pub use error::ProgramError;
pub use op::{Activation, HeadOrder, OpKind, RopeStyle, RouterGating};
pub use program::{Dim, KvLayer, Op, Program, StateLayer, Value, ValueId, ValueKind};
pub use tegula_quant::DType;
