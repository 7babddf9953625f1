//! Which device runs a model: the grammar of `TEGULA_DEVICE` and `--device`.
//!
//! An ordered list, separated by commas:
//!
//! | item | meaning |
//! |---|---|
//! | `auto` | every device worth using, best first; the default |
//! | `vulkan` | all devices of a backend |
//! | `vulkan:0` | one device, by the index that `tegula devices` prints |
//! | `opencl:gpu` | devices of a backend by kind: `gpu`, `discrete`, `integrated`, `cpu`, `accelerator` |
//! | `uuid:...`, `pci:0000:00:02.0` | by identity, under whatever backend |
//! | `name:*770*` | by name, `*` for any text, any case |
//! | `!ITEM` | excluded everywhere: devices with the same UUID or PCI address under other backends too |
//!
//! Empty, malformed and unknown items are errors that list what exists; nothing falls back in silence.

use crate::{Error, Result};
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

    /// Whether both are the same silicon seen through two backends. Two devices of one backend never are.
    pub fn is_twin_of(&self, other: &Self) -> bool {
        let same = |a: &Option<String>, b: &Option<String>| a.is_some() && a == b;
        self.backend != other.backend
            && (same(&self.uuid, &other.uuid) || same(&self.pci, &other.pci))
    }

    fn class(&self) -> u32 {
        match self.kind {
            DeviceKind::DISCRETE => 4,
            DeviceKind::INTEGRATED => 3,
            DeviceKind::ACCELERATOR => 2,
            _ => 1,
        }
    }
}

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
            Self::OnlyWhenNamed => f.write_str("not taken: its rank is 0, so only when named"),
            Self::TwinOf { device } => {
                write!(f, "not taken: {device} is the same hardware and is preferred")
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
    exclude(candidates, &excluded, &mut verdicts);
    if positive.is_empty() {
        positive.push(("auto", Vec::new()));
    }
    let mut place = 0;
    for (item, found) in positive {
        let found = if item == "auto" { auto(candidates, &mut verdicts) } else { found };
        for index in found {
            // What `auto` passed over can still be named; what is excluded or taken stays so.
            let open = |verdict: &Option<Verdict>| {
                matches!(verdict, None | Some(Verdict::OnlyWhenNamed | Verdict::TwinOf { .. }))
            };
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

fn exclude(candidates: &[Candidate], excluded: &[(&str, usize)], verdicts: &mut [Option<Verdict>]) {
    for (index, (candidate, verdict)) in candidates.iter().zip(verdicts).enumerate() {
        let itself = excluded.iter().find(|(_, other)| *other == index);
        let twin = excluded.iter().find_map(|(item, other)| {
            let other = candidates.get(*other)?;
            candidate.is_twin_of(other).then_some((item, other))
        });
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
fn auto(candidates: &[Candidate], verdicts: &mut [Option<Verdict>]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..candidates.len())
        .filter(|i| {
            !matches!(
                verdicts.get(*i),
                Some(Some(Verdict::Excluded { .. } | Verdict::TwinOfExcluded { .. }))
            )
        })
        .collect();
    order.sort_by_key(|i| {
        let candidate = &candidates[*i];
        std::cmp::Reverse((candidate.class(), candidate.rank))
    });
    let mut out: Vec<usize> = Vec::new();
    for i in order {
        let candidate = &candidates[i];
        let twin = out.iter().find(|other| candidate.is_twin_of(&candidates[**other]));
        let passed = match twin {
            _ if candidate.rank == 0 => Verdict::OnlyWhenNamed,
            Some(other) => Verdict::TwinOf { device: candidates[*other].id() },
            None => {
                out.push(i);
                continue;
            }
        };
        if let Some(verdict) = verdicts.get_mut(i) {
            verdict.get_or_insert(passed);
        }
    }
    out
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
            let plain = |text: &str| text.replace('-', "").to_ascii_lowercase();
            filter(&|c| c.uuid.as_deref().is_some_and(|known| plain(known) == plain(uuid)))
        }
        ("pci", Some(pci)) => {
            filter(&|c| c.pci.as_deref().is_some_and(|known| known.eq_ignore_ascii_case(pci)))
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
            let uuid = c.uuid.as_deref().map(|u| format!(", uuid:{u}")).unwrap_or_default();
            let pci = c.pci.as_deref().map(|p| format!(", pci:{p}")).unwrap_or_default();
            format!("  {} ({}{uuid}{pci})", c.id(), c.name)
        })
        .collect();
    format!("devices that exist:\n{}", lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates() -> Vec<Candidate> {
        let make = |backend: &str, index, kind, uuid: Option<&str>, name: &str, rank| Candidate {
            backend: backend.into(),
            index,
            kind,
            uuid: uuid.map(Into::into),
            pci: None,
            name: name.into(),
            rank,
        };
        vec![
            make("cpu", 0, DeviceKind::CPU, None, "EPYC", 100),
            make("reference", 0, DeviceKind::CPU, None, "EPYC (reference)", 0),
            make("vulkan", 0, DeviceKind::INTEGRATED, Some("aa-00"), "UHD 770", 100),
            make("vulkan", 1, DeviceKind::DISCRETE, Some("bb-11"), "H200", 100),
            make("opencl", 0, DeviceKind::DISCRETE, Some("bb-11"), "H200", 50),
        ]
    }

    fn check(selector: &str) -> Option<Vec<String>> {
        let candidates = candidates();
        let found = select(selector, &candidates).ok()?;
        Some(found.into_iter().map(|i| candidates[i].id()).collect())
    }

    /// A selector means exactly one list of devices, or an error; the wrong device is worse than none.
    #[test]
    fn selectors() {
        let table: [(&str, Option<&[&str]>); 30] = [
            ("auto", Some(&["vulkan:1", "vulkan:0", "cpu:0"])),
            ("cpu", Some(&["cpu:0"])),
            ("reference", Some(&["reference:0"])),
            ("vulkan", Some(&["vulkan:0", "vulkan:1"])),
            ("vulkan:1", Some(&["vulkan:1"])),
            ("vulkan:1,cpu", Some(&["vulkan:1", "cpu:0"])),
            (" cpu , vulkan:0 ", Some(&["cpu:0", "vulkan:0"])),
            ("opencl:gpu", Some(&["opencl:0"])),
            ("vulkan:integrated", Some(&["vulkan:0"])),
            ("uuid:BB11", Some(&["vulkan:1", "opencl:0"])),
            ("name:*770*", Some(&["vulkan:0"])),
            ("name:uhd*", Some(&["vulkan:0"])),
            ("name:epyc", Some(&["cpu:0"])),
            ("!vulkan:1", Some(&["vulkan:0", "cpu:0"])),
            ("auto,!vulkan:1", Some(&["vulkan:0", "cpu:0"])),
            ("opencl,vulkan:0,!vulkan:1", Some(&["vulkan:0"])),
            ("cpu,cpu:0", Some(&["cpu:0"])),
            ("", None),
            (",", None),
            ("cpu,", None),
            ("-1", None),
            ("0,foo,1", None),
            ("0", None),
            ("cuda", None),
            ("vulkan:7", None),
            ("vulkan:99999999999", None),
            ("vulkan:", None),
            ("vulkan:fast", None),
            ("name:*arc*", None),
            ("cpu,!cpu", None),
        ];
        for (selector, expected) in table {
            let expected = expected.map(|ids| ids.iter().map(ToString::to_string).collect());
            assert_eq!(check(selector), expected, "{selector:?}");
        }
    }

    /// A device is passed over for the reason that is told, and one piece of silicon is used once, however it is identified.
    #[test]
    fn every_decision_has_its_reason() {
        let make = |id: &str, kind, uuid: Option<&str>, pci: Option<&str>, rank| {
            let (backend, index) = id.split_once(':').unwrap();
            Candidate {
                backend: backend.into(),
                index: index.parse().unwrap(),
                kind,
                uuid: uuid.map(Into::into),
                pci: pci.map(Into::into),
                name: "x".into(),
                rank,
            }
        };
        let gpu = |id, uuid, pci, rank| make(id, DeviceKind::DISCRETE, uuid, pci, rank);
        let cpu = |id, rank| make(id, DeviceKind::CPU, None, None, rank);
        let (u, v, p, q) = (Some("aa"), Some("bb"), Some("0000:01:00.0"), Some("0000:02:00.0"));
        // The candidates, the selector, and in few words what becomes of each.
        let table: Vec<(Vec<Candidate>, &str, &[&str])> = vec![
            // The same UUID under two backends; then different ones.
            (vec![gpu("a:0", u, None, 50), gpu("b:0", u, None, 100)], "auto", &["twin b:0", "1"]),
            (vec![gpu("a:0", u, None, 50), gpu("b:0", v, None, 100)], "auto", &["2", "1"]),
            // Only a PCI address; two of them; one backend that states none.
            (vec![gpu("a:0", None, p, 100), gpu("b:0", None, p, 50)], "auto", &["1", "twin a:0"]),
            (vec![gpu("a:0", None, p, 100), gpu("b:0", None, q, 50)], "auto", &["1", "2"]),
            (vec![gpu("a:0", None, p, 100), gpu("b:0", None, None, 50)], "auto", &["1", "2"]),
            // A UUID that differs by driver, but the same slot: the same card.
            (vec![gpu("a:0", u, p, 100), gpu("b:0", v, p, 50)], "auto", &["1", "twin a:0"]),
            // No identity at all is no common identity.
            (vec![gpu("a:0", None, None, 9), gpu("b:0", None, None, 8)], "auto", &["1", "2"]),
            // One backend twice: equal cards of one driver may share a UUID, and are two.
            (vec![gpu("a:0", u, None, 100), gpu("a:1", u, None, 100)], "auto", &["1", "2"]),
            // Two drivers of one interface beside another backend: the best of the three.
            (
                vec![gpu("a:0", u, p, 50), gpu("a:1", u, p, 40), gpu("b:0", u, p, 100)],
                "auto",
                &["twin b:0", "twin b:0", "1"],
            ),
            // Rank 0 is never automatic, and never stands for its twin.
            (vec![gpu("a:0", u, None, 0), gpu("b:0", u, None, 1)], "auto", &["named", "1"]),
            (vec![cpu("a:0", 0), cpu("b:0", 1)], "auto,a", &["2", "1"]),
            // Exclusion takes the twin along, by its own reason; alone it means the rest of `auto`.
            (
                vec![gpu("a:0", u, None, 50), gpu("b:0", u, None, 100), cpu("c:0", 1)],
                "!a:0",
                &["not !a:0", "twin of a:0 not !a:0", "1"],
            ),
            // A twin of a twin of what is excluded is used.
            (
                vec![gpu("a:0", u, None, 9), gpu("b:0", u, p, 8), gpu("c:0", None, p, 7)],
                "auto,!a",
                &["not !a", "twin of a:0 not !a", "1"],
            ),
            // Twins that are both named are both meant.
            (vec![gpu("a:0", u, None, 9), gpu("b:0", u, None, 8)], "b,a", &["2", "1"]),
            (vec![gpu("a:0", u, None, 9), cpu("c:0", 1)], "c", &["unlisted", "1"]),
            (vec![cpu("a:0", 1)], "!a", &["not !a"]),
        ];
        for (candidates, selector, expected) in table {
            let verdicts = explain(selector, &candidates).unwrap();
            let short: Vec<String> = verdicts
                .iter()
                .map(|verdict| match verdict {
                    Verdict::Taken { place, .. } => (place + 1).to_string(),
                    Verdict::OnlyWhenNamed => "named".into(),
                    Verdict::TwinOf { device } => format!("twin {device}"),
                    Verdict::Excluded { item } => format!("not {item}"),
                    Verdict::TwinOfExcluded { device, item } => {
                        format!("twin of {device} not {item}")
                    }
                    Verdict::NotListed => "unlisted".into(),
                })
                .collect();
            let ids: Vec<String> = candidates.iter().map(Candidate::id).collect();
            assert_eq!(short, expected, "{selector} of {ids:?}");
        }
    }

    /// The error for a wrong name is the list of right ones.
    #[test]
    fn errors_list_what_exists() {
        let error = select("vulkan:7", &candidates()).unwrap_err().to_string();
        assert!(
            error.contains("vulkan:7") && error.contains("vulkan:1 (H200, uuid:bb-11)"),
            "{error}"
        );
    }
}
