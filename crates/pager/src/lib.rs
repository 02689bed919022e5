//! A page server: VMs that start from a snapshot before their memory is read.
//!
//! **Guarantee.** A page of a VM has the snapshot's contents until the VM changes it. It is zero
//! after the VM has given it back (a balloon). A page is never zero because something failed. The
//! server may be killed at any moment: the next one takes its VMs over, and they notice a pause.
//! Two servers never serve one VM.
//!
//! **Mechanism.** [`Pager`] has the restores of a process. Each waits at a socket of its own for
//! its VMM, which sends the layout of its memory and a userfaultfd ([`Handshake`]). One thread a
//! restore reads the userfaultfd and answers faults whose bytes are at hand. Others wait for a
//! [`Source`] in a pool, so a slow page delays none that is at hand. A directory has what
//! outlives the process: see `docs/pager-states.md`.
//!
//! [`Mount`] shows snapshots as files instead: VMs that map one share its clean pages.
//!
//! [`stores`] has snapshots of other hosts and in object stores.
//!
//! **Neighbours.** Below: `transport`, `hostfs`, `userfault`, `snapshot` and `addr`. Above: the
//! command line. This crate must not know machines, vCPUs or migrations.

mod answer;
mod background;
mod bits;
mod connect;
mod directory;
mod events;
mod fetch;
mod figures;
mod fingerprint;
mod handshake;
mod mount;
mod name;
mod options;
mod pager;
mod pool;
mod recording;
mod regions;
mod restore;
mod sample;
mod serve;
mod shared;
mod source;
mod status;
pub mod stores;
mod timeline;
mod vm;
mod vmm;

pub use bits::Bits;
pub use connect::connect;
pub use directory::DirectoryError;
pub use events::{Event, Happened};
pub use fingerprint::Fingerprint;
#[doc(hidden)]
pub use handshake::parse_regions;
pub use handshake::{Handshake, HandshakeError, MAX_HANDSHAKE_BYTES, MAX_REGIONS};
#[doc(hidden)]
pub use mount::parse_fuse;
pub use mount::{Mount, MountError, MountFile, MountFileStatus, MountSettings, MountStatus};
pub use name::{Name, NameError};
pub use options::{Background, Format, OnLoss, Restore};
pub use pageferry_hostfs::{ListenError, Owner};
pub use pager::{EndError, Keeper, Pager, RestoreError, Settings, StartError};
pub use recording::{Recording, RecordingError};
pub use regions::Region;
pub use shared::{Ring, Shared};
pub use source::open as open_source;
pub use source::{FileSource, PackedSource, Source, SourceError, Store, Stores, is_address};
pub use status::{Latency, Phase, Status, Survival, VmStatus};
pub use timeline::{Came, Timeline};

/// Runs the examples of the README.
#[cfg(all(doctest, feature = "peers"))]
#[doc = include_str!("../README.md")]
mod readme {}
