//! The thread of a VM that reads its userfaultfd.
//!
//! **Guarantee.** Messages are read in the order of the kernel, straight into the ring that
//! outlives this process. Removals of a batch are recorded before any of its faults is answered.
//! The thread itself never waits for a source.

use crate::answer::Placed;
use crate::fetch::Fetch;
use crate::shared::Ring;
use crate::source::SourceError;
use crate::timeline::Came;
use crate::vm::Vm;
use pageferry_addr::Hva;
use pageferry_userfault::uffd::{Event, MESSAGE_BYTES, ReadError, Wake, decode_message};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// The most zero pages that come with a touched one. They cost page tables and no memory.
const ZEROS_AROUND: u64 = 64 << 10;
/// The pauses before a page is tried again: one that the host has refused, and one beside a removal
/// whose thread has not run on. A message ends both. A busy host may let that thread wait for long.
const REFUSED: Duration = Duration::from_millis(1);
const CHANGING: Duration = Duration::from_micros(50);

/// The reason why a VM is not served any more.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The VMM has ended.
    Vmm,
    /// The pager ends, or the restore was released.
    Stopped,
    /// The userfaultfd cannot be read.
    Failed(String),
}

/// A fault that waits for its answer.
struct Fault {
    page: u64,
    arrived: Instant,
}

/// Serves a VM until it or the pager ends.
pub(crate) fn serve(vm: &Arc<Vm>, ring: &mut Ring) -> End {
    let end = run(vm, ring);
    vm.fetch.close();
    if vm.released.load(Ordering::Acquire) {
        drain(vm, ring);
    }
    end
}

/// Reads the removals that began before the memory was released. Their threads sleep until then.
fn drain(vm: &Vm, ring: &mut Ring) {
    let Some(region) = vm.regions.iter().next() else {
        return;
    };
    while read(vm, ring, &mut VecDeque::new()).is_ok() {
        // No region is registered, so this places nothing. It is refused in another way while a
        // removal waits.
        match vm.uffd.zeropage(Hva(region.address), 4096, Wake::Now) {
            Err(why) if why.is_changing() => std::thread::yield_now(),
            _ => return,
        }
    }
}

fn run(vm: &Arc<Vm>, ring: &mut Ring) -> End {
    let mut faults = VecDeque::new();
    let mut buffer = Vec::new();
    let mut limit = None;
    loop {
        if let Err(end) = wait(vm, limit) {
            return end;
        }
        if let Err(why) = read(vm, ring, &mut faults) {
            return End::Failed(why.to_string());
        }
        // A refused fault goes behind the others, and the messages are read before it is tried
        // again: one of them may be the removal for which the kernel refused it.
        limit = None;
        for _ in 0..faults.len() {
            let Some(fault) = faults.pop_front() else {
                break;
            };
            let pause = match answer(vm, &fault, &mut buffer) {
                Placed::All => continue,
                Placed::Gone => return End::Vmm,
                Placed::Changing(_) => CHANGING,
                Placed::Refused(_) => REFUSED,
            };
            limit = limit.max(Some(pause));
            faults.push_back(fault);
        }
    }
}

/// Waits for messages, at most `limit`.
fn wait(vm: &Vm, limit: Option<Duration>) -> Result<(), End> {
    let bell = vm.stop.bell();
    let ended = vm.vmm.end();
    let mut fds = [
        PollFd::new(&vm.uffd, PollFlags::IN),
        PollFd::new(&bell, PollFlags::IN),
        PollFd::new(&ended, PollFlags::IN),
    ];
    let timeout = limit.and_then(|limit| Timespec::try_from(limit).ok());
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(errno) => return Err(End::Failed(format!("poll failed: {errno}"))),
    }
    if vm.stop.is_asked() {
        return Err(End::Stopped);
    }
    if !fds[2].revents().is_empty() {
        return Err(End::Vmm);
    }
    Ok(())
}

/// Reads messages, and records what they say.
fn read(vm: &Vm, ring: &mut Ring, faults: &mut VecDeque<Fault>) -> Result<(), ReadError> {
    let _exclusive = vm.gate.write().unwrap_or_else(PoisonError::into_inner);
    let messages = vm.shared.messages(ring);
    let count = vm.uffd.read_messages(messages)?;
    let arrived = Instant::now();
    record(vm, &mut messages[..count], |page| {
        faults.push_back(Fault { page, arrived });
    });
    Ok(())
}

/// Records the messages of a former pager. Its faults come again, since their threads are woken.
pub(crate) fn recover(vm: &Vm, ring: &mut Ring) {
    let _exclusive = vm.gate.write().unwrap_or_else(PoisonError::into_inner);
    record(vm, vm.shared.messages(ring), |_| ());
}

