//! Weights as the core holds them: rows in GGUF's layout, in tiles of host memory.

#![expect(unsafe_code, reason = "tiles are read in the core's memory")]

use crate::buffer::Buffer;
use tegula_sdk::abi::LAYOUT_NATIVE;
use tegula_sdk::program::{Dim, Value};
use tegula_sdk::quant::{DType, dequantize};
use tegula_sdk::{Error, Held, Result, WeightBinding};

struct Tile {
    first_row: u64,
    n_rows: u64,
    buffer: Held<Buffer>,
    offset: u64,
}

/// A weight whose tiles cover all its rows.
pub(crate) struct Tiles {
    pub(crate) dtype: DType,
    pub(crate) n_in: u64,
    pub(crate) n_rows: u64,
    row_bytes: u64,
    tiles: Vec<Tile>,
}

impl Tiles {
    /// Checks that the tiles cover the value, in order, in memory that holds them.
    pub(crate) fn new(value: &Value, binding: WeightBinding<Buffer>) -> Result<Self> {
        let fault = |why: &str| Error::invalid(format!("the tiles of `{}` {why}", value.name));
        let Dim::Fixed(n_rows) = value.rows() else { return Err(fault("have no number of rows")) };
        let n_in = value.row_len();
        let row_bytes = value.dtype.row_bytes(n_in)?;
        let mut tiles = Vec::with_capacity(binding.tiles.len());
        let mut next = 0u64;
        for tile in binding.tiles {
            if tile.layout != LAYOUT_NATIVE {
                return Err(fault(&format!("have layout {}", tile.layout)));
            }
            if tile.first_row != next {
                return Err(fault("have gaps"));
            }
            next = next.checked_add(tile.n_rows).ok_or_else(|| fault("have too many rows"))?;
            let size = tile.n_rows.checked_mul(row_bytes).filter(|size| *size <= tile.size);
            let size = size.ok_or_else(|| fault("are too short"))?;
            tile.buffer.ptr(tile.offset, size)?;
            let (first_row, n_rows) = (tile.first_row, tile.n_rows);
            tiles.push(Tile { first_row, n_rows, buffer: tile.buffer, offset: tile.offset });
        }
        if next != n_rows {
            return Err(fault(&format!("cover {next} rows of {n_rows}")));
        }
        Ok(Self { dtype: value.dtype, n_in, n_rows, row_bytes, tiles })
    }

    /// Calls `f` with the bytes of rows `first .. first + n`, tile by tile, and the number of rows before them.
    pub(crate) fn each(
        &self,
        first: u64,
        n: u64,
        mut f: impl FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let end = first.checked_add(n).filter(|end| *end <= self.n_rows);
        let end =
            end.ok_or_else(|| Error::invalid(format!("rows {first} + {n} of {}", self.n_rows)))?;
        let begin = self.tiles.partition_point(|tile| tile.first_row + tile.n_rows <= first);
        for tile in self.tiles.iter().skip(begin) {
            let from = tile.first_row.max(first);
            let to = (tile.first_row + tile.n_rows).min(end);
            if from >= to {
                break;
            }
            let size = (to - from) * self.row_bytes;
            let ptr =
                tile.buffer.ptr(tile.offset + (from - tile.first_row) * self.row_bytes, size)?;
            let len = usize::try_from(size).map_err(|_| Error::invalid("rows of all memory"))?;
            // SAFETY: `len` readable bytes of a buffer that lives as long as the executable; the core does not write weights.
            f(from - first, unsafe { std::slice::from_raw_parts(ptr, len) })?;
        }
        Ok(())
    }

    /// Decodes row `row`.
    pub(crate) fn row(&self, row: u64, out: &mut [f32]) -> Result<()> {
        self.each(row, 1, |_, bytes| Ok(dequantize(self.dtype, bytes, out)?))
    }

    /// All elements of a vector.
    pub(crate) fn vector(&self) -> Result<Vec<f32>> {
        let n = usize::try_from(self.n_in).map_err(|_| Error::invalid("a vector of all memory"))?;
        let mut out = vec![0.0; n];
        self.row(0, &mut out)?;
        Ok(out)
    }
}
