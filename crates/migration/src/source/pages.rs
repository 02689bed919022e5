#![expect(
    unsafe_code,
    reason = "hands guest memory to the connection without copying it"
)]
//! Fills and sends Pages frames.
//!
//! While the guest runs, the source copies each page first, so that it hashes and sends the same
//! bytes. If the guest changes the page, the source sends it again later. After the guest has
//! stopped for good, the source hashes and sends pages without a copy.

use crate::error::MigrationError;
use crate::link::{StreamLink, never};
use crate::wire::{FrameHasher, PAGE_BYTES, RunKind, RunList, RunRefused};
use pageferry_addr::RamPage;
use pageferry_machine::GuestRam;
use std::io::IoSlice;

/// The data pages of a frame: 256 KiB, so that hashed bytes are still in the cache when they are
/// sent.
const FRAME_PAGES: u32 = 64;

/// The zero pages of a frame of a stopped guest. A vCPU that waits for one of them waits for the
/// whole frame.
const FRAME_ZERO_PAGES: u64 = 512;

/// The zero pages of a frame of a running guest. Each costs a scan of the page.
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
    /// Interrupts a send that the peer does not accept.
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

    /// Adds a page to the frame. If the frame is full, `send` sends it, and the page goes into the
    /// next. So the page is in a frame when this returns, or the migration fails.
    fn push(
        &mut self,
        page: RamPage,
        kind: RunKind,
        send: impl FnOnce(&mut Self) -> Result<(), MigrationError>,
    ) -> Result<(), MigrationError> {
        let pushed = match self.list.push(page, kind) {
            Err(RunRefused::Full) => {
                send(self)?;
                self.list.push(page, kind)
            }
            pushed => pushed,
        };
        pushed.map_err(|refused| MigrationError::Internal(refused.to_string()))?;
        self.zero_in_frame += u64::from(kind == RunKind::Zero);
        Ok(())
    }

    /// Copies a page of a running guest and adds it.
    pub(crate) fn add_running(
        &mut self,
        link: &mut StreamLink,
        page: RamPage,
    ) -> Result<(), MigrationError> {
        // Zero pages cost a scan each and fill no frame. The peer must not wait for many of them.
        if self.list.data_pages() == FRAME_PAGES || self.zero_in_frame >= RUNNING_ZERO_PAGES {
            self.send_copies(link)?;
        }
        let at = self.list.data_bytes();
        let copy = self.copies[at..at + PAGE_BYTES]
            .first_chunk_mut()
            .expect("a whole page");
        // SAFETY: (2) a source has all its pages.
        unsafe { self.ram.unchecked() }.read(page, copy);
        let kind = if is_zero(copy) {
            RunKind::Zero
        } else {
            RunKind::Data
        };
        self.push(page, kind, |sender| {
            sender.send_copies(link)?;
            // The page is the first of the new frame.
            sender.copies.copy_within(at..at + PAGE_BYTES, 0);
            Ok(())
        })
    }

    /// Adds a hole of the memfd: a zero page that needs no scan.
    pub(crate) fn add_hole(
        &mut self,
        link: &mut StreamLink,
        page: RamPage,
    ) -> Result<(), MigrationError> {
        self.push(page, RunKind::Zero, |sender| sender.send_copies(link))
    }

    /// Sends the frame with its copied pages.
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

/// A [`PageSender`] for a guest that has stopped for good.
pub(crate) struct StoppedSender<'a> {
    inner: PageSender<'a>,
    /// The result of the last search for allocated pages: its start, and the next allocated range.
    /// It stays valid, since no thread writes the memory any more.
    allocated: (u64, std::ops::Range<u64>),
}

impl<'a> StoppedSender<'a> {
    /// # Safety
    /// 1. No vCPU of `ram`'s VM runs while the sender lives, and none is resumed.
    /// 2. No other thread writes the memory of pages that are added to it.
    pub(crate) unsafe fn new(ram: &'a GuestRam) -> Self {
        Self {
            inner: PageSender {
                copies: Vec::new(),
                ..PageSender::new(ram, never())
            },
            allocated: (0, 0..0),
        }
    }

