//! What a backend says when it cannot.

use tegula_abi::{ErrorRecord, Status, error_has};

/// Result of everything a backend does.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure with the numbers that explain it.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// What kind of failure.
    pub status: Status,
    /// What happened, for people: what was asked, what is allowed.
    pub message: String,
    /// Bytes asked for.
    pub asked: Option<u64>,
    /// Bytes that would have been allowed.
    pub limit: Option<u64>,
    /// Bytes free at that moment.
    pub free: Option<u64>,
    /// The driver's own code.
    pub native: Option<i64>,
}

impl Error {
    /// A failure without numbers.
    pub fn new(status: Status, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), asked: None, limit: None, free: None, native: None }
    }

    /// This backend cannot do it.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(Status::UNSUPPORTED, message)
    }

    /// The host broke the contract.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Status::INVALID_ARGUMENT, message)
    }

    /// No such device, heap or buffer type.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(Status::NOT_FOUND, message)
    }

    /// More than `limit` in one piece.
    pub fn too_big(what: &str, asked: u64, limit: u64) -> Self {
        let message = format!("{what}: {asked} bytes in one piece, {limit} are possible");
        Self { asked: Some(asked), limit: Some(limit), ..Self::new(Status::TOO_BIG, message) }
    }

    /// The memory is not there.
    pub fn out_of_memory(what: &str, asked: u64, free: Option<u64>) -> Self {
        let left =
            free.map_or("an unknown amount is free".into(), |free| format!("{free} are free"));
        let message = format!("{what}: {asked} bytes asked, {left}");
        Self { asked: Some(asked), free, ..Self::new(Status::OUT_OF_MEMORY, message) }
    }

    /// The driver failed with its own code.
    pub fn driver(native: i64, message: impl Into<String>) -> Self {
        Self { native: Some(native), ..Self::new(Status::DRIVER, message) }
    }

    /// Fills the caller's record.
    ///
    /// # Safety
    /// `record` is null or a valid record whose `message` is null or holds `message_cap` bytes.
    pub(crate) unsafe fn store(&self, record: *mut ErrorRecord) {
        // SAFETY: valid or null by the caller's word; a copy is read.
        let Some(mut out) = (unsafe { tegula_abi::read_sized(record) }) else { return };
        let mut has = 0;
        let mut number = |value: Option<u64>, bit: u32| {
            has |= if value.is_some() { bit } else { 0 };
            value.unwrap_or(0)
        };
        out.asked = number(self.asked, error_has::ASKED);
        out.limit = number(self.limit, error_has::LIMIT);
        out.free = number(self.free, error_has::FREE);
        out.native_code = self.native.unwrap_or(0);
        out.has = has | if self.native.is_some() { error_has::NATIVE } else { 0 };
        out.status = self.status;
        let mut len = self.message.len().min(out.message_cap);
        while !self.message.is_char_boundary(len) {
            len -= 1;
        }
        out.message_len = if out.message.is_null() { 0 } else { len };
        // SAFETY: `message` holds `message_cap` bytes, `len` is at most that, and the text is no part of the caller's memory.
        unsafe {
            if !out.message.is_null() {
                std::ptr::copy_nonoverlapping(self.message.as_ptr(), out.message, len);
            }
            tegula_abi::write_sized(record, &out);
        }
    }
}

impl From<tegula_program::ProgramError> for Error {
    fn from(error: tegula_program::ProgramError) -> Self {
        Self::new(Status::UNSUPPORTED, error.to_string())
    }
}

impl From<tegula_quant::LayoutError> for Error {
    fn from(error: tegula_quant::LayoutError) -> Self {
        Self::invalid(error.to_string())
    }
}
