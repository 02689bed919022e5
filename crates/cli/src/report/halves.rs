//! The two sides' records of a migration, in a form that travels over a control socket.

use super::stalls::Stalls;
use crate::memory::Overhead;
use crate::sampler::Sample;
use pageferry_addr::RamPage;
use pageferry_machine::Backing;
use pageferry_migration::{
    DestinationReport, PageCounts, PassFigures, PhaseStart, PrefetchCounts, Protected,
    SourceReport, StallRow, StallStage, StallTimes,
};
use pageferry_transport::TLS_VERSION;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Numbers of pages by the way they travelled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pages {
    precopy: u64,
    urgent: u64,
    background: u64,
    zero: u64,
    #[serde(default)]
    confirmed: u64,
}

impl From<PageCounts> for Pages {
    fn from(counts: PageCounts) -> Self {
        Self {
            precopy: counts.precopy,
            urgent: counts.urgent,
            background: counts.background,
            zero: counts.zero,
            confirmed: counts.confirmed,
        }
    }
}

impl From<Pages> for PageCounts {
    fn from(pages: Pages) -> Self {
        Self {
            precopy: pages.precopy,
            urgent: pages.urgent,
            background: pages.background,
            zero: pages.zero,
            confirmed: pages.confirmed,
        }
    }
}

/// The pages that the push sent early.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Prefetch {
    /// Pages that came before their touch.
    pub(crate) in_time: u64,
    /// Pages of which no touch is known.
    pub(crate) unconfirmed: u64,
    /// Requests for pages that were sent already.
    pub(crate) late: u64,
}

impl From<PrefetchCounts> for Prefetch {
    fn from(counts: PrefetchCounts) -> Self {
        Self {
            in_time: counts.in_time,
            unconfirmed: counts.unconfirmed,
            late: counts.late,
        }
    }
}

/// The start of a phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PhaseAt {
    /// Its name, without the pass.
    pub(crate) name: String,
    /// Its name, with the pass.
    pub(crate) label: String,
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub(crate) at_ns: u64,
}

impl From<&PhaseStart> for PhaseAt {
    fn from(start: &PhaseStart) -> Self {
        Self {
            name: start.phase.name().into(),
            label: start.phase.to_string(),
            at_ns: ns(start.at),
        }
    }
}

/// What protected the channels of the move.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Protection {
    /// The version of the protocol.
    pub(crate) version: u16,
    /// The version of TLS.
    pub(crate) tls: Option<String>,
    /// The name in the peer's certificate.
    pub(crate) peer_name: Option<String>,
}

impl From<&Protected> for Protection {
    fn from(protected: &Protected) -> Self {
        Self {
            version: protected.version,
            tls: protected.tls.then(|| TLS_VERSION.to_owned()),
            peer_name: protected.peer_name.clone(),
        }
    }
}

impl fmt::Display for Protection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.tls, &self.peer_name) {
            (None, _) => f.write_str("plain, without TLS"),
            (Some(tls), None) => write!(f, "{tls} with a peer without a name"),
            (Some(tls), Some(name)) => write!(f, "{tls} with `{name}`"),
        }
    }
}

/// The lost connections that the migration survived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Losses {
    /// How often the control channel was lost and opened again.
    pub(crate) reconnects: u32,
    /// The open channels of all roles that were lost.
    pub(crate) channels_lost: u64,
}

/// A pre-copy pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pass {
    /// Its pages.
    pub(crate) pages: u64,
    /// Its length.
    pub(crate) ns: u64,
    /// The pages that the guest had dirtied by its end.
    #[serde(default)]
    pub(crate) left: u64,
}

impl From<&PassFigures> for Pass {
    fn from(pass: &PassFigures) -> Self {
        Self {
            pages: pass.pages,
            ns: ns(pass.took),
            left: pass.left,
        }
    }
}

