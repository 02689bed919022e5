//! Firecracker's memory, as its userfaultfd shows it to us.
//!
//! **Guarantee.** A page gets the bytes that have arrived, once, or zeros if the guest gave it back
//! before. When [`Memory::leave`] returns, Firecracker needs nobody for its memory.
//!
//! **Mechanism.** Removals are read and recorded under the exclusive side of a gate. Pages are
//! placed under its shared side. Until a removal is read, the kernel refuses to place pages
//! (`EAGAIN`). So no page is placed between the record of a removal and the removal itself. (The
//! pager does the same.)
//!
//! All that must outlive our process lies in [`Kept`]: the regions, the removals, and the messages
//! that were read and not recorded. The next process records these first. Then it wakes all threads
//! of the VM: those whose page is missing fault again.
//!
//! The end takes the registration off the memory: what is missing then was given back, and the
//! kernel fills it with zeros. A thread that began a removal before may still wait for a reader.
//! The kernel says so by `EAGAIN` too.

use crate::foreign::VmmError;
use crate::foreign::kept::{Kept, OWN, OWN_BITS};
use pageferry_addr::{Hva, PAGE_SIZE, RamPage};
use pageferry_machine::FaultEvent;
use pageferry_pager::{Handshake, MAX_REGIONS, Region, Ring};
use pageferry_userfault::PageBitmap;
use pageferry_userfault::uffd::{
    Event, Features, MESSAGE_BYTES, RangeError, Userfaultfd, Wake, decode_message,
};
use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// The numbers of [`Kept`]. The memory is Firecracker's own again, or about to be: nothing is
/// placed any more.
const LEFT: usize = OWN;
/// The count of regions, and three numbers of each.
const REGIONS: usize = OWN + 1;
/// The longest that the kernel may say that a mapping changes.
const CHANGE_LIMIT: Duration = Duration::from_secs(10);
/// The time between two looks at it.
const MOMENT: Duration = Duration::from_micros(50);

pub(super) struct Memory {
    uffd: Userfaultfd,
    regions: Vec<Region>,
    kept: Arc<Kept>,
    /// Shared by those who place pages, exclusive for those who read events.
    gate: RwLock<()>,
    /// Pages that the guest gave back.
    removed: PageBitmap,
    /// Pages that were placed by this process. They are not missing, unless they were given back.
    placed: PageBitmap,
    events: Mutex<Events>,
}

struct Events {
    ring: Ring,
    faults: VecDeque<FaultEvent>,
}

impl AsFd for Memory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }
}

impl Memory {
    /// The memory of a handshake, which must be all of `bytes`.
    pub(super) fn new(
        handshake: Handshake,
        bytes: u64,
        (kept, ring): (&Arc<Kept>, Ring),
    ) -> Result<Self, VmmError> {
        let Handshake {
            mut regions,
            page_bytes,
            uffd,
        } = handshake;
        let refused = |why: String| Err(VmmError::Handshake(why));
        if page_bytes != PAGE_SIZE {
            return refused(format!("its pages have {page_bytes} bytes, expected 4096"));
        }
        // They lie apart in the memory file, and end inside it.
        let all: u64 = regions.iter().map(|region| region.size).sum();
        if all != bytes {
            return refused(format!("its regions have {all} bytes, expected {bytes}"));
        }
        regions.sort_unstable_by_key(|region| region.offset);
        kept.set(REGIONS, regions.len() as u64);
        for (index, region) in regions.iter().enumerate() {
            let numbers = [region.address, region.size, region.offset];
            for (at, number) in numbers.into_iter().enumerate() {
                kept.set(REGIONS + 1 + 3 * index + at, number);
            }
        }
        Self::of(uffd, regions, bytes, (kept, ring))
    }

