//! One virtual CPU: a hart, its view of memory, and the gate between them and the other threads.
//!
//! A WFI with a timer set waits here, outside the gate. A kick or an interrupt by another thread
//! ends the wait: it makes its request first, and then takes the lock under which the vCPU looks
//! for requests before it sleeps. So no wake-up is lost.

use crate::gate::{Gate, Requests};
use crate::hart::{
    Access, Hart, HartExit, HartState, Interrupt, RunState, StateError, TIMEBASE_HZ,
};
use crate::memory::{Again, USERFAULT, VcpuMemory, WRITE_TRACKED};
use crate::scalable::Scalable;
use crate::slots::{MemslotReader, Memslots};
use crate::state::Changes;
use crate::sync::{AtomicU32, Ordering, yield_now};
use pageferry_addr::Gpa;
use pageferry_tdp::ring::Harvester;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The longest sleep in a WFI before the vCPU reads the VM's clock again, which may be set forward.
const NAP: Duration = Duration::from_millis(10);

/// The reason why [`VcpuCore::run`] returned. At every exit the hart's state is complete and can be
/// saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The vCPU accessed a page of a slot that is missing, or stored to a write-tracked page.
    /// Entering again repeats the access.
    MemoryFault {
        /// The first byte of the page.
        gpa: Gpa,
        /// The size of the page in bytes.
        size: u64,
        /// The kind of access.
        access: Access,
        /// Whether the page's userfault bit is set.
        userfault: bool,
        /// Whether the page is [write-tracked](crate::Vm::track_writes), and the access a store.
        write_tracked: bool,
    },
    /// A load from an address without a slot. It returns all ones, unless the caller calls
    /// [`VcpuCore::complete_mmio_read`] before the next entry.
    MmioRead {
        /// The address, naturally aligned.
        gpa: Gpa,
        /// The number of bytes: 1, 2, 4 or 8.
        size: u8,
    },
    /// A store to an address without a slot, or into a read-only slot. The vCPU has completed it.
    MmioWrite {
        /// The address, naturally aligned.
        gpa: Gpa,
        /// The number of bytes: 1, 2, 4 or 8.
        size: u8,
        /// The value, zero-extended.
        value: u64,
    },
    /// An ECALL from VS-mode. The answer goes into `a0` and `a1`.
    Ecall {
        /// `a0` to `a7`.
        args: [u64; 8],
    },
    /// The vCPU's dirty ring is nearly full, and the next store needs room in it. Entering again
    /// repeats the store: harvest the ring and call
    /// [`Vm::reset_dirty_rings`](crate::Vm::reset_dirty_rings) first.
    DirtyRingFull,
    /// A WFI while no interrupt is both pending and enabled, and no timer is set that would end it.
    /// Or the hart is stopped, or suspended in the same way: see
    /// [`Hart::run_state`](crate::hart::Hart::run_state).
    Halted,
    /// An interrupt has ended a suspension of the hart: see
    /// [`Hart::run_state`](crate::hart::Hart::run_state). It has executed nothing yet.
    Resumed,
    /// A thread kicked the vCPU.
    Kicked,
}

/// What the vCPU shares with the threads that wake it.
pub(crate) struct Port {
    gate: Arc<Gate>,
    /// Interrupts that other threads have raised, as bits of `sip`, and those that they have
    /// lowered, [`LOWERED`] bits above. No interrupt has both bits.
    changed: AtomicU32,
    sleep: Mutex<()>,
    bell: Condvar,
}

/// The bits of [`Port::changed`] above which lowered interrupts are.
const LOWERED: u32 = 16;

impl Port {
    /// The pending interrupts `sip`, as other threads have changed them.
    fn sip_with(changed: u32, sip: u64) -> u64 {
        let raised = changed & ((1 << LOWERED) - 1);
        sip & !u64::from(changed >> LOWERED) | u64::from(raised)
    }

