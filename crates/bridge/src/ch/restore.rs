//! A VM of Cloud Hypervisor starts from its snapshot before its memory is read.
//!
//! **Guarantee.** A page fault is answered when its page has the snapshot's bytes. A snapshot that
//! does not serve is refused before the process gets anything.
//!
//! **Mechanism.** A process without a VM takes it as a post-copy migration on its own host. Config
//! and State are those of the snapshot. One thread answers its page faults, one waits for its
//! answers to State and Complete, and the others read ahead. The process asks for each page once,
//! and needs nobody afterwards.
//!
//! **Neighbours.** `snapshot` has read the files, `pages` brings memory, `receiver` speaks with the
//! process.

use super::pages::Pages;
use super::receiver::{Ended, Keep, Receiver};
use super::snapshot::Snapshot;
use crate::foreign::VmmError;
use crate::foreign::keeper::End;
use crate::foreign::kept::Kept;
use pageferry_addr::PAGE_SIZE;
use pageferry_pager::{Source, SourceError};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use tracing::info;

/// The most reads ahead at once.
const MOST_READS: usize = 64;
/// The interval of looks at `stop`.
const WATCH: Duration = Duration::from_millis(50);
/// The time in which a process that has ended closes its other connection.
const GRACE: Duration = Duration::from_secs(5);
/// The priority of the threads that read ahead, as in the pager.
const NICE: i32 = 10;

/// The choices for a restore.
#[derive(Debug)]
pub struct RestoreOptions {
    /// The API socket of a process that has no VM.
    pub api: PathBuf,
    /// The VM runs once it is restored. Otherwise it stays paused, as it was saved.
    pub resume: bool,
    /// The command of a program that calls [`keep`](crate::foreign::keep) at once. With it, a VM
    /// that was loaded outlives this process: the next restore of the same snapshot goes on. Its
    /// standard input and output are set.
    pub keeper: Option<std::process::Command>,
}

/// An event of a restore.
#[derive(Debug)]
#[non_exhaustive]
pub enum Restoring<'a> {
    /// An earlier process was killed. This one goes on with its VM.
    GoesOn,
    /// The process has the VM, whose pages are still missing. It runs, if that was asked for.
    Loaded,
    /// A page that the process needs cannot be read. It waits, and the source is read again.
    Lost(&'a SourceError),
    /// The source works again.
    Found,
}

/// A restore that is over: the process has all pages.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RestoreReport {
    /// The VM's pages.
    pub pages: u64,
    /// The time until the process had answered State, with what it touched of memory.
    pub loaded: Duration,
    /// The time until the VM ran, or was restored for its owner to resume it.
    pub ready: Duration,
    /// The time until the process had all pages.
    pub took: Duration,
    /// The requests for pages.
    pub requests: u64,
    /// The requests whose pages were not here yet.
    pub waits: u64,
    /// The time that they have waited, together.
    pub waited: Duration,
    /// The longest wait.
    pub longest_wait: Duration,
    /// The reads of the source.
    pub reads: u64,
    /// The bytes that they brought.
    pub read_bytes: u64,
    /// The reads that failed, and were repeated.
    pub failed_reads: u64,
}

/// Progress of the threads.
enum Done {
    Loaded,
    Ready,
    Failed(VmmError),
    Faults(Result<Ended, VmmError>),
}

