//! The block device, on a file or a block device of the host.
//!
//! **Guarantee.** Of all processes that lock the disk, one writes it. A pause makes all writes
//! durable and then gives the lock up, so that the other end of a migration can take it.
//!
//! **Mechanism.** The lock is one of the open file ([`lock`]). The process that goes on takes it
//! again. The first request waits for it, for [`LOCK_WAIT`] at most. After that, requests fail
//! until the lock is there. Before a request changes the disk, all the memory that it needs is
//! here. So it is done once, at one end of a migration. Before its first write, a run writes a
//! random number into an attribute of the file, so that a saved VM notices the writes of others.

use super::lock::{Lock, lock};
use super::{Chain, Fault, VirtioDevice};
use rustix::fs::{FallocateFlags, XattrFlags, fallocate};
use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

const SECTOR: u64 = 512;
const PIECE: usize = 64 << 10;
/// The most sectors of a request that discards or zeroes.
const MOST_ZEROES: u32 = 32 << 10;
/// The extended attribute of a file that names the run that wrote it last.
const WRITER: &str = "user.pageferry.writer";
const LOCK_WAIT: Duration = Duration::from_secs(2);

const SEG_MAX: u64 = 1 << 2;
const READ_ONLY: u64 = 1 << 5;
const FLUSH: u64 = 1 << 9;
const DISCARD: u64 = 1 << 13;
const WRITE_ZEROES: u64 = 1 << 14;

/// The block device.
pub struct Block {
    file: File,
    bytes: u64,
    is_read_only: bool,
    is_locked: bool,
    /// Whether the file names this run as its writer.
    is_marked: bool,
    /// Since when it waits for the lock.
    waits: Option<Instant>,
}

impl Block {
    /// Opens and locks a disk.
    ///
    /// # Errors
    /// When it cannot be opened, has a part of a sector, or another process has it.
    pub fn open(path: &Path, read_only: bool) -> io::Result<Self> {
        let mut block = Self::open_unlocked(path, read_only)?;
        match block.acquire() {
            Ok(true) => Ok(block),
            Ok(false) => Err(io::Error::new(
                io::ErrorKind::WouldBlock,
                format!(
                    "{} is in use: another process has locked it",
                    path.display()
                ),
            )),
            Err(error) => Err(error),
        }
    }

    /// Opens a disk for a VM that comes: the first request takes the lock.
    ///
    /// # Errors
    /// When it cannot be opened, or has a part of a sector.
    pub fn open_unlocked(path: &Path, read_only: bool) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).write(!read_only).open(path)?;
        let bytes = file.seek(SeekFrom::End(0))?;
        if !bytes.is_multiple_of(SECTOR) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "{} has {bytes} bytes, expected a multiple of 512",
                    path.display()
                ),
            ));
        }
        Ok(Self {
            file,
            bytes,
            is_read_only: read_only,
            is_locked: false,
            is_marked: false,
            waits: None,
        })
    }

    /// The file, for reading beside a guest that stands still.
    #[must_use]
    pub const fn file(&self) -> &File {
        &self.file
    }

    /// The run whose guest wrote a disk last: a random number. It is zero if there was none, and
    /// where files have no extended attributes.
    #[must_use]
    pub fn writer(file: &File) -> [u8; 16] {
        let mut writer = [0; 16];
        match rustix::fs::fgetxattr(file, WRITER, &mut writer[..]) {
            Ok(16) => writer,
            _ => [0; 16],
        }
    }

    /// Names this run in the file, before its first write.
    fn mark(&mut self) {
        if !self.is_marked {
            let state = RandomState::new();
            let run = [0, 1]
                .map(|part| state.hash_one(part).to_le_bytes())
                .concat();
            // Not all file systems have attributes, and a device has none.
            let _ = rustix::fs::fsetxattr(&self.file, WRITER, &run, XattrFlags::empty());
            self.is_marked = true;
        }
    }

    /// The size of the disk in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Tries to take the lock. Returns whether this process has it.
    fn acquire(&mut self) -> io::Result<bool> {
        if !self.is_locked {
            let kind = match self.is_read_only {
                true => Lock::Shared,
                false => Lock::Exclusive,
            };
            self.is_locked = lock(&self.file, kind)?;
        }
        Ok(self.is_locked)
    }

    /// The place of `bytes` bytes on the disk.
    fn place(&self, sector: u64, bytes: u64) -> Result<u64, Failure> {
        let start = sector.checked_mul(SECTOR);
        let fits = |at: &u64| at.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        start.filter(fits).ok_or(Failure::Io)
    }

    fn zero(&self, at: u64, bytes: u64, flags: FallocateFlags) -> io::Result<()> {
        let flags = flags | FallocateFlags::KEEP_SIZE;
        if fallocate(&self.file, flags, at, bytes).is_ok() {
            return Ok(());
        }
        let zeroes = vec![0; PIECE];
        let mut done = 0;
        while done < bytes {
            let part = (bytes - done).min(PIECE as u64);
            self.file
                .write_all_at(&zeroes[..part as usize], at + done)?;
            done += part;
        }
        Ok(())
    }

    /// Does a request. Returns the number of bytes in front of the status.
    fn request(&mut self, chain: &Chain) -> Result<u64, Failure> {
        if self.acquire()? {
            self.waits = None;
        } else {
            let since = self.waits.get_or_insert_with(Instant::now);
            return Err(match since.elapsed() < LOCK_WAIT {
                true => Failure::Fault(Fault::Later),
                false => Failure::Io,
            });
        }
        chain.bring()?;
        let mut head = [0; 16];
        chain.read(0, &mut head)?;
        let word = u128::from_le_bytes(head);
        let (kind, sector) = (word as u32, (word >> 64) as u64);
        let (input, output) = (chain.readable() - 16, chain.writable() - 1);
        let is_write = matches!(kind, 1 | 11 | 13);
        if is_write && self.is_read_only {
            return Err(Failure::Io);
        }
        if is_write {
            self.mark();
        }
        let mut given = 0;
        match kind {
            0 | 1 => {
                let bytes = if kind == 0 { output } else { input };
                if !bytes.is_multiple_of(SECTOR) {
                    return Err(Failure::Io);
                }
                let at = self.place(sector, bytes)?;
                let mut piece = vec![0; PIECE.min(bytes as usize)];
                let mut done = 0;
                while done < bytes {
                    let part = &mut piece[..(bytes - done).min(PIECE as u64) as usize];
                    if kind == 0 {
                        self.file.read_exact_at(part, at + done)?;
                        chain.write(done, part)?;
                    } else {
                        chain.read(16 + done, part)?;
                        self.file.write_all_at(part, at + done)?;
                    }
                    done += part.len() as u64;
                }
                given = if kind == 0 { bytes } else { 0 };
            }
            4 => self.file.sync_data()?,
            8 if output >= 20 => {
                let mut name = [0; 20];
                name[..9].copy_from_slice(b"pageferry");
                chain.write(0, &name)?;
                given = 20;
            }
            11 | 13 => {
                let mut range = [0; 16];
                if input != 16 {
                    return Err(Failure::Io);
                }
                chain.read(16, &mut range)?;
                let range = u128::from_le_bytes(range);
                let (sectors, flags) = ((range >> 64) as u32, (range >> 96) as u32);
                // Only a request that zeroes has a flag: it may also discard.
                if flags > u32::from(kind == 13) {
                    return Err(Failure::Unsupported);
                }
                if sectors > MOST_ZEROES {
                    return Err(Failure::Io);
                }
                let bytes = u64::from(sectors) * SECTOR;
                let at = self.place(range as u64, bytes)?;
                let how = match kind == 11 || flags == 1 {
                    true => FallocateFlags::PUNCH_HOLE,
                    false => FallocateFlags::ZERO_RANGE,
                };
                if bytes > 0 {
                    self.zero(at, bytes, how)?;
                }
            }
            _ => return Err(Failure::Unsupported),
        }
        if is_write && chain.features & FLUSH == 0 {
            self.file.sync_data()?;
        }
        Ok(given)
    }
}

