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

/// Indices into `candidates`, in the order the selector asks for; never empty.
pub fn select(selector: &str, candidates: &[Candidate]) -> Result<Vec<usize>> {
    let fault = |item: &str, why: &str| Error::Selector {
        selector: item.to_owned(),
        why: why.to_owned(),
        available: available(candidates),
    };
    let mut chosen: Vec<usize> = Vec::new();
    let mut excluded: Vec<usize> = Vec::new();
    let mut positive = false;
    for item in selector.split(',').map(str::trim) {
        if item.is_empty() {
            return Err(fault(selector, "an empty item"));
        }
        if let Some(item) = item.strip_prefix('!') {
            excluded.extend(matching(item, candidates).map_err(|why| fault(item, &why))?);
            continue;
        }
        positive = true;
        let found = if item == "auto" {
            auto(candidates, &[])
        } else {
            matching(item, candidates).map_err(|why| fault(item, &why))?
        };
        chosen.extend(found);
    }
    let hidden = |i: &usize| {
        excluded.contains(i)
            || excluded.iter().any(|other| candidates[*i].is_twin_of(&candidates[*other]))
    };
    let listed = if positive { chosen } else { auto(candidates, &excluded) };
    let mut out: Vec<usize> = Vec::new();
    for i in listed {
        if !hidden(&i) && !out.contains(&i) {
            out.push(i);
        }
    }
    if out.is_empty() {
        return Err(fault(selector, "no device is left to run on"));
    }
    Ok(out)
}

/// The devices worth using, best first, each piece of silicon once.
fn auto(candidates: &[Candidate], excluded: &[usize]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..candidates.len())
        .filter(|i| candidates[*i].rank > 0 && !excluded.contains(i))
        .collect();
    order.sort_by_key(|i| {
        let candidate = &candidates[*i];
        std::cmp::Reverse((candidate.class(), candidate.rank))
    });
    let mut out: Vec<usize> = Vec::new();
    for i in order {
        if !out.iter().any(|other| candidates[i].is_twin_of(&candidates[*other])) {
            out.push(i);
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
