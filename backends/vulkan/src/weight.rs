//! Weights of an executable: where their rows lie on the device.

use crate::layout::{Format, table_words};
use crate::memory::Buffer;
use tegula_sdk::abi::LAYOUT_NATIVE;
use tegula_sdk::program::{Dim, OpKind, Program, Value, ValueId};
use tegula_sdk::quant::DType;
use tegula_sdk::{Error, Held, Result, WeightBinding};

/// Rows in one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rows {
    pub(crate) address: u64,
    pub(crate) first: u32,
    pub(crate) n: u32,
}

/// Types of vectors that lie as they are.
pub(crate) fn is_vector_type(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// Whether a weight is read by no product and no table.
pub(crate) fn is_vector(program: &Program, id: ValueId) -> bool {
    !program.ops.iter().any(|op| {
        let is_table =
            matches!(op.kind, OpKind::Matmul | OpKind::Embed | OpKind::MatmulExperts { .. });
        is_table && op.inputs.get(1) == Some(&id)
    })
}

/// A weight matrix, or vectors as rows of one.
pub(crate) struct Matrix {
    pub(crate) format: Format,
    /// The table of the general form, as the shaders take it.
    pub(crate) table: [u32; 4],
    pub(crate) n_in: u32,
    pub(crate) n_rows: u32,
    pub(crate) row_bytes: u32,
    pub(crate) tiles: Vec<Rows>,
    pub(crate) dtype: DType,
    /// The buffer and offset of a vector, for those that the host has to read.
    pub(crate) vector: Option<(Held<Buffer>, u64)>,
}

impl Matrix {
    /// Checks that the tiles cover the rows in order and lie inside their buffers.
    /// `is_vector`: no product or table reads it, so that it lies as it was given.
    pub(crate) fn new(
        value: &Value,
        is_vector: bool,
        binding: &WeightBinding<Buffer>,
    ) -> Result<Self> {
        let fault = |why: String| Error::invalid(format!("weight `{}`: {why}", value.name));
        let Dim::Fixed(n_rows) = value.rows() else { return Err(fault("no fixed shape".into())) };
        let format = Format::of(value.dtype);
        let n_in = value.row_len();
        let native = value.dtype.row_bytes(n_in)?;
        let row_bytes = match is_vector {
            true => native,
            false => format.planes(n_in)?.bytes as u64,
        };
        let layout = if is_vector { LAYOUT_NATIVE } else { format.layout() };
        let small = |n: u64| u32::try_from(n).map_err(|_| fault(format!("{n} rows or elements")));
        let mut tiles = Vec::with_capacity(binding.tiles.len());
        let mut next = 0u64;
        for tile in &binding.tiles {
            let bytes = tile.n_rows.checked_mul(row_bytes);
            let bytes = bytes.filter(|bytes| *bytes <= tile.size);
            if tile.first_row != next || tile.n_rows == 0 || tile.layout != layout {
                let (row, layout) = (tile.first_row, tile.layout);
                return Err(fault(format!("a tile at row {row} in layout {layout}")));
            }
            let bytes = bytes.ok_or_else(|| fault(format!("a tile of {} bytes", tile.size)))?;
            let address = tile.buffer.address(tile.offset, bytes)?;
            if !address.is_multiple_of(16) {
                return Err(fault("a tile that is not aligned to 16 bytes".into()));
            }
            tiles.push(Rows { address, first: small(next)?, n: small(tile.n_rows)? });
            next = next.saturating_add(tile.n_rows);
        }
        if next != n_rows {
            return Err(fault(format!("tiles of {next} rows for {n_rows}")));
        }
        let vector = binding.tiles.first().filter(|_| is_vector);
        Ok(Self {
            format,
            table: table_words(value.dtype),
            n_in: small(n_in)?,
            n_rows: small(n_rows)?,
            row_bytes: small(row_bytes)?,
            tiles,
            dtype: value.dtype,
            vector: vector.map(|tile| (tile.buffer, tile.offset)),
        })
    }

    /// The address of a vector.
    pub(crate) fn address(&self) -> u64 {
        self.tiles.first().map_or(0, |tile| tile.address)
    }
}
