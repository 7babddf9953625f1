//! How fast memory truly is: measured by reading, writing and multiplying, and remembered by device and driver.
//!
//! What a device states about bandwidth is seldom known and sometimes untrue: memory that the driver calls the device's own may be
//! read over a bus. The number that decides generation is the *device read*: the rate at which a matrix product of one token reads its
//! weight. It is taken with the backend's own program, so that it is the rate that a model will get.
//!
//! Weights are not placed where they would be read at a tenth of the rate of other memory that could hold them (`faster_type`). Stated
//! bandwidths move nothing.

mod cache;

use crate::runtime::DeviceEntry;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Instant;
use tegula_plugin::{
    Buffer, BufferDesc, BufferType, BufferUsage, CompileOptions, Device, DeviceError, FigureSource,
    Heap, HostAccess, InputData, OutputData, Queue, RunArgs, Tile, WeightBinding, WeightDesc,
    weight_use,
};
use tegula_program::ffi::FfiProgram;
use tegula_program::{DType, Dim, Program, ProgramBuilder};

pub use cache::Cache;

/// Bytes of a buffer that is measured at most: beyond most caches, and quick.
const SIZE_MAX: u64 = 256 << 20;
/// Fewest bytes that say anything.
const SIZE_MIN: u64 = 4 << 20;
/// Buffers are multiples of this.
const SIZE_STEP: u64 = 64 << 10;
/// Times that each rate is taken; the median counts.
const REPEATS: usize = 5;
/// Elements of a row of the weight; every backend must be able to multiply it.
const N_IN: u64 = 4096;
/// Bytes that are uploaded at a time.
const UPLOAD_BYTES: u64 = 16 << 20;
/// A type read at less than one in so many of another's rate is not used for weights.
const TOO_SLOW: u64 = 10;

/// Rates of one buffer type, in bytes a second; `None` where it cannot be done, or failed (then a note says why).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TypeRates {
    /// The buffer type's name.
    pub buffer_type: String,
    /// Bytes of the buffers that were used.
    pub size: u64,
    /// The device reading weights of a matrix product: what bounds generation.
    pub device_read: Option<u64>,
    /// Between two buffers of this type; each byte counts once.
    pub copy: Option<u64>,
    /// From host memory, through the queue.
    pub host_write: Option<u64>,
    /// To host memory, through the queue.
    pub host_read: Option<u64>,
    /// From host memory, through the mapping.
    pub mapped_write: Option<u64>,
    /// To host memory, through the mapping.
    pub mapped_read: Option<u64>,
    /// What failed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// Rates of a device, with what they hold for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceRates {
    backend: String,
    backend_version: String,
    name: String,
    driver: String,
    uuid: Option<String>,
    pci: Option<String>,
    /// By buffer type.
    pub types: Vec<TypeRates>,
}

impl DeviceRates {
    fn of(entry: &DeviceEntry, types: Vec<TypeRates>) -> Self {
        Self {
            backend: entry.backend.id().to_owned(),
            backend_version: entry.backend.version().to_owned(),
            name: entry.info.name.clone(),
            driver: entry.info.driver.clone(),
            uuid: entry.info.uuid.map(crate::format_uuid),
            pci: entry.info.pci.clone(),
            types,
        }
    }

    /// Whether both are of the same device, driver and backend.
    fn is_of(&self, other: &Self) -> bool {
        let key = |d: &Self| {
            let text = [&d.backend, &d.backend_version, &d.name, &d.driver].map(Clone::clone);
            (text, d.uuid.clone(), d.pci.clone())
        };
        key(self) == key(other)
    }
}

/// Measures every buffer type of a device. It takes about a second for each, and a buffer of at most 256 MiB, a quarter of `max_size` and
/// an eighth of what is free, twice.
///
/// # Errors
/// What the backend says when the device cannot be opened; what fails later is noted.
pub fn measure(device: &Device, entry: &DeviceEntry) -> Result<DeviceRates> {
    let mut types = Vec::new();
    for (index, kind) in (0u32..).zip(&entry.info.buffer_types) {
        let mut rates = TypeRates { buffer_type: kind.name.clone(), ..TypeRates::default() };
        rates.size = size_of_buffers(kind, &entry.info.heaps);
        if rates.size < SIZE_MIN {
            let least = crate::memory::units::format_size(SIZE_MIN);
            rates.notes.push(format!("buffers of less than {least} are not worth measuring"));
        } else {
            let mut bench = Bench { device, queue: device.queue()?, kind, index, rates };
            bench.transfers();
            bench.device_read();
            rates = bench.rates;
        }
        types.push(rates);
    }
    Ok(DeviceRates::of(entry, types))
}

