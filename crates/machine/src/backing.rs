//! The kinds of host memory behind guest RAM.
//!
//! **Guarantee.** A backing that the host lacks is refused before guest memory is made, with the
//! file to set. A pool of huge pages that is too small is found when memory is made, not when a
//! guest touches it.
//!
//! **Mechanism.** All kinds but [`Backing::Anonymous`] are memfds. [`Backing::ShmemThp`] asks for
//! huge pages by `madvise(2)`, which the host's policy for shared memory must allow. The hugetlb
//! kinds take pages of a pool. Mapping them reserves the pages.
//!
//! **Neighbours.** [`GuestRam`](crate::GuestRam) makes the memory.

use crate::{LayoutError, MachineError, RamLayout};
use pageferry_addr::PageSize;
use rustix::fs::MemfdFlags;
use std::fmt;
use std::fs;
use std::str::FromStr;

/// The host's settings of transparent huge pages.
const THP: &str = "/sys/kernel/mm/transparent_hugepage";

/// The kind of host memory behind guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Backing {
    /// Shared memory. The host's policy decides on huge pages.
    #[default]
    Shmem,
    /// Shared memory for which huge pages are requested.
    ShmemThp,
    /// Pages of 2 MiB from the host's pool.
    Hugetlb2M,
    /// Pages of 1 GiB from the host's pool.
    Hugetlb1G,
    /// Private anonymous memory, which most VMMs use. The host's policy decides on huge pages.
    Anonymous,
}

impl Backing {
    /// All kinds.
    pub const ALL: [Self; 5] = [
        Self::Shmem,
        Self::ShmemThp,
        Self::Hugetlb2M,
        Self::Hugetlb1G,
        Self::Anonymous,
    ];