    /// Makes a request, and ends the vCPU's sleep.
    fn wake(&self, request: Requests) {
        // The vCPU need not be waited for, so the ticket has no use.
        let _ = self.gate.request(request);
        drop(self.sleep.lock().unwrap_or_else(PoisonError::into_inner));
        self.bell.notify_all();
    }

    /// Sleeps for at most `limit`, until a thread calls [`Port::wake`].
    fn sleep(&self, limit: Duration) {
        let lock = self.sleep.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.has_wake_up() {
            drop(self.bell.wait_timeout(lock, limit));
        }
    }

    fn has_wake_up(&self) -> bool {
        self.gate.has_any(Requests::KICK | Requests::INTERRUPT)
    }
}

/// A handle that kicks a vCPU or raises its interrupts, from any thread.
#[derive(Clone)]
pub struct KickHandle(Arc<Port>);

impl KickHandle {
    /// Makes the vCPU return from [`VcpuCore::run`] with [`Exit::Kicked`]. It does so soon if it is
    /// inside the guest, else at its next entry. A kick stays open until such an exit. Open kicks
    /// merge into one.
    pub fn kick(&self) {
        self.0.wake(Requests::KICK);
    }

    /// Makes `interrupt` pending before the vCPU's next instruction, like
    /// [`Hart::set_interrupt`](crate::hart::Hart::set_interrupt). It ends a WFI inside
    /// [`VcpuCore::run`] and [`VcpuCore::wait`].
    pub fn raise(&self, interrupt: Interrupt) {
        self.set(interrupt, true);
    }

    /// Makes `interrupt` pending or not, as [`KickHandle::raise`] does.
    pub fn set(&self, interrupt: Interrupt, pending: bool) {
        let raised = 1 << interrupt as u32;
        let (bit, other) = match pending {
            true => (raised, raised << LOWERED),
            false => (raised << LOWERED, raised),
        };
        // The request comes second, and releases it.
        let change = |changed| Some(changed & !other | bit);
        let order = Ordering::Relaxed;
        let _ = self.0.changed.fetch_update(order, order, change);
        self.0.wake(Requests::INTERRUPT);
    }

    /// Ends a wait of the vCPU: [`VcpuCore::wait`] returns soon, or at once if it is called next.
    /// Unlike a kick, it is no exit of [`VcpuCore::run`].
    pub fn wake(&self) {
        self.0.wake(Requests::INTERRUPT);
    }

    /// Whether a kick is open.
    #[must_use]
    pub fn is_kicked(&self) -> bool {
        self.0.gate.is_kicked()
    }
}

impl fmt::Debug for KickHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KickHandle(kicked: {})", self.is_kicked())
    }
}

/// The watch for the first instruction to retire.
#[derive(Clone, Copy)]
enum First {
    Unwatched,
    Watched,
    Ran(Instant),
}

/// One vCPU. [`crate::Vm::create_vcpu`] makes it.
pub struct VcpuCore<M: Memslots = Scalable> {
    id: u32,
    hart: Hart,
    memory: VcpuMemory<M::Reader>,
    /// Keeps the slots alive, and so the memory to which the TLB leads.
    changes: Arc<Changes<M>>,
    port: Arc<Port>,
    first: First,
    dirty_ring: Option<Harvester>,
}

impl<M: Memslots> VcpuCore<M> {
    pub(crate) fn new(
        id: u32,
        memory: VcpuMemory<M::Reader>,
        changes: Arc<Changes<M>>,
        gate: Arc<Gate>,
        dirty_ring: Option<Harvester>,
    ) -> Self {
        Self {
            id,
            hart: Hart::new(),
            memory,
            changes,
            port: Arc::new(Port {
                gate,
                changed: AtomicU32::new(0),
                sleep: Mutex::new(()),
                bell: Condvar::new(),
            }),
            dirty_ring,
            first: First::Unwatched,
        }
    }

    /// The vCPU's id.
    #[must_use]
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// Takes the reading end of the vCPU's dirty ring, for the thread that harvests it. It is there
    /// once, and only if the VM has [`dirty_ring`](crate::VmConfig::dirty_ring).
    pub const fn take_dirty_ring(&mut self) -> Option<Harvester> {
        self.dirty_ring.take()
    }

