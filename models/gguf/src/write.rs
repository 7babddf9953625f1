//! [`GgufWriter`]: builds GGUF files, for tests and tools.
//!
//! Output is a function of the calls alone: keys and tensors are written in the order given, padding is zeros. What the
//! reader would refuse is refused here with the same errors, so a tool learns of it before the file exists.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use tegula_quant::DType;

use crate::error::clip;
use crate::file::{ALIGNMENT_KEY, check_alignment};
use crate::header::MAGIC;
use crate::index::NameIndex;
use crate::tensor_info::Shape;
use crate::{Array, GgufError, TensorProblem, Value};

struct OutTensor<'a> {
    name: String,
    dims: Vec<u64>,
    dtype: DType,
    /// `None` for a tensor that only has a place in the table.
    data: Option<Cow<'a, [u8]>>,
}

/// A GGUF file to be written.
///
/// ```
/// use tegula_gguf::{DType, Gguf, GgufWriter};
/// let bytes = GgufWriter::new()
///     .meta("general.architecture", "llama")
///     .tensor("token_embd.weight", &[2, 2], DType::F16, vec![0; 8])
///     .to_bytes()?;
/// assert_eq!(Gguf::parse(&bytes, "example.gguf")?.tensors().len(), 1);
/// # Ok::<(), tegula_gguf::GgufError>(())
/// ```
#[derive(Default)]
pub struct GgufWriter<'a> {
    version: Option<u32>,
    metadata: Vec<(String, Value)>,
    tensors: Vec<OutTensor<'a>>,
}

