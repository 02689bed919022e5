#![expect(unsafe_code, reason = "makes memory of files that others may map")]
//! Guest memory that the VMM has made itself: regions of memfds, at any guest addresses.
//!
//! **Guarantee.** Memory that was adopted is as good as our own. Files that could shrink below the
//! mappings are refused, and so is memory that a migration could not serve.
//!
//! **Mechanism.** The files are mapped twice, as our own memfd is (`ram`). Each mapping has all
//! regions one behind the other. So a page's address stays one addition, and no code above knows
//! the files. The VMM keeps its own mappings of the same memfds: they show the same bytes. If its
//! memory slots point at them, it names them ([`AdoptedRegion::mapped_at`]), and they take the
//! place of the first of our mappings.
//!
//! **Neighbours.** `ram` has the memory, `layout` the regions.

use crate::ram::RamFile;
use crate::{Backing, GuestRam, LayoutError, MachineError, RamLayout};
use pageferry_addr::{Gpa, Hva, PAGE_SIZE};
use rustix::fs::SealFlags;
use std::os::fd::OwnedFd;

/// `include/uapi/linux/magic.h`.
const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// A region of guest memory that a VMM has made: a part of a memfd.
#[derive(Debug)]
pub struct AdoptedRegion {
    start: Gpa,
    bytes: u64,
    fd: OwnedFd,
    offset: u64,
    mapped: Option<Hva>,
    keeps_size: bool,
}

impl AdoptedRegion {
    /// The region of `bytes` bytes at a guest-physical address. They begin at `offset` in the
    /// memfd. Regions may be different parts of one memfd: clone its descriptor then.
    #[must_use]
    pub const fn new(start: Gpa, bytes: u64, fd: OwnedFd, offset: u64) -> Self {
        Self {
            start,
            bytes,
            fd,
            offset,
            mapped: None,
            keeps_size: false,
        }
    }

    /// The same region, whose memfd keeps its size by the caller's word. [`GuestRam::adopt`] then
    /// takes a memfd that cannot be sealed, such as one of another VMM. If that VMM shrinks it,
    /// this process ends by SIGBUS.
    #[must_use]
    pub fn keeps_size(self) -> Self {
        Self {
            keeps_size: true,
            ..self
        }
    }

    /// The same region, which the VMM has mapped at `hva` for its guest. So the VMM's memory slots
    /// point there, and [`KvmFaults`](crate::kvm::KvmFaults) delivers the faults of that mapping.
    #[must_use]
    pub fn mapped_at(self, hva: Hva) -> Self {
        Self {
            mapped: Some(hva),
            ..self
        }
    }
}

#[cfg(feature = "vm-memory")]
impl AdoptedRegion {
    /// The regions of a guest memory of rust-vmm, for [`GuestRam::adopt`]: `vm-memory`'s
    /// `GuestMemoryMmap`, or a snapshot of the memory slots of `pageferry-vm-memory`.
    ///
    /// # Errors
    /// [`MachineError::Adopt`] if a region has no file. When a descriptor cannot be cloned.
    pub fn of<M: vm_memory::GuestMemoryBackend>(memory: &M) -> Result<Vec<Self>, MachineError> {
        use vm_memory::GuestMemoryRegion as _;
        let region = |region: &M::R| {
            let start = Gpa(region.start_addr().0);
            let place = region.file_offset().ok_or_else(|| {
                let why = "it has no file: create it with the FileOffset of a memfd";
                MachineError::Adopt(format!("the region at {start}: {why}"))
            })?;
            let fd = place
                .file()
                .try_clone()
                .map_err(|e| MachineError::os("cannot clone a memfd for guest memory", e))?;
            Ok(Self::new(start, region.len(), fd.into(), place.start()))
        };
        memory.iter().map(region).collect()
    }
}

