//! Runs all vCPUs at once, each on a thread, and times them.
//!
//! The threads wait for each other before any enters its guest, so no figure includes the start of
//! threads. If there is a core for each thread, each is pinned to its own. Otherwise two threads
//! that start together may share a core for the whole of a short run.

use crate::BenchError;
use crate::cores;
use crate::error::os;
use crate::kit::Meeting;
use crate::vm::LIMIT;
use pageferry_addr::RamPage;
use pageferry_guest::{Doorbell, Event};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// The reason why a vCPU left its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GuestExit {
    /// It touched a missing page.
    Missing(RamPage),
    /// It has touched all its pages.
    Finished,
    /// It was kicked.
    Kicked,
}

/// Whether `value`, stored to the doorbell, says that a vCPU has touched all its pages.
pub(super) fn is_finished(value: u64) -> bool {
    Doorbell::parse(value as u32).is_ok_and(|bell| bell.event == Event::Finished)
}

/// A vCPU that runs on the calling thread.
pub(crate) trait Runner: Send {
    /// Runs until the vCPU leaves its guest.
    fn run(&mut self) -> Result<GuestExit, BenchError>;

    /// A function that makes the vCPU leave its guest, from any thread.
    fn kicker(&self) -> Box<dyn Fn() + Send + Sync>;
}

/// The times of a race.
pub(crate) struct Race<T> {
    /// From the start of the first vCPU to the end of the last.
    pub(crate) whole: Duration,
    /// The time of each vCPU, from its own start to its own end.
    pub(crate) each: Vec<Duration>,
    /// The values that `end` returned, one for each thread.
    pub(crate) ended_with: Vec<T>,
    /// Nanoseconds from each fault on a missing page to the vCPU's next. [`race`] leaves it empty.
    pub(crate) fault_ns: Vec<u64>,
}

/// Runs the vCPUs to the end of their programs. Each thread calls `before` before any vCPU starts,
/// and `end` after its vCPU has ended. A thread whose vCPU touched a missing page calls `missing`
/// with the vCPU's index, and then the vCPU retries.
///
/// # Errors
/// The first error of a vCPU or of `missing`, or [`BenchError::Busy`] after [`LIMIT`].
pub(crate) fn race<R: Runner, T: Send>(
    runners: Vec<R>,
    before: &(dyn Fn() + Sync),
    missing: &(dyn Fn(usize, RamPage) -> Result<(), BenchError> + Sync),
    end: &(dyn Fn() -> T + Sync),
) -> Result<Race<T>, BenchError> {
    let count = runners.len();
    let own = Some(cores::each()).filter(|cores| cores.len() >= count);
    let kickers: Vec<_> = runners.iter().map(R::kicker).collect();
    let (start, stop) = (Meeting::new(count), AtomicBool::new(false));
    let results = std::thread::scope(|scope| {
        let (send, ends) = mpsc::channel();
        for (index, mut runner) in runners.into_iter().enumerate() {
            let core = own.as_ref().map(|cores| cores[index]);
            let (send, start, stop) = (send.clone(), &start, &stop);
            let body = move || {
                if let Some(core) = core {
                    cores::stay_on(&core);
                }
                before();
                start.meet(1);
                let began = Instant::now();
                let outcome = to_the_end(&mut runner, &|page| missing(index, page), stop);
                let ended = Instant::now();
                // The receiver is gone only if another vCPU has failed.
                let _ = send.send(outcome.map(|()| (began, ended, end())));
            };
            let started = std::thread::Builder::new()
                .name("touching-vcpu".into())
                .spawn_scoped(scope, body);
            if let Err(why) = started {
                stop.store(true, Ordering::Release);
                drop(start.leaving());
                return Err(os("cannot start a vCPU's thread")(why));
            }
        }
        // Now only the threads hold senders, so their end closes the channel.
        drop(send);
        let collected = collect(count, &ends);
        if collected.is_err() {
            stop.store(true, Ordering::Release);
            kickers.iter().for_each(|kick| kick());
        }
        collected
    })?;
    let began = results.iter().map(|(began, ..)| *began).min();
    let ended = results.iter().map(|(_, ended, _)| *ended).max();
    let whole = began.zip(ended).map(|(began, ended)| ended - began);
    Ok(Race {
        whole: whole.unwrap_or_default(),
        each: results
            .iter()
            .map(|(began, ended, _)| *ended - *began)
            .collect(),
        ended_with: results.into_iter().map(|(.., value)| value).collect(),
        fault_ns: Vec::new(),
    })
}

