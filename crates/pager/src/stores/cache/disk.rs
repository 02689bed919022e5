//! Blocks on disk.
//!
//! **Guarantee.** The files have no more bytes than they may. Bytes that were damaged on disk are a
//! miss. What goes wrong here costs speed only: it is counted, and logged once.
//!
//! **Mechanism.** One file has slots of [`BLOCK`] bytes, another the [`Index`]. A process that dies
//! between the two writes leaves a record whose sum is wrong. A lock lets one process use the
//! directory. Another goes without it, and takes it up when the first has ended.

use super::BLOCK;
use super::index::{Entry, Index, Key, RECORD};
use crate::vm::locked;
use pageferry_hostfs::own_directory;
use rustix::fs::{FlockOperation, flock};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::fs::{File, OpenOptions};
use std::io::{self, IoSliceMut, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;
use zerocopy::IntoBytes;

/// The pause before the lock is tried again, and before a full disk is asked for more room.
const PAUSE: Duration = Duration::from_secs(1);

/// A directory with blocks.
#[derive(Debug)]
pub(super) struct Disk {
    directory: PathBuf,
    slots: u32,
    held: OnceLock<Held>,
    next_try: Mutex<Option<Instant>>,
    failed: AtomicBool,
    pub(super) counts: Counts,
}

/// What happened, in blocks.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) hits: AtomicU64,
    pub(super) misses: AtomicU64,
    pub(super) damaged: AtomicU64,
    pub(super) stored: AtomicU64,
    pub(super) failures: AtomicU64,
}

/// The files, while this process has the lock.
#[derive(Debug)]
struct Held {
    lock: File,
    blocks: File,
    records: File,
    index: Mutex<Index>,
    /// The disk was full: it is not asked for more before this.
    grow_after: Mutex<Option<Instant>>,
}

