//! Snapshots as files of a file system, whose bytes come when they are read.
//!
//! **Guarantee.** A file has the contents of its source. A read never gives zeros or an error
//! because something failed: it waits. A pager that dies costs no VM, if the descriptor of
//! `/dev/fuse` outlives it and the kernel sends requests again ([`Mount::status`] says so).
//!
//! **Mechanism.** A read-only FUSE file system. VMs map a file privately, so all of them share the
//! clean pages in the page cache. Nothing but the descriptor has to outlive the process: the
//! numbers of nodes come from the names and identities of the sources.
//!
//! **Neighbours.** It needs the sources and recordings of this crate, and no userfaultfd.

mod device;
mod file;
mod protocol;
mod replay;
mod serve;

use crate::Owner;
use crate::name::Name;
use crate::pager::Keeper;
use crate::recording::Recording;
use crate::source::Source;
use crate::status::{Latency, Survival};
use crate::timeline::Came;
use crate::vm::locked;
use device::{Device, find, is_dead, unmount_at};
use file::File;
use rustix::io::Errno;
use serde::Serialize;
use serve::{Buffers, Shared};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The bytes that come with a touched page. As with a userfaultfd, 16 KiB save three faults in four
/// of a VM that uses its memory in parts. More would only cost memory.
const READAHEAD: u32 = 16 << 10;
/// The name under which the descriptor is kept.
const KEPT: &str = "mount";
/// The time that the loading of recordings has to end.
const PATIENCE: Duration = Duration::from_secs(5);

/// One snapshot of a mount.
#[derive(Clone, Debug)]
pub struct MountFile {
    /// The contents.
    pub source: Arc<dyn Source>,
    /// Owner and mode. Nobody can write, whatever the mode says.
    pub owner: Owner,
    /// A recording whose pages come when the file is opened.
    pub replay: Option<Recording>,
}

/// How a mount starts.
#[derive(Default)]
pub struct MountSettings {
    /// The directory to mount on. If there is none, it is made, and removed at the end.
    pub directory: PathBuf,
    /// The snapshots, by the names of their files.
    pub files: BTreeMap<Name, MountFile>,
    /// The keeper of the descriptor.
    pub keeper: Option<Box<dyn Keeper>>,
    /// The descriptor of a former pager's mount on the directory.
    pub kept: Option<OwnedFd>,
}

impl fmt::Debug for MountSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MountSettings")
            .field("directory", &self.directory)
            .field("files", &self.files)
            .field("kept", &self.kept)
            .finish_non_exhaustive()
    }
}

/// A mount cannot start or end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// The directory cannot be used.
    #[error("cannot mount on {}: {why}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The reason.
        why: io::Error,
    },
    /// The kernel or the container has no FUSE.
    #[error("cannot open /dev/fuse: {0}: expected a kernel with FUSE, and rights on the device")]
    NoFuse(io::Error),
    /// The process may not mount.
    #[error("this process may not mount: expected root, or CAP_SYS_ADMIN")]
    Forbidden,
    /// Another pager has it, or nobody who has its descriptor answers.
    #[error(
        "{} is mounted by another pager: end that one, or hand its descriptor over",
        path.display()
    )]
    Mounted {
        /// The directory.
        path: PathBuf,
    },
    /// The kept descriptor is that of another mount.
    #[error(
        "the descriptor that was kept is not that of {}: mount the directory of the former pager",
        path.display()
    )]
    Elsewhere {
        /// The directory.
        path: PathBuf,
    },
    /// Files of it are open or mapped.
    #[error("files of {} are in use: end their VMs first", path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// The host has no thread left, or `/proc` is not mounted.
    #[error("cannot serve files: {0}")]
    Host(#[from] io::Error),
}

/// A mount, seen from outside.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct MountStatus {
    /// The directory.
    pub directory: PathBuf,
    /// The cost of the pager's death.
    pub death_of_pager: Survival,
    /// Reads of files that this pager does not have. They wait for one that has them.
    pub stray_reads: u64,
    /// Its files by name.
    pub files: Vec<MountFileStatus>,
}

/// A file of a mount. Counts begin anew with each pager.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct MountFileStatus {
    /// Its name.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// Why a part of it cannot be read now. Readers of that part wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
    /// Reads that wait for the source now.
    pub waiting: u64,
    /// Failed reads of the source.
    pub source_errors: u64,
    /// Bytes asked for because of a recording.
    pub replayed_bytes: u64,
    /// Reads answered by zeros.
    pub zero_reads: Latency,
    /// Reads whose bytes were at hand.
    pub at_hand_reads: Latency,
    /// Reads that waited for the source.
    pub slow_reads: Latency,
}

