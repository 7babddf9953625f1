//! What a device states about itself, checked.
//!
//! Figures keep their state and source; "unknown" stays unknown. Statements that contradict each other are not believed: where a
//! safe reading exists it is taken, and the contradiction is recorded for `tegula devices` and the log; where none does
//! (an index out of range, an alignment that is no power of two) the device is not used.

use tegula_abi::{
    self as abi, DeviceKind, Figure, FigureSource, FigureState, HeapKind, HostAccess,
    buffer_type_flag,
};

/// More heaps or buffer types than any driver has; a larger count is damage.
const MAX_LIST: u32 = 64;
/// Greatest alignment that is believed.
const MAX_ALIGNMENT: u64 = 1 << 30;

/// Identity of a device, with its heaps and buffer types as they were when it was listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Id of its backend.
    pub backend: String,
    /// Its index within the backend.
    pub index: u32,
    /// What it is.
    pub kind: DeviceKind,
    /// Its name.
    pub name: String,
    /// Its vendor's name.
    pub vendor: String,
    /// PCI vendor id.
    pub vendor_id: Option<u32>,
    /// Driver name and version.
    pub driver: String,
    /// The driver's device UUID.
    pub uuid: Option<[u8; 16]>,
    /// PCI address `dddd:bb:dd.f`.
    pub pci: Option<String>,
    /// Its heaps; `free` is of the time of listing, [`crate::Backend::heaps`] asks again.
    pub heaps: Vec<Heap>,
    /// Its buffer types.
    pub buffer_types: Vec<BufferType>,
    /// Index of the buffer type advised for weights.
    pub type_for_weights: u32,
    /// Index of the buffer type advised for the KV cache.
    pub type_for_kv: u32,
    /// Index of the buffer type advised for scratch.
    pub type_for_scratch: u32,
    /// Index of the buffer type advised for staging.
    pub type_for_staging: u32,
    /// How willingly `auto` takes it among devices of its kind; 0 only when named.
    pub rank: u32,
    /// Statements that contradict each other, and what is assumed instead.
    pub contradictions: Vec<String>,
}

/// Physical memory that a device can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heap {
    /// Where it lies.
    pub kind: HeapKind,
    /// Heaps of one device with the same pool share bytes; [`abi::POOL_HOST`] is shared between devices too.
    pub pool: u64,
    /// Bytes in all.
    pub total: Figure,
    /// Bytes that this process could still take; never above a known `total`.
    pub free: Figure,
}

/// A kind of memory that buffers can be made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BufferType {
    /// Short name for tables.
    pub name: String,
    /// Index of the heap it is taken from.
    pub heap: u32,
    /// How the host reaches it: NONE or MAPPED.
    pub host_access: HostAccess,
    /// Host memory that is never paged.
    pub pinned: bool,
    /// Whether [`crate::Device::import`] works for it.
    pub import: bool,
    /// Greatest size of one buffer; never above a known total of its heap.
    pub max_size: Figure,
    /// Alignment of a buffer's first byte; a power of two.
    pub alignment: u64,
    /// Sizes are rounded up to a multiple of this; at least 1.
    pub granularity: u64,
    /// The chunk size that works best; never above a known `max_size`.
    pub preferred_chunk: Figure,
    /// Bytes per second at which the device reads it.
    pub read_bandwidth: Figure,
    /// Alignment of pointer and size that importing asks; a power of two.
    pub import_alignment: u64,
}

/// What the backend's table lets a device do at all.
#[derive(Clone, Copy)]
pub(crate) struct Abilities {
    pub(crate) can_map: bool,
    pub(crate) can_import: bool,
}

/// A figure whose state or source this core does not know is unknown.
fn figure(raw: Figure) -> Figure {
    let known_source = raw.source.name().is_some();
    match raw.state {
        FigureState::KNOWN if known_source => raw,
        FigureState::KNOWN => Figure { source: FigureSource::NONE, ..raw },
        FigureState::NOT_APPLICABLE => Figure::NOT_APPLICABLE,
        _ => Figure::UNKNOWN,
    }
}

/// Lowers `figure` to a known bound; says so in `notes`.
fn clamp(
    figure: Figure,
    bound: Figure,
    what: impl Fn(u64, u64) -> String,
    notes: &mut Vec<String>,
) -> Figure {
    match (figure.get(), bound.get()) {
        (Some(value), Some(most)) if value > most => {
            notes.push(what(value, most));
            Figure::known(most, FigureSource::DERIVED)
        }
        _ => figure,
    }
}

impl Heap {
    /// Reads a heap's statement; `index` is for the notes.
    pub(crate) fn read(raw: &abi::HeapInfo, index: u32, notes: &mut Vec<String>) -> Self {
        let total = figure(raw.total);
        let free = clamp(
            figure(raw.free),
            total,
            |free, total| {
                format!("heap {index} has {free} bytes free of {total}; {total} are assumed")
            },
            notes,
        );
        Self { kind: raw.kind, pool: raw.pool, total, free }
    }
}

