//! [`Gguf`]: a model, from one file or from all shards of a split one.
//!
//! Metadata is that of the first shard; the others' is used to check that they belong together and dropped. Tensors of
//! all shards are one list. Limits hold for the model as a whole, so that many small files cost no more than one.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::error::clip;
use crate::index::NameIndex;
use crate::shards::{Split, bad_shard, check_member, find_siblings};
use crate::{GgufError, GgufFile, Limits, Metadata, ShardProblem, TensorInfo};

/// One file of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shard {
    /// The path the file was opened by.
    pub path: PathBuf,
    /// GGUF version of the file.
    pub version: u32,
    /// Alignment of tensor data, in bytes.
    pub alignment: u32,
    /// Where tensor data begins, in bytes from the start of the file.
    pub data_offset: u64,
    /// Length of the file in bytes when it was opened.
    pub file_len: u64,
}

impl Shard {
    fn of(file: &GgufFile) -> Shard {
        Shard {
            path: file.path().to_owned(),
            version: file.version(),
            alignment: file.alignment(),
            data_offset: file.data_offset(),
            file_len: file.file_len(),
        }
    }
}

/// A model's metadata and tensors, with the files that hold the data.
#[derive(Clone, Debug)]
pub struct Gguf {
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    by_name: NameIndex,
    shards: Vec<Shard>,
}

impl Gguf {
    /// Opens the model that the file at `path` is or is a shard of; any of the shards will do.
    ///
    /// # Errors
    /// Any [`GgufError`].
    pub fn open(path: impl AsRef<Path>) -> Result<Gguf, GgufError> {
        Gguf::open_with(path, &Limits::default())
    }

    /// As [`Gguf::open`], with other limits.
    ///
    /// # Errors
    /// Any [`GgufError`].
    pub fn open_with(path: impl AsRef<Path>, limits: &Limits) -> Result<Gguf, GgufError> {
        let path = path.as_ref();
        let opened = GgufFile::open_with(path, limits)?;
        match Split::of(opened.metadata(), limits)? {
            None => Ok(Gguf::from_single(opened)),
            Some(split) => {
                let paths = find_siblings(path, split)?;
                Gguf::from_shards(opened, split, &paths, limits)
            }
        }
    }

    /// Reads a model of one file that is in memory. `name` stands for the path in messages.
    ///
    /// # Errors
    /// Any [`GgufError`] of a single file, and [`ShardProblem::InMemory`].
    pub fn parse(bytes: &[u8], name: impl AsRef<Path>) -> Result<Gguf, GgufError> {
        Gguf::from_memory(GgufFile::parse(bytes, name)?)
    }

    /// Reads a model of one file of which only the beginning exists, as [`GgufWriter::to_header`](crate::GgufWriter::to_header) gives it:
    /// metadata and tensor table, with tensors in a file that would be `file_len` bytes long. For sizing models that are not
    /// here; their data cannot be read. `name` stands for the path in messages.
    ///
    /// # Errors
    /// Any [`GgufError`] of a single file, and [`ShardProblem::InMemory`].
    pub fn from_header(
        header: &[u8],
        name: impl AsRef<Path>,
        file_len: u64,
    ) -> Result<Gguf, GgufError> {
        let limits = Limits::default();
        Gguf::from_memory(GgufFile::read_from(header, name.as_ref(), file_len, &limits)?)
    }

    fn from_memory(file: GgufFile) -> Result<Gguf, GgufError> {
        match Split::of(file.metadata(), &Limits::default())? {
            None => Ok(Gguf::from_single(file)),
            Some(Split { number, count, .. }) => {
                Err(bad_shard(file.path(), ShardProblem::InMemory { number, count }))
            }
        }
    }

    fn from_single(file: GgufFile) -> Gguf {
        let shards = vec![Shard::of(&file)];
        let (metadata, tensors, by_name) = file.into_parts();
        Gguf { metadata, tensors, by_name, shards }
    }

