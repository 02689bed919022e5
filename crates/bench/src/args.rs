//! The flags of the benchmarks.

use crate::BenchError;
use crate::blackout::BlackoutFlags;
use crate::demand_paging::DemandFlags;
use crate::dirty_log::DirtyLogFlags;
use crate::linux::LinuxFlags;
use crate::postcopy_latency::LatencyFlags;
use crate::restore::RestoreFlags;
use crate::slots::SlotFlags;
use crate::tunnel::TunnelFlags;
use crate::vm;
use clap::{Args, Parser, Subcommand};
use pageferry_hosts::Link;
use pageferry_machine::{Engine, EngineChoice};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// The exit codes. They have the same meaning as those of `pageferry`.
pub(crate) const EXIT_CODES: &str = "\
Exit codes:
   0  done
   1  a wrong value: in a guest's memory, or of a scheme's look-up
   2  wrong flags, sizes or files
   3  the engine asked for does not run on this host
   4  the fault delivery or the backing asked for is not there
   9  cancelled (Ctrl-C)
  12  the host refused something (the message says what), or a bug
  14  the guest stopped
  15  this host is too busy to measure: try again when it is idle";

/// Measures Pageferry on this host, each figure next to its lower bound from the same run
#[derive(Debug, Parser)]
#[command(name = "pageferry-bench", version, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    /// The benchmark.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Wait of a vCPU for an urgent page, and speed of the background push
    ///
    /// The wait is printed next to a bare ping-pong plus a bare exit, the push next to the bare
    /// link.
    Link(EngineFlags),
    /// The blackout of a busy VM with 4 vCPUs and 512 MiB, and the memory that both processes use
    /// beyond it
    Blackout(BlackoutFlags),
    /// Guest instructions per second on our own hypervisor
    Soft(Common),
    /// The states of a guest's pages: search of a bitmap, and claims of runs by two threads
    ///
    /// A read of the words of an empty bitmap is printed next to a search of it, and two threads
    /// next to one. No guest runs.
    States(Common),
    /// How soon the working set of a VM from a snapshot is there
    ///
    /// The same pages are touched by a private mapping of the memory file, through a plain handler
    /// of ours that stands for published ones, and through the pager. The file is in the page cache
    /// (warm) or not (cold). With root, the pager also reads it from another host over a link of 1
    /// Gbit/s. No guest runs: eight threads touch the memory.
    Restore(RestoreFlags),
    /// Speed of first touches of memory by many vCPUs at once
    ///
    /// This follows demand_paging_test of the kernel's selftests: each vCPU stores to one word of
    /// each page of its memory. The options -v -b -s -u -a -r -k -o -d are those of the test, and
    /// with one of them the test's three lines follow the table. The soft engine takes faults in
    /// parallel and, with a core for each vCPU, one after the other. KVM is measured with each
    /// fault delivery. PAGEFERRY_REQUIRE=kvm in the environment makes it an error if KVM cannot be
    /// measured. --model prints a MODEL of many more vCPUs instead, with a core for each. The
    /// model's inputs are measured in the same run, and its results are compared with real runs.
    DemandPaging(DemandFlags),
    /// Stalls of vCPUs that touch missing pages while a push saturates a shaped link
    ///
    /// This follows the measurements of the postcopy-preempt series. Source and destination have
    /// two network namespaces, joined by a link with one queue. Each round moves a VM three times:
    /// requested pages come behind the pushed ones (vanilla), before them (preempt), or nothing is
    /// pushed (idle). Bare exchanges on the same link follow (floor). All vCPUs write pages at
    /// random. Verdicts need 5 rounds in which nothing else disturbed the machine. It needs root
    /// and Debian's package iproute2. For pages of 2 MiB it takes huge pages of the host meanwhile.
    PostcopyLatency(LatencyFlags),
    /// Linux on our own hypervisor: start, processes, pipes, arithmetic
    ///
    /// A loop of a process is printed next to the same loop in a bare guest. With --peer qemu, the
    /// same kernel runs on QEMU in turn, which translates code where our engine interprets it:
    /// arithmetic is about 10 times slower here. The kernel and its initrd are those of `cargo
    /// xtask guest-linux`: in the folder PAGEFERRY_GUEST_LINUX of the environment, or in
    /// target/guest-linux.
    Linux(LinuxFlags),
    /// The phases of dirty logging on our own hypervisor, with one lock around every fault and
    /// without it
    DirtyLog(DirtyLogFlags),
    /// QEMU's migrations through a pair of tunnels, next to the same ones without
    ///
    /// Two QEMU processes emulate RV64 in two network namespaces, joined by a shaped link with one
    /// queue. Each round measures the stalls of a guest in post-copy with postcopy-preempt, the
    /// rate of pre-copy with one stream and with multifd, the blackout of a busy guest, and the
    /// memory of the tunnels. It needs root, Debian's packages iproute2 and qemu-system-misc.
    Tunnel(TunnelFlags),
    /// Our memory slots next to the memory maps of other crates: nanoseconds per operation
    ///
    /// Every scheme holds the same slots and looks up the same keys. The floor, a lower bound, is a
    /// binary search over sorted keys. With --quick there are 10 and 509 slots only.
    Slots(SlotFlags),
    /// Our second-stage page tables next to the page tables of other crates: nanoseconds per page
    ///
    /// Every timed look-up is checked; a wrong translation ends the command with 1. Figures with
    /// two threads need two idle cores. The floors, which are lower bounds, are bare stores and
    /// compare-exchanges. --quick maps 128 MiB per thread instead of 1 GiB.
    Tables(Common),
    /// Run a command that prints JSON, and store its output with the conditions of the run
    ///
    /// Example: pageferry-bench record docs/results/soft.json -- pageferry-bench soft --json
    Record {
        /// The file for the result
        #[arg(value_name = "FILE.json")]
        file: PathBuf,
        /// The command
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Print the page of figures, docs/performance.md, from the results in a directory
    Report {
        /// The directory. The page has its results in the order of their file names
        #[arg(value_name = "DIR")]
        results: PathBuf,
    },
    /// The other process of a benchmark
    #[command(hide = true)]
    Peer {
        /// The name of its part
        name: String,
        /// The part as JSON
        part: String,
    },
}

