//! What was found out about plugins, kept in `tegula/probed.json` of the user's cache folder.
//!
//! An entry holds for one file of a plugin, one fingerprint of the machine and, where the plugin passed, for the libraries that it brought
//! with it; all are compared when it is read. A damaged file counts as none. A process with more rights than its caller has no such file: the
//! folder is the caller's choice.

use serde::{Deserialize, Serialize};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use tegula_plugin::search::is_secure_execution;
use tegula_plugin::{ProbeEnd, ProbeFailure, ProbeStage};

/// A longer file is not ours.
const BYTES_MAX: u64 = 4 << 20;
const VERSION: u32 = 1;
/// Entries that are kept, the newest: several environments of several plugins.
const ENTRIES_MAX: usize = 64;
/// Who passed is tried again after this, whatever was compared.
const REMEMBER_SUCCESS: Duration = Duration::from_secs(24 * 3600);
/// Who took too long is tried again after this.
pub(super) const REMEMBER_FAILURE: Duration = Duration::from_secs(120);

/// One state of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileId {
    path: PathBuf,
    size: u64,
    /// Seconds and nanoseconds of the last change of its bytes.
    mtime: (i64, i64),
    inode: (u64, u64),
    /// The same of files beside a plugin whose names go on after its own, such as its settings.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    beside: Vec<FileId>,
}

impl FileId {
    fn of(path: &Path) -> Option<Self> {
        let meta = path.metadata().ok()?;
        Some(Self {
            path: path.to_owned(),
            size: meta.size(),
            mtime: (meta.mtime(), meta.mtime_nsec()),
            inode: (meta.dev(), meta.ino()),
            beside: Vec::new(),
        })
    }

    /// Of a plugin, with what lies beside it under its name.
    pub(super) fn of_plugin(path: &Path) -> Option<Self> {
        let mut id = Self::of(path)?;
        let name = path.file_name()?.as_encoded_bytes();
        let mut beside: Vec<PathBuf> = std::fs::read_dir(path.parent()?)
            .ok()?
            .flatten()
            .filter(|entry| {
                let other = entry.file_name();
                let other = other.as_encoded_bytes();
                other.len() > name.len() && other.starts_with(name)
            })
            .map(|entry| entry.path())
            .collect();
        beside.sort();
        id.beside = beside.iter().filter_map(|path| Self::of(path)).collect();
        Some(id)
    }

    /// Of all these, or none: a file that is gone cannot be compared later.
    pub(super) fn of_all(paths: &[PathBuf]) -> Option<Vec<Self>> {
        paths.iter().map(|path| Self::of(path)).collect()
    }

    fn is_now(&self) -> bool {
        Self::of(&self.path).as_ref() == Some(self)
    }
}

/// What became of a plugin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    /// It passed, with these files' code mapped.
    Passed {
        /// All must still be the same.
        libraries: Vec<FileId>,
    },
    /// It took longer than `seconds`.
    TimedOut {
        /// The limit it was given.
        seconds: u64,
        /// What it was doing, by name.
        stage: String,
    },
}

impl Verdict {
    /// What is worth remembering of a failure; see [`super`].
    pub(super) fn of(failure: &ProbeFailure) -> Option<Self> {
        match failure.end {
            ProbeEnd::TimedOut(limit) => Some(Self::TimedOut {
                seconds: limit.as_secs(),
                stage: failure.stage.name().to_owned(),
            }),
            _ => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    plugin: FileId,
    host: u64,
    /// Seconds since 1970.
    at: u64,
    verdict: Verdict,
}

/// All entries.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Cache {
    version: u32,
    entries: Vec<Entry>,
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map(|d| d.as_secs()).unwrap_or(0)
}

impl Cache {
    /// Beside what was measured of devices.
    pub(super) fn path() -> Option<PathBuf> {
        let path = || Some(crate::measure::Cache::path()?.with_file_name("probed.json"));
        (!is_secure_execution()).then(path).flatten()
    }

    /// The cache in this file, or an empty one.
    pub(super) fn read(path: &Path) -> Self {
        let read = || -> std::io::Result<Self> {
            let mut text = String::new();
            std::fs::File::open(path)?.take(BYTES_MAX).read_to_string(&mut text)?;
            Ok(serde_json::from_str(&text)?)
        };
        read().ok().filter(|cache| cache.version == VERSION).unwrap_or_default()
    }

    /// What is known of the plugin at `path`, if everything is as it was.
    pub(super) fn get(&self, path: &Path, host: u64) -> Option<Result<(), ProbeFailure>> {
        let plugin = FileId::of_plugin(path)?;
        let entry = self.entries.iter().find(|e| e.host == host && e.plugin == plugin)?;
        // An entry of the future is one of a clock that was wrong.
        let age = Duration::from_secs(now().checked_sub(entry.at)?);
        match &entry.verdict {
            Verdict::Passed { libraries } => {
                let holds = age < REMEMBER_SUCCESS && libraries.iter().all(FileId::is_now);
                holds.then_some(Ok(()))
            }
            Verdict::TimedOut { seconds, stage } if age < REMEMBER_FAILURE => {
                let end = ProbeEnd::TimedOut(Duration::from_secs(*seconds));
                let mut failure = ProbeFailure::new(end, ProbeStage::from_name(stage)?);
                failure.age = Some(age);
                Some(Err(failure))
            }
            Verdict::TimedOut { .. } => None,
        }
    }

