//! A guest's text console: two bounded queues of bytes.
//!
//! **Guarantee.** A guest never waits for the reader of its console. What it writes comes out in
//! order. While nobody has read, the newest 64 KiB are kept. Once there is a reader, no byte is
//! dropped: a full queue takes no more, and the guest writes again later.
//!
//! The newest 64 KiB of all text also stay for those who look on. They never hold the guest up: a
//! slow one misses the oldest text.
//!
//! **Mechanism.** The console is a [`Device`]: what was typed and not yet read travels with the VM.
//! What the guest has written stays where it was written, since its reader is there.

use crate::{Apply, Device, MachineError};
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
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
    on_input: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

#[derive(Default)]
struct Queues {
    /// From the guest.
    output: VecDeque<u8>,
    /// The newest text from the guest, read or not.
    newest: VecDeque<u8>,
    /// The number of bytes that the guest has written in all.
    total: u64,
    /// To the guest.
    input: VecDeque<u8>,
    /// Whether somebody has read.
    has_reader: bool,
    /// Whether the input stands still, since it travels.
    is_paused: bool,
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
        let surplus = (queues.newest.len() + taken - newest).saturating_sub(Self::CAPACITY);
        queues.newest.drain(..surplus);
        queues.newest.extend(&bytes[newest..taken]);
        queues.total += taken as u64;
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

    /// Returns what the guest has written behind its first `position` bytes, and the position
    /// behind that. Waits for text, for `limit` at most. Bytes that are older than the newest
    /// [`CAPACITY`](Self::CAPACITY) are left out. A caller that looks on is no reader.
    ///
    /// ```
    /// use pageferry_machine::Console;
    /// use std::time::Duration;
    ///
    /// let console = Console::default();
    /// console.write(b"hello");
    /// assert_eq!(console.text_since(0, Duration::ZERO), (b"hello".to_vec(), 5));
    /// assert_eq!(console.text_since(4, Duration::ZERO), (b"o".to_vec(), 5));
    /// assert_eq!(console.read(Duration::ZERO), b"hello");
    /// ```
    #[must_use]
    pub fn text_since(&self, position: u64, limit: Duration) -> (Vec<u8>, u64) {
        let deadline = Instant::now() + limit;
        let mut queues = self.queues();
        while queues.total <= position {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return (Vec::new(), position);
            }
            let waited = self.written.wait_timeout(queues, left);
            queues = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let kept = queues.newest.len();
        let behind = usize::try_from(queues.total - position).unwrap_or(usize::MAX);
        let text = queues.newest.range(kept - behind.min(kept)..).copied();
        (text.collect(), queues.total)
    }

    /// Sends text to the guest. Returns the number of bytes for which there was room. There is none
    /// while the VM switches over.
    pub fn send(&self, bytes: &[u8]) -> usize {
        let mut queues = self.queues();
        let room = match queues.is_paused {
            true => 0,
            false => Self::CAPACITY.saturating_sub(queues.input.len()),
        };
        let taken = bytes.len().min(room);
        queues.input.extend(&bytes[..taken]);
        drop(queues);
        self.tell_of_input();
        taken
    }

    /// Calls `told` after each [`Console::send`], and when a console goes on whose input stood
    /// still: for a device that interrupts its guest. Only the first call of this counts. An engine
    /// whose guest polls needs none.
    pub fn tell(&self, told: impl Fn() + Send + Sync + 'static) {
        let _ = self.on_input.set(Box::new(told));
    }

    fn tell_of_input(&self) {
        if let Some(told) = self.on_input.get() {
            told();
        }
    }

