//! A Firecracker that a VM arrives at.
//!
//! **Mechanism.** Pages arrive in a memfd of ours. In the switch-over the process loads the state
//! file, and sends us the userfaultfd of its memory. From then on pages are copied there, and their
//! place in the memfd is freed.
//!
//! **Neighbours.** `foreign::arrival` has the state machine, `memory` places pages.
#![expect(unsafe_code, reason = "reads pages that have arrived")]

use super::api::{MachineConfig, instance, set_running};
use super::jail::Place;
use super::memory::Memory;
use super::source::{adopt, memfd};
use super::{KIND, STATE_DEVICE, unframe};
use crate::foreign::api::Api;
use crate::foreign::arrival::Arriving;
use crate::foreign::description::{Description, major_minor};
use crate::foreign::keeper::End;
use crate::foreign::kept::Kept;
use crate::foreign::{
    LOAD_LIMIT, LeftBehind, Overrides, ReceiverOptions, STEP_LIMIT, VmmError, check,
};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_machine::{
    ArmOptions, Delivery, DeliveryInUse, FaultEvent, FaultEvents, GuestRam, Machine, MachineError,
    MachineKind,
};
use pageferry_migration::Incoming;
use pageferry_pager::{Handshake, Ring};
use pageferry_transport::Bell;
use pageferry_userfault::PageBitmap;
use rustix::event::epoll;
use serde_json::json;
use std::io::Write as _;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tracing::info;

/// A receiving process.
pub(super) struct Guest {
    ram: Arc<GuestRam>,
    memfd: OwnedFd,
    api: Api,
    overrides: Overrides,
    /// Whether the VM had huge pages of a pool.
    had_pool: bool,
    /// Whether its owner had it log dirty pages.
    tracks: bool,
    /// Where it finds the state file and the socket of its memory. `None` if an earlier process of
    /// ours has let it load its VM.
    place: Option<(Place, UnixListener)>,
    kept: Arc<Kept>,
    /// The ring of `kept`, until the memory has it.
    ring: Mutex<Option<Ring>>,
    /// The connection of the handshake.
    stream: OnceLock<UnixStream>,
    faults: Arc<Faults>,
}

/// The faults of the process.
struct Faults {
    /// Its memory, from the handshake on.
    memory: OnceLock<Memory>,
    /// Readable when faults wait: in the userfaultfd, or read by another thread (`bell`).
    ready: OwnedFd,
    bell: Bell,
}

/// A VM that an earlier process of ours has left at an API socket.
pub(super) fn left_behind(api: &Path) -> Result<Option<LeftBehind>, VmmError> {
    let Some((kept, ring, orphan, fds)) = Kept::found_move(api, End::Destination)? else {
        return Ok(None);
    };
    let [stream, uffd, memfd] = <[OwnedFd; 3]>::try_from(fds)
        .map_err(|fds| VmmError::Kept(format!("{} descriptors, expected 3", fds.len())))?;
    let offer = orphan.offer();
    let config = config_of(&Description::parse(&offer.guest)?)?;
    let guest = Guest::new(Api::new(api)?, &config, (kept, ring), memfd)?;
    let ring = guest
        .ring
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .take();
    let ring = ring.ok_or_else(|| VmmError::Kept("it has no ring".into()))?;
    let memory = Memory::found(uffd, config.bytes(), (&guest.kept, ring))?;
    guest.take_memory(memory, stream.into())?;
    let vmm = Arc::new(guest);
    Ok(Some(LeftBehind { vmm, orphan }))
}

fn config_of(description: &Description) -> Result<MachineConfig, VmmError> {
    MachineConfig::parse(description.config.as_bytes()).map_err(VmmError::Offer)
}

/// Firecracker loads states of its own minor version only, and of others fails in the pause.
fn check_version(there: &str, here: &str, any: bool) -> Result<(), VmmError> {
    let same = major_minor(there).is_some() && major_minor(there) == major_minor(here);
    if same || any {
        return Ok(());
    }
    let (there, here) = (there.escape_debug(), here.escape_debug());
    Err(VmmError::Version(format!(
        "the VM is of Firecracker {there}, and this is Firecracker {here}: expected the same minor \
         version; to try it all the same, use --any-version"
    )))
}