    /// The memory that a process has left behind.
    pub(super) fn found(
        fd: OwnedFd,
        bytes: u64,
        (kept, ring): (&Arc<Kept>, Ring),
    ) -> Result<Self, VmmError> {
        let uffd = Userfaultfd::adopt(fd, Features::empty());
        let uffd = uffd.map_err(|why| VmmError::Kept(why.to_string()))?;
        let count = kept.get(REGIONS).min(MAX_REGIONS as u64) as usize;
        let number = |index: usize, at: usize| kept.get(REGIONS + 1 + 3 * index + at);
        let regions = (0..count).map(|index| Region {
            address: number(index, 0),
            size: number(index, 1),
            offset: number(index, 2),
        });
        let memory = Self::of(uffd, regions.collect(), bytes, (kept, ring))?;
        let removed = kept.shared.bits(OWN_BITS).words();
        for (index, word) in removed.iter().enumerate() {
            memory.removed.or_word(index, word.load(Ordering::Relaxed));
        }
        memory.record(&mut memory.events());
        for region in &memory.regions {
            // Firecracker may have ended, or have its memory for itself: both are found out later.
            let _ = memory.uffd.wake(Hva(region.address), region.size);
        }
        Ok(memory)
    }

    fn of(
        uffd: Userfaultfd,
        regions: Vec<Region>,
        bytes: u64,
        (kept, ring): (&Arc<Kept>, Ring),
    ) -> Result<Self, VmmError> {
        let bitmap = || {
            PageBitmap::try_new((bytes / PAGE_SIZE) as usize)
                .map_err(|e| VmmError::Handshake(e.to_string()))
        };
        Ok(Self {
            uffd,
            regions,
            kept: Arc::clone(kept),
            gate: RwLock::default(),
            removed: bitmap()?,
            placed: bitmap()?,
            events: Mutex::new(Events {
                ring,
                faults: VecDeque::new(),
            }),
        })
    }

    /// The part of `pages` in the region of the first of them, and its address.
    fn part(&self, pages: &Range<u64>) -> (Hva, u64) {
        let start = pages.start * PAGE_SIZE;
        let index = self.regions.partition_point(|r| r.offset <= start) - 1;
        let region = &self.regions[index];
        let inside = start - region.offset;
        let rest = (region.size - inside) / PAGE_SIZE;
        let count = rest.min(pages.end - pages.start);
        (Hva(region.address + inside), count)
    }

