//! Packs the intermediate values of a program into scratch chunks by their lifetimes.
//!
//! Values are placed in the order they are made; each takes the lowest free place, first fit over chunks, among the values alive at the
//! same time. A value never spans two chunks: when one alone is larger than a chunk may be, the answer is TOO_BIG with
//! both numbers, and the core asks again with a smaller ubatch.

use crate::{Error, Result};
use tegula_abi as abi;
use tegula_program::{Dim, Program, ValueKind};

/// Alignment of every value in scratch: a cache line, and enough for any vector load.
pub const ALIGNMENT: u64 = 64;

/// Where a value lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Index of the scratch piece.
    pub chunk: usize,
    /// First byte in it.
    pub offset: u64,
    /// Bytes at the greatest number of rows.
    pub size: u64,
}

/// The plan: sizes of the chunks, the place of every value made by an op that is no output, and of the extra regions.
#[derive(Debug, Clone, Default)]
pub struct ScratchPlan {
    /// The pieces to ask the core for.
    pub chunks: Vec<abi::ScratchDesc>,
    /// By value id; `None` for inputs, weights and outputs.
    pub values: Vec<Option<Place>>,
    /// The extra regions, in the order given.
    pub extra: Vec<Place>,
}

/// A value's greatest size in bytes.
pub fn value_bytes(program: &Program, index: usize, options: &abi::CompileOptions) -> Result<u64> {
    let value = &program.values[index];
    let rows = match value.rows() {
        Dim::Fixed(n) => n,
        Dim::NTokens => u64::from(options.n_tokens_max),
        Dim::NOutputs => u64::from(options.n_outputs_max),
    };
    let bytes = value.dtype.row_bytes(value.row_len())?;
    rows.checked_mul(bytes)
        .ok_or_else(|| Error::invalid(format!("`{}` has more than 2^64 bytes", value.name)))
}

/// Plans scratch for `program` under `options`, with `extra` regions that live during the whole run (thread scratch).
pub fn plan(
    program: &Program,
    options: &abi::CompileOptions,
    extra: &[u64],
) -> Result<ScratchPlan> {
    let mut last_use = vec![0usize; program.values.len()];
    for (op_index, op) in program.ops.iter().enumerate() {
        for id in op.inputs.iter().chain(&op.outputs) {
            last_use[id.index()] = op_index;
        }
    }
    let mut packer = Packer { limit: options.scratch_chunk_max, chunks: Vec::new() };
    let mut plan = ScratchPlan { values: vec![None; program.values.len()], ..Default::default() };
    for size in extra {
        let place = packer.place(*size, 0, usize::MAX, || "a working area of one thread".into())?;
        plan.extra.push(place);
    }
    for (op_index, op) in program.ops.iter().enumerate() {
        for id in &op.outputs {
            let index = id.index();
            if program.outputs.contains(id) || program.values[index].kind != ValueKind::Result {
                continue;
            }
            let size = value_bytes(program, index, options)?;
            let place = packer.place(size, op_index, last_use[index], || {
                format!(
                    "the result of {} in `{}` at {} tokens",
                    op.kind.name(),
                    program.name,
                    options.n_tokens_max
                )
            })?;
            plan.values[index] = Some(place);
        }
    }
    plan.chunks = packer
        .chunks
        .iter()
        .map(|chunk| abi::ScratchDesc { size: chunk.size, alignment: ALIGNMENT })
        .collect();
    Ok(plan)
}

struct Chunk {
    size: u64,
    /// Offset, end and last op of what is placed here.
    live: Vec<(u64, u64, usize)>,
}

struct Packer {
    limit: u64,
    chunks: Vec<Chunk>,
}

impl Packer {
    fn place(
        &mut self,
        size: u64,
        from: usize,
        until: usize,
        what: impl Fn() -> String,
    ) -> Result<Place> {
        let aligned = size.max(1).checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX);
        // The limit binds what is really used; rounding up must not push a value over it.
        if size > self.limit {
            return Err(Error::too_big(&what(), size, self.limit));
        }
        for (index, chunk) in self.chunks.iter_mut().enumerate() {
            chunk.live.retain(|(_, _, last)| *last >= from);
            if let Some(offset) = chunk.gap(aligned, size, self.limit) {
                chunk.live.push((offset, offset + aligned, until));
                chunk.live.sort_unstable();
                chunk.size = chunk.size.max(offset + size);
                return Ok(Place { chunk: index, offset, size });
            }
        }
        self.chunks.push(Chunk { size, live: vec![(0, aligned, until)] });
        Ok(Place { chunk: self.chunks.len() - 1, offset: 0, size })
    }
}

