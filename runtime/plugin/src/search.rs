//! Where plugins are looked for, and which files are candidates.
//!
//! In this order: what the caller names; the folders of `TEGULA_BACKEND_PATH`; then, from the folder of the file that holds this
//! code (the program, or the shared library inside an interpreter): that folder, `backends/` below it, `tegula/backends` below it (of a
//! library folder) and `../lib/tegula/backends` (of an install prefix). The first plugin of an id wins, so an earlier folder
//! overrides a later one. The working directory is searched by nobody: entries of the variable that are empty or relative are refused
//! with a reason, and the variable is ignored when the process runs with more rights than its caller (`AT_SECURE`).
//!
//! The own file is found in `/proc/self/maps`, whose paths are the kernel's, with links resolved. `dladdr` is not enough: for
//! the main program it gives `argv[0]`, which is whatever the parent process wrote there.

use std::ffi::{CStr, OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The variable that adds folders, separated by colons.
pub const PATH_VARIABLE: &str = "TEGULA_BACKEND_PATH";

/// Who named a folder or file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// The caller.
    Explicit,
    /// `TEGULA_BACKEND_PATH`.
    Environment,
    /// The folder of the core's own file, or one below it.
    Core,
    /// The install prefix around the core's own file.
    Prefix,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Explicit => "named by the caller",
            Self::Environment => PATH_VARIABLE,
            Self::Core => "beside the core",
            Self::Prefix => "install prefix",
        })
    }
}

/// The folders and files to look at, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SearchPath {
    /// Folders; each once, by its real path where it exists.
    pub dirs: Vec<(PathBuf, Origin)>,
    /// Single files that the caller named; these need not be named like plugins.
    pub files: Vec<PathBuf>,
    /// Entries that are not searched, and why.
    pub refused: Vec<(PathBuf, String)>,
}

impl SearchPath {
    /// The search path of this process. `explicit` are folders or files; with `standard` the variable and the core's
    /// surroundings follow.
    pub fn of_process(explicit: &[PathBuf], standard: bool) -> Self {
        if !standard {
            return Self::build(explicit, None, false, None);
        }
        let variable = std::env::var_os(PATH_VARIABLE);
        Self::build(explicit, variable.as_deref(), is_secure_execution(), core_file().as_deref())
    }

    /// The search path from its ingredients, so that it can be tested without changing the process.
    pub fn build(
        explicit: &[PathBuf],
        variable: Option<&OsStr>,
        secure_execution: bool,
        core_file: Option<&Path>,
    ) -> Self {
        let mut out = Self::default();
        for path in explicit {
            out.add_explicit(path);
        }
        match variable {
            Some(value) if secure_execution => out.refuse(
                PathBuf::from(value),
                format!("{PATH_VARIABLE} is ignored because this program runs with more rights than its caller"),
            ),
            Some(value) if !value.is_empty() => out.add_variable(value),
            _ => {}
        }
        if let Some(folder) = core_file.and_then(Path::parent).filter(|f| f.is_absolute()) {
            out.add_dir(folder, Origin::Core);
            out.add_dir(&folder.join("backends"), Origin::Core);
            out.add_dir(&folder.join("tegula/backends"), Origin::Prefix);
            if let Some(prefix) = folder.parent() {
                out.add_dir(&prefix.join("lib/tegula/backends"), Origin::Prefix);
            }
        }
        out
    }

    fn refuse(&mut self, path: PathBuf, why: String) {
        self.refused.push((path, why));
    }

    /// The caller may name a relative path: it is resolved now, once, against the folder the caller sees.
    fn add_explicit(&mut self, path: &Path) {
        match path.canonicalize() {
            Ok(real) if real.is_dir() => self.add_dir(&real, Origin::Explicit),
            Ok(real) => self.files.push(real),
            Err(e) => self.refuse(path.to_owned(), e.to_string()),
        }
    }

    fn add_variable(&mut self, value: &OsStr) {
        for entry in value.as_bytes().split(|b| *b == b':') {
            let path = PathBuf::from(OsString::from_vec(entry.to_vec()));
            if entry.is_empty() {
                self.refuse(path, format!("an empty entry of {PATH_VARIABLE} would mean the working directory, which is never searched; remove the extra colon"));
            } else if path.is_relative() {
                self.refuse(path, format!("a relative entry of {PATH_VARIABLE} would depend on the working directory; write the whole path"));
            } else {
                self.add_dir(&path, Origin::Environment);
            }
        }
    }

