//! For tests: a configuration in a few lines, installed beside its own copy of the plugin.

use crate::{BufferTypeConfig, Config, DeviceConfig, Fault, Fig, HeapConfig, Stats, TypeFor};
use std::io;
use std::path::{Path, PathBuf};
use tegula_abi::POOL_HOST;

/// The file of this plugin, as cargo builds it.
const OWN_FILE: &str = "libtest_tegula_fake.so";
/// The plugin that is wrapped by default.
const INNER_FILE: &str = "libtegula_reference.so";

/// A configuration on its way to a plugin.
#[derive(Debug, Clone, Default)]
pub struct Fake {
    /// What it says so far.
    pub config: Config,
}

/// A copy of the plugin with its configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// `libtegula_<id>.so`.
    pub plugin: PathBuf,
    /// Where it writes what is alive.
    pub stats_file: PathBuf,
}

impl Installed {
    /// What was alive when something was freed last.
    ///
    /// # Errors
    /// No such file: nothing was freed or closed yet.
    pub fn stats(&self) -> io::Result<Stats> {
        serde_json::from_slice(&std::fs::read(&self.stats_file)?).map_err(io::Error::other)
    }
}

impl Fake {
    /// A plain backend of id `fake`.
    pub fn new() -> Self {
        Self::default()
    }

    /// Under another id.
    #[must_use]
    pub fn id(mut self, id: &str) -> Self {
        self.config.id = id.to_owned();
        self
    }

    /// Around another plugin than the reference backend's.
    #[must_use]
    pub fn inner(mut self, plugin: &Path) -> Self {
        self.config.inner = Some(plugin.to_owned());
        self
    }

    /// With one more device.
    #[must_use]
    pub fn device(mut self, device: DeviceConfig) -> Self {
        self.config.devices.push(device);
        self
    }

    /// With one more fault.
    #[must_use]
    pub fn fault(mut self, fault: Fault) -> Self {
        self.config.faults.push(fault);
        self
    }

    /// With any other change.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Config)) -> Self {
        change(&mut self.config);
        self
    }

    /// Writes `libtegula_<id>.so` and its configuration to `dir`. Where the file is there already, only the configuration changes, so that
    /// the next open of a plugin that may be mapped sees it.
    ///
    /// # Errors
    /// The system's, and that a plugin is not built.
    pub fn install(&self, dir: &Path) -> io::Result<Installed> {
        std::fs::create_dir_all(dir)?;
        let plugin = dir.join(format!("libtegula_{}.so", self.config.id));
        let mut config = self.config.clone();
        let stats_file =
            config.stats_file.get_or_insert_with(|| dir.join(format!("{}.stats.json", config.id)));
        let stats_file = stats_file.clone();
        if config.inner.is_none() {
            config.inner = Some(reference_plugin()?);
        }
        if !plugin.exists() {
            std::fs::copy(built_plugin(OWN_FILE)?, &plugin)?;
        }
        let text = serde_json::to_string_pretty(&config).map_err(io::Error::other)?;
        std::fs::write(config_beside(&plugin), text)?;
        Ok(Installed { plugin, stats_file })
    }
}

/// The configuration that belongs to a plugin's file.
pub(crate) fn config_beside(plugin: &Path) -> PathBuf {
    let mut name = plugin.as_os_str().to_owned();
    name.push(".json");
    name.into()
}

/// The reference backend's plugin.
///
/// # Errors
/// NotFound if it is not built.
pub fn reference_plugin() -> io::Result<PathBuf> {
    built_plugin(INNER_FILE)
}

/// A library that cargo built, from the folder of the running test: the plain name there is the newest.
///
/// # Errors
/// NotFound if it is not built.
pub fn built_plugin(file: &str) -> io::Result<PathBuf> {
    let program = std::env::current_exe()?;
    let folders = program.ancestors().skip(1).take(2);
    let found = folders.map(|dir| dir.join(file)).find(|path| path.is_file());
    found.ok_or_else(|| {
        let message = format!("{file} is not beside {}; cargo build makes it", program.display());
        io::Error::new(io::ErrorKind::NotFound, message)
    })
}

impl DeviceConfig {
    /// A card with memory of its own, which the host cannot map, and a mapped type of host memory for staging.
    pub fn gpu(name: &str, bytes: u64) -> Self {
        let local = HeapConfig { total: bytes.into(), free: bytes.into(), ..Default::default() };
        let host = HeapConfig { kind: "host".into(), pool: POOL_HOST, ..Default::default() };
        let device_local = BufferTypeConfig { max_size: bytes.into(), ..Default::default() };
        let staging = BufferTypeConfig {
            name: "staging".into(),
            heap: 1,
            host_access: "mapped".into(),
            ..Default::default()
        };
        Self {
            name: name.into(),
            heaps: vec![local, host],
            buffer_types: vec![device_local, staging],
            type_for: TypeFor { staging: 1, ..TypeFor::default() },
            ..Self::default()
        }
    }

    /// A device in the host's memory, mapped and importing, of which it states `bytes`.
    pub fn host(name: &str, bytes: u64) -> Self {
        let heap = HeapConfig {
            kind: "host".into(),
            pool: POOL_HOST,
            total: bytes.into(),
            free: bytes.into(),
            ..Default::default()
        };
        let host = BufferTypeConfig {
            name: "host".into(),
            max_size: bytes.into(),
            host_access: "mapped".into(),
            import: true,
            ..Default::default()
        };
        Self {
            name: name.into(),
            kind: "cpu".into(),
            heaps: vec![heap],
            buffer_types: vec![host],
            ..Self::default()
        }
    }

    /// As [`Self::host`], of a GPU that shares the host's memory and imports nothing.
    pub fn integrated(name: &str, bytes: u64) -> Self {
        let mut device = Self { kind: "integrated".into(), ..Self::host(name, bytes) };
        device.buffer_types[0].import = false;
        device
    }

    /// With this greatest buffer, stated and true, in its first buffer type.
    #[must_use]
    pub fn max_size(self, bytes: impl Into<Fig>) -> Self {
        self.buffer_type(0, |buffer_type| buffer_type.max_size = bytes.into())
    }

    /// With a change to one of its buffer types.
    #[must_use]
    pub fn buffer_type(mut self, index: usize, change: impl FnOnce(&mut BufferTypeConfig)) -> Self {
        if let Some(buffer_type) = self.buffer_types.get_mut(index) {
            change(buffer_type);
        }
        self
    }

    /// With a change to one of its heaps.
    #[must_use]
    pub fn heap(mut self, index: usize, change: impl FnOnce(&mut HeapConfig)) -> Self {
        if let Some(heap) = self.heaps.get_mut(index) {
            change(heap);
        }
        self
    }

    /// With any other change.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

impl Fault {
    /// Strikes the first call.
    pub fn new(at: crate::Point, kind: crate::FaultKind) -> Self {
        Self { at, nth: 1, count: 1, device: None, deferred: false, kind }
    }

    /// Strikes call `n`, from 1.
    #[must_use]
    pub fn nth(self, n: u64) -> Self {
        Self { nth: n, ..self }
    }

    /// Strikes every call from the first one on.
    #[must_use]
    pub fn always(self) -> Self {
        Self { count: 0, ..self }
    }

    /// Strikes calls about one device.
    #[must_use]
    pub fn device(self, index: u32) -> Self {
        Self { device: Some(index), ..self }
    }

    /// Shows at the wait for the work.
    #[must_use]
    pub fn deferred(self) -> Self {
        Self { deferred: true, ..self }
    }
}