impl Chunk {
    /// The lowest offset with `aligned` bytes free, so that `size` bytes end within `limit`.
    fn gap(&self, aligned: u64, size: u64, limit: u64) -> Option<u64> {
        let mut offset = 0;
        for (begin, end, _) in &self.live {
            if begin.saturating_sub(offset) >= aligned {
                break;
            }
            offset = offset.max(*end);
        }
        (offset.checked_add(size)? <= limit).then_some(offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tegula_program::{DType, Norm, ProgramBuilder};

    fn program(n_layers: u64) -> Program {
        let mut b = ProgramBuilder::new("test");
        let ids = b.input("tokens", DType::I32, &[Dim::NTokens]);
        let table = b.weight("table", DType::F32, &[100, 64]);
        let mut x = b.embed(ids, table);
        for i in 0..n_layers {
            let w = b.weight(&format!("w{i}"), DType::F32, &[64, 64]);
            let h = b.rms_norm(x, None, Norm { eps: 1e-5, n: 64 });
            let h = b.matmul(h, w, None);
            x = b.add(x, h);
        }
        b.output("y", x);
        b.finish().unwrap()
    }

    fn options(n_tokens: u32, limit: u64) -> abi::CompileOptions {
        abi::CompileOptions {
            struct_size: size_of::<abi::CompileOptions>(),
            n_tokens_max: n_tokens,
            n_outputs_max: n_tokens,
            n_seqs_max: 1,
            n_ctx_max: 128,
            scratch_type: 0,
            reserved: 0,
            scratch_chunk_max: limit,
        }
    }

    /// Two values alive at once must never share bytes, or generated text turns to garbage.
    #[test]
    fn live_values_never_overlap_and_no_chunk_passes_the_limit() {
        for (n_tokens, limit) in [(1, 1 << 20), (7, 2048), (16, 4096), (16, 10_000)] {
            let program = program(9);
            let plan = plan(&program, &options(n_tokens, limit), &[100, 1000]).unwrap();
            assert!(plan.chunks.iter().all(|chunk| chunk.size <= limit));
            let mut live: Vec<(Place, usize)> =
                plan.extra.iter().map(|place| (*place, usize::MAX)).collect();
            for (i, op) in program.ops.iter().enumerate() {
                live.retain(|(_, last)| *last >= i);
                for id in &op.outputs {
                    let Some(place) = plan.values[id.index()] else { continue };
                    for (other, _) in &live {
                        let apart = place.chunk != other.chunk
                            || place.offset + place.size <= other.offset
                            || other.offset + other.size <= place.offset;
                        assert!(apart, "{place:?} overlaps {other:?}");
                    }
                    assert!(place.offset + place.size <= plan.chunks[place.chunk].size);
                    assert!(place.offset.is_multiple_of(ALIGNMENT));
                    let last = program.ops.iter().rposition(|op| op.inputs.contains(id));
                    live.push((place, last.unwrap_or(i)));
                }
            }
        }
    }

    /// A long model must not need more scratch than a short one.
    #[test]
    fn scratch_does_not_grow_with_layers() {
        let bytes = |n| {
            let plan = plan(&program(n), &options(8, u64::MAX), &[]).unwrap();
            plan.chunks.iter().map(|chunk| chunk.size).sum::<u64>()
        };
        assert_eq!(bytes(3), bytes(30));
    }

    /// The core lowers the ubatch by these numbers.
    #[test]
    fn a_value_over_the_limit_is_too_big_with_both_numbers() {
        let error = plan(&program(1), &options(16, 4095), &[]).unwrap_err();
        assert_eq!(
            (error.status, error.asked, error.limit),
            (abi::Status::TOO_BIG, Some(4096), Some(4095))
        );
    }
}
