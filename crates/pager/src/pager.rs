//! [`Pager`]: the restores of a process.

use crate::directory::{Directory, DirectoryError, Record};
use crate::events::Event;
use crate::name::Name;
use crate::options::{Background, Restore};
use crate::recording::{RecordingError, Room};
use crate::restore::{Begin, Common, Entry, Held, KeptFor, Prepared, kept_names};
use crate::source::{SourceError, Stores};
use crate::status::Status;
use crate::vm::locked;
use pageferry_hostfs::ListenError;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The most restores of a pager, ended ones included.
const MAX_RESTORES: usize = 4096;
/// The longest time for which a pager that ends waits for its reads.
const LEAVE: Duration = Duration::from_secs(5);
/// The interval of looks at the memory files.
const LOOK: Duration = Duration::from_secs(1);
/// The ended restores that are still shown.
const MAX_ENDED: usize = 256;

/// Keeps descriptors while the process dies and starts again, such as systemd's FDSTORE.
pub trait Keeper: Send + Sync {
    /// Keeps a descriptor under a name: that of the restore for its userfaultfd, and the same with
    /// `/memory` behind it for its memory file.
    ///
    /// # Errors
    /// One sentence.
    fn keep(&self, name: &str, fd: BorrowedFd<'_>) -> Result<(), String>;

    /// Closes what is kept under a name.
    fn forget(&self, name: &str);
}

/// How a pager starts.
#[derive(Default)]
pub struct Settings {
    /// The directory for all that outlives the process, best on tmpfs.
    pub directory: PathBuf,
    /// Whether a pager that runs on the directory is ended first.
    pub take_over: bool,
    /// Whether `pidfd_getfd(2)` may kill this process, as a filter of system calls does. Then a VM
    /// is taken over only if its descriptor was kept.
    pub may_not_take: bool,
    /// The keeper of descriptors.
    pub keeper: Option<Box<dyn Keeper>>,
    /// The descriptors that were kept for this process, by name.
    pub kept: HashMap<String, OwnedFd>,
    /// Where memory may lie besides the file system.
    pub stores: Stores,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("directory", &self.directory)
            .field("take_over", &self.take_over)
            .field("may_not_take", &self.may_not_take)
            .field("kept", &self.kept)
            .field("stores", &self.stores)
            .finish_non_exhaustive()
    }
}

/// A pager cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The directory cannot be used.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The records cannot be read.
    #[error("cannot read the records of the former pager: {0}")]
    Records(io::Error),
    /// The host has no descriptor or thread left.
    #[error("cannot serve the VMs of the former pager: {0}")]
    Host(io::Error),
}

/// A restore cannot begin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The name is in use.
    #[error("there is a restore {0} already: end it, or choose another name")]
    Exists(Name),
    /// There are too many.
    #[error("there are {MAX_RESTORES} restores already: end some")]
    Full,
    /// The memory cannot be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The socket cannot be made.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The recording cannot be read.
    #[error(transparent)]
    Recording(#[from] RecordingError),
    /// A path that would mean another file to the next pager.
    #[error("'{}' is no absolute path: the next pager may have another directory", .0.display())]
    Relative(PathBuf),
    /// The memory file has no byte.
    #[error("{} is empty: expected the memory of a snapshot", .0.display())]
    Empty(PathBuf),
    /// The record cannot be written, or the host has no descriptor or thread left.
    #[error("cannot begin the restore: {0}")]
    Host(#[from] io::Error),
}

/// A restore cannot be ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EndError {
    /// There is none.
    #[error("there is no restore {0}")]
    Absent(Name),
    /// Its VM needs it.
    #[error(
        "{pages} pages of the VM are missing: end the VM first, load its memory (--when-loaded), \
         or let the pager kill it (--kill)"
    )]
    Needed {
        /// The missing pages.
        pages: u64,
    },
    /// Its VM waits for pages, and cannot be served.
    #[error("its VM waits for ever ({0}): end the VM first, or let the pager kill it")]
    Failed(String),
    /// A system call failed.
    #[error("cannot end the restore: {0}")]
    Host(String),
}

/// The restores of a process: each is one VM that starts from a snapshot.
///
/// Dropping a pager stops serving. Its VMs wait for the next one on the same directory.
///
/// ```
/// use pageferry_pager::{Pager, Phase, Restore, Settings};
///
/// # let scratch = std::env::temp_dir().join(format!("pageferry-doc-{}", std::process::id()));
/// # std::fs::create_dir(&scratch)?;
/// let memory = scratch.join("memory");
/// std::fs::write(&memory, vec![7; 1 << 20])?;
///
/// let settings = Settings { directory: scratch.join("state"), ..Settings::default() };
/// let pager = Pager::start(settings)?;
/// let name = "web".parse()?;
/// pager.restore(&name, Restore::new(&memory, scratch.join("web.sock")))?;
/// // Now Firecracker gets `PUT /snapshot/load` with the backend `Uffd` and that socket.
/// assert_eq!(pager.status(&name).unwrap().phase, Phase::Waiting);
/// pager.end(&name, false)?;
/// # std::fs::remove_dir_all(&scratch)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Pager {
    common: Arc<Common>,
    restores: Arc<Mutex<Restores>>,
}