/// The source's record.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Sent {
    /// Every phase in order.
    pub(crate) phases: Vec<PhaseAt>,
    /// From the first connection attempt to the confirmed end.
    pub(crate) total_ns: u64,
    /// The time at which the first vCPU left the guest for good.
    pub(crate) first_stop_ns: u64,
    /// The time at which the last vCPU left the guest for good.
    pub(crate) last_stop_ns: u64,
    /// The time at which the source learned that the guest runs at the destination.
    pub(crate) confirmed_ns: u64,
    /// What protected the channels.
    #[serde(default)]
    pub(crate) protection: Protection,
    /// Whether the VM was paused by its owner.
    #[serde(default)]
    pub(crate) paused: bool,
    /// Pages sent.
    pub(crate) pages: Pages,
    /// The part of the background push that was guessed from requests.
    #[serde(default)]
    pub(crate) prefetch: Prefetch,
    /// The states of devices: their number, their bytes, and nanoseconds.
    #[serde(default)]
    pub(crate) devices: (u64, u64, u64),
    /// Pages missing when the destination started.
    pub(crate) missing_at_start: u64,
    /// Pages that had changed since pre-copy, and were sent again behind the switch-over.
    #[serde(default)]
    pub(crate) pages_resent: u64,
    /// Bytes of pages that confirmations have saved.
    #[serde(default)]
    pub(crate) bytes_saved: u64,
    /// Bytes of pages that the destination has acknowledged.
    pub(crate) page_bytes: u64,
    /// The part of them that the background push sent.
    pub(crate) background_bytes: u64,
    /// The duration of the background push.
    pub(crate) background_ns: u64,
    /// The pre-copy passes.
    pub(crate) passes: Vec<Pass>,
    /// The parts of the pause that another VMM took: to stop the VM, and then to save it.
    #[serde(default)]
    pub(crate) vmm_pause_ns: Option<(u64, u64)>,
    /// The expected blackout.
    #[serde(default)]
    pub(crate) blackout_forecast_ns: Option<u64>,
    /// The notes of pre-copy.
    #[serde(default)]
    pub(crate) notes: Vec<String>,
    /// How often the connections were opened again.
    #[serde(default)]
    pub(crate) losses: Losses,
    /// The kind of host memory behind the VM at the source.
    pub(crate) backing: String,
    /// The source process's memory beyond guest memory, in bytes, if it is known.
    pub(crate) overhead_bytes: Option<u64>,
    /// The guest's progress.
    pub(crate) samples: Vec<Sample>,
}

impl Sent {
    /// The record of the source's report and of the samples taken meanwhile.
    pub(crate) fn new(report: &SourceReport, backing: Backing, samples: Vec<Sample>) -> Self {
        Self {
            phases: report.phases.iter().map(PhaseAt::from).collect(),
            total_ns: ns(report.total),
            first_stop_ns: ns(report.first_stop),
            last_stop_ns: ns(report.last_stop),
            confirmed_ns: ns(report.confirmed),
            protection: (&report.protected).into(),
            paused: report.paused,
            pages: report.pages.into(),
            prefetch: report.prefetch.into(),
            devices: (
                report.devices.count,
                report.devices.bytes,
                ns(report.devices.took),
            ),
            missing_at_start: report.missing_at_start,
            pages_resent: report.pages_resent,
            bytes_saved: report.bytes_saved,
            page_bytes: report.page_bytes,
            background_bytes: report.background_bytes,
            background_ns: ns(report.background_took),
            passes: report.passes.iter().map(Pass::from).collect(),
            vmm_pause_ns: None,
            blackout_forecast_ns: report.blackout_forecast.map(ns),
            notes: report.notes.clone(),
            losses: Losses {
                reconnects: report.reconnects,
                channels_lost: report.channels_lost,
            },
            backing: backing.name().into(),
            overhead_bytes: Overhead::beside(Some(backing)).map(|o| o.total()),
            samples,
        }
    }
}

/// The large mappings of a VM's memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LargeMappings {
    /// By the host, if it tells.
    pub(crate) host_bytes: Option<u64>,
    /// By the engine, if it counts them.
    pub(crate) engine_bytes: Option<u64>,
}

