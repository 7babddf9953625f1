//! [`Metadata`]: the key-value part of a file, parsed.
//!
//! Entries stay in file order for printing; a [`NameIndex`] finds them. Typed access is in `access`.

use std::io::Read;
use std::path::{Path, PathBuf};

use crate::error::clip;
use crate::index::NameIndex;
use crate::reader::{ByteReader, Field};
use crate::{Array, GgufError, StringArray, Value, ValueType};

/// Bytes of the smallest key-value pair: a key of one byte with its length, a type, a value of one byte.
pub(crate) const KV_BYTES_MIN: u64 = 8 + 1 + 4 + 1;

/// Longest key, by the specification.
const KEY_BYTES_MAX: u64 = (1 << 16) - 1;

#[derive(Clone, Debug)]
struct Entry {
    key: Box<str>,
    value: Value,
    offset: u64,
}

fn entry_key(entry: &Entry) -> &str {
    &entry.key
}

/// The metadata of a file: unique, non-empty keys with typed values, in file order.
#[derive(Clone, Debug)]
pub struct Metadata {
    file: PathBuf,
    entries: Vec<Entry>,
    by_key: NameIndex,
}

impl Metadata {
    /// Reads `n_kv` pairs; the caller has capped the count.
    pub(crate) fn read<R: Read>(
        reader: &mut ByteReader<'_, R>,
        n_kv: u64,
    ) -> Result<Metadata, GgufError> {
        let mut entries: Vec<Entry> = reader.reserved(n_kv, Field::Header("metadata"))?;
        let mut n_nested_arrays = 0;
        for index in 0..n_kv {
            let offset = reader.offset();
            let key =
                read_name(reader, KEY_BYTES_MAX, "the GGUF specification", Field::Key(index))?;
            let mut values =
                ValueReader { reader, key: &key, n_nested_arrays: &mut n_nested_arrays };
            let value = values.read_value()?;
            entries.push(Entry { key, value, offset });
        }
        let file = reader.file().to_owned();
        match NameIndex::build(&entries, entry_key) {
            Ok(by_key) => Ok(Metadata { file, entries, by_key }),
            Err(duplicate) => {
                let at = |index: usize| entries.get(index);
                let key = at(duplicate.first).map(|e| clip(&e.key)).unwrap_or_default();
                let offset = |index| at(index).map_or(0, |e| e.offset);
                let (first, second) = (offset(duplicate.first), offset(duplicate.second));
                Err(GgufError::DuplicateKey { file, key, first, second })
            }
        }
    }

    /// The file the metadata is from.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.by_key.find(&self.entries, key, entry_key).map(|entry| &entry.value)
    }

    /// All keys and values in file order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|entry| (&*entry.key, &entry.value))
    }
}

/// A key or tensor name: not empty, at most `bytes_max`, UTF-8.
pub(crate) fn read_name<R: Read>(
    reader: &mut ByteReader<'_, R>,
    bytes_max: u64,
    limit: &'static str,
    field: Field<'_>,
) -> Result<Box<str>, GgufError> {
    let (offset, file) = (reader.offset(), reader.file());
    let bad = |problem| {
        let (file, field) = (file.to_owned(), field.to_string());
        GgufError::BadName { file, field, offset, problem }
    };
    let len = reader.u64(field)?;
    reader.need(len, 1, field)?;
    reader.cap(len, bytes_max, "bytes", limit, field)?;
    if len == 0 {
        return Err(bad("empty; every key and tensor needs a name"));
    }
    let mut bytes = Vec::new();
    reader.append(len, &mut bytes, field)?;
    match String::from_utf8(bytes) {
        Ok(name) => Ok(name.into_boxed_str()),
        Err(_) => Err(bad("not UTF-8")),
    }
}

/// Reads the value of one key.
struct ValueReader<'r, 'f, R> {
    reader: &'r mut ByteReader<'f, R>,
    key: &'r str,
    n_nested_arrays: &'r mut u64,
}

