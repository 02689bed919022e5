//! Memslots as the guest memory of a VMM built on rust-vmm's `vm-memory`.
//!
//! **Guarantee.** A VMM that is generic over `vm-memory`'s traits takes a [`SlotMemory`] where it had a
//! `GuestMemoryAtomic<GuestMemoryMmap>`, and devices do not see the difference: the same look-ups, slices,
//! partial results and errors. What a snapshot shows is one version of the memory, and stays mapped while the
//! snapshot lives. Inserting, moving or removing one region costs O(log n) and copies that one; no look-up
//! takes a lock or waits, not even for a writer.
//!
//! **Mechanism.** A region is a memory slot of `pageferry-memslot` whose data is an `Arc` of the region, so
//! that a slot keeps its mapping alive. [`memory`](vm_memory::GuestAddressSpace::memory) pins the newest
//! version with a reader parked for the calling thread and gives it as an owned [`SlotSnapshot`]; its look-ups
//! walk the slots' tree. The slots' rules are KVM's, so regions are page-aligned, and refusals are
//! [`SlotError`](pageferry_memslot::SlotError)s with their values. A change can be made in two steps, to tell
//! the kernel in between ([`RegionUpdate`]).
//!
//! **Neighbours.** Below: `pageferry-memslot`, `pageferry-addr`, and `vm-memory`, whose `GuestRegionMmap` is
//! the region most will use; any `GuestMemoryRegion` with a host address serves. This crate must not know
//! hypervisors or devices, and it never touches guest memory itself: slices come from the regions.
//!
//! # A VMM that takes it
