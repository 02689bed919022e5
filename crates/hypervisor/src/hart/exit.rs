//! The reasons for which a hart leaves the guest.

use super::bus::{Access, MemoryFault};

/// The reason for which [`Hart::run`](super::Hart::run) returned.
///
/// After every exit, the hart's state is complete: no instruction is half done. The state can be
/// saved and moved, and the hart can run again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HartExit {
    /// A load from an address without memory. The load is retired, and its register holds all ones
    /// (sign- or zero-extended, according to the load). Before the next entry,
    /// [`Hart::complete_mmio_load`](super::Hart::complete_mmio_load) can replace that value.
    MmioLoad {
        /// The address, naturally aligned.
        gpa: u64,
        /// The number of bytes: 1, 2, 4 or 8.
        size: u8,
    },
    /// A store to an address without memory. It is retired.
    MmioStore {
        /// The address, naturally aligned.
        gpa: u64,
        /// The number of bytes: 1, 2, 4 or 8.
        size: u8,
        /// The value, zero-extended.
        value: u64,
    },
    /// Guest memory is missing or not writable now: the page itself, or a page of the guest's
    /// tables that lead to it. The instruction is not retired, and the next
    /// entry repeats it.
    MemoryFault {
        /// The range of memory.
        fault: MemoryFault,
        /// The kind of the instruction's access. The walk through the guest's tables only loads.
        access: Access,
    },
    /// An ECALL from VS-mode: an SBI call. `pc` is already behind it, and it does not count as
    /// retired. The answer belongs into `a0` and `a1` (`x10`, `x11`).
    Ecall {
        /// `a0` to `a7`.
        args: [u64; 8],
    },
    /// A WFI while no interrupt is both pending and enabled. It is retired, so the next entry
    /// continues behind it. Or the hart is stopped, or suspended without such an interrupt.
    Halted,
    /// The request word is not 0. The pending instruction is not retired.
    Requested,
    /// The budget is used up.
    Budget,
}
