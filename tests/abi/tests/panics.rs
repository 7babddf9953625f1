//! A plugin that panics: the call fails with its words, its device is given up, and everything else works on.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod common;

use common::{install, load};
use std::sync::{Arc, Mutex};
use tegula_plugin::{
    Backend, BufferDesc, BufferUsage, CompileOptions, Device, DeviceError, DeviceErrorKind,
    DeviceOptions, InputData, OutputData, RunArgs, Tile, WeightDesc, weight_use,
};
use tegula_program::ffi::FfiProgram;
use tegula_program::{Dim, ProgramBuilder};
use tegula_quant::DType;

/// The points of the plugin, by device, and the call of the boundary in which each shows.
const POINTS: [(&str, &str); 20] = [
    ("Nowhere", ""),
    ("DeviceInfo", "device_info"),
    ("HeapInfo", "heap_info"),
    ("BufferTypeInfo", "buffer_type_info"),
    ("OpenDevice", "device_open"),
    ("Alloc", "buffer_alloc"),
    ("Import", "buffer_import"),
    ("Map", "buffer_map"),
    ("WeightLayout", "weight_layout"),
    ("Supports", "program_supports"),
    ("Memory", "program_memory"),
    ("Compile", "program_compile"),
    ("MakeQueue", "queue_create"),
    ("Write", "queue_write"),
    ("Read", "queue_read"),
    ("Copy", "queue_copy"),
    ("Upload", "queue_upload"),
    ("Run", "queue_run"),
    ("Wait", "queue_wait"),
    ("Free", ""),
];

struct Collect(Mutex<Vec<String>>);

impl log::Log for Collect {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }
    fn log(&self, record: &log::Record<'_>) {
        let line = format!("{} {} {}", record.level(), record.target(), record.args());
        self.0.lock().unwrap().push(line);
    }
    fn flush(&self) {}
}

static LOG: Collect = Collect(Mutex::new(Vec::new()));

fn logged(part: &str) -> bool {
    LOG.0.lock().unwrap().iter().any(|line| line.contains(part))
}

/// Uses everything a device has, once; gives the device too, to see whether it is lost.
fn use_all(backend: &Backend, index: u32) -> (Option<Device>, Result<(), DeviceError>) {
    let device = match Device::open(backend, index, DeviceOptions::default()) {
        Ok(device) => device,
        Err(error) => return (None, Err(error)),
    };
    let result = use_device(&device);
    (Some(device), result)
}

fn use_device(device: &Device) -> Result<(), DeviceError> {
    let desc = BufferDesc { size: 4096, buffer_type: 0, usage: BufferUsage::ANY };
    let buffer = Arc::new(device.alloc(&desc)?);
    let other = device.alloc(&desc)?;
    drop(device.import(&desc, Arc::new(vec![0u8; 64]), 0..64)?);
    buffer.map()?;
    let weight = WeightDesc {
        dtype: DType::F32,
        uses: weight_use::MATMUL,
        n_in: 4,
        n_rows: 1,
        rows_per_expert: 0,
    };
    device.weight_layout(&weight)?;
    let mut b = ProgramBuilder::new("identity");
    let x = b.input("x", DType::F32, &[Dim::NTokens, Dim::Fixed(4)]);
    let y = b.scale(x, 1.0);
    b.output("y", y);
    let program = FfiProgram::new(&b.finish().unwrap());
    device.supports(&program)?;
    let options = CompileOptions {
        n_tokens_max: 1,
        n_outputs_max: 1,
        n_seqs_max: 1,
        n_ctx_max: 1,
        scratch_type: 0,
        scratch_chunk_max: 4096,
    };
    let executable = device.compile(&program, &options, &[])?;
    let mut queue = device.queue()?;
    queue.write(&buffer, 0, &[7; 16])?;
    queue.read(&buffer, 0, &mut [0; 16])?;
    queue.copy(&buffer.whole(), &other.whole())?;
    let tile = Tile { first_row: 0, n_rows: 1, buffer, offset: 0, size: 16, layout: 0 };
    queue.upload(&weight, &tile, &[7; 16])?;
    let (input, mut output) = ([9; 16], [0; 16]);
    let mut args = RunArgs {
        n_tokens: 1,
        n_outputs: 0,
        inputs: &[InputData::Host(&input)],
        outputs: &mut [OutputData::Host(&mut output)],
        scratch: &[],
        seqs: &[],
        kv: &[],
        state: None,
    };
    queue.run(&executable, &mut args)?;
    assert_eq!(output, input);
    Ok(())
}

/// A bug in a plugin costs the device it shows on: not the process, not the plugin's other devices, not the other plugins.
#[test]
fn each_point_costs_its_own_device() {
    log::set_logger(&LOG).unwrap();
    log::set_max_level(log::LevelFilter::Debug);
    let dir = tempfile::tempdir().unwrap();
    install(dir.path(), "old");
    install(dir.path(), "panic");
    let registry = load(&[dir.path()]);
    assert_eq!(registry.backends.len(), 2, "{}", registry.describe_empty());
    let backend = registry.backend("panic").unwrap();
    assert!(logged("DEBUG tegula_panic"), "a plugin's records do not arrive: {:?}", LOG.0.lock());

    for (index, (point, operation)) in (0..).zip(POINTS) {
        let said = format!("told to panic in {point}");
        let listed = backend.device(index).is_some();
        if let Some(faulty) = backend.faulty().iter().find(|faulty| faulty.index == index) {
            assert!(matches!(index, 1..=3) && !listed, "{point}: {faulty:?}");
            assert_eq!(
                (faulty.error.kind, faulty.error.operation),
                (DeviceErrorKind::Panic, operation)
            );
            assert!(faulty.error.to_string().contains(&said), "{}", faulty.error);
            continue;
        }
        assert!(listed, "device {index}, which panics in {point}, is not listed");
        let (device, result) = use_all(backend, index);
        if operation.is_empty() {
            result.unwrap();
        } else {
            let Err(error) = result else { panic!("nothing panicked in {point}") };
            // A wait is what the safe functions end with: the first one shows it.
            assert_eq!(
                (error.kind, error.operation),
                (DeviceErrorKind::Panic, operation),
                "{error}"
            );
            assert!(error.to_string().contains(&said), "{error}");
            if let Some(device) = device {
                let desc = BufferDesc { size: 64, buffer_type: 0, usage: BufferUsage::ANY };
                let error = device.alloc(&desc).unwrap_err();
                assert_eq!(error.kind, DeviceErrorKind::DeviceLost, "{point}: {error}");
                assert!(device.is_lost());
            }
        }
        if point != "Nowhere" {
            assert!(logged(&said), "the log does not tell of {point}");
        }
        use_all(backend, 0).1.unwrap_or_else(|error| panic!("after {point}: {error}"));
    }
    assert_eq!(backend.faulty().len(), 3);
    let old = registry.backend("old").unwrap();
    Device::open(old, 0, DeviceOptions::default()).unwrap();
}
