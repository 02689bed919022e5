//! Work of this command itself, with its progress.

use super::{Display, Feed, Rates};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Does `work` while its progress is shown, and measures its time. `work` gets a callback that
/// stops it once `stop` is true.
pub(crate) fn with_progress<T>(
    step: &str,
    stop: &dyn Fn() -> bool,
    work: impl FnOnce(&mut dyn FnMut(u64, u64) -> ControlFlow<()>) -> T,
) -> (T, Duration) {
    let feed = Feed::new();
    let display = Display::start(&feed);
    feed.step(step);
    let start = Instant::now();
    let so_far = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
    let seen = Arc::clone(&so_far);
    feed.measure(move || {
        // Plain figures for people: nothing else is read because of them.
        let [done, all] = [0, 1].map(|at| seen[at].load(Ordering::Relaxed));
        let bytes = (done as f64 / start.elapsed().as_secs_f64()) as u64;
        let left = all.saturating_sub(done).checked_div(bytes)?;
        let left = Some(Duration::from_secs(left));
        Some(Rates { bytes, left })
    });
    let result = work(&mut |done, all| {
        so_far[0].store(done, Ordering::Relaxed);
        so_far[1].store(all, Ordering::Relaxed);
        feed.at(done, all);
        match stop() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    let took = start.elapsed();
    display.finish();
    (result, took)
}
