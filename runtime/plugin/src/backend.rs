//! An opened backend and the list of its devices.

use crate::error::{DeviceError, DeviceErrorKind, ErrorSlot};
use crate::info::{Abilities, BufferType, DeviceInfo, Heap};
use crate::negotiate::Plugin;
use std::collections::BTreeMap;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tegula_abi::{self as abi, ErrorRecord, Status};

/// More devices than any machine has; a larger count is damage.
const MAX_DEVICES: u32 = 1024;

/// Calls of one object over the boundary: turns statuses into errors, and stops calling what panicked or was lost.
#[derive(Debug)]
pub(crate) struct Caller {
    /// What errors name.
    pub(crate) label: Arc<str>,
    dead: AtomicBool,
}

impl Caller {
    pub(crate) fn new(label: &str) -> Self {
        Self { label: label.into(), dead: AtomicBool::new(false) }
    }

    /// A failure that the core found itself.
    pub(crate) fn error(
        &self,
        kind: DeviceErrorKind,
        operation: &'static str,
        message: impl Into<String>,
    ) -> DeviceError {
        DeviceError::new(kind, operation, &self.label, message)
    }

    /// The plugin's answer breaks the contract.
    pub(crate) fn bad_answer(
        &self,
        operation: &'static str,
        message: impl Into<String>,
    ) -> DeviceError {
        self.error(DeviceErrorKind::BadAnswer, operation, message)
    }

    /// The core's caller asks for something that makes no sense.
    pub(crate) fn invalid(
        &self,
        operation: &'static str,
        message: impl Into<String>,
    ) -> DeviceError {
        self.error(DeviceErrorKind::InvalidArgument, operation, message)
    }

    /// A function of the table. Required ones were seen to be there at the negotiation.
    pub(crate) fn function<F>(
        &self,
        function: Option<F>,
        operation: &'static str,
    ) -> Result<F, DeviceError> {
        function.ok_or_else(|| {
            self.error(DeviceErrorKind::Unsupported, operation, "the backend does not offer it")
        })
    }

    /// Makes one call.
    pub(crate) fn call(
        &self,
        operation: &'static str,
        f: impl FnOnce(*mut ErrorRecord) -> Status,
    ) -> Result<(), DeviceError> {
        self.call_or(operation, Status::OK, f).map(drop)
    }

    /// Makes one call that may also return `other` without that being a failure.
    pub(crate) fn call_or(
        &self,
        operation: &'static str,
        other: Status,
        f: impl FnOnce(*mut ErrorRecord) -> Status,
    ) -> Result<Status, DeviceError> {
        if self.is_dead() {
            return Err(self.error(
                DeviceErrorKind::DeviceLost,
                operation,
                "it failed before and is not used again",
            ));
        }
        let mut slot = ErrorSlot::new();
        let status = f(slot.as_mut_ptr());
        if status == Status::OK || status == other {
            return Ok(status);
        }
        if status == Status::PANIC || status == Status::DEVICE_LOST {
            self.bury();
        }
        Err(slot.take(status, operation, &self.label))
    }

    /// Refuses all calls from now on.
    pub(crate) fn bury(&self) {
        self.dead.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }

    /// The pointer that a call gave back; null behind OK is the plugin's fault.
    pub(crate) fn handle<T>(
        &self,
        operation: &'static str,
        what: &str,
        handle: *mut T,
    ) -> Result<NonNull<T>, DeviceError> {
        NonNull::new(handle).ok_or_else(|| {
            self.bad_answer(operation, format!("it returned no {what} without an error"))
        })
    }
}

/// The backend's object with its plugin; devices hold it.
#[derive(Debug)]
pub(crate) struct BackendInner {
    pub(crate) handle: NonNull<abi::BackendHandle>,
    pub(crate) caller: Caller,
    /// For calls about one device: a device that panicked or was lost takes no other with it.
    device_callers: Mutex<BTreeMap<u32, Arc<Caller>>>,
    /// Dropped after `close` was called.
    pub(crate) plugin: Plugin,
}

// SAFETY: backend functions may be called from any thread at any time, by the boundary's rules; the rest is plain data.
unsafe impl Send for BackendInner {}
// SAFETY: as above.
unsafe impl Sync for BackendInner {}

