//! [`GgufFile`]: one file, opened and checked.

use std::fs::File;
use std::io::{Cursor, Read};
use std::path::{Path, PathBuf};

use crate::error::clip;
use crate::header::Header;
use crate::index::NameIndex;
use crate::reader::ByteReader;
use crate::tensor_info::{TableEntry, check_places, read_table};
use crate::{DEFAULT_ALIGNMENT, GgufError, Limits, Metadata, TensorInfo, Value};

pub(crate) const ALIGNMENT_KEY: &str = "general.alignment";
const ALIGNMENT_MIN: u32 = 8;
const ALIGNMENT_MAX: u32 = 1 << 20;

/// Enough of a file's beginning to name what it is.
const PEEK_BYTES: u64 = 64;

/// One GGUF file: metadata and tensor table. A model may be several; [`Gguf`](crate::Gguf) is the whole.
#[derive(Clone, Debug)]
pub struct GgufFile {
    path: PathBuf,
    version: u32,
    alignment: u32,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    by_name: NameIndex,
    header_bytes: u64,
    data_offset: u64,
    file_len: u64,
}

impl GgufFile {
    /// Reads metadata and tensor table of the file at `path`; no tensor data is read. Links are followed.
    ///
    /// # Errors
    /// Any [`GgufError`] that concerns a single file.
    pub fn open(path: impl AsRef<Path>) -> Result<GgufFile, GgufError> {
        GgufFile::open_with(path, &Limits::default())
    }

    /// As [`GgufFile::open`], with other limits.
    ///
    /// # Errors
    /// Any [`GgufError`] that concerns a single file.
    pub fn open_with(path: impl AsRef<Path>, limits: &Limits) -> Result<GgufFile, GgufError> {
        let path = path.as_ref();
        let io = |action| move |cause| GgufError::Io { file: path.to_owned(), action, cause };
        // Before it is opened, because to open a pipe would wait for a writer.
        check_regular(path, &path.metadata().map_err(io("open"))?)?;
        let file = File::open(path).map_err(io("open"))?;
        let metadata = file.metadata().map_err(io("read the size"))?;
        check_regular(path, &metadata)?;
        GgufFile::read_from(file, path, metadata.len(), limits)
    }

    /// Reads a file that is in memory. `name` stands for the path in messages.
    ///
    /// # Errors
    /// Any [`GgufError`] that concerns a single file.
    pub fn parse(bytes: &[u8], name: impl AsRef<Path>) -> Result<GgufFile, GgufError> {
        GgufFile::read_from(bytes, name.as_ref(), bytes.len() as u64, &Limits::default())
    }

    /// Reads a file of `file_len` bytes from its beginning. `path` is used for messages and for [`GgufFile::path`].
    ///
    /// # Errors
    /// Any [`GgufError`] that concerns a single file.
    pub fn read_from(
        source: impl Read,
        path: &Path,
        file_len: u64,
        limits: &Limits,
    ) -> Result<GgufFile, GgufError> {
        let (peek, source) = peek(source, path, file_len)?;
        let mut reader = ByteReader::new(source, path, file_len, limits);
        let header = Header::read(&mut reader, &peek)?;
        let metadata = Metadata::read(&mut reader, header.n_kv)?;
        let alignment = check_alignment(path, metadata.get(ALIGNMENT_KEY))?;
        let entries = read_table(&mut reader, header.n_tensors)?;
        let header_bytes = reader.offset();
        // Names first: two entries of one name often share their data too, and the name says more.
        let by_name = NameIndex::build(&entries, TableEntry::name).map_err(|duplicate| {
            let name = entries.get(duplicate.first).map(TableEntry::name).unwrap_or_default();
            let (file, first) = (path.to_owned(), path.to_owned());
            GgufError::DuplicateTensor { file, tensor: clip(name), first }
        })?;
        // The header lies inside the file and the alignment is small, so this cannot wrap for any real file.
        let data_offset =
            header_bytes.checked_next_multiple_of(alignment.into()).unwrap_or(u64::MAX);
        let tensors = check_places(path, entries, alignment, data_offset, file_len)?;
        Ok(GgufFile {
            path: path.to_owned(),
            version: header.version,
            alignment,
            metadata,
            tensors,
            by_name,
            header_bytes,
            data_offset,
            file_len,
        })
    }

    /// The path as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The GGUF version: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Alignment of tensor data in bytes: a power of two.
    pub fn alignment(&self) -> u32 {
        self.alignment
    }

    /// The metadata.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tensors in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.find(&self.tensors, name, TensorInfo::name)
    }

    /// Bytes of header, metadata and tensor table.
    pub fn header_bytes(&self) -> u64 {
        self.header_bytes
    }

    /// Where the data section begins. In a file without tensors this can be after the end.
    pub fn data_offset(&self) -> u64 {
        self.data_offset
    }

    /// Length of the file in bytes when it was opened.
    pub fn file_len(&self) -> u64 {
        self.file_len
    }

    pub(crate) fn into_parts(self) -> (Metadata, Vec<TensorInfo>, NameIndex) {
        (self.metadata, self.tensors, self.by_name)
    }
}

fn check_regular(path: &Path, metadata: &std::fs::Metadata) -> Result<(), GgufError> {
    let what = match () {
        () if metadata.is_file() => return Ok(()),
        () if metadata.is_dir() => "a directory",
        () => "a device, pipe or socket",
    };
    Err(GgufError::NotAFile { file: path.to_owned(), what })
}

/// The first bytes, and a source that gives them again.
fn peek<R: Read>(
    mut source: R,
    path: &Path,
    file_len: u64,
) -> Result<(Vec<u8>, impl Read + use<R>), GgufError> {
    let mut peek = Vec::new();
    let read = source.by_ref().take(PEEK_BYTES.min(file_len)).read_to_end(&mut peek);
    read.map_err(|cause| GgufError::Io { file: path.to_owned(), action: "read", cause })?;
    Ok((peek.clone(), Cursor::new(peek).chain(source)))
}

/// The alignment that the value of `general.alignment` asks for; the type is fixed, as everywhere in the field.
pub(crate) fn check_alignment(file: &Path, value: Option<&Value>) -> Result<u32, GgufError> {
    let file = || file.to_owned();
    match value {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(Value::U32(n))
            if n.is_power_of_two() && (ALIGNMENT_MIN..=ALIGNMENT_MAX).contains(n) =>
        {
            Ok(*n)
        }
        Some(Value::U32(got)) => Err(GgufError::BadAlignment { file: file(), got: *got }),
        Some(other) => Err(GgufError::WrongType {
            file: file(),
            key: ALIGNMENT_KEY.to_owned(),
            expected: "a u32",
            got: other.value_type().with_article().to_owned(),
        }),
    }
}
