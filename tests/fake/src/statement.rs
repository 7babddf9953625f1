//! What a device states: the configuration as it crosses, with live figures where it asks for them.

use crate::backend::State;
use crate::config::{BufferTypeConfig, Code, DeviceConfig, Fig, HeapConfig};
use crate::failure::{Failure, Result};
use crate::inner::Inner;
use tegula_abi::{
    self as abi, DeviceKind, Figure, FigureState, HeapKind, HostAccess, Status, Text,
    buffer_type_flag,
};

/// The only type of the inner backend that buffers are made of.
pub(crate) const INNER_TYPE: u32 = 0;

/// The device that a configuration without devices stands for: the inner backend's, which `auto` takes.
pub(crate) fn mirror(inner: &Inner) -> Result<DeviceConfig> {
    let info = inner.device_info()?;
    let raw = inner.buffer_type_info(INNER_TYPE)?;
    let heap = inner.heap_info(raw.heap)?;
    let figure = |figure: Figure| Fig::Whole {
        value: figure.value,
        state: Code::Number(figure.state.0.into()),
        source: Code::Number(figure.source.0.into()),
    };
    Ok(DeviceConfig {
        name: info.name.to_text(),
        vendor: info.vendor.to_text(),
        driver: info.driver.to_text(),
        kind: Code::Number(info.kind.0.into()),
        rank: 1,
        heaps: vec![HeapConfig {
            kind: Code::Number(heap.kind.0.into()),
            pool: heap.pool,
            // The inner backend counts what it gave itself.
            live: false,
            ..HeapConfig::default()
        }],
        buffer_types: vec![BufferTypeConfig {
            name: raw.name.to_text(),
            alignment: raw.alignment,
            granularity: raw.granularity,
            host_access: Code::Number(raw.host_access.0.into()),
            import: raw.flags & buffer_type_flag::IMPORT != 0,
            import_alignment: raw.import_alignment,
            pinned: raw.flags & buffer_type_flag::PINNED != 0,
            preferred_chunk: figure(raw.preferred_chunk),
            read_bandwidth: figure(raw.read_bandwidth),
            ..BufferTypeConfig::default()
        }],
        ..DeviceConfig::default()
    })
}

fn uuid(text: &str) -> Result<[u8; 16]> {
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    let number = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32);
    let fault = || Failure::from(format!("`{text}` is no UUID"));
    number.map(u128::to_be_bytes).ok_or_else(fault)
}

pub(crate) fn device_info(device: &DeviceConfig) -> Result<abi::DeviceInfo> {
    let len = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    Ok(abi::DeviceInfo {
        struct_size: size_of::<abi::DeviceInfo>(),
        kind: DeviceKind(device.kind.resolve(|n| DeviceKind(n as u32).name())? as u32),
        has_uuid: u32::from(device.uuid.is_some()),
        uuid: device.uuid.as_deref().map_or(Ok([0; 16]), uuid)?,
        pci: Text::new(device.pci.as_deref().unwrap_or("")),
        vendor_id: device.vendor_id,
        n_heaps: device.n_heaps.unwrap_or(len(device.heaps.len())),
        n_buffer_types: device.n_buffer_types.unwrap_or(len(device.buffer_types.len())),
        type_for_weights: device.type_for.weights,
        type_for_kv: device.type_for.kv,
        type_for_scratch: device.type_for.scratch,
        type_for_staging: device.type_for.staging,
        rank: device.rank,
        name: Text::new(&device.name),
        vendor: Text::new(&device.vendor),
        driver: Text::new(&device.driver),
    })
}

impl State {
    /// Heap `heap` of device `index`, with its free bytes less what is allocated.
    pub(crate) fn heap_info(&self, index: u32, heap: u32) -> Result<abi::HeapInfo> {
        let config = self.heap(index, heap)?;
        let inner = |of: fn(&abi::HeapInfo) -> Figure| {
            self.inner.heap_info(0).map(|heap| of(&heap)).map_err(|e| e.status.to_string())
        };
        let mut free = config.free.resolve(|| inner(|heap| heap.free))?;
        if config.live && free.state == FigureState::KNOWN {
            free.value = free.value.saturating_sub(self.ledger().live_bytes(index, Some(heap)));
        }
        Ok(abi::HeapInfo {
            struct_size: size_of::<abi::HeapInfo>(),
            kind: HeapKind(config.kind.resolve(|n| HeapKind(n as u32).name())? as u32),
            reserved: 0,
            pool: config.pool,
            total: config.total.resolve(|| inner(|heap| heap.total))?,
            free,
        })
    }

    /// Buffer type `buffer_type` of device `index`.
    pub(crate) fn buffer_type_info(
        &self,
        index: u32,
        buffer_type: u32,
    ) -> Result<abi::BufferTypeInfo> {
        let config = self.buffer_type(index, buffer_type)?;
        let inner = |of: fn(&abi::BufferTypeInfo) -> Figure| {
            let info = self.inner.buffer_type_info(INNER_TYPE);
            info.map(|info| of(&info)).map_err(|e| e.status.to_string())
        };
        let flag = |yes: bool, bit: u32| if yes { bit } else { 0 };
        Ok(abi::BufferTypeInfo {
            struct_size: size_of::<abi::BufferTypeInfo>(),
            heap: config.heap,
            host_access: host_access(config)?,
            flags: flag(config.pinned, buffer_type_flag::PINNED)
                | flag(config.import, buffer_type_flag::IMPORT),
            reserved: 0,
            max_size: self.max_size(config)?,
            alignment: config.alignment,
            granularity: config.granularity,
            preferred_chunk: config.preferred_chunk.resolve(|| inner(|t| t.preferred_chunk))?,
            read_bandwidth: config.read_bandwidth.resolve(|| inner(|t| t.read_bandwidth))?,
            import_alignment: config.import_alignment,
            name: Text::new(&config.name),
        })
    }

    /// The stated greatest size.
    pub(crate) fn max_size(&self, config: &BufferTypeConfig) -> Result<Figure> {
        Ok(config.max_size.resolve(|| {
            let info = self.inner.buffer_type_info(INNER_TYPE);
            info.map(|info| info.max_size).map_err(|e| e.status.to_string())
        })?)
    }

    pub(crate) fn device(&self, index: u32) -> Result<&DeviceConfig> {
        self.devices.get(index as usize).ok_or_else(|| not_found("device", index))
    }

    pub(crate) fn heap(&self, index: u32, heap: u32) -> Result<&HeapConfig> {
        self.device(index)?.heaps.get(heap as usize).ok_or_else(|| not_found("heap", heap))
    }

    pub(crate) fn buffer_type(&self, index: u32, at: u32) -> Result<&BufferTypeConfig> {
        let types = &self.device(index)?.buffer_types;
        types.get(at as usize).ok_or_else(|| not_found("buffer type", at))
    }
}

pub(crate) fn host_access(config: &BufferTypeConfig) -> Result<HostAccess> {
    let number = config.host_access.resolve(|n| HostAccess(n as u32).name())?;
    Ok(HostAccess(number as u32))
}

fn not_found(what: &str, index: u32) -> Failure {
    Failure::new(Status::NOT_FOUND, format!("there is no {what} {index}"))
}
