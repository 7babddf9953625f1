//! OpenVINO's C interface as owned objects and results. Every `unsafe` call to it is here.
//!
//! The safe crate `openvino` lacks properties at compile, host-pointer tensors and remote contexts, so the raw bindings are called.
//! Objects are freed on drop; a null object never leaves a constructor.

#![expect(unsafe_code, reason = "calls of a C library")]

use openvino_sys as sys;
use std::ffi::{CStr, CString, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use tegula_sdk::abi::Status;
use tegula_sdk::{Error, Result};

/// Element types of tensors.
pub(crate) type Element = sys::ov_element_type_e;

/// What OpenVINO said, its cause first. Its texts run over many lines: places in its sources outermost first, the cause last.
pub(crate) fn failure(doing: &str, code: i64) -> Error {
    // SAFETY: gives a static text or null.
    let text = unsafe { sys::ov_get_last_err_msg() };
    let text = if text.is_null() {
        String::new()
    } else {
        // SAFETY: a text of the library, ended by 0, which lives until its next failure on this thread.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    of_text(doing, code, &text)
}

/// As [`failure`], of a text.
pub(crate) fn of_text(doing: &str, code: i64, text: &str) -> Error {
    let cause = cause_of(text);
    let message = match cause.is_empty() {
        true => format!("OpenVINO gives no reason ({doing}, code {code})"),
        false => format!("{cause} (OpenVINO, {doing}, code {code})"),
    };
    let lower = text.to_lowercase();
    let any = |words: &[&str]| words.iter().any(|word| lower.contains(word));
    let status = if any(&["exceeded max size", "cl_invalid_buffer_size"]) {
        Status::TOO_BIG
    } else if any(&[
        "out of memory",
        "out_of_resources",
        "cl_mem_object_allocation_failure",
        "bad_alloc",
    ]) {
        Status::OUT_OF_MEMORY
    } else {
        Status::DRIVER
    };
    Error { native: Some(code), ..Error::new(status, message) }
}

/// The lines of a text that say what happened, the last first, without places in OpenVINO's sources; at most 400 bytes.
fn cause_of(text: &str) -> String {
    let is_place = |line: &str| {
        line.starts_with("Exception from ")
            || (line.starts_with("Check '") && line.contains("' failed at "))
    };
    let mut cause = String::new();
    for line in text.lines().rev().map(str::trim).filter(|line| !line.is_empty()) {
        if is_place(line) {
            // Without any other line the check that failed is all there is.
            if !cause.is_empty() || line.starts_with("Exception from ") {
                continue;
            }
        }
        if !cause.is_empty() {
            cause.push_str("; ");
        }
        cause.push_str(line.trim_end_matches(':'));
        if cause.len() > 400 {
            let end = (0..=400).rev().find(|i| cause.is_char_boundary(*i)).unwrap_or(0);
            cause.truncate(end);
            break;
        }
    }
    cause
}

fn check(doing: &str, status: sys::ov_status_e) -> Result<()> {
    match status {
        sys::ov_status_e::OK => Ok(()),
        code => Err(failure(doing, code as i64)),
    }
}

fn text(what: &str) -> Result<CString> {
    CString::new(what).map_err(|_| Error::invalid(format!("a zero byte in `{what}`")))
}

/// Takes a text that the library allocated.
///
/// # Safety
/// `ptr` is null or a text of the library, ended by 0, that is not used again.
unsafe fn take_text(ptr: *mut std::ffi::c_char) -> String {
    if ptr.is_null() {
        return String::new();
    }
    // SAFETY: as the caller promises.
    let out = unsafe { CStr::from_ptr(ptr) }.to_string_lossy().into_owned();
    // SAFETY: as above.
    unsafe { sys::ov_free(ptr) };
    out
}

macro_rules! object {
    ($($(#[$meta:meta])* $name:ident: $raw:ty, $free:path;)*) => {$(
        $(#[$meta])*
        #[derive(Debug)]
        pub(crate) struct $name(NonNull<$raw>);

        impl $name {
            fn new(doing: &str, ptr: *mut $raw) -> Result<Self> {
                let ptr = NonNull::new(ptr);
                ptr.map(Self).ok_or_else(|| Error::new(Status::DRIVER, format!("OpenVINO gave nothing ({doing})")))
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: made by the library, freed once.
                unsafe { $free(self.0.as_ptr()) };
            }
        }

        // SAFETY: the library's objects belong to no thread.
        unsafe impl Send for $name {}
    )*};
}

object! {
    /// The library's core: devices and models.
    CoreObject: sys::ov_core_t, sys::ov_core_free;
    /// A model as read.
    Model: sys::ov_model_t, sys::ov_model_free;
    /// A model compiled for a device.
    Compiled: sys::ov_compiled_model_t, sys::ov_compiled_model_free;
    /// A place to run a compiled model.
    Request: sys::ov_infer_request_t, sys::ov_infer_request_free;
    /// A tensor, of host memory or of a device's.
    Tensor: sys::ov_tensor_t, sys::ov_tensor_free;
    /// A device's context.
    ContextObject: sys::ov_remote_context_t, sys::ov_remote_context_free;
}

// SAFETY: the core may be used by several threads at once, as its documentation says.
unsafe impl Sync for CoreObject {}
// SAFETY: as above; contexts are reference-counted inside and locked.
unsafe impl Sync for ContextObject {}
// SAFETY: a tensor is only read through shared references: its address, type and shape.
unsafe impl Sync for Tensor {}

/// A shape for the length of one call.
struct Shape(sys::ov_shape_t);

impl Shape {
    fn new(dims: &[i64]) -> Result<Self> {
        let mut shape = sys::ov_shape_t { rank: 0, dims: null_mut() };
        // SAFETY: `dims` has `dims.len()` elements, which are copied.
        let status =
            unsafe { sys::ov_shape_create(dims.len() as i64, dims.as_ptr(), &raw mut shape) };
        check("making a shape", status)?;
        Ok(Self(shape))
    }

    fn get(&self) -> sys::ov_shape_t {
        sys::ov_shape_t { rank: self.0.rank, dims: self.0.dims }
    }
}

impl Drop for Shape {
    fn drop(&mut self) {
        // SAFETY: made by `ov_shape_create`, freed once.
        unsafe { sys::ov_shape_free(&raw mut self.0) };
    }
}

/// Properties: names and values.
pub(crate) type Properties = Vec<(String, String)>;

/// Texts of properties, alive for one call.
struct RawProperties {
    _texts: Vec<(CString, CString)>,
    raw: Vec<sys::ov_property_t>,
}

impl RawProperties {
    fn new(properties: &[(String, String)]) -> Result<Self> {
        let texts: Result<Vec<_>> =
            properties.iter().map(|(key, value)| Ok((text(key)?, text(value)?))).collect();
        let texts = texts?;
        let raw = texts
            .iter()
            .map(|(key, value)| sys::ov_property_t {
                key: key.as_ptr(),
                value: value.as_ptr().cast(),
            })
            .collect();
        Ok(Self { _texts: texts, raw })
    }
}

/// The library, opened. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Core(Arc<CoreObject>);

impl Core {
    /// Opens the library's core.
    pub(crate) fn new() -> Result<Self> {
        let mut core = null_mut();
        // SAFETY: writes one pointer.
        check("opening", unsafe { sys::ov_core_create(&raw mut core) })?;
        Ok(Self(Arc::new(CoreObject::new("opening", core)?)))
    }

    fn ptr(&self) -> *mut sys::ov_core_t {
        self.0.0.as_ptr()
    }

    /// The library's version.
    pub(crate) fn version() -> String {
        let mut version =
            sys::ov_version_t { buildNumber: std::ptr::null(), description: std::ptr::null() };
        // SAFETY: fills the record; texts are freed below.
        if unsafe { sys::ov_get_openvino_version(&raw mut version) } != sys::ov_status_e::OK
            || version.buildNumber.is_null()
        {
            return "unknown".into();
        }
        // SAFETY: a text ended by 0.
        let out = unsafe { CStr::from_ptr(version.buildNumber) }.to_string_lossy().into_owned();
        // SAFETY: filled by the library, freed once.
        unsafe { sys::ov_version_free(&raw mut version) };
        out
    }

    /// Names of the devices: `CPU`, `GPU`, `GPU.0`.
    pub(crate) fn devices(&self) -> Result<Vec<String>> {
        let mut list = sys::ov_available_devices_t { devices: null_mut(), size: 0 };
        // SAFETY: fills the record.
        check("listing devices", unsafe {
            sys::ov_core_get_available_devices(self.ptr(), &raw mut list)
        })?;
        let mut out = Vec::new();
        for i in 0..list.size {
            // SAFETY: `size` texts ended by 0.
            let name = unsafe { CStr::from_ptr(*list.devices.add(i)) };
            out.push(name.to_string_lossy().into_owned());
        }
        // SAFETY: filled by the library, freed once.
        unsafe { sys::ov_available_devices_free(&raw mut list) };
        Ok(out)
    }

    /// A property of a device as text.
    pub(crate) fn property(&self, device: &str, key: &str) -> Result<String> {
        let (device, name) = (text(device)?, text(key)?);
        let mut value = null_mut();
        // SAFETY: both texts live for the call.
        check(&format!("reading {key}"), unsafe {
            sys::ov_core_get_property(self.ptr(), device.as_ptr(), name.as_ptr(), &raw mut value)
        })?;
        // SAFETY: a text that the library allocated for us.
        Ok(unsafe { take_text(value) })
    }

    /// Reads a model from its IR. The model, and what is compiled from it, shares the weights' memory.
    pub(crate) fn read(&self, xml: &str, weights: Option<&Tensor>) -> Result<Model> {
        let weights = weights.map_or(std::ptr::null(), |tensor| tensor.0.as_ptr().cast_const());
        let mut model = null_mut();
        // SAFETY: `xml.len()` bytes; the tensor is null or alive, and counted by the model.
        check("reading a model", unsafe {
            sys::ov_core_read_model_from_memory_buffer(
                self.ptr(),
                xml.as_ptr().cast(),
                xml.len(),
                weights,
                &raw mut model,
            )
        })?;
        Model::new("reading a model", model)
    }

    /// Compiles a model for a device, in a context where one is given.
    pub(crate) fn compile(
        &self,
        model: &Model,
        device: &str,
        context: Option<&Context>,
        properties: &Properties,
    ) -> Result<Compiled> {
        let properties = RawProperties::new(properties)?;
        let (n, list) = (properties.raw.len(), properties.raw.as_ptr());
        let mut compiled = null_mut();
        let doing = "compiling a model";
        let status = match context {
            // SAFETY: every pointer is alive for the call.
            Some(context) => unsafe {
                sys::ov_core_compile_model_with_context_props(
                    self.ptr(),
                    model.0.as_ptr(),
                    context.0.0.as_ptr(),
                    n,
                    list,
                    &raw mut compiled,
                )
            },
            None => {
                let device = text(device)?;
                // SAFETY: as above.
                unsafe {
                    sys::ov_core_compile_model_props(
                        self.ptr(),
                        model.0.as_ptr(),
                        device.as_ptr(),
                        n,
                        list,
                        &raw mut compiled,
                    )
                }
            }
        };
        check(doing, status)?;
        Compiled::new(doing, compiled)
    }

    /// The device's own context.
    pub(crate) fn context(&self, device: &str) -> Result<Context> {
        let device = text(device)?;
        let mut context = null_mut();
        // SAFETY: the text lives for the call.
        check("taking the device's context", unsafe {
            sys::ov_core_get_default_context(self.ptr(), device.as_ptr(), &raw mut context)
        })?;
        Ok(Context(Arc::new(ContextObject::new("taking the device's context", context)?)))
    }
}

/// A device's context. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Context(Arc<ContextObject>);

impl Context {
    /// Makes a tensor in the device's memory. `handles` are properties whose values are addresses, `texts` those whose values are texts.
    ///
    /// # Safety
    /// Handles are what their properties say, and stay alive for as long as the tensor.
    pub(crate) unsafe fn tensor(
        &self,
        element: Element,
        dims: &[i64],
        texts: &[(&str, &str)],
        handles: &[(&str, *const c_void)],
    ) -> Result<Tensor> {
        let shape = Shape::new(dims)?;
        let texts: Result<Vec<_>> =
            texts.iter().map(|(key, value)| Ok((text(key)?, text(value)?))).collect();
        let texts = texts?;
        let keys: Result<Vec<_>> =
            handles.iter().map(|(key, value)| Ok((text(key)?, *value))).collect();
        let keys = keys?;
        let of_texts = texts.iter().map(|(key, value)| sys::ov_property_t {
            key: key.as_ptr(),
            value: value.as_ptr().cast(),
        });
        let of_handles =
            keys.iter().map(|(key, value)| sys::ov_property_t { key: key.as_ptr(), value: *value });
        let list: Vec<_> = of_texts.chain(of_handles).collect();
        let mut tensor = null_mut();
        // SAFETY: every pointer lives for the call; handles are valid by the caller's word.
        check("making a tensor of the device", unsafe {
            sys::ov_remote_context_create_tensor_props(
                self.0.0.as_ptr(),
                element,
                shape.get(),
                list.len(),
                list.as_ptr(),
                &raw mut tensor,
            )
        })?;
        Tensor::new("making a tensor of the device", tensor)
    }
}

/// `NAME:value;` or `NAME value` pairs; values that are no numbers are left out.
fn parse_params(text: &str) -> Vec<(String, usize)> {
    let words: Vec<&str> =
        text.split([':', ';', ' ', '\n', ',', '{', '}']).filter(|word| !word.is_empty()).collect();
    words
        .windows(2)
        .filter_map(|pair| {
            let digits = pair[1].strip_prefix("0x")?;
            Some((pair[0].to_owned(), usize::from_str_radix(digits, 16).ok()?))
        })
        .collect()
}

impl Tensor {
    /// A tensor over host memory.
    ///
    /// # Safety
    /// The memory is large enough for the type and shape, aligned for the element, and lives as long as the tensor and every request it is
    /// given to.
    pub(crate) unsafe fn of_host(element: Element, dims: &[i64], ptr: *mut u8) -> Result<Self> {
        let shape = Shape::new(dims)?;
        let mut tensor = null_mut();
        // SAFETY: as the caller promises.
        check("wrapping host memory", unsafe {
            sys::ov_tensor_create_from_host_ptr(element, shape.get(), ptr.cast(), &raw mut tensor)
        })?;
        Self::new("wrapping host memory", tensor)
    }

    /// A tensor of `size` bytes whose memory the library owns and counts.
    pub(crate) fn bytes(size: usize) -> Result<Self> {
        let shape = Shape::new(&[i64::try_from(size).unwrap_or(i64::MAX)])?;
        let mut tensor = null_mut();
        // SAFETY: writes one pointer.
        check("allocating a tensor", unsafe {
            sys::ov_tensor_create(Element::U8, shape.get(), &raw mut tensor)
        })?;
        Self::new("allocating a tensor", tensor)
    }

    /// The address of a host tensor's bytes.
    pub(crate) fn data(&self) -> Result<NonNull<u8>> {
        let mut data = null_mut();
        // SAFETY: writes one pointer.
        check("reading a tensor's address", unsafe {
            sys::ov_tensor_data(self.0.as_ptr(), &raw mut data)
        })?;
        NonNull::new(data.cast())
            .ok_or_else(|| Error::new(Status::DRIVER, "a tensor without memory"))
    }

    /// What a tensor of the device is made of, such as `MEM_HANDLE`.
    pub(crate) fn params(&self) -> Result<Vec<(String, usize)>> {
        let (mut n, mut params) = (0, null_mut());
        // SAFETY: fills both.
        check("reading a tensor's handles", unsafe {
            sys::ov_remote_tensor_get_params(self.0.as_ptr(), &raw mut n, &raw mut params)
        })?;
        // SAFETY: a text that the library allocated for us.
        Ok(parse_params(&unsafe { take_text(params) }))
    }
}

impl Compiled {
    /// A place to run it. It keeps the compiled model alive.
    pub(crate) fn request(&self) -> Result<Request> {
        let mut request = null_mut();
        // SAFETY: the compiled model is alive.
        check("making a request", unsafe {
            sys::ov_compiled_model_create_infer_request(self.0.as_ptr(), &raw mut request)
        })?;
        Request::new("making a request", request)
    }
}

impl Request {
    /// Gives the `index`th input; the library counts the tensor.
    pub(crate) fn input(&mut self, index: usize, tensor: &Tensor) -> Result<()> {
        // SAFETY: both are alive.
        check("setting an input", unsafe {
            sys::ov_infer_request_set_input_tensor_by_index(
                self.0.as_ptr(),
                index,
                tensor.0.as_ptr(),
            )
        })
    }

    /// Gives the `index`th output's memory; the library counts the tensor.
    pub(crate) fn output(&mut self, index: usize, tensor: &Tensor) -> Result<()> {
        // SAFETY: both are alive.
        check("setting an output", unsafe {
            sys::ov_infer_request_set_output_tensor_by_index(
                self.0.as_ptr(),
                index,
                tensor.0.as_ptr(),
            )
        })
    }

    /// Runs, and waits for the end.
    pub(crate) fn infer(&mut self) -> Result<()> {
        // SAFETY: the request is alive; its tensors are by the promise at which they were made.
        check("running a model", unsafe { sys::ov_infer_request_infer(self.0.as_ptr()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A user sees the first line of an error: it must say what happened, not where in OpenVINO's sources.
    #[test]
    fn the_cause_comes_first() {
        let text = "Exception from src/inference/src/cpp/core.cpp:112:\n\
            Exception from src/inference/src/dev/plugin.cpp:53:\n\
            Check 'false' failed at src/plugins/intel_gpu/src/plugin/program_builder.cpp:163:\n\
            [GPU] ProgramBuilder build failed!\n\
            [GPU] Exceeded max size of memory object allocation: requested 75497472 bytes, but max alloc size is 67108864 bytes.\n\n";
        let error = of_text("compiling", -1, text);
        assert!(error.message.starts_with("[GPU] Exceeded max size of memory object"), "{error}");
        assert!(!error.message.contains("src/plugins"), "{error}");
        assert_eq!((error.status, error.native), (Status::TOO_BIG, Some(-1)));
        let only = "Exception from a.cpp:1:\nCheck 'x > 0' failed at b.cpp:2:\n";
        assert!(of_text("x", -1, only).message.starts_with("Check 'x > 0' failed"));
        assert!(of_text("x", -7, "").message.contains("no reason"));
    }

    #[test]
    fn handles_are_read_from_texts() {
        // Releases differ in how they write them.
        for text in [
            "MEM_HANDLE:0x55;OCL_CONTEXT:0x10;SHARED_MEM_TYPE:OCL_BUFFER;",
            "{MEM_HANDLE:0x55,OCL_CONTEXT:0x10,SHARED_MEM_TYPE:USM_HOST_BUFFER}",
        ] {
            let params = parse_params(text);
            assert_eq!(params, [("MEM_HANDLE".to_owned(), 0x55), ("OCL_CONTEXT".to_owned(), 0x10)]);
        }
        assert_eq!(parse_params("CONTEXT_TYPE OCL OCL_CONTEXT 0x5")[0].1, 5);
    }
}
