//! What lies where: sizes, chunks, tilings and the plan that is made before anything is allocated.

pub mod context;
pub mod kv;
pub mod plan;
pub mod state;
mod svg;
pub mod tiling;
pub mod units;
