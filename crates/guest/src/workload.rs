//! The demo workload: every vCPU checks and rewrites its share of memory for ever.

use crate::code::{INSTRUCTIONS_PER_PASS, INSTRUCTIONS_PER_STEP, INSTRUCTIONS_PER_VISIT};
use crate::order::OrderParams;
use crate::program::forward_to_program;
use crate::{GuestError, Isa, MemoryMap, Program, ProgramKind, code};
use pageferry_addr::RamPage;
use std::ops::Range;
use std::time::Duration;

/// The demo workload for a number of vCPUs and an amount of memory.
///
/// Two workloads made with the same numbers are equal to the last byte. So a migration's
/// destination makes its own to verify the memory that arrived.
///
/// ```
/// use pageferry_guest::{Isa, Workload};
///
/// let workload = Workload::new(Isa::Rv64, 2, 1 << 20)?;
/// let start = workload.start(1);
/// assert_eq!((start.entry, start.args[0]), (0x1000, 0x3000));
/// assert_eq!(workload.share(0).end, workload.share(1).start);
/// # Ok::<(), pageferry_guest::GuestError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    program: Program,
}

forward_to_program!(Workload);

impl Workload {
    /// Plans the workload.
    ///
    /// # Errors
    /// As [`MemoryMap::new`].
    pub fn new(isa: Isa, vcpus: u32, memory_bytes: u64) -> Result<Self, GuestError> {
        let map = MemoryMap::new(isa, vcpus, memory_bytes)?;
        let code = code::workload(isa, map.share_pages());
        let ranges = (0..vcpus).map(|vcpu| map.share(vcpu)).collect();
        Ok(Self {
            program: Program::new(ProgramKind::Workload, map, code, ranges, 0),
        })
    }

    /// The workload, with a rest of each vCPU after each page, in steps of 100 µs. The VMM lets it
    /// rest ([`Event::Rest`](crate::Event::Rest)), so it sets the pace. The rest is in the guest's
    /// memory: it goes where the guest goes.
    ///
    /// # Errors
    /// If `rest` is longer than [`Doorbell::MAX_REST`](crate::Doorbell::MAX_REST).
    pub fn with_rest(self, rest: Duration) -> Result<Self, GuestError> {
        let program = self.program.with_rest(rest)?;
        Ok(Self { program })
    }

    /// See [`MemoryMap::minimum_memory`].
    #[must_use]
    pub fn minimum_memory(isa: Isa, vcpus: u32) -> u64 {
        MemoryMap::minimum_memory(isa, vcpus)
    }

    /// The pages that a vCPU rewrites, as RAM page indices.
    ///
    /// # Panics
    /// When there is no such vCPU.
    #[must_use]
    pub fn share(&self, vcpu: u32) -> Range<u64> {
        self.memory_map().share(vcpu)
    }

    /// Whether a page is in a vCPU's share.
    #[must_use]
    pub fn is_data(&self, page: RamPage) -> bool {
        self.memory_map().data().contains(&page.0)
    }

    /// The number of instructions that the RV64 program retires per page, on average over a pass,
    /// without the store that asks for a rest. `None` for x86-64, where nobody counts them.
    ///
    /// The number is exact from the second pass on if the guest finds no errors, with two
    /// exceptions. Pages above the hole take one instruction more. The end of a pass cuts off, on
    /// average, half of the values that the order generator would skip last. The first pass only
    /// tests for zero and takes fewer instructions.
    #[must_use]
    pub fn instructions_per_page(&self) -> Option<f64> {
        if self.memory_map().isa() != Isa::Rv64 {
            return None;
        }
        let pages = self.memory_map().share_pages();
        let steps = (OrderParams::new(pages).mask + 1) as f64 / pages as f64;
        Some(
            INSTRUCTIONS_PER_VISIT as f64
                + INSTRUCTIONS_PER_STEP as f64 * steps
                + INSTRUCTIONS_PER_PASS as f64 / pages as f64,
        )
    }
}
