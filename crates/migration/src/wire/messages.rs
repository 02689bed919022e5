//! The payloads of fixed size.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::error::{in_range, reserved_zero};
use super::{MAX_VCPUS, WireError};

/// The counts of a pre-copy pass. PassEnd has those of the source, PassAck those of the
/// destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// The number of the pass, counted from 1.
    pub pass: u32,
    /// The number of its pages, zero pages included.
    pub pages: u64,
}

/// The end of the data that the destination needs to run the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwitchOver {
    /// The number of missing pages: the bits set in all MissingBitmap frames.
    pub missing_pages: u64,
    /// The number of VcpuState frames: one for each vCPU of the VM.
    pub vcpus: u32,
    /// The stop time of the last vCPU, by the source's `CLOCK_MONOTONIC`, in nanoseconds. It has a
    /// meaning only if both sides run on one host. It is informative: no behaviour may depend on
    /// it.
    pub stopped_at_ns: u64,
}

/// The amount of memory that the destination has allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SetupProgress {
    /// The number of allocated pages.
    pub pages: u64,
    /// Whether the destination has allocated all memory that it needs. Then the source may send
    /// SwitchOver.
    pub ready: bool,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct SwitchOverLayout {
    missing_pages: U64,
    stopped_at_ns: U64,
    vcpus: U32,
    reserved: [u8; 4],
}

const _: () = assert!(size_of::<SwitchOverLayout>() == 24);

impl SwitchOver {
    pub(super) fn encode_payload(&self, out: &mut Vec<u8>) {
        let layout = SwitchOverLayout {
            missing_pages: self.missing_pages.into(),
            stopped_at_ns: self.stopped_at_ns.into(),
            vcpus: self.vcpus.into(),
            reserved: [0; 4],
        };
        out.extend_from_slice(layout.as_bytes());
    }

    pub(super) fn decode_payload(payload: &[u8], memory_pages: u64) -> Result<Self, WireError> {
        const WHAT: &str = "SwitchOver";
        let layout: &SwitchOverLayout = exact(WHAT, payload)?;
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

/// The pages of post-copy, by the way they were sent. DrainEnd has the counts of the source,
/// DrainAck those of the destination.
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
struct DrainCountsLayout {
    urgent: U64,
    background: U64,
    zero: U64,
    total: U64,
}

const _: () = assert!(size_of::<DrainCountsLayout>() == 32);

impl DrainCounts {
    /// Returns the sum, or `None` if it exceeds 64 bits.
    #[must_use]
    pub const fn total(&self) -> Option<u64> {
        match self.urgent.checked_add(self.background) {
            Some(sum) => sum.checked_add(self.zero),
            None => None,
        }
    }

    pub(super) fn encode_payload(&self, out: &mut Vec<u8>) {
        let layout = DrainCountsLayout {
            urgent: self.urgent.into(),
            background: self.background.into(),
            zero: self.zero.into(),
            total: self.total().unwrap_or(u64::MAX).into(),
        };
        out.extend_from_slice(layout.as_bytes());
    }

    pub(super) fn decode_payload(what: &'static str, payload: &[u8]) -> Result<Self, WireError> {
        let layout: &DrainCountsLayout = exact(what, payload)?;
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

/// Views a payload as a layout of exactly its length.
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
