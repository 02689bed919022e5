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

use super::api::{Api, Call, Meeting, until};
use super::error::ChError;
use super::keeper::{End, Lease};
use super::kept::{FIXED, Found, Kept, Main};
use super::link::{Limit, Link};
use super::wire::{self, Command as VmmCommand, FAULT_CONNECTION, Mapping, Range};
use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};
use pageferry_machine::{AdoptedRegion, GuestRam};
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use tracing::info;

/// The limit of a step that the process carries out alone.
pub(super) const STEP_LIMIT: Duration = Duration::from_secs(30);

/// A process that has its memory and Config.
pub(super) struct Receiver {
    /// The VM's memory, by our own mapping.
    pub(super) ram: Arc<GuestRam>,
    pub(super) api: Api,
    /// The connection for State and Complete.
    pub(super) main: Link,
    faults: Link,
    pub(super) kept: Kept,
    _meeting: Option<Meeting>,
    /// The wait for the answer to `vm.receive-migration`.
    _call: Option<Call>,
}

/// The state that is to outlive our process.
pub(super) struct Keep<'a> {
    /// The record of what brings the pages: a session, or a snapshot.
    pub(super) record: &'a [u8],
    pub(super) end: End,
    /// The command of a process that keeps the descriptors: see [`keep`](super::keep).
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

/// The memfd of a mapping.
fn memfd(mapping: &Mapping) -> Result<OwnedFd, ChError> {
    let failed = |e| ChError::io("cannot make a memfd for guest memory", e);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("pageferry-ch", flags).map_err(failed)?;
    let size = mapping.file_offset + mapping.size;
    rustix::fs::ftruncate(&fd, size).map_err(failed)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).map_err(failed)?;
    Ok(fd)
}

/// Our own mapping of the memfds.
fn adopt(mappings: &[Mapping], fds: &[OwnedFd]) -> Result<Arc<GuestRam>, ChError> {
    let regions = mappings.iter().zip(fds).map(|(mapping, fd)| {
        let fd = fd.try_clone();
        let fd = fd.map_err(|e| ChError::io("cannot clone a memfd", e))?;
        let start = Gpa(mapping.gpa);
        Ok(AdoptedRegion::new(
            start,
            mapping.size,
            fd,
            mapping.file_offset,
        ))
    });
    let regions = regions.collect::<Result<_, ChError>>()?;
    // SAFETY: the memfds are ours, new or of a process that is gone. The VMM that has them touches
    // them by the vCPUs and devices of its VM only, and these wait at missing pages by userfaultfd.
    Ok(Arc::new(unsafe { GuestRam::adopt(regions) }?))
}

impl Receiver {
    /// Gives the process its memory and Config.
    pub(super) fn prepare(
        api: &Path,
        mappings: &[Mapping],
        config: &[u8],
        keep: Keep<'_>,
        stop: &dyn Fn() -> bool,
    ) -> Result<Self, ChError> {
        let api = Api::new(api);
        let meeting = Meeting::beside(api.path())?;
        let fds: Vec<_> = mappings.iter().map(memfd).collect::<Result<_, _>>()?;
        let ram = adopt(mappings, &fds)?;
        let mut kept = Kept::new(ram.pages(), keep.record)?;
        let body = serde_json::json!({
            "receiver_url": meeting.url(),
            "memory_mode": "Postcopy",
        });
        let call = api.begin("vm.receive-migration", Some(&body.to_string()))?;
        let stream = until(
            "listen",
            STEP_LIMIT,
            &call,
            stop,
            || match UnixStream::connect(&meeting.socket) {
                Ok(stream) => Ok(Some(stream)),
                Err(e) => match e.kind() {
                    std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused => {
                        Ok(None)
                    }
                    _ => Err(ChError::io("cannot connect to Cloud Hypervisor", e)),
                },
            },
        )?;
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
            .map_err(|e| ChError::io("cannot open the connection for page faults", e))?;
        let faults = Link::new(faults)?;
        faults.send(&FAULT_CONNECTION.to_le_bytes(), "take page faults")?;
        info!("the receiving Cloud Hypervisor takes the VM's Config");
        if let Some(command) = keep.keeper {
            let links = [faults.as_fd(), main.as_fd()];
            let mut all: Vec<BorrowedFd<'_>> = kept.descriptors(links).into();
            debug_assert_eq!(all.len(), FIXED);
            all.extend(fds.iter().map(AsFd::as_fd));
            let lease = Lease::start(command, keep.end, api.path(), meeting.folder.path(), &all)?;
            kept.keep(lease);
        }
        Ok(Self {
            ram,
            api,
            main,
            faults,
            kept,
            _meeting: Some(meeting),
            _call: Some(call),
        })
    }

