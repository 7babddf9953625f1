//! How many threads are worth starting here.

/// The number of threads that can really run at once: the CPUs of the affinity mask, limited by the quota of the
/// control group (v1 and v2, both read by the standard library), counting cores instead of their hardware threads,
/// since two hardware threads share the units that the kernels saturate. At least 1.
pub fn default_threads() -> usize {
    let available = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    physical_cores().map_or(available, |cores| available.min(cores)).max(1)
}

/// Distinct cores under the affinity mask, or `None` where the system does not say.
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "sched_getaffinity is a C function")]
fn physical_cores() -> Option<usize> {
    // SAFETY: an all-zero mask is a valid value of this plain struct.
    let mut mask: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the size is that of the mask that the pointer names.
    let rc = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut mask) };
    if rc != 0 {
        return None;
    }
    let mut siblings = std::collections::BTreeSet::new();
    for cpu in 0..libc::CPU_SETSIZE as usize {
        // SAFETY: `cpu` is below the size of the set.
        if unsafe { libc::CPU_ISSET(cpu, &mask) } {
            // All hardware threads of a core read the same list, so the list names the core.
            let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            siblings.insert(std::fs::read_to_string(path).ok()?);
        }
    }
    Some(siblings.len()).filter(|&n| n > 0)
}

#[cfg(not(target_os = "linux"))]
fn physical_cores() -> Option<usize> {
    None
}
