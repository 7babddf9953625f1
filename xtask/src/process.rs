//! Running other programs: where the repository is, which environment they get, and what failed.

use anyhow::{Context as _, Result, bail};
use std::ffi::{OsStr, OsString};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

/// The root of the repository: the folder that holds this crate's folder.
pub(crate) fn root() -> PathBuf {
    // `cargo run` tells where the crate is now; the constant serves a binary that is started directly.
    let here = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    here.parent().map_or_else(|| here.clone(), Path::to_path_buf)
}

/// `cargo ARGS`, run in the root of the repository.
pub(crate) fn cargo<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(args: I) -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = clean(cargo);
    command.args(args).current_dir(root());
    command
}

/// `cargo metadata` of the workspace, without its dependencies: neither the network nor a lock file is needed.
pub(crate) fn metadata() -> Result<serde_json::Value> {
    let mut command = cargo(["metadata", "--no-deps", "--format-version", "1"]);
    let out = command.stderr(Stdio::inherit()).output().context("cannot start `cargo metadata`")?;
    check(&command, out.status)?;
    serde_json::from_slice(&out.stdout).context("reading what `cargo metadata` says")
}

/// Where cargo puts what it builds.
pub(crate) fn target_folder() -> Result<PathBuf> {
    let metadata = metadata()?;
    let folder = metadata["target_directory"]
        .as_str()
        .context("`cargo metadata` names no target_directory")?;
    Ok(PathBuf::from(folder))
}

/// A command without the traces of the `cargo run` that started this program.
///
/// `cargo run` puts its own folders into `LD_LIBRARY_PATH`. Left there, they would hide that a plugin or a library is
/// found only because of them, which is the very fault that the tests of the search path look for.
pub(crate) fn clean(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let Some(text) = name.to_str() else { continue };
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    if let Some(path) = std::env::var_os("LD_LIBRARY_PATH") {
        match without_cargo(&path) {
            Some(rest) => command.env("LD_LIBRARY_PATH", rest),
            None => command.env_remove("LD_LIBRARY_PATH"),
        };
    }
    command
}

/// A library search path without the folders that `cargo run` adds; `None` when nothing is left.
fn without_cargo(path: &OsStr) -> Option<OsString> {
    let is_cargos = |folder: &Path| {
        let names: Vec<&str> = folder.iter().filter_map(OsStr::to_str).collect();
        let ends_with = |end: &[&str]| names.ends_with(end);
        let is_build =
            names.contains(&"target") && (names.contains(&"debug") || names.contains(&"release"));
        is_build
            || (names.contains(&"rustlib") && ends_with(&["lib"]))
            || (names.contains(&"toolchains") && ends_with(&["lib"]))
    };
    let rest: Vec<PathBuf> = std::env::split_paths(path)
        .filter(|p| !p.as_os_str().is_empty() && !is_cargos(p))
        .collect();
    if rest.is_empty() { None } else { std::env::join_paths(rest).ok() }
}

/// A command as one would type it.
pub(crate) fn shown(command: &Command) -> String {
    let quoted = |word: &OsStr| {
        let text = word.to_string_lossy();
        let is_plain = !text.is_empty()
            && text.chars().all(|c| c.is_alphanumeric() || "-_./=:,+@%".contains(c));
        if is_plain { text.into_owned() } else { format!("'{}'", text.replace('\'', r"'\''")) }
    };
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    std::iter::once(program).chain(command.get_args()).map(quoted).collect::<Vec<_>>().join(" ")
}

/// Runs a command with this program's own output; it failed if it could not start or ended with another code than 0.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start `{}`", shown(command)))?;
    check(command, status)
}

fn check(command: &Command, status: ExitStatus) -> Result<()> {
    if !status.success() {
        bail!("`{}` failed ({status})", shown(command));
    }
    Ok(())
}

/// Whether a command can be started and succeeds; its output goes nowhere.
pub(crate) fn succeeds(program: &str, args: &[&str]) -> bool {
    let quiet = clean(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    quiet.is_ok_and(|status| status.success())
}

/// Runs a command, shows what it writes to standard output line by line as it comes, and keeps it.
///
/// # Errors
/// It could not be started or read. Its exit code is a result, not an error.
pub(crate) fn tee(command: &mut Command) -> Result<(ExitStatus, String)> {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{}`", shown(command)))?;
    let mut kept = String::new();
    if let Some(pipe) = child.stdout.take() {
        let mut terminal = std::io::stdout();
        for line in BufReader::new(pipe).split(b'\n') {
            let line = line.context("reading a command's output")?;
            let line = String::from_utf8_lossy(&line);
            // A closed terminal must not stop the tests.
            let _ = writeln!(terminal, "{line}");
            kept.push_str(&line);
            kept.push('\n');
        }
    }
    let status = child.wait().with_context(|| format!("waiting for `{}`", shown(command)))?;
    Ok((status, kept))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_shown_as_one_would_type_it() {
        let mut command = Command::new("/usr/bin/cargo");
        command.args(["test", "-p", "what's this", ""]);
        assert_eq!(shown(&command), r"cargo test -p 'what'\''s this' ''");
    }

    #[test]
    fn only_cargos_own_library_folders_are_removed() {
        let check = |path: &str, expected: Option<&str>| {
            assert_eq!(without_cargo(OsStr::new(path)), expected.map(OsString::from), "{path}");
        };
        check("/r/target/debug/deps:/r/target/debug", None);
        check("/r/target/debug/build/x/out:/opt/driver/lib", Some("/opt/driver/lib"));
        check(
            "/u/.rustup/toolchains/stable/lib/rustlib/x86_64-unknown-linux-gnu/lib:/opt/a",
            Some("/opt/a"),
        );
        check("/u/.rustup/toolchains/stable/lib:/opt/target:/b", Some("/opt/target:/b"));
        check("", None);
    }

    #[test]
    fn a_failing_command_is_an_error_that_names_it() {
        let error = run(&mut Command::new("false")).unwrap_err().to_string();
        assert!(error.contains("`false` failed"), "{error}");
        let error = format!("{:#}", run(&mut Command::new("no-such-program")).unwrap_err());
        assert!(error.contains("cannot start `no-such-program`"), "{error}");
    }

    #[test]
    fn output_is_kept_and_the_exit_code_is_no_error() {
        let (status, text) =
            tee(Command::new("sh").args(["-c", "echo one; echo two; exit 3"])).unwrap();
        assert_eq!((status.code(), text.as_str()), (Some(3), "one\ntwo\n"));
    }
}
