//! Virtual machines behind traits: [`Machine`], [`Vcpu`] and [`Vcpus`]. Two engines: KVM and soft.
//!
//! **Guarantee.** A migration, a demo or a benchmark is written once against [`Machine`] and
//! [`Vcpu`], and runs on every [`Engine`]. Guest memory is reached through [`GuestRam`] only. A
//! VMM's own access finds a page's bytes or touches nothing, and its writes are in the dirty log.
//! No Rust reference exists to memory that a running guest may change.
//!
//! **Mechanism.** The engines are [`kvm`] (the kernel's, `/dev/kvm`) and [`soft`]
//! (`pageferry-hypervisor`, in this process). Each vCPU has a thread, which [`VcpuThreads`] owns.
//! It starts, pauses and resumes the threads, and hands their exits to [`VcpuHooks`].
//!
//! **Neighbours.** Below: `hypervisor`, `memslot`, `userfault`, `addr`. Above: `migration`,
//! `bench`, `cli`. This crate does not know that migration exists: a missing page is a bit in a
//! bitmap, and the hook brings its bytes.
//!
//! # Example
//!
//! A guest on the soft engine stores to an address without memory, which leaves the guest:
//!
//! ```
//! use pageferry_addr::Gpa;
//! use pageferry_machine::{
//!     DOORBELL_GPA, Engine, Exit, MachineSpec, StartMode, StartState, create,
//! };
//!
//! let mut new = create(Engine::Soft, MachineSpec::new(1, 1 << 20))?;
//! // sw a0, 0(a1)
//! new.machine.ram().try_write(Gpa(0x1000), &0x00a5_a023_u32.to_le_bytes())?;
//! new.vcpus[0].set_start(&StartState {
//!     entry: 0x1000,
//!     stack: 0,
//!     args: [42, DOORBELL_GPA.0],
//!     tables: Gpa(0),
//!     mode: StartMode::User,
//! })?;
//! let exit = new.vcpus[0].run()?;
//! assert_eq!(exit, Exit::MmioWrite { gpa: DOORBELL_GPA, value: 42, size: 4 });
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod access;
mod adopt;
mod backing;
#[cfg(any(feature = "pc", feature = "soft"))]
pub mod board;
#[cfg(any(feature = "kvm", feature = "soft"))]
mod choice;
mod console;
#[cfg(feature = "kvm")]
mod cpu_model;
mod delivery;
mod demand;
mod device_state;
#[cfg(feature = "vm-memory")]
mod devices;
mod engine;
mod engine_side;
mod error;
mod fault_events;
mod gate;
mod huge;
mod interrupt;
#[cfg(feature = "kvm")]
pub mod kvm;
mod layout;
#[cfg(any(feature = "soft", all(feature = "pc", target_arch = "x86_64")))]
mod linux;
mod ram;
mod random;
#[cfg(feature = "soft")]
pub mod soft;
mod sync;
mod threads;
#[cfg(any(feature = "kvm", feature = "soft"))]
mod translate;
mod unchecked;
mod vcpu;
mod vcpus;
mod written;

pub use access::{AccessError, At, Fetch, Frozen};
pub use adopt::AdoptedRegion;
pub use backing::Backing;
#[cfg(feature = "pc")]
pub use choice::create_pc;
#[cfg(any(feature = "kvm", feature = "soft"))]
pub use choice::{create, select};
pub use console::Console;
#[cfg(feature = "kvm")]
pub use cpu_model::{CpuModel, CpuModelError, Cpuid, CpuidLeaf};
pub use delivery::{ArmOptions, Delivery, DeliveryInUse, DeliveryTrial};
pub use device_state::{Apply, Device};
#[cfg(feature = "vm-memory")]
pub use devices::{DeviceMemory, DeviceRegion, DeviceView, Written};
pub use engine::{
    BlackoutCost, Engine, EngineChoice, Machine, MachineKind, MachineSpec, NewMachine,
};
pub use error::MachineError;
pub use fault_events::{FaultEvent, FaultEvents};
pub use huge::Collapsed;
pub use interrupt::Interrupt;
pub use layout::{DOORBELL_GPA, LayoutError, MAX_VCPUS, RamLayout, RamRegion};
#[cfg(feature = "soft")]
pub use linux::ImageError;
#[cfg(any(feature = "soft", all(feature = "pc", target_arch = "x86_64")))]
pub use linux::{Linux, LinuxError};
#[cfg(all(feature = "pc", target_arch = "x86_64"))]
pub use linux::{PcImageError, is_pc_kernel};
pub use ram::GuestRam;
pub use random::fill_random;
pub use threads::{VcpuHooks, VcpuThreads};
pub use unchecked::UncheckedRam;
pub use vcpu::{
    Access, Exit, FirstInstruction, HookVerdict, Kicker, Reset, ResetKind, StartMode, StartState,
    Vcpu, VcpuState,
};
pub use vcpus::{PauseReport, Vcpus};

/// Runs the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
