//! The last blocks of a source, in memory.
//!
//! **Mechanism.** Pages come one by one, and a block has many. Blocks that one thread fetches are
//! not fetched by others meanwhile: they wait for it. Missing blocks that follow each other are one
//! fetch.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The last blocks of a source that is slow to read.
pub(crate) struct Kept {
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

/// A part of a buffer that lies in one block.
struct Part {
    index: u64,
    /// Its place in the block.
    at: usize,
    /// Its place in the buffer.
    range: Range<usize>,
}

impl Kept {
    /// Keeps at most about `bytes` of blocks of this length, and at least one block.
    pub(crate) fn new(block: u64, bytes: u64) -> Self {
        Self {
            block,
            most: (bytes / block).max(1) as usize,
            blocks: Mutex::default(),
            fetched: Condvar::new(),
        }
    }

    /// Fills the buffer from blocks that are kept, or that `find` has at hand. Returns false if one
    /// is missing, or is too short; the buffer has no meaning then.
    pub(crate) fn read_now(
        &self,
        offset: u64,
        buffer: &mut [u8],
        find: impl Fn(u64) -> Option<Arc<[u8]>>,
    ) -> bool {
        self.parts(offset, buffer.len()).all(|part| {
            let kept = self.locked().find(part.index);
            let block = kept.or_else(|| {
                let found = find(part.index)?;
                self.keep(part.index, &found);
                Some(found)
            });
            block.is_some_and(|block| part.copy(&block, buffer))
        })
    }

    /// Fills the buffer, and fetches the blocks that are missing: `fetch` returns those of a range
    /// of indices. Returns false if one is too short.
    ///
    /// # Errors
    /// Those of `fetch`.
    pub(crate) fn read<E>(
        &self,
        offset: u64,
        buffer: &mut [u8],
        mut fetch: impl FnMut(Range<u64>) -> Result<Vec<Arc<[u8]>>, E>,
    ) -> Result<bool, E> {
        let mut fetching = Fetching(self, Vec::new());
        let (mut there, mut later) = (Vec::new(), Vec::new());
        let mut blocks = self.locked();
        for part in self.parts(offset, buffer.len()) {
            if let Some(block) = blocks.find(part.index) {
                there.push((part, block));
            } else {
                if blocks.fetching.insert(part.index) {
                    fetching.1.push(part.index);
                }
                later.push(part);
            }
        }
        drop(blocks);
        let mut whole = there.iter().all(|(part, block)| part.copy(block, buffer));
        // First what others may wait for, and then what this thread waits for: no circle.
        for run in fetching.1.chunk_by(|a, b| a + 1 == *b) {
            let run = run[0]..run[run.len() - 1] + 1;
            for (index, block) in run.clone().zip(fetch(run)?) {
                self.keep(index, &block);
                let own = later.iter().position(|part| part.index == index);
                let part = later.swap_remove(own.expect("its part waits"));
                whole &= part.copy(&block, buffer);
            }
        }
        drop(fetching);
        for part in later {
            let index = part.index;
            let blocks = self.locked();
            let waited = self
                .fetched
                .wait_while(blocks, |blocks| blocks.fetching.contains(&index));
            let found = waited.unwrap_or_else(PoisonError::into_inner).find(index);
            // Threads that waited for a fetch that failed do not wait for one another.
            let block = match found {
                Some(block) => Some(block),
                None => fetch(index..index + 1)?.pop(),
            };
            whole &= block.is_some_and(|block| part.copy(&block, buffer));
        }
        Ok(whole)
    }

    /// Forgets blocks.
    pub(crate) fn forget(&self, indices: &Range<u64>) {
        let mut blocks = self.locked();
        blocks.kept.retain(|(index, _)| !indices.contains(index));
    }

    fn keep(&self, index: u64, block: &Arc<[u8]>) {
        let mut blocks = self.locked();
        // It may be there already: a block twice costs memory, and is right.
        if blocks.kept.len() >= self.most {
            blocks.kept.pop_front();
        }
        blocks.kept.push_back((index, block.clone()));
    }

    fn parts(&self, offset: u64, len: usize) -> impl Iterator<Item = Part> {
        let (block, mut done) = (self.block, 0);
        std::iter::from_fn(move || {
            let place = offset + done as u64;
            let at = place % block;
            let more = (len - done).min((block - at) as usize);
            let range = done..done + more;
            done += more;
            (more > 0).then(|| Part {
                index: place / block,
                at: at as usize,
                range,
            })
        })
    }

    fn locked(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Part {
    /// Returns false if the block ends before.
    fn copy(&self, block: &[u8], buffer: &mut [u8]) -> bool {
        let part = block.get(self.at..self.at + self.range.len());
        part.inspect(|part| buffer[self.range.clone()].copy_from_slice(part))
            .is_some()
    }
}

impl Blocks {
    fn find(&self, index: u64) -> Option<Arc<[u8]>> {
        let found = self.kept.iter().rev().find(|(kept, _)| *kept == index);
        found.map(|(_, block)| block.clone())
    }
}

/// The blocks that a thread fetches, until that is over.
struct Fetching<'a>(&'a Kept, Vec<u64>);

impl Drop for Fetching<'_> {
    fn drop(&mut self) {
        let mut blocks = self.0.locked();
        for index in &self.1 {
            blocks.fetching.remove(index);
        }
        drop(blocks);
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
        let fetch = |run: Range<u64>| {
            fetches.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(20));
            let block = |index| vec![index as u8; if index < 3 { 16 } else { 4 }].into();
            Ok::<Vec<Arc<[u8]>>, ()>(run.map(block).collect())
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
        assert_eq!(fetches.load(Ordering::Relaxed), 1, "both blocks at once");
        let (mut byte, none) = ([0], |_| None);
        assert!(kept.read_now(0, &mut byte, none) && kept.read_now(31, &mut byte, none));
        assert_eq!(kept.read(32, &mut byte, fetch), Ok(true));
        assert!(!kept.read_now(0, &mut byte, none), "the oldest block");
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
