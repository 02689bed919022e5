//! VMs of Cloud Hypervisor move, by its local migration protocol.
//!
//! **Guarantee.** Both processes are unchanged, and each believes that it talks to the other one on
//! its own host. Until the hand-over, any failure leaves the VM at the source as it was. From then
//! on a lost connection costs only waiting.
//!
//! **Mechanism.** [`Source`] makes the VM of a process a machine of `migration`. [`receive`] does
//! so with a process that waits for a VM. Config travels in the offer, State as the state of one
//! device. Neither is changed. [`restore()`] gives such a process the VM of a snapshot, whose
//! memory comes when it is asked for.
//!
//! | what fails | the VM at the source | the VM at the destination |
//! |---|---|---|
//! | anything before the answer to Config | runs on, never paused | none |
//! | anything until `Go` | an error response: it runs, or stays paused, as it was | discarded |
//! | a connection between the hosts, behind `Go` | handed over | waits for its pages |
//! | the sending process, before `Go` | ends with it | none |
//! | the sending process, behind `Go` | handed over: its memory is here | runs on |
//! | the receiving process, before `Go` | runs, or stays paused, as it was | none |
//! | the receiving process, behind `Go` | handed over: ended, or paused with `preserve` | ends with it |
//! | our process at the source, before `Go` | runs, or stays paused, as it was | discarded |
//! | our process at the source, behind `Go` | handed over: ended, or paused with `preserve` | waits for its pages, until the next process goes on |
//! | our process at the destination, behind `Go` | as the line above | waits for its pages, until the next process takes it over |
//!
//! The last two lines need a keeper ([`keep`]). Without one, the VM ends, or its pages never come.
//! And a source process that is killed between `Go` and the answer to Complete then makes Cloud
//! Hypervisor run its VM again, while the destination runs it too.
//!
//! **Neighbours.** Below: `migration`, and `pager` for the sources of snapshots. Verified against a
//! double of Cloud Hypervisor only (`testkit`).

pub(crate) mod api;
mod destination;
mod error;
mod keeper;
mod kept;
mod left;
mod link;
mod pages;
mod receiver;
mod restore;
mod snapshot;
mod source;
#[doc(hidden)]
pub mod wire;

#[doc(hidden)]
pub use api::parse_answer;
pub use destination::{Arrived, LeftBehind, ReceiveError, ReceiverOptions, receive};
pub use error::ChError;
pub use keeper::{end_keepers, keep};
pub use restore::{RestoreOptions, RestoreReport, Restoring, restore};
pub use snapshot::{Snapshot, SnapshotError};
pub use source::{Source, SourceError, SourceOptions};
pub use wire::boot_vcpus;

use pageferry_machine::MachineKind;

/// The kind of these machines. The format is that of Config, of State and of the pair's flag.
const KIND: MachineKind<'static> =
    MachineKind::new("cloud-hypervisor", std::env::consts::ARCH, "ch-migration/0");
/// The device whose state is State.
const STATE_DEVICE: &str = "cloud-hypervisor.state";
const STATE_VERSION: u32 = 0;
/// The state of "the vCPUs": whether the VM ran.
const VM_RUNS: u8 = 1;
const VM_PAUSED: u8 = 2;
