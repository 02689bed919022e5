//! All frames except Pages.

use zerocopy::little_endian::U64;

use super::in_range;
use super::messages::exact;
use super::{
    ChannelId, DestinationStage, DeviceState, ErrorMessage, FrameHeader, FrameType, HEADER_BYTES,
    MAX_VCPUS, MissingRuns, Pass, Setup, SetupProgress, SourceStage, SwitchOver, Text, VcpuState,
    WireError,
};

/// A frame of a control or bulk channel. Pages frames are not included, since their data is
/// received straight into memory ([`RunList`](super::RunList)).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// See [`FrameType::Setup`].
    Setup(Setup),
    /// See [`FrameType::SetupAck`].
    SetupAck {
        /// Whether the destination keeps the bytes that it has of missing pages. Then the source
        /// may confirm such pages ([`RunKind::Confirmed`](super::RunKind::Confirmed)).
        keeps: bool,
    },
    /// See [`FrameType::Error`].
    Error(ErrorMessage),
    /// See [`FrameType::Cancel`].
    Cancel,
    /// See [`FrameType::Pass`].
    Pass(Pass),
    /// See [`FrameType::Missing`].
    Missing(MissingRuns),
    /// See [`FrameType::VcpuState`].
    VcpuState(VcpuState),
    /// See [`FrameType::SwitchOver`].
    SwitchOver(SwitchOver),
    /// See [`FrameType::Ready`].
    Ready,
    /// See [`FrameType::Go`].
    Go,
    /// See [`FrameType::Running`].
    Running {
        /// The start time of the first vCPU, by the destination's `CLOCK_MONOTONIC`, in
        /// nanoseconds. It is informative, like [`SwitchOver::stopped_at_ns`].
        started_at_ns: u64,
    },
    /// See [`FrameType::Drained`].
    Drained {
        /// The missing pages at the switch-over.
        missing: u64,
    },
    /// See [`FrameType::DrainAck`].
    DrainAck {
        /// The missing pages at the switch-over, as the destination counted them.
        missing: u64,
    },
    /// See [`FrameType::Complete`].
    Complete,
    /// See [`FrameType::SetupProgress`].
    SetupProgress(SetupProgress),
    /// See [`FrameType::Receipt`].
    Receipt {
        /// The number of Pages frames of this channel whose pages are in place, from 1. They are
        /// the first ones that were sent on it.
        frames: u64,
    },
    /// See [`FrameType::Alive`].
    Alive,
    /// See [`FrameType::Resume`].
    Resume(SourceStage),
    /// See [`FrameType::Resumed`].
    Resumed {
        /// The stage of the destination.
        stage: DestinationStage,
        /// The number of missing pages: those of the Missing frames before this one.
        missing: u64,
    },
    /// See [`FrameType::Discarded`]. It has the reason.
    Discarded(Text),
    /// See [`FrameType::DiscardHeard`].
    DiscardHeard,
    /// See [`FrameType::CloseChannel`].
    CloseChannel(ChannelId),
    /// See [`FrameType::ChannelEnded`].
    ChannelEnded {
        /// The channel.
        channel: ChannelId,
        /// The number of messages of this channel whose pages are in place. They are the first ones
        /// that were sent on it.
        placed: u64,
    },
    /// See [`FrameType::Again`].
    Again,
    /// See [`FrameType::DeviceState`].
    DeviceState(DeviceState),
}

const LAST_VCPU: u64 = MAX_VCPUS as u64 - 1;

