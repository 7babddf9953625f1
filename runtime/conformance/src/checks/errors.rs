//! Wrong arguments: errors, and a device that works on.

use super::PASSED;
use crate::bounds::CHAIN;
use crate::case::{Case, Step, WeightData};
use crate::cases::chain;
use crate::data::{Rng, f32_bytes, f32s, i32_bytes};
use crate::report::Outcome;
use crate::session::{Place, Rig, Session};
use crate::suite::scratch_chunk_max;
use crate::{Fault, Result, compare, wrong};
use std::sync::Arc;
use tegula_plugin::{
    Backend, BufferDesc, BufferUsage, Device, DeviceError, DeviceErrorKind, DeviceOptions,
    InputData, OutputData, Tile, WeightBinding, WeightDesc, weight_use,
};
use tegula_program::ffi::FfiProgram;
use tegula_program::{DType, Dim, ProgramBuilder};

/// That a call failed, with the right kind, and without taking the device along.
fn refused<T>(
    rig: &Rig,
    what: &str,
    result: Result<T, DeviceError>,
    kinds: &[DeviceErrorKind],
) -> Result<()> {
    match result {
        Ok(_) => wrong(format!("{what} was accepted")),
        Err(error) if !kinds.contains(&error.kind) => wrong(format!("{what}: {error}")),
        Err(error) if error.message.is_empty() => wrong(format!("{what}: no word of why: {error}")),
        Err(_) if rig.device.is_lost() => wrong(format!("the device is lost after {what}")),
        Err(_) => Ok(()),
    }
}

pub(super) fn wrong_arguments(backend: &Backend, index: u32, _: &Backend) -> Result<Outcome> {
    use DeviceErrorKind::{BadAnswer, InvalidArgument, NotFound, Unsupported};
    let mut rig = Rig::open(backend, index)?;
    let info = rig.device.info().clone();
    let buffer = |size, buffer_type| BufferDesc { size, buffer_type, usage: BufferUsage::ANY };
    refused(&rig, "an allocation of nothing", rig.device.alloc(&buffer(0, 0)), &[InvalidArgument])?;
    let far = info.buffer_types.len() as u32;
    let nowhere = rig.device.alloc(&buffer(64, far));
    refused(&rig, "a buffer type that is not there", nowhere, &[NotFound])?;
    let missing = Device::open(backend, 1 << 20, DeviceOptions::default());
    refused(&rig, "a device that is not there", missing, &[NotFound])?;
    // Rows that are no whole number of blocks.
    let broken = WeightDesc {
        dtype: DType::Q4_K,
        uses: weight_use::MATMUL,
        n_in: 100,
        n_rows: 4,
        rows_per_expert: 0,
    };
    let kinds = [InvalidArgument, Unsupported, BadAnswer];
    refused(&rig, "a weight of broken blocks", rig.device.weight_layout(&broken), &kinds)?;
    // A layout that the device never gave.
    let mut b = ProgramBuilder::new("wrong layout");
    let x = b.input("x", DType::F32, &[Dim::NTokens, Dim::Fixed(32)]);
    let w = b.weight("w", DType::F32, &[2, 32]);
    let y = b.matmul(x, w, None);
    b.output("y", y);
    let program = b.finish()?;
    let value = program.weights().next().map_or(0, |(id, _)| id.0);
    let memory = Arc::new(rig.device.alloc(&buffer(4096, info.type_for_weights))?);
    let tile =
        Tile { first_row: 0, n_rows: 2, buffer: memory, offset: 0, size: 256, layout: 0x7fff_1234 };
    let most = scratch_chunk_max(&rig);
    let options = Case::new("", program.clone(), CHAIN).options(info.type_for_scratch, most);
    let binding = WeightBinding { value, tiles: vec![tile.clone()] };
    let compiled = rig.device.compile(&FfiProgram::new(&program), &options, &[binding]);
    refused(&rig, "a tile in a layout that is not its own", compiled, &kinds)?;
    let desc = WeightDesc {
        dtype: DType::F32,
        uses: weight_use::MATMUL,
        n_in: 32,
        n_rows: 2,
        rows_per_expert: 0,
    };
    let uploaded = rig.queue.upload(&desc, &tile, &[0; 256]);
    refused(&rig, "an upload to a layout that is not its own", uploaded, &kinds)?;
    still_works(&mut rig)
}