/// What became of a look-up.
pub(super) enum Loaded {
    Hit(Vec<u8>),
    Miss,
    /// It would have to wait for the disk.
    Wait,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Disk {
    /// # Errors
    /// When the directory cannot be made, is open to other users, or is too small for a block.
    pub(super) fn new(directory: &Path, bytes: u64) -> io::Result<Self> {
        let slots = u32::try_from(bytes / (BLOCK + RECORD)).unwrap_or(u32::MAX);
        if slots == 0 {
            let why = format!("{bytes} bytes are too few: expected at least {}", 1 << 20);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        if let Some(above) = directory.parent() {
            std::fs::create_dir_all(above)?;
        }
        // The sums in it are no proof against somebody who writes them too.
        own_directory(directory).map_err(io::Error::other)?;
        let disk = Self {
            directory: directory.to_owned(),
            slots,
            held: OnceLock::new(),
            next_try: Mutex::default(),
            failed: AtomicBool::new(false),
            counts: Counts::default(),
        };
        disk.held();
        Ok(disk)
    }

    /// The files. `None` while another process has them, or they cannot be opened.
    fn held(&self) -> Option<&Held> {
        if let Some(held) = self.held.get() {
            return Some(held);
        }
        let mut next_try = locked(&self.next_try);
        let now = Instant::now();
        if self.held.get().is_none() && next_try.is_none_or(|at| at <= now) {
            *next_try = Some(now + PAUSE);
            match Held::take(&self.directory, self.slots) {
                Ok(held) => {
                    // Nobody else sets it: this thread has `next_try`.
                    let _ = self.held.set(held);
                    self.failed.store(false, Ordering::Relaxed);
                }
                Err(why) => self.fail("use", &why),
            }
        }
        self.held.get()
    }

    fn fail(&self, what: &str, why: &io::Error) {
        count(&self.counts.failures);
        if !self.failed.swap(true, Ordering::Relaxed) {
            let directory = self.directory.display();
            tracing::warn!("cannot {what} the cache at {directory}: {why}; reads go on without it");
        }
    }

    /// Looks a block up. With `now` it does not wait for the disk.
    pub(super) fn load(&self, key: Key, block: u64, len: u64, now: bool) -> Loaded {
        let held = if now { self.held.get() } else { self.held() };
        let Some(held) = held else {
            return Loaded::Miss;
        };
        let Some((slot, entry)) = locked(&held.index).find(key, block) else {
            if !now {
                count(&self.counts.misses);
            }
            return Loaded::Miss;
        };
        match held.read(slot, &entry, now) {
            Ok(Some(bytes)) if xxh3_64(&bytes) == entry.sum && entry.len == len => {
                count(&self.counts.hits);
                return Loaded::Hit(bytes);
            }
            // Unless the slot was given to another block meanwhile.
            Ok(Some(_)) => {
                if locked(&held.index).remove_damaged(slot, &entry) {
                    count(&self.counts.damaged);
                }
            }
            Ok(None) => return Loaded::Wait,
            Err(why) => {
                self.fail("read", &why);
                locked(&held.index).remove_damaged(slot, &entry);
            }
        }
        if !now {
            count(&self.counts.misses);
        }
        Loaded::Miss
    }

    /// Stores a block.
    pub(super) fn store(&self, key: Key, block: u64, bytes: &[u8]) {
        let Some(held) = self.held() else {
            return;
        };
        let may_grow = locked(&held.grow_after).is_none_or(|at| at <= Instant::now());
        let Some(slot) = locked(&held.index).take(may_grow) else {
            return;
        };
        if let Err(why) = held.blocks.write_all_at(bytes, u64::from(slot) * BLOCK) {
            if why.kind() == io::ErrorKind::StorageFull {
                *locked(&held.grow_after) = Some(Instant::now() + PAUSE);
            }
            locked(&held.index).give_back(slot);
            self.fail("write", &why);
            return;
        }
        let (len, sum) = (bytes.len() as u64, xxh3_64(bytes));
        let record = locked(&held.index).put(slot, key, block, len, sum);
        let at = u64::from(slot) * RECORD;
        match held.records.write_all_at(record.as_bytes(), at) {
            Ok(()) => count(&self.counts.stored),
            // This process finds the block all the same.
            Err(why) => self.fail("write", &why),
        }
    }

    /// Forgets a block.
    pub(super) fn forget(&self, key: Key, block: u64) {
        if let Some(held) = self.held.get() {
            locked(&held.index).remove(key, block);
        }
    }
}

impl Held {
    fn take(directory: &Path, slots: u32) -> io::Result<Self> {
        let open = |name: &str| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            // Guest memory is nobody else's business.
            std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
            options.open(directory.join(name))
        };
        let lock = open("lock")?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|errno| match errno {
            Errno::WOULDBLOCK => io::Error::other("another process uses it"),
            errno => errno.into(),
        })?;
        let (blocks, records) = (open("blocks")?, open("index")?);
        // What is behind the bound, of a cache that was larger.
        for (file, size) in [(&blocks, BLOCK), (&records, RECORD)] {
            let most = u64::from(slots) * size;
            if file.metadata()?.len() > most {
                file.set_len(most)?;
            }
        }
        let mut bytes = Vec::new();
        (&records)
            .take(u64::from(slots) * RECORD)
            .read_to_end(&mut bytes)?;
        Ok(Self {
            lock,
            blocks,
            records,
            index: Mutex::new(Index::decode(&bytes, slots, BLOCK)),
            grow_after: Mutex::default(),
        })
    }

    /// Reads a slot. `None` if that would mean to wait.
    fn read(&self, slot: u32, entry: &Entry, now: bool) -> io::Result<Option<Vec<u8>>> {
        let mut bytes = vec![0; entry.len as usize];
        let at = u64::from(slot) * BLOCK;
        if !now {
            self.blocks.read_exact_at(&mut bytes, at)?;
            return Ok(Some(bytes));
        }
        let mut parts = [IoSliceMut::new(&mut bytes)];
        match preadv2(&self.blocks, &mut parts, at, ReadWriteFlags::NOWAIT) {
            Ok(read) if read as u64 == entry.len => Ok(Some(bytes)),
            Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::OPNOTSUPP) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Drop for Held {
    /// Keeps the order of uses. A process that is killed leaves the order of writes.
    fn drop(&mut self) {
        let bytes = locked(&self.index).encode();
        let _ = self.records.write_all_at(&bytes, 0);
        // A child that another thread forks has the descriptor until it executes its program.
        let _ = flock(&self.lock, FlockOperation::Unlock);
    }
}
