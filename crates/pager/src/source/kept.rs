//! The last blocks of a source, in memory.
//!
//! **Mechanism.** Pages come one by one, and a block has many. A block that one thread fetches is
//! not fetched by others meanwhile: they wait for it.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The last blocks of a source that is slow to read.
pub struct Kept {
    block: u64,
    most: usize,
    blocks: Mutex<Blocks>,
    fetched: Condvar,
}

#[derive(Default)]
struct Blocks {
    /// The newest block is the last.
    kept: VecDeque<(u64, Arc<[u8]>)>,
    fetching: BTreeSet<u64>,
}

impl Kept {
    /// Keeps at most about `bytes` of blocks of this length, and at least one block.
    #[must_use]
    pub fn new(block: u64, bytes: u64) -> Self {
        Self {
            block,
            most: (bytes / block).max(1) as usize,
            blocks: Mutex::default(),
            fetched: Condvar::new(),
        }
    }

    /// Fills the buffer from blocks that are kept. Returns false if one is missing, or is too
    /// short; the buffer has no meaning then.
    pub fn read_now(&self, offset: u64, buffer: &mut [u8]) -> bool {
        let copied = self.copy(offset, buffer, |index| {
            Ok::<_, ()>(self.locked().find(index))
        });
        copied.unwrap_or(false)
    }

    /// Fills the buffer, and fetches the blocks that are missing by their index. Returns false if
    /// one is too short.
    ///
    /// # Errors
    /// Those of `fetch`.
    pub fn read<E>(
        &self,
        offset: u64,
        buffer: &mut [u8],
        mut fetch: impl FnMut(u64) -> Result<Arc<[u8]>, E>,
    ) -> Result<bool, E> {
        self.copy(offset, buffer, |index| {
            self.block(index, &mut fetch).map(Some)
        })
    }

    fn block<E>(
        &self,
        index: u64,
        fetch: impl FnOnce(u64) -> Result<Arc<[u8]>, E>,
    ) -> Result<Arc<[u8]>, E> {
        let mut blocks = self.locked();
        let mut waited = false;
        while blocks.fetching.contains(&index) {
            waited = true;
            let woken = self.fetched.wait(blocks);
            blocks = woken.unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(block) = blocks.find(index) {
            return Ok(block);
        }
        // Threads that waited for a fetch that failed do not wait for one another.
        let fetching = (!waited).then(|| {
            blocks.fetching.insert(index);
            Fetching(self, index)
        });
        drop(blocks);
        let block = fetch(index)?;
        let mut blocks = self.locked();
        // It may be there already: a block twice costs memory, and is right.
        if blocks.kept.len() >= self.most {
            blocks.kept.pop_front();
        }
        blocks.kept.push_back((index, block.clone()));
        drop(blocks);
        drop(fetching);
        Ok(block)
    }

    /// Copies bytes of blocks that `block` gives. Returns false if it lacks one.
    fn copy<E>(
        &self,
        offset: u64,
        buffer: &mut [u8],
        mut block: impl FnMut(u64) -> Result<Option<Arc<[u8]>>, E>,
    ) -> Result<bool, E> {
        let mut done = 0;
        while done < buffer.len() {
            let at = offset + done as u64;
            let Some(bytes) = block(at / self.block)? else {
                return Ok(false);
            };
            // Nothing of a block behind the end, which is empty.
            let part = bytes.get((at % self.block) as usize..);
            let Some(part) = part.filter(|part| !part.is_empty()) else {
                return Ok(false);
            };
            let len = part.len().min(buffer.len() - done);
            buffer[done..done + len].copy_from_slice(&part[..len]);
            done += len;
        }
        Ok(true)
    }

    fn locked(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Blocks {
    fn find(&self, index: u64) -> Option<Arc<[u8]>> {
        let found = self.kept.iter().rev().find(|(kept, _)| *kept == index);
        found.map(|(_, block)| block.clone())
    }
}

/// A fetch of a block, until it is over.
struct Fetching<'a>(&'a Kept, u64);

impl Drop for Fetching<'_> {
    fn drop(&mut self) {
        self.0.locked().fetching.remove(&self.1);
        self.0.fetched.notify_all();
    }
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept")
            .field("block", &self.block)
            .field("most", &self.most)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_testkit::wait_until;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    #[test]
    fn a_block_is_fetched_once_and_the_oldest_is_dropped() {
        let kept = Kept::new(16, 32);
        let fetches = AtomicU32::new(0);
        let fetch = |index: u64| {
            fetches.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(20));
            Ok::<Arc<[u8]>, ()>(vec![index as u8; if index < 3 { 16 } else { 4 }].into())
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut buffer = [9; 20];
                    assert_eq!(kept.read(6, &mut buffer, fetch), Ok(true));
                    assert_eq!((&buffer[..10], &buffer[10..]), (&[0; 10][..], &[1; 10][..]));
                });
            }
        });
        assert_eq!(fetches.load(Ordering::Relaxed), 2);
        let mut byte = [0];
        assert!(kept.read_now(0, &mut byte) && kept.read_now(31, &mut byte));
        assert_eq!(kept.read(32, &mut byte, fetch), Ok(true));
        assert!(!kept.read_now(0, &mut byte), "the oldest block");
        assert_eq!(
            kept.read(48, &mut [0; 5], fetch),
            Ok(false),
            "behind the end"
        );
    }

    #[test]
    fn a_failed_fetch_holds_no_other_thread_up() {
        let kept = Kept::new(16, 32);
        let (now, most) = (AtomicU32::new(0), AtomicU32::new(0));
        let fetch = |_| {
            let fetches = now.fetch_add(1, Ordering::Relaxed) + 1;
            most.fetch_max(fetches, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(100));
            now.fetch_sub(1, Ordering::Relaxed);
            Err("lost")
        };
        // Threads that come after the first failure may wait for one another.
        wait_until("the other fetches at once", || {
            std::thread::scope(|scope| {
                for _ in 0..8 {
                    scope.spawn(|| assert_eq!(kept.read(0, &mut [0], fetch), Err("lost")));
                }
            });
            most.load(Ordering::Relaxed) == 7
        });
    }
}
