//! Typed failures: of a file that did not become a backend, and of a call to a device.

use crate::elf::ElfError;
use crate::probe::ProbeFailure;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use tegula_abi::{self as abi, Status};

/// Why a file or folder gave no backend.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SkipReason {
    /// A library whose name fits but that does not export the entry symbol. Nothing is wrong with it.
    #[error("not a plugin: it does not export {}", abi::ENTRY_SYMBOL)]
    NotPlugin,
    /// An entry of the search path that is not searched.
    #[error("folder not searched: {why}")]
    Folder {
        /// What is wrong with it.
        why: String,
    },
    /// The file could not be read.
    #[error("cannot be read: {0}; check its permissions")]
    Unreadable(#[source] std::io::Error),
    /// The file is no whole shared object of this machine.
    #[error(transparent)]
    Elf(#[from] ElfError),
    /// A library that the plugin needs is not installed.
    #[error(
        "needs {library}, which was not found; install it, or add its folder to LD_LIBRARY_PATH"
    )]
    MissingLibrary {
        /// The missing library, as the plugin names it.
        library: String,
    },
    /// It did not survive being tried in a process of its own.
    #[error(transparent)]
    Probe(#[from] ProbeFailure),
    /// The dynamic linker refused the file.
    #[error("cannot be opened: {message}")]
    Open {
        /// The dynamic linker's words.
        message: String,
    },
    /// The same file was already taken under another name.
    #[error("the same file as {}", first.display())]
    SameFile {
        /// The name under which it was taken.
        first: PathBuf,
    },
    /// A backend with the same id was found before.
    #[error("a second backend {id:?}; {} was found first and is used", first.display())]
    Duplicate {
        /// The id that both have.
        id: String,
        /// The file that is used.
        first: PathBuf,
    },
    /// No revision of the boundary is common.
    #[error(
        "speaks revisions {}..={} of the backend interface, this core {}..={}; install a plugin built for this version of Tegula",
        plugin.0, plugin.1, host.0, host.1
    )]
    Revision {
        /// The plugin's oldest and newest revision.
        plugin: (u32, u32),
        /// The core's.
        host: (u32, u32),
    },
    /// The plugin's compiler laid the tables out otherwise, under the same revision.
    #[error(
        "its tables differ from this core's although the revision is the same; rebuild the plugin: {difference}"
    )]
    Layout {
        /// What differs.
        difference: String,
    },
    /// A table without a function that every backend has.
    #[error("{table} has no {function}, which every backend must have")]
    MissingFunction {
        /// Which table.
        table: &'static str,
        /// Which function.
        function: &'static str,
    },
    /// The negotiation was answered with something that makes no sense.
    #[error("broken plugin: {what}")]
    BadAnswer {
        /// What makes no sense.
        what: String,
    },
    /// The negotiation failed.
    #[error("the plugin's entry failed: {status}")]
    Entry {
        /// What it returned.
        status: Status,
    },
    /// The backend could not be opened: its driver is missing or failed.
    #[error("{0}")]
    Backend(#[source] DeviceError),
}

/// What kind of failure a call to a device met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceErrorKind {
    /// The call broke the contract: a bug in the core, or a range outside a buffer.
    InvalidArgument,
    /// The backend cannot do this.
    Unsupported,
    /// More than the device's limit in one piece.
    TooBig,
    /// Within the limits, but the memory is not there.
    OutOfMemory,
    /// The device is gone, or panicked before and is not called again.
    DeviceLost,
    /// The driver failed.
    Driver,
    /// The plugin panicked and caught it.
    Panic,
    /// The wait ended before the fence was reached.
    Timeout,
    /// No such device, heap or buffer type.
    NotFound,
    /// The plugin's answer breaks the contract.
    BadAnswer,
    /// A code that this core does not know.
    Unknown(i32),
}

impl DeviceErrorKind {
    fn of(status: Status) -> Self {
        match status {
            Status::INVALID_ARGUMENT => Self::InvalidArgument,
            Status::UNSUPPORTED => Self::Unsupported,
            Status::TOO_BIG => Self::TooBig,
            Status::OUT_OF_MEMORY => Self::OutOfMemory,
            Status::DEVICE_LOST => Self::DeviceLost,
            Status::DRIVER => Self::Driver,
            Status::PANIC => Self::Panic,
            Status::TIMEOUT => Self::Timeout,
            Status::NOT_FOUND => Self::NotFound,
            // The core states capacities that it was told; falling short of them is a contradiction.
            Status::SHORT_BUFFER | Status::INCOMPATIBLE => Self::BadAnswer,
            other => Self::Unknown(other.0),
        }
    }

