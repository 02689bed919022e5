//! The double's guest memory: mappings, and all accesses to them.
//!
//! **Guarantee.** Regions lie at addresses that are multiples of 2 MiB, with holes between them.
//! Each lies below the one before it, as the kernel gives addresses. Their pages are counted
//! through, without holes, as in the memory file.
//!
//! **Mechanism.** One reserved range has room for all regions. Each region is mapped over a part of
//! it. Words are atomics, so threads may race.
#![expect(
    unsafe_code,
    reason = "maps memory, touches it like a guest, and registers it"
)]

use super::Done;
use super::contents::{PAGE_BYTES, WORDS, Words};
use pageferry_addr::Hva;
use pageferry_userfault::uffd::{RegisterMode, Userfaultfd};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};
use serde::{Deserialize, Serialize};
use std::ffi::c_void;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicU64, Ordering};

/// The alignment of regions, and the size of a huge page: 2 MiB.
const ALIGN: u64 = 2 << 20;

/// A region of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// The address of its first byte in the double's process.
    pub base: u64,
    /// Its size in bytes.
    pub size: u64,
    /// The place of its first byte in the memory file, in bytes.
    pub offset: u64,
}

/// The memory behind the regions.
#[derive(Debug)]
pub(crate) enum Kind {
    /// Private anonymous memory, in pages of 4 KiB or of 2 MiB of a pool.
    Anonymous { huge: bool },
    /// A private mapping of the memory file.
    File(File),
    /// Shared mappings of memfds, one for each region.
    Shared(Vec<Ram>),
}

/// What is known of a region of shared memory.
#[derive(Debug)]
pub(crate) struct Ram {
    pub(crate) slot: u32,
    pub(crate) gpa: u64,
    pub(crate) size: u64,
    /// The place of its first byte in the memfd.
    pub(crate) offset: u64,
    pub(crate) fd: OwnedFd,
}

#[derive(Debug)]
pub(crate) struct Memory {
    regions: Vec<Region>,
    kind: Kind,
}

fn pointer(address: u64) -> *mut c_void {
    with_exposed_provenance_mut(address as usize)
}