    /// Runs the guest until it leaves for a reason that the caller must see.
    pub fn run(&mut self) -> Exit {
        loop {
            let gate = &*self.port.gate;
            let inside = match gate.enter() {
                Ok(inside) => inside,
                Err(requests) => {
                    serve(&mut self.hart, &mut self.memory, requests);
                    if requests.contains(Requests::INTERRUPT) {
                        take_changed(&mut self.hart, &self.port);
                    }
                    if requests.contains(Requests::KICK) {
                        self.changes.free_tables();
                        return Exit::Kicked;
                    }
                    continue;
                }
            };
            // While the first instruction is watched for, execute one at a time.
            let watched = matches!(self.first, First::Watched);
            let before = self.hart.instret();
            // A suspended hart executes nothing before the caller has heard that it resumes.
            let suspended = self.hart.run_state() == RunState::Suspended;
            let budget = match (suspended, watched) {
                (true, _) => Some(0),
                (false, true) => Some(1),
                (false, false) => None,
            };
            let exit = self.hart.run(&mut self.memory, gate.poll_flag(), budget);
            if watched && self.hart.instret() != before {
                self.first = First::Ran(Instant::now());
            }
            drop(inside);
            if suspended && self.hart.run_state() == RunState::Started {
                return Exit::Resumed;
            }
            match exit {
                HartExit::Requested => {
                    if let Some(address) = self.memory.unwatched.take() {
                        let _turn = self.changes.lock();
                        self.memory.state.watch(address);
                    }
                    match self.memory.again.take() {
                        // The writer is between the halves of a change.
                        Some(Again::Slots) => yield_now(),
                        Some(Again::Tables) => self.memory.worker.wait(),
                        Some(Again::Ring) => return Exit::DirtyRingFull,
                        Some(Again::Watched) => {
                            let _turn = self.changes.lock();
                            self.memory.state.unwatch();
                        }
                        None => {}
                    }
                }
                HartExit::Budget => {}
                HartExit::MemoryFault { fault, access } => {
                    return Exit::MemoryFault {
                        gpa: Gpa(fault.gpa),
                        size: fault.size,
                        access,
                        userfault: fault.flags & USERFAULT != 0,
                        write_tracked: fault.flags & WRITE_TRACKED != 0,
                    };
                }
                HartExit::MmioLoad { gpa, size } => {
                    return Exit::MmioRead {
                        gpa: Gpa(gpa),
                        size,
                    };
                }
                HartExit::MmioStore { gpa, size, value } => {
                    return Exit::MmioWrite {
                        gpa: Gpa(gpa),
                        size,
                        value,
                    };
                }
                HartExit::Ecall { args } => return Exit::Ecall { args },
                HartExit::Halted => {
                    self.changes.free_tables();
                    if self.hart.wakes_at().is_some() {
                        self.wait(Duration::MAX);
                        continue;
                    }
                    return Exit::Halted;
                }
            }
        }
    }

    /// Waits until a thread kicks the vCPU or raises an interrupt, until the timer ends a WFI, or
    /// for `limit`. A caller that gets [`Exit::Halted`] may wait so for other vCPUs.
    pub fn wait(&mut self, limit: Duration) {
        let begin = Instant::now();
        loop {
            let left = limit.saturating_sub(begin.elapsed());
            let timer = self.hart.wakes_at().map_or(Duration::MAX, |deadline| {
                until(deadline.saturating_sub(self.memory.state.clock.ticks()))
            });
            let nap = NAP.min(left).min(timer);
            if nap.is_zero() || self.port.has_wake_up() {
                return;
            }
            self.port.sleep(nap);
        }
    }

    /// Completes the load of the last [`Exit::MmioRead`] with `value`. The call does nothing if the
    /// last entry ended with another exit.
    pub fn complete_mmio_read(&mut self, value: u64) {
        self.hart.complete_mmio_load(value);
    }

