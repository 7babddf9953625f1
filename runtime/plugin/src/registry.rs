//! All backends of a process: every candidate of the search path, opened or skipped with a reason.

use crate::backend::Backend;
use crate::elf;
use crate::error::SkipReason;
use crate::library::Library;
use crate::negotiate::negotiate;
use crate::probe::Gate;
use crate::search::{Candidate, Origin, SearchPath, plugin_files};
use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::File;
use std::path::{Path, PathBuf};
use tegula_abi::ENTRY_SYMBOL;

/// What to look for.
#[derive(Debug, Clone)]
pub struct RegistryOptions {
    /// Folders and files to look at first.
    pub explicit: Vec<PathBuf>,
    /// Whether `TEGULA_BACKEND_PATH` and the core's surroundings are looked at as well.
    pub standard: bool,
}

impl Default for RegistryOptions {
    fn default() -> Self {
        Self { explicit: Vec::new(), standard: true }
    }
}

/// A file or folder that gave no backend.
#[derive(Debug)]
pub struct Skipped {
    /// Which.
    pub path: PathBuf,
    /// Why.
    pub reason: SkipReason,
    /// How much a user should care; what it was logged at.
    pub level: log::Level,
}

/// The backends that could be loaded, in order of the search path.
#[derive(Debug, Default)]
pub struct Registry {
    /// The backends; each id once.
    pub backends: Vec<Backend>,
    /// What gave none.
    pub skipped: Vec<Skipped>,
    /// Where it was looked.
    pub search_path: SearchPath,
}

impl Registry {
    /// Looks for plugins, opens them and lists their devices. Never fails: what is wrong with a file is in `skipped`.
    pub fn load(options: &RegistryOptions) -> Self {
        Self::load_from(SearchPath::of_process(&options.explicit, options.standard))
    }

    /// As [`Self::load`], over a search path of the caller's.
    pub fn load_from(search_path: SearchPath) -> Self {
        Self::load_through(search_path, None)
    }

    /// As [`Self::load_from`], opening only what `gate` lets through.
    pub fn load_through(search_path: SearchPath, gate: Option<&dyn Gate>) -> Self {
        let mut out = Self { search_path, ..Self::default() };
        let mut seen = HashMap::new();
        for (path, why) in std::mem::take(&mut out.search_path.refused) {
            out.skip(&path, SkipReason::Folder { why: why.clone() }, Origin::Environment);
            out.search_path.refused.push((path, why));
        }
        for path in out.search_path.files.clone() {
            out.try_file(&path, Origin::Explicit, gate, &mut seen);
        }
        for (dir, origin) in out.search_path.dirs.clone() {
            match plugin_files(&dir) {
                Ok(files) => {
                    for path in files {
                        out.try_file(&path, origin, gate, &mut seen);
                    }
                }
                Err(e) => out.skip(&dir, SkipReason::Unreadable(e), origin),
            }
        }
        out
    }

    /// The backend with this id.
    pub fn backend(&self, id: &str) -> Option<&Backend> {
        self.backends.iter().find(|b| b.id() == id)
    }

    /// For a user without any backend: which folders were tried, and what each file said.
    pub fn describe_empty(&self) -> String {
        let mut out = String::from("no backend could be loaded");
        let folders = &self.search_path.dirs;
        out.push_str(if folders.is_empty() {
            "; no folders were tried"
        } else {
            "; folders tried:"
        });
        for (dir, origin) in folders {
            let there = if dir.is_dir() { "" } else { ", not there" };
            // Writing to a String does not fail.
            let _ = write!(out, "\n  {} ({origin}{there})", dir.display());
        }
        if self.skipped.is_empty() {
            out.push_str("\nno file named libtegula_<id>.so was found in them");
        } else {
            out.push_str("\nfiles and entries that gave none:");
        }
        for skipped in &self.skipped {
            let _ = write!(out, "\n  {}: {}", skipped.path.display(), skipped.reason);
        }
        out
    }

    fn skip(&mut self, path: &Path, reason: SkipReason, origin: Origin) {
        let level = level_of(&reason, origin);
        log::log!(level, "{}: skipped: {reason}", path.display());
        self.skipped.push(Skipped { path: path.to_owned(), reason, level });
    }

    fn try_file(
        &mut self,
        path: &Path,
        origin: Origin,
        gate: Option<&dyn Gate>,
        seen: &mut HashMap<(u64, u64), PathBuf>,
    ) {
        let backend =
            Candidate::of(path, origin).map_err(SkipReason::Unreadable).and_then(|file| {
                if let Some(first) = seen.get(&file.identity) {
                    return Err(SkipReason::SameFile { first: first.clone() });
                }
                seen.insert(file.identity, path.to_owned());
                self.open(&file, gate)
            });
        match backend {
            Ok(backend) => {
                log::debug!("{}: backend {} {}", path.display(), backend.id(), backend.version());
                self.backends.push(backend);
            }
            Err(reason) => self.skip(path, reason, origin),
        }
    }

    fn check_duplicate(&self, id: &str) -> Result<(), SkipReason> {
        self.backend(id).map_or(Ok(()), |first| {
            Err(SkipReason::Duplicate { id: id.to_owned(), first: first.path().to_owned() })
        })
    }

    fn open(&self, file: &Candidate, gate: Option<&dyn Gate>) -> Result<Backend, SkipReason> {
        let needed = look_at(file)?;
        // A copy under the usual name is not even opened: its constructors and destructors could disturb the one in use.
        self.check_duplicate(&file.id)?;
        if let Some(gate) = gate {
            gate.admit(file)?;
        }
        let library = Library::open(&file.path, &needed)?;
        let plugin = negotiate(library, &file.path, &file.id)?;
        self.check_duplicate(&plugin.id)?;
        Backend::open(plugin).map_err(SkipReason::Backend)
    }
}

/// Reads the file as ELF; gives the libraries that it needs.
fn look_at(file: &Candidate) -> Result<Vec<String>, SkipReason> {
    let opened = File::open(&file.path).map_err(SkipReason::Unreadable)?;
    let elf = elf::inspect(&opened, ENTRY_SYMBOL)?;
    if elf.exports { Ok(elf.needed) } else { Err(SkipReason::NotPlugin) }
}

/// How loud a skipped file is. What a user named is an error; a whole plugin whose driver is not installed is
/// news, not a fault; a library that only looks like a plugin by its name is neither.
fn level_of(reason: &SkipReason, origin: Origin) -> log::Level {
    match reason {
        SkipReason::SameFile { .. } => log::Level::Debug,
        SkipReason::NotPlugin if origin != Origin::Explicit => log::Level::Debug,
        _ if origin == Origin::Explicit => log::Level::Error,
        SkipReason::Duplicate { .. }
        | SkipReason::MissingLibrary { .. }
        | SkipReason::Backend(_) => log::Level::Info,
        _ => log::Level::Warn,
    }
}
