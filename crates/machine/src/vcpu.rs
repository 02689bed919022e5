//! The trait of vCPUs, and their exits.

use crate::MachineError;
use pageferry_addr::{Gpa, RamPage};
use std::time::Instant;

/// The kind of an access to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
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
#[non_exhaustive]
pub enum Exit {
    /// It touched a page whose bit in the missing bitmap is set, and the engine delivers such
    /// faults as exits. Entering again after the bit is clear repeats the access.
    MemoryFault {
        /// The page.
        page: RamPage,
        /// The access that it tried.
        access: Access,
    },
    /// It stored to an address that no memory slot covers.
    MmioWrite {
        /// The address.
        gpa: Gpa,
        /// The value, zero-extended.
        value: u64,
        /// The number of bytes: 1, 2, 4 or 8.
        size: u8,
    },
    /// It loaded from an address that no memory slot covers. The load returns all ones, unless
    /// [`Vcpu::complete_read`] follows.
    MmioRead {
        /// The address.
        gpa: Gpa,
        /// The number of bytes: 1, 2, 4 or 8.
        size: u8,
    },
    /// It wrote to an I/O port of x86-64.
    PortWrite {
        /// The port.
        port: u16,
        /// The value, zero-extended.
        value: u32,
        /// The number of bytes: 1, 2 or 4.
        size: u8,
    },
    /// It reads from an I/O port of x86-64. The read returns all ones, unless
    /// [`Vcpu::complete_read`] follows.
    PortRead {
        /// The port.
        port: u16,
        /// The number of bytes: 1, 2 or 4.
        size: u8,
    },
    /// It waits for an interrupt that cannot come (HLT, in a machine without interrupt
    /// controllers).
    Halted,
    /// The guest ends itself. No vCPU should run any further. A vCPU that is entered again asks
    /// again.
    Reset(Reset),
    /// It was kicked.
    Kicked,
}

/// The end of a guest, as it asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reset {
    /// The action that is to follow.
    pub kind: ResetKind,
    /// Whether the guest calls it a failure of the system.
    pub failure: bool,
}

/// The action after the end of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetKind {
    /// Nothing.
    Shutdown,
    /// A new start.
    Reboot,
}

/// The answer of a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HookVerdict {
    /// Enter the guest again.
    Resume,
    /// Leave the guest until the VM is resumed (a pause is under way, or the hook asks for one).
    Park,
}

/// The whole state of a vCPU, in its engine's versioned encoding.
///
/// Opaque above the engine; at most [`VcpuState::MAX_BYTES`] long. The bytes come from another
/// process, so the engine that restores them checks every one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VcpuState(pub Vec<u8>);

impl VcpuState {
    /// The maximum length of a state in bytes.
    pub const MAX_BYTES: usize = 64 * 1024;
}

/// Makes a vCPU leave the guest, from any thread.
pub trait Kicker: Send + Sync {
    /// Makes the vCPU leave the guest soon. If it is not in the guest, its next entry returns at
    /// once with [`Exit::Kicked`]. No kick is lost: each gives at least one such exit.
    fn kick(&self);

    /// Whether a kick is pending. Hooks that wait on a vCPU's behalf poll this.
    fn is_kicked(&self) -> bool;
}

/// One virtual CPU.
pub trait Vcpu: Send {
    /// The index, from 0.
    fn id(&self) -> u32;

    /// Runs the guest until it leaves for a reason that concerns the caller.
    ///
    /// Always called from the thread that called it first.
    ///
    /// # Errors
    /// When the engine cannot run the guest any further (a triple fault, an emulation failure), or
    /// the kernel refused. The state then stays as it was. After a triple fault on an AMD host, KVM
    /// has reset it.
    fn run(&mut self) -> Result<Exit, MachineError>;

    /// Answers the load of the last [`Exit::MmioRead`] or [`Exit::PortRead`] with `value`, before
    /// the vCPU is entered again. The call does nothing after another exit.
    fn complete_read(&mut self, value: u64);

    /// A handle that kicks this vCPU.
    fn kicker(&self) -> std::sync::Arc<dyn Kicker>;

    /// The whole state, for another machine of the same engine.
    ///
    /// # Errors
    /// When the kernel refuses a part that matters.
    fn save(&mut self) -> Result<VcpuState, MachineError>;

    /// Decodes a state as [`Vcpu::restore`] does, and changes nothing.
    ///
    /// # Errors
    /// When the bytes are not a state of this engine and version.
    fn check(&self, state: &VcpuState) -> Result<(), MachineError>;

    /// Replaces the whole state.
    ///
    /// # Errors
    /// As [`Vcpu::check`], or when a value that matters cannot be set. The vCPU must then not be
    /// run.
    fn restore(&mut self, state: &VcpuState) -> Result<(), MachineError>;

    /// Sets up the state in which a guest program starts: `entry` and up to two arguments (x86-64:
    /// rip, rdi and rsi, in the [mode](StartMode) of `start`; RV64: pc, a0 and a1, in VS-mode).
    ///
    /// An RV64 hart without this call, and without a restored state, is stopped. Another hart
    /// starts it by SBI.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn set_start(&mut self, start: &StartState) -> Result<(), MachineError>;

    /// The time at which the first guest instruction since the last [`Vcpu::restore`] retired.
    fn first_instruction(&self) -> FirstInstruction;
}

/// An engine's knowledge of the first guest instruction that a vCPU ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FirstInstruction {
    /// Nothing, now or for a while: the engine does not see single instructions, or the vCPU was
    /// not restored, or it waits for an interrupt.
    Untold,
    /// None has retired so far. A vCPU may leave the guest many times in this state, because its
    /// first instruction may itself wait for memory.
    NotYet,
    /// The time at which it retired.
    At(Instant),
}

/// The mode in which an x86-64 vCPU starts. A RV64 hart starts in VS-mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum StartMode {
    /// 64-bit mode in ring 3, with paging by the tables of [`StartState::tables`] and no descriptor
    /// tables: a program without an operating system.
    #[default]
    User,
    /// 64-bit mode in ring 0, with paging by the tables of [`StartState::tables`] and flat segments
    /// 0x10 (code) and 0x18 (data): the 64-bit boot protocol of Linux. The GDT of the protocol is
    /// at [`StartState::GDT`]; the kernel's loader writes it.
    Kernel64,
    /// 32-bit protected mode in ring 0, without paging, with the same segments: the PVH protocol of
    /// Xen. RBX has the second argument.
    Kernel32,
}

/// The start of a guest program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartState {
    /// Address of the first instruction. Guest-virtual and guest-physical are the same: all tables
    /// here are flat.
    pub entry: u64,
    /// Top of the stack.
    pub stack: u64,
    /// The arguments.
    pub args: [u64; 2],
    /// Guest-physical address of the root page table (x86-64 only; ignored elsewhere).
    pub tables: Gpa,
    /// The mode (x86-64 only; ignored elsewhere).
    pub mode: StartMode,
}

impl StartState {
    /// Guest-physical address of the GDT of [`StartMode::Kernel64`] and [`StartMode::Kernel32`]:
    /// four descriptors of 8 bytes.
    pub const GDT: Gpa = Gpa(0x500);
}
