//! The core inside of a shared library, as a host has it that opens and closes it at run time. Started by `exit_host`.

#![expect(unsafe_code, reason = "a function for a host that opens this library")]
#![allow(
    clippy::unwrap_used,
    missing_docs,
    unreachable_pub,
    reason = "a program for tests: what cannot go on fails"
)]

#[path = "exit/scenario.rs"]
mod scenario;

use std::ffi::{CStr, c_char};
use std::path::Path;

/// 0 if it was done.
///
/// # Safety
/// Three texts that end in NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn exit_core_run(
    plugin: *const c_char,
    model: *const c_char,
    name: *const c_char,
) -> i32 {
    let run = || {
        // SAFETY: by the caller's word.
        let [plugin, model, name] =
            [plugin, model, name].map(|text| unsafe { CStr::from_ptr(text) });
        let text = |text: &CStr| text.to_str().unwrap().to_owned();
        scenario::run(Path::new(&text(plugin)), Path::new(&text(model)), &text(name))
    };
    i32::from(!std::panic::catch_unwind(run).unwrap_or(false))
}
