//! GGUF rows to the device's layout, one row at a time.
//!
//! Nothing is rounded: codes and scales keep their values, only their places change. Where a type has no form of its own, its elements are decoded
//! and looked up in its table again, under the scale that the decoder multiplies with.

use crate::layout::{Format, Planes, table};
use crate::repack_table::{minimum_row, table_row};
use half::f16;
use tegula_sdk::Result;
use tegula_sdk::quant::block::{q4_0, q4_1, q4_k, q5_0, q5_1, q5_k, q6_k, q8_0, q8_1, q8_k};
use tegula_sdk::quant::{DType, dequantize_row_fn};

/// Writes rows of one weight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Repack {
    dtype: DType,
    n_in: usize,
    planes: Planes,
    row_bytes: usize,
    table: [i8; 16],
}

impl Repack {
    pub(crate) fn new(dtype: DType, n_in: u64) -> Result<Self> {
        let row_bytes = dtype.row_bytes(n_in)?;
        let planes = Format::of(dtype).planes(n_in)?;
        Ok(Self {
            dtype,
            n_in: usize::try_from(n_in).unwrap_or(usize::MAX),
            planes,
            row_bytes: usize::try_from(row_bytes).unwrap_or(usize::MAX),
            table: table(dtype),
        })
    }

    /// Bytes of a row in GGUF.
    pub(crate) fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Bytes of a row on the device.
    pub(crate) fn packed_bytes(&self) -> usize {
        self.planes.bytes
    }

    /// Writes as many whole rows as both sides hold. `dst` is written whole, and never read: it may be slow to read.
    pub(crate) fn rows(&self, src: &[u8], dst: &mut [u8]) {
        let rows = src.chunks_exact(self.row_bytes.max(1));
        let mut packed = vec![0u8; self.planes.bytes];
        for (src, dst) in rows.zip(dst.chunks_exact_mut(self.planes.bytes.max(1))) {
            self.row(src, &mut packed);
            dst.copy_from_slice(&packed);
        }
    }

    /// Padding of `out` is zero and stays so.
    fn row(&self, src: &[u8], out: &mut [u8]) {
        let planes = &self.planes;
        match self.dtype {
            DType::F32 | DType::F16 | DType::BF16 => {
                if let Some(out) = out.get_mut(..src.len()) {
                    out.copy_from_slice(src);
                }
            }
            DType::F64 | DType::I8 | DType::I16 | DType::I32 | DType::I64 => {
                let mut row = vec![0.0; self.n_in];
                dequantize_row_fn(self.dtype)(src, &mut row);
                for (out, x) in out.as_chunks_mut::<4>().0.iter_mut().zip(row) {
                    *out = x.to_le_bytes();
                }
            }
            DType::Q8_0 => blocks::<{ q8_0::BYTES }>(src, |i, b| {
                put(out, 32 * i, part::<32>(b, q8_0::QS));
                put(out, planes.second + 2 * i, part::<2>(b, q8_0::D));
            }),
            DType::Q8_1 => blocks::<{ q8_1::BYTES }>(src, |i, b| {
                put(out, 32 * i, part::<32>(b, q8_1::QS));
                let d = f16::from_le_bytes(part(b, q8_1::D)).to_f32();
                put(out, planes.second + 4 * i, d.to_le_bytes());
            }),
            DType::Q8_K => blocks::<{ q8_k::BYTES }>(src, |i, b| {
                put(out, 256 * i, part::<256>(b, q8_k::QS));
                for j in 0..8 {
                    put(out, planes.second + 4 * (8 * i + j), part::<4>(b, q8_k::D));
                }
            }),
            DType::Q4_0 => blocks::<{ q4_0::BYTES }>(src, |i, b| {
                put(out, 16 * i, pack(&split(part(b, q4_0::QS))));
                put(out, planes.second + 2 * i, part::<2>(b, q4_0::D));
            }),
            DType::Q4_1 => blocks::<{ q4_1::BYTES }>(src, |i, b| {
                put(out, 16 * i, pack(&split(part(b, q4_1::QS))));
                put(out, planes.second + 4 * i, part::<4>(b, q4_1::D));
            }),
            DType::Q5_0 => blocks::<{ q5_0::BYTES }>(src, |i, b| {
                put(out, 16 * i, pack(&split(part(b, q5_0::QS))));
                put(out, planes.second + 4 * i, part::<4>(b, q5_0::QH));
                put(out, planes.third + 2 * i, part::<2>(b, q5_0::D));
            }),
            DType::Q5_1 => blocks::<{ q5_1::BYTES }>(src, |i, b| {
                put(out, 16 * i, pack(&split(part(b, q5_1::QS))));
                put(out, planes.second + 4 * i, part::<4>(b, q5_1::QH));
                put(out, planes.third + 4 * i, part::<4>(b, q5_1::D));
            }),
            DType::Q4_K => blocks::<{ q4_k::BYTES }>(src, |i, b| {
                k_nibbles(out, i, part::<128>(b, q4_k::QS));
                put(out, planes.second + 16 * i, part::<16>(b, q4_k::D));
            }),
            DType::Q5_K => blocks::<{ q5_k::BYTES }>(src, |i, b| {
                k_nibbles(out, i, part::<128>(b, q5_k::QS));
                let high = part::<32>(b, q5_k::QH);
                for k in 0..8 {
                    let bits = high
                        .iter()
                        .rev()
                        .fold(0u32, |bits, byte| bits << 1 | u32::from(byte >> k & 1));
                    put(out, planes.second + 4 * (8 * i + k), bits.to_le_bytes());
                }
                put(out, planes.third + 16 * i, part::<16>(b, q5_k::D));
            }),
            DType::Q6_K => blocks::<{ q6_k::BYTES }>(src, |i, b| q6_k_block(out, planes, i, b)),
            DType::Q2_K => minimum_row(src, planes, out),
            _ => table_row(self.dtype, &self.table, self.n_in, planes, src, out),
        }
    }
}

