//! The reads of a VM: those that its faults wait for, and those ahead of them.
//!
//! **Guarantee.** A fault never waits for the read of another block, as long as fewer than
//! [`THREADS`](crate::pool::THREADS) of its VM are under way. A block is read by one thread at a
//! time, but for what is loaded in the background. Its faults and its recorded pages share that
//! read. No fault is lost: each is in `coming` until its page is placed.
//!
//! **Mechanism.** Faults queue their block in a pool. Threads that read ahead take blocks from a
//! plan, or bring their own. A fault takes its block out of the plan, so nothing is read twice.
//!
//! **Neighbours.** `serve` queues the faults, `background` reads ahead, `pool` has the threads.

use crate::answer::Placed;
use crate::pool::{FIRST_PAUSE, LAST_PAUSE, Pool};
use crate::timeline::Came;
use crate::vm::{Vm, locked};
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The pause before a read ahead is repeated, and between looks at a block that another thread
/// reads.
const AHEAD_PAUSE: Duration = Duration::from_millis(100);
const LOOK: Duration = Duration::from_millis(1);
/// The faults of a VM that wait are bounded by its threads. This bounds a VMM that lies.
const MAX_WAITING: usize = 1 << 20;

/// The reads of a VM. A block has the number of its first page.
#[derive(Debug, Default)]
pub(crate) struct Fetch {
    blocks: Mutex<Blocks>,
    pool: Pool<u64>,
}

#[derive(Debug, Default)]
struct Blocks {
    /// All blocks that are asked for or read.
    coming: HashMap<u64, Block>,
    /// The recorded pages of blocks that nobody has asked for, sorted.
    planned: HashMap<u64, Vec<u64>>,
    faults: usize,
}

#[derive(Debug)]
struct Block {
    /// The pages that are read.
    pages: Range<u64>,
    /// Pages and the arrivals of their faults.
    faults: Vec<(u64, Instant)>,
    /// The pages that are placed without a fault.
    ahead: Vec<u64>,
    came: Came,
    pause: Duration,
}

/// The faults and pages that wait for a block that was read.
struct Waiting {
    faults: Vec<(u64, Instant)>,
    ahead: Vec<u64>,
    came: Came,
}

impl Block {
    fn new(pages: Range<u64>, ahead: Vec<u64>, came: Came) -> Self {
        Self {
            pages,
            faults: Vec::new(),
            ahead,
            came,
            pause: FIRST_PAUSE,
        }
    }
}

/// Whether there is nothing to do any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Go,
    /// The VM or the pager has ended.
    End,
}

impl Fetch {
    /// Starts the thread that stays as long as the VM.
    pub(crate) fn start(vm: &Arc<Vm>) -> io::Result<()> {
        vm.fetch.pool.start(|| Self::spawn(vm))
    }

    fn spawn(vm: &Arc<Vm>) -> io::Result<()> {
        let own = vm.clone();
        let thread = std::thread::Builder::new().name(format!("read-{}", vm.name));
        let work = move || {
            let mut buffer = Vec::new();
            while let Some(first) = own.fetch.pool.next() {
                bring(&own, first, &mut buffer);
            }
        };
        thread.spawn(work).map(drop)
    }

    /// Queues a fault on a page whose bytes are not at hand.
    pub(crate) fn add(vm: &Arc<Vm>, page: u64, arrived: Instant) {
        let whole = vm.regions.block_of(page, vm.source.block());
        let first = whole.start;
        let mut blocks = locked(&vm.fetch.blocks);
        if blocks.faults >= MAX_WAITING {
            return;
        }
        blocks.faults += 1;
        if let Some(block) = blocks.coming.get_mut(&first) {
            block.faults.push((page, arrived));
            return;
        }
        if vm.shared.placed().test(page) && !vm.shared.removed().test(page) {
            // It came while this fault was looked at.
            blocks.faults -= 1;
            drop(blocks);
            vm.wake(page);
            return;
        }
        let recorded = blocks.planned.remove(&first).unwrap_or_default();
        // What the recording has of a block is what the VM needs of it.
        let pages = match (recorded.first(), recorded.last()) {
            (Some(first), Some(last)) => page.min(*first)..page.max(*last) + 1,
            _ => whole,
        };
        let mut block = Block::new(pages, recorded, Came::Replayed);
        block.faults.push((page, arrived));
        blocks.coming.insert(first, block);
        drop(blocks);
        vm.fetch.pool.add(first, || Self::spawn(vm));
    }

