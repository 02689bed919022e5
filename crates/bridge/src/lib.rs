//! How do the VMs of other VMMs move?
//!
//! **Guarantee.** A VMM's migration stream arrives as it was sent: no byte is lost, comes twice or
//! out of order, as long as both processes live. A VM that moves runs in one place, and sees no
//! page before its bytes are there. A lost connection costs only waiting. docs/bridge.md has the
//! one exception: a process that is killed within a moment of the hand-over.
//!
//! **Mechanism.** [`tunnel`] carries the streams of QEMU, libvirt and Cloud Hypervisor between two
//! hosts. [`ch`] moves a VM between two unchanged Cloud Hypervisor processes, and [`fc`] between
//! two unchanged Firecracker processes, by pre-copy and post-copy. [`ch`] also starts a VM from its
//! snapshot.
//!
//! **Neighbours.** Below: `migration` has the connections, their handshake and TLS, and the
//! governor. `pager` has the handshake of a userfaultfd, and the sources of snapshots. Above:
//! `cli`.

pub mod ch;
pub mod fc;
pub mod foreign;
pub mod tunnel;

/// The VMMs whose VMs move.
pub static FOREIGN: [&dyn foreign::ForeignVmm; 2] = [&CLOUD_HYPERVISOR, &FIRECRACKER];
/// Cloud Hypervisor.
pub static CLOUD_HYPERVISOR: ch::CloudHypervisor = ch::CloudHypervisor;
/// Firecracker.
pub static FIRECRACKER: fc::Firecracker = fc::Firecracker;

/// Runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
