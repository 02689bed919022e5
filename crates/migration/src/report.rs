//! The figures of a migration.

use crate::Phase;
use hdrhistogram::Histogram;
use pageferry_addr::RamPage;
use pageferry_machine::DeliveryInUse;
use std::time::Duration;

/// Pages by the way they were sent. A page counts once for each time it was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// Sent with their bytes in pre-copy.
    pub precopy: u64,
    /// Sent on an urgent channel, with their bytes, as zero, or confirmed.
    pub urgent: u64,
    /// Sent with their bytes by the background push.
    pub background: u64,
    /// Sent as zero on a bulk channel, in any phase.
    pub zero: u64,
    /// Confirmed on any channel: the destination had the bytes already. Those on an urgent channel
    /// count there too.
    pub confirmed: u64,
}

/// The pages that the push sent early, since vCPUs seemed to be about to touch them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrefetchCounts {
    /// Pages that came before their touch: the guest requested a later page of the same sequence,
    /// and not these.
    pub in_time: u64,
    /// Pages of which nothing shows that the guest touched them before the end of the migration.
    pub unconfirmed: u64,
    /// Requests for pages that were sent already, by prefetch or by the rest of the push.
    pub late: u64,
}

/// The device states of a migration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceFigures {
    /// The number of devices.
    pub count: u64,
    /// Bytes of their states.
    pub bytes: u64,
    /// The time in which they were paused and saved, while the guest stood still.
    pub took: Duration,
}

/// What protects the channels of a session, and what the handshake found. All channels of a session
/// have the same protection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Protected {
    /// The version of the protocol that both sides speak.
    pub version: u16,
    /// Whether TLS protects the channels, by [`TLS_VERSION`](pageferry_transport::TLS_VERSION).
    pub tls: bool,
    /// The name of the peer in its certificate: the one that was asked for, or else the first DNS
    /// name. `None` without TLS, or without such a name.
    pub peer_name: Option<String>,
}

/// The start of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PhaseStart {
    /// The phase.
    pub phase: Phase,
    /// Its time, by [`monotonic`](crate::monotonic).
    pub at: Duration,
}

/// The most phases that a report has. A session that is lost and resumed for days, or a peer that
/// begins passes without an end, makes any number.
const MAX_PHASES: usize = 2000;

impl PhaseStart {
    /// Adds a phase that starts now, unless there are too many.
    pub(crate) fn note(phases: &mut Vec<Self>, phase: Phase) {
        if phases.len() < MAX_PHASES {
            let at = crate::clock::monotonic();
            phases.push(Self { phase, at });
        }
    }
}

/// The source's report of a completed migration. Its points in time are by
/// [`monotonic`](crate::monotonic).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SourceReport {
    /// Every phase in order, with its start: the first 2000.
    pub phases: Vec<PhaseStart>,
    /// From the first connection attempt to the confirmed end.
    pub total: Duration,
    /// The time at which the first vCPU left the guest for good.
    pub first_stop: Duration,
    /// The time at which the last vCPU did so. No guest instruction runs at the source after it.
    pub last_stop: Duration,
    /// Whether the VM was paused by its owner, and arrived paused. Then there is no blackout, and
    /// the two times above are those of that pause.
    pub paused: bool,
    /// The time at which everything up to SwitchOver was sent.
    pub sent_at: Duration,
    /// The time at which the destination's `Running` arrived.
    pub confirmed: Duration,
    /// What protected the channels.
    pub protected: Protected,
    /// Pages sent.
    pub pages: PageCounts,
    /// The part of the background push that was guessed from requests.
    pub prefetch: PrefetchCounts,
    /// The states of devices.
    pub devices: DeviceFigures,
    /// The number of pages missing when the guest started at the destination.
    pub missing_at_start: u64,
    /// Pages that had been sent in pre-copy, had changed, and were sent with their bytes again
    /// after the guest had stopped. Counted with [`Tracking::Hash`](crate::Tracking::Hash) only.
    pub pages_resent: u64,
    /// Bytes of pages that confirmations have saved.
    pub bytes_saved: u64,
    /// Bytes of pages that the destination has acknowledged, without headers and descriptors. A
    /// page counts as often as it came.
    pub page_bytes: u64,
    /// Bytes of pages sent by the background push.
    pub background_bytes: u64,
    /// From the start of the background push to its end.
    pub background_took: Duration,
    /// The pre-copy passes in order, at most the first 1000.
    pub passes: Vec<PassFigures>,
    /// The expected blackout, by the last forecast before the switch-over.
    pub blackout_forecast: Option<Duration>,
    /// The notes of pre-copy: why it ended with many pages left, or went on. For people.
    pub notes: Vec<String>,
    /// How often the control channel was lost and opened again.
    pub reconnects: u32,
    /// The open channels of all roles that were lost. Those that ended with a lost control channel
    /// do not count.
    pub channels_lost: u64,
}

/// One pre-copy pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PassFigures {
    /// Its pages, zero pages included.
    pub pages: u64,
    /// The time until the destination had all of them.
    pub took: Duration,
    /// The pages that the guest had dirtied by its end, and that the destination thus lacks.
    /// Without a dirty log nobody knows them: then these are the pages that had changed since the
    /// pass before, or all pages.
    pub left: u64,
}