impl GuestRam {
    /// Memory of memfds that the VMM has made, with their present bytes. The regions ascend. Each
    /// memfd is sealed against shrinking, if it is not yet. A migration moves the file positions of
    /// the memfds.
    ///
    /// The memfds are all of shared memory, or all of one pool of huge pages (`MFD_HUGETLB`).
    ///
    /// ```
    /// use pageferry_addr::{Gpa, RamPage};
    /// use pageferry_machine::{AdoptedRegion, GuestRam};
    /// use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    ///
    /// let fd = memfd_create("vmm", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    /// ftruncate(&fd, 1 << 20)?;
    /// rustix::io::pwrite(&fd, b"kernel", 512 << 10)?;
    /// let low = AdoptedRegion::new(Gpa(0), 512 << 10, fd.try_clone()?, 0);
    /// let high = AdoptedRegion::new(Gpa(1 << 32), 512 << 10, fd, 512 << 10);
    /// // SAFETY: nobody else writes the memfd.
    /// let ram = unsafe { GuestRam::adopt(vec![low, high]) }?;
    /// let mut bytes = [0; 6];
    /// ram.try_read(Gpa(1 << 32), &mut bytes)?;
    /// assert_eq!(&bytes, b"kernel");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`RamLayout::new`]. [`MachineError::Adopt`] if a descriptor is no memfd, the memfds are
    /// of several kinds, one is too small or cannot be sealed, an offset is no multiple of its
    /// page, or two regions have bytes of a memfd in common. The same for an address of
    /// [`AdoptedRegion::mapped_at`] that is no multiple of the page, that lies in another region's
    /// mapping, or that not all regions have. When the host has no room for the mappings. Memfds
    /// may be sealed then.
    ///
    /// # Safety
    /// From now on, only two kinds of code write these bytes, by whatever mapping or descriptor:
    /// the calls of this crate, and the vCPUs of this machine's [`Vcpus`](crate::Vcpus). Such a
    /// vCPU writes none while it is paused, and touches none of a page whose bit in the missing
    /// bitmap is set, or waits for it as vCPUs of this crate's engines do. Nobody else reads such a
    /// page either: a read would fill the memfd's hole with zeros.
    ///
    /// At an address of [`AdoptedRegion::mapped_at`] is a mapping of exactly the region's bytes of
    /// the memfd (`MAP_SHARED`, readable and writable). It stays there until the memory is dropped,
    /// and only vCPUs touch it.
    pub unsafe fn adopt(regions: Vec<AdoptedRegion>) -> Result<Self, MachineError> {
        let places: Vec<_> = regions.iter().map(|r| (r.start, r.bytes)).collect();
        let layout = RamLayout::new(&places)?;
        let mut backing = None;
        let mut files = Vec::with_capacity(regions.len());
        check_mappings(&regions)?;
        for region in &regions {
            let (kind, file) = check(region)?;
            let other = regions.iter().zip(&files).find(|(other, before)| {
                **before == file
                    && other.offset < region.offset + region.bytes
                    && region.offset < other.offset + other.bytes
            });
            if let Some((other, _)) = other {
                return Err(overlap(region, other));
            }
            files.push(file);
            if *backing.get_or_insert(kind) != kind {
                return Err(refused(
                    region,
                    "its memfd is of another kind than those before",
                ));
            }
        }
        let backing = backing.ok_or(LayoutError::Empty)?;
        backing.check_layout(&layout)?;
        let files = layout.regions().iter().zip(regions);
        let files = files.map(|(place, region)| RamFile {
            first: place.first,
            pages: place.pages,
            fd: region.fd,
            offset: region.offset,
            mapped: region.mapped,
        });
        let files = files.collect();
        Self::of_files(layout, backing, files)
    }
}

/// Checks that the VMM has mapped all regions or none, each at addresses of its own.
fn check_mappings(regions: &[AdoptedRegion]) -> Result<(), MachineError> {
    let mut before: Vec<(&AdoptedRegion, std::ops::Range<u64>)> = Vec::new();
    for region in regions {
        if region.mapped.is_some() != regions[0].mapped.is_some() {
            let why = "call `mapped_at` for all regions, or for none";
            return Err(refused(region, why));
        }
        let Some(Hva(start)) = region.mapped else {
            continue;
        };
        let end = start.checked_add(region.bytes);
        let Some(end) = end.filter(|_| start != 0) else {
            let why = format!("no mapping of {} bytes begins at {start:#x}", region.bytes);
            return Err(refused(region, why));
        };
        let other = before
            .iter()
            .find(|(_, at)| start < at.end && at.start < end);
        if let Some((other, at)) = other {
            let why = format!(
                "its mapping at {start:#x} is in part that of the region at {}, which is at {:#x}",
                other.start, at.start
            );
            return Err(refused(region, why));
        }
        before.push((region, start..end));
    }
    Ok(())
}

