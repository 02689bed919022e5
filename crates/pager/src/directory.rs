//! The directory with what outlives a pager: a record and a state for each restore, and the lock
//! that one pager holds.
//!
//! **Guarantee.** At most one process has a [`Directory`] of a path at a time. The kernel gives the
//! lock to the next one only when no thread of the former is left. A record is the old or the new
//! one whole, whenever the process is killed.
//!
//! **Mechanism.** `flock(2)` on the file `lock`, which says the holder's pid. A pager that is to
//! take over asks the holder to end by SIGTERM, and ends it by SIGKILL if that takes too long. A
//! record is written beside its name and renamed. It belongs on tmpfs (`/run`): its VMs do not
//! outlive the host.

use crate::fingerprint::{Fingerprint, Stamp};
use crate::name::Name;
use crate::options::Restore;
use crate::regions::Region;
use crate::vmm::{Identity, Vmm};
use pageferry_hostfs::{OwnError, own_directory};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The version of records and states. A pager refuses others.
const VERSION: u32 = 1;
/// The time that a holder has to end by itself.
const PATIENCE: Duration = Duration::from_secs(2);
/// The time that the kernel has to end a killed holder.
const KILL_LIMIT: Duration = Duration::from_secs(30);
/// The longest record, for its writer and its reader.
const MAX_RECORD_BYTES: u64 = 128 << 10;
/// The room in it for the VM, whose 64 regions need about 9 KiB. A request must leave it.
const VM_BYTES: u64 = 16 << 10;

/// The end of the name of a record that is being written.
const FRESH: &str = ".new";

/// The directory of this process.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    lock: File,
}

impl Drop for Directory {
    fn drop(&mut self) {
        // A child that another thread forks has the descriptor until it executes its program.
        let _ = flock(&self.lock, FlockOperation::Unlock);
    }
}

/// The refusal of a directory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirectoryError {
    /// Another pager has it.
    #[error(
        "{} is the directory of the pager with process id {pid}, which runs: end that one, or take \
         its VMs over",
        path.display()
    )]
    Held {
        /// The directory.
        path: PathBuf,
        /// The holder's process id, 0 if it has not said it.
        pid: i32,
    },
    /// The former pager does not end, even by SIGKILL.
    #[error(
        "the pager with process id {pid} does not end, even by SIGKILL: its source may hang in the \
         kernel"
    )]
    Undead {
        /// Its process id.
        pid: i32,
    },
    /// Others may write there, so they could give VMs wrong memory.
    #[error("cannot use the directory {}: {_1}", _0.display())]
    Open(PathBuf, #[source] OwnError),
    /// A system call failed.
    #[error("cannot use the directory {}: {why}", path.display())]
    Failed {
        /// The directory.
        path: PathBuf,
        /// The reason.
        why: io::Error,
    },
}

/// The facts that another pager needs to serve a restore again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    version: u32,
    pub(crate) restore: Restore,
    /// The memory file as it was when the restore began.
    pub(crate) source: String,
    /// The same as what is at its path, if it has one.
    #[serde(default)]
    pub(crate) stamp: Option<Stamp>,
    /// The same as a part of its contents.
    #[serde(default)]
    pub(crate) fingerprint: Option<Fingerprint>,
    /// The process at the other end, from its connect on.
    pub(crate) vmm: Option<Identity>,
    /// Its memory, from its handshake on.
    pub(crate) memory: Option<Memory>,
    /// Whether its VM needs no pager any more.
    #[serde(default)]
    pub(crate) released: bool,
}

/// The memory of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Memory {
    pub(crate) page_bytes: u64,
    pub(crate) regions: Vec<Region>,
}

impl Memory {
    /// The bytes that a memory file must have.
    pub(crate) fn bytes(&self) -> u64 {
        let ends = self
            .regions
            .iter()
            .map(|region| region.offset + region.size);
        ends.max().unwrap_or(0)
    }
}

impl Record {
    pub(crate) fn new(restore: Restore, source: String) -> Self {
        Self {
            version: VERSION,
            restore,
            source,
            stamp: None,
            fingerprint: None,
            vmm: None,
            memory: None,
            released: false,
        }
    }
}

