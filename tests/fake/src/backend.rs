//! The backend's functions.

use crate::books::Ledger;
use crate::config::{Config, DeviceConfig, Point};
use crate::device::FakeDevice;
use crate::failure::{Failure, Result, forwarded, guard, need, object, put, put_sized, sized};
use crate::faults::{Effect, Faults};
use crate::inner::Inner;
use crate::stats::{FAKE_STATS, FakeCounts, FakeStatsTable};
use crate::{entry, statement};
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use tegula_abi::{self as abi, BackendTable, ErrorRecord, Status};

/// The plugin to wrap where the configuration names none, beside this one's file.
const INNER_FILE: &str = "libtegula_reference.so";

/// An open backend; its handle is a reference to it, and its devices hold it.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) config: Config,
    pub(crate) devices: Vec<DeviceConfig>,
    pub(crate) faults: Faults,
    pub(crate) inner: Inner,
    lost: Vec<AtomicBool>,
    ledger: Mutex<Ledger>,
}

/// The backend that was opened last, for the extension.
static LAST: Mutex<Weak<State>> = Mutex::new(Weak::new());

impl State {
    /// # Safety
    /// `err` is null or valid.
    unsafe fn open(config: Config, faults: Faults, err: *mut ErrorRecord) -> Result<Self> {
        let beside = || Some(entry::own_file()?.parent()?.join(INNER_FILE));
        let inner: Option<PathBuf> = config.inner.clone().or_else(beside);
        let inner = inner.ok_or_else(|| Failure::from("no inner plugin".to_owned()))?;
        // SAFETY: the host's record lives as long as this library; `err` by the caller's word.
        let inner = unsafe { Inner::open(&inner, entry::host(), err) }?;
        let mut devices = config.devices.clone();
        if devices.is_empty() {
            devices.push(statement::mirror(&inner)?);
        }
        let lost = devices.iter().map(|_| AtomicBool::new(false)).collect();
        let ledger = Mutex::new(Ledger::new(devices.len()));
        Ok(Self { config, devices, faults, inner, lost, ledger })
    }

    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // Figures are changed one statement at a time; a panic leaves them whole.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes what is alive to the file that the configuration names; by renaming, so that a reader never sees half of it.
    pub(crate) fn publish(&self) {
        let Some(path) = &self.config.stats_file else { return };
        let ledger = self.ledger();
        let new = path.with_extension("new");
        let text = serde_json::to_vec_pretty(&ledger.stats).unwrap_or_default();
        if let Err(e) = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, path)) {
            eprintln!("tegula-fake: {}: {e}", path.display());
        }
    }

    /// Counts a call to a device, which fails if the device is lost or a fault strikes.
    pub(crate) fn strike(&self, at: Point, device: u32, bytes: u64) -> Result<Effect> {
        if self.is_lost(device) {
            return Err(Failure::new(Status::DEVICE_LOST, "the fake device is gone"));
        }
        let effect = self.faults.strike(at, Some(device), bytes);
        effect.inspect_err(|failure| self.note_loss(device, failure))
    }

    /// Keeps a device lost once a call of it said so.
    pub(crate) fn note_loss(&self, device: u32, failure: &Failure) {
        if let Some(lost) = self.lost.get(device as usize)
            && failure.status == Status::DEVICE_LOST
        {
            lost.store(true, Ordering::Relaxed);
        }
    }

    fn is_lost(&self, device: u32) -> bool {
        self.lost.get(device as usize).is_some_and(|lost| lost.load(Ordering::Relaxed))
    }
}

pub(crate) const TABLE: BackendTable = BackendTable {
    struct_size: size_of::<BackendTable>(),
    open: Some(open),
    close: Some(close),
    device_count: Some(device_count),
    device_info: Some(device_info),
    heap_info: Some(heap_info),
    buffer_type_info: Some(buffer_type_info),
    device_open: Some(device_open),
    device: &crate::device::TABLE,
    extension: Some(extension),
};

// Every function below is called by the host under the boundary's contract: pointers are null or valid for what their type says, handles
// came from this table and are freed once. That contract is the SAFETY of every block here.

/// Declares functions of a table that differ only in what they do inside the guard.
macro_rules! thunks {
    ($(fn $name:ident($($arg:ident: $ty:ty),* ; $err:ident) $body:block)*) => {$(
        pub(crate) unsafe extern "C" fn $name($($arg: $ty,)* $err: *mut tegula_abi::ErrorRecord) -> tegula_abi::Status {
            // SAFETY: the boundary's contract, above.
            unsafe { $crate::failure::guard($err, || $body) }
        }
    )*};
}
pub(crate) use thunks;

