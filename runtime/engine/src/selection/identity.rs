//! Which devices are the same hardware, seen through several backends or drivers.
//!
//! Two devices are the same if a UUID or a PCI address says so, and that identity is one:
//!
//! * **It names one device only within its own backend and driver.** A driver that gives four cards one UUID, or all partitions of a card
//!   its PCI address, has not said which is which; what it gave to two devices counts for none of them.
//! * **Devices of one backend and one driver are never merged.** Whoever lists two has two. Two drivers of one backend may show the same card
//!   twice; that they are two is only believed where both say which they are.
//! * **Either identity is enough.** Some drivers make up UUIDs of their own, so that different ones prove nothing while the same slot does; a
//!   card's partitions, which share a slot, fall under the first rule.
//! * **Writing does not matter.** UUIDs are compared without dashes and case, PCI addresses by their numbers; all zeros are no identity.

use super::Candidate;

/// Which of a list of devices are the same.
pub(super) struct Twins(Vec<Identity>);

struct Identity {
    backend: String,
    driver: String,
    uuid: Option<String>,
    pci: Option<String>,
}

impl Identity {
    fn is_of_driver(&self, other: &Self) -> bool {
        self.backend == other.backend
            && (self.driver == other.driver || self.driver.is_empty() || other.driver.is_empty())
    }
}

impl Twins {
    pub(super) fn of(candidates: &[Candidate]) -> Self {
        let mut all: Vec<Identity> = candidates
            .iter()
            .map(|c| Identity {
                backend: c.backend.clone(),
                driver: c.driver.clone(),
                uuid: c.uuid.as_deref().filter(|uuid| is_uuid(uuid)).map(plain),
                pci: c.pci.as_deref().and_then(normal_pci),
            })
            .collect();
        let shared: Vec<(bool, bool)> = all
            .iter()
            .enumerate()
            .map(|(at, this)| {
                let others = || {
                    let rest = all.iter().enumerate().filter(|(other, _)| *other != at);
                    rest.map(|(_, other)| other).filter(|other| this.is_of_driver(other))
                };
                (others().any(|o| o.uuid == this.uuid), others().any(|o| o.pci == this.pci))
            })
            .collect();
        for (this, (uuid, pci)) in all.iter_mut().zip(shared) {
            this.uuid = this.uuid.take().filter(|_| !uuid);
            this.pci = this.pci.take().filter(|_| !pci);
        }
        Self(all)
    }

    /// Whether the devices at these two places are the same hardware.
    pub(super) fn are(&self, a: usize, b: usize) -> bool {
        let (Some(a), Some(b)) = (self.0.get(a), self.0.get(b)) else { return false };
        let same = |a: &Option<String>, b: &Option<String>| a.is_some() && a == b;
        !a.is_of_driver(b) && (same(&a.uuid, &b.uuid) || same(&a.pci, &b.pci))
    }
}

/// A UUID for comparing.
pub(super) fn plain(uuid: &str) -> String {
    uuid.replace('-', "").to_ascii_lowercase()
}

/// Whether it is one, and not the zeros of a driver that has none.
pub(super) fn is_uuid(uuid: &str) -> bool {
    uuid.bytes().any(|b| b != b'0' && b != b'-')
}

/// `dddd:bb:dd.f` in lower case, of an address with or without a domain, with numbers of any length that fits. `None` for what is no
/// address, and for 0000:00:00.0, which drivers give for "unknown".
pub fn normal_pci(text: &str) -> Option<String> {
    let number = |text: &str, max: u32| {
        let is_hex = (1..=8).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
        is_hex.then(|| u32::from_str_radix(text, 16).ok()).flatten().filter(|n| *n <= max)
    };
    let (front, function) = text.trim().rsplit_once('.')?;
    let mut parts = front.rsplit(':');
    let device = number(parts.next()?, 0x1f)?;
    let bus = number(parts.next()?, 0xff)?;
    let domain = parts.next().map_or(Some(0), |domain| number(domain, u32::MAX))?;
    let function = number(function, 7)?;
    if parts.next().is_some() || (domain, bus, device, function) == (0, 0, 0, 0) {
        return None;
    }
    Some(format!("{domain:04x}:{bus:02x}:{device:02x}.{function}"))
}
