//! All that serves one VM, shared by its threads.

use crate::answer::Placed;
use crate::background::Load;
use crate::directory::Directory;
use crate::events::{Events, Happened};
use crate::fetch::{Fetch, Next};
use crate::figures::Figures;
use crate::fingerprint::{Fingerprint, Stamp};
use crate::name::Name;
use crate::options::{OnLoss, Restore};
use crate::regions::Regions;
use crate::restore::Entry;
use crate::sample::Sample;
use crate::shared::Shared;
use crate::source::{Source, SourceError};
use crate::status::Survival;
use crate::vmm::Vmm;
use pageferry_userfault::uffd::{RangeError, Userfaultfd};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::process::Signal;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// The bytes that come with a touched page if they are at hand: a block of the first length, or of
/// the second for a VM that touches its memory in long runs. 16 KiB cost a VM without any runs four
/// times its memory.
const SHORT: u64 = 16 << 10;
const LONG: u64 = 32 << 10;
/// The touches after which this is decided anew.
const TOUCHES: u32 = 64;
/// The pauses before a call is repeated: a removal is read at once, and memory comes back slowly.
const CHANGE: Duration = Duration::from_micros(50);
const REFUSAL: Duration = Duration::from_millis(10);

/// A request to end, that a `poll(2)` sees.
#[derive(Debug)]
pub(crate) struct Stop {
    asked: AtomicBool,
    bell: OwnedFd,
}

