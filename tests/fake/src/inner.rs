//! The plugin that computes: opened, negotiated with, and asked what its first device states.

use crate::failure::{Failure, Result, forwarded, need};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::error::Error as _;
use std::path::Path;
use tegula_abi::{self as abi, BackendTable, DeviceTable, ErrorRecord, Status};

/// Its open backend.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) backend: BackendTable,
    pub(crate) device: DeviceTable,
    pub(crate) handle: *mut abi::BackendHandle,
    /// Closed after the backend.
    _library: Library,
}

// SAFETY: backend functions may be called from any thread, by the boundary's rules; the rest is plain data.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(close) = self.backend.close {
            // SAFETY: the handle came from `open` of the same table; the shim's backend, which holds this, closed its devices.
            unsafe { close(self.handle) }
        }
    }
}

impl Inner {
    /// Opens the plugin and its backend.
    ///
    /// # Safety
    /// `host` is the host's record, alive as long as this library is loaded; `err` is null or valid.
    pub(crate) unsafe fn open(
        path: &Path,
        host: *const abi::Host,
        err: *mut ErrorRecord,
    ) -> Result<Self> {
        let fault =
            |what: String| Failure::new(Status::NOT_FOUND, format!("{}: {what}", path.display()));
        // SAFETY: a test names a plugin of this project; running its constructors is what it wants.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|e| fault(e.source().map_or_else(|| e.to_string(), ToString::to_string)))?;
        // SAFETY: the symbol's name is its contract.
        let entry = unsafe { library.get::<abi::BackendEntry>(abi::ENTRY_SYMBOL) };
        let entry = entry.map(|symbol| *symbol).map_err(|e| fault(e.to_string()))?;
        let mut answer = abi::Plugin {
            struct_size: size_of::<abi::Plugin>(),
            revision_min: 0,
            revision_max: 0,
            id: abi::Str::of(""),
            version: abi::Str::of(""),
            description: abi::Str::of(""),
            backend: std::ptr::null(),
        };
        // SAFETY: the entry's contract: both records are valid, the host's by the caller's word.
        let status = unsafe { entry(host, &raw mut answer) };
        if status != Status::OK {
            return Err(fault(format!("negotiation: {status}")));
        }
        // SAFETY: the tables are static in the plugin, which is open.
        let tables = unsafe {
            let backend = abi::read_sized(answer.backend);
            backend.and_then(|backend| Some((abi::read_sized(backend.device)?, backend)))
        };
        let (device, backend) = tables.ok_or_else(|| fault("no tables".into()))?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a function of the plugin's table; both pointers are valid for the call.
        forwarded(unsafe { need(backend.open)?(&raw mut handle, err) })?;
        Ok(Self { backend, device, handle, _library: library })
    }

    /// What its device states about itself.
    pub(crate) fn device_info(&self) -> Result<abi::DeviceInfo> {
        let mut out =
            abi::DeviceInfo { struct_size: size_of::<abi::DeviceInfo>(), ..Default::default() };
        let call = need(self.backend.device_info)?;
        // SAFETY: a function of the plugin's table with its own handle; null is allowed for the record.
        forwarded(unsafe { call(self.handle, 0, &raw mut out, std::ptr::null_mut()) })?;
        Ok(out)
    }

    /// One of its heaps, now.
    pub(crate) fn heap_info(&self, heap: u32) -> Result<abi::HeapInfo> {
        let mut out =
            abi::HeapInfo { struct_size: size_of::<abi::HeapInfo>(), ..Default::default() };
        let call = need(self.backend.heap_info)?;
        // SAFETY: as above.
        forwarded(unsafe { call(self.handle, 0, heap, &raw mut out, std::ptr::null_mut()) })?;
        Ok(out)
    }

    /// One of its buffer types.
    pub(crate) fn buffer_type_info(&self, index: u32) -> Result<abi::BufferTypeInfo> {
        let size = size_of::<abi::BufferTypeInfo>();
        let mut out = abi::BufferTypeInfo { struct_size: size, ..Default::default() };
        let call = need(self.backend.buffer_type_info)?;
        // SAFETY: as above.
        forwarded(unsafe { call(self.handle, 0, index, &raw mut out, std::ptr::null_mut()) })?;
        Ok(out)
    }
}
