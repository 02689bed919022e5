//! The devices that a stock Linux needs.
//!
//! **Guarantee.** A guest can harm itself only, by any access of any width. The state of each
//! device travels with its VM. An interrupt that a device has raised comes, at the source or at the
//! destination.
//!
//! **Mechanism.** A [`Pc`] takes the accesses of vCPUs to I/O ports, and an [`MmioBus`] those to
//! memory without RAM. Each device is a [`pageferry_machine::Device`]. It raises interrupts by
//! [`pageferry_machine::Interrupt`], and not while it is paused: a pending one is raised when it
//! goes on. A virtio device is a [`VirtioDevice`] behind a [`MmioTransport`], which has a thread
//! for it. It touches guest memory by [`pageferry_machine::DeviceMemory`] only.
//!
//! **Neighbours.** Below: `machine`. Above: `harness`, whose hooks pass accesses on.

mod bus;
mod pc;
mod power;
mod serial;
mod sync;
mod virtio;

#[doc = include_str!("../README.md")]
#[cfg(doctest)]
struct Readme;

pub use bus::MmioBus;
pub use pc::Pc;
pub use power::Power;
pub use serial::SerialPort;
pub use virtio::{Block, Chain, Entropy, Fault, Mac, MmioTransport, Net, Tap, VirtioDevice};
