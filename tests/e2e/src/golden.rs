//! Where golden data and models lie, and how they are read.

use serde_json::Value;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// A folder of the golden data.
pub fn golden(part: &str) -> Option<PathBuf> {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/golden");
    let root = std::env::var_os("TEGULA_GOLDEN").map_or_else(|| default.into(), PathBuf::from);
    present(root.join(part), "set TEGULA_GOLDEN to the folder of golden data")
}

/// A real model, by its file's name.
pub fn model_file(name: &str) -> Option<PathBuf> {
    let named = std::env::var_os("TEGULA_MODELS").map(PathBuf::from);
    let folder = named.unwrap_or_else(|| cache().join("models"));
    present(folder.join(name), "`cargo xtask models` fetches it")
}

/// The project's folder in the user's cache folder, which `cargo xtask setup` fills.
pub(crate) fn cache() -> PathBuf {
    let named = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache");
    named.unwrap_or_else(home).join("tegula")
}

fn present(path: PathBuf, hint: &str) -> Option<PathBuf> {
    if path.exists() {
        return Some(path);
    }
    eprintln!("SKIPPED: {} is not there; {hint}", path.display());
    None
}

/// Whether the slowest cases are asked for too.
pub fn full() -> bool {
    std::env::var_os("TEGULA_TEST_FULL").as_deref() == Some(OsStr::new("1"))
}

/// A JSON file.
pub fn json(path: impl AsRef<Path>) -> Value {
    let path = path.as_ref();
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// A file of little-endian f32.
pub fn f32s(path: impl AsRef<Path>) -> Vec<f32> {
    let path = path.as_ref();
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let (words, rest) = bytes.as_chunks::<4>();
    assert!(rest.is_empty(), "{} is no file of f32", path.display());
    words.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

/// A JSON array of token ids or positions.
pub fn ids(value: &Value) -> Vec<u32> {
    let id = |value: &Value| u32::try_from(value.as_u64().expect("an id")).expect("a small id");
    value.as_array().expect("an array of ids").iter().map(id).collect()
}
