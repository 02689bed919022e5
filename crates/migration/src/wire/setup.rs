//! The description of the VM: the first frame of a migration.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::device::EntryLayout;
use super::name::NameLayout;
use super::{
    DeviceEntry, MAX_CHANNELS, MAX_DESCRIPTION_BYTES, MAX_DEVICES, MAX_MEMORY_BYTES, MAX_REGIONS,
    MAX_VCPUS, Name, PAGE_BYTES, WireError,
};
use super::{in_range, reserved_zero};
use pageferry_addr::Gfn;

const WHAT: &str = "Setup";

/// The kind of a machine: names that both ends of a migration must share. The implementer of a
/// machine chooses them, and this module compares nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kind {
    /// The engine that runs the guest.
    pub engine: Name,
    /// The guest's instruction set.
    pub isa: Name,
    /// The format of the states of vCPUs, with its version.
    pub state_format: Name,
}

/// A range of guest-physical address space that is backed by RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// The memslot's id.
    pub slot: u32,
    /// Its first guest frame.
    pub gfn: Gfn,
    /// Its length in base pages, at least 1.
    pub pages: u64,
}

/// The VM that the destination must build, and the channels of the session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setup {
    /// The number of bulk channels, from 1 to [`MAX_CHANNELS`].
    pub bulk_channels: u16,
    /// The number of urgent channels, from 1 to [`MAX_CHANNELS`].
    pub urgent_channels: u16,
    /// The kind of the machine. A migration does not change it.
    pub kind: Kind,
    /// The number of vCPUs, from 1 to [`MAX_VCPUS`].
    pub vcpus: u32,
    /// The size of RAM in bytes: whole pages, from one page to [`MAX_MEMORY_BYTES`].
    pub memory_bytes: u64,
    /// The regions of RAM in ascending order without overlap, from 1 to [`MAX_REGIONS`]. RAM pages
    /// are counted in this order. All regions together have exactly `memory_bytes`, and no two have
    /// the same slot id.
    pub regions: Vec<Region>,
    /// The devices whose states travel, at most [`MAX_DEVICES`].
    pub devices: Vec<DeviceEntry>,
    /// The description of the guest, at most [`MAX_DESCRIPTION_BYTES`]. It is opaque to this module
    /// and not trusted.
    pub description: Vec<u8>,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct SetupLayout {
    engine: NameLayout,
    isa: NameLayout,
    state_format: NameLayout,
    vcpus: U32,
    page_size: U32,
    memory_bytes: U64,
    region_count: U32,
    description_len: U32,
    device_count: U32,
    reserved: [u8; 4],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RegionLayout {
    slot: U32,
    reserved: [u8; 4],
    gfn: U64,
    pages: U64,
}

const _: () = assert!(size_of::<SetupLayout>() == 224 && size_of::<RegionLayout>() == 24);

/// Checks the numbers of a session's channels.
pub(crate) fn check_channels(bulk: u16, urgent: u16) -> Result<(), WireError> {
    for (field, channels) in [("bulk_channels", bulk), ("urgent_channels", urgent)] {
        in_range(WHAT, field, channels.into(), 1, MAX_CHANNELS.into())?;
    }
    Ok(())
}

impl Setup {
    /// Returns the VM's memory in base pages.
    #[must_use]
    pub const fn memory_pages(&self) -> u64 {
        self.memory_bytes / PAGE_BYTES as u64
    }

    /// Checks every rule of the fields' documentation.
    ///
    /// # Errors
    /// [`WireError::OutOfRange`], [`WireError::TooLong`] or [`WireError::BadField`], with the
    /// field.
    pub fn check(&self) -> Result<(), WireError> {
        const PAGE: u64 = PAGE_BYTES as u64;
        let bad = |field, value| WireError::BadField {
            what: WHAT,
            field,
            value,
        };
        check_channels(self.bulk_channels, self.urgent_channels)?;
        in_range(WHAT, "vcpus", self.vcpus.into(), 1, MAX_VCPUS.into())?;
        in_range(
            WHAT,
            "memory_bytes",
            self.memory_bytes,
            PAGE,
            MAX_MEMORY_BYTES,
        )?;
        if !self.memory_bytes.is_multiple_of(PAGE) {
            return Err(bad("memory_bytes", self.memory_bytes));
        }
        let lengths = [
            self.regions.len(),
            self.devices.len(),
            self.description.len(),
        ];
        check_lengths(lengths)?;
        let (mut next_gfn, mut pages) = (0, 0);
        for (index, region) in self.regions.iter().enumerate() {
            let left = self.memory_pages() - pages;
            in_range(WHAT, "region.pages", region.pages, 1, left)?;
            let last = Gfn::MAX.0 + 1 - region.pages;
            in_range(WHAT, "region.gfn", region.gfn.0, next_gfn, last)?;
            if self.regions[..index].iter().any(|r| r.slot == region.slot) {
                return Err(bad("region.slot", region.slot.into()));
            }
            next_gfn = region.gfn.0 + region.pages;
            pages += region.pages;
        }
        if pages != self.memory_pages() {
            return Err(bad("memory_bytes", self.memory_bytes));
        }
        Ok(())
    }

    pub(super) fn encode_payload(&self, out: &mut Vec<u8>) {
        let fixed = SetupLayout {
            engine: self.kind.engine.to_layout(),
            isa: self.kind.isa.to_layout(),
            state_format: self.kind.state_format.to_layout(),
            vcpus: self.vcpus.into(),
            page_size: (PAGE_BYTES as u32).into(),
            memory_bytes: self.memory_bytes.into(),
            region_count: (self.regions.len() as u32).into(),
            description_len: (self.description.len() as u32).into(),
            device_count: (self.devices.len() as u32).into(),
            reserved: [0; 4],
        };
        out.extend_from_slice(fixed.as_bytes());
        for region in &self.regions {
            let layout = RegionLayout {
                slot: region.slot.into(),
                reserved: [0; 4],
                gfn: region.gfn.0.into(),
                pages: region.pages.into(),
            };
            out.extend_from_slice(layout.as_bytes());
        }
        for device in &self.devices {
            out.extend_from_slice(device.to_layout().as_bytes());
        }
        out.extend_from_slice(&self.description);
    }

    /// Decodes the payload of a frame with these numbers of channels in its header.
    pub(super) fn decode_payload(
        bulk_channels: u32,
        urgent_channels: u64,
        payload: &[u8],
    ) -> Result<Self, WireError> {
        let max = MAX_CHANNELS.into();
        in_range(WHAT, "bulk_channels", bulk_channels.into(), 1, max)?;
        in_range(WHAT, "urgent_channels", urgent_channels, 1, max)?;
        let (fixed, rest) =
            SetupLayout::ref_from_prefix(payload).map_err(|_| WireError::WrongLength {
                what: WHAT,
                len: payload.len() as u64,
                expected: size_of::<SetupLayout>() as u64,
            })?;
        let name = |field, layout| Name::from_layout(WHAT, field, layout);
        let kind = Kind {
            engine: name("engine", &fixed.engine)?,
            isa: name("isa", &fixed.isa)?,
            state_format: name("state_format", &fixed.state_format)?,
        };
        reserved_zero(WHAT, "reserved", &fixed.reserved)?;
        if fixed.page_size != PAGE_BYTES as u32 {
            return Err(WireError::BadField {
                what: WHAT,
                field: "page_size",
                value: fixed.page_size.get().into(),
            });
        }
        let lengths = [
            fixed.region_count,
            fixed.device_count,
            fixed.description_len,
        ];
        let [regions, devices, description] = lengths.map(|len| len.get() as usize);
        check_lengths([regions, devices, description])?;
        let (regions, devices) = (
            size_of::<RegionLayout>() * regions,
            size_of::<EntryLayout>() * devices,
        );
        let expected = regions + devices + description;
        if rest.len() != expected {
            return Err(WireError::WrongLength {
                what: WHAT,
                len: payload.len() as u64,
                expected: (size_of::<SetupLayout>() + expected) as u64,
            });
        }
        let (table, rest) = rest.split_at(regions);
        let (entries, description) = rest.split_at(devices);
        let table =
            <[RegionLayout]>::ref_from_bytes(table).expect("whole entries of an unaligned layout");
        let entries =
            <[EntryLayout]>::ref_from_bytes(entries).expect("whole entries of an unaligned layout");
        let mut regions = Vec::with_capacity(table.len());
        for entry in table {
            reserved_zero(WHAT, "region.reserved", &entry.reserved)?;
            regions.push(Region {
                slot: entry.slot.get(),
                gfn: Gfn(entry.gfn.get()),
                pages: entry.pages.get(),
            });
        }
        let devices = entries
            .iter()
            .map(|entry| DeviceEntry::from_layout(WHAT, entry));
        let setup = Self {
            bulk_channels: bulk_channels as u16,
            urgent_channels: urgent_channels as u16,
            kind,
            vcpus: fixed.vcpus.get(),
            memory_bytes: fixed.memory_bytes.get(),
            regions,
            devices: devices.collect::<Result<_, _>>()?,
            description: description.to_vec(),
        };
        setup.check()?;
        Ok(setup)
    }
}

/// Checks the lengths of the regions, the devices and the description.
fn check_lengths([regions, devices, description]: [usize; 3]) -> Result<(), WireError> {
    for (what, len, max) in [
        ("Setup regions", regions, MAX_REGIONS),
        ("Setup devices", devices, MAX_DEVICES),
        ("Setup description", description, MAX_DESCRIPTION_BYTES),
    ] {
        if len > max {
            return Err(WireError::TooLong {
                what,
                len: len as u64,
                max: max as u64,
            });
        }
    }
    in_range(WHAT, "region_count", regions as u64, 1, MAX_REGIONS as u64)
}
