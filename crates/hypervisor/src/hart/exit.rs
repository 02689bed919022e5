//! Why a hart left the guest.

use super::bus::{Access, MemoryFault};

/// Why [`Hart::run`](super::Hart::run) returned.
///
/// Whatever it is, the hart's state is then complete: nothing is half done, and it can be saved,
/// moved and run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HartExit {
    /// A load where no memory answers. The load is retired and its register holds all ones (sign-
    /// or zero-extended as the load says);
    /// [`Hart::complete_mmio_load`](super::Hart::complete_mmio_load) replaces that before the next
    /// entry.
    MmioLoad {
        /// The address, naturally aligned.
        gpa: u64,
        /// How many bytes: 1, 2, 4 or 8.
        size: u8,
    },
    /// A store where no memory answers. It is retired.
    MmioStore {
        /// The address, naturally aligned.
        gpa: u64,
        /// How many bytes: 1, 2, 4 or 8.
        size: u8,
        /// The value, zero-extended.
        value: u64,
    },
    /// Memory of the guest is not there now. The instruction is not retired; the next entry repeats
    /// it.
    MemoryFault {
        /// What is missing, or not to be stored to.
        fault: MemoryFault,
        /// What the instruction tried to do.
        access: Access,
    },
    /// An ECALL from VS-mode, as the SBI uses it. `pc` is already behind it, and it is not counted
    /// as retired. An answer goes to `a0` and `a1` (`x10`, `x11`).
    Ecall {
        /// `a0` to `a7`.
        args: [u64; 8],
    },
    /// A WFI with nothing to wake it. It is retired: the next entry goes on behind it.
    Halted,
    /// The request word is not 0. Nothing was retired because of it.
    Requested,
    /// The budget is used up.
    Budget,
}
