//! Limits on real drivers: what is stated is what the driver says of that very device, and what the driver says on refusal reaches the caller.
//!
//! Drivers read their limits from the environment when they are loaded, so each case runs this test's own file again as a child, with the
//! driver's variables. Intel's runtime is found through `TEGULA_INTEL_OPENCL`, the folder of its `libintelocl.so`, or in
//! `~/.cache/tegula/intel-opencl/lib`; without it those cases are skipped, and told.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use ocl_core::types::abs::{DeviceId, PlatformId};
use ocl_core::{DeviceInfo as Query, DeviceInfoResult as Answer};
use std::path::PathBuf;
use std::process::Command;
use tegula_opencl::OpenCl;
use tegula_sdk::abi::{BufferDesc, BufferUsage, DeviceOptions, Status};
use tegula_sdk::{Backend, Device};

const MIB: u64 = 1 << 20;
/// Says that this process is a child, and what it checks.
const CHILD: &str = "TEGULA_OPENCL_TEST_CHILD";
/// What the UHD 770 of the OpenVINO failure states.
const UHD_770: u64 = 4_294_959_104;

/// The folder of Intel's CPU runtime.
fn intel() -> Option<PathBuf> {
    let named = std::env::var_os("TEGULA_INTEL_OPENCL").map(PathBuf::from);
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let cache = cache.or_else(|| Some(std::env::home_dir()?.join(".cache")));
    let cached = cache.map(|cache| cache.join("tegula/intel-opencl/lib"));
    let found = named.or(cached).filter(|folder| folder.join("libintelocl.so").is_file());
    if found.is_none() {
        eprintln!("SKIPPED: no libintelocl.so; run: cargo xtask setup");
    }
    found
}

/// All devices in the order of the backend.
fn devices() -> Vec<DeviceId> {
    let platforms: Vec<PlatformId> = ocl_core::get_platform_ids().unwrap_or_default();
    let of = |p: &PlatformId| ocl_core::get_device_ids(p, None, None).unwrap_or_default();
    platforms.iter().flat_map(of).collect()
}

fn query(device: &DeviceId) -> u64 {
    let ask = |what| match ocl_core::get_device_info(device, what).unwrap() {
        Answer::MaxMemAllocSize(n) | Answer::GlobalMemSize(n) => n,
        other => panic!("{other:?}"),
    };
    ask(Query::MaxMemAllocSize).min(ask(Query::GlobalMemSize))
}

fn stated(backend: &OpenCl, index: usize) -> u64 {
    let info = backend.buffer_type_info(index as u32, 0).unwrap();
    info.max_size.get().unwrap()
}

/// Runs `name` of this file in a child; its output on failure.
fn child(name: &str, check: &str, with_intel: bool, env: &[(&str, String)]) -> bool {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).env(CHILD, check);
    if with_intel {
        let Some(folder) = intel() else { return false };
        command.env("LD_LIBRARY_PATH", &folder);
        command.env("OCL_ICD_FILENAMES", folder.join("libintelocl.so"));
    }
    for (key, value) in env {
        command.env(key, value);
    }
    let output = command.output().unwrap();
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    let text = String::from_utf8_lossy(&text);
    assert!(output.status.success(), "{check}: {text}");
    assert!(text.contains("CHECKED"), "{check}: nothing was checked: {text}");
    true
}

/// A model is cut by these figures: one that is another device's, or of another time, ends in a failed load.
///
/// The limit of some device is `wanted`, wherever the loader puts its platform.
fn check_stated(wanted: Option<u64>) {
    let backend = OpenCl::open().unwrap();
    let devices = devices();
    assert_eq!(devices.len(), backend.n_devices() as usize);
    let n = devices.len();
    let orders = [(0..n).collect::<Vec<_>>(), (0..n).rev().collect()];
    let check = |order: &[usize]| {
        for i in order {
            // A driver whose figures follow free memory is asked just before and after.
            let before = query(&devices[*i]);
            let (ours, after) = (stated(&backend, *i), query(&devices[*i]));
            let (low, high) = (before.min(after), before.max(after));
            assert!((low..=high).contains(&ours), "device {i}: {ours}, the driver says {before}");
        }
    };
    orders.iter().for_each(|order| check(order));
    std::thread::scope(|scope| {
        for order in &orders {
            let check = &check;
            scope.spawn(move || (0..50).for_each(|_| check(order)));
        }
    });
    let limits: Vec<u64> = (0..n).map(|i| stated(&backend, i)).collect();
    assert!(wanted.is_none_or(|wanted| limits.contains(&wanted)), "{limits:?}");
    println!("CHECKED {n} devices");
}

/// The driver's own code and its name, in an error that both hosts and people can read, and a device that lives on.
fn check_refusals() {
    let backend = OpenCl::open().unwrap();
    for index in 0..backend.n_devices() {
        let device = backend.open_device(index, &DeviceOptions::default()).unwrap();
        let limit = stated(&backend, index as usize);
        let usage = BufferUsage::WEIGHTS;
        for buffer_type in [0, 1] {
            let desc = |size| BufferDesc { struct_size: 0, size, buffer_type, usage };
            let error = device.alloc(&desc(limit + MIB)).map(drop).unwrap_err();
            assert_eq!(error.status, Status::TOO_BIG, "{error}");
            assert_eq!((error.asked, error.native), (Some(limit + MIB), Some(-61)), "{error}");
            assert!(error.message.contains("CL_INVALID_BUFFER_SIZE"), "{error}");
            assert!(!error.message.contains('\n'), "{error}");
            device.alloc(&desc(MIB)).unwrap();
        }
    }
    println!("CHECKED {} devices", backend.n_devices());
}

/// In a child: what it is there for.
fn is_child() -> bool {
    let Some(check) = std::env::var_os(CHILD) else { return false };
    match check.to_str() {
        Some("stated") => check_stated(None),
        Some("forced") => check_stated(Some(UHD_770)),
        Some("refusals") => check_refusals(),
        other => panic!("{other:?}"),
    }
    true
}

#[test]
fn stated_limits_are_the_drivers() {
    if is_child() {
        return;
    }
    let name = "stated_limits_are_the_drivers";
    if devices().is_empty() {
        eprintln!("SKIPPED: no OpenCL device");
        return;
    }
    child(name, "stated", false, &[]);
    child(name, "stated", false, &[("POCL_MEMORY_LIMIT", "1".into())]);
    // Two platforms, the first with a limit that the second does not have.
    let force = ("CL_CONFIG_CPU_FORCE_MAX_MEM_ALLOC_SIZE", format!("{UHD_770}B"));
    child(name, "forced", true, &[force, ("POCL_MEMORY_LIMIT", "1".into())]);
}

#[test]
fn the_drivers_code_reaches_the_caller() {
    if is_child() {
        return;
    }
    let name = "the_drivers_code_reaches_the_caller";
    if devices().is_empty() {
        eprintln!("SKIPPED: no OpenCL device");
        return;
    }
    child(name, "refusals", false, &[("POCL_MEMORY_LIMIT", "1".into())]);
    let force = ("CL_CONFIG_CPU_FORCE_MAX_MEM_ALLOC_SIZE", format!("{}B", 64 * MIB));
    child(name, "refusals", true, &[force]);
}
