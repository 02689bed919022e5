//! A double of Cloud Hypervisor: what its process does in a local migration, at both ends. A tool
//! of ours for tests only, written from facts about its protocol and with nothing of its code.
//!
//! **Guarantee.** A peer cannot tell a [`Double`] from Cloud Hypervisor by its API, its messages or
//! its faults. The double knows what each page must contain, and counts every page that it finds
//! wrong.
//!
//! **Mechanism.** [`Double::start`] runs the test binary once more, which becomes the double in a
//! test that calls [`entry`]. So the double is a process of its own, which can be killed. Threads
//! stand for vCPUs: they check and write pages by a seed. State has the version of each page.
//!
//! - The sender has `vm.send-migration`: Start, MemoryFd for each region, Config. It pauses when
//!   Config is answered. Then it sends State and Complete. On an error, a VM that ran runs on.
//! - The receiver has `vm.receive-migration`. It maps the memfds, waits for the connection for page
//!   faults, and registers RAM for missing and minor faults. It touches a page while it loads
//!   State.
//! - One thread asks for one page at a time, and maps it by `UFFDIO_CONTINUE` behind the answer.
//!   When it is idle it asks for all pages in order. The process ends when that connection ends
//!   early.
//! - [`Double::snapshot`] writes the directory that the real one writes by `vm.snapshot`.
//!
//! It differs from the real one in two things: its VM has no devices, and its process stays when
//! its VM was sent.
//!
//! **Neighbours.** It uses `userfault`. The tests of `bridge` move VMs between two of it.

mod config;
mod receive;
mod relay;
mod send;
mod snapshot;
mod vmm;
mod wire;

pub use crate::double::{Double, Status};
pub use config::{Config, Quirk};
pub use relay::relay;
pub use vmm::entry;
