//! Whether the stated limits are true. A `max_size` that is too great ends in a failed load; one that is too small wastes memory.

use super::PASSED;
use crate::bounds::MATMUL;
use crate::data::{Rng, f32_bytes};
use crate::report::Outcome;
use crate::session::Rig;
use crate::{Result, compare, wrong};
use std::sync::Arc;
use tegula_plugin::{
    Backend, BufferDesc, BufferType, BufferUsage, CompileOptions, Device, DeviceErrorKind,
    InputData, OutputData, RunArgs, Tile, WeightBinding, WeightDesc, weight_use,
};
use tegula_program::ffi::FfiProgram;
use tegula_program::{DType, Dim, ProgramBuilder};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

fn desc(size: u64, buffer_type: u32) -> BufferDesc {
    BufferDesc { size, buffer_type, usage: BufferUsage::WEIGHTS }
}

fn types(device: &Device) -> impl Iterator<Item = (u32, &BufferType)> {
    (0..).zip(&device.info().buffer_types)
}

/// Bytes free in the heap of a buffer type, where that is known.
fn free(device: &Device, kind: &BufferType) -> Result<Option<u64>> {
    Ok(device.heaps()?.get(kind.heap as usize).and_then(|heap| heap.free.get()))
}

/// Figures that contradict each other are corrected by the core, and one of them is wrong: no plan should rest on either.
pub(super) fn no_contradictions(backend: &Backend, index: u32, _: &Backend) -> Result<Outcome> {
    let notes = backend.device(index).map(|info| info.contradictions.join("; "));
    match notes {
        Some(notes) if notes.is_empty() => Ok(PASSED),
        Some(notes) => wrong(notes),
        None => wrong(format!("device {index} is not usable")),
    }
}

/// One byte more than `max_size`, and far more, are refused with the numbers, whatever is free.
pub(super) fn one_more(backend: &Backend, index: u32, _: &Backend) -> Result<Outcome> {
    let rig = Rig::open(backend, index)?;
    for (i, kind) in types(&rig.device) {
        let Some(most) = kind.max_size.get() else {
            return wrong(format!("buffer type {i} does not say how great a buffer may be"));
        };
        for size in [most.saturating_add(1), most.saturating_mul(2).max(1 << 62), u64::MAX] {
            let Err(error) = rig.device.alloc(&desc(size, i)) else {
                return wrong(format!("{size} bytes were given, {most} are the limit"));
            };
            let limit = error.limit.filter(|limit| *limit < size);
            if error.kind != DeviceErrorKind::TooBig || error.asked != Some(size) || limit.is_none()
            {
                return wrong(format!("{size} bytes, {most} are the limit: {error}"));
            }
        }
    }
    Ok(PASSED)
}

/// The first and last bytes of a buffer of `max_size`, or of what the test may take of it, are its own.
pub(super) fn both_ends(backend: &Backend, index: u32, _: &Backend) -> Result<Outcome> {
    let mut rig = Rig::open(backend, index)?;
    let kinds: Vec<_> = types(&rig.device).map(|(i, kind)| (i, kind.clone())).collect();
    for (i, kind) in kinds {
        let size = kind.max_size.get().unwrap_or(GIB).min(GIB);
        if let Some(free) = free(&rig.device, &kind)?.filter(|free| *free / 2 < size) {
            let why = format!("{size} bytes of buffer type {i}, {free} are free");
            return Ok(Outcome::Skipped(why));
        }
        let buffer = rig.device.alloc(&desc(size, i))?;
        let ends = [(0, b"the first bytes."), (size - 16, b"and the last one")];
        for (at, bytes) in ends {
            rig.queue.write(&buffer, at, bytes)?;
        }
        for (at, bytes) in ends {
            let mut back = [0; 16];
            rig.queue.read(&buffer, at, &mut back)?;
            if back != *bytes {
                return wrong(format!("bytes at {at} of {size} read back as {back:?}"));
            }
        }
    }
    Ok(PASSED)
}

