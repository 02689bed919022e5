//! What this process's control groups leave it of memory, huge pages and threads.
//!
//! A limit may be set at any level: at a systemd unit (`MemoryMax=`), at the slice above it, or at
//! a container. The tightest level counts. Versions 2 and 1 of the interface are read, as
//! `/proc/self/cgroup` names them.
//!
//! Memory that the kernel takes back before it enforces a limit counts as left: the page cache of
//! files, and slabs that can be freed.

use std::fs;
use std::path::{Path, PathBuf};

/// A resource that control groups limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resource {
    /// Memory in bytes.
    Memory,
    /// Huge pages in bytes, of the size that the interface calls so: `2MB` or `1GB`.
    HugePages(&'static str),
    /// Threads.
    Threads,
}

/// What the tightest limit leaves.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Left {
    /// The amount.
    pub(crate) amount: u64,
    /// The file with the limit.
    pub(crate) file: PathBuf,
}

/// What is left under the tightest limit; `None` if there is no limit.
pub(crate) fn left(resource: Resource) -> Option<Left> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    left_of(resource, Path::new("/sys/fs/cgroup"), &groups)
}

/// The names of a file with a limit and of the one with what is in use.
type Files = [String; 2];

impl Resource {
    /// The controller of version 1.
    const fn controller(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::HugePages(_) => "hugetlb",
            Self::Threads => "pids",
        }
    }

    /// The files of version 2, or of version 1. Reserved huge pages have limits of their own.
    fn files(self, v2: bool) -> Vec<Files> {
        let pairs: Vec<(String, [&str; 2])> = match (self, v2) {
            (Self::Memory, true) => vec![("memory.".into(), ["max", "current"])],
            (Self::Memory, false) => {
                vec![("memory.".into(), ["limit_in_bytes", "usage_in_bytes"])]
            }
            (Self::HugePages(size), true) => {
                [format!("hugetlb.{size}."), format!("hugetlb.{size}.rsvd.")]
                    .map(|prefix| (prefix, ["max", "current"]))
                    .into()
            }
            (Self::HugePages(size), false) => {
                [format!("hugetlb.{size}."), format!("hugetlb.{size}.rsvd.")]
                    .map(|prefix| (prefix, ["limit_in_bytes", "usage_in_bytes"]))
                    .into()
            }
            (Self::Threads, _) => vec![("pids.".into(), ["max", "current"])],
        };
        pairs
            .into_iter()
            .map(|(prefix, names)| names.map(|name| format!("{prefix}{name}")))
            .collect()
    }

    /// The fields of `memory.stat` with what the kernel takes back. Those of version 1 with
    /// `total_` count the groups below, as its usage does.
    const fn reclaimable(self, v2: bool) -> &'static [&'static str] {
        match (self, v2) {
            (Self::Memory, true) => &["active_file", "inactive_file", "slab_reclaimable"],
            (Self::Memory, false) => &["total_active_file", "total_inactive_file"],
            _ => &[],
        }
    }
}

/// The same, with `groups` in the form of `/proc/self/cgroup`: a line per hierarchy,
/// `ID:CONTROLLERS:PATH`.
fn left_of(resource: Resource, mount: &Path, groups: &str) -> Option<Left> {
    let hierarchies = groups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, group) = (fields.next()?, fields.next()?);
        let controller = resource.controller();
        match controllers {
            "" => Some((mount_of_version_2(mount), true, group)),
            _ if controllers.split(',').any(|name| name == controller) => {
                Some((mount.join(controller), false, group))
            }
            _ => None,
        }
    });
    hierarchies
        .filter_map(|(mount, v2, group)| tightest(resource, &mount, v2, group))
        .min()
}

/// Beside hierarchies of version 1, systemd mounts version 2 at `unified`.
fn mount_of_version_2(mount: &Path) -> PathBuf {
    let beside = mount.join("unified");
    match beside.join("cgroup.controllers").exists() {
        true => beside,
        false => mount.to_owned(),
    }
}

