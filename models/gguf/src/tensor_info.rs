//! [`TensorInfo`]: one entry of the tensor table, and the checks that make it sound.
//!
//! The checks that need one entry are [`Shape::check`] and [`TensorInfo::check_place`]; [`check_overlaps`] needs all of
//! a file. A product that wraps around is the classic hole here: dimensions of 2^32 by 2^32 are zero bytes in 64-bit
//! arithmetic, and then any offset is in bounds.

use std::io::Read;
use std::path::Path;

use tegula_quant::DType;

use crate::error::clip;
use crate::metadata::read_name;
use crate::reader::{ByteReader, Field};
use crate::{GgufError, TensorProblem};

/// Bytes of the smallest entry: a name of one byte with its length, one dimension, type and offset.
pub(crate) const ENTRY_BYTES_MIN: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// Dimensions a tensor may have.
pub(crate) const N_DIMS_MAX: usize = 4;

/// Dimensions with a type, whose sizes are known to fit in 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    dims: [u64; N_DIMS_MAX],
    n_dims: u8,
    pub(crate) dtype: DType,
    pub(crate) n_elements: u64,
    pub(crate) n_bytes: u64,
}

impl Shape {
    /// Checks number, sizes and products of the dimensions, and that rows hold whole QuantBlocks.
    pub(crate) fn check(dims: &[u64], dtype: DType) -> Result<Shape, TensorProblem> {
        let got = u32::try_from(dims.len()).unwrap_or(u32::MAX);
        let (Some(row), true) = (dims.first(), dims.len() <= N_DIMS_MAX) else {
            return Err(TensorProblem::DimCount { got });
        };
        if let Some(dim) = dims.iter().position(|n| *n == 0) {
            return Err(TensorProblem::ZeroDim { dim });
        }
        let row_bytes = dtype.row_bytes(*row).map_err(TensorProblem::Layout)?;
        let rows = dims.iter().skip(1).try_fold(1u64, |product, n| product.checked_mul(*n));
        let overflow = || TensorProblem::SizeOverflow { dims: dims.to_vec(), dtype };
        let rows = rows.ok_or_else(overflow)?;
        let n_elements = row.checked_mul(rows).ok_or_else(overflow)?;
        let n_bytes = row_bytes.checked_mul(rows).ok_or_else(overflow)?;
        let mut padded = [1; N_DIMS_MAX];
        for (to, from) in padded.iter_mut().zip(dims) {
            *to = *from;
        }
        Ok(Shape { dims: padded, n_dims: dims.len() as u8, dtype, n_elements, n_bytes })
    }

    pub(crate) fn dims(&self) -> &[u64] {
        self.dims.get(..usize::from(self.n_dims)).unwrap_or_default()
    }
}

/// A tensor of a model: shape, type and place in a file. All of it has been checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    name: Box<str>,
    shape: Shape,
    offset: u64,
    shard: u32,
}

impl TensorInfo {
    /// The name, unique in the model.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// 1 to 4 sizes in elements, none of them zero. The first is the length of a row, contiguous in memory; it is a
    /// multiple of the type's block length.
    pub fn dims(&self) -> &[u64] {
        self.shape.dims()
    }

    /// The four sizes, with 1 for dimensions that the tensor does not have.
    pub fn dims_padded(&self) -> [u64; 4] {
        self.shape.dims
    }

    /// The element or block type.
    pub fn dtype(&self) -> DType {
        self.shape.dtype
    }

    /// The product of the dimensions.
    pub fn n_elements(&self) -> u64 {
        self.shape.n_elements
    }

    /// Bytes of data; never zero.
    pub fn n_bytes(&self) -> u64 {
        self.shape.n_bytes
    }

    /// Where the data begins, in bytes from the start of its file's data section; a multiple of the file's alignment.
    /// [`Gguf::file_range`](crate::Gguf::file_range) gives the place in the file.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Position of the tensor's file in [`Gguf::shards`](crate::Gguf::shards).
    pub fn shard(&self) -> usize {
        self.shard as usize
    }

    pub(crate) fn set_shard(&mut self, shard: u32) {
        self.shard = shard;
    }

    /// Offset of the first byte after the data; the sum was checked with the place.
    pub(crate) fn end(&self) -> u64 {
        self.offset.saturating_add(self.shape.n_bytes)
    }

