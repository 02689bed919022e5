//! The frame types of the stream connection, with the sender and the payload bounds of each.

use core::fmt;

use super::{
    DESCRIPTOR_BYTES, MAX_BITMAP_WORDS, MAX_DATA_PAGES, MAX_DESCRIPTION_BYTES, MAX_ERROR_BYTES,
    MAX_REGIONS, MAX_RUNS, MAX_VCPU_STATE_BYTES, PAGE_BYTES, WireError,
};

/// A side of the migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// The process that the VM leaves. It connects.
    Source,
    /// The process that the VM moves to. It listens.
    Destination,
}

impl Side {
    /// Returns the other side.
    #[must_use]
    pub const fn peer(self) -> Self {
        match self {
            Self::Source => Self::Destination,
            Self::Destination => Self::Source,
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Destination => "destination",
        })
    }
}

/// The type of a frame on the stream connection. The numbers are those on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum FrameType {
    /// Source: the description of the VM. The first frame of a migration.
    Setup = 1,
    /// Destination: it has built such a VM, which is empty.
    SetupAck = 2,
    /// Either side: the sender gives up, with the reason.
    Error = 3,
    /// Either side: the sender's user cancelled the migration.
    Cancel = 4,
    /// Source: contents of pages.
    Pages = 5,
    /// Source: a pre-copy pass is complete.
    PassEnd = 6,
    /// Destination: all pages of the pass are in place.
    PassAck = 7,
    /// Source: a piece of the bitmap of missing pages.
    MissingBitmap = 8,
    /// Source: one vCPU's state.
    VcpuState = 9,
    /// Source: the destination has everything that it needs, and may start the guest.
    SwitchOver = 10,
    /// Destination: the guest runs here.
    Running = 11,
    /// Source: it received Running, and will never resume the guest.
    RunningAck = 12,
    /// Source: it has sent every page, with the counts.
    DrainEnd = 13,
    /// Destination: it has received every page, with the counts.
    DrainAck = 14,
    /// Source: it received DrainAck. The last frame of a migration.
    Complete = 15,
    /// Destination: the amount of allocated memory. The last such frame says that the destination
    /// is ready.
    SetupProgress = 16,
}

impl FrameType {
    /// Every type, in the order of their numbers.
    pub const ALL: [Self; 16] = [
        Self::Setup,
        Self::SetupAck,
        Self::Error,
        Self::Cancel,
        Self::Pages,
        Self::PassEnd,
        Self::PassAck,
        Self::MissingBitmap,
        Self::VcpuState,
        Self::SwitchOver,
        Self::Running,
        Self::RunningAck,
        Self::DrainEnd,
        Self::DrainAck,
        Self::Complete,
        Self::SetupProgress,
    ];

    /// Returns the type's number on the wire.
    #[must_use]
    pub const fn number(self) -> u16 {
        self as u16
    }

    /// Returns the type with this number.
    ///
    /// # Errors
    /// [`WireError::UnknownType`] for a number that this version does not define.
    pub fn from_number(found: u16) -> Result<Self, WireError> {
        Self::ALL
            .into_iter()
            .find(|known| known.number() == found)
            .ok_or(WireError::UnknownType { found })
    }

    /// Returns its name in documents, errors and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Setup => "Setup",
            Self::SetupAck => "SetupAck",
            Self::Error => "Error",
            Self::Cancel => "Cancel",
            Self::Pages => "Pages",
            Self::PassEnd => "PassEnd",
            Self::PassAck => "PassAck",
            Self::MissingBitmap => "MissingBitmap",
            Self::VcpuState => "VcpuState",
            Self::SwitchOver => "SwitchOver",
            Self::Running => "Running",
            Self::RunningAck => "RunningAck",
            Self::DrainEnd => "DrainEnd",
            Self::DrainAck => "DrainAck",
            Self::Complete => "Complete",
            Self::SetupProgress => "SetupProgress",
        }
    }

    /// Whether `side` may send this type.
    #[must_use]
    pub const fn is_sent_by(self, side: Side) -> bool {
        match self {
            Self::Error | Self::Cancel => true,
            Self::SetupAck
            | Self::PassAck
            | Self::Running
            | Self::DrainAck
            | Self::SetupProgress => {
                matches!(side, Side::Destination)
            }
            Self::Setup
            | Self::Pages
            | Self::PassEnd
            | Self::MissingBitmap
            | Self::VcpuState
            | Self::SwitchOver
            | Self::RunningAck
            | Self::DrainEnd
            | Self::Complete => matches!(side, Side::Source),
        }
    }

    /// Returns the smallest and the largest payload of this type, in bytes.
    #[must_use]
    pub const fn payload_bounds(self) -> (u32, u32) {
        match self {
            Self::Setup => (
                32 + 24,
                (32 + 24 * MAX_REGIONS + MAX_DESCRIPTION_BYTES) as u32,
            ),
            Self::Error => (0, MAX_ERROR_BYTES as u32),
            Self::Pages => (
                DESCRIPTOR_BYTES as u32,
                (MAX_RUNS * DESCRIPTOR_BYTES + MAX_DATA_PAGES * PAGE_BYTES) as u32,
            ),
            Self::MissingBitmap => (8, 8 * MAX_BITMAP_WORDS as u32),
            Self::VcpuState => (1, MAX_VCPU_STATE_BYTES as u32),
            Self::SwitchOver => (24, 24),
            Self::DrainEnd | Self::DrainAck => (32, 32),
            Self::SetupAck
            | Self::Cancel
            | Self::PassEnd
            | Self::PassAck
            | Self::Running
            | Self::RunningAck
            | Self::Complete
            | Self::SetupProgress => (0, 0),
        }
    }
}

impl fmt::Display for FrameType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
