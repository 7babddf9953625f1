//! How many threads are worth starting here.

/// The number of threads that can really run at once: the CPUs of the affinity mask, limited by the quota of the
/// control group (v1 and v2, both read by the standard library), counting cores instead of their hardware threads,
/// since two hardware threads share the units that the kernels saturate. At least 1.
pub fn default_threads() -> usize {
    let available = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    physical_cores().map_or(available, |cores| available.min(cores)).max(1)
}

/// The CPU for each worker of a pool that takes all the cores that it may run on, the caller's place left out; none where
/// the pool is smaller, since others would pin theirs to the same few, or where the system does not say.
///
/// A worker that stays keeps its caches, and the scheduler cannot put two on one core, which it does with threads that
/// sleep and wake often.
pub(super) fn places(n_threads: usize) -> Vec<usize> {
    let cores = first_cpus().unwrap_or_default();
    let quota = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    if n_threads == cores.len() && n_threads <= quota {
        cores.into_iter().skip(1).collect()
    } else {
        Vec::new()
    }
}

/// Pins the calling thread to a CPU. A refusal changes nothing but speed.
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "sched_setaffinity is a C function")]
pub(super) fn pin(cpu: usize) {
    // SAFETY: an all-zero mask is a valid value of this plain struct.
    let mut mask: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    if cpu < libc::CPU_SETSIZE as usize {
        // SAFETY: `cpu` is below the size of the set, and the size given is that of the mask.
        let rc = unsafe {
            libc::CPU_SET(cpu, &mut mask);
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const mask)
        };
        if rc != 0 {
            log::debug!("a worker could not be pinned to CPU {cpu}");
        }
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) fn pin(_cpu: usize) {}

/// Distinct cores under the affinity mask, or `None` where the system does not say.
fn physical_cores() -> Option<usize> {
    first_cpus().map(|cpus| cpus.len())
}

/// The first hardware thread of each core under the affinity mask.
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "sched_getaffinity is a C function")]
fn first_cpus() -> Option<Vec<usize>> {
    // SAFETY: an all-zero mask is a valid value of this plain struct.
    let mut mask: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the size is that of the mask that the pointer names.
    let rc = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut mask) };
    if rc != 0 {
        return None;
    }
    let mut siblings = std::collections::BTreeSet::new();
    let mut cpus = Vec::new();
    for cpu in 0..libc::CPU_SETSIZE as usize {
        // SAFETY: `cpu` is below the size of the set.
        if unsafe { libc::CPU_ISSET(cpu, &mask) } {
            // All hardware threads of a core read the same list, so the list names the core.
            let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            if siblings.insert(std::fs::read_to_string(path).ok()?) {
                cpus.push(cpu);
            }
        }
    }
    Some(cpus).filter(|cpus| !cpus.is_empty())
}

#[cfg(not(target_os = "linux"))]
fn first_cpus() -> Option<Vec<usize>> {
    None
}
