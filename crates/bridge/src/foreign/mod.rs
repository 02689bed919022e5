//! How do the VMs of other VMMs move?
//!
//! **Guarantee.** Both VMM processes are unchanged. Until the hand-over, any failure leaves the VM
//! at the source as it was: also a destination that cannot open a device, a disk or a lock. From
//! then on a lost connection costs only waiting, and so does the death of any process of ours.
//!
//! **Mechanism.** [`ForeignVmm`] gives a VM to a migration as a [`Departure`], and takes one in as
//! an [`Arrival`]. `departure` and `arrival` are the state machines of both ends; `ch` and `fc`
//! have what differs. A keeper has the descriptors of a VM too, so that the next process goes on
//! when one dies.
//!
//! | what fails | the VM at the source | the VM at the destination |
//! |---|---|---|
//! | anything before the pause | runs on | none |
//! | anything until `Go`, such as the load at the destination | runs, or stays paused, as it was | discarded |
//! | a connection between the hosts, behind `Go` | handed over | waits for its pages |
//! | the sending VMM, before its memory is ours | ends with it | none |
//! | the sending VMM, later | handed over: its memory is here | runs on |
//! | the receiving VMM, before `Go` | runs, or stays paused, as it was | none |
//! | the receiving VMM, behind `Go` | handed over: both ends say so | ends with it |
//! | our process at the source, before `Go` | as it was; Firecracker's may stay paused | discarded |
//! | our process at the source, behind `Go` | handed over | waits for its pages, until the next process goes on |
//! | our process at the destination, behind `Go` | handed over | waits for its pages, until the next process takes it over |
//!
//! The last two lines need a keeper ([`keep`]). Behind the move Firecracker still has its paused
//! VM, and Cloud Hypervisor with `preserve`: end it, and never resume it.
//!
//! **Neighbours.** Below: `migration`, and `pager` for the handshake of a userfaultfd.

pub(crate) mod api;
pub(crate) mod arrival;
pub(crate) mod departure;
pub(crate) mod description;
pub(crate) mod descriptors;
pub(crate) mod disks;
mod error;
pub(crate) mod keeper;
pub(crate) mod kept;
mod moved;
pub(crate) mod smaps;

#[doc(hidden)]
pub use api::parse_answer;
pub use arrival::{Arrival, ReceiveError};
pub use departure::{Departure, Pause, SourceError};
pub use error::VmmError;
pub use keeper::{end_keepers, keep};
pub(crate) use moved::check as check_moved;

use pageferry_migration::{Destination, Incoming, MigrationError, Offer, Orphan};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

/// The version of the devices whose states are those of VMMs. The VMM checks its own version.
const STATE_VERSION: u32 = 0;
/// The longest state file that Firecracker itself reads.
pub(crate) const MAX_STATE_BYTES: u64 = 10_000_000;
/// The state of "the vCPUs": whether the VM ran.
const VM_RUNS: u8 = 1;
const VM_PAUSED: u8 = 2;
/// The limit of a step that a VMM carries out alone.
pub(crate) const STEP_LIMIT: Duration = Duration::from_secs(30);
/// The limit of a load in the blackout. It is shorter than the silence of a migration
/// ([`Limits::silence`](pageferry_migration::Limits)), so that the source hears the reason.
pub(crate) const LOAD_LIMIT: Duration = Duration::from_secs(15);

/// The names of a VMM.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    /// For people.
    pub vmm: &'static str,
    /// In offers and reports.
    pub engine: &'static str,
    /// Before its API socket, on a command line.
    pub prefix: &'static str,
}

/// The choices for a VMM that a VM leaves.
#[derive(Debug)]
pub struct SourceOptions {
    /// Its API socket.
    pub api: PathBuf,
    /// Whether a VM of Cloud Hypervisor stays there, paused, when it has moved (`preserve_source`,
    /// newer than v53). It then keeps its locks of disks, which the destination may need.
    pub preserve: bool,
    /// The command of a program that calls [`keep`] at once. With it, the move outlives this
    /// process, from the hand-over on. Its standard input and output are set.
    pub keeper: Option<Command>,
}

/// The choices for a VMM that waits for a VM.
#[derive(Debug)]
pub struct ReceiverOptions {
    /// Its API socket.
    pub api: PathBuf,
    /// The command of a program that calls [`keep`] at once. With it, the VM outlives this process.
    pub keeper: Option<Command>,
    /// Whether a Firecracker is tried whose version is not that of the source: see the first two
    /// numbers.
    pub any_version: bool,
    /// The differences from the source, of Firecracker.
    pub overrides: Overrides,
}