type Restores = BTreeMap<Name, Served>;

struct Served {
    entry: Arc<Entry>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Pager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pager")
            .field("directory", &self.common.directory.path())
            .finish_non_exhaustive()
    }
}

impl Pager {
    /// Starts a pager, and serves the VMs of the former one on its directory again.
    ///
    /// # Errors
    /// [`StartError`]. A single VM that cannot be served is no error: its status says why.
    pub fn start(mut settings: Settings) -> Result<Self, StartError> {
        let directory = Directory::take(&settings.directory, settings.take_over)?;
        let pager = Self {
            common: Arc::new(Common {
                directory: Arc::new(directory),
                keeper: settings.keeper,
                may_not_take: settings.may_not_take,
                stores: settings.stores,
                events: Arc::default(),
            }),
            restores: Arc::default(),
        };
        let records = pager
            .common
            .directory
            .records()
            .map_err(StartError::Records)?;
        // VMs that run come first: what a waiting restore needs may be slow to open.
        let (running, waiting): (Vec<_>, Vec<_>) = records
            .into_iter()
            .partition(|(_, record)| record.as_ref().is_ok_and(|record| record.memory.is_some()));
        for (name, record) in running.into_iter().chain(waiting) {
            match record {
                Ok(record) => {
                    let [uffd, memory] = kept_names(&name).map(|name| settings.kept.remove(&name));
                    let kept = KeptFor { uffd, memory };
                    pager.again(name, record, kept).map_err(StartError::Host)?;
                }
                // It stays for a person, or for the version that wrote it.
                Err(why) => tracing::error!("a restore of the former pager is passed over: {why}"),
            }
        }
        for name in settings.kept.keys() {
            if let Some(keeper) = &pager.common.keeper {
                keeper.forget(name);
            }
        }
        let restores = Arc::downgrade(&pager.restores);
        std::thread::Builder::new()
            .name("memory-files".into())
            .spawn(move || look_at_memory(&restores))
            .map_err(StartError::Host)?;
        Ok(pager)
    }

    /// Takes up a restore of the former pager.
    fn again(&self, name: Name, record: Record, kept: KeptFor) -> io::Result<()> {
        if let Some(memory) = record.memory.clone() {
            let recording = record.restore.record.clone();
            match Entry::again(&name, record, &memory, kept, &self.common)? {
                Some((entry, begin)) => self.spawn(&mut locked(&self.restores), entry, begin)?,
                // Its VM has ended while nobody served it.
                None => {
                    drop(recording.as_deref().map(Room::of));
                    self.common.directory.remove(&name)?;
                }
            }
            return Ok(());
        }
        let fault = record.vmm.map(|vmm| {
            format!(
                "the former pager ended during the handshake of process {}: end that VM, and start \
                 it again",
                vmm.pid
            )
        });
        if let Some(fault) = &fault {
            tracing::error!(restore = %name, "{fault}");
        }
        match Prepared::new(&record.restore, &self.common.stores) {
            Ok(prepared) => {
                let common = self.common.clone();
                let entry = Entry::waiting(name, fault, &prepared, record.restore, common)?;
                let begin = Begin::Listen(Box::new(prepared));
                self.spawn(&mut locked(&self.restores), entry, begin)
            }
            Err(why) => {
                tracing::error!(restore = %name, "it cannot wait for its VMM again: {why}");
                self.common.directory.remove(&name)
            }
        }
    }

    /// Begins a restore. From the return on, the VMM may connect to its socket.
    ///
    /// # Errors
    /// [`RestoreError`]. Nothing is left of the restore then.
    pub fn restore(&self, name: &Name, restore: Restore) -> Result<(), RestoreError> {
        let is_free = |restores: &Restores| match restores.get(name) {
            Some(served) if !served.entry.has_ended() => Err(RestoreError::Exists(name.clone())),
            _ => Ok(()),
        };
        is_free(&locked(&self.restores))?;
        // A file system that hangs must hold up this request alone.
        let prepared = Prepared::new(&restore, &self.common.stores)?;
        let mut restores = locked(&self.restores);
        forget_ended(&mut restores);
        match restores.len() < MAX_RESTORES {
            true => is_free(&restores)?,
            false => return Err(RestoreError::Full),
        }
        let begun = self.begin(&mut restores, name, &restore, prepared);
        if begun.is_err() {
            let _ = self.common.directory.remove(name);
        }
        Ok(begun?)
    }

    fn begin(
        &self,
        restores: &mut Restores,
        name: &Name,
        restore: &Restore,
        prepared: Prepared,
    ) -> io::Result<()> {
        let (restore, common) = (restore.clone(), self.common.clone());
        let entry = Entry::waiting(name.clone(), None, &prepared, restore, common)?;
        self.spawn(restores, entry, Begin::Listen(Box::new(prepared)))
    }

