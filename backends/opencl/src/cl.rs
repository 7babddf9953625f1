//! The calls of OpenCL that this backend makes, each once: handles that release themselves, codes that become errors.
//!
//! The raw functions of `ocl_core::ffi` are called, not the crate's wrappers: those assert on lists and dimensions, and format errors as
//! banners of many lines. Here every `cl_int` becomes an [`Error`] with the code and its name, in one line.

#![expect(unsafe_code, reason = "a C interface")]

use num_traits::FromPrimitive;
use ocl_core::ffi;
use ocl_core::ffi::{cl_device_id, cl_int, cl_mem, cl_platform_id, cl_uint};
use std::ffi::{CString, c_void};
use std::ptr::{null, null_mut};
use tegula_sdk::abi::Status;
use tegula_sdk::{Error, Result};

pub(crate) use ocl_core::ffi::cl_event;

/// What `clGetPlatformIDs` says through the loader when no driver is installed.
const PLATFORM_NOT_FOUND_KHR: cl_int = -1001;
const DEVICE_NOT_FOUND: cl_int = -1;

/// The name of a code, as the headers spell it.
pub(crate) fn code_name(code: cl_int) -> String {
    match (code, ocl_core::Status::from_i32(code)) {
        (PLATFORM_NOT_FOUND_KHR, _) => "CL_PLATFORM_NOT_FOUND_KHR".into(),
        (_, Some(status)) => format!("{status:?}"),
        _ => "an unknown code".into(),
    }
}

/// What a code means at the boundary. Codes say little: NVIDIA's driver answers CL_OUT_OF_RESOURCES to most of what fails in a kernel.
fn status_of(code: cl_int) -> Status {
    match code {
        ffi::CL_INVALID_BUFFER_SIZE => Status::TOO_BIG,
        ffi::CL_MEM_OBJECT_ALLOCATION_FAILURE
        | ffi::CL_OUT_OF_RESOURCES
        | ffi::CL_OUT_OF_HOST_MEMORY => Status::OUT_OF_MEMORY,
        ffi::CL_DEVICE_NOT_AVAILABLE => Status::DEVICE_LOST,
        _ => Status::DRIVER,
    }
}

/// The error of a call.
pub(crate) fn error(what: &str, code: cl_int) -> Error {
    let message = format!("{what}: {} ({code})", code_name(code));
    Error { native: Some(code.into()), ..Error::new(status_of(code), message) }
}

pub(crate) fn check(what: &str, code: cl_int) -> Result<()> {
    if code == ffi::CL_SUCCESS { Ok(()) } else { Err(error(what, code)) }
}

