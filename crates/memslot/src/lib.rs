//! Memory slots: which host range backs a guest range?
//!
//! **Guarantee.** Slots obey the rules of Linux's `KVM_SET_USER_MEMORY_REGION2`: they never overlap by
//! guest frame inside an address space, may overlap by host address, and keep size and host address for
//! life. Every look-up (by guest frame, exact or nearest below; by id; over a frame range; over a host range)
//! and every change takes O(log n). Readers are wait-free and see an operation wholly or not at all; while a slot is
//! being deleted or moved they find it invalid and know to retry. A refused request changes nothing and says which
//! value was wrong and what would be right.
//!
//! **Mechanism.** Each address space has three B+ trees over one set of slot records: by frame, by id, and by host
//! address with the largest end below each child (an interval tree). A change makes a new record of the slot
//! it changes, no other, copies a leaf of each tree in which the slot's place changes (seldom more of it), and publishes
//! each tree by one store; a slot that comes behind all others of its leaf goes into an unused place of it, so that
//! slots in ascending order copy next to nothing; and one that goes leaves a tombstone in its place, over which it may come again. Versions
//! in the nodes, records and tombstones let a reader's view see all trees at one
//! version. What was replaced is freed after a grace period. `table.rs` says in which
//! order things become visible and why that suffices; `tree/` has the trees. The kernel keeps two sets of trees and
//! waits for its readers at every change instead (Szmigiero, *Scalable memslots implementation*, v5, 2021).
//!
//! **Cost.** Pay as you go: a table without slots takes less than 1 KiB, a slot about 150 to 200 bytes with its index entries. Where many
//! of a full table's slots have gone again, more a slot: measured, 215 bytes with a quarter gone, 340 with half.
//! Figures are in `docs/performance.md`.
//!
//! **Neighbours.** Below: `pageferry-addr`, and `pageferry-epoch`, which knows when memory may be freed. The hypervisor
//! above keeps its own data in every slot (the `D` of [`Slot`]: dirty log, userfault bitmap) and zaps second-stage
//! mappings as [`Change`] tells it. This crate must not know page tables, vCPUs, bitmaps or system calls; it never
//! touches the memory that slots describe.
//!
//! ```
//! use pageferry_addr::{Gfn, Gpa, Hva};
//! use pageferry_memslot::{Limits, Request, SlotFlags, SlotWriter};
//!
//! let mut writer = SlotWriter::new(Limits::default());
//! let mut reader = writer.table().reader();
//! writer.set(Request {
//!     address_space: 0,
//!     id: 0,
//!     gpa: Gpa(0x8000_0000),
//!     size: 0x20_0000,
//!     hva: Hva(0x7f00_0000_0000),
//!     flags: SlotFlags::LOG_DIRTY_PAGES,
//!     userfault_bitmap: None,
//!     data: "RAM",
//! })?;
//!
//! // On the thread of a vCPU:
//! let guard = reader.pin();
//! let slot = guard.lookup(Gfn(0x80001)).expect("inside the slot");
//! assert_eq!(slot.hva_of(Gfn(0x80001)), Some(Hva(0x7f00_0000_1000)));
//!
//! // For an MMU notifier:
//! let hva = Hva(0x7f00_0000_3000)..Hva(0x7f00_0000_4000);
//! let slots: Vec<_> = guard.view().iter_hva(hva).map(|slot| slot.data).collect();
//! assert_eq!(slots, ["RAM"]);
//! # Ok::<(), pageferry_memslot::SlotError>(())
//! ```
#![no_std]

extern crate alloc;

mod error;
mod flags;
mod reader;
mod reclaim;
mod request;
pub mod rules;
mod slab;
mod slot;
mod sync;
mod table;
mod tree;
mod trees;
mod update;
mod view;
mod writer;

pub use error::SlotError;
pub use flags::SlotFlags;
pub use reader::{SlotGuard, SlotReader};
pub use request::{Change, Limits, Request};
pub use slot::Slot;
pub use table::{Generation, SlotTable};
pub use update::Update;
pub use view::SlotView;
pub use writer::SlotWriter;

pub use pageferry_epoch::Barrier;
