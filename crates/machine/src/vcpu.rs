//! The trait of vCPUs, and their exits.

use crate::MachineError;
use pageferry_addr::{Gpa, RamPage};
use std::time::Instant;

/// The kind of an access to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// A load.
    Read,
    /// A store or an atomic.
    Write,
    /// An instruction fetch.
    Execute,
}

/// The reason why a vCPU left the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It touched a page whose bit in the missing bitmap is set, and the engine delivers such
    /// faults as exits. Entering again after the bit is clear repeats the access.
    MemoryFault {
        /// The page.
        page: RamPage,
        /// The access that it tried.
        access: Access,
    },
    /// It stored to an address no memory slot covers.
    MmioWrite {
        /// The address.
        gpa: Gpa,
        /// The value, zero-extended.
        value: u64,
        /// How many bytes: 1, 2, 4 or 8.
        size: u8,
    },
    /// It loaded from an address no memory slot covers. The load has returned all ones.
    MmioRead {
        /// The address.
        gpa: Gpa,
        /// How many bytes: 1, 2, 4 or 8.
        size: u8,
    },
    /// It waits for an interrupt that cannot come (HLT, WFI).
    Halted,
    /// It was kicked.
    Kicked,
}

/// The answer of a hook: how the vCPU goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HookVerdict {
    /// Go on.
    Resume,
    /// Leave the guest until the VM is resumed (a pause is under way, or the hook asks for one).
    Park,
}

/// The whole state of a vCPU, in its engine's own versioned encoding.
///
/// Opaque above the engine; at most [`VcpuState::MAX_BYTES`] long. The engine that restores it
/// checks every byte: it comes from another process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VcpuState(pub Vec<u8>);

impl VcpuState {
    /// The most bytes a state may have.
    pub const MAX_BYTES: usize = 64 * 1024;
}

/// Makes a vCPU leave the guest, from any thread.
pub trait Kicker: Send + Sync {
    /// Makes the vCPU leave the guest soon. If it is not in the guest, its next entry returns at
    /// once with [`Exit::Kicked`]. No kick is lost: each gives at least one such exit.
    fn kick(&self);

    /// Whether a kick is waiting to be taken. Hooks that wait on a vCPU's behalf poll this.
    fn is_kicked(&self) -> bool;
}

/// One virtual CPU.
pub trait Vcpu: Send {
    /// The index, from 0.
    fn id(&self) -> u32;

    /// Runs the guest until it leaves for a reason the caller must see.
    ///
    /// Always called from one thread, the one that called it first.
    ///
    /// # Errors
    /// When the engine cannot go on after what the guest did (a triple fault, an emulation
    /// failure), or the kernel refused. The state stays as it was then. After a triple fault on an
    /// AMD host, KVM has reset it.
    fn run(&mut self) -> Result<Exit, MachineError>;

    /// How to kick this vCPU.
    fn kicker(&self) -> std::sync::Arc<dyn Kicker>;

    /// The whole state, to be restored on another machine of the same engine.
    ///
    /// # Errors
    /// When the kernel refuses a part that matters.
    fn save(&mut self) -> Result<VcpuState, MachineError>;

    /// Replaces the whole state.
    ///
    /// # Errors
    /// When the bytes are not a state of this engine and version, or a value that matters cannot be
    /// set. The vCPU must then not be run.
    fn restore(&mut self, state: &VcpuState) -> Result<(), MachineError>;

    /// Sets up the state in which a guest program starts: `entry` and up to two arguments (x86-64:
    /// rip, rdi, rsi in ring 3 with flat 64-bit tables at `tables`; RV64: pc, a0, a1 in VS-mode).
    ///
    /// # Errors
    /// When the kernel refuses.
    fn set_start(&mut self, start: &StartState) -> Result<(), MachineError>;

    /// When the first guest instruction since the last [`Vcpu::restore`] ran.
    fn first_instruction(&self) -> FirstInstruction;
}

/// What an engine knows of the first guest instruction that a vCPU ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstInstruction {
    /// Nothing, now or later: the engine does not see single instructions, or the vCPU was not
    /// restored.
    Untold,
    /// None has retired so far. A vCPU may leave the guest many times in this state: its first
    /// instruction may itself wait for memory.
    NotYet,
    /// The moment at which it retired.
    At(Instant),
}

/// Where a guest program starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartState {
    /// Guest-virtual (and, as all tables here are flat, guest-physical) address of the first
    /// instruction.
    pub entry: u64,
    /// Top of the stack.
    pub stack: u64,
    /// The arguments.
    pub args: [u64; 2],
    /// Guest-physical address of the root page table (x86-64 only; ignored elsewhere).
    pub tables: Gpa,
}
