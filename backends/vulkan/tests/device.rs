//! What only a driver can show: two logical devices beside each other, both ends of the greatest buffer as the device sees them, a lost
//! device, and silence of the validation layer. Without a driver there is nothing to test, which is said.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    unsafe_code,
    reason = "a test that cannot go on fails; the traits of queues take raw pointers"
)]

use tegula_sdk::abi::{BufferDesc, BufferUsage, CompileOptions, DeviceOptions, Status};
use tegula_sdk::program::{DType, Dim, Program, ProgramBuilder};
use tegula_sdk::{Backend, Device, Queue as _, Range, Weight};
use tegula_vulkan::{Buffer, Queue, Vulkan, VulkanDevice};

fn backend() -> Option<Vulkan> {
    let backend = Vulkan::open().expect("without a driver there are no devices, and no error");
    if backend.n_devices() == 0 {
        eprintln!("SKIPPED: no Vulkan device");
        return None;
    }
    Some(backend)
}

fn open(backend: &Vulkan, index: u32) -> VulkanDevice {
    backend.open_device(index, &DeviceOptions::default()).unwrap()
}

fn alloc(device: &VulkanDevice, buffer_type: u32, size: u64) -> Buffer {
    let struct_size = size_of::<BufferDesc>();
    device.alloc(&BufferDesc { struct_size, size, buffer_type, usage: BufferUsage::ANY }).unwrap()
}

fn write(queue: &mut Queue, buffer: &Buffer, offset: u64, bytes: &[u8]) {
    let range = Range { buffer, offset, size: bytes.len() as u64 };
    // SAFETY: the bytes live until the wait.
    let fence = unsafe { queue.write(range, bytes.as_ptr()) }.unwrap();
    queue.wait(fence, None).unwrap();
}

fn read(queue: &mut Queue, buffer: &Buffer, offset: u64, bytes: &mut [u8]) {
    let range = Range { buffer, offset, size: bytes.len() as u64 };
    // SAFETY: as above.
    let fence = unsafe { queue.read(range, bytes.as_mut_ptr()) }.unwrap();
    queue.wait(fence, None).unwrap();
}

/// A device that runs twice must not fall back to another's memory: each keeps its own ring, and only its own grows.
#[test]
fn two_logical_devices_keep_their_own_staging() {
    let Some(backend) = backend() else { return };
    let (first, second) = (open(&backend, 0), open(&backend, 0));
    assert_eq!((first.staging(), second.staging()), ((0, 0), (0, 0)));
    let bytes = vec![7u8; 3 << 20];
    let buffers = (alloc(&first, 0, 4 << 20), alloc(&second, 0, 4 << 20));
    let mut queue = first.queue().unwrap();
    write(&mut queue, &buffers.0, 64, &bytes);
    assert_eq!(second.staging(), (0, 0), "the other device's transfers show");
    let mut other = second.queue().unwrap();
    let mut back = vec![0u8; bytes.len()];
    write(&mut other, &buffers.1, 64, &vec![9u8; bytes.len()]);
    read(&mut queue, &buffers.0, 64, &mut back);
    assert!(back == bytes, "one device reads what the other wrote");
    read(&mut other, &buffers.1, 64, &mut back);
    assert!(back.iter().all(|byte| *byte == 9));
    // Unified memory is written in place; pinned memory is bounded elsewhere.
    for device in [&first, &second] {
        let (pinned, moved) = device.staging();
        assert!(pinned <= 3 * (16 << 20) && (pinned == 0) == (moved == 0));
    }
}

/// A `max_size` that the device does not reach gives zeros in the middle of a model, silently.
#[test]
fn the_device_reaches_both_ends_of_the_greatest_buffer() {
    let Some(backend) = backend() else { return };
    for index in 0..backend.n_devices() {
        let device = open(&backend, index);
        let max_size = backend.buffer_type_info(index, 0).unwrap().max_size.get().unwrap();
        let free = backend.heap_info(index, 0).unwrap().free.get();
        if free.is_some_and(|free| free < max_size + (64 << 20)) {
            eprintln!("SKIPPED: max_size {max_size} with {free:?} bytes free");
            continue;
        }
        let buffer = alloc(&device, 0, max_size);
        let middle = (max_size / 2).next_multiple_of(64);
        for (i, at) in [0, middle - 4, middle, max_size - 4].into_iter().enumerate() {
            let word = 0xA5A5_0000u32 + u32::try_from(i).unwrap();
            assert_eq!(device.touch(&buffer, at, word).unwrap(), word, "at {at} of {max_size}");
            let mut back = [0u8; 4];
            read(&mut device.queue().unwrap(), &buffer, at, &mut back);
            assert_eq!(u32::from_le_bytes(back), word, "at {at} of {max_size}");
        }
        let error = device
            .alloc(&BufferDesc {
                struct_size: size_of::<BufferDesc>(),
                size: max_size + 1,
                buffer_type: 0,
                usage: BufferUsage::ANY,
            })
            .unwrap_err();
        assert_eq!((error.status, error.limit), (Status::TOO_BIG, Some(max_size)));
    }
}

