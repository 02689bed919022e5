//! The life of one restore: it waits for its VMM, serves its VM, and ends.
//!
//! **Guarantee.** The record on disk is ahead of what is done: whenever the process is killed, the
//! next one finds what it needs to serve the VM. Only a VMM whose handshake was under way has to be
//! started again, and the next pager says so.

use crate::background::{self, Load};
use crate::directory::{Directory, Memory, Record};
use crate::events::{Events, Happened};
use crate::fetch::Fetch;
use crate::fingerprint::{Fingerprint, Stamp};
use crate::handshake::{Handshake, HandshakeError};
use crate::name::Name;
use crate::options::{Background, OnLoss, Restore};
use crate::pager::{Keeper, RestoreError};
use crate::recording::{Recording, Room};
use crate::regions::{Region, Regions};
use crate::serve::{End, recover, serve, wake_all};
use crate::shared::{Ring, Shared};
use crate::source::{self, Source, Stores, is_address};
use crate::status::{Phase, Status, Survival, VmStatus};
use crate::vm::{MemoryFile, Stop, Vm, locked};
use crate::vmm::{self, Vmm};
use pageferry_addr::Hva;
use pageferry_hostfs::{SocketFile, listen_at};
use pageferry_userfault::uffd::Userfaultfd;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use rustix::process::Signal;
use serde_json::json;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

const FOREIGN_PIDS: &str = "the VMM runs in another PID namespace, so this pager cannot watch its \
                            process: let both share one (hostPID, --pid=host)";

/// The parts that all restores of a pager share.
pub(crate) struct Common {
    pub(crate) directory: Arc<Directory>,
    pub(crate) keeper: Option<Box<dyn Keeper>>,
    pub(crate) may_not_take: bool,
    pub(crate) stores: Stores,
    pub(crate) events: Arc<Events>,
}

impl Common {
    fn take(&self, vmm: &Vmm, regions: &[Region]) -> Result<Userfaultfd, String> {
        if self.may_not_take {
            return Err("a filter of system calls forbids pidfd_getfd".to_owned());
        }
        vmm.take_userfaultfd(regions)
    }
}

/// One restore.
pub(crate) struct Entry {
    pub(crate) name: Name,
    pub(crate) restore: Restore,
    /// Nobody waits while he holds its lock, for a file or for another process. So others may look
    /// at any time.
    state: Mutex<State>,
    changed: Condvar,
    /// The record on disk, until it is removed.
    record: Mutex<Option<Record>>,
    pub(crate) load: Arc<Load>,
    /// Its thread and its VM hold it. So a restore that has ended holds no descriptor.
    stop: Weak<Stop>,
    pub(crate) common: Arc<Common>,
}

enum State {
    Waiting {
        fault: Option<String>,
    },
    /// It was released while it waited, and its thread has not ended yet.
    Leaving,
    Serving(Arc<Vm>),
    Failed {
        fault: String,
        vmm: Vmm,
    },
    Ended {
        vm: Option<Box<VmStatus>>,
        fault: Option<String>,
    },
}

impl State {
    const RELEASED: Self = Self::Ended {
        vm: None,
        fault: None,
    };
}

/// Where the thread of a restore begins.
pub(crate) enum Begin {
    /// It waits for a VMM.
    Listen(Box<Prepared>),
    /// It goes on with a VM of a former pager.
    Serve { vm: Arc<Vm>, ring: Ring },
    /// It has nothing to do.
    Nothing,
}

/// The descriptors of a restore that a keeper has kept.
#[derive(Default)]
pub(crate) struct KeptFor {
    pub(crate) uffd: Option<OwnedFd>,
    pub(crate) memory: Option<OwnedFd>,
}

/// The names under which a keeper has the descriptors of a restore.
pub(crate) fn kept_names(name: &Name) -> [String; 2] {
    [name.to_string(), format!("{name}/memory")]
}

