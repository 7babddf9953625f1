//! Which device runs a model: the grammar of `TEGULA_DEVICE` and `--device`.
//!
//! An ordered list, separated by commas:
//!
//! | item | meaning |
//! |---|---|
//! | `auto` | the devices worth using, best first, by the table [`POLICY`]; the default |
//! | `vulkan` | all devices of a backend |
//! | `vulkan:0` | one device, by the index that `tegula devices` prints |
//! | `opencl:gpu` | devices of a backend by kind: `gpu`, `discrete`, `integrated`, `cpu`, `accelerator` |
//! | `uuid:...`, `pci:0000:00:02.0` | by identity, under whatever backend |
//! | `name:*770*` | by name, `*` for any text, any case |
//! | `!ITEM` | excluded everywhere: devices with the same UUID or PCI address under other backends too |
//!
//! Items by identity (`uuid:`, `pci:`, `name:`) mean hardware, so each piece of it is taken once, under the backend that ranks
//! it highest; excluded hardware is excluded under every backend. No variable of a vendor is read or written: which
//! devices a driver hides from its backend is between those two.
//!
//! Empty, malformed and unknown items are errors that list what exists; nothing falls back in silence.

mod identity;

pub use identity::normal_pci;

use crate::{Error, Result};
use identity::Twins;
use tegula_abi::DeviceKind;

/// What selection knows of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// The backend's id.
    pub backend: String,
    /// Index within the backend.
    pub index: u32,
    /// What it is.
    pub kind: DeviceKind,
    /// Lower-case hexadecimal with dashes, if known.
    pub uuid: Option<String>,
    /// PCI address, if known.
    pub pci: Option<String>,
    /// Driver name and version; empty if unknown.
    pub driver: String,
    /// The device's name.
    pub name: String,
    /// How willingly `auto` takes it; 0 is never.
    pub rank: u32,
}

impl Candidate {
    /// `vulkan:0`.
    pub fn id(&self) -> String {
        format!("{}:{}", self.backend, self.index)
    }

    /// Its row in [`POLICY`].
    fn row(&self) -> usize {
        let row = POLICY.iter().position(|row| row.kinds.contains(&self.kind));
        // A kind that this core does not know comes last.
        row.unwrap_or(POLICY.len())
    }

    /// How a user names the same hardware tomorrow: by UUID or PCI address where one is known, whatever else is plugged in.
    pub fn stable_id(&self) -> String {
        let pci = || Some(format!("pci:{}", normal_pci(self.pci.as_deref()?)?));
        let uuid = self.uuid.as_deref().filter(|uuid| identity::is_uuid(uuid));
        let uuid = uuid.map(|uuid| format!("uuid:{uuid}"));
        uuid.or_else(pci).unwrap_or_else(|| self.id())
    }
}

/// A row of what `auto` takes.
#[derive(Debug)]
pub struct Policy {
    /// What the row is about, in words.
    pub what: &'static str,
    /// Kinds of devices.
    pub kinds: &'static [DeviceKind],
    /// When they are taken, in words; empty is always.
    pub when: &'static str,
}

/// What `auto` takes, in this order; within a row by the rank that devices state. Besides, none whose rank is 0, and no hardware twice.
pub const POLICY: [Policy; 4] = [
    Policy { what: "discrete GPUs", kinds: &[DeviceKind::DISCRETE], when: "" },
    Policy {
        what: "integrated GPUs",
        kinds: &[DeviceKind::INTEGRATED],
        when: "if there is no discrete one",
    },
    Policy { what: "accelerators", kinds: &[DeviceKind::ACCELERATOR], when: "" },
    Policy { what: "processors", kinds: &[DeviceKind::CPU], when: "" },
];

