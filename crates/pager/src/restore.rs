//! The life of one restore: it waits for its VMM, serves its VM, and ends.
//!
//! **Guarantee.** The record on disk is ahead of what is done: whenever the process is killed, the
//! next one finds what it needs to serve the VM. Only a VMM whose handshake was under way has to be
//! started again, and the next pager says so.

use crate::background;
use crate::directory::{Directory, Memory, Record};
use crate::events::{Events, Happened};
use crate::fetch::Fetch;
use crate::handshake::{Handshake, HandshakeError};
use crate::name::Name;
use crate::options::{OnLoss, Restore};
use crate::pager::{Keeper, RestoreError};
use crate::recording::Recording;
use crate::regions::{Region, Regions};
use crate::serve::{End, recover, serve, wake_all};
use crate::shared::{Ring, Shared};
use crate::source::{self, Source, Stores};
use crate::status::{Phase, Status, Survival, VmStatus};
use crate::vm::{Stop, Vm, locked};
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
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

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
    restore: Restore,
    state: Mutex<State>,
    changed: Condvar,
    pub(crate) stop: Arc<Stop>,
    common: Arc<Common>,
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
    Ended(Option<Box<VmStatus>>),
}

/// Where the thread of a restore begins.
pub(crate) enum Begin {
    /// It waits for a VMM.
    Listen(Prepared),
    /// It goes on with a VM of a former pager.
    Serve { vm: Arc<Vm>, ring: Ring },
    /// It has nothing to do.
    Nothing,
}

impl Entry {
    /// A restore that waits at its socket.
    pub(crate) fn waiting(
        name: Name,
        restore: Restore,
        fault: Option<String>,
        common: Arc<Common>,
    ) -> Result<Arc<Self>, Errno> {
        common.events.add(&name, Happened::Waiting);
        Self::with(name, restore, State::Waiting { fault }, common)
    }

    fn with(
        name: Name,
        restore: Restore,
        state: State,
        common: Arc<Common>,
    ) -> Result<Arc<Self>, Errno> {
        Ok(Arc::new(Self {
            name,
            restore,
            state: Mutex::new(state),
            changed: Condvar::new(),
            stop: Arc::new(Stop::new()?),
            common,
        }))
    }

