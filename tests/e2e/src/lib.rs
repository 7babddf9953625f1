//! What crosses crates: end to end, golden data, hostile files and plugins.
