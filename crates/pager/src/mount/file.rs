//! One file of a mount, and the reads of its source that take time.
//!
//! **Guarantee.** A read waits for another one only if [`THREADS`] of its file are under way. One
//! that fails is repeated until it succeeds: an error would end the VM (SIGBUS), and zeros would be
//! wrong. Only a thread that is being killed gets an error, so that it can end.

use super::device::Device;
use super::protocol::Attr;
use crate::Owner;
use crate::figures::Figures;
use crate::name::Name;
use crate::recording::Recording;
use crate::source::{Source, SourceError};
use crate::timeline::Came;
use crate::vm::locked;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

/// The most reads of one file at once.
const THREADS: usize = 16;
/// The time after which a thread without work ends, but for the last one.
const IDLE: Duration = Duration::from_secs(5);
/// The pauses before a failed read is repeated.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// A file.
#[derive(Debug)]
pub(super) struct File {
    pub(super) name: Name,
    pub(super) node: u64,
    pub(super) source: Arc<dyn Source>,
    pub(super) recording: Option<Recording>,
    /// Whether its recording has been replayed since the kernel forgot it last.
    pub(super) replayed: AtomicBool,
    pub(super) figures: Figures,
    owner: (u32, u32),
    mode: u32,
    /// The reason why a part cannot be read, while that is so.
    loss: Mutex<Option<String>>,
    reads: Mutex<Reads>,
    ready: Condvar,
}

#[derive(Debug, Default)]
struct Reads {
    now: VecDeque<Read>,
    /// Reads that have failed, with the time of the next try.
    later: Vec<(Instant, Read)>,
    /// All that are not answered yet.
    waiting: usize,
    threads: usize,
    sleeping: usize,
    closed: bool,
}

/// A read of the kernel.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) unique: u64,
    pub(super) pid: u32,
    pub(super) offset: u64,
    pub(super) len: usize,
    pub(super) arrived: Instant,
}

impl File {
    pub(super) fn new(
        name: Name,
        source: Arc<dyn Source>,
        owner: Owner,
        recording: Option<Recording>,
    ) -> Self {
        // The next pager finds the node again. Other contents are another node, so that no page of
        // them mixes with pages in the page cache. 0 is none, and 1 is the directory.
        let node = xxh3_64(format!("{name}\n{}", source.identity()).as_bytes()).max(2);
        let user = owner.user.unwrap_or(rustix::process::geteuid().as_raw());
        let group = owner.group.unwrap_or(rustix::process::getegid().as_raw());
        Self {
            name,
            node,
            source,
            recording,
            replayed: AtomicBool::new(false),
            figures: Figures::new(),
            owner: (user, group),
            mode: owner.mode,
            loss: Mutex::default(),
            reads: Mutex::default(),
            ready: Condvar::new(),
        }
    }

    pub(super) fn attr(&self) -> Attr {
        Attr::file(self.node, self.source.bytes(), self.owner, self.mode)
    }

    /// Starts the thread that stays as long as the file.
    pub(super) fn start(self: &Arc<Self>, device: &Arc<Device>) -> io::Result<()> {
        locked(&self.reads).threads = 1;
        self.spawn(device)
    }

    fn spawn(self: &Arc<Self>, device: &Arc<Device>) -> io::Result<()> {
        let (file, device) = (self.clone(), device.clone());
        let thread = std::thread::Builder::new().name(format!("read-{}", self.name));
        thread.spawn(move || file.work(&device)).map(drop)
    }

    /// Queues a read whose bytes are not at hand.
    pub(super) fn add(self: &Arc<Self>, device: &Arc<Device>, read: Read) {
        let mut reads = locked(&self.reads);
        reads.waiting += 1;
        reads.now.push_back(read);
        if reads.sleeping >= reads.now.len() {
            self.ready.notify_one();
        } else if reads.threads < THREADS {
            reads.threads += 1;
            drop(reads);
            if self.spawn(device).is_err() {
                // The others read it.
                locked(&self.reads).threads -= 1;
            }
        }
    }

