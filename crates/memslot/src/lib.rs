//! Memory slots: which host range backs a guest range?
//!
//! **Guarantee.** Slots obey the rules of Linux's `KVM_SET_USER_MEMORY_REGION2`. Inside an address
//! space they never overlap by guest frame. They may overlap by host address. They keep size and
//! host address for life. Every change takes O(log n). So does every look-up: by guest frame (exact
//! or nearest below), by id, over a frame range, and over a host range. Readers are wait-free and
//! see an operation wholly or not at all. While a writer deletes or moves a slot, readers find it
//! invalid and must retry. A refused request changes nothing. Its error names the wrong value and
//! what would be right. A lack of memory is such an error.
//!
//! **Mechanism.** Each address space has three B+ trees over one set of slot records: by frame, by
//! id, and by host address. The last is an interval tree: it keeps the largest end below each
//! child. A change makes a new record of its slot, and copies a leaf of each tree in which the
//! slot's place changes. One store publishes each tree. Slots that come in ascending order fill
//! unused places, so they copy almost nothing. Nodes and records carry versions, so that a reader's
//! view sees all trees at one version. Replaced nodes and records are freed after a grace period.
//! The module `table` describes the order in which things become visible, and proves that it
//! suffices. The kernel keeps two sets of trees instead and waits for its readers at every change
//! (Szmigiero, *Scalable memslots implementation*, v5, 2021).
//!
//! **Cost.** A table without slots takes less than 1 KiB. A slot takes about 150 to 200 bytes with
//! its index entries. After many deletions from a full table a slot takes more: measured, 215 bytes
//! with a quarter of the slots gone, 340 with half.
//!
//! **Neighbours.** Below: `pageferry-addr`, and `pageferry-epoch`, which decides when memory may be
//! freed. The hypervisor above keeps its own data in every slot (the `D` of [`Slot`]: dirty log,
//! userfault bitmap) and zaps second-stage mappings according to [`Change`]. This crate must not
//! know page tables, vCPUs, bitmaps or system calls. It never touches the memory that slots
//! describe.
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

pub use pageferry_epoch::{Barrier, OutOfMemory};

/// The examples of the README are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
