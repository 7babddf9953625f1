//! A plugin's shared object, opened.
//!
//! `RTLD_NOW`, so that a missing symbol is an error here and not a dead process at its first call; `RTLD_LOCAL`, so that nothing
//! of one plugin resolves to another's symbols. Dropping it unloads the file.
//!
//! The dynamic linker knows libraries by name: a file that is replaced while an earlier version of it is mapped is opened as
//! that earlier version, until the last handle to it is dropped.

use crate::error::{SkipReason, one_line};
use libloading::os::unix::{Library as Dl, RTLD_LOCAL, RTLD_NOW};
use std::error::Error as _;
use std::path::Path;

/// An opened shared object.
#[derive(Debug)]
pub(crate) struct Library(Dl);

impl Library {
    /// Opens a file that [`crate::elf::inspect`] found whole. `needed` are the libraries it names, for the message.
    pub(crate) fn open(path: &Path, needed: &[String]) -> Result<Self, SkipReason> {
        // SAFETY: this runs the library's constructors, which is what trusting its folder means (see `search`); it
        // was looked at before, exports our entry symbol, and its contract is to do nothing process-wide on loading.
        unsafe { Dl::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map(Self).map_err(|e| {
            // The dynamic linker's words are in the source; the error itself only says that it failed.
            let message = e.source().map_or_else(|| e.to_string(), ToString::to_string);
            refusal(&message, needed)
        })
    }

    /// The address of an exported symbol, as a value of the function pointer type `T`.
    ///
    /// # Safety
    /// The symbol, if it is there, is a function of type `T`. The pointer must not be called after `self` is dropped.
    pub(crate) unsafe fn function<T: Copy>(&self, name: &str) -> Option<T> {
        // SAFETY: the caller vouches for the type.
        unsafe { self.0.get::<T>(name) }.ok().map(|symbol| *symbol)
    }
}

/// Tells a missing dependency, which a user can install, from everything else.
fn refusal(message: &str, needed: &[String]) -> SkipReason {
    let missing = message
        .split_once(": cannot open shared object file")
        .map(|(library, _)| library)
        .filter(|library| needed.iter().any(|n| n == library) || !library.contains('/'));
    match missing {
        Some(library) => SkipReason::MissingLibrary { library: library.to_owned() },
        None => SkipReason::Open { message: one_line(message.as_bytes()) },
    }
}