/// That the device computes after all this.
fn still_works(rig: &mut Rig) -> Result<Outcome> {
    let mut b = ProgramBuilder::new("still works");
    let x = b.input("x", DType::F32, &[Dim::NTokens, Dim::Fixed(2)]);
    let y = b.scale(x, 2.0);
    b.output("y", y);
    let mut case = Case::new("still works", b.finish()?, CHAIN);
    let inputs = vec![f32_bytes(&[1.0, 2.0])];
    case.steps = vec![Step { n_tokens: 1, inputs, ..Step::default() }];
    let most = scratch_chunk_max(rig);
    let got = Session::new(rig, &case, most)?.run(&case.steps[0], Place::Host)?;
    match got.first().map(|bytes| f32s(bytes)) {
        Some(values) if values == [2.0, 4.0] => Ok(PASSED),
        other => wrong(format!("twice 1 and 2 is {other:?} after errors")),
    }
}

/// Token ids and rows beyond the table. Host devices look and refuse; a device that cannot look before it reads may give
/// any rows, but must live, and must not write elsewhere.
pub(super) fn wrong_ids(backend: &Backend, index: u32, _: &Backend) -> Result<Outcome> {
    let mut rig = Rig::open(backend, index)?;
    let mut rng = Rng::of("wrong ids");
    let mut b = ProgramBuilder::new("wrong ids");
    let ids = b.input("ids", DType::I32, &[Dim::NTokens]);
    let table = b.weight("table", DType::Q8_0, &[5, 64]);
    let x = b.embed(ids, table);
    let y = b.gather_rows(x, ids);
    b.output("y", y);
    let mut case = Case::new("wrong ids", b.finish()?, CHAIN);
    let bytes = rng.weights(DType::Q8_0, 5 * 64)?;
    case.weights = vec![WeightData { name: "table".into(), bytes }];
    case.tile_rows = 2;
    for wrong in [[0, 5], [-1, 0], [i32::MIN, 1], [1, i32::MAX], [4, 0]] {
        let inputs = vec![i32_bytes(&wrong)];
        case.steps.push(Step { n_tokens: 2, inputs, ..Step::default() });
    }
    let most = scratch_chunk_max(&rig);
    let mut session = Session::new(&mut rig, &case, most)?;
    for step in &case.steps {
        match session.run(step, Place::Host) {
            Ok(_) => {}
            Err(Fault::Device(error)) if error.kind == DeviceErrorKind::InvalidArgument => {}
            Err(fault) => return Err(fault),
        }
        session.check_surroundings()?;
    }
    drop(session);
    still_works(&mut rig)
}

/// Host memory of a caller whose bytes are not aligned as numbers: right results, or an error that says so.
pub(super) fn odd_addresses(backend: &Backend, index: u32, oracle: &Backend) -> Result<Outcome> {
    let mut rig = Rig::open(backend, index)?;
    let mut oracle = Rig::open(oracle, 0)?;
    let case = chain::residual("errors/odd addresses", 1)?;
    let Some(step) = case.steps.last() else { return wrong("no step") };
    let most = scratch_chunk_max(&oracle);
    let wanted = Session::new(&mut oracle, &case, most)?.run(step, Place::Host)?;
    let most = scratch_chunk_max(&rig);
    let bound = case.bound_on(&rig);
    let mut session = Session::new(&mut rig, &case, most)?;
    let (Some(input), Some(want)) = (step.inputs.first(), wanted.first()) else {
        return wrong("no operands");
    };
    let mut bytes = (vec![0; input.len() + 16], vec![0; want.len() + 16]);
    for odd in [1, 2, 3] {
        let begin = bytes.0.as_ptr().align_offset(8).min(8) + odd;
        bytes.0[begin..begin + input.len()].copy_from_slice(input);
        let begin_out = bytes.1.as_ptr().align_offset(8).min(8) + odd;
        let out = &mut bytes.1[begin_out..begin_out + want.len()];
        let inputs = [InputData::Host(&bytes.0[begin..begin + input.len()])];
        match session.submit(step, &inputs, vec![OutputData::Host(&mut *out)]) {
            Ok(()) => compare::check(DType::F32, out, want, bound).map(drop)?,
            Err(Fault::Device(error)) if error.kind == DeviceErrorKind::InvalidArgument => {}
            Err(fault) => return Err(fault),
        }
    }
    Ok(PASSED)
}
