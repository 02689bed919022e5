//! The pages of a snapshot, which come when a process asks for them, or before.
//!
//! **Guarantee.** Each page is written once, before anyone may be told that it is here. A page that
//! was asked for waits for one read at most, as long as the source works. A source that fails is
//! asked again, and the page waits. Zero pages cost no read.
//!
//! **Mechanism.** The source is read in its own blocks, each by one thread. A thread that needs a
//! page of a missing block reads the block itself. Other threads read ahead, from behind the block
//! that was needed last, then from the start. They begin no read while a needed one is under way.
//! Failed reads leave the block missing.
//!
//! **Neighbours.** `snapshot` has the places of pages. `pager` has the sources.

use super::snapshot::Snapshot;
use crate::foreign::kept::Kept;
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_machine::GuestRam;
use pageferry_pager::{Source, SourceError};
use pageferry_userfault::PageBitmap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The pauses before a needed read is repeated.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LAST_PAUSE: Duration = Duration::from_secs(1);
/// The pause before a read ahead is repeated.
const AHEAD_PAUSE: Duration = Duration::from_millis(100);
/// The longest wait without a look at the end.
const WATCH: Duration = Duration::from_millis(50);

/// A block of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Missing,
    /// One thread reads and writes it.
    Busy,
    Here,
}

struct Blocks {
    states: Vec<Block>,
    /// Where the threads that read ahead look first.
    next: usize,
    /// A needed read is under way.
    needed: bool,
    /// The blocks that are not here.
    left: usize,
}

/// The cost of reading.
#[derive(Debug, Default)]
pub(super) struct Figures {
    pub(super) reads: AtomicU64,
    pub(super) read_bytes: AtomicU64,
    pub(super) failed_reads: AtomicU64,
    /// Requests that waited for a read.
    pub(super) waits: AtomicU64,
    pub(super) waited_ns: AtomicU64,
    pub(super) longest_ns: AtomicU64,
}

pub(super) struct Pages<'a> {
    snapshot: &'a Snapshot,
    source: &'a dyn Source,
    ram: &'a GuestRam,
    block: u64,
    blocks: Mutex<Blocks>,
    changed: Condvar,
    /// Pages that are written, or were given as zeros. Written under a busy block, or under the
    /// lock while the block is missing.
    placed: PageBitmap,
    /// The same, for the next process: noted before the process hears of the page. So a page that
    /// the guest may have written is never written here again.
    kept: &'a Kept,
    over: AtomicBool,
    /// The source has failed a needed read, whose page is not here yet.
    lost: AtomicBool,
    tell: &'a (dyn Fn(Option<&SourceError>) + Sync),
    pub(super) figures: Figures,
}

impl<'a> Pages<'a> {
    /// The pages of `snapshot` in `source`, for `ram`. `tell` hears of a failed source, and of one
    /// that works again.
    pub(super) fn new(
        snapshot: &'a Snapshot,
        source: &'a dyn Source,
        ram: &'a GuestRam,
        kept: &'a Kept,
        tell: &'a (dyn Fn(Option<&SourceError>) + Sync),
    ) -> Self {
        let placed = PageBitmap::new(ram.pages() as usize);
        placed.set_range(0..ram.pages() as usize);
        for (word, missing) in kept.missing().into_iter().enumerate() {
            placed.take_word(word, missing);
        }
        let block = source.block().max(PAGE_SIZE);
        let blocks = snapshot.memory_bytes().div_ceil(block) as usize;
        Self {
            snapshot,
            source,
            ram,
            block,
            blocks: Mutex::new(Blocks {
                states: vec![Block::Missing; blocks],
                next: 0,
                needed: false,
                left: blocks,
            }),
            changed: Condvar::new(),
            placed,
            kept,
            over: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            tell,
            figures: Figures::default(),
        }
    }

