//! Weights of an executable: where their rows lie.

use crate::kernels::RowTile;
use tegula_sdk::abi::LAYOUT_NATIVE;
use tegula_sdk::host_memory::HostBuffer;
use tegula_sdk::program::{DType, Dim, Value};
use tegula_sdk::{Error, Result, WeightBinding};

/// A weight's rows, resolved to addresses that hold as long as the executable.
#[derive(Debug)]
pub(crate) struct Matrix {
    pub(crate) dtype: DType,
    pub(crate) n_in: usize,
    pub(crate) n_rows: usize,
    pub(crate) row_bytes: usize,
    pub(crate) tiles: Vec<RowTile>,
}

impl Matrix {
    /// Checks that the tiles cover the rows of `value` in order and lie inside their buffers.
    pub(crate) fn new(value: &Value, binding: &WeightBinding<HostBuffer>) -> Result<Self> {
        let fault = |why: String| Error::invalid(format!("weight `{}`: {why}", value.name));
        let Dim::Fixed(n_rows) = value.rows() else { return Err(fault("no fixed shape".into())) };
        let row_bytes = value.dtype.row_bytes(value.row_len())?;
        let mut tiles = Vec::with_capacity(binding.tiles.len());
        let mut next = 0u64;
        for tile in &binding.tiles {
            let bytes = tile.n_rows.checked_mul(row_bytes);
            if tile.first_row != next || tile.layout != LAYOUT_NATIVE || bytes.is_none() {
                return Err(fault(format!(
                    "a tile at row {} in layout {}",
                    tile.first_row, tile.layout
                )));
            }
            let data = tile.buffer.ptr(tile.offset, bytes.unwrap_or(0))?;
            if value.dims.len() == 1 && !(data as usize).is_multiple_of(align_of::<f32>()) {
                return Err(fault("a vector that is not aligned to 4 bytes".into()));
            }
            let rows = usize::try_from(tile.n_rows).map_err(|e| fault(e.to_string()))?;
            let first = usize::try_from(next).map_err(|e| fault(e.to_string()))?;
            tiles.push(RowTile { data, first_row: first, n_rows: rows });
            next = next.saturating_add(tile.n_rows);
        }
        if next != n_rows {
            return Err(fault(format!("tiles of {next} rows for {n_rows}")));
        }
        let size = |n: u64| usize::try_from(n).map_err(|e| fault(e.to_string()));
        Ok(Self {
            dtype: value.dtype,
            n_in: size(value.row_len())?,
            n_rows: size(n_rows)?,
            row_bytes: size(row_bytes)?,
            tiles,
        })
    }

    /// The address of a row.
    pub(crate) fn row(&self, index: usize) -> Option<*const u8> {
        let after = self.tiles.partition_point(|tile| tile.first_row <= index);
        let tile = self.tiles.get(after.checked_sub(1)?)?;
        let row = index - tile.first_row;
        (row < tile.n_rows).then(|| tile.data.wrapping_add(row * self.row_bytes))
    }
}
