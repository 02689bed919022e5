#![expect(unsafe_code, reason = "maps guest memory")]
//! Guest RAM: a memfd mapped twice, or private memory mapped once.
//!
//! Memory slots point at the **guest's mapping**, where userfaultfd may make a touch sleep. The
//! **alias** is the VMM's own view of the same pages. Touching it never faults into userfaultfd. So
//! bytes can be put in their final place before the guest can see them. The guest's mapping may be
//! one that the VMM has made itself (`adopt`), with a place of its own for each file.
//!
//! Private memory ([`Backing::Anonymous`]) has no second mapping: the alias is the guest's mapping.
//! userfaultfd watches it from the start of post-copy on. From then on no thread that brings pages
//! touches it, and the VMM's own accesses have holes mapped first (`access`).
//!
//! There are two ways to the bytes, both through the alias. The VMM's own accesses
//! ([`GuestRam::read`], in `access`) look at the missing bitmap and enter the dirty log. Code that
//! places or sends pages takes the privileged way ([`GuestRam::unchecked`]).

use crate::access::{Fetch, MapPages, StoreRules};
use crate::gate::AccessGate;
use crate::written::WriteLog;
use crate::{Backing, MachineError, RamLayout};
use pageferry_addr::{Hva, PAGE_SIZE, PageSize, RamPage};
use rustix::fs::{MemfdFlags, SealFlags, SeekFrom};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{OnceLock, Weak};

/// One mapping of all of RAM, unmapped on drop.
struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping is plain address space and belongs to no thread. All accesses through it are
// volatile or by system call, or follow the rules of `GuestRam::unchecked`.
unsafe impl Send for Mapping {}
// SAFETY: as for Send.
unsafe impl Sync for Mapping {}

/// The least alignment of mappings. The host can map pages of this size only at such addresses.
const ALIGN: usize = PageSize::Size2M.bytes() as usize;

