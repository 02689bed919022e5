//! `bench blackout`: the time without a running vCPU when a busy VM moves, and the memory that the
//! move needs.

use crate::link::receive;
use crate::peer::{Guest, Peer, Role, SourceVm, overhead_bytes};
use crate::vm::isa_of;
use crate::{BenchError, Bound, Conditions, Row, Samples, Setting};
use pageferry_guest::Workload;

/// The size of the VM that moves.
const VCPUS: u32 = 4;
const MEMORY: u64 = 512 << 20;
/// The bound on a process' memory beyond guest memory, in bytes: 64 MiB and 1 % of guest memory.
const OVERHEAD_BOUND: u64 = (64 << 20) + MEMORY / 100;

/// Runs `bench blackout` and returns its rows.
///
/// # Errors
/// [`BenchError`].
pub fn blackout(setting: &Setting, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>, BenchError> {
    let mut rows = Vec::new();
    for &engine in &setting.engines {
        let workload = Workload::new(isa_of(engine), VCPUS, MEMORY)?;
        let (mut blackouts, mut missing) = (Samples::default(), Samples::default());
        let mut handovers = Samples::default();
        let (mut at_source, mut at_destination) = (Samples::default(), Samples::default());
        let mut delivery = None;
        for round in 1..=setting.repeat {
            progress(&format!(
                "moving a busy VM on {engine}, round {round} of {}",
                setting.repeat
            ));
            let role = Role::Source(SourceVm {
                engine,
                vcpus: VCPUS,
                memory_bytes: MEMORY,
                passes: 1,
                push: true,
                guest: Guest::Workload,
            });
            let mut peer = Peer::start(setting, &role)?;
            let (report, vm) = receive(&mut peer, None)?;
            let sent = peer.read_figures()?;
            let first = report
                .first_instruction_ns
                .or_else(|| report.first_touch_ns(|page| workload.is_data(page)))
                .ok_or_else(|| BenchError::Busy("no sign of the first instruction".into()))?;
            blackouts.push(first.saturating_sub(sent.last_stop_ns) as f64 / 1e6);
            handovers.push(report.started_ns.saturating_sub(sent.last_stop_ns) as f64 / 1e6);
            missing.push(sent.missing_at_start as f64);
            at_source.push(sent.overhead_bytes as f64);
            at_destination.push(overhead_bytes()? as f64);
            delivery = Some(report.delivery.delivery);
            drop(vm);
        }
        let conditions = |note: &str| {
            let conditions = Conditions::here(VCPUS, MEMORY, note);
            delivery.map_or(conditions.clone(), |delivery| {
                conditions.with_delivery(delivery)
            })
        };
        let how = "last guest instruction at the source to first at the destination, one clock; 1 pre-copy pass; all vCPUs rewrite memory all the time; if the engine does not report the first instruction, the first touch of a data page";
        rows.push(
            blackouts
                .row("blackout", engine.name(), "ms", conditions(how))
                .aiming_at("median < 5 ms", Bound::Below(5.0)),
        );
        rows.push(handovers.row(
            "blackout.handover",
            engine.name(),
            "ms",
            conditions("the part of the blackout until the destination resumes the vCPUs"),
        ));
        rows.push(missing.row(
            "blackout.missing_pages",
            engine.name(),
            "pages",
            conditions("missing when the vCPUs resume at the destination"),
        ));
        let bound = format!("< {OVERHEAD_BOUND} B (64 MiB + 1 %)");
        let note = "RssAnon + RssFile + VmPTE after the move; guest memory is shared memory and not included";
        rows.push(
            at_source
                .row("overhead.source", engine.name(), "B", conditions(note))
                .aiming_at(bound.as_str(), Bound::Below(OVERHEAD_BOUND as f64)),
        );
        rows.push(
            at_destination
                .row("overhead.destination", engine.name(), "B", conditions(note))
                .aiming_at(bound.as_str(), Bound::Below(OVERHEAD_BOUND as f64)),
        );
    }
    Ok(rows)
}