    fn from_shards(
        opened: GgufFile,
        split: Split,
        paths: &[PathBuf],
        limits: &Limits,
    ) -> Result<Gguf, GgufError> {
        let mut left = *limits;
        let mut spend = |file: &GgufFile| {
            left.header_bytes_max = left.header_bytes_max.saturating_sub(file.header_bytes());
            left.n_tensors_max = left.n_tensors_max.saturating_sub(file.tensors().len() as u64);
            left
        };
        let mut now = spend(&opened);
        let mut opened = Some(opened);
        let mut first: Option<Metadata> = None;
        let (mut tensors, mut shards) = (Vec::new(), Vec::new());
        for ((path, number), index) in paths.iter().zip(1u64..).zip(0u32..) {
            let file = match opened.take_if(|_| number == split.number) {
                Some(file) => file,
                None => {
                    let file = GgufFile::open_with(path, &now)?;
                    now = spend(&file);
                    file
                }
            };
            check_member(&file, number, split, first.as_ref(), limits)?;
            shards.push(Shard { path: path.clone(), ..Shard::of(&file) });
            let (metadata, of_file, _) = file.into_parts();
            first.get_or_insert(metadata);
            tensors.extend(of_file.into_iter().map(|mut tensor| {
                tensor.set_shard(index);
                tensor
            }));
        }
        let Some(metadata) = first else {
            let problem = ShardProblem::Numbers { no: 0, count: 0 };
            return Err(bad_shard(Path::new(""), problem));
        };
        check_tensor_count(metadata.file(), split, tensors.len() as u64)?;
        let by_name = index_all(&tensors, &shards)?;
        Ok(Gguf { metadata, tensors, by_name, shards })
    }

    /// The metadata of the model: that of its first shard.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// All tensors: shard by shard, in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.find(&self.tensors, name, TensorInfo::name)
    }

    /// The tensor called `name`, which the caller cannot do without.
    ///
    /// # Errors
    /// [`GgufError::MissingTensor`].
    pub fn required_tensor(&self, name: &str) -> Result<&TensorInfo, GgufError> {
        self.tensor(name).ok_or_else(|| GgufError::MissingTensor {
            file: self.metadata.file().to_owned(),
            tensor: clip(name),
        })
    }

    /// The files; [`TensorInfo::shard`] is a position in this list.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// The file of a tensor of this model and the bytes of the tensor in it, which lie inside the file.
    /// `None` for a tensor of a model with more shards.
    pub fn file_range(&self, tensor: &TensorInfo) -> Option<(&Shard, Range<u64>)> {
        let shard = self.shards.get(tensor.shard())?;
        let start = shard.data_offset.checked_add(tensor.offset())?;
        let end = start.checked_add(tensor.n_bytes())?;
        (end <= shard.file_len).then_some((shard, start..end))
    }

    /// Reads the bytes of a tensor from its file. For tools and tests; the runtime maps files instead.
    ///
    /// # Errors
    /// [`GgufError::Io`], [`GgufError::Truncated`] where the file has become shorter, and [`GgufError::OutOfMemory`].
    pub fn read_tensor(&self, tensor: &TensorInfo) -> Result<Vec<u8>, GgufError> {
        let missing = || GgufError::MissingTensor {
            file: self.metadata.file().to_owned(),
            tensor: clip(tensor.name()),
        };
        let (shard, range) = self.file_range(tensor).ok_or_else(missing)?;
        let (file, n_bytes) = (&shard.path, tensor.n_bytes());
        let io = |action| move |cause| GgufError::Io { file: file.clone(), action, cause };
        let field = || format!("the data of the tensor {:?}", clip(tensor.name()));

        let mut source = File::open(file).map_err(io("open"))?;
        source.seek(SeekFrom::Start(range.start)).map_err(io("seek in"))?;
        let mut bytes = Vec::new();
        let reserved = usize::try_from(n_bytes).ok().map(|n| bytes.try_reserve_exact(n));
        if !matches!(reserved, Some(Ok(()))) {
            let file = file.clone();
            return Err(GgufError::OutOfMemory { file, field: field(), asked: n_bytes });
        }
        source.take(n_bytes).read_to_end(&mut bytes).map_err(io("read"))?;
        let left = bytes.len() as u64;
        if left != n_bytes {
            let (file, offset, needed) = (file.clone(), range.start, u128::from(n_bytes));
            return Err(GgufError::Truncated { file, field: field(), offset, needed, left });
        }
        Ok(bytes)
    }
}

fn check_tensor_count(file: &Path, split: Split, found: u64) -> Result<(), GgufError> {
    match split.n_tensors {
        Some(announced) if announced != found => {
            let count = split.count;
            Err(bad_shard(file, ShardProblem::TensorCount { announced, found, count }))
        }
        _ => Ok(()),
    }
}

/// An index over all shards' tensors; a name in two of them is an error that names both files.
fn index_all(tensors: &[TensorInfo], shards: &[Shard]) -> Result<NameIndex, GgufError> {
    NameIndex::build(tensors, TensorInfo::name).map_err(|duplicate| {
        let path = |index: usize| {
            let shard = tensors.get(index).and_then(|tensor| shards.get(tensor.shard()));
            shard.map(|shard| shard.path.clone()).unwrap_or_default()
        };
        let name = tensors.get(duplicate.first).map(TensorInfo::name).unwrap_or_default();
        let (first, file) = (path(duplicate.first), path(duplicate.second));
        GgufError::DuplicateTensor { file, tensor: clip(name), first }
    })
}