impl<'a> GgufWriter<'a> {
    /// An empty GGUF 3 file.
    pub fn new() -> GgufWriter<'a> {
        GgufWriter::default()
    }

    /// Writes this version instead of 3. Versions 2 and 3 differ in nothing but the number.
    #[must_use]
    pub fn version(mut self, version: u32) -> Self {
        self.version = Some(version);
        self
    }

    /// Aligns tensor data to `alignment` bytes instead of 32, and writes `general.alignment`.
    #[must_use]
    pub fn alignment(self, alignment: u32) -> Self {
        self.meta(ALIGNMENT_KEY, alignment)
    }

    /// Adds a key.
    #[must_use]
    pub fn meta(mut self, key: impl Into<String>, value: impl Into<Value>) -> Self {
        self.metadata.push((key.into(), value.into()));
        self
    }

    /// Adds a tensor; the first of `dims` is the length of a row.
    #[must_use]
    pub fn tensor(
        mut self,
        name: impl Into<String>,
        dims: &[u64],
        dtype: DType,
        data: impl Into<Cow<'a, [u8]>>,
    ) -> Self {
        let (name, dims, data) = (name.into(), dims.to_vec(), Some(data.into()));
        self.tensors.push(OutTensor { name, dims, dtype, data });
        self
    }

    /// Adds a tensor without data; only [`GgufWriter::to_header`] can write it.
    #[must_use]
    pub fn tensor_shape(mut self, name: impl Into<String>, dims: &[u64], dtype: DType) -> Self {
        let (name, dims) = (name.into(), dims.to_vec());
        self.tensors.push(OutTensor { name, dims, dtype, data: None });
        self
    }

    /// The beginning of the file, up to where data would begin, and the length that the whole file would have. Read it with
    /// [`Gguf::from_header`](crate::Gguf::from_header).
    ///
    /// # Errors
    /// As [`GgufWriter::write_to`], but for [`GgufError::Io`].
    pub fn to_header(&self) -> Result<(Vec<u8>, u64), GgufError> {
        let file = Path::new("new.gguf");
        let alignment = self.check(file)?;
        let (bytes, data_bytes) = self.header(file, alignment, false)?;
        let file_len = data_bytes.saturating_add(bytes.len() as u64);
        Ok((bytes, file_len))
    }

    /// The file's bytes.
    ///
    /// # Errors
    /// As [`GgufWriter::write_to`].
    pub fn to_bytes(&self) -> Result<Vec<u8>, GgufError> {
        let file = Path::new("new.gguf");
        let alignment = self.check(file)?;
        let (mut bytes, _) = self.header(file, alignment, true)?;
        self.write_data(&mut bytes, alignment).map_err(|cause| write_error(file, cause))?;
        Ok(bytes)
    }

    /// Writes the file at `path`, over what is there. After an error the file may be incomplete.
    ///
    /// # Errors
    /// [`GgufError::Io`], and what the reader would say of the file: [`GgufError::BadTensor`],
    /// [`GgufError::DuplicateTensor`], [`GgufError::DuplicateKey`], [`GgufError::BadName`],
    /// [`GgufError::BadAlignment`].
    pub fn write_to(&self, path: impl AsRef<Path>) -> Result<(), GgufError> {
        let path = path.as_ref();
        let alignment = self.check(path)?;
        let (header, _) = self.header(path, alignment, true)?;
        let write = || {
            let mut out = BufWriter::new(File::create(path)?);
            out.write_all(&header)?;
            self.write_data(&mut out, alignment)?;
            out.flush()
        };
        write().map_err(|cause| write_error(path, cause))
    }

    /// Everything before the data, padded, and the bytes of the data. Data that does not fit its tensor is an error if `with_data`.
    fn header(
        &self,
        file: &Path,
        alignment: u32,
        with_data: bool,
    ) -> Result<(Vec<u8>, u64), GgufError> {
        let mut out = Vec::new();
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&self.version.unwrap_or(3).to_le_bytes());
        put_len(&mut out, self.tensors.len());
        put_len(&mut out, self.metadata.len());
        for (key, value) in &self.metadata {
            put_string(&mut out, key.as_bytes());
            put_value(&mut out, value);
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            put_string(&mut out, tensor.name.as_bytes());
            let shape = tensor.check(with_data).map_err(|problem| tensor.bad(file, problem))?;
            out.extend_from_slice(&(tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| out.extend_from_slice(&dim.to_le_bytes()));
            out.extend_from_slice(&tensor.dtype.id().to_le_bytes());
            out.extend_from_slice(&offset.to_le_bytes());
            // Beyond 2^64 the offsets are wrong, and the reader refuses tensors that overlap.
            let end = offset.saturating_add(shape.n_bytes);
            offset = end.checked_next_multiple_of(alignment.into()).unwrap_or(u64::MAX);
        }
        pad(&mut out, alignment);
        Ok((out, offset))
    }

    /// Checks what does not concern a single tensor, and gives the alignment.
    fn check(&self, file: &Path) -> Result<u32, GgufError> {
        self.check_names(file)?;
        let alignment = self.metadata.iter().find(|(key, _)| key == ALIGNMENT_KEY);
        check_alignment(file, alignment.map(|(_, value)| value))
    }

    fn check_names(&self, file: &Path) -> Result<(), GgufError> {
        let keys = NameIndex::build(&self.metadata, |(key, _)| key);
        keys.map_err(|duplicate| {
            let key = self.metadata.get(duplicate.first).map(|(key, _)| clip(key));
            let (first, second) = (duplicate.first as u64, duplicate.second as u64);
            let (file, key) = (file.to_owned(), key.unwrap_or_default());
            GgufError::DuplicateKey { file, key, first, second }
        })?;
        let names = NameIndex::build(&self.tensors, |tensor| &tensor.name);
        names.map_err(|duplicate| {
            let tensor = self.tensors.get(duplicate.first).map(|tensor| clip(&tensor.name));
            let (file, first): (PathBuf, PathBuf) = (file.to_owned(), file.to_owned());
            GgufError::DuplicateTensor { file, tensor: tensor.unwrap_or_default(), first }
        })?;
        let keys = self.metadata.iter().map(|(key, _)| ("a metadata key", key));
        let tensors = self.tensors.iter().map(|tensor| ("a tensor's name", &tensor.name));
        match keys.chain(tensors).find(|(_, name)| name.is_empty()) {
            None => Ok(()),
            Some((field, _)) => Err(GgufError::BadName {
                file: file.to_owned(),
                field: field.to_owned(),
                offset: 0,
                problem: "empty; every key and tensor needs a name",
            }),
        }
    }

    fn write_data(&self, out: &mut impl Write, alignment: u32) -> io::Result<()> {
        let alignment = alignment as usize;
        for tensor in &self.tensors {
            let data = tensor.data.as_deref().unwrap_or_default();
            out.write_all(data)?;
            let padding = data.len().next_multiple_of(alignment) - data.len();
            io::copy(&mut io::Read::take(io::repeat(0), padding as u64), out)?;
        }
        Ok(())
    }
}

