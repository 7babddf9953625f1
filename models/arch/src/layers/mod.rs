//! Parts that architectures share. A difference between them is a field here, never the name of a model.

mod attention;
mod mlp;
mod output;

pub(crate) use attention::{Attention, attention};
pub(crate) use mlp::{Mlp, mlp};
pub(crate) use output::output;
