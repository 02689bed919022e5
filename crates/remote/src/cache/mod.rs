//! A cache between a pager and a slow source: blocks in memory, and in a directory.
//!
//! **Guarantee.** Reads of the same block by any restores of the process are one read of the
//! source. Its missing blocks that follow each other are one read too. The directory has no more
//! bytes than it may, and keeps its blocks over a restart. Its damage is a miss. A directory that
//! is full, slow or broken fails no read and delays none.
//!
//! **Mechanism.** [`Cache::wrap`] gives one `Cached` for a source and its identity. It has blocks
//! of [`BLOCK`] bytes that are there or are coming: the first reader brings them, and others wait
//! for it. The last few stay in memory, since a VM touches their pages one by one. A thread writes
//! blocks to disk, and what it cannot keep up with is passed over.
//!
//! **Neighbours.** Below: [`Source`] of `pager`, which it takes and gives.

mod disk;
mod index;

use crate::locked;
use disk::{Disk, Loaded};
use index::Key;
use pageferry_pager::{Source, SourceError};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use xxhash_rust::xxh3::xxh3_128;

/// The bytes of a block. At 20 ms a request, a fault on a fast link takes a tenth more than with a
/// page; larger blocks make it take far longer (`docs/object-stores.md`).
pub const BLOCK: u64 = 256 << 10;
/// The blocks of a source that stay in memory.
const KEPT: usize = 32;
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
    /// When the directory cannot be made, `bytes` are less than one block, or the host has no room
    /// for a thread. All that goes wrong later is counted instead.
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
            blocks: Mutex::default(),
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
    blocks: Mutex<Blocks>,
}

#[derive(Debug, Default)]
struct Blocks {
    all: HashMap<u64, State>,
    /// Those that are there, the oldest first.
    order: VecDeque<u64>,
}

#[derive(Debug)]
enum State {
    There(Arc<[u8]>),
    Coming(Arc<Flight>),
}

/// A block that a thread brings, and others wait for.
#[derive(Debug, Default)]
struct Flight {
    landed: Mutex<Option<Result<Arc<[u8]>, Failure>>>,
    changed: Condvar,
}

/// The failure of another thread's read.
#[derive(Clone, Debug)]
struct Failure {
    kind: io::ErrorKind,
    why: String,
}

impl Failure {
    fn of(why: &SourceError) -> Self {
        let kind = match why {
            SourceError::Failed { why, .. } => why.kind(),
            _ => io::ErrorKind::Other,
        };
        Self {
            kind,
            why: why.to_string(),
        }
    }
}

impl Flight {
    fn wait(&self) -> Result<Arc<[u8]>, Failure> {
        let landed = locked(&self.landed);
        let landed = self
            .changed
            .wait_while(landed, |landed| landed.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        landed.clone().expect("it has landed")
    }
}

impl Blocks {
    fn keep(&mut self, block: u64, bytes: Arc<[u8]>) {
        self.all.insert(block, State::There(bytes));
        self.order.push_back(block);
        if self.order.len() > KEPT
            && let Some(oldest) = self.order.pop_front()
        {
            self.all.remove(&oldest);
        }
    }
}

/// The blocks that this thread brings. Those that it does not bring fail at its end.
struct Lead<'a> {
    cached: &'a Cached,
    flights: HashMap<u64, Arc<Flight>>,
    failure: Failure,
}

impl Lead<'_> {
    fn land(&mut self, block: u64, result: Result<Arc<[u8]>, Failure>) {
        let Some(flight) = self.flights.remove(&block) else {
            return;
        };
        let mut blocks = locked(&self.cached.blocks);
        match &result {
            Ok(bytes) => blocks.keep(block, bytes.clone()),
            Err(_) => {
                blocks.all.remove(&block);
            }
        }
        drop(blocks);
        *locked(&flight.landed) = Some(result);
        flight.changed.notify_all();
    }
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        let left: Vec<u64> = self.flights.keys().copied().collect();
        for block in left {
            self.land(block, Err(self.failure.clone()));
        }
    }
}

/// Copies the part of a block that lies in the buffer, which begins at `offset`.
fn copy(block: u64, bytes: &[u8], offset: u64, buffer: &mut [u8]) {
    let begin = block * BLOCK;
    let from = offset.max(begin);
    let to = (offset + buffer.len() as u64).min(begin + bytes.len() as u64);
    let len = (to - from) as usize;
    buffer[(from - offset) as usize..][..len]
        .copy_from_slice(&bytes[(from - begin) as usize..][..len]);
}

