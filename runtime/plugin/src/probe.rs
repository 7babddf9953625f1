//! Trying a plugin in a process of its own: the child's side, what both sides say, and what a failure is.
//!
//! A driver that crashes, hangs or ends its process while it is asked for its devices would take the host along. So a program that is
//! nothing but a probe does it first: it opens the one plugin, negotiates, lists devices and heaps, closes all of it and ends. If it comes
//! to its end, the same is done in the host. Who starts the probe, and when, is decided above this crate, behind [`Gate`].
//!
//! Decisions:
//!
//! * **The exit status is the answer, marks on stdout say how far it came.** A plugin prints what it likes, so marks are lines with a prefix
//!   that no driver writes, on a duplicate of stdout that no driver closes.
//! * **The child says nothing about devices.** What it saw would be old when it is read; the host asks the devices itself.
//! * **The end counts.** A driver that dies while it is closed, or in the process's exit handlers, would turn the host's success
//!   into a signal.
//! * **The child does not outlive its parent**: the parent holds the other end of stdin, and the end of that ends the child, even
//!   while a driver hangs. It leaves no core file: its death is an answer, not a fault to look into.
//! * Only what happens up to here can be kept away from a host. A plugin that crashes when it compiles or runs a model does so
//!   in the host's process; `tegula verify` is there to find that beforehand.

use crate::backend::Backend;
use crate::elf;
use crate::library::Library;
use crate::negotiate::negotiate;
use crate::search::{Candidate, Origin};
use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::Duration;
use tegula_abi::ENTRY_SYMBOL;

/// The argument that makes the command or the helper a probe; the plugin's path follows.
pub const PROBE_ARGUMENT: &str = "__probe";
/// Set in the child: a process that has it starts no probe, whatever program it turns out to be.
pub const CHILD_VARIABLE: &str = "TEGULA_PROBE_CHILD";
/// How a mark's line begins; the number is the revision of what both sides say.
const MARK: &str = "\u{1e}tegula-probe 1 ";
/// More files than any driver maps.
const MAX_MAPPED: usize = 2048;
/// The exit code of a child whose parent is gone.
const ORPHANED: i32 = 125;

/// Lets a file be opened in this process, or not.
pub trait Gate {
    /// Asked once for each file that is a whole plugin of an id not seen before, before anything of it runs.
    ///
    /// # Errors
    /// The file is skipped for this reason.
    fn admit(&self, file: &Candidate) -> Result<(), ProbeFailure>;
}

/// How far a probe came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ProbeStage {
    /// Nothing of the plugin ran.
    Start,
    /// The dynamic linker loads it, its dependencies and their constructors.
    Load,
    /// Its entry is called.
    Negotiate,
    /// Drivers are started, devices and heaps listed.
    Devices,
    /// It is closed and unloaded.
    Close,
    /// The process ends.
    Exit,
}

impl ProbeStage {
    const ALL: [Self; 6] =
        [Self::Start, Self::Load, Self::Negotiate, Self::Devices, Self::Close, Self::Exit];

    /// One word: for marks, and for programs that read reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Load => "load",
            Self::Negotiate => "negotiate",
            Self::Devices => "devices",
            Self::Close => "close",
            Self::Exit => "exit",
        }
    }

    /// The stage of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|stage| stage.name() == name)
    }
}

impl fmt::Display for ProbeStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Start => "before it was loaded",
            Self::Load => "while it was loaded",
            Self::Negotiate => "while it was asked for its tables",
            Self::Devices => "while it listed its devices",
            Self::Close => "while it was closed",
            Self::Exit => "at the end of the process",
        })
    }
}

/// How a probe ended that did not come to its end.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProbeEnd {
    /// A signal killed it.
    Signal(i32),
    /// It ended by itself, with this code.
    Exit(i32),
    /// It was ended after this time.
    TimedOut(Duration),
    /// It could not be tried, and the caller wants nothing that was not tried.
    NotTried(String),
}

impl fmt::Display for ProbeEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Signal(signal) => write!(f, "signal {signal}"),
            Self::Exit(code) => write!(f, "exit {code}"),
            Self::TimedOut(limit) => write!(f, "timed out after {} s", limit.as_secs_f64()),
            Self::NotTried(why) => write!(f, "not tried: {why}"),
        }
    }
}

/// A plugin that did not survive being tried. One line when printed, which begins with `failed probe (signal 11)` or the like.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProbeFailure {
    /// How it ended.
    pub end: ProbeEnd,
    /// What it was doing.
    pub stage: ProbeStage,
    /// The last line that it printed, if any.
    pub said: Option<String>,
    /// How long ago this was found out, where it is remembered.
    pub age: Option<Duration>,
}

impl ProbeFailure {
    /// A failure that was found out just now.
    pub fn new(end: ProbeEnd, stage: ProbeStage) -> Self {
        Self { end, stage, said: None, age: None }
    }
}

impl std::error::Error for ProbeFailure {}

impl fmt::Display for ProbeFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "failed probe ({})", self.end)?;
        if !matches!(self.end, ProbeEnd::NotTried(_)) {
            write!(f, " {}", self.stage)?;
        }
        if let Some(age) = self.age {
            write!(f, ", {} s ago", age.as_secs())?;
        }
        match &self.said {
            Some(said) => write!(f, "; it said: {said}"),
            None => Ok(()),
        }
    }
}

/// What a line of the child's stdout means.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mark {
    /// It goes on with this.
    Stage(ProbeStage),
    /// The process has code of this file mapped while the driver is open.
    Mapped(String),
}

impl Mark {
    /// Reads a line; `None` for what a plugin printed.
    pub fn read(line: &str) -> Option<Self> {
        let (word, rest) = line.strip_prefix(MARK)?.split_once(' ')?;
        match word {
            "stage" => ProbeStage::from_name(rest).map(Self::Stage),
            "mapped" => Some(Self::Mapped(rest.to_owned())),
            _ => None,
        }
    }

