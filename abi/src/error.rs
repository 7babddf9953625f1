//! Status codes and the record that explains them.

use crate::types::open_enum;
use abi_stable::StableAbi;

open_enum! {
    /// What a fallible function returns. 0 is success; everything else is a failure, known or not.
    Status: i32 {
        /// Done.
        OK = 0,
        /// The caller broke the contract; a bug in the core.
        INVALID_ARGUMENT = 1,
        /// The backend cannot do this: an op, a type, an optional function.
        UNSUPPORTED = 2,
        /// More than `limit` in one piece: over `max_size`, or a scratch value larger than a chunk may be.
        TOO_BIG = 3,
        /// Within every stated limit, but the memory is not there.
        OUT_OF_MEMORY = 4,
        /// The device is gone; every handle of it is dead and may only be freed.
        DEVICE_LOST = 5,
        /// The driver failed; `native_code` says how.
        DRIVER = 6,
        /// The plugin panicked and was caught; its state may be inconsistent, so the core stops using the device.
        PANIC = 7,
        /// Host and plugin have no revision in common.
        INCOMPATIBLE = 8,
        /// The wait ended before the fence value was reached.
        TIMEOUT = 9,
        /// No such device, heap, buffer type or extension.
        NOT_FOUND = 10,
        /// The caller's array is too short; the needed length was written.
        SHORT_BUFFER = 11,
    }
}

/// Which of an [`ErrorRecord`]'s numbers are set; a number that is not set means nothing.
pub mod error_has {
    /// `asked` is set.
    pub const ASKED: u32 = 1;
    /// `limit` is set.
    pub const LIMIT: u32 = 2;
    /// `free` is set.
    pub const FREE: u32 = 4;
    /// `native_code` is set.
    pub const NATIVE: u32 = 8;
}

/// The caller's record of a failure. The caller sets `struct_size`, `message` and `message_cap`, the callee the rest.
#[repr(C)]
#[derive(Debug, StableAbi)]
pub struct ErrorRecord {
    /// Set by the caller.
    pub struct_size: usize,
    /// The same status as returned.
    pub status: Status,
    /// Bits of [`error_has`].
    pub has: u32,
    /// The driver's own code (`VkResult`, `cl_int`, `errno`).
    pub native_code: i64,
    /// Bytes asked for.
    pub asked: u64,
    /// Bytes that would have been allowed.
    pub limit: u64,
    /// Bytes free when it failed.
    pub free: u64,
    /// The caller's memory for the text (UTF-8, cut at a character); may be null.
    pub message: *mut u8,
    /// Capacity of `message` in bytes.
    pub message_cap: usize,
    /// Bytes of text written.
    pub message_len: usize,
}