/// A product whose weights lie at the end of a buffer that 32 bits do not address.
pub(super) fn far_weights(backend: &Backend, index: u32, _: &Backend) -> Result<Outcome> {
    const N: u64 = 64;
    let mut rig = Rig::open(backend, index)?;
    let buffer_type = rig.device.info().type_for_weights;
    let Some(kind) = rig.device.info().buffer_types.get(buffer_type as usize).cloned() else {
        return wrong("the buffer type for weights is not there");
    };
    let size = kind.max_size.get().unwrap_or(0).min(4 * GIB + 64 * MIB);
    if free(&rig.device, &kind)?.is_none_or(|free| free / 2 < size) {
        return Ok(Outcome::Skipped(format!("{size} bytes are not free")));
    }
    let mut rng = Rng::of("far weights");
    let mut b = ProgramBuilder::new("far weights");
    let x = b.input("x", DType::F32, &[Dim::NTokens, Dim::Fixed(N)]);
    let w = b.weight("w", DType::F32, &[N, N]);
    let y = b.matmul(x, w, None);
    b.output("y", y);
    let program = b.finish()?;
    let weights = rng.vec(N * N, 1.0);
    let x = rng.vec(3 * N, 1.0);
    let desc = WeightDesc {
        dtype: DType::F32,
        uses: weight_use::MATMUL,
        n_in: N,
        n_rows: N,
        rows_per_expert: 0,
    };
    let layout = rig.device.weight_layout(&desc)?;
    let bytes = layout.bytes(N).unwrap_or(u64::MAX);
    let buffer = Arc::new(rig.device.alloc(&self::desc(size, buffer_type))?);
    let alignment = layout.alignment.max(kind.alignment);
    let offset = (size - bytes) / alignment * alignment;
    let tile = Tile { first_row: 0, n_rows: N, buffer, offset, size: bytes, layout: layout.layout };
    rig.queue.upload(&desc, &tile, &f32_bytes(&weights))?;
    let options = CompileOptions {
        n_tokens_max: 3,
        n_outputs_max: 1,
        n_seqs_max: 1,
        n_ctx_max: 1,
        scratch_type: rig.device.info().type_for_scratch,
        scratch_chunk_max: crate::suite::scratch_chunk_max(&rig),
    };
    let value = program.weights().next().map_or(0, |(id, _)| id.0);
    let binding = WeightBinding { value, tiles: vec![tile] };
    let executable = rig.device.compile(&FfiProgram::new(&program), &options, &[binding])?;
    let mut scratch = Vec::new();
    for piece in &executable.memory().scratch {
        scratch.push(rig.device.alloc(&self::desc(piece.size.max(1), options.scratch_type))?);
    }
    let spans: Vec<_> = scratch.iter().map(|buffer| buffer.whole()).collect();
    let mut out = crate::session::HostBytes::new(3 * 64 * 4);
    let input = f32_bytes(&x);
    let mut args = RunArgs {
        n_tokens: 3,
        n_outputs: 0,
        inputs: &[InputData::Host(&input)],
        outputs: &mut [OutputData::Host(out.get_mut())],
        scratch: &spans,
        seqs: &[],
        kv: &[],
        state: None,
    };
    rig.queue.run(&executable, &mut args)?;
    let rows = x.chunks_exact(64).flat_map(|x| {
        weights.chunks_exact(64).map(move |w| {
            x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>() as f32
        })
    });
    let want = f32_bytes(&rows.collect::<Vec<_>>());
    Ok(Outcome::Passed(compare::check(DType::F32, out.get(), &want, MATMUL)?))
}

/// What is allocated and used is no longer free; what is freed is.
pub(super) fn free_falls(backend: &Backend, index: u32, _: &Backend) -> Result<Outcome> {
    const TAKEN: u64 = 256 * MIB;
    // Others on the machine take and give as well: a quarter must show, in one of a few attempts.
    const SHOWN: u64 = TAKEN / 4;
    let mut rig = Rig::open(backend, index)?;
    let buffer_type = rig.device.info().type_for_weights;
    let Some(kind) = rig.device.info().buffer_types.get(buffer_type as usize).cloned() else {
        return wrong("the buffer type for weights is not there");
    };
    let mut said = String::new();
    for _ in 0..5 {
        let Some(before) = free(&rig.device, &kind)? else {
            return Ok(Outcome::Skipped("the heap does not say what is free".into()));
        };
        if before / 2 < TAKEN || kind.max_size.get().is_some_and(|most| most < TAKEN) {
            return Ok(Outcome::Skipped(format!("{before} bytes are free")));
        }
        let buffer = rig.device.alloc(&desc(TAKEN, buffer_type))?;
        let piece = vec![1u8; 16 << 20];
        for at in (0..TAKEN).step_by(piece.len()) {
            rig.queue.write(&buffer, at, &piece)?;
        }
        // A system's counters may lag behind what is in use.
        let pause = std::time::Duration::from_millis(100);
        let mut during = free(&rig.device, &kind)?.unwrap_or(0);
        for _ in 0..10 {
            if during + SHOWN <= before {
                break;
            }
            std::thread::sleep(pause);
            during = free(&rig.device, &kind)?.unwrap_or(0);
        }
        drop(buffer);
        let mut after = free(&rig.device, &kind)?.unwrap_or(0);
        for _ in 0..10 {
            if during + SHOWN <= after {
                break;
            }
            std::thread::sleep(pause);
            after = free(&rig.device, &kind)?.unwrap_or(0);
        }
        if during + SHOWN <= before && during + SHOWN <= after {
            return Ok(PASSED);
        }
        said = format!("{before} bytes free, {during} with {TAKEN} in use, {after} without them");
    }
    wrong(said)
}
