//! The bit sets of userfaultfd: features, registration modes, and the ioctls of a range.

use core::fmt;
use core::ops::BitOr;

macro_rules! bit_set {
    ($(#[$doc:meta])* $name:ident { $($(#[$bit_doc:meta])* $bit:ident = $shift:literal, $since:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(u64);

        impl $name {
            $($(#[$bit_doc])* pub const $bit: Self = Self(1 << $shift);)*

            /// The name and the bit, and the Linux version that added it.
            const TABLE: &[(&'static str, u64, &'static str)] =
                &[$((stringify!($bit), 1 << $shift, $since),)*];

            /// The empty set.
            #[must_use]
            pub const fn empty() -> Self {
                Self(0)
            }

            /// The set with exactly the kernel's `bits`, including bits without a name here.
            #[must_use]
            pub const fn from_bits(bits: u64) -> Self {
                Self(bits)
            }

            /// The bits of the kernel's ABI.
            #[must_use]
            pub const fn bits(self) -> u64 {
                self.0
            }

            /// Whether no bit is set.
            #[must_use]
            pub const fn is_empty(self) -> bool {
                self.0 == 0
            }

            /// Whether the set has every bit of `other`.
            #[must_use]
            pub const fn contains(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }

            /// The bits of `self` and of `other`.
            #[must_use]
            pub const fn union(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }

            /// The bits of `self` that are not in `other`.
            #[must_use]
            pub const fn difference(self, other: Self) -> Self {
                Self(self.0 & !other.0)
            }

            /// The kernel header's names of the bits, in order of their value, without nameless
            /// bits.
            pub fn names(self) -> impl Iterator<Item = &'static str> {
                Self::TABLE.iter().filter(move |row| self.0 & row.1 != 0).map(|row| row.0)
            }

            /// The bits that have no name here.
            fn nameless(self) -> u64 {
                Self::TABLE.iter().fold(self.0, |bits, row| bits & !row.1)
            }
        }

        impl BitOr for $name {
            type Output = Self;

            fn bitor(self, other: Self) -> Self {
                self.union(other)
            }
        }

        /// Writes the names joined by commas, nameless bits as one hexadecimal number, and "none"
        /// for the empty set.
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let mut comma = "";
                for name in self.names() {
                    write!(f, "{comma}{name}")?;
                    comma = ", ";
                }
                match self.nameless() {
                    0 if self.is_empty() => f.write_str("none"),
                    0 => Ok(()),
                    rest => write!(f, "{comma}{rest:#x}"),
                }
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }
    };
}

bit_set! {
    /// The available or the requested features of a userfaultfd (`UFFD_FEATURE_*`).
    ///
    /// ```
    /// use pageferry_userfault::uffd::Features;
    /// let wanted = Features::MINOR_SHMEM | Features::POISON;
    /// assert!(wanted.contains(Features::POISON));
    /// assert_eq!(wanted.to_string(), "MINOR_SHMEM, POISON");
    /// ```
    Features {
        /// Write-protect faults on anonymous memory.
        PAGEFAULT_FLAG_WP = 0, "5.7";
        /// An event when the process forks. It carries a new userfaultfd for the child's ranges.
        /// Needs `CAP_SYS_PTRACE`.
        EVENT_FORK = 1, "4.11";
        /// An event when a range moves (`mremap`).
        EVENT_REMAP = 2, "4.11";
        /// An event when pages are dropped (`MADV_DONTNEED`, `MADV_REMOVE`).
        EVENT_REMOVE = 3, "4.11";
        /// Missing faults on hugetlbfs.
        MISSING_HUGETLBFS = 4, "4.11";
        /// Missing faults on shared memory (memfd, tmpfs).
        MISSING_SHMEM = 5, "4.11";
        /// An event when a range is unmapped.
        EVENT_UNMAP = 6, "4.11";
        /// SIGBUS in the faulting thread instead of an event.
        SIGBUS = 7, "4.14";
        /// Fault events carry the thread's id.
        THREAD_ID = 8, "4.14";
        /// Minor faults on hugetlbfs.
        MINOR_HUGETLBFS = 9, "5.13";
        /// Minor faults on shared memory (memfd, tmpfs).
        MINOR_SHMEM = 10, "5.14";
        /// Fault events carry the exact address rather than its page's.
        EXACT_ADDRESS = 11, "5.18";
        /// Write-protect faults on shared memory and hugetlbfs.
        WP_HUGETLBFS_SHMEM = 12, "5.19";
        /// Write protection covers anonymous pages that are not present yet.
        WP_UNPOPULATED = 13, "6.4";
        /// `UFFDIO_POISON`.
        POISON = 14, "6.6";
        /// Write-protect faults that the kernel resolves itself: a write lifts the protection,
        /// without an event. Implies [`Self::WP_UNPOPULATED`].
        WP_ASYNC = 15, "6.7";
        /// [`move_pages`](super::Userfaultfd::move_pages).
        MOVE = 16, "6.8";
    }
}

impl Features {
    /// The names of the bits, each with the Linux version that added it, for messages.
    pub(super) fn with_versions(self) -> String {
        let mut parts: Vec<String> = Self::TABLE
            .iter()
            .filter(|row| self.0 & row.1 != 0)
            .map(|(name, _, since)| format!("{name} (Linux {since})"))
            .collect();
        if self.nameless() != 0 {
            parts.push(format!("{:#x} (unknown)", self.nameless()));
        }
        parts.join(", ")
    }
}

bit_set! {
    /// The faults on a range that are reported (`UFFDIO_REGISTER_MODE_*`).
    RegisterMode {
        /// The page has no contents yet: resolved by [`copy`](super::Userfaultfd::copy) or
        /// [`zeropage`](super::Userfaultfd::zeropage).
        MISSING = 0, "4.3";
        /// A write to a page that is write-protected.
        WP = 1, "5.7";
        /// The page is in the page cache but not mapped here: resolved by
        /// [`continue_range`](super::Userfaultfd::continue_range).
        MINOR = 2, "5.13";
    }
}

bit_set! {
    /// The ioctls that a registered range allows. The kernel returns them on registration.
    RangeIoctls {
        /// [`wake`](super::Userfaultfd::wake)
        WAKE = 2, "4.3";
        /// [`copy`](super::Userfaultfd::copy)
        COPY = 3, "4.3";
        /// [`zeropage`](super::Userfaultfd::zeropage)
        ZEROPAGE = 4, "4.3";
        /// [`move_pages`](super::Userfaultfd::move_pages)
        MOVE = 5, "6.8";
        /// [`write_protect`](super::Userfaultfd::write_protect)
        WRITEPROTECT = 6, "5.7";
        /// [`continue_range`](super::Userfaultfd::continue_range)
        CONTINUE = 7, "5.13";
        /// [`poison`](super::Userfaultfd::poison)
        POISON = 8, "6.6";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn feature_bits_are_the_kernels() {
        assert_eq!(Features::PAGEFAULT_FLAG_WP.bits(), 1);
        assert_eq!(Features::EVENT_UNMAP.bits(), 1 << 6);
        assert_eq!(Features::MINOR_SHMEM.bits(), 1 << 10);
        assert_eq!(Features::MOVE.bits(), 1 << 16);
        let all = Features::TABLE.iter().fold(0, |bits, row| bits | row.1);
        assert_eq!(all, (1 << 17) - 1);
    }

    #[test]
    fn a_set_shows_its_names_and_what_has_none() {
        assert_eq!(Features::empty().to_string(), "none");
        assert_eq!(Features::from_bits(1 << 40).to_string(), "0x10000000000");
        assert_eq!(
            Features::from_bits(1 << 40 | 2).to_string(),
            "EVENT_FORK, 0x10000000000"
        );
        assert_eq!(
            format!("{:?}", RegisterMode::MISSING | RegisterMode::MINOR),
            "RegisterMode(MISSING, MINOR)"
        );
        assert_eq!(
            (Features::POISON | Features::from_bits(1 << 40)).with_versions(),
            "POISON (Linux 6.6), 0x10000000000 (unknown)"
        );
    }

    #[test]
    fn set_algebra() {
        let both = Features::POISON | Features::MOVE;
        assert!(both.contains(Features::MOVE) && !Features::MOVE.contains(both));
        assert_eq!(both.difference(Features::MOVE), Features::POISON);
        assert!(both.difference(both).is_empty());
        assert!(both.contains(Features::empty()));
    }
}
