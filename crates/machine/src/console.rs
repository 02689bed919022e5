//! A guest's text console: two bounded queues of bytes.
//!
//! **Guarantee.** A guest never waits for the reader of its console. What it writes comes out in
//! order. While nobody has read, the newest 64 KiB are kept. Once there is a reader, no byte is
//! dropped: a full queue takes no more, and the guest writes again later.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The console of one machine.
///
/// ```
/// use pageferry_machine::Console;
/// use std::time::Duration;
///
/// let console = Console::default();
/// assert_eq!(console.write(b"hello"), 5); // the guest
/// assert_eq!(console.read(Duration::ZERO), b"hello");
/// ```
#[derive(Default)]
pub struct Console {
    queues: Mutex<Queues>,
    written: Condvar,
}

#[derive(Default)]
struct Queues {
    /// From the guest.
    output: VecDeque<u8>,
    /// To the guest.
    input: VecDeque<u8>,
    /// Whether somebody has read.
    has_reader: bool,
}

impl Console {
    /// The most bytes that wait in each direction.
    pub const CAPACITY: usize = 64 * 1024;

    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes text from the guest. Returns the number of bytes that it took, which is less than all
    /// if the reader is slow.
    pub fn write(&self, bytes: &[u8]) -> usize {
        let mut queues = self.queues();
        let room = Self::CAPACITY - queues.output.len();
        let taken = if queues.has_reader {
            bytes.len().min(room)
        } else {
            let surplus = bytes.len().saturating_sub(room).min(queues.output.len());
            queues.output.drain(..surplus);
            bytes.len()
        };
        let newest = taken.saturating_sub(Self::CAPACITY);
        queues.output.extend(&bytes[newest..taken]);
        drop(queues);
        self.written.notify_all();
        taken
    }

    /// Returns what the guest has written since the last call. Waits for it, for `limit` at most.
    #[must_use]
    pub fn read(&self, limit: Duration) -> Vec<u8> {
        let deadline = Instant::now() + limit;
        let mut queues = self.queues();
        queues.has_reader = true;
        while queues.output.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Vec::new();
            }
            let waited = self.written.wait_timeout(queues, left);
            queues = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        std::mem::take(&mut queues.output).into()
    }

    /// Sends text to the guest. Returns the number of bytes for which there was room.
    pub fn send(&self, bytes: &[u8]) -> usize {
        let mut queues = self.queues();
        let room = Self::CAPACITY - queues.input.len();
        let taken = bytes.len().min(room);
        queues.input.extend(&bytes[..taken]);
        taken
    }

    /// Offers at most `most` bytes of input to `give`. Forgets them if it returns `Ok`.
    pub(crate) fn give_input<E>(
        &self,
        most: usize,
        give: impl FnOnce(&[u8]) -> Result<(), E>,
    ) -> Result<usize, E> {
        let mut queues = self.queues();
        let bytes = most.min(queues.input.len());
        give(&queues.input.make_contiguous()[..bytes])?;
        queues.input.drain(..bytes);
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    #[test]
    fn without_a_reader_the_newest_text_stays() {
        let console = Console::default();
        for round in 0..3u8 {
            assert_eq!(console.write(&[round; 30_000]), 30_000);
        }
        let text = console.read(NOW);
        assert_eq!(text.len(), Console::CAPACITY);
        assert_eq!(text[Console::CAPACITY - 60_001..][..2], [0, 1]);
        let console = Console::default();
        assert_eq!(console.write(&[7; 100_000]), 100_000);
        assert_eq!(console.read(NOW).len(), Console::CAPACITY);
    }

    #[test]
    fn with_a_reader_nothing_is_dropped() {
        let console = Console::default();
        assert!(console.read(NOW).is_empty());
        assert_eq!(console.write(&[1; 60_000]), 60_000);
        assert_eq!(console.write(&[2; 60_000]), Console::CAPACITY - 60_000);
        assert_eq!(console.write(&[3; 10]), 0);
        assert_eq!(console.read(NOW).len(), Console::CAPACITY);
        assert_eq!(console.write(&[3; 10]), 10);
    }

    #[test]
    fn a_reader_waits_for_text() {
        let console = Console::default();
        std::thread::scope(|scope| {
            scope.spawn(|| console.write(b"late"));
            assert_eq!(console.read(Duration::from_secs(60)), b"late");
        });
    }

    #[test]
    fn input_is_bounded_and_stays_until_it_is_taken() {
        let console = Console::default();
        assert_eq!(console.send(&[1; 100_000]), Console::CAPACITY);
        assert_eq!(console.give_input(5, |_| Err(())), Err(()));
        let given = console.give_input(5, |bytes| {
            assert_eq!(bytes, [1; 5]);
            Ok::<_, ()>(())
        });
        assert_eq!(given, Ok(5));
        assert_eq!(console.send(&[1; 9]), 5);
    }
}