    /// The page at an address.
    fn page_at(&self, at: Hva) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let inside = at.0.checked_sub(region.address)?;
            (inside < region.size).then_some((region.offset + inside) / PAGE_SIZE)
        })
    }

    fn events(&self) -> MutexGuard<'_, Events> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads all events that wait, and records removals.
    fn read_events(&self) -> Result<(), VmmError> {
        let _alone = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        let mut events = self.events();
        loop {
            let messages = self.kept.shared.messages(&mut events.ring);
            let count = self.uffd.read_messages(messages);
            if count.map_err(|e| VmmError::Place(e.to_string()))? == 0 {
                return Ok(());
            }
            self.record(&mut events);
        }
    }

    /// Records removals, passes faults on, and then empties the messages.
    fn record(&self, events: &mut Events) {
        let Events { ring, faults } = events;
        for message in self.kept.shared.messages(ring) {
            match decode_message(message) {
                Some(Event::PageFault(fault)) => {
                    if let Some(page) = self.page_at(fault.address) {
                        faults.push_back(FaultEvent {
                            page: RamPage(page),
                            write: fault.write,
                        });
                    }
                }
                Some(event) => {
                    if let Some(range) = event.dropped(PAGE_SIZE) {
                        self.record_removal(range.start.0, range.end.0);
                    }
                }
                None => {}
            }
            *message = [0; MESSAGE_BYTES];
        }
    }

    fn record_removal(&self, start: u64, end: u64) {
        for region in &self.regions {
            let from = start.max(region.address);
            let to = end.min(region.address + region.size);
            if from < to {
                let page = |at: u64| (region.offset + at - region.address) / PAGE_SIZE;
                let kept = self.kept.shared.bits(OWN_BITS);
                kept.set(page(from)..page(to));
                self.removed
                    .set_range(page(from) as usize..page(to) as usize);
            }
        }
    }

    /// The next fault whose page was not given back. Faults on the others are answered.
    pub(super) fn next_fault(&self) -> Result<Option<FaultEvent>, VmmError> {
        let pop = || self.events().faults.pop_front();
        loop {
            let mut fault = pop();
            if fault.is_none() {
                self.read_events()?;
                fault = pop();
            }
            let Some(fault) = fault else {
                return Ok(None);
            };
            if !self.removed.test(fault.page) {
                return Ok(Some(fault));
            }
            self.place(fault.page.0..fault.page.0 + 1, &|_| None, &|| ())?;
        }
    }

    /// Places `pages`. `bytes` gives those of a part. Pages that were given back become zeros.
    /// `read` is called after events were read here, so that another thread takes their faults.
    pub(super) fn place<'b>(
        &self,
        pages: Range<u64>,
        bytes: &dyn Fn(Range<u64>) -> Option<&'b [u8]>,
        read: &dyn Fn(),
    ) -> Result<(), VmmError> {
        let began = Instant::now();
        let mut at = pages.start;
        while at < pages.end && self.kept.get(LEFT) == 0 {
            let shared = self.gate.read().unwrap_or_else(PoisonError::into_inner);
            let (hva, count) = self.part(&(at..pages.end));
            let next = |bits: &PageBitmap| bits.next_set(at as usize).unwrap_or(usize::MAX) as u64;
            let special = next(&self.removed).min(next(&self.placed));
            let outcome = if self.removed.test(RamPage(at)) {
                self.uffd
                    .zeropage(hva, PAGE_SIZE, Wake::Now)
                    .map(|()| at + 1)
            } else if self.placed.test(RamPage(at)) {
                self.uffd.wake(hva, PAGE_SIZE).map(|()| at + 1)
            } else {
                let end = special.min(at + count);
                match bytes(at..end) {
                    Some(bytes) => self.uffd.copy(hva, bytes, Wake::Now).map(|()| end),
                    None => return Ok(()),
                }
            };
            let (done, error) = match outcome {
                Ok(end) => (end, None),
                Err(error) => (at + error.done / PAGE_SIZE, Some(error)),
            };
            if !self.removed.test(RamPage(at)) {
                self.placed.set_range(at as usize..done as usize);
            }
            drop(shared);
            at = done;
            let Some(error) = error else { continue };
            if error.is_already_there() {
                // Another thread placed it. Its sleepers may have come between.
                let (hva, _) = self.part(&(at..pages.end));
                self.uffd.wake(hva, PAGE_SIZE).map_err(cannot_place)?;
                at += 1;
            } else if error.is_changing() && began.elapsed() < CHANGE_LIMIT {
                self.read_events()?;
                read();
                std::thread::sleep(MOMENT);
            } else {
                return Err(cannot_place(error));
            }
        }
        Ok(())
    }

    /// The pages from `from` on that were neither placed nor given back: the next run of them.
    pub(super) fn next_open(&self, from: u64) -> Option<Range<u64>> {
        if self.kept.get(LEFT) != 0 {
            return None;
        }
        let pages = self.placed.pages();
        let mut at = from as usize;
        loop {
            at = self.placed.next_clear(at).filter(|at| *at < pages)?;
            if !self.removed.test(RamPage(at as u64)) {
                break;
            }
            at += 1;
        }
        let next = |bits: &PageBitmap| bits.next_set(at).unwrap_or(pages);
        let end = next(&self.placed).min(next(&self.removed)).min(pages);
        Some(at as u64..end as u64)
    }

    /// Leaves the memory to Firecracker. Pages that are missing are zero from now on.
    pub(super) fn leave(&self) -> Result<(), VmmError> {
        self.kept.set(LEFT, 1);
        for region in &self.regions {
            let start = Hva(region.address);
            let left = self.uffd.unregister(start, region.size);
            left.map_err(cannot_place)?;
        }
        let began = Instant::now();
        let start = Hva(self.regions[0].address);
        loop {
            self.read_events()?;
            match self.uffd.zeropage(start, PAGE_SIZE, Wake::Later) {
                Err(error) if error.is_changing() && began.elapsed() < CHANGE_LIMIT => {
                    std::thread::sleep(MOMENT);
                }
                // It is not registered, and nobody waits.
                Err(error) if error.is_not_registered() => return Ok(()),
                Err(error) => return Err(cannot_place(error)),
                Ok(()) => return Err(VmmError::Place("it was registered again".into())),
            }
        }
    }
}

fn cannot_place(error: RangeError) -> VmmError {
    match error.is_process_gone() {
        true => VmmError::Ended,
        false => VmmError::Place(error.to_string()),
    }
}
