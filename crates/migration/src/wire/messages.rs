//! The small messages of fixed size.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::error::{in_range, reserved_zero};
use super::{MAX_VCPUS, WireError};

/// A pre-copy pass: PassEnd as the source sent it, PassAck as the destination received it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// The pass's number, counted from 0.
    pub pass: u32,
    /// How many pages it had, zero pages included.
    pub pages: u64,
}

/// Everything the destination needs to run the guest was sent before this.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwitchOver {
    /// How many pages are missing: the bits set in all MissingBitmap frames.
    pub missing_pages: u64,
    /// How many VcpuState frames were sent: the VM's vCPUs.
    pub vcpus: u32,
    /// When the last vCPU stopped, by the source's `CLOCK_MONOTONIC`, in nanoseconds. Means
    /// something only where both sides run on one host; informative, nothing may depend on it.
    pub stopped_at_ns: u64,
}

/// How much of the VM's memory the destination has allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SetupProgress {
    /// Pages whose memory is allocated.
    pub pages: u64,
    /// All of the memory that is to be allocated before the switch-over is: SwitchOver may be
    /// sent.
    pub ready: bool,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct SwitchOverBytes {
    missing_pages: U64,
    stopped_at_ns: U64,
    vcpus: U32,
    reserved: [u8; 4],
}

const _: () = assert!(size_of::<SwitchOverBytes>() == 24);

impl SwitchOver {
    pub(super) fn encode_payload(&self, out: &mut Vec<u8>) {
        let layout = SwitchOverBytes {
            missing_pages: self.missing_pages.into(),
            stopped_at_ns: self.stopped_at_ns.into(),
            vcpus: self.vcpus.into(),
            reserved: [0; 4],
        };
        out.extend_from_slice(layout.as_bytes());
    }

    pub(super) fn decode_payload(payload: &[u8], memory_pages: u64) -> Result<Self, WireError> {
        const WHAT: &str = "SwitchOver";
        let layout: &SwitchOverBytes = exact(WHAT, payload)?;
        reserved_zero(WHAT, "reserved", &layout.reserved)?;
        let (missing_pages, vcpus) = (layout.missing_pages.get(), layout.vcpus.get());
        in_range(WHAT, "missing_pages", missing_pages, 0, memory_pages)?;
        in_range(WHAT, "vcpus", vcpus.into(), 1, MAX_VCPUS.into())?;
        Ok(Self {
            missing_pages,
            vcpus,
            stopped_at_ns: layout.stopped_at_ns.get(),
        })
    }
}

/// How the pages travelled after switch-over: DrainEnd as the source sent them, DrainAck as the
/// destination received them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DrainCounts {
    /// Pages answered on the urgent connection, zero pages included.
    pub urgent: u64,
    /// Data pages pushed in the background.
    pub background: u64,
    /// Zero pages pushed in the background.
    pub zero: u64,
}

impl core::fmt::Display for DrainCounts {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self {
            urgent,
            background,
            zero,
        } = self;
        write!(
            f,
            "{urgent} urgent, {background} background and {zero} zero pages"
        )
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct DrainBytes {
    urgent: U64,
    background: U64,
    zero: U64,
    total: U64,
}

const _: () = assert!(size_of::<DrainBytes>() == 32);

impl DrainCounts {
    /// All of them together, or `None` where the sum exceeds 64 bits.
    #[must_use]
    pub const fn total(&self) -> Option<u64> {
        match self.urgent.checked_add(self.background) {
            Some(sum) => sum.checked_add(self.zero),
            None => None,
        }
    }

    pub(super) fn encode_payload(&self, out: &mut Vec<u8>) {
        let layout = DrainBytes {
            urgent: self.urgent.into(),
            background: self.background.into(),
            zero: self.zero.into(),
            total: self.total().unwrap_or(u64::MAX).into(),
        };
        out.extend_from_slice(layout.as_bytes());
    }

    pub(super) fn decode_payload(what: &'static str, payload: &[u8]) -> Result<Self, WireError> {
        let layout: &DrainBytes = exact(what, payload)?;
        let counts = Self {
            urgent: layout.urgent.get(),
            background: layout.background.get(),
            zero: layout.zero.get(),
        };
        if counts.total() != Some(layout.total.get()) {
            return Err(WireError::BadField {
                what,
                field: "total",
                value: layout.total.get(),
            });
        }
        Ok(counts)
    }
}

/// A payload as a layout of exactly its length.
pub(super) fn exact<'a, T>(what: &'static str, payload: &'a [u8]) -> Result<&'a T, WireError>
where
    T: FromBytes + KnownLayout + Immutable + Unaligned,
{
    T::ref_from_bytes(payload).map_err(|_| WireError::WrongLength {
        what,
        len: payload.len() as u64,
        expected: size_of::<T>() as u64,
    })
}
