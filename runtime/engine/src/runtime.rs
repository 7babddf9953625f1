//! A runtime: the backends found, their devices, and the caps an operator put on them.

use crate::memory::units::parse_size;
use crate::selection::{Candidate, select};
use crate::{Error, Result};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};
use tegula_plugin::{
    Backend, BufferType, Device, DeviceInfo, DeviceOptions, Figure, FigureSource, FigureState,
    Registry, RegistryOptions,
};

/// Caps on what devices state, from `TEGULA_MAX_BUFFER` and `TEGULA_MEMORY_LIMIT` or the caller.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Caps {
    /// No buffer is larger.
    pub max_buffer: Option<u64>,
    /// No heap gives more.
    pub memory_limit: Option<u64>,
}

impl Caps {
    /// Reads the two variables; a value that is no size is an error, not "no cap".
    pub fn from_env() -> Result<Self> {
        Ok(Self {
            max_buffer: size_var("TEGULA_MAX_BUFFER")?,
            memory_limit: size_var("TEGULA_MEMORY_LIMIT")?,
        })
    }

    /// A figure under a cap; marked with the cap's source where it binds or the figure was not known.
    fn apply(cap: Option<u64>, figure: Figure, source: FigureSource) -> Figure {
        match cap {
            Some(cap) if figure.get().is_none_or(|value| value > cap) => Figure::known(cap, source),
            _ => figure,
        }
    }
}

fn size_var(name: &'static str) -> Result<Option<u64>> {
    match std::env::var_os(name) {
        None => Ok(None),
        Some(text) => parse_size(&text.to_string_lossy())
            .map(Some)
            .map_err(|source| Error::Size { name, source }),
    }
}

/// What to start a runtime with.
#[derive(Debug, Default)]
pub struct RuntimeOptions {
    /// Where backends are searched, and the rest of what the loader wants to know.
    pub registry: RegistryOptions,
    /// Caps on what devices state.
    pub caps: Caps,
}

/// A device as the runtime sees it: the backend's statements under the operator's caps.
#[derive(Debug, Clone)]
pub struct DeviceEntry {
    /// The backend it belongs to.
    pub backend: Backend,
    /// What it states.
    pub info: DeviceInfo,
}

impl DeviceEntry {
    /// `cpu:0`, as selectors name it.
    pub fn id(&self) -> String {
        format!("{}:{}", self.backend.id(), self.info.index)
    }

    fn candidate(&self) -> Candidate {
        Candidate {
            backend: self.backend.id().to_owned(),
            index: self.info.index,
            kind: self.info.kind,
            uuid: self.info.uuid.map(format_uuid),
            pci: self.info.pci.clone(),
            name: self.info.name.clone(),
            rank: self.info.rank,
        }
    }

    /// The buffer type at `index`, or an error naming the device.
    pub fn buffer_type(&self, index: u32) -> Result<&BufferType> {
        self.info.buffer_types.get(index as usize).ok_or_else(|| {
            Error::NoDevice(format!(
                "{}: it names buffer type {index}, which it does not have",
                self.id()
            ))
        })
    }
}

/// `0a1b2c3d-...`, the usual form of a UUID.
pub fn format_uuid(uuid: [u8; 16]) -> String {
    let hex: Vec<String> = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let group =
        |range: std::ops::Range<usize>| hex.get(range).map(<[String]>::concat).unwrap_or_default();
    [group(0..4), group(4..6), group(6..8), group(8..10), group(10..16)].join("-")
}

/// The backends found and the devices they have. Cheap to clone; clones share the backends.
#[derive(Debug, Clone)]
pub struct Runtime {
    registry: Arc<Registry>,
    caps: Caps,
    learned: Arc<Mutex<Vec<LearnedLimit>>>,
}

/// A limit found by trying, below the one that a device states.
#[derive(Debug)]
struct LearnedLimit {
    device: String,
    buffer_type: u32,
    limit: u64,
}