type End<T> = (Instant, Instant, T);

fn collect<T>(
    count: usize,
    ends: &mpsc::Receiver<Result<End<T>, BenchError>>,
) -> Result<Vec<End<T>>, BenchError> {
    let deadline = Instant::now() + LIMIT;
    (0..count)
        .map(|_| {
            let left = deadline.saturating_duration_since(Instant::now());
            match ends.recv_timeout(left) {
                Ok(end) => end,
                Err(RecvTimeoutError::Timeout) => Err(BenchError::Busy(format!(
                    "the guests did not touch all their pages within {} s",
                    LIMIT.as_secs()
                ))),
                Err(RecvTimeoutError::Disconnected) => Err(BenchError::Stopped(
                    "a vCPU's thread ended without a result".into(),
                )),
            }
        })
        .collect()
}

fn to_the_end(
    runner: &mut impl Runner,
    missing: &dyn Fn(RamPage) -> Result<(), BenchError>,
    stop: &AtomicBool,
) -> Result<(), BenchError> {
    loop {
        match runner.run()? {
            GuestExit::Finished => return Ok(()),
            GuestExit::Missing(page) => missing(page)?,
            GuestExit::Kicked => {}
        }
        if stop.load(Ordering::Acquire) {
            return Err(BenchError::Stopped("another vCPU failed".into()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// Leaves with the exits of its script, then runs until it is kicked.
    struct Scripted(Vec<GuestExit>, Arc<AtomicBool>);

    impl Runner for Scripted {
        fn run(&mut self) -> Result<GuestExit, BenchError> {
            match self.0.pop() {
                Some(left) => Ok(left),
                None => {
                    while !self.1.load(Ordering::Acquire) {
                        std::thread::yield_now();
                    }
                    Ok(GuestExit::Kicked)
                }
            }
        }
        fn kicker(&self) -> Box<dyn Fn() + Send + Sync> {
            let kicked = Arc::clone(&self.1);
            Box::new(move || kicked.store(true, Ordering::Release))
        }
    }

    fn scripted(script: &[GuestExit]) -> Scripted {
        let backwards = script.iter().rev().copied().collect();
        Scripted(backwards, Arc::default())
    }

    #[test]
    fn every_missing_page_is_brought_and_every_thread_asked() {
        let brought = std::sync::Mutex::new(Vec::new());
        let runners = (0..3)
            .map(|page| {
                scripted(&[
                    GuestExit::Missing(RamPage(page)),
                    GuestExit::Kicked,
                    GuestExit::Finished,
                ])
            })
            .collect();
        let bring = |vcpu, page| {
            brought.lock().unwrap().push((vcpu, page));
            Ok(())
        };
        let race = race(runners, &|| {}, &bring, &|| 7).unwrap();
        assert_eq!((race.each.len(), race.ended_with), (3, vec![7; 3]));
        assert!(race.each.iter().all(|&one| one <= race.whole));
        let mut brought = brought.into_inner().unwrap();
        brought.sort_unstable();
        assert_eq!(brought, [0, 1, 2].map(|n| (n as usize, RamPage(n))));
    }

    #[test]
    fn one_error_stops_all() {
        let runners = vec![scripted(&[GuestExit::Missing(RamPage(0))]), scripted(&[])];
        let refuse = |_, _| Err(BenchError::Setting("no such page".into()));
        let error = race(runners, &|| {}, &refuse, &|| ()).err().unwrap();
        assert_eq!(error.to_string(), "no such page");
    }
}
