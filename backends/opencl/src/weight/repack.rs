//! Repacks rows from GGUF's blocks to the planes of `layout`, exactly.
//!
//! Each type's blocks are taken apart into small integers, element by element, and put together again in the order that kernels load. Loops run over
//! whole blocks of both sides and stop at the shorter: no bytes index outside.

use super::layout::{Layout, Rows};
use tegula_quant::block::{
    iq4_nl, iq4_xs, mxfp4, nvfp4, q1_0, q2_0, q2_k, q3_k, q4_0, q4_1, q4_k, q5_0, q5_1, q5_k, q6_k,
    q8_0, q8_1, tq1_0, tq2_0,
};
use tegula_quant::{DType, dequantize_row_fn};
use tegula_sdk::{Error, Result};

/// Rows below this many bytes are not worth a thread.
const BYTES_PER_THREAD: usize = 1 << 20;
/// More threads than this wait for memory.
const THREADS_MAX: usize = 8;

/// Repacks whole rows; `dst` holds as many as `src`. Large pieces are shared out to threads.
pub(crate) fn repack_rows(rows: &Rows, src: &[u8], dst: &mut [u8]) -> Result<()> {
    let src_row = usize::try_from(rows.dtype.row_bytes(rows.n_in)?).unwrap_or(usize::MAX);
    let dst_row = usize::try_from(rows.stride).unwrap_or(usize::MAX);
    if src_row == 0 || src.len() / src_row != dst.len() / dst_row.max(1) {
        return Err(Error::invalid("rows to repack that differ in number"));
    }
    let n = src.len() / src_row;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = (dst.len() / BYTES_PER_THREAD).clamp(1, cores.min(THREADS_MAX));
    let share = n.div_ceil(threads).max(1);
    let pieces = src.chunks(share * src_row).zip(dst.chunks_mut(share * dst_row));
    let work = |src: &[u8], dst: &mut [u8]| {
        for (src, dst) in src.chunks_exact(src_row).zip(dst.chunks_exact_mut(dst_row)) {
            row(rows, src, dst);
        }
    };
    if threads == 1 {
        pieces.for_each(|(src, dst)| work(src, dst));
        return Ok(());
    }
    std::thread::scope(|scope| {
        for (src, dst) in pieces {
            scope.spawn(move || work(src, dst));
        }
    });
    Ok(())
}

/// A row's planes, one after the other.
struct Planes<'a> {
    planes: Vec<&'a mut [u8]>,
}

impl<'a> Planes<'a> {
    fn new(rows: &Rows, mut dst: &'a mut [u8]) -> Self {
        let mut planes = Vec::with_capacity(4);
        let ends = rows.offsets.iter().skip(1).copied().chain([usize::MAX]);
        let mut begin = 0;
        for end in ends {
            let (plane, rest) = dst.split_at_mut((end - begin).min(dst.len()));
            planes.push(plane);
            dst = rest;
            begin = end;
        }
        Self { planes }
    }

    /// Writes bytes at `at` units of their length.
    fn put<const N: usize>(&mut self, plane: usize, at: usize, bytes: [u8; N]) {
        let plane = self.planes.get_mut(plane);
        if let Some(place) = plane.and_then(|plane| plane.get_mut(at * N..(at + 1) * N)) {
            place.copy_from_slice(&bytes);
        }
    }
}

/// `N` bytes of a block; zeros beyond its end, which no block's own constants reach.
fn field<const N: usize>(block: &[u8], at: usize) -> [u8; N] {
    block.get(at..).and_then(|rest| rest.first_chunk::<N>()).copied().unwrap_or([0; N])
}

/// Nibbles of 32 elements: byte j has elements j and j + 16.
fn nibbles(q: &[u8; 32]) -> [u8; 16] {
    std::array::from_fn(|j| q[j] & 15 | q[j + 16] << 4)
}

/// Bit `bit` of 32 elements, element 0 lowest.
fn bits(q: &[u8; 32], bit: u32) -> [u8; 4] {
    let word = q.iter().rev().fold(0u32, |word, q| word << 1 | u32::from(*q >> bit & 1));
    word.to_le_bytes()
}

/// Two bits, from `shift` on, of 32 elements: byte k has elements k, k + 8, k + 16, k + 24.
fn pairs(q: &[u8; 32], shift: u32) -> [u8; 8] {
    let two = |i: usize| q[i] >> shift & 3;
    std::array::from_fn(|k| two(k) | two(k + 8) << 2 | two(k + 16) << 4 | two(k + 24) << 6)
}

/// The two bits that 64 bytes hold of 256 elements: byte 32 n + l has elements 128 n + 32 j + l at bits 2 j.
fn group_of_two_bits(qs: &[u8; 64], k: usize) -> [u8; 32] {
    std::array::from_fn(|l| qs[k / 4 * 32 + l] >> (k % 4 * 2) & 3)
}