    /// The name used in reports and on command lines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shmem => "shmem",
            Self::ShmemThp => "shmem-thp",
            Self::Hugetlb2M => "hugetlb-2m",
            Self::Hugetlb1G => "hugetlb-1g",
            Self::Anonymous => "anonymous",
        }
    }

    /// The size of the pages that the host allocates and maps whole. Guest memory is a multiple of
    /// it.
    ///
    /// ```
    /// use pageferry_addr::PageSize;
    /// use pageferry_machine::Backing;
    ///
    /// assert_eq!(Backing::ShmemThp.page_size(), PageSize::Size4K);
    /// assert_eq!("hugetlb-2m".parse(), Ok(Backing::Hugetlb2M));
    /// assert_eq!(Backing::Hugetlb2M.page_size(), PageSize::Size2M);
    /// ```
    #[must_use]
    pub const fn page_size(self) -> PageSize {
        match self {
            Self::Shmem | Self::ShmemThp | Self::Anonymous => PageSize::Size4K,
            Self::Hugetlb2M => PageSize::Size2M,
            Self::Hugetlb1G => PageSize::Size1G,
        }
    }

    /// Whether the pages are of a pool of the host.
    #[must_use]
    pub const fn is_hugetlb(self) -> bool {
        matches!(self, Self::Hugetlb2M | Self::Hugetlb1G)
    }

    /// The flags of the memfd, or `None` for memory without a file.
    pub(crate) fn memfd_flags(self) -> Option<MemfdFlags> {
        match self {
            Self::Shmem | Self::ShmemThp => Some(MemfdFlags::empty()),
            Self::Hugetlb2M => Some(MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB),
            Self::Hugetlb1G => Some(MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB),
            Self::Anonymous => None,
        }
    }

    /// Checks that RAM of this layout can be made of this backing's pages.
    ///
    /// # Errors
    /// [`LayoutError::Backing`] if the memory is no multiple of the page.
    pub fn check_layout(self, layout: &RamLayout) -> Result<(), LayoutError> {
        let page = self.page_size();
        let whole = layout.bytes().is_multiple_of(page.bytes())
            && (layout.regions().iter()).all(|region| {
                region.first.0.is_multiple_of(page.pages()) && page.is_aligned(region.gfn)
            });
        if whole {
            Ok(())
        } else {
            Err(LayoutError::Backing {
                backing: self,
                bytes: layout.bytes(),
            })
        }
    }

    /// Checks that the host has this backing, and `bytes` bytes of it if they are of a pool.
    ///
    /// ```
    /// use pageferry_machine::Backing;
    ///
    /// assert!(Backing::Shmem.check(1 << 30).is_ok());
    /// let why = Backing::Hugetlb1G.check(1 << 60).unwrap_err();
    /// assert!(why.to_string().contains("hugetlb-1g"));
    /// ```
    ///
    /// # Errors
    /// [`MachineError::NoBacking`] with the file to set.
    pub fn check(self, bytes: u64) -> Result<(), MachineError> {
        match self {
            Self::Shmem | Self::Anonymous => Ok(()),
            Self::ShmemThp => {
                check_policy(&|file| fs::read_to_string(format!("{THP}/{file}")).ok())
            }
            Self::Hugetlb2M | Self::Hugetlb1G => {
                let needed = bytes.div_ceil(self.page_size().bytes());
                let read = |file: &str| {
                    let path = format!("{}/{file}", self.pool());
                    fs::read_to_string(path).ok()?.trim().parse().ok()
                };
                match Pool::read(&read) {
                    None => Err(self.lacks(&format!(
                        "its kernel has no pool of such pages ({} does not exist): use shmem",
                        self.pool()
                    ))),
                    Some(pool) if pool.left() < needed => Err(self.too_few(pool, needed)),
                    Some(_) => Ok(()),
                }
            }
        }
    }

    /// The error for memory that the pool could not give, although the kernel was asked for it.
    pub(crate) fn refused(self, bytes: u64) -> MachineError {
        match self.check(bytes) {
            Err(why) => why,
            // Others took pages before, and gave them back since.
            Ok(()) => self.lacks("its pool of huge pages was too small a moment ago: try again"),
        }
    }

    fn too_few(self, pool: Pool, needed: u64) -> MachineError {
        self.lacks(&format!(
            "{needed} free huge pages are needed and its pool has {}: write {} to {}/nr_hugepages",
            pool.left(),
            pool.all.saturating_add(needed - pool.left()),
            self.pool()
        ))
    }

    fn lacks(self, why: &str) -> MachineError {
        MachineError::NoBacking(format!("this host cannot back memory by {self}: {why}"))
    }

    fn pool(self) -> String {
        let kib = self.page_size().bytes() >> 10;
        format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB")
    }
}

/// A pool of huge pages, in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pool {
    all: u64,
    /// Pages that nobody has.
    free: u64,
    /// Free pages that were promised.
    reserved: u64,
    /// Pages by which the pool may still grow by itself.
    overcommit: u64,
}

impl Pool {
    fn read(number: &dyn Fn(&str) -> Option<u64>) -> Option<Self> {
        let surplus = number("surplus_hugepages").unwrap_or(0);
        Some(Self {
            all: number("nr_hugepages")?,
            free: number("free_hugepages")?,
            reserved: number("resv_hugepages").unwrap_or(0),
            overcommit: number("nr_overcommit_hugepages")
                .unwrap_or(0)
                .saturating_sub(surplus),
        })
    }

    fn left(self) -> u64 {
        self.free.saturating_sub(self.reserved) + self.overcommit
    }
}