impl Stop {
    pub(crate) fn new() -> Result<Self, Errno> {
        Ok(Self {
            asked: AtomicBool::new(false),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    pub(crate) fn ask(&self) {
        self.asked.store(true, Ordering::Release);
        // A full counter is readable too.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    pub(crate) fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Acquire)
    }

    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

/// A VM that is served.
#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) name: Name,
    pub(crate) restore: Restore,
    pub(crate) regions: Regions,
    pub(crate) uffd: Userfaultfd,
    pub(crate) vmm: Vmm,
    pub(crate) source: Arc<dyn Source>,
    pub(crate) shared: Shared,
    /// Shared while pages are placed, exclusive while messages are read and removals recorded: see
    /// `answer`.
    pub(crate) gate: RwLock<()>,
    pub(crate) fetch: Fetch,
    pub(crate) figures: Figures,
    pub(crate) sample: Sample,
    /// The reason why a page cannot be read, while that is so.
    loss: Mutex<Option<Loss>>,
    /// Pages in the order of their first touches.
    touched: Mutex<Vec<u64>>,
    run: Run,
    /// The way to the userfaultfd for the next pager.
    pub(crate) survival: Survival,
    /// The way to the memory file for the next pager.
    pub(crate) memory: MemoryFile,
    pub(crate) load: Arc<Load>,
    pub(crate) stop: Arc<Stop>,
    /// Whether its memory needs no pager any more. It is set before `stop` is asked.
    pub(crate) released: AtomicBool,
    pub(crate) events: Arc<Events>,
    /// The lock of the directory is held as long as a thread may place a page.
    _directory: Arc<Directory>,
    began: Instant,
    /// The last fault, in microseconds since `began`.
    last_fault: AtomicU64,
}

/// The reason why a page cannot be placed.
#[derive(Debug)]
struct Loss {
    why: String,
    /// Whether it cannot be read. Else the host refuses it.
    is_of_source: bool,
}

/// The memory file of a VM, as the next pager will look for it.
#[derive(Debug, Default)]
pub(crate) struct MemoryFile {
    /// The file at the path, if it is one.
    stamp: Option<Stamp>,
    pub(crate) fingerprint: Option<Fingerprint>,
    /// Whether a keeper has it.
    is_kept: bool,
    is_gone: AtomicBool,
}

impl MemoryFile {
    pub(crate) fn new(
        stamp: Option<Stamp>,
        fingerprint: Option<Fingerprint>,
        is_kept: bool,
    ) -> Self {
        Self {
            stamp,
            fingerprint,
            is_kept,
            is_gone: AtomicBool::new(false),
        }
    }

    /// Looks whether the file is still at its path, which may take long.
    pub(crate) fn look(&self, path: &Path) {
        let is_gone = self.stamp.is_some_and(|stamp| !stamp.is_at(path));
        self.is_gone.store(is_gone, Ordering::Relaxed);
    }
}

impl Vm {
    pub(crate) fn new(
        entry: &Entry,
        stop: &Arc<Stop>,
        regions: Regions,
        (uffd, survival): (Userfaultfd, Survival),
        vmm: Vmm,
        (source, memory): (Arc<dyn Source>, MemoryFile),
        shared: Shared,
    ) -> Self {
        Self {
            name: entry.name.clone(),
            restore: entry.restore.clone(),
            regions,
            uffd,
            vmm,
            source,
            shared,
            gate: RwLock::new(()),
            fetch: Fetch::default(),
            figures: Figures::new(),
            sample: Sample::default(),
            loss: Mutex::new(None),
            touched: Mutex::default(),
            run: Run::default(),
            survival,
            memory,
            load: entry.load.clone(),
            stop: stop.clone(),
            released: AtomicBool::new(false),
            events: entry.common.events.clone(),
            _directory: entry.common.directory.clone(),
            began: Instant::now(),
            last_fault: AtomicU64::new(0),
        }
    }

    /// The cost of the pager's death: the next one needs the userfaultfd and the memory file.
    pub(crate) fn survival(&self) -> Survival {
        match &self.survival {
            Survival::Lost(why) => Survival::Lost(why.clone()),
            _ if !self.memory.is_kept && self.memory.is_gone.load(Ordering::Relaxed) => {
                let path = self.restore.memory.display();
                Survival::Lost(format!(
                    "{path} is not the memory file any more, and no service manager keeps the \
                     file: load all its memory, and end the restore"
                ))
            }
            there => there.clone(),
        }
    }

    /// Remembers a touch of a page that was not there. A page that was given back is no part of the
    /// snapshot.
    pub(crate) fn touched(&self, page: u64) {
        let now = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.last_fault.store(now, Ordering::Relaxed);
        let here = self.regions.block_of(page, self.run.bytes());
        let there = |page| self.shared.placed().test(page);
        let before = here.start > 0 && there(here.start - 1);
        self.run
            .touched(before || here.end < self.regions.pages() && there(here.end));
        if self.restore.replay.is_some() {
            self.sample.touched(page);
        }
        if self.restore.record.is_some() && !self.shared.removed().test(page) {
            locked(&self.touched).push(page);
        }
    }

    /// Counts the pages that a former pager placed as touched, in their order in memory: nobody
    /// knows the order of their touches any more.
    pub(crate) fn recover_touches(&self) {
        let (placed, removed) = (self.shared.placed(), self.shared.removed());
        let there = |page: &u64| placed.test(*page) && !removed.test(*page);
        if self.restore.record.is_some() {
            *locked(&self.touched) = (0..self.regions.pages()).filter(there).collect();
        }
    }

    /// The pages in the order of their first touches.
    pub(crate) fn touches(&self) -> Vec<u64> {
        locked(&self.touched).clone()
    }

    /// The time since the last fault.
    pub(crate) fn idle_for(&self) -> Duration {
        let last = Duration::from_micros(self.last_fault.load(Ordering::Relaxed));
        self.began.elapsed().saturating_sub(last)
    }

    /// The bytes of a page could not be read. The first failure of a loss acts on the VM.
    pub(crate) fn source_failed(&self, why: &SourceError) {
        self.figures.source_errors.add(1);
        let mut loss = locked(&self.loss);
        if !loss.as_ref().is_some_and(|loss| loss.is_of_source) {
            let signal = match self.restore.on_loss {
                OnLoss::Wait => None,
                OnLoss::Kill => Some(Signal::KILL),
                OnLoss::Pause => Some(Signal::STOP),
            };
            tracing::error!(restore = %self.name, on_loss = ?self.restore.on_loss, "{why}");
            if let Some(Err(errno)) = signal.map(|signal| self.vmm.signal(signal)) {
                tracing::error!(restore = %self.name, "cannot signal the VMM: {errno}");
            }
        }
        self.lose(&mut loss, why.to_string(), true);
    }

    /// Notes a loss, and tells of it unless it is known.
    fn lose(&self, loss: &mut Option<Loss>, why: String, is_of_source: bool) {
        if loss.as_ref().is_none_or(|known| known.why != why) {
            let why = why.clone();
            self.events.add(&self.name, Happened::Lost { why });
        }
        *loss = Some(Loss { why, is_of_source });
    }

    /// A read has succeeded. A VM that was paused stays so: its operator resumes it.
    pub(crate) fn source_works(&self) {
        let mut loss = locked(&self.loss);
        if loss.take().is_some() {
            tracing::warn!(restore = %self.name, "the source can be read again");
            self.events.add(&self.name, Happened::Found);
        }
    }

    /// Waits, unless the VM or the pager ends before.
    pub(crate) fn pause(&self, time: Duration) -> Next {
        let deadline = Instant::now() + time;
        while !self.stop.is_asked() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Next::Go;
            }
            std::thread::sleep(left.min(Duration::from_millis(20)));
        }
        Next::End
    }

    /// The reason why a page cannot be read now.
    pub(crate) fn loss(&self) -> Option<String> {
        locked(&self.loss).as_ref().map(|loss| loss.why.clone())
    }

    /// The pages that have not come yet. Pages given back need none.
    pub(crate) fn missing(&self) -> u64 {
        let (placed, removed) = (self.shared.placed(), self.shared.removed());
        let both = placed.0.iter().zip(removed.0).map(|(placed, removed)| {
            let word = placed.load(Ordering::Relaxed) | removed.load(Ordering::Relaxed);
            u64::from(word.count_ones())
        });
        self.regions.pages() - both.sum::<u64>()
    }

    /// The host refused a page, such as for want of memory in the VMM's control group.
    pub(crate) fn host_refused(&self, why: &RangeError) {
        let mut loss = locked(&self.loss);
        if loss.is_none() {
            tracing::error!(restore = %self.name, "{why}");
            self.lose(&mut loss, why.to_string(), false);
        }
    }

    /// Places pages until the kernel has taken all of them. `bytes` are those of the source, or
    /// `None` for zeros. It may wait for the thread that reads messages, which never calls it.
    /// Returns the number of pages that it placed, or `None` once the VM has ended.
    pub(crate) fn place_all(&self, pages: Range<u64>, bytes: Option<&[u8]>) -> Option<u64> {
        let (mut from, mut fresh) = (pages.start, 0);
        loop {
            let at = ((from - pages.start) * self.regions.page_bytes()) as usize;
            let attempt = self.place(from..pages.end, bytes.map(|bytes| &bytes[at..]));
            fresh += attempt.fresh;
            from = match attempt.how {
                Placed::All => return Some(fresh),
                Placed::Gone => return None,
                Placed::Changing(page) => {
                    std::thread::sleep(CHANGE);
                    page
                }
                Placed::Refused(page) => {
                    std::thread::sleep(REFUSAL);
                    page
                }
            };
            if self.stop.is_asked() {
                return None;
            }
        }
    }

    /// The pages that come with `page`: its neighbours, within `limit`. While touches are recorded
    /// it comes alone, since a touch of a page that is there is not seen.
    pub(crate) fn around(&self, page: u64, limit: &Range<u64>) -> Range<u64> {
        let bytes = match self.restore.record {
            Some(_) => 0,
            None => self.run.bytes(),
        };
        let around = self.regions.block_of(page, bytes);
        around.start.max(limit.start)..around.end.min(limit.end)
    }
}

/// The length of what comes with a touched page.
///
/// **Mechanism.** A touch beside pages that are there belongs to a run that is longer than what
/// came. The length changes if more than half of the touches do, or less than a quarter.
#[derive(Debug, Default)]
struct Run {
    is_long: AtomicBool,
    touches: AtomicU32,
    beside: AtomicU32,
}

impl Run {
    fn bytes(&self) -> u64 {
        match self.is_long.load(Ordering::Relaxed) {
            true => LONG,
            false => SHORT,
        }
    }

