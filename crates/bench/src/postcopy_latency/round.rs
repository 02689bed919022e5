//! One row of one round: a VM that moves between the two hosts, or bare exchanges between them.

use super::noise::{Meter, Noise};
use super::setting::{Column, LatencyFlags, Mode, Queue};
use super::stalls::Stalls;
use crate::link::{Bulk, Pong, exchanges, take_bulk};
use crate::mover::{Guest, SourceFigures, SourceVm, receive_by};
use crate::peer::{Part, Peer, listen, within};
use crate::{BenchError, is_cancelled};
use pageferry_hosts::{Host, TwoHosts};
use pageferry_machine::Delivery;
use pageferry_migration::{DestinationConfig, DestinationReport, Phase, PlainPolicy};
use pageferry_testkit::qemu::Qemu;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// The time of bare exchanges before the first that counts. TCP finds the link's rate meanwhile.
const FLOOR_WARM_UP: Duration = Duration::from_millis(200);
/// The time of bare exchanges that count.
const FLOOR_TIME: Duration = Duration::from_secs(1);
/// The least number of bare exchanges that count.
const FLOOR_LEAST: usize = 20;
/// The bytes that a vCPU touches without a push where the link has a delay.
const IDLE_BYTES: u64 = 1 << 20;
/// The time that a row may take beyond that of its bytes.
const SLACK: Duration = Duration::from_secs(120);

/// The figures of one row in one round.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    pub(super) stalls: Stalls,
    /// The bytes that the source's host sent, to those that the link could carry in post-copy.
    /// `None` where nothing is pushed.
    pub(super) link_busy_percent: Option<f64>,
    /// The length of post-copy in seconds. `None` where nothing is pushed.
    pub(super) total_s: Option<f64>,
    /// The bytes a second of the push while it lasts, or of bare TCP.
    pub(super) bulk_rate: Option<f64>,
    /// The delivery of faults. `None`: there is no guest.
    pub(super) delivery: Option<Delivery>,
}

impl Measured {
    /// The stalls, if there were any.
    pub(super) fn stalls(&self) -> Option<&Stalls> {
        Some(&self.stalls).filter(|stalls| stalls.count > 0)
    }
}

/// All rows of a column, measured one after the other.
#[derive(Clone, Debug)]
pub(super) struct Round {
    pub(super) noise: Noise,
    pub(super) rows: Vec<(Mode, Measured)>,
}

impl Round {
    pub(super) fn row(&self, mode: Mode) -> Option<&Measured> {
        let mut rows = self.rows.iter();
        rows.find(|row| row.0 == mode).map(|row| &row.1)
    }
}

/// The conditions of all rows of a column.
#[derive(Clone, Copy)]
pub(super) struct Conditions<'a> {
    pub(super) flags: &'a LatencyFlags,
    pub(super) hosts: &'a TwoHosts,
    pub(super) column: &'a Column,
    pub(super) qemu: Option<&'a Qemu>,
}

impl Conditions<'_> {
    /// Measures all rows, one after the other.
    pub(super) fn round(self) -> Result<Round, BenchError> {
        let mut meter = Meter::start()?;
        let mut rows = Vec::new();
        let qemu = self.qemu.filter(|_| self.column.suits_qemu());
        for mode in Mode::ALL.into_iter().filter(|mode| self.column.has(*mode)) {
            let switches = mode.qemu();
            if switches.is_some() && qemu.is_none() {
                continue;
            }
            meter.gap();
            let measured = match (mode, qemu.zip(switches)) {
                (_, Some((qemu, switches))) => self.measure_qemu(qemu, switches)?,
                (Mode::Floor, None) => floor(self)?,
                (Mode::Bare, None) => bare(self)?,
                (_, None) => moved(self, mode)?,
            };
            rows.push((mode, measured));
        }
        let noise = meter.end()?;
        Ok(Round { noise, rows })
    }

    /// The longest time for `bytes` over the link.
    pub(super) fn limit(self, bytes: u64) -> Duration {
        let seconds = bytes as f64 / self.flags.rate.bytes_per_second() as f64;
        SLACK + Duration::from_secs_f64(seconds) * 4
    }

    /// `sent` bytes to those that the link can carry meanwhile, in percent.
    pub(super) fn link_busy_percent(self, sent: u64, seconds: f64) -> f64 {
        sent as f64 * 100.0 / (seconds * self.flags.rate.bytes_per_second() as f64)
    }
}

