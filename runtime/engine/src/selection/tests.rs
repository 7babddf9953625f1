//! Selectors, what `auto` prefers, and which devices are the same hardware, as tables.

use super::*;

fn candidates() -> Vec<Candidate> {
    let make = |backend: &str, index, kind, uuid: Option<&str>, name: &str, rank| Candidate {
        backend: backend.into(),
        index,
        kind,
        uuid: uuid.map(Into::into),
        pci: None,
        driver: format!("{backend} 1"),
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
    let table: [(&str, Option<&[&str]>); 46] = [
        ("auto", Some(&["vulkan:1", "cpu:0"])),
        ("auto,vulkan:0", Some(&["vulkan:1", "cpu:0", "vulkan:0"])),
        ("cpu", Some(&["cpu:0"])),
        ("reference", Some(&["reference:0"])),
        ("vulkan", Some(&["vulkan:0", "vulkan:1"])),
        ("vulkan:1", Some(&["vulkan:1"])),
        ("vulkan:1,cpu", Some(&["vulkan:1", "cpu:0"])),
        (" cpu , vulkan:0 ", Some(&["cpu:0", "vulkan:0"])),
        ("opencl:gpu", Some(&["opencl:0"])),
        ("vulkan:integrated", Some(&["vulkan:0"])),
        ("uuid:BB11", Some(&["vulkan:1"])),
        ("opencl,uuid:BB11", Some(&["opencl:0", "vulkan:1"])),
        ("name:H*", Some(&["vulkan:1"])),
        ("!uuid:bb-11", Some(&["vulkan:0", "cpu:0"])),
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
        ("   ", None),
        (",cpu", None),
        ("cpu,,vulkan", None),
        ("!", None),
        ("!auto", None),
        ("cpu cpu", None),
        ("cpu;vulkan", None),
        ("vulkan:-1", None),
        ("vulkan:0x1", None),
        ("vulkan:gpu:0", None),
        ("GPU", None),
        ("none", None),
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
            driver: "d".into(),
            name: "x".into(),
            rank,
        }
    };
    let gpu = |id, uuid, pci, rank| make(id, DeviceKind::DISCRETE, uuid, pci, rank);
    let cpu = |id, rank| make(id, DeviceKind::CPU, None, None, rank);
    let igpu = |id, rank| make(id, DeviceKind::INTEGRATED, None, None, rank);
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
        // An integrated GPU is for machines without another, unless it is named.
        (vec![igpu("a:0", 9), gpu("a:1", u, None, 1)], "auto", &["integrated a:1", "1"]),
        (vec![igpu("a:0", 9), gpu("a:1", u, None, 0), cpu("c:0", 1)], "auto", &["1", "named", "2"]),
        (vec![igpu("a:0", 9), gpu("a:1", u, None, 1)], "auto,a:0", &["2", "1"]),
        (vec![igpu("a:0", 9), gpu("a:1", u, None, 1)], "!a:1", &["1", "not !a:1"]),
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
                Verdict::Integrated { discrete } => format!("integrated {discrete}"),
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
    assert!(error.contains("vulkan:7") && error.contains("vulkan:1 (H200, uuid:bb-11)"), "{error}");
}