impl OutTensor<'_> {
    fn check(&self, with_data: bool) -> Result<Shape, TensorProblem> {
        let shape = Shape::check(&self.dims, self.dtype)?;
        let got = self.data.as_ref().map_or(0, |data| data.len() as u64);
        if got == shape.n_bytes || !with_data {
            Ok(shape)
        } else {
            Err(TensorProblem::DataLength { got, n_bytes: shape.n_bytes })
        }
    }

    fn bad(&self, file: &Path, problem: TensorProblem) -> GgufError {
        GgufError::BadTensor { file: file.to_owned(), tensor: clip(&self.name), offset: 0, problem }
    }
}

fn write_error(file: &Path, cause: io::Error) -> GgufError {
    GgufError::Io { file: file.to_owned(), action: "write", cause }
}

fn pad(out: &mut Vec<u8>, alignment: u32) {
    out.resize(out.len().next_multiple_of(alignment as usize), 0);
}

fn put_len(out: &mut Vec<u8>, len: usize) {
    out.extend_from_slice(&(len as u64).to_le_bytes());
}

fn put_string(out: &mut Vec<u8>, bytes: &[u8]) {
    put_len(out, bytes.len());
    out.extend_from_slice(bytes);
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    out.extend_from_slice(&value.value_type().id().to_le_bytes());
    match value {
        Value::U8(n) => out.extend_from_slice(&n.to_le_bytes()),
        Value::I8(n) => out.extend_from_slice(&n.to_le_bytes()),
        Value::U16(n) => out.extend_from_slice(&n.to_le_bytes()),
        Value::I16(n) => out.extend_from_slice(&n.to_le_bytes()),
        Value::U32(n) => out.extend_from_slice(&n.to_le_bytes()),
        Value::I32(n) => out.extend_from_slice(&n.to_le_bytes()),
        Value::F32(x) => out.extend_from_slice(&x.to_le_bytes()),
        Value::Bool(b) => out.push((*b).into()),
        Value::String(bytes) => put_string(out, bytes),
        Value::Array(array) => put_array(out, array),
        Value::U64(n) => out.extend_from_slice(&n.to_le_bytes()),
        Value::I64(n) => out.extend_from_slice(&n.to_le_bytes()),
        Value::F64(x) => out.extend_from_slice(&x.to_le_bytes()),
    }
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    out.extend_from_slice(&array.element_type().id().to_le_bytes());
    put_len(out, array.len());
    match array {
        Array::U8(v) => out.extend_from_slice(v),
        Array::I8(v) => v.iter().for_each(|n| out.extend_from_slice(&n.to_le_bytes())),
        Array::U16(v) => v.iter().for_each(|n| out.extend_from_slice(&n.to_le_bytes())),
        Array::I16(v) => v.iter().for_each(|n| out.extend_from_slice(&n.to_le_bytes())),
        Array::U32(v) => v.iter().for_each(|n| out.extend_from_slice(&n.to_le_bytes())),
        Array::I32(v) => v.iter().for_each(|n| out.extend_from_slice(&n.to_le_bytes())),
        Array::F32(v) => v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
        Array::Bool(v) => out.extend(v.iter().map(|b| u8::from(*b))),
        Array::String(v) => v.iter().for_each(|bytes| put_string(out, bytes)),
        Array::Array(v) => v.iter().for_each(|inner| put_array(out, inner)),
        Array::U64(v) => v.iter().for_each(|n| out.extend_from_slice(&n.to_le_bytes())),
        Array::I64(v) => v.iter().for_each(|n| out.extend_from_slice(&n.to_le_bytes())),
        Array::F64(v) => v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
    }
}
