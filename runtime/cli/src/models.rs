//! The cache folder of models, and the names by which commands find models in it.
//!
//! A MODEL that exists as a path is that path; only a bare name, one without a folder, is looked up, so that a path with a typing error
//! never runs another model. The shards of a split model count as one.

use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

/// Where `tegula pull` puts models and bare names are looked up.
pub(crate) fn folder() -> Result<PathBuf> {
    folder_of(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
        .context("no cache folder: none of TEGULA_MODELS, XDG_CACHE_HOME and HOME is set")
}

fn folder_of(var: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    if let Some(folder) = var("TEGULA_MODELS") {
        return Some(folder.into());
    }
    // The XDG rules say to ignore a relative path.
    let cache = var("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = cache.or_else(|| Some(PathBuf::from(var("HOME")?).join(".cache")))?;
    Some(cache.join("tegula/models"))
}

/// The file that a MODEL argument names: the path itself, or a model of the cache folder.
pub(crate) fn find(model: &Path) -> Result<PathBuf> {
    if model.exists() {
        return Ok(model.to_owned());
    }
    let parts: Vec<Component> = model.components().collect();
    match (parts.as_slice(), model.to_str()) {
        // `./name` is no bare name; `components` keeps its first dot.
        ([Component::Normal(_)], Some(name)) if !name.ends_with('/') => {
            let folder = folder()?;
            let files = list(&folder)
                .with_context(|| format!("cannot list the models in {}", folder.display()))?;
            Ok(folder.join(choose(name, &files, &folder)?))
        }
        ([Component::Normal(_), Component::Normal(_)], Some(name)) if !is_gguf(name) => bail!(
            "{name}: no such file. If it names a repository of the Hugging Face hub, `tegula pull {name}` fetches a model from it"
        ),
        // Opening it says what is wrong.
        _ => Ok(model.to_owned()),
    }
}

fn is_gguf(name: &str) -> bool {
    name.len() > 5
        && name.get(name.len() - 5..).is_some_and(|end| end.eq_ignore_ascii_case(".gguf"))
}

/// The names of the GGUF files in a folder, sorted; none where the folder does not exist yet.
fn list(folder: &Path) -> std::io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        // A name that is not UTF-8 cannot be typed here either; its path still works.
        let Ok(name) = entry?.file_name().into_string() else { continue };
        if is_gguf(&name) && !name.starts_with('.') {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// A shard's name taken apart: what all shards share, its number from 1, and how many there are.
pub(crate) fn shard_of(name: &str) -> Option<(&str, u32, u32)> {
    let stem = name.get(..name.len().checked_sub(5)?).filter(|_| is_gguf(name))?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (base, number) = rest.rsplit_once('-')?;
    let parse = |text: &str| {
        (text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse().ok())?
    };
    let (number, count) = (parse(number)?, parse(count)?);
    (1 <= number && number <= count).then_some((base, number, count))
}

/// What a user would call the model of a file: its name without `.gguf` and shard number.
fn stem(file: &str) -> &str {
    match shard_of(file) {
        Some((base, _, _)) => base,
        None => file.get(..file.len().saturating_sub(5)).unwrap_or(file),
    }
}

/// The file that `name` means among `files`: by its exact name, with or without .gguf, else as the one that it begins.
fn choose<'a>(name: &str, files: &'a [String], folder: &Path) -> Result<&'a str> {
    if let Some(file) = files.iter().find(|file| *file == name) {
        return Ok(file);
    }
    let heads: Vec<&str> = files
        .iter()
        .map(String::as_str)
        .filter(|file| shard_of(file).is_none_or(|(_, number, _)| number == 1))
        .collect();
    let wanted = name.to_lowercase();
    if let Some(file) = heads.iter().find(|file| stem(file) == name) {
        return Ok(file);
    }
    let begun: Vec<&str> =
        heads.iter().copied().filter(|file| file.to_lowercase().starts_with(&wanted)).collect();
    let whole = begun.iter().copied().filter(|file| stem(file).to_lowercase() == wanted);
    let whole: Vec<&str> = whole.collect();
    match (begun.as_slice(), whole.as_slice()) {
        ([file], _) | (_, [file]) => Ok(file),
        ([], _) if heads.is_empty() => bail!(
            "{name}: no such file, and no model in {} yet; `tegula pull OWNER/REPO` fetches one",
            folder.display()
        ),
        ([], _) => bail!(
            "{name}: neither a file nor a model in {}, where these are:{}\n`tegula pull OWNER/REPO` fetches more",
            folder.display(),
            lines(&heads)
        ),
        _ => bail!(
            "{name}: several models in {} begin so; type more of the name:{}",
            folder.display(),
            lines(&begun)
        ),
    }
}

fn lines(files: &[&str]) -> String {
    files.iter().map(|file| format!("\n  {}", stem(file))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(name: &str, files: &[&str], expected: Result<&str, &str>) {
        let files: Vec<String> = files.iter().map(ToString::to_string).collect();
        let found = choose(name, &files, Path::new("/models")).map_err(|e| e.to_string());
        match (found, expected) {
            (Ok(found), Ok(expected)) => assert_eq!(found, expected),
            (Err(found), Err(part)) => assert!(found.contains(part), "{found}"),
            (found, expected) => panic!("{found:?} where {expected:?} was expected"),
        }
    }

    /// Another model than the one meant would run, or none though it is there.
    #[test]
    fn names_find_their_model() {
        let files = [
            "Llama-3-8B.Q4_0.gguf",
            "Llama-3-8B.Q8_0.gguf",
            "big-00001-of-00002.gguf",
            "big-00002-of-00002.gguf",
            "gemma.gguf",
            "gemma-3.gguf",
        ];
        check("gemma-3.gguf", &files, Ok("gemma-3.gguf"));
        check("gemma-3", &files, Ok("gemma-3.gguf"));
        check("gemma", &files, Ok("gemma.gguf"));
        check("Gemma", &files, Ok("gemma.gguf"));
        check("gem", &files, Err("gemma-3"));
        check("llama-3-8b.q8", &files, Ok("Llama-3-8B.Q8_0.gguf"));
        check("Llama", &files, Err("type more of the name:\n  Llama-3-8B.Q4_0\n  Llama-3-8B.Q8_0"));
        check("big", &files, Ok("big-00001-of-00002.gguf"));
        check("b", &files, Ok("big-00001-of-00002.gguf"));
        check("big-00002-of-00002.gguf", &files, Ok("big-00002-of-00002.gguf"));
        check("mistral", &files, Err("where these are:\n  Llama-3-8B.Q4_0\n"));
        check("mistral", &[], Err("tegula pull"));
    }

    /// Models would land where nothing looks for them.
    #[test]
    fn the_folder_follows_the_environment() {
        let check = |vars: &[(&str, &str)], expected: Option<&str>| {
            let var = |name: &str| {
                vars.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
            };
            assert_eq!(folder_of(var), expected.map(PathBuf::from), "{vars:?}");
        };
        let home = ("HOME", "/users/u");
        check(&[], None);
        check(&[home], Some("/users/u/.cache/tegula/models"));
        check(&[home, ("XDG_CACHE_HOME", "/var/c")], Some("/var/c/tegula/models"));
        check(&[home, ("XDG_CACHE_HOME", "c")], Some("/users/u/.cache/tegula/models"));
        check(&[home, ("TEGULA_MODELS", "/m")], Some("/m"));
    }

    /// A split model would be offered as many, or pulled in part.
    #[test]
    fn shard_names_are_taken_apart() {
        for (name, expected) in [
            ("a-00001-of-00003.gguf", Some(("a", 1, 3))),
            ("a-of-b-00003-of-00003.gguf", Some(("a-of-b", 3, 3))),
            ("a-00004-of-00003.gguf", None),
            ("a-00000-of-00003.gguf", None),
            ("a-1-of-3.gguf", None),
            ("a-00001-of-00003.bin", None),
            ("é.gguf", None),
            ("", None),
        ] {
            assert_eq!(shard_of(name), expected, "{name}");
        }
    }
}
