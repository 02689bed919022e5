//! A Cloud Hypervisor process that receives a VM whose pages come later.
//!
//! **Guarantee.** A page fault is answered once, and when the caller has the right bytes in place.
//! That holds over the death of our process, too. Each step that the process carries out alone has
//! a limit.
//!
//! **Mechanism.** The process gets memfds of ours and Config by its own migration protocol, and
//! then the connection for page faults. The caller says State and Complete on `main`. It writes
//! pages into `ram`, which is the same memory.
//!
//! **Neighbours.** `kept` has what outlives our process. `destination` brings the pages of a
//! migration, `restore` those of a snapshot.
#![expect(unsafe_code, reason = "shares memory with another VMM")]

use super::check_receiver;
use super::kept::{Answers, Main};
use super::link::{Limit, Link};
use super::wire::{Command as VmmCommand, FAULT_CONNECTION, Mapping, Range};
use crate::foreign::api::{Api, Call, Meeting};
use crate::foreign::keeper::End;
use crate::foreign::kept::Kept;
use crate::foreign::{LOAD_LIMIT, STEP_LIMIT, VmmError, smaps};
use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};
use pageferry_machine::{AdoptedRegion, GuestRam};
use pageferry_pager::Ring;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::process::Pid;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tracing::info;

/// A process that has its memory and Config.
pub(super) struct Receiver {
    /// The VM's memory, by our own mapping.
    pub(super) ram: Arc<GuestRam>,
    pub(super) api: Api,
    /// The connection for State and Complete.
    pub(super) main: Link,
    faults: Link,
    pub(super) answers: Answers,
    _meeting: Option<Meeting>,
    /// The wait for the answer to `vm.receive-migration`.
    call: Option<Mutex<Call>>,
    /// The process, if it is visible here.
    process: Option<Pid>,
}

/// The descriptors in front of those of RAM: the connections for faults and commands, and the ends
/// of a pipe.
const OF_VMM: usize = 4;

/// The state that is to outlive our process.
pub(super) struct Keep<'a> {
    /// The record of what brings the pages: a session, or a snapshot.
    pub(super) record: &'a [u8],
    pub(super) end: End,
    /// The command of a process that keeps the descriptors: see [`keep`](crate::foreign::keep).
    pub(super) keeper: Option<&'a mut Command>,
}

/// How the service of page faults has ended.
pub(super) enum Ended {
    /// The process has closed the connection.
    Closed,
    /// A page never comes. An answer would pass off a wrong one, and the end of the connection
    /// would end the VM. So the request stands.
    Unanswered,
}

/// The name of the memfds of guest memory.
const MEMFD_NAME: &str = "pageferry-ch";

/// The memfd of a mapping.
fn memfd(mapping: &Mapping) -> Result<OwnedFd, VmmError> {
    let failed = |e| VmmError::io("cannot make a memfd for guest memory", e);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create(MEMFD_NAME, flags).map_err(failed)?;
    let size = mapping.file_offset + mapping.size;
    rustix::fs::ftruncate(&fd, size).map_err(failed)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).map_err(failed)?;
    Ok(fd)
}

/// Our own mapping of the memfds.
fn adopt(mappings: &[Mapping], fds: &[OwnedFd]) -> Result<Arc<GuestRam>, VmmError> {
    let regions = mappings.iter().zip(fds).map(|(mapping, fd)| {
        let fd = fd.try_clone();
        let fd = fd.map_err(|e| VmmError::io("cannot clone a memfd", e))?;
        let start = Gpa(mapping.gpa);
        Ok(AdoptedRegion::new(
            start,
            mapping.size,
            fd,
            mapping.file_offset,
        ))
    });
    let regions = regions.collect::<Result<_, VmmError>>()?;
    // SAFETY: the memfds are ours, new or of a process that is gone. The VMM that has them touches
    // them by the vCPUs and devices of its VM only, and these wait at missing pages by userfaultfd.
    Ok(Arc::new(unsafe { GuestRam::adopt(regions) }?))
}