/// What is left at the tightest level from `group` up to the mount point. In a container the
/// host's names of groups may lead nowhere below the mount point. Such levels have no files and are
/// skipped.
fn tightest(resource: Resource, mount: &Path, v2: bool, group: &str) -> Option<Left> {
    let group = Path::new(group.trim_start_matches('/'));
    let files = resource.files(v2);
    let at = |level: &Path, [limit, used]: &Files| {
        let number = |name: &str| -> Option<u64> {
            let text = fs::read_to_string(mount.join(level).join(name)).ok()?;
            text.trim().parse().ok()
        };
        let stat = || {
            let stat = fs::read_to_string(mount.join(level).join("memory.stat"));
            stat.unwrap_or_default()
        };
        let fields = resource.reclaimable(v2);
        let freed: u64 = match fields {
            [] => 0,
            fields => (stat().lines())
                .filter_map(|line| line.split_once(' '))
                .filter(|(name, _)| fields.contains(name))
                .filter_map(|(_, value)| value.trim().parse::<u64>().ok())
                .sum(),
        };
        Some(Left {
            amount: number(limit)?.saturating_sub(number(used)?.saturating_sub(freed)),
            file: mount.join(level).join(limit),
        })
    };
    group
        .ancestors()
        .flat_map(|level| files.iter().filter_map(move |pair| at(level, pair)))
        .min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    const V2: [&str; 2] = ["memory.max", "memory.current"];
    const V1: [&str; 2] = ["memory.limit_in_bytes", "memory.usage_in_bytes"];

    /// A tree of control groups that is removed at the end of its test.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("cgroup-{}-{name}", std::process::id()));
            fs::create_dir(&path).expect("a fresh directory");
            Self(path)
        }

        fn level(&self, group: &str, files: [&str; 2], limit: &str, used: &str) {
            for (file, text) in files.into_iter().zip([limit, used]) {
                self.file(group, file, text);
            }
        }

        fn file(&self, group: &str, file: &str, text: &str) {
            let level = self.0.join(group);
            fs::create_dir_all(&level).expect("a level");
            fs::write(level.join(file), format!("{text}\n")).expect("a file");
        }

        fn left(&self, groups: &str) -> Option<u64> {
            self.left_of(Resource::Memory, groups)
        }

        fn left_of(&self, resource: Resource, groups: &str) -> Option<u64> {
            left_of(resource, &self.0, groups).map(|left| left.amount)
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_unit_s_own_limit_counts() {
        let tree = Tree::new("unit");
        tree.level("system.slice/vm.service", V2, "1000", "300");
        tree.level("system.slice", V2, "max", "9000");
        let groups = "0::/system.slice/vm.service\n";
        assert_eq!(tree.left(groups), Some(700));
        // The slice above it may be tighter.
        tree.level("system.slice", V2, "9500", "9000");
        assert_eq!(tree.left(groups), Some(500));
        // More is used than allowed, as for a moment after the limit was lowered.
        tree.level("system.slice/vm.service", V2, "100", "300");
        assert_eq!(tree.left(groups), Some(0));
    }

    #[test]
    fn version_1_counts() {
        let tree = Tree::new("one");
        tree.level("memory/docker/abc", V1, "5000", "1000");
        tree.level("memory", V1, "9223372036854771712", "7000");
        let groups = "12:cpu,cpuacct:/docker/abc\n5:memory:/docker/abc\n0::/docker/abc\n";
        assert_eq!(tree.left(groups), Some(4000));
    }

    #[test]
    fn a_container_sees_its_limit_at_the_mount_point() {
        let tree = Tree::new("container");
        tree.level("", V2, "800", "200");
        assert_eq!(tree.left("0::/\n"), Some(600));
        // Without its own namespace, the host's name of the group leads nowhere here.
        assert_eq!(tree.left("0::/docker/abc\n"), Some(600));
    }

    #[test]
    fn without_a_limit_there_is_none() {
        let tree = Tree::new("none");
        tree.level("a", V2, "max", "200");
        assert_eq!(tree.left("0::/a\n"), None);
        assert_eq!(tree.left(""), None);
        assert_eq!(tree.left("nonsense"), None);
    }

    #[test]
    fn memory_that_the_kernel_takes_back_is_left() {
        let tree = Tree::new("cache");
        tree.level("a", V2, "1000", "900");
        let stat = "anon 50\nfile 800\ninactive_file 500\nactive_file 300\nslab_reclaimable 40";
        tree.file("a", "memory.stat", stat);
        assert_eq!(tree.left("0::/a\n"), Some(1000 - 900 + 500 + 300 + 40));
        // More may be taken back than is in use, if the counters are of different moments.
        tree.file("a", "memory.stat", "inactive_file 5000");
        assert_eq!(tree.left("0::/a\n"), Some(1000));
        tree.level("memory/b", V1, "1000", "900");
        tree.file(
            "memory/b",
            "memory.stat",
            "inactive_file 1\ntotal_inactive_file 600\ntotal_active_file 50",
        );
        assert_eq!(tree.left("4:memory:/b\n"), Some(750));
    }

    #[test]
    fn huge_pages_have_limits_of_use_and_of_promises() {
        let tree = Tree::new("huge");
        let huge = Resource::HugePages("2MB");
        tree.level("a", ["hugetlb.2MB.max", "hugetlb.2MB.current"], "900", "0");
        assert_eq!(tree.left_of(huge, "0::/a\n"), Some(900));
        let reserved = ["hugetlb.2MB.rsvd.max", "hugetlb.2MB.rsvd.current"];
        tree.level("a", reserved, "800", "100");
        assert_eq!(tree.left_of(huge, "0::/a\n"), Some(700));
        let found = left_of(huge, &tree.0, "0::/a\n").expect("a limit");
        assert!(found.file.ends_with("a/hugetlb.2MB.rsvd.max"), "{found:?}");
        assert_eq!(tree.left_of(Resource::HugePages("1GB"), "0::/a\n"), None);
        let files = ["hugetlb.1GB.limit_in_bytes", "hugetlb.1GB.usage_in_bytes"];
        tree.level("hugetlb/b", files, "70", "30");
        let left = tree.left_of(Resource::HugePages("1GB"), "7:hugetlb:/b\n");
        assert_eq!(left, Some(40));
    }

    #[test]
    fn threads_count_and_version_2_may_be_mounted_beside_version_1() {
        let tree = Tree::new("pids");
        tree.level("pids/a", ["pids.max", "pids.current"], "20", "15");
        let groups = "8:pids:/a\n0::/b\n";
        assert_eq!(tree.left_of(Resource::Threads, groups), Some(5));
        tree.file("unified", "cgroup.controllers", "hugetlb");
        let files = ["hugetlb.2MB.max", "hugetlb.2MB.current"];
        tree.level("unified/b", files, "9", "4");
        assert_eq!(tree.left_of(Resource::HugePages("2MB"), groups), Some(5));
    }
}
