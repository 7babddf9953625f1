//! A device's buffers, and ranges of them.

use crate::device::DeviceInner;
use crate::error::{DeviceError, DeviceErrorKind};
use std::ptr::NonNull;
use std::sync::Arc;
use tegula_abi::{self as abi, BufferRange, BufferUsage, HostAccess};

/// An allocation wish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferDesc {
    /// Bytes; more than 0. Ignored by imports, whose range says it.
    pub size: u64,
    /// Index of the buffer type.
    pub buffer_type: u32,
    /// What it will hold.
    pub usage: BufferUsage,
}

/// One allocation of a device (a chunk, in the words of the plan). Freed when dropped, which must not happen while work
/// submitted through an `unsafe` function of [`crate::Queue`] uses it. Any thread.
///
/// Its bytes are the caller's to order: work of one queue runs in order, work of two queues on the same bytes does not, and
/// leaves bytes that nobody states.
pub struct Buffer {
    handle: NonNull<abi::BufferHandle>,
    size: u64,
    buffer_type: u32,
    read_only: bool,
    pub(crate) device: Arc<DeviceInner>,
    /// What an import points to; dropped after `drop` freed the buffer.
    _owner: Option<Arc<dyn AsRef<[u8]> + Send + Sync>>,
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer")
            .field("device", &self.device.caller.label)
            .field("size", &self.size)
            .field("buffer_type", &self.buffer_type)
            .field("read_only", &self.read_only)
            .finish_non_exhaustive()
    }
}

// SAFETY: a buffer's handle may be used from any thread, by the boundary's rules; the rest is Send and Sync.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(free) = self.device.table().buffer_free {
            // SAFETY: the handle is this device's, freed once; safe queue functions wait for their work, unsafe ones leave that to their callers.
            unsafe { free(self.device.handle.as_ptr(), self.handle.as_ptr()) }
        }
    }
}

impl Buffer {
    pub(crate) fn alloc(device: &Arc<DeviceInner>, desc: &BufferDesc) -> Result<Self, DeviceError> {
        const WHAT: &str = "buffer_alloc";
        let caller = &device.caller;
        let raw = raw_desc(device, desc, WHAT)?;
        let alloc = caller.function(device.table().buffer_alloc, WHAT)?;
        let mut handle = std::ptr::null_mut();
        caller
            .call(WHAT, |err| {
                // SAFETY: a function of the plugin's table, with its own handle; all pointers are valid for the call.
                unsafe { alloc(device.handle.as_ptr(), &raw const raw, &raw mut handle, err) }
            })
            .map_err(|e| DeviceError { asked: e.asked.or(Some(desc.size)), ..e })?;
        let handle = caller
            .handle(WHAT, "buffer", handle)
            .map_err(|e| DeviceError { asked: Some(desc.size), ..e })?;
        Ok(Self::new(device, handle, desc, false, None))
    }

    pub(crate) fn import(
        device: &Arc<DeviceInner>,
        desc: &BufferDesc,
        owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
        range: std::ops::Range<usize>,
    ) -> Result<Self, DeviceError> {
        const WHAT: &str = "buffer_import";
        let caller = &device.caller;
        let bytes = (*owner).as_ref();
        let bytes = bytes.get(range.clone()).ok_or_else(|| {
            caller.invalid(WHAT, format!("bytes {range:?} of {} bytes", bytes.len()))
        })?;
        let desc = BufferDesc { size: bytes.len() as u64, ..*desc };
        let raw = raw_desc(device, &desc, WHAT)?;
        let kind = device.info.buffer_types.get(desc.buffer_type as usize).filter(|k| k.import);
        let kind = kind.ok_or_else(|| {
            let message = format!("buffer type {} imports nothing", desc.buffer_type);
            caller.error(DeviceErrorKind::Unsupported, WHAT, message)
        })?;
        let mask = kind.import_alignment - 1;
        if (bytes.as_ptr() as u64 | desc.size) & mask != 0 {
            let message = format!(
                "{} bytes at {:p} are not aligned to {}",
                desc.size,
                bytes.as_ptr(),
                kind.import_alignment
            );
            return Err(caller.invalid(WHAT, message));
        }
        let import = caller.function(device.table().buffer_import, WHAT)?;
        let (ptr, mut handle) = (bytes.as_ptr(), std::ptr::null_mut());
        caller.call(WHAT, |err| {
            // SAFETY: a function of the plugin's table, with its own handle; `ptr` holds `size` bytes, which the owner keeps for the buffer's life.
            unsafe { import(device.handle.as_ptr(), &raw const raw, ptr, &raw mut handle, err) }
        })?;
        let handle = caller.handle(WHAT, "buffer", handle)?;
        Ok(Self::new(device, handle, &desc, true, Some(owner)))
    }

