//! Parts that architectures share. A difference between them is a field here, never the name of a model.

mod attention;
mod delta_net;
mod mlp;
mod moe;
mod output;

pub(crate) use attention::{Attention, QkNorm, attention};
pub(crate) use delta_net::{DeltaNet, delta_net};
pub(crate) use mlp::{Mlp, mlp, mlp_plain, mlp_together};
pub(crate) use moe::{Gate, Moe, moe};
pub(crate) use output::output;
