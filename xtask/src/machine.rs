//! What a machine must have before the tests run: found, installed where that is safe, or named.
//!
//! Packages are installed only by root on a Debian-like system, which is what a fresh container or a server of
//! continuous integration is. On anybody's own machine nothing is installed: the missing program and the command
//! that would install it are printed, and what needs it is skipped.

use crate::process;

/// A program that some tests need.
struct Need {
    /// A command that succeeds where the need is met.
    probe: (&'static str, &'static [&'static str]),
    /// Debian's packages that provide it.
    packages: &'static [&'static str],
    what_for: &'static str,
}

const NEEDS: [Need; 2] = [
    Need {
        probe: ("cc", &["--version"]),
        packages: &["gcc", "libc6-dev"],
        what_for: "a plugin in C is compiled from the header",
    },
    Need {
        probe: ("python3", &["-m", "pip", "--version"]),
        packages: &["python3", "python3-pip"],
        what_for: "the real models are fetched from PyPI",
    },
];

/// Installs what is missing, where allowed; gives one line for each need that stays unmet.
pub(crate) fn provide() -> Vec<String> {
    let is_met = |need: &Need| process::succeeds(need.probe.0, need.probe.1);
    let missing: Vec<&Need> = NEEDS.iter().filter(|need| !is_met(need)).collect();
    if missing.is_empty() {
        return Vec::new();
    }
    let packages: Vec<&str> = missing.iter().flat_map(|need| need.packages).copied().collect();
    if may_install() {
        install(&packages);
    }
    missing
        .into_iter()
        .filter(|need| !is_met(need))
        .map(|need| {
            let command = [need.probe.0, &need.probe.1.join(" ")].join(" ");
            format!(
                "`{command}` fails: {}; on Debian: apt-get install {}",
                need.what_for,
                need.packages.join(" ")
            )
        })
        .collect()
}

/// Whether this is root on a system with apt.
fn may_install() -> bool {
    let id = process::clean("id").arg("-u").output();
    let is_root = id.is_ok_and(|out| out.status.success() && out.stdout.trim_ascii() == b"0");
    is_root && process::succeeds("apt-get", &["--version"])
}

fn install(packages: &[&str]) {
    let apt = |args: &[&str]| {
        let mut command = process::clean("apt-get");
        command.args(args).env("DEBIAN_FRONTEND", "noninteractive");
        println!("$ {}", process::shown(&command));
        process::run(&mut command)
    };
    let mut args = vec!["install", "--yes", "--no-install-recommends"];
    args.extend(packages);
    // Package lists may be absent or stale; a failure shows in the probe that follows, with its consequence.
    if let Err(error) = apt(&["update", "--quiet"]).and_then(|()| apt(&args)) {
        eprintln!("warning: {error:#}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_need_names_what_it_is_for_and_what_provides_it() {
        for need in &NEEDS {
            assert!(!need.packages.is_empty() && !need.what_for.is_empty(), "{}", need.probe.0);
        }
    }

    #[test]
    fn a_missing_program_is_not_met() {
        assert!(!process::succeeds("no-such-program", &[]));
        assert!(process::succeeds("sh", &["-c", "exit 0"]));
    }
}
