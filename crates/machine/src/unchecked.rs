#![expect(
    unsafe_code,
    reason = "copies bytes that a guest may change at the same time"
)]
//! The privileged way to the bytes of guest memory, for code that places pages or sends them.
//!
//! It knows neither missing pages nor the dirty log. The accessor ([`GuestRam::read`] and its
//! siblings, in `access`) is built on it.
//!
//! A guest may write any byte at any time. So no call here returns a Rust reference to guest
//! memory: copies go through volatile accesses ([`UncheckedRam::read`], [`UncheckedRam::write`]),
//! or through raw pointers given to system calls ([`UncheckedRam::alias`]). A copy tears no
//! naturally aligned part of 2, 4 or 8 bytes. A caller that needs a stable view (checksums) copies
//! first, or reads a VM whose vCPUs are parked.

use crate::{Backing, GuestRam, MachineError};
use pageferry_addr::{PAGE_SIZE, RamPage, first_access};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::mm::Advice;

/// The bytes of guest memory through the alias mapping, without any check. See
/// [`GuestRam::unchecked`] for the rules.
#[derive(Clone, Copy, Debug)]
pub struct UncheckedRam<'a> {
    ram: &'a GuestRam,
}

impl GuestRam {
    /// The bytes without regard to the missing bitmap and the dirty log. For threads that place or
    /// send pages. All others use [`GuestRam::read`] and [`GuestRam::write`].
    ///
    /// ```
    /// use pageferry_addr::RamPage;
    /// use pageferry_machine::{GuestRam, RamLayout};
    ///
    /// let ram = GuestRam::new(RamLayout::for_memory(1 << 20)?)?;
    /// // SAFETY: no machine has this memory, and only this thread knows it.
    /// let placing = unsafe { ram.unchecked() };
    /// placing.write(RamPage(3), &[7; 4096]);
    /// let mut byte = [0];
    /// ram.try_read((RamPage(3), 99), &mut byte)?;
    /// assert_eq!(byte, [7]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Safety
    /// For each page that the caller accesses by the result:
    /// 1. The caller writes a page of a machine only if no other thread of this process accesses
    ///    the page. That holds for a page whose bit in the machine's missing bitmap is set, if the
    ///    caller alone has the right to place that page. From [`Machine::arm_userfault`] until
    ///    [`Machine::begin_postcopy`] it holds for every page, if the caller alone receives the
    ///    memory. The engine's own vCPU threads may also write for their vCPU.
    /// 2. The caller reads a page only if its bit in the missing bitmap is clear, or under (1).
    ///
    /// Writes are not in the dirty log. So a page that a migration may have sent must not be
    /// written this way.
    ///
    /// [`Machine::arm_userfault`]: crate::Machine::arm_userfault
    /// [`Machine::begin_postcopy`]: crate::Machine::begin_postcopy
    #[must_use]
    pub unsafe fn unchecked(&self) -> UncheckedRam<'_> {
        UncheckedRam { ram: self }
    }
}