    /// The faults that wait for a read.
    pub(crate) fn waiting(&self) -> usize {
        locked(&self.blocks).faults
    }

    /// Ends the threads of the pool, once their reads are over.
    pub(crate) fn close(&self) {
        self.pool.close();
    }

    /// Plans pages to be read ahead. Returns their blocks, in the order of the pages.
    pub(crate) fn plan(vm: &Vm, pages: impl Iterator<Item = u64>) -> Vec<u64> {
        let block_bytes = vm.source.block();
        let mut planned: HashMap<u64, Vec<u64>> = HashMap::new();
        let mut order = Vec::new();
        for page in pages {
            let first = vm.regions.block_of(page, block_bytes).start;
            let pages = planned.entry(first).or_default();
            if pages.is_empty() {
                order.push(first);
            }
            pages.push(page);
        }
        for pages in planned.values_mut() {
            pages.sort_unstable();
            pages.dedup();
        }
        locked(&vm.fetch.blocks).planned = planned;
        order
    }

    /// Brings what is planned of a block, unless a fault has taken it over.
    pub(crate) fn bring_planned(vm: &Vm, first: u64, buffer: &mut Vec<u8>) -> Next {
        let wanted =
            |page: &u64| !vm.shared.placed().test(*page) && !vm.shared.removed().test(*page);
        let mut blocks = locked(&vm.fetch.blocks);
        let mut pages = blocks.planned.remove(&first).unwrap_or_default();
        pages.retain(wanted);
        let (Some(start), Some(last)) = (pages.first(), pages.last()) else {
            return Next::Go;
        };
        let block = Block::new(*start..*last + 1, pages, Came::Replayed);
        if let Some(asked) = blocks.coming.get_mut(&first) {
            // Faults have asked for the whole block before the plan was made.
            asked.ahead.extend(block.ahead);
            return Next::Go;
        }
        blocks.coming.insert(first, block);
        drop(blocks);
        bring(vm, first, buffer)
    }

    /// Brings pages of one region that are missing. They may be those of several blocks: faults on
    /// the first block wait for this read, and those on others have their own.
    pub(crate) fn bring_ahead(vm: &Vm, pages: Range<u64>, buffer: &mut Vec<u8>) -> Next {
        let first = vm.regions.block_of(pages.start, vm.source.block()).start;
        let mut blocks = locked(&vm.fetch.blocks);
        while blocks.coming.contains_key(&first) {
            drop(blocks);
            if vm.pause(LOOK) == Next::End {
                return Next::End;
            }
            blocks = locked(&vm.fetch.blocks);
        }
        let block = Block::new(pages.clone(), pages.collect(), Came::Background);
        blocks.coming.insert(first, block);
        drop(blocks);
        bring(vm, first, buffer)
    }

    /// The pages to read of a block that is this thread's.
    fn pages_of(&self, first: u64) -> Range<u64> {
        locked(&self.blocks).coming[&first].pages.clone()
    }

