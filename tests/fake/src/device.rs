//! The device's functions: memory that is as large as the configuration says, and layouts.

use crate::backend::{State, thunks};
use crate::books::Live;
use crate::config::{BufferTypeConfig, LayoutConfig, Point};
use crate::failure::{
    Failure, Numbers, Result, forwarded, guard, need, object, put, put_sized, sized,
};
use crate::faults::Effect;
use crate::statement::{INNER_TYPE, host_access};
use crate::{program, queue};
use std::sync::Arc;
use tegula_abi::{
    self as abi, DeviceTable, FigureState, HostAccess, Status, WeightDesc, WeightLayout, weight_use,
};

/// The layout of [`LayoutConfig::Grouped`].
pub(crate) const LAYOUT_GROUPED: u32 = 7;

/// An open device; its handle is a reference to it, and its queues hold it.
#[derive(Debug)]
pub(crate) struct FakeDevice {
    pub(crate) state: Arc<State>,
    pub(crate) index: u32,
    /// The inner backend's device.
    pub(crate) inner: *mut abi::DeviceHandle,
}

// SAFETY: device functions may be called from any thread, by the boundary's rules.
unsafe impl Send for FakeDevice {}
// SAFETY: as above.
unsafe impl Sync for FakeDevice {}

impl FakeDevice {
    pub(crate) fn strike(&self, at: Point, bytes: u64) -> Result<Effect> {
        self.state.strike(at, self.index, bytes)
    }

    pub(crate) fn table(&self) -> &DeviceTable {
        &self.state.inner.device
    }
}

pub(crate) const TABLE: DeviceTable = DeviceTable {
    struct_size: size_of::<DeviceTable>(),
    close: Some(close),
    buffer_alloc: Some(buffer_alloc),
    buffer_import: Some(buffer_import),
    buffer_free: Some(buffer_free),
    buffer_map: Some(buffer_map),
    weight_layout: Some(weight_layout),
    program_supports: Some(program::program_supports),
    program_memory: Some(program::program_memory),
    program_compile: Some(program::program_compile),
    executable_free: Some(program::executable_free),
    queue_create: Some(queue::queue_create),
    queue_free: Some(queue::queue_free),
    queue_write: Some(queue::queue_write),
    queue_read: Some(queue::queue_read),
    queue_copy: Some(queue::queue_copy),
    queue_upload: Some(queue::queue_upload),
    queue_run: Some(queue::queue_run),
    queue_wait: Some(queue::queue_wait),
};

// Every function below is called by the host under the boundary's contract: pointers are null or valid for what their type says, handles
// came from this table and are freed once. That contract is the SAFETY of every block here.

thunks! {
    fn buffer_alloc(
        device: *const abi::DeviceHandle, desc: *const abi::BufferDesc, out: *mut *mut abi::BufferHandle; err
    ) {
        let (device, desc) = (object::<FakeDevice, _>(device)?, sized(desc)?);
        device.state.ledger().device(device.index).alloc_calls += 1;
        if matches!(device.strike(Point::Alloc, desc.size)?, Effect::Null) {
            return Ok(());
        }
        device.alloc(&desc, out, err)
    }

    fn buffer_import(
        device: *const abi::DeviceHandle, desc: *const abi::BufferDesc, ptr: *const u8,
        out: *mut *mut abi::BufferHandle; err
    ) {
        let (device, desc) = (object::<FakeDevice, _>(device)?, sized(desc)?);
        if matches!(device.strike(Point::Import, desc.size)?, Effect::Null) {
            return Ok(());
        }
        device.import(&desc, ptr, out, err)
    }

    fn buffer_map(device: *const abi::DeviceHandle, buffer: *const abi::BufferHandle, out: *mut *mut u8; err) {
        let device = object::<FakeDevice, _>(device)?;
        if matches!(device.strike(Point::Map, 0)?, Effect::Null) {
            return Ok(());
        }
        let live = device.state.ledger().buffer(device.index, buffer)?;
        let config = device.state.buffer_type(device.index, live.buffer_type)?;
        if host_access(config)? != HostAccess::MAPPED {
            return Err(device.state.ledger().refuse(format!("`{}` is not mapped", config.name)));
        }
        forwarded(need(device.table().buffer_map)?(device.inner, buffer, out, err))
    }

    fn weight_layout(device: *const abi::DeviceHandle, desc: *const WeightDesc, out: *mut WeightLayout; err) {
        let (device, desc) = (object::<FakeDevice, _>(device)?, sized(desc)?);
        if matches!(device.strike(Point::WeightLayout, 0)?, Effect::Null) {
            return Ok(());
        }
        let (layout, _) = device.layout(&desc, err)?;
        let size = device.state.config.stated_size("weight_layout", layout.struct_size);
        put_sized(out, &layout, size)
    }
}

