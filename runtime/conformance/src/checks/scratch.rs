//! Scratch under a small limit: TOO_BIG with numbers the core can go by, and right results at the least limit that is enough.

use super::PASSED;
use crate::case::Case;
use crate::cases::chain;
use crate::report::Outcome;
use crate::session::{Place, Rig, Session};
use crate::suite::scratch_chunk_max;
use crate::{Result, compare, wrong};
use tegula_plugin::{Backend, DeviceError, DeviceErrorKind};
use tegula_program::ffi::FfiProgram;

/// More refusals than any program should need until its least limit is found.
const REFUSALS_MAX: u32 = 64;

fn ask(rig: &Rig, case: &Case, limit: u64) -> Result<(), DeviceError> {
    let options = case.options(rig.device.info().type_for_scratch, limit);
    rig.device.memory(&FfiProgram::new(&case.program), &options).map(drop)
}

/// The least limit that is enough: what each refusal asks for is the next limit.
fn least(rig: &Rig, case: &Case) -> Result<u64> {
    let mut limit = 1;
    for _ in 0..REFUSALS_MAX {
        let error = match ask(rig, case, limit) {
            Ok(()) => return Ok(limit),
            Err(error) => error,
        };
        let asked = error.asked.filter(|asked| *asked > limit);
        match asked {
            Some(asked) if error.kind == DeviceErrorKind::TooBig && error.limit == Some(limit) => {
                limit = asked;
            }
            _ => return wrong(format!("under a limit of {limit}: {error}")),
        }
    }
    wrong(format!("{REFUSALS_MAX} refusals, each asking for more"))
}

/// The core lowers the ubatch by these numbers until it fits.
pub(super) fn too_big(backend: &Backend, index: u32, _: &Backend) -> Result<Outcome> {
    let rig = Rig::open(backend, index)?;
    let mut case = chain::residual("scratch/limit", 3)?;
    let limit = least(&rig, &case)?;
    if limit == 1 {
        return Ok(Outcome::Skipped("the program takes no scratch here".into()));
    }
    match ask(&rig, &case, limit - 1) {
        Ok(()) => return wrong(format!("{limit} bytes were asked for, one less is enough")),
        Err(error) if error.kind == DeviceErrorKind::TooBig => {}
        Err(error) => return Err(error.into()),
    }
    let Err(fault) = Session::new(&mut Rig::open(backend, index)?, &case, limit - 1).map(drop)
    else {
        return wrong("what does not fit was compiled");
    };
    if !fault.to_string().contains("too big") {
        return Err(fault);
    }
    // Fewer tokens need no more.
    case.steps.retain(|step| step.n_tokens == 1);
    let small = least(&rig, &case)?;
    if small > limit {
        return wrong(format!("{small} bytes for one token, {limit} for 64"));
    }
    Ok(PASSED)
}

/// The least limit gives the same results as no limit.
pub(super) fn least_limit(backend: &Backend, index: u32, oracle: &Backend) -> Result<Outcome> {
    let mut rig = Rig::open(backend, index)?;
    let mut oracle = Rig::open(oracle, 0)?;
    let case = chain::residual("scratch/least", 3)?;
    let limit = least(&rig, &case)?;
    let most = scratch_chunk_max(&oracle);
    let mut oracle = Session::new(&mut oracle, &case, most)?;
    let bound = case.bound_on(&rig);
    let mut session = Session::new(&mut rig, &case, limit)?;
    let mut worst = 0.0f64;
    for step in &case.steps {
        let wanted = oracle.run(step, Place::Host)?;
        for (got, want) in session.run(step, Place::Host)?.iter().zip(&wanted) {
            worst = worst.max(compare::check(tegula_program::DType::F32, got, want, bound)?);
        }
    }
    session.check_surroundings()?;
    Ok(Outcome::Passed(worst))
}
