//! A plugin over the SDK whose devices each panic at one point: device `i` in [`Point::ALL`]`[i]`, and device 0 nowhere.
//!
//! What has no device to stand for it is chosen by the environment: `TEGULA_TEST_PANIC=open`. Its one program is the identity.

#![expect(unsafe_code, reason = "copies operands that the host names by address")]

use std::time::Duration;
use tegula_sdk::abi::{
    BufferDesc, BufferTypeInfo, CompileOptions, DeviceInfo, DeviceOptions, HeapInfo, LAYOUT_NATIVE,
    WeightLayout,
};
use tegula_sdk::host_memory::HostBuffer;
use tegula_sdk::host_memory::device::{Processor, buffer_type_info, heap_info};
use tegula_sdk::program::Program;
use tegula_sdk::{
    Backend, Device, Error, Memory, Operand, Queue, Range, Result, Run, Upload, Weight,
    WeightBinding,
};

/// A place to panic in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "named like the functions")]
pub enum Point {
    Nowhere,
    DeviceInfo,
    HeapInfo,
    BufferTypeInfo,
    OpenDevice,
    Alloc,
    Import,
    Map,
    WeightLayout,
    Supports,
    Memory,
    Compile,
    MakeQueue,
    Write,
    Read,
    Copy,
    Upload,
    Run,
    Wait,
    Free,
}

impl Point {
    /// By index of the device.
    pub const ALL: [Self; 20] = [
        Self::Nowhere,
        Self::DeviceInfo,
        Self::HeapInfo,
        Self::BufferTypeInfo,
        Self::OpenDevice,
        Self::Alloc,
        Self::Import,
        Self::Map,
        Self::WeightLayout,
        Self::Supports,
        Self::Memory,
        Self::Compile,
        Self::MakeQueue,
        Self::Write,
        Self::Read,
        Self::Copy,
        Self::Upload,
        Self::Run,
        Self::Wait,
        Self::Free,
    ];

    fn of(index: u32) -> Result<Self> {
        let point = Self::ALL.get(index as usize).copied();
        point.ok_or_else(|| Error::not_found(format!("no device {index}")))
    }

    /// Panics if this is the point.
    #[expect(clippy::panic, reason = "what the plugin is for")]
    fn pass(self, here: Self) {
        if self == here {
            panic!("told to panic in {here:?}");
        }
    }
}

/// The backend.
pub struct Panicking;

impl Backend for Panicking {
    const ID: &'static str = "panic";
    const DESCRIPTION: &'static str = "panics where it is told to";
    type Device = PanickingDevice;

    #[expect(clippy::panic, reason = "what the plugin is for")]
    fn open() -> Result<Self> {
        log::debug!("opening");
        if std::env::var_os("TEGULA_TEST_PANIC").is_some_and(|point| point == "open") {
            panic!("told to panic in open");
        }
        Ok(Self)
    }

    fn n_devices(&self) -> u32 {
        Point::ALL.len() as u32
    }

    fn device_info(&self, index: u32) -> Result<DeviceInfo> {
        Point::of(index)?.pass(Point::DeviceInfo);
        Ok(Processor::read().device_info("none", 0))
    }

    fn heap_info(&self, index: u32, _: u32) -> Result<HeapInfo> {
        Point::of(index)?.pass(Point::HeapInfo);
        Ok(heap_info())
    }

    fn buffer_type_info(&self, index: u32, _: u32) -> Result<BufferTypeInfo> {
        Point::of(index)?.pass(Point::BufferTypeInfo);
        Ok(buffer_type_info())
    }

    fn open_device(&self, index: u32, _: &DeviceOptions) -> Result<PanickingDevice> {
        let point = Point::of(index)?;
        point.pass(Point::OpenDevice);
        log::info!("device {index} will panic in {point:?}");
        Ok(PanickingDevice(point))
    }
}

/// A device.
pub struct PanickingDevice(Point);

/// Host memory.
pub struct Buffer(Point, HostBuffer);

impl Drop for Buffer {
    fn drop(&mut self) {
        self.0.pass(Point::Free);
    }
}

/// An order of work.
pub struct PanickingQueue(Point, u64);

impl Device for PanickingDevice {
    type Buffer = Buffer;
    type Executable = ();
    type Queue = PanickingQueue;

    fn alloc(&self, desc: &BufferDesc) -> Result<Buffer> {
        self.0.pass(Point::Alloc);
        Ok(Buffer(self.0, HostBuffer::alloc(desc.size)?))
    }