thunks! {
    fn open(out: *mut *mut abi::BackendHandle; err) {
        let config = entry::config()?;
        let faults = Faults::new(&config.faults);
        if matches!(faults.strike(Point::Open, None, 0)?, Effect::Null) {
            return Ok(());
        }
        let state = Arc::new(State::open(config, faults, err)?);
        *LAST.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&state);
        put(out, Arc::into_raw(state).cast_mut().cast())
    }

    fn device_count(backend: *const abi::BackendHandle, out: *mut u32; err) {
        let state = object::<State, _>(backend)?;
        match state.faults.strike(Point::DeviceCount, None, 0)? {
            Effect::Null => Ok(()),
            _ => put(out, u32::try_from(state.devices.len()).unwrap_or(u32::MAX)),
        }
    }

    fn device_info(backend: *const abi::BackendHandle, index: u32, out: *mut abi::DeviceInfo; err) {
        let state = object::<State, _>(backend)?;
        if matches!(state.faults.strike(Point::DeviceInfo, Some(index), 0)?, Effect::Null) {
            return Ok(());
        }
        let info = statement::device_info(state.device(index)?)?;
        put_sized(out, &info, state.config.stated_size("device_info", info.struct_size))
    }

    fn heap_info(backend: *const abi::BackendHandle, index: u32, heap: u32, out: *mut abi::HeapInfo; err) {
        let state = object::<State, _>(backend)?;
        if matches!(state.faults.strike(Point::HeapInfo, Some(index), 0)?, Effect::Null) {
            return Ok(());
        }
        let info = state.heap_info(index, heap)?;
        put_sized(out, &info, state.config.stated_size("heap_info", info.struct_size))
    }

    fn buffer_type_info(
        backend: *const abi::BackendHandle, index: u32, buffer_type: u32, out: *mut abi::BufferTypeInfo; err
    ) {
        let state = object::<State, _>(backend)?;
        if matches!(state.faults.strike(Point::BufferTypeInfo, Some(index), 0)?, Effect::Null) {
            return Ok(());
        }
        let info = state.buffer_type_info(index, buffer_type)?;
        put_sized(out, &info, state.config.stated_size("buffer_type_info", info.struct_size))
    }

    fn device_open(
        backend: *const abi::BackendHandle, index: u32, options: *const abi::DeviceOptions,
        out: *mut *mut abi::DeviceHandle; err
    ) {
        let state = shared(backend)?;
        state.device(index)?;
        if matches!(state.faults.strike(Point::DeviceOpen, Some(index), 0)?, Effect::Null) {
            return Ok(());
        }
        let options: abi::DeviceOptions = sized(options)?;
        let mut inner = std::ptr::null_mut();
        let open = need(state.inner.backend.device_open)?;
        forwarded(open(state.inner.handle, 0, &raw const options, &raw mut inner, err))?;
        state.ledger().device(index).open += 1;
        let device = FakeDevice { state, index, inner };
        put(out, Arc::into_raw(Arc::new(device)).cast_mut().cast())
    }
}

/// One more reference to the backend.
///
/// # Safety
/// `backend` is null or a handle of this table.
unsafe fn shared(backend: *const abi::BackendHandle) -> Result<Arc<State>> {
    if backend.is_null() {
        return Err(Failure::invalid("a null handle"));
    }
    // SAFETY: the handle is a reference that is not given back yet; one is added for the new Arc.
    unsafe {
        Arc::increment_strong_count(backend.cast::<State>());
        Ok(Arc::from_raw(backend.cast::<State>()))
    }
}

unsafe extern "C" fn close(backend: *mut abi::BackendHandle) {
    let run = || {
        // SAFETY: the boundary's contract: the handle is given back, once.
        let state = unsafe { Arc::from_raw(backend.cast::<State>().cast_const()) };
        let open: u64 = state.ledger().stats.devices.iter().map(|device| device.open).sum();
        if open > 0 {
            state.ledger().violation(format!("the backend was closed with {open} devices open"));
        }
        state.ledger().stats.backends = 0;
        state.publish();
        Ok(())
    };
    // SAFETY: a null record is allowed.
    unsafe { guard(std::ptr::null_mut(), run) };
}

static STATS: FakeStatsTable =
    FakeStatsTable { struct_size: size_of::<FakeStatsTable>(), read: read_stats };

unsafe extern "C" fn read_stats(out: *mut FakeCounts) -> Status {
    let run = || {
        let last = LAST.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        let none = || Failure::new(Status::NOT_FOUND, "no backend is open");
        let counts = last.ok_or_else(none)?.ledger().stats.counts();
        // SAFETY: the extension's contract: null or writable.
        unsafe { put(out, counts) }
    };
    // SAFETY: a null record is allowed.
    unsafe { guard(std::ptr::null_mut(), run) }
}

unsafe extern "C" fn extension(name: abi::Str) -> *const c_void {
    // SAFETY: the boundary's contract: the name lives for the call.
    match unsafe { name.get() } {
        Some(FAKE_STATS) => (&raw const STATS).cast(),
        _ => std::ptr::null(),
    }
}
