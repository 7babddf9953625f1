//! What was measured, kept in `tegula/measured.json` of the user's cache folder.
//!
//! Rates count only for the same device, driver and backend version. A damaged file counts as none: measuring again costs seconds.

use super::DeviceRates;
use crate::runtime::DeviceEntry;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use tegula_plugin::{Figure, FigureSource};

/// A longer file is not ours.
const CACHE_BYTES_MAX: u64 = 4 << 20;
const CACHE_VERSION: u32 = 1;

/// What was measured before.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Cache {
    version: u32,
    devices: Vec<DeviceRates>,
}

impl Cache {
    /// The cache of this user, or an empty one.
    pub fn read() -> Self {
        Self::path().map(|path| Self::read_from(&path)).unwrap_or_default()
    }

    /// `$XDG_CACHE_HOME/tegula/measured.json`, or that of `~/.cache`; `None` where neither variable is set.
    pub fn path() -> Option<PathBuf> {
        let folder = |name: &str| std::env::var_os(name).map(PathBuf::from);
        let absolute = |path: &PathBuf| path.is_absolute();
        let cache = folder("XDG_CACHE_HOME").filter(absolute);
        let cache = cache.or_else(|| Some(folder("HOME").filter(absolute)?.join(".cache")))?;
        Some(cache.join("tegula/measured.json"))
    }

    fn read_from(path: &Path) -> Self {
        let read = || -> std::io::Result<Self> {
            let mut text = String::new();
            std::fs::File::open(path)?.take(CACHE_BYTES_MAX).read_to_string(&mut text)?;
            Ok(serde_json::from_str(&text)?)
        };
        match read() {
            Ok(cache) if cache.version == CACHE_VERSION => cache,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Self::default(),
            Ok(_) | Err(_) => {
                log::info!("{} is not readable and counts as empty", path.display());
                Self::default()
            }
        }
    }

    /// Puts measured rates in place of those a device states.
    pub(crate) fn apply(&self, entry: &mut DeviceEntry) {
        if self.devices.is_empty() {
            return;
        }
        let this = DeviceRates::of(entry, Vec::new());
        let Some(known) = self.devices.iter().find(|known| known.is_of(&this)) else { return };
        for kind in &mut entry.info.buffer_types {
            let rates = known.types.iter().find(|rates| rates.buffer_type == kind.name);
            if let Some(rate) = rates.and_then(|rates| rates.device_read) {
                kind.read_bandwidth = Figure::known(rate, FigureSource::MEASURED);
            }
        }
    }

    /// Adds rates to the file of this user, in place of older ones of the same device; another process sees the old file or the new.
    ///
    /// # Errors
    /// [`Error::Io`] where the file cannot be written.
    pub fn add(rates: &DeviceRates) -> Result<()> {
        match Self::path() {
            Some(path) => Self::add_to(&path, rates),
            None => Ok(()),
        }
    }

    fn add_to(path: &Path, rates: &DeviceRates) -> Result<()> {
        let mut cache = Self::read_from(path);
        cache.version = CACHE_VERSION;
        cache.devices.retain(|known| !known.is_of(rates));
        cache.devices.push(rates.clone());
        let write = || -> std::io::Result<()> {
            let folder = path.parent().unwrap_or(Path::new("."));
            std::fs::create_dir_all(folder)?;
            let new = folder.join(format!(".measured.{}.json", std::process::id()));
            let text = serde_json::to_vec_pretty(&cache)?;
            let mut file = std::fs::File::create(&new)?;
            let written = file.write_all(&text).and_then(|()| file.sync_all());
            written.and_then(|()| std::fs::rename(&new, path)).inspect_err(|_| {
                // What was begun is of no use to anyone.
                let _ = std::fs::remove_file(&new);
            })
        };
        write().map_err(|source| Error::Io { path: path.to_owned(), source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::TypeRates;

    /// A damaged or foreign file must not stop anything, and what was measured must be found again, for the same driver only.
    #[test]
    fn the_cache_survives_damage() {
        let folder = std::env::temp_dir().join(format!("tegula-measure-{}", std::process::id()));
        let path = folder.join("measured.json");
        let rates = |driver: &str, rate| DeviceRates {
            backend: "b".into(),
            backend_version: "1".into(),
            name: "n".into(),
            driver: driver.into(),
            uuid: None,
            pci: None,
            types: vec![TypeRates { device_read: Some(rate), ..TypeRates::default() }],
        };
        Cache::add_to(&path, &rates("1", 5)).unwrap();
        Cache::add_to(&path, &rates("2", 6)).unwrap();
        Cache::add_to(&path, &rates("1", 7)).unwrap();
        let cache = Cache::read_from(&path);
        assert_eq!(cache.devices, [rates("2", 6), rates("1", 7)]);
        for damage in ["", "{", "[]", r#"{"version": 99, "devices": []}"#, "\u{0}"] {
            std::fs::write(&path, damage).unwrap();
            assert!(Cache::read_from(&path).devices.is_empty(), "{damage:?}");
        }
        Cache::add_to(&path, &rates("3", 8)).unwrap();
        assert_eq!(Cache::read_from(&path).devices, [rates("3", 8)]);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "nothing is left lying about");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
