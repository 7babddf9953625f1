//! [`HostLimits`]: what this process may take of the host's memory, as the least of everything that binds.
//!
//! | bound | total | free |
//! |---|---|---|
//! | physical memory | `MemTotal` | `MemAvailable` |
//! | cgroup v2 `memory.max`, `memory.high`, v1 `memory.limit_in_bytes`, of every group up to the root | the limit | limit minus usage, caches not counted |
//! | `CommitLimit`, when `vm.overcommit_memory` is 2 | the limit | limit minus `Committed_AS` |
//! | `RLIMIT_AS`, `RLIMIT_DATA` | the limit | limit minus `VmSize`, `VmData` |
//!
//! Swap is not counted: weights in swap are slower than no answer.

use super::cgroup::{self, ReadText};
use std::path::Path;
use tegula_abi::{Figure, FigureSource};

/// What this process may take of the host's memory, at the moment of reading.
///
/// `max_size` is derived: a single buffer can have what the least bound allows, less what even an idle machine does not
/// give away. For physical memory and groups that is a sixteenth, at most 1 GiB: the kernel's own memory, page tables, the
/// services of the system and the process itself. For the limits of the address space it is what the process has mapped
/// besides its buffers, which is known exactly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostLimits {
    /// Bytes in all. `UNKNOWN` if nothing could be read.
    pub total: Figure,
    /// Bytes that can still be taken now; at most `total`.
    pub free: Figure,
    /// The greatest buffer on an idle machine; at most `total`.
    pub max_size: Figure,
    /// What binds `max_size`, by the name under which a user can raise it, such as `cgroup v2 memory.max`.
    pub binding: &'static str,
}

/// Limits of the process on its address space; `None` is no limit.
#[derive(Debug, Clone, Copy, Default)]
struct ProcessLimits {
    address_space: Option<u64>,
    data: Option<u64>,
}

/// One thing that binds.
struct Bound {
    name: &'static str,
    total: u64,
    free: Option<u64>,
    max_size: u64,
    /// Where `total` and `free` come from.
    sources: (FigureSource, FigureSource),
}

impl HostLimits {
    /// Reads everything now. Any thread; takes some tens of microseconds.
    pub fn read() -> Self {
        Self::with_granted(*super::granted())
    }

    /// As [`HostLimits::read`], by a caller who holds the lock on what is granted.
    pub(super) fn with_granted(granted: u64) -> Self {
        let read = |path: &Path| std::fs::read_to_string(path).ok();
        compute(&read, process_limits(), granted)
    }
}

fn process_limits() -> ProcessLimits {
    let limit = |resource| {
        let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: 0 };
        // SAFETY: writes one rlimit to the place it is given.
        let ok = unsafe { libc::getrlimit(resource, &raw mut limit) } == 0;
        (ok && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
    };
    ProcessLimits { address_space: limit(libc::RLIMIT_AS), data: limit(libc::RLIMIT_DATA) }
}

/// The least of everything that binds. `granted` are the bytes of live buffers, touched or not.
fn compute(read: ReadText<'_>, process: ProcessLimits, granted: u64) -> HostLimits {
    let text = |path: &str| read(Path::new(path)).unwrap_or_default();
    let (meminfo, status) = (text("/proc/meminfo"), text("/proc/self/status"));
    // Buffers are a part of the process's anonymous memory, so at least this much of them has no page yet.
    let resident = kib(&status, "RssAnon").unwrap_or(0);
    let untouched =
        granted.saturating_sub(resident.saturating_add(kib(&status, "VmSwap").unwrap_or(0)));
    let mut bounds = Vec::new();
    bounds.extend(physical(&meminfo, untouched));
    bounds.extend(cgroup::limits(read).into_iter().map(|group| Bound {
        name: group.name,
        total: group.limit,
        free: group.used.map(|used| group.limit.saturating_sub(used).saturating_sub(untouched)),
        max_size: less_reserve(group.limit),
        sources: (FigureSource::DRIVER, FigureSource::DERIVED),
    }));
    if text("/proc/sys/vm/overcommit_memory").trim() == "2" {
        bounds.extend(commit_limit(&meminfo));
    }
    bounds.extend(mapped("RLIMIT_AS", process.address_space, kib(&status, "VmSize"), granted));
    bounds.extend(mapped("RLIMIT_DATA", process.data, kib(&status, "VmData"), granted));
    least(&bounds)
}

