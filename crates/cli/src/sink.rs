//! Output that never holds up the work: a bounded queue before a descriptor, with its own thread.
//!
//! **Guarantee.** [`Sink::offer`] never waits and never fails. [`Sink::push`] waits only while the
//! reader makes progress. Text for which there is no room, or that cannot be written, is dropped
//! and counted. The count is written as a line of its own as soon as output works again.
//!
//! **Mechanism.** One thread writes the queue, [`PIECE`] bytes at a time. It holds no lock while it
//! writes, so a reader that takes nothing blocks this thread alone.

use rustix::io::Errno;
use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The most bytes of one write(2). A slow reader of a pipe shows its progress at each piece.
const PIECE: usize = 4096;
/// The pause before the next attempt at a descriptor that does not block and is full.
const AGAIN: Duration = Duration::from_millis(10);
/// The interval at which a wait for the reader looks whether to stop.
const POLL: Duration = Duration::from_millis(20);

/// A descriptor that a sink writes to.
#[derive(Debug)]
pub(crate) enum To {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// A file.
    File(File),
}

impl To {
    fn write(&self, bytes: &[u8]) -> Result<usize, Errno> {
        let (stdout, stderr);
        let fd: BorrowedFd<'_> = match self {
            Self::Stdout => {
                stdout = std::io::stdout();
                stdout.as_fd()
            }
            Self::Stderr => {
                stderr = std::io::stderr();
                stderr.as_fd()
            }
            Self::File(file) => file.as_fd(),
        };
        rustix::io::write(fd, bytes)
    }
}

/// A text on its way, and the number of texts that were dropped before it.
#[derive(Debug)]
struct Text {
    bytes: Vec<u8>,
    lost_before: u64,
}

#[derive(Debug, Default)]
struct Queue {
    texts: VecDeque<Text>,
    /// The bytes of all texts that are not written yet, with the one that is being written.
    waiting: usize,
    /// Whether the thread is writing.
    is_writing: bool,
    /// The texts that were dropped and that no reader was told of.
    untold: u64,
    /// All texts that were dropped, and their bytes.
    lost: u64,
    lost_bytes: u64,
    /// Counts the writes that took bytes. It shows that the reader makes progress.
    progress: u64,
    /// The progress at which [`Sink::push`] gave the reader up.
    given_up_at: Option<u64>,
    /// The error of the last write, if it failed.
    failed: Option<Errno>,
    /// The first error.
    first_error: Option<Errno>,
    /// Whether the thread ends once it has nothing to write.
    closed: bool,
}