    unsafe fn import(&self, desc: &BufferDesc, ptr: *const u8) -> Result<Buffer> {
        self.0.pass(Point::Import);
        // SAFETY: passed on unchanged.
        Ok(Buffer(self.0, unsafe { HostBuffer::import(ptr, desc.size) }?))
    }

    fn map(&self, buffer: &Buffer) -> Result<*mut u8> {
        self.0.pass(Point::Map);
        buffer.1.map()
    }

    fn weight_layout(&self, weight: &Weight) -> Result<WeightLayout> {
        self.0.pass(Point::WeightLayout);
        Ok(WeightLayout {
            layout: LAYOUT_NATIVE,
            rows_per_group: 1,
            group_bytes: weight.dtype.row_bytes(weight.n_in)?,
            alignment: 1,
            ..WeightLayout::default()
        })
    }

    fn supports(&self, program: &Program) -> Result<Vec<bool>> {
        self.0.pass(Point::Supports);
        Ok(vec![true; program.ops.len()])
    }

    fn memory(&self, _: &Program, _: &CompileOptions) -> Result<Memory> {
        self.0.pass(Point::Memory);
        Ok(Memory::default())
    }

    fn compile(&self, _: Program, _: &CompileOptions, _: Vec<WeightBinding<Buffer>>) -> Result<()> {
        self.0.pass(Point::Compile);
        Ok(())
    }

    fn queue(&self) -> Result<PanickingQueue> {
        self.0.pass(Point::MakeQueue);
        Ok(PanickingQueue(self.0, 0))
    }
}

impl PanickingQueue {
    /// Copies, unless this is where to panic.
    ///
    /// # Safety
    /// Both are `size` bytes.
    unsafe fn copy_bytes(
        &mut self,
        here: Point,
        from: *const u8,
        to: *mut u8,
        size: u64,
    ) -> Result<u64> {
        self.0.pass(here);
        let size = usize::try_from(size).map_err(|error| Error::invalid(error.to_string()))?;
        // SAFETY: as the caller promises; `copy` allows overlap.
        unsafe { std::ptr::copy(from, to, size) };
        self.1 += 1;
        Ok(self.1)
    }
}

impl Queue<PanickingDevice> for PanickingQueue {
    unsafe fn write(&mut self, dst: Range<'_, Buffer>, src: *const u8) -> Result<u64> {
        let to = dst.buffer.1.ptr_mut(dst.offset, dst.size)?;
        // SAFETY: `to` is that many bytes, `src` by the caller's word.
        unsafe { self.copy_bytes(Point::Write, src, to, dst.size) }
    }

    unsafe fn read(&mut self, src: Range<'_, Buffer>, dst: *mut u8) -> Result<u64> {
        let from = src.buffer.1.ptr(src.offset, src.size)?;
        // SAFETY: `from` is that many bytes, `dst` by the caller's word.
        unsafe { self.copy_bytes(Point::Read, from, dst, src.size) }
    }

    fn copy(&mut self, src: Range<'_, Buffer>, dst: Range<'_, Buffer>) -> Result<u64> {
        let from = src.buffer.1.ptr(src.offset, src.size)?;
        let to = dst.buffer.1.ptr_mut(dst.offset, src.size)?;
        // SAFETY: both are that many bytes.
        unsafe { self.copy_bytes(Point::Copy, from, to, src.size) }
    }

    unsafe fn upload(&mut self, upload: &Upload<'_, Buffer>) -> Result<u64> {
        let to = upload.dst.buffer.1.ptr_mut(upload.dst.offset, upload.src_size)?;
        // SAFETY: `to` is that many bytes, `src` by the caller's word.
        unsafe { self.copy_bytes(Point::Upload, upload.src, to, upload.src_size) }
    }

    unsafe fn run(&mut self, (): &mut (), run: &Run<'_, Buffer>) -> Result<u64> {
        let (Operand::Host(from, size), Operand::Host(to, room)) = (run.input(0)?, run.output(0)?)
        else {
            return Err(Error::unsupported("operands in buffers"));
        };
        // SAFETY: host operands are that many bytes by the caller's word.
        unsafe { self.copy_bytes(Point::Run, from, to, size.min(room)) }
    }

    fn wait(&mut self, _: u64, _: Option<Duration>) -> Result<()> {
        self.0.pass(Point::Wait);
        Ok(())
    }
}

tegula_sdk::export_backend!(Panicking);
