//! All frames of the stream connection except Pages.

use super::error::in_range;
use super::{
    DrainCounts, ErrorMessage, FrameHeader, FrameType, HEADER_BYTES, MAX_BITMAP_WORDS, MAX_VCPUS,
    Pass, Setup, SetupProgress, SwitchOver, WireError,
};

/// A frame of the stream connection. Pages frames are not included, since their data is received
/// straight into memory ([`RunList`](super::RunList)).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// See [`FrameType::Setup`].
    Setup(Setup),
    /// See [`FrameType::SetupAck`].
    SetupAck,
    /// See [`FrameType::Error`].
    Error(ErrorMessage),
    /// See [`FrameType::Cancel`].
    Cancel,
    /// See [`FrameType::PassEnd`].
    PassEnd(Pass),
    /// See [`FrameType::PassAck`].
    PassAck(Pass),
    /// See [`FrameType::MissingBitmap`].
    MissingBitmap(MissingBitmap),
    /// See [`FrameType::VcpuState`].
    VcpuState(VcpuState),
    /// See [`FrameType::SwitchOver`].
    SwitchOver(SwitchOver),
    /// See [`FrameType::Running`].
    Running {
        /// The start time of the first vCPU, by the destination's `CLOCK_MONOTONIC`, in
        /// nanoseconds. It is informative, like [`SwitchOver::stopped_at_ns`].
        started_at_ns: u64,
    },
    /// See [`FrameType::RunningAck`].
    RunningAck,
    /// See [`FrameType::DrainEnd`].
    DrainEnd(DrainCounts),
    /// See [`FrameType::DrainAck`].
    DrainAck(DrainCounts),
    /// See [`FrameType::Complete`].
    Complete,
    /// See [`FrameType::SetupProgress`].
    SetupProgress(SetupProgress),
}

/// A piece of the bitmap of missing pages: bit `b` of word `w` is RAM page `64 * w + b`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingBitmap {
    /// The index of the first word.
    pub first_word: u64,
    /// The words, from 1 to [`MAX_BITMAP_WORDS`]. Bits behind the end of memory are zero.
    pub words: Vec<u64>,
}

/// One vCPU's state, in the format that [`Setup`] names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VcpuState {
    /// The vCPU, below [`MAX_VCPUS`].
    pub vcpu: u32,
    /// Its state, from 1 to [`MAX_VCPU_STATE_BYTES`](super::MAX_VCPU_STATE_BYTES) bytes. Opaque to
    /// this module.
    pub state: Vec<u8>,
}

impl Frame {
    /// The frame's type.
    #[must_use]
    pub const fn frame_type(&self) -> FrameType {
        match self {
            Self::Setup(_) => FrameType::Setup,
            Self::SetupAck => FrameType::SetupAck,
            Self::Error(_) => FrameType::Error,
            Self::Cancel => FrameType::Cancel,
            Self::PassEnd(_) => FrameType::PassEnd,
            Self::PassAck(_) => FrameType::PassAck,
            Self::MissingBitmap(_) => FrameType::MissingBitmap,
            Self::VcpuState(_) => FrameType::VcpuState,
            Self::SwitchOver(_) => FrameType::SwitchOver,
            Self::Running { .. } => FrameType::Running,
            Self::RunningAck => FrameType::RunningAck,
            Self::DrainEnd(_) => FrameType::DrainEnd,
            Self::DrainAck(_) => FrameType::DrainAck,
            Self::Complete => FrameType::Complete,
            Self::SetupProgress(_) => FrameType::SetupProgress,
        }
    }

