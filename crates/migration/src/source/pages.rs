#![expect(
    unsafe_code,
    reason = "hands guest memory to the connection without copying it"
)]
//! Fills Pages frames with unsent pages.
//!
//! While the guest runs, the source copies each page first, so that it hashes and sends the same
//! bytes. If the guest changes the page, the source sends it again later. After the guest has
//! stopped for good, the source hashes and sends pages without a copy.
//!
//! If RAM is a copy itself ([`Machine::refresh`]), it is brought up to date first, in pieces of one
//! frame: before the search for holes, since a hole of the copy may be a page of the guest by now.
//!
//! With [`SentHashes`], a copy is sent only if it differs from what was sent before. A page of a
//! guest that has stopped is confirmed if the destination has its bytes.

#[cfg(all(test, not(shuttle)))]
mod model;

use super::hashes::SentHashes;
use crate::error::MigrationError;
use crate::ledger::Ledger;
use crate::wire::{PAGE_BYTES, RunKind, RunList};
use pageferry_addr::RamPage;
use pageferry_machine::{GuestRam, Machine};
use pageferry_transport::channel::{Connection, Wait};
use std::io::IoSlice;
use std::ops::Range;

/// The most data pages of a frame: 256 KiB, so that hashed bytes are still in the cache when they
/// are sent.
pub(super) const FRAME_PAGES: u32 = 64;

/// The zero pages of a frame of a stopped guest. A vCPU that waits for one of them waits for the
/// whole frame.
const FRAME_ZERO_PAGES: u64 = 512;

/// The zero pages of a frame of a running guest. Each costs a scan of the page.
const RUNNING_ZERO_PAGES: u64 = 1 << 16;

/// The unchanged pages that one frame of a running guest looks at. Receipts wait meanwhile.
const SCAN_PAGES: u64 = 1024;

/// Whether every byte is zero.
pub(super) fn is_zero(page: &[u8; PAGE_BYTES]) -> bool {
    page.as_chunks::<64>()
        .0
        .iter()
        .all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
}

/// Returns the bytes of a page of a guest that has stopped, without a copy.
///
/// # Safety
/// 1. No vCPU of `ram`'s VM runs while the bytes are borrowed.
/// 2. No other thread writes the page meanwhile.
pub(super) unsafe fn stopped_page(ram: &GuestRam, page: RamPage) -> &[u8; PAGE_BYTES] {
    // SAFETY: the pointer is to 4096 mapped bytes, which live as long as `ram`. By the contract no
    // thread writes them.
    unsafe { &*ram.unchecked().alias(page, 1).cast() }
}

/// One Pages frame in the making.
pub(super) struct PageFrame<'a> {
    ram: &'a GuestRam,
    list: RunList,
    head: Vec<u8>,
    /// The bytes of the data pages of a running guest. A frame of a stopped guest has none.
    copies: Vec<u8>,
    /// Whether the guest runs.
    copied: bool,
    /// The most data pages of this frame.
    most: u32,
    /// The result of the last search for allocated pages: its start, and the next allocated range.
    /// While the guest runs, a result serves one frame. A guest that has stopped fills no hole.
    allocated: (u64, Range<u64>),
    /// The machine, which may have to bring its RAM up to date.
    machine: Option<&'a dyn Machine>,
    /// The pages that are up to date since this frame began.
    fresh: Range<u64>,
    /// The hashes of the bytes that the destination has, if they are known.
    hashes: Option<&'a SentHashes>,
    /// The hashes of the copies, in their order.
    copied_hashes: Vec<u64>,
    /// Claimed pages of a running guest that have not changed since they were sent.
    unchanged: Vec<Range<usize>>,
}

impl<'a> PageFrame<'a> {
    pub(super) fn new(ram: &'a GuestRam) -> Self {
        Self {
            ram,
            list: RunList::new(ram.pages()),
            head: Vec::new(),
            copies: Vec::new(),
            copied: false,
            most: FRAME_PAGES,
            allocated: (0, 0..0),
            machine: None,
            fresh: 0..0,
            hashes: None,
            copied_hashes: Vec::new(),
            unchanged: Vec::new(),
        }
    }

    /// The frame of a machine's memory.
    pub(super) fn of(machine: &'a dyn Machine) -> Self {
        Self {
            machine: Some(machine),
            ..Self::new(machine.ram())
        }
    }

    /// From now on, pages are compared with what the destination has.
    pub(super) fn compare_with(&mut self, hashes: Option<&'a SentHashes>) {
        self.hashes = hashes;
    }