/// A file system with snapshots, served by this process.
///
/// Dropping it takes it out of the tree. VMs that use it are served as long as the process lives.
///
/// ```no_run
/// use pageferry_pager::{Format, Mount, MountFile, MountSettings, Owner, open_source};
///
/// let file = MountFile {
///     source: open_source("/snapshots/web/memory".as_ref(), Format::Raw)?,
///     owner: Owner::default(),
///     replay: None,
/// };
/// let mount = Mount::start(MountSettings {
///     directory: "/run/snapshots".into(),
///     files: [("web".parse()?, file)].into(),
///     ..MountSettings::default()
/// })?;
/// // VMs map `/run/snapshots/web` privately. Once all of them have ended:
/// mount.unmount()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Mount {
    shared: Arc<Shared>,
    readers: Mutex<Vec<JoinHandle<()>>>,
    keeper: Option<Box<dyn Keeper>>,
    not_kept: Option<String>,
    made_directory: bool,
    /// Whether the directory is not this mount's any more, or is left to the next pager.
    is_over: AtomicBool,
}

impl fmt::Debug for Mount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mount")
            .field("directory", &self.shared.target)
            .finish_non_exhaustive()
    }
}

impl Mount {
    /// Mounts snapshots, or goes on with the mount of a former pager whose descriptor was kept.
    ///
    /// # Errors
    /// [`MountError`].
    pub fn start(settings: MountSettings) -> Result<Self, MountError> {
        let path = settings.directory;
        let target = target_of(&path).map_err(|why| MountError::Directory {
            path: path.clone(),
            why,
        })?;
        let mut made_directory = false;
        let kept = settings.kept.and_then(Device::kept);
        let goes_on = kept.is_some();
        let device = match (kept, find(&target)?) {
            (Some(device), Some(found)) if device.is_of(&found) => device,
            (Some(_), _) => return Err(MountError::Elsewhere { path }),
            (None, found) => {
                if found.is_some() {
                    // A pager whose descriptor nobody kept leaves a mount that nobody can use.
                    if !is_dead(&target) {
                        return Err(MountError::Mounted { path });
                    }
                    let _ = unmount_at(&target, true);
                }
                let device = Device::open().map_err(|errno| MountError::NoFuse(errno.into()))?;
                made_directory = std::fs::create_dir(&target).is_ok();
                let mounted = device.mount(&target);
                if mounted.is_err() && made_directory {
                    let _ = std::fs::remove_dir(&target);
                }
                mounted.map_err(|errno| match errno {
                    Errno::PERM => MountError::Forbidden,
                    _ => MountError::Directory {
                        path,
                        why: errno.into(),
                    },
                })?;
                device
            }
        };
        let files = settings.files.into_iter().map(|(name, file)| {
            let file = File::new(name, file.source, file.owner, file.replay);
            (file.node, Arc::new(file))
        });
        let shared = Arc::new(Shared {
            device: Arc::new(device),
            target,
            files: files.collect(),
            replays: AtomicUsize::new(0),
            strays: Default::default(),
            resends: OnceLock::new(),
            ending: Default::default(),
        });
        let mut mount = Self {
            shared,
            readers: Mutex::default(),
            keeper: settings.keeper,
            not_kept: None,
            made_directory,
            // Without its threads a mount that goes on is the next pager's.
            is_over: AtomicBool::new(goes_on),
        };
        mount.begin(goes_on)?;
        mount.is_over.store(false, Ordering::Relaxed);
        Ok(mount)
    }

    fn begin(&mut self, goes_on: bool) -> Result<(), MountError> {
        let shared = &self.shared;
        let kept = match &self.keeper {
            Some(keeper) => keeper.keep(KEPT, shared.device.fd()),
            None => Err("no service manager keeps the descriptor of the mount".to_owned()),
        };
        self.not_kept = kept.err();
        if goes_on {
            let resent = shared.device.resend();
            if let Err(errno) = resent {
                tracing::error!(
                    "the kernel does not send again what the former pager had read ({errno}): VMs \
                     that waited for it wait for ever"
                );
            }
            let _ = shared.resends.set(resent.is_ok());
        } else {
            // The kernel sends nothing else before this is answered.
            shared.answer_one(&mut Buffers::new());
        }
        for file in shared.files.values() {
            file.start(&shared.device)?;
        }
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        for _ in 0..cores.clamp(2, 8) {
            let own = shared.clone();
            let thread = std::thread::Builder::new().name("mount".to_owned());
            locked(&self.readers).push(thread.spawn(move || own.serve())?);
        }
        Ok(())
    }