fn physical(meminfo: &str, untouched: u64) -> Option<Bound> {
    let total = kib(meminfo, "MemTotal")?;
    let free = kib(meminfo, "MemAvailable").or_else(|| kib(meminfo, "MemFree"));
    Some(Bound {
        name: "physical memory",
        total,
        free: free.map(|free| free.saturating_sub(untouched)),
        max_size: less_reserve(total),
        sources: (FigureSource::DRIVER, FigureSource::DRIVER),
    })
}

/// The limit of a kernel that does not overcommit. It counts what is mapped, touched or not.
fn commit_limit(meminfo: &str) -> Option<Bound> {
    let total = kib(meminfo, "CommitLimit")?;
    Some(Bound {
        name: "CommitLimit of vm.overcommit_memory",
        total,
        free: kib(meminfo, "Committed_AS").map(|used| total.saturating_sub(used)),
        max_size: less_reserve(total),
        sources: (FigureSource::DRIVER, FigureSource::DERIVED),
    })
}

/// A limit on what the process has mapped, which includes its buffers.
fn mapped(
    name: &'static str,
    limit: Option<u64>,
    used: Option<u64>,
    granted: u64,
) -> Option<Bound> {
    let total = limit?;
    let others = used.map(|used| used.saturating_sub(granted));
    Some(Bound {
        name,
        total,
        free: used.map(|used| total.saturating_sub(used)),
        max_size: others.map_or(less_reserve(total), |others| total.saturating_sub(others)),
        sources: (FigureSource::DRIVER, FigureSource::DERIVED),
    })
}

/// Without a sixteenth, at most 1 GiB; see [`HostLimits`].
fn less_reserve(total: u64) -> u64 {
    total - (total / 16).min(1 << 30)
}

fn least(bounds: &[Bound]) -> HostLimits {
    let Some(tightest) = bounds.iter().min_by_key(|bound| bound.max_size) else {
        return HostLimits {
            total: Figure::UNKNOWN,
            free: Figure::UNKNOWN,
            max_size: Figure::UNKNOWN,
            binding: "nothing that could be read",
        };
    };
    let total = bounds.iter().map(|bound| (bound.total, bound.sources.0)).min_by_key(|b| b.0);
    let (total, source) = total.unwrap_or((tightest.total, tightest.sources.0));
    let free = bounds.iter().filter_map(|b| Some((b.free?, b.sources.1))).min_by_key(|b| b.0);
    HostLimits {
        total: Figure::known(total, source),
        free: free.map_or(Figure::UNKNOWN, |(free, source)| Figure::known(free.min(total), source)),
        max_size: Figure::known(tightest.max_size.min(total), FigureSource::DERIVED),
        binding: tightest.name,
    }
}

