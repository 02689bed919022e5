//! A cache between a pager and a slow source: blocks in memory, and in a directory.
//!
//! **Guarantee.** Reads of the same block by any restores of the process are one read of the
//! source. Its missing blocks that follow each other are one read too. The directory has no more
//! bytes than it may, and keeps its blocks over a restart. Its damage is a miss. A directory that
//! is full, slow or broken fails no read and delays none.
//!
//! **Mechanism.** [`Cache::wrap`] gives one `Cached` for a source and its identity, with blocks of
//! [`BLOCK`] bytes. `Kept` joins the reads, and has the last blocks in memory. A thread writes
//! blocks to disk, and what it cannot keep up with is passed over.
//!
//! **Neighbours.** Below: [`Source`] and `Kept` of `source`.

mod disk;
mod index;

use crate::source::{Kept, Source, SourceError};
use crate::vm::locked;
use disk::{Disk, Loaded};
use index::Key;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use xxhash_rust::xxh3::xxh3_128;

/// The bytes of a block. At 20 ms a request, a fault on a fast link takes a tenth more than with a
/// page; larger blocks make it take far longer (`docs/object-stores.md`).
pub const BLOCK: u64 = 256 << 10;
/// The bytes of a source's blocks that stay in memory.
const KEPT: u64 = 8 << 20;
/// The blocks that wait to be written to disk: 16 MiB.
const QUEUE: usize = 64;

#[doc(hidden)]
pub fn fuzz_index(bytes: &[u8]) {
    index::fuzz(bytes);
}

/// The cache of a process.
#[derive(Clone, Debug)]
pub struct Cache(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    disk: Option<Arc<Disk>>,
    writer: Option<Writer>,
    sources: Mutex<HashMap<Key, Weak<Cached>>>,
}

/// What a cache on disk did so far, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Figures {
    /// Blocks that came from the disk.
    pub hits: u64,
    /// Blocks that were not there.
    pub misses: u64,
    /// Blocks whose bytes were not those that were written.
    pub damaged: u64,
    /// Blocks that were written.
    pub stored: u64,
    /// System calls that failed, such as on a full disk.
    pub failures: u64,
}

impl Cache {
    /// Without a directory: reads are joined, and the last blocks of each source stay in memory.
    #[must_use]
    pub fn in_memory() -> Self {
        Self(Arc::new(Inner {
            disk: None,
            writer: None,
            sources: Mutex::default(),
        }))
    }

    /// With a directory, of at most `bytes`. One process at a time uses a directory: another one
    /// goes without it until the first has ended.
    ///
    /// # Errors
    /// When the directory cannot be made or is open to other users, `bytes` are less than one block,
    /// or the host has no room for a thread. All that goes wrong later is counted instead.
    pub fn at(directory: &Path, bytes: u64) -> io::Result<Self> {
        let disk = Arc::new(Disk::new(directory, bytes)?);
        Ok(Self(Arc::new(Inner {
            writer: Some(Writer::start(disk.clone())?),
            disk: Some(disk),
            sources: Mutex::default(),
        })))
    }

    /// The source with this cache before it. The same address and identity give the same one, as
    /// long as it is in use.
    #[must_use]
    pub fn wrap(&self, address: &str, source: Arc<dyn Source>) -> Arc<dyn Source> {
        let name = format!("{address}\0{}\0{}", source.identity(), source.bytes());
        let key = xxh3_128(name.as_bytes());
        let mut sources = locked(&self.0.sources);
        if let Some(cached) = sources.get(&key).and_then(Weak::upgrade) {
            return cached;
        }
        sources.retain(|_, cached| cached.strong_count() > 0);
        let cached = Arc::new(Cached {
            source,
            what: address.to_owned(),
            key,
            cache: self.0.clone(),
            kept: Kept::new(BLOCK, KEPT),
        });
        sources.insert(key, Arc::downgrade(&cached));
        cached
    }

    /// What the disk did so far.
    #[must_use]
    pub fn figures(&self) -> Figures {
        let Some(disk) = &self.0.disk else {
            return Figures::default();
        };
        Figures {
            hits: disk.counts.hits.load(Ordering::Relaxed),
            misses: disk.counts.misses.load(Ordering::Relaxed),
            damaged: disk.counts.damaged.load(Ordering::Relaxed),
            stored: disk.counts.stored.load(Ordering::Relaxed),
            failures: disk.counts.failures.load(Ordering::Relaxed),
        }
    }

    /// Waits until the blocks that have come so far are on disk.
    pub fn flush(&self) {
        if let Some(writer) = &self.0.writer {
            writer.flush();
        }
    }
}

enum Write {
    Block(Key, u64, Arc<[u8]>),
    Flush(SyncSender<()>),
}

