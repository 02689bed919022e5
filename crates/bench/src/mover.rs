//! The mover: a VM of another process moves to this one.
//!
//! Every benchmark that moves a VM of ours does it by a [`SourceVm`] in a process of its own, and
//! by [`receive`] here.

use crate::BenchError;
use crate::peer::{
    LOOPBACK, Part, Peer, by_name, kib_of, listen, parse_address, read_line, send, send_line,
};
use crate::vm::{Faults, LIMIT, Vm, create, fill, isa_of, toucher};
use pageferry_addr::PAGE_SIZE;
use pageferry_guest::{TouchOrder, Workload};
use pageferry_machine::{Backing, Engine, MachineSpec, VcpuThreads};
use pageferry_migration::{
    Destination, DestinationConfig, DestinationReport, Observer, Phase, PlainPolicy, Resolver,
    Route, SourceConfig, SourceSession, Switch, Unobserved, migrate,
};
use pageferry_transport::channel::Listener;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time that a workload runs before the move.
const WARM_UP: Duration = Duration::from_millis(400);
/// A source without a push pushes when its guest has requested nothing for this long.
const QUIET: Duration = Duration::from_millis(300);

/// The VM of a source, and how it moves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SourceVm {
    /// The VM's engine.
    #[serde(with = "by_name")]
    pub(crate) engine: Engine,
    /// The number of vCPUs.
    pub(crate) vcpus: u32,
    /// Guest memory, in bytes.
    pub(crate) memory_bytes: u64,
    /// The memory behind the guest.
    #[serde(with = "by_name")]
    pub(crate) backing: Backing,
    /// The part of it that the guest uses, in bytes.
    pub(crate) used_bytes: u64,
    /// The number of pre-copy passes.
    pub(crate) passes: u32,
    /// Whether the source pushes pages in the background.
    pub(crate) push: bool,
    /// Whether requested pages have a way of their own.
    pub(crate) preempt: bool,
    /// Whether requests guide the push.
    pub(crate) prefetch: bool,
    /// The guest program.
    pub(crate) guest: Guest,
    /// The channels for pages in the background.
    pub(crate) bulk_channels: u16,
    /// The queue that the push may have.
    pub(crate) queue: Duration,
}

impl SourceVm {
    /// A VM whose guest uses all of its memory. The source pushes without pre-copy.
    pub(crate) fn new(engine: Engine, vcpus: u32, memory_bytes: u64, guest: Guest) -> Self {
        Self {
            engine,
            vcpus,
            memory_bytes,
            backing: Backing::Shmem,
            used_bytes: memory_bytes,
            passes: 0,
            push: true,
            preempt: true,
            prefetch: true,
            guest,
            bulk_channels: 1,
            queue: SourceConfig::default().queue,
        }
    }
}

/// The guest program of a source's VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Guest {
    /// The demo's workload. It starts before the move.
    Workload,
    /// A program whose vCPUs store to all data pages, each in a random order of its own. It starts
    /// when the VM has moved.
    Toucher,
    /// As `Toucher`, but each vCPU stores to its own part of the pages, in ascending order.
    InOrder,
    /// A program that touches one page. It starts when the VM has moved, and leaves the cores to
    /// the migration.
    Quiet,
}

/// The figures that a source reports to the parent process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct SourceFigures {
    pub(crate) last_stop: Duration,
    pub(crate) missing_at_start: u64,
    pub(crate) background_bytes: u64,
    pub(crate) background_took: Duration,
    pub(crate) total: Duration,
    pub(crate) overhead_bytes: u64,
}

impl Part for SourceVm {
    const NAME: &'static str = "source";

    fn play(&self) -> Result<(), BenchError> {
        let spec = MachineSpec {
            backing: self.backing,
            ..MachineSpec::new(self.vcpus, self.memory_bytes)
        };
        let vm = create(self.engine, spec, Resolver::new())?;
        if self.guest == Guest::Workload {
            let program = Workload::new(isa_of(self.engine), self.vcpus, self.used_bytes)?;
            vm.load(program.program())?;
            vm.threads.resume();
            std::thread::sleep(WARM_UP);
        } else {
            let pages = if self.guest == Guest::Quiet {
                1
            } else {
                u64::MAX
            };
            let order = if self.guest == Guest::InOrder {
                TouchOrder::Ascending
            } else {
                TouchOrder::Random
            };
            let program = toucher(self.engine, self.vcpus, self.used_bytes, pages, order)?;
            fill(&vm, 0..self.used_bytes / PAGE_SIZE)?;
            vm.load(program.program())?;
        }
        let config = SourceConfig {
            push_after: if self.push { Duration::ZERO } else { QUIET },
            preempt: self.preempt,
            prefetch: self.prefetch,
            bulk_channels: self.bulk_channels,
            queue: self.queue,
            ..SourceConfig::default()
        };
        send_vm(&vm, &config, self.passes)
    }
}