    fn new(
        device: &Arc<DeviceInner>,
        handle: NonNull<abi::BufferHandle>,
        desc: &BufferDesc,
        read_only: bool,
        owner: Option<Arc<dyn AsRef<[u8]> + Send + Sync>>,
    ) -> Self {
        Self {
            handle,
            size: desc.size,
            buffer_type: desc.buffer_type,
            read_only,
            device: Arc::clone(device),
            _owner: owner,
        }
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Index of its buffer type.
    pub fn buffer_type(&self) -> u32 {
        self.buffer_type
    }

    /// Whether it was imported and may only be read.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// The host's address of its first byte, valid until it is dropped. Reading and writing through it is the caller's to order
    /// with the device's work; bytes of an imported buffer may only be read.
    ///
    /// # Errors
    /// Unsupported for a type that is not mapped; BadAnswer for a null address.
    pub fn map(&self) -> Result<NonNull<u8>, DeviceError> {
        const WHAT: &str = "buffer_map";
        let caller = &self.device.caller;
        let kind = self.device.info.buffer_types.get(self.buffer_type as usize);
        if kind.is_none_or(|kind| kind.host_access != HostAccess::MAPPED) {
            return Err(caller.error(
                DeviceErrorKind::Unsupported,
                WHAT,
                "its memory is not mapped",
            ));
        }
        let map = caller.function(self.device.table().buffer_map, WHAT)?;
        let mut address = std::ptr::null_mut();
        caller.call(WHAT, |err| {
            // SAFETY: a function of the plugin's table, with its own handles; both pointers are valid for the call.
            unsafe { map(self.device.handle.as_ptr(), self.handle.as_ptr(), &raw mut address, err) }
        })?;
        caller.handle(WHAT, "address", address)
    }

    /// Copies host memory to `offset ..` through the mapping. Nobody else holds the buffer, so no work of the device can be using it.
    ///
    /// # Errors
    /// As [`Self::map`]; InvalidArgument for a range outside the buffer and for an imported buffer.
    pub fn write_mapped(&mut self, offset: u64, src: &[u8]) -> Result<(), DeviceError> {
        const WHAT: &str = "buffer_map";
        if self.read_only {
            return Err(self.device.caller.invalid(WHAT, "an imported buffer is only read"));
        }
        self.raw_range(offset, src.len() as u64, WHAT)?;
        let address = self.map()?;
        // SAFETY: the range lies inside the buffer, whose mapping holds all its bytes; `src` is other memory, since the buffer is held exclusively.
        unsafe {
            let to = address.as_ptr().add(offset as usize);
            to.copy_from_nonoverlapping(src.as_ptr(), src.len());
        }
        Ok(())
    }

    /// Copies `offset ..` to host memory through the mapping. Nobody else holds the buffer, so no work of the device can be changing it.
    ///
    /// # Errors
    /// As [`Self::map`]; InvalidArgument for a range outside the buffer.
    pub fn read_mapped(&mut self, offset: u64, dst: &mut [u8]) -> Result<(), DeviceError> {
        self.raw_range(offset, dst.len() as u64, "buffer_map")?;
        let address = self.map()?;
        // SAFETY: as in `write_mapped`.
        unsafe {
            let from = address.as_ptr().add(offset as usize);
            dst.as_mut_ptr().copy_from_nonoverlapping(from, dst.len());
        }
        Ok(())
    }

    /// The bytes at `offset`, `size` of them.
    ///
    /// # Errors
    /// InvalidArgument for a range that is not inside the buffer.
    pub fn span(&self, offset: u64, size: u64) -> Result<BufferSpan<'_>, DeviceError> {
        self.raw_range(offset, size, "span")?;
        Ok(BufferSpan { buffer: self, offset, size })
    }

    /// All its bytes.
    pub fn whole(&self) -> BufferSpan<'_> {
        BufferSpan { buffer: self, offset: 0, size: self.size }
    }

    /// A range for the boundary, checked.
    pub(crate) fn raw_range(
        &self,
        offset: u64,
        size: u64,
        operation: &'static str,
    ) -> Result<BufferRange, DeviceError> {
        if offset.checked_add(size).is_none_or(|end| end > self.size) {
            let message = format!("{size} bytes at {offset} of a buffer of {}", self.size);
            return Err(self.device.caller.invalid(operation, message));
        }
        Ok(BufferRange { buffer: self.handle.as_ptr(), offset, size })
    }
}

/// The desc for the boundary, with what the core itself can check.
fn raw_desc(
    device: &DeviceInner,
    desc: &BufferDesc,
    operation: &'static str,
) -> Result<abi::BufferDesc, DeviceError> {
    let n_types = device.info.buffer_types.len();
    if desc.buffer_type as usize >= n_types {
        let message = format!("buffer type {} of {n_types}", desc.buffer_type);
        return Err(device.caller.error(DeviceErrorKind::NotFound, operation, message));
    }
    if desc.size == 0 {
        return Err(device.caller.invalid(operation, "a buffer of no bytes"));
    }
    Ok(abi::BufferDesc {
        struct_size: size_of::<abi::BufferDesc>(),
        size: desc.size,
        buffer_type: desc.buffer_type,
        usage: desc.usage,
    })
}

/// Bytes inside a buffer; always inside.
#[derive(Debug, Clone, Copy)]
pub struct BufferSpan<'a> {
    pub(crate) buffer: &'a Buffer,
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

impl BufferSpan<'_> {
    /// First byte in the buffer.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    pub(crate) fn raw(&self) -> BufferRange {
        BufferRange { buffer: self.buffer.handle.as_ptr(), offset: self.offset, size: self.size }
    }
}
