//! One file of a mount, and the reads of its source that take time.
//!
//! **Guarantee.** A read waits for another one only if [`THREADS`](crate::pool::THREADS) of its file
//! are under way. One
//! that fails is repeated until it succeeds: an error would end the VM (SIGBUS), and zeros would be
//! wrong. Only a thread that is being killed gets an error, so that it can end.

use super::device::Device;
use super::protocol::Attr;
use crate::Owner;
use crate::figures::Figures;
use crate::name::Name;
use crate::pool::{FIRST_PAUSE, LAST_PAUSE, Pool};
use crate::recording::Recording;
use crate::source::{Source, SourceError};
use crate::timeline::Came;
use crate::vm::locked;
use rustix::io::Errno;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use xxhash_rust::xxh3::xxh3_64;

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
    reads: Pool<Read>,
    /// The reads that are not answered yet.
    waiting: AtomicUsize,
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
            reads: Pool::default(),
            waiting: AtomicUsize::new(0),
        }
    }

    pub(super) fn attr(&self) -> Attr {
        Attr::file(self.node, self.source.bytes(), self.owner, self.mode)
    }

    /// Starts the thread that stays as long as the file.
    pub(super) fn start(self: &Arc<Self>, device: &Arc<Device>) -> io::Result<()> {
        self.reads.start(|| self.spawn(device))
    }

    fn spawn(self: &Arc<Self>, device: &Arc<Device>) -> io::Result<()> {
        let (file, device) = (self.clone(), device.clone());
        let thread = std::thread::Builder::new().name(format!("read-{}", self.name));
        thread.spawn(move || file.work(&device)).map(drop)
    }

    /// Queues a read whose bytes are not at hand.
    pub(super) fn add(self: &Arc<Self>, device: &Arc<Device>, read: Read) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.reads.add(read, || self.spawn(device));
    }

    /// The reads that wait for the source.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Why the source cannot be read now.
    pub(super) fn loss(&self) -> Option<String> {
        locked(&self.loss).clone()
    }

    /// Ends its threads, once their reads are over.
    pub(super) fn close(&self) {
        self.reads.close();
    }

    fn work(&self, device: &Device) {
        let mut buffer = Vec::new();
        while let Some(read) = self.reads.next() {
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
                        // It has waited so long that as much again changes little.
                        let pause = read.arrived.elapsed().clamp(FIRST_PAUSE, LAST_PAUSE);
                        self.reads.add_later(read, pause);
                        continue;
                    }
                }
            }
            self.waiting.fetch_sub(1, Ordering::Relaxed);
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