/// Checks, for a process that has loaded State, that the kernel tells it of each page that is
/// absent (`um` in the flags of a mapping) and of each that lies in the page cache (`ui`). Without
/// the latter it would find stale bytes. A process that is not visible here is known by its
/// version.
fn check_asks(process: Option<Pid>) -> Result<(), VmmError> {
    let smaps = process.and_then(smaps::read).unwrap_or_default();
    for (mapping, field, words) in smaps::fields(&smaps) {
        let asks = || {
            let flags: Vec<_> = words.collect();
            ["um", "ui"].iter().all(|flag| flags.contains(flag))
        };
        if field == "VmFlags:" && mapping.contains(MEMFD_NAME) && !asks() {
            let why = "Cloud Hypervisor does not ask for each page: its userfaultfd has no minor \
                       faults";
            return Err(VmmError::Version(why.into()));
        }
    }
    Ok(())
}

impl Receiver {
    /// Gives the process its memory and Config.
    pub(super) fn prepare(
        api: &Path,
        mappings: &[Mapping],
        config: &[u8],
        keep: Keep<'_>,
        stop: &dyn Fn() -> bool,
    ) -> Result<Self, VmmError> {
        let api = Api::new(api)?;
        let process = check_receiver(&api)?;
        let meeting = Meeting::beside(api.path())?;
        let fds: Vec<_> = mappings.iter().map(memfd).collect::<Result<_, _>>()?;
        let ram = adopt(mappings, &fds)?;
        let mut answers = Answers::new(ram.pages(), keep.record)?;
        let body = serde_json::json!({
            "receiver_url": meeting.url(),
            "memory_mode": "Postcopy",
        });
        let mut call = api.begin("PUT /api/v1/vm.receive-migration", Some(&body))?;
        let stream = call.until("listen", STEP_LIMIT, stop, || {
            match UnixStream::connect(&meeting.socket) {
                Ok(stream) => Ok(Some(stream)),
                Err(e) => match e.kind() {
                    std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused => {
                        Ok(None)
                    }
                    _ => Err(VmmError::io("cannot connect to Cloud Hypervisor", e)),
                },
            }
        })?;
        let main = Link::new(stream)?;
        let limit = Limit::new(STEP_LIMIT);
        main.begin(VmmCommand::Start, &[], "start", STEP_LIMIT)?;
        main.expect_ok("start a migration", limit)?;
        for (mapping, fd) in mappings.iter().zip(&fds) {
            main.begin_memory_fd(mapping.slot, fd.as_fd())?;
            main.expect_ok("take a memfd", limit)?;
        }
        main.begin(VmmCommand::Config, config, "take Config", STEP_LIMIT)?;
        main.expect_ok("take the VM's Config", limit)?;
        let faults = UnixStream::connect(&meeting.socket)
            .map_err(|e| VmmError::io("cannot open the connection for page faults", e))?;
        let faults = Link::new(faults)?;
        faults.send(&FAULT_CONNECTION.to_le_bytes(), "take page faults")?;
        info!("the receiving Cloud Hypervisor takes the VM's Config");
        let Answers { kept, pipe, .. } = &mut answers;
        let of_vmm = [faults.as_fd(), main.as_fd(), pipe.0.as_fd(), pipe.1.as_fd()];
        let of_vmm = of_vmm.into_iter().chain(fds.iter().map(AsFd::as_fd));
        let places = (api.path(), meeting.folder.path());
        kept.keep(keep.keeper, keep.end, places, of_vmm)?;
        Ok(Self {
            ram,
            api,
            main,
            faults,
            answers,
            _meeting: Some(meeting),
            call: Some(Mutex::new(call)),
            process,
        })
    }

    /// The process of a VM that another process of ours has left behind.
    pub(super) fn found(
        api: &Path,
        (kept, ring): (Kept, Ring),
        fds: Vec<OwnedFd>,
        mappings: &[Mapping],
    ) -> Result<Self, VmmError> {
        let (found, expected) = (fds.len(), OF_VMM + mappings.len());
        let mut fds = fds.into_iter();
        let mut next = || fds.next().filter(|_| found == expected);
        let (Some(faults), Some(main), Some(out), Some(into)) = (next(), next(), next(), next())
        else {
            let why = format!("{found} descriptors, expected {expected}");
            return Err(VmmError::Kept(why));
        };
        let memfds: Vec<OwnedFd> = fds.collect();
        Ok(Self {
            ram: adopt(mappings, &memfds)?,
            api: Api::new(api)?,
            main: Link::new(main.into())?,
            faults: Link::new(faults.into())?,
            answers: Answers::of(kept, ring, (out, into)),
            _meeting: None,
            call: None,
            process: None,
        })
    }

