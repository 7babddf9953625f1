//! The configuration: what the backend says it is, what it truly has, and what goes wrong.
//!
//! Unknown fields are refused, so that a test with a mistyped fault does not pass for want of it.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use tegula_abi::{self as abi, FigureSource, FigureState};

/// 2^10 bytes.
pub const KIB: u64 = 1 << 10;
/// 2^20 bytes.
pub const MIB: u64 = 1 << 20;
/// 2^30 bytes.
pub const GIB: u64 = 1 << 30;

/// A value of an open enumeration of the boundary: its name in lower case, or any number.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Code {
    /// The number as it crosses.
    Number(i64),
    /// The constant's name, such as `out_of_memory`.
    Name(String),
}

impl From<&str> for Code {
    fn from(name: &str) -> Self {
        Self::Name(name.to_owned())
    }
}

impl From<i64> for Code {
    fn from(number: i64) -> Self {
        Self::Number(number)
    }
}

impl Code {
    /// The number. `name_of` gives the name of a number; names are looked for among the small numbers, where all constants are.
    pub(crate) fn resolve(&self, name_of: impl Fn(i64) -> Option<String>) -> Result<i64, String> {
        match self {
            Self::Number(number) => Ok(*number),
            Self::Name(name) => (0..64)
                .find(|number| name_of(*number).as_deref() == Some(name))
                .ok_or_else(|| format!("`{name}` is no name of this enumeration")),
        }
    }

    pub(crate) fn status(&self) -> Result<abi::Status, String> {
        let number = self.resolve(|n| abi::Status(n as i32).name())?;
        Ok(abi::Status(number as i32))
    }
}

/// A figure: a number that is known, or `"unknown"`, `"not_applicable"` or `"inner"` (what the inner backend states), or all of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Fig {
    /// Known, from the driver.
    Known(u64),
    /// One of the three words.
    Word(String),
    /// Any value, state and source.
    Whole {
        /// The number.
        value: u64,
        /// A [`FigureState`].
        state: Code,
        /// A [`FigureSource`].
        source: Code,
    },
}

impl From<u64> for Fig {
    fn from(value: u64) -> Self {
        Self::Known(value)
    }
}

impl Fig {
    /// Nobody could say.
    pub fn unknown() -> Self {
        Self::Word("unknown".into())
    }

    /// What the inner backend states at this moment.
    pub fn inner() -> Self {
        Self::Word("inner".into())
    }

    /// As it crosses; `inner` is asked for the inner backend's.
    pub(crate) fn resolve(
        &self,
        inner: impl FnOnce() -> Result<abi::Figure, String>,
    ) -> Result<abi::Figure, String> {
        match self {
            Self::Known(value) => Ok(abi::Figure::known(*value, FigureSource::DRIVER)),
            Self::Word(word) => match word.as_str() {
                "unknown" => Ok(abi::Figure::UNKNOWN),
                "not_applicable" => Ok(abi::Figure::NOT_APPLICABLE),
                "inner" => inner(),
                word => Err(format!("`{word}` is no figure")),
            },
            Self::Whole { value, state, source } => Ok(abi::Figure {
                value: *value,
                state: FigureState(state.resolve(|n| FigureState(n as u32).name())? as u32),
                source: FigureSource(source.resolve(|n| FigureSource(n as u32).name())? as u32),
            }),
        }
    }
}

/// The whole of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The backend's id.
    pub id: String,
    /// The plugin's version.
    pub version: String,
    /// One line for people.
    pub description: String,
    /// The plugin to wrap; `libtegula_reference.so` beside this one by default.
    pub inner: Option<PathBuf>,
    /// Oldest and newest revision that it says it serves.
    pub revisions: [u32; 2],
    /// Whether a host without a common revision is told INCOMPATIBLE; if not, it is left to find out.
    pub refuses_revisions: bool,
    /// Bytes by which the stated size of a struct differs from the truth: `plugin`, `backend_table`, `device_table`, `device_info`, `heap_info`,
    /// `buffer_type_info`, `weight_layout`, `executable_memory`. Tables may be stated up to 64 bytes longer.
    pub struct_sizes: BTreeMap<String, i64>,
    /// Functions that the tables lack: `backend.open`, `device.buffer_map`.
    pub missing: Vec<String>,
    /// The devices; if empty, one that states what the inner backend's first does, with rank 1.
    pub devices: Vec<DeviceConfig>,
    /// What goes wrong.
    pub faults: Vec<Fault>,
    /// Where [`crate::Stats`] are written, whenever something is freed or closed.
    pub stats_file: Option<PathBuf>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            id: "fake".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            description: "a backend for tests".into(),
            inner: None,
            revisions: [abi::REVISION_MIN, abi::REVISION],
            refuses_revisions: true,
            struct_sizes: BTreeMap::new(),
            missing: Vec::new(),
            devices: Vec::new(),
            faults: Vec::new(),
            stats_file: None,
        }
    }
}