/// Whether shared memory may get huge pages on request. `read` gives the text of a file of the
/// host's settings.
fn check_policy(read: &dyn Fn(&str) -> Option<String>) -> Result<(), MachineError> {
    let chosen = |file: &str| {
        let text = read(file)?;
        let start = text.find('[')? + 1;
        Some(text[start..start + text[start..].find(']')?].to_owned())
    };
    // A size of its own decides first (Linux 6.11 and later).
    const SIZE: &str = "hugepages-2048kB/shmem_enabled";
    const ALL: &str = "shmem_enabled";
    let (file, policy) = match chosen(SIZE) {
        Some(policy) if policy != "inherit" => (SIZE, Some(policy)),
        _ => (ALL, chosen(ALL)),
    };
    let why = match policy.as_deref() {
        Some("always" | "within_size" | "advise" | "force") => return Ok(()),
        Some(policy) => {
            format!(
                "its policy for huge pages of shared memory is '{policy}': write advise to {THP}/{file}"
            )
        }
        None => "its kernel has no transparent huge pages (CONFIG_TRANSPARENT_HUGEPAGE): use shmem"
            .into(),
    };
    Err(Backing::ShmemThp.lacks(&why))
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Backing {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|b| b.name() == text)
            .ok_or_else(|| {
                format!(
                    "unknown backing '{text}': expected shmem, shmem-thp, hugetlb-2m, hugetlb-1g or anonymous"
                )
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_others_are_refused() {
        for backing in Backing::ALL {
            assert_eq!(backing.name().parse(), Ok(backing));
        }
        let why = "hugetlb".parse::<Backing>().unwrap_err();
        assert!(Backing::ALL.iter().all(|b| why.contains(b.name())), "{why}");
    }

    #[test]
    fn memory_is_a_multiple_of_the_backings_page() {
        for (backing, bytes, fits) in [
            (Backing::ShmemThp, 4096 * 7, true),
            (Backing::Hugetlb2M, 6 << 20, true),
            (Backing::Hugetlb2M, 5 << 20, false),
            (Backing::Hugetlb1G, 5 << 30, true),
            (Backing::Hugetlb1G, (5 << 30) + (2 << 20), false),
        ] {
            let layout = RamLayout::for_memory(bytes).unwrap();
            let checked = backing.check_layout(&layout);
            assert_eq!(checked.is_ok(), fits, "{backing} {bytes}");
            let Err(why) = checked else { continue };
            let why = why.to_string();
            assert!(
                why.contains(backing.name()) && why.contains("multiple"),
                "{why}"
            );
        }
    }

    #[test]
    fn a_pool_counts_promised_pages_as_taken() {
        let number = |file: &str| match file {
            "nr_hugepages" => Some(10),
            "free_hugepages" => Some(7),
            "resv_hugepages" => Some(3),
            "nr_overcommit_hugepages" => Some(2),
            "surplus_hugepages" => Some(1),
            _ => None,
        };
        let pool = Pool::read(&number).unwrap();
        assert_eq!(pool.left(), 7 - 3 + 1);
        let why = Backing::Hugetlb2M.too_few(pool, 9).to_string();
        assert!(
            why.contains("9 free huge pages are needed and its pool has 5"),
            "{why}"
        );
        assert!(
            why.contains("write 14 to /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"),
            "{why}"
        );
        assert_eq!(Pool::read(&|_| None), None);
    }

    #[test]
    fn the_policy_for_shared_memory_decides() {
        let host = |size: Option<&'static str>, all: Option<&'static str>| {
            check_policy(&|file| {
                let text = if file.starts_with("hugepages") {
                    size
                } else {
                    all
                };
                text.map(str::to_owned)
            })
        };
        let (never, advise) = (Some("always [never] deny"), Some("[advise] never"));
        assert!(host(None, advise).is_ok());
        assert!(host(Some("always [inherit] never"), advise).is_ok());
        assert!(host(Some("[always] inherit"), never).is_ok());
        for (size, all, part) in [
            (
                None,
                never,
                "write advise to /sys/kernel/mm/transparent_hugepage/shmem_enabled",
            ),
            (Some("[inherit]"), Some("[deny]"), "is 'deny'"),
            (
                Some("inherit [never]"),
                advise,
                "hugepages-2048kB/shmem_enabled",
            ),
            (None, None, "use shmem"),
        ] {
            let why = host(size, all).unwrap_err().to_string();
            assert!(why.contains(part) && why.contains("shmem-thp"), "{why}");
        }
    }
}
