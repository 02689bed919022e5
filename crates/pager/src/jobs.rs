//! Reads that take time: a queue, a thread, and others that come when it grows and go when it is
//! empty.
//!
//! **Guarantee.** A fault never waits for the read of another page, as long as fewer than
//! [`THREADS`] reads of its VM are under way. Faults on the same block of the source share one
//! read. No fault is lost: each is in `waiting` until its page is placed.

use crate::answer::Placed;
use crate::timeline::Came;
use crate::vm::{Vm, locked};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The most reads of one VM at once.
pub(crate) const THREADS: usize = 16;
/// The time after which a thread without work ends.
const IDLE: Duration = Duration::from_secs(5);
/// The pauses before a failed read is repeated.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LAST_PAUSE: Duration = Duration::from_secs(1);
/// The faults of a VM that wait are bounded by its threads. This bounds a VMM that lies.
const MAX_WAITING: usize = 1 << 20;

/// The reads of a VM.
#[derive(Debug, Default)]
pub(crate) struct Jobs {
    queue: Mutex<Queue>,
    ready: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    /// Blocks to be read, by their first page.
    blocks: VecDeque<u64>,
    /// Blocks whose read has failed, with the time of the next try.
    later: Vec<(Instant, u64)>,
    /// The faults of each block that is queued or read: page, and arrival.
    waiting: BTreeMap<u64, Block>,
    faults: usize,
    threads: usize,
    sleeping: usize,
    closed: bool,
}

#[derive(Debug)]
struct Block {
    pages: Range<u64>,
    faults: Vec<(u64, Instant)>,
    pause: Duration,
}

impl Jobs {
    /// Queues a fault on a page whose bytes are not at hand.
    pub(crate) fn add(vm: &Arc<Vm>, page: u64, arrived: Instant) {
        let pages = vm.regions.block_of(page, vm.source.block());
        let mut queue = locked(&vm.jobs.queue);
        if queue.closed || queue.faults >= MAX_WAITING {
            return;
        }
        queue.faults += 1;
        let first = pages.start;
        if let Some(block) = queue.waiting.get_mut(&first) {
            block.faults.push((page, arrived));
            return;
        }
        let block = Block {
            pages,
            faults: vec![(page, arrived)],
            pause: FIRST_PAUSE,
        };
        queue.waiting.insert(first, block);
        queue.blocks.push_back(first);
        if queue.sleeping >= queue.blocks.len() {
            drop(queue);
            vm.jobs.ready.notify_one();
        } else if queue.threads < THREADS {
            queue.threads += 1;
            drop(queue);
            if Self::spawn(vm).is_err() {
                // The others take the block.
                locked(&vm.jobs.queue).threads -= 1;
            }
        }
    }

    /// Starts the thread that stays as long as the VM.
    pub(crate) fn start(vm: &Arc<Vm>) -> io::Result<()> {
        locked(&vm.jobs.queue).threads = 1;
        Self::spawn(vm)
    }

    fn spawn(vm: &Arc<Vm>) -> io::Result<()> {
        let own = vm.clone();
        let thread = std::thread::Builder::new().name(format!("read-{}", vm.name));
        thread.spawn(move || work(&own)).map(drop)
    }

    /// The faults that wait for a read.
    pub(crate) fn waiting(&self) -> usize {
        locked(&self.queue).faults
    }

    /// Ends all threads, once their reads are over.
    pub(crate) fn close(&self) {
        locked(&self.queue).closed = true;
        self.ready.notify_all();
    }
}

fn work(vm: &Arc<Vm>) {
    let mut buffer = Vec::new();
    while step(vm, &mut buffer) {}
}

/// Reads the next block and answers its faults. Returns false if the thread has to end, which is
/// counted already.
fn step(vm: &Vm, buffer: &mut Vec<u8>) -> bool {
    let Some((first, pages)) = next(vm) else {
        return false;
    };
    let page_bytes = vm.regions.page_bytes();
    let (_, offset) = vm.regions.place_of(pages.start);
    buffer.resize(((pages.end - pages.start) * page_bytes) as usize, 0);
    let read = vm.source.read(offset, buffer);
    if let Err(why) = &read {
        vm.source_failed(why);
    } else {
        vm.source_works();
    }
    let mut queue = locked(&vm.jobs.queue);
    if read.is_err() {
        let block = queue
            .waiting
            .get_mut(&first)
            .expect("only this thread removes it");
        let next = (Instant::now() + block.pause, first);
        block.pause = (block.pause * 2).min(LAST_PAUSE);
        queue.later.push(next);
        return true;
    }
    let block = queue
        .waiting
        .remove(&first)
        .expect("only this thread removes it");
    queue.faults -= block.faults.len();
    drop(queue);
    for (page, arrived) in block.faults {
        let around = vm.around(page, &pages);
        let at = |page: u64| ((page - pages.start) * page_bytes) as usize;
        let bytes = &buffer[at(around.start)..at(around.end)];
        let Some(fresh) = vm.place_all(around, Some(bytes)) else {
            break;
        };
        vm.figures.neighbours.add(fresh.saturating_sub(1));
        if !settle(vm, page) {
            break;
        }
        vm.figures.answered(Came::Read, arrived.elapsed());
    }
    true
}

/// Waits for a block. `None` if the thread has to end.
fn next(vm: &Vm) -> Option<(u64, Range<u64>)> {
    let mut queue = locked(&vm.jobs.queue);
    let idle_since = Instant::now();
    loop {
        if queue.closed {
            queue.threads -= 1;
            return None;
        }
        let now = Instant::now();
        while let Some(due) = queue.later.iter().position(|(at, _)| *at <= now) {
            let (_, block) = queue.later.swap_remove(due);
            queue.blocks.push_back(block);
        }
        if let Some(first) = queue.blocks.pop_front() {
            let pages = queue.waiting[&first].pages.clone();
            return Some((first, pages));
        }
        // One thread stays.
        if queue.threads > 1 && now.duration_since(idle_since) >= IDLE {
            queue.threads -= 1;
            return None;
        }
        let soonest = queue.later.iter().map(|(at, _)| *at).min();
        let until = soonest.map_or(IDLE, |at| at.duration_since(now).min(IDLE));
        queue.sleeping += 1;
        let woken = vm.jobs.ready.wait_timeout(queue, until);
        (queue, _) = woken.unwrap_or_else(PoisonError::into_inner);
        queue.sleeping -= 1;
    }
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
