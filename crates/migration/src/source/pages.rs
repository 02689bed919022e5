#![expect(
    unsafe_code,
    reason = "hands guest memory to the connection without copying it"
)]
//! Pages frames as the source fills and sends them.
//!
//! While the guest runs, a page is copied out first, so that the bytes that are hashed are the bytes that
//! are sent; the page is sent again later if the guest changed it. Once the guest is stopped for good,
//! pages are hashed and sent from where they lie.

use crate::error::MigrationError;
use crate::link::{StreamLink, never};
use crate::wire::{FrameHasher, PAGE_BYTES, RunKind, RunList, RunRefused};
use pageferry_addr::RamPage;
use pageferry_machine::GuestRam;
use std::io::IoSlice;

/// Data pages a frame: 256 KiB, so that what was hashed is still in the cache when it is sent.
const FRAME_PAGES: u32 = 64;

/// Zero pages a frame of a stopped guest: whoever waits for one of them waits for its frame.
const FRAME_ZERO_PAGES: u64 = 512;

/// Zero pages a frame of a running guest, looked at one by one.
const RUNNING_ZERO_PAGES: u64 = 1 << 16;

/// Whether every byte is zero.
pub(crate) fn is_zero(page: &[u8; PAGE_BYTES]) -> bool {
    page.as_chunks::<64>()
        .0
        .iter()
        .all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
}

/// One Pages frame in the making.
pub(crate) struct PageSender<'a> {
    ram: &'a GuestRam,
    list: RunList,
    head: Vec<u8>,
    copies: Vec<u8>,
    /// Ends a send that the peer does not take.
    stop: &'a dyn Fn() -> bool,
    /// Zero pages in the frame.
    zero_in_frame: u64,
    /// Data pages sent so far.
    pub(crate) data_pages: u64,
    /// Pages sent as zero so far.
    pub(crate) zero_pages: u64,
}

impl<'a> PageSender<'a> {
    pub(crate) fn new(ram: &'a GuestRam, stop: &'a dyn Fn() -> bool) -> Self {
        Self {
            ram,
            stop,
            list: RunList::new(ram.pages()),
            head: Vec::new(),
            copies: vec![0; FRAME_PAGES as usize * PAGE_BYTES],
            zero_in_frame: 0,
            data_pages: 0,
            zero_pages: 0,
        }
    }

    fn push(&mut self, page: RamPage, kind: RunKind) -> Result<bool, MigrationError> {
        match self.list.push(page, kind) {
            Ok(()) => {
                self.zero_in_frame += u64::from(kind == RunKind::Zero);
                Ok(true)
            }
            Err(RunRefused::Full) => Ok(false),
            Err(refused @ RunRefused::OutOfOrder { .. }) => {
                Err(MigrationError::Internal(refused.to_string()))
            }
        }
    }

    /// Adds a page of a running guest, which is copied now.
    pub(crate) fn add_running(
        &mut self,
        link: &mut StreamLink,
        page: RamPage,
    ) -> Result<(), MigrationError> {
        // Zero pages cost a look each and fill no frame: the peer must not wait for the end of many.
        if self.list.data_pages() == FRAME_PAGES || self.zero_in_frame >= RUNNING_ZERO_PAGES {
            self.send_copies(link)?;
        }
        loop {
            let at = self.list.data_bytes();
            let copy = self.copies[at..at + PAGE_BYTES]
                .first_chunk_mut()
                .expect("a whole page");
            self.ram.read(page, copy);
            let kind = if is_zero(copy) {
                RunKind::Zero
            } else {
                RunKind::Data
            };
            if self.push(page, kind)? {
                return Ok(());
            }
            self.send_copies(link)?;
        }
    }

    /// Adds a page known to be zero without looking at it (a hole of the memfd).
    pub(crate) fn add_hole(
        &mut self,
        link: &mut StreamLink,
        page: RamPage,
    ) -> Result<(), MigrationError> {
        if !self.push(page, RunKind::Zero)? {
            self.send_copies(link)?;
            self.push(page, RunKind::Zero)?;
        }
        Ok(())
    }

    /// Sends what [`PageSender::add_running`] collected.
    pub(crate) fn send_copies(&mut self, link: &mut StreamLink) -> Result<(), MigrationError> {
        if self.list.is_empty() {
            return Ok(());
        }
        let mut hasher = self.list.encode_head(&mut self.head);
        let data = &self.copies[..self.list.data_bytes()];
        hasher.update(data);
        hasher.seal(&mut self.head);
        link.send_vectored(&[IoSlice::new(&self.head), IoSlice::new(data)], self.stop)?;
        self.sent();
        Ok(())
    }

