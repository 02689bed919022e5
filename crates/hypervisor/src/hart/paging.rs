//! Sv39 and Sv48: the format of the guest's page tables, and the walk through them.
//!
//! Source: The RISC-V Instruction Set Manual, volume II, chapter "Supervisor-Level ISA", sections
//! "Supervisor Address Translation and Protection (satp) Register", "Virtual Address Translation
//! Process", and those of Sv39 and Sv48.
//!
//! **Guarantee.** [`walk`] reads one entry a level and writes nothing. The guest sets the A and D
//! bits itself (Svade): an access that needs a clear one is a page fault. A result does not depend
//! on the access. [`Leaf::allows`] decides that, so one walk serves every [`View`].
//!
//! **Neighbours.** The hart's CSRs make the [`View`]. The [`Bus`](super::Bus) walks on a miss of
//! its TLB, and reads entries like other guest memory.

use super::bus::Access;
use super::csr::Mode;
use pageferry_addr::{PAGE_MASK, PAGE_SHIFT};

/// The number of ASID bits (ASIDLEN).
pub const ASID_BITS: u32 = 9;

const ASID_SHIFT: u32 = 44;
const ASID_MASK: u64 = (1 << ASID_BITS) - 1;
const MODE_SHIFT: u32 = 60;
const PPN_MASK: u64 = (1 << 44) - 1;

/// The bits of a page-table entry.
const V: u64 = 1;
const R: u64 = 1 << 1;
const W: u64 = 1 << 2;
const X: u64 = 1 << 3;
const U: u64 = 1 << 4;
const G: u64 = 1 << 5;
const A: u64 = 1 << 6;
const D: u64 = 1 << 7;
const PTE_PPN_SHIFT: u32 = 10;
/// Bits 63 to 54 belong to Svnapot, Svpbmt and future extensions. All of them are reserved here.
const PTE_RESERVED: u64 = !0 << 54;

/// The number of address bits that one level translates.
const LEVEL_BITS: u32 = 9;

/// A value of the `satp` CSR that a hart can hold: Bare (0), Sv39 or Sv48.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Satp(u64);

impl Satp {
    /// No translation.
    pub const BARE: Self = Self(0);

    /// The value that `satp` holds after `bits` are written to it, if their mode is implemented.
    /// ASID bits above [`ASID_BITS`] are read-only zero. Bare has no other fields, so they read as
    /// zero too.
    #[must_use]
    pub const fn from_write(bits: u64) -> Option<Self> {
        let absent = (0xffff & !ASID_MASK) << ASID_SHIFT;
        match bits >> MODE_SHIFT {
            0 => Some(Self::BARE),
            8 | 9 => Some(Self(bits & !absent)),
            _ => None,
        }
    }

    /// The value as the guest reads it.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// The number of levels of page tables: 0 (Bare), 3 (Sv39) or 4 (Sv48).
    #[must_use]
    pub const fn levels(self) -> u32 {
        match self.0 >> MODE_SHIFT {
            0 => 0,
            8 => 3,
            _ => 4,
        }
    }

    /// Whether there is no translation.
    #[must_use]
    pub const fn is_bare(self) -> bool {
        self.0 == 0
    }

    /// The address space, below 2^[`ASID_BITS`].
    #[must_use]
    pub const fn asid(self) -> u16 {
        (self.0 >> ASID_SHIFT & ASID_MASK) as u16
    }

    /// The guest-physical address of the root table.
    const fn root(self) -> u64 {
        (self.0 & PPN_MASK) << PAGE_SHIFT
    }
}

/// Everything in a hart that decides how it translates an address, and what it may access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// The root of the tables, and the address space.
    pub satp: Satp,
    /// The privilege mode.
    pub mode: Mode,
    /// `sstatus.SUM`: S-mode may load and store in pages of U-mode.
    pub sum: bool,
    /// `sstatus.MXR`: loads may read pages that are only executable.
    pub mxr: bool,
}

/// The rights and the place that a leaf entry gives to one page of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// The guest-physical address of the page.
    pub gpa: u64,
    /// The number of levels below the leaf: 0 for 4 KiB, 1 for 2 MiB, 2 for 1 GiB, 3 for 512 GiB.
    pub level: u32,
    /// Whether every address space has this mapping.
    pub global: bool,
    rights: Rights,
}

/// The bits of a leaf entry that decide which accesses it allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights(u8);