fn size_of_buffers(kind: &BufferType, heaps: &[Heap]) -> u64 {
    let free = heaps.get(kind.heap as usize).and_then(|heap| heap.free.get());
    let quarter = kind.max_size.get().map_or(SIZE_MAX, |max| max / 4);
    let size = SIZE_MAX.min(quarter).min(free.map_or(SIZE_MAX, |free| free / 8));
    size - size % SIZE_STEP
}

struct Bench<'a> {
    device: &'a Device,
    queue: Queue,
    kind: &'a BufferType,
    index: u32,
    rates: TypeRates,
}

impl Bench<'_> {
    fn buffer(&self, usage: BufferUsage) -> Result<Buffer, DeviceError> {
        self.device.alloc(&BufferDesc { size: self.rates.size, buffer_type: self.index, usage })
    }

    /// The rate of `bytes` by `work`, or a note.
    fn rate(
        &mut self,
        what: &str,
        bytes: u64,
        mut work: impl FnMut(&mut Queue) -> Result<(), DeviceError>,
    ) -> Option<u64> {
        let queue = &mut self.queue;
        match median_seconds(|| work(queue)) {
            Ok(seconds) => Some((bytes as f64 / seconds.max(1e-9)) as u64),
            Err(error) => {
                self.rates.notes.push(format!("{what}: {error}"));
                None
            }
        }
    }

    fn transfers(&mut self) {
        let size = self.rates.size;
        let mut host = vec![1u8; usize::try_from(size).unwrap_or(0)];
        let buffers = self.buffer(BufferUsage::WEIGHTS);
        let (mut from, to) = match (buffers, self.buffer(BufferUsage::WEIGHTS)) {
            (Ok(from), Ok(to)) => (from, to),
            (Err(error), _) | (_, Err(error)) => {
                self.rates.notes.push(error.to_string());
                return;
            }
        };
        self.rates.host_write = self.rate("write", size, |queue| queue.write(&from, 0, &host));
        self.rates.host_read = self.rate("read", size, |queue| queue.read(&from, 0, &mut host));
        self.rates.copy = self.rate("copy", size, |queue| queue.copy(&from.whole(), &to.whole()));
        if self.kind.host_access == HostAccess::MAPPED {
            self.rates.mapped_write =
                self.rate("mapped write", size, |_| from.write_mapped(0, &host));
            self.rates.mapped_read =
                self.rate("mapped read", size, |_| from.read_mapped(0, &mut host));
        }
    }

    /// In F16, or in F32 where the device does not multiply that.
    fn device_read(&mut self) {
        let mut last = String::new();
        for dtype in [DType::F16, DType::F32] {
            match self.read_by_matmul(dtype) {
                Ok(rate) => {
                    self.rates.device_read = Some(rate);
                    return;
                }
                Err(error) => last = error.to_string(),
            }
        }
        self.rates.notes.push(format!("device read: {last}"));
    }

    fn read_by_matmul(&mut self, dtype: DType) -> Result<u64> {
        let weights = self.buffer(BufferUsage::WEIGHTS)?;
        let mut desc = WeightDesc {
            dtype,
            uses: weight_use::MATMUL,
            n_in: N_IN,
            n_rows: 1 << 20,
            rows_per_expert: 0,
        };
        let layout = self.device.weight_layout(&desc)?;
        let rows_per_group = u64::from(layout.rows_per_group.max(1));
        let n_groups = self.rates.size / layout.group_bytes.max(1);
        desc.n_rows = n_groups * rows_per_group;
        let program = matmul(dtype, desc.n_rows)?;
        let ffi = FfiProgram::new(&program);
        if desc.n_rows == 0 || self.device.supports(&ffi)?.contains(&false) {
            let (device, ops) = (self.device.info().id(), format!("matmul of {}", dtype.name()));
            return Err(Error::OpsUnsupported { device, ops });
        }
        let whole = Tile {
            first_row: 0,
            n_rows: desc.n_rows,
            buffer: Arc::new(weights),
            offset: 0,
            size: n_groups * layout.group_bytes,
            layout: layout.layout,
        };
        self.fill(&desc, &whole, rows_per_group, layout.group_bytes)?;
        let value = program.weights().next().map_or(0, |(id, _)| id.0);
        let bytes = whole.size;
        let seconds =
            self.seconds_of(&ffi, WeightBinding { value, tiles: vec![whole] }, desc.n_rows)?;
        Ok((bytes as f64 / seconds.max(1e-9)) as u64)
    }

    /// The time of one product with the weight.
    fn seconds_of(&mut self, ffi: &FfiProgram, weight: WeightBinding, n_rows: u64) -> Result<f64> {
        let info = self.device.info();
        let scratch_type = info.buffer_types.get(info.type_for_scratch as usize);
        let options = CompileOptions {
            n_tokens_max: 1,
            n_outputs_max: 1,
            n_seqs_max: 1,
            n_ctx_max: 1,
            scratch_type: info.type_for_scratch,
            scratch_chunk_max: scratch_type.and_then(|t| t.max_size.get()).unwrap_or(SIZE_MAX),
        };
        let executable = self.device.compile(ffi, &options, &[weight])?;
        let mut scratch = Vec::new();
        for piece in &executable.memory().scratch {
            let (size, buffer_type) = (piece.size, options.scratch_type);
            let desc = BufferDesc { size, buffer_type, usage: BufferUsage::SCRATCH };
            scratch.push(self.device.alloc(&desc)?);
        }
        let spans: Vec<_> = scratch.iter().map(Buffer::whole).collect();
        let x = vec![1f32; N_IN as usize];
        let mut y = vec![0f32; usize::try_from(n_rows).unwrap_or(0)];
        let queue = &mut self.queue;
        Ok(median_seconds(|| {
            let mut args = RunArgs {
                n_tokens: 1,
                n_outputs: 1,
                inputs: &[InputData::Host(bytemuck::cast_slice(&x))],
                outputs: &mut [OutputData::Host(bytemuck::cast_slice_mut(&mut y))],
                scratch: &spans,
                seqs: &[],
                kv: &[],
                state: None,
            };
            queue.run(&executable, &mut args)
        })?)
    }

    /// Fills the weight with ones, a piece at a time: what lies in a new buffer may be numbers that are slow to multiply.
    fn fill(
        &mut self,
        desc: &WeightDesc,
        whole: &Tile,
        rows_per_group: u64,
        group_bytes: u64,
    ) -> Result<()> {
        let one: &[u8] = if desc.dtype == DType::F16 { &[0, 0x3c] } else { &[0, 0, 0x80, 0x3f] };
        let row_bytes = N_IN * one.len() as u64;
        let groups = (UPLOAD_BYTES / group_bytes.max(1)).max(1);
        let n = groups.checked_mul(rows_per_group).and_then(|n| n.checked_mul(row_bytes));
        let overflow = || Error::Overflow { what: "the bytes of a group of rows".into() };
        let n = n.and_then(|n| usize::try_from(n).ok()).ok_or_else(overflow)?;
        let ones = one.repeat(n / one.len());
        let mut group = 0;
        let n_groups = whole.size / group_bytes.max(1);
        while group < n_groups {
            let n = groups.min(n_groups - group);
            let part = Tile {
                first_row: group * rows_per_group,
                n_rows: n * rows_per_group,
                offset: group * group_bytes,
                size: n * group_bytes,
                ..whole.clone()
            };
            let bytes = usize::try_from(part.n_rows * row_bytes).unwrap_or(usize::MAX);
            self.queue.upload(desc, &part, ones.get(..bytes).ok_or_else(overflow)?)?;
            group += n;
        }
        Ok(())
    }
}