/// Group k of 128 bytes of nibbles: byte 32 n + l has elements 64 n + l and 64 n + 32 + l.
fn group_of_nibbles(qs: &[u8; 128], k: usize) -> [u8; 32] {
    std::array::from_fn(|l| qs[k / 2 * 32 + l] >> (k % 2 * 4) & 15)
}

/// Scale and minimum k of Q4_K and Q5_K.
fn scale_and_min(packed: &[u8; 12], k: usize) -> [u8; 2] {
    if k < 4 {
        return [packed[k] & 63, packed[4 + k] & 63];
    }
    let both = packed[4 + k];
    [both & 15 | packed[k - 4] >> 6 << 4, both >> 4 | packed[k] >> 6 << 4]
}

/// Scale i of Q3_K, 0 to 63.
fn q3_k_scale(packed: &[u8; 12], i: usize) -> u8 {
    let low = packed[i % 8] >> (i / 8 * 4) & 15;
    low | (packed[8 + i % 4] >> (i / 4 * 2) & 3) << 4
}

/// Digits of base 3 of a TQ1_0 block.
fn base3(block: &[u8]) -> [u8; 256] {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    let (qs, qh): ([u8; 48], [u8; 4]) = (field(block, tq1_0::QS), field(block, tq1_0::QH));
    let digit = |byte: u8, n: usize| {
        let fraction = u16::from(byte.wrapping_mul(POWERS[n]));
        ((fraction * 3) >> 8) as u8
    };
    std::array::from_fn(|i| match i {
        0..160 => digit(qs[i % 32], i / 32),
        160..240 => digit(qs[32 + (i - 160) % 16], (i - 160) / 16),
        _ => digit(qh[(i - 240) % 4], (i - 240) / 4),
    })
}

/// One row. The match is on the type: two types may share a layout.
fn row(rows: &Rows, src: &[u8], dst: &mut [u8]) {
    dst.fill(0);
    if rows.offsets.is_empty() {
        // Blocks with codebooks stay.
        for (to, from) in dst.iter_mut().zip(src) {
            *to = *from;
        }
        return;
    }
    if rows.layout == Layout::F32 && rows.dtype != DType::F32 {
        let mut values = vec![0f32; usize::try_from(rows.n_in).unwrap_or(0)];
        dequantize_row_fn(rows.dtype)(src, &mut values);
        for (to, from) in dst.as_chunks_mut::<4>().0.iter_mut().zip(values) {
            *to = from.to_le_bytes();
        }
        return;
    }
    if !rows.dtype.is_quantized() {
        for (to, from) in dst.iter_mut().zip(src) {
            *to = *from;
        }
        return;
    }
    let mut planes = Planes::new(rows, dst);
    let blocks = src.chunks_exact(rows.dtype.block_bytes());
    for (i, block) in blocks.enumerate() {
        match rows.dtype.block_len() {
            32 => block_of_32(rows.dtype, i, block, &mut planes),
            256 => block_of_256(rows.dtype, i, block, &mut planes),
            _ => other_block(rows.dtype, i, block, &mut planes),
        }
    }
}

fn block_of_32(dtype: DType, i: usize, b: &[u8], to: &mut Planes<'_>) {
    match dtype {
        DType::Q4_0 => {
            to.put::<16>(0, i, field(b, q4_0::QS));
            to.put::<2>(1, i, field(b, q4_0::D));
        }
        DType::IQ4_NL => {
            to.put::<16>(0, i, field(b, iq4_nl::QS));
            to.put::<2>(1, i, field(b, iq4_nl::D));
        }
        DType::Q4_1 => {
            to.put::<16>(0, i, field(b, q4_1::QS));
            to.put::<4>(1, i, field(b, q4_1::D));
        }
        DType::Q5_0 => {
            to.put::<16>(0, i, field(b, q5_0::QS));
            to.put::<4>(1, i, field(b, q5_0::QH));
            to.put::<2>(2, i, field(b, q5_0::D));
        }
        DType::Q5_1 => {
            to.put::<16>(0, i, field(b, q5_1::QS));
            to.put::<4>(1, i, field(b, q5_1::QH));
            to.put::<4>(2, i, field(b, q5_1::D));
        }
        DType::Q8_0 => {
            to.put::<32>(0, i, field(b, q8_0::QS));
            to.put::<2>(1, i, field(b, q8_0::D));
        }
        DType::Q8_1 => {
            to.put::<32>(0, i, field(b, q8_1::QS));
            to.put::<2>(1, i, field(b, q8_1::D));
        }
        DType::MXFP4 => {
            to.put::<16>(0, i, field(b, mxfp4::QS));
            to.put::<1>(1, i, field(b, mxfp4::E));
        }
        _ => {}
    }
}