/// Why a device is taken or not.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// Taken, as the number `place` (from 0) of the devices to use, because of `item`.
    Taken {
        /// Its place in the order.
        place: usize,
        /// The part of the selector that takes it.
        item: String,
    },
    /// `auto` never takes it, since its rank is 0; its name would.
    OnlyWhenNamed,
    /// `auto` takes no integrated GPU beside a discrete one; its name would.
    Integrated {
        /// The id of the discrete device.
        discrete: String,
    },
    /// `auto` takes the same silicon under another backend.
    TwinOf {
        /// The id of the device that is taken.
        device: String,
    },
    /// An item excludes it.
    Excluded {
        /// The item, with its `!`.
        item: String,
    },
    /// An item excludes the same silicon under another backend.
    TwinOfExcluded {
        /// The id of the device that the item names.
        device: String,
        /// The item, with its `!`.
        item: String,
    },
    /// No item names it.
    NotListed,
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Taken { place, item } => {
                write!(f, "taken, number {} of the order, by `{item}`", place + 1)
            }
            Self::OnlyWhenNamed => {
                f.write_str("listed, not selected by default: its rank is 0, so only when named")
            }
            Self::Integrated { discrete } => {
                write!(f, "listed, not selected by default: integrated, and {discrete} is discrete")
            }
            Self::TwinOf { device } => {
                write!(f, "not taken: the same hardware as {device}, which is preferred")
            }
            Self::Excluded { item } => write!(f, "not taken: excluded by `{item}`"),
            Self::TwinOfExcluded { device, item } => {
                write!(f, "not taken: the same hardware as {device}, which `{item}` excludes")
            }
            Self::NotListed => f.write_str("not taken: the selector does not name it"),
        }
    }
}

/// Indices into `candidates`, in the order the selector asks for; never empty.
pub fn select(selector: &str, candidates: &[Candidate]) -> Result<Vec<usize>> {
    let verdicts = explain(selector, candidates)?;
    let mut out: Vec<(usize, usize)> = (0..).zip(&verdicts).filter_map(taken).collect();
    out.sort_unstable();
    if out.is_empty() {
        return Err(fault(selector, "no device is left to run on", candidates));
    }
    Ok(out.into_iter().map(|(_, index)| index).collect())
}

fn taken((index, verdict): (usize, &Verdict)) -> Option<(usize, usize)> {
    match verdict {
        Verdict::Taken { place, .. } => Some((*place, index)),
        _ => None,
    }
}

/// What the selector decides on each of `candidates`, in their order. That none is taken is no error here.
///
/// # Errors
/// [`Error::Selector`] for items that are empty, malformed or name nothing.
pub fn explain(selector: &str, candidates: &[Candidate]) -> Result<Vec<Verdict>> {
    let mut verdicts: Vec<Option<Verdict>> = vec![None; candidates.len()];
    let mut positive = Vec::new();
    let mut excluded = Vec::new();
    if selector.trim().is_empty() {
        return Err(fault(selector, "it is empty; `auto` is what nothing would mean", candidates));
    }
    let twins = Twins::of(candidates);
    for item in selector.split(',').map(str::trim) {
        if item.is_empty() {
            return Err(fault(selector, "an empty item", candidates));
        }
        let named = item.strip_prefix('!').unwrap_or(item);
        let found = match item {
            "auto" => Vec::new(),
            _ => matching(named, candidates).map_err(|why| fault(named, &why, candidates))?,
        };
        if named == item {
            positive.push((item, found));
        } else {
            excluded.extend(found.into_iter().map(|index| (item, index)));
        }
    }
    exclude(candidates, &twins, &excluded, &mut verdicts);
    if positive.is_empty() {
        positive.push(("auto", Vec::new()));
    }
    let mut place = 0;
    for (item, found) in positive {
        let found = match item {
            "auto" => auto(candidates, &twins, &mut verdicts),
            _ if is_identity(item) => once(candidates, &twins, &found, &mut verdicts),
            _ => found,
        };
        for index in found {
            // What was passed over can still be named; what is excluded or taken stays so.
            let open = |verdict: &Option<Verdict>| verdict.as_ref().is_none_or(is_passed_over);
            if let Some(verdict) = verdicts.get_mut(index).filter(|verdict| open(verdict)) {
                *verdict = Some(Verdict::Taken { place, item: item.to_owned() });
                place += 1;
            }
        }
    }
    Ok(verdicts.into_iter().map(|verdict| verdict.unwrap_or(Verdict::NotListed)).collect())
}