impl Config {
    /// The size to state for a struct of `truth` bytes.
    pub(crate) fn stated_size(&self, name: &str, truth: usize) -> usize {
        let delta = self.struct_sizes.get(name).copied().unwrap_or(0);
        truth.saturating_add_signed(isize::try_from(delta).unwrap_or(0))
    }
}

/// A device: what it states, and what it has.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DeviceConfig {
    /// Its name.
    pub name: String,
    /// Its vendor's name.
    pub vendor: String,
    /// Driver name and version.
    pub driver: String,
    /// A `DeviceKind`.
    pub kind: Code,
    /// PCI vendor id.
    pub vendor_id: u32,
    /// 32 hexadecimal digits; dashes are skipped.
    pub uuid: Option<String>,
    /// PCI address.
    pub pci: Option<String>,
    /// How willingly `auto` takes it.
    pub rank: u32,
    /// Its heaps.
    pub heaps: Vec<HeapConfig>,
    /// Its buffer types.
    pub buffer_types: Vec<BufferTypeConfig>,
    /// The types it advises.
    pub type_for: TypeFor,
    /// Number of heaps that it states, if not the true one.
    pub n_heaps: Option<u32>,
    /// Number of buffer types that it states, if not the true one.
    pub n_buffer_types: Option<u32>,
    /// Ops that it cannot run: names such as `rope`, or codes.
    pub unsupported_ops: Vec<Code>,
    /// The layout it wants weights in.
    pub weight_layout: LayoutConfig,
    /// Least alignment of a weight's tile; on top of the layout's.
    pub weight_alignment: u64,
    /// Bytes that it can truly give, over all heaps.
    pub budget_bytes: Option<u64>,
}

impl Default for DeviceConfig {
    fn default() -> Self {
        Self {
            name: "fake device".into(),
            vendor: "Tegula".into(),
            driver: "fake 1.0".into(),
            kind: "discrete".into(),
            vendor_id: 0,
            uuid: None,
            pci: None,
            rank: 1,
            heaps: Vec::new(),
            buffer_types: Vec::new(),
            type_for: TypeFor::default(),
            n_heaps: None,
            n_buffer_types: None,
            unsupported_ops: Vec::new(),
            weight_layout: LayoutConfig::Native,
            weight_alignment: 1,
            budget_bytes: None,
        }
    }
}

/// Indices of the buffer types that a device advises.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TypeFor {
    /// For weights.
    pub weights: u32,
    /// For the KV cache.
    pub kv: u32,
    /// For scratch.
    pub scratch: u32,
    /// For staging.
    pub staging: u32,
}

/// A heap.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HeapConfig {
    /// A `HeapKind`.
    pub kind: Code,
    /// Its pool; 1 is the host's.
    pub pool: u64,
    /// Bytes in all.
    pub total: Fig,
    /// Bytes free while nothing is allocated.
    pub free: Fig,
    /// Whether the stated free bytes fall with every allocation.
    pub live: bool,
    /// Bytes that it can truly give; as many as it states to be free by default, and no bound if that is not known.
    pub budget: Option<u64>,
}

impl Default for HeapConfig {
    fn default() -> Self {
        Self {
            kind: "device_local".into(),
            pool: 16,
            total: Fig::inner(),
            free: Fig::inner(),
            live: true,
            budget: None,
        }
    }
}

/// A buffer type.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BufferTypeConfig {
    /// Its name.
    pub name: String,
    /// Index of its heap.
    pub heap: u32,
    /// The stated greatest size. A greater allocation is TOO_BIG.
    pub max_size: Fig,
    /// The true greatest size, if it is lower.
    pub real_max_size: Option<u64>,
    /// How an allocation over `real_max_size` fails.
    pub refusal: Refusal,
    /// Alignment of buffers and tiles.
    pub alignment: u64,
    /// Sizes are rounded up to a multiple of this.
    pub granularity: u64,
    /// A `HostAccess`. Mapping is refused unless it is `mapped`.
    pub host_access: Code,
    /// Whether host memory can be imported. If not, importing is refused.
    pub import: bool,
    /// Alignment of imported pointers and sizes.
    pub import_alignment: u64,
    /// Whether it is stated to be pinned.
    pub pinned: bool,
    /// The stated chunk size that works best.
    pub preferred_chunk: Fig,
    /// The stated bytes per second.
    pub read_bandwidth: Fig,
    /// Milliseconds that each MiB of weights in this memory costs a run, and each MiB of a transfer.
    pub slow_ms_per_mib: f64,
}