impl FakeDevice {
    /// # Safety
    /// `out` and `err` are null or writable.
    unsafe fn alloc(
        &self,
        desc: &abi::BufferDesc,
        out: *mut *mut abi::BufferHandle,
        err: *mut abi::ErrorRecord,
    ) -> Result<()> {
        let config = self.state.buffer_type(self.index, desc.buffer_type)?;
        let counted = desc.size.checked_next_multiple_of(config.granularity.max(1));
        let counted = counted.ok_or_else(|| Failure::invalid("a size that overflows"))?;
        self.check_max_size(config, desc.size)?;
        let mut ledger = self.state.ledger();
        // Checked and entered under one lock, so that two threads are not given the same bytes.
        for (heap, budget) in self.budgets(config)? {
            let free = budget.saturating_sub(ledger.live_bytes(self.index, heap));
            if counted > free {
                let numbers = Numbers {
                    message: format!("`{}` has no more", config.name),
                    asked: Some(desc.size),
                    free: Some(free),
                    ..Numbers::default()
                };
                return Err(Failure::with(Status::OUT_OF_MEMORY, numbers));
            }
        }
        let inner = abi::BufferDesc { buffer_type: INNER_TYPE, ..*desc };
        let mut handle = std::ptr::null_mut();
        let alloc = need(self.table().buffer_alloc)?;
        // SAFETY: the inner table's function with its own handle; the record is the caller's.
        forwarded(unsafe { alloc(self.inner, &raw const inner, &raw mut handle, err) })?;
        let live = self.live(desc, config, counted, false);
        ledger.add_buffer(handle, live, desc.usage);
        // SAFETY: null or writable by the caller's word.
        unsafe { put(out, handle) }
    }

    fn live(
        &self,
        desc: &abi::BufferDesc,
        config: &BufferTypeConfig,
        counted: u64,
        imported: bool,
    ) -> Live {
        Live {
            device: self.index,
            size: desc.size,
            counted,
            buffer_type: desc.buffer_type,
            heap: config.heap,
            imported,
            bound: 0,
        }
    }

    /// The stated limit first, then the true one behind it.
    fn check_max_size(&self, config: &BufferTypeConfig, size: u64) -> Result<()> {
        let over = |status, limit, native| {
            let message = format!("`{}` gives {limit} bytes in one buffer", config.name);
            let numbers =
                Numbers { message, asked: Some(size), limit: Some(limit), free: None, native };
            Err(Failure::with(status, numbers))
        };
        if let Some(limit) = self.state.max_size(config)?.get().filter(|limit| size > *limit) {
            return over(Status::TOO_BIG, limit, None);
        }
        match config.real_max_size {
            Some(limit) if size > limit => {
                over(config.refusal.status.status()?, limit, config.refusal.native_code)
            }
            _ => Ok(()),
        }
    }

    /// What bounds an allocation: its heap's true bytes, and the device's.
    fn budgets(&self, config: &BufferTypeConfig) -> Result<Vec<(Option<u32>, u64)>> {
        let heap = self.state.heap(self.index, config.heap)?;
        let stated = heap.free.resolve(|| Ok(abi::Figure::UNKNOWN))?;
        let stated = (stated.state == FigureState::KNOWN).then_some(stated.value);
        let of_heap = heap.budget.or(stated).map(|budget| (Some(config.heap), budget));
        let of_device = self.state.device(self.index)?.budget_bytes.map(|budget| (None, budget));
        Ok(of_heap.into_iter().chain(of_device).collect())
    }