impl Memory {
    /// Maps regions of these sizes, in bytes, for the life of the process.
    pub(crate) fn map(sizes: &[u64], kind: Kind) -> Result<Self, Errno> {
        let room = |size: &u64| size.next_multiple_of(ALIGN) + ALIGN;
        let used = sizes.iter().map(room).sum::<u64>();
        let reserved = (used + ALIGN) as usize;
        // SAFETY: the kernel chooses an unused address.
        let start = unsafe {
            mmap_anonymous(
                null_mut(),
                reserved,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        let mut base = (start.expose_provenance() as u64).next_multiple_of(ALIGN) + used;
        let (mut regions, mut offset) = (Vec::new(), 0);
        for size in sizes {
            base -= room(size);
            let region = Region {
                base,
                size: *size,
                offset,
            };
            map_region(region, &kind, regions.len())?;
            regions.push(region);
            offset += size;
        }
        Ok(Self { regions, kind })
    }

    pub(crate) fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The regions of shared memory.
    pub(crate) fn rams(&self) -> &[Ram] {
        match &self.kind {
            Kind::Shared(rams) => rams,
            _ => &[],
        }
    }

    /// The number of pages of 4 KiB.
    pub(crate) fn pages(&self) -> u64 {
        self.regions.iter().map(|region| region.size).sum::<u64>() / PAGE_BYTES
    }

    /// The number of pages of 4 KiB in a page of the mapping.
    pub(crate) fn unit(&self) -> u64 {
        match self.kind {
            Kind::Anonymous { huge: true } => ALIGN / PAGE_BYTES,
            _ => 1,
        }
    }

    /// Registers all regions.
    pub(crate) fn register(&self, uffd: &Userfaultfd, mode: RegisterMode) -> Done {
        for region in &self.regions {
            // SAFETY: only words and system calls access the mapping, and it is never unmapped. No
            // thread holds a lock that a handler needs: the handler is another process, or a thread
            // that touches none of it.
            unsafe { uffd.register(Hva(region.base), region.size, mode) }?;
        }
        Ok(())
    }

    /// The region that has `page`, and the page's address.
    fn find(&self, page: u64) -> (Region, u64) {
        let offset = page * PAGE_BYTES;
        let has = |region: &&Region| (region.offset..region.offset + region.size).contains(&offset);
        let region = *self.regions.iter().find(has).expect("a page of the memory");
        (region, region.base + (offset - region.offset))
    }

    /// The page at an address.
    pub(crate) fn page_at(&self, at: Hva) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let inside =
                at.0.checked_sub(region.base)
                    .filter(|at| *at < region.size)?;
            Some((region.offset + inside) / PAGE_BYTES)
        })
    }

    /// The guest-physical address of a page of shared memory, and its address here.
    pub(crate) fn place(&self, page: u64) -> (u64, Hva) {
        let (region, at) = self.find(page);
        let index = self.regions.iter().position(|other| *other == region);
        let gpa = self.rams()[index.expect("a region")].gpa;
        (gpa + (at - region.base), Hva(at))
    }

    /// The words of a page. Every access to them may sleep until a page server has placed the page.
    pub(crate) fn words(&self, page: u64) -> &[AtomicU64; WORDS] {
        let start = pointer(self.find(page).1).cast::<[AtomicU64; WORDS]>();
        // SAFETY: 1. the page lies in a mapping that is never unmapped. 2. The only accesses that
        // are not atomic are those of the kernel.
        unsafe { &*start }
    }

    pub(crate) fn load(&self, page: u64) -> Words {
        let words = self.words(page);
        std::array::from_fn(|word| words[word].load(Ordering::Relaxed))
    }

    /// Lets the kernel copy a page to a pipe. No thread may write the page meanwhile.
    pub(crate) fn send(&self, page: u64, pipe: impl AsFd) -> Result<usize, Errno> {
        let start = pointer(self.find(page).1).cast::<u8>();
        // SAFETY: the page lies in a mapping that is never unmapped, and nobody writes it.
        let bytes = unsafe { std::slice::from_raw_parts(start, PAGE_BYTES as usize) };
        rustix::io::write(pipe, bytes)
    }

    /// Lets the kernel write all regions to the memory file, each at once if it can. No thread may
    /// write them meanwhile. Only what is resident, if `resident`: that cannot be told in a jail.
    pub(crate) fn write_to(&self, file: &File, resident: bool) -> std::io::Result<()> {
        if resident && let Ok(pagemap) = File::open("/proc/self/pagemap") {
            for page in 0..self.pages() {
                let mut entry = [0; 8];
                let at = self.find(page).1 / PAGE_BYTES * 8;
                pagemap.read_exact_at(&mut entry, at).expect("an entry");
                if u64::from_ne_bytes(entry) >> 63 != 0 {
                    let words = super::contents::bytes(&self.load(page));
                    file.write_all_at(&words, page * PAGE_BYTES)?;
                }
            }
            return Ok(());
        }
        for region in &self.regions {
            let start = pointer(region.base).cast::<u8>();
            // SAFETY: the region is a mapping that is never unmapped, and nobody writes it.
            let bytes = unsafe { std::slice::from_raw_parts(start, region.size as usize) };
            file.write_all_at(bytes, region.offset)?;
        }
        Ok(())
    }

    /// Lets the kernel fill the first `len` bytes of a page from a pipe. No other thread may write
    /// the page meanwhile.
    pub(crate) fn receive(&self, page: u64, len: usize, pipe: impl AsFd) -> Result<usize, Errno> {
        assert!(len <= PAGE_BYTES as usize, "{len} bytes are not in a page");
        let start = pointer(self.find(page).1).cast::<u8>();
        // SAFETY: the page lies in a mapping that is never unmapped. Only the kernel uses the
        // slice.
        let bytes = unsafe { std::slice::from_raw_parts_mut(start, len) };
        rustix::io::read(pipe, bytes)
    }

    /// The end of the longest run from `page` that [`Memory::remove`] takes, at most `most` units.
    pub(crate) fn run_end(&self, page: u64, most: u64) -> u64 {
        let region = self.find(page).0;
        let end = (region.offset + region.size) / PAGE_BYTES;
        end.min(page.saturating_add(most.saturating_mul(self.unit())))
    }

    /// Gives the pages `first..end` back, as Firecracker's balloon does. They lie in one region.
    pub(crate) fn remove(&self, first: u64, end: u64) -> Result<(), Errno> {
        let (region, start) = self.find(first);
        let len = (end - first) * PAGE_BYTES;
        assert!(
            start + len <= region.base + region.size,
            "pages {first}..{end} do not lie in one region"
        );
        // SAFETY: the range lies in one of our mappings. Accesses by words may race with this.
        unsafe {
            match &self.kind {
                Kind::Anonymous { .. } => {
                    madvise(pointer(start), len as usize, Advice::LinuxDontNeed)
                }
                Kind::Shared(_) => Err(Errno::OPNOTSUPP),
                // Dropping the pages of a private mapping would bring the file's contents back.
                Kind::File(_) => {
                    let region = Region {
                        base: start,
                        size: len,
                        offset: 0,
                    };
                    map_region(region, &Kind::Anonymous { huge: false }, 0)
                }
            }
        }
    }
}

/// Maps memory at a region's address, in the place of what is there.
fn map_region(region: Region, kind: &Kind, index: usize) -> Result<(), Errno> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    let (start, len) = (pointer(region.base), region.size as usize);
    // SAFETY: the range lies in the reserved one, to which no reference exists but of words.
    unsafe {
        match kind {
            Kind::Anonymous { huge: false } => mmap_anonymous(start, len, access, flags),
            // With a reservation, a pool that is too small is an error here and no SIGBUS later.
            Kind::Anonymous { huge: true } => {
                let flags = MapFlags::PRIVATE | MapFlags::FIXED;
                let huge = MapFlags::HUGETLB | MapFlags::HUGE_2MB;
                mmap_anonymous(start, len, access, flags | huge)
            }
            Kind::File(file) => mmap(start, len, access, flags, file, region.offset),
            Kind::Shared(rams) => {
                let flags = MapFlags::SHARED | MapFlags::FIXED;
                mmap(
                    start,
                    len,
                    access,
                    flags,
                    &rams[index].fd,
                    rams[index].offset,
                )
            }
        }
    }
    .map(|_| ())
}