    /// The mount, its files, and the cost of this process's death.
    #[must_use]
    pub fn status(&self) -> MountStatus {
        let resends = self.shared.resends.get().copied().unwrap_or(false);
        let death_of_pager = match &self.not_kept {
            Some(why) => Survival::Lost(format!("{why}, and VMs get SIGBUS without it")),
            None if !resends => Survival::Lost(
                "the kernel does not send requests again (Linux 6.9 does): a VM that waits for a \
                 page then waits for ever"
                    .to_owned(),
            ),
            None => Survival::Kept,
        };
        let mut files: Vec<_> = self
            .shared
            .files
            .values()
            .map(|file| of_file(file))
            .collect();
        files.sort_by(|a, b| a.name.cmp(&b.name));
        MountStatus {
            directory: self.shared.target.clone(),
            death_of_pager,
            stray_reads: self.shared.strays.get(),
            files,
        }
    }

    /// Whether the file system is gone: somebody has unmounted it, and no VM uses it any more.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        let readers = locked(&self.readers);
        !readers.is_empty() && readers.iter().all(JoinHandle::is_finished)
    }

    /// Unmounts, and ends all threads. Loading of recordings ends in any case.
    ///
    /// # Errors
    /// [`MountError::InUse`]: VMs use files. They are served as before.
    pub fn unmount(&self) -> Result<(), MountError> {
        let shared = &self.shared;
        if self.is_over.load(Ordering::Relaxed) {
            return Ok(());
        }
        // The threads that load a recording have the file open.
        shared.ending.store(true, Ordering::Relaxed);
        let began = Instant::now();
        while shared.replays.load(Ordering::Acquire) > 0 && began.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(5));
        }
        let path = || shared.target.clone();
        let unmounted = match self.has_ended() {
            // What is there now is somebody else's.
            true => Ok(()),
            false => unmount_at(&shared.target, false),
        };
        match unmounted {
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
            Err(Errno::BUSY) => {
                shared.ending.store(false, Ordering::Relaxed);
                return Err(MountError::InUse { path: path() });
            }
            Err(errno) => {
                return Err(MountError::Directory {
                    path: path(),
                    why: errno.into(),
                });
            }
        }
        self.is_over.store(true, Ordering::Relaxed);
        if self.made_directory {
            // One that is used for something else stays.
            let _ = std::fs::remove_dir(&shared.target);
        }
        self.forget();
        for reader in locked(&self.readers).drain(..) {
            // A panic was told when it happened.
            let _ = reader.join();
        }
        Ok(())
    }

    fn forget(&self) {
        if let Some(keeper) = self.keeper.as_ref().filter(|_| self.not_kept.is_none()) {
            keeper.forget(KEPT);
        }
    }

    /// Leaves the mount to the next pager, which gets its descriptor. This process has to end soon:
    /// it goes on serving until then.
    pub fn leave(self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if !self.is_over.load(Ordering::Relaxed) && self.unmount().is_err() {
            self.forget();
            let _ = unmount_at(&self.shared.target, true);
        }
    }
}

fn of_file(file: &File) -> MountFileStatus {
    let latency = |way| Latency::of(&file.figures.times(way));
    MountFileStatus {
        name: file.name.to_string(),
        bytes: file.source.bytes(),
        fault: file.loss(),
        waiting: file.waiting() as u64,
        source_errors: file.figures.source_errors.get(),
        replayed_bytes: file.figures.replayed.get(),
        zero_reads: latency(Came::Zero),
        at_hand_reads: latency(Came::AtHand),
        slow_reads: latency(Came::Read),
    }
}

/// The absolute path of a directory. Nothing looks at the directory itself: a file system there may
/// not answer.
fn target_of(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => Ok(parent.canonicalize()?.join(name)),
        _ => Err(Errno::BUSY.into()),
    }
}

/// Parses a message of the kernel, for the fuzz target.
#[doc(hidden)]
pub fn parse_fuse(bytes: &[u8]) -> bool {
    protocol::parse(bytes).is_ok()
}
