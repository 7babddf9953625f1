//! Weights: rows in tiles over chunks, decoded one at a time.

use crate::buffer::Bytes;
use crate::values::zeros;
use tegula_sdk::abi::LAYOUT_NATIVE;
use tegula_sdk::host_memory::HostBuffer;
use tegula_sdk::program::{Dim, Value};
use tegula_sdk::quant::{DType, dequantize};
use tegula_sdk::{Error, Range, Result, Tile, WeightBinding};

/// A weight matrix, or a vector as a matrix of one row.
pub(crate) struct Matrix {
    dtype: DType,
    /// Elements of a row.
    pub(crate) n_in: u64,
    /// Rows.
    pub(crate) n_rows: u64,
    row_bytes: u64,
    tiles: Vec<Tile<HostBuffer>>,
}

impl Matrix {
    /// Checks that the tiles cover the rows of `value` in order and hold their bytes.
    pub(crate) fn new(value: &Value, binding: WeightBinding<HostBuffer>) -> Result<Self> {
        let Dim::Fixed(n_rows) = value.rows() else {
            return Err(Error::invalid(format!("weight `{}` has no fixed shape", value.name)));
        };
        let (dtype, n_in) = (value.dtype, value.row_len());
        let row_bytes = dtype.row_bytes(n_in)?;
        let matrix = Self { dtype, n_in, n_rows, row_bytes, tiles: binding.tiles };
        matrix.check_tiles().map_err(|error| Error {
            message: format!("weight `{}`: {}", value.name, error.message),
            ..error
        })?;
        Ok(matrix)
    }

    fn check_tiles(&self) -> Result<()> {
        let mut next = 0u64;
        for tile in &self.tiles {
            if tile.first_row != next || tile.n_rows == 0 {
                let (first, n) = (tile.first_row, tile.n_rows);
                let why = format!("a tile of {n} rows from {first} on, where row {next} is next");
                return Err(Error::invalid(why));
            }
            if tile.layout != LAYOUT_NATIVE {
                return Err(Error::invalid(format!("no weight has layout {}", tile.layout)));
            }
            let bytes = tile.n_rows.checked_mul(self.row_bytes);
            let bytes = bytes.ok_or_else(|| Error::invalid("a tile of more than 2^64 bytes"))?;
            tile_bytes(tile)?.part(0, bytes)?;
            next = next.saturating_add(tile.n_rows);
        }
        if next != self.n_rows {
            return Err(Error::invalid(format!("tiles of {next} rows for {}", self.n_rows)));
        }
        Ok(())
    }

    /// A reader with room for one row.
    pub(crate) fn rows(&self) -> Result<Rows<'_>> {
        Ok(Rows { matrix: self, raw: zeros(self.row_bytes)?, row: zeros(self.n_in)? })
    }
}

fn tile_bytes(tile: &Tile<HostBuffer>) -> Result<Bytes<'_>> {
    Bytes::of(&Range { buffer: &tile.buffer, offset: tile.offset, size: tile.size })
}

/// Decodes rows of a matrix.
pub(crate) struct Rows<'a> {
    matrix: &'a Matrix,
    raw: Vec<u8>,
    row: Vec<f32>,
}

impl Rows<'_> {
    /// Row `index`, from the tile that holds it.
    pub(crate) fn get(&mut self, index: u64) -> Result<&[f32]> {
        let Matrix { tiles, row_bytes, n_rows, .. } = self.matrix;
        let after = tiles.partition_point(|tile| tile.first_row <= index);
        let tile = after.checked_sub(1).and_then(|i| tiles.get(i));
        let tile = tile.filter(|tile| index - tile.first_row < tile.n_rows);
        let tile = tile.ok_or_else(|| Error::invalid(format!("row {index} of {n_rows}")))?;
        let offset = (index - tile.first_row) * row_bytes;
        tile_bytes(tile)?.part(offset, *row_bytes)?.read(&mut self.raw)?;
        dequantize(self.matrix.dtype, &self.raw, &mut self.row)?;
        Ok(&self.row)
    }
}
