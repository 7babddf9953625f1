//! The backend: every usable device of every platform.

use crate::cl;
use crate::device::OpenClDevice;
use crate::facts::Facts;
use ocl_core::ffi;
use tegula_sdk::abi::{BufferTypeInfo, DeviceInfo, DeviceOptions, HeapInfo};
use tegula_sdk::{Backend, Error, Result};

/// The devices that were found. Their limits are not kept: see `Facts`.
#[derive(Debug)]
pub struct OpenCl {
    devices: Vec<Facts>,
}

impl OpenCl {
    fn device(&self, index: u32) -> Result<&Facts> {
        let n = self.devices.len();
        let device = self.devices.get(index as usize);
        device.ok_or_else(|| Error::not_found(format!("OpenCL device {index} of {n}")))
    }
}

impl Backend for OpenCl {
    const ID: &'static str = "opencl";
    const DESCRIPTION: &'static str = "any OpenCL 1.2 device";
    type Device = OpenClDevice;

    /// A platform or device that fails is left out and told: others must stay usable.
    fn open() -> Result<Self> {
        let mut devices = Vec::new();
        for platform in cl::platforms()? {
            let name = platform.text(ffi::CL_PLATFORM_NAME).unwrap_or_default();
            match platform.devices() {
                Ok(ids) => {
                    for id in ids {
                        match Facts::read(platform, id) {
                            Ok(facts) => devices.push(facts),
                            Err(error) => log::warn!("platform `{name}`: {error}"),
                        }
                    }
                }
                Err(error) => log::warn!("platform `{name}`: {error}"),
            }
        }
        Ok(Self { devices })
    }

    fn n_devices(&self) -> u32 {
        u32::try_from(self.devices.len()).unwrap_or(u32::MAX)
    }

    fn device_info(&self, index: u32) -> Result<DeviceInfo> {
        Ok(self.device(index)?.device_info())
    }

    fn heap_info(&self, index: u32, heap: u32) -> Result<HeapInfo> {
        self.device(index)?.heap_info(heap)
    }

    fn buffer_type_info(&self, index: u32, buffer_type: u32) -> Result<BufferTypeInfo> {
        self.device(index)?.buffer_type_info(buffer_type)
    }

    fn open_device(&self, index: u32, _options: &DeviceOptions) -> Result<OpenClDevice> {
        OpenClDevice::open(self.device(index)?.clone())
    }
}