    fn add_dir(&mut self, path: &Path, origin: Origin) {
        let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        if !self.dirs.iter().any(|(known, _)| *known == real) {
            self.dirs.push((real, origin));
        }
    }
}

/// A file that may be a plugin, before it is read.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// Its real path, absolute, with links resolved.
    pub path: PathBuf,
    /// The id in its name; the whole name for files that the caller named otherwise.
    pub id: String,
    /// Who led to it.
    pub origin: Origin,
    /// Device and inode: the same pair is the same file.
    pub identity: (u64, u64),
}

impl Candidate {
    /// Looks up a file; follows links.
    pub fn of(path: &Path, origin: Origin) -> std::io::Result<Self> {
        let real = path.canonicalize()?;
        let meta = real.metadata()?;
        if !meta.is_file() {
            return Err(std::io::Error::other("not a regular file"));
        }
        let name = path.file_name().unwrap_or_default();
        let id = plugin_id(name).map_or_else(|| name.to_string_lossy().into_owned(), str::to_owned);
        Ok(Self { path: real, id, origin, identity: (meta.dev(), meta.ino()) })
    }
}

/// The id in the file name `libtegula_<id>.so`; `None` for any other name.
pub fn plugin_id(name: &OsStr) -> Option<&str> {
    let id = name.to_str()?.strip_prefix("libtegula_")?.strip_suffix(".so")?;
    is_id(id).then_some(id)
}

/// Whether `id` is a backend id: `[a-z0-9_]+`, at most 64 bytes.
pub fn is_id(id: &str) -> bool {
    (1..=64).contains(&id.len())
        && id.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}

/// The files in `dir` that are named like plugins, by name. A folder that does not exist holds none.
pub fn plugin_files(dir: &Path) -> std::io::Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(dir) {
        Err(e)
            if matches!(
                e.kind(),
                std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory
            ) =>
        {
            return Ok(Vec::new());
        }
        other => other?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let entry = entry?;
        if plugin_id(&entry.file_name()).is_some() {
            files.push(entry.path());
        }
    }
    files.sort();
    Ok(files)
}