#[derive(Debug)]
struct SinkState {
    to: To,
    /// Names a number of lost texts to the reader.
    notice: fn(u64) -> String,
    capacity: usize,
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl SinkState {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, queue: MutexGuard<'a, Queue>, limit: Duration) -> MutexGuard<'a, Queue> {
        let waited = self.changed.wait_timeout(queue, limit);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl Queue {
    /// Takes the next text, or else the count of lost ones if output works.
    fn next(&mut self) -> Option<Text> {
        self.texts.pop_front().or_else(|| {
            let tells = self.untold > 0 && self.failed.is_none();
            tells.then(|| Text {
                bytes: Vec::new(),
                lost_before: std::mem::take(&mut self.untold),
            })
        })
    }

    fn has_room(&self, bytes: usize, capacity: usize) -> bool {
        self.waiting == 0 || self.waiting.saturating_add(bytes) <= capacity
    }

    fn drop_one(&mut self, bytes: usize) {
        self.lost += 1;
        self.lost_bytes += bytes as u64;
        self.untold += 1;
    }

    fn add(&mut self, bytes: &[u8]) {
        self.waiting += bytes.len();
        let lost_before = std::mem::take(&mut self.untold);
        self.texts.push_back(Text {
            bytes: bytes.to_vec(),
            lost_before,
        });
    }
}

/// Writes texts to a descriptor in the background. A copy shares the queue. The thread ends after
/// [`Sink::close`], or with the process.
#[derive(Clone, Debug)]
pub(crate) struct Sink(Arc<SinkState>);

impl Sink {
    /// Starts the thread `name`. At most `capacity` bytes wait, except for one text that is longer.
    ///
    /// # Errors
    /// When the host has no room for a thread.
    pub(crate) fn start(
        name: &str,
        to: To,
        capacity: usize,
        notice: fn(u64) -> String,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(SinkState {
            to,
            notice,
            capacity,
            queue: Mutex::default(),
            changed: Condvar::new(),
        });
        let ours = Arc::clone(&shared);
        std::thread::Builder::new()
            .name(name.into())
            .spawn(move || write_all_texts(&ours))?;
        Ok(Self(shared))
    }

    /// Adds a text, or drops and counts it if there is no room.
    pub(crate) fn offer(&self, bytes: &[u8]) {
        let mut queue = self.0.queue();
        if queue.has_room(bytes.len(), self.0.capacity) {
            queue.add(bytes);
        } else {
            queue.drop_one(bytes.len());
        }
        self.0.changed.notify_all();
    }

    /// Adds a text, whatever waits already. The caller waits for it by [`Sink::drain`].
    pub(crate) fn force(&self, bytes: &[u8]) {
        self.0.queue().add(bytes);
        self.0.changed.notify_all();
    }

    /// Adds a text. Waits for room while the reader makes progress. A reader that takes nothing for
    /// `patience` is given up: texts are dropped and counted until it takes something again.
    pub(crate) fn push(&self, bytes: &[u8], patience: Duration) {
        let mut queue = self.0.queue();
        let (mut seen, mut since) = (queue.progress, Instant::now());
        while !queue.has_room(bytes.len(), self.0.capacity) {
            if queue.progress != seen {
                (seen, since) = (queue.progress, Instant::now());
            }
            if queue.given_up_at == Some(seen) || since.elapsed() >= patience {
                queue.given_up_at = Some(seen);
                queue.drop_one(bytes.len());
                return;
            }
            queue = self.0.wait(queue, POLL);
        }
        queue.add(bytes);
        self.0.changed.notify_all();
    }

    /// Waits until all was written or dropped, or `stop` holds. Returns whether all was.
    pub(crate) fn drain(&self, stop: &dyn Fn() -> bool) -> bool {
        let mut queue = self.0.queue();
        while queue.is_writing
            || !queue.texts.is_empty()
            || queue.untold > 0 && queue.failed.is_none()
        {
            if stop() {
                return false;
            }
            queue = self.0.wait(queue, POLL);
        }
        true
    }

    /// The number of texts that were dropped so far.
    pub(crate) fn lost(&self) -> u64 {
        self.0.queue().lost
    }

    /// The bytes that were dropped so far, and a count that grows when the reader takes something.
    pub(crate) fn losses(&self) -> (u64, u64) {
        let queue = self.0.queue();
        (queue.lost_bytes, queue.progress)
    }

    /// The first error of a write.
    pub(crate) fn first_error(&self) -> Option<Errno> {
        self.0.queue().first_error
    }

    /// Lets the thread end once it has nothing to write.
    pub(crate) fn close(&self) {
        self.0.queue().closed = true;
        self.0.changed.notify_all();
    }
}

/// The thread.
fn write_all_texts(shared: &SinkState) {
    let mut queue = shared.queue();
    loop {
        let Some(text) = queue.next() else {
            if queue.closed {
                return;
            }
            let waited = shared.changed.wait(queue);
            queue = waited.unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        queue.is_writing = true;
        drop(queue);
        let told = match text.lost_before {
            0 => Ok(()),
            lost => write(shared, (shared.notice)(lost).as_bytes()),
        };
        let written = told.and_then(|()| write(shared, &text.bytes));
        queue = shared.queue();
        queue.is_writing = false;
        queue.waiting -= text.bytes.len();
        queue.failed = written.err();
        if let Err(why) = written {
            queue.first_error.get_or_insert(why);
            if told.is_err() {
                queue.untold += text.lost_before;
            }
            if !text.bytes.is_empty() {
                queue.drop_one(text.bytes.len());
            }
        }
        shared.changed.notify_all();
    }
}

/// Writes all of `bytes`.
fn write(shared: &SinkState, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match shared.to.write(&bytes[..bytes.len().min(PIECE)]) {
            Ok(taken) => {
                bytes = &bytes[taken..];
                shared.queue().progress += 1;
                shared.changed.notify_all();
            }
            Err(Errno::INTR) => {}
            // Another process that has this descriptor may have set O_NONBLOCK.
            Err(Errno::AGAIN) => std::thread::sleep(AGAIN),
            Err(why) => return Err(why),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_testkit::LIMIT;
    use rustix::pipe::{PipeFlags, pipe_with};
    use std::io::Read;

    fn notice(lost: u64) -> String {
        format!("{lost} lost\n")
    }

    fn pipe(capacity: usize) -> (File, Sink) {
        // The children of other tests must not have it.
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let sink = Sink::start("test", To::File(writer.into()), capacity, notice).unwrap();
        (reader.into(), sink)
    }

    /// Reads from `from` until `sink` has written all, and then what is left.
    fn read_all(mut from: File, sink: Sink) -> String {
        let reading = std::thread::spawn(move || {
            let mut text = String::new();
            from.read_to_string(&mut text).unwrap();
            text
        });
        assert!(sink.drain(&|| false));
        sink.close();
        drop(sink);
        reading.join().unwrap()
    }

    #[test]
    fn a_full_pipe_holds_nobody_up_and_the_loss_is_told() {
        let (reader, sink) = pipe(1 << 10);
        let line = [b"x".repeat(99), b"\n".to_vec()].concat();
        let before = Instant::now();
        for _ in 0..2000 {
            sink.offer(&line);
        }
        assert!(before.elapsed() < LIMIT);
        // A pipe takes 64 KiB at least, and ten lines wait.
        let lost = sink.lost();
        assert!((1..2000).contains(&lost), "{lost}");
        assert!(!sink.drain(&|| true));
        let text = read_all(reader, sink);
        // While the pipe filled, the thread may have been slower, and have told of losses in
        // between.
        let (told, written): (Vec<&str>, Vec<&str>) =
            text.lines().partition(|line| line.ends_with(" lost"));
        let told = told.iter().map(|line| line.strip_suffix(" lost"));
        let told: u64 = told
            .map(|count| count.unwrap().parse::<u64>().unwrap())
            .sum();
        assert_eq!(told, lost, "all losses are told");
        assert_eq!(written.len() as u64, 2000 - lost);
    }

    #[test]
    fn a_disk_that_is_full_loses_lines_and_their_count_survives() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let sink = Sink::start("test", To::File(full), 1 << 10, notice).unwrap();
        for _ in 0..3 {
            sink.offer(b"line\n");
            assert!(sink.drain(&|| false));
        }
        assert_eq!(sink.lost(), 3);
        assert_eq!(sink.first_error(), Some(Errno::NOSPC));
        assert_eq!(sink.0.queue().untold, 3, "nobody was told yet");
        sink.close();
    }

    #[test]
    fn a_reader_that_has_gone_is_an_error_and_no_signal() {
        let (reader, sink) = pipe(1 << 10);
        drop(reader);
        sink.offer(b"line\n");
        assert!(sink.drain(&|| false));
        assert_eq!((sink.lost(), sink.first_error()), (1, Some(Errno::PIPE)));
        sink.close();
    }

    #[test]
    fn a_slow_reader_loses_nothing_and_one_that_stopped_loses_without_a_wait() {
        let (mut reader, sink) = pipe(8 << 10);
        let ours = sink.clone();
        let pushing = std::thread::spawn(move || {
            for _ in 0..200 {
                ours.push(&[b'x'; 1000], LIMIT);
            }
        });
        let mut taken = vec![0; 200_000];
        for piece in taken.chunks_mut(4096) {
            std::thread::sleep(Duration::from_millis(2));
            reader.read_exact(piece).unwrap();
        }
        pushing.join().unwrap();
        assert_eq!(sink.lost(), 0);
        for _ in 0..200 {
            sink.push(&[b'y'; 1000], Duration::from_millis(50));
        }
        let lost = sink.lost();
        assert!(lost > 100, "{lost}");
        // Given up once, it costs no more time.
        let before = Instant::now();
        (0..1000).for_each(|_| sink.push(&[b'y'; 1000], Duration::from_secs(3600)));
        assert!(before.elapsed() < LIMIT);
        let told = format!("{} lost\n", lost + 1000);
        assert!(read_all(reader, sink).ends_with(&told));
    }
}