/// Moves a VM to the address on the standard input, and reports it.
pub(crate) fn send_vm(vm: &Vm, config: &SourceConfig, passes: u32) -> Result<(), BenchError> {
    send_line("ready")?;
    let to = parse_address(&read_line()?)?;
    let config = SourceConfig {
        settings: Switch::AfterPasses(passes).into(),
        // The other end is on this machine, also where it has an address of its own.
        plain: PlainPolicy::Anywhere,
        ..config.clone()
    };
    let session = SourceSession::new().map_err(failed)?;
    let report = migrate(
        &vm.running(),
        &Route::To(to),
        b"bench",
        &config,
        &session,
        &Unobserved,
    )
    .map_err(failed)?;
    send(&SourceFigures {
        last_stop: report.last_stop,
        missing_at_start: report.missing_at_start,
        background_bytes: report.background_bytes,
        background_took: report.background_took,
        total: report.total,
        overhead_bytes: overhead_bytes()?,
    })
}

fn failed(why: impl std::fmt::Display) -> BenchError {
    BenchError::Migration(why.to_string())
}

/// The memory of this process beyond guest memory, in bytes: private pages, files, page tables.
/// Guest memory is a memfd and counts as shared memory.
pub(crate) fn overhead_bytes() -> Result<u64, BenchError> {
    Ok(kib_of("/proc/self/status", &["RssAnon:", "RssFile:", "VmPTE:"])? << 10)
}

/// Runs a VM as soon as it is handed over. Some guests begin their work only then, so their source
/// never runs them, and they arrive paused.
struct Starter<'a>(&'a VcpuThreads);

impl Observer for Starter<'_> {
    fn phase(&self, phase: Phase) {
        if phase == Phase::Postcopy {
            self.0.resume();
        }
    }

    fn progress(&self, _: Phase, _: u64, _: u64) {}
}

/// Receives a VM from a peer in the role `Source`.
pub(crate) fn receive(
    peer: &mut Peer,
    config: DestinationConfig,
) -> Result<(DestinationReport, Vm), BenchError> {
    let deadline = Instant::now() + LIMIT;
    let late = || Instant::now() > deadline;
    receive_by(peer, listen(LOOPBACK)?, Backing::Shmem, config, &late)
}

/// As [`receive`], by a listener, into memory of `backing`, until `stop` returns true.
pub(crate) fn receive_by(
    peer: &mut Peer,
    listener: Listener,
    backing: Backing,
    config: DestinationConfig,
    stop: &(dyn Fn() -> bool + Sync),
) -> Result<(DestinationReport, Vm), BenchError> {
    peer.expect("ready")?;
    peer.send_line(&listener.local_addr().to_string())?;
    let destination = Destination::listen(listener, config, |_| {}).map_err(failed)?;
    let incoming = Arc::new(destination).accept(stop).map_err(failed)?;
    let offer = incoming.offer().clone();
    let engine = offer
        .kind
        .engine
        .as_str()
        .parse()
        .map_err(BenchError::Peer)?;
    let resolver = Resolver::new();
    let spec = MachineSpec {
        backing,
        ..MachineSpec::new(offer.vcpus, offer.memory_bytes)
    };
    let vm = create(engine, spec, Arc::clone(&resolver) as Arc<dyn Faults>)?;
    let report = incoming
        .receive(&vm.running(), &resolver, stop, &Starter(&vm.threads))
        .map_err(failed)?;
    Ok((report, vm))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_survives_its_way_to_the_other_process() {
        let source = SourceVm {
            backing: Backing::Hugetlb2M,
            used_bytes: 2 << 20,
            preempt: false,
            ..SourceVm::new(Engine::Soft, 3, 4 << 20, Guest::Toucher)
        };
        let text = serde_json::to_string(&source).expect("JSON");
        assert_eq!(
            serde_json::from_str::<SourceVm>(&text).expect("a source"),
            source
        );
    }
}