impl Rights {
    /// All bits: the rights where nothing translates.
    pub const ALL: Self = Self((R | W | X | U | A | D) as u8);
    /// Whether an access of this kind is allowed in `view`. In Bare, modes make no difference.
    #[must_use]
    #[inline]
    pub const fn allow(self, view: View, access: Access) -> bool {
        let bits = self.0 as u64;
        let right_mode = match (view.mode, access) {
            _ if view.satp.is_bare() => true,
            (Mode::User, _) => bits & U != 0,
            (Mode::Supervisor, Access::Fetch) => bits & U == 0,
            (Mode::Supervisor, _) => bits & U == 0 || view.sum,
        };
        let right_kind = match access {
            Access::Fetch => bits & X != 0,
            Access::Load => bits & R != 0 || view.mxr && bits & X != 0,
            Access::Store => bits & (W | D) == W | D,
        };
        right_mode && right_kind && bits & A != 0
    }

    /// [`Rights::allow`] as a mask of bits and the values that they must have. `None` where that is
    /// not possible: with MXR, loads need one of two bits.
    #[must_use]
    pub const fn needed(view: View, access: Access) -> Option<(u8, u8)> {
        let kind = match access {
            Access::Fetch => X,
            Access::Load => R,
            Access::Store => W | D,
        };
        if view.satp.is_bare() {
            return Some((kind as u8, kind as u8));
        }
        if view.mxr && matches!(access, Access::Load) {
            return None;
        }
        let (checks_user, user) = match (view.mode, access) {
            (Mode::User, _) => (U, U),
            (Mode::Supervisor, Access::Load | Access::Store) if view.sum => (0, 0),
            (Mode::Supervisor, _) => (U, 0),
        };
        Some(((kind | A | checks_user) as u8, (kind | A | user) as u8))
    }

    /// The bits R, W, X, U, A and D at their places in an entry.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// The inverse of [`Rights::bits`]. Other bits are ignored.
    #[must_use]
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits & Self::ALL.0)
    }
}

impl Leaf {
    /// Whether an access of this kind is allowed in `view`. If not, it is a page fault.
    #[must_use]
    pub const fn allows(self, view: View, access: Access) -> bool {
        self.rights.allow(view, access)
    }

    /// The rights.
    #[must_use]
    pub const fn rights(self) -> Rights {
        self.rights
    }
}

/// Walks the tables of `satp` for `address`. `read` loads the entry at a guest-physical address.
/// Returns `None` if there is no valid leaf: the access is a page fault.
///
/// # Errors
/// The first error of `read`.
///
/// # Panics
/// If `satp` is Bare.
pub fn walk<E>(
    satp: Satp,
    address: u64,
    mut read: impl FnMut(u64) -> Result<u64, E>,
) -> Result<Option<Leaf>, E> {
    assert!(!satp.is_bare(), "a walk without tables");
    let levels = satp.levels();
    // The address must be the sign extension of its translated bits.
    let unused = 64 - (PAGE_SHIFT + LEVEL_BITS * levels);
    if (address << unused) as i64 >> unused != address as i64 {
        return Ok(None);
    }
    let mut table = satp.root();
    let mut global = false;
    for level in (0..levels).rev() {
        let index = address >> (PAGE_SHIFT + LEVEL_BITS * level) & ((1 << LEVEL_BITS) - 1);
        let entry = read(table + index * 8)?;
        if entry & V == 0 || entry & (R | W) == W || entry & PTE_RESERVED != 0 {
            return Ok(None);
        }
        global |= entry & G != 0;
        let gpa = (entry >> PTE_PPN_SHIFT & PPN_MASK) << PAGE_SHIFT;
        if entry & (R | X) == 0 {
            // A pointer to the next table. Its U, A and D bits are reserved.
            if entry & (U | A | D) != 0 {
                return Ok(None);
            }
            table = gpa;
            continue;
        }
        // A superpage's frame is aligned to its size.
        let below = (1 << (PAGE_SHIFT + LEVEL_BITS * level)) - 1;
        if gpa & below != 0 {
            return Ok(None);
        }
        return Ok(Some(Leaf {
            gpa: gpa | address & below & !PAGE_MASK,
            level,
            global,
            rights: Rights::from_bits(entry as u8),
        }));
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needed_bits_are_those_that_allow() {
        for satp in [0, 8 << 60, 9 << 60] {
            for view in (0..8).map(|bits| View {
                satp: Satp(satp),
                mode: if bits & 1 == 0 {
                    Mode::User
                } else {
                    Mode::Supervisor
                },
                sum: bits & 2 != 0,
                mxr: bits & 4 != 0,
            }) {
                for access in [Access::Fetch, Access::Load, Access::Store] {
                    let Some((mask, value)) = Rights::needed(view, access) else {
                        assert!(view.mxr && access == Access::Load);
                        continue;
                    };
                    for bits in 0..=u8::MAX {
                        // In Bare, the rights always have A, and MXR has no effect.
                        let bits = if satp == 0 {
                            bits | A as u8 | R as u8
                        } else {
                            bits
                        };
                        let allowed = Rights::from_bits(bits).allow(view, access);
                        assert_eq!(bits & mask == value, allowed, "{view:?} {bits:#x}");
                    }
                }
            }
        }
    }
}