impl Cached {
    /// The blocks of a range, `None` if it ends behind the end.
    fn blocks_of(&self, offset: u64, len: usize) -> Option<Range<u64>> {
        let end = offset.checked_add(len as u64)?;
        (end <= self.source.bytes()).then(|| match len {
            0 => 0..0,
            _ => offset / BLOCK..end.div_ceil(BLOCK),
        })
    }

    fn len_of(&self, block: u64) -> u64 {
        BLOCK.min(self.source.bytes() - block * BLOCK)
    }

    /// Brings the blocks that this thread leads.
    fn bring(
        &self,
        lead: &mut Lead<'_>,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<(), SourceError> {
        let mut wanted: Vec<u64> = lead.flights.keys().copied().collect();
        wanted.sort_unstable();
        if let Some(disk) = &self.cache.disk {
            wanted.retain(
                |block| match disk.load(self.key, *block, self.len_of(*block), false) {
                    Loaded::Hit(bytes) => {
                        copy(*block, &bytes, offset, buffer);
                        lead.land(*block, Ok(bytes.into()));
                        false
                    }
                    _ => true,
                },
            );
        }
        for run in wanted.chunk_by(|a, b| a + 1 == *b) {
            let (first, last) = (run[0], run[run.len() - 1]);
            let begin = first * BLOCK;
            let len = last * BLOCK + self.len_of(last) - begin;
            let mut bytes = vec![0; len as usize];
            if let Err(why) = self.source.read(begin, &mut bytes) {
                lead.failure = Failure::of(&why);
                return Err(why);
            }
            for (block, bytes) in (first..=last).zip(bytes.chunks(BLOCK as usize)) {
                copy(block, bytes, offset, buffer);
                let bytes: Arc<[u8]> = bytes.into();
                if let Some(writer) = &self.cache.writer {
                    writer.send(Write::Block(self.key, block, bytes.clone()));
                }
                lead.land(block, Ok(bytes));
            }
        }
        Ok(())
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
        let Some(range) = self.blocks_of(offset, buffer.len()) else {
            return Ok(false);
        };
        for block in range {
            let there = match locked(&self.blocks).all.get(&block) {
                Some(State::There(bytes)) => Some(bytes.clone()),
                Some(State::Coming(_)) => return Ok(false),
                None => None,
            };
            if let Some(bytes) = there {
                copy(block, &bytes, offset, buffer);
                continue;
            }
            let Some(disk) = &self.cache.disk else {
                return Ok(false);
            };
            let Loaded::Hit(bytes) = disk.load(self.key, block, self.len_of(block), true) else {
                return Ok(false);
            };
            copy(block, &bytes, offset, buffer);
            let mut blocks = locked(&self.blocks);
            if !blocks.all.contains_key(&block) {
                blocks.keep(block, bytes.into());
            }
        }
        Ok(true)
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SourceError> {
        let Some(range) = self.blocks_of(offset, buffer.len()) else {
            return Err(SourceError::Short {
                what: self.what.clone(),
                end: offset.saturating_add(buffer.len() as u64),
            });
        };
        let (mut there, mut coming) = (Vec::new(), Vec::new());
        let mut lead = Lead {
            cached: self,
            flights: HashMap::new(),
            failure: Failure {
                kind: io::ErrorKind::Other,
                why: "the thread that read it has ended".to_owned(),
            },
        };
        let mut blocks = locked(&self.blocks);
        for block in range {
            match blocks.all.get(&block) {
                Some(State::There(bytes)) => there.push((block, bytes.clone())),
                Some(State::Coming(flight)) => coming.push((block, flight.clone())),
                None => {
                    let flight = Arc::new(Flight::default());
                    blocks.all.insert(block, State::Coming(flight.clone()));
                    lead.flights.insert(block, flight);
                }
            }
        }
        drop(blocks);
        for (block, bytes) in there {
            copy(block, &bytes, offset, buffer);
        }
        // First what others may wait for, and then what this thread waits for: no circle.
        if !lead.flights.is_empty() {
            self.bring(&mut lead, offset, buffer)?;
        }
        drop(lead);
        for (block, flight) in coming {
            let bytes = flight.wait().map_err(|failure| SourceError::Failed {
                what: self.what.clone(),
                why: io::Error::new(failure.kind, failure.why),
            })?;
            copy(block, &bytes, offset, buffer);
        }
        Ok(())
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
        for block in offset / BLOCK..end.div_ceil(BLOCK) {
            if let Some(disk) = &self.cache.disk {
                disk.forget(self.key, block);
            }
            let mut blocks = locked(&self.blocks);
            if let Some(State::There(_)) = blocks.all.get(&block) {
                blocks.all.remove(&block);
                blocks.order.retain(|kept| *kept != block);
            }
        }
        self.source.forget(offset, len);
    }
}