impl Frame {
    /// The frame's type.
    #[must_use]
    pub const fn frame_type(&self) -> FrameType {
        match self {
            Self::Setup(_) => FrameType::Setup,
            Self::SetupAck { .. } => FrameType::SetupAck,
            Self::Error(_) => FrameType::Error,
            Self::Cancel => FrameType::Cancel,
            Self::Pass(_) => FrameType::Pass,
            Self::Missing(_) => FrameType::Missing,
            Self::VcpuState(_) => FrameType::VcpuState,
            Self::SwitchOver(_) => FrameType::SwitchOver,
            Self::Ready => FrameType::Ready,
            Self::Go => FrameType::Go,
            Self::Running { .. } => FrameType::Running,
            Self::Drained { .. } => FrameType::Drained,
            Self::DrainAck { .. } => FrameType::DrainAck,
            Self::Complete => FrameType::Complete,
            Self::SetupProgress(_) => FrameType::SetupProgress,
            Self::Receipt { .. } => FrameType::Receipt,
            Self::Alive => FrameType::Alive,
            Self::Resume(_) => FrameType::Resume,
            Self::Resumed { .. } => FrameType::Resumed,
            Self::Discarded(_) => FrameType::Discarded,
            Self::DiscardHeard => FrameType::DiscardHeard,
            Self::CloseChannel(_) => FrameType::CloseChannel,
            Self::ChannelEnded { .. } => FrameType::ChannelEnded,
            Self::Again => FrameType::Again,
            Self::DeviceState(_) => FrameType::DeviceState,
        }
    }