impl BackendInner {
    /// The caller of functions of the backend that are about device `index`.
    pub(crate) fn device_caller(&self, index: u32) -> Arc<Caller> {
        // Nothing that is half done can be seen: the map only grows, by whole entries.
        let mut callers = self.device_callers.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Arc::new(Caller::new(&format!("{}:{index}", self.plugin.id)));
        Arc::clone(callers.entry(index).or_insert_with(new))
    }
}

impl Drop for BackendInner {
    fn drop(&mut self) {
        if let Some(close) = self.plugin.backend.close {
            // SAFETY: the handle came from `open` of the same table, and all devices, which hold this object, are closed.
            unsafe { close(self.handle.as_ptr()) }
        }
    }
}

/// A device of a backend that is not used, and why.
#[derive(Debug, Clone)]
pub struct FaultyDevice {
    /// Its index within the backend.
    pub index: u32,
    /// What went wrong when it was asked for its identity.
    pub error: DeviceError,
}

/// An opened backend. Clones share it; its plugin is unloaded when the last handle to anything of it is dropped.
#[derive(Debug, Clone)]
pub struct Backend {
    pub(crate) inner: Arc<BackendInner>,
    devices: Arc<[DeviceInfo]>,
    faulty: Arc<[FaultyDevice]>,
}

impl Backend {
    /// Loads drivers and lists devices; may be slow.
    pub(crate) fn open(plugin: Plugin) -> Result<Self, DeviceError> {
        let caller = Caller::new(&plugin.id);
        let open = caller.function(plugin.backend.open, "open")?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a function of the plugin's table; both pointers are valid for the call.
        caller.call("open", |err| unsafe { open(&raw mut handle, err) })?;
        let handle = caller.handle("open", "backend", handle)?;
        let device_callers = Mutex::default();
        let inner = Arc::new(BackendInner { handle, caller, device_callers, plugin });
        let (devices, faulty) = list_devices(&inner)?;
        Ok(Self { inner, devices: devices.into(), faulty: faulty.into() })
    }

    /// Its id, such as `vulkan`.
    pub fn id(&self) -> &str {
        &self.inner.plugin.id
    }

    /// The plugin's version.
    pub fn version(&self) -> &str {
        &self.inner.plugin.version
    }

    /// One line for people.
    pub fn description(&self) -> &str {
        &self.inner.plugin.description
    }

    /// The plugin's file.
    pub fn path(&self) -> &Path {
        &self.inner.plugin.path
    }

    /// The revision of the interface that both sides use.
    pub fn revision(&self) -> u32 {
        self.inner.plugin.revision
    }

    /// The oldest and the newest revision that the plugin speaks.
    pub fn revisions(&self) -> (u32, u32) {
        self.inner.plugin.revisions
    }

    /// Its devices as they were when it was opened. May be empty. A device's place in this list is not its index: see
    /// [`DeviceInfo::index`].
    pub fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    /// Devices that could not say what they are, or that contradict themselves beyond use.
    pub fn faulty(&self) -> &[FaultyDevice] {
        &self.faulty
    }

    /// The device with this index, if it is usable.
    pub fn device(&self, index: u32) -> Option<&DeviceInfo> {
        self.devices.iter().find(|d| d.index == index)
    }

    /// The heaps of a device with the memory free at this moment.
    ///
    /// # Errors
    /// What the backend says; NotFound for an index without a usable device.
    pub fn heaps(&self, index: u32) -> Result<Vec<Heap>, DeviceError> {
        let device = self.device(index).ok_or_else(|| {
            let message = format!("it has no usable device {index}");
            self.inner.caller.error(DeviceErrorKind::NotFound, "heap_info", message)
        })?;
        let mut notes = Vec::new();
        let heaps = (0..device.heaps.len() as u32)
            .map(|heap| read_heap(&self.inner, index, heap, &mut notes))
            .collect::<Result<_, _>>()?;
        for note in notes {
            log::debug!("{}: {note}", device.id());
        }
        Ok(heaps)
    }
}