/// Moves a VM whose guest starts when it has moved.
fn moved(conditions: Conditions<'_>, mode: Mode) -> Result<Measured, BenchError> {
    let Conditions {
        flags,
        hosts,
        column,
        ..
    } = conditions;
    let memory_bytes = flags.memory_of(column.host_page, mode);
    let guest = match mode {
        Mode::InOrder | Mode::InOrderNoPrefetch => Guest::InOrder,
        Mode::NoReaders => Guest::Quiet,
        _ => Guest::Toucher,
    };
    let engine = flags.engine_of(column.host_page);
    let mut source = SourceVm {
        backing: column.host_page.backing(),
        push: mode != Mode::Idle,
        preempt: mode != Mode::Vanilla,
        prefetch: !matches!(
            mode,
            Mode::Vanilla | Mode::NoPrefetch | Mode::InOrderNoPrefetch
        ),
        bulk_channels: column.bulk,
        ..SourceVm::new(engine, column.vcpus, memory_bytes, guest)
    };
    if let Some(Queue(queue)) = column.queue {
        source.queue = queue;
    }
    if mode == Mode::Idle && column.link.is_some() {
        // Each page takes a round trip.
        source.used_bytes = u64::from(column.vcpus) * IDLE_BYTES;
    }
    let config = DestinationConfig {
        plain: PlainPolicy::Anywhere,
        ..DestinationConfig::default()
    };
    let sent_before = hosts.sent_bytes(Host::A)?;
    let mut peer = start(hosts, &source)?;
    let here = IpAddr::from(hosts.address(Host::B));
    let listener = within(hosts, Host::B, || listen(here))?;
    let deadline = Instant::now() + conditions.limit(memory_bytes);
    let kill = peer.killer();
    let stop = || {
        if is_cancelled() {
            // Or else the source would report a lost destination.
            kill();
            return true;
        }
        Instant::now() > deadline
    };
    let (report, vm) = receive_by(
        &mut peer,
        listener,
        column.host_page.backing(),
        config,
        &stop,
    )?;
    let figures = peer.figures::<SourceFigures>()?;
    let sent = hosts.sent_bytes(Host::A)? - sent_before;
    drop(vm);
    let total_s = (mode != Mode::Idle).then(|| seconds(&report)).flatten();
    Ok(Measured {
        stalls: Stalls::of(
            report
                .stalls
                .iter_recorded()
                .map(|time| (time.value_iterated_to(), time.count_at_value())),
        ),
        link_busy_percent: total_s.map(|seconds| conditions.link_busy_percent(sent, seconds)),
        total_s,
        bulk_rate: (mode != Mode::Idle)
            .then(|| figures.background_bytes as f64 / figures.background_took.as_secs_f64()),
        delivery: Some(report.delivery.delivery),
    })
}

/// Starts the process of the source's host.
fn start(hosts: &TwoHosts, part: &impl Part) -> Result<Peer, BenchError> {
    Peer::start_in(hosts.name(Host::A), part)
}

/// The length of post-copy.
fn seconds(report: &DestinationReport) -> Option<f64> {
    let at = |wanted: Phase| {
        let mut phases = report.phases.iter();
        phases.find(|start| start.phase == wanted)
    };
    let (began, ended) = (at(Phase::Postcopy)?, at(Phase::Completion)?);
    Some(ended.at.saturating_sub(began.at).as_secs_f64())
}

/// Exchanges bare requests and replies, as many unanswered as there are vCPUs.
fn floor(conditions: Conditions<'_>) -> Result<Measured, BenchError> {
    let Conditions { hosts, column, .. } = conditions;
    let page_bytes = column.host_page.bytes() as usize;
    let in_flight = column.vcpus as usize;
    let pong = Pong {
        host: hosts.address(Host::A).into(),
        page_bytes,
    };
    let mut peer = start(hosts, &pong)?;
    let connection = within(hosts, Host::B, || peer.connect())?;
    let began = Instant::now();
    let (mut warm, mut from) = (0, None);
    let mut times = exchanges(&connection, page_bytes, in_flight, &mut |done| {
        if from.is_none() && began.elapsed() >= FLOOR_WARM_UP && done >= 2 * in_flight {
            from = Some(Instant::now());
            warm = done;
        }
        let enough = from.is_some_and(|from: Instant| {
            from.elapsed() >= FLOOR_TIME && done >= warm + FLOOR_LEAST
        });
        !enough && !is_cancelled()
    })?;
    // Before the connection, or else it would report the loss of that.
    drop(peer);
    let mut counted = times.split_off(warm);
    counted.sort_unstable();
    Ok(Measured {
        stalls: Stalls::of(counted.into_iter().map(|ns| (ns, 1))),
        link_busy_percent: None,
        total_s: None,
        bulk_rate: None,
        delivery: None,
    })
}

/// Sends as many bytes as a guest has over a new connection, in the direction of the push.
fn bare(conditions: Conditions<'_>) -> Result<Measured, BenchError> {
    let Conditions { flags, hosts, .. } = conditions;
    let bulk = Bulk {
        host: hosts.address(Host::A).into(),
    };
    let mut peer = start(hosts, &bulk)?;
    let connection = within(hosts, Host::B, || peer.connect())?;
    let took = take_bulk(&connection, flags.memory() as usize)?;
    // Before the connection, or else it would report the loss of that.
    drop(peer);
    Ok(Measured {
        stalls: Stalls::default(),
        link_busy_percent: None,
        total_s: None,
        bulk_rate: Some(flags.memory() as f64 / took.as_secs_f64()),
        delivery: None,
    })
}
