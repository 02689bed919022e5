//! What is a virtual machine to the rooms above?
//!
//! **Guarantee.** A migration, a demo or a benchmark is written once against [`Machine`] and [`Vcpu`] and
//! runs on every [`Engine`]. Guest memory is reached through [`GuestRam`] only, and what a running guest
//! may change at the same moment is never behind a Rust reference.
//!
//! **Mechanism.** Two engines: [`kvm`] (the kernel's, `/dev/kvm`) and [`soft`] (`pageferry-hypervisor`, in
//! this process). One thread a vCPU, owned by [`VcpuThreads`], which starts, pauses and resumes them and
//! hands their exits to [`VcpuHooks`].
//!
//! **Neighbours.** Below: `hypervisor`, `memslot`, `userfault`, `addr`. Above: `migration`, `bench`, `cli`.
//! It must not know that migration exists: a missing page is a bit in a bitmap, and who brings its bytes
//! is the hook's affair.

mod delivery;
mod engine;
mod error;
pub mod kvm;
mod layout;
mod ram;
pub mod soft;
mod threads;
mod translate;
mod vcpu;

pub use delivery::{Delivery, FaultEvent, FaultEvents};
pub use engine::{Engine, EngineChoice, Machine, MachineSpec, NewMachine, create, select};
pub use error::MachineError;
pub use layout::{DOORBELL_GPA, LayoutError, MAX_VCPUS, RamLayout, RamRegion};
pub use ram::GuestRam;
pub use threads::{PauseReport, VcpuHooks, VcpuThreads};
pub use vcpu::{Access, Exit, FirstInstruction, HookVerdict, Kicker, StartState, Vcpu, VcpuState};
