//! The suite on the backends of the project, one test for each group, so that a failure is named by what is wrong.

#![allow(clippy::panic, clippy::expect_used, reason = "a test fails by panicking")]

use tegula_conformance::{Expectations, GROUPS, Report, check_group};
use tegula_conformance_tests::expectations;
use tegula_e2e::is_on_intels_opencl;
use tegula_plugin::{Backend, Registry, RegistryOptions};

/// What everything is measured against.
const ORACLE: &str = "reference";

fn registry() -> Registry {
    // Plugins lie beside the tests, and where a build of the workspace puts them.
    let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.to_owned()));
    let folders = beside.iter().flat_map(|folder| [Some(folder.as_path()), folder.parent()]);
    let explicit = folders.flatten().map(ToOwned::to_owned).collect();
    Registry::load(&RegistryOptions { explicit, standard: true })
}

/// Runs on every device of a backend. A backend that is not built, or finds no device, is told.
fn check(id: &str, run: impl Fn(&Backend, u32, &Backend, &Expectations) -> Report) {
    let registry = registry();
    let oracle = registry.backend(ORACLE).expect("the oracle is built with this test");
    let Some(backend) = registry.backend(id) else {
        eprintln!("SKIPPED: no backend `{id}` here");
        return;
    };
    if backend.devices().is_empty() {
        eprintln!("SKIPPED: backend `{id}` finds no device");
    }
    for device in backend.devices() {
        let report = run(backend, device.index, oracle, &expectations(id));
        assert!(!report.verdicts.is_empty(), "nothing was checked");
        for skipped in report.skipped() {
            eprintln!("SKIPPED: {}: {skipped}", device.id());
        }
        let (n, worst) = (report.verdicts.len(), report.worst());
        println!("{}: {n} cases, greatest error {worst:.1e}", device.id());
        let faults: Vec<_> = report.faults().map(ToString::to_string).collect();
        assert!(
            faults.is_empty(),
            "{}: {} of {n} cases:\n{}",
            device.id(),
            faults.len(),
            faults.join("\n")
        );
    }
}

fn check_named(id: &str, group: &str) {
    let group = GROUPS.iter().find(|known| known.name == group).expect("a group of the suite");
    check(id, |backend, index, oracle, expectations| {
        check_group(group, backend, index, oracle, expectations)
    });
}

macro_rules! suite {
    ($id:ident: $($group:ident)*) => {
        mod $id {
            $(#[test]
            fn $group() {
                super::check_named(stringify!($id), stringify!($group));
            })*

            #[test]
            fn promises() {
                super::check(stringify!($id), tegula_conformance::run_checks);
            }
        }
    };
}

suite!(cpu: embed matmul norm rope elementwise rows rank attention experts state chain);
// The oracle keeps the promises too; that it computes rightly is held to values by hand in its own tests.
suite!(reference: embed matmul norm rope elementwise rows rank attention experts state chain);

/// Backends that need a driver: everything in one test, so that an absent one is one skip.
macro_rules! whole {
    ($($id:ident)*) => {$(
        #[test]
        fn $id() {
            check(stringify!($id), tegula_conformance::verify);
        }
    )*};
}

whole!(vulkan opencl openvino);

/// A second driver, with what the first has not: subgroups and f16.
#[test]
fn opencl_on_intels_driver() {
    if is_on_intels_opencl("opencl_on_intels_driver") {
        check("opencl", tegula_conformance::verify);
    }
}

/// A group that no test names would never run.
#[test]
fn every_group_is_named_here() {
    let named = [
        "embed",
        "matmul",
        "norm",
        "rope",
        "elementwise",
        "rows",
        "rank",
        "attention",
        "experts",
        "state",
        "chain",
    ];
    let groups: Vec<_> = GROUPS.iter().map(|group| group.name).collect();
    assert_eq!(groups, named);
    let mut names = Vec::new();
    for group in GROUPS {
        names.extend((group.cases)().expect("cases that verify").into_iter().map(|case| case.name));
    }
    let n = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), n, "two cases have one name, and one seed");
}
