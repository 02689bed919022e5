//! The memory that this process's control groups leave it.
//!
//! A limit may be set at any level: at a systemd unit (`MemoryMax=`), at the slice above it, or at
//! a container. The tightest level counts. Versions 2 and 1 of the interface are read, as
//! `/proc/self/cgroup` names them.

use std::fs;
use std::path::Path;

/// The bytes left under the tightest limit; `None` if there is no limit.
pub(crate) fn left() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    left_of(Path::new("/sys/fs/cgroup"), &groups)
}

/// The names of the files with the limit and with the memory in use.
type Files = [&'static str; 2];
const V2: Files = ["memory.max", "memory.current"];
const V1: Files = ["memory.limit_in_bytes", "memory.usage_in_bytes"];

/// The same, with `groups` in the form of `/proc/self/cgroup`: a line per hierarchy,
/// `ID:CONTROLLERS:PATH`.
fn left_of(mount: &Path, groups: &str) -> Option<u64> {
    let hierarchies = groups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, group) = (fields.next()?, fields.next()?);
        match controllers {
            "" => Some((mount.to_owned(), V2, group)),
            _ if controllers.split(',').any(|name| name == "memory") => {
                Some((mount.join("memory"), V1, group))
            }
            _ => None,
        }
    });
    hierarchies
        .filter_map(|(mount, files, group)| tightest(&mount, files, group))
        .min()
}

/// The bytes left at the tightest level from `group` up to the mount point. In a container the
/// host's names of groups may lead nowhere below the mount point. Such levels have no files and are
/// skipped.
fn tightest(mount: &Path, [limit, used]: Files, group: &str) -> Option<u64> {
    let group = Path::new(group.trim_start_matches('/'));
    let number = |level: &Path, name: &str| -> Option<u64> {
        let text = fs::read_to_string(mount.join(level).join(name)).ok()?;
        text.trim().parse().ok()
    };
    group
        .ancestors()
        .filter_map(|level| Some(number(level, limit)?.saturating_sub(number(level, used)?)))
        .min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// A tree of control groups that is removed at the end of its test.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("cgroup-{}-{name}", std::process::id()));
            fs::create_dir(&path).expect("a fresh directory");
            Self(path)
        }

        fn level(&self, group: &str, files: Files, limit: &str, used: &str) {
            let level = self.0.join(group);
            fs::create_dir_all(&level).expect("a level");
            for (file, text) in files.into_iter().zip([limit, used]) {
                fs::write(level.join(file), format!("{text}\n")).expect("a file");
            }
        }

        fn left(&self, groups: &str) -> Option<u64> {
            left_of(&self.0, groups)
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
}