    /// Encodes header and payload into `out`, with the checksum. Clears `out` first.
    ///
    /// # Errors
    /// [`WireError::TooLong`], [`WireError::OutOfRange`] or [`WireError::BadField`] for a message
    /// that breaks the documented ranges of its fields. These are bugs of the sender. Ranges that
    /// depend on the memory's size are left to the receiver.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        out.clear();
        out.resize(HEADER_BYTES, 0);
        let frame_type = self.frame_type();
        let what = frame_type.name();
        let (mut count, mut arg) = (0, 0);
        match self {
            Self::Setup(setup) => {
                setup.check()?;
                (count, arg) = (setup.bulk_channels.into(), setup.urgent_channels.into());
                setup.encode_payload(out);
            }
            Self::Error(error) => {
                arg = error.code() as u64;
                out.extend_from_slice(error.message().as_bytes());
            }
            Self::Pass(pass) => {
                in_range(what, "pass", pass.pass.into(), 1, u32::MAX.into())?;
                (count, arg) = (pass.pass, pass.pages);
            }
            Self::Missing(missing) => {
                missing.encode_payload(out)?;
                (count, arg) = (missing.runs.len() as u32, missing.base);
            }
            Self::VcpuState(vcpu) => {
                in_range(what, "vcpu", vcpu.vcpu.into(), 0, LAST_VCPU)?;
                arg = vcpu.vcpu.into();
                out.extend_from_slice(&vcpu.state);
            }
            Self::SwitchOver(switch_over) => {
                count = u32::from(switch_over.paused);
                switch_over.encode_payload(out);
            }
            Self::Running { started_at_ns } => arg = *started_at_ns,
            Self::Drained { missing } | Self::DrainAck { missing } => arg = *missing,
            Self::SetupAck { keeps } => count = u32::from(*keeps),
            Self::SetupProgress(progress) => {
                (count, arg) = (u32::from(progress.ready), progress.pages);
            }
            Self::Receipt { frames } => {
                in_range(what, "frames", *frames, 1, u64::MAX)?;
                arg = *frames;
            }
            Self::Resume(stage) => count = *stage as u32,
            Self::Resumed { stage, missing } => (count, arg) = (*stage as u32, *missing),
            Self::Discarded(reason) => out.extend_from_slice(reason.as_str().as_bytes()),
            Self::CloseChannel(channel) => (count, arg) = channel.to_header(what)?,
            Self::ChannelEnded { channel, placed } => {
                (count, arg) = channel.to_header(what)?;
                out.extend_from_slice(&placed.to_le_bytes());
            }
            Self::DeviceState(device) => {
                (count, arg) = (device.version, device.encode_payload(what, out)?);
            }
            Self::Cancel
            | Self::Ready
            | Self::Go
            | Self::Complete
            | Self::Alive
            | Self::DiscardHeard
            | Self::Again => {}
        }
        let (min, max) = frame_type.payload_bounds();
        let len = (out.len() - HEADER_BYTES) as u64;
        if len > u64::from(max) {
            let max = max.into();
            return Err(WireError::TooLong { what, len, max });
        }
        in_range(what, "payload_len", len, min.into(), max.into())?;
        let header = FrameHeader::unsealed(frame_type, len as u32, count, arg);
        out[..HEADER_BYTES].copy_from_slice(&header.to_bytes());
        let mut hasher = header.hasher();
        hasher.update(&out[HEADER_BYTES..]);
        hasher.seal(out);
        Ok(())
    }

    /// Decodes the frame of this header and payload, for a VM of `memory_pages` pages. This is 0
    /// before set-up: then every frame with page numbers is out of range.
    ///
    /// # Errors
    /// [`WireError::WrongLength`] if the payload is not as long as the header says,
    /// [`WireError::Checksum`], and the errors of the fields.
    ///
    /// # Panics
    /// If the header is that of a Pages frame. [`RunList::decode`](super::RunList::decode) decodes
    /// those.
    pub fn decode(
        header: &FrameHeader,
        payload: &[u8],
        memory_pages: u64,
    ) -> Result<Self, WireError> {
        let mut hasher = header.hasher();
        hasher.update(payload);
        hasher.verify()?;
        let what = header.frame_type.name();
        let FrameHeader { count, arg, .. } = *header;
        header.check_unused()?;
        let missing = || in_range(what, "missing", arg, 0, memory_pages).map(|()| arg);
        Ok(match header.frame_type {
            FrameType::Pages => panic!("`RunList::decode` decodes Pages frames"),
            FrameType::Setup => Self::Setup(Setup::decode_payload(count, arg, payload)?),
            FrameType::SetupAck => {
                in_range(what, "keeps", count.into(), 0, 1)?;
                Self::SetupAck { keeps: count == 1 }
            }
            FrameType::Error => Self::Error(ErrorMessage::decode_payload(arg, payload)?),
            FrameType::Cancel => Self::Cancel,
            FrameType::Pass => {
                in_range(what, "pass", count.into(), 1, u32::MAX.into())?;
                in_range(what, "pages", arg, 0, memory_pages)?;
                let (pass, pages) = (count, arg);
                Self::Pass(Pass { pass, pages })
            }
            FrameType::Missing => Self::Missing(MissingRuns::decode_payload(
                count,
                arg,
                payload,
                memory_pages,
            )?),
            FrameType::VcpuState => {
                in_range(what, "vcpu", arg, 0, LAST_VCPU)?;
                Self::VcpuState(VcpuState {
                    vcpu: arg as u32,
                    state: payload.to_vec(),
                })
            }
            FrameType::SwitchOver => {
                Self::SwitchOver(SwitchOver::decode_payload(count, payload, memory_pages)?)
            }
            FrameType::Ready => Self::Ready,
            FrameType::Go => Self::Go,
            FrameType::Running => Self::Running { started_at_ns: arg },
            FrameType::Drained => Self::Drained {
                missing: missing()?,
            },
            FrameType::DrainAck => Self::DrainAck {
                missing: missing()?,
            },
            FrameType::Complete => Self::Complete,
            FrameType::SetupProgress => {
                in_range(what, "ready", count.into(), 0, 1)?;
                in_range(what, "pages", arg, 0, memory_pages)?;
                let (pages, ready) = (arg, count == 1);
                Self::SetupProgress(SetupProgress { pages, ready })
            }
            FrameType::Receipt => {
                in_range(what, "frames", arg, 1, u64::MAX)?;
                Self::Receipt { frames: arg }
            }
            FrameType::Alive => Self::Alive,
            FrameType::Resume => Self::Resume(SourceStage::from_number(count)?),
            FrameType::Resumed => Self::Resumed {
                stage: DestinationStage::from_number(count)?,
                missing: missing()?,
            },
            FrameType::Discarded => Self::Discarded(Text::decode(what, "reason", payload)?),
            FrameType::DiscardHeard => Self::DiscardHeard,
            FrameType::CloseChannel => {
                Self::CloseChannel(ChannelId::from_header(what, count, arg)?)
            }
            FrameType::ChannelEnded => Self::ChannelEnded {
                channel: ChannelId::from_header(what, count, arg)?,
                placed: exact::<U64>(what, payload)?.get(),
            },
            FrameType::Again => Self::Again,
            FrameType::DeviceState => {
                Self::DeviceState(DeviceState::decode_payload(what, count, arg, payload)?)
            }
        })
    }
}