fn block_of_256(dtype: DType, i: usize, b: &[u8], to: &mut Planes<'_>) {
    for k in 0..8 {
        let g = 8 * i + k;
        match dtype {
            DType::Q2_K => {
                to.put(0, g, pairs(&group_of_two_bits(&field(b, q2_k::QS), k), 0));
                to.put::<2>(1, g, field(b, q2_k::SCALES + 2 * k));
            }
            DType::Q3_K => {
                let mask: [u8; 32] = field(b, q3_k::HMASK);
                let packed = field(b, q3_k::SCALES);
                to.put(0, g, pairs(&group_of_two_bits(&field(b, q3_k::QS), k), 0));
                to.put(1, g, bits(&mask, k as u32));
                let scale = |i| q3_k_scale(&packed, i).wrapping_sub(32);
                to.put(2, g, [scale(2 * k), scale(2 * k + 1)]);
            }
            DType::Q4_K => {
                to.put(0, g, nibbles(&group_of_nibbles(&field(b, q4_k::QS), k)));
                to.put(1, g, scale_and_min(&field(b, q4_k::SCALES), k));
            }
            DType::Q5_K => {
                let high: [u8; 32] = field(b, q5_k::QH);
                to.put(0, g, nibbles(&group_of_nibbles(&field(b, q5_k::QS), k)));
                to.put(1, g, bits(&high, k as u32));
                to.put(2, g, scale_and_min(&field(b, q5_k::SCALES), k));
            }
            DType::Q6_K => {
                // Low nibbles: byte 64 n + l has elements 128 n + l and 128 n + 64 + l.
                let ql: [u8; 32] = field(b, q6_k::QL + k / 4 * 64 + k % 2 * 32);
                let low = ql.map(|q| q >> (k / 2 % 2 * 4) & 15);
                to.put(0, g, nibbles(&low));
                to.put(1, g, pairs(&group_of_two_bits(&field(b, q6_k::QH), k), 0));
                to.put::<2>(2, g, field(b, q6_k::SCALES + 2 * k));
            }
            DType::IQ4_XS => {
                let high = u16::from_le_bytes(field(b, iq4_xs::SCALES_H)) >> (2 * k) & 3;
                let low = field::<1>(b, iq4_xs::SCALES_L + k / 2)[0] >> (k % 2 * 4) & 15;
                to.put::<16>(0, g, field(b, iq4_xs::QS + 16 * k));
                to.put(1, g, [(low | (high as u8) << 4).wrapping_sub(32)]);
            }
            DType::TQ2_0 => {
                to.put(0, g, pairs(&group_of_two_bits(&field(b, tq2_0::QS), k), 0));
            }
            _ => {}
        }
    }
    match dtype {
        DType::Q2_K => to.put::<4>(2, i, field(b, q2_k::D)),
        DType::Q3_K => to.put::<2>(3, i, field(b, q3_k::D)),
        DType::Q4_K => to.put::<4>(2, i, field(b, q4_k::D)),
        DType::Q5_K => to.put::<4>(3, i, field(b, q5_k::D)),
        DType::Q6_K => to.put::<2>(3, i, field(b, q6_k::D)),
        DType::IQ4_XS => to.put::<2>(2, i, field(b, iq4_xs::D)),
        DType::TQ2_0 => to.put::<2>(1, i, field(b, tq2_0::D)),
        DType::TQ1_0 => {
            let digits = base3(b);
            for (k, q) in digits.as_chunks::<32>().0.iter().enumerate() {
                to.put(0, 8 * i + k, pairs(q, 0));
            }
            to.put::<2>(1, i, field(b, tq1_0::D));
        }
        _ => {}
    }
}

fn other_block(dtype: DType, i: usize, b: &[u8], to: &mut Planes<'_>) {
    match dtype {
        DType::Q1_0 => {
            to.put::<16>(0, i, field(b, q1_0::QS));
            to.put::<2>(1, i, field(b, q1_0::D));
        }
        DType::Q2_0 => {
            let qs: [u8; 16] = field(b, q2_0::QS);
            for k in 0..2 {
                let q = std::array::from_fn(|j| qs[8 * k + j / 4] >> (j % 4 * 2) & 3);
                to.put(0, 2 * i + k, pairs(&q, 0));
            }
            to.put::<2>(1, i, field(b, q2_0::D));
        }
        DType::NVFP4 => {
            for k in 0..2 {
                // Sixteen elements in 8 bytes: byte j has elements j and j + 8.
                let qs: [u8; 16] = field(b, nvfp4::QS + 16 * k);
                let q = std::array::from_fn(|j| qs[j / 16 * 8 + j % 8] >> (j / 8 % 2 * 4) & 15);
                to.put(0, 2 * i + k, nibbles(&q));
                to.put::<2>(1, 2 * i + k, field(b, nvfp4::D + 2 * k));
            }
        }
        _ => {}
    }
}