impl Entry {
    /// A restore that waits at its socket. Its record is written first.
    pub(crate) fn waiting(
        name: Name,
        fault: Option<String>,
        prepared: &Prepared,
        restore: Restore,
        common: Arc<Common>,
    ) -> io::Result<Arc<Self>> {
        let mut record = Record::new(restore, prepared.source.identity());
        record.stamp = prepared.stamp;
        record.fingerprint = prepared.fingerprint;
        common.directory.write(&name, &record)?;
        common.events.add(&name, Happened::Waiting);
        let state = State::Waiting { fault };
        Ok(Self::with(name, record, state, &prepared.stop, common))
    }

    fn with(
        name: Name,
        record: Record,
        state: State,
        stop: &Arc<Stop>,
        common: Arc<Common>,
    ) -> Arc<Self> {
        Arc::new(Self {
            name,
            restore: record.restore.clone(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            load: Arc::new(Load::new(record.restore.background)),
            record: Mutex::new(Some(record)),
            stop: Arc::downgrade(stop),
            common,
        })
    }

    /// The restore of a former pager whose VM was served. `None` if its VMM has ended.
    pub(crate) fn again(
        name: &Name,
        record: Record,
        memory: &Memory,
        kept: KeptFor,
        common: &Arc<Common>,
    ) -> io::Result<Option<(Arc<Self>, Begin)>> {
        let Some(Ok(vmm)) = record.vmm.map(Vmm::again) else {
            return Ok(None);
        };
        let stop = Arc::new(Stop::new()?);
        let mut survival = Survival::Kept;
        let uffd = match kept.uffd.map(|fd| vmm::adopt(fd, &memory.regions)) {
            Some(Ok(uffd)) => Ok(uffd),
            _ => {
                survival = Survival::Taken;
                common.take(&vmm, &memory.regions)
            }
        };
        if record.released
            && let Ok(uffd) = &uffd
            && unregister(uffd, &memory.regions).is_ok()
        {
            return Ok(None);
        }
        let regions = Regions::new(&memory.regions, memory.page_bytes);
        let state = common
            .directory
            .state(name)
            .and_then(|file| Shared::open(&file, regions.pages()))
            .map_err(|why| format!("the state of the former pager: {why}"));
        let entry = |state| Self::with(name.clone(), record.clone(), state, &stop, common.clone());
        let (uffd, (shared, mut ring)) = match (uffd, state) {
            (Ok(uffd), Ok(state)) => (uffd, state),
            // It has ended meanwhile.
            (Err(_), _) if vmm.has_ended() => return Ok(None),
            (Err(why), _) | (_, Err(why)) => {
                tracing::error!(restore = %name, "its VM cannot be served again: {why}");
                common
                    .events
                    .add(name, Happened::Failed { why: why.clone() });
                if record.restore.on_loss == OnLoss::Kill {
                    // It may have ended meanwhile.
                    let _ = vmm.signal(Signal::KILL);
                }
                let failed = State::Failed { fault: why, vmm };
                return Ok(Some((entry(failed), Begin::Nothing)));
            }
        };
        let is_kept = kept.memory.is_some();
        let memory_file = MemoryFile::new(record.stamp, record.fingerprint, is_kept);
        let source = source::again(&record, &common.stores, memory.bytes(), kept.memory);
        let entry = entry(State::Waiting { fault: None });
        let vm = Arc::new(Vm::new(
            &entry,
            &stop,
            regions,
            (uffd, survival),
            vmm,
            (source, memory_file),
            shared,
        ));
        Fetch::start(&vm)?;
        recover(&vm, &mut ring);
        vm.recover_touches();
        wake_all(&vm);
        *locked(&entry.state) = State::Serving(vm.clone());
        Ok(Some((entry, Begin::Serve { vm, ring })))
    }

    /// Asks its thread to end.
    pub(crate) fn ask_to_stop(&self) {
        if let Some(stop) = self.stop.upgrade() {
            stop.ask();
        }
    }

    /// Changes the record on disk. Returns false if it was removed.
    fn note(&self, change: impl FnOnce(&mut Record)) -> io::Result<bool> {
        let mut record = locked(&self.record);
        let Some(record) = &mut *record else {
            return Ok(false);
        };
        change(record);
        self.common.directory.write(&self.name, record)?;
        Ok(true)
    }

    /// Runs the restore on this thread until it ends or is stopped.
    pub(crate) fn run(&self, begin: Begin) {
        match begin {
            Begin::Listen(prepared) => {
                let prepared = *prepared;
                let Some((vm, mut ring, connection)) = self.accept(&prepared) else {
                    if self.is_leaving() {
                        drop(prepared.file);
                        self.leave();
                    } else {
                        // The next pager listens there.
                        prepared.file.keep();
                    }
                    return;
                };
                // The restore is for one VM: another connect is refused from now on.
                drop((prepared.socket, prepared.file));
                if let Some(room) = prepared.room {
                    room.keep();
                }
                let mut state = locked(&self.state);
                if matches!(*state, State::Leaving) {
                    drop(state);
                    vm.fetch.close();
                    self.leave();
                    return;
                }
                *state = State::Serving(vm.clone());
                drop(state);
                self.changed.notify_all();
                self.tell_serving(&vm, false);
                background::start(&vm, true, prepared.recording);
                self.serve(&vm, &mut ring);
                // Firecracker keeps its end for its whole life: its end would be ours.
                drop(connection);
            }
            Begin::Serve { vm, mut ring } => {
                self.tell_serving(&vm, true);
                background::start(&vm, true, None);
                self.serve(&vm, &mut ring);
            }
            Begin::Nothing => {}
        }
    }

    fn tell(&self, happened: Happened) {
        self.common.events.add(&self.name, happened);
    }

    fn tell_serving(&self, vm: &Vm, taken_over: bool) {
        self.tell(Happened::Serving {
            pid: vm.vmm.identity.pid,
            pages: vm.regions.pages(),
            taken_over,
        });
    }

    fn serve(&self, vm: &Arc<Vm>, ring: &mut Ring) {
        let end = serve(vm, ring);
        let mut unwritten = None;
        if let Some(path) = &self.restore.record {
            let touches = vm.touches();
            let offsets = touches.iter().map(|&page| vm.regions.place_of(page).1);
            let recording = Recording::of(offsets).about(vm.memory.fingerprint);
            if let Err(why) = recording.save(path) {
                let why = format!("cannot write the recording: {why}");
                tracing::error!(restore = %self.name, "{why}");
                unwritten = Some(why);
            }
        }
        let ended = || State::Ended {
            vm: Some(Box::new(VmStatus::of(vm))),
            fault: unwritten.or_else(|| vm.loss()),
        };
        match end {
            // A pager that ends leaves the VM to the next one.
            End::Stopped => {}
            End::Vmm => {
                vm.stop.ask();
                self.forget();
                tracing::info!(restore = %self.name, "the VMM has ended");
                self.become_(ended());
            }
            End::Failed(fault) => {
                tracing::error!(restore = %self.name, "{fault}");
                self.tell(Happened::Failed { why: fault.clone() });
                let vmm = Vmm::again(vm.vmm.identity);
                self.become_(match vmm {
                    Ok(vmm) => State::Failed { fault, vmm },
                    Err(_) => ended(),
                });
            }
        }
    }

    /// Ends a restore that was released while it waited. Only its own thread may: it may just have
    /// written the record.
    fn leave(&self) {
        self.forget();
        self.become_(State::RELEASED);
    }

    fn is_leaving(&self) -> bool {
        matches!(*locked(&self.state), State::Leaving)
    }

    /// Removes what would outlive this process.
    fn forget(&self) {
        if locked(&self.record).take().is_none() {
            return;
        }
        if let Some(keeper) = &self.common.keeper {
            kept_names(&self.name)
                .iter()
                .for_each(|name| keeper.forget(name));
        }
        if let Err(why) = self.common.directory.remove(&self.name) {
            tracing::error!(restore = %self.name, "cannot remove the record: {why}");
        }
    }

    fn become_(&self, state: State) {
        let mut now = locked(&self.state);
        if matches!(state, State::Ended { .. }) && !matches!(*now, State::Ended { .. }) {
            self.tell(Happened::Ended);
        }
        *now = state;
        drop(now);
        self.changed.notify_all();
    }

    /// Waits for a VMM whose handshake holds.
    fn accept(&self, prepared: &Prepared) -> Option<(Arc<Vm>, Ring, OwnedFd)> {
        let stop = &prepared.stop;
        loop {
            let connection = self.next_connection(prepared.socket.as_fd(), stop)?;
            let refusal = match self.shake(connection.as_fd(), prepared) {
                Ok((vm, ring)) => return Some((vm, ring, connection)),
                Err(_) if stop.is_asked() => return None,
                Err(refusal) => refusal,
            };
            // A probe of the socket, such as by another pager, says nothing.
            if refusal != Refusal::Silent {
                let fault = refusal.to_string();
                tracing::error!(restore = %self.name, "handshake refused: {fault}");
                answer(connection.as_fd(), &fault);
                self.tell(Happened::Refused { why: fault.clone() });
                self.become_(State::Waiting { fault: Some(fault) });
            }
            let forgotten = self.note(|record| {
                record.vmm = None;
                record.memory = None;
            });
            if let Err(why) = forgotten {
                tracing::error!(restore = %self.name, "cannot write the record: {why}");
            }
        }
    }

    /// `None` when the restore is to end.
    fn next_connection(&self, socket: BorrowedFd<'_>, stop: &Stop) -> Option<OwnedFd> {
        loop {
            let bell = stop.bell();
            let mut fds = [
                PollFd::new(&socket, PollFlags::IN),
                PollFd::new(&bell, PollFlags::IN),
            ];
            let polled = poll(&mut fds, None);
            if stop.is_asked() {
                return None;
            }
            let accepted = polled
                .and_then(|_| accept_with(socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK));
            match accepted {
                Ok(connection) => return Some(connection),
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
                Err(errno) => {
                    // Such as a limit on descriptors, which may pass.
                    tracing::error!(restore = %self.name, "cannot accept a VMM: {errno}");
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }

    fn shake(
        &self,
        connection: BorrowedFd<'_>,
        prepared: &Prepared,
    ) -> Result<(Arc<Vm>, Ring), Refusal> {
        let Prepared { source, stop, .. } = prepared;
        let cannot =
            |what: &str, why: &dyn std::fmt::Display| Refusal::Other(format!("{what}: {why}"));
        let peer = rustix::net::sockopt::socket_peercred(connection).map_err(|errno| {
            // The kernel says 0 for a process without a number here, and rustix takes it for an
            // error.
            match errno.raw_os_error() {
                0 => Refusal::Other(FOREIGN_PIDS.to_owned()),
                _ => cannot("the peer's process", &errno),
            }
        })?;
        let pid = peer.pid.as_raw_nonzero().get();
        let vmm = Vmm::of_pid(pid).map_err(|errno| {
            let what = format!("the VMM's process {pid} is not visible from here");
            cannot(&what, &errno)
        })?;
        let state = |why: io::Error| cannot("the state of the VM", &why);
        self.note(|record| record.vmm = Some(vmm.identity))
            .map_err(state)?;

        let Handshake {
            regions,
            page_bytes,
            uffd,
        } = Handshake::receive(connection, source.bytes(), Some(stop.bell())).map_err(|why| {
            match why {
                HandshakeError::Ended(0) => Refusal::Silent,
                why => Refusal::Other(why.to_string()),
            }
        })?;
        let survival = self.survival(&vmm, &uffd, &regions);
        let is_kept = match (&self.common.keeper, source.file()) {
            (Some(keeper), Some(file)) => keeper.keep(&kept_names(&self.name)[1], file).is_ok(),
            _ => false,
        };
        let memory_file = MemoryFile::new(prepared.stamp, prepared.fingerprint, is_kept);
        let numbered = Regions::new(&regions, page_bytes);
        let directory = &self.common.directory;
        let (shared, ring) = directory
            .new_state(&self.name)
            .and_then(|file| Shared::create(&file, numbered.pages()))
            .map_err(state)?;
        let memory = Memory {
            page_bytes,
            regions,
        };
        self.note(|record| record.memory = Some(memory))
            .map_err(state)?;
        let vm = Vm::new(
            self,
            stop,
            numbered,
            (uffd, survival),
            vmm,
            (source.clone(), memory_file),
            shared,
        );
        let vm = Arc::new(vm);
        Fetch::start(&vm).map_err(|why| cannot("a thread for reads", &why))?;
        Ok((vm, ring))
    }

    /// Gives the userfaultfd to the keeper, or tries whether it can be taken out of the VMM.
    fn survival(&self, vmm: &Vmm, uffd: &Userfaultfd, regions: &[Region]) -> Survival {
        let kept = match &self.common.keeper {
            Some(keeper) => keeper.keep(&kept_names(&self.name)[0], uffd.as_fd()),
            None => Err("no service manager keeps it".to_owned()),
        };
        let Err(not_kept) = kept else {
            return Survival::Kept;
        };
        match self.common.take(vmm, regions) {
            Ok(_) => Survival::Taken,
            Err(why) => {
                let why = format!("{why}; {not_kept}");
                tracing::warn!(restore = %self.name, "the death of this pager would cost its VM: {why}");
                Survival::Lost(why)
            }
        }
    }

    /// Looks whether the memory file of its VM is still at its path. It may wait for the file
    /// system, so no other answer waits for it.
    pub(crate) fn look_at_memory(&self) {
        let vm = match &*locked(&self.state) {
            State::Serving(vm) => vm.clone(),
            _ => return,
        };
        vm.memory.look(&self.restore.memory);
    }

    /// Sets how the rest of the memory is loaded, also for the next pager. Returns false if the
    /// restore has ended.
    pub(crate) fn set_background(&self, background: Background) -> io::Result<bool> {
        if !self.note(|record| record.restore.background = background)? {
            return Ok(false);
        }
        self.load.set(background);
        let vm = match &*locked(&self.state) {
            State::Serving(vm) => Some(vm.clone()),
            _ => None,
        };
        if let Some(vm) = vm {
            background::start(&vm, false, None);
        }
        Ok(true)
    }

    /// Waits until the restore has ended, but at most `limit`.
    pub(crate) fn wait_ended(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut state = locked(&self.state);
        while !matches!(*state, State::Ended { .. }) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let woken = self.changed.wait_timeout(state, left);
            (state, _) = woken.unwrap_or_else(PoisonError::into_inner);
        }
        true
    }

    pub(crate) fn has_ended(&self) -> bool {
        matches!(*locked(&self.state), State::Ended { .. })
    }

    /// Lets the restore go. Returns the number of pages for which its VM still needs it, if there
    /// are some: then nothing has changed.
    pub(crate) fn release(&self, kill: bool) -> Result<(), Held> {
        let mut state = locked(&self.state);
        match &*state {
            State::Waiting { .. } | State::Leaving => {
                *state = State::Leaving;
                drop(state);
                self.ask_to_stop();
                self.wait_ended(Duration::from_secs(30));
            }
            State::Serving(vm) if kill => {
                vm.vmm.signal(Signal::KILL).map_err(Held::Signal)?;
                drop(state);
                self.wait_ended(Duration::from_secs(30));
            }
            State::Serving(vm) => {
                let vm = vm.clone();
                drop(state);
                let missing = vm.missing();
                if missing > 0 {
                    return Err(Held::Missing(missing));
                }
                // A pager that dies half-way must not be followed by one that registers again:
                // pages that are dropped without a message would be missing for ever.
                self.note(|record| record.released = true)
                    .map_err(|why| Held::Kernel(why.to_string()))?;
                unregister(&vm.uffd, vm.regions.iter()).map_err(Held::Kernel)?;
                vm.released.store(true, Ordering::Release);
                vm.stop.ask();
                self.forget();
            }
            State::Failed { fault, vmm } => {
                if kill {
                    vmm.signal(Signal::KILL).map_err(Held::Signal)?;
                } else if Vmm::again(vmm.identity).is_ok() {
                    return Err(Held::Failed(fault.clone()));
                }
                drop(state);
                self.forget();
            }
            State::Ended { .. } => drop(state),
        }
        self.become_(State::RELEASED);
        Ok(())
    }

    pub(crate) fn status(&self) -> Status {
        let (phase, fault, served, vm) = match &*locked(&self.state) {
            State::Waiting { fault } => (Phase::Waiting, fault.clone(), None, None),
            State::Leaving => (Phase::Waiting, None, None, None),
            State::Serving(vm) => (Phase::Serving, None, Some(vm.clone()), None),
            State::Failed { fault, .. } => (Phase::Failed, Some(fault.clone()), None, None),
            State::Ended { vm, fault } => {
                (Phase::Ended, fault.clone(), None, vm.as_deref().cloned())
            }
        };
        // What a VM needs to be counted takes a while.
        let loss = served.as_ref().and_then(|vm| vm.loss());
        let mut restore = self.restore.clone();
        restore.background = self.load.background();
        Status {
            id: self.name.as_str().to_owned(),
            phase: match loss {
                Some(_) => Phase::Lost,
                None => phase,
            },
            fault: loss.or(fault),
            restore,
            vm: served.map(|vm| VmStatus::of(&vm)).or(vm),
        }
    }
}

/// Lets memory go. Pages that were given back and are touched now become zeros by the kernel.
fn unregister<'a>(
    uffd: &Userfaultfd,
    regions: impl IntoIterator<Item = &'a Region>,
) -> Result<(), String> {
    for region in regions {
        let start = Hva(region.address);
        let ended = uffd.unregister(start, region.size);
        ended.map_err(|why| why.to_string())?;
    }
    Ok(())
}

/// The reason why a restore cannot be let go.
#[derive(Debug)]
pub(crate) enum Held {
    Missing(u64),
    Failed(String),
    Signal(Errno),
    Kernel(String),
}

/// The refusal of a connection.
#[derive(Debug, PartialEq, Eq)]
enum Refusal {
    /// It ended without a byte.
    Silent,
    Other(String),
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Silent => f.write_str("the connection ended without a byte"),
            Self::Other(why) => f.write_str(why),
        }
    }
}

