//! The page-table formats: how an address picks entries, and what the bits of an entry mean.
//!
//! **Guarantee.** Every entry made here has one meaning, which [`Format::decode`] returns. It is
//! legal for the hardware at its level. Its permissions are ordered: it allows stores only where
//! [`Writes`] does, and it is dirty only if it allows stores. Every other value stops each access
//! of the hardware: [`EntryLayout::NON_PRESENT`], [`EntryLayout::FROZEN`], MMIO markers, and leaves
//! with saved permissions.
//!
//! **Mechanism.** A format is a type without data. [`EntryLayout`] gives it the positions of the
//! fields as associated constants. [`Format`] is implemented for all layouts and moves the bits.
//! Its functions fold into a few masks once the format is known. Generic code needs that bound
//! only. Entries are plain `u64`.
//!
//! Associated constants also describe the hardware for a concurrent MMU: the sources of the
//! accessed and dirty state, the bits that the hardware may change at any time, whether a change
//! needs break-before-make, and whether TLBs may cache entries that fault.
//!
//! | format | levels | accessed | dirty | root | guest-physical bits |
//! |---|---|---|---|---|---|
//! | [`Ept`] | 4, 5 | bit, or saved permissions | bit, or write protection | 4 KiB | 48, 52 |
//! | [`Npt`] | 4, 5 | bit | bit | 4 KiB | 48, 52 |
//! | [`RiscvX4`] | 4, 5 | bit; without Svadu a clear one faults | bit, or write protection | 16 KiB | 50, 59 |
//! | [`Arm64Stage2`] | 3, 4 | bit; without HA a clear one faults | bit, or write protection | 64 B..64 KiB | 33..48 |
//!
//! **Neighbours.** The walker, the function that changes entries and the fault handler use this
//! module, and must not know a bit's position. This module must not know atomics, locks, slots or
//! table memory.
//!
//! Each format also has the value of the hardware's root register, and its documentation writes out
//! the [flush](crate::Platform::flush) of that hardware: [`Ept::eptp`], [`Npt::n_cr3`],
//! [`RiscvX4::hgatp`], [`Arm64Stage2::vttbr_el2`].
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
pub use ept::{Ept, Ept4, Ept4NoAd, Ept5, Ept5NoAd, EptWalks};
pub use layout::EntryLayout;
pub use npt::{Npt, Npt4, Npt5};
pub use ops::Format;
pub use riscv::{RiscvX4, Sv48x4Svade, Sv48x4Svadu, Sv57x4Svade, Sv57x4Svadu};
