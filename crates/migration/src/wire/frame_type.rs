//! The frame types, with the sender, the channels and the payload bounds of each.

use core::fmt;

use super::{
    DESCRIPTOR_BYTES, MAX_DESCRIPTION_BYTES, MAX_DEVICE_STATE_BYTES, MAX_DEVICES, MAX_ERROR_BYTES,
    MAX_MISSING_BYTES, MAX_NAME_BYTES, MAX_PAGES_BYTES, MAX_REGIONS, MAX_VCPU_STATE_BYTES, Role,
    Side, WireError,
};

/// The type of a frame on a control or bulk channel. The numbers are those on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
#[non_exhaustive]
pub enum FrameType {
    /// Source: the description of the VM and the number of channels. The first frame of a session.
    Setup = 1,
    /// Destination: it has built such a VM, which is empty.
    SetupAck = 2,
    /// Either side: the sender gives up, with the reason.
    Error = 3,
    /// Either side: the sender's user cancelled the migration.
    Cancel = 4,
    /// Source: contents of pages.
    Pages = 5,
    /// Source: a pass over memory begins. Informative.
    Pass = 6,
    /// Either side: runs of pages that the destination does not have.
    Missing = 7,
    /// Source: one vCPU's state.
    VcpuState = 8,
    /// Source: it has sent all that the destination needs to run the guest.
    SwitchOver = 9,
    /// Destination: it has all that it needs to run the guest.
    Ready = 10,
    /// Source: the destination runs the guest from now on.
    Go = 11,
    /// Destination: the guest runs here. Informative.
    Running = 12,
    /// Source: every page is acknowledged.
    Drained = 13,
    /// Destination: every page is in place.
    DrainAck = 14,
    /// Source: it received DrainAck. The last frame of a session.
    Complete = 15,
    /// Destination: the amount of allocated memory. The last such frame says that the destination
    /// is ready.
    SetupProgress = 16,
    /// Destination: the number of frames of this channel whose pages are in place.
    Receipt = 17,
    /// Either side: the sender lives and has nothing else to say.
    Alive = 18,
    /// Source: what it has decided. The first frame of a generation after the first.
    Resume = 19,
    /// Destination: what it has reached. The answer to Resume.
    Resumed = 20,
    /// Destination: it has discarded its copy of the VM, which never ran.
    Discarded = 21,
    /// Source: it received Discarded.
    DiscardHeard = 22,
    /// Source: the destination must end its reader of this channel.
    CloseChannel = 23,
    /// Destination: the reader of this channel has ended.
    ChannelEnded = 24,
    /// Source: the destination must repeat its outstanding requests.
    Again = 25,
    /// Source: one device's state.
    DeviceState = 26,
}

impl FrameType {
    /// Every type, in the order of their numbers.
    pub const ALL: [Self; 26] = [
        Self::Setup,
        Self::SetupAck,
        Self::Error,
        Self::Cancel,
        Self::Pages,
        Self::Pass,
        Self::Missing,
        Self::VcpuState,
        Self::SwitchOver,
        Self::Ready,
        Self::Go,
        Self::Running,
        Self::Drained,
        Self::DrainAck,
        Self::Complete,
        Self::SetupProgress,
        Self::Receipt,
        Self::Alive,
        Self::Resume,
        Self::Resumed,
        Self::Discarded,
        Self::DiscardHeard,
        Self::CloseChannel,
        Self::ChannelEnded,
        Self::Again,
        Self::DeviceState,
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
            Self::Pass => "Pass",
            Self::Missing => "Missing",
            Self::VcpuState => "VcpuState",
            Self::SwitchOver => "SwitchOver",
            Self::Ready => "Ready",
            Self::Go => "Go",
            Self::Running => "Running",
            Self::Drained => "Drained",
            Self::DrainAck => "DrainAck",
            Self::Complete => "Complete",
            Self::SetupProgress => "SetupProgress",
            Self::Receipt => "Receipt",
            Self::Alive => "Alive",
            Self::Resume => "Resume",
            Self::Resumed => "Resumed",
            Self::Discarded => "Discarded",
            Self::DiscardHeard => "DiscardHeard",
            Self::CloseChannel => "CloseChannel",
            Self::ChannelEnded => "ChannelEnded",
            Self::Again => "Again",
            Self::DeviceState => "DeviceState",
        }
    }

    /// Whether `side` may send this type.
    #[must_use]
    pub const fn is_sent_by(self, side: Side) -> bool {
        match self {
            Self::Error | Self::Cancel | Self::Missing | Self::Alive => true,
            Self::SetupAck
            | Self::Ready
            | Self::Running
            | Self::DrainAck
            | Self::SetupProgress
            | Self::Receipt
            | Self::Resumed
            | Self::Discarded
            | Self::ChannelEnded => matches!(side, Side::Destination),
            Self::Setup
            | Self::Pages
            | Self::Pass
            | Self::VcpuState
            | Self::SwitchOver
            | Self::Go
            | Self::Drained
            | Self::Complete
            | Self::Resume
            | Self::DiscardHeard
            | Self::CloseChannel
            | Self::Again
            | Self::DeviceState => matches!(side, Side::Source),
        }
    }

    /// Whether this type may travel on a channel of this role. Urgent channels have no frames.
    #[must_use]
    pub const fn is_sent_on(self, role: Role) -> bool {
        match role {
            Role::Control => !matches!(self, Self::Pages | Self::Receipt),
            Role::Bulk => matches!(self, Self::Pages | Self::Receipt | Self::Alive),
            Role::Urgent | Role::Tunnel | Role::Share => false,
        }
    }

    /// Returns the smallest and the largest payload of this type, in bytes.
    #[must_use]
    pub const fn payload_bounds(self) -> (u32, u32) {
        match self {
            Self::Setup => (
                224 + 24,
                (224 + 24 * MAX_REGIONS + 68 * MAX_DEVICES + MAX_DESCRIPTION_BYTES) as u32,
            ),
            Self::Error | Self::Discarded => (0, MAX_ERROR_BYTES as u32),
            Self::Pages => (DESCRIPTOR_BYTES as u32, MAX_PAGES_BYTES as u32),
            Self::Missing => (2, MAX_MISSING_BYTES as u32),
            Self::VcpuState => (1, MAX_VCPU_STATE_BYTES as u32),
            Self::DeviceState => (1, (MAX_NAME_BYTES + MAX_DEVICE_STATE_BYTES) as u32),
            Self::SwitchOver => (24, 24),
            Self::ChannelEnded => (8, 8),
            Self::SetupAck
            | Self::Cancel
            | Self::Pass
            | Self::Ready
            | Self::Go
            | Self::Running
            | Self::Drained
            | Self::DrainAck
            | Self::Complete
            | Self::SetupProgress
            | Self::Receipt
            | Self::Alive
            | Self::Resume
            | Self::Resumed
            | Self::DiscardHeard
            | Self::CloseChannel
            | Self::Again => (0, 0),
        }
    }
}

impl fmt::Display for FrameType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
