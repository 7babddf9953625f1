//! Control groups: which directories bind this process, and what their files say. Pure functions over text, so that
//! every kind of system can be tried in a table.

use std::path::{Component, Path, PathBuf};

/// Reads a whole small file; `None` when it is missing or unreadable.
pub(super) type ReadText<'a> = &'a dyn Fn(&Path) -> Option<String>;

/// A limit on the memory of a group of processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GroupLimit {
    /// What to tell a user who wants to raise it.
    pub(super) name: &'static str,
    /// The limit in bytes.
    pub(super) limit: u64,
    /// Bytes in use that the kernel cannot take back from caches. `None` when it could not be read.
    pub(super) used: Option<u64>,
}

/// The files of one version of the interface. Limits are those a process cannot grow past; `memory.high` is one of them,
/// because a process above it is slowed until it stands still.
struct Version {
    fstype: &'static str,
    limits: &'static [(&'static str, &'static str)],
    usage: &'static str,
    /// Lines of `memory.stat` that count what is reclaimed under pressure. A mapped model file would otherwise look like used memory.
    caches: &'static [&'static str],
}

const V2: Version = Version {
    fstype: "cgroup2",
    limits: &[("memory.max", "cgroup v2 memory.max"), ("memory.high", "cgroup v2 memory.high")],
    usage: "memory.current",
    caches: &["inactive_file", "active_file", "slab_reclaimable"],
};

const V1: Version = Version {
    fstype: "cgroup",
    limits: &[("memory.limit_in_bytes", "cgroup v1 memory.limit_in_bytes")],
    usage: "memory.usage_in_bytes",
    caches: &["total_inactive_file", "total_active_file"],
};

/// All limits on the way from this process's groups up to the roots of the mounted hierarchies, of both versions:
/// the memory controller sits in one of them, and the files of the other are missing.
pub(super) fn limits(read: ReadText<'_>) -> Vec<GroupLimit> {
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let mounts = read(Path::new("/proc/self/mountinfo")).unwrap_or_default();
    let mut out = Vec::new();
    for version in [&V2, &V1] {
        let Some(group) = group_path(&groups, version) else { continue };
        for mount in mounts.lines().filter_map(|line| Mount::parse(line, version)) {
            for dir in mount.dirs(group) {
                read_dir(&dir, version, read, &mut out);
            }
        }
    }
    out
}

/// The process's group in a `/proc/self/cgroup`: lines are `id:controllers:path`, v2's is `0::path`.
fn group_path<'a>(groups: &'a str, version: &Version) -> Option<&'a str> {
    groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (id, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let ours = match version.fstype {
            "cgroup2" => id == "0" && controllers.is_empty(),
            _ => controllers.split(',').any(|controller| controller == "memory"),
        };
        ours.then_some(path)
    })
}

/// Where a hierarchy can be seen.
struct Mount<'a> {
    /// The group that lies at the mount point.
    root: &'a str,
    point: &'a str,
}

impl<'a> Mount<'a> {
    /// From a line of mountinfo: `id parent device root point options [tags] - fstype source options`.
    fn parse(line: &'a str, version: &Version) -> Option<Self> {
        let (place, kind) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3);
        let (root, point) = (place.next()?, place.next()?);
        let mut kind = kind.split(' ');
        let fstype = kind.next()?;
        let options = kind.nth(1).unwrap_or_default();
        let has_memory = fstype == "cgroup2" || options.split(',').any(|o| o == "memory");
        let ours = fstype == version.fstype && has_memory;
        ours.then_some(Self { root, point })
    }

    /// The directories of `group` and of those above it, as far as the mount shows them. In a container the group's
    /// path may be the host's and mean nothing here: then the mount point is the closest group that can be seen.
    fn dirs(&self, group: &str) -> Vec<PathBuf> {
        let inside = Path::new(group).strip_prefix(self.root).unwrap_or(Path::new(""));
        let plain = inside.components().all(|part| matches!(part, Component::Normal(_)));
        let inside = if plain { inside } else { Path::new("") };
        inside.ancestors().map(|part| Path::new(self.point).join(part)).collect()
    }
}

fn read_dir(dir: &Path, version: &Version, read: ReadText<'_>, out: &mut Vec<GroupLimit>) {
    for (file, name) in version.limits {
        let Some(limit) = read(&dir.join(file)).as_deref().and_then(parse_limit) else { continue };
        let usage = read(&dir.join(version.usage)).and_then(|text| text.trim().parse::<u64>().ok());
        let stat = read(&dir.join("memory.stat")).unwrap_or_default();
        let used = usage.map(|usage| usage.saturating_sub(cache_bytes(&stat, version.caches)));
        out.push(GroupLimit { name, limit, used });
    }
}

/// A limit in bytes. `None` for v2's `max`, for v1's "no limit" (the greatest page-aligned `i64`, far above any machine), and for garbage.
fn parse_limit(text: &str) -> Option<u64> {
    text.trim().parse::<u64>().ok().filter(|limit| *limit < 1 << 62)
}