    /// Adds an entry in place of an older one.
    pub(super) fn put(&mut self, plugin: FileId, host: u64, verdict: Verdict) {
        self.version = VERSION;
        self.entries.retain(|e| e.host != host || e.plugin.path != plugin.path);
        self.entries.insert(0, Entry { plugin, host, at: now(), verdict });
        self.entries.truncate(ENTRIES_MAX);
    }

    /// Writes the file; another process sees the old one or the new.
    pub(super) fn write(&self, path: &Path) -> std::io::Result<()> {
        let folder = path.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder)?;
        let new = folder.join(format!(".probed.{}.json", std::process::id()));
        let written = serde_json::to_vec(self)
            .map_err(std::io::Error::from)
            .and_then(|text| std::fs::File::create(&new)?.write_all(&text))
            .and_then(|()| std::fs::rename(&new, path));
        written.inspect_err(|_| {
            // What was begun is of no use to anyone.
            let _ = std::fs::remove_file(&new);
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timed_out() -> Verdict {
        Verdict::TimedOut { seconds: 10, stage: "devices".into() }
    }

    /// A stale "it passed" would let a new driver crash the host; a lost one costs a try at every start.
    #[test]
    fn entries_hold_until_something_changes() {
        let dir = std::env::temp_dir().join(format!("tegula-probed-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let plugin = dir.join("libtegula_x.so");
        let library = dir.join("libdriver.so.1");
        let write = |path: &Path, text: &str| std::fs::write(path, text).unwrap();
        let passed = || {
            write(&plugin, "p");
            write(&library, "l");
            let mut cache = Cache::default();
            let libraries = FileId::of_all(&[plugin.clone(), library.clone()]).unwrap();
            cache.put(FileId::of_plugin(&plugin).unwrap(), 7, Verdict::Passed { libraries });
            let file = dir.join("cache/probed.json");
            cache.write(&file).unwrap();
            assert_eq!(std::fs::read_dir(dir.join("cache")).unwrap().count(), 1);
            Cache::read(&file)
        };
        assert_eq!(passed().get(&plugin, 7), Some(Ok(())));
        assert_eq!(passed().get(&plugin, 8), None, "another machine");
        assert_eq!(passed().get(&library, 7), None, "another file");
        let changes: [(&str, &dyn Fn()); 4] = [
            ("the plugin's bytes", &|| write(&plugin, "longer")),
            ("a driver's bytes", &|| write(&library, "longer")),
            ("a driver's removal", &|| std::fs::remove_file(&library).unwrap()),
            ("settings beside it", &|| write(&dir.join("libtegula_x.so.json"), "{}")),
        ];
        for (what, change) in changes {
            let cache = passed();
            assert_eq!(cache.get(&plugin, 7), Some(Ok(())), "before {what}");
            change();
            assert_eq!(cache.get(&plugin, 7), None, "after {what}");
        }
        let mut cache = passed();
        cache.entries[0].at -= REMEMBER_SUCCESS.as_secs();
        assert_eq!(cache.get(&plugin, 7), None, "a day later");
        cache.entries[0].at = now() + 100;
        assert_eq!(cache.get(&plugin, 7), None, "of the future");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// A driver that hangs is not waited for at every start, but soon tried again.
    #[test]
    fn time_outs_are_remembered_briefly() {
        let file = std::env::current_exe().unwrap();
        let mut cache = Cache::default();
        cache.put(FileId::of_plugin(&file).unwrap(), 7, timed_out());
        let failure = cache.get(&file, 7).unwrap().unwrap_err();
        assert_eq!(failure.end, ProbeEnd::TimedOut(Duration::from_secs(10)));
        cache.entries[0].at -= REMEMBER_FAILURE.as_secs();
        assert_eq!(cache.get(&file, 7), None);
        let crashed = ProbeFailure::new(ProbeEnd::Signal(11), ProbeStage::Devices);
        assert_eq!(Verdict::of(&crashed), None, "a crash is cheap to try again");
    }

    /// Damage is no answer, and the list does not grow for ever.
    #[test]
    fn damage_and_growth() {
        let file = std::env::temp_dir().join(format!("tegula-damage-{}.json", std::process::id()));
        for damage in ["", "{", "[]", r#"{"version": 99, "entries": []}"#, "\u{0}"] {
            std::fs::write(&file, damage).unwrap();
            assert!(Cache::read(&file).entries.is_empty(), "{damage:?}");
        }
        std::fs::remove_file(&file).unwrap();
        let id = FileId::of_plugin(&std::env::current_exe().unwrap()).unwrap();
        let mut cache = Cache::default();
        for host in 0..200 {
            cache.put(id.clone(), host, timed_out());
        }
        assert_eq!((cache.entries.len(), cache.entries[0].host), (ENTRIES_MAX, 199));
    }
}