    /// Brings an unsent page of a running guest up to date, and some behind it. Returns the end of
    /// the pages that are.
    fn refresh(&mut self, page: u64) -> u64 {
        if !self.fresh.contains(&page) {
            let pages = u64::from(FRAME_PAGES).min(self.ram.pages() - page);
            let copied = self.machine.filter(|_| self.copied);
            let copied = copied.is_some_and(|machine| machine.refresh(RamPage(page), pages));
            self.fresh = if copied {
                self.forget_holes();
                page..page + pages
            } else {
                0..u64::MAX
            };
        }
        self.fresh.end
    }

    /// Whether the page is a hole. A hole is zero, and reading it would allocate it.
    fn is_hole(&mut self, page: u64) -> Result<bool, MigrationError> {
        let (from, allocated) = &self.allocated;
        if !(*from..allocated.end).contains(&page) {
            let end = self.ram.pages();
            // Each page behind the first would be a system call, also if it is not unsent.
            let next = self.ram.next_allocated(RamPage(page), 1)?;
            let next = next.unwrap_or(end..end);
            self.allocated = (page, next);
        }
        Ok(page < self.allocated.1.start)
    }

    /// Fills the frame with unsent pages of a running guest, from `cursor` on. Returns the cursor
    /// for the next frame, or `None` if no page behind it is unsent.
    pub(super) fn copy(
        &mut self,
        ledger: &Ledger,
        cursor: usize,
    ) -> Result<Option<usize>, MigrationError> {
        self.copied = true;
        self.most = FRAME_PAGES;
        self.copies.resize(FRAME_PAGES as usize * PAGE_BYTES, 0);
        // The guest may have written a hole since the last frame.
        self.forget_holes();
        self.fill(ledger, cursor, RUNNING_ZERO_PAGES)
    }

    /// As [`Self::copy`], for a guest that has stopped for good. The frame has at most `most` data
    /// pages, up to [`FRAME_PAGES`]. With 0 it has the zero pages before the next data page.
    ///
    /// # Safety
    /// Until the frame is sent or dropped:
    /// 1. No vCPU of the VM runs.
    /// 2. No other thread writes the memory of unsent pages.
    pub(super) unsafe fn borrow(
        &mut self,
        ledger: &Ledger,
        cursor: usize,
        most: u32,
    ) -> Result<Option<usize>, MigrationError> {
        self.has_stopped();
        self.most = most;
        self.fill(ledger, cursor, FRAME_ZERO_PAGES)
    }

    /// Fills the frame with those of `pages` that are unsent, as [`Self::borrow`] does. They
    /// ascend, and are at most [`FRAME_PAGES`]. Returns the number of those that need no other
    /// frame.
    ///
    /// # Safety
    /// As for [`Self::borrow`].
    pub(super) unsafe fn borrow_pages(
        &mut self,
        ledger: &Ledger,
        pages: &[RamPage],
        most: u32,
    ) -> Result<usize, MigrationError> {
        self.has_stopped();
        self.most = most;
        self.clear();
        for (before, page) in pages.iter().enumerate() {
            if self.list.data_pages() == most.max(1)
                || most == 0 && !self.is_hole(page.0)? && !self.is_zero(*page)
            {
                return Ok(before);
            }
            if ledger.claim(*page) {
                let page = page.index()..page.index() + 1;
                if self.add(page.clone())?.end == page.start {
                    ledger.unclaim(page);
                    return Ok(before);
                }
            }
        }
        Ok(pages.len())
    }

    fn clear(&mut self) {
        self.list.clear();
        self.copied_hashes.clear();
    }

    fn forget_holes(&mut self) {
        self.allocated = (0, 0..0);
    }

    /// The guest has stopped for good.
    fn has_stopped(&mut self) {
        if std::mem::take(&mut self.copied) {
            // The guest may have written a hole between the last copy and its stop.
            self.forget_holes();
            self.copies = Vec::new();
        }
    }

    fn fill(
        &mut self,
        ledger: &Ledger,
        cursor: usize,
        most_zero: u64,
    ) -> Result<Option<usize>, MigrationError> {
        self.clear();
        self.fresh = 0..0;
        let mut at = cursor;
        let (mut zero, mut unchanged) = (0, 0);
        let most = self.most.max(1);
        while self.list.data_pages() < most && zero < most_zero && unchanged < SCAN_PAGES {
            let Some(next) = ledger.unsent().next_set(at) else {
                return Ok(None);
            };
            let fresh = self.refresh(next as u64) - next as u64;
            // Holes need no look at their pages, so many of them are claimed at a time.
            let limit = if self.is_hole(next as u64)? {
                (self.allocated.1.start - next as u64).min(most_zero - zero)
            } else if self.most == 0 && !self.is_zero(RamPage(next as u64)) {
                // A request for it would take a claim for its answer.
                return Ok(Some(next));
            } else {
                u64::from(most - self.list.data_pages())
            };
            let Some(claimed) = ledger.claim_run(next, limit.min(fresh) as usize) else {
                return Ok(None);
            };
            let added = self.add(claimed.clone())?;
            zero += added.zero;
            unchanged += added.unchanged;
            at = added.end;
            if at < claimed.end {
                ledger.unclaim(at..claimed.end);
                break;
            }
        }
        Ok(Some(at))
    }

