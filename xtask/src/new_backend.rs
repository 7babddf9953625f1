//! `cargo xtask new-backend NAME`: a backend of one's own, outside of this repository, that is right from its first build on.
//!
//! * **A copy of what is tested, not a template beside it.** The reference backend, or the worked example in C, is copied as it is now and
//!   renamed, so there is no second version that goes stale.
//! * **It stands alone.** It has a workspace, a lock file and a toolchain of its own, and knows this checkout only by the path of the
//!   boundary's crates, or by a copy of the header.
//! * **It starts at rank 0**: until its author changes that, nobody runs it who did not name it.

use crate::process;
use anyhow::{Context as _, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The backend in Rust that is copied, from the root.
const RUST: &str = "backends/reference";
/// The one in C.
const C: &str = "tests/abi/c_backend/c_backend.c";
const HEADER: &str = "abi/include/tegula_backend.h";
/// The longest name; ids may be longer, file names with them are hard to read.
const NAME_MAX: usize = 32;

/// What to make.
#[derive(clap::Args)]
pub(crate) struct Flags {
    /// The backend's id: lower-case letters, digits and underscores, beginning with a letter
    name: String,
    /// Where; must be empty or not exist [default: tegula-NAME beside this checkout]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// In C, from the header alone
    #[arg(long)]
    c: bool,
}

pub(crate) fn run(flags: &Flags) -> Result<ExitCode> {
    let root = process::root().canonicalize().context("the root of the checkout")?;
    check_name(&flags.name, &root)?;
    let folder = match &flags.dir {
        Some(folder) => std::path::absolute(folder)?,
        None => root.parent().unwrap_or(&root).join(format!("tegula-{}", flags.name)),
    };
    check_folder(&folder, &root)?;
    let files =
        if flags.c { c_files(&root, &flags.name)? } else { rust_files(&root, &flags.name)? };
    for (path, text) in files {
        let path = folder.join(path);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
        }
        fs::write(&path, text).with_context(|| path.display().to_string())?;
    }
    println!("{}", advice(flags, &folder, &root));
    Ok(ExitCode::SUCCESS)
}

fn check_name(name: &str, root: &Path) -> Result<()> {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if name.len() > NAME_MAX
        || !name.starts_with(|c: char| c.is_ascii_lowercase())
        || !name.chars().all(is_plain)
    {
        bail!(
            "`{name}` cannot be a backend's id: lower-case letters, digits and underscores, beginning with a letter, {NAME_MAX} at most"
        );
    }
    if root.join("backends").join(name).exists() {
        bail!("there is a backend `{name}` already; of two with one id the core uses the first");
    }
    Ok(())
}

fn check_folder(folder: &Path, root: &Path) -> Result<()> {
    if folder.starts_with(root) {
        bail!("{} is inside this checkout; --dir names a folder outside of it", folder.display());
    }
    let is_taken = match fs::read_dir(folder) {
        Ok(mut entries) => entries.next().is_some(),
        Err(_) => folder.exists(),
    };
    if is_taken {
        bail!("{} exists and is not empty; nothing was written", folder.display());
    }
    Ok(())
}

type Files = Vec<(PathBuf, String)>;

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| path.display().to_string())
}

fn rust_files(root: &Path, name: &str) -> Result<Files> {
    let mut files = vec![
        ("Cargo.toml".into(), manifest(root, name)?),
        // The versions that this checkout was tested with; cargo takes out what is not needed.
        ("Cargo.lock".into(), read(&root.join("Cargo.lock"))?),
        ("rust-toolchain.toml".into(), read(&root.join("rust-toolchain.toml"))?),
        (".gitignore".into(), "/target\n".to_owned()),
    ];
    let source = root.join(RUST).join("src");
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(source.join(&folder))? {
            let entry = entry?;
            let path = folder.join(entry.file_name());
            if entry.file_type()?.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = renamed(&read(&source.join(&path))?, name);
                let text =
                    if path == Path::new("lib.rs") { with_own_docs(&text, name) } else { text };
                files.push((Path::new("src").join(path), text));
            }
        }
    }
    Ok(files)
}

/// The names of the original, by the new one's.
fn renamed(text: &str, name: &str) -> String {
    let type_name: String = name.split('_').map(capitalised).collect();
    text.replace("tegula-reference", &format!("tegula-{}", name.replace('_', "-")))
        .replace("\"reference\"", &format!("\"{name}\""))
        .replace("(reference)", &format!("({name})"))
        .replace("the slow oracle on the host's processor", &format!("the backend {name}"))
        .replace(
            "/// An oracle is used when it is named, never by itself.",
            "/// Used when it is named, never by itself: give it a rank when it is right and fast.",
        )
        .replace("ReferenceDevice", &format!("{type_name}Device"))
        .replace("Reference", &format!("{type_name}Backend"))
}

fn capitalised(word: &str) -> String {
    let mut chars = word.chars();
    chars
        .next()
        .map_or_else(String::new, |first| first.to_ascii_uppercase().to_string() + chars.as_str())
}

/// Of the documentation of the crate, the recipe is the author's; the rest speaks of the original.
fn with_own_docs(text: &str, name: &str) -> String {
    let recipe = text.find("//! # A recipe").unwrap_or(0);
    let own = format!(
        "//! The backend `{name}`. It began as a copy of Tegula's reference, which is slow and right.\n//!\n"
    );
    let rest = text.get(recipe..).unwrap_or(text);
    own + &rest.replace(
        "1. Copy this folder, rename",
        "1. Done by `cargo xtask new-backend`: copy the folder, rename",
    )
}