fn refused(region: &AdoptedRegion, why: impl std::fmt::Display) -> MachineError {
    MachineError::Adopt(format!("the region at {}: {why}", region.start))
}

/// The error for a region that has bytes of `other`. A write of one would be no write of the other
/// to the dirty log, and a migration would place such a page twice.
fn overlap(region: &AdoptedRegion, other: &AdoptedRegion) -> MachineError {
    let extent = |r: &AdoptedRegion| format!("{} to {}", r.offset, r.offset + r.bytes);
    let why = format!(
        "its bytes {} of the memfd are in part those of the region at {}, which has {}: each byte \
         belongs to one region",
        extent(region),
        other.start,
        extent(other)
    );
    refused(region, why)
}

/// Checks the memfd of a region and seals it. Returns its kind, and the device and inode that
/// distinguish it from other memfds. The region ends inside the memfd, and so below 2^63.
fn check(region: &AdoptedRegion) -> Result<(Backing, (u64, u64)), MachineError> {
    let os = |e| MachineError::os("cannot examine a memfd for guest memory", e);
    let system = rustix::fs::fstatfs(&region.fd).map_err(os)?;
    let huge = u64::try_from(system.f_bsize).unwrap_or_default();
    let backing = match (system.f_type as u64, huge) {
        (TMPFS_MAGIC, _) => Backing::Shmem,
        (HUGETLBFS_MAGIC, 0x20_0000) => Backing::Hugetlb2M,
        (HUGETLBFS_MAGIC, 0x4000_0000) => Backing::Hugetlb1G,
        (HUGETLBFS_MAGIC, other) => {
            let why = format!("its huge pages have {other} bytes, expected 2 MiB or 1 GiB");
            return Err(refused(region, why));
        }
        _ => {
            return Err(refused(
                region,
                "its descriptor is no memfd: use memfd_create(2)",
            ));
        }
    };
    let page = backing.page_size().bytes().max(PAGE_SIZE);
    if !region.offset.is_multiple_of(page) {
        let why = format!("its offset {} is no multiple of {page}", region.offset);
        return Err(refused(region, why));
    }
    if let Some(Hva(start)) = region.mapped
        && !start.is_multiple_of(page)
    {
        let why = format!("its mapping at {start:#x} begins at no multiple of {page}");
        return Err(refused(region, why));
    }
    let no_memfd = |_| refused(region, "its descriptor is no memfd: use memfd_create(2)");
    let seals = || rustix::fs::fcntl_get_seals(&region.fd).map_err(no_memfd);
    // Shrinking would end in SIGBUS. The seal comes before the look at the size, so that the size
    // stays large enough.
    if !seals()?.contains(SealFlags::SHRINK) {
        let _ = rustix::fs::fcntl_add_seals(&region.fd, SealFlags::SHRINK);
    }
    let seals = seals()?;
    if !seals.contains(SealFlags::SHRINK) && !region.keeps_size {
        let why = "its memfd can shrink: create it with MFD_ALLOW_SEALING, or add F_SEAL_SHRINK";
        return Err(refused(region, why));
    }
    if seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
        return Err(refused(region, "its memfd is sealed against writing"));
    }
    let stat = rustix::fs::fstat(&region.fd).map_err(os)?;
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    if region
        .offset
        .checked_add(region.bytes)
        .is_none_or(|end| end > size)
    {
        let why = format!(
            "its memfd has {size} bytes, expected {} from {}",
            region.bytes, region.offset
        );
        return Err(refused(region, why));
    }
    Ok((backing, (stat.st_dev, stat.st_ino)))
}
