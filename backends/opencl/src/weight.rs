//! Weights on the device: the layout of their rows, and the tiles an executable reads.

pub(crate) mod grids;
pub(crate) mod layout;
mod repack;

pub(crate) use repack::repack_rows;