impl Guest {
    /// Looks at the process, and makes room for the memory.
    pub(super) fn prepare(
        options: &mut ReceiverOptions,
        incoming: &Incoming,
    ) -> Result<Self, VmmError> {
        let offer = incoming.offer();
        let description = Description::parse(&offer.guest)?;
        let config = config_of(&description)?;
        check(offer, KIND.engine, config.bytes())?;
        let record = incoming.record();
        let record = record.map_err(|e| VmmError::Offer(e.to_string()))?;
        let api = Api::new(&options.api)?;
        let (found, process) = instance(&api, STEP_LIMIT)?;
        if found.state != "Not started" {
            return Err(VmmError::VmState {
                found: found.state.escape_debug().to_string(),
                expected: "Not started, in a new process",
            });
        }
        check_version(
            &description.version,
            &found.vmm_version,
            options.any_version,
        )?;
        let place = Place::beside(api.path(), process)?;
        let meeting = &place.meeting;
        let failed = |e| VmmError::io(format!("cannot listen on {}", meeting.socket.display()), e);
        let listener = meeting.listen().map_err(failed)?;
        let (mut kept, ring) = Kept::new(config.bytes() / PAGE_SIZE, &record)?;
        let places = (api.path(), meeting.folder.path());
        kept.keep(options.keeper.as_mut(), End::Destination, places, [])?;
        let memfd = memfd(config.bytes())?;
        let guest = Self::new(api, &config, (kept, ring), memfd)?;
        Ok(Self {
            overrides: options.overrides.clone(),
            place: Some((place, listener)),
            ..guest
        })
    }

    fn new(
        api: Api,
        config: &MachineConfig,
        (kept, ring): (Kept, Ring),
        memfd: OwnedFd,
    ) -> Result<Self, VmmError> {
        let os = |e: rustix::io::Errno| VmmError::io("cannot make descriptors for faults", e);
        let ready = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(os)?;
        let bell =
            Bell::new().map_err(|e| VmmError::io("cannot make descriptors for faults", e))?;
        let data = epoll::EventData::new_u64(0);
        epoll::add(&ready, &bell, data, epoll::EventFlags::IN).map_err(os)?;
        Ok(Self {
            ram: Arc::new(adopt(&memfd, config.bytes(), true)?),
            memfd,
            api,
            overrides: Overrides::default(),
            had_pool: config.has_pool(),
            tracks: config.track_dirty_pages,
            place: None,
            kept: Arc::new(kept),
            ring: Mutex::new(Some(ring)),
            stream: OnceLock::new(),
            faults: Arc::new(Faults {
                memory: OnceLock::new(),
                ready,
                bell,
            }),
        })
    }

    /// Takes the process's memory, and gives it to the keeper, too.
    fn take_memory(&self, memory: Memory, stream: UnixStream) -> Result<(), VmmError> {
        let data = epoll::EventData::new_u64(1);
        epoll::add(&self.faults.ready, &memory, data, epoll::EventFlags::IN)
            .map_err(|e| VmmError::io("cannot watch a userfaultfd", e))?;
        let _ = self.stream.set(stream);
        if self.faults.memory.set(memory).is_err() {
            return Err(VmmError::Handshake("there was one before".into()));
        }
        // Events that came meanwhile.
        self.faults.bell.ring();
        Ok(())
    }

    /// Copies pages that have arrived to the process, and frees their place here.
    fn place(&self, pages: Range<u64>) -> Result<(), MachineError> {
        let Some(memory) = self.faults.memory.get() else {
            return Ok(());
        };
        let bytes = |part: Range<u64>| {
            let start = self.ram.alias_hva(RamPage(part.start)).0 as usize;
            let length = ((part.end - part.start) * PAGE_SIZE) as usize;
            // SAFETY: the pages lie in guest RAM, which is mapped as long as `self` lives. They are
            // in place, so no thread writes them any more. A thread that frees them has placed
            // them, and then the bytes that are read here are placed nowhere.
            Some(unsafe {
                let start = std::ptr::with_exposed_provenance::<u8>(start);
                std::slice::from_raw_parts(start, length)
            })
        };
        let placed = memory.place(pages.clone(), &bytes, &|| self.faults.bell.ring());
        placed?;
        // SAFETY: the pages are not missing, and their bytes are needed no more.
        let ram = unsafe { self.ram.unchecked() };
        ram.punch_hole(RamPage(pages.start), pages.end - pages.start)
    }
}