/// A power of two in bounds; 0 means "none asked" and is 1.
fn alignment(value: u64, what: &str, index: u32) -> Result<u64, String> {
    match value {
        0 => Ok(1),
        n if n.is_power_of_two() && n <= MAX_ALIGNMENT => Ok(n),
        n => Err(format!(
            "buffer type {index} asks for {what} {n}, which is no power of two up to {MAX_ALIGNMENT}"
        )),
    }
}

impl BufferType {
    /// Reads a buffer type's statement; an error is a reason not to use the device.
    pub(crate) fn read(
        raw: &abi::BufferTypeInfo,
        index: u32,
        heaps: &[Heap],
        abilities: Abilities,
        notes: &mut Vec<String>,
    ) -> Result<Self, String> {
        let heap = heaps.get(raw.heap as usize).ok_or_else(|| {
            format!("buffer type {index} lies in heap {}, there are {}", raw.heap, heaps.len())
        })?;
        let max_size = clamp(
            figure(raw.max_size),
            heap.total,
            |size, total| {
                format!(
                    "buffer type {index} allows {size} bytes in a heap of {total}; {total} are assumed"
                )
            },
            notes,
        );
        if max_size.get() == Some(0) {
            notes.push(format!("buffer type {index} allows no byte in one buffer"));
        }
        let preferred_chunk = clamp(
            figure(raw.preferred_chunk),
            max_size,
            |chunk, most| {
                format!(
                    "buffer type {index} prefers chunks of {chunk} bytes over its greatest size {most}; {most} are assumed"
                )
            },
            notes,
        );
        let mut host_access = raw.host_access;
        if host_access == HostAccess::MAPPED && !abilities.can_map {
            notes.push(format!("buffer type {index} is mapped, but the backend maps nothing; it is taken as not mapped"));
            host_access = HostAccess::NONE;
        }
        let mut import = raw.flags & buffer_type_flag::IMPORT != 0;
        if import && !abilities.can_import {
            notes.push(format!("buffer type {index} imports, but the backend has no import; it is taken as not importing"));
            import = false;
        }
        Ok(Self {
            name: raw.name.to_text(),
            heap: raw.heap,
            host_access: if host_access == HostAccess::MAPPED {
                host_access
            } else {
                HostAccess::NONE
            },
            pinned: raw.flags & buffer_type_flag::PINNED != 0,
            import,
            max_size,
            alignment: alignment(raw.alignment, "alignment", index)?,
            granularity: raw.granularity.max(1),
            preferred_chunk,
            read_bandwidth: figure(raw.read_bandwidth),
            import_alignment: alignment(raw.import_alignment, "import alignment", index)?,
        })
    }
}

impl DeviceInfo {
    /// Reads a device's identity, without heaps and buffer types yet; an error is a reason not to use the device.
    pub(crate) fn read(raw: &abi::DeviceInfo, backend: &str, index: u32) -> Result<Self, String> {
        if raw.n_heaps > MAX_LIST || raw.n_buffer_types > MAX_LIST {
            return Err(format!(
                "it states {} heaps and {} buffer types; {MAX_LIST} are the most",
                raw.n_heaps, raw.n_buffer_types
            ));
        }
        for (what, index) in [
            ("weights", raw.type_for_weights),
            ("the KV cache", raw.type_for_kv),
            ("scratch", raw.type_for_scratch),
            ("staging", raw.type_for_staging),
        ] {
            if index >= raw.n_buffer_types {
                return Err(format!(
                    "it advises buffer type {index} for {what}, there are {}",
                    raw.n_buffer_types
                ));
            }
        }
        let pci = raw.pci.to_text();
        Ok(Self {
            backend: backend.to_owned(),
            index,
            kind: raw.kind,
            name: crate::error::one_line(raw.name.to_text().as_bytes()),
            vendor: crate::error::one_line(raw.vendor.to_text().as_bytes()),
            vendor_id: (raw.vendor_id != 0).then_some(raw.vendor_id),
            driver: crate::error::one_line(raw.driver.to_text().as_bytes()),
            uuid: (raw.has_uuid == 1).then_some(raw.uuid),
            pci: (!pci.is_empty()).then_some(pci),
            heaps: Vec::new(),
            buffer_types: Vec::new(),
            type_for_weights: raw.type_for_weights,
            type_for_kv: raw.type_for_kv,
            type_for_scratch: raw.type_for_scratch,
            type_for_staging: raw.type_for_staging,
            rank: raw.rank,
            contradictions: Vec::new(),
        })
    }

    /// `<backend>:<index>`, as people select it.
    pub fn id(&self) -> String {
        format!("{}:{}", self.backend, self.index)
    }
}
