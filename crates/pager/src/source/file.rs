//! A memory file: the regions of a VM one after the other, with holes where pages are zero.
//!
//! **Guarantee.** A page, or a zero, is given only while the file has the bytes of the start. Times
//! are no evidence: a file that was touched, or copied over itself, serves on.
//!
//! **Mechanism.** Behind each answer, from the disk or from the map of holes, [`Stamp`]s tell
//! whether the file may have changed. Its writer can set the time of the last write back, but not
//! that of the last change of the inode. If the stamps differ, the next read that may wait compares
//! bytes: samples of the start, samples of what was given since, and what was a hole and is none
//! any more. A change that no sample sees is not noticed.

use super::{Source, SourceError};
use rustix::fs::{Advice, FileType, SeekFrom, fadvise, fstat, fstatfs, seek};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::num::NonZeroU64;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use xxhash_rust::xxh3::xxh3_64;

/// The bytes that one read from the disk brings.
const BLOCK: u64 = 64 << 10;
/// The most extents that are kept. The rest of a file with more counts as data.
const MAX_EXTENTS: usize = 1 << 20;
/// The bytes of a sample.
const SAMPLE: usize = 4096;
/// The samples of the start, which are its identity, and those of all. Where two saves of a VM
/// differ in 5 % of their pages, 128 samples are equal once in 700.
const FIRST_SAMPLES: u64 = 128;
const MOST_SAMPLES: usize = 1024;
/// The most bytes of former holes that are compared with zeros. A file with more has changed.
const MOST_FILLED: u64 = 64 << 20;
/// The magic number of tmpfs, from `linux/magic.h`.
const TMPFS: u64 = 0x0102_1994;

/// A memory file.
#[derive(Debug)]
pub struct FileSource {
    path: PathBuf,
    file: File,
    bytes: u64,
    /// The parts with data at the start, in order: first byte, and first byte behind.
    extents: Vec<(u64, u64)>,
    now: Now,
    known: Mutex<Known>,
    identity: String,
}

/// Whether a read can tell that it would wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Now {
    Tells,
    /// It never waits: a file system in memory.
    InMemory,
    /// It cannot tell, as on FUSE and NFS.
    Unknown,
}

/// The signs by which a file system tells that a file may have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    size: i64,
    modified: (i64, i64),
    changed: (i64, i64),
}

#[derive(Debug)]
struct Known {
    stamp: Stamp,
    /// Places, and sums of [`SAMPLE`] bytes there.
    samples: Vec<(u64, u32)>,
}

impl FileSource {
    /// Opens a memory file, or a block device, for reading.
    ///
    /// # Errors
    /// [`SourceError::Failed`], also for a file that is neither.
    pub fn open(path: &Path) -> Result<Self, SourceError> {
        let failed = |why| SourceError::Failed {
            what: path.display().to_string(),
            why,
        };
        // A fifo must not hold the caller up.
        let file = std::os::unix::fs::OpenOptionsExt::custom_flags(
            std::fs::OpenOptions::new().read(true),
            rustix::fs::OFlags::NONBLOCK.bits() as i32,
        )
        .open(path)
        .map_err(failed)?;
        Self::from_file(file, path)
    }

