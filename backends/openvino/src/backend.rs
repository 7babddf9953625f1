//! The backend: OpenVINO's devices, with what each can give.

use crate::device::OpenVinoDevice;
use crate::engine::Engine;
use crate::gpu::Gpu;
use crate::library;
use crate::ov::Core;
use std::sync::Arc;
use tegula_sdk::abi::{BufferTypeInfo, DeviceInfo, DeviceOptions, HeapInfo};
use tegula_sdk::host_memory::device::{Processor, buffer_type_info, heap_info, only};
use tegula_sdk::{Backend, Error, Result};

/// Below the cpu backend, which runs on the same processor without a driver, and above oracles.
const RANK: u32 = 50;

/// OpenVINO, if it is installed.
pub struct OpenVino {
    core: Option<Core>,
    devices: Vec<String>,
}

impl Backend for OpenVino {
    const ID: &'static str = "openvino";
    const DESCRIPTION: &'static str = "OpenVINO on Intel's processors and GPUs";
    type Device = OpenVinoDevice;

    /// Without OpenVINO there are no devices, and one line says what to install.
    fn open() -> Result<Self> {
        match library::load() {
            Ok(path) => log::debug!("OpenVINO at {}", path.display()),
            Err(why) => {
                log::info!("{why}");
                return Ok(Self { core: None, devices: Vec::new() });
            }
        }
        let core = Core::new()?;
        let mut devices = core.devices()?;
        devices.retain(|name| name == "CPU" || name == "GPU" || name.starts_with("GPU."));
        Ok(Self { core: Some(core), devices })
    }

    fn n_devices(&self) -> u32 {
        u32::try_from(self.devices.len()).unwrap_or(u32::MAX)
    }

    fn device_info(&self, index: u32) -> Result<DeviceInfo> {
        if let Some(gpu) = self.gpu(index)? {
            return Ok(gpu.info());
        }
        let Processor { name, vendor } = Processor::read();
        let driver = format!("OpenVINO {}", Core::version());
        Ok(Processor { name, vendor }.device_info(&driver, RANK))
    }

    fn heap_info(&self, index: u32, heap: u32) -> Result<HeapInfo> {
        if let Some(gpu) = self.gpu(index)? {
            return gpu.heap(heap);
        }
        only("heap", heap)?;
        Ok(heap_info())
    }

    fn buffer_type_info(&self, index: u32, buffer_type: u32) -> Result<BufferTypeInfo> {
        if let Some(gpu) = self.gpu(index)? {
            return gpu.buffer_type(buffer_type);
        }
        only("buffer type", buffer_type)?;
        Ok(buffer_type_info())
    }

    fn open_device(&self, index: u32, options: &DeviceOptions) -> Result<OpenVinoDevice> {
        let name = self.device(index)?;
        let core = self.core.clone().ok_or_else(|| Error::not_found("OpenVINO is not loaded"))?;
        let engine = match self.gpu(index)?.map(|gpu| gpu.max_size().get()) {
            Some(max) => Engine::gpu(core, name, options.n_threads, max.unwrap_or(0))?,
            None => Engine::cpu(core, name, options.n_threads)?,
        };
        Ok(OpenVinoDevice { engine: Arc::new(engine) })
    }
}

impl OpenVino {
    /// The device as a GPU, if it is one.
    fn gpu(&self, index: u32) -> Result<Option<Gpu<'_>>> {
        let name = self.device(index)?;
        let core = self.core.as_ref().filter(|_| name != "CPU");
        Ok(core.map(|core| Gpu { core, name }))
    }

    fn device(&self, index: u32) -> Result<&str> {
        let name = self.devices.get(index as usize).map(String::as_str);
        name.ok_or_else(|| Error::not_found(format!("device {index} of {}", self.devices.len())))
    }
}