impl Directory {
    /// Takes the directory, and makes it if there is none. With `take_over` another pager that
    /// holds it is ended first.
    pub(crate) fn take(path: &Path, take_over: bool) -> Result<Self, DirectoryError> {
        let failed = |why: io::Error| DirectoryError::Failed {
            path: path.to_owned(),
            why,
        };
        if let Some(above) = path.parent() {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(above)
                .map_err(failed)?;
        }
        own_directory(path).map_err(|why| match why {
            OwnError::Refused(why) => failed(why),
            why => DirectoryError::Open(path.to_owned(), why),
        })?;
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path.join("lock"))
            .map_err(failed)?;
        if !try_lock(&lock).map_err(failed)? {
            let pid = holder(&mut lock);
            if !take_over {
                return Err(DirectoryError::Held {
                    path: path.to_owned(),
                    pid,
                });
            }
            end_holder(&mut lock).map_err(|why| match why {
                Fence::Undead(pid) => DirectoryError::Undead { pid },
                Fence::Failed(why) => failed(why),
            })?;
        }
        let own = rustix::process::getpid().as_raw_nonzero();
        lock.set_len(0)
            .and_then(|()| {
                rustix::io::pwrite(&lock, own.to_string().as_bytes(), 0).map_err(Into::into)
            })
            .map_err(failed)?;
        Ok(Self {
            path: path.to_owned(),
            lock,
        })
    }

    /// The path of the directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn record_path(&self, name: &Name) -> PathBuf {
        self.path.join(format!("{name}.json"))
    }

    fn state_path(&self, name: &Name) -> PathBuf {
        self.path.join(format!("{name}.state"))
    }

    /// Replaces the record of a restore.
    pub(crate) fn write(&self, name: &Name, record: &Record) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(record)?;
        let most = match record.memory {
            Some(_) => MAX_RECORD_BYTES,
            None => MAX_RECORD_BYTES - VM_BYTES,
        };
        if text.len() as u64 > most {
            let why = format!(
                "its record would have {} bytes: expected at most {most}",
                text.len()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let fresh = self.path.join(format!(".{name}{FRESH}"));
        let written = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&fresh)
            .and_then(|mut file| file.write_all(&text))
            .and_then(|()| std::fs::rename(&fresh, self.record_path(name)));
        if written.is_err() {
            let _ = std::fs::remove_file(&fresh);
        }
        written
    }

    /// A new empty state of a restore.
    pub(crate) fn new_state(&self, name: &Name) -> io::Result<File> {
        OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(self.state_path(name))
    }

    /// The state of a restore.
    pub(crate) fn state(&self, name: &Name) -> io::Result<File> {
        OpenOptions::new()
            .read(true)
            .write(true)
            .open(self.state_path(name))
    }

    /// Forgets a restore. The record goes first: without it the state means nothing.
    pub(crate) fn remove(&self, name: &Name) -> io::Result<()> {
        for path in [self.record_path(name), self.state_path(name)] {
            match std::fs::remove_file(path) {
                Err(why) if why.kind() != io::ErrorKind::NotFound => return Err(why),
                _ => {}
            }
        }
        Ok(())
    }

    /// All records, by name. A record that cannot be read comes with one sentence. One that was not
    /// whole when its writer was killed goes.
    pub(crate) fn records(&self) -> io::Result<Vec<(Name, Result<Record, String>)>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.path)? {
            let file = entry?.file_name();
            let file = file.to_str().unwrap_or_default();
            if file.starts_with('.') && file.ends_with(FRESH) {
                let _ = std::fs::remove_file(self.path.join(file));
            }
            let name = file.strip_suffix(".json");
            if let Some(Ok(name)) = name.map(str::parse::<Name>) {
                let record = self.read(&name);
                found.push((name, record));
            }
        }
        found.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok(found)
    }

    /// The record of a restore. The error is one sentence.
    pub(crate) fn read(&self, name: &Name) -> Result<Record, String> {
        let path = self.record_path(name);
        let cannot = |why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
        let mut text = String::new();
        File::open(&path)
            .and_then(|file| file.take(MAX_RECORD_BYTES + 1).read_to_string(&mut text))
            .map_err(|why| cannot(&why))?;
        if text.len() as u64 > MAX_RECORD_BYTES {
            return Err(cannot(&format_args!("more than {MAX_RECORD_BYTES} bytes")));
        }
        let record: Record = serde_json::from_str(&text).map_err(|why| cannot(&why))?;
        if record.version != VERSION {
            return Err(cannot(&format_args!(
                "the record has version {}: this pager reads version {VERSION}",
                record.version
            )));
        }
        Ok(record)
    }
}