    /// Takes a file that is open for reading. Errors call it `path`.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn from_file(file: File, path: &Path) -> Result<Self, SourceError> {
        let failed = |why| SourceError::Failed {
            what: path.display().to_string(),
            why,
        };
        let metadata = file.metadata().map_err(failed)?;
        let kind = FileType::from_raw_mode(metadata.mode());
        let bytes = match kind {
            FileType::RegularFile => metadata.len(),
            FileType::BlockDevice => seek(&file, SeekFrom::End(0)).map_err(|e| failed(e.into()))?,
            _ => {
                let why = "it is no file and no block device: expected a memory file";
                return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, why)));
            }
        };
        // A fault asks for what it needs. The kernel's guess at more would delay it. A refusal
        // costs nothing but speed.
        let _ = fadvise(&file, 0, None, Advice::Random);
        let stamp = stamp(&file).map_err(failed)?;
        let extents = extents(&file, bytes).map_err(failed)?;
        if extents.is_empty() {
            tracing::warn!("{} has no data: all its pages are zeros", path.display());
        }
        let samples = first_samples(&file, &extents).map_err(failed)?;
        let sums: Vec<String> = samples
            .iter()
            .map(|(at, sum)| format!("{at:x}:{sum:x}"))
            .collect();
        Ok(Self {
            path: path.to_owned(),
            now: now(&file),
            file,
            bytes,
            extents,
            identity: format!(
                "{bytes} bytes in {}:{}; {}",
                metadata.dev(),
                metadata.ino(),
                sums.join(" ")
            ),
            known: Mutex::new(Known { stamp, samples }),
        })
    }

    /// The parts with data, in order: the first byte, and the first byte behind.
    ///
    /// # Errors
    /// [`SourceError::Changed`]: the file has other bytes than at the start.
    pub fn extents(&self) -> Result<&[(u64, u64)], SourceError> {
        self.check().map(|()| &self.extents[..])
    }

    /// Whether nobody may have written the file since its bytes were compared last.
    fn is_untouched(&self) -> bool {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        stamp(&self.file).is_ok_and(|now| now == known.stamp)
    }

    /// Checks behind a read that the file has the bytes of the start.
    fn check(&self) -> Result<(), SourceError> {
        if self.is_untouched() {
            return Ok(());
        }
        let now = stamp(&self.file).map_err(|why| self.failed(why))?;
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let (before, samples) = (known.stamp, known.samples.clone());
        drop(known);
        if now.size != before.size {
            return Err(self.changed(format!("{} bytes", now.size)));
        }
        if let Some(at) = self.first_difference(&samples)? {
            return Err(self.changed(format!("a file with other bytes at {at}")));
        }
        tracing::warn!(
            "{} was touched, and its bytes have not changed: it serves on",
            self.path.display()
        );
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.stamp = now;
        Ok(())
    }

    /// The first sample with other bytes, or the first byte of a former hole that is not zero.
    fn first_difference(&self, samples: &[(u64, u32)]) -> Result<Option<u64>, SourceError> {
        let failed = |why| self.failed(why);
        for &(at, before) in samples {
            if sum_at(&self.file, at).map_err(failed)? != before {
                return Ok(Some(at));
            }
        }
        let mut left = MOST_FILLED;
        let mut buffer = vec![0; BLOCK as usize];
        for (start, end) in extents(&self.file, self.bytes).map_err(failed)? {
            let mut at = start;
            while at < end {
                let behind = self.extents.partition_point(|&(_, end)| end <= at);
                let old = self.extents.get(behind).copied();
                if let Some((first, last)) = old
                    && first <= at
                {
                    at = last;
                    continue;
                }
                let hole = old.map_or(end, |(first, _)| first.min(end));
                let part = &mut buffer[..(hole - at).min(BLOCK) as usize];
                self.file.read_exact_at(part, at).map_err(failed)?;
                left = left.saturating_sub(part.len() as u64);
                if left == 0 || part.iter().any(|&byte| byte != 0) {
                    return Ok(Some(at));
                }
                at += part.len() as u64;
            }
        }
        Ok(None)
    }

    /// Keeps a sample of what is given, as long as there are few.
    fn sample(&self, offset: u64, bytes: &[u8]) {
        let Some(page) = bytes.get(..SAMPLE) else {
            return;
        };
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.samples.len() < MOST_SAMPLES {
            known.samples.push((offset, xxh3_64(page) as u32));
        }
    }

    fn changed(&self, now: String) -> SourceError {
        SourceError::Changed {
            what: self.path.display().to_string(),
            before: format!("{} bytes", self.bytes),
            now,
        }
    }

    fn short(&self, end: u64) -> SourceError {
        SourceError::Short {
            what: self.path.display().to_string(),
            end,
        }
    }

    fn failed(&self, why: io::Error) -> SourceError {
        SourceError::Failed {
            what: self.path.display().to_string(),
            why,
        }
    }
}

fn stamp(file: &File) -> io::Result<Stamp> {
    let now = fstat(file)?;
    Ok(Stamp {
        size: now.st_size,
        modified: (now.st_mtime, now.st_mtime_nsec as i64),
        changed: (now.st_ctime, now.st_ctime_nsec as i64),
    })
}

/// Tries whether a read can tell that it would wait.
fn now(file: &File) -> Now {
    let mut byte = [0];
    let read = preadv2(
        file,
        &mut [IoSliceMut::new(&mut byte)],
        0,
        ReadWriteFlags::NOWAIT,
    );
    let in_memory = || fstatfs(file).is_ok_and(|found| found.f_type as u64 == TMPFS);
    match read {
        Err(Errno::OPNOTSUPP) if in_memory() => Now::InMemory,
        Err(Errno::OPNOTSUPP) => Now::Unknown,
        _ => Now::Tells,
    }
}

/// The sum of the bytes at a place, as far as there are any.
fn sum_at(file: &File, at: u64) -> io::Result<u32> {
    let mut page = [0; SAMPLE];
    let mut read = 0;
    while read < SAMPLE {
        match file.read_at(&mut page[read..], at + read as u64)? {
            0 => break,
            more => read += more,
        }
    }
    Ok(xxh3_64(&page[..read]) as u32)
}

