//! The benchmarks by their flags: settings, and the output of figures.

mod demand_paging;
mod dirty_log;
mod linux;
mod postcopy_latency;
mod schemes;
mod tunnel;

use crate::args::{BenchFlags, Command, RestoreFlags};
use crate::output::{Output, print};
use crate::peer::{self, Part};
use crate::restore::RestoreSizes;
use crate::{BenchError, Row, Setting, note, results};
use pageferry_harness::size;
use pageferry_machine::{Engine, EngineChoice};

type Benchmark<'a> = &'a dyn Fn(&Setting) -> Result<Vec<Row>, BenchError>;

/// Runs a benchmark and prints its figures, or runs the other process of one.
pub(crate) fn run(command: &Command) -> Result<(), BenchError> {
    let run = |flags: &BenchFlags, benchmark: Benchmark<'_>| rows(command, flags, benchmark);
    match command {
        Command::Peer { name, part } => play(name, part),
        Command::Link(flags) => run(&flags.common, &|setting| {
            crate::link(setting, &flags.channels())
        }),
        Command::Blackout(flags) => run(&flags.common, &|setting| {
            crate::blackout(setting, flags.sparse)
        }),
        Command::Soft(flags) => run(flags, &crate::soft),
        Command::States(flags) => run(flags, &crate::states),
        Command::Restore(flags) => restore(flags),
        Command::DemandPaging(flags) => demand_paging::demand_paging(flags),
        Command::PostcopyLatency(flags) => postcopy_latency::postcopy_latency(flags),
        Command::Linux(flags) => linux::linux(flags),
        Command::DirtyLog(flags) => dirty_log::dirty_log(flags),
        Command::Tunnel(flags) => tunnel::tunnel(flags),
        Command::Slots(flags) => schemes::slots(flags),
        Command::Tables(flags) => schemes::tables(flags),
        Command::Record { file, command } => results::record(file, command),
        Command::Report { results } => print(&results::report(results)?),
    }
}

/// Plays the part `name` of another process.
fn play(name: &str, part: &str) -> Result<(), BenchError> {
    use crate::link::{Bulk, Pong};
    use crate::linux::LinuxSource;
    use crate::mover::SourceVm;
    use crate::restore::{Paced, Restarted, Restored};
    use crate::tunnel::TunnelEnd;
    match name {
        Bulk::NAME => peer::play::<Bulk>(part),
        Pong::NAME => peer::play::<Pong>(part),
        LinuxSource::NAME => peer::play::<LinuxSource>(part),
        SourceVm::NAME => peer::play::<SourceVm>(part),
        Paced::NAME => peer::play::<Paced>(part),
        Restarted::NAME => peer::play::<Restarted>(part),
        Restored::NAME => peer::play::<Restored>(part),
        TunnelEnd::NAME => peer::play::<TunnelEnd>(part),
        _ => Err(BenchError::Peer(format!("unknown part '{name}'"))),
    }
}

/// Checks that this host has memory for `machines` machines.
fn check_host_memory(memory_bytes: u64, machines: u64) -> Result<(), BenchError> {
    let needed = memory_bytes.saturating_mul(machines);
    let available = peer::kib_of("/proc/meminfo", &["MemAvailable:"])? << 10;
    if needed <= available {
        return Ok(());
    }
    let [needed, available] = [needed, available].map(size::human);
    let advice = "choose a smaller --memory";
    Err(BenchError::Setting(format!(
        "the guests need {needed} of memory, and this host has {available} available: {advice}"
    )))
}

/// Runs a benchmark that gives rows.
fn rows(command: &Command, flags: &BenchFlags, benchmark: Benchmark<'_>) -> Result<(), BenchError> {
    if matches!(command, Command::Soft(_) | Command::States(_))
        && flags.engine == EngineChoice::Only(Engine::Kvm)
    {
        let why = "soft and states use no KVM: use --engine soft, or leave it out";
        return Err(BenchError::Setting(why.into()));
    }
    let setting = Setting {
        engines: engines(flags.engine)?,
        repeat: flags.repeat,
    };
    let rows = benchmark(&setting)?;
    Output::from(rows).show(flags.json, None)
}

fn restore(flags: &RestoreFlags) -> Result<(), BenchError> {
    if flags.working_set > flags.memory / 2 {
        let why = "the working set is more than half of the memory: choose less";
        return Err(BenchError::Setting(why.into()));
    }
    let setting = Setting {
        engines: Vec::new(),
        repeat: flags.repeat,
    };
    let sizes = RestoreSizes {
        memory: flags.memory,
        working_set: flags.working_set,
    };
    let rows = crate::restore::restore(&setting, &sizes)?;
    Output::from(rows).show(flags.json, None)
}

/// The engines to measure: the chosen one, or all that run here.
fn engines(choice: EngineChoice) -> Result<Vec<Engine>, BenchError> {
    match choice {
        EngineChoice::Only(_) => Ok(vec![pageferry_machine::select(choice)?.0]),
        EngineChoice::Auto => {
            let kvm = pageferry_machine::select(EngineChoice::Only(Engine::Kvm));
            if let Err(why) = &kvm {
                note(&format!("KVM is not measured: {why}"));
            }
            Ok(kvm
                .ok()
                .map(|(engine, _)| engine)
                .into_iter()
                .chain([Engine::Soft])
                .collect())
        }
    }
}

/// Whether `PAGEFERRY_REQUIRE` makes it an error that KVM cannot be measured.
fn is_kvm_required() -> bool {
    let required = std::env::var("PAGEFERRY_REQUIRE").unwrap_or_default();
    required.split(',').any(|word| word == "kvm")
}