/// Restores a snapshot into a Cloud Hypervisor process that has no VM, until it has all pages.
/// `source` is the memory that [`Snapshot::open`] has opened.
///
/// # Errors
/// [`VmmError`]. The VM has not started, or has ended with its process. [`VmmError::Stopped`] when
/// `stop` returned true: the process then ends its VM.
pub fn restore(
    options: &mut RestoreOptions,
    snapshot: &Snapshot,
    source: &dyn Source,
    stop: &dyn Fn() -> bool,
    tell: &(dyn Fn(Restoring<'_>) + Sync),
) -> Result<RestoreReport, VmmError> {
    let (process, goes_on) = receiver(options, snapshot, source, stop)?;
    if goes_on {
        tell(Restoring::GoesOn);
    }
    let began = Instant::now();
    let of_source = |why: Option<&SourceError>| tell(why.map_or(Restoring::Found, Restoring::Lost));
    let pages = Pages::new(
        snapshot,
        source,
        &process.ram,
        &process.answers.kept,
        &of_source,
    );
    let requests = AtomicU64::new(0);
    let resume = options.resume;
    let bring = |first, count| {
        requests.fetch_add(1, Ordering::Relaxed);
        pages.bring(first, count)
    };
    let (sender, done) = channel();
    let ended = std::thread::scope(|scope| {
        for _ in 0..source.reads().clamp(1, MOST_READS) {
            scope.spawn(|| {
                let own = rustix::thread::gettid();
                // Without the right to, it runs beside the others.
                let _ = rustix::process::setpriority_process(Some(own), NICE);
                pages.read_ahead();
            });
        }
        let of_faults = sender.clone();
        scope.spawn(|| {
            let of_faults = of_faults;
            let _ = of_faults.send(Done::Faults(process.answer_faults(&bring)));
        });
        let of_main = sender;
        scope.spawn(|| {
            let of_main = of_main;
            let state = (!goes_on).then_some(&snapshot.state[..]);
            if let Err(why) = load(&process, state, resume, &of_main) {
                let _ = of_main.send(Done::Failed(why));
            }
        });
        let ended = follow(&done, &process, (began, stop), tell);
        pages.end();
        process.shutdown();
        ended
    });
    let (loaded, ready, took) = ended?;
    let figures = &pages.figures;
    let count = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
    Ok(RestoreReport {
        pages: process.ram.pages(),
        loaded,
        ready,
        took,
        requests: count(&requests),
        waits: count(&figures.waits),
        waited: Duration::from_nanos(count(&figures.waited_ns)),
        longest_wait: Duration::from_nanos(count(&figures.longest_ns)),
        reads: count(&figures.reads),
        read_bytes: count(&figures.read_bytes),
        failed_reads: count(&figures.failed_reads),
    })
}

/// A process that takes the VM, or one that has it from a process of ours that was killed. Returns
/// which.
fn receiver(
    options: &mut RestoreOptions,
    snapshot: &Snapshot,
    source: &dyn Source,
    stop: &dyn Fn() -> bool,
) -> Result<(Receiver, bool), VmmError> {
    let record = snapshot.record(&source.identity());
    let pages = |found: &[u8]| match found == record {
        true => Ok(snapshot.memory_bytes() / PAGE_SIZE),
        false => Err(VmmError::Kept("it is of another snapshot".into())),
    };
    let (api, mappings) = (&options.api, &snapshot.mappings);
    if let Some((kept, ring, _, fds)) = Kept::found(api, End::Restore, &pages)? {
        return Ok((Receiver::found(api, (kept, ring), fds, mappings)?, true));
    }
    let keep = Keep {
        record: &record,
        end: End::Restore,
        keeper: options.keeper.as_mut(),
    };
    let process = Receiver::prepare(api, mappings, &snapshot.config, keep, stop)?;
    process.answers.kept.all_missing(process.ram.pages());
    Ok((process, false))
}

/// Gives the process State, if it has none yet, and lets it go. Both may wait for pages.
fn load(
    process: &Receiver,
    state: Option<&[u8]>,
    resume: bool,
    done: &Sender<Done>,
) -> Result<(), VmmError> {
    if let Some(state) = state {
        process.load(state, false)?;
    }
    process.answers.kept.loaded(!resume);
    let _ = done.send(Done::Loaded);
    process.complete(!resume)?;
    let _ = done.send(Done::Ready);
    Ok(())
}

/// Waits until the process has the VM and all its pages. Returns the times of State, of Complete
/// and of the end.
fn follow(
    done: &std::sync::mpsc::Receiver<Done>,
    process: &Receiver,
    (began, stop): (Instant, &dyn Fn() -> bool),
    tell: &(dyn Fn(Restoring<'_>) + Sync),
) -> Result<(Duration, Duration, Duration), VmmError> {
    let (mut loaded, mut ready, mut closed) = (None, None, None);
    let pages = process.ram.pages();
    loop {
        let asked = process.answers.asked();
        let whole = asked == pages;
        let gone = || VmmError::Gone { asked, pages };
        match (loaded, ready, closed) {
            (Some(loaded), Some(ready), Some(closed)) if whole => {
                return Ok((loaded, ready, closed));
            }
            // The other connection has the reason, if it is open.
            (_, Some(_), Some(_)) => return Err(gone()),
            (_, None, Some(at)) if !whole && began.elapsed() > at + GRACE => return Err(gone()),
            _ => {}
        }
        if stop() {
            return Err(VmmError::Stopped);
        }
        match done.recv_timeout(WATCH) {
            Ok(Done::Loaded) => loaded = Some(began.elapsed()),
            Ok(Done::Ready) => {
                ready = Some(began.elapsed());
                info!("the restored Cloud Hypervisor has its VM");
                tell(Restoring::Loaded);
            }
            Ok(Done::Failed(why)) => return Err(why),
            Ok(Done::Faults(Ok(_) | Err(VmmError::Closed(_)))) => closed = Some(began.elapsed()),
            Ok(Done::Faults(Err(why))) => return Err(why),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(gone()),
        }
    }
}