/// The things of this host that take the place of those that a VM of Firecracker had at its source.
/// Firecracker refuses what its version does not know, before `Go`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// The names of network interfaces in the VM's configuration, and their tap devices here.
    pub network: Vec<(String, String)>,
    /// The Unix socket of the VM's vsock device (since 1.16).
    pub vsock: Option<PathBuf>,
    /// Whether the guest's clock is advanced by the time of the move (x86-64).
    pub clock_realtime: bool,
}

impl Overrides {
    /// Adds them to the body of a load. An older version knows none of the fields.
    pub(crate) fn add_to(&self, body: &mut serde_json::Value) {
        if !self.network.is_empty() {
            let taps = self
                .network
                .iter()
                .map(|(interface, tap)| json!({ "iface_id": interface, "host_dev_name": tap }));
            body["network_overrides"] = taps.collect();
        }
        if let Some(path) = &self.vsock {
            body["vsock_override"] = json!({ "uds_path": path });
        }
        if self.clock_realtime {
            body["clock_realtime"] = true.into();
        }
    }
}

/// A VMM whose VMs move.
pub trait ForeignVmm: Send + Sync {
    /// Its names.
    fn names(&self) -> Names;

    /// Takes the VM of a process, which runs meanwhile. If another process of ours has handed it
    /// over, and died, this is that move.
    ///
    /// # Errors
    /// When the process cannot be reached, has no VM, or its VM cannot move. The VM is as it was.
    fn depart(
        &self,
        options: &mut SourceOptions,
        stop: &dyn Fn() -> bool,
    ) -> Result<Departure, VmmError>;

    /// Prepares a process that has no VM for an offered one.
    ///
    /// # Errors
    /// When the VM does not fit, or the process cannot be reached. The VM stays at its source.
    fn arrive(
        &self,
        options: &mut ReceiverOptions,
        destination: &Arc<Destination>,
        incoming: &Incoming,
        stop: &dyn Fn() -> bool,
    ) -> Result<Arrival, VmmError>;

    /// A VM that waits in its process for pages, and whose process of ours has died.
    ///
    /// # Errors
    /// When there is one that cannot be taken over.
    fn left_behind(&self, api: &Path) -> Result<Option<LeftBehind>, VmmError>;

    /// The number of vCPUs of an offered VM, for people. Nothing else depends on it.
    fn vcpus(&self, offer: &[u8]) -> Option<u32>;
}

/// Receives an offered VM into a process that has none. Behind it, call [`Arrival::serve`].
///
/// # Errors
/// [`ReceiveError`] says where the VM is.
pub fn receive(
    vmm: &dyn ForeignVmm,
    options: &mut ReceiverOptions,
    destination: &Arc<Destination>,
    incoming: Incoming,
    stop: &dyn Fn() -> bool,
    observer: &dyn pageferry_migration::Observer,
) -> Result<(pageferry_migration::DestinationReport, Arrival), ReceiveError> {
    match vmm.arrive(options, destination, &incoming, stop) {
        Ok(arrival) => Ok((arrival.receive(incoming, stop, observer)?, arrival)),
        Err(error) => {
            incoming.refuse(&error.to_string());
            Err(ReceiveError::Refused(error))
        }
    }
}

/// A VM that waits in its VMM for pages, and whose process of ours has died.
pub struct LeftBehind {
    pub(crate) vmm: Arc<dyn arrival::Arriving>,
    pub(crate) orphan: Orphan,
}

impl LeftBehind {
    /// Goes on with the session that brings its pages, at a destination that its source reaches.
    ///
    /// # Errors
    /// When the session's record does not fit its pages.
    pub fn session(&self, destination: &Arc<Destination>) -> Result<Incoming, MigrationError> {
        destination.take_over(self.orphan.clone())
    }

    /// Brings the missing pages: see [`Arrival::receive`].
    ///
    /// # Errors
    /// When the host has no room for threads.
    pub fn arrive(self, destination: &Arc<Destination>) -> Result<Arrival, VmmError> {
        Arrival::new(self.vmm, destination, Some(&self.orphan))
    }
}

impl std::fmt::Debug for LeftBehind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LeftBehind")
            .field("orphan", &self.orphan)
            .finish_non_exhaustive()
    }
}

/// Checks that an offer is of such a VM, with memory of this size.
pub(crate) fn check(offer: &Offer, engine: &str, bytes: u64) -> Result<(), VmmError> {
    let found = offer.kind.engine.as_str();
    if found != engine {
        let why = format!("its engine is {found}, expected {engine}");
        return Err(VmmError::Offer(why));
    }
    if bytes != offer.memory_bytes {
        let why = format!(
            "its configuration has {bytes} bytes of RAM, and the offer has {}",
            offer.memory_bytes
        );
        return Err(VmmError::Offer(why));
    }
    Ok(())
}