    /// The reads that wait for the source.
    pub(super) fn waiting(&self) -> usize {
        locked(&self.reads).waiting
    }

    /// Why the source cannot be read now.
    pub(super) fn loss(&self) -> Option<String> {
        locked(&self.loss).clone()
    }

    /// Ends its threads, once their reads are over.
    pub(super) fn close(&self) {
        locked(&self.reads).closed = true;
        self.ready.notify_all();
    }

    fn work(&self, device: &Device) {
        let mut buffer = Vec::new();
        let mut failed = None;
        while let Some(read) = self.next(failed.take()) {
            buffer.resize(read.len, 0);
            match self.source.read(read.offset, &mut buffer) {
                Ok(()) => {
                    self.works();
                    self.figures.answered(Came::Read, read.arrived.elapsed());
                    device.reply(read.unique, &buffer);
                }
                Err(why) => {
                    self.failed(&why);
                    if is_dying(read.pid) {
                        device.refuse(read.unique, Errno::IO);
                    } else {
                        failed = Some(read);
                        continue;
                    }
                }
            }
            locked(&self.reads).waiting -= 1;
        }
    }

    /// Puts a failed read back, and waits for one. `None` if the thread has to end.
    fn next(&self, failed: Option<Read>) -> Option<Read> {
        let mut reads = locked(&self.reads);
        if let Some(read) = failed {
            // It has waited so long that as much again changes little.
            let pause = read.arrived.elapsed().clamp(FIRST_PAUSE, LAST_PAUSE);
            reads.later.push((Instant::now() + pause, read));
        }
        let idle_since = Instant::now();
        loop {
            let now = Instant::now();
            if reads.closed || (reads.threads > 1 && now.duration_since(idle_since) >= IDLE) {
                reads.threads -= 1;
                return None;
            }
            while let Some(due) = reads.later.iter().position(|(at, _)| *at <= now) {
                let (_, read) = reads.later.swap_remove(due);
                reads.now.push_back(read);
            }
            if let Some(read) = reads.now.pop_front() {
                return Some(read);
            }
            let soonest = reads.later.iter().map(|(at, _)| *at).min();
            let until = soonest.map_or(IDLE, |at| at.duration_since(now).min(IDLE));
            reads.sleeping += 1;
            let woken = self.ready.wait_timeout(reads, until);
            (reads, _) = woken.unwrap_or_else(PoisonError::into_inner);
            reads.sleeping -= 1;
        }
    }

    fn failed(&self, why: &SourceError) {
        self.figures.source_errors.add(1);
        let before = locked(&self.loss).replace(why.to_string());
        if before.is_none() {
            tracing::error!(file = %self.name, "{why}: its readers wait");
        }
    }

    fn works(&self) {
        if locked(&self.loss).take().is_some() {
            tracing::warn!(file = %self.name, "the source can be read again");
        }
    }
}

/// Whether a thread is gone or has been killed. The kernel lets it end only when its read is
/// answered. A thread of another pid namespace has no number here, and counts as alive.
fn is_dying(pid: u32) -> bool {
    if pid == 0 {
        return false;
    }
    match std::fs::read_to_string(format!("/proc/{pid}/status")) {
        Ok(text) => is_killed(&text),
        Err(why) => why.kind() == io::ErrorKind::NotFound,
    }
}

fn is_killed(status: &str) -> bool {
    const SIGKILL: u64 = 1 << (9 - 1);
    status.lines().any(|line| {
        let pending = line
            .strip_prefix("SigPnd:")
            .or_else(|| line.strip_prefix("ShdPnd:"))
            .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        pending.is_some_and(|mask| mask & SIGKILL != 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pending_sigkill_is_the_end_of_a_thread() {
        assert!(is_killed(
            "Name:\tvmm\nSigPnd:\t0000000000000100\nShdPnd:\t0000000000000000\n"
        ));
        assert!(!is_killed(
            "SigPnd:\t0000000000000200\nSigBlk:\t0000000000000100\n"
        ));
        assert!(!is_dying(std::process::id()) && !is_dying(0));
        assert!(is_dying(u32::MAX), "there is no such process");
    }
}
