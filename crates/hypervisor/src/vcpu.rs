//! One virtual CPU: a hart, its view of memory, and the gate between them and the other threads.

use crate::gate::{Gate, Requests};
use crate::hart::{Access, Hart, HartExit, HartState, StateError};
use crate::memory::{Again, Memory, USERFAULT, WRITE_TRACKED};
use crate::revoke::Shared;
use crate::scalable::Scalable;
use crate::slots::{MemslotReader, Memslots};
use crate::sync::yield_now;
use pageferry_addr::Gpa;
use pageferry_tdp::ring::{Harvester, Producer};
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// Why [`VcpuCore::run`] returned. At every exit the hart's state is complete and can be saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The vCPU touched memory that is a slot's but is not there, or not to be stored to, now. Entering again repeats the
    /// access.
    MemoryFault {
        /// The first byte of the page.
        gpa: Gpa,
        /// How many bytes it has.
        size: u64,
        /// What the instruction tried to do.
        access: Access,
        /// Whether it is the page's userfault bit that is set.
        userfault: bool,
        /// Whether it is that the page is [write-tracked](crate::Vm::track_writes), and the access a store.
        write_tracked: bool,
    },
    /// A load where no slot is. It returns all ones unless [`VcpuCore::complete_mmio_read`] is called before the
    /// next entry.
    MmioRead {
        /// The address, naturally aligned.
        gpa: Gpa,
        /// How many bytes: 1, 2, 4 or 8.
        size: u8,
    },
    /// A store where no slot is, or into a read-only slot. It is done as far as the vCPU is concerned.
    MmioWrite {
        /// The address, naturally aligned.
        gpa: Gpa,
        /// How many bytes: 1, 2, 4 or 8.
        size: u8,
        /// The value, zero-extended.
        value: u64,
    },
    /// An ECALL from VS-mode; the answer goes into `a0` and `a1`.
    Ecall {
        /// `a0` to `a7`.
        args: [u64; 8],
    },
    /// The vCPU's dirty ring is nearly full, and the next store needs room in it. Entering again repeats the store:
    /// harvest the ring and call [`Vm::reset_dirty_rings`](crate::Vm::reset_dirty_rings) first.
    DirtyRingFull,
    /// A WFI with nothing to wake it.
    Halted,
    /// Somebody kicked the vCPU.
    Kicked,
}

/// What other threads hold of a vCPU.
#[derive(Default)]
pub(crate) struct Link {
    pub(crate) gate: Gate,
}

/// Kicks a vCPU, from any thread.
#[derive(Clone)]
pub struct KickHandle(Arc<Link>);

impl KickHandle {
    /// Makes the vCPU return from [`VcpuCore::run`] with [`Exit::Kicked`]: soon, if it is inside the guest, else at its
    /// next entry. A kick is kept until such an exit takes it; kicks that were not taken merge into one.
    pub fn kick(&self) {
        // Nobody waits for a kicked vCPU here, so the ticket is of no use.
        let _ = self.0.gate.request(Requests::KICK);
    }

    /// Whether a kick is waiting to be taken.
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

/// When the first instruction is to be noticed.
#[derive(Clone, Copy)]
enum First {
    Unwatched,
    Watched,
    Ran(Instant),
}

/// One vCPU. Made by [`crate::Vm::create_vcpu`].
pub struct VcpuCore<M: Memslots = Scalable> {
    id: u32,
    hart: Hart,
    memory: Memory<M>,
    link: Arc<Link>,
    first: First,
    dirty_ring: Option<Harvester>,
}

impl<M: Memslots> VcpuCore<M> {
    pub(crate) fn new(
        id: u32,
        vm: Arc<Shared<M>>,
        slots: M::Reader,
        link: Arc<Link>,
        ring: Option<(Producer, Harvester)>,
    ) -> Self {
        let (producer, dirty_ring) = ring.unzip();
        Self {
            id,
            hart: Hart::new(),
            memory: Memory::new(vm, slots, producer),
            link,
            dirty_ring,
            first: First::Unwatched,
        }
    }