    /// The restore of a former pager whose VM was served. `None` if its VMM has ended.
    pub(crate) fn again(
        name: &Name,
        record: Record,
        memory: &Memory,
        kept: Option<OwnedFd>,
        common: &Arc<Common>,
    ) -> io::Result<Option<(Arc<Self>, Begin)>> {
        let Some(Ok(vmm)) = record.vmm.map(Vmm::again) else {
            return Ok(None);
        };
        let stop = Arc::new(Stop::new()?);
        let restore = record.restore;
        let entry = |state| {
            Arc::new(Self {
                name: name.clone(),
                restore: restore.clone(),
                state: Mutex::new(state),
                changed: Condvar::new(),
                stop: stop.clone(),
                common: common.clone(),
            })
        };
        let mut survival = Survival::Kept;
        let uffd = match kept.map(|fd| vmm::adopt(fd, &memory.regions)) {
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
        let (uffd, (shared, mut ring)) = match (uffd, state) {
            (Ok(uffd), Ok(state)) => (uffd, state),
            // It has ended meanwhile.
            (Err(_), _) if vmm.has_ended() => return Ok(None),
            (Err(why), _) | (_, Err(why)) => {
                tracing::error!(restore = %name, "its VM cannot be served again: {why}");
                common
                    .events
                    .add(name, Happened::Failed { why: why.clone() });
                if restore.on_loss == OnLoss::Kill {
                    // It may have ended meanwhile.
                    let _ = vmm.signal(Signal::KILL);
                }
                let failed = State::Failed { fault: why, vmm };
                return Ok(Some((entry(failed), Begin::Nothing)));
            }
        };
        let bytes = memory
            .regions
            .iter()
            .map(|region| region.offset + region.size);
        let source = source::again(
            &restore,
            &common.stores,
            record.source,
            bytes.max().unwrap_or(0),
        );
        let vm = Arc::new(Vm::new(
            name.clone(),
            restore.clone(),
            regions,
            uffd,
            vmm,
            source,
            shared,
            survival,
            stop.clone(),
            common.directory.clone(),
            common.events.clone(),
        ));
        Fetch::start(&vm)?;
        recover(&vm, &mut ring);
        vm.recover_touches();
        wake_all(&vm);
        let serving = State::Serving(vm.clone());
        Ok(Some((entry(serving), Begin::Serve { vm, ring })))
    }

    /// Runs the restore on this thread until it ends or is stopped.
    pub(crate) fn run(&self, begin: Begin) {
        match begin {
            Begin::Listen(prepared) => {
                let accepted = self.accept(&prepared.socket, &prepared.source);
                let Some((vm, mut ring, connection)) = accepted else {
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
                background::start(&vm, prepared.recording);
                self.serve(&vm, &mut ring);
                // Firecracker keeps its end for its whole life: its end would be ours.
                drop(connection);
            }
            Begin::Serve { vm, mut ring } => {
                self.tell_serving(&vm, true);
                background::start(&vm, None);
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
        if let Some(path) = &self.restore.record {
            let touches = vm.touches();
            let offsets = touches.iter().map(|&page| vm.regions.place_of(page).1);
            if let Err(why) = Recording::of(offsets).save(path) {
                tracing::error!(restore = %self.name, "cannot write the recording: {why}");
            }
        }
        match end {
            // A pager that ends leaves the VM to the next one.
            End::Stopped => {}
            End::Vmm => {
                vm.stop.ask();
                self.forget();
                tracing::info!(restore = %self.name, "the VMM has ended");
                self.become_(State::Ended(Some(Box::new(VmStatus::of(vm)))));
            }
            End::Failed(fault) => {
                tracing::error!(restore = %self.name, "{fault}");
                self.tell(Happened::Failed { why: fault.clone() });
                let vmm = Vmm::again(vm.vmm.identity);
                self.become_(match vmm {
                    Ok(vmm) => State::Failed { fault, vmm },
                    Err(_) => State::Ended(Some(Box::new(VmStatus::of(vm)))),
                });
            }
        }
    }

    /// Ends a restore that was released while it waited. Only its own thread may: it may just have
    /// written the record.
    fn leave(&self) {
        self.forget();
        self.become_(State::Ended(None));
    }

    fn is_leaving(&self) -> bool {
        matches!(*locked(&self.state), State::Leaving)
    }

    /// Removes what would outlive this process.
    fn forget(&self) {
        if let Some(keeper) = &self.common.keeper {
            keeper.forget(self.name.as_str());
        }
        if let Err(why) = self.common.directory.remove(&self.name) {
            tracing::error!(restore = %self.name, "cannot remove the record: {why}");
        }
    }

    fn become_(&self, state: State) {
        let mut now = locked(&self.state);
        if matches!(state, State::Ended(_)) && !matches!(*now, State::Ended(_)) {
            self.tell(Happened::Ended);
        }
        *now = state;
        drop(now);
        self.changed.notify_all();
    }

    /// Waits for a VMM whose handshake holds.
    fn accept(
        &self,
        socket: &UnixListener,
        source: &Arc<dyn Source>,
    ) -> Option<(Arc<Vm>, Ring, OwnedFd)> {
        let mut record = Record::new(self.restore.clone(), source.identity());
        loop {
            let connection = self.next_connection(socket.as_fd())?;
            let refusal = match self.shake(connection.as_fd(), &mut record, source) {
                Ok((vm, ring)) => return Some((vm, ring, connection)),
                Err(_) if self.stop.is_asked() => return None,
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
            record.vmm = None;
            record.memory = None;
            if let Err(why) = self.common.directory.write(&self.name, &record) {
                tracing::error!(restore = %self.name, "cannot write the record: {why}");
            }
        }
    }

    /// `None` when the restore is to end.
    fn next_connection(&self, socket: BorrowedFd<'_>) -> Option<OwnedFd> {
        loop {
            let bell = self.stop.bell();
            let mut fds = [
                PollFd::new(&socket, PollFlags::IN),
                PollFd::new(&bell, PollFlags::IN),
            ];
            let polled = poll(&mut fds, None);
            if self.stop.is_asked() {
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
        record: &mut Record,
        source: &Arc<dyn Source>,
    ) -> Result<(Arc<Vm>, Ring), Refusal> {
        let cannot =
            |what: &str, why: &dyn std::fmt::Display| Refusal::Other(format!("{what}: {why}"));
        let peer = rustix::net::sockopt::socket_peercred(connection)
            .map_err(|errno| cannot("the peer's process", &errno))?;
        let pid = peer.pid.as_raw_nonzero().get();
        let vmm = Vmm::of_pid(pid).map_err(|errno| {
            let what = format!("the VMM's process {pid} is not visible from here");
            cannot(&what, &errno)
        })?;
        record.vmm = Some(vmm.identity);
        let directory = &self.common.directory;
        let state = |why: io::Error| cannot("the state of the VM", &why);
        directory.write(&self.name, record).map_err(state)?;

        let stop = Some(self.stop.bell());
        let Handshake {
            regions,
            page_bytes,
            uffd,
        } = Handshake::receive(connection, source.bytes(), stop).map_err(|why| match why {
            HandshakeError::Ended(0) => Refusal::Silent,
            why => Refusal::Other(why.to_string()),
        })?;
        let survival = self.survival(&vmm, &uffd, &regions);
        let numbered = Regions::new(&regions, page_bytes);
        let (shared, ring) = directory
            .new_state(&self.name)
            .and_then(|file| Shared::create(&file, numbered.pages()))
            .map_err(state)?;
        record.memory = Some(Memory {
            page_bytes,
            regions,
        });
        directory.write(&self.name, record).map_err(state)?;
        let vm = Vm::new(
            self.name.clone(),
            self.restore.clone(),
            numbered,
            uffd,
            vmm,
            source.clone(),
            shared,
            survival,
            self.stop.clone(),
            directory.clone(),
            self.common.events.clone(),
        );
        let vm = Arc::new(vm);
        Fetch::start(&vm).map_err(|why| cannot("a thread for reads", &why))?;
        Ok((vm, ring))
    }

    /// Gives the userfaultfd to the keeper, or tries whether it can be taken out of the VMM.
    fn survival(&self, vmm: &Vmm, uffd: &Userfaultfd, regions: &[Region]) -> Survival {
        let kept = match &self.common.keeper {
            Some(keeper) => keeper.keep(self.name.as_str(), uffd.as_fd()),
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

    /// Waits until the restore has ended, but at most `limit`.
    pub(crate) fn wait_ended(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut state = locked(&self.state);
        while !matches!(*state, State::Ended(_)) {
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
        matches!(*locked(&self.state), State::Ended(_))
    }

    /// Lets the restore go. Returns the number of pages for which its VM still needs it, if there
    /// are some: then nothing has changed.
    pub(crate) fn release(&self, kill: bool) -> Result<(), Held> {
        let mut state = locked(&self.state);
        match &*state {
            State::Waiting { .. } | State::Leaving => {
                *state = State::Leaving;
                drop(state);
                self.stop.ask();
                self.wait_ended(Duration::from_secs(30));
            }
            State::Serving(vm) if kill => {
                vm.vmm.signal(Signal::KILL).map_err(Held::Signal)?;
                drop(state);
                self.wait_ended(Duration::from_secs(30));
            }
            State::Serving(vm) => {
                let missing = vm.missing();
                if missing > 0 {
                    return Err(Held::Missing(missing));
                }
                // A pager that dies half-way must not be followed by one that registers again:
                // pages that are dropped without a message would be missing for ever.
                let directory = &self.common.directory;
                directory
                    .read(&self.name)
                    .and_then(|mut record| {
                        record.released = true;
                        let written = directory.write(&self.name, &record);
                        written.map_err(|why| why.to_string())
                    })
                    .and_then(|()| unregister(&vm.uffd, vm.regions.iter()))
                    .map_err(Held::Kernel)?;
                vm.released.store(true, Ordering::Release);
                self.stop.ask();
                drop(state);
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
            State::Ended(_) => {}
        }
        self.become_(State::Ended(None));
        Ok(())
    }

    pub(crate) fn status(&self) -> Status {
        let state = locked(&self.state);
        let (phase, fault, vm) = match &*state {
            State::Waiting { fault } => (Phase::Waiting, fault.clone(), None),
            State::Leaving => (Phase::Waiting, None, None),
            State::Serving(vm) => {
                let loss = vm.loss();
                let phase = if loss.is_some() {
                    Phase::Lost
                } else {
                    Phase::Serving
                };
                (phase, loss, Some(VmStatus::of(vm)))
            }
            State::Failed { fault, .. } => (Phase::Failed, Some(fault.clone()), None),
            State::Ended(vm) => (Phase::Ended, None, vm.as_deref().cloned()),
        };
        Status {
            id: self.name.as_str().to_owned(),
            phase,
            fault,
            restore: self.restore.clone(),
            vm,
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
    recording: Option<Recording>,
}

impl Prepared {
    /// Opens the memory and the recording, then makes the socket.
    pub(crate) fn new(restore: &Restore, stores: &Stores) -> Result<Self, RestoreError> {
        let source = stores.open(&restore.memory, restore.format)?;
        let recording = restore.replay.as_deref().map(Recording::load).transpose()?;
        let (socket, file) = listen_at(&restore.socket, &restore.owner)?;
        Ok(Self {
            socket,
            file,
            source,
            recording,
        })
    }
}