    fn locked(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'b>(&self, blocks: MutexGuard<'b, Blocks>, time: Duration) -> MutexGuard<'b, Blocks> {
        let waited = self.changed.wait_timeout(blocks, time);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Ends all waits.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Release);
        drop(self.locked());
        self.changed.notify_all();
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// The place of a page in the source.
    fn offset_of(&self, page: u64) -> u64 {
        let parts = &self.snapshot.parts;
        let part = parts[parts.partition_point(|part| part.first <= page) - 1];
        part.offset + (page - part.first) * PAGE_SIZE
    }

    /// Puts pages in place. Returns false if they never come: all is over.
    pub(super) fn bring(&self, first: RamPage, pages: u64) -> bool {
        let began = Instant::now();
        let mut waited = false;
        let here = (first.0..first.0 + pages).all(|page| self.bring_one(page, &mut waited));
        if waited {
            let ns = began.elapsed().as_nanos() as u64;
            self.figures.waits.fetch_add(1, Ordering::Relaxed);
            self.figures.waited_ns.fetch_add(ns, Ordering::Relaxed);
            self.figures.longest_ns.fetch_max(ns, Ordering::Relaxed);
        }
        if here && self.lost.swap(false, Ordering::AcqRel) {
            (self.tell)(None);
        }
        here
    }

    fn bring_one(&self, page: u64, waited: &mut bool) -> bool {
        let offset = self.offset_of(page);
        let index = (offset / self.block) as usize;
        let (mut pause, mut zero) = (FIRST_PAUSE, None);
        let mut blocks = self.locked();
        loop {
            let placed = self.placed.test(RamPage(page));
            if placed || blocks.states[index] == Block::Here {
                return true;
            }
            if self.is_over() {
                return false;
            }
            if blocks.states[index] == Block::Busy {
                *waited = true;
                blocks = self.wait(blocks, WATCH);
                continue;
            }
            let Some(zero) = zero else {
                // The index of a source may lie elsewhere.
                drop(blocks);
                zero = Some(self.source.is_zero(offset, PAGE_SIZE));
                blocks = self.locked();
                continue;
            };
            if zero {
                // The memfd has zeros there, and whoever writes the block leaves this page out.
                self.place(RamPage(page));
                return true;
            }
            *waited = true;
            blocks.states[index] = Block::Busy;
            blocks.needed = true;
            blocks.next = index + 1;
            drop(blocks);
            let read = self.fill(index, &mut Vec::new());
            if let Err(why) = &read
                && !self.lost.swap(true, Ordering::AcqRel)
            {
                (self.tell)(Some(why));
            }
            blocks = self.done(index, read.is_ok());
            blocks.needed = false;
            if read.is_ok() {
                return true;
            }
            let until = Instant::now() + pause;
            pause = (pause * 2).min(LAST_PAUSE);
            // Another thread may bring it meanwhile.
            while blocks.states[index] != Block::Here && !self.is_over() {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                blocks = self.wait(blocks, left.min(WATCH));
            }
        }
    }

    /// A page is as in the snapshot. Nobody was told yet.
    fn place(&self, page: RamPage) {
        self.kept.came(page, 1);
        self.placed.set(page);
    }

    /// Notes the end of a read.
    fn done(&self, index: usize, here: bool) -> MutexGuard<'_, Blocks> {
        let mut blocks = self.locked();
        blocks.states[index] = if here { Block::Here } else { Block::Missing };
        blocks.left -= usize::from(here);
        self.changed.notify_all();
        blocks
    }

    /// Reads a busy block, and writes its pages.
    fn fill(&self, index: usize, buffer: &mut Vec<u8>) -> Result<(), SourceError> {
        let start = index as u64 * self.block;
        let end = (start + self.block).min(self.snapshot.memory_bytes());
        let bytes = end - start;
        // The memfd has zeros there. The pages are noted like others: the guest may write them.
        let zero = self.source.is_zero(start, bytes);
        if !zero {
            buffer.resize(bytes as usize, 0);
            self.figures.reads.fetch_add(1, Ordering::Relaxed);
            if let Err(why) = self.source.read(start, buffer) {
                self.figures.failed_reads.fetch_add(1, Ordering::Relaxed);
                return Err(why);
            }
            self.figures.read_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        for part in &self.snapshot.parts {
            let from = start.max(part.offset);
            let to = end.min(part.offset + part.pages * PAGE_SIZE);
            for offset in (from..to).step_by(PAGE_SIZE as usize) {
                let page = RamPage(part.first + (offset - part.offset) / PAGE_SIZE);
                if self.placed.test(page) {
                    continue;
                }
                if !zero {
                    let at = (offset - start) as usize;
                    let written = self
                        .ram
                        .try_write(page, &buffer[at..at + PAGE_SIZE as usize]);
                    written.expect("no migration holds this memory, and the page is RAM");
                }
                self.place(page);
            }
        }
        Ok(())
    }

    /// Reads blocks that nobody has asked for, until all are here.
    pub(super) fn read_ahead(&self) {
        let mut buffer = Vec::new();
        let mut blocks = self.locked();
        while blocks.left > 0 && !self.is_over() {
            let next = match blocks.needed {
                true => None,
                false => blocks.next_missing(),
            };
            let Some(index) = next else {
                blocks = self.wait(blocks, WATCH);
                continue;
            };
            blocks.states[index] = Block::Busy;
            blocks.next = index + 1;
            drop(blocks);
            let read = self.fill(index, &mut buffer);
            blocks = self.done(index, read.is_ok());
            if read.is_err() {
                // A page that nobody waits for is no loss.
                let until = Instant::now() + AHEAD_PAUSE;
                while !self.is_over() && Instant::now() < until {
                    blocks = self.wait(blocks, WATCH);
                }
            }
        }
    }
}

