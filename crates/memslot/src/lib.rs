//! Memory slots: which host range backs a guest range?
//!
//! **Guarantee.** Slots obey the rules of Linux's `KVM_SET_USER_MEMORY_REGION2`: they never overlap by
//! guest frame inside an address space, may overlap by host address, and keep size and host address for
//! life. A reader sees either the state before a request or the state after it, never a mixture, because a
//! [`SlotTable`] never changes: [`SlotTable::apply`] answers with the next version. A refused request
//! changes nothing and says which value was wrong and what would be right.
//!
//! **Mechanism.** A version is an array of slots sorted by guest frame and an index by id, one pair an
//! address space; versions share the slots themselves. Looking up a frame is a binary search, O(log n). A
//! request copies the arrays of one address space and a host-address look-up scans them: both O(n) today.
//! How versions are published to readers (a lock, an atomic pointer, a grace period) is the caller's choice.
//!
//! **Neighbours.** `pageferry-addr` below. The hypervisor above keeps its own data in every slot (the `D` of
//! [`Slot`]: dirty log, userfault bitmap) and zaps second-stage mappings as [`Change`] tells it. This crate
//! must not know page tables, vCPUs, bitmaps or system calls; it never touches the memory that slots describe.
//!
//! ```
//! use pageferry_addr::{Gfn, Gpa, Hva};
//! use pageferry_memslot::{Change, Request, SlotFlags, SlotTable};
//!
//! let empty = SlotTable::default();
//! let request = Request {
//!     address_space: 0,
//!     id: 0,
//!     gpa: Gpa(0x8000_0000),
//!     size: 0x20_0000,
//!     hva: Hva(0x7f00_0000_0000),
//!     flags: SlotFlags::LOG_DIRTY_PAGES,
//!     data: (),
//! };
//! let (table, change) = empty.apply(request)?;
//! assert!(matches!(change, Change::Created { .. }));
//! let slot = table.lookup(Gfn(0x80001)).expect("inside the slot");
//! assert_eq!(slot.hva_of(Gfn(0x80001)), Some(Hva(0x7f00_0000_1000)));
//! # Ok::<(), pageferry_memslot::SlotError>(())
//! ```
#![no_std]

extern crate alloc;

mod error;
mod flags;
mod last_used;
mod request;
mod set;
mod slot;
mod table;

pub use error::SlotError;
pub use flags::SlotFlags;
pub use last_used::LastUsed;
pub use request::{Change, Limits, Request};
pub use set::SlotSet;
pub use slot::Slot;
pub use table::SlotTable;