    /// Only the thread that reads messages calls it.
    fn touched(&self, beside: bool) {
        self.beside.fetch_add(beside.into(), Ordering::Relaxed);
        if self.touches.fetch_add(1, Ordering::Relaxed) + 1 < TOUCHES {
            return;
        }
        self.touches.store(0, Ordering::Relaxed);
        let beside = self.beside.swap(0, Ordering::Relaxed);
        if beside > TOUCHES / 2 {
            self.is_long.store(true, Ordering::Relaxed);
        } else if beside < TOUCHES / 4 {
            self.is_long.store(false, Ordering::Relaxed);
        }
    }
}

/// Locks a mutex whose data are whole after each statement.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::restore::{Common, Prepared};
    use crate::source::Stores;
    use pageferry_addr::Hva;
    use pageferry_userfault::uffd::{Features, RangeOp};
    use rustix::fs::{MemfdFlags, memfd_create};
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command};

    /// A process that ends with its test.
    struct Sleep(Child);

    impl Drop for Sleep {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_source_that_fails_behind_a_refusal_of_the_host_kills_too() {
        let Ok(uffd) = Userfaultfd::open(Features::empty()) else {
            pageferry_testkit::skip("uffd", "not permitted");
            return;
        };
        let pid = std::process::id();
        let scratch = std::env::temp_dir().join(format!("pageferry-loss-{pid}"));
        std::fs::create_dir(&scratch).unwrap();
        let path = scratch.join("memory");
        std::fs::write(&path, [7; 4096]).unwrap();
        let mut restore = Restore::new(&path, scratch.join("socket"));
        restore.on_loss = OnLoss::Kill;
        let prepared = Prepared::new(&restore, &Stores::default()).unwrap();
        let common = Arc::new(Common {
            directory: Arc::new(Directory::take(&scratch.join("state"), false).unwrap()),
            keeper: None,
            may_not_take: false,
            stores: Stores::default(),
            events: Arc::default(),
        });
        let name: Name = "web".parse().unwrap();
        let entry = Entry::waiting(name, None, &prepared, restore, common).unwrap();
        let mut child = Sleep(Command::new("sleep").arg("600").spawn().unwrap());
        let file = memfd_create("state", MemfdFlags::CLOEXEC).unwrap().into();
        let vm = Vm::new(
            &entry,
            &Arc::new(Stop::new().unwrap()),
            Regions::new(&[], 4096),
            (uffd, Survival::Kept),
            Vmm::of_pid(child.0.id() as i32).unwrap(),
            (prepared.source.clone(), MemoryFile::default()),
            Shared::create(&file, 0).unwrap().0,
        );
        vm.host_refused(&RangeError {
            op: RangeOp::Copy,
            start: Hva(4096),
            len: 4096,
            done: 0,
            errno: Errno::NOMEM,
        });
        assert!(vm.loss().is_some() && child.0.try_wait().unwrap().is_none());
        vm.source_failed(&SourceError::Short {
            what: "memory".to_owned(),
            end: 4096,
        });
        let ended =
            pageferry_testkit::wait_for("the VMM to be killed", || child.0.try_wait().unwrap());
        assert_eq!(ended.signal(), Some(Signal::KILL.as_raw()));
        std::fs::remove_dir_all(scratch).unwrap();
    }
}