    fn sent(&mut self) {
        self.data_pages += u64::from(self.list.data_pages());
        self.zero_pages += self.list.zero_pages();
        self.zero_in_frame = 0;
        self.list.clear();
    }
}

/// The same for a guest that is stopped and will never run here again.
pub(crate) struct StoppedSender<'a> {
    inner: PageSender<'a>,
    /// From this page on, the next pages with memory are those of the range: nobody writes them any more.
    allocated: (u64, std::ops::Range<u64>),
}

impl<'a> StoppedSender<'a> {
    /// # Safety
    /// 1. No vCPU of `ram`'s VM runs while the sender lives, and none is resumed.
    /// 2. Nobody else writes the memory of pages that are added to it.
    pub(crate) unsafe fn new(ram: &'a GuestRam) -> Self {
        Self {
            inner: PageSender {
                copies: Vec::new(),
                ..PageSender::new(ram, never())
            },
            allocated: (0, 0..0),
        }
    }

    /// The bytes of a page, where they lie.
    pub(crate) fn page(&self, page: RamPage) -> &'a [u8; PAGE_BYTES] {
        // SAFETY: the pointer is to 4096 mapped bytes that live as long as the `GuestRam` borrowed for
        // 'a, and by the contract of `new` nobody writes them.
        unsafe { &*self.inner.ram.alias(page, 1).cast() }
    }

    /// Whether the page has no memory. It is zero, and looking at it would allocate it.
    fn is_hole(&mut self, page: RamPage) -> Result<bool, MigrationError> {
        let (from, allocated) = &self.allocated;
        if !(*from..allocated.end).contains(&page.0) {
            let end = self.inner.ram.pages();
            let next = self.inner.ram.next_allocated(page)?.unwrap_or(end..end);
            self.allocated = (page.0, next);
        }
        Ok(page.0 < self.allocated.1.start)
    }

    /// Adds a page; false if the frame is full: send it, then add the page again.
    pub(crate) fn add(&mut self, page: RamPage) -> Result<bool, MigrationError> {
        let kind = if self.is_hole(page)? || is_zero(self.page(page)) {
            RunKind::Zero
        } else {
            RunKind::Data
        };
        self.inner.push(page, kind)
    }

    /// Whether the frame has as many pages as a frame should.
    pub(crate) fn is_full(&self) -> bool {
        self.inner.list.data_pages() >= FRAME_PAGES || self.inner.zero_in_frame >= FRAME_ZERO_PAGES
    }

    /// Whether the frame has no page.
    pub(crate) fn is_empty(&self) -> bool {
        self.inner.list.is_empty()
    }

    /// Sends the frame, the pages from where they lie.
    pub(crate) fn send(&mut self, link: &mut StreamLink) -> Result<(), MigrationError> {
        if self.is_empty() {
            return Ok(());
        }
        let mut head = std::mem::take(&mut self.inner.head);
        let mut hasher: FrameHasher = self.inner.list.encode_head(&mut head);
        let runs = self.inner.list.runs();
        let mut slices = Vec::with_capacity(runs.len() + 1);
        for run in runs.iter().filter(|run| run.kind == RunKind::Data) {
            let start = self.inner.ram.alias(run.first, run.pages.into());
            // SAFETY: as for `page`; `alias` checked the whole run.
            let bytes = unsafe { std::slice::from_raw_parts(start.cast_const(), run.data_bytes()) };
            hasher.update(bytes);
            slices.push(IoSlice::new(bytes));
        }
        hasher.seal(&mut head);
        slices.insert(0, IoSlice::new(&head));
        link.send_vectored(&slices, never())?;
        self.inner.head = head;
        self.inner.sent();
        Ok(())
    }

    /// Data pages sent so far.
    pub(crate) fn data_pages(&self) -> u64 {
        self.inner.data_pages
    }

    /// Pages sent as zero so far.
    pub(crate) fn zero_pages(&self) -> u64 {
        self.inner.zero_pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_set_bit_anywhere_makes_a_page_not_zero() {
        let mut page = [0; PAGE_BYTES];
        assert!(is_zero(&page));
        for at in [0, 63, 64, 2047, 4095] {
            page[at] = 0x80;
            assert!(!is_zero(&page), "byte {at}");
            page[at] = 0;
        }
    }
}
