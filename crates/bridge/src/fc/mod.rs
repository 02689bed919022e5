//! VMs of Firecracker move, by its snapshots.
//!
//! **Guarantee.** Both processes are unchanged. A page that the guest gave back never gets its old
//! contents. See [`foreign`](crate::foreign) for what a failure costs.
//!
//! **Mechanism.** The source copies pages while the VM runs, by a guess where they are. Then it
//! pauses the VM, and lets Firecracker write a full snapshot. Its memory file is a memfd of ours,
//! with the copies, so this process has all pages then. The state file travels as the state
//! of one device. The destination lets a process without a VM load it, with its memory from our
//! userfaultfd. It places pages there as they arrive. When all are there, it takes the userfaultfd
//! off the memory, and Firecracker needs nobody any more.
//!
//! Pages that have changed since their copy come by post-copy. The pause has the time in which
//! Firecracker writes its memory to ours: see [`Pause`](crate::foreign::Pause). The source host
//! needs the VM's memory once more until the move is over. The destination host does not: a page
//! that the process has is freed here.
//!
//! **Neighbours.** `foreign` has the state machines of both ends. Below: `migration`, and `pager`
//! for the handshake.

mod api;
mod destination;
mod jail;
mod memory;
mod running;
mod source;

use crate::foreign::description::Description;
use crate::foreign::{
    Arrival, Departure, ForeignVmm, LeftBehind, Names, ReceiverOptions, SourceOptions, VmmError,
};
use pageferry_machine::MachineKind;
use pageferry_migration::{Destination, Incoming};
use std::path::Path;
use std::sync::Arc;

/// The kind of these machines. The format is that of the offer and of the flag. Firecracker checks
/// the version of the state itself, before `Go`.
const KIND: MachineKind<'static> =
    MachineKind::new("firecracker", std::env::consts::ARCH, "fc-snapshot/0");
/// The device whose state is the state file.
const STATE_DEVICE: &str = "firecracker.state";

/// Firecracker, as a VMM whose VMs move.
#[derive(Debug)]
pub struct Firecracker;

impl ForeignVmm for Firecracker {
    fn names(&self) -> Names {
        Names {
            vmm: "Firecracker",
            engine: KIND.engine,
            prefix: "fc",
        }
    }
    fn depart(
        &self,
        options: &mut SourceOptions,
        _: &dyn Fn() -> bool,
    ) -> Result<Departure, VmmError> {
        source::depart(options)
    }
    fn arrive(
        &self,
        options: &mut ReceiverOptions,
        destination: &Arc<Destination>,
        incoming: &Incoming,
        _: &dyn Fn() -> bool,
    ) -> Result<Arrival, VmmError> {
        let guest = destination::Guest::prepare(options, incoming)?;
        Arrival::new(Arc::new(guest), destination, None)
    }
    fn left_behind(&self, api: &Path) -> Result<Option<LeftBehind>, VmmError> {
        destination::left_behind(api)
    }
    fn vcpus(&self, offer: &[u8]) -> Option<u32> {
        let config = Description::parse(offer).ok()?.config;
        Some(parse_config(config.as_bytes()).ok()?.1)
    }
}

/// Reads the configuration of an offered VM: the bytes of its memory, and the number of its vCPUs.
///
/// # Errors
/// Why it is no configuration of a VM that can move.
#[doc(hidden)]
pub fn parse_config(offer: &[u8]) -> Result<(u64, u32), String> {
    let config = api::MachineConfig::parse(offer)?;
    Ok((config.bytes(), config.vcpu_count))
}

/// Puts the data of the metadata service before the state file: that has none of it.
fn frame(mmds: &[u8], state: Vec<u8>) -> Vec<u8> {
    let length = u32::try_from(mmds.len()).unwrap_or(u32::MAX);
    [&length.to_le_bytes()[..], mmds, &state].concat()
}

/// Takes the two apart.
#[doc(hidden)]
pub fn unframe(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    rest.split_at_checked(u32::from_le_bytes(*length) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_with_its_metadata_is_taken_apart() {
        for mmds in [&b""[..], b"{\"a\":1}"] {
            let framed = frame(mmds, b"state".to_vec());
            assert_eq!(unframe(&framed), Some((mmds, &b"state"[..])));
        }
        for wrong in [&b""[..], b"abc", b"\xff\0\0\0abc", b"\xff\xff\xff\xff"] {
            assert_eq!(unframe(wrong), None);
        }
    }
}
