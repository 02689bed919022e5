//! The flags of a slot, with the bit positions of Linux's `KVM_MEM_*`.

use core::fmt;
use core::ops::BitOr;

/// The flags of a request or a slot. A request may have unknown ones, which
/// [`SlotWriter::begin`](crate::SlotWriter::begin) refuses.
///
/// Values: `include/uapi/linux/kvm.h`; `USERFAULT` as the KVM Userfault series (2024) numbers it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct SlotFlags(pub u32);

impl SlotFlags {
    /// No flag.
    pub const EMPTY: Self = Self(0);
    /// Writes are logged (`KVM_MEM_LOG_DIRTY_PAGES`).
    pub const LOG_DIRTY_PAGES: Self = Self(1 << 0);
    /// Guest writes leave the guest (`KVM_MEM_READONLY`); fixed when the slot is created.
    pub const READONLY: Self = Self(1 << 1);
    /// A guest_memfd backs the slot's private memory (`KVM_MEM_GUEST_MEMFD`); fixed when the slot
    /// is created.
    pub const GUEST_MEMFD: Self = Self(1 << 2);
    /// An access to a page whose userfault bit is set leaves the guest (`KVM_MEM_USERFAULT`).
    pub const USERFAULT: Self = Self(1 << 3);
    /// All flags this crate knows.
    pub const KNOWN: Self = Self(0b1111);

    /// Whether all flags of `other` are set.
    #[inline]
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether any flag of `other` is set.
    #[inline]
    #[must_use]
    pub const fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// The flags without those of `other`.
    #[inline]
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The flags in which the two differ.
    #[inline]
    #[must_use]
    pub const fn difference(self, other: Self) -> Self {
        Self(self.0 ^ other.0)
    }
}

impl BitOr for SlotFlags {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Debug for SlotFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for SlotFlags {
    /// The names of the flags joined by `|`, unknown bits in hexadecimal, `none` for none.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [(SlotFlags, &str); 4] = [
            (SlotFlags::LOG_DIRTY_PAGES, "LOG_DIRTY_PAGES"),
            (SlotFlags::READONLY, "READONLY"),
            (SlotFlags::GUEST_MEMFD, "GUEST_MEMFD"),
            (SlotFlags::USERFAULT, "USERFAULT"),
        ];
        let mut separator = "";
        for (flag, name) in NAMES {
            if self.contains(flag) {
                write!(f, "{separator}{name}")?;
                separator = "|";
            }
        }
        let unknown = self.without(Self::KNOWN);
        if unknown != Self::EMPTY {
            write!(f, "{separator}{:#x}", unknown.0)?;
        } else if separator.is_empty() {
            f.write_str("none")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::format;

    #[test]
    fn bits_are_those_of_the_kernel() {
        // include/uapi/linux/kvm.h: (1UL << 0), (1UL << 1), (1UL << 2); the series adds (1UL << 3).
        assert_eq!(SlotFlags::LOG_DIRTY_PAGES.0, 1);
        assert_eq!(SlotFlags::READONLY.0, 2);
        assert_eq!(SlotFlags::GUEST_MEMFD.0, 4);
        assert_eq!(SlotFlags::USERFAULT.0, 8);
    }

    #[test]
    fn shown_by_name() {
        assert_eq!(format!("{}", SlotFlags::EMPTY), "none");
        assert_eq!(
            format!("{}", SlotFlags::READONLY | SlotFlags(0x100)),
            "READONLY|0x100"
        );
    }
}
