//! Switch-over at the destination: everything that the guest needs to run is loaded.

use super::{Guest, Stage, Supervisor};
use crate::clock::monotonic;
use crate::devices::{self, DeviceStates};
use crate::error::MigrationError;
use crate::orphan::Orphan;
use crate::phase::Phase;
use crate::protocol_error::ProtocolError;
use crate::session::destination::Event;
use crate::sync::Ordering;
use crate::wire::{self, MissingRuns, SwitchOver};
use pageferry_machine::{Apply, Backing, MachineError, VcpuState};
use std::time::Instant;

/// The parts of the switch-over that have come so far.
pub(super) struct Loading<'a> {
    states: Vec<Option<VcpuState>>,
    devices: DeviceStates<'a>,
    /// The decoded states of devices. They wait for `Go`.
    decoded: Vec<Apply<'a>>,
    begun: bool,
    /// The number of missing pages, once all is loaded.
    missing_at_start: Option<u64>,
    /// Whether the VM was paused at the source, and stays so.
    paused: bool,
}

impl<'a> Loading<'a> {
    pub(super) fn new(vcpus: usize, devices: DeviceStates<'a>, orphan: Option<&Orphan>) -> Self {
        Self {
            states: vec![None; vcpus],
            devices,
            decoded: Vec::new(),
            begun: orphan.is_some(),
            missing_at_start: orphan.map(|orphan| orphan.missing_at_start),
            paused: orphan.is_some_and(|orphan| orphan.paused),
        }
    }

    /// Whether the source has begun to send what the guest needs to run.
    pub(super) fn has_begun(&self) -> bool {
        self.begun && self.missing_at_start.is_none()
    }

    pub(super) fn is_loaded(&self) -> bool {
        self.missing_at_start.is_some()
    }

    /// Whether the VM comes paused.
    pub(super) fn is_paused(&self) -> bool {
        self.paused
    }

    /// The number of missing pages at the switch-over, or 0 before.
    pub(super) fn missing_at_start(&self) -> u64 {
        self.missing_at_start.unwrap_or(0)
    }
}

