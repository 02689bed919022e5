//! The KVM engine on x86-64. One concept a file:
//!
//! | file | concept |
//! |---|---|
//! | `sys` | the ioctls that kvm-ioctls lacks, and `KVM_RUN` |
//! | `plain` | kernel structures as bytes |
//! | `vm` | the VM: shared parts, [`crate::Machine`] |
//! | `slots` | the memory slots, here and in the kernel; memory beyond RAM |
//! | `vcpu` | the vCPU: [`crate::Vcpu`] |
//! | `run_page` | the page shared with the kernel |
//! | `kick` | making a vCPU leave, from any thread |
//! | `signal` | the two signals: the kick's, and SIGBUS of a poison exit |
//! | `exits` | what an exit means |
//! | `dirty` | the dirty log |
//! | `userfault` | delivery of faults on missing pages |
//! | `poison` | which missing pages are marked, and which must not be |
//! | `state` | the whole state of a vCPU as bytes |
//! | `cpuid`, `msr`, `start` | parts of that state |
//! | `probe` | does KVM work here? |

mod cpuid;
mod dirty;
mod exits;
mod kick;
mod msr;
mod plain;
mod poison;
mod probe;
mod run_page;
mod signal;
mod slots;
mod start;
mod state;
mod sync;
mod sys;
mod userfault;
mod vcpu;
mod vm;

pub use probe::probe_vm;
pub use slots::{KvmSlot, MemoryPlug};
pub use vm::{Irqchip, create, create_pluggable, create_with};