/// The thread that writes blocks to disk.
#[derive(Debug)]
struct Writer {
    queue: Option<SyncSender<Write>>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    fn start(disk: Arc<Disk>) -> io::Result<Self> {
        let (queue, writes): (_, Receiver<Write>) = sync_channel(QUEUE);
        let thread = std::thread::Builder::new()
            .name("cache-write".into())
            .spawn(move || {
                for write in writes {
                    match write {
                        Write::Block(key, block, bytes) => disk.store(key, block, &bytes),
                        Write::Flush(done) => {
                            let _ = done.send(());
                        }
                    }
                }
            })?;
        Ok(Self {
            queue: Some(queue),
            thread: Some(thread),
        })
    }

    /// Passes a block over if the disk is slower than the source.
    fn send(&self, write: Write) {
        if let Some(queue) = &self.queue {
            let _ = queue.try_send(write);
        }
    }

    /// Waits until the blocks that were sent so far are on disk.
    fn flush(&self) {
        let (done, written) = sync_channel(1);
        if let Some(queue) = &self.queue
            && queue.send(Write::Flush(done)).is_ok()
        {
            let _ = written.recv();
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        drop(self.queue.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A source with a cache before it.
#[derive(Debug)]
struct Cached {
    source: Arc<dyn Source>,
    what: String,
    key: Key,
    cache: Arc<Inner>,
    kept: Kept,
}

impl Cached {
    /// Checks that a range ends within the source.
    fn has(&self, offset: u64, len: usize) -> bool {
        let end = offset.checked_add(len as u64);
        end.is_some_and(|end| end <= self.source.bytes())
    }

    fn len_of(&self, block: u64) -> u64 {
        BLOCK.min(self.source.bytes() - block * BLOCK)
    }

    /// Looks a block up on disk. With `now` it does not wait for it.
    fn on_disk(&self, block: u64, now: bool) -> Option<Arc<[u8]>> {
        let disk = self.cache.disk.as_ref()?;
        match disk.load(self.key, block, self.len_of(block), now) {
            Loaded::Hit(bytes) => Some(bytes.into()),
            _ => None,
        }
    }

    /// Brings blocks: from the disk, and runs of the others by a read each.
    fn bring(&self, run: Range<u64>) -> Result<Vec<Arc<[u8]>>, SourceError> {
        let mut blocks: Vec<_> = run
            .map(|block| (block, self.on_disk(block, false)))
            .collect();
        for run in blocks.chunk_by_mut(|a, b| a.1.is_some() == b.1.is_some()) {
            let (first, last) = (run[0].0, run[run.len() - 1].0);
            if run[0].1.is_some() {
                continue;
            }
            let len = last * BLOCK + self.len_of(last) - first * BLOCK;
            let mut bytes = vec![0; len as usize];
            self.source.read(first * BLOCK, &mut bytes)?;
            for ((block, place), bytes) in run.iter_mut().zip(bytes.chunks(BLOCK as usize)) {
                let bytes: Arc<[u8]> = bytes.into();
                if let Some(writer) = &self.cache.writer {
                    writer.send(Write::Block(self.key, *block, bytes.clone()));
                }
                *place = Some(bytes);
            }
        }
        Ok(blocks.into_iter().filter_map(|(_, bytes)| bytes).collect())
    }
}

impl Source for Cached {
    fn bytes(&self) -> u64 {
        self.source.bytes()
    }

    fn block(&self) -> u64 {
        self.source.block().max(BLOCK)
    }

    fn reads(&self) -> usize {
        self.source.reads()
    }

    fn is_zero(&self, offset: u64, len: u64) -> bool {
        self.source.is_zero(offset, len)
    }

    fn read_now(&self, offset: u64, buffer: &mut [u8]) -> Result<bool, SourceError> {
        let find = |block| self.on_disk(block, true);
        Ok(self.has(offset, buffer.len()) && self.kept.read_now(offset, buffer, find))
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SourceError> {
        let whole = self.has(offset, buffer.len())
            && self.kept.read(offset, buffer, |run| self.bring(run))?;
        match whole {
            true => Ok(()),
            false => Err(SourceError::Short {
                what: self.what.clone(),
                end: offset.saturating_add(buffer.len() as u64),
            }),
        }
    }

    fn identity(&self) -> String {
        self.source.identity()
    }

    fn forget(&self, offset: u64, len: u64) {
        let end = offset.saturating_add(len).min(self.source.bytes());
        // A damaged block may still wait to be written, and would come back from the disk then. So
        // first the writes, then the disk, then memory. A thread that reads the disk meanwhile can
        // bring a block back to memory once more: its next reader forgets it again.
        if let Some(writer) = &self.cache.writer {
            writer.flush();
        }
        let blocks = offset / BLOCK..end.div_ceil(BLOCK);
        if let Some(disk) = &self.cache.disk {
            for block in blocks.clone() {
                disk.forget(self.key, block);
            }
        }
        self.kept.forget(&blocks);
        self.source.forget(offset, len);
    }
}
