//! An open device: what it can do, and the things made on it.

use crate::backend::{Backend, BackendInner, Caller, check_size};
use crate::buffer::{Buffer, BufferDesc};
use crate::error::{DeviceError, DeviceErrorKind};
use crate::info::{DeviceInfo, Heap};
use crate::queue::Queue;
use std::ptr::NonNull;
use std::sync::Arc;
use tegula_abi as abi;
use tegula_program::ffi::FfiProgram;
use tegula_quant::DType;

/// Wishes for opening a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceOptions {
    /// Host threads the device may keep busy; `None` leaves it to the backend.
    pub n_threads: Option<std::num::NonZeroU32>,
}

/// A weight matrix in GGUF's row layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightDesc {
    /// Element or block type.
    pub dtype: DType,
    /// Bits of [`abi::weight_use`]: which ops read it.
    pub uses: u32,
    /// Elements of a row.
    pub n_in: u64,
    /// Rows.
    pub n_rows: u64,
    /// Rows of one expert, where the weight is a stack of experts; 0 where it is none.
    pub rows_per_expert: u64,
}

impl WeightDesc {
    pub(crate) fn raw(&self) -> abi::WeightDesc {
        abi::WeightDesc {
            struct_size: size_of::<abi::WeightDesc>(),
            dtype: abi::DType(self.dtype.id()),
            uses: self.uses,
            n_in: self.n_in,
            n_rows: self.n_rows,
            rows_per_expert: self.rows_per_expert,
        }
    }
}

/// How a device wants a weight laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightLayout {
    /// [`abi::LAYOUT_NATIVE`], or a number of the backend's own.
    pub layout: u32,
    /// Rows are split between tiles only at multiples of this; at least 1.
    pub rows_per_group: u32,
    /// Bytes of a group of rows; more than 0.
    pub group_bytes: u64,
    /// Alignment of a tile's first byte; a power of two.
    pub alignment: u64,
}

impl WeightLayout {
    /// Whether weights are used in GGUF's own layout, where they lie.
    pub fn is_native(&self) -> bool {
        self.layout == abi::LAYOUT_NATIVE
    }

    /// Bytes that `n_rows` rows take, the last group counted whole. `None` on overflow.
    pub fn bytes(&self, n_rows: u64) -> Option<u64> {
        n_rows.div_ceil(u64::from(self.rows_per_group.max(1))).checked_mul(self.group_bytes)
    }
}

/// The plugin's device; everything made on it holds it.
#[derive(Debug)]
pub(crate) struct DeviceInner {
    pub(crate) handle: NonNull<abi::DeviceHandle>,
    pub(crate) caller: Caller,
    pub(crate) info: DeviceInfo,
    /// Closed after the device.
    pub(crate) backend: Arc<BackendInner>,
}

// SAFETY: device functions may be called from any thread at any time, by the boundary's rules; the rest is plain data.
unsafe impl Send for DeviceInner {}
// SAFETY: as above.
unsafe impl Sync for DeviceInner {}

impl DeviceInner {
    pub(crate) fn table(&self) -> &abi::DeviceTable {
        &self.backend.plugin.device
    }
}

impl Drop for DeviceInner {
    fn drop(&mut self) {
        if let Some(close) = self.table().close {
            // SAFETY: the handle came from `device_open` of the same backend; buffers, executables and queues hold this object, so all are freed.
            unsafe { close(self.handle.as_ptr()) }
        }
    }
}

/// An open device. Clones share it; any thread.
#[derive(Debug, Clone)]
pub struct Device {
    pub(crate) inner: Arc<DeviceInner>,
    backend: Backend,
}

impl Device {
    /// Makes the device with [`DeviceInfo::index`] `index` usable.
    ///
    /// # Errors
    /// What the backend says; NotFound for an index without a usable device.
    pub fn open(
        backend: &Backend,
        index: u32,
        options: DeviceOptions,
    ) -> Result<Self, DeviceError> {
        const WHAT: &str = "device_open";
        let outer = &backend.inner;
        let info = backend.device(index).cloned().ok_or_else(|| {
            let message = format!("it has no usable device {index}");
            outer.caller.error(DeviceErrorKind::NotFound, WHAT, message)
        })?;
        let listed = outer.device_caller(index);
        let open = listed.function(outer.plugin.backend.device_open, WHAT)?;
        let options = abi::DeviceOptions {
            struct_size: size_of::<abi::DeviceOptions>(),
            n_threads: options.n_threads.map_or(0, std::num::NonZeroU32::get),
        };
        let mut handle = std::ptr::null_mut();
        listed.call(WHAT, |err| {
            // SAFETY: a function of the plugin's table, with its own handle; all pointers are valid for the call.
            unsafe { open(outer.handle.as_ptr(), index, &raw const options, &raw mut handle, err) }
        })?;
        let handle = listed.handle(WHAT, "device", handle)?;
        let caller = Caller::new(&format!("{} {}", info.id(), info.name));
        let inner = Arc::new(DeviceInner { handle, caller, info, backend: Arc::clone(outer) });
        Ok(Self { inner, backend: backend.clone() })
    }