fn manifest(root: &Path, name: &str) -> Result<String> {
    let workspace = read(&root.join("Cargo.toml"))?;
    let value = |key: &str| {
        let mut lines = workspace.lines();
        let found = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "));
        found.with_context(|| format!("Cargo.toml has no `{key}`"))
    };
    let (edition, rust) = (value("edition")?, value("rust-version")?);
    let (log, libc) = (value("log")?, value("libc")?);
    // A path in TOML, where quotes and backslashes are escaped as in Rust.
    let sdk = root.join("abi/sdk");
    let sdk = sdk.to_str().context("the path of this checkout is not UTF-8")?;
    let package = name.replace('_', "-");
    Ok(format!(
        "\
[package]
name = \"tegula-{package}\"
version = \"0.1.0\"
edition = {edition}
rust-version = {rust}
publish = false

# Of its own, wherever this folder lies.
[workspace]

# cargo makes libtegula_{name}.so, the name by which the core finds it.
[lib]
name = \"tegula_{name}\"
crate-type = [\"cdylib\"]

[dependencies]
tegula-sdk = {{ path = {sdk:?} }}
log = {log}
libc = {libc}

[lints.rust]
unsafe_code = \"deny\"

# Kernels are unusable unoptimised.
[profile.dev]
opt-level = 2
"
    ))
}

fn c_files(root: &Path, name: &str) -> Result<Files> {
    let source = read(&root.join(C))?
        .replace("cexample", name)
        .replace("C example", name)
        .replace("the worked example in C", &format!("the backend {name}"))
        .replace("cc -std=c11 -shared -fPIC -fvisibility=hidden -I abi/include tests/abi/c_backend/c_backend.c -o", "make #")
        .replace("STR(\"c\")", &format!("STR(\"{name}\")"));
    let makefile = format!(
        "\
# -fvisibility=hidden: a plugin exports its entry and nothing else.
CFLAGS ?= -O2 -g -Wall -Wextra
PLUGIN = libtegula_{name}.so

$(PLUGIN): {name}.c tegula_backend.h
\t$(CC) -std=c11 $(CFLAGS) -shared -fPIC -fvisibility=hidden $< -o $@ $(LDFLAGS) $(LDLIBS)

verify: $(PLUGIN)
\ttegula verify ./$(PLUGIN)

clean:
\trm -f $(PLUGIN)

.PHONY: verify clean
"
    );
    Ok(vec![
        (format!("{name}.c").into(), source),
        ("tegula_backend.h".into(), read(&root.join(HEADER))?),
        ("Makefile".into(), makefile),
        (".gitignore".into(), "*.so\n".to_owned()),
    ])
}

/// What to do next.
fn advice(flags: &Flags, folder: &Path, root: &Path) -> String {
    let name = &flags.name;
    let (build, plugin, first) = if flags.c {
        ("make", format!("./libtegula_{name}.so"), format!("{name}.c"))
    } else {
        ("cargo build", format!("target/debug/libtegula_{name}.so"), "src/lib.rs".to_owned())
    };
    let output = Path::new(&plugin).parent().map(|parent| folder.join(parent)).unwrap_or_default();
    let output: PathBuf = output.components().collect();
    format!(
        "\
made {folder}

  cd {folder}
  {build}
  tegula verify {plugin}
  TEGULA_BACKEND_PATH={output} tegula run MODEL.gguf --device {name} -p \"Hello\"

The command and the oracle that it compares with come from this checkout:

  cd {root} && cargo build -p tegula-cli -p tegula-reference && export PATH=\"$PWD/target/debug:$PATH\"

The first thing to read is {first}; what decides is a truthful max_size. Verify after each op.",
        folder = folder.display(),
        output = output.display(),
        root = root.display(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> PathBuf {
        process::root().canonicalize().unwrap()
    }

    /// A copy that goes by the original's name is skipped as a second one, or mistaken for the oracle.
    #[test]
    fn nothing_is_called_as_the_original() {
        for (files, own) in [
            (rust_files(&root(), "my_card").unwrap(), "const ID: &'static str = \"my_card\";"),
            (c_files(&root(), "my_card").unwrap(), "STR(\"my_card\")"),
        ] {
            assert!(files.iter().any(|(_, text)| text.contains(own)), "{own}");
            for (path, text) in files.iter().filter(|(path, _)| !path.ends_with("Cargo.lock")) {
                for word in [
                    "tegula-reference",
                    "tegula_reference",
                    "Reference",
                    "\"reference\"",
                    "cexample",
                    "C example",
                ] {
                    assert!(!text.contains(word), "{}: {word}", path.display());
                }
            }
        }
        let files = rust_files(&root(), "my_card").unwrap();
        let of = |name: &str| &files.iter().find(|(path, _)| path.ends_with(name)).unwrap().1;
        assert!(of("lib.rs").contains("export_backend!(MyCardBackend)"));
        assert!(of("lib.rs").contains("# A recipe for a new backend"));
        assert!(of("Cargo.toml").contains("name = \"tegula_my_card\""));
        assert!(of("Cargo.toml").contains("abi/sdk\""), "{}", of("Cargo.toml"));
    }

    #[test]
    fn names_and_folders_that_would_do_harm_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["", "Cuda", "1st", "a-b", "../x", "reference", "cpu", &"a".repeat(40)] {
            assert!(check_name(name, &root()).is_err(), "{name}");
        }
        check_name("my_card2", &root()).unwrap();
        check_folder(&dir.path().join("new"), &root()).unwrap();
        check_folder(dir.path(), &root()).unwrap();
        fs::write(dir.path().join("file"), "mine").unwrap();
        for taken in [dir.path().to_owned(), dir.path().join("file"), root().join("x")] {
            assert!(check_folder(&taken, &root()).is_err(), "{}", taken.display());
        }
    }
}
