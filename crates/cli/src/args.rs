//! The flags: parsed once, here, for all commands. Help texts come from the same definitions.

use crate::exit::TABLE;
use crate::size;
use clap::{Args, Parser, Subcommand};
use pageferry_bench::demand_paging::DemandSetting;
use pageferry_machine::{Delivery, EngineChoice, MAX_VCPUS};
use pageferry_migration::address::Address;
use std::path::PathBuf;

/// Moves running virtual machines between processes and hosts; their memory follows on demand.
///
/// `pageferry demo` shows it on this machine. `run`, `receive` and `migrate` do it between two terminals
/// or two hosts. `probe` says what this host can do.
#[derive(Debug, Parser)]
#[command(name = "pageferry", version, after_help = TABLE, propagate_version = true)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Move a running VM to another process on this machine, prove that not a byte was lost, and report
    ///
    /// Starts a second process as the destination, connected by TCP on the loopback interface. The guest
    /// rewrites all of its memory for ever and checks each page against its checksum and sequence number
    /// whenever it returns to it. After the move it must have been at every page once more; then the host
    /// checks all pages as well. Exits with 0 only if neither found a wrong page.
    #[command(after_help = TABLE)]
    Demo(DemoArgs),
    /// Run a VM that can be migrated from here
    ///
    /// Runs until it was migrated away, until `pageferry quit`, or until Ctrl-C. While it is being
    /// migrated, Ctrl-C before the switch-over cancels the migration and the VM runs on here; after the
    /// switch-over the remaining pages are sent first, and a second Ctrl-C gives up.
    #[command(after_help = TABLE)]
    Run(RunArgs),
    /// Wait for a VM, receive it and run it
    ///
    /// Prints the address it listens on, waits for one migration, and goes on running the VM until
    /// `pageferry quit` or Ctrl-C. If the connection breaks after the VM was started here, the VM is paused
    /// with its memory incomplete, and the exit code is 10: it is never continued with wrong pages.
    #[command(after_help = TABLE)]
    Receive(ReceiveArgs),
    /// Tell a VM on this host to move to another process or host
    ///
    /// Shows how the move goes and what it did. Ctrl-C before the switch-over cancels: the VM runs on.
    #[command(after_help = TABLE)]
    Migrate(MigrateArgs),
    /// Say what a VM on this host is doing
    #[command(after_help = TABLE)]
    Status(StatusArgs),
    /// Pause a VM on this host
    Pause(VmArgs),
    /// Let a paused VM on this host run on
    Resume(VmArgs),
    /// Check every page of a VM on this host against the guest's own counters
    ///
    /// The VM is paused while it is checked and runs on afterwards if it ran before.
    Verify(VmArgs),
    /// End a VM on this host
    Quit(VmArgs),
    /// Say what this host can do, what that means for Pageferry, and what to do about what is missing
    #[command(after_help = TABLE)]
    Probe(ProbeArgs),
    /// Measure Pageferry on this host, each figure beside its floor from the same run
    Bench(BenchArgs),
}

/// `pageferry bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// An urgent page's whole stall beside a bare ping-pong and a bare exit; the background push beside the
    /// bare link
    Link(BenchFlags),
    /// The blackout of a busy VM of 4 vCPUs and 512 MiB, and the memory both processes use beyond it
    Blackout(BenchFlags),
    /// Guest instructions a second of our own hypervisor
    Soft(BenchFlags),
    /// The six tests of the kernel's memslot_perf_test on our own hypervisor: with our memory slots, beside the array
    /// that the kernel copied at every change before it had trees
    ///
    /// Times are of one run of a test. The kernel's own figures, from a Xeon, stand in columns of their own; where KVM
    /// can be opened, what its calls cost on this host is measured too. With PAGEFERRY_REQUIRE=kvm in the environment it
    /// is an error if it cannot. Every run checks what the guest wrote; a wrong value ends the command with 1.
    #[command(after_help = TABLE)]
    Memslot(MemslotFlags),
    /// How fast vCPUs get memory that they touch for the first time, all at once
    ///
    /// After demand_paging_test of the kernel's selftests: each vCPU stores to one word of each page of its memory, on the soft
    /// engine with faults in parallel and, with a core for each vCPU, one after the other; on KVM by each delivery of
    /// faults. With --model instead a MODEL of many more vCPUs, each on a core of its own, driven by times measured in the same run
    /// and compared with real runs. With PAGEFERRY_REQUIRE=kvm in the environment it is an error if KVM cannot be measured.
    #[command(after_help = TABLE)]
    DemandPaging(DemandFlags),
    /// Nanoseconds a page of our second-stage page tables, beside the page tables of other public crates and beside
    /// bare stores and compare-exchanges
    ///
    /// Every look-up that is timed is checked; a wrong translation ends the command with 1. Two threads need two cores
    /// that are idle, or have no figures.
    #[command(after_help = TABLE)]
    Tdp(TdpFlags),
    /// The phases of dirty logging, with one lock around every fault and without (the soft hypervisor)
    DirtyLog(DirtyLogFlags),
    /// The other process of a benchmark
    #[command(hide = true)]
    Peer {
        /// What it plays
        role: Vec<String>,
    },
}