/// Samples at equal distances in the data of a file.
fn first_samples(file: &File, extents: &[(u64, u64)]) -> io::Result<Vec<(u64, u32)>> {
    let data: u64 = extents.iter().map(|(start, end)| end - start).sum();
    let step = (data / FIRST_SAMPLES)
        .next_multiple_of(SAMPLE as u64)
        .max(SAMPLE as u64);
    let (mut places, mut before, mut next) = (Vec::new(), 0, 0);
    for (start, end) in extents {
        let len = end - start;
        while next < before + len {
            places.push(start + (next - before));
            next += step;
        }
        before += len;
    }
    // A disk reads them all at once.
    for &at in &places {
        let _ = fadvise(file, at, NonZeroU64::new(SAMPLE as u64), Advice::WillNeed);
    }
    let samples = places.into_iter().map(|at| Ok((at, sum_at(file, at)?)));
    samples.collect()
}

/// The parts of a file that have data.
fn extents(file: &File, bytes: u64) -> io::Result<Vec<(u64, u64)>> {
    let mut extents = Vec::new();
    let mut at = 0;
    while at < bytes {
        if extents.len() == MAX_EXTENTS {
            extents.push((at, bytes));
            break;
        }
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            // No data behind.
            Err(Errno::NXIO) => break,
            // A file system or a device without holes.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                extents.push((at, bytes));
                break;
            }
            Err(errno) => return Err(errno.into()),
        };
        let end = seek(file, SeekFrom::Hole(start))?.min(bytes);
        extents.push((start, end));
        at = end;
    }
    Ok(extents)
}

impl Source for FileSource {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn block(&self) -> u64 {
        BLOCK
    }

    fn is_zero(&self, offset: u64, len: u64) -> bool {
        let behind = self.extents.partition_point(|&(_, end)| end <= offset);
        offset + len <= self.bytes
            && self
                .extents
                .get(behind)
                .is_none_or(|&(start, _)| offset + len <= start)
            // The read that follows says what is wrong.
            && self.is_untouched()
    }

    fn read_now(&self, offset: u64, buffer: &mut [u8]) -> Result<bool, SourceError> {
        let expected = buffer.len();
        let mut parts = [IoSliceMut::new(buffer)];
        let flags = match self.now {
            Now::Tells => ReadWriteFlags::NOWAIT,
            Now::InMemory => ReadWriteFlags::empty(),
            Now::Unknown => return Ok(false),
        };
        match preadv2(&self.file, &mut parts, offset, flags) {
            Ok(read) if read == expected && self.is_untouched() => {
                self.sample(offset, buffer);
                Ok(true)
            }
            // A part is in the page cache, or the file was touched: a whole read tells.
            Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::OPNOTSUPP) => Ok(false),
            Err(errno) => Err(self.failed(errno.into())),
        }
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SourceError> {
        self.file.read_exact_at(buffer, offset).map_err(|why| {
            if why.kind() == io::ErrorKind::UnexpectedEof {
                self.short(offset + buffer.len() as u64)
            } else {
                self.failed(why)
            }
        })?;
        self.check()?;
        self.sample(offset, buffer);
        Ok(())
    }

    fn identity(&self) -> String {
        self.identity.clone()
    }