/// Wakes all threads that sleep on a page of the VM. Those whose page is missing fault again.
pub(crate) fn wake_all(vm: &Vm) {
    for region in vm.regions.iter() {
        // The VMM may have unmapped a part, or ended: both are found out later.
        let _ = vm.uffd.wake(Hva(region.address), region.size);
    }
}

/// Records the removals first, then passes the faults on, then empties the messages.
fn record(vm: &Vm, messages: &mut [[u8; MESSAGE_BYTES]], mut fault: impl FnMut(u64)) {
    for message in messages.iter() {
        match decode_message(message) {
            Some(event @ Event::Remove { .. }) => {
                if let Some(range) = event.dropped(vm.regions.page_bytes()) {
                    vm.record_removal(&range);
                }
            }
            Some(Event::PageFault(touched)) => {
                // An address beside the regions is registered by the VMM itself, for others.
                if let Some(page) = vm.regions.page_at(touched.address) {
                    fault(page);
                }
            }
            _ => {}
        }
    }
    for message in messages {
        message.fill(0);
    }
}

/// Answers a fault, or gives it to the threads that wait for the source.
fn answer(vm: &Arc<Vm>, fault: &Fault, buffer: &mut Vec<u8>) -> Placed {
    let page = fault.page;
    // A removed page may be missing although it was placed: the kernel drops pages some time after
    // their removal was read, also those that were placed meanwhile.
    let is_removed = vm.shared.removed().test(page);
    if !is_removed && vm.shared.placed().test(page) {
        // It came between the fault and now. The thread may have gone to sleep after the wake-up.
        vm.wake(page);
        return Placed::All;
    }
    let page_bytes = vm.regions.page_bytes();
    let (_, offset) = vm.regions.place_of(page);
    let (way, how) = if is_removed {
        (Came::Zero, vm.place_removed(page))
    } else if vm.source.is_zero(offset, page_bytes) {
        (Came::Zero, zeros(vm, page))
    } else {
        match at_hand(vm, page, buffer) {
            Ok(Some(around)) => {
                let attempt = vm.place(around, Some(buffer));
                vm.figures.neighbours.add(attempt.fresh.saturating_sub(1));
                (Came::AtHand, attempt.how)
            }
            Ok(None) => {
                vm.touched(page);
                Fetch::add(vm, page, fault.arrived);
                return Placed::All;
            }
            Err(why) => {
                vm.source_failed(&why);
                Fetch::add(vm, page, fault.arrived);
                return Placed::All;
            }
        }
    };
    if how != Placed::All {
        return how;
    }
    if !vm.shared.placed().test(page) {
        // It was given back meanwhile.
        return Placed::Changing(page);
    }
    vm.touched(page);
    if way == Came::AtHand {
        vm.source_works();
    }
    vm.figures.answered(way, fault.arrived.elapsed());
    Placed::All
}

/// Places a page that is zero in the source, and its neighbours that are zero too.
fn zeros(vm: &Vm, page: u64) -> Placed {
    let around = vm.regions.block_of(page, ZEROS_AROUND);
    let (_, offset) = vm.regions.place_of(around.start);
    let bytes = (around.end - around.start) * vm.regions.page_bytes();
    let run = if vm.source.is_zero(offset, bytes) {
        around
    } else {
        page..page + 1
    };
    let attempt = vm.place(run, None);
    vm.figures.neighbours.add(attempt.fresh.saturating_sub(1));
    attempt.how
}

/// Reads the page and its neighbours if they are at hand, else the page alone. The neighbours of a
/// page that a replay left out are there.
fn at_hand(vm: &Vm, page: u64, buffer: &mut Vec<u8>) -> Result<Option<Range<u64>>, SourceError> {
    if vm.restore.replay.is_some() && vm.sample.bytes(page, buffer) {
        return Ok(Some(page..page + 1));
    }
    let page_bytes = vm.regions.page_bytes();
    let around = vm.around(page, &(0..vm.regions.pages()));
    for run in [around, page..page + 1] {
        let (_, offset) = vm.regions.place_of(run.start);
        buffer.resize(((run.end - run.start) * page_bytes) as usize, 0);
        if vm.source.read_now(offset, buffer)? {
            return Ok(Some(run));
        }
    }
    Ok(None)
}

impl Vm {
    /// Wakes the threads that sleep on a page.
    pub(crate) fn wake(&self, page: u64) {
        let (address, _) = self.regions.place_of(page);
        // A VMM that has ended has no sleepers.
        let _ = self.uffd.wake(address, self.regions.page_bytes());
    }
}
