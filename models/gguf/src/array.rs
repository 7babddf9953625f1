//! [`Array`] and [`StringArray`]: metadata arrays in memory.
//!
//! An array is a `Vec` of its own type, and all strings of an array are in one buffer: an array never takes more memory
//! than its bytes in the file, and a vocabulary of 262,144 tokens is two allocations. Arrays inside arrays are the
//! exception, which `Limits::n_nested_arrays_max` bounds.

use std::fmt;

use crate::ValueType;

/// The elements of a metadata array.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "the variants are GGUF's value types")]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(StringArray),
    Array(Vec<Array>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

impl Array {
    /// The type of the elements.
    pub fn element_type(&self) -> ValueType {
        match self {
            Array::U8(_) => ValueType::U8,
            Array::I8(_) => ValueType::I8,
            Array::U16(_) => ValueType::U16,
            Array::I16(_) => ValueType::I16,
            Array::U32(_) => ValueType::U32,
            Array::I32(_) => ValueType::I32,
            Array::F32(_) => ValueType::F32,
            Array::Bool(_) => ValueType::Bool,
            Array::String(_) => ValueType::String,
            Array::Array(_) => ValueType::Array,
            Array::U64(_) => ValueType::U64,
            Array::I64(_) => ValueType::I64,
            Array::F64(_) => ValueType::F64,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::String(v) => v.len(),
            Array::Array(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F64(v) => v.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element `index` where it is an integer; no element type but the integers counts.
    pub fn integer(&self, index: usize) -> Option<i128> {
        match self {
            Array::U8(v) => v.get(index).map(|n| i128::from(*n)),
            Array::I8(v) => v.get(index).map(|n| i128::from(*n)),
            Array::U16(v) => v.get(index).map(|n| i128::from(*n)),
            Array::I16(v) => v.get(index).map(|n| i128::from(*n)),
            Array::U32(v) => v.get(index).map(|n| i128::from(*n)),
            Array::I32(v) => v.get(index).map(|n| i128::from(*n)),
            Array::U64(v) => v.get(index).map(|n| i128::from(*n)),
            Array::I64(v) => v.get(index).map(|n| i128::from(*n)),
            Array::F32(_) | Array::F64(_) | Array::Bool(_) | Array::String(_) | Array::Array(_) => {
                None
            }
        }
    }

    /// Writes element `index` for a person to read.
    fn fmt_element(&self, index: usize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Array::F32(v) => v.get(index).map_or(Ok(()), |x| write!(f, "{x}")),
            Array::F64(v) => v.get(index).map_or(Ok(()), |x| write!(f, "{x}")),
            Array::Bool(v) => v.get(index).map_or(Ok(()), |x| write!(f, "{x}")),
            Array::Array(v) => v.get(index).map_or(Ok(()), |x| write!(f, "{x}")),
            Array::String(v) => {
                v.get(index).map_or(Ok(()), |x| write!(f, "\"{}\"", x.escape_ascii()))
            }
            _ => self.integer(index).map_or(Ok(()), |x| write!(f, "{x}")),
        }
    }
}

/// The first elements, then the length.
impl fmt::Display for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN_MAX: usize = 6;
        f.write_str("[")?;
        for index in 0..self.len().min(SHOWN_MAX) {
            if index > 0 {
                f.write_str(", ")?;
            }
            self.fmt_element(index, f)?;
        }
        if self.len() > SHOWN_MAX {
            write!(f, ", ... {} in all", self.len())?;
        }
        f.write_str("]")
    }
}

/// The bytes of all strings, as text where every one of them is UTF-8.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Arena {
    Text(String),
    Bytes(Vec<u8>),
}

/// Many strings in one buffer. GGUF strings should be UTF-8 and may not be; both views exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StringArray {
    arena: Arena,
    /// Ends of the strings in the arena; a string begins where the one before it ends.
    ends: Vec<u32>,
}

impl StringArray {
    /// `ends` ascend and the last is the length of `bytes`.
    pub(crate) fn new(mut bytes: Vec<u8>, ends: Vec<u32>) -> StringArray {
        bytes.shrink_to_fit();
        let arena = match String::from_utf8(bytes) {
            // Text as a whole is text in each piece only if no piece ends inside a character.
            Ok(text) if ends.iter().all(|&end| text.is_char_boundary(end as usize)) => {
                Arena::Text(text)
            }
            Ok(text) => Arena::Bytes(text.into_bytes()),
            Err(e) => Arena::Bytes(e.into_bytes()),
        };
        StringArray { arena, ends }
    }

    /// Gathers `strings`, or `None` where they have 4 GiB or more.
    pub fn from_strings<S: AsRef<[u8]>>(
        strings: impl IntoIterator<Item = S>,
    ) -> Option<StringArray> {
        let (mut bytes, mut ends) = (Vec::new(), Vec::new());
        for string in strings {
            bytes.extend_from_slice(string.as_ref());
            ends.push(u32::try_from(bytes.len()).ok()?);
        }
        Some(StringArray::new(bytes, ends))
    }

    /// Number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are no strings.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Whether every string is UTF-8.
    pub fn is_utf8(&self) -> bool {
        matches!(self.arena, Arena::Text(_))
    }

    fn range(&self, index: usize) -> Option<std::ops::Range<usize>> {
        let end = *self.ends.get(index)? as usize;
        let start = index.checked_sub(1).and_then(|before| self.ends.get(before));
        Some(start.map_or(0, |start| *start as usize)..end)
    }

    /// The bytes of string `index`.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        let range = self.range(index)?;
        match &self.arena {
            Arena::Text(text) => text.as_bytes().get(range),
            Arena::Bytes(bytes) => bytes.get(range),
        }
    }

    /// String `index` as text; `None` where it is not UTF-8 or not there. Constant time where [`Self::is_utf8`].
    pub fn text(&self, index: usize) -> Option<&str> {
        let range = self.range(index)?;
        match &self.arena {
            Arena::Text(text) => text.get(range),
            Arena::Bytes(bytes) => std::str::from_utf8(bytes.get(range)?).ok(),
        }
    }

    /// The bytes of all strings, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        (0..self.len()).map(|index| self.get(index).unwrap_or_default())
    }

    /// Bytes of memory held, for budgets.
    pub fn memory_bytes(&self) -> usize {
        let arena = match &self.arena {
            Arena::Text(text) => text.capacity(),
            Arena::Bytes(bytes) => bytes.capacity(),
        };
        arena + self.ends.capacity() * size_of::<u32>()
    }
}
