//! A hypervisor in one process: "KVM in a process", without the kernel's help and without privileges.
//!
//! **Guarantee.** A guest, whatever its code does, reaches host memory only inside its VM's memory slots, with
//! the permissions the slots give; no page is mapped while its userfault bit is set; nothing a guest wrote
//! is missing from the dirty log, and no store through its slot reaches a write-tracked page; and when a call that removes or restricts
//! memory has returned, no vCPU uses what was there before. vCPUs that fault at the same time share no lock and wait for nobody.
//!
//! **Mechanism.** A vCPU's life is [`VcpuCore::run`]: it enters the guest through its [`Gate`], interprets RV64
//! machine code ([`hart`]), and finds memory through its own software TLB. A TLB miss asks the memory slots
//! (by a wait-free look-up, under a guard that lasts as long as the fault) and the second-stage tables that all
//! vCPUs of the [`Vm`] share; then it fills the TLB or leaves the guest with an [`Exit`], on the vCPU's own
//! thread. Whoever takes something away (a slot, a write permission) says so in the slots, then goes through every
//! vCPU's gate and the tables; the order of steps and why it suffices is written down once, in `revoke.rs`.
//! Who keeps the slots is a type parameter with a default: [`Memslots`], [`Scalable`].
//! The frame space of the second-stage tables is the process's own virtual pages: the PPN of a leaf is
//! a host-virtual address shifted right by 12.
//!
//! **Neighbours.** Below: `memslot` (which host range backs a guest range), `tdp` (the tables), `userfault` (the
//! bitmaps), `addr`. Above: `machine`, which puts the traits of all engines over [`Vm`] and [`VcpuCore`]. The
//! calls are those of KVM's API, so that both engines compare call by call. It must not know that migration
//! exists, where pages come from, or what an exit is good for; it owns no thread and does no system call.

#[cfg(not(loom))]
mod clock;
#[cfg(not(loom))]
mod dirty;
#[cfg(not(loom))]
mod error;
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
mod sync;
#[cfg(not(loom))]
mod tlb;
#[cfg(not(loom))]
mod track;
#[cfg(not(loom))]
mod vcpu;
#[cfg(not(loom))]
mod vm;

#[cfg(not(loom))]
pub use error::VmError;
pub use gate::{Gate, Inside, Requests, Ticket};
#[cfg(not(loom))]
pub use log::DirtyBy;
#[cfg(not(loom))]
pub use pageferry_memslot::{
    Generation, Limits, Request, Slot, SlotError, SlotFlags, SlotGuard, SlotReader, SlotTable,
    SlotView,
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
pub use vcpu::{Exit, KickHandle, VcpuCore};
#[cfg(not(loom))]
pub use vm::{Capabilities, DirtyProtect, Vm, VmConfig};