    /// Takes what waits for a block that was read. Once nothing does, the block is forgotten.
    /// Faults that come before share the read, and those on pages beside it are asked again.
    fn take(&self, vm: &Vm, first: u64, read: &Range<u64>) -> Option<Waiting> {
        let mut blocks = locked(&self.blocks);
        let block = blocks.coming.get_mut(&first).expect("it is this thread's");
        let here = |fault: &mut (u64, Instant)| read.contains(&fault.0);
        let faults: Vec<_> = block.faults.extract_if(.., here).collect();
        let mut ahead = std::mem::take(&mut block.ahead);
        ahead.retain(|page| read.contains(page));
        let came = block.came;
        blocks.faults -= faults.len();
        if !faults.is_empty() || !ahead.is_empty() {
            return Some(Waiting {
                faults,
                ahead,
                came,
            });
        }
        let block = blocks.coming.remove(&first)?;
        if !block.faults.is_empty() {
            let whole = vm.regions.block_of(first, vm.source.block());
            let mut again = Block::new(whole, Vec::new(), came);
            again.faults = block.faults;
            blocks.coming.insert(first, again);
            drop(blocks);
            self.pool.add_later(first, Duration::ZERO);
        }
        None
    }

    /// Notes a failed read. Returns whether the thread itself has to try again: nobody waits.
    fn fail(&self, first: u64) -> bool {
        let mut blocks = locked(&self.blocks);
        let block = blocks.coming.get_mut(&first).expect("it is this thread's");
        if block.faults.is_empty() {
            return true;
        }
        self.pool.add_later(first, block.pause);
        block.pause = (block.pause * 2).min(LAST_PAUSE);
        false
    }
}

/// Reads a block that is this thread's, answers its faults, and places the pages ahead. A failed
/// read that faults wait for goes back to the queue.
fn bring(vm: &Vm, first: u64, buffer: &mut Vec<u8>) -> Next {
    let page_bytes = vm.regions.page_bytes();
    let pages = vm.fetch.pages_of(first);
    let (_, offset) = vm.regions.place_of(pages.start);
    buffer.resize(((pages.end - pages.start) * page_bytes) as usize, 0);
    // The rest of a whole block may be asked for. A recording says what of a block is.
    let is_whole = pages == vm.regions.block_of(first, vm.source.block());
    let mut read = || match is_whole {
        true => vm.source.read(offset, buffer),
        false => vm.source.read_once(offset, buffer),
    };
    while let Err(why) = read() {
        if !vm.fetch.fail(first) {
            vm.source_failed(&why);
            return Next::Go;
        }
        // A page that nobody waits for is no loss: the VM's own faults decide.
        if vm.pause(AHEAD_PAUSE) == Next::End {
            return Next::End;
        }
    }
    let part = |run: &Range<u64>| {
        let at = |page: u64| ((page - pages.start) * page_bytes) as usize;
        &buffer[at(run.start)..at(run.end)]
    };
    while let Some(mut waiting) = vm.fetch.take(vm, first, &pages) {
        if !waiting.faults.is_empty() {
            vm.source_works();
        }
        for (page, arrived) in waiting.faults {
            let around = vm.around(page, &pages);
            let Some(fresh) = vm.place_all(around.clone(), Some(part(&around))) else {
                return Next::End;
            };
            vm.figures.neighbours.add(fresh.saturating_sub(1));
            if !settle(vm, page) {
                return Next::End;
            }
            vm.figures.answered(Came::Read, arrived.elapsed());
        }
        let is_replay = waiting.came == Came::Replayed;
        let kept = |page: u64| is_replay && vm.sample.keep(page, part(&(page..page + 1)));
        waiting.ahead.retain(|page| !kept(*page));
        for run in waiting.ahead.chunk_by(|a, b| a + 1 == *b) {
            let run = run[0]..run[run.len() - 1] + 1;
            match vm.place_all(run.clone(), Some(part(&run))) {
                Some(fresh) if is_replay => vm.figures.replayed(fresh),
                Some(fresh) => vm.figures.loaded(fresh),
                None => return Next::End,
            }
        }
    }
    Next::Go
}

/// Answers a fault whose page was given back after it was asked for, or was there before.
fn settle(vm: &Vm, page: u64) -> bool {
    let again = loop {
        match vm.place_removed(page) {
            Placed::All => break true,
            Placed::Gone => break false,
            _ if vm.stop.is_asked() => break false,
            _ => std::thread::sleep(Duration::from_micros(50)),
        }
    };
    vm.wake(page);
    again
}