/// What all benchmarks take.
#[derive(Debug, Args)]
pub(crate) struct BenchFlags {
    /// Whose guests: kvm, soft, or auto for all that run here
    #[arg(long, default_value = "auto", value_name = "auto|kvm|soft")]
    pub(crate) engine: EngineChoice,
    /// How often each measurement is repeated; medians are printed
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: u32,
    /// Print the rows as a JSON array
    #[arg(long)]
    pub(crate) json: bool,
}

/// `pageferry bench memslot`.
#[derive(Debug, Args)]
pub(crate) struct MemslotFlags {
    /// Some seconds instead of about a minute and a half: with 10 and 509 slots only, and noisier
    #[arg(long)]
    pub(crate) quick: bool,
    /// Numbers of slots, from 3 to 32764, instead of the series' [default: 10,30,50,100,509,8194,32764]
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(3..=32_764))]
    pub(crate) slots: Vec<u32>,
    /// How many samples each figure has at least; medians are printed
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) repeat: u32,
    /// Instead: nanoseconds an operation, beside the memory maps of other public crates
    #[arg(long, conflicts_with = "report")]
    pub(crate) micro: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a self-contained HTML page with a chart for each test
    #[arg(long, value_name = "FILE.html")]
    pub(crate) report: Option<PathBuf>,
}

/// `pageferry bench demand-paging`.
#[derive(Debug, Args)]
pub(crate) struct DemandFlags {
    /// Whose guests: kvm, soft, or auto for all that run here
    #[arg(
        long,
        default_value = "auto",
        value_name = "auto|kvm|soft",
        conflicts_with = "model"
    )]
    pub(crate) engine: EngineChoice,
    /// Numbers of vCPUs [default: 1,2,4,8,16,32,64; of the model up to 416]
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=i64::from(DemandSetting::MAX_VCPUS)))]
    pub(crate) vcpus: Vec<u32>,
    /// Guest memory for each vCPU [default: 16M on soft and of the model, 1M on kvm]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) memory_per_vcpu: Option<u64>,
    /// Every vCPU touches the pages of all
    #[arg(long, conflicts_with = "model")]
    pub(crate) overlap: bool,
    /// How often each measurement is repeated; medians are printed [default: 5; of the model's inputs 21]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: Option<u32>,
    /// Model many vCPUs on as many cores, from times measured on the soft engine in this run
    #[arg(long)]
    pub(crate) model: bool,
    /// Of the model: memory that all vCPUs share out among them, in a table of its own [default: 12T]
    #[arg(long, value_name = "SIZE", value_parser = size::parse, requires = "model")]
    pub(crate) total_memory: Option<u64>,
    /// Of the model: names the sequence of random numbers [default: 2019]
    #[arg(long, value_name = "N", requires = "model")]
    pub(crate) seed: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a self-contained HTML page with a chart; with --model a name that ends in .svg gets the figure alone
    #[arg(long, value_name = "FILE.html")]
    pub(crate) report: Option<PathBuf>,
}

