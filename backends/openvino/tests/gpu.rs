//! The GPU path where OpenVINO's GPU plugin finds a device: a real one, or the instrument in `tests/ovgpu`.
//!
//! Where `cargo xtask setup` made the instrument, this program runs all of its tests on it too, with a small limit, and as a discrete GPU.
//! `TEGULA_OVGPU=1`, which the instrument's `env.sh` sets, makes an absent GPU a failure instead of a skip.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::path::PathBuf;
use std::process::Command;
use tegula_openvino::{Buffer, OpenVino, OpenVinoDevice};
use tegula_sdk::abi::{BufferDesc, BufferUsage, DeviceKind, DeviceOptions, FigureSource, Status};
use tegula_sdk::{Backend, Device};

/// The first GPU.
fn gpu() -> Option<(OpenVino, u32)> {
    let backend = OpenVino::open().unwrap();
    let is_gpu = |i: &u32| backend.device_info(*i).unwrap().kind != DeviceKind::CPU;
    let Some(index) = (0..backend.n_devices()).find(is_gpu) else {
        assert!(
            std::env::var_os("TEGULA_OVGPU").is_none(),
            "the instrument is set up, but no GPU is found"
        );
        eprintln!(
            "SKIPPED: 1 test: OpenVINO finds no GPU here; on_the_instrument runs it where there is one"
        );
        return None;
    };
    Some((backend, index))
}

fn open(backend: &OpenVino, index: u32) -> OpenVinoDevice {
    backend.open_device(index, &DeviceOptions::default()).unwrap()
}

fn alloc(device: &OpenVinoDevice, size: u64) -> tegula_sdk::Result<Buffer> {
    let desc = BufferDesc { size, buffer_type: 0, usage: BufferUsage::KV, ..BufferDesc::default() };
    device.alloc(&desc)
}

/// A limit that is not the device's own makes every plan wrong: too high fails at load, too low cuts for nothing.
#[test]
fn the_limit_is_the_devices_own_and_one_byte_more_is_refused_with_its_words() {
    let Some((backend, index)) = gpu() else { return };
    let kind = backend.buffer_type_info(index, 0).unwrap();
    let max = kind.max_size.get().unwrap();
    let stated = std::env::var("FAKEGPU_MAX_ALLOC").ok().and_then(|max| max.parse().ok());
    if std::env::var_os("TEGULA_OVGPU").is_some() {
        assert_eq!(max, stated.unwrap_or(4_294_959_104));
        assert_eq!(kind.max_size.source, FigureSource::DRIVER);
    }
    let device = open(&backend, index);
    let error = alloc(&device, max + 1).map(drop).unwrap_err();
    assert_eq!(
        (error.status, error.asked, error.limit),
        (Status::TOO_BIG, Some(max + 1), Some(max))
    );
    assert!(
        error.message.starts_with("[GPU] Exceeded max size of memory object allocation"),
        "{error}"
    );
    let buffer = alloc(&device, max).unwrap();
    let bytes = device.map(&buffer).unwrap();
    assert!(!bytes.is_null());
}

/// `GPU.0` is another card when one is plugged in: an operator names a UUID or a PCI address.
#[test]
fn a_gpu_has_an_identity_and_a_kind() {
    let Some((backend, index)) = gpu() else { return };
    let info = backend.device_info(index).unwrap();
    assert!(info.has_uuid == 1 || !info.pci.to_text().is_empty(), "{info:?}");
    if std::env::var_os("TEGULA_OVGPU").is_some() {
        let is_discrete = std::env::var("FAKEGPU_DISCRETE").is_ok_and(|value| value == "1");
        let kind = if is_discrete { DeviceKind::DISCRETE } else { DeviceKind::INTEGRATED };
        assert_eq!((info.kind, info.pci.to_text().as_str()), (kind, "0000:00:02.0"));
        assert_eq!(info.n_heaps, if is_discrete { 2 } else { 1 });
    }
}

/// Llama-3.2-3B at 65,536 tokens in f16: 7,516,192,768 bytes of keys and values, as 28 layers in 8 segments. Asked for as one buffer this
/// was what failed on a device of 4,294,959,104 bytes a buffer.
#[test]
fn the_cache_of_a_long_context_is_really_allocated() {
    const TILE: u64 = 65_536 / 8 * 8 * 128 * 2;
    const N_TILES: u64 = 28 * 2 * 8;
    let Some((backend, index)) = gpu() else { return };
    let max = backend.buffer_type_info(index, 0).unwrap().max_size.get().unwrap();
    let free = backend.heap_info(index, 0).unwrap().free.get().unwrap_or(0);
    let per_chunk = (max / TILE).min(N_TILES);
    if per_chunk == 0 || free < TILE * N_TILES {
        eprintln!("SKIPPED: 1 test: {free} bytes are free, {max} in one piece");
        return;
    }
    let device = open(&backend, index);
    assert!(alloc(&device, TILE * N_TILES).is_err() || max >= TILE * N_TILES);
    let mut left = N_TILES;
    let mut chunks = Vec::new();
    while left > 0 {
        let n = left.min(per_chunk);
        chunks.push(alloc(&device, n * TILE).unwrap());
        left -= n;
    }
    for chunk in &chunks {
        assert!(!device.map(chunk).unwrap().is_null());
    }
}

/// What the instrument's GPU is like.
fn check_on_the_instrument(what: &[(&str, &str)]) {
    if std::env::var_os("TEGULA_OVGPU").is_some() {
        return;
    }
    let named = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let home = || std::env::home_dir().unwrap_or_default().join(".cache");
    let settings = named.unwrap_or_else(home).join("tegula/ovgpu/env.sh");
    if !settings.is_file() {
        eprintln!("SKIPPED: 1 test: no {}; run: cargo xtask setup", settings.display());
        return;
    }
    let mut bash = Command::new("bash");
    bash.args(["-c", ". \"$0\"; exec \"$@\""]).arg(settings);
    bash.arg(std::env::current_exe().unwrap()).arg("--nocapture").envs(what.iter().copied());
    let output = bash.output().unwrap();
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    assert!(output.status.success(), "{what:?}: {}", String::from_utf8_lossy(&text));
    assert!(
        !String::from_utf8_lossy(&text).contains("finds no GPU"),
        "{what:?}: nothing was checked"
    );
}

#[test]
fn on_the_instrument() {
    check_on_the_instrument(&[]);
}

#[test]
fn on_the_instrument_with_a_small_limit() {
    check_on_the_instrument(&[("FAKEGPU_MAX_ALLOC", "67108864")]);
}

#[test]
fn on_the_instrument_as_a_discrete_gpu() {
    check_on_the_instrument(&[("FAKEGPU_DISCRETE", "1")]);
}
