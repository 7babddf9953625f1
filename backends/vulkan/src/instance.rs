//! The loader, the instance, and the validation layers where they are asked for.
//!
//! Without a loader or a driver the backend has no devices and says so once: a plugin that cannot serve is no error.
//! `TEGULA_VULKAN_VALIDATION=1` turns on the Khronos validation layer where it is installed; its messages go to the log and are counted.

#![expect(unsafe_code, reason = "Vulkan is a C interface")]

use crate::error::failed;
use ash::{ext, khr, vk};
use std::ffi::{CStr, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tegula_sdk::Result;

const VALIDATION: &CStr = c"VK_LAYER_KHRONOS_validation";

/// The instance, for as long as anything of it lives.
pub(crate) struct Instance {
    pub(crate) raw: ash::Instance,
    messenger: Option<(ext::debug_utils::Instance, vk::DebugUtilsMessengerEXT)>,
    /// Counted by the messenger, which has its address.
    messages: Arc<AtomicU64>,
    // Dropped last: it has the library open.
    pub(crate) entry: ash::Entry,
}

impl Instance {
    /// `None`, with one line in the log, where there is no Vulkan.
    pub(crate) fn open() -> Result<Option<Arc<Self>>> {
        // SAFETY: the system's Vulkan loader is opened as its specification says; its initialisers are trusted as the system's.
        let entry = match unsafe { ash::Entry::load() } {
            Ok(entry) => entry,
            Err(error) => {
                log::info!("no Vulkan devices: the loader cannot be opened ({error})");
                return Ok(None);
            }
        };
        // SAFETY: a plain query.
        let version = match unsafe { entry.try_enumerate_instance_version() } {
            Ok(version) => version.unwrap_or(vk::API_VERSION_1_0),
            Err(code) => return Err(failed("vkEnumerateInstanceVersion", code)),
        };
        if version < vk::API_VERSION_1_2 {
            log::info!("no Vulkan devices: the loader is older than Vulkan 1.2");
            return Ok(None);
        }
        match Self::create(entry, version) {
            Ok(instance) => Ok(Some(Arc::new(instance))),
            Err(vk::Result::ERROR_INCOMPATIBLE_DRIVER) => {
                log::info!("no Vulkan devices: no driver is installed");
                Ok(None)
            }
            Err(code) => Err(failed("vkCreateInstance", code)),
        }
    }

    fn create(entry: ash::Entry, version: u32) -> Result<Self, vk::Result> {
        let is_wanted = std::env::var("TEGULA_VULKAN_VALIDATION").is_ok_and(|v| v == "1");
        let is_checked = is_wanted && has_validation(&entry)?;
        if is_wanted && !is_checked {
            log::warn!("TEGULA_VULKAN_VALIDATION: the validation layer is not installed");
        }
        // A version that the loader knows and the driver does not is no error from 1.1 on.
        let version = version.min(vk::make_api_version(0, 1, 3, 0));
        let application = vk::ApplicationInfo::default().api_version(version);
        let layers = [VALIDATION.as_ptr()];
        let extensions = [ext::debug_utils::NAME.as_ptr()];
        let mut info = vk::InstanceCreateInfo::default().application_info(&application);
        if is_checked {
            info = info.enabled_layer_names(&layers).enabled_extension_names(&extensions);
        }
        // SAFETY: the structs live for the call.
        let raw = unsafe { entry.create_instance(&info, None) }?;
        let messages = Arc::new(AtomicU64::new(0));
        let mut instance = Self { raw, messenger: None, messages, entry };
        if is_checked {
            instance.messenger = Some(instance.listen()?);
        }
        Ok(instance)
    }

    fn listen(
        &self,
    ) -> Result<(ext::debug_utils::Instance, vk::DebugUtilsMessengerEXT), vk::Result> {
        use vk::{
            DebugUtilsMessageSeverityFlagsEXT as Severity, DebugUtilsMessageTypeFlagsEXT as Type,
        };
        let utils = ext::debug_utils::Instance::new(&self.entry, &self.raw);
        let info = vk::DebugUtilsMessengerCreateInfoEXT::default()
            .message_severity(Severity::ERROR | Severity::WARNING)
            .message_type(Type::VALIDATION)
            .pfn_user_callback(Some(on_message))
            .user_data(Arc::as_ptr(&self.messages).cast_mut().cast());
        // SAFETY: the counter lives until the messenger is destroyed, in `drop`.
        let messenger = unsafe { utils.create_debug_utils_messenger(&info, None) }?;
        Ok((utils, messenger))
    }

    /// Messages of the validation layer so far.
    pub(crate) fn messages(&self) -> u64 {
        self.messages.load(Ordering::Relaxed)
    }

    /// Whether a device has an extension.
    pub(crate) fn extensions(
        &self,
        device: vk::PhysicalDevice,
    ) -> Result<Vec<vk::ExtensionProperties>> {
        // SAFETY: the device is of this instance.
        let list = unsafe { self.raw.enumerate_device_extension_properties(device) };
        list.map_err(|code| failed("vkEnumerateDeviceExtensionProperties", code))
    }

    /// The functions that list shapes of cooperative matrices.
    pub(crate) fn matrices(&self) -> khr::cooperative_matrix::Instance {
        khr::cooperative_matrix::Instance::new(&self.entry, &self.raw)
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // SAFETY: everything made of the instance holds it, so nothing is left; each is destroyed once.
        unsafe {
            if let Some((utils, messenger)) = self.messenger.take() {
                utils.destroy_debug_utils_messenger(messenger, None);
            }
            self.raw.destroy_instance(None);
        }
    }
}

fn has_validation(entry: &ash::Entry) -> Result<bool, vk::Result> {
    // SAFETY: plain queries.
    let layers = unsafe { entry.enumerate_instance_layer_properties() }?;
    Ok(layers.iter().any(|layer| layer.layer_name_as_c_str() == Ok(VALIDATION)))
}

unsafe extern "system" fn on_message(
    _severity: vk::DebugUtilsMessageSeverityFlagsEXT,
    _types: vk::DebugUtilsMessageTypeFlagsEXT,
    data: *const vk::DebugUtilsMessengerCallbackDataEXT<'_>,
    counter: *mut c_void,
) -> vk::Bool32 {
    // SAFETY: the layer passes valid data, and the counter that `listen` gave it, which is still alive.
    unsafe {
        if let Some(counter) = counter.cast::<AtomicU64>().as_ref() {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(text) = data.as_ref().and_then(|data| data.message_as_c_str()) {
            log::warn!("validation: {}", text.to_string_lossy());
        }
    }
    vk::FALSE
}