/// Why a request fails.
enum Failure {
    Io,
    Unsupported,
    Fault(Fault),
}

impl From<io::Error> for Failure {
    fn from(_: io::Error) -> Self {
        Self::Io
    }
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.is_locked {
            // A child that another thread forks has the descriptor until it executes its program.
            let _ = lock(&self.file, Lock::Free);
        }
    }
}

impl VirtioDevice for Block {
    fn id(&self) -> u32 {
        2
    }

    fn features(&self) -> u64 {
        let writes = match self.is_read_only {
            true => READ_ONLY,
            false => DISCARD | WRITE_ZEROES,
        };
        SEG_MAX | FLUSH | writes
    }

    fn config(&self) -> Vec<u8> {
        let mut config = vec![0; 60];
        config[..8].copy_from_slice(&(self.bytes / SECTOR).to_le_bytes());
        let words = [(12, 254), (36, MOST_ZEROES), (40, 1), (44, 1)];
        for (at, word) in words
            .into_iter()
            .chain([(48, MOST_ZEROES), (52, 1), (56, 1)])
        {
            config[at..at + 4].copy_from_slice(&u32::to_le_bytes(word));
        }
        config
    }

    fn serve(&mut self, _: usize, chain: &Chain) -> Result<Option<u32>, Fault> {
        if chain.readable() < 16 || chain.writable() < 1 {
            return Err(Fault::Broken);
        }
        let (given, status) = match self.request(chain) {
            Ok(given) => (given, 0),
            Err(Failure::Io) => (0, 1),
            Err(Failure::Unsupported) => (0, 2),
            Err(Failure::Fault(fault)) => return Err(fault),
        };
        chain.write(chain.writable() - 1, &[status])?;
        Ok(Some(given as u32 + 1))
    }

    fn pause(&mut self) -> io::Result<()> {
        if self.is_locked {
            if !self.is_read_only {
                self.file.sync_data()?;
            }
            lock(&self.file, Lock::Free)?;
            self.is_locked = false;
        }
        Ok(())
    }

    fn resume(&mut self, _arrived: bool) {
        self.waits = None;
        // If another has it, the first request waits for it.
        let _ = self.acquire();
    }

    fn state(&self) -> Vec<u8> {
        self.bytes.to_le_bytes().to_vec()
    }

    fn check(&self, state: &[u8]) -> Result<(), String> {
        match state == self.state() {
            true => Ok(()),
            false => Err(format!(
                "the disk of the source has another size, expected {} bytes",
                self.bytes
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_goes_with_its_disk() {
        let name = format!("pageferry-lock-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, [0; 512]).unwrap();
        let first = Block::open(&path, false).unwrap();
        // As a child has it for a moment.
        let copy = first.file.try_clone().unwrap();
        assert!(Block::open(&path, false).is_err());
        drop(first);
        assert!(Block::open(&path, false).is_ok());
        drop(copy);
        std::fs::remove_file(path).unwrap();
    }
}