/// Devices that one item names, as [`select`] reads it; an error in words if it names none.
pub(crate) fn named(item: &str, candidates: &[Candidate]) -> Result<Vec<usize>, String> {
    match item.trim() {
        "auto" | "" => Err("it must name devices".into()),
        item => matching(item, candidates),
    }
}

/// The error about an item, with the devices that exist.
pub(crate) fn fault(item: &str, why: &str, candidates: &[Candidate]) -> Error {
    Error::Selector {
        selector: item.to_owned(),
        why: why.to_owned(),
        available: available(candidates),
    }
}

fn is_passed_over(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::OnlyWhenNamed | Verdict::Integrated { .. } | Verdict::TwinOf { .. })
}

fn is_excluded(verdict: Option<&Option<Verdict>>) -> bool {
    matches!(verdict, Some(Some(Verdict::Excluded { .. } | Verdict::TwinOfExcluded { .. })))
}

/// Whether an item names hardware, rather than a device of a backend.
fn is_identity(item: &str) -> bool {
    ["uuid:", "pci:", "name:"].iter().any(|head| item.starts_with(head))
}

fn exclude(
    candidates: &[Candidate],
    twins: &Twins,
    excluded: &[(&str, usize)],
    verdicts: &mut [Option<Verdict>],
) {
    for (index, verdict) in verdicts.iter_mut().enumerate() {
        let itself = excluded.iter().find(|(_, other)| *other == index);
        let twin = excluded.iter().find(|(_, other)| twins.are(index, *other));
        let twin = twin.and_then(|(item, other)| Some((item, candidates.get(*other)?)));
        *verdict = match (itself, twin) {
            (Some((item, _)), _) => Some(Verdict::Excluded { item: (*item).to_owned() }),
            (None, Some((item, other))) => {
                Some(Verdict::TwinOfExcluded { device: other.id(), item: (*item).to_owned() })
            }
            (None, None) => None,
        };
    }
}

/// The devices worth using, best first, each piece of silicon once; for the others it is said why not.
fn auto(candidates: &[Candidate], twins: &Twins, verdicts: &mut [Option<Verdict>]) -> Vec<usize> {
    let mut order: Vec<(usize, &Candidate)> = candidates.iter().enumerate().collect();
    order.retain(|(index, _)| !is_excluded(verdicts.get(*index)));
    order.sort_by_key(|(_, candidate)| (candidate.row(), std::cmp::Reverse(candidate.rank)));
    let mut out: Vec<(usize, &Candidate)> = Vec::new();
    for (index, candidate) in order {
        let twin = out.iter().find(|(other, _)| twins.are(index, *other));
        let discrete = out.iter().find(|(_, other)| other.kind == DeviceKind::DISCRETE);
        let passed = match (twin, discrete) {
            _ if candidate.rank == 0 => Verdict::OnlyWhenNamed,
            (Some((_, other)), _) => Verdict::TwinOf { device: other.id() },
            (None, Some((_, other))) if candidate.kind == DeviceKind::INTEGRATED => {
                Verdict::Integrated { discrete: other.id() }
            }
            _ => {
                out.push((index, candidate));
                continue;
            }
        };
        if let Some(verdict) = verdicts.get_mut(index) {
            verdict.get_or_insert(passed);
        }
    }
    out.into_iter().map(|(index, _)| index).collect()
}

/// Of devices that an identity names, each piece of hardware once: under the backend that ranks it highest, or the first. For the
/// others it is said why not.
fn once(
    candidates: &[Candidate],
    twins: &Twins,
    found: &[usize],
    verdicts: &mut [Option<Verdict>],
) -> Vec<usize> {
    let rank = |index: usize| candidates.get(index).map_or(0, |candidate| candidate.rank);
    let mut order: Vec<usize> = found.to_vec();
    order.retain(|index| !is_excluded(verdicts.get(*index)));
    order.sort_by_key(|index| std::cmp::Reverse(rank(*index)));
    let mut best: Vec<usize> = Vec::new();
    for index in order {
        match best.iter().find(|other| twins.are(index, **other)) {
            None => best.push(index),
            Some(other) => {
                let device = candidates.get(*other).map(Candidate::id).unwrap_or_default();
                if let Some(verdict) = verdicts.get_mut(index) {
                    verdict.get_or_insert(Verdict::TwinOf { device });
                }
            }
        }
    }
    found.iter().copied().filter(|index| best.contains(index)).collect()
}

