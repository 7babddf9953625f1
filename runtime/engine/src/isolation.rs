//! Plugins are tried in a child process before they are opened in this one, so that a driver that crashes, hangs or exits while it is asked
//! for its devices costs one line and not the host.
//!
//! What the child does is in [`tegula_plugin::probe`]; here is when it is started, how long it may take, and what is remembered.
//!
//! Decisions:
//!
//! * **A new program, never a bare fork.** A host has threads, and the child of a fork may then do next to nothing. So isolation needs a program: the
//!   command starts itself, a host that links the core uses a helper found beside the core's own file ([`Isolation::Auto`]), or names one.
//! * **A plugin that passed is trusted until something changes** that could change the answer: its file, any library that was mapped while
//!   its driver was open, the variables of the environment, what the system has of devices, kernel modules and packages, or the day.
//!   Comparing these costs a millisecond or two; see [`host`]. Only "it passed" is kept, never what it said: devices are always asked anew.
//! * **A plugin that failed is tried again at every start**, since the user is repairing it, and a crash costs milliseconds. Only one that timed
//!   out, which costs seconds, is remembered, for two minutes ([`cache::REMEMBER_FAILURE`]).
//! * **No helper is no failure** under `Auto` and `Child`: what cannot be tried is opened as it is, and that is said. `Always` refuses it.
//! * **What runs later is not isolated.** A crash while a model is compiled or run happens in this process, since the memory that
//!   the model lies in is here.

mod cache;
mod child;
mod host;

use crate::{Error, Result};
use cache::{Cache, FileId, Verdict};
use child::Outcome;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tegula_plugin::probe::CHILD_VARIABLE;
use tegula_plugin::search::{Candidate, helper_file};
use tegula_plugin::{Gate, ProbeEnd, ProbeFailure, ProbeStage};

/// The variable that an operator sets: `off`, or `child`.
pub const ISOLATION_VARIABLE: &str = "TEGULA_ISOLATION";
/// The variable with the seconds that trying one plugin may take.
pub const PROBE_LIMIT_VARIABLE: &str = "TEGULA_PROBE_TIMEOUT";
/// Time for one plugin where nothing else is said. Drivers that start from cold take seconds.
const LIMIT: Duration = Duration::from_secs(10);
/// A greater limit is no limit.
const LIMIT_SECONDS_MAX: u64 = 3600;

/// Whether plugins are tried in a child process before they are opened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isolation {
    /// They are opened at once; one that crashes takes the process along.
    Off,
    /// With the helper that lies beside the core's own file, if one does: `tegula-probe`, or the `tegula` command.
    #[default]
    Auto,
    /// With this program, which does what [`tegula_plugin::probe::run_child`] does when it is started with `__probe PLUGIN`.
    Child(PathBuf),
    /// As `Child`, each time, whatever is remembered; a plugin that cannot be tried is not opened.
    Always(PathBuf),
}

/// How plugins are tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IsolationOptions {
    /// Whether, and with which program.
    pub mode: Isolation,
    /// Time for one plugin.
    pub limit: Duration,
}

impl Default for IsolationOptions {
    fn default() -> Self {
        Self { mode: Isolation::default(), limit: LIMIT }
    }
}

impl IsolationOptions {
    /// What [`ISOLATION_VARIABLE`] and [`PROBE_LIMIT_VARIABLE`] say of a process that has `program` as its helper. Without the first,
    /// [`Isolation::Child`].
    ///
    /// # Errors
    /// [`Error::Option`] for another value: an operator who mistypes `off` must not get the opposite.
    pub fn from_env(program: PathBuf) -> Result<Self> {
        let value = |name: &str| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned());
        let (mode, limit) = (value(ISOLATION_VARIABLE), value(PROBE_LIMIT_VARIABLE));
        Self::parse(mode.as_deref(), limit.as_deref(), program)
    }

    fn parse(mode: Option<&str>, limit: Option<&str>, program: PathBuf) -> Result<Self> {
        let mode = match mode {
            None => Isolation::Child(program),
            Some("off") => Isolation::Off,
            Some("child") => Isolation::Always(program),
            Some(other) => {
                let why = format!("`{other}` is neither `off` nor `child`");
                return Err(Error::Option { name: ISOLATION_VARIABLE, why });
            }
        };
        let limit = match limit {
            None => LIMIT,
            Some(text) => {
                let seconds = text.parse().ok().filter(|s| (1..=LIMIT_SECONDS_MAX).contains(s));
                let why =
                    || format!("`{text}` is no number of seconds from 1 to {LIMIT_SECONDS_MAX}");
                Duration::from_secs(
                    seconds
                        .ok_or_else(|| Error::Option { name: PROBE_LIMIT_VARIABLE, why: why() })?,
                )
            }
        };
        Ok(Self { mode, limit })
    }

    /// What tries the files of one search; `None` if they are opened untried.
    pub(crate) fn gate(&self) -> Option<Prober> {
        if std::env::var_os(CHILD_VARIABLE).is_some() {
            log::debug!("plugins are not tried: this process is itself a probe");
            return None;
        }
        let (program, always) = match &self.mode {
            Isolation::Off => return None,
            Isolation::Child(program) => (program.clone(), false),
            Isolation::Always(program) => (program.clone(), true),
            Isolation::Auto => match helper_file() {
                Some(program) => (program, false),
                None => {
                    log::debug!(
                        "plugins are opened untried: neither tegula-probe nor tegula lies beside the core"
                    );
                    return None;
                }
            },
        };
        Some(Prober::new(program, always, self.limit, Cache::path()))
    }
}

