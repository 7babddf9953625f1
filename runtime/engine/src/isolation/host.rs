//! What of a machine may change how a plugin's driver behaves, in one number.
//!
//! The core knows no driver, so it takes what every driver depends on: the boot, PCI devices with their drivers and the versions of those
//! modules, device files, installed packages, the dynamic linker's cache, the folders in which drivers and layers register themselves, and
//! the environment. A change too many costs one more try; a change missed costs the host's life, so in doubt it counts.
//! Libraries that were mapped are compared one by one in [`super::cache`].

use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Variables of a session that no driver reads; all others count, whatever they are called.
const NOISE: [&str; 21] = [
    "_",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "COLUMNS",
    "LINES",
    "TERM",
    "COLORTERM",
    "WINDOWID",
    "PS1",
    "SSH_CLIENT",
    "SSH_CONNECTION",
    "SSH_TTY",
    "TMUX",
    "TMUX_PANE",
    "STY",
    "RUST_LOG",
    "NO_COLOR",
    "XDG_SESSION_ID",
    "INVOCATION_ID",
    "JOURNAL_STREAM",
];
/// The same, by how they begin: the core's own and those of the tools that start it in tests.
const NOISE_PREFIXES: [&str; 5] = ["TEGULA_", "CARGO", "NEXTEST", "LESS", "VSCODE_"];
/// Files and folders that change when software is installed: caches of linkers, lists of packages.
const INSTALLED: [&str; 7] = [
    "/etc/ld.so.cache",
    "/etc/ld.so.preload",
    "/var/lib/dpkg/status",
    "/var/lib/rpm",
    "/usr/lib/sysimage/rpm",
    "/var/lib/pacman/local",
    "/run/current-system",
];
/// Names of the folders, two levels below those of [`shared_folders`], whose files name drivers and layers.
const REGISTRIES: [&str; 4] = ["icd.d", "vendors", "implicit_layer.d", "explicit_layer.d"];

/// The number; another one means that nothing is known any more.
pub(super) fn fingerprint() -> u64 {
    let mut hash = DefaultHasher::new();
    (env!("CARGO_PKG_VERSION"), tegula_plugin::REVISION).hash(&mut hash);
    std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default().hash(&mut hash);
    environment(&mut hash);
    pci(&mut hash);
    for folder in ["/dev", "/dev/dri", "/dev/accel"] {
        device_files(Path::new(folder), &mut hash);
    }
    for path in INSTALLED {
        identity(Path::new(path), &mut hash);
    }
    registries(&mut hash);
    hash.finish()
}

/// Size and time of a file or folder, or that it is not there.
fn identity(path: &Path, hash: &mut DefaultHasher) {
    let meta = path.metadata().ok();
    meta.map(|m| (m.ino(), m.size(), m.mtime(), m.mtime_nsec(), m.ctime())).hash(hash);
}

fn environment(hash: &mut DefaultHasher) {
    let mut variables: Vec<_> = std::env::vars_os().filter(|(name, _)| !is_noise(name)).collect();
    variables.sort();
    variables.hash(hash);
}

fn is_noise(name: &OsStr) -> bool {
    let name = name.as_bytes();
    NOISE.iter().any(|noise| noise.as_bytes() == name)
        || NOISE_PREFIXES.iter().any(|prefix| name.starts_with(prefix.as_bytes()))
}

/// The names in a folder, in order.
fn names(folder: &Path) -> Vec<std::ffi::OsString> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.file_name()).collect();
    names.sort();
    names
}

/// Devices on the bus, the driver that each has, and the version of that driver's module.
fn pci(hash: &mut DefaultHasher) {
    let root = Path::new("/sys/bus/pci/devices");
    let mut drivers: Vec<PathBuf> = Vec::new();
    for name in names(root) {
        let driver = root.join(&name).join("driver").canonicalize().ok();
        (&name, &driver).hash(hash);
        drivers.extend(driver);
    }
    drivers.sort();
    drivers.dedup();
    for driver in drivers {
        for file in ["module/version", "module/srcversion"] {
            std::fs::read(driver.join(file)).ok().hash(hash);
        }
    }
}

/// Device files, other than terminals, loops and disks, which come and go.
fn device_files(folder: &Path, hash: &mut DefaultHasher) {
    let passing = ["tty", "pts", "loop", "sd", "nvme", "vcs", "dm-", "ram", "shm", "fd", "std"];
    let is_passing =
        |name: &OsStr| passing.iter().any(|start| name.as_bytes().starts_with(start.as_bytes()));
    names(folder).iter().filter(|name| !is_passing(name)).for_each(|name| name.hash(hash));
}

/// Folders that hold a folder for each piece of software.
fn shared_folders() -> Vec<PathBuf> {
    let fixed =
        ["/etc", "/usr/share", "/usr/local/share", "/usr/local/etc", "/run/opengl-driver/share"];
    let home = std::env::var_os("HOME").map(PathBuf::from).filter(|home| home.is_absolute());
    let own = home.iter().flat_map(|home| [home.join(".local/share"), home.join(".config")]);
    fixed.iter().map(PathBuf::from).chain(own).collect()
}

/// What registers itself as a driver or a layer between programs and drivers, by dropping a file.
fn registries(hash: &mut DefaultHasher) {
    for folder in shared_folders() {
        let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
        let is_folder = |entry: &std::fs::DirEntry| {
            entry.file_type().is_ok_and(|kind| kind.is_dir() || kind.is_symlink())
        };
        let mut found: Vec<PathBuf> = entries
            .filter(is_folder)
            .flat_map(|entry| REGISTRIES.map(|name| entry.path().join(name)))
            .filter(|path| path.is_dir())
            .collect();
        found.sort();
        for registry in found {
            for name in names(&registry) {
                name.hash(hash);
                identity(&registry.join(&name), hash);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If this changed from call to call, every start would try every plugin; and the noise of a session is not to change it.
    #[test]
    fn it_stands_still() {
        assert_eq!(fingerprint(), fingerprint());
        for (name, expected) in [
            ("PWD", true),
            ("TEGULA_DEVICE", true),
            ("LD_LIBRARY_PATH", false),
            ("HOME", false),
            ("SOME_DRIVER_OPTION", false),
        ] {
            assert_eq!(is_noise(OsStr::new(name)), expected, "{name}");
        }
    }
}
