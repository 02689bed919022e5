//! Pages that nobody has asked for yet: those of a recording, and then, on request, all.
//!
//! **Guarantee.** It never waits in the queue of faults, nor they in its own. Its threads have a
//! lower priority than those that answer faults. Without a recording and a request it does nothing.
//!
//! **Mechanism.** A recording becomes blocks of the source in the order of their first touches.
//! Several threads read the blocks, each from its first to its last recorded page, and place the
//! recorded pages only. Loading all goes through the pages in order, also by several threads. Its
//! pace may be set while the VM runs.

use crate::events::Happened;
use crate::options::Background;
use crate::recording::Recording;
use crate::vm::{Vm, locked};
use std::collections::HashMap;
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
/// The pauses before a failed read is repeated.
const PAUSE: Duration = Duration::from_millis(100);
/// The least priority but one (nice 19 would never run beside a busy VM).
const NICE: i32 = 10;

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

fn lower_priority() {
    let own = rustix::thread::gettid();
    // Without the right to, it runs beside the others.
    let _ = rustix::process::setpriority_process(Some(own), NICE);
}

/// Loads the pages of a recording.
fn replay(vm: &Vm, recording: &Recording) {
    // A larger page says little about others, and costs much.
    if vm.regions.page_bytes() == 4096 {
        let pages = recording.offsets();
        vm.sample
            .choose(pages.filter_map(|offset| vm.regions.page_of(offset)));
    }
    let blocks = blocks_of(vm, recording);
    let next = AtomicUsize::new(0);
    let work = || {
        lower_priority();
        let mut buffer = Vec::new();
        while let Some(pages) = blocks.get(next.fetch_add(1, Ordering::Relaxed)) {
            if !load_block(vm, pages, &mut buffer) {
                return;
            }
        }
    };
    on_threads(vm, vm.source.reads().min(blocks.len()), work);
}

/// Does `work` on several threads, and waits for them. Fewer do the same.
fn on_threads(vm: &Vm, count: usize, work: impl Fn() + Sync) {
    std::thread::scope(|scope| {
        for _ in 1..count {
            let thread = std::thread::Builder::new().name(format!("load-{}", vm.name));
            let _ = thread.spawn_scoped(scope, &work);
        }
        work();
    });
}

/// The recorded pages of each block of the source, in the order of the first touches.
fn blocks_of(vm: &Vm, recording: &Recording) -> Vec<Vec<u64>> {
    let mut blocks: Vec<Vec<u64>> = Vec::new();
    let mut places = HashMap::new();
    let block_bytes = vm.source.block();
    for page in recording
        .offsets()
        .filter_map(|offset| vm.regions.page_of(offset))
    {
        let first = vm.regions.block_of(page, block_bytes).start;
        let at = *places.entry(first).or_insert_with(|| {
            blocks.push(Vec::new());
            blocks.len() - 1
        });
        blocks[at].push(page);
    }
    for pages in &mut blocks {
        pages.sort_unstable();
        pages.dedup();
    }
    blocks
}

/// Loads pages of one block, sorted. Returns false once the VM has ended.
fn load_block(vm: &Vm, pages: &[u64], buffer: &mut Vec<u8>) -> bool {
    let wanted =
        |page: &&u64| !vm.shared.placed().test(**page) && !vm.shared.removed().test(**page);
    let (Some(first), Some(last)) = (pages.iter().find(wanted), pages.iter().rfind(wanted)) else {
        return true;
    };
    if !read(vm, &(*first..last + 1), buffer) {
        return false;
    }
    let at = |page: u64| ((page - first) * vm.regions.page_bytes()) as usize;
    let placed: Vec<u64> = pages
        .iter()
        .copied()
        .filter(|page| (*first..=*last).contains(page))
        .filter(|&page| !vm.sample.keep(page, &buffer[at(page)..at(page + 1)]))
        .collect();
    for run in placed.chunk_by(|a, b| a + 1 == *b) {
        let run = run[0]..run[run.len() - 1] + 1;
        match vm.place_all(run.clone(), Some(&buffer[at(run.start)..at(run.end)])) {
            Some(fresh) => vm.figures.replayed(fresh),
            None => return false,
        }
    }
    true
}

/// Reads pages until that works. Returns false once the VM has ended.
fn read(vm: &Vm, pages: &Range<u64>, buffer: &mut Vec<u8>) -> bool {
    let (_, offset) = vm.regions.place_of(pages.start);
    buffer.resize(
        ((pages.end - pages.start) * vm.regions.page_bytes()) as usize,
        0,
    );
    while !vm.stop.is_asked() {
        match vm.source.read(offset, buffer) {
            Ok(()) => return true,
            // A page that nobody waits for is no loss: the VM's own faults decide.
            Err(_) => pause(vm, PAUSE),
        }
    }
    false
}

fn pause(vm: &Vm, time: Duration) {
    let deadline = Instant::now() + time;
    while !vm.stop.is_asked() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        std::thread::sleep(left.min(Duration::from_millis(20)));
    }
}

/// Loads all pages, as the restore says. Returns false if it was told to stop.
fn load_all(vm: &Vm) -> bool {
    let step_pages = (STEP / vm.regions.page_bytes()).max(1);
    let (next, stopped) = (AtomicU64::new(0), AtomicBool::new(false));
    on_threads(vm, LOADERS, || {
        lower_priority();
        let mut buffer = Vec::new();
        while !stopped.load(Ordering::Relaxed) {
            let first = next.fetch_add(step_pages, Ordering::Relaxed);
            let end = (first + step_pages).min(vm.regions.pages());
            let mut page = first;
            if page >= end {
                return;
            }
            while page < end {
                let block = vm.regions.block_of(page, STEP);
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
            Background::Idle if vm.jobs.waiting() == 0 && vm.idle_for() >= IDLE => return true,
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
    let contents = if vm.source.is_zero(offset, len) {
        None
    } else {
        if !pace(vm, len) || !read(vm, &run, buffer) {
            return false;
        }
        Some(&buffer[..])
    };
    let placed = vm.place_all(run, contents);
    if let Some(fresh) = placed {
        vm.figures.loaded(fresh);
    }
    placed.is_some()
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