/// A host that goes on after a device is gone must get errors, not hangs; other devices go on.
#[test]
fn a_lost_device_says_so_and_others_go_on() {
    let Some(backend) = backend() else { return };
    let (lost, other) = (open(&backend, 0), open(&backend, 0));
    let buffer = alloc(&lost, 0, 4096);
    let mut queue = lost.queue().unwrap();
    write(&mut queue, &buffer, 0, &[1; 16]);
    lost.lose();
    let desc = BufferDesc {
        struct_size: size_of::<BufferDesc>(),
        size: 64,
        buffer_type: 0,
        usage: BufferUsage::ANY,
    };
    let errors = [
        lost.alloc(&desc).map(drop).unwrap_err(),
        lost.queue().map(drop).unwrap_err(),
        queue.wait(0, None).unwrap_err(),
        queue
            .copy(
                Range { buffer: &buffer, offset: 0, size: 16 },
                Range { buffer: &buffer, offset: 64, size: 16 },
            )
            .unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.status, Status::DEVICE_LOST, "{error}");
        assert_eq!(error.native, Some(-4), "VK_ERROR_DEVICE_LOST is kept: {error}");
    }
    drop((buffer, queue, lost));
    let buffer = alloc(&other, 0, 4096);
    let mut queue = other.queue().unwrap();
    let mut back = [0; 16];
    write(&mut queue, &buffer, 0, &[3; 16]);
    read(&mut queue, &buffer, 0, &mut back);
    assert_eq!(back, [3; 16]);
}

/// A norm, a gated pair, a product with a residual, and what reads its result.
fn program() -> Program {
    let mut b = ProgramBuilder::new("validated");
    let x = b.input("x", DType::F32, &[Dim::NTokens, Dim::Fixed(64)]);
    let gate = b.weight("gate", DType::Q8_0, &[96, 64]);
    let up = b.weight("up", DType::Q8_0, &[96, 64]);
    let down = b.weight("down", DType::Q4_0, &[64, 96]);
    let (g, u) = (b.matmul(x, gate, None), b.matmul(x, up, None));
    let hidden = b.glu(tegula_sdk::program::Activation::Silu, g, u);
    let y = b.matmul(hidden, down, None);
    let y = b.add(x, y);
    let best = b.argmax(y);
    b.output("y", y);
    b.output("best", best);
    b.finish().unwrap()
}

/// What the layer flags works here and fails on the next driver.
#[test]
fn the_validation_layer_is_silent() {
    // SAFETY: tests of this file run in processes of their own under nextest; elsewhere the variable only turns checks on.
    unsafe { std::env::set_var("TEGULA_VULKAN_VALIDATION", "1") };
    let Some(backend) = backend() else { return };
    let device = open(&backend, 0);
    let mut queue = device.queue().unwrap();
    let program = program();
    let options = CompileOptions {
        struct_size: size_of::<CompileOptions>(),
        n_tokens_max: 16,
        n_outputs_max: 16,
        n_seqs_max: 1,
        n_ctx_max: 16,
        scratch_type: 0,
        reserved: 0,
        scratch_chunk_max: 1 << 20,
    };
    assert!(device.supports(&program).unwrap().iter().all(|yes| *yes));
    assert!(!device.memory(&program, &options).unwrap().scratch.is_empty());
    let weight = Weight { dtype: DType::Q4_0, uses: 1, n_in: 96, n_rows: 64, rows_per_expert: 0 };
    let layout = device.weight_layout(&weight).unwrap();
    let tile = alloc(&device, 0, layout.group_bytes * 64);
    let rows = vec![0x11u8; 54 * 64];
    let upload = tegula_sdk::Upload {
        weight,
        first_row: 0,
        n_rows: 64,
        dst: Range { buffer: &tile, offset: 0, size: layout.group_bytes * 64 },
        layout: layout.layout,
        src: rows.as_ptr(),
        src_size: rows.len() as u64,
    };
    // SAFETY: the rows live until the wait.
    let fence = unsafe { queue.upload(&upload) }.unwrap();
    queue.wait(fence, None).unwrap();
    assert_eq!(device.touch(&tile, 0, 5).unwrap(), 5);
    drop((tile, queue, device));
    assert_eq!(backend.validation_messages(), 0, "see the log");
}