/// `y = W x` for one token.
fn matmul(dtype: DType, n_rows: u64) -> Result<Program> {
    let mut b = ProgramBuilder::new("device read");
    let x = b.input("x", DType::F32, &[Dim::NTokens, Dim::Fixed(N_IN)]);
    let w = b.weight("w", dtype, &[n_rows, N_IN]);
    let y = b.matmul(x, w, None);
    b.output("y", y);
    Ok(b.finish()?)
}

fn median_seconds(mut work: impl FnMut() -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
    // The first time pays for pages and caches.
    work()?;
    let mut seconds = Vec::with_capacity(REPEATS);
    for _ in 0..REPEATS {
        let begin = Instant::now();
        work()?;
        seconds.push(begin.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds.get(REPEATS / 2).copied().unwrap_or(f64::INFINITY))
}

/// A buffer type that a backend advises for weights although another is read far faster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlowType {
    /// Bytes a second of the type advised.
    pub(crate) rate: u64,
    /// The type to use instead.
    pub(crate) faster: u32,
    /// Its bytes a second.
    pub(crate) faster_rate: u64,
}

/// Whether memory was measured to be read at less than a tenth of another's rate.
pub(crate) fn is_far_slower(kind: &BufferType, other: &BufferType) -> bool {
    let rates = measured_rate(kind).zip(measured_rate(other));
    rates.is_some_and(|(rate, other)| rate.saturating_mul(TOO_SLOW) < other)
}

