//! What can be wrong with a program.

/// A fault in a program, naming the op or value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProgramError {
    /// An op's inputs do not fit it.
    #[error("program `{program}`, op {op} ({name}): {why}")]
    Op {
        /// The program's name.
        program: String,
        /// Index of the op.
        op: usize,
        /// Name of its code.
        name: &'static str,
        /// What does not fit, with both sides.
        why: String,
    },
    /// A value, input, output or KV layer is malformed.
    #[error("program `{program}`: {why}")]
    Malformed {
        /// The program's name.
        program: String,
        /// What is wrong.
        why: String,
    },
    /// The flat form is of a newer revision or damaged.
    #[error("program over the boundary: {why}")]
    Boundary {
        /// What is wrong.
        why: String,
    },
}