/// The destination's record.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Received {
    /// Every phase in order.
    pub(crate) phases: Vec<PhaseAt>,
    /// The fault delivery.
    pub(crate) delivery: String,
    /// The reason for it.
    pub(crate) delivery_because: String,
    /// The time at which the VM was taken over, and its vCPUs were started unless `paused`.
    pub(crate) started_ns: u64,
    /// What protected the channels.
    #[serde(default)]
    pub(crate) protection: Protection,
    /// Whether the VM came paused.
    #[serde(default)]
    pub(crate) paused: bool,
    /// The time of the first guest instruction, if the engine reports it.
    pub(crate) first_instruction_ns: Option<u64>,
    /// The time of the guest's first touch of a data page.
    pub(crate) first_touch_ns: Option<u64>,
    /// The stalls of vCPUs on missing pages.
    pub(crate) stalls: Stalls,
    /// The stages of the stalls, of all vCPUs together, by name.
    #[serde(default)]
    pub(crate) stall_stages: Vec<(String, Stalls)>,
    /// The stalls of each vCPU, and last those of userfaultfd events.
    #[serde(default)]
    pub(crate) stalls_by_vcpu: Vec<(Option<u32>, Stalls)>,
    /// Faults on present pages that only had to be mapped.
    pub(crate) local_faults: u64,
    /// Pages received.
    pub(crate) pages: Pages,
    /// Pages missing at the start.
    pub(crate) missing_at_start: u64,
    /// How often the connections were opened again.
    #[serde(default)]
    pub(crate) losses: Losses,
    /// The kind of host memory behind the VM at the destination.
    pub(crate) backing: String,
    /// The large mappings of the memory, when the record was asked for.
    pub(crate) large_mappings: Option<LargeMappings>,
    /// The destination process's memory beyond guest memory, in bytes, if it is known.
    pub(crate) overhead_bytes: Option<u64>,
    /// The guest's progress.
    pub(crate) samples: Vec<Sample>,
}

impl Received {
    /// The record of the destination's report. `is_data` separates the guest's data from its code
    /// and tables.
    pub(crate) fn new(
        report: &DestinationReport,
        backing: Backing,
        is_data: impl Fn(RamPage) -> bool,
    ) -> Self {
        let pairs = report
            .stalls
            .iter_recorded()
            .map(|v| (v.value_iterated_to(), v.count_at_value()));
        let rows = &report.stall_rows;
        let of_stage = |stage: StallStage| {
            let all = rows.iter().flat_map(|row| pairs_of(row.stage(stage)));
            (stage.name().to_owned(), Stalls::new(all))
        };
        let by_vcpu = |row: &StallRow| (row.vcpu, Stalls::new(pairs_of(&row.whole)));
        Self {
            phases: report.phases.iter().map(PhaseAt::from).collect(),
            delivery: report.delivery.delivery.name().into(),
            delivery_because: report.delivery.because.clone(),
            started_ns: ns(report.started),
            protection: (&report.protected).into(),
            paused: report.paused,
            first_instruction_ns: report.first_instruction.map(ns),
            first_touch_ns: report.first_touch(is_data).map(ns),
            stalls: Stalls::new(pairs),
            stall_stages: StallStage::ALL.map(of_stage).into(),
            stalls_by_vcpu: rows.iter().map(by_vcpu).collect(),
            local_faults: report.local_faults,
            pages: report.pages.into(),
            missing_at_start: report.missing_at_start,
            losses: Losses {
                reconnects: report.reconnects,
                channels_lost: report.channels_lost,
            },
            backing: backing.name().into(),
            large_mappings: None,
            overhead_bytes: Overhead::beside(Some(backing)).map(|o| o.total()),
            samples: Vec::new(),
        }
    }
}

/// The nanoseconds of times, each with its count.
fn pairs_of(times: &StallTimes) -> impl Iterator<Item = (u64, u64)> {
    times.recorded().map(|(time, count)| (ns(time), count))
}

/// A time in whole nanoseconds.
pub(crate) fn ns(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