/// Calls `each` with the index and bytes of every whole block.
fn blocks<const N: usize>(src: &[u8], mut each: impl FnMut(usize, &[u8; N])) {
    for (i, block) in src.as_chunks::<N>().0.iter().enumerate() {
        each(i, block);
    }
}

/// `N` bytes of a block; offsets are those of the type, which cover it.
pub(crate) fn part<const N: usize>(block: &[u8], at: usize) -> [u8; N] {
    block.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

/// Puts bytes where the planes have room for them.
pub(crate) fn put<const N: usize>(out: &mut [u8], at: usize, bytes: [u8; N]) {
    if let Some(to) = out.get_mut(at..).and_then(|rest| rest.first_chunk_mut()) {
        *to = bytes;
    }
}

/// Codes in order to nibbles in order, the low nibble first.
pub(crate) fn pack(codes: &[u8; 32]) -> [u8; 16] {
    std::array::from_fn(|i| codes[2 * i] & 15 | codes[2 * i + 1] << 4)
}

/// All low nibbles, then all high ones.
fn split(qs: [u8; 16]) -> [u8; 32] {
    std::array::from_fn(|i| if i < 16 { qs[i] & 15 } else { qs[i - 16] >> 4 })
}

fn k_nibbles(out: &mut [u8], block: usize, qs: [u8; 128]) {
    for j in 0..8 {
        let codes = std::array::from_fn(|l| qs[32 * (j / 2) + l] >> (4 * (j % 2)) & 15);
        put(out, 16 * (8 * block + j), pack(&codes));
    }
}

fn q6_k_block(out: &mut [u8], planes: &Planes, i: usize, b: &[u8; q6_k::BYTES]) {
    let (low, high) = (part::<128>(b, q6_k::QL), part::<64>(b, q6_k::QH));
    for j in 0..8 {
        let (half, quarter) = (j / 4, j % 4);
        let codes: [u8; 32] = std::array::from_fn(|l| {
            low[64 * half + 32 * (quarter % 2) + l] >> (4 * (quarter / 2)) & 15
        });
        put(out, 16 * (8 * i + j), pack(&codes));
        let bits: [u8; 8] = std::array::from_fn(|byte| {
            let two = |k: usize| (high[32 * half + 4 * byte + k] >> (2 * quarter) & 3) << (2 * k);
            two(0) | two(1) | two(2) | two(3)
        });
        put(out, planes.second + 8 * (8 * i + j), bits);
    }
    put(out, planes.third + 16 * i, part::<16>(b, q6_k::SCALES));
    put(out, planes.fourth + 2 * i, part::<2>(b, q6_k::D));
}
