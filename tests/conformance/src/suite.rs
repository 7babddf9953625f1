//! Runs cases on a device and on the oracle.

use crate::case::Case;
use crate::cases::{attention, chain, elementwise, matrix, norm, rank, rope, rows};
use crate::checks::CHECKS;
use crate::compare;
use crate::report::{Outcome, Report, Verdict};
use crate::session::{Place, Rig, Session};
use crate::{Expectations, Fault, Result};
use tegula_plugin::Backend;

/// Cases that belong together.
pub struct Group {
    /// Its name.
    pub name: &'static str,
    /// Makes its cases.
    pub cases: fn() -> Result<Vec<Case>>,
}

/// All cases.
pub const GROUPS: &[Group] = &[
    Group { name: "embed", cases: matrix::embed },
    Group { name: "matmul", cases: matrix::matmul },
    Group { name: "norm", cases: norm::cases },
    Group { name: "rope", cases: rope::cases },
    Group { name: "elementwise", cases: elementwise::cases },
    Group { name: "rows", cases: rows::cases },
    Group { name: "rank", cases: rank::cases },
    Group { name: "attention", cases: attention::cases },
    Group { name: "chain", cases: chain::cases },
];

/// Everything, on one device.
pub fn verify(
    backend: &Backend,
    index: u32,
    oracle: &Backend,
    expectations: &Expectations,
) -> Report {
    let mut report = Report::default();
    for group in GROUPS {
        report.append(check_group(group, backend, index, oracle, expectations));
    }
    report.append(run_checks(backend, index, oracle, expectations));
    report
}

/// The cases of a group, on one device.
pub fn check_group(
    group: &Group,
    backend: &Backend,
    index: u32,
    oracle: &Backend,
    expectations: &Expectations,
) -> Report {
    let cases = match (group.cases)() {
        Ok(cases) => cases,
        Err(fault) => return failed(group.name, &fault, expectations),
    };
    let mut rigs: Option<(Rig, Rig)> = None;
    let mut verdicts = Vec::new();
    for case in cases {
        // A device that was lost in one case is opened anew for the next.
        let pair = match rigs.take().filter(|(rig, _)| !rig.device.is_lost()) {
            Some(pair) => pair,
            None => {
                match Rig::open(backend, index).and_then(|rig| Ok((rig, Rig::open(oracle, 0)?))) {
                    Ok(pair) => pair,
                    Err(fault) => return failed(group.name, &fault, expectations),
                }
            }
        };
        let (mut rig, mut oracle) = pair;
        let outcome = run_case(&mut rig, &mut oracle, &case);
        let outcome = outcome.unwrap_or_else(|fault| Outcome::Failed(fault.to_string()));
        verdicts.push(Verdict::new(&case.name, outcome, expectations));
        rigs = Some((rig, oracle));
    }
    Report { verdicts }
}

/// What is no op: limits, errors, threads, orders of life.
pub fn run_checks(
    backend: &Backend,
    index: u32,
    oracle: &Backend,
    expectations: &Expectations,
) -> Report {
    let verdicts = CHECKS.iter().map(|check| {
        let outcome = (check.run)(backend, index, oracle);
        let outcome = outcome.unwrap_or_else(|fault| Outcome::Failed(fault.to_string()));
        Verdict::new(check.name, outcome, expectations)
    });
    Report { verdicts: verdicts.collect() }
}

fn failed(name: &str, fault: &Fault, expectations: &Expectations) -> Report {
    let outcome = Outcome::Failed(fault.to_string());
    Report { verdicts: vec![Verdict::new(name, outcome, expectations)] }
}

/// The greatest piece of scratch that a device can be asked for.
pub(crate) fn scratch_chunk_max(rig: &Rig) -> u64 {
    let info = rig.device.info();
    let kind = info.buffer_types.get(info.type_for_scratch as usize);
    kind.and_then(|kind| kind.max_size.get()).unwrap_or(1 << 40)
}

/// A case on a device and on the oracle.
pub(crate) fn run_case(rig: &mut Rig, oracle: &mut Rig, case: &Case) -> Result<Outcome> {
    if !Session::is_supported(rig, case)? {
        return Ok(Outcome::Unsupported);
    }
    let most = scratch_chunk_max(oracle);
    let mut oracle = Session::new(oracle, case, most).map_err(|e| of_oracle(&e))?;
    let mut wanted = Vec::new();
    for step in &case.steps {
        wanted.push(oracle.run(step, Place::Host).map_err(|e| of_oracle(&e))?);
    }
    let most = scratch_chunk_max(rig);
    let mut session = Session::new(rig, case, most)?;
    let mut worst = 0.0f64;
    for (index, (step, wanted)) in case.steps.iter().zip(&wanted).enumerate() {
        for place in [Place::Host, Place::Device] {
            let at = |fault: Fault| {
                let n = step.n_tokens;
                Fault::Wrong(format!("run {index} of {n} tokens, operands on {place:?}: {fault}"))
            };
            let got = session.run(step, place).map_err(at)?;
            for ((got, want), id) in got.iter().zip(wanted).zip(&case.program.outputs) {
                let dtype = case.program.value(*id)?.dtype;
                let error = compare::check(dtype, got, want, case.bound).map_err(at)?;
                worst = worst.max(error);
            }
        }
    }
    session.check_surroundings()?;
    compare_kv(case, &mut session, &mut oracle)?;
    Ok(Outcome::Passed(worst))
}

fn of_oracle(fault: &Fault) -> Fault {
    Fault::Wrong(format!("the oracle: {fault}"))
}

fn compare_kv(case: &Case, session: &mut Session<'_>, oracle: &mut Session<'_>) -> Result<()> {
    let (got, wanted) = (session.kv_bytes()?, oracle.kv_bytes()?);
    for (group, (got, wanted)) in (0..).zip(got.iter().zip(&wanted)) {
        let layers: Vec<_> =
            case.program.kv_layers.iter().filter(|layer| layer.group == group).collect();
        let sides = layers.iter().flat_map(|layer| [(layer, 0), (layer, 1)]).cycle();
        for ((got, want), (layer, side)) in got.iter().zip(wanted).zip(sides) {
            compare::check_kv(layer, side, got, want)?;
        }
    }
    Ok(())
}
