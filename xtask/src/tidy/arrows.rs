//! Which crate of the workspace may depend on which. An arrow that is not listed is forbidden.

use super::{Finding, tree::is_below, whole};
use anyhow::{Context as _, Result};
use serde_json::Value;

/// What the crates below `from` may depend on. The most specific line counts.
struct Arrow {
    from: &'static str,
    to: &'static [&'static str],
    reason: &'static str,
}

const ARROWS: &[Arrow] = &[
    Arrow { from: "abi", to: &[], reason: "the boundary stands alone" },
    Arrow { from: "abi/quant", to: &[], reason: "block formats are facts about files" },
    Arrow {
        from: "abi/program",
        to: &["abi", "abi/quant"],
        reason: "programs are data of the boundary",
    },
    Arrow {
        from: "abi/sdk",
        to: &["abi", "abi/program", "abi/quant"],
        reason: "authors need the boundary and nothing else",
    },
    Arrow {
        from: "models/gguf",
        to: &["abi/quant"],
        reason: "files know block formats and nothing that runs",
    },
    Arrow {
        from: "models",
        to: &["abi/program", "abi/quant", "models"],
        reason: "models know files and mathematics, and no device",
    },
    Arrow {
        from: "runtime",
        to: &["abi", "models", "runtime"],
        reason: "the core finds backends at run time and links none",
    },
    Arrow {
        from: "backends",
        to: &["abi/sdk", "abi/quant"],
        reason: "a backend knows the boundary only, as any author's does",
    },
    Arrow { from: "xtask", to: &[], reason: "chores run when the workspace does not build" },
    Arrow { from: "tests", to: &[""], reason: "tests cross every boundary" },
];

/// Within `abi`, one crate is not the others: `abi` as a target is the folder's own crate for those below it.
fn is_allowed(from: &str, to: &str, arrow: &Arrow) -> bool {
    let is_in_abi = is_below(from, "abi") || is_below(from, "backends");
    arrow.to.iter().any(|target| if is_in_abi { to == *target } else { is_below(to, target) })
}

/// Checks the arrows of `cargo metadata --no-deps`, those of tests and build scripts included.
pub(super) fn check(metadata: &Value) -> Result<Vec<Finding>> {
    let root = metadata["workspace_root"].as_str().context("no workspace_root")?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    let place = |folder: &str| {
        folder.strip_prefix(root).map(|path| path.trim_start_matches('/').to_owned())
    };
    let mut findings = Vec::new();
    for package in packages {
        let manifest = package["manifest_path"]
            .as_str()
            .and_then(place)
            .context("a package outside the workspace")?;
        let from = manifest.trim_end_matches("/Cargo.toml");
        let Some(arrow) = arrow_of(from) else {
            findings.push(whole(
                &manifest,
                "a crate in a folder without a line in xtask/src/tidy/arrows.rs",
            ));
            continue;
        };
        let dependencies =
            package["dependencies"].as_array().map(Vec::as_slice).unwrap_or_default();
        let ours = dependencies
            .iter()
            .filter_map(|dependency| dependency["path"].as_str().and_then(place));
        findings.extend(
            ours.filter(|to| !is_allowed(from, to, arrow))
                .map(|to| forbidden(&manifest, from, &to, arrow)),
        );
        if package["license"].as_str() != Some("MIT OR Apache-2.0") {
            findings.push(whole(&manifest, "needs `license.workspace = true`"));
        }
    }
    Ok(findings)
}

fn arrow_of(from: &str) -> Option<&'static Arrow> {
    ARROWS.iter().filter(|arrow| is_below(from, arrow.from)).max_by_key(|arrow| arrow.from.len())
}

fn forbidden(manifest: &str, from: &str, to: &str, arrow: &Arrow) -> Finding {
    let allowed =
        if arrow.to.is_empty() { "nothing of ours".to_owned() } else { arrow.to.join(", ") };
    whole(manifest, format!("{from} may not depend on {to} (allowed: {allowed}): {}", arrow.reason))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn found(from: &str, to: &[&str], license: &str) -> Vec<String> {
        let dependencies: Vec<Value> =
            to.iter().map(|to| json!({ "name": to, "path": format!("/r/{to}") })).collect();
        let package = json!({ "manifest_path": format!("/r/{from}/Cargo.toml"), "license": license, "dependencies": dependencies });
        let findings = check(&json!({ "workspace_root": "/r", "packages": [package] })).unwrap();
        findings.into_iter().map(|finding| finding.to_string()).collect()
    }

    #[test]
    fn listed_arrows_pass_and_others_do_not() {
        let good =
            |from: &str, to: &[&str]| assert_eq!(found(from, to, "MIT OR Apache-2.0"), [""; 0]);
        let bad = |from: &str, to: &str| {
            let found = found(from, &[to], "MIT OR Apache-2.0");
            assert_eq!(found.len(), 1, "{from} -> {to}");
            assert!(found[0].contains(&format!("{from} may not depend on {to}")), "{found:?}");
        };
        good("abi", &[]);
        good("abi/program", &["abi", "abi/quant"]);
        good("abi/sdk", &["abi", "abi/program", "abi/quant"]);
        good("models/arch", &["abi/program", "abi/quant", "models/gguf"]);
        good("runtime/engine", &["abi", "abi/program", "models/arch", "runtime/plugin"]);
        good("backends/cpu", &["abi/sdk", "abi/quant"]);
        good("tests/e2e", &["backends/cpu", "runtime/engine", "abi"]);
        bad("abi", "abi/quant");
        bad("abi/quant", "abi");
        bad("abi/sdk", "models/gguf");
        bad("models/gguf", "models/tokenizer");
        bad("models/arch", "abi");
        bad("models/arch", "abi/sdk");
        bad("models/tokenizer", "runtime/engine");
        bad("runtime/cli", "backends/cpu");
        bad("backends/cpu", "abi");
        bad("backends/cpu", "abi/program");
        bad("backends/cpu", "backends/reference");
        bad("xtask", "abi");
    }

    #[test]
    fn a_crate_elsewhere_or_under_other_terms_is_found() {
        assert!(found("helpers/x", &[], "MIT OR Apache-2.0")[0].contains("without a line"));
        assert!(found("abi", &[], "GPL-3.0")[0].contains("license.workspace"));
    }
}
