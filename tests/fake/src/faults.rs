//! Which call goes wrong, and the going wrong itself.

use crate::config::{Fault, FaultKind, MIB, Point, Wrong};
use crate::failure::{Failure, Numbers, Record, Result};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tegula_abi::Status;

/// What is left to do for a call that was struck, or not.
#[derive(Debug, Clone)]
pub(crate) enum Effect {
    /// Nothing: the call goes on.
    Pass,
    /// It says OK and does nothing.
    Null,
    /// It goes on, and its outputs are spoilt.
    Wrong(Wrong),
    /// It goes on, and the wait for it fails.
    Defer(Failure),
}

/// The faults of an open backend, each with the number of calls it was asked about.
#[derive(Debug)]
pub(crate) struct Faults(Vec<(Fault, AtomicU64)>);

impl Faults {
    pub(crate) fn new(faults: &[Fault]) -> Self {
        Self(faults.iter().map(|fault| (fault.clone(), AtomicU64::new(0))).collect())
    }

    /// Counts a call of `bytes` bytes and lets go wrong what has to. `Err` is the call's failure.
    pub(crate) fn strike(&self, at: Point, device: Option<u32>, bytes: u64) -> Result<Effect> {
        let mut struck = None;
        for (fault, calls) in &self.0 {
            let is_meant = fault.at == at && (fault.device.is_none() || fault.device == device);
            if is_meant {
                let n = calls.fetch_add(1, Ordering::Relaxed) + 1;
                struck = struck.or(is_struck(fault, n).then_some(fault));
            }
        }
        struck.map_or(Ok(Effect::Pass), |fault| happen(fault, bytes))
    }
}

/// Whether a fault strikes call `n`, from 1.
pub(crate) fn is_struck(fault: &Fault, n: u64) -> bool {
    n >= fault.nth && (fault.count == 0 || n - fault.nth < fault.count)
}

/// Lets a fault happen.
pub(crate) fn happen(fault: &Fault, bytes: u64) -> Result<Effect> {
    let failure = match &fault.kind {
        FaultKind::Null => return Ok(Effect::Null),
        FaultKind::WrongResult { how } => return Ok(Effect::Wrong(*how)),
        FaultKind::Hang { seconds } => {
            sleep(seconds * 1000.0);
            return Ok(Effect::Pass);
        }
        FaultKind::Slow { ms, ms_per_mib } => {
            sleep(ms + milliseconds(*ms_per_mib, bytes));
            return Ok(Effect::Pass);
        }
        FaultKind::Crash => crash(),
        FaultKind::Abort => std::process::abort(),
        // SAFETY: ends the process as a driver's library would, with its handlers; that is the fault.
        FaultKind::Exit { code } => unsafe { libc::exit(*code) },
        FaultKind::Panic => panic_now(),
        FaultKind::Error { status, native_code, message } => {
            let message = message.clone().unwrap_or_else(|| format!("a fault at {:?}", fault.at));
            let numbers = Numbers { message, native: *native_code, ..Numbers::default() };
            Failure::with(status.status()?, numbers)
        }
        FaultKind::NoErrorText { status } => {
            Failure { status: status.status()?, record: Record::Untouched }
        }
        FaultKind::BadText { status } => Failure { status: status.status()?, record: Record::Bad },
        FaultKind::DeviceLost => Failure::new(Status::DEVICE_LOST, "the fake device is gone"),
    };
    if fault.deferred { Ok(Effect::Defer(failure)) } else { Err(failure) }
}

pub(crate) fn milliseconds(ms_per_mib: f64, bytes: u64) -> f64 {
    ms_per_mib * bytes as f64 / MIB as f64
}

pub(crate) fn sleep(ms: f64) {
    if ms > 0.0 {
        std::thread::sleep(Duration::try_from_secs_f64(ms / 1000.0).unwrap_or(Duration::MAX));
    }
}

#[expect(clippy::panic, reason = "a panic of a plugin is the fault that was asked for")]
fn panic_now() -> ! {
    panic!("the fake was asked to panic")
}

/// Dies of a write to a page that may not be written: a true fault of the hardware, which a handler sees as such.
fn crash() -> ! {
    // SAFETY: a fresh page without any rights; writing to it is the end of the process, as asked for.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let page = libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_NONE, flags, -1, 0);
        page.cast::<u8>().write_volatile(1);
    }
    std::process::abort()
}