impl Supervisor<'_, '_, '_> {
    pub(super) fn load_missing(&mut self, runs: &MissingRuns) -> Result<(), MigrationError> {
        self.guest.loading.begun = true;
        for run in &runs.runs {
            let pages = run.start as usize..run.end as usize;
            self.guest.core.pages.states.missing().set_range(pages);
        }
        Ok(())
    }

    pub(super) fn load_state(&mut self, state: wire::VcpuState) -> Result<(), MigrationError> {
        self.guest.loading.begun = true;
        let vcpu = state.vcpu;
        let slot = self.guest.loading.states.get_mut(vcpu as usize);
        match slot.filter(|slot| slot.is_none()) {
            Some(slot) => *slot = Some(VcpuState(state.state)),
            None => return Err(ProtocolError::VcpuState { vcpu }.into()),
        }
        Ok(())
    }

    pub(super) fn load_device(&mut self, state: wire::DeviceState) -> Result<(), MigrationError> {
        self.guest.loading.begun = true;
        Ok(self.guest.loading.devices.take(state)?)
    }

    /// SwitchOver has come: checks that all has arrived, and loads it. The states of devices are
    /// decoded before anything changes. They are applied on `Go`, since that cannot fail.
    pub(super) fn load(&mut self, announced: &SwitchOver) -> Result<(), MigrationError> {
        if !self.guest.precopy.is_ready() {
            return Err(ProtocolError::SwitchOverTooEarly.into());
        }
        self.enter(Phase::SwitchOver);
        // The states bring these pages, whatever has been said of them before.
        let machine = self.guest.vm.machine;
        let states = self.guest.loading.states.iter().flatten();
        for page in states.flat_map(|state| machine.state_pages(state)) {
            self.guest.core.pages.states.missing().clear(page);
        }
        let found = self.guest.core.pages.missing();
        if found != announced.missing_pages {
            let announced = announced.missing_pages;
            return Err(ProtocolError::MissingCount { announced, found }.into());
        }
        let states: Vec<VcpuState> = self.guest.loading.states.drain(..).flatten().collect();
        let vcpus = self.guest.vm.vcpus.count();
        if states.len() != vcpus || announced.vcpus as usize != vcpus {
            let (announced, found) = (announced.vcpus, states.len());
            return Err(ProtocolError::VcpuStates {
                announced,
                found,
                vcpus,
            }
            .into());
        }
        let devices = std::mem::take(&mut self.guest.loading.devices);
        self.guest.loading.decoded = devices.decode(announced.devices)?;
        self.link.inbound.end_precopy()?;
        self.begin_postcopy(|guest| guest.vm.vcpus.restore(&states))?;
        self.guest.loading.missing_at_start = Some(found);
        self.guest.loading.paused = announced.paused;
        self.events.push_back(Event::Loaded);
        Ok(())
    }

    /// The missing pages are final. `load` gives the vCPUs their states.
    fn begin_postcopy(
        &mut self,
        load: impl FnOnce(&Guest<'_, '_, '_>) -> Result<(), MachineError>,
    ) -> Result<(), MigrationError> {
        // Before VMM threads get in: they read replies, and a page that arrives is counted down.
        self.guest.core.pages.begin_counting();
        self.guest.vm.machine.begin_postcopy()?;
        self.guest.precopy_data = self.link.inbound.data_pages.load(Ordering::Relaxed);
        // Before the vCPUs' states: with minor faults, the first touch of a page that is here
        // sleeps too. And another VMM needs pages while it loads.
        self.serve_faults()?;
        // From here on, frames bring missing pages: those that the load needs come first.
        self.link.inbound.begin_postcopy();
        self.guest.core.begin_requests();
        load(&self.guest)?;
        self.assist()?;
        Ok(())
    }

    /// Goes on with a VM that another process has loaded, and perhaps run.
    pub(super) fn go_on(&mut self) -> Result<(), MigrationError> {
        self.guest.precopy.end();
        self.begin_postcopy(|_| Ok(()))?;
        self.link.lost_since = Some(Instant::now());
        if self.state.stage == Stage::Ready {
            return Ok(());
        }
        self.guest.started = monotonic();
        self.run_here();
        Ok(())
    }

    /// The source has said `Go`: the guest counts here and nowhere else. It runs, unless it comes
    /// paused. All else is as for a guest that runs: its owner may resume it at any time.
    pub(super) fn start_guest(&mut self) {
        debug_assert_eq!(self.state.stage, Stage::Running);
        // Those of a generation that has ended before `Go`.
        self.guest.core.repeat_requests();
        for apply in self.guest.loading.decoded.drain(..) {
            apply();
        }
        devices::resume(self.guest.vm.devices);
        if !self.guest.loading.is_paused() {
            self.guest.vm.vcpus.resume();
        }
        if !self.guest.vm.vcpus.confirms_start() {
            self.started();
        }
        // Behind the resume: an owner's pause comes after it.
        self.run_here();
    }

    /// The guest runs, or its owner may let it run.
    pub(super) fn started(&mut self) {
        if self.guest.started.is_zero() {
            self.guest.started = monotonic();
        }
        self.events.push_back(Event::Started);
    }

    /// The VM is here and nowhere else.
    fn run_here(&mut self) {
        self.host.set_open_to_owner(true);
        self.guest.core.hand_over();
        self.wake_assist();
        self.link.patience.set(self.host.config.limits.dead_after);
        self.enter(Phase::Postcopy);
        // For private memory, the kernel makes huge pages under the lock of all mappings, where
        // every fault would wait.
        if self.guest.core.machine.ram().backing() != Backing::Anonymous {
            self.guest.core.collapse();
        }
    }
}
