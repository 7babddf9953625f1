//! Weights of an executable: where their tiles lie, checked once.

use crate::buffer::{ClBuffer, device_place};
use crate::launch::Memory;
use crate::weight::layout::Rows;
use tegula_sdk::abi::LAYOUT_NATIVE;
use tegula_sdk::program::{Dim, OpKind, Program, Value, ValueId};
use tegula_sdk::quant::DType;
use tegula_sdk::{Error, Range, Result, WeightBinding};

/// One tile.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TileAt {
    pub(crate) at: Memory,
    pub(crate) first_row: u64,
    pub(crate) n_rows: u64,
}

/// Types of vectors, which lie as they are.
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

/// A weight: a vector, rows of them, or a matrix in one of the layouts.
#[derive(Debug)]
pub(crate) struct Bound {
    /// `None` for vectors.
    pub(crate) rows: Option<Rows>,
    pub(crate) tiles: Vec<TileAt>,
}

impl Bound {
    /// Checks that the tiles cover the rows in order, are laid out as this backend said, and lie inside their buffers.
    pub(crate) fn new(
        value: &Value,
        is_vector: bool,
        binding: &WeightBinding<ClBuffer>,
    ) -> Result<Self> {
        let fault = |why: String| Error::invalid(format!("weight `{}`: {why}", value.name));
        let Dim::Fixed(n_rows) = value.rows() else { return Err(fault("no fixed shape".into())) };
        let rows = Rows::new(value.dtype, value.row_len(), n_rows)?;
        let layout = if is_vector { LAYOUT_NATIVE } else { rows.layout.number() };
        let row_bytes =
            if is_vector { value.dtype.row_bytes(value.row_len())? } else { rows.stride };
        let mut tiles = Vec::with_capacity(binding.tiles.len());
        let mut next = 0u64;
        for tile in &binding.tiles {
            let bytes = tile.n_rows.checked_mul(row_bytes);
            let (Some(bytes), true) = (bytes, tile.first_row == next && tile.layout == layout)
            else {
                return Err(fault(format!(
                    "a tile at row {} in layout {}, row {next} in layout {layout} is next",
                    tile.first_row, tile.layout
                )));
            };
            let range = Range { buffer: &*tile.buffer, offset: tile.offset, size: bytes };
            let (mem, offset) = device_place(&range, "a weight")?;
            let alignment = if is_vector { 4 } else { 64 };
            if !offset.is_multiple_of(alignment) {
                return Err(fault(format!("a tile at byte {offset}")));
            }
            tiles.push(TileAt { at: Memory(mem, offset), first_row: next, n_rows: tile.n_rows });
            next = next.saturating_add(tile.n_rows);
        }
        if next != n_rows {
            return Err(fault(format!("tiles of {next} rows for {n_rows}")));
        }
        Ok(Self { rows: (!is_vector).then_some(rows), tiles })
    }
}