    /// Returns the bytes of a page, without a copy.
    pub(crate) fn page(&self, page: RamPage) -> &'a [u8; PAGE_BYTES] {
        // SAFETY: the pointer is to 4096 mapped bytes. They live as long as the `GuestRam` borrowed
        // for 'a. By the contract of `new` no thread writes them.
        unsafe { &*self.inner.ram.unchecked().alias(page, 1).cast() }
    }

    /// Whether the page is a hole. A hole is zero, and reading it would allocate it.
    fn is_hole(&mut self, page: RamPage) -> Result<bool, MigrationError> {
        let (from, allocated) = &self.allocated;
        if !(*from..allocated.end).contains(&page.0) {
            let end = self.inner.ram.pages();
            let next = self.inner.ram.next_allocated(page)?.unwrap_or(end..end);
            self.allocated = (page.0, next);
        }
        Ok(page.0 < self.allocated.1.start)
    }

    /// Adds a page. Sends the frame first if it is full.
    pub(crate) fn add(
        &mut self,
        link: &mut StreamLink,
        page: RamPage,
    ) -> Result<(), MigrationError> {
        let kind = if self.is_hole(page)? || is_zero(self.page(page)) {
            RunKind::Zero
        } else {
            RunKind::Data
        };
        self.inner
            .push(page, kind, |inner| send_in_place(inner, link))
    }

    /// Whether the frame should be sent.
    pub(crate) fn is_full(&self) -> bool {
        self.inner.list.data_pages() >= FRAME_PAGES || self.inner.zero_in_frame >= FRAME_ZERO_PAGES
    }

    /// Sends the frame without copying its pages.
    pub(crate) fn send(&mut self, link: &mut StreamLink) -> Result<(), MigrationError> {
        send_in_place(&mut self.inner, link)
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

/// Sends the frame of a [`StoppedSender`] without copying its pages.
fn send_in_place(sender: &mut PageSender<'_>, link: &mut StreamLink) -> Result<(), MigrationError> {
    if sender.list.is_empty() {
        return Ok(());
    }
    let mut head = std::mem::take(&mut sender.head);
    let mut hasher: FrameHasher = sender.list.encode_head(&mut head);
    let runs = sender.list.runs();
    let mut slices = Vec::with_capacity(runs.len() + 1);
    for run in runs.iter().filter(|run| run.kind == RunKind::Data) {
        // SAFETY: (2) a source has all its pages.
        let start = unsafe { sender.ram.unchecked() }.alias(run.first, run.pages.into());
        // SAFETY: `alias` checked that the whole run is mapped as long as the `GuestRam` lives. By
        // the contract of `StoppedSender::new` no thread writes it.
        let bytes = unsafe { std::slice::from_raw_parts(start.cast_const(), run.data_bytes()) };
        hasher.update(bytes);
        slices.push(IoSlice::new(bytes));
    }
    hasher.seal(&mut head);
    slices.insert(0, IoSlice::new(&head));
    link.send_vectored(&slices, never())?;
    sender.head = head;
    sender.sent();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::{Connection, Wait};
    use crate::wire::{FrameHeader, HEADER_BYTES, Run, Side};
    use pageferry_machine::RamLayout;
    use std::time::Duration;

    /// Returns the runs that `send` sends. Every second page is zero, so that frames are full of
    /// runs.
    fn sent_pages(send: impl FnOnce(&GuestRam, &mut StreamLink)) -> (u64, Vec<(Run, Vec<u8>)>) {
        const PAGES: u64 = 700;
        let layout = RamLayout::for_memory(PAGES * PAGE_BYTES as u64).unwrap();
        let ram = GuestRam::new(layout).unwrap();
        for page in (0..PAGES).step_by(2) {
            ram.try_write(RamPage(page), &[page as u8 | 1; PAGE_BYTES])
                .unwrap();
        }
        let (ours, theirs) = Connection::pair().unwrap();
        let limit = Duration::from_secs(60);
        let reader = std::thread::spawn(move || {
            let wait = Wait::block("test").within(limit);
            let mut runs = Vec::new();
            let mut head = [0; HEADER_BYTES];
            while theirs.read_exact(&mut head, &wait).is_ok() {
                let header = FrameHeader::decode(&head, Side::Source).unwrap();
                let mut payload = vec![0; header.payload_len as usize];
                theirs.read_exact(&mut payload, &wait).unwrap();
                let (descriptors, mut data) =
                    payload.split_at(RunList::descriptors_len(&header).unwrap());
                let list = RunList::decode(&header, descriptors, PAGES).unwrap();
                for run in list.runs() {
                    let bytes = if run.kind == RunKind::Data {
                        run.data_bytes()
                    } else {
                        0
                    };
                    let (of_run, rest) = data.split_at(bytes);
                    runs.push((*run, of_run.to_vec()));
                    data = rest;
                }
            }
            runs
        });
        let mut link = StreamLink::new(ours, Side::Destination, PAGES, limit);
        send(&ram, &mut link);
        drop(link);
        (PAGES, reader.join().unwrap())
    }

    fn assert_each_once(pages: u64, runs: &[(Run, Vec<u8>)]) {
        let mut next = 0;
        for (run, bytes) in runs {
            assert_eq!(run.first.0, next, "no page is lost and none comes twice");
            for (i, page) in bytes.chunks(PAGE_BYTES).enumerate() {
                let expected = (run.first.0 + i as u64) as u8 | 1;
                assert!(
                    page.iter().all(|byte| *byte == expected),
                    "page {next} + {i}"
                );
            }
            next = run.end();
        }
        assert_eq!(next, pages);
    }

    #[test]
    fn a_full_frame_loses_no_page_of_a_stopped_guest() {
        let (pages, runs) = sent_pages(|ram, link| {
            // SAFETY: no vCPU runs in this test, and no thread writes the memory.
            let mut sender = unsafe { StoppedSender::new(ram) };
            for page in 0..ram.pages() {
                sender.add(link, RamPage(page)).unwrap();
            }
            sender.send(link).unwrap();
        });
        assert_each_once(pages, &runs);
    }

    #[test]
    fn a_full_frame_loses_no_page_of_a_running_guest() {
        let (pages, runs) = sent_pages(|ram, link| {
            let mut sender = PageSender::new(ram, never());
            for page in 0..ram.pages() {
                // Holes fill a frame before a page with data comes.
                if page % 14 == 1 {
                    sender.add_hole(link, RamPage(page)).unwrap();
                } else {
                    sender.add_running(link, RamPage(page)).unwrap();
                }
            }
            sender.send_copies(link).unwrap();
        });
        assert_each_once(pages, &runs);
    }

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