    /// The id it was created with.
    #[must_use]
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// The reader's end of the vCPU's dirty ring, for whichever thread is to harvest it: once, and only where the VM has
    /// [`dirty_ring`](crate::VmConfig::dirty_ring).
    pub const fn take_dirty_ring(&mut self) -> Option<Harvester> {
        self.dirty_ring.take()
    }

    /// Runs the guest until it leaves for a reason the caller must see.
    pub fn run(&mut self) -> Exit {
        loop {
            let gate = &self.link.gate;
            let inside = match gate.enter() {
                Ok(inside) => inside,
                Err(requests) => {
                    serve(&mut self.hart, &mut self.memory, requests);
                    if requests.contains(Requests::KICK) {
                        return Exit::Kicked;
                    }
                    continue;
                }
            };
            // Until one instruction has retired, one at a time.
            let watched = matches!(self.first, First::Watched);
            let before = self.hart.instret();
            let budget = watched.then_some(1);
            let exit = self.hart.run(&mut self.memory, gate.bell(), budget);
            if watched && self.hart.instret() != before {
                self.first = First::Ran(Instant::now());
            }
            drop(inside);
            match exit {
                HartExit::Requested => {
                    if let Some(address) = self.memory.unwatched.take() {
                        self.memory.vm.watch(address);
                    }
                    match self.memory.again.take() {
                        // The writer is between the halves of a change: let it go on.
                        Some(Again::Slots) => yield_now(),
                        Some(Again::Tables) => self.memory.worker.wait(),
                        Some(Again::Ring) => return Exit::DirtyRingFull,
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
                HartExit::Halted => return Exit::Halted,
            }
        }
    }

    /// Gives the load of the last [`Exit::MmioRead`] its value. Without such an exit since the last entry it does
    /// nothing.
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

    /// The whole architectural state.
    #[must_use]
    pub fn state(&self) -> HartState {
        self.hart.state()
    }

    /// Replaces the whole architectural state.
    ///
    /// # Errors
    /// If no hart can be in it; the vCPU is then unchanged.
    pub fn set_state(&mut self, state: &HartState) -> Result<(), StateError> {
        self.hart.set_state(state)
    }

    /// Watches for the next instruction to retire: [`VcpuCore::first_instruction`] then says when it did.
    pub const fn watch_first_instruction(&mut self) {
        self.first = First::Watched;
    }

    /// When the first instruction retired since [`VcpuCore::watch_first_instruction`]; `None` if none has.
    #[must_use]
    pub const fn first_instruction(&self) -> Option<Instant> {
        match self.first {
            First::Ran(when) => Some(when),
            First::Unwatched | First::Watched => None,
        }
    }

    /// Whether an instruction that retires now would be the one
    /// [`VcpuCore::watch_first_instruction`] asked for.
    #[must_use]
    pub const fn watches_first_instruction(&self) -> bool {
        matches!(self.first, First::Watched)
    }

    /// How to kick this vCPU.
    #[must_use]
    pub fn kick_handle(&self) -> KickHandle {
        KickHandle(Arc::clone(&self.link))
    }
}

/// Does what was requested while the vCPU is outside.
#[cold]
fn serve<M: Memslots>(hart: &mut Hart, memory: &mut Memory<M>, requests: Requests) {
    if requests.contains(Requests::FLUSH) {
        memory.tlb.flush();
        hart.invalidate_code();
    } else if requests.contains(Requests::FLUSH_WRITES) {
        memory.tlb.flush_writes();
    }
    if requests.contains(Requests::QUIESCE) {
        memory.slots.refresh();
    }
    if requests != Requests::KICK {
        // The requester waits until every vCPU has left. Where there are more of them than processors, one
        // that was preempted inside its guest must get a processor for that: offer it this one.
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