fn cache_bytes(stat: &str, names: &[&str]) -> u64 {
    let bytes = stat.lines().filter_map(|line| {
        let (name, value) = line.split_once(' ')?;
        names.contains(&name).then(|| value.trim().parse::<u64>().ok())?
    });
    bytes.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    const V2_MOUNT: &str =
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
    const HYBRID_MOUNTS: &str = "\
        32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
        35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
        41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

    fn check(what: &str, files: &[(&str, &str)], expected: &[(&'static str, u64, Option<u64>)]) {
        let read = |path: &Path| {
            let file = files.iter().find(|(name, _)| Path::new(name) == path);
            file.map(|(_, text)| (*text).to_string())
        };
        let got: Vec<_> =
            limits(&read).into_iter().map(|group| (group.name, group.limit, group.used)).collect();
        assert_eq!(got, expected, "{what}");
    }

    /// A limit that is overlooked here is a process that the kernel kills later.
    #[test]
    fn limits_are_found_on_every_kind_of_system() {
        const MAX: &str = "cgroup v2 memory.max";
        const HIGH: &str = "cgroup v2 memory.high";
        const V1: &str = "cgroup v1 memory.limit_in_bytes";
        check("nothing readable", &[], &[]);
        check(
            "v2, nested, the outer one limited and the inner one not",
            &[
                ("/proc/self/cgroup", "0::/user.slice/app.scope\n"),
                ("/proc/self/mountinfo", V2_MOUNT),
                ("/sys/fs/cgroup/user.slice/app.scope/memory.max", "max\n"),
                ("/sys/fs/cgroup/user.slice/app.scope/memory.current", "1000\n"),
                ("/sys/fs/cgroup/user.slice/memory.max", "5000\n"),
                ("/sys/fs/cgroup/user.slice/memory.high", "4000\n"),
                ("/sys/fs/cgroup/user.slice/memory.current", "3000\n"),
                (
                    "/sys/fs/cgroup/user.slice/memory.stat",
                    "anon 1\ninactive_file 500\nactive_file 200\nslab_reclaimable 50\n",
                ),
            ],
            &[(MAX, 5000, Some(2250)), (HIGH, 4000, Some(2250))],
        );
        check(
            "v2 in a container with a namespace of its own",
            &[
                ("/proc/self/cgroup", "0::/\n"),
                ("/proc/self/mountinfo", V2_MOUNT),
                ("/sys/fs/cgroup/memory.max", "7000\n"),
            ],
            &[(MAX, 7000, None)],
        );
        check(
            "v2 with the host's path, of which the mount shows nothing",
            &[
                ("/proc/self/cgroup", "0::/docker/abc\n"),
                (
                    "/proc/self/mountinfo",
                    "30 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup ro\n",
                ),
                ("/sys/fs/cgroup/memory.max", "7000\n"),
                ("/sys/fs/cgroup/memory.current", "garbage"),
            ],
            &[(MAX, 7000, None)],
        );
        check(
            "v2 with a group outside the namespace",
            &[
                ("/proc/self/cgroup", "0::/../other\n"),
                ("/proc/self/mountinfo", V2_MOUNT),
                ("/sys/fs/cgroup/memory.max", "7000\n"),
            ],
            &[(MAX, 7000, None)],
        );
        check(
            "hybrid: v1 has the memory controller, its root has no limit",
            &[
                ("/proc/self/cgroup", "4:memory:/box/inner\n1:cpu:/\n0::/\n"),
                ("/proc/self/mountinfo", HYBRID_MOUNTS),
                ("/sys/fs/cgroup/memory/box/inner/memory.limit_in_bytes", "6000\n"),
                ("/sys/fs/cgroup/memory/box/inner/memory.usage_in_bytes", "1000\n"),
                (
                    "/sys/fs/cgroup/memory/box/inner/memory.stat",
                    "inactive_file 9\ntotal_inactive_file 300\ntotal_active_file x\n",
                ),
                ("/sys/fs/cgroup/memory/box/memory.limit_in_bytes", "9223372036854771712\n"),
                ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ],
            &[(V1, 6000, Some(700))],
        );
        check(
            "v1 with joined controllers; more cache than usage; a limit of 0",
            &[
                ("/proc/self/cgroup", "9:cpu,memory:/a\n"),
                ("/proc/self/mountinfo", "35 31 0:32 / /cg rw - cgroup cgroup rw,cpu,memory\n"),
                ("/cg/a/memory.limit_in_bytes", "0\n"),
                ("/cg/a/memory.usage_in_bytes", "100\n"),
                ("/cg/a/memory.stat", "total_active_file 200\n"),
            ],
            &[(V1, 0, Some(0))],
        );
        check(
            "garbage everywhere",
            &[
                ("/proc/self/cgroup", "\n::\n0::\nx\n5:memory\n"),
                ("/proc/self/mountinfo", "a - b\n - cgroup2\n1 2 3 / - cgroup2\n"),
                ("/sys/fs/cgroup/memory.max", "7000\n"),
            ],
            &[],
        );
        check(
            "limits that are no numbers bind nothing",
            &[
                ("/proc/self/cgroup", "0::/\n"),
                ("/proc/self/mountinfo", V2_MOUNT),
                ("/sys/fs/cgroup/memory.max", "-1\n"),
                ("/sys/fs/cgroup/memory.high", "99999999999999999999999\n"),
            ],
            &[],
        );
    }
}
