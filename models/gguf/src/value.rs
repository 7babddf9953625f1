//! [`Value`] and [`ValueType`]: the 13 types of GGUF metadata.

use std::fmt;

use crate::{Array, StringArray};

/// A metadata value type; the discriminants are GGUF's ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[expect(missing_docs, reason = "the variants are GGUF's value types")]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    const ALL: [ValueType; 13] = [
        ValueType::U8,
        ValueType::I8,
        ValueType::U16,
        ValueType::I16,
        ValueType::U32,
        ValueType::I32,
        ValueType::F32,
        ValueType::Bool,
        ValueType::String,
        ValueType::Array,
        ValueType::U64,
        ValueType::I64,
        ValueType::F64,
    ];

    /// The type that has this id in a file.
    pub fn from_id(id: u32) -> Option<ValueType> {
        ValueType::ALL.get(usize::try_from(id).ok()?).copied()
    }

    /// The id in a file.
    pub fn id(self) -> u32 {
        self as u32
    }

    /// Fewest bytes a value of this type takes in a file; the exact size for numbers and bools.
    pub(crate) fn bytes_min(self) -> u64 {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => 1,
            ValueType::U16 | ValueType::I16 => 2,
            ValueType::U32 | ValueType::I32 | ValueType::F32 => 4,
            ValueType::String | ValueType::U64 | ValueType::I64 | ValueType::F64 => 8,
            ValueType::Array => 12,
        }
    }

    /// `a u32`, `an array`: for messages.
    pub(crate) fn with_article(self) -> &'static str {
        match self {
            ValueType::U8 => "a u8",
            ValueType::I8 => "an i8",
            ValueType::U16 => "a u16",
            ValueType::I16 => "an i16",
            ValueType::U32 => "a u32",
            ValueType::I32 => "an i32",
            ValueType::F32 => "an f32",
            ValueType::Bool => "a bool",
            ValueType::String => "a string",
            ValueType::Array => "an array",
            ValueType::U64 => "a u64",
            ValueType::I64 => "an i64",
            ValueType::F64 => "an f64",
        }
    }
}

/// `u32`, `string` and so on.
impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.with_article();
        f.pad(name.split_once(' ').map_or(name, |(_, bare)| bare))
    }
}

/// The value of a metadata key.
///
/// Strings are bytes, since nothing makes a file's strings UTF-8; the typed getters of
/// [`Metadata`](crate::Metadata) give `&str` or an error.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "the variants are GGUF's value types")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(Box<[u8]>),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl Value {
    /// The type of the value.
    pub fn value_type(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::F32(_) => ValueType::F32,
            Value::Bool(_) => ValueType::Bool,
            Value::String(_) => ValueType::String,
            Value::Array(_) => ValueType::Array,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F64(_) => ValueType::F64,
        }
    }

    /// The value where it is an integer of any width; a bool is not one.
    pub fn integer(&self) -> Option<i128> {
        match *self {
            Value::U8(n) => Some(n.into()),
            Value::I8(n) => Some(n.into()),
            Value::U16(n) => Some(n.into()),
            Value::I16(n) => Some(n.into()),
            Value::U32(n) => Some(n.into()),
            Value::I32(n) => Some(n.into()),
            Value::U64(n) => Some(n.into()),
            Value::I64(n) => Some(n.into()),
            Value::F32(_) | Value::F64(_) | Value::Bool(_) | Value::String(_) | Value::Array(_) => {
                None
            }
        }
    }

    /// An array of strings, or `None` where they have 4 GiB or more.
    pub fn strings<S: AsRef<[u8]>>(strings: impl IntoIterator<Item = S>) -> Option<Value> {
        StringArray::from_strings(strings).map(|strings| Value::Array(Array::String(strings)))
    }
}

/// One line for a person; strings are quoted and escaped, arrays show their first elements.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::U8(n) => write!(f, "{n}"),
            Value::I8(n) => write!(f, "{n}"),
            Value::U16(n) => write!(f, "{n}"),
            Value::I16(n) => write!(f, "{n}"),
            Value::U32(n) => write!(f, "{n}"),
            Value::I32(n) => write!(f, "{n}"),
            Value::F32(x) => write!(f, "{x}"),
            Value::Bool(b) => write!(f, "{b}"),
            Value::String(bytes) => match std::str::from_utf8(bytes) {
                Ok(text) => write!(f, "{text:?}"),
                Err(_) => write!(f, "\"{}\"", bytes.escape_ascii()),
            },
            Value::Array(array) => write!(f, "{array}"),
            Value::U64(n) => write!(f, "{n}"),
            Value::I64(n) => write!(f, "{n}"),
            Value::F64(x) => write!(f, "{x}"),
        }
    }
}

macro_rules! from_scalars {
    ($( $rust:ty => $variant:ident ),* $(,)?) => { $(
        impl From<$rust> for Value {
            fn from(value: $rust) -> Value {
                Value::$variant(value)
            }
        }
        impl From<Vec<$rust>> for Value {
            fn from(elements: Vec<$rust>) -> Value {
                Value::Array(Array::$variant(elements))
            }
        }
    )* };
}

from_scalars! {
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, f32 => F32, bool => Bool,
    u64 => U64, i64 => I64, f64 => F64,
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::String(text.as_bytes().into())
    }
}

impl From<Array> for Value {
    fn from(array: Array) -> Value {
        Value::Array(array)
    }
}