/// The bytes of a line `Name:   123 kB`.
fn kib(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const MEMINFO: &str = "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:  12582912 kB\n\
        CommitLimit: 8388608 kB\nCommitted_AS: 2097152 kB\n";
    const STATUS: &str =
        "VmSize:\t 4194304 kB\nVmData:\t 2097152 kB\nRssAnon:\t 1048576 kB\nVmSwap:\t 0 kB\n";

    struct Case {
        what: &'static str,
        files: &'static [(&'static str, &'static str)],
        process: ProcessLimits,
        granted: u64,
        /// Total, free, max_size in bytes; `None` for unknown.
        expected: (Option<u64>, Option<u64>, Option<u64>, &'static str),
    }

    const NO_LIMITS: ProcessLimits = ProcessLimits { address_space: None, data: None };
    const PROC: [(&str, &str); 2] = [("/proc/meminfo", MEMINFO), ("/proc/self/status", STATUS)];
    const GROUP: [(&str, &str); 6] = [
        PROC[0],
        PROC[1],
        ("/proc/self/cgroup", "0::/\n"),
        ("/proc/self/mountinfo", "1 2 0:3 / /cg rw - cgroup2 cgroup2 rw\n"),
        ("/cg/memory.max", "4294967296\n"),
        ("/cg/memory.current", "1073741824\n"),
    ];

    /// These numbers decide what is loaded: too great and the process is killed, too small and a model that fits is refused.
    #[test]
    fn the_least_bound_wins() {
        let cases = [
            Case {
                what: "physical memory alone",
                files: &PROC,
                process: NO_LIMITS,
                granted: 0,
                expected: (Some(16 * GIB), Some(12 * GIB), Some(15 * GIB), "physical memory"),
            },
            Case {
                what: "3 GiB granted, of which 1 GiB can be touched",
                files: &PROC,
                process: NO_LIMITS,
                granted: 3 * GIB,
                expected: (Some(16 * GIB), Some(10 * GIB), Some(15 * GIB), "physical memory"),
            },
            Case {
                what: "more granted than available",
                files: &PROC,
                process: NO_LIMITS,
                granted: 64 * GIB,
                expected: (Some(16 * GIB), Some(0), Some(15 * GIB), "physical memory"),
            },
            Case {
                what: "a group",
                files: &GROUP,
                process: NO_LIMITS,
                granted: 2 * GIB,
                expected: (
                    Some(4 * GIB),
                    Some(2 * GIB),
                    Some(4 * GIB - GIB / 4),
                    "cgroup v2 memory.max",
                ),
            },
            Case {
                what: "an address space whose mappings are half buffers",
                files: &PROC,
                process: ProcessLimits { address_space: Some(6 * GIB), data: None },
                granted: 2 * GIB,
                expected: (Some(6 * GIB), Some(2 * GIB), Some(4 * GIB), "RLIMIT_AS"),
            },
            Case {
                what: "data segments already over their limit",
                files: &PROC,
                process: ProcessLimits { address_space: Some(6 * GIB), data: Some(GIB) },
                granted: 0,
                expected: (Some(GIB), Some(0), Some(0), "RLIMIT_DATA"),
            },
            Case {
                what: "a kernel that does not overcommit",
                files: &[PROC[0], PROC[1], ("/proc/sys/vm/overcommit_memory", "2\n")],
                process: NO_LIMITS,
                granted: 0,
                expected: (
                    Some(8 * GIB),
                    Some(6 * GIB),
                    Some(8 * GIB - GIB / 2),
                    "CommitLimit of vm.overcommit_memory",
                ),
            },
            Case {
                what: "nothing can be read",
                files: &[],
                process: NO_LIMITS,
                granted: 0,
                expected: (None, None, None, "nothing that could be read"),
            },
            Case {
                what: "garbage",
                files: &[("/proc/meminfo", "MemTotal: many kB\nMemTotal\nMemAvailable: 5\n")],
                process: NO_LIMITS,
                granted: 0,
                expected: (None, None, None, "nothing that could be read"),
            },
            Case {
                what: "an address space limit alone, its use unknown",
                files: &[],
                process: ProcessLimits { address_space: Some(16 * GIB), data: None },
                granted: 0,
                expected: (Some(16 * GIB), None, Some(15 * GIB), "RLIMIT_AS"),
            },
        ];
        for case in cases {
            let read = |path: &Path| {
                let file = case.files.iter().find(|(name, _)| Path::new(name) == path);
                file.map(|(_, text)| (*text).to_string())
            };
            let got = compute(&read, case.process, case.granted);
            let got = (got.total.get(), got.free.get(), got.max_size.get(), got.binding);
            assert_eq!(got, case.expected, "{}", case.what);
        }
    }
}