    /// Lets the process load State, which may need pages: vCPUs first, then devices, then locks.
    /// Without `in_blackout` it may take any time.
    pub(super) fn load(&self, state: &[u8], in_blackout: bool) -> Result<(), VmmError> {
        const WHAT: &str = "load State";
        let limit = in_blackout.then(|| Limit::new(LOAD_LIMIT));
        self.main
            .begin(VmmCommand::State, state, WHAT, STEP_LIMIT)?;
        let loaded = self.main.expect_ok(WHAT, limit);
        loaded.map_err(|error| match error {
            VmmError::Refused(what, _) => VmmError::Refused(what, self.reason()),
            other => other,
        })?;
        // A process that has all pages drops its userfaultfd: so the flags are read first.
        let asks = check_asks(self.process);
        match self.answers.asked() == self.ram.pages() {
            true => Ok(()),
            false => asks,
        }
    }

    /// The process's own words for its refusal, which the answer of its API has.
    fn reason(&self) -> String {
        let call = self.call.iter();
        let call = call.map(|call| call.lock().unwrap_or_else(PoisonError::into_inner));
        let answered = call.map(|mut call| call.wait(Duration::from_secs(1)));
        match answered.last() {
            Some(Err(VmmError::Api { body, .. })) => format!(": {body}"),
            _ => String::new(),
        }
    }

    /// Lets the VM go, and waits for the answer, which may need pages. Begins where a process
    /// before this one has ended.
    pub(super) fn complete(&self, paused: bool) -> Result<(), VmmError> {
        let (main, kept) = (&self.main, &self.answers);
        if kept.main() == Main::Loaded {
            let command = match paused {
                true => VmmCommand::CompletePaused,
                false => VmmCommand::Complete,
            };
            // A process that dies here says it twice. Cloud Hypervisor reads no command behind it.
            main.begin(command, &[], "complete", STEP_LIMIT)?;
            kept.set_main(Main::Complete);
        }
        if kept.main() == Main::Complete {
            main.await_ok("complete")?;
            kept.set_main(Main::Completed);
        }
        Ok(())
    }

    /// Answers page faults until the process has no more. `bring` puts pages in place, and returns
    /// false if they never come.
    pub(super) fn answer_faults(
        &self,
        bring: &dyn Fn(RamPage, u64) -> bool,
    ) -> Result<Ended, VmmError> {
        while let Some((request, range)) = self.answers.request(&self.faults)? {
            match request.command {
                VmmCommand::PageFault => {}
                VmmCommand::Abandon => {
                    self.answers.answer(&self.faults)?;
                    return Err(VmmError::Abandoned);
                }
                other => {
                    return Err(VmmError::Order {
                        found: format!("{other:?}"),
                        expected: "PageFault",
                    });
                }
            }
            let range = Range::decode(range)?;
            let first = self.page_of(range)?;
            if !bring(first, range.length / PAGE_SIZE) {
                return Ok(Ended::Unanswered);
            }
            // The process maps what is in the page cache, and a zero page may not be.
            let pages = range.length / PAGE_SIZE;
            self.ram.allocate_range(first, pages)?;
            // Before the answer: a process that died behind it has counted them.
            self.answers.ask(first, pages);
            self.answers.answer(&self.faults)?;
        }
        Ok(Ended::Closed)
    }

    /// The first page of a range, which lies in one region of RAM.
    fn page_of(&self, range: Range) -> Result<RamPage, VmmError> {
        let regions = self.ram.layout().regions().iter();
        let page = regions.into_iter().find_map(|region| {
            let offset = range.gpa.checked_sub(region.gfn.gpa().0)?;
            let end = offset.checked_add(range.length)?;
            (end <= region.pages * PAGE_SIZE).then(|| RamPage(region.first.0 + offset / PAGE_SIZE))
        });
        Ok(page.ok_or_else(|| range.refusal())?)
    }

    /// Ends both connections, and every wait on them. The process then ends its VM, unless it has
    /// all pages.
    pub(super) fn shutdown(&self) {
        self.answers.kept.end();
        self.main.shutdown();
        self.faults.shutdown();
    }
}
