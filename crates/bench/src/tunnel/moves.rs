//! The measurements.

use super::ends::Ends;
use super::{Conditions, Way};
use crate::vm::toucher;
use crate::{BenchError, Samples};
use pageferry_guest::{Isa, Program, TouchOrder, Workload};
use pageferry_machine::Engine;
use pageferry_testkit::qemu::{Pair, Progress, Streams};
use serde_json::json;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The longest time of a migration.
const LIMIT: Duration = Duration::from_secs(120);
/// The time between two looks at a migration whose length counts.
const POLL: Duration = Duration::from_millis(2);
/// The time between two looks at a guest's progress.
const LOOK: Duration = Duration::from_micros(100);
/// The part of pre-copy before post-copy, of the time that the link needs for all memory. QEMU's
/// emulation was seen to lose a page that its guest wrote between two passes of pre-copy, also
/// without tunnels. So post-copy begins in the first.
const PRECOPY: f64 = 0.125;
/// A rate beyond that of every link, in bytes a second.
const NO_LIMIT: u64 = 1 << 40;
/// The streams of multifd.
const STREAMS: u32 = 2;

/// A measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Move {
    /// The stalls of a guest in post-copy, with a stream of their own.
    Urgent,
    /// The rate of one stream in pre-copy.
    Push,
    /// The rate of several.
    PushMultifd,
    /// The longest time without progress.
    Blackout,
}

impl Move {
    pub(super) const ALL: [Self; 4] = [Self::Urgent, Self::Push, Self::PushMultifd, Self::Blackout];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Urgent => "urgent pages",
            Self::Push => "1 stream",
            Self::PushMultifd => "multifd",
            Self::Blackout => "blackout",
        }
    }

    /// Whether it is measured on a way. TCP_NODELAY makes a difference to urgent pages only.
    pub(super) fn has(self, way: Way) -> bool {
        way != Way::DirectNoDelay || self == Self::Urgent
    }
}

/// The figures of one measurement.
pub(super) enum Found {
    /// All stalls, in microseconds.
    StallsUs(Samples),
    /// Bytes a second, and the memory that the tunnels took, in bytes.
    Pushed(f64, Option<[u64; 2]>),
    /// Milliseconds.
    BlackoutMs(f64),
}

