//! The wire format: pure functions between messages and bytes.
//!
//! **Guarantee.** For any bytes of a peer, a decoder returns a message with every field checked, or
//! a [`WireError`] with the offending values. It never panics, never reads past its input, and
//! never allocates more than the bounds below allow. A decoded message equals the encoded one.
//!
//! **Mechanism.** Structs have a fixed little-endian layout (zerocopy). Lengths are checked against
//! the bounds of their type *before* anything is allocated. Reserved bytes must be zero. Checksums
//! are xxh3-64. In Pageferry's repository, docs/wire-format.md describes every byte with its
//! reason.
//!
//! **Neighbours.** [`channel`](crate::channel) moves the bytes. [`handshake`](crate::handshake)
//! uses [`Hello`] and [`HelloReply`]. This module must not do I/O, nor know sockets, guest memory
//! or machines.
//!
//! [`Hello`], [`HelloReply`], [`Credentials`], [`Welcome`] and a `path_check` of each side open
//! every channel. A message of a control or bulk channel is a [`FrameHeader`] with a payload. The
//! payload is that of a [`Frame`], or a list of page runs ([`RunList`]) with the pages' bytes. A
//! message of an urgent channel is an [`UrgentMessage`], with a page or without.

mod channel_id;
mod checksum;
mod device;
mod error_message;
mod frame;
mod frame_type;
mod header;
mod messages;
mod missing;
mod name;
mod pages;
mod setup;
mod text;
mod urgent;

pub use channel_id::ChannelId;
pub use checksum::FrameHasher;
pub use device::{DeviceEntry, DeviceState};
pub use error_message::{ErrorCode, ErrorMessage};
pub use frame::Frame;
pub use frame_type::FrameType;
pub use header::FrameHeader;
pub use messages::{DestinationStage, Pass, SetupProgress, SourceStage, SwitchOver, VcpuState};
pub use missing::MissingRuns;
pub use name::Name;
pub use pageferry_transport::wire::*;
pub use pages::{Run, RunKind, RunList, RunRefused};
pub(crate) use setup::check_channels;
pub use setup::{Kind, Region, Setup};
pub use text::Text;
pub use urgent::{
    UrgentKind, UrgentMessage, urgent_reply, urgent_reply_confirmed, urgent_reply_page,
    urgent_reply_zero,
};

/// The first four bytes of every frame, as a little-endian number: the letters `PGFR`.
pub const FRAME_MAGIC: u32 = u32::from_le_bytes(*b"PGFR");

/// The length of a frame's header, in bytes.
pub const HEADER_BYTES: usize = 32;
/// The length of a run's descriptor in a Pages frame, in bytes.
pub const DESCRIPTOR_BYTES: usize = 16;
/// The length of a message on an urgent channel, without the page that may follow, in bytes.
pub const URGENT_BYTES: usize = 16;

/// The most runs in a Pages frame.
pub const MAX_RUNS: usize = 128;
/// The most data pages in a Pages frame: 1 MiB.
pub const MAX_DATA_PAGES: usize = 256;
/// The most confirmed pages in a Pages frame. The receiver hashes their 2 MiB before its receipt.
pub const MAX_CONFIRMED_PAGES: usize = 512;
/// The most memory regions in a [`Setup`].
pub const MAX_REGIONS: usize = 64;
/// The longest guest description in a [`Setup`], in bytes.
pub const MAX_DESCRIPTION_BYTES: usize = 64 << 10;
/// The longest text in an Error or Discarded frame, in bytes of UTF-8.
pub const MAX_ERROR_BYTES: usize = 1024;
/// The most runs in a Missing frame.
pub const MAX_MISSING_RUNS: usize = 65536;
/// The longest payload of a Missing frame, in bytes: 512 KiB.
pub const MAX_MISSING_BYTES: usize = 512 << 10;
/// The longest state of one vCPU, in bytes.
pub const MAX_VCPU_STATE_BYTES: usize = 64 << 10;
/// The most devices in a [`Setup`].
pub const MAX_DEVICES: usize = 1024;
/// The longest [`Name`] in bytes.
pub const MAX_NAME_BYTES: usize = 64;
/// The longest state of one device, in bytes: 16 MiB.
pub const MAX_DEVICE_STATE_BYTES: usize = 16 << 20;
/// The longest payloads of all DeviceState frames of a session together, in bytes: 64 MiB.
pub const MAX_DEVICE_STATES_BYTES: usize = 64 << 20;
/// The most bulk channels of a session, and the most urgent channels.
pub const MAX_CHANNELS: u16 = 16;
/// The most vCPUs of a VM.
pub const MAX_VCPUS: u32 = 4096;
/// The largest memory of a VM, in bytes: 64 TiB.
pub const MAX_MEMORY_BYTES: u64 = 1 << 46;
/// The longest payload of a Pages frame, in bytes: 1 MiB of pages and their descriptors.
pub const MAX_PAGES_BYTES: usize = MAX_RUNS * DESCRIPTOR_BYTES + MAX_DATA_PAGES * PAGE_BYTES;