    /// The hart: its registers and counters.
    #[must_use]
    pub const fn hart(&self) -> &Hart {
        &self.hart
    }

    /// The hart, to set its registers or raise its interrupts.
    pub const fn hart_mut(&mut self) -> &mut Hart {
        &mut self.hart
    }

    /// The whole architectural state. Interrupts that other threads have raised are pending in
    /// it, and those that they have lowered are not.
    #[must_use]
    pub fn state(&self) -> HartState {
        let mut state = self.hart.state();
        state.sip = Port::sip_with(self.port.changed.load(Ordering::Relaxed), state.sip);
        state
    }

    /// Replaces the whole architectural state. Changes of interrupts that other threads have made
    /// before end here.
    ///
    /// To change a part of the state, use [`VcpuCore::hart_mut`]: an interrupt that is raised
    /// between [`VcpuCore::state`] and this call would be lost.
    ///
    /// # Errors
    /// If no hart can be in `state`. The vCPU is then unchanged.
    pub fn set_state(&mut self, state: &HartState) -> Result<(), StateError> {
        self.hart.set_state(state)?;
        self.port.changed.store(0, Ordering::Relaxed);
        Ok(())
    }

    /// Watches for the next instruction to retire. [`VcpuCore::first_instruction`] then returns the
    /// time.
    pub const fn watch_first_instruction(&mut self) {
        self.first = First::Watched;
    }

    /// The time at which the first instruction since [`VcpuCore::watch_first_instruction`] retired.
    /// `None` if none has retired.
    #[must_use]
    pub const fn first_instruction(&self) -> Option<Instant> {
        match self.first {
            First::Ran(when) => Some(when),
            First::Unwatched | First::Watched => None,
        }
    }

    /// Whether [`VcpuCore::watch_first_instruction`] still waits for an instruction to retire.
    #[must_use]
    pub const fn watches_first_instruction(&self) -> bool {
        matches!(self.first, First::Watched)
    }

    /// Returns a handle that kicks this vCPU.
    #[must_use]
    pub fn kick_handle(&self) -> KickHandle {
        KickHandle(Arc::clone(&self.port))
    }
}

/// The time that `ticks` of the clock take.
fn until(ticks: u64) -> Duration {
    let nanos = 1_000_000_000 / TIMEBASE_HZ;
    Duration::from_nanos(ticks.saturating_mul(nanos))
}

/// Raises and lowers the interrupts that other threads have changed.
#[cold]
fn take_changed(hart: &mut Hart, port: &Port) {
    let changed = port.changed.swap(0, Ordering::Relaxed);
    for interrupt in [Interrupt::Software, Interrupt::Timer, Interrupt::External] {
        let bit = 1 << interrupt as u32;
        if changed & (bit | bit << LOWERED) != 0 {
            hart.set_interrupt(interrupt, changed & bit != 0);
        }
    }
}

/// Serves requests while the vCPU is outside.
#[cold]
fn serve<R: MemslotReader>(hart: &mut Hart, memory: &mut VcpuMemory<R>, requests: Requests) {
    if requests.contains(Requests::FLUSH) {
        memory.tlb.flush();
        hart.invalidate_code();
    } else {
        if requests.contains(Requests::FLUSH_WRITES) {
            memory.tlb.flush_writes();
        }
        if requests.contains(Requests::FENCE_VMA) {
            memory.tlb.fence(None, None);
            hart.forget_code_translations();
        }
        if requests.contains(Requests::FENCE_I) {
            hart.fence_code();
        }
    }
    if requests.contains(Requests::QUIESCE) {
        memory.slots.refresh();
    }
    if requests != Requests::KICK {
        // The requester waits until every vCPU has left. If vCPUs outnumber CPUs, a vCPU that was
        // preempted inside its guest needs a CPU to leave: offer it this one.
        yield_now();
    }
}

impl<M: Memslots> fmt::Debug for VcpuCore<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VcpuCore")
            .field("id", &self.id)
            .field("hart", &self.hart)
            .finish_non_exhaustive()
    }
}
