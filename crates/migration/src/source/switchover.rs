//! Switch-over: the source stops the guest, keeps the VMM's writes out, and sends all that the
//! destination needs to run it. This is the blackout.
//!
//! The pages that are missing already travel before the guest stops, as runs. In the blackout only
//! those follow that the guest has written since a harvest of the dirty log right before.
//!
//! Each step needs the ones before it:
//!
//! 1. The vCPUs stop, so no device gets more to do. From here until the VM is taken back, its owner
//!    can neither pause nor resume it: what SwitchOver says about that stays true.
//! 2. The devices stop. What they still complete goes to guest memory, or to a vCPU as an interrupt.
//! 3. Memory is frozen, which waits for every write under way, also those of other threads.
//! 4. The dirty log is harvested: it has all writes.
//! 5. The states of vCPUs and devices are saved. Nothing changes them any more. Pages that are part
//!    of a state travel with it, and with nothing else.
//! 6. Requests are answered, and SwitchOver goes out. A destination that loads another VMM's VM needs
//!    pages for that. A load that fails is a refusal: the VM runs on here.

use super::shared::Mode;
use super::{Supervisor, Tracking};
use crate::clock::{monotonic, monotonic_at};
use crate::devices;
use crate::error::MigrationError;
use crate::phase::Phase;
use crate::report::DeviceFigures;
use crate::wire::{Frame, MissingRuns, SwitchOver, VcpuState};
use std::ops::Range;
use std::time::{Duration, Instant};

/// The longest wait for vCPUs to leave the guest.
const PAUSE_LIMIT: Duration = Duration::from_secs(10);

/// The interval at which the source looks for the last receipts.
const RECEIPT_POLL: Duration = Duration::from_micros(50);

impl Supervisor<'_, '_, '_> {
    /// Stops the guest and sends everything up to SwitchOver.
    pub(super) fn switch_over(&mut self) -> Result<(), MigrationError> {
        let shared = self.shared;
        let ledger = &shared.ledger;
        self.wait_for_silence()?;
        if self.guest.precopy.logs {
            // While the source waited for the destination, the guest has written more.
            self.harvest(true, |_| ())?;
        }
        if self.guest.precopy.tracking == Tracking::Hash {
            // Nobody knows which pages the guest has written.
            self.all_may_be_dirty();
        }
        let Some(control) = &mut self.link.control else {
            return Err(MigrationError::LinkLost("no control channel".into()));
        };
        for frame in MissingRuns::frames(ledger.unsent_runs()) {
            control.send_slowly(&Frame::Missing(frame), self.config.limits.silence)?;
        }
        self.enter(Phase::SwitchOver);
        self.session.close_to_owner();
        // The request to pause stands also if this fails.
        self.guest.resumes = true;
        let stopped = self.guest.vm.vcpus.pause(PAUSE_LIMIT)?;
        self.guest.resumes = stopped.was_running;
        self.record.report.paused = !stopped.was_running;
        self.session.board.set_paused(self.record.report.paused);
        let pausing = Instant::now();
        self.guest.devices_paused = true;
        devices::pause(self.guest.vm.devices)?;
        let mut devices_took = pausing.elapsed();
        // The VMM's own writes are in the last harvest, or refused.
        self.guest.frozen = Some(self.guest.vm.machine.ram().freeze()?);
        let mut new: Vec<Range<u64>> = Vec::new();
        if self.guest.precopy.logs {
            self.harvest(false, |run| match new.last_mut() {
                Some(last) if last.end == run.start as u64 => last.end = run.end as u64,
                _ => new.push(run.start as u64..run.end as u64),
            })?;
        }
        let states = self.guest.vm.vcpus.save()?;
        let machine = self.guest.vm.machine;
        for page in states.iter().flat_map(|state| machine.state_pages(state)) {
            if ledger.claim_closed(page) {
                ledger.acknowledge(page.index()..page.index() + 1);
            }
        }
        let saving = Instant::now();
        let devices = devices::save(self.guest.vm.devices)?;
        devices_took += saving.elapsed();
        self.record.report.devices = DeviceFigures {
            count: devices.len() as u64,
            bytes: devices.iter().map(|d| d.state.len() as u64).sum(),
            took: devices_took,
        };
        self.record.report.first_stop = monotonic_at(stopped.first_stop);
        self.record.report.last_stop = monotonic_at(stopped.last_stop);
        self.record.report.missing_at_start = ledger.unsent_count();
        let counts = (states.len() as u32, devices.len() as u32);
        let Some(control) = &mut self.link.control else {
            return Err(MigrationError::LinkLost("no control channel".into()));
        };
        for frame in MissingRuns::frames(new) {
            control.queue(&Frame::Missing(frame))?;
        }
        for (vcpu, state) in states.into_iter().enumerate() {
            control.queue(&Frame::VcpuState(VcpuState {
                vcpu: vcpu as u32,
                state: state.0,
            }))?;
        }
        for device in devices {
            control.queue(&Frame::DeviceState(device))?;
        }
        control.queue(&Frame::SwitchOver(SwitchOver {
            missing_pages: self.record.report.missing_at_start,
            vcpus: counts.0,
            devices: counts.1,
            stopped_at_ns: self.record.report.last_stop.as_nanos() as u64,
            paused: self.record.report.paused,
        }))?;
        // The destination may need pages while it loads. Memory is final, and the frame that lets
        // it ask is not sent yet.
        self.shared.set_mode(Mode::Answer);
        self.record.report.sent_at = monotonic();
        control.flush()
    }
}

impl Supervisor<'_, '_, '_> {
    /// Waits until no page is under way. Usually none is: a thread may just have claimed some when
    /// the last pass ended. It can claim none from now on.
    fn wait_for_silence(&self) -> Result<(), MigrationError> {
        let began = Instant::now();
        while self.shared.ledger.in_flight() > 0 {
            if began.elapsed() > self.config.limits.silence {
                return Err(MigrationError::Timeout("receipts of the last pass"));
            }
            std::thread::sleep(RECEIPT_POLL);
        }
        Ok(())
    }
}