/// `pageferry bench tdp`.
#[derive(Debug, Args)]
pub(crate) struct TdpFlags {
    /// A second or two instead of about ten: 128 MiB a thread instead of a GiB, and noisier
    #[arg(long)]
    pub(crate) quick: bool,
    /// How often everything is measured; medians are printed [default: 9, or 5 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a self-contained HTML page with bars for each operation
    #[arg(long, value_name = "FILE.html")]
    pub(crate) report: Option<PathBuf>,
}

/// `pageferry bench dirty-log`.
#[derive(Debug, Args)]
pub(crate) struct DirtyLogFlags {
    /// Virtual CPUs, each with a thread of its own
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) vcpus: u32,
    /// Guest memory for each: a whole number and K, M or G (powers of 1024)
    #[arg(long, default_value = "128M", value_name = "SIZE", value_parser = size::parse)]
    pub(crate) memory: u64,
    /// Know dirty pages by the dirty bits of the tables, not by write protection
    #[arg(long)]
    pub(crate) dirty_bits: bool,
    /// How often everything is done; medians are printed
    #[arg(long, default_value_t = 11, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: u32,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// What kind of machine.
#[derive(Debug, Args)]
pub(crate) struct MachineArgs {
    /// Virtual CPUs
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_VCPUS)))]
    pub(crate) vcpus: u32,
    /// Guest memory: a whole number and K, M, G or T (powers of 1024)
    #[arg(long, default_value = "512M", value_name = "SIZE", value_parser = size::parse)]
    pub(crate) memory: u64,
    /// Who runs the guest: kvm, soft (our own hypervisor: no /dev/kvm, no privileges), or auto (kvm if a
    /// probe VM really runs here, else soft)
    #[arg(long, default_value = "auto", value_name = "auto|kvm|soft")]
    pub(crate) engine: EngineChoice,
}

/// What the user asked for as delivery of faults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeliveryChoice(pub(crate) Option<Delivery>);

fn delivery(text: &str) -> Result<DeliveryChoice, String> {
    if text == "auto" {
        return Ok(DeliveryChoice(None));
    }
    let parsed = text
        .parse()
        .map_err(|_| format!("'{text}' is no fault delivery: {DELIVERIES}"))?;
    Ok(DeliveryChoice(Some(parsed)))
}

const DELIVERIES: &str = "use auto, exit (soft engine), poison, minor or missing";

/// How faults on missing pages are delivered.
#[derive(Debug, Args)]
pub(crate) struct DeliveryArgs {
    /// How a vCPU's touch of a missing page is told: exit (soft engine), or on KVM poison (vCPU exits,
    /// Linux 6.6), minor or missing (userfaultfd); auto takes the best this host has
    #[arg(long, default_value = "auto", value_name = "auto|exit|poison|minor|missing", value_parser = delivery)]
    pub(crate) delivery: DeliveryChoice,
}

/// The most pre-copy passes: each costs as much as the first, and after a few nothing is gained.
pub(crate) const MAX_PASSES: u32 = 64;

/// How the source goes about it.
#[derive(Debug, Args)]
pub(crate) struct SourceArgs {
    /// Passes over the memory while the guest still runs at the source; 0 sends everything after the
    /// switch-over
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=i64::from(MAX_PASSES)))]
    pub(crate) precopy_passes: u32,
}

/// `pageferry demo`.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
    #[command(flatten)]
    pub(crate) delivery: DeliveryArgs,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a self-contained HTML page with the stall histogram and a timeline of the guest's progress
    #[arg(long, value_name = "FILE.html")]
    pub(crate) report: Option<PathBuf>,
    /// For tests: change one byte of a page at the destination after it arrived; both verifications must
    /// find it
    #[arg(long, hide = true)]
    pub(crate) corrupt_page: bool,
}

/// `pageferry run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
    /// Where to make the control socket (mode 0600) for migrate, status, pause, resume and quit
    #[arg(long, value_name = "SOCKET")]
    pub(crate) control: PathBuf,
}