    /// Offers at most `most` bytes of input to `give`, for the engine whose guest reads them.
    /// Forgets them if it returns `Ok`. Returns their number.
    ///
    /// The console is locked meanwhile, so `give` must not call it.
    ///
    /// ```
    /// use pageferry_machine::Console;
    ///
    /// let console = Console::default();
    /// console.send(b"uname");
    /// let mut guest = Vec::new();
    /// let given = console.give_input(2, |bytes| Ok::<(), ()>(guest.extend(bytes)));
    /// assert_eq!((given, &guest[..]), (Ok(2), &b"un"[..]));
    /// ```
    ///
    /// # Errors
    /// Those of `give`. The input then stays.
    pub fn give_input<E>(
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

/// The state is what was typed and not yet read, at most [`Console::CAPACITY`] bytes.
impl Device for Console {
    fn name(&self) -> &str {
        "console"
    }

    fn version(&self) -> u32 {
        1
    }

    fn pause(&self) -> Result<(), MachineError> {
        self.queues().is_paused = true;
        Ok(())
    }

    fn resume(&self) {
        self.queues().is_paused = false;
        self.tell_of_input();
    }

    fn save(&self) -> Result<Vec<u8>, MachineError> {
        Ok(self.queues().input.iter().copied().collect())
    }

    fn decode<'a>(&'a self, _: u32, bytes: &[u8]) -> Result<Apply<'a>, MachineError> {
        if bytes.len() > Self::CAPACITY {
            return Err(MachineError::Device(format!(
                "the console's input has {} bytes, expected at most {}",
                bytes.len(),
                Self::CAPACITY
            )));
        }
        let typed = VecDeque::from(bytes.to_vec());
        // It was typed before anything that was typed here.
        Ok(Box::new(move || {
            let mut queues = self.queues();
            let here = std::mem::replace(&mut queues.input, typed);
            queues.input.extend(here);
        }))
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
    fn those_who_look_on_see_the_newest_text_and_hold_nobody_up() {
        let console = Console::default();
        let (text, end) = console.text_since(0, NOW);
        assert_eq!((text.len(), end), (0, 0));
        assert_eq!(console.write(&[1; 50_000]), 50_000);
        assert_eq!(console.read(NOW).len(), 50_000, "this is a reader");
        assert_eq!(console.text_since(0, NOW), (vec![1; 50_000], 50_000));
        assert_eq!(console.write(&[2; 50_000]), 50_000);
        let (text, end) = console.text_since(0, NOW);
        assert_eq!((text.len(), end), (Console::CAPACITY, 100_000));
        assert_eq!(text[Console::CAPACITY - 50_001..][..2], [1, 2]);
        let (text, _) = console.text_since(99_998, NOW);
        assert_eq!(text, [2, 2]);
        assert!(console.text_since(100_000, NOW).0.is_empty());
        // What the full queue did not take is written again, and counts then.
        assert_eq!(console.write(&[3; 50_000]), Console::CAPACITY - 50_000);
        let (text, end) = console.text_since(100_000, NOW);
        assert_eq!(text.len(), Console::CAPACITY - 50_000);
        assert_eq!(end, 100_000 + text.len() as u64);
        // More at once than all that stays, while there is no reader.
        let console = Console::default();
        assert_eq!(console.write(&[4; 100_000]), 100_000);
        let (text, end) = console.text_since(0, NOW);
        assert_eq!((text.len(), end), (Console::CAPACITY, 100_000));
        assert_eq!(console.text_since(u64::MAX, NOW), (Vec::new(), u64::MAX));
    }

    #[test]
    fn one_who_looks_on_waits_for_text() {
        let console = Console::default();
        std::thread::scope(|scope| {
            scope.spawn(|| console.write(b"late"));
            let (text, end) = console.text_since(0, Duration::from_secs(60));
            assert_eq!((text.as_slice(), end), (&b"late"[..], 4));
        });
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

    /// All input, in order.
    fn typed(console: &Console) -> Vec<u8> {
        let mut typed = Vec::new();
        let all = |bytes: &[u8]| {
            typed = bytes.to_vec();
            Ok::<_, ()>(())
        };
        console.give_input(usize::MAX, all).unwrap();
        typed
    }

    #[test]
    fn what_was_typed_travels_before_what_is_typed_there() {
        let (here, there) = (Console::default(), Console::default());
        assert_eq!(here.send(b"first "), 6);
        assert_eq!(there.send(b"second"), 6);
        here.write(b"text stays");
        for console in [&here, &there] {
            console.pause().unwrap();
            assert_eq!(console.send(b"x"), 0, "it is paused");
        }
        let apply = there.decode(1, &here.save().unwrap()).unwrap();
        apply();
        there.resume();
        assert_eq!(typed(&there), b"first second");
        assert!(there.read(NOW).is_empty());
        // A source that takes the VM back has all that was typed.
        here.resume();
        assert_eq!(typed(&here), b"first ");
        assert_eq!(here.read(NOW), b"text stays");
    }

    #[test]
    fn a_state_is_bounded_and_changes_nothing_until_it_is_applied() {
        let console = Console::default();
        console.send(b"own");
        let error = console
            .decode(1, &[7; Console::CAPACITY + 1])
            .err()
            .unwrap();
        assert!(error.to_string().contains("at most 65536"), "{error}");
        drop(console.decode(1, b"theirs").unwrap());
        assert_eq!(typed(&console), b"own");
        // Two full queues: more is refused until the guest has read.
        console.send(&[1; Console::CAPACITY]);
        console.decode(1, &[2; Console::CAPACITY]).unwrap()();
        assert_eq!(console.send(b"more"), 0);
        assert_eq!(typed(&console).len(), 2 * Console::CAPACITY);
        assert_eq!(console.send(b"more"), 4);
    }
}
