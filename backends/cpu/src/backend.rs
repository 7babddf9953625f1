//! The backend: the host's processor as its one device.

use crate::device::CpuDevice;
use tegula_sdk::abi::{BufferTypeInfo, DeviceInfo, DeviceOptions, HeapInfo};
use tegula_sdk::host_memory::device::{Processor, buffer_type_info, heap_info, only};
use tegula_sdk::{Backend, Result};

/// Above every other backend that runs on the same processor through a driver.
const RANK: u32 = 100;

/// The processor.
#[derive(Debug)]
pub struct Cpu {
    processor: Processor,
}

impl Backend for Cpu {
    const ID: &'static str = "cpu";
    const DESCRIPTION: &'static str = "the host's processor";
    type Device = CpuDevice;

    fn open() -> Result<Self> {
        Ok(Self { processor: Processor::read() })
    }

    fn n_devices(&self) -> u32 {
        1
    }

    fn device_info(&self, index: u32) -> Result<DeviceInfo> {
        only("device", index)?;
        let isa = crate::kernels::Kernels::detect().isa().name();
        let driver = format!("tegula-cpu {} ({isa})", env!("CARGO_PKG_VERSION"));
        Ok(self.processor.device_info(&driver, RANK))
    }

    fn heap_info(&self, index: u32, heap: u32) -> Result<HeapInfo> {
        only("device", index)?;
        only("heap", heap)?;
        Ok(heap_info())
    }

    fn buffer_type_info(&self, index: u32, buffer_type: u32) -> Result<BufferTypeInfo> {
        only("device", index)?;
        only("buffer type", buffer_type)?;
        Ok(buffer_type_info())
    }

    fn open_device(&self, index: u32, options: &DeviceOptions) -> Result<CpuDevice> {
        only("device", index)?;
        CpuDevice::open(options.n_threads)
    }
}
