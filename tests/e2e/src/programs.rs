//! The command and the plugins, as they were built for these tests.
//!
//! They lie in cargo's output folder, above that of the test's own file. `cargo xtask test` builds everything first; after
//! `cargo test -p tegula-e2e` alone they may be missing or older than their sources, which cargo's lists of sources (`.d`
//! files) tell, and then they are built here. What is fresh is not built again: another selection of packages could resolve to
//! other features and replace plugins under running tests.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::SystemTime;
use tegula::{Caps, RegistryOptions, Runtime, RuntimeOptions};

/// What is needed: the file, and the list of its sources.
const FILES: [(&str, &str); 4] = [
    ("tegula", "tegula.d"),
    ("libtegula_cpu.so", "libtegula_cpu.d"),
    ("libtegula_openvino.so", "libtegula_openvino.d"),
    ("libtegula_reference.so", "libtegula_reference.d"),
];
const PACKAGES: [&str; 8] =
    ["-p", "tegula-cli", "-p", "tegula-cpu", "-p", "tegula-openvino", "-p", "tegula-reference"];

/// The folder of the command and the plugins, with all of them fresh.
pub fn target_dir() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        let own = std::env::current_exe().expect("the test's own file");
        // Tests lie in a folder below it, programs of this package in it.
        let folder = own.parent().expect("a folder of binaries");
        let is_deps = folder.file_name() == Some(OsStr::new("deps"));
        let dir = if is_deps { folder.parent() } else { Some(folder) };
        let dir = dir.expect("cargo's output folder").to_owned();
        let stale = |dir: &Path| FILES.iter().find_map(|(file, list)| stale(dir, file, list));
        if let Some(why) = stale(&dir) {
            eprintln!("{why}: building it");
            build(&dir);
            if let Some((file, _)) = FILES.iter().find(|(file, _)| !dir.join(file).exists()) {
                panic!(
                    "{} was not built; run: cargo build {}",
                    dir.join(file).display(),
                    PACKAGES.join(" ")
                );
            }
        }
        dir
    })
}

/// Why a file must be built, if it must.
fn stale(dir: &Path, file: &str, list: &str) -> Option<String> {
    let modified = |path: &Path| fs::metadata(path).and_then(|meta| meta.modified()).ok();
    let file = dir.join(file);
    let Some(built) = modified(&file) else {
        return Some(format!("{} is not there", file.display()));
    };
    let Ok(list) = fs::read_to_string(dir.join(list)) else {
        return Some(format!("{} has no list of sources", file.display()));
    };
    let sources = list.split_once(": ").map_or("", |(_, sources)| sources);
    // A missing source was removed or renamed since.
    let is_newer =
        |source: &&str| modified(Path::new(source)).is_none_or(|at: SystemTime| at > built);
    let newer = sources.split_whitespace().find(is_newer)?;
    Some(format!("{} is older than {newer}", file.display()))
}

fn build(dir: &Path) {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.arg("build").args(PACKAGES).current_dir(env!("CARGO_MANIFEST_DIR"));
    match dir.file_name().and_then(OsStr::to_str) {
        Some("debug") | None => {}
        Some(profile) => {
            cargo.args(["--profile", profile]);
        }
    }
    if let Some(target) = dir.parent() {
        cargo.arg("--target-dir").arg(target);
    }
    let status = cargo.status().expect("cargo");
    assert!(status.success(), "`cargo build {}` failed", PACKAGES.join(" "));
}

/// The `tegula` command; the environment names neither devices nor caps nor libraries.
pub fn tegula<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = command(target_dir().join("tegula"));
    command.args(args);
    command
}

/// A command in a clean environment; cargo's `LD_LIBRARY_PATH` would hide what is found only because of it.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.env_remove("LD_LIBRARY_PATH").env_remove("RUST_LOG").env("RUST_BACKTRACE", "0");
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"TEGULA_") {
            command.env_remove(name);
        }
    }
    command
}

/// A runtime with the built plugins and no caps.
pub fn runtime() -> Runtime {
    runtime_with(Caps::default())
}

/// A runtime with the plugin of one backend that needs a driver, and no other: none where it is not built or finds no device, which is told.
pub fn runtime_with_driver(backend: &str) -> Option<Runtime> {
    let plugin = target_dir().join(format!("libtegula_{backend}.so"));
    if !plugin.is_file() {
        eprintln!("SKIPPED: {} is not built", plugin.display());
        return None;
    }
    let registry = RegistryOptions { explicit: vec![plugin], standard: false };
    let runtime = Runtime::new(&RuntimeOptions { registry, ..Default::default() });
    let has_device = runtime.registry().backend(backend).is_some_and(|b| !b.devices().is_empty());
    if !has_device {
        eprintln!("SKIPPED: backend `{backend}` finds no device here");
    }
    has_device.then_some(runtime)
}

/// A runtime with the built plugins.
pub fn runtime_with(caps: Caps) -> Runtime {
    let plugin = |(file, _): &(&str, &str)| file.ends_with(".so").then(|| target_dir().join(file));
    let explicit = FILES.iter().filter_map(plugin).collect();
    let registry = RegistryOptions { explicit, standard: false };
    let runtime = Runtime::new(&RuntimeOptions { registry, caps, ..Default::default() });
    assert!(runtime.registry().skipped.is_empty(), "{:?}", runtime.registry().skipped);
    runtime
}