impl Conditions<'_> {
    pub(super) fn measure(&self, what: Move, way: Way) -> Result<Found, BenchError> {
        let (mut ends, streams) = self.streams(way)?;
        match what {
            Move::Urgent => self.urgent(&streams),
            Move::Push | Move::PushMultifd => {
                let rate = self.push(&streams, what == Move::PushMultifd)?;
                let grown = ends.as_mut().map(Ends::grown_bytes).transpose()?;
                Ok(Found::Pushed(rate, grown))
            }
            Move::Blackout => Ok(Found::BlackoutMs(self.blackout(&streams)?)),
        }
    }

    fn pair(&self, program: &Program, capabilities: &[&str]) -> Result<Pair<'_>, BenchError> {
        let (qemu, hosts) = (self.qemu, self.hosts);
        let pair = Pair::start(
            qemu,
            hosts,
            program,
            capabilities,
            LIMIT,
            &crate::is_cancelled,
        )?;
        Ok(pair)
    }

    fn urgent(&self, streams: &Streams) -> Result<Found, BenchError> {
        let bytes = self.flags.memory();
        let guest = toucher(Engine::Soft, 1, bytes, u64::MAX, TouchOrder::Random)?;
        let pair = self.pair(guest.program(), &["postcopy-ram", "postcopy-preempt"])?;
        let stalls = pair.postcopy(streams)?.stalls.into_iter();
        Ok(Found::StallsUs(
            stalls.map(|ns| ns as f64 / 1000.0).collect(),
        ))
    }

    /// Bytes of memory a second, of a guest that does not run.
    fn push(&self, streams: &Streams, multifd: bool) -> Result<f64, BenchError> {
        let bytes = self.flags.memory();
        let guest = toucher(Engine::Soft, 1, bytes, u64::MAX, TouchOrder::Random)?;
        let capabilities: &[&str] = if multifd { &["multifd"] } else { &[] };
        let mut pair = self.pair(guest.program(), capabilities)?;
        let mut limits = json!({ "max-bandwidth": NO_LIMIT });
        if multifd {
            limits["multifd-channels"] = STREAMS.into();
            let same = json!({ "multifd-channels": STREAMS });
            pair.destination.call("migrate-set-parameters", same)?;
        }
        pair.source.call("migrate-set-parameters", limits)?;
        let began = Instant::now();
        pair.migrate(streams)?;
        pair.finish(POLL, &mut |_, _| Ok(()))?;
        Ok(bytes as f64 / began.elapsed().as_secs_f64())
    }

    /// Milliseconds from the last page that the guest has done at the source to the first one at
    /// the destination.
    fn blackout(&self, streams: &Streams) -> Result<f64, BenchError> {
        let bytes = self.flags.memory();
        let workload = Workload::new(Isa::Rv64, 1, bytes)?;
        let whole = bytes as f64 / self.flags.rate.bytes_per_second() as f64;
        let precopy = Duration::from_secs_f64(whole * PRECOPY);
        let capabilities = ["postcopy-ram", "postcopy-preempt"];
        let mut pair = self.pair(workload.program(), &capabilities)?;
        // Milliseconds: so little that pre-copy never ends by itself.
        let mut limits = json!({ "downtime-limit": 1 });
        limits["max-bandwidth"] = NO_LIMIT.into();
        limits["max-postcopy-bandwidth"] = 0.into();
        pair.source.call("migrate-set-parameters", limits)?;
        pair.source.call("cont", json!({}))?;
        let progress = [pair.source.progress(0)?, pair.destination.progress(0)?];
        let began = Instant::now();
        while progress[0].done() < workload.memory_map().share_pages() {
            if began.elapsed() > LIMIT {
                return Err(BenchError::Busy(
                    "the guest does not write its memory".into(),
                ));
            }
            std::thread::sleep(POLL);
        }
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let watch = scope.spawn(|| watch(&progress, &over));
            let moved = (|| {
                pair.migrate(streams)?;
                let began = Instant::now();
                let mut asked = false;
                pair.finish(POLL, &mut |pair, _| {
                    if !asked && began.elapsed() > precopy {
                        pair.source.call("migrate-start-postcopy", json!({}))?;
                        asked = true;
                    }
                    Ok(())
                })
            })();
            over.store(true, Ordering::Relaxed);
            let blackout = watch.join();
            moved?;
            let control = pair.destination.control(0)?;
            if let Some(error) = control.and_then(|control| control.first_error) {
                return Err(BenchError::WrongValue(format!("{error:?}")));
            }
            let blackout = blackout.ok().flatten();
            let blackout = blackout.ok_or_else(|| {
                BenchError::Stopped("it made no progress at the destination".into())
            })?;
            Ok(blackout.as_secs_f64() * 1e3)
        })
    }
}

/// The time between the last progress at the source and the first one at the destination.
fn watch([source, destination]: &[Progress; 2], over: &AtomicBool) -> Option<Duration> {
    let mut last = (Instant::now(), 0);
    let mut arrived = Vec::new();
    while !over.load(Ordering::Relaxed) {
        let (before, there) = (source.done(), destination.done());
        let now = Instant::now();
        if before > last.1 {
            last = (now, before);
        }
        if arrived.last().is_none_or(|(_, done)| *done < there) {
            arrived.push((now, there));
        }
        std::thread::sleep(LOOK);
    }
    // Its work at the source arrives too, in pre-copy.
    let first = arrived.into_iter().find(|(_, done)| *done > last.1);
    first.map(|(at, _)| at.saturating_duration_since(last.0))
}