/// Flags of all benchmarks.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct Common {
    /// Number of rounds; each measures all rows once, and medians are printed [default: linux 7,
    /// dirty-log 11, postcopy-latency and tables 9, slots 15, the model 21, others 5; with --quick
    /// 1, or 5 of slots, tables and demand-paging]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: Option<u32>,
    /// Some seconds, noisier, and without a verdict where rounds are too few
    #[arg(long)]
    pub(crate) quick: bool,
    /// Print the rows as a JSON array
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a self-contained HTML page with bars for each case
    #[arg(long, value_name = "FILE.html")]
    pub(crate) report: Option<PathBuf>,
}

impl Common {
    /// The number of rounds of a benchmark that has `full` of them, or `quick`.
    pub(crate) fn rounds(&self, full: u32, quick: u32) -> u32 {
        self.repeat.unwrap_or(if self.quick { quick } else { full })
    }
}

/// Flags of benchmarks that run on both engines.
#[derive(Debug, Args)]
pub(crate) struct EngineFlags {
    /// The engine: kvm, soft, or auto for all that run here
    #[arg(long, default_value = "auto", value_name = "auto|kvm|soft")]
    pub(crate) engine: EngineChoice,
    #[command(flatten)]
    pub(crate) common: Common,
}

impl EngineFlags {
    /// The engines to measure.
    pub(crate) fn engines(&self) -> Result<Vec<Engine>, BenchError> {
        vm::engines(self.engine)
    }
}

/// A hypervisor to compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum PeerFlag {
    /// QEMU
    Qemu,
}

/// A time such as `100us` or `2ms`.
pub(crate) fn time(text: &str) -> Result<Duration, String> {
    let (digits, unit) = match text.strip_suffix("us") {
        Some(digits) => (digits, 1),
        None => (text.strip_suffix("ms").unwrap_or_default(), 1000),
    };
    let number: u32 = digits
        .parse()
        .map_err(|_| format!("time '{text}': expected a whole number with us or ms"))?;
    Ok(Duration::from_micros(u64::from(number) * unit))
}

/// The times that a link adds to each packet in each direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Delay {
    delay: Duration,
    /// Up to so much more.
    jitter: Duration,
}

impl FromStr for Delay {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (delay, jitter) = text.split_once(':').unwrap_or((text, "0us"));
        let [delay, jitter] = [time(delay)?, time(jitter)?];
        Ok(Self { delay, jitter })
    }
}

impl Delay {
    /// The link with these times.
    pub(crate) fn of(self, link: Link) -> Link {
        link.delayed(self.delay, self.jitter)
    }
}

impl fmt::Display for Delay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "delay {:?} to {:?}",
            self.delay,
            self.delay + self.jitter
        )
    }
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
    fn a_quick_run_is_short_unless_more_is_named() {
        let rounds = |more: &[&str]| {
            let words = [&["pageferry-bench", "soft"], more].concat();
            match Cli::parse_from(words).command {
                Command::Soft(common) => common.rounds(7, 1),
                other => panic!("soft is {other:?}"),
            }
        };
        assert_eq!(rounds(&[]), 7);
        assert_eq!(rounds(&["--quick"]), 1);
        assert_eq!(rounds(&["--quick", "--repeat", "3"]), 3);
    }
}
