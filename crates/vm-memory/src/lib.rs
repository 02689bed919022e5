//! Memslots as the guest memory of a VMM built on rust-vmm's `vm-memory`.
//!
//! **Guarantee.** A VMM that is generic over `vm-memory`'s traits takes a [`SlotMemory`] in place
//! of a `GuestMemoryAtomic<GuestMemoryMmap>`. Devices get the same look-ups, slices, partial
//! results and errors. A snapshot shows one version of the memory, which stays mapped while the
//! snapshot lives. Inserting, moving or removing a region costs O(log n) and copies that region's
//! record only. No look-up takes a lock or waits, not even for a writer.
//!
//! **Mechanism.** A region is a memory slot of `pageferry-memslot` whose data is an `Arc` of the
//! region, so a slot keeps its mapping alive. [`memory`](vm_memory::GuestAddressSpace::memory) pins
//! the newest version with a reader that is kept for the calling thread, and returns it as an owned
//! [`SlotSnapshot`]. Its look-ups walk the slots' tree. The slots' rules are KVM's. So regions are
//! page-aligned, and a refusal is a [`SlotError`](pageferry_memslot::SlotError) with its values. A
//! change can take two steps, so that the VMM can tell the kernel in between ([`RegionUpdate`]).
//!
//! **Cost**, in ns, ours / `GuestMemoryMmap` in a `GuestMemoryAtomic` (x86-64, two busy cores):
//!
//! | regions | 10 | 509 | 8194 |
//! |---|---|---|---|
//! | look-up in the region that was found last | 1 / 10 | 1 / 21 | 1 / 42 |
//! | look-up in random order | 12 / 10 | 29 / 25 | 52 / 85 |
//! | reading a `u64` in one region | 14 / 27 | 16 / 46 | 13 / 68 |
//! | reading a `u64` in random order | 33 / 26 | 53 / 54 | 112 / 135 |
//! | inserting or removing a region | 210 / 140 | 270 / 5800 | 300 / 125 000 |
//! | `memory()` and its drop | 17 / 5 | 17 / 5 | 17 / 5 |
//!
//! While a snapshot is held, each change leaves about 2 KB behind, with any number of regions.
//!
//! **Neighbours.** Below: `pageferry-memslot`, `pageferry-addr`, and `vm-memory`. The region is
//! usually `vm-memory`'s `GuestRegionMmap`. Any `GuestMemoryRegion` with a host address works. This
//! crate must not know hypervisors or devices, and it never touches guest memory: slices come from
//! the regions.
//!
//! # Example: a VMM with slot memory
//!
//! ```
//! use pageferry_vm_memory::SlotMemory;
//! use std::sync::Arc;
//! use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestRegionMmap};
//!
//! /// A device of any VMM: it knows `vm-memory`, not us.
//! struct Console<AS: GuestAddressSpace> {
//!     memory: AS,
//!     out: Vec<u8>,
//! }
//!
//! impl<AS: GuestAddressSpace> Console<AS> {
//!     /// The guest rang: `len` bytes wait at `addr`.
//!     fn notified(&mut self, addr: GuestAddress, len: usize) -> vm_memory::GuestMemoryResult<()> {
//!         let memory = self.memory.memory();
//!         let mut bytes = vec![0; len];
//!         memory.read_slice(&mut bytes, addr)?;
//!         self.out.extend(bytes);
//!         Ok(())
//!     }
//! }
//!
//! let mebibyte = |at| GuestRegionMmap::from_range(GuestAddress(at), 1 << 20, None).map(Arc::new);
//! let memory: SlotMemory<GuestRegionMmap> = SlotMemory::from_regions([mebibyte(0)?])?;
//! let mut console = Console { memory: memory.clone(), out: Vec::new() };
//!
//! memory.memory().write_slice(b"hello, ", GuestAddress(0x1000))?;
//! console.notified(GuestAddress(0x1000), 7)?;
//!
//! // Hotplug: the device sees it at its next look, snapshots that are held do not change.
//! let before = memory.memory();
//! memory.lock().insert_region(mebibyte(1 << 20)?)?;
//! let across = GuestAddress((1 << 20) - 2);
//! memory.memory().write_slice(b"world", across)?;
//! console.notified(across, 5)?;
//! assert_eq!(console.out, b"hello, world");
//! assert_eq!(before.write(b"world", across)?, 2, "there was only one region");
//!
//! let removed = memory.lock().remove_region(GuestAddress(1 << 20), 1 << 20)?;
//! assert!(console.notified(across, 5).is_err());
//! # drop(removed);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod free_list;
mod memory;
mod pinned;
mod snapshot;
mod sync;
mod writer;

pub use error::RegionError;
pub use memory::SlotMemory;
pub use snapshot::{SlotMemoryGuard, SlotSnapshot};
pub use writer::{KernelSlot, RegionUpdate, SlotMemoryWriter};

pub use pageferry_memslot::{Barrier, OutOfMemory};

/// The examples of the README are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