impl<'r, R: Read> ValueReader<'r, '_, R> {
    fn field(&self, part: &'static str) -> Field<'r> {
        Field::Value(self.key, part)
    }

    fn read_type(&mut self, part: &'static str) -> Result<ValueType, GgufError> {
        let offset = self.reader.offset();
        let id = self.reader.u32(self.field(part))?;
        ValueType::from_id(id).ok_or_else(|| GgufError::UnknownValueType {
            file: self.reader.file().to_owned(),
            field: self.field(part).to_string(),
            offset,
            id,
        })
    }

    fn read_value(&mut self) -> Result<Value, GgufError> {
        let value_type = self.read_type("the type")?;
        let field = self.field("the value");
        let reader = &mut *self.reader;
        Ok(match value_type {
            ValueType::U8 => Value::U8(u8::from_le_bytes(reader.fixed(field)?)),
            ValueType::I8 => Value::I8(i8::from_le_bytes(reader.fixed(field)?)),
            ValueType::U16 => Value::U16(u16::from_le_bytes(reader.fixed(field)?)),
            ValueType::I16 => Value::I16(i16::from_le_bytes(reader.fixed(field)?)),
            ValueType::U32 => Value::U32(reader.u32(field)?),
            ValueType::I32 => Value::I32(i32::from_le_bytes(reader.fixed(field)?)),
            ValueType::F32 => Value::F32(f32::from_le_bytes(reader.fixed(field)?)),
            ValueType::U64 => Value::U64(reader.u64(field)?),
            ValueType::I64 => Value::I64(i64::from_le_bytes(reader.fixed(field)?)),
            ValueType::F64 => Value::F64(f64::from_le_bytes(reader.fixed(field)?)),
            ValueType::Bool => {
                let offset = reader.offset();
                let [byte] = reader.fixed(field)?;
                Value::Bool(self.bool(byte, offset, field)?)
            }
            ValueType::String => {
                let mut bytes = Vec::new();
                self.read_string(&mut bytes, field)?;
                Value::String(bytes.into_boxed_slice())
            }
            ValueType::Array => Value::Array(self.read_array(1)?),
        })
    }

    fn bool(&self, byte: u8, offset: u64, field: Field<'_>) -> Result<bool, GgufError> {
        match byte {
            0 => Ok(false),
            1 => Ok(true),
            got => Err(GgufError::BadBool {
                file: self.reader.file().to_owned(),
                field: field.to_string(),
                offset,
                got,
            }),
        }
    }

    /// Appends a string with its length to `bytes`.
    fn read_string(&mut self, bytes: &mut Vec<u8>, field: Field<'_>) -> Result<(), GgufError> {
        let len = self.reader.u64(field)?;
        self.reader.need(len, 1, field)?;
        let allowed = self.reader.limits().string_bytes_max;
        self.reader.cap(len, allowed, "bytes", "string_bytes_max", field)?;
        self.reader.append(len, bytes, field)
    }

    fn read_array(&mut self, depth: u32) -> Result<Array, GgufError> {
        let (nesting, length) = (self.field("the nesting"), self.field("the length"));
        let limits = *self.reader.limits();
        let depth_max = u64::from(limits.array_depth_max);
        self.reader.cap(depth.into(), depth_max, "levels", "array_depth_max", nesting)?;
        let element_type = self.read_type("the element type")?;
        let count = self.reader.u64(length)?;
        self.reader.need(count, element_type.bytes_min(), length)?;
        self.reader.cap(count, limits.array_len_max, "elements", "array_len_max", length)?;
        let field = self.field("the elements");
        let reader = &mut *self.reader;
        Ok(match element_type {
            ValueType::U8 => Array::U8(reader.numbers(count, u8::from_le_bytes, field)?),
            ValueType::I8 => Array::I8(reader.numbers(count, i8::from_le_bytes, field)?),
            ValueType::U16 => Array::U16(reader.numbers(count, u16::from_le_bytes, field)?),
            ValueType::I16 => Array::I16(reader.numbers(count, i16::from_le_bytes, field)?),
            ValueType::U32 => Array::U32(reader.numbers(count, u32::from_le_bytes, field)?),
            ValueType::I32 => Array::I32(reader.numbers(count, i32::from_le_bytes, field)?),
            ValueType::F32 => Array::F32(reader.numbers(count, f32::from_le_bytes, field)?),
            ValueType::U64 => Array::U64(reader.numbers(count, u64::from_le_bytes, field)?),
            ValueType::I64 => Array::I64(reader.numbers(count, i64::from_le_bytes, field)?),
            ValueType::F64 => Array::F64(reader.numbers(count, f64::from_le_bytes, field)?),
            ValueType::Bool => Array::Bool(self.read_bools(count)?),
            ValueType::String => Array::String(self.read_strings(count)?),
            ValueType::Array => Array::Array(self.read_arrays(count, depth)?),
        })
    }

    fn read_bools(&mut self, count: u64) -> Result<Vec<bool>, GgufError> {
        let offset = self.reader.offset();
        let bytes = self.reader.numbers(count, u8::from_le_bytes, self.field("the elements"))?;
        let element = |(index, byte): (u64, u8)| {
            self.bool(byte, offset.saturating_add(index), Field::Element(self.key, index))
        };
        (0u64..).zip(bytes).map(element).collect()
    }

    fn read_strings(&mut self, count: u64) -> Result<StringArray, GgufError> {
        let mut bytes = Vec::new();
        let mut ends = self.reader.reserved(count, self.field("the elements"))?;
        for index in 0..count {
            let field = Field::Element(self.key, index);
            self.read_string(&mut bytes, field)?;
            let end = u32::try_from(bytes.len());
            ends.push(end.map_err(|_| self.reader.out_of_memory(bytes.len() as u64, field))?);
        }
        Ok(StringArray::new(bytes, ends))
    }

    fn read_arrays(&mut self, count: u64, depth: u32) -> Result<Vec<Array>, GgufError> {
        let field = self.field("the elements");
        *self.n_nested_arrays = self.n_nested_arrays.saturating_add(count);
        let allowed = self.reader.limits().n_nested_arrays_max;
        self.reader.cap(
            *self.n_nested_arrays,
            allowed,
            "inner arrays",
            "n_nested_arrays_max",
            field,
        )?;
        let mut arrays = self.reader.reserved(count, field)?;
        for _ in 0..count {
            arrays.push(self.read_array(depth.saturating_add(1))?);
        }
        Ok(arrays)
    }
}