fn measured_rate(kind: &BufferType) -> Option<u64> {
    let figure = kind.read_bandwidth;
    figure.get().filter(|_| figure.source == FigureSource::MEASURED)
}

/// The faster type for weights of `needed` bytes, where the type advised was measured to be read at less than a tenth of its rate.
/// Only measured rates count, and only a type whose heap has room for all of the weights, as far as that is known.
pub(crate) fn faster_type(
    types: &[BufferType],
    heaps: &[Heap],
    advised: u32,
    needed: u64,
) -> Option<SlowType> {
    let rate = types.get(advised as usize).and_then(measured_rate)?;
    let has_room = |kind: &BufferType| {
        let heap = heaps.get(kind.heap as usize);
        heap.is_some_and(|heap| heap.free.get().is_none_or(|free| free >= needed))
    };
    let faster = (0u32..)
        .zip(types)
        .filter(|(_, kind)| has_room(kind))
        .filter_map(|(index, kind)| Some((measured_rate(kind)?, index)))
        .max_by_key(|(rate, index)| (*rate, std::cmp::Reverse(*index)))?;
    let (faster_rate, faster) = faster;
    (rate.saturating_mul(TOO_SLOW) < faster_rate).then_some(SlowType { rate, faster, faster_rate })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tegula_plugin::{Figure, HeapKind, POOL_HOST};

    fn kind(name: &str, heap: u32, rate: Option<(u64, FigureSource)>) -> BufferType {
        BufferType {
            name: name.into(),
            heap,
            host_access: HostAccess::NONE,
            pinned: false,
            import: false,
            max_size: Figure::UNKNOWN,
            alignment: 64,
            granularity: 1,
            preferred_chunk: Figure::UNKNOWN,
            read_bandwidth: rate.map_or(Figure::UNKNOWN, |(rate, from)| Figure::known(rate, from)),
            import_alignment: 1,
        }
    }

    /// Weights must not be read over a bus where they fit beside the processor; and no guess may move them.
    #[test]
    fn weights_leave_slow_memory() {
        let heap = |free: Option<u64>| Heap {
            kind: HeapKind::DEVICE_LOCAL,
            pool: POOL_HOST,
            total: Figure::UNKNOWN,
            free: free.map_or(Figure::UNKNOWN, |free| Figure::known(free, FigureSource::DRIVER)),
        };
        let measured = |rate| Some((rate, FigureSource::MEASURED));
        let stated = |rate| Some((rate, FigureSource::DRIVER));
        let room = [Some(1000), Some(1000)];
        // Rates of the type advised and of the other one, free memory of their heaps, and whether the other one is used.
        let table = [
            (measured(9), measured(100), room, true),
            (measured(10), measured(100), room, false),
            (measured(100), measured(9), room, false),
            (measured(9), measured(100), [Some(1000), Some(99)], false),
            (measured(9), measured(100), [Some(1000), Some(100)], true),
            (measured(9), measured(100), [Some(1000), None], true),
            (stated(9), measured(100), room, false),
            (measured(9), stated(100), room, false),
            (None, measured(100), room, false),
            (measured(9), None, room, false),
            (measured(0), measured(1), room, true),
        ];
        for (advised, other, free, moves) in table {
            let types = [kind("bus", 0, advised), kind("own", 1, other)];
            let found = faster_type(&types, &free.map(heap), 0, 100).map(|slow| slow.faster);
            assert_eq!(found, moves.then_some(1), "{advised:?} {other:?} {free:?}");
        }
        assert_eq!(faster_type(&[], &[], 7, 1), None);
    }
}