impl Blocks {
    /// The next missing block from `next` on, or else the first.
    fn next_missing(&self) -> Option<usize> {
        let missing = |from: usize, to: usize| {
            let states = self.states.get(from..to)?;
            let at = states.iter().position(|state| *state == Block::Missing)?;
            Some(from + at)
        };
        let end = self.states.len();
        missing(self.next, end).or_else(|| missing(0, self.next.min(end)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ch::snapshot::Part;
    use pageferry_addr::Gpa;
    use pageferry_machine::RamLayout;
    use std::sync::mpsc::{Receiver, Sender, channel};

    const BLOCK: u64 = 4 * PAGE_SIZE;
    const PAGES: u64 = 32;
    const LIMIT: Duration = Duration::from_secs(20);

    /// Bytes of sevens. The block of page 20 waits until it is let go.
    #[derive(Debug)]
    struct Sevens {
        reads: Mutex<Vec<u64>>,
        begun: Sender<u64>,
        go: Mutex<Receiver<()>>,
        /// Whether all is zero. Otherwise one page is.
        zero: bool,
    }

    impl Source for Sevens {
        fn bytes(&self) -> u64 {
            PAGES * PAGE_SIZE
        }
        fn block(&self) -> u64 {
            BLOCK
        }
        fn is_zero(&self, offset: u64, len: u64) -> bool {
            self.zero || offset == 0 && len == PAGE_SIZE
        }
        fn read_now(&self, _: u64, _: &mut [u8]) -> Result<bool, SourceError> {
            Ok(false)
        }
        fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SourceError> {
            self.reads.lock().unwrap().push(offset / BLOCK);
            let _ = self.begun.send(offset / BLOCK);
            if offset / BLOCK == 5 {
                self.go.lock().unwrap().recv_timeout(LIMIT).unwrap();
            }
            buffer.fill(7);
            Ok(())
        }
        fn identity(&self) -> String {
            String::new()
        }
    }

    /// Page 0 of RAM is page 16 of the file.
    fn snapshot() -> Snapshot {
        let part = |first, offset| Part {
            first,
            pages: PAGES / 2,
            offset: offset * PAGE_SIZE,
        };
        Snapshot {
            config: Vec::new(),
            state: Vec::new(),
            mappings: Vec::new(),
            parts: vec![part(0, PAGES / 2), part(PAGES / 2, 0)],
        }
    }

    fn kept() -> Kept {
        let (kept, _) = Kept::new(PAGES, b"").unwrap();
        kept.all_missing(PAGES);
        kept
    }

    fn ram() -> GuestRam {
        let layout = RamLayout::new(&[(Gpa(0), PAGES * PAGE_SIZE)]).unwrap();
        GuestRam::new(layout).unwrap()
    }

    fn source() -> (Sevens, Sender<()>, Receiver<u64>) {
        let (begun, started) = channel();
        let (let_go, go) = channel();
        let source = Sevens {
            reads: Mutex::default(),
            begun,
            go: Mutex::new(go),
            zero: false,
        };
        (source, let_go, started)
    }

    #[test]
    fn reading_ahead_waits_for_a_needed_read_and_goes_on_behind_it() {
        let (source, let_go, begun) = source();
        let (snapshot, ram) = (snapshot(), ram());
        let kept = kept();
        let pages = Pages::new(&snapshot, &source, &ram, &kept, &|_| ());
        let (first, beside, brought) = std::thread::scope(|scope| {
            // Page 20 of the file.
            let needed = scope.spawn(|| pages.bring(RamPage(4), 1));
            let first = begun.recv_timeout(LIMIT);
            scope.spawn(|| pages.read_ahead());
            std::thread::sleep(Duration::from_millis(100));
            let beside = source.reads.lock().unwrap().clone();
            let_go.send(()).unwrap();
            (first, beside, needed.join())
        });
        assert_eq!((first, &beside[..]), (Ok(5), &[5][..]));
        assert!(brought.unwrap());
        assert_eq!(*source.reads.lock().unwrap(), [5, 6, 7, 0, 1, 2, 3, 4]);
        let mut byte = [0];
        for page in 0..PAGES {
            ram.try_read(RamPage(page), &mut byte).unwrap();
            assert_eq!(byte, [7], "page {page}");
        }
    }

    /// The page is the guest's by the time at which its block is read.
    #[test]
    fn a_page_that_was_given_as_zeros_is_not_written_again() {
        let (source, let_go, _begun) = source();
        let (snapshot, ram) = (snapshot(), ram());
        let kept = kept();
        let pages = Pages::new(&snapshot, &source, &ram, &kept, &|_| ());
        let zero = RamPage(PAGES / 2);
        assert!(pages.bring(zero, 1));
        assert!(source.reads.lock().unwrap().is_empty());
        ram.try_write(zero, &[9]).unwrap();
        let_go.send(()).unwrap();
        pages.read_ahead();
        let mut bytes = [0; 2];
        ram.try_read(zero, &mut bytes).unwrap();
        assert_eq!(bytes, [9, 0]);
        ram.try_read(RamPage(zero.0 + 1), &mut bytes).unwrap();
        assert_eq!(bytes, [7, 7]);
    }

    /// Of a process that is killed, the next one knows each page that was told to be here.
    #[test]
    fn a_block_of_zeros_is_noted_like_others() {
        let (mut source, _let_go, _begun) = source();
        source.zero = true;
        let (snapshot, ram, kept) = (snapshot(), ram(), kept());
        let pages = Pages::new(&snapshot, &source, &ram, &kept, &|_| ());
        pages.read_ahead();
        assert!(source.reads.lock().unwrap().is_empty());
        assert!(kept.missing().iter().all(|word| *word == 0));
    }
}
