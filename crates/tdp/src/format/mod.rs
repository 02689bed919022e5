//! The page-table formats: how an address picks entries, and what the bits of an entry mean.
//!
//! **Guarantee.** Every entry made here has one meaning ([`Format::decode`] gives it back), is
//! legal for the hardware at the level it was made for, and keeps the order of permissions: stores
//! are let through only where [`Writes`] allows them, and only what lets stores through is dirty.
//! Values that are not translations ([`EntryLayout::NON_PRESENT`], [`EntryLayout::FROZEN`], MMIO
//! markers, entries whose permissions are put aside) stop every access of the hardware.
//!
//! **Mechanism.** A format is a type that holds nothing; [`EntryLayout`] gives it the places of the
//! fields as associated constants, and [`Format`], implemented for all layouts, moves the bits: its
//! functions fold into a few masks where the format is known, and code that is generic over formats
//! needs that bound only. Entries are plain `u64`: they are read and exchanged as such. What a
//! concurrent MMU must know beyond the bits is an associated constant too: who sets the accessed
//! and dirty state, which bits the hardware may change under the reader, whether size changes need
//! break-before-make, whether faulting entries may be cached.
//!
//! | format | levels | accessed | dirty | root | guest-physical bits |
//! |---|---|---|---|---|---|
//! | [`Ept`] | 4, 5 | bit, or saved permissions | bit, or write protection | 4 KiB | 48, 52 |
//! | [`Npt`] | 4, 5 | bit | bit | 4 KiB | 48, 52 |
//! | [`RiscvX4`] | 4, 5 | bit; without Svadu a clear one faults | bit, or write protection | 16 KiB | 50, 59 |
//! | [`Arm64Stage2`] | 3, 4 | bit; without HA a clear one faults | bit, or write protection | 64 B..64 KiB | 33..48 |
//!
//! **Neighbours.** The walker, the function that changes entries and the fault handler are above;
//! they must not know a bit's position. This module must not know atomics, locks, slots or table
//! memory.
//!
//! ```
//! use pageferry_addr::Pfn;
//! use pageferry_tdp::format::{Access, Ept4, Format, Leaf, MemoryType, Writes};
//!
//! let leaf = Ept4::leaf(
//!     Leaf {
//!         pfn: Pfn(0x200),
//!         access: Access::ALL,
//!         memory: MemoryType::WriteBack,
//!         accessed: true,
//!         dirty: false,
//!         writes: Writes::Allowed,
//!     },
//!     2,
//! );
//! assert!(Ept4::is_leaf(leaf, 2) && !Ept4::is_dirty(leaf));
//! let third = Ept4::split(leaf, 2, 3);
//! assert_eq!(Ept4::pfn(third, 1), Pfn(0x203));
//! assert!(!Ept4::allows(Ept4::write_protect(third), Access::READ_WRITE));
//! ```

mod arm64;
mod entry;
mod ept;
mod layout;
mod npt;
mod ops;
mod riscv;

pub use arm64::{Arm64Ipa40, Arm64Ipa44, Arm64Ipa48, Arm64Stage2};
pub use entry::{Access, AccessedBy, DirtyBy, Leaf, Meaning, MemoryType, TlbAfterFault, Writes};
pub use ept::{Ept, Ept4, Ept4NoAd, Ept5, Ept5NoAd};
pub use layout::EntryLayout;
pub use npt::{Npt, Npt4, Npt5};
pub use ops::Format;
pub use riscv::{RiscvX4, Sv48x4Svade, Sv48x4Svadu, Sv57x4Svade, Sv57x4Svadu};
