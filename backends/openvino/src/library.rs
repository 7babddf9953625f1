//! Finding and opening OpenVINO.
//!
//! The shared libraries of the PyPI wheel carry only versioned names (`libopenvino_c.so.2641`), which the bindings' own finder does not
//! look for. So the folders where OpenVINO is installed are searched here, in the order of [`folders`], for the newest version in the
//! first folder that has one, and the file is opened by its full path: its own search path then finds its plugins beside it.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Names the folder that holds `libopenvino_c.so*`, or one above it as the wheel and the archives lay it out.
pub(crate) const ENV_FOLDER: &str = "TEGULA_OPENVINO";
/// What a user without OpenVINO is told.
pub(crate) const INSTALL: &str =
    "install it with `pip install openvino`, or name its folder in TEGULA_OPENVINO";

const STEM: &str = "libopenvino_c.so";

/// Opens the library once for the process; later calls give the same answer.
pub(crate) fn load() -> Result<&'static Path, String> {
    static LOADED: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    LOADED.get_or_init(open).as_deref().map_err(Clone::clone)
}

fn open() -> Result<PathBuf, String> {
    let path = find()?;
    // The bindings parse the library's version string with `unwrap`: one they do not understand must not look like a fault of ours.
    let loaded = std::panic::catch_unwind(|| openvino_sys::library::load_from(path.clone()));
    match loaded {
        Ok(Ok(())) => Ok(path),
        Ok(Err(error)) => Err(format!("OpenVINO at {}: {error}", path.display())),
        Err(_) => Err(format!("OpenVINO at {} has a version that cannot be read", path.display())),
    }
}

fn find() -> Result<PathBuf, String> {
    if let Some(folder) = std::env::var_os(ENV_FOLDER) {
        let folder = PathBuf::from(folder);
        return below(&folder)
            .iter()
            .find_map(|folder| newest(folder))
            .ok_or_else(|| format!("{ENV_FOLDER} names {}, where no {STEM} is", folder.display()));
    }
    folders()
        .iter()
        .flat_map(|folder| below(folder))
        .find_map(|folder| newest(&folder))
        .ok_or_else(|| format!("OpenVINO is not installed: {INSTALL}"))
}

/// A folder, and where the wheel and the archives keep libraries below one.
fn below(folder: &Path) -> Vec<PathBuf> {
    let inside = ["", "libs", "openvino/libs", "runtime/lib/intel64", "runtime/lib/aarch64", "lib"];
    inside.iter().map(|inside| folder.join(inside)).collect()
}

/// The known places, best first: what the environment names, archives, the user's Python packages, the system's, our own cache.
fn folders() -> Vec<PathBuf> {
    let mut out = Vec::new();
    out.extend(std::env::var_os("INTEL_OPENVINO_DIR").map(PathBuf::from));
    if let Some(path) = std::env::var_os("LD_LIBRARY_PATH") {
        out.extend(std::env::split_paths(&path).filter(|folder| folder.is_absolute()));
    }
    let packages = |root: &Path| {
        entries(&root.join("lib"))
            .into_iter()
            .filter(|folder| starts_with(folder, "python"))
            .flat_map(|folder| [folder.join("site-packages"), folder.join("dist-packages")])
            .collect::<Vec<_>>()
    };
    out.extend(std::env::var_os("VIRTUAL_ENV").iter().flat_map(|root| packages(Path::new(root))));
    let home = std::env::var_os("HOME").map(PathBuf::from);
    out.extend(home.iter().flat_map(|home| packages(&home.join(".local"))));
    out.extend(packages(Path::new("/usr/local")));
    out.extend(packages(Path::new("/usr")));
    let mut archives = entries(Path::new("/opt/intel"));
    archives.retain(|folder| starts_with(folder, "openvino"));
    archives.sort_by(|a, b| b.cmp(a));
    out.extend(archives);
    out.extend(cache_folder().map(|cache| cache.join("openvino")));
    out.extend(["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/lib"].map(PathBuf::from));
    out
}

/// Where this project keeps files that can be made again.
pub(crate) fn cache_folder() -> Option<PathBuf> {
    let base =
        std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let base = base.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
    Some(base.join("tegula"))
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
}

fn starts_with(path: &Path, prefix: &str) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
}

/// The library of the greatest version in a folder.
fn newest(folder: &Path) -> Option<PathBuf> {
    let versions = entries(folder).into_iter().filter_map(|path| {
        let name = path.file_name()?.to_str()?.to_owned();
        let rest = name.strip_prefix(STEM)?;
        let numbers: Vec<u32> = rest.split('.').filter_map(|part| part.parse().ok()).collect();
        (rest.is_empty() || !numbers.is_empty()).then_some((numbers, path))
    });
    versions.max().map(|(_, path)| path)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The wheel has no unversioned name; a user with two versions expects the newer one.
    #[test]
    fn the_newest_versioned_name_is_found() {
        let folder = std::env::temp_dir().join(format!("tegula-openvino-{}", std::process::id()));
        let libs = folder.join("openvino/libs");
        std::fs::create_dir_all(&libs).unwrap();
        for name in ["libopenvino_c.so.2541", "libopenvino_c.so.2641", "libopenvino_c.so.txt"] {
            std::fs::write(libs.join(name), b"").unwrap();
        }
        let found = below(&folder).iter().find_map(|folder| newest(folder));
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found, Some(libs.join("libopenvino_c.so.2641")));
    }
}
