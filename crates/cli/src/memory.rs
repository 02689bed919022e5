//! Memory of this process and of the host, from the kernel's counters.

use crate::cgroup::{self, Resource};
use crate::procfs;
use pageferry_machine::Backing;
use std::fs;

/// This process's memory beyond guest memory, in bytes. Guest memory on a memfd counts as
/// `RssShmem` and is in none of these.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Overhead {
    /// Anonymous pages (`RssAnon`).
    pub(crate) anon: u64,
    /// Pages of files, mainly code (`RssFile`).
    pub(crate) file: u64,
    /// Page tables (`VmPTE`), including those of the mappings of guest memory.
    pub(crate) tables: u64,
}

impl Overhead {
    /// The memory of this process at this moment. `None` if its guest has private memory, which the
    /// kernel counts with the rest.
    pub(crate) fn beside(backing: Option<Backing>) -> Option<Self> {
        if backing == Some(Backing::Anonymous) {
            return None;
        }
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        Some(Self::of(&status))
    }

    fn of(status: &str) -> Self {
        Self {
            anon: procfs::kib(status, "RssAnon:").unwrap_or(0),
            file: procfs::kib(status, "RssFile:").unwrap_or(0),
            tables: procfs::kib(status, "VmPTE:").unwrap_or(0),
        }
    }

    /// The sum in bytes.
    pub(crate) fn total(&self) -> u64 {
        self.anon + self.file + self.tables
    }
}

/// The bytes that the host can give without swapping, if it reports them. If a control group has a
/// memory limit, at most the bytes left under that.
pub(crate) fn available_bytes() -> Option<u64> {
    let host = procfs::kib(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?;
    let group = cgroup::left(Resource::Memory);
    Some(group.map_or(host, |left| left.amount.min(host)))
}

/// The host's memory in bytes.
pub(crate) fn host_bytes() -> Option<u64> {
    procfs::kib(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_lines_are_read() {
        let status = "Name:\tx\nRssAnon:\t     120 kB\nRssFile:\t    3000 kB\nRssShmem:\t 9 kB\nVmPTE:\t  40 kB\n";
        let overhead = Overhead::of(status);
        assert_eq!(
            (overhead.anon, overhead.file, overhead.tables),
            (120 << 10, 3000 << 10, 40 << 10)
        );
        assert_eq!(overhead.total(), 3160 << 10);
        assert_eq!(Overhead::of("nonsense"), Overhead::default());
    }

    #[test]
    fn this_host_says_what_it_has() {
        assert!(Overhead::beside(None).unwrap().total() > 100 << 10);
        assert_eq!(Overhead::beside(Some(Backing::Anonymous)), None);
        let (available, all) = (available_bytes().unwrap(), host_bytes().unwrap());
        assert!(available <= all, "{available} of {all}");
    }
}
