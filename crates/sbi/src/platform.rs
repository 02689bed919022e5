//! What a hypervisor brings.

use crate::{HartMask, HartStatus, error};

/// A fence on other harts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// FENCE.I.
    Code,
    /// SFENCE.VMA for a range of addresses, in one address space or in all.
    Translations {
        /// The first virtual address.
        start: u64,
        /// The number of bytes; all of the address space if it is 0 or all ones.
        bytes: u64,
        /// The address space, or `None` for all.
        asid: Option<u64>,
    },
}

/// The reason why a hart does not start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartError {
    /// It is not stopped.
    NotStopped,
    /// The hypervisor cannot execute code at this address.
    Address,
}

impl StartError {
    pub(crate) const fn code(self) -> i64 {
        match self {
            Self::NotStopped => error::ALREADY_AVAILABLE,
            Self::Address => error::INVALID_ADDRESS,
        }
    }
}

/// The result of an access to guest memory.
pub type Memory<T, Again> = Result<Option<T>, Again>;

/// The hypervisor behind the calls of one hart.
pub trait Platform {
    /// The reason why a call must be repeated later: its memory is not here.
    type Again;

    /// The number of harts. Their ids are 0 and up.
    fn harts(&self) -> u32;

    /// Sets the calling hart's timer to `deadline`, in ticks of `time`. All ones switch it off.
    fn set_timer(&mut self, deadline: u64);

    /// Makes a supervisor software interrupt pending at all harts of `harts`.
    fn send_ipi(&mut self, harts: HartMask);

    /// Lets all harts of `harts` execute `fence`. Returns when they have.
    fn fence(&mut self, harts: HartMask, fence: Fence);

    /// Starts `hart`, which exists, at `entry` with `opaque` in `a1`.
    ///
    /// # Errors
    /// [`StartError`]; the hart is then unchanged.
    fn start(&mut self, hart: u32, entry: u64, opaque: u64) -> Result<(), StartError>;

    /// The state of `hart`, which exists. It may have changed already.
    fn status(&self, hart: u32) -> HartStatus;

    /// Whether all of `bytes` bytes of guest-physical memory from `address` are RAM.
    fn is_ram(&self, address: u64, bytes: u64) -> bool;

    /// Takes text of the guest for the console: some of `bytes` bytes of RAM from `address`.
    /// Returns their number, or `None` if the console fails.
    ///
    /// # Errors
    /// When the memory is not here. Nothing was taken.
    fn console_write(&mut self, address: u64, bytes: u64) -> Memory<u64, Self::Again>;

    /// Takes one byte for the console. Returns whether it did.
    fn console_write_byte(&mut self, byte: u8) -> bool;

    /// Gives text to the guest: writes at most `bytes` bytes to RAM from `address`. Returns their
    /// number, which may be 0, or `None` if the console fails.
    ///
    /// # Errors
    /// When the memory is not here. Nothing was given.
    fn console_read(&mut self, address: u64, bytes: u64) -> Memory<u64, Self::Again>;
}

/// A platform with one hart and nothing else: no timer, no memory, a console that takes nothing.
/// For tests and examples.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bare;

impl Platform for Bare {
    type Again = core::convert::Infallible;

    fn harts(&self) -> u32 {
        1
    }

    fn set_timer(&mut self, _deadline: u64) {}

    fn send_ipi(&mut self, _harts: HartMask) {}

    fn fence(&mut self, _harts: HartMask, _fence: Fence) {}

    fn start(&mut self, _hart: u32, _entry: u64, _opaque: u64) -> Result<(), StartError> {
        Err(StartError::NotStopped)
    }

    fn status(&self, _hart: u32) -> HartStatus {
        HartStatus::Started
    }

    fn is_ram(&self, _address: u64, bytes: u64) -> bool {
        bytes == 0
    }

    fn console_write(&mut self, _address: u64, _bytes: u64) -> Memory<u64, Self::Again> {
        Ok(Some(0))
    }

    fn console_write_byte(&mut self, _byte: u8) -> bool {
        false
    }

    fn console_read(&mut self, _address: u64, _bytes: u64) -> Memory<u64, Self::Again> {
        Ok(Some(0))
    }
}
