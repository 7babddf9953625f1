//! Which parts of the suite are asked for.

use anyhow::{Result, bail};
use tegula_conformance::{CHECKS, GROUPS};

/// The negotiation; always told, and all that is told when it is asked for alone.
const ABI: &str = "abi";
/// All groups of cases.
const OPS: &str = "ops";
/// Opening, closing, orders of dropping; in the suite these are called after the life of handles.
const LOAD: &str = "load";
const LIFE: &str = "life";

/// Names of parts; none for everything.
pub(super) struct Selection(Vec<String>);

impl Selection {
    /// Refuses names of nothing.
    pub(super) fn of(only: &[String]) -> Result<Self> {
        let mut known = vec![ABI, LOAD, OPS];
        known.extend(GROUPS.iter().map(|group| group.name));
        known.extend(CHECKS.iter().map(|check| kind(check.name)));
        known.dedup();
        if let Some(wrong) = only.iter().find(|name| !known.contains(&name.as_str())) {
            bail!("the suite has no part `{wrong}`; its parts are {}", known.join(", "));
        }
        Ok(Self(only.to_vec()))
    }

    /// Whether anything runs on a device.
    pub(super) fn needs_oracle(&self) -> bool {
        self.0.is_empty() || self.0.iter().any(|name| name != ABI)
    }

    pub(super) fn has_group(&self, name: &str) -> bool {
        self.has(name) || self.0.iter().any(|only| only == OPS)
    }

    /// The kinds of checks that are chosen, in the order of the suite.
    pub(super) fn kinds(&self) -> Vec<&'static str> {
        let mut kinds: Vec<_> = CHECKS.iter().map(|check| kind(check.name)).collect();
        kinds.dedup();
        kinds.retain(|kind| self.has_check(kind));
        kinds
    }

    pub(super) fn is_of_kind(check: &str, wanted: &str) -> bool {
        kind(check) == wanted
    }

    fn has_check(&self, name: &str) -> bool {
        let kind = kind(name);
        self.has(kind) || (kind == LIFE && self.0.iter().any(|only| only == LOAD))
    }

    fn has(&self, name: &str) -> bool {
        self.0.is_empty() || self.0.iter().any(|only| only == name)
    }
}

fn kind(check: &str) -> &str {
    check.split('/').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who asks for a part and gets nothing believes that it holds.
    #[test]
    fn parts_are_what_was_asked_for() {
        for (only, matmul, threads, life, needs_oracle) in [
            (&[][..], true, true, true, true),
            (&["abi"], false, false, false, false),
            (&["ops"], true, false, false, true),
            (&["matmul", "abi"], true, false, false, true),
            (&["norm"], false, false, false, true),
            (&["threads"], false, true, false, true),
            (&["load"], false, false, true, true),
            (&["life"], false, false, true, true),
        ] {
            let names: Vec<_> = only.iter().map(ToString::to_string).collect();
            let selection = Selection::of(&names).unwrap();
            let found = (
                selection.has_group("matmul"),
                selection.has_check("threads/two devices"),
                selection.has_check("life/opened again and again"),
                selection.needs_oracle(),
            );
            assert_eq!(found, (matmul, threads, life, needs_oracle), "{only:?}");
        }
        let error = Selection::of(&["mathmul".to_owned()]).err().unwrap().to_string();
        assert!(error.contains("`mathmul`") && error.contains("state, chain, limits"), "{error}");
    }
}
