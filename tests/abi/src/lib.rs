//! What plugin authors and users with old or broken plugins meet; see `tests/`.
//!
//! The plugins live in folders of their own, each a crate or a file in C. None of them has a name that a search would find.
