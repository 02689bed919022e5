//! Running guest code: entry, interrupts, and the choice between the loop and the slow path.

use super::Hart;
use super::bus::{Access, Bus, BusFault};
use super::csr::Cause;
use super::exec::{Leave, run_page};
use super::exit::HartExit;
use super::slow::{Step, extend, kind_of_access, refused};
use super::state::RunState;
use super::sync::{AtomicU32, Ordering};

/// The number of instructions between two reads of the clock, while a timer is set: about 50 us.
const POLL: u64 = 16_384;

impl Hart {
    /// Runs guest code until the hart has to leave it; see [`HartExit`].
    ///
    /// While `request` is not 0, nothing runs and the exit is [`HartExit::Requested`]. The hart
    /// reads `request` with relaxed order. `budget` limits the number of executed instructions.
    /// Instructions that raise exceptions count too.
    pub fn run<B: Bus>(
        &mut self,
        bus: &mut B,
        request: &AtomicU32,
        budget: Option<u64>,
    ) -> HartExit {
        let mut budget = budget.unwrap_or(u64::MAX);
        self.mmio_load = None;
        self.read_clock(bus);
        if !self.is_running() {
            return HartExit::Halted;
        }
        if core::mem::take(&mut self.restored) {
            bus.fence_translations(None, None);
        }
        // The caller may lend another bus each time.
        self.csrs.view_changed = true;
        self.take_interrupt();
        loop {
            if let Some(view) = self.csrs.take_view() {
                self.code.set_view(view);
                bus.set_view(view);
            }
            if request.load(Ordering::Relaxed) != 0 {
                return HartExit::Requested;
            }
            if budget == 0 {
                return HartExit::Budget;
            }
            if self.poll_in == 0 {
                self.read_clock(bus);
                self.take_interrupt();
                continue;
            }
            let slice = budget.min(self.poll_in);
            let step = match self.code.page(self.pc) {
                Some(page) => {
                    let left = run_page(&mut self.x, page, bus, request, self.pc, slice);
                    self.pc = left.pc;
                    self.instret = self.instret.wrapping_add(left.retired);
                    budget -= left.retired;
                    self.poll_in -= left.retired;
                    match left.leave {
                        Leave::Jump => continue,
                        Leave::Slow(op) => self.slow(bus, op),
                        // The path of a missing page avoids `Step`, whose copies cost more than
                        // the look-up.
                        Leave::Memory(op, BusFault::Memory(fault)) => {
                            let (access, _) = kind_of_access(op.kind);
                            return HartExit::MemoryFault { fault, access };
                        }
                        Leave::Memory(op, fault) => self.memory(bus, op, fault),
                        Leave::OddTarget(target) => {
                            Step::Trap(Cause::InstructionMisaligned, target)
                        }
                    }
                }
                None => match self.fetch(bus) {
                    Ok(()) => continue,
                    Err(fault) => refused(fault, Access::Fetch),
                },
            };
            budget -= 1;
            self.poll_in = self.poll_in.saturating_sub(1);
            match step {
                Step::Next => self.retire(self.pc.wrapping_add(4)),
                Step::Jump(target) => self.retire(target),
                Step::Trap(cause, stval) => self.pc = self.csrs.trap(cause, stval, self.pc),
                Step::ExitAfter(exit) => {
                    self.retire(self.pc.wrapping_add(4));
                    return exit;
                }
                Step::ExitUncounted(exit) => {
                    self.pc = self.pc.wrapping_add(4);
                    return exit;
                }
                Step::ExitBefore(exit) => return exit,
            }
        }
    }

    /// Sees whether the timer is due, and decides when to look again. Without a timer, the hart
    /// never reads the clock.
    pub(super) fn read_clock<B: Bus>(&mut self, bus: &mut B) {
        if self.csrs.awaits_deadline() {
            self.csrs.see_time(bus.time());
        }
        self.poll_in = if self.csrs.awaits_deadline() {
            POLL
        } else {
            u64::MAX
        };
    }

    /// Whether the hart executes instructions. An interrupt that would end WFI ends a suspension.
    fn is_running(&mut self) -> bool {
        if self.run_state == RunState::Suspended && self.csrs.waking() {
            self.run_state = RunState::Started;
        }
        self.run_state == RunState::Started
    }

    /// Counts the instruction at `pc`, continues at `next`, and takes an interrupt if that
    /// instruction enabled one.
    #[inline]
    fn retire(&mut self, next: u64) {
        self.pc = next;
        self.instret = self.instret.wrapping_add(1);
        self.take_interrupt();
    }

    #[inline]
    fn take_interrupt(&mut self) {
        if let Some(handler) = self.csrs.interrupt(self.pc) {
            self.pc = handler;
        }
    }

    #[cold]
    fn fetch<B: Bus>(&mut self, bus: &mut B) -> Result<(), BusFault> {
        let address = self.pc;
        let gpa = bus.locate_code(address)?;
        self.code
            .enter(address, gpa, |words| bus.fetch_page(gpa, words))
            // The guest sees the address of the instruction, not of the page.
            .map_err(|fault| match fault {
                BusFault::Access { .. } | BusFault::Mmio { .. } => BusFault::Access { address },
                fault => fault,
            })
    }

    /// Completes the load of the last [`HartExit::MmioLoad`]: the low bytes of `value` go to the
    /// load's register, sign- or zero-extended. Without such an exit since the last entry, the call
    /// does nothing.
    #[inline]
    pub fn complete_mmio_load(&mut self, value: u64) {
        if let Some(load) = self.mmio_load.take() {
            self.x[load.rd] = extend(load.kind, value);
        }
    }
}
