//! Packages of the system.

use super::may_install;
use crate::process;

/// Something that the build or some tests need.
struct Need {
    /// A command that succeeds where the need is met.
    probe: (&'static str, &'static [&'static str]),
    /// Debian's packages that provide it.
    packages: &'static [&'static str],
    what_for: &'static str,
}

const NEEDS: [Need; 6] = [
    Need {
        probe: ("cc", &["--version"]),
        packages: &["gcc", "libc6-dev"],
        what_for: "programs are linked, and plugins in C are compiled from the header",
    },
    Need {
        probe: (
            "sh",
            &["-c", "echo 'int main(void){return 0;}' | cc -x c - -lOpenCL -o /dev/null"],
        ),
        packages: &["ocl-icd-opencl-dev"],
        what_for: "the OpenCL backend links libOpenCL",
    },
    Need {
        probe: ("python3", &["-m", "pip", "--version"]),
        packages: &["python3", "python3-pip"],
        what_for: "models and drivers are fetched from PyPI",
    },
    Need {
        probe: (
            "sh",
            &[
                "-c",
                "ldconfig -p | grep -q libvulkan.so.1 && ls /usr/share/vulkan/icd.d/lvp_icd*.json",
            ],
        ),
        packages: &["libvulkan1", "mesa-vulkan-drivers"],
        what_for: "the Vulkan backend is tested on Mesa's lavapipe",
    },
    Need {
        probe: (
            "sh",
            &["-c", "ls /usr/share/vulkan/explicit_layer.d/VkLayer_khronos_validation.json"],
        ),
        packages: &["vulkan-validationlayers"],
        what_for: "the Vulkan backend is watched by the validation layers",
    },
    Need {
        probe: ("sh", &["-c", "ls /etc/OpenCL/vendors/pocl.icd"]),
        packages: &["pocl-opencl-icd"],
        what_for: "the OpenCL backend is tested on PoCL",
    },
];

/// Installs what building and testing need, where allowed; gives one line for each need that stays unmet.
pub(super) fn provide() -> Vec<String> {
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