impl Default for BufferTypeConfig {
    fn default() -> Self {
        Self {
            name: "device_local".into(),
            heap: 0,
            max_size: Fig::inner(),
            real_max_size: None,
            refusal: Refusal::default(),
            alignment: 64,
            granularity: 1,
            host_access: "none".into(),
            import: false,
            import_alignment: 1,
            pinned: false,
            preferred_chunk: Fig::unknown(),
            read_bandwidth: Fig::unknown(),
            slow_ms_per_mib: 0.0,
        }
    }
}

/// How an allocation over the true limit fails.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Refusal {
    /// The status.
    pub status: Code,
    /// The driver's code.
    pub native_code: Option<i64>,
}

impl Default for Refusal {
    fn default() -> Self {
        Self { status: "too_big".into(), native_code: None }
    }
}

/// The layout a device wants weights in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum LayoutConfig {
    /// The inner backend's.
    Native,
    /// Layout 7, for weights that only matmul reads: groups of rows with padding after each, so that neither a mapped file nor bytes that were
    /// written as they are give the right result.
    Grouped {
        /// Rows of a group; a multiple of what the inner backend asks for.
        rows_per_group: u32,
        /// Bytes after each group.
        #[serde(default)]
        pad: u64,
    },
}

/// Where in the boundary something goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "each is the function of the boundary of that name")]
pub enum Point {
    Negotiate,
    Open,
    DeviceCount,
    DeviceInfo,
    HeapInfo,
    BufferTypeInfo,
    DeviceOpen,
    Alloc,
    Import,
    Map,
    WeightLayout,
    Supports,
    Memory,
    Compile,
    QueueCreate,
    Write,
    Read,
    Copy,
    Upload,
    Run,
    Wait,
}

/// Something that goes wrong, once or for some time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// In which function.
    pub at: Point,
    /// The first call that it strikes, from 1; calls are counted for each fault over the calls it is about.
    #[serde(default = "one")]
    pub nth: u64,
    /// Number of calls that it strikes; 0 for all from there on.
    #[serde(default = "one")]
    pub count: u64,
    /// The device it is about; all if absent.
    #[serde(default)]
    pub device: Option<u32>,
    /// For work of a queue: the call itself succeeds, and the wait for it fails.
    #[serde(default)]
    pub deferred: bool,
    /// What happens.
    pub kind: FaultKind,
}

fn one() -> u64 {
    1
}

/// What happens when a fault strikes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FaultKind {
    /// A failure with its record.
    Error {
        /// The status.
        status: Code,
        /// The driver's code.
        #[serde(default)]
        native_code: Option<i64>,
        /// The text; one that names the fault by default.
        #[serde(default)]
        message: Option<String>,
    },
    /// A status without any word: the record stays as it was.
    NoErrorText {
        /// The status.
        status: Code,
    },
    /// A record that lies: text that is not UTF-8, and more bytes of it than there is room for.
    BadText {
        /// The status.
        status: Code,
    },
    /// OK, and nothing done: handles stay null, fences 0, answers empty.
    Null,
    /// Nothing happens for that long; then the call goes on.
    Hang {
        /// How long.
        seconds: f64,
    },
    /// The call goes on late.
    Slow {
        /// Milliseconds for the call.
        #[serde(default)]
        ms: f64,
        /// Milliseconds for each MiB that the call is about.
        #[serde(default)]
        ms_per_mib: f64,
    },
    /// A write to memory that may not be written: SIGSEGV.
    Crash,
    /// SIGABRT.
    Abort,
    /// The process ends, as far as the plugin is concerned.
    Exit {
        /// With this code.
        code: i32,
    },
    /// A panic, caught at the boundary: PANIC.
    Panic,
    /// The run is done, and its outputs are wrong.
    WrongResult {
        /// In which way.
        how: Wrong,
    },
    /// DEVICE_LOST, now and for every later call of the device.
    DeviceLost,
}

impl FaultKind {
    /// A failure with this status and a text that says that it was asked for.
    pub fn error(status: impl Into<Code>) -> Self {
        Self::Error { status: status.into(), native_code: None, message: None }
    }
}

/// In which way outputs are wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wrong {
    /// Every float is not a number.
    Nan,
    /// Every float has the other sign.
    Negated,
    /// Every byte is 0.
    Zero,
}