    /// What it states about itself, as of when the backend was opened.
    pub fn info(&self) -> &DeviceInfo {
        &self.inner.info
    }

    /// Its backend.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Its heaps with the memory free at this moment.
    ///
    /// # Errors
    /// What the backend says.
    pub fn heaps(&self) -> Result<Vec<Heap>, DeviceError> {
        self.backend.heaps(self.inner.info.index)
    }

    /// Whether it panicked or was lost: every call but freeing is refused.
    pub fn is_lost(&self) -> bool {
        self.inner.caller.is_dead()
    }

    /// Allocates a buffer of exactly the type asked for. Its contents are undefined.
    ///
    /// # Errors
    /// TooBig over the type's limit, OutOfMemory below it, with the numbers; whatever else the backend says.
    pub fn alloc(&self, desc: &BufferDesc) -> Result<Buffer, DeviceError> {
        Buffer::alloc(&self.inner, desc)
    }

    /// Makes a read-only buffer of host memory without a copy. The buffer keeps `owner`, whose `as_ref` must give the same bytes,
    /// at the same place and never changing, for as long as it lives; file mappings, vectors and boxed slices do.
    ///
    /// # Errors
    /// Unsupported for a type without import, InvalidArgument for bytes that are not aligned as it asks.
    pub fn import(
        &self,
        desc: &BufferDesc,
        owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
        range: std::ops::Range<usize>,
    ) -> Result<Buffer, DeviceError> {
        Buffer::import(&self.inner, desc, owner, range)
    }

    /// The layout it wants a weight in.
    ///
    /// # Errors
    /// Unsupported for a type it cannot read; BadAnswer for a layout that makes no sense.
    pub fn weight_layout(&self, desc: &WeightDesc) -> Result<WeightLayout, DeviceError> {
        const WHAT: &str = "weight_layout";
        let caller = &self.inner.caller;
        let call = caller.function(self.inner.table().weight_layout, WHAT)?;
        let raw_desc = desc.raw();
        let mut raw =
            abi::WeightLayout { struct_size: size_of::<abi::WeightLayout>(), ..Default::default() };
        caller.call(WHAT, |err| {
            // SAFETY: a function of the plugin's table, with its own handle; all pointers are valid for the call.
            unsafe { call(self.inner.handle.as_ptr(), &raw const raw_desc, &raw mut raw, err) }
        })?;
        check_size(caller, WHAT, raw.struct_size, size_of::<abi::WeightLayout>())?;
        let layout = WeightLayout {
            layout: raw.layout,
            rows_per_group: raw.rows_per_group,
            group_bytes: raw.group_bytes,
            alignment: raw.alignment.max(1),
        };
        check_layout(desc, &layout).map_err(|message| caller.bad_answer(WHAT, message))?;
        Ok(layout)
    }

    /// For every op of the program, whether it can run it.
    ///
    /// # Errors
    /// What the backend says.
    pub fn supports(&self, program: &FfiProgram) -> Result<Vec<bool>, DeviceError> {
        const WHAT: &str = "program_supports";
        let call = self.inner.caller.function(self.inner.table().program_supports, WHAT)?;
        let program = program.as_abi();
        let mut out = vec![0u8; program.ops.len];
        self.inner.caller.call(WHAT, |err| {
            // SAFETY: a function of the plugin's table, with its own handle; the program and the array live for the call.
            unsafe { call(self.inner.handle.as_ptr(), program, out.as_mut_ptr(), out.len(), err) }
        })?;
        Ok(out.into_iter().map(|flag| flag == 1).collect())
    }

    /// Makes a queue.
    ///
    /// # Errors
    /// What the backend says.
    pub fn queue(&self) -> Result<Queue, DeviceError> {
        Queue::create(&self.inner)
    }
}

fn check_layout(desc: &WeightDesc, layout: &WeightLayout) -> Result<(), String> {
    if layout.rows_per_group == 0 || layout.group_bytes == 0 || !layout.alignment.is_power_of_two()
    {
        return Err(format!("a layout that makes no sense: {layout:?}"));
    }
    if !desc.rows_per_expert.is_multiple_of(layout.rows_per_group.into()) {
        return Err(format!("groups of rows that cross from one expert to the next: {layout:?}"));
    }
    if layout.is_native() {
        let row = desc.dtype.row_bytes(desc.n_in).map_err(|e| e.to_string())?;
        let group = row.checked_mul(u64::from(layout.rows_per_group));
        if group != Some(layout.group_bytes) {
            return Err(format!(
                "rows in their own layout take {row} bytes each, it states {} for {}",
                layout.group_bytes, layout.rows_per_group
            ));
        }
    }
    Ok(())
}