fn list_devices(inner: &BackendInner) -> Result<(Vec<DeviceInfo>, Vec<FaultyDevice>), DeviceError> {
    let caller = &inner.caller;
    let device_count = caller.function(inner.plugin.backend.device_count, "device_count")?;
    let mut count = 0;
    caller.call("device_count", |err| {
        // SAFETY: a function of the plugin's table, with its own handle; both pointers are valid for the call.
        unsafe { device_count(inner.handle.as_ptr(), &raw mut count, err) }
    })?;
    if count > MAX_DEVICES {
        let message = format!("it states {count} devices; {MAX_DEVICES} are the most");
        return Err(caller.bad_answer("device_count", message));
    }
    let (mut devices, mut faulty) = (Vec::new(), Vec::new());
    for index in 0..count {
        match read_device(inner, index) {
            Ok(device) => {
                for note in &device.contradictions {
                    log::warn!("{}: {note}", device.id());
                }
                devices.push(device);
            }
            Err(error) => {
                log::warn!("device {}:{index} is not used: {error}", inner.plugin.id);
                faulty.push(FaultyDevice { index, error });
            }
        }
    }
    Ok((devices, faulty))
}

fn read_device(inner: &BackendInner, index: u32) -> Result<DeviceInfo, DeviceError> {
    let caller = &*inner.device_caller(index);
    let device_info = caller.function(inner.plugin.backend.device_info, "device_info")?;
    let mut raw =
        abi::DeviceInfo { struct_size: size_of::<abi::DeviceInfo>(), ..Default::default() };
    caller.call("device_info", |err| {
        // SAFETY: a function of the plugin's table, with its own handle; both pointers are valid for the call.
        unsafe { device_info(inner.handle.as_ptr(), index, &raw mut raw, err) }
    })?;
    check_size(caller, "device_info", raw.struct_size, size_of::<abi::DeviceInfo>())?;
    let fault = |operation| move |message: String| caller.bad_answer(operation, message);
    let mut device =
        DeviceInfo::read(&raw, &inner.plugin.id, index).map_err(fault("device_info"))?;
    let mut notes = Vec::new();
    for heap in 0..raw.n_heaps {
        device.heaps.push(read_heap(inner, index, heap, &mut notes)?);
    }
    let table = &inner.plugin.device;
    let abilities = Abilities {
        can_map: table.buffer_map.is_some(),
        can_import: table.buffer_import.is_some(),
    };
    for i in 0..raw.n_buffer_types {
        let raw = read_buffer_type(inner, index, i)?;
        let read = BufferType::read(&raw, i, &device.heaps, abilities, &mut notes);
        device.buffer_types.push(read.map_err(fault("buffer_type_info"))?);
    }
    device.contradictions = notes;
    Ok(device)
}

fn read_heap(
    inner: &BackendInner,
    index: u32,
    heap: u32,
    notes: &mut Vec<String>,
) -> Result<Heap, DeviceError> {
    let caller = &*inner.device_caller(index);
    let heap_info = caller.function(inner.plugin.backend.heap_info, "heap_info")?;
    let mut raw = abi::HeapInfo { struct_size: size_of::<abi::HeapInfo>(), ..Default::default() };
    caller.call("heap_info", |err| {
        // SAFETY: a function of the plugin's table, with its own handle; both pointers are valid for the call.
        unsafe { heap_info(inner.handle.as_ptr(), index, heap, &raw mut raw, err) }
    })?;
    check_size(caller, "heap_info", raw.struct_size, size_of::<abi::HeapInfo>())?;
    Ok(Heap::read(&raw, heap, notes))
}

fn read_buffer_type(
    inner: &BackendInner,
    index: u32,
    buffer_type: u32,
) -> Result<abi::BufferTypeInfo, DeviceError> {
    const WHAT: &str = "buffer_type_info";
    let caller = &*inner.device_caller(index);
    let call = caller.function(inner.plugin.backend.buffer_type_info, WHAT)?;
    let mut raw =
        abi::BufferTypeInfo { struct_size: size_of::<abi::BufferTypeInfo>(), ..Default::default() };
    caller.call(WHAT, |err| {
        // SAFETY: a function of the plugin's table, with its own handle; both pointers are valid for the call.
        unsafe { call(inner.handle.as_ptr(), index, buffer_type, &raw mut raw, err) }
    })?;
    check_size(caller, WHAT, raw.struct_size, size_of::<abi::BufferTypeInfo>())?;
    Ok(raw)
}

/// That the plugin filled all of a struct whose first revision has all of its fields.
pub(crate) fn check_size(
    caller: &Caller,
    operation: &'static str,
    filled: usize,
    offered: usize,
) -> Result<(), DeviceError> {
    if filled == offered {
        return Ok(());
    }
    let message = format!("it filled {filled} bytes of an answer of {offered}");
    Err(caller.bad_answer(operation, message))
}