    /// Encodes header and payload into `out`, with the checksum. Clears `out` first.
    ///
    /// # Errors
    /// [`WireError::TooLong`] or [`WireError::OutOfRange`] for a message that breaks its type's
    /// bounds, and the errors of [`Setup::check`]. These are bugs of the sender.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        out.clear();
        out.resize(HEADER_BYTES, 0);
        let (mut count, mut arg) = (0, 0);
        match self {
            Self::Setup(setup) => {
                setup.check()?;
                setup.encode_payload(out);
            }
            Self::Error(error) => {
                arg = error.code() as u64;
                out.extend_from_slice(error.message().as_bytes());
            }
            Self::PassEnd(pass) | Self::PassAck(pass) => (count, arg) = (pass.pass, pass.pages),
            Self::MissingBitmap(bitmap) => {
                (count, arg) = (bitmap.words.len() as u32, bitmap.first_word);
                out.extend(bitmap.words.iter().flat_map(|word| word.to_le_bytes()));
            }
            Self::VcpuState(vcpu) => {
                in_range("VcpuState", "vcpu", vcpu.vcpu.into(), 0, LAST_VCPU)?;
                arg = vcpu.vcpu.into();
                out.extend_from_slice(&vcpu.state);
            }
            Self::SwitchOver(switch_over) => switch_over.encode_payload(out),
            Self::Running { started_at_ns } => arg = *started_at_ns,
            Self::SetupProgress(progress) => {
                (count, arg) = (u32::from(progress.ready), progress.pages);
            }
            Self::DrainEnd(counts) | Self::DrainAck(counts) => counts.encode_payload(out),
            Self::SetupAck | Self::Cancel | Self::RunningAck | Self::Complete => {}
        }
        let frame_type = self.frame_type();
        let (min, max) = frame_type.payload_bounds();
        let len = (out.len() - HEADER_BYTES) as u64;
        if len > u64::from(max) {
            return Err(WireError::TooLong {
                what: frame_type.name(),
                len,
                max: max.into(),
            });
        }
        in_range(
            frame_type.name(),
            "payload_len",
            len,
            min.into(),
            max.into(),
        )?;
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
        let count_is = |expected: u64| {
            if u64::from(header.count) == expected {
                return Ok(());
            }
            Err(WireError::BadField {
                what,
                field: "count",
                value: header.count.into(),
            })
        };
        let unused = |field, value: u64| match value {
            0 => Ok(()),
            _ => Err(WireError::BadField { what, field, value }),
        };
        match header.frame_type {
            FrameType::PassEnd | FrameType::PassAck => {}
            FrameType::SetupProgress => in_range(what, "count", header.count.into(), 0, 1)?,
            FrameType::MissingBitmap => count_is(payload.len() as u64 / 8)?,
            _ => count_is(0)?,
        }
        match header.frame_type {
            FrameType::PassEnd
            | FrameType::PassAck
            | FrameType::MissingBitmap
            | FrameType::VcpuState
            | FrameType::Error
            | FrameType::SetupProgress
            | FrameType::Running => {}
            _ => unused("arg", header.arg)?,
        }
        let pass = || {
            in_range(what, "arg", header.arg, 0, memory_pages)?;
            Ok(Pass {
                pass: header.count,
                pages: header.arg,
            })
        };
        Ok(match header.frame_type {
            FrameType::Pages => panic!("`RunList::decode` decodes Pages frames"),
            FrameType::Setup => Self::Setup(Setup::decode_payload(payload)?),
            FrameType::SetupAck => Self::SetupAck,
            FrameType::Error => Self::Error(ErrorMessage::decode_payload(header.arg, payload)?),
            FrameType::Cancel => Self::Cancel,
            FrameType::PassEnd => Self::PassEnd(pass()?),
            FrameType::PassAck => Self::PassAck(pass()?),
            FrameType::MissingBitmap => {
                Self::MissingBitmap(decode_bitmap(header.arg, payload, memory_pages)?)
            }
            FrameType::VcpuState => {
                in_range(what, "vcpu", header.arg, 0, LAST_VCPU)?;
                Self::VcpuState(VcpuState {
                    vcpu: header.arg as u32,
                    state: payload.to_vec(),
                })
            }
            FrameType::SwitchOver => {
                Self::SwitchOver(SwitchOver::decode_payload(payload, memory_pages)?)
            }
            FrameType::Running => Self::Running {
                started_at_ns: header.arg,
            },
            FrameType::RunningAck => Self::RunningAck,
            FrameType::DrainEnd => Self::DrainEnd(DrainCounts::decode_payload(what, payload)?),
            FrameType::DrainAck => Self::DrainAck(DrainCounts::decode_payload(what, payload)?),
            FrameType::Complete => Self::Complete,
            FrameType::SetupProgress => {
                in_range(what, "arg", header.arg, 0, memory_pages)?;
                Self::SetupProgress(SetupProgress {
                    pages: header.arg,
                    ready: header.count == 1,
                })
            }
        })
    }
}

const LAST_VCPU: u64 = MAX_VCPUS as u64 - 1;

fn decode_bitmap(
    first_word: u64,
    payload: &[u8],
    memory_pages: u64,
) -> Result<MissingBitmap, WireError> {
    const WHAT: &str = "MissingBitmap";
    let (words, rest) = payload.as_chunks::<8>();
    if !rest.is_empty() {
        return Err(WireError::WrongLength {
            what: WHAT,
            len: payload.len() as u64,
            expected: 8 * words.len() as u64,
        });
    }
    let memory_words = memory_pages.div_ceil(64);
    let count = words.len() as u64;
    let max = memory_words.min(MAX_BITMAP_WORDS as u64);
    in_range(WHAT, "count", count, 1, max)?;
    in_range(WHAT, "first_word", first_word, 0, memory_words - count)?;
    let words: Vec<u64> = words.iter().map(|&word| u64::from_le_bytes(word)).collect();
    let used = memory_pages % 64;
    if first_word + count == memory_words && used != 0 {
        let last = words.last().copied().unwrap_or(0);
        if last >> used != 0 {
            return Err(WireError::BadField {
                what: WHAT,
                field: "words",
                value: last,
            });
        }
    }
    Ok(MissingBitmap { first_word, words })
}
