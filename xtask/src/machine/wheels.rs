//! Drivers that PyPI carries as wheels, unpacked into folders of the cache where the tests look for them.
//!
//! Nothing of a package is run and no Python environment is changed: pip only unpacks.

use crate::models::cache;
use crate::process;
use anyhow::{Context as _, Result};
use std::fs;
use std::path::{Path, PathBuf};

struct Wheels {
    /// Folder below the cache folder.
    folder: &'static str,
    requirements: &'static [&'static str],
    /// pip's option for where files go: `--target` leaves out libraries that a wheel carries beside its Python package.
    place: &'static str,
    what_for: &'static str,
}

const WHEELS: [Wheels; 2] = [
    Wheels {
        folder: "openvino",
        requirements: &["openvino==2026.4.1"],
        place: "--target",
        what_for: "the OpenVINO backend is tested on its CPU device",
    },
    Wheels {
        folder: "intel-opencl",
        requirements: &[
            "intel-opencl-rt==2026.2.0",
            "intel-cmplr-lib-rt==2026.2.0",
            "tbb==2023.2.0",
            "tcmlib==1.6.0",
        ],
        place: "--prefix",
        what_for: "the OpenCL backend is tested on a second driver, Intel's for CPUs",
    },
];

/// Unpacks what is not there yet; gives one line for each that cannot be had.
pub(super) fn provide() -> Vec<String> {
    let ensure_one = |wheels: &Wheels| ensure(wheels, &cache()?.join(wheels.folder));
    WHEELS
        .iter()
        .filter_map(|wheels| ensure_one(wheels).err().map(|error| (wheels, error)))
        .map(|(wheels, error)| {
            format!("{} is missing: {}; {error:#}", wheels.requirements.join(", "), wheels.what_for)
        })
        .collect()
}

/// A folder counts as whole once it holds a note of what was unpacked, which is written last.
fn ensure(wheels: &Wheels, folder: &Path) -> Result<()> {
    let note = folder.join("requirements.txt");
    let wanted = wheels.requirements.join("\n") + "\n";
    if fs::read_to_string(&note).is_ok_and(|text| text == wanted) {
        return Ok(());
    }
    println!("fetching {} into {}", wheels.requirements.join(", "), folder.display());
    let part = PathBuf::from(format!("{}.part", folder.display()));
    let _ = fs::remove_dir_all(&part);
    process::run(
        process::clean("python3")
            .args([
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-input",
                "--disable-pip-version-check",
                "--no-cache-dir",
            ])
            .args([
                "--no-deps",
                "--only-binary",
                ":all:",
                "--no-compile",
                "--root-user-action=ignore",
                wheels.place,
            ])
            .arg(&part)
            .args(wheels.requirements),
    )?;
    let _ = fs::remove_dir_all(folder);
    fs::write(part.join("requirements.txt"), wanted)
        .and_then(|()| fs::rename(&part, folder))
        .with_context(|| folder.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_with_its_note_is_not_fetched_again() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("requirements.txt"), "no-such-package==1\n").unwrap();
        let wheels = |requirements| Wheels {
            folder: "x",
            requirements,
            place: "--target",
            what_for: "nothing",
        };
        ensure(&wheels(&["no-such-package==1"]), folder.path()).unwrap();
    }

    #[test]
    fn every_version_is_pinned() {
        for requirement in WHEELS.iter().flat_map(|wheels| wheels.requirements) {
            assert!(requirement.contains("=="), "{requirement}");
        }
    }
}
