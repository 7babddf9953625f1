//! The worked example in C, driven through every safe handle.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]
#![expect(unsafe_code, reason = "tests the unsafe doors too")]

mod common;

use common::*;
use std::sync::Arc;
use tegula_plugin::*;
use tegula_program::ffi::FfiProgram;
use tegula_program::{Dim, ProgramBuilder};
use tegula_quant::DType;

const WIDTH: u64 = 4;

fn device(dir: &std::path::Path) -> Device {
    let registry = load(&[&example(dir, "libtegula_cexample.so")]);
    Device::open(&registry.backends[0], 0, DeviceOptions::default()).unwrap()
}

fn desc(size: u64) -> BufferDesc {
    BufferDesc { size, buffer_type: 0, usage: BufferUsage::ANY }
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn options() -> CompileOptions {
    CompileOptions {
        n_tokens_max: 8,
        n_outputs_max: 8,
        n_seqs_max: 1,
        n_ctx_max: 16,
        scratch_type: 0,
        scratch_chunk_max: 1 << 20,
    }
}

/// `out = (x * 2 + y) * y`: two values in between.
fn program() -> FfiProgram {
    let mut b = ProgramBuilder::new("example");
    let dims = [Dim::NTokens, Dim::Fixed(WIDTH)];
    let x = b.input("x", DType::F32, &dims);
    let y = b.input("y", DType::F32, &dims);
    let doubled = b.scale(x, 2.0);
    let sum = b.add(doubled, y);
    let product = b.mul(sum, y);
    b.output("out", product);
    FfiProgram::new(&b.finish().unwrap())
}

#[test]
fn identity_and_limits() {
    let dir = tempfile::tempdir().unwrap();
    let device = device(dir.path());
    let info = device.info();
    assert_eq!((info.id().as_str(), info.name.as_str()), ("cexample:0", "C example"));
    assert_eq!((info.kind, info.heaps[0].pool), (DeviceKind::CPU, POOL_HOST));
    assert!(info.contradictions.is_empty(), "{info:?}");
    let heaps = device.heaps().unwrap();
    assert!(heaps[0].total.get().unwrap() > 0);
    assert_eq!(heaps[0].free.get(), None);
    let most = info.buffer_types[0].max_size.get().unwrap();
    let error = device.alloc(&desc(most + 1)).unwrap_err();
    assert_eq!(
        (error.kind, error.asked, error.limit),
        (DeviceErrorKind::TooBig, Some(most + 1), Some(most))
    );
    assert_eq!(device.alloc(&desc(0)).unwrap_err().kind, DeviceErrorKind::InvalidArgument);
    let nowhere = BufferDesc { buffer_type: 7, ..desc(1) };
    assert_eq!(device.alloc(&nowhere).unwrap_err().kind, DeviceErrorKind::NotFound);
    let owner: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new(vec![0u8; 64]);
    let error = device.import(&desc(0), owner, 0..64).unwrap_err();
    assert_eq!(error.kind, DeviceErrorKind::Unsupported);
    assert!(Device::open(device.backend(), 5, DeviceOptions::default()).is_err());
}

#[test]
fn transfers() {
    let dir = tempfile::tempdir().unwrap();
    let device = device(dir.path());
    let (a, b) = (device.alloc(&desc(64)).unwrap(), device.alloc(&desc(64)).unwrap());
    let mut queue = device.queue().unwrap();
    let data: Vec<u8> = (0..32).collect();
    queue.write(&a, 16, &data).unwrap();
    queue.copy(&a.span(16, 32).unwrap(), &b.span(0, 32).unwrap()).unwrap();
    let mut back = vec![0; 32];
    queue.read(&b, 0, &mut back).unwrap();
    assert_eq!(back, data);
    let mapped = a.map().unwrap();
    // SAFETY: the buffer has 64 bytes, is mapped for its life, and no work is in flight.
    assert_eq!(unsafe { mapped.add(16 + 5).read() }, 5);
    for result in [
        queue.write(&a, 40, &data),
        queue.write(&a, u64::MAX, &data),
        queue.read(&b, 33, &mut back),
        queue.copy(&a.span(0, 8).unwrap(), &a.span(4, 8).unwrap()),
        queue.copy(&a.span(0, 8).unwrap(), &b.span(0, 9).unwrap()),
        a.span(60, 5).map(drop),
    ] {
        assert_eq!(result.unwrap_err().kind, DeviceErrorKind::InvalidArgument);
    }
    let mut other = device.queue().unwrap();
    // SAFETY: everything lives until the wait.
    let fence = unsafe { queue.write_async(&a, 0, &data) }.unwrap();
    assert!(other.wait(fence, None).is_err(), "a fence of another queue");
    queue.wait(fence, Some(std::time::Duration::ZERO)).unwrap();
}

#[test]
fn weights() {
    let dir = tempfile::tempdir().unwrap();
    let device = device(dir.path());
    let weight = WeightDesc {
        dtype: DType::F32,
        uses: weight_use::MATMUL,
        n_in: 3,
        n_rows: 2,
        rows_per_expert: 0,
    };
    let layout = device.weight_layout(&weight).unwrap();
    assert!(layout.is_native());
    assert_eq!(layout.bytes(weight.n_rows), Some(24));
    let quantised = WeightDesc { dtype: DType::Q4_0, n_in: 32, ..weight };
    let error = device.weight_layout(&quantised).unwrap_err();
    assert_eq!(error.kind, DeviceErrorKind::Unsupported);
    let buffer = Arc::new(device.alloc(&desc(64)).unwrap());
    let tile = Tile {
        first_row: 1,
        n_rows: 1,
        buffer: Arc::clone(&buffer),
        offset: 8,
        size: 12,
        layout: 0,
    };
    let mut queue = device.queue().unwrap();
    queue.upload(&weight, &tile, &bytes(&[1.0, 2.0, 3.0])).unwrap();
    let mut back = [0; 12];
    queue.read(&buffer, 8, &mut back).unwrap();
    assert_eq!(floats(&back), [1.0, 2.0, 3.0]);
    for (tile, src) in [
        (tile.clone(), 8),
        (Tile { first_row: 2, ..tile.clone() }, 12),
        (Tile { offset: 60, ..tile }, 12),
    ] {
        assert!(queue.upload(&weight, &tile, &vec![0; src]).is_err(), "{tile:?}, {src} bytes");
    }
}

#[test]
fn runs_a_program() {
    let dir = tempfile::tempdir().unwrap();
    let device = device(dir.path());
    let program = program();
    assert_eq!(device.supports(&program).unwrap(), [true; 3]);
    let memory = device.memory(&program, &options()).unwrap();
    assert_eq!(memory.scratch.len(), 2);
    let executable = device.compile(&program, &options(), &[]).unwrap();
    let scratch = device.alloc(&desc(1 << 12)).unwrap();
    let spans = [scratch.span(0, 128).unwrap(), scratch.span(128, 128).unwrap()];
    let mut queue = device.queue().unwrap();
    let x: Vec<f32> = (0..8).map(|i| i as f32).collect();
    let y: Vec<f32> = (0..8).map(|i| 10.0 - i as f32).collect();
    let want: Vec<f32> = x.iter().zip(&y).map(|(x, y)| (x * 2.0 + y) * y).collect();
    let on_device = device.alloc(&desc(64)).unwrap();
    let (x, y) = (bytes(&x), bytes(&y));
    queue.write(&on_device, 4, &y).unwrap();
    // From host and device memory, twice, to show that the arrays are taken up again.
    for second in [InputData::Host(&y), InputData::Buffer(on_device.span(4, 32).unwrap())] {
        let mut out = vec![0; 40];
        let mut args = RunArgs {
            n_tokens: 2,
            n_outputs: 0,
            inputs: &[InputData::Host(&x), second],
            outputs: &mut [OutputData::Host(&mut out)],
            scratch: &spans,
            seqs: &[],
            kv: &[],
            state: None,
        };
        queue.run(&executable, &mut args).unwrap();
        assert_eq!(floats(&out[..32]), want);
        assert_eq!(out[32..], [0; 8], "more was written than the value has");
    }
    // Arguments that would send the device out of bounds never reach it.
    let mut check = |n_tokens, scratch: &[BufferSpan<'_>], len: usize, expected: &str| {
        let mut out = vec![0; len];
        let mut args = RunArgs {
            n_tokens,
            n_outputs: 0,
            inputs: &[InputData::Host(&x), InputData::Host(&y)],
            outputs: &mut [OutputData::Host(&mut out)],
            scratch,
            seqs: &[],
            kv: &[],
            state: None,
        };
        let error = queue.run(&executable, &mut args).unwrap_err();
        assert_eq!(error.kind, DeviceErrorKind::InvalidArgument);
        assert!(error.to_string().contains(expected), "{error}");
    };
    check(3, &spans, 64, "has 48 bytes in this run, 32 are given");
    check(2, &spans, 31, "has 32 bytes in this run, 31 are given");
    check(0, &spans, 32, "0 tokens");
    check(9, &spans, 320, "compiled for 8");
    check(2, &spans[..1], 32, "1 pieces of scratch, 2 are needed");
    check(2, &[spans[0], scratch.span(128, 4).unwrap()], 32, "scratch");
    check(2, &[spans[0], scratch.span(129, 128).unwrap()], 32, "scratch");
}

/// What the example cannot do, it says before anything is allocated.
#[test]
fn unsupported_ops_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let device = device(dir.path());
    let mut b = ProgramBuilder::new("matmul");
    let x = b.input("x", DType::F32, &[Dim::NTokens, Dim::Fixed(WIDTH)]);
    let w = b.weight("w", DType::F32, &[2, WIDTH]);
    let y = b.matmul(x, w, None);
    let z = b.scale(y, 3.0);
    b.output("z", z);
    let program = FfiProgram::new(&b.finish().unwrap());
    assert_eq!(device.supports(&program).unwrap(), [false, true]);
    let buffer = Arc::new(device.alloc(&desc(64)).unwrap());
    let tile = |first_row, n_rows, size| Tile {
        first_row,
        n_rows,
        buffer: Arc::clone(&buffer),
        offset: 0,
        size,
        layout: 0,
    };
    let whole = [WeightBinding { value: 1, tiles: vec![tile(0, 1, 16), tile(1, 1, 16)] }];
    let error = device.compile(&program, &options(), &whole).unwrap_err();
    assert_eq!(error.kind, DeviceErrorKind::Unsupported, "{error}");
    for (value, tiles) in [
        (1, vec![tile(0, 1, 16)]),
        (1, vec![tile(0, 1, 16), tile(0, 1, 16)]),
        (1, vec![tile(0, 2, 16)]),
        (0, vec![tile(0, 2, 32)]),
    ] {
        let error =
            device.compile(&program, &options(), &[WeightBinding { value, tiles }]).unwrap_err();
        assert_eq!(error.kind, DeviceErrorKind::InvalidArgument, "{error}");
    }
    let small = CompileOptions { scratch_chunk_max: 16, ..options() };
    let error = device.memory(&program, &small).unwrap_err();
    assert_eq!((error.kind, error.limit), (DeviceErrorKind::TooBig, Some(16)));
}