/// Takes the lock if nobody holds it.
fn try_lock(lock: &File) -> io::Result<bool> {
    match flock(lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// The process that the lock file names, 0 for none.
fn holder(lock: &mut File) -> i32 {
    let mut text = [0; 16];
    let bytes = rustix::io::pread(&*lock, &mut text, 0).unwrap_or(0);
    std::str::from_utf8(&text[..bytes])
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(0)
}

/// A holder that could not be ended.
enum Fence {
    Undead(i32),
    Failed(io::Error),
}

/// Ends the process that holds the lock, and takes it.
fn end_holder(lock: &mut File) -> Result<(), Fence> {
    let deadline = Instant::now() + PATIENCE + KILL_LIMIT;
    let mut asked = None;
    loop {
        if try_lock(lock).map_err(Fence::Failed)? {
            return Ok(());
        }
        let pid = holder(lock);
        // The descriptor holds on to the process. Only then the file is read again: if it still
        // names the process, and the lock is still held, it is the holder and no later process.
        if let Ok(vmm) = Vmm::of_pid(pid)
            && holder(lock) == pid
            && !try_lock(lock).map_err(Fence::Failed)?
        {
            let (since, killed) = match &asked {
                Some((identity, since, killed)) if *identity == vmm.identity => (*since, *killed),
                _ => {
                    // It may have ended meanwhile, or belong to another user: the limit decides.
                    let _ = vmm.signal(Signal::TERM);
                    (Instant::now(), false)
                }
            };
            let kill = !killed && since.elapsed() >= PATIENCE;
            if kill {
                let _ = vmm.signal(Signal::KILL);
            }
            asked = Some((vmm.identity, since, killed || kill));
        } else if try_lock(lock).map_err(Fence::Failed)? {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(Fence::Undead(holder(lock)));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> PathBuf {
        let pid = std::process::id();
        std::env::temp_dir().join(format!("pageferry-directory-{name}-{pid}"))
    }

    #[test]
    fn one_process_has_a_directory() {
        let path = path("lock");
        let first = Directory::take(&path, false).unwrap();
        let second = Directory::take(&path, false).unwrap_err();
        let own = std::process::id();
        assert!(
            matches!(second, DirectoryError::Held { pid, .. } if pid as u32 == own),
            "{second}"
        );
        // As a child has it for a moment.
        let copy = first.lock.try_clone().unwrap();
        drop(first);
        assert!(Directory::take(&path, false).is_ok());
        drop(copy);
        std::fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn a_directory_that_others_may_write_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let path = path("mode");
        std::fs::create_dir(&path).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o777)).unwrap();
        let refused = Directory::take(&path, false).unwrap_err().to_string();
        assert!(refused.contains("mode 777"), "{refused}");
        std::fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn records_are_found_again_and_damaged_ones_are_named() {
        let path = path("records");
        let directory = Directory::take(&path, false).unwrap();
        let name: Name = "web".parse().unwrap();
        let record = Record {
            vmm: Some(Identity {
                pid: 7,
                started: 11,
            }),
            memory: Some(Memory {
                page_bytes: 4096,
                regions: vec![Region {
                    address: 1 << 40,
                    size: 4096,
                    offset: 0,
                }],
            }),
            ..Record::new(Restore::new("/memory", "/socket"), "file 1".into())
        };
        directory.write(&name, &record).unwrap();
        std::fs::write(path.join("bad.json"), "{").unwrap();
        std::fs::write(path.join(".x.new"), "{").unwrap();
        let old = serde_json::to_string(&Record {
            version: 0,
            ..record.clone()
        });
        std::fs::write(path.join("old.json"), old.unwrap()).unwrap();
        let found = directory.records().unwrap();
        assert_eq!(found.len(), 3);
        assert!(!path.join(".x.new").exists());
        let refusal = |index: usize| found[index].1.clone().unwrap_err();
        assert!(refusal(0).contains("bad.json"), "{}", refusal(0));
        assert!(refusal(1).contains("version 0"), "{}", refusal(1));
        assert_eq!(found[2], (name.clone(), Ok(record)));
        directory.remove(&name).unwrap();
        directory.remove(&name).unwrap();
        assert_eq!(directory.records().unwrap().len(), 2);
        std::fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn each_record_that_is_written_can_be_read() {
        let path = path("long");
        let directory = Directory::take(&path, false).unwrap();
        let name: Name = "web".parse().unwrap();
        let region = Region {
            address: u64::MAX,
            size: u64::MAX,
            offset: u64::MAX,
        };
        let memory = Memory {
            page_bytes: 4096,
            regions: vec![region; crate::MAX_REGIONS],
        };
        let record = |bytes: usize| {
            let memory = "\n".repeat(bytes / 2);
            Record::new(Restore::new(memory, "/socket"), "file 1".into())
        };
        let mut taken = 0;
        for bytes in (0..160 << 10).step_by(512) {
            let mut record = record(bytes);
            match directory.write(&name, &record) {
                Ok(()) => taken = bytes,
                Err(why) => {
                    assert!(why.to_string().contains("at most"), "{why}");
                    continue;
                }
            }
            record.memory = Some(memory.clone());
            directory.write(&name, &record).unwrap();
            assert_eq!(directory.read(&name), Ok(record), "{bytes} bytes");
        }
        assert!((96 << 10..128 << 10).contains(&taken), "{taken} bytes");
        std::fs::write(directory.record_path(&name), vec![b' '; 129 << 10]).unwrap();
        let refused = directory.read(&name).unwrap_err();
        assert!(refused.contains("more than"), "{refused}");
        std::fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn a_record_that_cannot_be_written_leaves_nothing() {
        let path = path("full");
        let directory = Directory::take(&path, false).unwrap();
        let name: Name = "web".parse().unwrap();
        // As a full disk does, it fails behind the file's creation.
        std::fs::create_dir(directory.record_path(&name)).unwrap();
        let record = Record::new(Restore::new("/memory", "/socket"), "file 1".into());
        assert!(directory.write(&name, &record).is_err());
        assert!(!path.join(".web.new").exists());
        std::fs::remove_dir_all(path).unwrap();
    }
}