/// Declares a handle of OpenCL that is released when it is dropped.
macro_rules! owned {
    ($($(#[$meta:meta])* $name:ident: $raw:ident, $release:ident;)*) => {$(
        $(#[$meta])*
        #[derive(Debug)]
        pub(crate) struct $name(ffi::$raw);

        impl $name {
            /// Takes over a handle that a call gave together with its code.
            fn new(what: &str, raw: ffi::$raw, code: cl_int) -> Result<Self> {
                check(what, code)?;
                if raw.is_null() {
                    return Err(Error::new(Status::DRIVER, format!("{what}: no handle")));
                }
                Ok(Self(raw))
            }

            #[allow(dead_code, reason = "not every handle is named elsewhere")]
            pub(crate) fn raw(&self) -> ffi::$raw {
                self.0
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: a live handle of which this is the owner.
                let code = unsafe { ffi::$release(self.0) };
                if code != ffi::CL_SUCCESS {
                    log::debug!("{}: {}", stringify!($release), code_name(code));
                }
            }
        }

        // SAFETY: all calls of OpenCL but clSetKernelArg are safe from any thread; kernels are only used through `&mut`.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    )*};
}

owned! {
    /// A context of one device.
    Context: cl_context, clReleaseContext;
    /// An in-order queue.
    CommandQueue: cl_command_queue, clReleaseCommandQueue;
    /// A memory object.
    Mem: cl_mem, clReleaseMemObject;
    /// A built program.
    Program: cl_program, clReleaseProgram;
    /// A kernel with its arguments.
    Kernel: cl_kernel, clReleaseKernel;
    /// A point in a queue.
    Event: cl_event, clReleaseEvent;
}

/// Reads a variable-length property through `get(size, out, out_size)`.
fn bytes(
    what: &str,
    mut get: impl FnMut(usize, *mut c_void, *mut usize) -> cl_int,
) -> Result<Vec<u8>> {
    let mut size = 0;
    check(what, get(0, null_mut(), &raw mut size))?;
    // Nothing that is asked for here is longer; a driver that says so is not believed.
    if size > 64 << 20 {
        return Err(Error::new(Status::DRIVER, format!("{what}: {size} bytes")));
    }
    let mut out = vec![0u8; size];
    check(what, get(size, out.as_mut_ptr().cast(), &raw mut size))?;
    out.truncate(size);
    Ok(out)
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).trim().to_owned()
}

/// A platform.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlatformId(cl_platform_id);

/// A device of a platform. Root devices live as long as the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeviceId(cl_device_id);

// SAFETY: ids are names that any thread may use.
unsafe impl Send for PlatformId {}
// SAFETY: as above.
unsafe impl Sync for PlatformId {}
// SAFETY: as above.
unsafe impl Send for DeviceId {}
// SAFETY: as above.
unsafe impl Sync for DeviceId {}

/// All platforms; none where no driver is installed.
pub(crate) fn platforms() -> Result<Vec<PlatformId>> {
    let mut n: cl_uint = 0;
    // SAFETY: asks for the number only.
    let code = unsafe { ffi::clGetPlatformIDs(0, null_mut(), &raw mut n) };
    if code == PLATFORM_NOT_FOUND_KHR || (code == ffi::CL_SUCCESS && n == 0) {
        return Ok(Vec::new());
    }
    check("clGetPlatformIDs", code)?;
    let mut ids = vec![null_mut(); n.min(256) as usize];
    // SAFETY: the list holds as many ids as it says.
    let code = unsafe { ffi::clGetPlatformIDs(ids.len() as cl_uint, ids.as_mut_ptr(), null_mut()) };
    check("clGetPlatformIDs", code)?;
    Ok(ids.into_iter().map(PlatformId).collect())
}

impl PlatformId {
    /// A property that is text.
    pub(crate) fn text(self, name: cl_uint) -> Result<String> {
        let get = |size, out, out_size| {
            // SAFETY: `out` holds `size` bytes.
            unsafe { ffi::clGetPlatformInfo(self.0, name, size, out, out_size) }
        };
        Ok(text(&bytes("clGetPlatformInfo", get)?))
    }

    /// All devices of all types; none is no error.
    pub(crate) fn devices(self) -> Result<Vec<DeviceId>> {
        let all = ffi::CL_DEVICE_TYPE_ALL;
        let mut n: cl_uint = 0;
        // SAFETY: asks for the number only.
        let code = unsafe { ffi::clGetDeviceIDs(self.0, all, 0, null_mut(), &raw mut n) };
        if code == DEVICE_NOT_FOUND || (code == ffi::CL_SUCCESS && n == 0) {
            return Ok(Vec::new());
        }
        check("clGetDeviceIDs", code)?;
        let mut ids = vec![null_mut(); n.min(256) as usize];
        let room = ids.len() as cl_uint;
        // SAFETY: the list holds as many ids as it says.
        let code = unsafe { ffi::clGetDeviceIDs(self.0, all, room, ids.as_mut_ptr(), null_mut()) };
        check("clGetDeviceIDs", code)?;
        Ok(ids.into_iter().map(DeviceId).collect())
    }
}

impl DeviceId {
    /// A number that no other device of the process has.
    pub(crate) fn key(self) -> usize {
        self.0 as usize
    }

    /// A property's bytes.
    pub(crate) fn bytes(self, name: cl_uint) -> Result<Vec<u8>> {
        let get = |size, out, out_size| {
            // SAFETY: `out` holds `size` bytes.
            unsafe { ffi::clGetDeviceInfo(self.0, name, size, out, out_size) }
        };
        bytes("clGetDeviceInfo", get)
    }

    /// A property that is text.
    pub(crate) fn text(self, name: cl_uint) -> Result<String> {
        Ok(text(&self.bytes(name)?))
    }

    /// A property that is an integer of 4 or 8 bytes.
    pub(crate) fn number(self, name: cl_uint) -> Result<u64> {
        let bytes = self.bytes(name)?;
        match bytes.as_slice() {
            [a, b, c, d] => Ok(u32::from_ne_bytes([*a, *b, *c, *d]).into()),
            [a, b, c, d, e, f, g, h] => Ok(u64::from_ne_bytes([*a, *b, *c, *d, *e, *f, *g, *h])),
            other => Err(Error::new(
                Status::DRIVER,
                format!("clGetDeviceInfo {name:#x}: {} bytes are no number", other.len()),
            )),
        }
    }
}

impl Context {
    /// A context of this device alone.
    pub(crate) fn create(device: DeviceId) -> Result<Self> {
        let mut code = 0;
        // SAFETY: one device; no callback.
        let raw = unsafe {
            ffi::clCreateContext(null(), 1, &raw const device.0, None, null_mut(), &raw mut code)
        };
        Self::new("clCreateContext", raw, code)
    }

    pub(crate) fn queue(&self, device: DeviceId, profile: bool) -> Result<CommandQueue> {
        let properties = if profile { ffi::CL_QUEUE_PROFILING_ENABLE } else { 0 };
        let mut code = 0;
        // SAFETY: handles are live.
        let raw = unsafe { ffi::clCreateCommandQueue(self.0, device.0, properties, &raw mut code) };
        CommandQueue::new("clCreateCommandQueue", raw, code)
    }

    /// A buffer; `flags` without host pointer.
    pub(crate) fn buffer(&self, flags: u64, size: u64) -> Result<Mem> {
        let size = usize::try_from(size).map_err(|_| Error::invalid("a buffer over 2^64 bytes"))?;
        let mut code = 0;
        // SAFETY: no host pointer is named.
        let raw = unsafe { ffi::clCreateBuffer(self.0, flags, size, null_mut(), &raw mut code) };
        Mem::new("clCreateBuffer", raw, code)
    }

    /// A buffer over host memory: what a processor's kernels work on, without a copy.
    ///
    /// # Safety
    /// `size` bytes at `ptr` outlive the buffer.
    pub(crate) unsafe fn host_buffer(&self, ptr: *mut u8, size: u64) -> Result<Mem> {
        let size = usize::try_from(size).map_err(|_| Error::invalid("a buffer over 2^64 bytes"))?;
        let flags = ffi::CL_MEM_READ_WRITE | ffi::CL_MEM_USE_HOST_PTR;
        let mut code = 0;
        // SAFETY: the memory is there by the caller's word.
        let raw = unsafe { ffi::clCreateBuffer(self.0, flags, size, ptr.cast(), &raw mut code) };
        Mem::new("clCreateBuffer", raw, code)
    }

    /// A program from source, not built.
    pub(crate) fn program(&self, source: &str) -> Result<Program> {
        let (ptr, len) = (source.as_ptr().cast(), source.len());
        let mut code = 0;
        // SAFETY: one string with its length.
        let raw = unsafe {
            ffi::clCreateProgramWithSource(self.0, 1, &raw const ptr, &raw const len, &raw mut code)
        };
        Program::new("clCreateProgramWithSource", raw, code)
    }

    /// A program from what [`Program::binary`] gave.
    pub(crate) fn program_of_binary(&self, device: DeviceId, binary: &[u8]) -> Result<Program> {
        let (ptr, len) = (binary.as_ptr(), binary.len());
        let (mut status, mut code) = (0, 0);
        // SAFETY: one device, one binary with its length.
        let raw = unsafe {
            ffi::clCreateProgramWithBinary(
                self.0,
                1,
                &raw const device.0,
                &raw const len,
                &raw const ptr,
                &raw mut status,
                &raw mut code,
            )
        };
        let program = Program::new("clCreateProgramWithBinary", raw, code)?;
        check("clCreateProgramWithBinary", status)?;
        Ok(program)
    }
}

impl Program {
    /// Builds for the device; the build log is in the error.
    pub(crate) fn build(&self, device: DeviceId, options: &str) -> Result<()> {
        let options = CString::new(options).map_err(|e| Error::invalid(e.to_string()))?;
        // SAFETY: no callback, so the call returns when the build has ended.
        let code = unsafe {
            ffi::clBuildProgram(self.0, 1, &raw const device.0, options.as_ptr(), None, null_mut())
        };
        if code == ffi::CL_SUCCESS {
            return Ok(());
        }
        let get = |size, out, out_size| {
            let name = ffi::CL_PROGRAM_BUILD_LOG;
            // SAFETY: `out` holds `size` bytes.
            unsafe { ffi::clGetProgramBuildInfo(self.0, device.0, name, size, out, out_size) }
        };
        let log = bytes("clGetProgramBuildInfo", get).map_or_else(|_| String::new(), |b| text(&b));
        let error = error("clBuildProgram", code);
        Err(Error { message: format!("{}; build log:\n{log}", error.message), ..error })
    }

    /// The built program as the driver stores it.
    pub(crate) fn binary(&self) -> Result<Vec<u8>> {
        let mut size = 0usize;
        // SAFETY: a context of one device has one size.
        let code = unsafe {
            ffi::clGetProgramInfo(
                self.0,
                ffi::CL_PROGRAM_BINARY_SIZES,
                size_of::<usize>(),
                (&raw mut size).cast(),
                null_mut(),
            )
        };
        check("clGetProgramInfo", code)?;
        if size == 0 || size > 256 << 20 {
            return Err(Error::new(Status::DRIVER, format!("a program of {size} bytes")));
        }
        let mut out = vec![0u8; size];
        let mut list = [out.as_mut_ptr()];
        // SAFETY: one pointer to as many bytes as the driver said.
        let code = unsafe {
            ffi::clGetProgramInfo(
                self.0,
                ffi::CL_PROGRAM_BINARIES,
                size_of_val(&list),
                list.as_mut_ptr().cast(),
                null_mut(),
            )
        };
        check("clGetProgramInfo", code)?;
        Ok(out)
    }

    pub(crate) fn kernel(&self, name: &str) -> Result<Kernel> {
        let c_name = CString::new(name).map_err(|e| Error::invalid(e.to_string()))?;
        let mut code = 0;
        // SAFETY: a terminated string.
        let raw = unsafe { ffi::clCreateKernel(self.0, c_name.as_ptr(), &raw mut code) };
        Kernel::new(&format!("clCreateKernel {name}"), raw, code)
    }
}

impl Kernel {
    /// Sets an argument to the bytes of `value`. `&mut`, because arguments are the one thing that is not safe from two threads.
    fn set<T: Copy>(&mut self, index: u32, value: &T) -> Result<()> {
        let ptr: *const T = value;
        // SAFETY: the driver copies `size_of::<T>()` bytes and compares with the kernel's declaration.
        let code = unsafe { ffi::clSetKernelArg(self.0, index, size_of::<T>(), ptr.cast()) };
        check("clSetKernelArg", code)
    }

    pub(crate) fn set_mem(&mut self, index: u32, mem: cl_mem) -> Result<()> {
        self.set(index, &mem)
    }

    pub(crate) fn set_u64(&mut self, index: u32, value: u64) -> Result<()> {
        self.set(index, &value)
    }

    pub(crate) fn set_u32(&mut self, index: u32, value: u32) -> Result<()> {
        self.set(index, &value)
    }

    pub(crate) fn set_f32(&mut self, index: u32, value: f32) -> Result<()> {
        self.set(index, &value)
    }
}

/// Where an enqueue puts its event, if one is wanted.
fn event_slot(raw: &mut cl_event, wanted: bool) -> *mut cl_event {
    if wanted { raw } else { null_mut() }
}

impl CommandQueue {
    /// Runs a kernel over `global` work-items in groups of `local`.
    pub(crate) fn kernel(
        &self,
        kernel: &Kernel,
        global: [usize; 3],
        local: [usize; 3],
        with_event: bool,
    ) -> Result<Option<Event>> {
        let mut raw = null_mut();
        // SAFETY: three dimensions in both lists; arguments are set, which the driver checks.
        let code = unsafe {
            ffi::clEnqueueNDRangeKernel(
                self.0,
                kernel.0,
                3,
                null(),
                global.as_ptr(),
                local.as_ptr(),
                0,
                null(),
                event_slot(&mut raw, with_event),
            )
        };
        check("clEnqueueNDRangeKernel", code)?;
        with_event.then(|| Event::new("clEnqueueNDRangeKernel", raw, 0)).transpose()
    }

    /// Copies from host memory.
    ///
    /// # Safety
    /// `src` holds `size` bytes until the copy is done; with `blocking` that is when the call returns.
    pub(crate) unsafe fn write(
        &self,
        mem: cl_mem,
        offset: u64,
        size: u64,
        src: *const u8,
        blocking: bool,
    ) -> Result<()> {
        // SAFETY: as the caller promises; the range was checked against the buffer.
        let code = unsafe {
            ffi::clEnqueueWriteBuffer(
                self.0,
                mem,
                blocking.into(),
                offset as usize,
                size as usize,
                src.cast(),
                0,
                null(),
                null_mut(),
            )
        };
        check("clEnqueueWriteBuffer", code)
    }

    /// Copies to host memory.
    ///
    /// # Safety
    /// As for [`CommandQueue::write`].
    pub(crate) unsafe fn read(
        &self,
        mem: cl_mem,
        offset: u64,
        size: u64,
        dst: *mut u8,
        blocking: bool,
    ) -> Result<()> {
        // SAFETY: as the caller promises; the range was checked against the buffer.
        let code = unsafe {
            ffi::clEnqueueReadBuffer(
                self.0,
                mem,
                blocking.into(),
                offset as usize,
                size as usize,
                dst.cast(),
                0,
                null(),
                null_mut(),
            )
        };
        check("clEnqueueReadBuffer", code)
    }

    pub(crate) fn copy(
        &self,
        (src, src_offset): (cl_mem, u64),
        (dst, dst_offset): (cl_mem, u64),
        size: u64,
    ) -> Result<()> {
        // SAFETY: handles are live, ranges were checked.
        let code = unsafe {
            ffi::clEnqueueCopyBuffer(
                self.0,
                src,
                dst,
                src_offset as usize,
                dst_offset as usize,
                size as usize,
                0,
                null(),
                null_mut(),
            )
        };
        check("clEnqueueCopyBuffer", code)
    }

    /// Maps a whole buffer for reading and writing and waits for it.
    pub(crate) fn map(&self, mem: &Mem, size: u64) -> Result<*mut u8> {
        let mut code = 0;
        // SAFETY: the handle is live; the call blocks until the memory is mapped.
        let ptr = unsafe {
            ffi::clEnqueueMapBuffer(
                self.0,
                mem.0,
                1,
                ffi::CL_MAP_READ | ffi::CL_MAP_WRITE,
                0,
                size as usize,
                0,
                null(),
                null_mut(),
                &raw mut code,
            )
        };
        check("clEnqueueMapBuffer", code)?;
        if ptr.is_null() {
            return Err(Error::new(Status::DRIVER, "clEnqueueMapBuffer: a null pointer"));
        }
        Ok(ptr.cast())
    }

    /// Unmaps and waits.
    pub(crate) fn unmap(&self, mem: &Mem, ptr: *mut u8) -> Result<()> {
        // SAFETY: `ptr` came from `map` of the same buffer.
        let code = unsafe {
            ffi::clEnqueueUnmapMemObject(self.0, mem.0, ptr.cast(), 0, null(), null_mut())
        };
        check("clEnqueueUnmapMemObject", code)?;
        self.finish()
    }

    /// An event that completes when everything before it has.
    pub(crate) fn marker(&self) -> Result<Event> {
        let mut raw = null_mut();
        // SAFETY: an empty wait list stands for all commands before.
        let code = unsafe { ffi::clEnqueueMarkerWithWaitList(self.0, 0, null(), &raw mut raw) };
        Event::new("clEnqueueMarkerWithWaitList", raw, code)
    }

    /// Makes what follows wait for an event of another queue of the context.
    pub(crate) fn wait_for(&self, event: &Event) -> Result<()> {
        // SAFETY: one live event.
        let code =
            unsafe { ffi::clEnqueueBarrierWithWaitList(self.0, 1, &raw const event.0, null_mut()) };
        check("clEnqueueBarrierWithWaitList", code)
    }

    pub(crate) fn flush(&self) -> Result<()> {
        // SAFETY: a live queue.
        check("clFlush", unsafe { ffi::clFlush(self.0) })
    }

    pub(crate) fn finish(&self) -> Result<()> {
        // SAFETY: a live queue.
        check("clFinish", unsafe { ffi::clFinish(self.0) })
    }
}

impl Event {
    /// Waits; an error of the command is given.
    pub(crate) fn wait(&self) -> Result<()> {
        // SAFETY: one live event.
        let code = unsafe { ffi::clWaitForEvents(1, &raw const self.0) };
        // The list's error says only that there is one; the event says which.
        match self.status() {
            Ok(_) => check("clWaitForEvents", code),
            Err(error) => Err(error),
        }
    }

    /// Whether the command is done; its error if it failed.
    pub(crate) fn status(&self) -> Result<bool> {
        let mut status: cl_int = 0;
        // SAFETY: a cl_int is asked for.
        let code = unsafe {
            ffi::clGetEventInfo(
                self.0,
                ffi::CL_EVENT_COMMAND_EXECUTION_STATUS,
                size_of::<cl_int>(),
                (&raw mut status).cast(),
                null_mut(),
            )
        };
        check("clGetEventInfo", code)?;
        if status < 0 {
            return Err(error("a command of the queue", status));
        }
        Ok(status == ffi::CL_COMPLETE)
    }

    /// Nanoseconds between the command's start and end.
    pub(crate) fn nanoseconds(&self) -> Result<u64> {
        let read = |name| {
            let mut value = 0u64;
            // SAFETY: a cl_ulong is asked for.
            let code = unsafe {
                ffi::clGetEventProfilingInfo(
                    self.0,
                    name,
                    size_of::<u64>(),
                    (&raw mut value).cast(),
                    null_mut(),
                )
            };
            check("clGetEventProfilingInfo", code).map(|()| value)
        };
        let (start, end) =
            (read(ffi::CL_PROFILING_COMMAND_START)?, read(ffi::CL_PROFILING_COMMAND_END)?);
        Ok(end.saturating_sub(start))
    }
}