/// `pageferry receive`.
#[derive(Debug, Args)]
pub(crate) struct ReceiveArgs {
    /// Where to listen: HOST:PORT (port 0 takes a free one), or unix:PATH
    #[arg(long, value_name = "ADDR")]
    pub(crate) listen: Address,
    /// Where to make the VM's control socket (mode 0600)
    #[arg(long, value_name = "SOCKET")]
    pub(crate) control: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) delivery: DeliveryArgs,
    /// Allocate memory as pages arrive, not before: saves memory, makes each stall longer
    #[arg(long)]
    pub(crate) sparse: bool,
    /// Print what was received as one JSON object when the command ends
    #[arg(long)]
    pub(crate) json: bool,
    /// Started by `demo` with this process id: end when it ends, say nothing but the address
    #[arg(long, hide = true, value_name = "PID")]
    pub(crate) child_of: Option<u32>,
    /// See `demo --corrupt-page`
    #[arg(long, hide = true)]
    pub(crate) corrupt_page: bool,
}

/// `pageferry migrate`.
#[derive(Debug, Args)]
pub(crate) struct MigrateArgs {
    #[command(flatten)]
    pub(crate) vm: VmArgs,
    /// Where `pageferry receive` listens: HOST:PORT or unix:PATH
    #[arg(long, value_name = "ADDR")]
    pub(crate) to: Address,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `pageferry status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub(crate) vm: VmArgs,
    /// Print it as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Which VM.
#[derive(Debug, Args)]
pub(crate) struct VmArgs {
    /// The VM's control socket
    #[arg(long = "vm", value_name = "SOCKET")]
    pub(crate) socket: PathBuf,
}

/// `pageferry probe`.
#[derive(Debug, Args)]
pub(crate) struct ProbeArgs {
    /// Print it as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn numbers_of_slots_are_a_list_within_limits() {
        let slots = |list: &str| {
            let parsed = Cli::try_parse_from(["pageferry", "bench", "memslot", "--slots", list]);
            match parsed.ok()?.command {
                Command::Bench(BenchArgs {
                    command: BenchCommand::Memslot(flags),
                }) => Some(flags.slots),
                other => panic!("bench memslot is {other:?}"),
            }
        };
        assert_eq!(slots("10,32764"), Some(vec![10, 32_764]));
        assert_eq!(slots("2"), None);
        assert_eq!(slots("10,32765"), None);
        assert_eq!(slots("10,"), None);
    }

    #[test]
    fn demand_paging_takes_lists_and_sizes() {
        let parse = |more: &[&str]| {
            let words = ["pageferry", "bench", "demand-paging"].iter().chain(more);
            match Cli::try_parse_from(words).ok()?.command {
                Command::Bench(BenchArgs {
                    command: BenchCommand::DemandPaging(flags),
                }) => Some(flags),
                other => panic!("bench demand-paging is {other:?}"),
            }
        };
        let flags = parse(&["--vcpus", "1,64", "--memory-per-vcpu", "4M", "--overlap"]).unwrap();
        assert_eq!(
            (flags.vcpus, flags.memory_per_vcpu),
            (vec![1, 64], Some(4 << 20))
        );
        assert!(flags.overlap && !flags.model && flags.repeat.is_none());
        let flags = parse(&["--model", "--total-memory", "1T", "--seed", "3"]).unwrap();
        assert_eq!((flags.total_memory, flags.seed), (Some(1 << 40), Some(3)));
        for refused in [
            &["--vcpus", "1025"][..],
            &["--vcpus", "1,"],
            &["--memory-per-vcpu", "1K"],
            &["--total-memory", "1T"],
            &["--model", "--engine", "kvm"],
        ] {
            assert!(parse(refused).is_none(), "{refused:?}");
        }
    }

    #[test]
    fn defaults_are_the_documented_ones() {
        let Command::Demo(demo) = Cli::parse_from(["pageferry", "demo"]).command else {
            panic!("demo is not demo");
        };
        assert_eq!((demo.machine.vcpus, demo.machine.memory), (4, 512 << 20));
        assert_eq!(demo.machine.engine, EngineChoice::Auto);
        assert_eq!(demo.delivery.delivery, DeliveryChoice(None));
        assert_eq!(demo.source.precopy_passes, 1);
    }
}
