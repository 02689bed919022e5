//! VMs of Cloud Hypervisor move, by its local migration protocol.
//!
//! **Guarantee.** Both processes are unchanged, and each believes that it talks to the other one on
//! its own host. Until the hand-over, any failure leaves the VM at the source as it was. From then
//! on a lost connection costs only waiting: see [`foreign`](crate::foreign).
//!
//! **Mechanism.** Config travels in the offer, State as the state of one device. Neither is
//! changed. [`restore()`] gives such a process the VM of a snapshot, whose memory comes when it is
//! asked for.
//!
//! **Neighbours.** `foreign` has the state machines of both ends. Below: `migration`, and `pager`
//! for the sources of snapshots.

mod destination;
mod kept;
mod link;
mod pages;
mod receiver;
mod restore;
mod snapshot;
mod source;
#[doc(hidden)]
pub mod wire;

pub use restore::{RestoreOptions, RestoreReport, Restoring, restore};
pub use snapshot::{Snapshot, SnapshotError};

use crate::foreign::api::Api;
use crate::foreign::description::{Description, major_minor};
use crate::foreign::{
    Arrival, Departure, ForeignVmm, LeftBehind, Names, ReceiverOptions, STEP_LIMIT, SourceOptions,
    VmmError,
};
use pageferry_machine::MachineKind;
use pageferry_migration::{Destination, Incoming};
use rustix::process::Pid;
use std::path::Path;
use std::sync::Arc;

/// The kind of these machines. The format is that of Config, of State and of the pair's flag.
const KIND: MachineKind<'static> =
    MachineKind::new("cloud-hypervisor", std::env::consts::ARCH, "ch-migration/0");
/// The device whose state is State.
const STATE_DEVICE: &str = "cloud-hypervisor.state";

/// Cloud Hypervisor, as a VMM whose VMs move.
#[derive(Debug)]
pub struct CloudHypervisor;

impl ForeignVmm for CloudHypervisor {
    fn names(&self) -> Names {
        Names {
            vmm: "Cloud Hypervisor",
            engine: KIND.engine,
            prefix: "ch",
        }
    }
    fn depart(
        &self,
        options: &mut SourceOptions,
        stop: &dyn Fn() -> bool,
    ) -> Result<Departure, VmmError> {
        source::depart(options, stop)
    }
    fn arrive(
        &self,
        options: &mut ReceiverOptions,
        destination: &Arc<Destination>,
        incoming: &Incoming,
        stop: &dyn Fn() -> bool,
    ) -> Result<Arrival, VmmError> {
        let guest = destination::Guest::prepare(options, incoming, stop)?;
        Arrival::new(Arc::new(guest), destination, None)
    }
    fn left_behind(&self, api: &Path) -> Result<Option<LeftBehind>, VmmError> {
        destination::left_behind(api)
    }
    fn vcpus(&self, offer: &[u8]) -> Option<u32> {
        wire::boot_vcpus(Description::parse(offer).ok()?.config.as_bytes())
    }
}

/// The first version that asks for pages which lie in the page cache, too (minor faults).
const FIRST_RECEIVER: (u32, u32) = (54, 0);

/// The version of a process, and its id, if it is visible here.
fn version(api: &Api) -> Result<(String, Option<Pid>), VmmError> {
    #[derive(serde::Deserialize)]
    struct Ping {
        version: String,
    }
    let (ping, process) = api.get::<Ping>("GET /api/v1/vmm.ping", STEP_LIMIT)?;
    Ok((ping.version, process))
}

/// Refuses a version that would find stale bytes where it does not ask. Returns the process.
fn check_receiver(api: &Api) -> Result<Option<Pid>, VmmError> {
    let (version, process) = version(api)?;
    if major_minor(&version).is_some_and(|version| version >= FIRST_RECEIVER) {
        return Ok(process);
    }
    Err(VmmError::Version(format!(
        "Cloud Hypervisor {} asks for no page that lies in the page cache: expected version {}.{} or \
         later",
        version.escape_debug(),
        FIRST_RECEIVER.0,
        FIRST_RECEIVER.1
    )))
}
