//! Switch-over: the source stops the guest, keeps the VMM's writes out, and sends the missing bitmap
//! and the vCPU states. This is the blackout.

use super::Source;
use crate::clock::{instant_ns, monotonic_ns};
use crate::error::MigrationError;
use crate::link::{SWITCH_OVER_SPIN_MICROS, never};
use crate::phase::Phase;
use crate::wire::{Frame, MAX_BITMAP_WORDS, MissingBitmap, SwitchOver, VcpuState};
use pageferry_userfault::PageBitmap;
use std::time::Duration;

/// The longest wait for vCPUs to leave the guest.
const PAUSE_LIMIT: Duration = Duration::from_secs(10);

impl Source<'_> {
    /// Stops the guest, sends bitmap and states, and waits for Running. Returns the missing pages.
    pub(super) fn switch_over(
        &mut self,
        missing: PageBitmap,
    ) -> Result<PageBitmap, MigrationError> {
        self.check_cancel()?;
        self.link.set_spin(SWITCH_OVER_SPIN_MICROS);
        self.enter(Phase::SwitchOver);
        let stopped = self.vm.threads.pause(PAUSE_LIMIT)?;
        // The VMM's own writes are in the last harvest, or refused.
        self.frozen = Some(self.vm.machine.ram().freeze()?);
        if self.config.precopy_passes > 0 {
            self.vm.machine.harvest_dirty(&missing, false)?;
        }
        let states = self.vm.threads.save()?;
        self.report.first_stop_ns = instant_ns(stopped.first_stop);
        self.report.last_stop_ns = instant_ns(stopped.last_stop);
        self.report.missing_at_start = missing.count() as u64;

        let mut frames = Vec::new();
        let words = missing.snapshot();
        for (chunk, words) in words.chunks(MAX_BITMAP_WORDS).enumerate() {
            frames.push(Frame::MissingBitmap(MissingBitmap {
                first_word: (chunk * MAX_BITMAP_WORDS) as u64,
                words: words.to_vec(),
            }));
        }
        for (vcpu, state) in states.into_iter().enumerate() {
            frames.push(Frame::VcpuState(VcpuState {
                vcpu: vcpu as u32,
                state: state.0,
            }));
        }
        frames.push(Frame::SwitchOver(SwitchOver {
            missing_pages: self.report.missing_at_start,
            vcpus: self.vm.threads.count() as u32,
            stopped_at_ns: self.report.last_stop_ns,
        }));
        self.link.send_all(&frames)?;

        // From here on, `cancel` has no effect: the guest may run at the destination.
        match self.link.receive(self.config.answer_limit, never())? {
            Frame::Running { .. } => {}
            other => return Err(self.link.unexpected("Running", &other)),
        }
        self.report.confirmed_ns = monotonic_ns();
        Ok(missing)
    }
}