/// Devices that one item names; an error in words if it names none.
fn matching(item: &str, candidates: &[Candidate]) -> Result<Vec<usize>, String> {
    let filter = |test: &dyn Fn(&Candidate) -> bool| -> Vec<usize> {
        (0..candidates.len()).filter(|i| test(&candidates[*i])).collect()
    };
    let (head, tail) = item.split_once(':').map_or((item, None), |(h, t)| (h, Some(t.trim())));
    let found = match (head, tail) {
        (_, Some("")) => return Err("nothing after the colon".into()),
        ("uuid", Some(uuid)) => {
            let asked = identity::plain(uuid);
            filter(&|c| c.uuid.as_deref().is_some_and(|known| identity::plain(known) == asked))
        }
        ("pci", Some(pci)) => {
            let asked =
                normal_pci(pci).ok_or("no PCI address; one is written 0000:03:00.0, or 03:00.0")?;
            filter(&|c| c.pci.as_deref().and_then(normal_pci).as_ref() == Some(&asked))
        }
        ("name", Some(pattern)) => filter(&|c| glob(pattern, &c.name)),
        (backend, tail) => {
            let known = candidates.iter().any(|c| c.backend == backend);
            if !known {
                return Err("no such backend, and no other form of selector".into());
            }
            return of_backend(backend, tail, candidates);
        }
    };
    if found.is_empty() { Err("no device matches".into()) } else { Ok(found) }
}

fn of_backend(
    backend: &str,
    tail: Option<&str>,
    candidates: &[Candidate],
) -> Result<Vec<usize>, String> {
    let kinds: Option<&[DeviceKind]> = match tail {
        None => None,
        Some("gpu") => Some(&[DeviceKind::DISCRETE, DeviceKind::INTEGRATED]),
        Some("discrete") => Some(&[DeviceKind::DISCRETE]),
        Some("integrated") => Some(&[DeviceKind::INTEGRATED]),
        Some("cpu") => Some(&[DeviceKind::CPU]),
        Some("accelerator") => Some(&[DeviceKind::ACCELERATOR]),
        Some(index) if index.bytes().all(|b| b.is_ascii_digit()) => {
            let index: u32 = index.parse().map_err(|_| "an index too large".to_owned())?;
            let found = candidates.iter().position(|c| c.backend == backend && c.index == index);
            return found.map(|i| vec![i]).ok_or_else(|| "no device of that index".into());
        }
        Some(_) => return Err("neither an index nor a kind after the colon".into()),
    };
    let found: Vec<usize> = (0..candidates.len())
        .filter(|i| candidates[*i].backend == backend)
        .filter(|i| kinds.is_none_or(|kinds| kinds.contains(&candidates[*i].kind)))
        .collect();
    if found.is_empty() { Err("the backend has no such device".into()) } else { Ok(found) }
}

/// `*` matches any text; case does not matter.
fn glob(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.to_lowercase(), text.to_lowercase());
    let parts: Vec<&str> = pattern.split('*').collect();
    let [first, middle @ .., last] = parts.as_slice() else { return pattern == text };
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    for part in middle {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.len() >= last.len() && rest.ends_with(last)
}

fn available(candidates: &[Candidate]) -> String {
    if candidates.is_empty() {
        return "no devices exist".to_owned();
    }
    let lines: Vec<String> = candidates
        .iter()
        .map(|c| {
            let named = if c.rank == 0 { ", only when named" } else { "" };
            let uuid = c.uuid.as_deref().map(|u| format!(", uuid:{u}")).unwrap_or_default();
            let pci = c.pci.as_deref().map(|p| format!(", pci:{p}")).unwrap_or_default();
            format!("  {} ({}{uuid}{pci}{named})", c.id(), c.name)
        })
        .collect();
    format!("devices that exist:\n{}", lines.join("\n"))
}

#[cfg(test)]
mod tests;