    /// Compares the samples of that identity. A copy of the bytes is the same source.
    fn is(&self, identity: &str) -> bool {
        let samples = identity
            .strip_prefix(&format!("{} bytes in ", self.bytes))
            .and_then(|rest| rest.split_once("; "))
            .map(|(_, samples)| samples.split_ascii_whitespace());
        samples.is_some_and(|mut samples| {
            samples.all(|sample| {
                let parsed = sample.split_once(':').and_then(|(at, sum)| {
                    let at = u64::from_str_radix(at, 16).ok()?;
                    Some((at, u32::from_str_radix(sum, 16).ok()?))
                });
                parsed.is_some_and(|(at, sum)| sum_at(&self.file, at).is_ok_and(|now| now == sum))
            })
        })
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("pageferry-source-{name}-{}", std::process::id()))
    }

    #[test]
    fn holes_are_zero_without_a_read() {
        let path = path("holes");
        let file = File::create(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        file.write_all_at(&[7; 4096], 256 << 10).unwrap();
        let source = FileSource::open(&path).unwrap();
        assert_eq!(source.bytes(), 1 << 20);
        assert!(source.is_zero(0, 256 << 10));
        assert!(!source.is_zero(0, (256 << 10) + 1));
        assert!(!source.is_zero(256 << 10, 4096));
        assert!(source.is_zero(512 << 10, 512 << 10));
        assert!(!source.is_zero(1 << 20, 4096), "behind the end");
        let mut page = [1; 4096];
        source.read(256 << 10, &mut page).unwrap();
        assert_eq!(page, [7; 4096]);
        assert!(source.read_now(256 << 10, &mut page).unwrap());
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_file_that_is_cut_off_is_an_error_and_no_zeros() {
        let path = path("short");
        std::fs::write(&path, vec![7; 64 << 10]).unwrap();
        let source = FileSource::open(&path).unwrap();
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(8192)
            .unwrap();
        let mut page = [1; 4096];
        let error = source.read(16384, &mut page).unwrap_err();
        assert!(matches!(error, SourceError::Short { .. }), "{error}");
        assert!(!source.read_now(16384, &mut page).unwrap());
        let error = source.read(0, &mut page).unwrap_err();
        assert!(matches!(error, SourceError::Changed { .. }), "{error}");
        std::fs::remove_file(path).unwrap();
    }

    fn set_time(path: &Path, time: std::time::SystemTime) {
        let file = File::options().write(true).open(path).unwrap();
        file.set_modified(time).unwrap();
    }

    fn modified(path: &Path) -> std::time::SystemTime {
        std::fs::metadata(path).unwrap().modified().unwrap()
    }

    #[test]
    fn a_touch_changes_nothing() {
        let path = path("touch");
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        let source = FileSource::open(&path).unwrap();
        let identity = source.identity();
        set_time(&path, std::time::SystemTime::UNIX_EPOCH);
        let mut page = [1; 4096];
        assert!(!source.read_now(8192, &mut page).unwrap(), "it may wait");
        source.read(8192, &mut page).unwrap();
        assert!(source.read_now(8192, &mut page).unwrap());
        let copy = path.with_extension("copy");
        std::fs::copy(&path, &copy).unwrap();
        assert!(FileSource::open(&copy).unwrap().is(&identity));
        std::fs::write(&copy, vec![8; 1 << 20]).unwrap();
        assert!(!FileSource::open(&copy).unwrap().is(&identity));
        for path in [path, copy] {
            std::fs::remove_file(path).unwrap();
        }
    }

    #[test]
    fn other_bytes_are_noticed_although_the_time_was_put_back() {
        let path = path("back");
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        let before = modified(&path);
        let write: [fn(&File); 2] = [
            |file| file.write_all_at(&[8; 1 << 20], 0).unwrap(),
            |file| {
                file.set_len(0).unwrap();
                file.set_len(1 << 20).unwrap();
            },
        ];
        for write in write {
            std::fs::write(&path, vec![7; 1 << 20]).unwrap();
            let source = FileSource::open(&path).unwrap();
            write(&File::options().write(true).open(&path).unwrap());
            set_time(&path, before);
            let mut page = [1; 4096];
            assert!(!source.read_now(0, &mut page).unwrap());
            let error = source.read(0, &mut page).unwrap_err();
            assert!(matches!(error, SourceError::Changed { .. }), "{error}");
        }
        std::fs::remove_file(path).unwrap();
    }

    /// The page that was given is the only evidence.
    #[test]
    fn a_page_that_was_given_is_a_sample() {
        let path = path("given");
        std::fs::write(&path, vec![7; 4 << 20]).unwrap();
        let source = FileSource::open(&path).unwrap();
        let given = 5 * 4096;
        source.read(given, &mut [0; 8192]).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&[8; 4096], given).unwrap();
        let error = source.read(0, &mut [0; 4096]).unwrap_err();
        assert!(matches!(error, SourceError::Changed { .. }), "{error}");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_hole_counts_only_while_it_is_one() {
        let path = path("late");
        let file = File::create(&path).unwrap();
        file.set_len(16 << 20).unwrap();
        file.write_all_at(&[7; 8 << 20], 0).unwrap();
        let source = FileSource::open(&path).unwrap();
        assert!(source.is_zero(8 << 20, 4096));
        file.write_all_at(&[0; 65536], 12 << 20).unwrap();
        assert!(!source.is_zero(8 << 20, 4096));
        let mut page = [1; 4096];
        source.read(8 << 20, &mut page).unwrap();
        assert_eq!(page, [0; 4096]);
        assert!(source.is_zero(8 << 20, 4096), "zeros have filled a hole");
        file.write_all_at(&[7; 4096], 15 << 20).unwrap();
        assert!(!source.is_zero(8 << 20, 4096));
        let error = source.read(8 << 20, &mut page).unwrap_err();
        assert!(matches!(error, SourceError::Changed { .. }), "{error}");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn other_kinds_of_files_are_refused() {
        assert!(FileSource::open(Path::new("/dev/null")).is_err());
        assert!(FileSource::open(&std::env::temp_dir()).is_err());
        assert!(FileSource::open(&path("absent")).is_err());
    }
}
