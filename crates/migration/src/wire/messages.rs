//! The contents of small frames.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::in_range;
use super::{MAX_DEVICES, MAX_VCPUS, WireError};

/// A pass over memory in pre-copy. It is informative: no behaviour may depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// The number of the pass, counted from 1.
    pub pass: u32,
    /// The number of its pages when it begins, zero pages included.
    pub pages: u64,
}

/// One vCPU's state, in the format that [`Setup`](super::Setup) names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VcpuState {
    /// The vCPU, below [`MAX_VCPUS`].
    pub vcpu: u32,
    /// Its state, from 1 to [`MAX_VCPU_STATE_BYTES`](super::MAX_VCPU_STATE_BYTES) bytes. Opaque to
    /// this module.
    pub state: Vec<u8>,
}

/// The decision of the source, when it resumes a session. The numbers are those on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum SourceStage {
    /// It has sent Go.
    HandedOver = 1,
    /// Every page is acknowledged.
    Drained = 2,
    /// It has cancelled the migration.
    Cancelled = 3,
}

impl SourceStage {
    /// Every stage, in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::HandedOver, Self::Drained, Self::Cancelled];

    pub(super) fn from_number(found: u32) -> Result<Self, WireError> {
        Self::ALL
            .into_iter()
            .find(|&known| known as u32 == found)
            .ok_or(bad_stage("Resume", found))
    }
}

/// The stage of the destination, when a session is resumed. The numbers are those on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DestinationStage {
    /// It waits for Go.
    Ready = 1,
    /// The guest runs there.
    Running = 2,
    /// Every page is there.
    Complete = 3,
    /// It has discarded its copy.
    Discarded = 4,
}

impl DestinationStage {
    /// Every stage, in the order of their numbers.
    pub const ALL: [Self; 4] = [Self::Ready, Self::Running, Self::Complete, Self::Discarded];

    pub(super) fn from_number(found: u32) -> Result<Self, WireError> {
        Self::ALL
            .into_iter()
            .find(|&known| known as u32 == found)
            .ok_or(bad_stage("Resumed", found))
    }
}

fn bad_stage(what: &'static str, found: u32) -> WireError {
    WireError::BadField {
        what,
        field: "stage",
        value: found.into(),
    }
}

/// The end of the data that the destination needs to run the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwitchOver {
    /// The number of missing pages: those of all Missing frames.
    pub missing_pages: u64,
    /// The number of VcpuState frames: one for each vCPU of the VM.
    pub vcpus: u32,
    /// The number of DeviceState frames: one for each device that Setup announced.
    pub devices: u32,
    /// The stop time of the last vCPU, by the source's `CLOCK_MONOTONIC`, in nanoseconds. It has a
    /// meaning only if both sides run on one host. It is informative: no behaviour may depend on
    /// it.
    pub stopped_at_ns: u64,
    /// Whether the VM was paused by its owner. The destination then takes it over on `Go`, and
    /// leaves it paused.
    pub paused: bool,
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
    devices: U32,
}

const _: () = assert!(size_of::<SwitchOverLayout>() == 24);

impl SwitchOver {
    pub(super) fn encode_payload(&self, out: &mut Vec<u8>) {
        let layout = SwitchOverLayout {
            missing_pages: self.missing_pages.into(),
            stopped_at_ns: self.stopped_at_ns.into(),
            vcpus: self.vcpus.into(),
            devices: self.devices.into(),
        };
        out.extend_from_slice(layout.as_bytes());
    }

    pub(super) fn decode_payload(
        count: u32,
        payload: &[u8],
        memory_pages: u64,
    ) -> Result<Self, WireError> {
        const WHAT: &str = "SwitchOver";
        in_range(WHAT, "paused", count.into(), 0, 1)?;
        let layout: &SwitchOverLayout = exact(WHAT, payload)?;
        let (missing_pages, vcpus) = (layout.missing_pages.get(), layout.vcpus.get());
        let devices = layout.devices.get();
        in_range(WHAT, "missing_pages", missing_pages, 0, memory_pages)?;
        in_range(WHAT, "vcpus", vcpus.into(), 1, MAX_VCPUS.into())?;
        in_range(WHAT, "devices", devices.into(), 0, MAX_DEVICES as u64)?;
        Ok(Self {
            missing_pages,
            vcpus,
            devices,
            stopped_at_ns: layout.stopped_at_ns.get(),
            paused: count == 1,
        })
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
