//! Model files of random weights in the real shapes of known models, for measuring speed and memory where no real file is at hand.
//!
//! Decisions:
//! * **Everything but the numbers is real**: shapes, names, types of every tensor and metadata are those that the planner plans from, so a file
//!   takes the same memory and the same time as the model it stands for.
//! * **Blocks are random bits with sane scales**, written as they lie in the file: no quantiser runs, and the speed is that of the disk. Scales are
//!   chosen so that a row has the deviation `1 / sqrt(n_in)`, which keeps activations near 1 and logits finite.
//! * **A file is a function of its options.** Each piece of a tensor has a seed of its own, so threads and their number change nothing.

mod block;
mod file;
mod random;
mod vocab;

pub use file::{Options, Written, write};