/// Tries plugins, and remembers.
#[derive(Debug)]
pub(crate) struct Prober {
    program: PathBuf,
    always: bool,
    limit: Duration,
    /// `None` until the first file needs it.
    memory: Mutex<Option<Memory>>,
    cache_path: Option<PathBuf>,
}

#[derive(Debug)]
struct Memory {
    cache: Cache,
    host: u64,
    is_changed: bool,
    /// That trying does not work is said once.
    is_told: bool,
}

impl Prober {
    fn new(program: PathBuf, always: bool, limit: Duration, cache_path: Option<PathBuf>) -> Self {
        Self { program, always, limit, memory: Mutex::new(None), cache_path }
    }

    /// Writes what was found out, for later processes of this user.
    pub(crate) fn finish(self) {
        let memory = self.memory.into_inner().unwrap_or_else(PoisonError::into_inner);
        let (Some(memory), Some(path)) = (memory.filter(|m| m.is_changed), self.cache_path) else {
            return;
        };
        if let Err(error) = memory.cache.write(&path) {
            log::debug!("{}: not remembered: {error}", path.display());
        }
    }

    fn remember(&self) -> Memory {
        let begin = Instant::now();
        let cache = self.cache_path.as_deref().map(Cache::read).unwrap_or_default();
        let host = host::fingerprint();
        log::debug!("what is known of plugins was read in {:.1?}", begin.elapsed());
        Memory { cache, host, is_changed: false, is_told: false }
    }

    fn try_file(&self, file: &Path, memory: &mut Memory) -> Result<(), ProbeFailure> {
        let before = FileId::of_plugin(file);
        let begin = Instant::now();
        let outcome = child::run(&self.program, file, self.limit);
        let took = begin.elapsed();
        let verdict = match &outcome {
            Outcome::Passed { mapped } => {
                log::debug!("{}: tried in {took:.0?}", file.display());
                FileId::of_all(mapped).map(|libraries| Verdict::Passed { libraries })
            }
            Outcome::Failed(failure) => Verdict::of(failure),
            Outcome::NoChild(_) => None,
        };
        if let (Some(verdict), Some(id)) = (verdict, before) {
            memory.cache.put(id, memory.host, verdict);
            memory.is_changed = true;
        }
        match outcome {
            Outcome::Passed { .. } => Ok(()),
            Outcome::Failed(failure) => Err(failure),
            Outcome::NoChild(why) if self.always => {
                Err(ProbeFailure::new(ProbeEnd::NotTried(why), ProbeStage::Start))
            }
            Outcome::NoChild(why) => {
                if !std::mem::replace(&mut memory.is_told, true) {
                    log::warn!(
                        "plugins are opened untried, so one that crashes ends this process: {why}"
                    );
                }
                Ok(())
            }
        }
    }
}

impl Gate for Prober {
    fn admit(&self, file: &Candidate) -> Result<(), ProbeFailure> {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let memory = memory.get_or_insert_with(|| self.remember());
        if !self.always
            && let Some(known) = memory.cache.get(&file.path, memory.host)
        {
            return known;
        }
        self.try_file(&file.path, memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An operator's word is read or refused, never guessed.
    #[test]
    fn variables() {
        let program = || PathBuf::from("p");
        let parse = |mode, limit| IsolationOptions::parse(mode, limit, program()).ok();
        let options =
            |mode, seconds| Some(IsolationOptions { mode, limit: Duration::from_secs(seconds) });
        for (mode, limit, expected) in [
            (None, None, options(Isolation::Child(program()), 10)),
            (Some("off"), None, options(Isolation::Off, 10)),
            (Some("child"), Some("60"), options(Isolation::Always(program()), 60)),
            (Some(""), None, None),
            (Some("OFF"), None, None),
            (Some("0"), None, None),
            (None, Some("0"), None),
            (None, Some(""), None),
            (None, Some("1.5"), None),
            (None, Some("999999"), None),
        ] {
            assert_eq!(parse(mode, limit), expected, "{mode:?} {limit:?}");
        }
    }
}
