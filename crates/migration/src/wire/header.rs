//! The header of a frame on a control or bulk channel.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::in_range;
use super::{FRAME_MAGIC, FrameHasher, FrameType, HEADER_BYTES, Role, Side, WireError};

/// The on-wire layout of a header.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct HeaderLayout {
    magic: U32,
    frame_type: U16,
    flags: U16,
    payload_len: U32,
    count: U32,
    arg: U64,
    checksum: U64,
}

const _: () = assert!(size_of::<HeaderLayout>() == HEADER_BYTES);

/// A frame's header, with the type and the length of its payload.
///
/// The type, direction, channel, flags and length of a decoded header are checked. Its other fields
/// can be trusted only after a checksum is verified. [`FrameHasher::verify`] verifies all fields.
/// For a Pages frame, [`RunList::decode`](super::RunList::decode) verifies the fields before `arg`
/// earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// The type of the frame.
    pub frame_type: FrameType,
    /// The payload's length in bytes, within [`FrameType::payload_bounds`].
    pub payload_len: u32,
    /// A small number whose meaning depends on the type.
    pub count: u32,
    /// A number whose meaning depends on the type.
    pub arg: u64,
    /// xxh3-64 over the header's first 24 bytes and the payload.
    pub checksum: u64,
}

impl FrameHeader {
    /// Returns a header whose checksum is zero. [`FrameHasher::seal`] fills it in.
    #[must_use]
    pub const fn unsealed(frame_type: FrameType, payload_len: u32, count: u32, arg: u64) -> Self {
        Self {
            frame_type,
            payload_len,
            count,
            arg,
            checksum: 0,
        }
    }

    /// Returns the header's bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        zerocopy::transmute!(HeaderLayout {
            magic: FRAME_MAGIC.into(),
            frame_type: self.frame_type.number().into(),
            flags: U16::ZERO,
            payload_len: self.payload_len.into(),
            count: self.count.into(),
            arg: self.arg.into(),
            checksum: self.checksum.into(),
        })
    }

    /// Decodes a header that side `from` sent on a channel of role `on`.
    ///
    /// # Errors
    /// [`WireError::FrameMagic`], [`WireError::UnknownType`], [`WireError::WrongDirection`],
    /// [`WireError::WrongChannel`], [`WireError::BadField`] for flags (none is defined),
    /// [`WireError::TooLong`] and [`WireError::OutOfRange`] for a payload longer or shorter than
    /// its type allows.
    pub fn decode(bytes: &[u8; HEADER_BYTES], from: Side, on: Role) -> Result<Self, WireError> {
        let layout: &HeaderLayout = zerocopy::transmute_ref!(bytes);
        if layout.magic != FRAME_MAGIC {
            return Err(WireError::FrameMagic {
                found: layout.magic.get(),
            });
        }
        let frame_type = FrameType::from_number(layout.frame_type.get())?;
        let what = frame_type.name();
        if !frame_type.is_sent_by(from) {
            return Err(WireError::WrongDirection {
                frame: frame_type.name(),
                from,
            });
        }
        if !frame_type.is_sent_on(on) {
            return Err(WireError::WrongChannel {
                frame: frame_type.name(),
                on,
            });
        }
        if layout.flags != 0 {
            return Err(WireError::BadField {
                what,
                field: "flags",
                value: layout.flags.get().into(),
            });
        }
        let (min, max) = frame_type.payload_bounds();
        let len = layout.payload_len.get();
        if len > max {
            return Err(WireError::TooLong {
                what,
                len: len.into(),
                max: max.into(),
            });
        }
        in_range(what, "payload_len", len.into(), min.into(), max.into())?;
        Ok(Self {
            frame_type,
            payload_len: len,
            count: layout.count.get(),
            arg: layout.arg.get(),
            checksum: layout.checksum.get(),
        })
    }

    /// Refuses a `count` or an `arg` that is not zero, where the type says nothing about it.
    pub(super) fn check_unused(&self) -> Result<(), WireError> {
        let (count_used, arg_used) = match self.frame_type {
            FrameType::Setup
            | FrameType::Pages
            | FrameType::Pass
            | FrameType::Missing
            | FrameType::SetupProgress
            | FrameType::Resumed
            | FrameType::CloseChannel
            | FrameType::ChannelEnded
            | FrameType::DeviceState => (true, true),
            FrameType::SetupAck | FrameType::Resume | FrameType::SwitchOver => (true, false),
            FrameType::Error
            | FrameType::VcpuState
            | FrameType::Running
            | FrameType::Drained
            | FrameType::DrainAck
            | FrameType::Receipt => (false, true),
            FrameType::Cancel
            | FrameType::Ready
            | FrameType::Go
            | FrameType::Complete
            | FrameType::Alive
            | FrameType::Discarded
            | FrameType::DiscardHeard
            | FrameType::Again => (false, false),
        };
        let what = self.frame_type.name();
        for (used, field, value) in [
            (count_used, "count", self.count.into()),
            (arg_used, "arg", self.arg),
        ] {
            if !used && value != 0 {
                return Err(WireError::BadField { what, field, value });
            }
        }
        Ok(())
    }

    /// Returns a hasher for this frame, ready for the payload.
    #[must_use]
    pub fn hasher(&self) -> FrameHasher {
        FrameHasher::new(self)
    }
}
