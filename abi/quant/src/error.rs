//! [`LayoutError`]: what is wrong with a length, a row or a type, always with what would be right.

use crate::DType;

/// A length or type that does not fit the layout of a [`DType`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A row does not end on a block boundary.
    #[error(
        "a {dtype} row of {n_elements} elements does not split into blocks of {block_len}; use a type whose block length divides it"
    )]
    NotWholeBlocks {
        /// The type of the row.
        dtype: DType,
        /// The elements asked for.
        n_elements: u64,
        /// Elements per block of the type.
        block_len: u64,
    },
    /// The size in bytes does not fit in 64 bits.
    #[error(
        "{n_elements} elements of {dtype} are more bytes than 64 bits can count; the shape is corrupt"
    )]
    Overflow {
        /// The type of the row.
        dtype: DType,
        /// The elements asked for.
        n_elements: u64,
    },
    /// The bytes given are not those of the elements given.
    #[error("{n_elements} elements of {dtype} take {expected} bytes, but {got} bytes were given")]
    WrongBytes {
        /// The type of the row.
        dtype: DType,
        /// The elements asked for.
        n_elements: u64,
        /// Bytes that many elements take.
        expected: u64,
        /// Bytes given.
        got: u64,
    },
    /// The importances given are not those of the elements given.
    #[error("{n_elements} elements have {got} importances; give one for each, or none")]
    WrongImportance {
        /// The elements of the row.
        n_elements: u64,
        /// Importances given.
        got: u64,
    },
    /// No encoder exists for the type.
    #[error("{dtype} cannot be encoded here; encodable types are {allowed}")]
    NotEncodable {
        /// The type asked for.
        dtype: DType,
        /// Names of the types that can be encoded.
        allowed: &'static str,
    },
    /// No type has this name.
    #[error(
        "no element type is called {name:?}; names are GGUF's, such as F16, Q8_0, Q4_K or MXFP4"
    )]
    UnknownName {
        /// The name asked for, cut to 32 characters.
        name: String,
    },
}