impl Arriving for Guest {
    fn state_device(&self) -> &'static str {
        STATE_DEVICE
    }
    /// Its vCPUs come first, and touch memory. Then it opens taps, disks and vsock, each of which
    /// may fail.
    fn load(&self, state: &[u8], paused: bool) -> Result<(), VmmError> {
        let ring = self
            .ring
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let (Some((place, listener)), Some(ring)) = (&self.place, ring) else {
            return Err(VmmError::Handshake("there was one before".into()));
        };
        let framed = || VmmError::Offer("its state is cut off".into());
        let (mmds, state) = unframe(state).ok_or_else(framed)?;
        let meeting = &place.meeting;
        let path = meeting.folder.path().join("state");
        let failed = |e| VmmError::io(format!("cannot write {}", path.display()), e);
        let file = meeting.folder.create("state", &meeting.owner);
        file.and_then(|mut file| file.write_all(state))
            .map_err(failed)?;
        let mut body = json!({
            "snapshot_path": place.inside(&path),
            "mem_backend": {
                "backend_type": "Uffd",
                "backend_path": place.inside(&meeting.socket),
            },
            "resume_vm": false,
        });
        self.overrides.add_to(&mut body);
        if self.tracks {
            body["track_dirty_pages"] = true.into();
        }
        if self.had_pool {
            // Pages of 4 KiB arrive one by one. The kernel joins them when all are there.
            body["huge_pages"] = "Transparent".into();
        }
        let mut call = self.api.begin("PUT /snapshot/load", Some(&body))?;
        let began = Instant::now();
        let left = || LOAD_LIMIT.saturating_sub(began.elapsed());
        let stream = loop {
            match listener.accept() {
                Ok((stream, _)) => break stream,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(VmmError::io("cannot accept a handshake", e)),
            }
            if call.poll(Duration::from_millis(2))?.is_some() {
                let why = "it loaded its memory from elsewhere".into();
                return Err(VmmError::Handshake(why));
            }
            if left().is_zero() {
                return Err(VmmError::Timeout {
                    what: "connect to the socket of its memory",
                    limit: LOAD_LIMIT,
                });
            }
        };
        let bytes = self.ram.layout().bytes();
        let handshake = Handshake::receive(stream.as_fd(), bytes, None)
            .map_err(|e| VmmError::Handshake(e.to_string()))?;
        let memory = Memory::new(handshake, bytes, (&self.kept, ring))?;
        self.kept
            .keep_more(&[stream.as_fd(), memory.as_fd(), self.memfd.as_fd()])?;
        self.take_memory(memory, stream)?;
        call.wait(left())?;
        if !mmds.is_empty() {
            let data = serde_json::from_slice(mmds);
            let data = data.map_err(|e| VmmError::Offer(format!("its metadata: {e}")))?;
            self.api.call("PUT /mmds", Some(&data), left())?;
        }
        meeting.folder.remove("state");
        info!("the receiving Firecracker has loaded the VM");
        // Before the source hears that the VM is ready.
        self.kept.loaded(paused);
        Ok(())
    }
    fn handed_over(&self) {
        self.kept.handed_over();
    }
    fn start(&self, paused: bool) -> Result<(), VmmError> {
        // A process before this one may have let it run.
        let found = self.place.is_none();
        if paused || found && instance(&self.api, STEP_LIMIT)?.0.state == "Running" {
            return Ok(());
        }
        self.set_running(true, STEP_LIMIT)
    }
    fn set_running(&self, on: bool, limit: Duration) -> Result<(), VmmError> {
        set_running(&self.api, on, limit)
    }
    fn shutdown(&self) {
        self.kept.end();
    }
}

impl Machine for Guest {
    fn kind(&self) -> MachineKind<'_> {
        KIND
    }
    fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }
    fn has_dirty_log(&self) -> bool {
        false
    }
    fn deliveries(&self) -> Vec<Delivery> {
        vec![Delivery::Missing]
    }
    fn delivery(&self) -> Option<DeliveryInUse> {
        self.ram.is_armed().then(|| DeliveryInUse {
            delivery: Delivery::Missing,
            because: "Firecracker's memory has no other".into(),
        })
    }
    /// The missing pages are final: they are kept.
    fn begin_postcopy(&self) -> Result<(), MachineError> {
        if self.place.is_some()
            && let Some(missing) = self.ram.missing()
        {
            self.kept.set_missing(&missing.snapshot());
        }
        self.ram.begin();
        Ok(())
    }
    fn arm_userfault(
        &self,
        missing: Arc<PageBitmap>,
        options: ArmOptions,
    ) -> Result<Vec<Box<dyn FaultEvents>>, MachineError> {
        if let Some(other) = options.delivery.filter(|d| *d != Delivery::Missing) {
            return Err(MachineError::NoDelivery(other));
        }
        self.ram.arm(&missing, &options, || Ok(()))?;
        Ok(vec![Box::new(Stream(Arc::clone(&self.faults)))])
    }
    fn install(&self, first: RamPage, pages: u64) -> Result<(), MachineError> {
        self.kept.came(first, pages);
        self.place(first.0..first.0 + pages)
    }
    /// All pages are here: the process gets the rest of them, and keeps its memory alone.
    fn disarm_userfault(&self) -> Result<(), MachineError> {
        self.ram.check_whole()?;
        if let Some(memory) = self.faults.memory.get() {
            let mut at = 0;
            while let Some(run) = memory.next_open(at) {
                at = run.end;
                self.place(run)?;
            }
            memory.leave()?;
        }
        self.ram.disarm()
    }
}

/// A stream of the faults.
struct Stream(Arc<Faults>);

impl FaultEvents for Stream {
    fn fd(&self) -> BorrowedFd<'_> {
        self.0.ready.as_fd()
    }
    fn next(&mut self) -> Result<Option<FaultEvent>, MachineError> {
        // Before the look: a later ring is for a later look.
        self.0.bell.hush();
        match self.0.memory.get() {
            Some(memory) => Ok(memory.next_fault()?),
            None => Ok(None),
        }
    }
}