/// The same card twice is a budget counted twice; two cards taken for one are a card that is idle. Each row is two devices, as
/// backend, driver, UUID and PCI address, and whether they are one.
#[test]
fn which_devices_are_the_same() {
    let (u, v) = ("00112233-4455-6677-8899-aabbccddeeff", "00112233445566778899AABBCCDDEEFF");
    let (w, zero) =
        ("f0112233-4455-6677-8899-aabbccddeeff", "00000000-0000-0000-0000-000000000000");
    let (p, q) = ("0000:03:00.0", "0000:04:00.0");
    type Device<'a> = (&'a str, &'a str, &'a str, &'a str);
    let table: [(Device<'_>, Device<'_>, bool); 20] = [
        // One card through two backends: by UUID, in whatever writing, or by address.
        (("a", "d", u, p), ("b", "e", u, p), true),
        (("a", "d", u, ""), ("b", "e", v, ""), true),
        (("a", "d", u, ""), ("b", "e", w, ""), false),
        (("a", "d", "", p), ("b", "e", "", p), true),
        (("a", "d", "", p), ("b", "e", "", q), false),
        (("a", "d", u, p), ("b", "e", w, p), true),
        (("a", "d", u, p), ("b", "e", u, q), true),
        (("a", "d", u, ""), ("b", "e", "", p), false),
        (("a", "d", "", ""), ("b", "e", "", ""), false),
        (("a", "d", zero, ""), ("b", "e", zero, ""), false),
        // Addresses that are written otherwise, and what is none.
        (("a", "d", "", "0000:03:00.0"), ("b", "e", "", "03:00.0"), true),
        (("a", "d", "", "00000000:0A:00.0"), ("b", "e", "", "0000:0a:0.0"), true),
        (("a", "d", "", "0000:00:00.0"), ("b", "e", "", "0000:00:00.0"), false),
        (("a", "d", "", "3"), ("b", "e", "", "3"), false),
        (("a", "d", "", "0001:03:00.0"), ("b", "e", "", p), false),
        // Through one backend: two drivers may show one card twice, one driver never does.
        (("a", "d", u, p), ("a", "e", u, p), true),
        (("a", "d", u, p), ("a", "d", u, p), false),
        (("a", "d", "", p), ("a", "d", "", p), false),
        (("a", "", u, p), ("a", "e", u, p), false),
        (("a", "d", "", ""), ("a", "e", "", ""), false),
    ];
    for (a, b, expected) in table {
        let twins = Twins::of(&[device(a, 0), device(b, 1)]);
        assert_eq!((twins.are(0, 1), twins.are(1, 0)), (expected, expected), "{a:?} {b:?}");
    }
}

fn device((backend, driver, uuid, pci): (&str, &str, &str, &str), index: u32) -> Candidate {
    let known = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    Candidate {
        backend: backend.into(),
        index,
        kind: DeviceKind::DISCRETE,
        uuid: known(uuid),
        pci: known(pci),
        driver: driver.into(),
        name: "card".into(),
        rank: 1,
    }
}

/// An identity that a driver gives to several devices is none: four cards stay four, beside another backend too.
#[test]
fn identities_that_are_shared_count_for_nothing() {
    let u = "00112233-4455-6677-8899-aabbccddeeff";
    let slots = ["0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:04:00.0"];
    let ids = |candidates: &[Candidate]| -> Vec<String> {
        let found = select("auto", candidates).unwrap();
        found.into_iter().map(|i| candidates[i].id()).collect()
    };
    // One UUID for all.
    let one_uuid: Vec<_> = (0..4).map(|i| device(("a", "d", u, ""), i)).collect();
    assert_eq!(ids(&one_uuid), ["a:0", "a:1", "a:2", "a:3"]);
    // The same through a second backend, which knows addresses: nothing says which is which, so nothing is merged.
    let known = (0..4).map(|i| device(("b", "e", u, slots[i as usize]), i));
    let both: Vec<_> = one_uuid.into_iter().chain(known.clone()).collect();
    assert_eq!(ids(&both).len(), 8);
    // Both know addresses: each card once, although all share a UUID.
    let first = (0..4).map(|i| device(("a", "d", u, slots[i as usize]), i));
    let both: Vec<_> = first.chain(known).collect();
    assert_eq!(ids(&both), ["a:0", "a:1", "a:2", "a:3"]);
    // Partitions of one card share its slot and differ in UUID.
    let uuid = |i: u32| format!("{i:032x}");
    let part = |backend, i| device((backend, backend, &uuid(i), slots[0]), i);
    let parts = [part("a", 1), part("a", 2), part("b", 2), part("b", 3)];
    assert_eq!(ids(&parts), ["a:1", "a:2", "b:3"]);
}

/// What names hardware today names it tomorrow: not by an index, where the driver says what it is.
#[test]
fn stable_ids() {
    let u = "00112233-4455-6677-8899-aabbccddeeff";
    for (uuid, pci, expected) in [
        (u, "0000:03:00.0", &*format!("uuid:{u}")),
        ("", "3:0.0", "pci:0000:03:00.0"),
        ("00000000-0000-0000-0000-000000000000", "", "a:7"),
        ("", "nonsense", "a:7"),
    ] {
        let candidate = device(("a", "d", uuid, pci), 7);
        assert_eq!(candidate.stable_id(), expected);
        assert_eq!(select(expected, &[candidate]).unwrap(), [0], "{expected}");
    }
}
