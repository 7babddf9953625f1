//! The backend: one device, one heap, one type of buffer, all of them the host's.

use crate::ReferenceDevice;
use tegula_sdk::abi::{BufferTypeInfo, DeviceInfo, DeviceOptions, HeapInfo};
use tegula_sdk::host_memory::device::{Processor, buffer_type_info, heap_info, only};
use tegula_sdk::{Backend, Result};

/// An oracle is used when it is named, never by itself.
const RANK: u32 = 0;

/// The processor, as the system describes it.
#[derive(Debug)]
pub struct Reference {
    processor: Processor,
}

impl Backend for Reference {
    const ID: &'static str = "reference";
    const DESCRIPTION: &'static str = "the slow oracle on the host's processor";
    type Device = ReferenceDevice;

    fn open() -> Result<Self> {
        let Processor { name, vendor } = Processor::read();
        Ok(Self { processor: Processor { name: format!("{name} (reference)"), vendor } })
    }

    fn n_devices(&self) -> u32 {
        1
    }

    fn device_info(&self, index: u32) -> Result<DeviceInfo> {
        only("device", index)?;
        let driver = concat!("tegula-reference ", env!("CARGO_PKG_VERSION"));
        Ok(self.processor.device_info(driver, RANK))
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

    fn open_device(&self, index: u32, _options: &DeviceOptions) -> Result<ReferenceDevice> {
        only("device", index)?;
        Ok(ReferenceDevice)
    }
}
