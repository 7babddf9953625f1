//! Runs cases on a device and on the oracle.

use crate::case::Case;
use crate::cases::{attention, chain, elementwise, experts, matrix, norm, rank, rope, rows, state};
use crate::checks::{CHECKS, Check};
use crate::compare;
use crate::report::{Outcome, Report, Verdict};
use crate::session::{Place, Rig, Session};
use crate::{Expectations, Fault, Result};
use tegula_plugin::{Backend, DeviceErrorKind};

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
    Group { name: "experts", cases: experts::cases },
    Group { name: "state", cases: state::cases },
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

/// What the suite is doing, for those who wait for it. A case that takes the process down has begun and not ended.
#[derive(Debug, Clone, Copy)]
pub enum Event<'a> {
    /// A case or check begins; its name.
    Begin(&'a str),
    /// The verdict over it.
    End(&'a Verdict),
}

/// The cases of a group, on one device.
pub fn check_group(
    group: &Group,
    backend: &Backend,
    index: u32,
    oracle: &Backend,
    expectations: &Expectations,
) -> Report {
    check_group_watched(group, backend, index, oracle, expectations, &mut |_| {})
}

/// As [`check_group`], and `watch` is told before and after each case.
pub fn check_group_watched(
    group: &Group,
    backend: &Backend,
    index: u32,
    oracle: &Backend,
    expectations: &Expectations,
    watch: &mut dyn FnMut(Event<'_>),
) -> Report {
    let mut verdicts = Vec::new();
    let mut judge = |name: &str, outcome: Result<Outcome>, watch: &mut dyn FnMut(Event<'_>)| {
        let outcome = outcome.unwrap_or_else(|fault| Outcome::Failed(fault.to_string()));
        let verdict = Verdict::new(name, outcome, expectations);
        watch(Event::End(&verdict));
        verdicts.push(verdict);
    };
    let cases = (group.cases)().unwrap_or_else(|fault| {
        judge(group.name, Err(fault), watch);
        Vec::new()
    });
    let mut rigs: Option<(Rig, Rig)> = None;
    for case in cases {
        watch(Event::Begin(&case.name));
        // A device that was lost in one case is opened anew for the next.
        let pair = match rigs.take().filter(|(rig, _)| !rig.device.is_lost()) {
            Some(pair) => Ok(pair),
            None => Rig::open(backend, index).and_then(|rig| Ok((rig, Rig::open(oracle, 0)?))),
        };
        let (mut rig, mut oracle) = match pair {
            Ok(pair) => pair,
            // Without a device there is nothing to be learned from the other cases.
            Err(fault) => {
                judge(&case.name, Err(fault), watch);
                break;
            }
        };
        judge(&case.name, run_case(&mut rig, &mut oracle, &case), watch);
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
    run_checks_watched(&|_| true, backend, index, oracle, expectations, &mut |_| {})
}

/// As [`run_checks`], of those that are chosen; `watch` is told before and after each.
pub fn run_checks_watched(
    is_chosen: &dyn Fn(&Check) -> bool,
    backend: &Backend,
    index: u32,
    oracle: &Backend,
    expectations: &Expectations,
    watch: &mut dyn FnMut(Event<'_>),
) -> Report {
    let mut verdicts = Vec::new();
    for check in CHECKS.iter().filter(|check| is_chosen(check)) {
        watch(Event::Begin(check.name));
        let outcome = match (check.run)(backend, index, oracle) {
            // A check runs small programs, which a device may not run. That it runs what it says it runs is for the cases to find.
            Err(Fault::Device(error)) if error.kind == DeviceErrorKind::Unsupported => {
                Outcome::Unsupported(error.to_string())
            }
            outcome => outcome.unwrap_or_else(|fault| Outcome::Failed(fault.to_string())),
        };
        let verdict = Verdict::new(check.name, outcome, expectations);
        watch(Event::End(&verdict));
        verdicts.push(verdict);
    }
    Report { verdicts }
}

/// The greatest piece of scratch that a device can be asked for.
pub(crate) fn scratch_chunk_max(rig: &Rig) -> u64 {
    let info = rig.device.info();
    let kind = info.buffer_types.get(info.type_for_scratch as usize);
    kind.and_then(|kind| kind.max_size.get()).unwrap_or(1 << 40)
}

/// A case on a device and on the oracle.
pub(crate) fn run_case(rig: &mut Rig, oracle: &mut Rig, case: &Case) -> Result<Outcome> {
    let refused = Session::refused_ops(rig, case)?;
    if !refused.is_empty() {
        return Ok(Outcome::Unsupported(refused.join(", ")));
    }
    let most = scratch_chunk_max(oracle);
    let mut oracle = Session::new(oracle, case, most).map_err(|e| of_oracle(&e))?;
    let mut wanted = Vec::new();
    for step in &case.steps {
        wanted.push(oracle.run(step, Place::Host).map_err(|e| of_oracle(&e))?);
    }
    let most = scratch_chunk_max(rig);
    let bound = case.bound_on(rig);
    let mut session = Session::new(rig, case, most)?;
    let mut worst = 0.0f64;
    for (index, (step, wanted)) in case.steps.iter().zip(&wanted).enumerate() {
        // What the first run of a step leaves is not what the second one begins with.
        let before = session.state_bytes()?;
        for place in [Place::Host, Place::Device] {
            session.set_state_bytes(&before)?;
            let at = |fault: Fault| {
                let n = step.n_tokens;
                Fault::Wrong(format!("run {index} of {n} tokens, operands on {place:?}: {fault}"))
            };
            let got = session.run(step, place).map_err(at)?;
            for ((got, want), id) in got.iter().zip(wanted).zip(&case.program.outputs) {
                let dtype = case.program.value(*id)?.dtype;
                let error = match &step.rounded {
                    Some(rounded) => compare::check_rounded(dtype, got, want, bound, rounded),
                    None => compare::check(dtype, got, want, bound),
                };
                let error = error.map_err(at)?;
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
