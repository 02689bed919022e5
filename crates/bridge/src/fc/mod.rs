//! VMs of Firecracker move, by its snapshots.
//!
//! **Guarantee.** Both processes are unchanged. Until the hand-over, any failure leaves the VM at
//! the source as it was. From then on a lost connection costs only waiting. A page that the guest
//! gave back never gets its old contents.
//!
//! **Mechanism.** [`Source`] copies pages while the VM runs, by a guess where they are. Then it
//! pauses the VM, and lets Firecracker write a full snapshot. Its memory file is a memfd of ours,
//! with the copies, so this process has all pages then. The state file travels as the state
//! of one device. [`receive`] lets a process without a VM load it, with its memory from our
//! userfaultfd. It places pages there as they arrive. When all are there, it takes the userfaultfd
//! off the memory, and Firecracker needs nobody any more.
//!
//! Pages that have changed since their copy come by post-copy. The pause has the time in which
//! Firecracker writes its memory to ours: see [`Pause`]. The source host needs the VM's memory once
//! more until the move is over. The destination host does not: a page that the process has is freed
//! here.
//!
//! | what fails | the VM at the source | the VM at the destination |
//! |---|---|---|
//! | anything before the pause | runs on | none |
//! | anything until `Go` | runs, or stays paused, as it was | discarded: end that process |
//! | a connection between the hosts, behind `Go` | handed over, paused | waits for its pages |
//! | the sending process, before its snapshot is whole | ends with it | none |
//! | the sending process, later | handed over: its memory is here | runs on |
//! | the receiving process, before `Go` | runs, or stays paused, as it was | none |
//! | the receiving process, behind `Go` | handed over, paused | ends with it |
//! | our process at the source, in the pause | paused: resume it | discarded |
//! | our process at the source, behind `Go` | handed over, paused | waits for pages that never come |
//! | our process at the destination, behind `Go` | handed over, paused | waits for ever |
//!
//! Behind the move, the sending process still has its paused VM. End it. Never resume it.
//!
//! **Neighbours.** Below: `migration`, and `pager` for the handshake. Verified against a double of
//! Firecracker only (`testkit`).

mod api;
mod destination;
mod error;
mod jail;
mod memory;
mod running;
mod source;

pub use destination::{Overrides, ReceiveError, ReceiverOptions, receive};
pub use error::FcError;
pub use source::{Pause, Source, SourceError, SourceOptions};

use pageferry_machine::MachineKind;
use std::time::Duration;

/// The kind of these machines. The format is that of the offer and of the flag. Firecracker checks
/// the version of the state itself, before `Go`.
const KIND: MachineKind<'static> =
    MachineKind::new("firecracker", std::env::consts::ARCH, "fc-snapshot/0");
/// The device whose state is the state file.
const STATE_DEVICE: &str = "firecracker.state";
const STATE_VERSION: u32 = 0;
/// The longest state file that Firecracker itself reads.
const MAX_STATE_BYTES: u64 = 10_000_000;
/// The state of "the vCPUs": whether the VM ran.
const VM_RUNS: u8 = 1;
const VM_PAUSED: u8 = 2;
/// The limit of a step that Firecracker carries out alone.
const STEP_LIMIT: Duration = Duration::from_secs(30);

/// Reads the description of an offered VM: the bytes of its memory, and the number of its vCPUs.
///
/// # Errors
/// Why it is no configuration of a VM that can move.
#[doc(hidden)]
pub fn parse_config(offer: &[u8]) -> Result<(u64, u32), String> {
    let config = api::MachineConfig::parse(offer)?;
    Ok((config.bytes(), config.vcpu_count))
}

/// The number of vCPUs of an offered VM, for people. Nothing else depends on it.
#[must_use]
pub fn vcpus(offer: &[u8]) -> Option<u32> {
    Some(parse_config(offer).ok()?.1)
}
