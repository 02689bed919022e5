//! The spinner: only a counter, for tests of kicks and pauses.

use crate::program::forward_to_program;
use crate::{GuestError, Isa, MemoryMap, Program, ProgramKind, code};

/// A program whose vCPUs count up the `done` field of their control pages for ever. It never stores
/// to the doorbell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spin {
    program: Program,
}

forward_to_program!(Spin);

impl Spin {
    /// Plans the spinner.
    ///
    /// # Errors
    /// As [`MemoryMap::new`].
    pub fn new(isa: Isa, vcpus: u32, memory_bytes: u64) -> Result<Self, GuestError> {
        let map = MemoryMap::new(isa, vcpus, memory_bytes)?;
        let ranges = vec![0..0; vcpus as usize];
        let program = Program::new(ProgramKind::Spin, map, code::spin(isa), ranges, 0);
        Ok(Self { program })
    }
}
