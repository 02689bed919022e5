//! The KVM engine on x86-64. One concept per file. No file uses one that uses it:
//!
//! | file | concept |
//! |---|---|
//! | `sys` | the ioctls that kvm-ioctls lacks, and `KVM_RUN` |
//! | `plain` | kernel structures as bytes |
//! | `device` | KVM's device |
//! | `shared` | the parts of a VM that its vCPUs share |
//! | `vm` | creates VMs |
//! | `machine` | [`crate::Machine`] |
//! | `slots` | the memory slots, here and in the kernel |
//! | `plug` | memory beyond RAM |
//! | `vcpu` | the vCPU: [`crate::Vcpu`] |
//! | `run_page` | the page shared with the kernel |
//! | `kick` | kicks: any thread makes a vCPU leave the guest |
//! | `signal` | the signal of a kick |
//! | `sigbus` | SIGBUS of a poison exit, taken without a handler |
//! | `exits` | the meaning of exits |
//! | `dirty` | the dirty log |
//! | `dirty_bitmap`, `dirty_ring` | its two kinds |
//! | `ring` | the entries of a dirty ring |
//! | `userfault`, `events` | delivery of faults on missing pages, of any VM on KVM |
//! | `paging` | how vCPUs and KVM use guest memory |
//! | `poison` | the choice of missing pages to mark |
//! | `state` | the whole state of a vCPU as bytes |
//! | `stats` | sizes of KVM's mappings |
//! | `cpuid`, `msr`, `start`, `clock` | parts of that state |
//! | `chips` | interrupt controllers and timers |
//! | `probe` | a test run of a guest |
//! | `trial` | the choice of a fault delivery, by measuring |
//! | `faults` | fault delivery for a VM that a VMM has made itself |

mod chips;
mod clock;
mod cpuid;
mod device;
mod dirty;
mod dirty_bitmap;
mod dirty_ring;
mod events;
mod exits;
mod faults;
mod kick;
mod machine;
mod msr;
mod paging;
mod plain;
mod plug;
mod poison;
mod probe;
mod ring;
mod run_page;
mod shared;
mod sigbus;
mod signal;
mod slots;
mod start;
mod state;
mod stats;
mod sync;
mod sys;
mod trial;
mod userfault;
mod vcpu;
mod vm;

pub use cpuid::{check_cpuid, check_forced_poison, cpuid_of};
pub use dirty::{DirtyTracking, dirty_ring_entries};
pub use faults::KvmFaults;
pub use machine::{create, create_on, create_pluggable, create_with};
pub use plug::MemoryPlug;
pub use probe::{probe_kernels, probe_vm};
pub use slots::KvmSlot;
pub use trial::delivery_trials;
pub use vm::{Irqchip, KvmOptions};