    /// The process of a VM that another process of ours has left behind.
    pub(super) fn found(api: &Path, found: Found, mappings: &[Mapping]) -> Result<Self, ChError> {
        if mappings.len() != found.ram.len() {
            let (memfds, regions) = (found.ram.len(), mappings.len());
            return Err(ChError::Kept(format!(
                "{memfds} memfds, expected {regions}"
            )));
        }
        Ok(Self {
            ram: adopt(mappings, &found.ram)?,
            api: Api::new(api),
            main: found.main,
            faults: found.faults,
            kept: found.kept,
            _meeting: None,
            _call: None,
        })
    }

    /// Waits for the answer to State, lets the VM go, and waits for the answer to that. Both may
    /// wait for pages. Begins where a process before this one has ended. `loaded` hears of the
    /// first answer. `go` returns whether the VM stays paused, or `None` if it does not go.
    ///
    /// Returns whether it has gone.
    pub(super) fn load_and_complete(
        &self,
        loaded: &dyn Fn(),
        go: &dyn Fn() -> Option<bool>,
    ) -> Result<bool, ChError> {
        let (main, kept) = (&self.main, &self.kept);
        if kept.main() == Main::State {
            main.await_ok("load State")?;
            kept.set_main(Main::StateAnswered);
        }
        loaded();
        if kept.main() == Main::StateAnswered {
            // The answer to State, which this process or one before it has seen.
            main.drain();
            let Some(paused) = go() else {
                return Ok(false);
            };
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
        Ok(true)
    }

    /// Answers page faults until the process has no more. `bring` puts pages in place, and returns
    /// false if they never come.
    pub(super) fn answer_faults(
        &self,
        bring: &dyn Fn(RamPage, u64) -> bool,
    ) -> Result<Ended, ChError> {
        while let Some((request, range)) = self.kept.request(&self.faults)? {
            match request.command {
                VmmCommand::PageFault => {}
                VmmCommand::Abandon => {
                    self.kept.answer(&self.faults)?;
                    return Err(ChError::Abandoned);
                }
                other => {
                    return Err(ChError::Order {
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
            self.kept.ask(first, pages);
            self.kept.answer(&self.faults)?;
        }
        Ok(Ended::Closed)
    }

    /// The first page of a range, which lies in one region of RAM.
    fn page_of(&self, range: Range) -> Result<RamPage, ChError> {
        let regions = self.ram.layout().regions().iter();
        let page = regions.into_iter().find_map(|region| {
            let offset = range.gpa.checked_sub(region.gfn.gpa().0)?;
            let end = offset.checked_add(range.length)?;
            (end <= region.pages * PAGE_SIZE).then(|| RamPage(region.first.0 + offset / PAGE_SIZE))
        });
        let Range { gpa, length } = range;
        Ok(page.ok_or(wire::WireError::Range { gpa, length })?)
    }

    /// Ends both connections, and every wait on them. The process then ends its VM, unless it has
    /// all pages.
    pub(super) fn shutdown(&self) {
        self.kept.end();
        self.main.shutdown();
        self.faults.shutdown();
    }
}