impl UncheckedRam<'_> {
    /// The VMM's pointer to `pages` pages from `page`, valid as long as the memory lives.
    ///
    /// For system calls and volatile access only: the guest may change the bytes at any time.
    ///
    /// # Panics
    /// If the pages are not all RAM. The same holds for all calls that take pages.
    #[must_use]
    pub fn alias(&self, page: RamPage, pages: u64) -> *mut u8 {
        self.ram.alias(page, pages)
    }

    /// The pointer to `len` bytes from `offset` bytes behind the start of `page`.
    fn bytes(&self, page: RamPage, offset: u64, len: usize) -> *mut u8 {
        let pages = (offset + len as u64).div_ceil(PAGE_SIZE);
        self.alias(page, pages).wrapping_add(offset as usize)
    }

    /// Copies one page out. Each naturally aligned part of 2, 4 or 8 bytes is one access, so it is
    /// untorn. The page as a whole may mix bytes from before and after a write that a running guest
    /// makes meanwhile.
    pub fn read(&self, page: RamPage, into: &mut [u8; PAGE_SIZE as usize]) {
        self.read_at(page, 0, into);
    }

    /// Copies bytes out from `offset` bytes behind the start of `page`, as [`UncheckedRam::read`]
    /// does. They may reach into the following pages.
    ///
    /// # Panics
    /// If they leave RAM.
    #[expect(
        clippy::cast_ptr_alignment,
        reason = "words are read only where the pointer is aligned"
    )]
    pub fn read_at(&self, page: RamPage, offset: u64, into: &mut [u8]) {
        let from = self.bytes(page, offset, into.len());
        let (head, rest) = into.split_at_mut(from.align_offset(8).min(into.len()));
        // SAFETY: the bytes lie in the mapping: `bytes` checked the whole extent.
        unsafe { read_parts(from, head) };
        let at = from.wrapping_add(head.len());
        let (words, tail) = rest.as_chunks_mut::<8>();
        for (i, word) in words.iter_mut().enumerate() {
            // SAFETY: as above, and `at` is aligned to words. The read is volatile, so a concurrent
            // writer outside Rust's view is tolerated, and no reference exists.
            *word = unsafe { at.cast::<u64>().add(i).read_volatile() }.to_ne_bytes();
        }
        // SAFETY: as above.
        unsafe { read_parts(at.wrapping_add(words.len() * 8), tail) };
    }

    /// Copies one page in, by accesses as those of [`UncheckedRam::read`].
    pub fn write(&self, page: RamPage, bytes: &[u8; PAGE_SIZE as usize]) {
        self.write_at(page, 0, bytes);
    }

    /// Copies `bytes` in at `offset` bytes into `page`, as [`UncheckedRam::write`] does. They may
    /// reach into the following pages.
    ///
    /// # Panics
    /// If they leave RAM.
    #[expect(
        clippy::cast_ptr_alignment,
        reason = "words are written only where the pointer is aligned"
    )]
    pub fn write_at(&self, page: RamPage, offset: u64, bytes: &[u8]) {
        let to = self.bytes(page, offset, bytes.len());
        let (head, rest) = bytes.split_at(to.align_offset(8).min(bytes.len()));
        // SAFETY: the bytes lie in the mapping: `bytes` checked the whole extent.
        unsafe { write_parts(to, head) };
        let (words, tail) = rest.as_chunks::<8>();
        let at = to.wrapping_add(head.len());
        for (i, word) in words.iter().enumerate() {
            // SAFETY: as above, and `at` is aligned to words.
            let at = unsafe { at.cast::<u64>().add(i) };
            // SAFETY: as above. The write is volatile.
            unsafe { at.write_volatile(u64::from_ne_bytes(*word)) };
        }
        // SAFETY: as above.
        unsafe { write_parts(at.wrapping_add(words.len() * 8), tail) };
    }

    /// Makes the page read as zero. Its memory stays allocated.
    pub fn zero(&self, page: RamPage) {
        self.write(page, &[0; PAGE_SIZE as usize]);
    }

    /// Frees the pages' memory. They read as zero. A touch of the guest's mapping is a *missing*
    /// fault where userfaultfd watches it.
    ///
    /// # Errors
    /// When the kernel refuses, or the pages are no whole pages of a pool. Such a pool also loses
    /// the promise that the pages can be allocated again.
    pub fn punch_hole(&self, first: RamPage, pages: u64) -> Result<(), MachineError> {
        self.ram.offset(first, pages);
        let unit = self.ram.backing().page_size().pages();
        if !first.0.is_multiple_of(unit) || !pages.is_multiple_of(unit) {
            return Err(MachineError::WrongState(
                "only whole pages of a pool can be freed",
            ));
        }
        let freed = if self.ram.backing() == Backing::Anonymous {
            let at = self.alias(first, pages).cast();
            // SAFETY: `alias` checked that the range is RAM. It reads as zero from now on, as the
            // caller wants.
            unsafe { rustix::mm::madvise(at, (pages * PAGE_SIZE) as usize, Advice::LinuxDontNeed) }
        } else {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            self.ram
                .files(first, pages)
                .try_for_each(|(fd, offset, pages)| fallocate(fd, flags, offset, pages * PAGE_SIZE))
        };
        freed.map_err(|e| MachineError::os("cannot punch a hole into guest memory", e))
    }
}

/// The number of bytes of the first access of a copy of `bytes` bytes at `at`.
fn part(at: *mut u8, bytes: usize) -> usize {
    first_access(at.addr() as u64, bytes as u64) as usize
}

/// Copies the bytes at `from` out, which begin or end inside a word.
///
/// # Safety
/// As many bytes as `into` has are mapped at `from`.
#[expect(clippy::cast_ptr_alignment, reason = "`part` aligns each access")]
unsafe fn read_parts(mut from: *mut u8, mut into: &mut [u8]) {
    while !into.is_empty() {
        let (part, rest) = into.split_at_mut(part(from, into.len()));
        match part {
            // SAFETY: the caller promises that the bytes are mapped, and `part` aligns them. The
            // read is volatile: the guest may write meanwhile.
            [byte] => *byte = unsafe { from.read_volatile() },
            [_, _] => {
                // SAFETY: as above.
                let value = unsafe { from.cast::<u16>().read_volatile() };
                part.copy_from_slice(&value.to_ne_bytes());
            }
            [_, _, _, _] => {
                // SAFETY: as above.
                let value = unsafe { from.cast::<u32>().read_volatile() };
                part.copy_from_slice(&value.to_ne_bytes());
            }
            _ => unreachable!("whole words are no part of a head or a tail"),
        }
        (from, into) = (from.wrapping_add(part.len()), rest);
    }
}

/// Copies `bytes` in at `to`, which begin or end inside a word.
///
/// # Safety
/// As many bytes as `bytes` has are mapped at `to`.
#[expect(clippy::cast_ptr_alignment, reason = "`part` aligns each access")]
unsafe fn write_parts(mut to: *mut u8, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let (part, rest) = bytes.split_at(part(to, bytes.len()));
        match *part {
            // SAFETY: the caller promises that the bytes are mapped, and `part` aligns them. The
            // write is volatile: the guest may access them meanwhile.
            [byte] => unsafe { to.write_volatile(byte) },
            [a, b] => {
                let value = u16::from_ne_bytes([a, b]);
                // SAFETY: as above.
                unsafe { to.cast::<u16>().write_volatile(value) };
            }
            [a, b, c, d] => {
                let value = u32::from_ne_bytes([a, b, c, d]);
                // SAFETY: as above.
                unsafe { to.cast::<u32>().write_volatile(value) };
            }
            _ => unreachable!("whole words are no part of a head or a tail"),
        }
        (to, bytes) = (to.wrapping_add(part.len()), rest);
    }
}