    /// Adds claimed pages until the frame is full.
    fn add(&mut self, pages: Range<usize>) -> Result<Added, MigrationError> {
        let mut added = Added {
            end: pages.start,
            zero: 0,
            unchanged: 0,
        };
        for index in pages {
            let page = RamPage(index as u64);
            // The first pages of the range may have been another thread's.
            self.refresh(page.0);
            let kind = if self.is_hole(page.0)? {
                RunKind::Zero
            } else if self.list.data_pages() == self.most && self.most > 0 {
                // Other threads have claimed the hole that this run was to be.
                return Ok(added);
            } else if self.is_zero(page) {
                RunKind::Zero
            } else if self.most == 0 {
                return Ok(added);
            } else {
                RunKind::Data
            };
            let (kind, hash) = self.compared(page, kind);
            if self.copied && kind == RunKind::Confirmed {
                self.note_unchanged(index);
                // Holes cost no look at their bytes.
                added.unchanged += u64::from(hash != SentHashes::of_zero());
                added.zero += u64::from(hash == SentHashes::of_zero());
                added.end = index + 1;
                continue;
            }
            if self.list.push(page, kind).is_err() {
                return Ok(added);
            }
            if self.copied && kind == RunKind::Data && self.hashes.is_some() {
                self.copied_hashes.push(hash);
            }
            added.zero += u64::from(kind == RunKind::Zero);
            added.end = index + 1;
        }
        Ok(added)
    }

    /// The hashes that pages are compared with.
    pub(super) fn hashes(&self) -> Option<&'a SentHashes> {
        self.hashes
    }

    /// The kind of a page's run, and its hash. A page is confirmed if the destination has its
    /// bytes. A stopped guest's zero page is sent as zero in any case, which costs as little.
    fn compared(&self, page: RamPage, kind: RunKind) -> (RunKind, u64) {
        let Some(hashes) = self.hashes else {
            return (kind, 0);
        };
        let hash = match kind {
            RunKind::Data if self.copied => hashes.of(self.next_copy()),
            // SAFETY: the contract of `borrow`.
            RunKind::Data => hashes.of(unsafe { stopped_page(self.ram, page) }),
            _ => SentHashes::of_zero(),
        };
        let known = hashes.is(page, hash) && (self.copied || kind == RunKind::Data);
        (if known { RunKind::Confirmed } else { kind }, hash)
    }

    /// The place of the next copy of a page.
    fn next_copy(&self) -> &[u8; PAGE_BYTES] {
        let copy = self.copies[self.list.data_bytes()..].first_chunk();
        copy.expect("a whole page")
    }

    fn note_unchanged(&mut self, index: usize) {
        match self.unchanged.last_mut() {
            Some(last) if last.end == index => last.end += 1,
            _ => self.unchanged.push(index..index + 1),
        }
    }

    /// Acknowledges the pages that need not be sent. Returns their number.
    pub(super) fn release_unchanged(&mut self, ledger: &Ledger) -> usize {
        let pages = self.unchanged.drain(..);
        pages.map(|run| ledger.acknowledge(run)).sum()
    }

    /// Makes the pages that need not be sent unsent again.
    pub(super) fn give_back_unchanged(&mut self, ledger: &Ledger) {
        for run in self.unchanged.drain(..) {
            ledger.unclaim(run);
        }
    }

    /// Notes what the frame brings of each page. The frame is one of a running guest.
    pub(super) fn note_sent(&self, hashes: &SentHashes) {
        let mut data = self.copied_hashes.iter();
        for run in self.list.runs() {
            for page in (run.first.0..run.end()).map(RamPage) {
                let hash = match run.kind {
                    RunKind::Data => *data.next().expect("a hash for each copy"),
                    _ => SentHashes::of_zero(),
                };
                hashes.note(page, hash);
            }
        }
    }

    /// Whether the page is zero. Copies the page of a running guest to the end of the frame's data.
    fn is_zero(&mut self, page: RamPage) -> bool {
        if self.copied {
            let at = self.list.data_bytes();
            let copy = self.copies[at..at + PAGE_BYTES]
                .first_chunk_mut()
                .expect("a whole page");
            // SAFETY: a source has all its pages.
            unsafe { self.ram.unchecked() }.read(page, copy);
            is_zero(copy)
        } else {
            // SAFETY: the contract of `borrow`.
            is_zero(unsafe { stopped_page(self.ram, page) })
        }
    }

    /// Makes the pages of the frame unsent again.
    pub(super) fn give_back(&mut self, ledger: &Ledger) {
        for run in self.list.runs() {
            ledger.unclaim(run.first.index()..run.end() as usize);
        }
        self.clear();
    }

    /// Whether the guest runs.
    pub(super) fn is_copied(&self) -> bool {
        self.copied
    }

    pub(super) fn list(&self) -> &RunList {
        &self.list
    }

    /// Sends the frame.
    pub(super) fn send(
        &mut self,
        connection: &Connection,
        wait: &Wait<'_>,
    ) -> Result<(), MigrationError> {
        let mut hasher = self.list.encode_head(&mut self.head);
        let mut slices = Vec::with_capacity(self.list.runs().len() + 1);
        if self.copied {
            let copies = &self.copies[..self.list.data_bytes()];
            hasher.update(copies);
            slices.push(copies);
        } else {
            let bytes = |run: &&crate::wire::Run| run.kind != RunKind::Zero;
            for run in self.list.runs().iter().filter(bytes) {
                // SAFETY: a source has all its pages.
                let start = unsafe { self.ram.unchecked() }.alias(run.first, run.pages.into());
                let len = run.pages as usize * PAGE_BYTES;
                // SAFETY: `alias` checked that the whole run is mapped as long as the `GuestRam`
                // lives. By the contract of `borrow` no thread writes it.
                let bytes = unsafe { std::slice::from_raw_parts(start.cast_const(), len) };
                if run.kind == RunKind::Confirmed {
                    hasher.update_unsent(bytes);
                } else {
                    hasher.update(bytes);
                    slices.push(bytes);
                }
            }
        }
        hasher.seal(&mut self.head);
        let head = std::iter::once(&self.head[..]);
        let all: Vec<IoSlice<'_>> = head.chain(slices).map(IoSlice::new).collect();
        Ok(connection.write_all_vectored(&all, wait)?)
    }
}