    /// # Safety
    /// As `buffer_import` of the table.
    unsafe fn import(
        &self,
        desc: &abi::BufferDesc,
        ptr: *const u8,
        out: *mut *mut abi::BufferHandle,
        err: *mut abi::ErrorRecord,
    ) -> Result<()> {
        let config = self.state.buffer_type(self.index, desc.buffer_type)?;
        let mut ledger = self.state.ledger();
        if !config.import {
            return Err(ledger.refuse(format!("`{}` imports nothing", config.name)));
        }
        let alignment = config.import_alignment.max(1);
        if !(ptr.addr() as u64).is_multiple_of(alignment) || !desc.size.is_multiple_of(alignment) {
            let what =
                format!("an import of {} bytes at {ptr:p}, not aligned to {alignment}", desc.size);
            return Err(ledger.refuse(what));
        }
        self.check_max_size(config, desc.size)?;
        let inner = abi::BufferDesc { buffer_type: INNER_TYPE, ..*desc };
        let mut handle = std::ptr::null_mut();
        let import = need(self.table().buffer_import)?;
        // SAFETY: the inner table's function with its own handle; the memory lives by the caller's word.
        forwarded(unsafe { import(self.inner, &raw const inner, ptr, &raw mut handle, err) })?;
        ledger.add_buffer(handle, self.live(desc, config, 0, true), desc.usage);
        // SAFETY: null or writable by the caller's word.
        unsafe { put(out, handle) }
    }

    /// The layout that is stated for a weight, and the inner backend's.
    ///
    /// # Safety
    /// `err` is null or valid.
    pub(crate) unsafe fn layout(
        &self,
        desc: &WeightDesc,
        err: *mut abi::ErrorRecord,
    ) -> Result<(WeightLayout, WeightLayout)> {
        let mut inner =
            WeightLayout { struct_size: size_of::<WeightLayout>(), ..Default::default() };
        let call = need(self.table().weight_layout)?;
        // SAFETY: the inner table's function with its own handle.
        forwarded(unsafe { call(self.inner, std::ptr::from_ref(desc), &raw mut inner, err) })?;
        let config = self.state.device(self.index)?;
        let mut stated = inner;
        if let LayoutConfig::Grouped { rows_per_group, pad } = config.weight_layout
            && desc.uses == weight_use::MATMUL
        {
            let n = u64::from(rows_per_group / inner.rows_per_group.max(1));
            if n == 0 || !rows_per_group.is_multiple_of(inner.rows_per_group.max(1)) {
                let (ours, theirs) = (rows_per_group, inner.rows_per_group);
                return Err(Failure::from(format!(
                    "groups of {ours} rows over groups of {theirs}"
                )));
            }
            let bytes = inner.group_bytes.checked_mul(n).and_then(|bytes| bytes.checked_add(pad));
            stated.layout = LAYOUT_GROUPED;
            stated.rows_per_group = rows_per_group;
            stated.group_bytes =
                bytes.ok_or_else(|| Failure::invalid("a group's bytes overflow"))?;
        }
        stated.alignment = stated.alignment.max(config.weight_alignment).max(1);
        Ok((stated, inner))
    }
}

unsafe extern "C" fn buffer_free(device: *const abi::DeviceHandle, buffer: *mut abi::BufferHandle) {
    let run = || {
        // SAFETY: the boundary's contract, above.
        let device = unsafe { object::<FakeDevice, _>(device) }?;
        // Forgotten first: the inner backend may give the address to another buffer at once.
        if device.state.ledger().remove_buffer(buffer) {
            // SAFETY: the inner table's function, with its own handles.
            unsafe { need(device.table().buffer_free)?(device.inner, buffer) }
        }
        device.state.publish();
        Ok(())
    };
    // SAFETY: a null record is allowed.
    unsafe { guard(std::ptr::null_mut(), run) };
}

unsafe extern "C" fn close(device: *mut abi::DeviceHandle) {
    let run = || {
        // SAFETY: the boundary's contract: the handle is given back, once.
        let device = unsafe { Arc::from_raw(device.cast::<FakeDevice>().cast_const()) };
        let mut ledger = device.state.ledger();
        let figures = ledger.device(device.index);
        figures.open -= 1;
        let left = [
            (figures.queues, "queues"),
            (figures.executables, "executables"),
            (figures.buffers, "buffers"),
        ];
        // Of several handles of one device only the last tells whose things are left.
        if figures.open == 0 {
            for (n, what) in left.into_iter().filter(|(n, _)| *n > 0) {
                ledger.violation(format!("a device was closed with {n} {what}"));
            }
        }
        drop(ledger);
        // SAFETY: the inner table's function, with its own handle.
        unsafe { need(device.table().close)?(device.inner) }
        device.state.publish();
        Ok(())
    };
    // SAFETY: a null record is allowed.
    unsafe { guard(std::ptr::null_mut(), run) };
}
