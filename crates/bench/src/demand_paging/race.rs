//! All vCPUs at once: a thread each, one start, and when each was done.
//!
//! The threads wait for each other before the first of them enters its guest; what starting threads
//! costs is in no figure. Where there is a core for each, each stays on its own: else two that were
//! started together may share one for the whole of a short run.

use crate::BenchError;
use crate::cores;
use crate::vm::LIMIT;
use pageferry_addr::RamPage;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Why a vCPU left its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// It touched a page that is missing.
    Missing(RamPage),
    /// It has touched all its pages.
    Finished,
    /// It was kicked.
    Kicked,
}

/// A vCPU that runs on the thread it is given to.
pub(crate) trait Runner: Send {
    /// Runs until the guest leaves.
    fn run(&mut self) -> Result<Left, BenchError>;

    /// Makes it leave, from any thread.
    fn kicker(&self) -> Box<dyn Fn() + Send + Sync>;
}

/// What a race was.
pub(crate) struct Race<T> {
    /// From the start of the first vCPU to the end of the last.
    pub(crate) whole: Duration,
    /// Of each vCPU by itself.
    pub(crate) each: Vec<Duration>,
    /// What each thread said at its end.
    pub(crate) said: Vec<T>,
}

/// Runs the vCPUs to the end of their programs. `before` is called on each thread before any
/// begins. `missing` is called on the thread of a vCPU that touched a missing page, and the vCPU
/// tries again when it returns; `end` is called on each thread at its end.
///
/// # Errors
/// The first error of a vCPU or of `missing`; or that the guests took longer than [`LIMIT`].
pub(crate) fn race<R: Runner, T: Send>(
    runners: Vec<R>,
    before: &(dyn Fn() + Sync),
    missing: &(dyn Fn(RamPage) -> Result<(), BenchError> + Sync),
    end: &(dyn Fn() -> T + Sync),
) -> Result<Race<T>, BenchError> {
    let count = runners.len();
    let own = Some(cores::each()).filter(|cores| cores.len() >= count);
    let kickers: Vec<_> = runners.iter().map(R::kicker).collect();
    let (arrived, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let results = std::thread::scope(|scope| {
        let (send, ends) = mpsc::channel();
        for (index, mut runner) in runners.into_iter().enumerate() {
            let core = own.as_ref().map(|cores| cores[index]);
            let (send, arrived, stop) = (send.clone(), &arrived, &stop);
            let body = move || {
                if let Some(core) = core {
                    cores::stay_on(&core);
                }
                before();
                arrived.fetch_add(1, Ordering::AcqRel);
                let mut spins = 0_u32;
                while arrived.load(Ordering::Acquire) < count && !stop.load(Ordering::Acquire) {
                    spins = spins.wrapping_add(1);
                    if spins.is_multiple_of(1 << 10) {
                        std::thread::yield_now();
                    } else {
                        std::hint::spin_loop();
                    }
                }
                let began = Instant::now();
                let outcome = to_the_end(&mut runner, missing, stop);
                let ended = Instant::now();
                // Nobody listens only where the race is lost already.
                let _ = send.send(outcome.map(|()| (began, ended, end())));
            };
            let started = std::thread::Builder::new()
                .name("touching-vcpu".into())
                .spawn_scoped(scope, body);
            if let Err(source) = started {
                stop.store(true, Ordering::Release);
                return Err(BenchError::Os {
                    what: "cannot start a vCPU's thread",
                    source,
                });
            }
        }
        // From here on only the threads can send: if they are gone, that is seen.
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
        said: results.into_iter().map(|(.., said)| said).collect(),
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
                    "a vCPU's thread ended without a word".into(),
                )),
            }
        })
        .collect()
}

fn to_the_end(
    runner: &mut impl Runner,
    missing: &(dyn Fn(RamPage) -> Result<(), BenchError> + Sync),
    stop: &AtomicBool,
) -> Result<(), BenchError> {
    loop {
        match runner.run()? {
            Left::Finished => return Ok(()),
            Left::Missing(page) => missing(page)?,
            Left::Kicked => {}
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

    /// Leaves as its script says, then runs until it is kicked.
    struct Scripted(Vec<Left>, Arc<AtomicBool>);

    impl Runner for Scripted {
        fn run(&mut self) -> Result<Left, BenchError> {
            match self.0.pop() {
                Some(left) => Ok(left),
                None => {
                    while !self.1.load(Ordering::Acquire) {
                        std::thread::yield_now();
                    }
                    Ok(Left::Kicked)
                }
            }
        }
        fn kicker(&self) -> Box<dyn Fn() + Send + Sync> {
            let kicked = Arc::clone(&self.1);
            Box::new(move || kicked.store(true, Ordering::Release))
        }
    }

    fn scripted(script: &[Left]) -> Scripted {
        let backwards = script.iter().rev().copied().collect();
        Scripted(backwards, Arc::default())
    }

    #[test]
    fn every_missing_page_is_brought_and_every_thread_asked() {
        let brought = std::sync::Mutex::new(Vec::new());
        let runners = (0..3)
            .map(|page| scripted(&[Left::Missing(RamPage(page)), Left::Kicked, Left::Finished]))
            .collect();
        let bring = |page| {
            brought.lock().unwrap().push(page);
            Ok(())
        };
        let race = race(runners, &|| {}, &bring, &|| 7).unwrap();
        assert_eq!((race.each.len(), race.said), (3, vec![7; 3]));
        assert!(race.each.iter().all(|&one| one <= race.whole));
        let mut brought = brought.into_inner().unwrap();
        brought.sort_unstable();
        assert_eq!(brought, [RamPage(0), RamPage(1), RamPage(2)]);
    }

    #[test]
    fn one_error_stops_all() {
        let runners = vec![scripted(&[Left::Missing(RamPage(0))]), scripted(&[])];
        let refuse = |_| Err(BenchError::Setting("no such page".into()));
        let error = race(runners, &|| {}, &refuse, &|| ()).err().unwrap();
        assert_eq!(error.to_string(), "no such page");
    }
}
