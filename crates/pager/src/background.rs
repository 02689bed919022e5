//! Pages that nobody has asked for yet: those of a recording, and then, on request, all.
//!
//! **Guarantee.** It never waits in the queue of faults, nor they in its own. Its threads have a
//! lower priority than those that answer faults. Without a recording and a request it does nothing.
//!
//! **Mechanism.** A recording becomes a plan: blocks of the source in the order of their first
//! touches. Several threads bring the blocks, each from its first to its last recorded page, and
//! place the recorded pages only. Loading all goes through the pages in order, also by several
//! threads. Its pace may be set while the VM runs.

use crate::events::Happened;
use crate::fetch::{Fetch, Next};
use crate::options::Background;
use crate::pool::on_threads;
use crate::recording::Recording;
use crate::vm::{Vm, locked};
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The threads that load all memory.
const LOADERS: usize = 4;
/// The bytes that each of them reads at once.
const STEP: u64 = 256 << 10;
/// A VM without a fault for this long is idle.
const IDLE: Duration = Duration::from_millis(5);

/// How the rest of a VM's memory is loaded, which may change while it runs.
#[derive(Debug)]
pub(crate) struct Load(Mutex<Loading>);

#[derive(Debug)]
struct Loading {
    background: Background,
    /// Whether a thread loads, or will after its replay.
    runs: bool,
    /// The rate of the last reads, and when the next one is due.
    next: Option<(NonZeroU64, Instant)>,
}

impl Load {
    pub(crate) fn new(background: Background) -> Self {
        Self(Mutex::new(Loading {
            background,
            runs: false,
            next: None,
        }))
    }

    pub(crate) fn background(&self) -> Background {
        locked(&self.0).background
    }

    pub(crate) fn set(&self, background: Background) {
        locked(&self.0).background = background;
    }

    /// Whether the caller has to load from now on.
    fn begins(&self, replays: bool) -> bool {
        let mut loading = locked(&self.0);
        let begins = !loading.runs && (replays || loading.background != Background::Off);
        loading.runs |= begins;
        begins
    }

    /// Whether the caller has to go on. If not, another may begin.
    fn goes_on(&self, all_is_there: bool) -> bool {
        let mut loading = locked(&self.0);
        loading.runs = !all_is_there && loading.background != Background::Off;
        loading.runs
    }

    /// When a read of so many bytes is due.
    fn due(&self, rate: NonZeroU64, bytes: u64) -> Instant {
        let mut loading = locked(&self.0);
        let now = Instant::now();
        let due = match loading.next {
            Some((former, next)) if former == rate => next.max(now),
            _ => now,
        };
        let takes = Duration::from_secs_f64(bytes as f64 / rate.get() as f64);
        loading.next = Some((rate, due + takes));
        due
    }
}

/// Starts loading, if there is something to load and nobody loads yet. Without the recording of a
/// restore it is read again.
pub(crate) fn start(vm: &Arc<Vm>, replays: bool, recording: Option<Recording>) {
    let replays = replays && vm.restore.replay.is_some();
    if !vm.load.begins(replays) {
        return;
    }
    let own = vm.clone();
    let thread = std::thread::Builder::new().name(format!("load-{}", vm.name));
    let spawned = thread.spawn(move || {
        let recording = recording.or_else(|| replays.then(|| again(&own)).flatten());
        if let Some(recording) = recording {
            replay(&own, &recording);
            let pages = own.figures.replayed.get();
            tell(&own, Happened::Replayed { pages });
        }
        let mut all_is_there = false;
        while own.load.goes_on(all_is_there) && !own.stop.is_asked() {
            all_is_there = load_all(&own);
            if all_is_there {
                let pages = own.figures.background.get();
                tell(&own, Happened::Loaded { pages });
            }
        }
    });
    if let Err(why) = spawned {
        // Faults bring the pages all the same.
        tracing::warn!(restore = %vm.name, "no thread to load pages: {why}");
        vm.load.goes_on(true);
    }
}

/// The recording of a VM that was taken over. Its file may be gone, which costs only time.
fn again(vm: &Vm) -> Option<Recording> {
    let path = vm.restore.replay.as_deref()?;
    let recording = Recording::load_of(path, vm.memory.fingerprint);
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

/// Loads all pages, as the restore says. Returns false if it was told to stop.
fn load_all(vm: &Vm) -> bool {
    let block_bytes = vm.source.block().max(STEP);
    let step_pages = (STEP / vm.regions.page_bytes()).max(1);
    let (next, stopped) = (AtomicU64::new(0), AtomicBool::new(false));
    on_threads(&vm.name, LOADERS, || {
        let mut buffer = Vec::new();
        while !stopped.load(Ordering::Relaxed) {
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
                if !run.is_empty() && !load(vm, run, &mut buffer) {
                    stopped.store(true, Ordering::Relaxed);
                    return;
                }
            }
        }
    });
    !stopped.into_inner()
}

/// Waits before a read of so many bytes. Returns false if nothing is to be loaded any more.
fn pace(vm: &Vm, bytes: u64) -> bool {
    let mut asked = None;
    while !vm.stop.is_asked() {
        let left = match vm.load.background() {
            Background::Off => return false,
            // The VM has no fault for a while.
            Background::Idle if vm.fetch.waiting() == 0 && vm.idle_for() >= IDLE => return true,
            Background::Idle => Duration::from_millis(1),
            Background::Rate(rate) => {
                let due = match asked {
                    Some((former, due)) if former == rate => due,
                    _ => vm.load.due(rate, bytes),
                };
                asked = Some((rate, due));
                due.saturating_duration_since(Instant::now())
            }
        };
        if left.is_zero() {
            return true;
        }
        std::thread::sleep(left.min(Duration::from_millis(20)));
    }
    false
}

/// Loads pages of one region. Returns false once the VM has ended, or nothing is to be loaded.
fn load(vm: &Vm, run: Range<u64>, buffer: &mut Vec<u8>) -> bool {
    let (_, offset) = vm.regions.place_of(run.start);
    let len = (run.end - run.start) * vm.regions.page_bytes();
    if vm.source.is_zero(offset, len) {
        let placed = vm.place_all(run, None);
        return placed.inspect(|fresh| vm.figures.loaded(*fresh)).is_some();
    }
    pace(vm, len) && Fetch::bring_ahead(vm, run, buffer) == Next::Go
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