impl Runtime {
    /// Finds and opens backends. That none was found is no error here: [`Runtime::open_device`] says so with everything tried.
    pub fn new(options: &RuntimeOptions) -> Self {
        Self {
            registry: Arc::new(Registry::load(&options.registry)),
            caps: options.caps,
            learned: Arc::default(),
        }
    }

    /// What was found and skipped.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// The caps in force.
    pub fn caps(&self) -> Caps {
        self.caps
    }

    /// Every device of every backend, read now; free memory is that of this moment.
    pub fn devices(&self) -> Vec<DeviceEntry> {
        let mut out = Vec::new();
        for backend in &self.registry.backends {
            for device in backend.devices() {
                let mut info = device.clone();
                match backend.heaps(info.index) {
                    Ok(heaps) => info.heaps = heaps,
                    Err(error) => log::warn!("free memory as of the start is used: {error}"),
                }
                self.cap(&mut info);
                out.push(DeviceEntry { backend: backend.clone(), info });
            }
        }
        out
    }

    /// Remembers that a device gives less than it states; later plans of this runtime use the lower limit.
    pub(crate) fn learn(&self, device: &str, buffer_type: u32, limit: u64) {
        let mut learned = self.learned.lock().unwrap_or_else(PoisonError::into_inner);
        learned.retain(|known| known.device != device || known.buffer_type != buffer_type);
        learned.push(LearnedLimit { device: device.to_owned(), buffer_type, limit });
    }

    fn cap(&self, info: &mut DeviceInfo) {
        for heap in &mut info.heaps {
            heap.total = Caps::apply(self.caps.memory_limit, heap.total, FigureSource::OVERRIDE);
            if heap.free.state != FigureState::NOT_APPLICABLE {
                heap.free = Caps::apply(self.caps.memory_limit, heap.free, FigureSource::OVERRIDE);
            }
        }
        let id = info.id();
        let learned = self.learned.lock().unwrap_or_else(PoisonError::into_inner);
        for (index, buffer_type) in (0u32..).zip(&mut info.buffer_types) {
            let limit = learned.iter().find(|l| l.device == id && l.buffer_type == index);
            for (cap, source) in [
                (self.caps.max_buffer, FigureSource::OVERRIDE),
                (self.caps.memory_limit, FigureSource::OVERRIDE),
                (limit.map(|l| l.limit), FigureSource::MEASURED),
            ] {
                buffer_type.max_size = Caps::apply(cap, buffer_type.max_size, source);
            }
            let max_size = buffer_type.max_size.get();
            if buffer_type.preferred_chunk.get().zip(max_size).is_some_and(|(p, max)| p > max) {
                buffer_type.preferred_chunk = buffer_type.max_size;
            }
        }
    }

    /// The devices a selector names, in its order; `None` means `TEGULA_DEVICE`, or `auto` where that is not set.
    pub fn select(&self, selector: Option<&str>) -> Result<Vec<DeviceEntry>> {
        let devices = self.devices();
        if devices.is_empty() {
            return Err(Error::NoDevice(self.registry.describe_empty()));
        }
        let from_env = std::env::var("TEGULA_DEVICE").ok();
        let selector = selector.or(from_env.as_deref()).unwrap_or("auto");
        let candidates: Vec<_> = devices.iter().map(DeviceEntry::candidate).collect();
        let chosen = select(selector, &candidates)?;
        Ok(chosen.into_iter().filter_map(|i| devices.get(i).cloned()).collect())
    }

    /// Opens a device for work. `n_threads` 0 leaves the number of host threads to the backend.
    pub fn open_device(&self, entry: &DeviceEntry, n_threads: u32) -> Result<Device> {
        let options = DeviceOptions { n_threads: NonZeroU32::new(n_threads) };
        Ok(Device::open(&entry.backend, entry.info.index, options)?)
    }
}
