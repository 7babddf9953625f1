//! `VkResult` to typed errors: the driver's code and its name are kept.

use ash::vk;
use tegula_sdk::Error;
use tegula_sdk::abi::Status;

/// A call that failed, by its name.
pub(crate) fn failed(what: &str, code: vk::Result) -> Error {
    let status = match code {
        vk::Result::ERROR_DEVICE_LOST => Status::DEVICE_LOST,
        vk::Result::ERROR_OUT_OF_DEVICE_MEMORY
        | vk::Result::ERROR_OUT_OF_HOST_MEMORY
        | vk::Result::ERROR_OUT_OF_POOL_MEMORY
        | vk::Result::ERROR_FRAGMENTATION
        | vk::Result::ERROR_TOO_MANY_OBJECTS => Status::OUT_OF_MEMORY,
        vk::Result::TIMEOUT | vk::Result::NOT_READY => Status::TIMEOUT,
        _ => Status::DRIVER,
    };
    let message = format!("{what}: {code:?}");
    Error { native: Some(code.as_raw().into()), ..Error::new(status, message) }
}