    /// Checks the place in a file whose data section begins at `data_offset`.
    fn check_place(
        &self,
        alignment: u32,
        data_offset: u64,
        file_len: u64,
    ) -> Result<(), TensorProblem> {
        let (offset, n_bytes) = (self.offset, self.shape.n_bytes);
        if !offset.is_multiple_of(alignment.into()) {
            return Err(TensorProblem::Misaligned { offset, alignment });
        }
        let end = data_offset.checked_add(offset).and_then(|start| start.checked_add(n_bytes));
        match end {
            Some(end) if end <= file_len => Ok(()),
            _ => Err(TensorProblem::OutOfBounds { offset, n_bytes, data_offset, file_len }),
        }
    }
}

/// An entry as it is read, with the place of the entry in the file for messages.
pub(crate) struct TableEntry {
    info: TensorInfo,
    entry_offset: u64,
}

impl TableEntry {
    pub(crate) fn name(&self) -> &str {
        &self.info.name
    }
}

/// Reads the tensor table; the caller has capped the count. Places are checked later, by [`check_places`], because they
/// count from the end of the table.
pub(crate) fn read_table<R: Read>(
    reader: &mut ByteReader<'_, R>,
    n_tensors: u64,
) -> Result<Vec<TableEntry>, GgufError> {
    let mut entries = reader.reserved(n_tensors, Field::Header("the tensor table"))?;
    for index in 0..n_tensors {
        entries.push(read_entry(reader, index)?);
    }
    Ok(entries)
}

fn read_entry<R: Read>(
    reader: &mut ByteReader<'_, R>,
    index: u64,
) -> Result<TableEntry, GgufError> {
    let (entry_offset, file) = (reader.offset(), reader.file());
    let name_max = reader.limits().tensor_name_bytes_max;
    let name = read_name(reader, name_max, "tensor_name_bytes_max", Field::TensorName(index))?;
    let bad = |problem| bad_tensor(file, &name, entry_offset, problem);

    let n_dims = reader.u32(Field::Tensor(&name, "the number of dimensions"))?;
    let mut dims = [0; N_DIMS_MAX];
    let dims = match usize::try_from(n_dims).ok().and_then(|n| dims.get_mut(..n)) {
        Some(dims) if !dims.is_empty() => dims,
        _ => return Err(bad(TensorProblem::DimCount { got: n_dims })),
    };
    for dim in dims.iter_mut() {
        *dim = reader.u64(Field::Tensor(&name, "the dimensions"))?;
    }
    let id = reader.u32(Field::Tensor(&name, "the type"))?;
    let offset = reader.u64(Field::Tensor(&name, "the data offset"))?;

    let dtype = DType::from_id(id).ok_or_else(|| bad(TensorProblem::UnknownDType { id }))?;
    let shape = Shape::check(dims, dtype).map_err(bad)?;
    Ok(TableEntry { info: TensorInfo { name, shape, offset, shard: 0 }, entry_offset })
}

fn bad_tensor(file: &Path, name: &str, offset: u64, problem: TensorProblem) -> GgufError {
    GgufError::BadTensor { file: file.to_owned(), tensor: clip(name), offset, problem }
}

/// Checks that each tensor is aligned, inside the file and outside of the others, and drops what only messages need.
pub(crate) fn check_places(
    file: &Path,
    entries: Vec<TableEntry>,
    alignment: u32,
    data_offset: u64,
    file_len: u64,
) -> Result<Vec<TensorInfo>, GgufError> {
    for TableEntry { info, entry_offset } in &entries {
        info.check_place(alignment, data_offset, file_len)
            .map_err(|problem| bad_tensor(file, &info.name, *entry_offset, problem))?;
    }
    let tensors: Vec<TensorInfo> = entries.into_iter().map(|entry| entry.info).collect();
    check_overlaps(file, &tensors)?;
    Ok(tensors)
}

/// In the order of offsets it is enough to look at neighbours, because no tensor is empty.
fn check_overlaps(file: &Path, tensors: &[TensorInfo]) -> Result<(), GgufError> {
    let mut by_offset: Vec<&TensorInfo> = tensors.iter().collect();
    by_offset.sort_by_key(|tensor| tensor.offset);
    for (first, second) in by_offset.iter().zip(by_offset.iter().skip(1)) {
        if first.end() > second.offset {
            return Err(GgufError::OverlappingTensors {
                file: file.to_owned(),
                first: clip(&first.name),
                second: clip(&second.name),
                first_end: first.end(),
                second_start: second.offset,
            });
        }
    }
    Ok(())
}