    fn spawn(&self, restores: &mut Restores, entry: Arc<Entry>, begin: Begin) -> io::Result<()> {
        let own = entry.clone();
        let thread = std::thread::Builder::new()
            .name(format!("serve-{}", entry.name))
            .spawn(move || own.run(begin))?;
        let served = Served {
            entry: entry.clone(),
            thread: Some(thread),
        };
        restores.insert(entry.name.clone(), served);
        Ok(())
    }

    fn entry(&self, name: &Name) -> Option<Arc<Entry>> {
        let restores = locked(&self.restores);
        restores.get(name).map(|served| served.entry.clone())
    }

    /// A restore, `None` if there is none of this name.
    #[must_use]
    pub fn status(&self, name: &Name) -> Option<Status> {
        self.entry(name).map(|entry| entry.status())
    }

    /// The events behind number `after`, 0 for the first: at most the last 4096. If there is none
    /// yet, it waits for the next, at most `limit`. A few callers may wait at once; another gets
    /// its answer without a wait.
    #[must_use]
    pub fn events_after(&self, after: u64, limit: Duration) -> Vec<Event> {
        self.common.events.after(after, limit)
    }

    /// All restores by name, and the last ones that have ended.
    #[must_use]
    pub fn list(&self) -> Vec<Status> {
        let entries = entries_of(&self.restores);
        entries.iter().map(|entry| entry.status()).collect()
    }

    /// Sets whether the rest of a VM's memory is loaded, also while it runs. Once all is there, the
    /// restore can be ended, and the VM needs nobody.
    ///
    /// # Errors
    /// [`EndError::Absent`], also for a restore that has ended, and [`EndError::Host`].
    pub fn set_background(&self, name: &Name, background: Background) -> Result<(), EndError> {
        let absent = || EndError::Absent(name.clone());
        let entry = self.entry(name).ok_or_else(absent)?;
        let set = entry.set_background(background);
        match set.map_err(|why| EndError::Host(why.to_string()))? {
            true => Ok(()),
            false => Err(absent()),
        }
    }

    /// Ends a restore: one that waits, one whose VM has all its pages and needs no pager any more,
    /// one that has ended, and with `kill` any other, whose VMM gets SIGKILL.
    ///
    /// # Errors
    /// [`EndError`]. Nothing has changed then.
    pub fn end(&self, name: &Name, kill: bool) -> Result<(), EndError> {
        let entry = self
            .entry(name)
            .ok_or_else(|| EndError::Absent(name.clone()))?;
        entry.release(kill).map_err(|held| match held {
            Held::Missing(pages) => EndError::Needed { pages },
            Held::Failed(why) => EndError::Failed(why),
            Held::Signal(errno) => EndError::Host(format!("cannot kill the VMM: {errno}")),
            Held::Kernel(why) => EndError::Host(why),
        })?;
        let served = {
            let mut restores = locked(&self.restores);
            match restores.get(name) {
                // Not one that has taken its place meanwhile.
                Some(served) if Arc::ptr_eq(&served.entry, &entry) => restores.remove(name),
                _ => None,
            }
        };
        join(served);
        Ok(())
    }

    /// Waits until a restore's VMM has ended, but at most `limit`. Returns whether it has; a
    /// restore that there is not has ended too.
    #[must_use]
    pub fn wait_ended(&self, name: &Name, limit: Duration) -> bool {
        self.entry(name).is_none_or(|entry| entry.wait_ended(limit))
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        let restores = std::mem::take(&mut *locked(&self.restores));
        for served in restores.values() {
            served.entry.ask_to_stop();
        }
        for served in restores.into_values() {
            join(Some(served));
        }
        // A thread that reads holds the directory until its read is over. The next pager may start
        // at once; but a source that hangs must not hold up the end of the process.
        let deadline = Instant::now() + LEAVE;
        while Arc::strong_count(&self.common.directory) > 1 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Looks at the memory files of all VMs again and again, until the pager has ended.
fn look_at_memory(restores: &Weak<Mutex<Restores>>) {
    while let Some(restores) = restores.upgrade() {
        let entries = entries_of(&restores);
        drop(restores);
        entries.iter().for_each(|entry| entry.look_at_memory());
        drop(entries);
        std::thread::sleep(LOOK);
    }
}

fn entries_of(restores: &Mutex<Restores>) -> Vec<Arc<Entry>> {
    let restores = locked(restores);
    restores
        .values()
        .map(|served| served.entry.clone())
        .collect()
}

/// Waits for the thread of a restore. A panic of it was told when it happened.
fn join(served: Option<Served>) {
    if let Some(thread) = served.and_then(|mut served| served.thread.take()) {
        let _ = thread.join();
    }
}

/// Forgets ended restores beyond those that are shown.
fn forget_ended(restores: &mut Restores) {
    let ended = restores
        .values()
        .filter(|served| served.entry.has_ended())
        .count();
    let mut excess = ended.saturating_sub(MAX_ENDED);
    restores.retain(|_, served| {
        let goes = excess > 0 && served.entry.has_ended();
        excess -= usize::from(goes);
        !goes
    });
}
