//! Failures on their way to the host, and the guard around every function of the tables.

use std::panic::{AssertUnwindSafe, catch_unwind};
use tegula_abi::{self as abi, ErrorRecord, Status, error_has};

pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

/// A failure.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    pub(crate) status: Status,
    pub(crate) record: Record,
}

/// What the caller's record becomes.
#[derive(Debug, Clone)]
pub(crate) enum Record {
    /// It stays: the inner backend filled it, or nobody does.
    Untouched,
    /// It is filled.
    Filled(Box<Numbers>),
    /// It is filled with lies.
    Bad,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Numbers {
    pub(crate) message: String,
    pub(crate) asked: Option<u64>,
    pub(crate) limit: Option<u64>,
    pub(crate) free: Option<u64>,
    pub(crate) native: Option<i64>,
}

impl Failure {
    pub(crate) fn new(status: Status, message: impl Into<String>) -> Self {
        Self::with(status, Numbers { message: message.into(), ..Numbers::default() })
    }

    pub(crate) fn with(status: Status, numbers: Numbers) -> Self {
        Self { status, record: Record::Filled(Box::new(numbers)) }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(Status::INVALID_ARGUMENT, message)
    }

    /// # Safety
    /// `record` is null or a valid record whose `message` is null or holds `message_cap` bytes.
    unsafe fn store(&self, record: *mut ErrorRecord) {
        // SAFETY: valid or null by the caller's word; a copy is read.
        let Some(mut out) = (unsafe { abi::read_sized(record) }) else { return };
        let (text, len) = match &self.record {
            Record::Untouched => return,
            Record::Filled(numbers) => {
                let number = |value: Option<u64>, bit| {
                    (value.unwrap_or(0), if value.is_some() { bit } else { 0 })
                };
                let (asked, limit, free) = (
                    number(numbers.asked, error_has::ASKED),
                    number(numbers.limit, error_has::LIMIT),
                    number(numbers.free, error_has::FREE),
                );
                let native = if numbers.native.is_some() { error_has::NATIVE } else { 0 };
                (out.asked, out.limit, out.free) = (asked.0, limit.0, free.0);
                out.native_code = numbers.native.unwrap_or(0);
                out.has = asked.1 | limit.1 | free.1 | native;
                let len = numbers.message.floor_char_boundary(out.message_cap);
                (numbers.message.as_bytes(), len)
            }
            Record::Bad => (&[0xff, 0xfe, b'\n', 0x1b][..], usize::MAX),
        };
        out.status = self.status;
        out.message_len = if out.message.is_null() { 0 } else { len };
        // SAFETY: `message` holds `message_cap` bytes, at most that many are written, and the text is no part of the caller's memory.
        unsafe {
            if !out.message.is_null() {
                let n = text.len().min(out.message_cap).min(len);
                std::ptr::copy_nonoverlapping(text.as_ptr(), out.message, n);
            }
            abi::write_sized(record, &out);
        }
    }
}

impl From<String> for Failure {
    fn from(message: String) -> Self {
        Self::invalid(format!("the configuration of the fake: {message}"))
    }
}

/// Runs `f`; an error or a panic becomes a status and fills the caller's record.
///
/// # Safety
/// `err` is null or a valid record.
pub(crate) unsafe fn guard(err: *mut ErrorRecord, f: impl FnOnce() -> Result<()>) -> Status {
    let failure = match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(())) => return Status::OK,
        Ok(Err(failure)) => failure,
        Err(_) => Failure::new(Status::PANIC, "the fake panicked"),
    };
    // SAFETY: valid or null by the caller's word.
    unsafe { failure.store(err) };
    failure.status
}

/// The result of a call to the inner backend, which filled the caller's record itself.
pub(crate) fn forwarded(status: Status) -> Result<()> {
    if status == Status::OK { Ok(()) } else { Err(Failure { status, record: Record::Untouched }) }
}

/// A function that the inner backend has to have for this call.
pub(crate) fn need<F>(function: Option<F>) -> Result<F> {
    function.ok_or_else(|| Failure::new(Status::UNSUPPORTED, "the inner backend does not offer it"))
}

/// # Safety
/// `ptr` is null or a valid struct of the other side.
pub(crate) unsafe fn sized<T: abi::Crossing>(ptr: *const T) -> Result<T> {
    // SAFETY: valid or null by the caller's word.
    unsafe { abi::read_sized(ptr) }.ok_or_else(|| {
        Failure::invalid(format!("no {}, or one too short", std::any::type_name::<T>()))
    })
}

/// # Safety
/// `out` is null or writable.
pub(crate) unsafe fn put<T>(out: *mut T, value: T) -> Result<()> {
    if out.is_null() {
        return Err(Failure::invalid("nowhere to put the result"));
    }
    // SAFETY: writable by the caller's word.
    unsafe { out.write(value) };
    Ok(())
}

/// Fills the caller's struct and states `size` as filled, which may be a lie.
///
/// # Safety
/// `out` is null or a valid struct of the host.
pub(crate) unsafe fn put_sized<T: abi::Crossing>(
    out: *mut T,
    value: &T,
    size: usize,
) -> Result<()> {
    // SAFETY: valid or null by the caller's word; a Crossing starts with its size.
    unsafe {
        if !abi::write_sized(out, value) {
            return Err(Failure::invalid("a struct too short"));
        }
        out.cast::<usize>().write(size);
    }
    Ok(())
}

/// # Safety
/// `ptr` is null or points to a T that lives for `'a`.
pub(crate) unsafe fn object<'a, T, H>(ptr: *const H) -> Result<&'a T> {
    // SAFETY: null or live by the caller's word.
    unsafe { ptr.cast::<T>().as_ref() }.ok_or_else(|| Failure::invalid("a null handle"))
}