impl Mapping {
    /// Maps the `bytes` bytes of all `files` one behind the other, or private memory without files.
    /// This reserves the pages of a pool.
    fn new(files: &[RamFile], bytes: usize, backing: Backing) -> Result<Self, MachineError> {
        let failed = |e| match e {
            Errno::NOMEM if backing.is_hugetlb() => backing.refused(bytes as u64),
            _ => MachineError::os("cannot map guest memory", e),
        };
        let align = ALIGN.max(backing.page_size().bytes() as usize);
        let reserve = if backing.is_hugetlb() {
            MapFlags::empty()
        } else {
            MapFlags::NORESERVE
        };
        let room = bytes
            .checked_add(align)
            .ok_or_else(|| failed(Errno::NOMEM))?;
        // SAFETY: the kernel chooses an unused address; nothing existing is replaced.
        let reserved = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                room,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(failed)?;
        let before = reserved.align_offset(align);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::FIXED | reserve;
        // SAFETY: `before` is less than `align`, so the range lies in the room that was just
        // reserved. Nobody else knows that room.
        let at = unsafe { reserved.byte_add(before) };
        let start = if files.is_empty() {
            // SAFETY: as above.
            unsafe { rustix::mm::mmap_anonymous(at, bytes, access, MapFlags::PRIVATE | flags) }
        } else {
            let map = |file: &RamFile| {
                let bytes = (file.pages * PAGE_SIZE) as usize;
                // SAFETY: as above, and all files together have `bytes` bytes.
                unsafe {
                    let at = at.byte_add(file.first.byte_offset() as usize);
                    let flags = MapFlags::SHARED | flags;
                    rustix::mm::mmap(at, bytes, access, flags, &file.fd, file.offset)
                }
            };
            files
                .iter()
                .try_for_each(|file| map(file).map(drop))
                .map(|()| at)
        };
        // The rest of the room, or all of it.
        let (head, tail) = match start {
            Ok(_) => (before, align - before),
            Err(_) => (room, 0),
        };
        for (offset, bytes) in [(0, head), (room - tail, tail)] {
            if bytes > 0 {
                // SAFETY: as above; this part of the room is not in use.
                let _ = unsafe { rustix::mm::munmap(reserved.byte_add(offset), bytes) };
            }
        }
        let start = start.map_err(failed)?;
        let start = NonNull::new(start.cast::<u8>()).expect("mmap returns no null on success");
        let mapping = Self { start, bytes };
        if backing == Backing::ShmemThp {
            // SAFETY: the advice changes no byte, and the range is the new mapping.
            unsafe { rustix::mm::madvise(start.as_ptr().cast(), bytes, Advice::LinuxHugepage) }
                .map_err(|e| MachineError::os("cannot request huge pages for guest memory", e))?;
        }
        Ok(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new`, and all users hold the `GuestRam` that owns it.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// The place of the first data at or behind `offset`.
fn data_after(fd: BorrowedFd<'_>, offset: u64) -> Result<Option<u64>, MachineError> {
    match rustix::fs::seek(fd, SeekFrom::Data(offset)) {
        Ok(data) => Ok(Some(data)),
        Err(Errno::NXIO) => Ok(None),
        Err(e) => {
            let what = "cannot find the allocated pages of guest memory";
            Err(MachineError::os(what, e))
        }
    }
}

/// Whether no page of a file has memory.
fn is_empty(fd: BorrowedFd<'_>) -> Result<bool, MachineError> {
    let stat = rustix::fs::fstat(fd);
    let stat = stat.map_err(|e| MachineError::os("cannot examine the file of guest memory", e))?;
    Ok(stat.st_blocks == 0)
}

/// A sealed memfd of `bytes` bytes.
fn memfd(bytes: u64, flags: MemfdFlags) -> Result<OwnedFd, MachineError> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | flags;
    let fd = rustix::fs::memfd_create("pageferry-ram", flags)
        .map_err(|e| MachineError::os("cannot create a memfd for guest memory", e))?;
    rustix::fs::ftruncate(&fd, bytes)
        .map_err(|e| MachineError::os("cannot size the memfd for guest memory", e))?;
    // No holder of the memfd can shrink it under the mappings (SIGBUS).
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)
        .map_err(|e| MachineError::os("cannot seal the memfd of guest memory", e))?;
    Ok(fd)
}

/// A part of a memfd that is a part of RAM.
pub(crate) struct RamFile {
    pub(crate) first: RamPage,
    pub(crate) pages: u64,
    pub(crate) fd: OwnedFd,
    /// The place of its first page in the memfd, in bytes.
    pub(crate) offset: u64,
    /// The VMM's own mapping of it for the guest.
    pub(crate) mapped: Option<Hva>,
}

/// The memory of one VM.
pub struct GuestRam {
    layout: RamLayout,
    backing: Backing,
    /// `None` if the VMM has mapped all files for the guest.
    guest: Option<Mapping>,
    /// The second mapping, and the memfds in order. Private memory has neither.
    alias: Option<Mapping>,
    files: Vec<RamFile>,
    /// Before the VMM's own accesses.
    pub(crate) gate: AccessGate,
    /// The pages that the VMM wrote.
    pub(crate) written: WriteLog,
    /// The source of missing pages. Weak, since it holds the machine.
    pub(crate) fetch: OnceLock<Weak<dyn Fetch>>,
    /// The engine's rules for the VMM's stores.
    pub(crate) rules: OnceLock<Box<StoreRules>>,
    /// Maps pages of private memory, once a machine was armed.
    pub(crate) map: OnceLock<Box<MapPages>>,
}

impl std::fmt::Debug for GuestRam {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GuestRam({} pages)", self.layout.pages())
    }
}

impl GuestRam {
    /// Shared memory of the layout's size, all zero, none of it allocated yet.
    ///
    /// # Errors
    /// When the host has no room for it.
    pub fn new(layout: RamLayout) -> Result<Self, MachineError> {
        Self::with_backing(layout, Backing::Shmem)
    }

    /// Memory of the layout's size and of a chosen kind, all zero. Pages of a pool are reserved,
    /// and not allocated yet.
    ///
    /// # Errors
    /// [`MachineError::NoBacking`] if the host lacks this kind, or has too few pages of it.
    /// [`MachineError::Layout`] if the memory is no multiple of the kind's page.
    pub fn with_backing(layout: RamLayout, backing: Backing) -> Result<Self, MachineError> {
        backing.check_layout(&layout)?;
        backing.check(layout.bytes())?;
        let fd = (backing.memfd_flags())
            .map(|flags| memfd(layout.bytes(), flags))
            .transpose()?;
        let file = fd.map(|fd| RamFile {
            first: RamPage(0),
            pages: layout.pages(),
            fd,
            offset: 0,
            mapped: None,
        });
        Self::of_files(layout, backing, file.into_iter().collect())
    }

    /// Memory of these files, which have all pages of the layout, or private memory without files.
    /// The VMM has mapped all of the files or none.
    pub(crate) fn of_files(
        layout: RamLayout,
        backing: Backing,
        files: Vec<RamFile>,
    ) -> Result<Self, MachineError> {
        let bytes = usize::try_from(layout.bytes())
            .map_err(|_| crate::LayoutError::TooLarge(layout.bytes()))?;
        let map = || Mapping::new(&files, bytes, backing);
        let is_mapped = files.first().is_some_and(|file| file.mapped.is_some());
        let guest = (!is_mapped).then(map).transpose()?;
        let alias = (!files.is_empty()).then(map).transpose()?;
        Ok(Self {
            written: WriteLog::try_new(layout.pages())?,
            gate: AccessGate::default(),
            fetch: OnceLock::new(),
            map: OnceLock::new(),
            rules: OnceLock::new(),
            layout,
            backing,
            guest,
            alias,
            files,
        })
    }

    /// The place of RAM in guest-physical address space.
    #[must_use]
    pub fn layout(&self) -> &RamLayout {
        &self.layout
    }

    /// The kind of host memory.
    #[must_use]
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// The number of pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.layout.pages()
    }

    pub(crate) fn offset(&self, page: RamPage, pages: u64) -> usize {
        let fits = page
            .checked_add(pages)
            .is_some_and(|end| end.0 <= self.pages());
        assert!(
            fits,
            "{pages} pages from {page:?} leave the {} pages of RAM",
            self.pages()
        );
        page.byte_offset() as usize
    }

    fn alias_start(&self) -> *mut u8 {
        let mapping = self.alias.as_ref().or(self.guest.as_ref());
        mapping
            .expect("only files have no own mapping for the guest, and they have an alias")
            .start
            .as_ptr()
    }

    /// The pointer to `pages` pages from `page` in the alias.
    pub(crate) fn alias(&self, page: RamPage, pages: u64) -> *mut u8 {
        let offset = self.offset(page, pages);
        // SAFETY: `offset` checked that the offset lies inside the mapping.
        unsafe { self.alias_start().add(offset) }
    }

    /// The address of `page` in the guest's mapping, for a memory slot.
    #[must_use]
    pub fn guest_hva(&self, page: RamPage) -> Hva {
        let offset = self.offset(page, 0) as u64;
        let (first, start) = match &self.guest {
            Some(mapping) => (RamPage(0), mapping.start.as_ptr() as u64),
            None => self.mapped_file(page),
        };
        Hva(start + offset - first.byte_offset())
    }

    /// The file of a page that the VMM has mapped: its first page and its address. The end of RAM
    /// counts to the last file.
    fn mapped_file(&self, page: RamPage) -> (RamPage, u64) {
        let behind = self.files.partition_point(|file| file.first <= page);
        let file = &self.files[behind - 1];
        let mapped = file.mapped.expect("all files are mapped, or none");
        (file.first, mapped.0)
    }

    /// Whether the guest's mapping is one of our own, with all of RAM at adjacent addresses.
    #[cfg(feature = "kvm")]
    pub(crate) fn is_adjacent(&self) -> bool {
        self.guest.is_some()
    }

    /// The address of `page` in the alias, for an engine whose slots point at the alias.
    #[must_use]
    pub fn alias_hva(&self, page: RamPage) -> Hva {
        let offset = self.offset(page, 0);
        Hva(self.alias_start() as u64 + offset as u64)
    }

    /// The page at `hva` of the guest's mapping, if it is in there.
    #[must_use]
    pub fn page_at_guest_hva(&self, hva: Hva) -> Option<RamPage> {
        let within = |start: u64, first: RamPage, pages: u64| {
            let page = hva.0.checked_sub(start)? / PAGE_SIZE;
            (page < pages).then_some(RamPage(first.0 + page))
        };
        match &self.guest {
            Some(mapping) => within(mapping.start.as_ptr() as u64, RamPage(0), self.pages()),
            None => {
                (self.files.iter()).find_map(|file| within(file.mapped?.0, file.first, file.pages))
            }
        }
    }

    /// The guest's mapping of `pages` pages from `first`, in ascending runs: each with its address
    /// and its number of pages. A run ends with the mapping of its file.
    #[cfg(feature = "kvm")]
    pub(crate) fn guest_runs(
        &self,
        first: RamPage,
        pages: u64,
    ) -> impl Iterator<Item = (Hva, u64)> {
        let all = self.files.is_empty().then_some(pages);
        let of_files = self.files(first, pages).map(|(_, _, pages)| pages);
        let mut at = first;
        all.into_iter().chain(of_files).map(move |pages| {
            let run = (self.guest_hva(at), pages);
            at.0 += pages;
            run
        })
    }

    /// The parts of memfds behind `pages` pages from `first`: each with its place in bytes and its
    /// size in pages. None if the memory is private.
    pub(crate) fn files(
        &self,
        first: RamPage,
        pages: u64,
    ) -> impl Iterator<Item = (BorrowedFd<'_>, u64, u64)> {
        let end = first.0 + pages;
        self.files.iter().filter_map(move |file| {
            let from = first.0.max(file.first.0);
            let to = end.min(file.first.0 + file.pages);
            let offset = file.offset + (from.saturating_sub(file.first.0)) * PAGE_SIZE;
            (from < to).then(|| (file.fd.as_fd(), offset, to - from))
        })
    }

    /// Allocates all of RAM now, so that no later touch waits for the host's allocator.
    ///
    /// # Errors
    /// When the host has too little memory.
    pub fn allocate(&self) -> Result<(), MachineError> {
        self.allocate_range(RamPage(0), self.pages())
    }

    /// Allocates `pages` pages from `first`. Changes no byte, so other threads may write them
    /// meanwhile.
    ///
    /// # Errors
    /// When the host has too little memory.
    pub fn allocate_range(&self, first: RamPage, pages: u64) -> Result<(), MachineError> {
        let at = self.alias(first, pages);
        let bytes = (pages * PAGE_SIZE) as usize;
        // SAFETY: populating changes no byte; `alias` checked that the range is ours.
        unsafe { rustix::mm::madvise(at.cast(), bytes, Advice::LinuxPopulateWrite) }
            .map_err(|e| MachineError::os("cannot allocate guest memory", e))
    }

    /// The next pages at or behind `from` that have memory: the first of them, and at most
    /// `most - 1` that follow. The pages before them are zero, and reading those would allocate
    /// them. It takes time for `most` pages, each of which is a system call, and for the hole.
    ///
    /// Once a file of a pool has any page, all of the file counts: the kernel finds no holes in it.
    /// All private memory counts: reading its holes allocates nothing.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn next_allocated(
        &self,
        from: RamPage,
        most: u64,
    ) -> Result<Option<std::ops::Range<u64>>, MachineError> {
        if from.0 >= self.pages() {
            return Ok(None);
        }
        let bounded = |start: u64| start..start.saturating_add(most.max(1)).min(self.pages());
        if self.files.is_empty() {
            return Ok(Some(bounded(from.0)));
        }
        let mut next = from.0;
        let mut found = None;
        for (fd, offset, pages) in self.files(from, self.pages() - from.0) {
            let data = if self.backing().is_hugetlb() && is_empty(fd)? {
                pages
            } else {
                // Not SEEK_HOLE: it would look at all the memory up to the next hole.
                data_after(fd, offset)?.map_or(pages, |data| (data - offset) / PAGE_SIZE)
            };
            if data < pages {
                found = Some(bounded(next + data));
                break;
            }
            next += pages;
        }
        let Some(pages) = found else {
            return Ok(None);
        };
        if self.backing().is_hugetlb() {
            return Ok(Some(pages));
        }
        let behind = RamPage(pages.start + 1);
        let more = self.allocated(behind, pages.end - behind.0)?;
        Ok(Some(pages.start..behind.0 + more))
    }

    /// Whether none of `pages` pages from `first` has memory, as far as [`Self::next_allocated`]
    /// can tell.
    ///
    /// # Errors
    /// When the kernel refuses.
    #[cfg(any(test, all(feature = "kvm", target_arch = "x86_64")))]
    pub(crate) fn is_hole(&self, first: RamPage, pages: u64) -> Result<bool, MachineError> {
        self.offset(first, pages);
        if self.files.is_empty() {
            return Ok(pages == 0);
        }
        for (fd, offset, pages) in self.files(first, pages) {
            if data_after(fd, offset)?.is_some_and(|data| data < offset + pages * PAGE_SIZE) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether all of `pages` pages from `first` have memory, or are swapped out.
    ///
    /// # Errors
    /// When the kernel refuses.
    #[cfg(any(test, feature = "kvm", feature = "soft"))]
    pub(crate) fn is_allocated(&self, first: RamPage, pages: u64) -> Result<bool, MachineError> {
        Ok(self.allocated(first, pages)? == pages)
    }

    /// The number of pages from `first` on that have memory, without a hole. It is at most `pages`.
    ///
    /// It asks for each page. SEEK_HOLE would look at all the memory up to the next hole.
    /// mincore(2) is refused by systemd's `@system-service` and by many other filters.
    fn allocated(&self, first: RamPage, pages: u64) -> Result<u64, MachineError> {
        self.offset(first, pages);
        let mut found = 0;
        for (fd, offset, pages) in self.files(first, pages) {
            for page in 0..pages {
                let at = offset + page * PAGE_SIZE;
                // The data of a huge page may begin before this page.
                if data_after(fd, at)? != Some(at) {
                    return Ok(found);
                }
                found += 1;
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ram(pages: u64) -> GuestRam {
        GuestRam::new(RamLayout::for_memory(pages * PAGE_SIZE).unwrap()).unwrap()
    }

    #[test]
    fn both_mappings_show_the_same_bytes() {
        let ram = ram(4);
        ram.try_write((RamPage(1), 5), b"over the page's edge")
            .unwrap();
        let mut page = [0; 4096];
        ram.try_read(RamPage(1), &mut page).unwrap();
        assert_eq!(&page[5..25], b"over the page's edge");
        let guest = ram.guest_hva(RamPage(1)).0 as *const u8;
        // SAFETY: the guest's mapping has this page, and nobody writes it meanwhile.
        assert_eq!(unsafe { guest.add(5).read_volatile() }, b'o');
    }

    #[test]
    fn mappings_can_have_large_pages() {
        let ram = ram(512 + 3);
        for hva in [ram.guest_hva(RamPage(0)), ram.alias_hva(RamPage(0))] {
            assert_eq!(hva.0 % ALIGN as u64, 0, "{hva:?}");
        }
    }

    #[test]
    fn a_hole_reads_as_zero_and_pages_translate_back() {
        let ram = ram(8);
        ram.allocate().unwrap();
        ram.try_write(RamPage(3), &[7; 4096]).unwrap();
        // SAFETY: (1) no machine has this memory.
        unsafe { ram.unchecked() }
            .punch_hole(RamPage(3), 1)
            .unwrap();
        let mut page = [1; 4096];
        ram.try_read(RamPage(3), &mut page).unwrap();
        assert_eq!(page, [0; 4096]);
        assert_eq!(
            ram.page_at_guest_hva(ram.guest_hva(RamPage(7))),
            Some(RamPage(7))
        );
        assert_eq!(
            ram.page_at_guest_hva(Hva(ram.guest_hva(RamPage(7)).0 + 4096)),
            None
        );
    }

    #[test]
    fn allocated_pages_are_told_from_holes() {
        let ram = ram(64);
        let next = |from| ram.next_allocated(RamPage(from), 64).unwrap();
        assert_eq!(next(0), None);
        ram.try_write(RamPage(5), &[1; 4096]).unwrap();
        ram.try_write(RamPage(6), &[1; 4096]).unwrap();
        ram.try_write(RamPage(63), &[1; 4096]).unwrap();
        assert_eq!(next(0), Some(5..7));
        assert_eq!(ram.next_allocated(RamPage(0), 1).unwrap(), Some(5..6));
        assert_eq!(ram.next_allocated(RamPage(6), 0).unwrap(), Some(6..7));
        assert_eq!(next(7), Some(63..64));
        assert_eq!(next(64), None);
    }

    #[test]
    #[should_panic(expected = "leave the 4 pages of RAM")]
    fn a_page_outside_ram_is_a_bug_of_the_caller() {
        let _ = ram(4).alias(RamPage(3), 2);
    }

    #[test]
    fn holes_and_allocated_pages_are_told_apart() {
        let ram = ram(600);
        assert!(ram.is_hole(RamPage(0), 600).unwrap());
        ram.try_write(RamPage(5), &[1; 4096]).unwrap();
        assert!(ram.is_hole(RamPage(0), 5).unwrap() && ram.is_hole(RamPage(6), 594).unwrap());
        assert!(!ram.is_hole(RamPage(0), 6).unwrap());
        assert!(ram.is_allocated(RamPage(5), 1).unwrap());
        assert!(!ram.is_allocated(RamPage(5), 2).unwrap());
        ram.allocate().unwrap();
        assert!(ram.is_allocated(RamPage(0), 600).unwrap());
    }

    #[test]
    fn writes_may_cross_pages() {
        let ram = ram(2);
        ram.try_write((RamPage(0), 4090), &[9; 12]).unwrap();
        let mut page = [0; 4096];
        ram.try_read(RamPage(1), &mut page).unwrap();
        assert_eq!(page[..7], [9, 9, 9, 9, 9, 9, 0]);
    }
}