/// One fault on a missing page, as the destination saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FaultRecord {
    /// The time at which the fault arrived, by [`monotonic`](crate::monotonic).
    pub at: Duration,
    /// The time for which the vCPU was stalled.
    pub stall: Duration,
    /// The page.
    pub page: RamPage,
    /// The vCPU, if the fault delivery names it.
    pub vcpu: Option<u32>,
}

/// A stage of a stall on a missing page. Together the stages are the stall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum StallStage {
    /// From the fault's arrival at Pageferry until its request goes to the socket.
    ToSent,
    /// From the request's arrival at the source until its answer.
    AtSource,
    /// The rest of the round trip: the wire, and every queue on the way.
    WireAndQueue,
    /// From the answer's arrival until the page is in place.
    Install,
    /// From the page in place until the vCPU's thread goes on.
    Resume,
}

impl StallStage {
    /// All stages in their order.
    pub const ALL: [Self; 5] = [
        Self::ToSent,
        Self::AtSource,
        Self::WireAndQueue,
        Self::Install,
        Self::Resume,
    ];

    /// The name in reports and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ToSent => "to-sent",
            Self::AtSource => "at-source",
            Self::WireAndQueue => "wire-and-queue",
            Self::Install => "install",
            Self::Resume => "resume",
        }
    }
}

/// Times of stalls, or of one stage of them.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StallTimes {
    /// The times in nanoseconds, each at most 12.5 percent above the true one.
    pub counts: Histogram<u64>,
    /// The exact sum of the times.
    pub sum: Duration,
}

impl StallTimes {
    /// The number of times.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.len()
    }

    /// The times, ascending, each with its count.
    pub fn recorded(&self) -> impl Iterator<Item = (Duration, u64)> {
        let recorded = self.counts.iter_recorded();
        recorded.map(|v| {
            (
                Duration::from_nanos(v.value_iterated_to()),
                v.count_at_value(),
            )
        })
    }
}

/// The stalls of one vCPU.
#[derive(Clone, Debug)]
pub struct StallRow {
    /// The vCPU, from 0. `None` for faults that userfaultfd events brought: they name no vCPU.
    pub vcpu: Option<u32>,
    /// Its stalls.
    pub whole: StallTimes,
    /// Their stages, by the number of their [`StallStage`].
    pub(crate) stages: [StallTimes; StallStage::ALL.len()],
}

impl StallRow {
    /// The times of one stage. A stall that could not be measured in this stage is not in it: for
    /// example, the background push brought the page, or another vCPU had requested it before.
    #[must_use]
    pub const fn stage(&self, stage: StallStage) -> &StallTimes {
        &self.stages[stage as usize]
    }
}

/// The destination's report of a completed migration. Its points in time are by
/// [`monotonic`](crate::monotonic).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DestinationReport {
    /// Every phase in order, with its start.
    pub phases: Vec<PhaseStart>,
    /// The name of the engine that runs the guest.
    pub engine: String,
    /// The fault delivery.
    pub delivery: DeliveryInUse,
    /// The time at which the destination took the VM over, and resumed the vCPUs unless `paused`.
    pub started: Duration,
    /// Whether the VM was paused by its owner at the source, and arrived paused. It may have been
    /// resumed since.
    pub paused: bool,
    /// The time of the first guest instruction, if the engine knows it exactly. Otherwise
    /// [`DestinationReport::first_touch`] gives a slightly later time. `None` for a VM that
    /// arrived paused.
    pub first_instruction: Option<Duration>,
    /// Stalls of faults on missing pages, in nanoseconds. A stall lasts from the fault's arrival at
    /// Pageferry to the moment at which the vCPU may continue. Faults on present, unmapped pages
    /// are not included.
    pub stalls: Histogram<u64>,
    /// The stalls of each vCPU in order, with their stages, and a last row for userfaultfd events.
    pub stall_rows: Vec<StallRow>,
    /// Faults on missing pages in order of arrival, at most
    /// [`DestinationReport::MAX_FAULT_RECORDS`].
    pub faults: Vec<FaultRecord>,
    /// The first faults of all kinds, in order. Their stalls are not recorded.
    pub first_faults: Vec<FaultRecord>,
    /// The number of faults on present, unmapped pages.
    pub local_faults: u64,
    /// What protected the channels.
    pub protected: Protected,
    /// Pages received, counted in the same way as at the source.
    pub pages: PageCounts,
    /// Pages missing when the guest started.
    pub missing_at_start: u64,
    /// How often the control channel was lost and opened again.
    pub reconnects: u32,
    /// The open channels of all roles that were lost. Those that ended with a lost control channel
    /// do not count.
    pub channels_lost: u64,
}

impl DestinationReport {
    /// The most faults on missing pages that a report keeps.
    pub const MAX_FAULT_RECORDS: usize = 65_536;
    /// The number of first faults of all kinds that a report keeps.
    pub const MAX_FIRST_FAULTS: usize = 256;

    /// The time of the first fault on a page for which `is_data` holds, among the first faults.
    ///
    /// This bounds the time of the first guest instruction from above, under two conditions:
    /// 1. The engine maps nothing before the start.
    /// 2. `is_data` excludes the pages that a vCPU needs before its first instruction (code,
    ///    tables).
    #[must_use]
    pub fn first_touch(&self, is_data: impl Fn(RamPage) -> bool) -> Option<Duration> {
        self.first_faults
            .iter()
            .find(|f| is_data(f.page))
            .map(|f| f.at)
    }
}
