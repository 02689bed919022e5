//! How does a running virtual machine move?
//!
//! **Guarantee.** A VM runs in one place at any time, and no byte of its memory is lost. No vCPU
//! sees a page before its right bytes are there. Until the destination has confirmed that the guest
//! runs there, any failure leaves the guest running at the source. After that, the source resumes
//! it in one case only: the destination says that it discarded its copy before that copy counted. A
//! connection that is lost after the switch-over pauses the VM at the destination, with an error
//! that says how many pages are missing.
//!
//! **Mechanism.** [`source`] and [`destination`] are two processes joined by two connections
//! ([`channel`]). The *stream* carries set-up, pre-copy, switch-over and the background push. The
//! *urgent* connection carries the pages that vCPUs wait for. [`wire`] has the byte formats, and
//! [`Phase`] the phases in their order.
//!
//! | phase | source | destination |
//! |---|---|---|
//! | set-up | offers the VM | builds such a machine and acknowledges |
//! | pre-copy | sends pages while the guest runs | allocates memory and takes the pages |
//! | switch-over | stops the guest, sends the missing bitmap and the vCPU states | starts the guest |
//! | post-copy | answers requests and pushes the rest | requests the pages that its vCPUs touch |
//! | completion | compares counts | compares counts |
//!
//! **Neighbours.** Below: `machine` (the VM) and `userfault` (page states). Above: `harness`,
//! `bench` and `cli`. This crate must not know which engine runs the guest, nor what the guest does.

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
pub use latency::prefer_short_slices;
pub use link::URGENT_SPIN_MICROS;
pub use phase::{Observer, Phase, Unobserved};
pub use report::{DestinationReport, FaultRecord, PageCounts, PhaseStart, SourceReport};
pub use source::{RunningVm, SourceConfig, SourceFailure, SourceVm, migrate};

/// The version of the vCPU state encoding, which both sides must share. Each engine's states carry
/// a finer version too.
pub const STATE_FORMAT: u16 = 1;
