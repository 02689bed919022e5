//! The names of a session and of its channels.

use core::fmt;

/// The identity of one migration: random, and the same on all of its channels.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId(pub [u8; 16]);

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "session {self}")
    }
}

/// The role of a channel. The numbers are those on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Role {
    /// Carries the frames that steer the migration. A session has one such channel.
    Control = 0,
    /// Carries requests for single pages, and their answers.
    Urgent = 1,
    /// Carries frames of pages.
    Bulk = 2,
    /// Carries streams of another program, not a VM of ours.
    Tunnel = 3,
    /// Carries requests for parts of shared files, and their answers.
    Share = 4,
}

impl Role {
    /// Every role, in the order of their numbers.
    pub const ALL: [Self; 5] = [
        Self::Control,
        Self::Urgent,
        Self::Bulk,
        Self::Tunnel,
        Self::Share,
    ];

    /// Returns the role of this number, or `None` if there is none.
    #[must_use]
    pub fn of_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|&role| role as u8 == number)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Control => "control",
            Self::Urgent => "urgent",
            Self::Bulk => "bulk",
            Self::Tunnel => "tunnel",
            Self::Share => "share",
        })
    }
}

/// The place of a channel in its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ChannelKey {
    /// The role of the channel.
    pub role: Role,
    /// Its number among the channels of this role, from 0. The control channel has number 0.
    pub index: u16,
    /// The number of the control channel with which it opens, from 1.
    pub generation: u32,
    /// The number of its connections in this generation, from 1.
    pub incarnation: u32,
}

impl ChannelKey {
    /// Returns the key of the control channel of `generation`.
    #[must_use]
    pub const fn control(generation: u32) -> Self {
        Self {
            role: Role::Control,
            index: 0,
            generation,
            incarnation: 1,
        }
    }

    /// Whether this channel opens its session: it is the first control channel, the first
    /// connection of the first channel of a tunnel, or a connection to shared files.
    #[must_use]
    pub const fn opens_session(&self) -> bool {
        match self.role {
            Role::Control => self.generation == 1,
            Role::Tunnel => self.index == 0 && self.generation == 1 && self.incarnation == 1,
            // Each connection is a session of its own.
            Role::Share => true,
            Role::Urgent | Role::Bulk => false,
        }
    }
}

impl fmt::Display for ChannelKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            role,
            index,
            generation,
            incarnation,
        } = self;
        write!(f, "{role} channel {index} ({generation}.{incarnation})")
    }
}

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
