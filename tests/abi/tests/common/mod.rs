//! Where the plugins are, and registries of nothing but them.

#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

use std::path::{Path, PathBuf};
use tegula_plugin::{Registry, SearchPath};

/// A shared object that was built with the tests: beside them, or where a build of the workspace puts it.
pub(crate) fn built(file: &str) -> Option<PathBuf> {
    let exe = std::env::current_exe().unwrap();
    let beside = exe.parent().unwrap();
    let folders = [beside, beside.parent().unwrap()];
    folders.into_iter().map(|folder| folder.join(file)).find(|path| path.is_file())
}

/// Puts a plugin of this workspace into `dir` under the name that users' plugins have.
pub(crate) fn install(dir: &Path, name: &str) -> PathBuf {
    let file = format!("libtest_tegula_{name}.so");
    let from = built(&file).unwrap_or_else(|| panic!("{file} is built with these tests"));
    let to = dir.join(format!("libtegula_{name}.so"));
    std::fs::copy(from, &to).unwrap();
    to
}

/// The registry of these files and folders, and nothing else.
pub(crate) fn load(paths: &[&Path]) -> Registry {
    let paths: Vec<_> = paths.iter().map(|path| path.to_path_buf()).collect();
    Registry::load_from(SearchPath::build(&paths, None, false, None))
}
