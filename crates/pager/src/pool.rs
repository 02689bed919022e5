//! A queue of reads that take time and its threads, and the threads that read ahead.
//!
//! **Guarantee.** One thread is there from the start to the end, so no read waits for a thread that
//! the host refuses. Others come when the queue grows, up to [`THREADS`], and go when it is empty.
//! A failed read comes again after its pause.

use crate::name::Name;
use crate::vm::locked;
use std::collections::VecDeque;
use std::io;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The most reads of one queue at once.
pub(crate) const THREADS: usize = 16;
/// The pauses before a failed read is repeated.
pub(crate) const FIRST_PAUSE: Duration = Duration::from_millis(10);
pub(crate) const LAST_PAUSE: Duration = Duration::from_secs(1);
/// The time after which a thread without work ends.
const IDLE: Duration = Duration::from_secs(5);

/// The priority of threads that read ahead (nice 19 would never run beside a busy VM).
const NICE: i32 = 10;

/// Does `work` on several threads of a lower priority, and waits for them. Fewer do the same.
pub(crate) fn on_threads(name: &Name, count: usize, work: impl Fn() + Sync) {
    let work = || {
        let own = rustix::thread::gettid();
        // Without the right to, it runs beside the others.
        let _ = rustix::process::setpriority_process(Some(own), NICE);
        work();
    };
    std::thread::scope(|scope| {
        for _ in 1..count {
            let thread = std::thread::Builder::new().name(format!("load-{name}"));
            let _ = thread.spawn_scoped(scope, work);
        }
        work();
    });
}

/// A queue of `T`.
#[derive(Debug)]
pub(crate) struct Pool<T> {
    queue: Mutex<Queue<T>>,
    ready: Condvar,
}

#[derive(Debug)]
struct Queue<T> {
    now: VecDeque<T>,
    /// What has failed, with the time of the next try.
    later: Vec<(Instant, T)>,
    threads: usize,
    sleeping: usize,
    closed: bool,
}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Self {
            queue: Mutex::new(Queue {
                now: VecDeque::new(),
                later: Vec::new(),
                threads: 0,
                sleeping: 0,
                closed: false,
            }),
            ready: Condvar::new(),
        }
    }
}

impl<T> Pool<T> {
    /// Starts the first thread by `spawn`. Each thread calls [`Self::next`] until that is `None`.
    ///
    /// # Errors
    /// Those of `spawn`: there is no thread.
    pub(crate) fn start(&self, spawn: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        locked(&self.queue).threads = 1;
        spawn()
    }

    /// Queues a read. `spawn` starts another thread if that is worth one.
    pub(crate) fn add(&self, read: T, spawn: impl FnOnce() -> io::Result<()>) {
        let mut queue = locked(&self.queue);
        queue.now.push_back(read);
        if queue.sleeping >= queue.now.len() {
            self.ready.notify_one();
        } else if queue.threads < THREADS {
            queue.threads += 1;
            drop(queue);
            if spawn().is_err() {
                // The others read it.
                locked(&self.queue).threads -= 1;
            }
        }
    }

    /// Queues a failed read again.
    pub(crate) fn add_later(&self, read: T, pause: Duration) {
        locked(&self.queue)
            .later
            .push((Instant::now() + pause, read));
        // The sleepers may know of a later time only.
        self.ready.notify_one();
    }

    /// Ends all threads, once their reads are over.
    pub(crate) fn close(&self) {
        locked(&self.queue).closed = true;
        self.ready.notify_all();
    }

    /// Waits for a read. `None` if the thread has to end.
    pub(crate) fn next(&self) -> Option<T> {
        let mut queue = locked(&self.queue);
        let idle_since = Instant::now();
        loop {
            let now = Instant::now();
            if queue.closed || (queue.threads > 1 && now.duration_since(idle_since) >= IDLE) {
                queue.threads -= 1;
                return None;
            }
            while let Some(due) = queue.later.iter().position(|(at, _)| *at <= now) {
                let (_, read) = queue.later.swap_remove(due);
                queue.now.push_back(read);
            }
            if let Some(read) = queue.now.pop_front() {
                return Some(read);
            }
            let soonest = queue.later.iter().map(|(at, _)| *at).min();
            let until = soonest.map_or(IDLE, |at| at.duration_since(now).min(IDLE));
            queue.sleeping += 1;
            let woken = self.ready.wait_timeout(queue, until);
            (queue, _) = woken.unwrap_or_else(PoisonError::into_inner);
            queue.sleeping -= 1;
        }
    }
}
