//! A hypervisor in one process: "KVM in a process", without help from the kernel and without
//! privileges.
//!
//! **Guarantee.** For any guest code, a guest is confined to the memory slots of its VM:
//! - It reaches host memory only inside those slots, with the permissions that they give.
//! - No page is mapped while its userfault bit is set.
//! - Every page that a guest wrote is in the dirty log, if its slot has one.
//! - No store through its slot reaches a write-tracked page.
//! - When a call that removes or restricts memory has returned, no vCPU uses the old state.
//!
//! vCPUs that fault at the same time share no lock, and none waits for another.
//!
//! **Mechanism.** [`VcpuCore::run`] enters the guest through the vCPU's [`Gate`] and interprets
//! RV64 machine code ([`hart`]), with Sv39 and Sv48. Each vCPU has a software TLB by virtual page.
//! On a miss, the fault path walks the guest's tables, and looks the frame up in the memory slots.
//! The look-up is wait-free, under a guard that lasts as long as the fault. Then it reads the
//! second-stage tables, which all vCPUs of the [`Vm`] share, and fills the TLB. If it cannot, the
//! vCPU leaves the guest with an [`Exit`] on its own thread.
//!
//! A call that takes something away (a slot, a write permission) first changes the slots, then the
//! tables. In between and after that, it makes requests at every vCPU's gate. `revoke.rs` has the
//! order of the steps, with its proof.
//!
//! The hypervisor reads the guest's tables and never writes them. [`Vm::fence`] takes their
//! translations away from other vCPUs, for SBI.
//!
//! A frame of the second-stage tables is a virtual page of this process: the PPN of a leaf is a
//! host virtual address shifted right by 12. A type parameter with a default chooses the scheme
//! that keeps the slots: [`Memslots`], [`Scalable`].
//!
//! **Neighbours.** Below: `memslot` (the slots), `tdp` (the tables), `userfault` (the bitmaps),
//! `addr`. Above: `machine`, which implements the traits of all engines for [`Vm`] and
//! [`VcpuCore`]. The calls are those of KVM's API, so that both engines compare call by call. This
//! crate knows nothing of migration, of the source of pages, or of the handling of exits. It owns
//! no thread, and needs only `membarrier` and a clock from the kernel.
//!
//! # Example
//!
//! A guest adds two numbers and stores the sum to an address without a slot, which leaves the
//! guest:
//!
//! ```
//! use pageferry_addr::{Gpa, Hva};
//! use pageferry_hypervisor::{Exit, HostMemory, Region, SlotFlags, Vm, VmConfig};
//! use std::ops::Range;
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicU32, Ordering};
//!
//! #[repr(align(4096))]
//! struct Page([AtomicU32; 1024]);
//!
//! // SAFETY: the page lives as long as the value and holds only atomics; its provenance is exposed.
//! unsafe impl HostMemory for Page {
//!     fn hva_range(&self) -> Range<Hva> {
//!         let start = self.0.as_ptr().expose_provenance() as u64;
//!         Hva(start)..Hva(start + 4096)
//!     }
//! }
//!
//! let page = Arc::new(Page([const { AtomicU32::new(0) }; 1024]));
//! // add a0, a0, a1; sw a0, 0(a2)
//! for (word, code) in page.0.iter().zip([0x00b5_0533, 0x00a6_2023]) {
//!     word.store(code, Ordering::Relaxed);
//! }
//! let vm = Vm::new(VmConfig::default());
//! vm.set_user_memory_region2(Region {
//!     slot: 0,
//!     flags: SlotFlags::EMPTY,
//!     gpa: Gpa(0),
//!     size: 4096,
//!     hva: page.hva_range().start,
//!     memory: Some(page),
//!     userfault: None,
//! })?;
//! let mut vcpu = vm.create_vcpu(0)?;
//! for (register, value) in [(10, 2), (11, 40), (12, 0x1000_0000)] {
//!     vcpu.hart_mut().set_x(register, value);
//! }
//! let exit = vcpu.run();
//! assert_eq!(exit, Exit::MmioWrite { gpa: Gpa(0x1000_0000), size: 4, value: 42 });
//! # Ok::<(), pageferry_hypervisor::VmError>(())
//! ```

#[cfg(not(loom))]
mod clock;
#[cfg(not(loom))]
mod config;
#[cfg(not(loom))]
mod dirty;
#[cfg(not(loom))]
mod dirty_log;
#[cfg(not(loom))]
mod error;
#[cfg(not(loom))]
mod fence;
mod gate;
pub mod hart;
#[cfg(not(loom))]
mod log;
#[cfg(not(loom))]
mod memory;
#[cfg(not(loom))]
mod notifier;
#[cfg(not(loom))]
mod platform;
#[cfg(not(loom))]
mod region;
#[cfg(not(loom))]
mod revoke;
#[cfg(not(loom))]
mod scalable;
#[cfg(not(loom))]
mod slots;
#[cfg(not(loom))]
mod state;
#[cfg(not(loom))]
mod stores;
mod sync;
#[cfg(not(loom))]
mod tlb;
#[cfg(not(loom))]
mod track;
#[cfg(not(loom))]
mod tracked;
#[cfg(not(loom))]
mod vcpu;
#[cfg(not(loom))]
mod vm;

#[cfg(not(loom))]
pub use config::{Capabilities, DirtyProtect, VmConfig};
#[cfg(not(loom))]
pub use dirty_log::DirtyBy;
#[cfg(not(loom))]
pub use error::VmError;
#[cfg(not(loom))]
pub use fence::RemoteFence;
pub use gate::{Gate, Inside, Requests, Ticket};
pub use hart::LrSc;
#[cfg(not(loom))]
pub use pageferry_memslot::{
    Generation, Limits, OutOfMemory, Request, Slot, SlotError, SlotFlags, SlotGuard, SlotReader,
    SlotTable, SlotView,
};
#[cfg(not(loom))]
pub use pageferry_tdp::ring::{DirtyPage, Harvester};
#[cfg(not(loom))]
pub use region::{HostMemory, Region, SlotData, UserfaultBits};
#[cfg(not(loom))]
pub use scalable::Scalable;
#[cfg(not(loom))]
pub use slots::{Begun, Found, MemslotReader, MemslotUpdate, Memslots};
#[cfg(not(loom))]
pub use stores::Stores;
#[cfg(not(loom))]
pub use vcpu::{Exit, KickHandle, VcpuCore};
#[cfg(not(loom))]
pub use vm::Vm;

/// Runs the examples of the README.
#[cfg(all(doctest, not(loom)))]
#[doc = include_str!("../README.md")]
mod readme {}
