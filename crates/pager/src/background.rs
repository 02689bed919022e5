//! Pages that nobody has asked for yet: those of a recording, and then, on request, all.
//!
//! **Guarantee.** It never waits in the queue of faults, nor they in its own. Its threads have a
//! lower priority than those that answer faults. Without a recording and a request it does nothing.
//!
//! **Mechanism.** A recording becomes a plan: blocks of the source in the order of their first
//! touches. Several threads bring the blocks, each from its first to its last recorded page, and
//! place the recorded pages only. Loading all goes through the pages in order, also by several
//! threads.

use crate::events::Happened;
use crate::fetch::{Fetch, Next};
use crate::options::Background;
use crate::pool::on_threads;
use crate::recording::Recording;
use crate::vm::Vm;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The threads that load all memory.
const LOADERS: usize = 4;
/// The bytes that each of them reads at once.
const STEP: u64 = 256 << 10;
/// A VM without a fault for this long is idle.
const IDLE: Duration = Duration::from_millis(5);

/// Starts loading, if there is something to load. Without the recording of a restore it is read
/// again.
pub(crate) fn start(vm: &Arc<Vm>, recording: Option<Recording>) {
    if vm.restore.replay.is_none() && vm.restore.background == Background::Off {
        return;
    }
    let own = vm.clone();
    let thread = std::thread::Builder::new().name(format!("load-{}", vm.name));
    let spawned = thread.spawn(move || {
        if let Some(recording) = recording.or_else(|| again(&own)) {
            replay(&own, &recording);
            let pages = own.figures.replayed.get();
            tell(&own, Happened::Replayed { pages });
        }
        if own.restore.background != Background::Off {
            load_all(&own);
            let pages = own.figures.background.get();
            tell(&own, Happened::Loaded { pages });
        }
    });
    if let Err(why) = spawned {
        // Faults bring the pages all the same.
        tracing::warn!(restore = %vm.name, "no thread to load pages: {why}");
    }
}

/// The recording of a VM that was taken over. Its file may be gone, which costs only time.
fn again(vm: &Vm) -> Option<Recording> {
    let path = vm.restore.replay.as_deref()?;
    let recording = Recording::load(path);
    recording
        .inspect_err(|why| tracing::warn!(restore = %vm.name, "the replay ends here: {why}"))
        .ok()
}

/// Tells of the end of some work, unless the VM or the pager has ended before it.
fn tell(vm: &Vm, happened: Happened) {
    if !vm.stop.is_asked() {
        vm.events.add(&vm.name, happened);
    }
}

/// Loads the pages of a recording.
fn replay(vm: &Vm, recording: &Recording) {
    // A larger page says little about others, and costs much.
    if vm.regions.page_bytes() == 4096 {
        let pages = recording.offsets();
        vm.sample
            .choose(pages.filter_map(|offset| vm.regions.page_of(offset)));
    }
    let pages = recording.offsets();
    let blocks = Fetch::plan(vm, pages.filter_map(|offset| vm.regions.page_of(offset)));
    let next = AtomicUsize::new(0);
    let work = || {
        let mut buffer = Vec::new();
        while let Some(block) = blocks.get(next.fetch_add(1, Ordering::Relaxed)) {
            if Fetch::bring_planned(vm, *block, &mut buffer) == Next::End {
                return;
            }
        }
    };
    on_threads(&vm.name, vm.source.reads().min(blocks.len()), work);
}

/// Loads all pages, as the request says.
fn load_all(vm: &Vm) {
    let rate = match vm.restore.background {
        Background::Off => return,
        Background::Idle => None,
        Background::Rate(rate) => Some(rate.get() as f64),
    };
    let block_bytes = vm.source.block();
    let step_pages = (STEP / vm.regions.page_bytes()).max(1);
    let (next, loaded, began) = (AtomicU64::new(0), AtomicU64::new(0), Instant::now());
    on_threads(&vm.name, LOADERS, || {
        let mut buffer = Vec::new();
        while !vm.stop.is_asked() {
            let first = next.fetch_add(step_pages, Ordering::Relaxed);
            let end = (first + step_pages).min(vm.regions.pages());
            let mut page = first;
            if page >= end {
                return;
            }
            while page < end {
                let block = vm.regions.block_of(page, block_bytes);
                let run = missing_run(vm, page..block.end.min(end));
                page = run.end;
                if run.is_empty() {
                    continue;
                }
                let len = (run.end - run.start) * vm.regions.page_bytes();
                let (_, offset) = vm.regions.place_of(run.start);
                let next = if vm.source.is_zero(offset, len) {
                    let placed = vm.place_all(run, None);
                    placed.map_or(Next::End, |fresh| {
                        vm.figures.loaded(fresh);
                        Next::Go
                    })
                } else {
                    match rate {
                        Some(rate) => {
                            let before = loaded.fetch_add(len, Ordering::Relaxed);
                            let due = Duration::from_secs_f64(before as f64 / rate);
                            let _ = vm.pause(due.saturating_sub(began.elapsed()));
                        }
                        None => wait_idle(vm),
                    }
                    Fetch::bring_ahead(vm, run, &mut buffer)
                };
                if next == Next::End {
                    return;
                }
            }
        }
    });
}

/// Waits until the VM has no fault for a while.
fn wait_idle(vm: &Vm) {
    while !vm.stop.is_asked() && (vm.fetch.waiting() > 0 || vm.idle_for() < IDLE) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The first run of missing pages in `pages`; empty, and at the end, if there is none.
fn missing_run(vm: &Vm, pages: Range<u64>) -> Range<u64> {
    let there = |page: u64| vm.shared.placed().test(page) || vm.shared.removed().test(page);
    let start = pages
        .clone()
        .find(|&page| !there(page))
        .unwrap_or(pages.end);
    let end = (start..pages.end)
        .find(|&page| there(page))
        .unwrap_or(pages.end);
    start..end
}