/// Whether the process runs with rights that its caller does not have (set-user-id, file capabilities).
pub fn is_secure_execution() -> bool {
    // SAFETY: reads a word that the kernel passed at start; no memory is involved.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// The real path of the file that holds this code: the program, or a shared library loaded into one.
pub fn core_file() -> Option<PathBuf> {
    let address = core_file as fn() -> Option<PathBuf> as usize;
    let maps = std::fs::read("/proc/self/maps").ok();
    maps.and_then(|maps| mapped_file(&maps, address)).or_else(|| linker_file(address))
}

/// A program that can try plugins, found from the core's own file: `tegula-probe` or the command itself, beside it, or in the `bin` folder
/// next to its own. Never the core's own file: a host that is called so need not know what to do.
pub fn helper_file() -> Option<PathBuf> {
    let core = core_file()?;
    helper_beside(&core)
}

fn helper_beside(core: &Path) -> Option<PathBuf> {
    let folder = core.parent()?;
    let folders = [Some(folder.to_owned()), folder.parent().map(|prefix| prefix.join("bin"))];
    let files = folders.into_iter().flatten().flat_map(|folder| {
        ["tegula-probe", "tegula"].map(|name| folder.join(name).canonicalize().ok())
    });
    files.flatten().find(|file| {
        let meta = file.metadata();
        file != core && meta.is_ok_and(|m| m.is_file() && m.mode() & 0o111 != 0)
    })
}

/// The file that is mapped at `address`, from the text of `/proc/self/maps`.
fn mapped_file(maps: &[u8], address: usize) -> Option<PathBuf> {
    let line = maps.split(|b| *b == b'\n').find(|line| {
        let range = line.split(|b| *b == b' ').next().and_then(|r| std::str::from_utf8(r).ok());
        let Some((start, end)) = range.and_then(|r| r.split_once('-')) else { return false };
        let parse = |hex| usize::from_str_radix(hex, 16).ok();
        matches!((parse(start), parse(end)), (Some(s), Some(e)) if (s..e).contains(&address))
    })?;
    let start = line.iter().position(|b| *b == b'/')?;
    let path = Path::new(OsStr::from_bytes(line.get(start..)?));
    // A replaced file ("... (deleted)") says no more where its folder is; the dynamic linker may know.
    path.exists().then(|| path.to_owned())
}

/// What the dynamic linker calls the file; only believed when absolute.
fn linker_file(address: usize) -> Option<PathBuf> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `info` is writable, and all-zero bytes are a valid Dl_info; the address is only compared.
    let info = unsafe {
        if libc::dladdr(address as *const libc::c_void, info.as_mut_ptr()) == 0 {
            return None;
        }
        info.assume_init()
    };
    if info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr gave a NUL-terminated name, which lives as long as the file that holds this code is mapped.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let path = Path::new(OsStr::from_bytes(name.to_bytes()));
    path.is_absolute().then(|| path.canonicalize().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(path: &SearchPath) -> Vec<String> {
        path.dirs.iter().map(|(dir, origin)| format!("{} ({origin})", dir.display())).collect()
    }

    /// A user who installs to a prefix, unpacks an archive or builds with cargo has plugins found by the core's own file.
    #[test]
    fn folders_follow_the_core() {
        let path = SearchPath::build(&[], None, false, Some(Path::new("/opt/x/bin/tegula")));
        assert_eq!(
            names(&path),
            [
                "/opt/x/bin (beside the core)",
                "/opt/x/bin/backends (beside the core)",
                "/opt/x/bin/tegula/backends (install prefix)",
                "/opt/x/lib/tegula/backends (install prefix)",
            ]
        );
    }

    /// A variable that names the working directory, by an empty or relative entry, would run what lies there.
    #[test]
    fn variable_entries() {
        for (value, dirs, refused) in [
            ("/a:/b", &["/a", "/b"][..], 0),
            ("", &[], 0),
            (":", &[], 2),
            ("/a:", &["/a"], 1),
            (".:/a", &["/a"], 1),
            ("plugins:../x", &[], 2),
            ("/a:/a", &["/a"], 0),
        ] {
            let path = SearchPath::build(&[], Some(OsStr::new(value)), false, None);
            let got: Vec<_> = path.dirs.iter().map(|(dir, _)| dir.to_str().unwrap()).collect();
            assert_eq!((got.as_slice(), path.refused.len()), (dirs, refused), "{value:?}");
        }
    }

    /// A set-user-id program must not run code that its caller chose.
    #[test]
    fn variable_is_ignored_under_secure_execution() {
        let core = Path::new("/opt/x/bin/tegula");
        let path = SearchPath::build(&[], Some(OsStr::new("/a")), true, Some(core));
        assert!(path.dirs.iter().all(|(_, origin)| *origin != Origin::Environment), "{path:?}");
        assert!(path.refused[0].1.contains("ignored"), "{path:?}");
        assert!(!is_secure_execution(), "tests run without extra rights");
    }

    /// Other files in a folder are none of our business; a wrong pattern would run them.
    #[test]
    fn file_names() {
        for (name, id) in [
            ("libtegula_cpu.so", Some("cpu")),
            ("libtegula_my_2.so", Some("my_2")),
            ("libtegula_.so", None),
            ("libtegula.so", None),
            ("libtegula_cpu.so.1", None),
            ("libtegula_CPU.so", None),
            ("libtegula_cpu-3f2a.so", None),
            ("tegula_cpu.so", None),
            ("libtegula_cpu.dll", None),
        ] {
            assert_eq!(plugin_id(OsStr::new(name)), id, "{name}");
        }
    }

    /// A host finds the helper that was installed with the library it links, and never starts itself once more.
    #[test]
    fn helpers_are_found_from_the_core() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let put = |path: &str, mode: u32| {
            use std::os::unix::fs::PermissionsExt;
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "").unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        };
        let found = |core: &str| {
            let found = helper_beside(&root.join(core))?;
            Some(found.strip_prefix(&root).unwrap().to_str().unwrap().to_owned())
        };
        put("lib/libtegula.so", 0o644);
        assert_eq!(found("lib/libtegula.so"), None);
        put("bin/tegula", 0o755);
        assert_eq!(found("lib/libtegula.so").as_deref(), Some("bin/tegula"));
        assert_eq!(found("bin/tegula"), None, "itself");
        put("bin/tegula-probe", 0o644);
        assert_eq!(found("lib/libtegula.so").as_deref(), Some("bin/tegula"), "not executable");
        put("bin/tegula-probe", 0o755);
        assert_eq!(found("bin/host").as_deref(), Some("bin/tegula-probe"));
    }

    #[test]
    fn own_file_is_this_test() {
        let own = core_file().unwrap();
        assert_eq!(own, std::env::current_exe().unwrap().canonicalize().unwrap());
        assert_eq!(mapped_file(b"10-20 r-xp 0 00:00 0 \nzz\n", 0x18), None);
    }
}