    fn line(&self) -> String {
        // What a plugin printed last may not have ended its line.
        match self {
            Self::Stage(stage) => format!("\n{MARK}stage {}\n", stage.name()),
            Self::Mapped(path) => format!("\n{MARK}mapped {path}\n"),
        }
    }
}

/// Tries the plugin at `path`: what a probe does, and all that it does. Returns when the plugin is closed; the caller then lets the
/// process end by returning from `main`, with success whatever the plugin refused.
pub fn run_child(path: &Path) {
    leave_no_core();
    end_with_parent();
    let out = std::io::stdout().as_fd().try_clone_to_owned().map(File::from).ok();
    let mark = |mark: Mark| {
        // Nobody else is there to be told of a parent that does not read.
        out.as_ref().map(|mut out| out.write_all(mark.line().as_bytes()));
    };
    mark(Mark::Stage(ProbeStage::Start));
    // A plugin that is refused, by us or by itself, is refused by the host in the same words.
    if let Some(backend) = open(path, &mark) {
        for device in backend.devices() {
            drop(backend.heaps(device.index));
        }
        for file in mapped_code() {
            mark(Mark::Mapped(file));
        }
        mark(Mark::Stage(ProbeStage::Close));
        drop(backend);
    }
    mark(Mark::Stage(ProbeStage::Exit));
}

fn open(path: &Path, mark: &dyn Fn(Mark)) -> Option<Backend> {
    let file = Candidate::of(path, Origin::Explicit).ok()?;
    let elf = elf::inspect(&File::open(&file.path).ok()?, ENTRY_SYMBOL).ok()?;
    if !elf.exports {
        return None;
    }
    mark(Mark::Stage(ProbeStage::Load));
    let library = Library::open(&file.path, &elf.needed).ok()?;
    mark(Mark::Stage(ProbeStage::Negotiate));
    let plugin = negotiate(library, &file.path, &file.id).ok()?;
    mark(Mark::Stage(ProbeStage::Devices));
    Backend::open(plugin).ok()
}

/// Files whose code this process has mapped, so the plugin and every library of its driver: when one of them is replaced, what was
/// found out about the plugin is worth nothing.
fn mapped_code() -> BTreeSet<String> {
    let maps = std::fs::read("/proc/self/maps").unwrap_or_default();
    let maps = String::from_utf8_lossy(&maps);
    let files = maps.lines().filter_map(|line| {
        let is_code = line.split(' ').nth(1).is_some_and(|rights| rights.contains('x'));
        let path = line.get(line.find('/')?..)?;
        is_code.then(|| path.to_owned())
    });
    files.take(MAX_MAPPED).collect()
}

/// No core file, and no helper of the system that collects one.
fn leave_no_core() {
    // A limit of 1 is the one that a collector is not started for either; 0 would hold for files alone.
    let limit = libc::rlimit { rlim_cur: 1, rlim_max: 1 };
    // SAFETY: reads the struct, changes a limit of this process, which is a probe and nothing else.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const limit) };
}

/// Ends this process when the other end of stdin is closed.
fn end_with_parent() {
    // A duplicate, as of stdout: what a driver does to the descriptor is not the parent's end.
    let Ok(mut parent) = std::io::stdin().as_fd().try_clone_to_owned().map(File::from) else {
        return;
    };
    std::thread::spawn(move || {
        let mut buffer = [0; 64];
        while parent.read(&mut buffer).is_ok_and(|n| n > 0) {}
        // SAFETY: ends the process without running anything of a plugin that may hang.
        unsafe { libc::_exit(ORPHANED) };
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever reads the marks must not take what a driver prints for one, nor miss one after an unfinished line.
    #[test]
    fn marks_survive_what_plugins_print() {
        let mut text = String::from("loading driver...");
        text.push_str(&Mark::Stage(ProbeStage::Devices).line());
        text.push_str("tegula-probe 1 stage exit\nstage exit\n");
        text.push_str(&Mark::Mapped("/usr/lib/a b.so".into()).line());
        text.push_str(&format!("{MARK}stage nonsense\n{MARK}\n"));
        let marks: Vec<_> = text.lines().filter_map(Mark::read).collect();
        assert_eq!(
            marks,
            [Mark::Stage(ProbeStage::Devices), Mark::Mapped("/usr/lib/a b.so".into())]
        );
        for stage in ProbeStage::ALL {
            let line = Mark::Stage(stage).line();
            assert_eq!(Mark::read(line.trim()), Some(Mark::Stage(stage)));
        }
    }

    /// The code that a process runs is what a driver's update replaces; this test's own file is part of it.
    #[test]
    fn mapped_code_names_files() {
        let own = std::env::current_exe().unwrap().canonicalize().unwrap();
        assert!(mapped_code().contains(own.to_str().unwrap()));
    }

    /// One line tells how it ended, when, and what was said.
    #[test]
    fn failures_in_words() {
        let mut failure = ProbeFailure::new(ProbeEnd::Signal(11), ProbeStage::Devices);
        assert_eq!(failure.to_string(), "failed probe (signal 11) while it listed its devices");
        failure.said = Some("no such thing".into());
        failure.end = ProbeEnd::TimedOut(Duration::from_secs(10));
        failure.age = Some(Duration::from_secs(40));
        assert_eq!(
            failure.to_string(),
            "failed probe (timed out after 10 s) while it listed its devices, 40 s ago; it said: no such thing"
        );
        let failure = ProbeFailure::new(ProbeEnd::NotTried("no helper".into()), ProbeStage::Start);
        assert_eq!(failure.to_string(), "failed probe (not tried: no helper)");
    }
}