/// Tells a peer why it is refused. Firecracker does not listen; other VMMs may.
fn answer(connection: BorrowedFd<'_>, fault: &str) {
    let text = json!({ "error": fault }).to_string();
    // A peer that does not read has the whole socket buffer, which is larger.
    let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
    let _ = rustix::net::send(connection, text.as_bytes(), flags);
}

/// The parts that a restore needs before its VMM may connect.
pub(crate) struct Prepared {
    socket: UnixListener,
    file: SocketFile,
    pub(crate) source: Arc<dyn Source>,
    stamp: Option<Stamp>,
    fingerprint: Option<Fingerprint>,
    recording: Option<Recording>,
    room: Option<Room>,
    stop: Arc<Stop>,
}

impl Prepared {
    /// Opens the memory and the recordings, then makes the socket.
    pub(crate) fn new(restore: &Restore, stores: &Stores) -> Result<Self, RestoreError> {
        if let Some(path) = restore.relative() {
            return Err(RestoreError::Relative(path));
        }
        let source = stores.open(&restore.memory, restore.format)?;
        if source.bytes() == 0 {
            return Err(RestoreError::Empty(restore.memory.clone()));
        }
        let (replay, record) = (restore.replay.as_deref(), restore.record.as_deref());
        let stamp = match is_address(&restore.memory) {
            true => None,
            false => Stamp::of(&restore.memory).ok(),
        };
        // Only recordings name their snapshot by it.
        let fingerprint = match replay.is_some() || record.is_some() {
            true => Some(Fingerprint::of(&*source)?),
            false => None,
        };
        let recording = replay.map(|path| Recording::load_of(path, fingerprint));
        let recording = recording.transpose()?;
        let (socket, file) = listen_at(&restore.socket, &restore.owner)?;
        let room = record.map(|path| Room::reserve(path, source.bytes()));
        let room = room.transpose()?;
        Ok(Self {
            socket,
            file,
            source,
            stamp,
            fingerprint,
            recording,
            room,
            stop: Arc::new(Stop::new().map_err(io::Error::from)?),
        })
    }
}
