//! How does a running virtual machine move?
//!
//! **Guarantee.** A VM runs in one place at any time, and no byte of its memory is lost. No vCPU
//! sees a page before its right bytes are there. Until the source sends `Go`, any failure leaves
//! the guest running at the source. From then on a lost connection costs only waiting: the guest
//! runs on at the destination, and the missing pages follow over new connections.
//!
//! **Mechanism.** Source and destination are two processes. A *session* joins them, and
//! outlives its connections. A connection is a *channel*: one for control, one or more *bulk*
//! channels for pages in the background, and one or more *urgent* channels for pages that vCPUs
//! wait for. The ledger of the source knows which pages are unsent, in flight or acknowledged.
//! `wire` has the byte formats, the crate `transport` opens channels and moves bytes, and [`Phase`]
//! has the phases in their order.
//!
//! | phase | source | destination |
//! |---|---|---|
//! | set-up | offers the VM | builds such a machine and acknowledges |
//! | pre-copy | sends pages while the guest runs | allocates memory and takes the pages |
//! | switch-over | stops the guest and its devices, sends what they need to run, says `Go` | loads it, says `Ready`, runs the guest on `Go` |
//! | post-copy | answers requests and pushes the rest | requests the pages that its vCPUs touch |
//! | completion | knows that every page has a receipt | confirms it |
//!
//! **Neighbours.** Below: `machine` (the VM), `userfault` (page states) and `transport` (channels).
//! Above: `harness`, `bench` and `cli`. This crate must not know which engine runs the guest, nor
//! what the guest does.

mod clock;
mod control;
mod cpus;
mod destination;
#[doc(hidden)]
pub mod devices;
mod error;
mod file;
mod latency;
mod ledger;
mod limits;
mod orphan;
mod outbox;
mod phase;
mod protocol_error;
mod report;
mod saved;
#[doc(hidden)]
pub mod session;
mod settings;
mod source;
mod status;
mod sync;
mod vm;
#[doc(hidden)]
pub mod wire;

// Hidden modules are no interface: the tests, the benchmarks and the fuzz targets use them.
pub use clock::monotonic;
pub use cpus::{CpuList, CpuListError};
pub use destination::{
    Destination, DestinationConfig, DestinationFailure, DestinationVm, FAULT_SPIN, Incoming, Offer,
    Resolver, new_histogram,
};
pub use error::MigrationError;
pub use latency::prefer_short_slices;
pub use ledger::{ReceiptError, TakesBack};
pub use limits::{Limits, Silence};
pub use orphan::Orphan;
pub use pageferry_transport::{
    ChannelError, Connection, HandshakeError, Listener, OpenError, PlainPolicy, Stranger,
    StrangerError, Tls, TlsError, address, channel, handshake,
};
#[cfg(feature = "tls")]
pub use pageferry_transport::{Pem, TlsFiles, TlsPem};
pub use phase::{Observer, Phase, Unobserved};
pub use protocol_error::ProtocolError;
pub use report::{
    DestinationReport, DeviceFigures, FaultRecord, PageCounts, PassFigures, PhaseStart,
    PrefetchCounts, Protected, SourceReport, StallRow, StallStage, StallTimes,
};
pub use saved::{MAX_SAVED_BYTES, SavedVm, Stopped};
pub use settings::{Change, Settings, SettingsError, Switch};
pub use source::{
    Checked, Connect, Governor, Route, SourceConfig, SourceFailure, SourceSession, SourceVm,
    Tracking, URGENT_SPIN, check, go_on, migrate,
};
pub use status::SessionStatus;
pub use vm::RunningVm;
pub use wire::{
    ChannelId, ErrorCode, FrameType, Kind, MAX_DESCRIPTION_BYTES, Name, Role, Status, WireError,
};
