//! A runtime: the backends found, their devices, and the caps an operator put on them.

use crate::isolation::IsolationOptions;
use crate::measure;
use crate::memory::units::parse_size;
use crate::promises::Promises;
use crate::selection::{Candidate, Verdict, explain, named, select};
use crate::{Error, Result};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};
use tegula_plugin::{
    Backend, BufferType, Device, DeviceInfo, DeviceOptions, Figure, FigureSource, FigureState,
    Gate, Registry, RegistryOptions, SearchPath,
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

/// A cap on what one device states. It counts instead of the [`Caps`] that hold for all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceCap {
    /// A device selector of one item; `None` is every device.
    pub device: Option<String>,
    /// What is capped.
    pub limit: Limit,
    /// Bytes; more than 0.
    pub bytes: u64,
}

/// What a [`DeviceCap`] caps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// The size of one buffer.
    Buffer,
    /// What each heap gives.
    Memory,
}

impl DeviceCap {
    /// Reads `[DEVICE=]SIZE`, such as `2GiB` or `vulkan:0=512MiB`; `name` is the option, for errors.
    pub fn parse(name: &'static str, limit: Limit, text: &str) -> Result<Self> {
        let (device, size) = match text.rsplit_once('=') {
            Some((device, size)) => (Some(device.trim().to_owned()), size),
            None => (None, text),
        };
        if device.as_deref() == Some("") {
            return Err(Error::Option {
                name,
                why: format!("`{text}` has no device before the ="),
            });
        }
        let bytes = parse_size(size).map_err(|source| Error::Size { name, source })?;
        Ok(Self { device, limit, bytes })
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
    /// Whether plugins are tried in a child process before they are opened in this one.
    pub isolation: IsolationOptions,
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

    /// How it is named tomorrow, whatever else is plugged in by then: by UUID or PCI address where one is known.
    pub fn stable_id(&self) -> String {
        self.candidate().stable_id()
    }

    fn candidate(&self) -> Candidate {
        Candidate {
            backend: self.backend.id().to_owned(),
            index: self.info.index,
            kind: self.info.kind,
            uuid: self.info.uuid.map(format_uuid),
            pci: self.info.pci.clone(),
            driver: self.info.driver.clone(),
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
    device_caps: Arc<[DeviceCap]>,
    /// Whether caps replace what a device states even where they are greater: for plans of devices that are not here.
    stand_in: bool,
    learned: Arc<Mutex<Vec<LearnedLimit>>>,
    promises: Promises,
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
        let RegistryOptions { explicit, standard } = &options.registry;
        let gate = options.isolation.gate();
        let registry = Registry::load_through(
            SearchPath::of_process(explicit, *standard),
            gate.as_ref().map(|gate| gate as &dyn Gate),
        );
        if let Some(gate) = gate {
            gate.finish();
        }
        Self {
            registry: Arc::new(registry),
            caps: options.caps,
            device_caps: Arc::default(),
            stand_in: false,
            learned: Arc::default(),
            promises: Promises::default(),
        }
    }

    /// The same runtime under caps of single devices. For each device the last cap that names it counts, else the last one for every
    /// device, else those of [`RuntimeOptions::caps`].
    ///
    /// # Errors
    /// [`Error::Selector`] for a cap that names no device: it would protect nothing.
    pub fn with_device_caps(mut self, caps: &[DeviceCap]) -> Result<Self> {
        let candidates: Vec<_> = self.devices().iter().map(DeviceEntry::candidate).collect();
        for item in caps.iter().filter_map(|cap| cap.device.as_deref()) {
            named(item, &candidates)
                .map_err(|why| crate::selection::fault(item, &why, &candidates))?;
        }
        self.device_caps = caps.into();
        Ok(self)
    }

    /// The same devices, with caps standing in for the figures of a device that is not here. For plans only.
    pub(crate) fn standing_in(&self) -> Self {
        Self { stand_in: true, ..self.clone() }
    }

    /// What was found and skipped.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// The caps in force.
    pub fn caps(&self) -> Caps {
        self.caps
    }

    /// Every device of every backend, read now; free memory is that of this moment, less what models of this runtime were promised, and bandwidths that were once measured are those.
    pub fn devices(&self) -> Vec<DeviceEntry> {
        let mut out: Vec<DeviceEntry> = Vec::new();
        for backend in &self.registry.backends {
            for device in backend.devices() {
                let mut info = device.clone();
                match backend.heaps(info.index) {
                    Ok(heaps) => info.heaps = heaps,
                    Err(error) => log::warn!("free memory as of the start is used: {error}"),
                }
                out.push(DeviceEntry { backend: backend.clone(), info });
            }
        }
        let candidates: Vec<_> = out.iter().map(DeviceEntry::candidate).collect();
        let measured = measure::Cache::read();
        for (index, entry) in out.iter_mut().enumerate() {
            measured.apply(entry);
            let caps = self.caps_of(index, &candidates);
            self.cap(&mut entry.info, caps);
            self.promises.apply(&mut entry.info);
        }
        out
    }

    /// The caps that hold for one device.
    fn caps_of(&self, index: usize, candidates: &[Candidate]) -> Caps {
        let names_it = |cap: &&DeviceCap| match &cap.device {
            None => false,
            Some(item) => named(item, candidates).is_ok_and(|found| found.contains(&index)),
        };
        let last = |limit: Limit| {
            let caps = || self.device_caps.iter().filter(|cap| cap.limit == limit).rev();
            let cap = caps().find(names_it).or_else(|| caps().find(|cap| cap.device.is_none()));
            cap.map(|cap| cap.bytes)
        };
        Caps {
            max_buffer: last(Limit::Buffer).or(self.caps.max_buffer),
            memory_limit: last(Limit::Memory).or(self.caps.memory_limit),
        }
    }

    /// The operator's memory limit that names this device, if there is one: what [`Self::caps_of`] gives for all devices is none.
    pub(crate) fn limit_naming(&self, id: &str) -> Option<u64> {
        if self.device_caps.is_empty() {
            return None;
        }
        let devices = self.devices();
        let candidates: Vec<_> = devices.iter().map(DeviceEntry::candidate).collect();
        let index = devices.iter().position(|entry| entry.id() == id)?;
        let names_it = |cap: &&DeviceCap| {
            let item = cap.device.as_deref().filter(|_| cap.limit == Limit::Memory);
            item.and_then(|item| named(item, &candidates).ok()).is_some_and(|i| i.contains(&index))
        };
        self.device_caps.iter().rev().find(names_it).map(|cap| cap.bytes)
    }

    /// What models of this runtime will still take.
    pub(crate) fn promises(&self) -> &Promises {
        &self.promises
    }

    /// Remembers that a device gives less than it states; later plans of this runtime use the lower limit.
    pub(crate) fn learn(&self, device: &str, buffer_type: u32, limit: u64) {
        let mut learned = self.learned.lock().unwrap_or_else(PoisonError::into_inner);
        learned.retain(|known| known.device != device || known.buffer_type != buffer_type);
        learned.push(LearnedLimit { device: device.to_owned(), buffer_type, limit });
    }

    fn cap(&self, info: &mut DeviceInfo, caps: Caps) {
        let over = FigureSource::OVERRIDE;
        let apply = |cap: Option<u64>, figure: Figure| match cap {
            Some(cap) if self.stand_in => Figure::known(cap, over),
            cap => Caps::apply(cap, figure, over),
        };
        for heap in &mut info.heaps {
            heap.total = apply(caps.memory_limit, heap.total);
            if heap.free.state != FigureState::NOT_APPLICABLE {
                heap.free = apply(caps.memory_limit, heap.free);
            }
        }
        let id = info.id();
        let learned = self.learned.lock().unwrap_or_else(PoisonError::into_inner);
        for (index, buffer_type) in (0u32..).zip(&mut info.buffer_types) {
            buffer_type.max_size =
                apply(caps.max_buffer.or(caps.memory_limit), buffer_type.max_size);
            buffer_type.max_size = Caps::apply(caps.memory_limit, buffer_type.max_size, over);
            let limit = learned.iter().find(|l| l.device == id && l.buffer_type == index);
            let limit = limit.filter(|_| !self.stand_in).map(|l| l.limit);
            buffer_type.max_size = Caps::apply(limit, buffer_type.max_size, FigureSource::MEASURED);
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
        let candidates: Vec<_> = devices.iter().map(DeviceEntry::candidate).collect();
        let chosen = select(&selector_or_default(selector), &candidates)?;
        Ok(chosen.into_iter().filter_map(|i| devices.get(i).cloned()).collect())
    }

    /// The selector that counts, and what it decides on every device, with the reason; `None` as in [`Runtime::select`].
    ///
    /// # Errors
    /// [`Error::Selector`] for a selector that is malformed or names nothing.
    pub fn explain(&self, selector: Option<&str>) -> Result<(String, Vec<(DeviceEntry, Verdict)>)> {
        let selector = selector_or_default(selector);
        let devices = self.devices();
        let candidates: Vec<_> = devices.iter().map(DeviceEntry::candidate).collect();
        let verdicts = explain(&selector, &candidates)?;
        Ok((selector, devices.into_iter().zip(verdicts).collect()))
    }

    /// Measures how fast a device's memory is, and remembers it for later runs of this user, unless caps made the buffers smaller than the
    /// device's own figures would: then caches may have helped.
    ///
    /// # Errors
    /// As [`measure::measure`].
    pub fn measure(&self, entry: &DeviceEntry) -> Result<measure::DeviceRates> {
        let rates = measure::measure(&self.open_device(entry, 0)?, entry)?;
        let is_cap = |figure: Figure| figure.source == FigureSource::OVERRIDE;
        let capped = entry.info.heaps.iter().any(|heap| is_cap(heap.free))
            || entry.info.buffer_types.iter().any(|kind| is_cap(kind.max_size));
        if capped {
            log::warn!("{}: measured under caps, so not remembered", entry.id());
        } else if let Err(error) = measure::Cache::add(&rates) {
            log::warn!("{}: what was measured is not remembered: {error}", entry.id());
        }
        Ok(rates)
    }

    /// Opens a device for work. `n_threads` 0 leaves the number of host threads to the backend.
    pub fn open_device(&self, entry: &DeviceEntry, n_threads: u32) -> Result<Device> {
        let options = DeviceOptions { n_threads: NonZeroU32::new(n_threads) };
        Ok(Device::open(&entry.backend, entry.info.index, options)?)
    }
}

fn selector_or_default(selector: Option<&str>) -> String {
    // Bytes that are no text stay, as characters that no device has: a variable that is set is never passed over.
    let from_env = || Some(std::env::var_os("TEGULA_DEVICE")?.to_string_lossy().into_owned());
    selector.map(str::to_owned).or_else(from_env).unwrap_or_else(|| "auto".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cap for one device must not cap another, nor mean "no cap".
    #[test]
    fn caps_of_devices_are_read_or_refused() {
        let table = [
            ("2GiB", Some((None, 2u64 << 30))),
            ("vulkan:0=512MiB", Some((Some("vulkan:0"), 512 << 20))),
            ("name:*a=b*=1k", Some((Some("name:*a=b*"), 1024))),
            ("=1GiB", None),
            ("cpu=", None),
            ("cpu=much", None),
            ("", None),
        ];
        for (text, expected) in table {
            let cap = DeviceCap::parse("--memory-limit", Limit::Memory, text).ok();
            let got = cap.as_ref().map(|cap| (cap.device.as_deref(), cap.bytes));
            assert_eq!(got, expected, "{text}");
        }
    }

    /// Of several caps the nearest to the device counts: another order would lift a cap that its operator set.
    #[test]
    fn the_nearest_cap_counts() {
        let candidate = |backend: &str| Candidate {
            backend: backend.into(),
            index: 0,
            kind: tegula_plugin::DeviceKind::CPU,
            uuid: None,
            pci: None,
            driver: String::new(),
            name: backend.into(),
            rank: 1,
        };
        let candidates = [candidate("a"), candidate("b")];
        // Caps in the order given, and what holds for `a` and `b` where the environment says 9.
        let table: [(&[&str], [u64; 2]); 6] = [
            (&[], [9, 9]),
            (&["5"], [5, 5]),
            (&["a=7"], [7, 9]),
            (&["a=7", "5"], [7, 5]),
            (&["5", "a=7", "a:0=20"], [20, 5]),
            (&["name:*=3", "6"], [3, 3]),
        ];
        for (caps, expected) in table {
            let registry = RegistryOptions { explicit: Vec::new(), standard: false };
            let from_env = Caps { max_buffer: None, memory_limit: Some(9) };
            let mut runtime = Runtime::new(&RuntimeOptions {
                registry,
                caps: from_env,
                ..RuntimeOptions::default()
            });
            let parse = |text: &&str| DeviceCap::parse("--memory-limit", Limit::Memory, text);
            runtime.device_caps = caps.iter().map(|text| parse(text).unwrap()).collect();
            let got = [0, 1].map(|index| runtime.caps_of(index, &candidates));
            assert_eq!(got.map(|caps| caps.memory_limit), expected.map(Some), "{caps:?}");
            assert!(got.iter().all(|caps| caps.max_buffer.is_none()));
        }
    }
}
