//! How does a running virtual machine move?
//!
//! **Guarantee.** A VM runs in one place at any time; no byte of its memory is lost; no vCPU ever sees a
//! page before its right bytes are there. Until the destination has confirmed that the guest runs there,
//! any failure leaves it running at the source; afterwards the source never resumes it, unless the destination says
//! that it discarded its copy before it counted, and a lost connection pauses it at the destination with a clear error
//! (`docs/failures.md`).
//!
//! **Mechanism.** [`source`] and [`destination`] are two processes joined by two connections
//! ([`channel`]): a *stream* for set-up, pre-copy, switch-over and the background push, and an *urgent*
//! one for the pages that vCPUs wait for. The byte formats are in [`wire`] and `docs/wire-format.md`.
//! The phases are those of [`Phase`].
//!
//! **Neighbours.** Below: `machine` (the VM), `userfault` (page states). Above: `bench`, `cli`. It must
//! not know which engine runs the guest, nor what the guest does.

pub mod address;
pub mod channel;
mod clock;
pub mod destination;
mod error;
pub mod handshake;
mod latency;
mod link;
mod phase;
mod report;
pub mod source;
mod sync;
pub mod wire;

pub use clock::{instant_ns, monotonic_ns};
pub use destination::{
    DestinationConfig, DestinationFailure, DestinationVm, FAULT_SPIN, Incoming, Offer, Resolver,
};
pub use error::MigrationError;
pub use link::URGENT_SPIN_MICROS;
pub use phase::{Observer, Phase, Unobserved};
pub use report::{DestinationReport, FaultRecord, PageCounts, PhaseStart, SourceReport};
pub use source::{RunningVm, SourceConfig, SourceFailure, SourceVm, migrate};

/// The version of the vCPU states' encoding that both sides must share; each engine's states carry a
/// finer version of their own.
pub const STATE_FORMAT: u16 = 1;