/// The pages that were added to a frame.
struct Added {
    /// The first page that was not added.
    end: usize,
    /// The zero pages.
    zero: u64,
    /// The other pages that have not changed since they were sent.
    unchanged: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_machine::{MachineKind, RamLayout};
    use std::sync::Arc;

    /// Memory with bytes in its first page only, whose first pages a frame has copied and a receipt
    /// has acknowledged. The frame has seen that all pages behind are a hole.
    fn copied<'a>(ram: &'a GuestRam, ledger: &Ledger) -> PageFrame<'a> {
        ram.try_write(RamPage(0), &[7; PAGE_BYTES]).unwrap();
        ledger.set_unsent(0..10);
        let mut frame = PageFrame::new(ram);
        frame.copy(ledger, 0).unwrap();
        let runs = frame.list().runs().iter();
        let runs = runs.map(|run| run.first.index()..run.end() as usize);
        ledger.sent(0, runs, PAGE_BYTES as u64);
        assert_eq!(ledger.receipt(0, 1).unwrap().pages, 10);
        frame
    }

    fn memory() -> (GuestRam, Ledger) {
        let ram = GuestRam::new(RamLayout::for_memory(256 << 12).unwrap()).unwrap();
        (ram, Ledger::try_new(256, 1).unwrap())
    }

    #[test]
    fn a_hole_that_the_guest_filled_before_it_stopped_is_sent() {
        let (ram, ledger) = memory();
        let mut frame = copied(&ram, &ledger);
        ram.try_write(RamPage(200), &[9; PAGE_BYTES]).unwrap();
        ledger.set_unsent(199..202);
        // SAFETY: there are no vCPUs, and this thread alone writes.
        unsafe { frame.borrow(&ledger, 0, FRAME_PAGES) }.unwrap();
        let kinds: Vec<_> = frame
            .list()
            .runs()
            .iter()
            .map(|run| (run.first.0, run.kind))
            .collect();
        let right = [
            (199, RunKind::Zero),
            (200, RunKind::Data),
            (201, RunKind::Zero),
        ];
        assert_eq!(kinds, right);
    }

    #[test]
    fn a_hole_that_the_guest_filled_between_two_passes_is_sent() {
        let (ram, ledger) = memory();
        let mut frame = copied(&ram, &ledger);
        ram.try_write(RamPage(200), &[9; PAGE_BYTES]).unwrap();
        ledger.set_unsent(200..201);
        frame.copy(&ledger, 0).unwrap();
        assert_eq!(frame.list().data_pages(), 1);
    }

    #[test]
    fn a_frame_without_room_for_data_has_the_zero_pages_before_it() {
        let (ram, ledger) = memory();
        // Only the second is no hole.
        ram.try_write(RamPage(100), &[0; PAGE_BYTES]).unwrap();
        ram.try_write(RamPage(200), &[9; PAGE_BYTES]).unwrap();
        ledger.set_unsent(99..256);
        let mut frame = PageFrame::new(&ram);
        for first in [Some(99), None] {
            // SAFETY: there are no vCPUs, and this thread alone writes.
            assert_eq!(unsafe { frame.borrow(&ledger, 0, 0) }.unwrap(), Some(200));
            let runs = frame.list().runs();
            assert_eq!(runs.first().map(|run| run.first.0), first);
            assert!(runs.iter().all(|run| run.kind == RunKind::Zero));
            assert_eq!((ledger.in_flight(), ledger.unsent_count()), (101, 56));
        }
        let ahead = [150, 210, 200, 220].map(RamPage);
        for (most, left) in [(0, 2), (1, 3)] {
            // SAFETY: as before.
            let done = unsafe { frame.borrow_pages(&ledger, &ahead, most) };
            assert_eq!((done.unwrap(), frame.list().data_pages()), (left, most));
        }
        assert_eq!((ledger.in_flight(), ledger.unsent_count()), (103, 54));
    }

    #[test]
    fn a_hole_that_the_guest_filled_is_sent_when_it_is_asked_for() {
        let (ram, ledger) = memory();
        let mut frame = copied(&ram, &ledger);
        ram.try_write(RamPage(200), &[9; PAGE_BYTES]).unwrap();
        ledger.set_unsent(200..201);
        // SAFETY: there are no vCPUs, and this thread alone writes.
        unsafe { frame.borrow_pages(&ledger, &[RamPage(200)], 1) }.unwrap();
        assert_eq!(frame.list().data_pages(), 1);
    }

    /// A machine whose guest has its memory elsewhere.
    struct Elsewhere(Arc<GuestRam>);

    impl Machine for Elsewhere {
        fn kind(&self) -> MachineKind<'_> {
            MachineKind::new("test", "test", "test/0")
        }
        fn ram(&self) -> &Arc<GuestRam> {
            &self.0
        }
        /// The guest has bytes in every 50th page.
        fn refresh(&self, first: RamPage, pages: u64) -> bool {
            for page in (first.0..first.0 + pages).filter(|page| page.is_multiple_of(50)) {
                let bytes = [page as u8 + 1; PAGE_BYTES];
                self.0.try_write(RamPage(page), &bytes).unwrap();
            }
            true
        }
    }

    #[test]
    fn unchanged_pages_that_are_given_back_are_unsent() {
        let (ram, ledger) = memory();
        let hashes = SentHashes::try_new(256).unwrap();
        (0..256).for_each(|page| hashes.note(RamPage(page), SentHashes::of_zero()));
        ledger.set_unsent(0..256);
        let mut frame = PageFrame::new(&ram);
        frame.compare_with(Some(&hashes));
        frame.copy(&ledger, 0).unwrap();
        assert_eq!((frame.list().is_empty(), ledger.in_flight()), (true, 256));
        frame.give_back_unchanged(&ledger);
        assert_eq!((ledger.unsent_count(), ledger.in_flight()), (256, 0));
        assert_eq!(frame.release_unchanged(&ledger), 0);
    }

    #[test]
    fn memory_that_is_a_copy_is_brought_up_to_date_before_it_is_sent() {
        let (ram, ledger) = memory();
        let machine = Elsewhere(Arc::new(ram));
        ledger.set_unsent(0..256);
        // Another thread has these, so the claim begins behind the pages that are up to date.
        assert_eq!(ledger.claim_run(0, 70), Some(0..70));
        let mut frame = PageFrame::of(&machine);
        assert_eq!(frame.copy(&ledger, 0).unwrap(), None);
        let runs = frame.list().runs().iter();
        let data = runs.filter(|run| run.kind == RunKind::Data);
        let pages: Vec<_> = data.map(|run| (run.first.0, run.pages)).collect();
        assert_eq!(pages, [(100, 1), (150, 1), (200, 1), (250, 1)]);
        assert_eq!(frame.copies[..PAGE_BYTES], [101; PAGE_BYTES]);
    }
}
