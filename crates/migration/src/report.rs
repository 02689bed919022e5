//! What a migration did, in numbers.

use crate::Phase;
use hdrhistogram::Histogram;
use pageferry_addr::RamPage;
use pageferry_machine::{Delivery, Engine};

/// Pages by the way they went. Every page counts once for each time it was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// With their bytes, in pre-copy.
    pub precopy: u64,
    /// With their bytes or as zero, on request, on the urgent connection.
    pub urgent: u64,
    /// With their bytes, in post-copy, pushed in the background.
    pub background: u64,
    /// Said to be zero, on the stream, in any phase.
    pub zero: u64,
}

/// When a phase began, on the host's monotonic clock in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhaseStart {
    /// The phase.
    pub phase: Phase,
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub at_ns: u64,
}

/// The source's account of a completed migration.
#[derive(Clone, Debug)]
pub struct SourceReport {
    /// Every phase in order, with its start.
    pub phases: Vec<PhaseStart>,
    /// From the first connection attempt to the confirmed end, nanoseconds.
    pub total_ns: u64,
    /// When the first vCPU left the guest for good.
    pub first_stop_ns: u64,
    /// When the last vCPU did: the last guest instruction at the source.
    pub last_stop_ns: u64,
    /// When the destination's word that the guest runs had arrived.
    pub confirmed_ns: u64,
    /// Pages sent.
    pub pages: PageCounts,
    /// How many pages were missing when the destination started.
    pub missing_at_start: u64,
    /// Bytes of pages written to both connections (headers and descriptors not counted).
    pub page_bytes: u64,
    /// Bytes of pages sent by the background push, and how long that took.
    pub background_bytes: u64,
    /// Nanoseconds from the start of the background push to its end.
    pub background_ns: u64,
    /// Pages of each pre-copy pass (data and zero) and its length in nanoseconds.
    pub passes: Vec<(u64, u64)>,
}

/// One fault on a missing page, as the destination saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultRecord {
    /// When it arrived, `CLOCK_MONOTONIC` nanoseconds.
    pub at_ns: u64,
    /// How long the vCPU was held up.
    pub stall_ns: u64,
    /// The page.
    pub page: RamPage,
    /// The vCPU, where the delivery names it.
    pub vcpu: Option<u32>,
}

/// The destination's account of a completed migration.
#[derive(Clone, Debug)]
pub struct DestinationReport {
    /// Every phase in order, with its start.
    pub phases: Vec<PhaseStart>,
    /// Who runs the guest.
    pub engine: Engine,
    /// How faults were delivered.
    pub delivery: Delivery,
    /// When the vCPUs were let go.
    pub started_ns: u64,
    /// When the first guest instruction ran, where the engine can tell exactly. Elsewhere
    /// [`DestinationReport::first_touch_ns`] gives a time a little after it.
    pub first_instruction_ns: Option<u64>,
    /// Stalls of faults on missing pages, in nanoseconds: from the fault's arrival at Pageferry to
    /// the moment the vCPU may go on. Faults on pages that were there and only not mapped are
    /// not in it.
    pub stalls: Histogram<u64>,
    /// Faults on missing pages (at most [`DestinationReport::MAX_FAULT_RECORDS`]), each vCPU's in
    /// order.
    pub faults: Vec<FaultRecord>,
    /// The first faults of all kinds, in order; those that were only mapped have no stall.
    pub first_faults: Vec<FaultRecord>,
    /// Faults on pages that were present and only had to be mapped.
    pub local_faults: u64,
    /// Pages received, counted as the source counts them.
    pub pages: PageCounts,
    /// Pages missing when the guest started.
    pub missing_at_start: u64,
}

impl DestinationReport {
    /// How many single faults a report keeps.
    pub const MAX_FAULT_RECORDS: usize = 65_536;
    /// How many faults of all kinds a report keeps from the start on.
    pub const MAX_FIRST_FAULTS: usize = 256;

    /// When the guest first touched a page for which `is_data` holds, among the first faults: an
    /// upper bound of the time of its first instruction where nothing is mapped at the start
    /// (KVM), as long as `is_data` leaves out the pages a vCPU needs before its first
    /// instruction (code, tables).
    #[must_use]
    pub fn first_touch_ns(&self, is_data: impl Fn(RamPage) -> bool) -> Option<u64> {
        self.first_faults
            .iter()
            .find(|f| is_data(f.page))
            .map(|f| f.at_ns)
    }
}
