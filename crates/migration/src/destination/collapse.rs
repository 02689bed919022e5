//! Huge pages of the host come back: complete 2 MiB ranges are collapsed in the background.
//!
//! **Guarantee.** A range is collapsed once no page of it is missing, so no fault on a missing page
//! waits for it. It takes at most a fifth of a core. It never allocates memory for pages that were
//! not written.
//!
//! **Mechanism.** A thread asks [`Machine::collapse`] for each range, and sleeps for four times the
//! processor time that it used. Its priority is the normal one: a touch of a range waits for it. It
//! goes round as long as pages are missing. Then it tries the ranges that the kernel refused a few
//! times more. It ends when nothing is left, when the migration fails, or when this is dropped.

use crate::sync::{AtomicBool, Ordering};
use pageferry_addr::{PageSize, RamPage};
use pageferry_machine::{Collapsed, Machine};
use pageferry_userfault::PageBitmap;
use rustix::time::{ClockId, clock_gettime};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Rounds over the ranges that the kernel refused, when no page is missing.
const ROUNDS: u32 = 5;
/// The sleep between two rounds.
const BETWEEN: Duration = Duration::from_millis(200);
/// The sleep after a range, in times of the processor time that it took.
const REST: u32 = 4;

/// Collapses the memory of one machine.
pub(super) struct Collapser {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Collapser {
    /// Starts. Without the thread, pages stay small, and nothing worse happens.
    pub(super) fn start(machine: &Arc<dyn Machine>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (machine, stopped) = (Arc::clone(machine), Arc::clone(&stop));
        let thread = thread::Builder::new()
            .name("pf-collapse".into())
            .spawn(move || run(machine.as_ref(), &stopped))
            .ok();
        Self { stop, thread }
    }
}

impl Collapser {
    /// Ends it soon, without waiting for that.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl Drop for Collapser {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// The processor time of the calling thread.
fn used() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

fn run(machine: &dyn Machine, stop: &AtomicBool) {
    let pages = PageSize::Size2M.pages();
    let ranges = (machine.ram().pages() / pages) as usize;
    if machine.ram().backing().is_hugetlb() {
        return;
    }
    let Ok(rest) = PageBitmap::try_new(ranges) else {
        return;
    };
    rest.set_range(0..ranges);
    let mut left = ROUNDS;
    while left > 0 && rest.next_set(0).is_some() {
        let (mut at, mut waits) = (0, false);
        while let Some(range) = rest.next_set(at) {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            at = range + 1;
            let began = used();
            match machine.collapse(RamPage(range as u64 * pages)) {
                Collapsed::Missing => waits = true,
                Collapsed::Huge | Collapsed::Incomplete => {
                    rest.clear(RamPage(range as u64));
                }
                // Refused: later, perhaps.
                _ => {}
            }
            thread::park_timeout(used().saturating_sub(began) * REST);
        }
        if !waits {
            left -= 1;
        }
        thread::park_timeout(BETWEEN);
    }
}
