//! `bench blackout`: the time without a running vCPU when a busy VM moves, and the memory that the
//! move needs.

use crate::args::EngineFlags;
use crate::mover::{Guest, SourceFigures, SourceVm, overhead_bytes, receive};
use crate::peer::Peer;
use crate::vm::isa_of;
use crate::{BenchError, Bound, Conditions, Row, Samples, note};
use pageferry_guest::Workload;
use pageferry_harness::size;
use pageferry_machine::{Delivery, Engine};
use pageferry_migration::DestinationConfig;
use std::time::Duration;

/// The conditions of a blackout.
const HOW: &str = "last guest instruction at the source to first at the destination, one clock; 1 pre-copy pass; all vCPUs rewrite memory all the time; if the engine does not report the first instruction, the first touch of a data page";

pub(crate) const VCPUS: u32 = 4;
/// The memory that the guest uses, in bytes. Without `sparse`, the VM has no more.
pub(crate) const MEMORY: u64 = 512 << 20;

/// `pageferry-bench blackout`.
#[derive(Debug, clap::Args)]
pub(crate) struct BlackoutFlags {
    #[command(flatten)]
    pub(crate) engine: EngineFlags,
    /// Also move VMs with this much memory, of which the guest uses 512 MiB: a whole number and K,
    /// M, G or T. The destination then allocates no memory before it is needed
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    sparse: Option<u64>,
}

/// The figures of VMs with one size of memory.
#[derive(Default)]
struct Measured {
    memory_bytes: u64,
    /// Whether the destination allocates all memory before the switch-over.
    allocate: bool,
    blackouts: Samples,
    handovers: Samples,
    missing: Samples,
    totals: Samples,
    at_source: Samples,
    at_destination: Samples,
    delivery: Option<Delivery>,
}

/// Runs `bench blackout` and returns its rows. With `sparse`, VMs with that many bytes of memory
/// move in turn with the others. Their guests use as much of it as the others. Then no destination
/// allocates memory before it is needed.
///
/// # Errors
/// [`BenchError`].
pub(crate) fn blackout(flags: &BlackoutFlags) -> Result<Vec<Row>, BenchError> {
    let (sparse, repeat) = (flags.sparse, flags.engine.common.rounds(5, 1));
    let mut rows = Vec::new();
    for engine in flags.engine.engines()? {
        let sizes = [Some(MEMORY), sparse].into_iter().flatten();
        let mut all: Vec<Measured> = sizes
            .map(|memory_bytes| Measured {
                memory_bytes,
                allocate: sparse.is_none(),
                ..Measured::default()
            })
            .collect();
        for round in 1..=repeat {
            for measured in &mut all {
                note(&format!(
                    "moving a busy VM of {} MiB on {engine}, round {round} of {repeat}",
                    measured.memory_bytes >> 20,
                ));
                measured.measure(engine)?;
            }
        }
        let mut all = all.iter();
        let dense = all.next().expect("the first size");
        rows.extend(dense.rows(engine));
        for sparse in all {
            rows.extend(sparse.sparse_rows(engine, dense));
        }
    }
    Ok(rows)
}

/// The source of the test guest that moves.
pub(crate) fn source(engine: Engine, memory_bytes: u64) -> SourceVm {
    SourceVm {
        used_bytes: MEMORY,
        passes: 1,
        ..SourceVm::new(engine, VCPUS, memory_bytes, Guest::Workload)
    }
}

impl Measured {
    /// Moves a VM.
    fn measure(&mut self, engine: Engine) -> Result<(), BenchError> {
        let workload = Workload::new(isa_of(engine), VCPUS, MEMORY)?;
        let mut peer = Peer::start(&source(engine, self.memory_bytes))?;
        let config = DestinationConfig {
            allocate: self.allocate,
            ..DestinationConfig::default()
        };
        let (report, vm) = receive(&mut peer, config)?;
        let sent = peer.figures::<SourceFigures>()?;
        let first = report
            .first_instruction
            .or_else(|| report.first_touch(|page| workload.is_data(page)))
            .ok_or_else(|| BenchError::Busy("no sign of the first instruction".into()))?;
        let since = |at: Duration| at.saturating_sub(sent.last_stop).as_secs_f64() * 1e3;
        self.blackouts.push(since(first));
        self.handovers.push(since(report.started));
        self.missing.push(sent.missing_at_start as f64);
        self.totals.push(sent.total.as_secs_f64() * 1e3);
        self.at_source.push(sent.overhead_bytes as f64);
        self.at_destination.push(overhead_bytes()? as f64);
        self.delivery = Some(report.delivery.delivery);
        drop(vm);
        Ok(())
    }

    fn conditions(&self, note: &str) -> Conditions {
        Conditions::here(VCPUS, self.memory_bytes, note).with_delivery(self.delivery)
    }

    fn rows(&self, engine: Engine) -> Vec<Row> {
        let name = engine.name();
        let handover = "the part of the blackout until the destination resumes the vCPUs";
        let mut rows = vec![
            self.blackouts
                .row("blackout", name, "ms", self.conditions(HOW))
                .aiming_at(Bound::Below(5.0)),
            self.handovers
                .row("blackout.handover", name, "ms", self.conditions(handover)),
            self.missing.row(
                "blackout.missing_pages",
                name,
                "pages",
                self.conditions("missing when the vCPUs resume at the destination"),
            ),
        ];
        let cases = ["overhead.source", "overhead.destination"];
        rows.extend(self.overheads(engine, cases, 100));
        rows
    }

    /// The rows of a VM that uses only a part of its memory.
    fn sparse_rows(&self, engine: Engine, dense: &Self) -> Vec<Row> {
        let name = engine.name();
        let mut rows = vec![
            self.blackouts
                .row("sparse.blackout", name, "ms", self.conditions(HOW))
                .against("blackout", dense.blackouts.median())
                .aiming_at(Bound::RatioAtMost(1.5)),
            self.handovers
                .row(
                    "sparse.handover",
                    name,
                    "ms",
                    self.conditions("as blackout.handover"),
                )
                .against("blackout.handover", dense.handovers.median()),
            self.totals
                .row(
                    "sparse.total",
                    name,
                    "ms",
                    self.conditions("the whole migration"),
                )
                .aiming_at(Bound::Below(10_000.0)),
        ];
        let cases = ["sparse.overhead_source", "sparse.overhead_destination"];
        rows.extend(self.overheads(engine, cases, 1000));
        rows
    }

    /// Rows of memory beyond guest memory. The bound is 64 MiB and a part of guest memory.
    fn overheads(&self, engine: Engine, cases: [&'static str; 2], divisor: u64) -> Vec<Row> {
        let most = (64 << 20) + self.memory_bytes / divisor;
        let note = "RssAnon + RssFile + VmPTE after the move; guest memory is shared memory and not included";
        [&self.at_source, &self.at_destination]
            .into_iter()
            .zip(cases)
            .map(|(samples, case)| {
                samples
                    .row(case, engine.name(), "B", self.conditions(note))
                    .aiming_at(Bound::Below(most as f64))
            })
            .collect()
    }
}