    fn text(self) -> (&'static str, &'static str) {
        match self {
            Self::InvalidArgument => ("invalid argument", ""),
            Self::Unsupported => ("not supported", ""),
            Self::TooBig => ("too big for one allocation", "use smaller chunks"),
            Self::OutOfMemory => {
                ("out of memory", "free memory on the device, or ask for less context")
            }
            Self::DeviceLost => ("device lost", "reload the model, or choose another device"),
            Self::Driver => ("driver error", "check the driver's own log"),
            Self::Panic => (
                "the plugin panicked",
                "the device is not used again; report it to the backend's authors",
            ),
            Self::Timeout => ("timed out", ""),
            Self::NotFound => ("not found", ""),
            Self::BadAnswer => {
                ("the plugin broke the interface's contract", "report it to the backend's authors")
            }
            Self::Unknown(_) => {
                ("a failure this core does not know", "a newer core may explain it")
            }
        }
    }
}

/// A failed call to a backend or device. One line when printed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceError {
    /// What happened.
    pub kind: DeviceErrorKind,
    /// Which function of the boundary, such as `buffer_alloc`.
    pub operation: &'static str,
    /// The device, as `<backend>:<index> <name>`, or the backend alone.
    pub device: Arc<str>,
    /// Bytes that were asked for.
    pub asked: Option<u64>,
    /// Bytes that would have been allowed.
    pub limit: Option<u64>,
    /// Bytes that were free.
    pub free: Option<u64>,
    /// The driver's own code.
    pub native_code: Option<i64>,
    /// The backend's words, without line breaks; may be empty.
    pub message: Box<str>,
}

impl DeviceError {
    /// A failure that the core found itself.
    pub(crate) fn new(
        kind: DeviceErrorKind,
        operation: &'static str,
        device: &Arc<str>,
        message: impl Into<String>,
    ) -> Self {
        Self {
            kind,
            operation,
            device: Arc::clone(device),
            asked: None,
            limit: None,
            free: None,
            native_code: None,
            message: message.into().into_boxed_str(),
        }
    }
}

impl std::error::Error for DeviceError {}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, advice) = self.kind.text();
        write!(f, "{}: {}: {what}", self.device, self.operation)?;
        if let DeviceErrorKind::Unknown(code) = self.kind {
            write!(f, " (status {code})")?;
        }
        if let Some(asked) = self.asked {
            write!(f, ", asked for {asked} bytes")?;
        }
        if let Some(limit) = self.limit {
            write!(f, ", limit {limit} bytes")?;
        }
        if let Some(free) = self.free {
            write!(f, ", free {free} bytes")?;
        }
        if let Some(code) = self.native_code {
            write!(f, ", driver code {code}")?;
        }
        if !self.message.is_empty() {
            write!(f, ": {}", self.message)?;
        }
        if !advice.is_empty() {
            write!(f, "; {advice}")?;
        }
        Ok(())
    }
}

/// Bytes of a backend's message that are kept.
const MESSAGE_CAP: usize = 512;

/// The record that a call may fill, with its text, on the caller's stack.
pub(crate) struct ErrorSlot {
    record: abi::ErrorRecord,
    text: [u8; MESSAGE_CAP],
}

impl ErrorSlot {
    pub(crate) fn new() -> Self {
        Self {
            record: abi::ErrorRecord {
                struct_size: size_of::<abi::ErrorRecord>(),
                status: Status::OK,
                has: 0,
                native_code: 0,
                asked: 0,
                limit: 0,
                free: 0,
                message: std::ptr::null_mut(),
                message_cap: MESSAGE_CAP,
                message_len: 0,
            },
            text: [0; MESSAGE_CAP],
        }
    }

    /// The pointer to pass to the call; valid until `self` moves.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut abi::ErrorRecord {
        self.record.message = self.text.as_mut_ptr();
        &raw mut self.record
    }

    /// The error for a status other than OK. The returned status counts, not the one in the record.
    pub(crate) fn take(
        &self,
        status: Status,
        operation: &'static str,
        device: &Arc<str>,
    ) -> DeviceError {
        let has = |bit: u32| self.record.has & bit != 0;
        let len = self.record.message_len.min(MESSAGE_CAP);
        let message = one_line(self.text.get(..len).unwrap_or_default());
        DeviceError {
            asked: has(abi::error_has::ASKED).then_some(self.record.asked),
            limit: has(abi::error_has::LIMIT).then_some(self.record.limit),
            free: has(abi::error_has::FREE).then_some(self.record.free),
            native_code: has(abi::error_has::NATIVE).then_some(self.record.native_code),
            ..DeviceError::new(DeviceErrorKind::of(status), operation, device, message)
        }
    }
}

/// Text of a plugin for one line of a terminal: no control characters, no broken UTF-8.
pub(crate) fn one_line(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    text.trim().to_owned()
}
