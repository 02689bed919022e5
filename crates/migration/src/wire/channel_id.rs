//! The name of a bulk or urgent channel in frames of the control channel.

use core::fmt;

use super::in_range;
use super::{ChannelKey, MAX_CHANNELS, Role, WireError};

/// One incarnation of a bulk or urgent channel, within the generation of the control channel that
/// names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ChannelId {
    /// [`Role::Bulk`] or [`Role::Urgent`]. The control channel is never named.
    pub role: Role,
    /// Its index among the channels of this role, below [`MAX_CHANNELS`].
    pub index: u16,
    /// The number of its connection in this generation, from 1.
    pub incarnation: u32,
}

impl ChannelId {
    /// Returns the channel's key in a generation.
    #[must_use]
    pub const fn key(self, generation: u32) -> ChannelKey {
        ChannelKey {
            role: self.role,
            index: self.index,
            generation,
            incarnation: self.incarnation,
        }
    }

    /// Returns the values of a header's `count` and `arg`.
    pub(super) fn to_header(self, what: &'static str) -> Result<(u32, u64), WireError> {
        let (count, index, incarnation) = (self.role as u32, self.index, self.incarnation);
        let arg = u64::from(index) | u64::from(incarnation) << 32;
        Self::from_header(what, count, arg)?;
        Ok((count, arg))
    }

    /// Decodes a header's `count` and `arg`.
    pub(super) fn from_header(what: &'static str, count: u32, arg: u64) -> Result<Self, WireError> {
        let role = [Role::Urgent, Role::Bulk]
            .into_iter()
            .find(|&role| role as u32 == count)
            .ok_or(WireError::BadField {
                what,
                field: "role",
                value: count.into(),
            })?;
        let (index, incarnation) = (arg as u32, (arg >> 32) as u32);
        let last = u64::from(MAX_CHANNELS) - 1;
        in_range(what, "index", index.into(), 0, last)?;
        in_range(what, "incarnation", incarnation.into(), 1, u32::MAX.into())?;
        Ok(Self {
            role,
            index: index as u16,
            incarnation,
        })
    }
}

impl fmt::Display for ChannelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            role,
            index,
            incarnation,
        } = self;
        write!(f, "{role} channel {index}, incarnation {incarnation}")
    }
}
