//! The flags of the benchmarks.

use crate::channels::{Channels, TlsFlags};
use crate::demand_paging::DemandSetting;
use crate::postcopy_latency::{LatencySetting, Rate};
use crate::tunnel::TunnelSetting;
use clap::{Args, Parser, Subcommand};
use pageferry_harness::size;
use pageferry_machine::{Backing, Engine, EngineChoice};
use std::path::PathBuf;

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
    Link(LinkFlags),
    /// The blackout of a busy VM with 4 vCPUs and 512 MiB, and the memory that both processes use
    /// beyond it
    Blackout(BlackoutFlags),
    /// Guest instructions per second on our own hypervisor
    Soft(BenchFlags),
    /// The states of a guest's pages: search of a bitmap, and claims of runs by two threads
    ///
    /// A read of the words of an empty bitmap is printed next to a search of it, and two threads
    /// next to one. No guest runs.
    States(BenchFlags),
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
    /// binary search over sorted keys.
    Slots(SlotFlags),
    /// Our second-stage page tables next to the page tables of other crates: nanoseconds per page
    ///
    /// Every timed look-up is checked; a wrong translation ends the command with 1. Figures with
    /// two threads need two idle cores. The floors, which are lower bounds, are bare stores and
    /// compare-exchanges.
    Tables(TableFlags),
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

/// `pageferry-bench slots`.
#[derive(Debug, Args)]
pub(crate) struct SlotFlags {
    /// A few seconds instead of about a minute: 10 and 509 slots only, and noisier
    #[arg(long)]
    pub(crate) quick: bool,
    /// Numbers of slots, from 4 to 32764 [default: 10,30,50,100,509,8194,32764]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub(crate) slots: Vec<u32>,
    #[command(flatten)]
    pub(crate) common: CommonFlags,
}

/// `pageferry-bench tables`.
#[derive(Debug, Args)]
pub(crate) struct TableFlags {
    /// A second or two instead of about ten: 128 MiB per thread instead of 1 GiB, and noisier
    #[arg(long)]
    pub(crate) quick: bool,
    #[command(flatten)]
    pub(crate) common: CommonFlags,
    /// Write a self-contained HTML page with bars for each operation
    #[arg(long, value_name = "FILE.html")]
    pub(crate) report: Option<PathBuf>,
}

/// Flags of the comparisons with other crates.
#[derive(Debug, Args)]
pub(crate) struct CommonFlags {
    /// The number of rounds; medians are printed [default: slots 15, tables 9; 5 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Flags of all benchmarks.
#[derive(Debug, Args)]
pub(crate) struct BenchFlags {
    /// The engine: kvm, soft, or auto for all that run here
    #[arg(long, default_value = "auto", value_name = "auto|kvm|soft")]
    pub(crate) engine: EngineChoice,
    /// Number of repetitions of each measurement; medians are printed
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: u32,
    /// Print the rows as a JSON array
    #[arg(long)]
    pub(crate) json: bool,
}

/// `pageferry-bench restore`.
#[derive(Debug, Args)]
pub(crate) struct RestoreFlags {
    /// The memory of the VM
    #[arg(long, default_value = "1G", value_name = "SIZE", value_parser = size::parse)]
    pub(crate) memory: u64,
    /// The part of it that the VM touches, at most half
    #[arg(long, default_value = "64M", value_name = "SIZE", value_parser = size::parse)]
    pub(crate) working_set: u64,
    /// Number of repetitions of each measurement; medians are printed
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: u32,
    /// Print the rows as a JSON array
    #[arg(long)]
    pub(crate) json: bool,
}

/// `pageferry-bench link`.
#[derive(Debug, Args)]
pub(crate) struct LinkFlags {
    #[command(flatten)]
    pub(crate) common: BenchFlags,
    /// Channels for pages in the background, and bare connections to compare them with
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) channels: u16,
    #[command(flatten)]
    pub(crate) tls: TlsFlags,
}

impl LinkFlags {
    /// The channels to measure.
    pub(crate) fn channels(&self) -> Channels {
        Channels {
            bulk: self.channels,
            tls: self.tls.given(),
        }
    }
}

/// `pageferry-bench blackout`.
#[derive(Debug, Args)]
pub(crate) struct BlackoutFlags {
    #[command(flatten)]
    pub(crate) common: BenchFlags,
    /// Also move VMs with this much memory, of which the guest uses 512 MiB: a whole number and K,
    /// M, G or T. The destination then allocates no memory before it is needed
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) sparse: Option<u64>,
}

/// `pageferry-bench demand-paging`.
#[derive(Debug, Args)]
pub(crate) struct DemandFlags {
    /// The engine: kvm, soft, or auto for all that run here
    #[arg(
        long,
        default_value = "auto",
        value_name = "auto|kvm|soft",
        conflicts_with = "model"
    )]
    pub(crate) engine: EngineChoice,
    /// Numbers of vCPUs [default: 1,2,4,8,16,32,64; of the model up to 416; with --matrix 2,8,64]
    #[arg(short, long, value_name = "N,..", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=i64::from(DemandSetting::MAX_VCPUS)))]
    pub(crate) vcpus: Vec<u32>,
    /// Guest memory for each vCPU [default: 16M on soft and of the model, 1M on kvm]
    #[arg(short = 'b', long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) memory_per_vcpu: Option<u64>,
    /// Every vCPU touches the pages of all
    #[arg(short, long, conflicts_with = "model")]
    pub(crate) overlap: bool,
    /// Pages that are installed at a fault: the missing ones of the aligned block around the page
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "model", value_parser = clap::value_parser!(u64).range(1..=DemandSetting::MAX_AROUND))]
    pub(crate) around: u64,
    /// Number of repetitions of each measurement; medians are printed [default: 5; of the model's
    /// inputs 21]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: Option<u32>,
    /// One pass for each sample instead of passes for 0.2 s: faster, and noisier
    #[arg(long, conflicts_with = "model")]
    pub(crate) quick: bool,
    /// The tables of the KVM Userfault series: vCPUs by mode, fault events with one reader and with
    /// a reader for each vCPU
    #[arg(long, conflicts_with_all = ["model", "userfault", "kvm_userfault", "readers"])]
    pub(crate) matrix: bool,
    /// Compare readers of fault events on kvm: a loop that reads one message at a time and never
    /// spins, one reader that spins, two, and one for each of two userfaultfds
    #[arg(long, conflicts_with_all = ["model", "matrix", "kvm_userfault", "readers"])]
    pub(crate) compare_readers: bool,
    /// The options that only the kernel's test has.
    #[command(flatten)]
    pub(crate) selftest: SelftestFlags,
    /// Model many vCPUs on as many cores, from times measured on the soft engine in this run
    #[arg(long)]
    pub(crate) model: bool,
    /// Of the model: memory of all vCPUs together, in a separate table [default: 12T]
    #[arg(long, value_name = "SIZE", value_parser = size::parse, requires = "model")]
    pub(crate) total_memory: Option<u64>,
    /// Of the model: the seed of its random numbers [default: 2019]
    #[arg(long, value_name = "N", requires = "model")]
    pub(crate) seed: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a self-contained HTML page with a chart; a name that ends in .svg gets the figure
    /// alone
    #[arg(long, value_name = "FILE.html")]
    pub(crate) report: Option<PathBuf>,
}

/// Options of `demand_paging_test` that `demand-paging` takes too.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Options of demand_paging_test")]
pub(crate) struct SelftestFlags {
    /// The memory behind the guest: shmem, shmem-thp or anonymous [default: shmem]
    #[arg(short = 's', long, value_name = "TYPE", conflicts_with = "model")]
    pub(crate) backing: Option<Backing>,
    /// Measure only this userfaultfd mode [default: all modes]
    #[arg(
        short = 'u',
        long,
        value_name = "MODE",
        ignore_case = true,
        conflicts_with = "model"
    )]
    pub(crate) userfault: Option<Userfault>,
    /// One userfaultfd for all vCPUs: always so here, but with --compare-readers
    #[arg(short = 'a', long, conflicts_with = "model")]
    pub(crate) single_userfaultfd: bool,
    /// Threads that read fault events [default: 1]
    #[arg(short = 'r', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024), conflicts_with = "model")]
    pub(crate) readers: Option<u32>,
    /// Measure only exits on the vCPU's own thread: by a bitmap, or by poison on kvm
    #[arg(short = 'k', long, conflicts_with = "model")]
    pub(crate) kvm_userfault: bool,
    /// Microseconds that a thread sleeps before it installs a page: a simulated fetch [default: 0]
    #[arg(short = 'd', long, value_name = "USEC", value_parser = clap::value_parser!(u64).range(0..=1_000_000), conflicts_with = "model")]
    pub(crate) delay_us: Option<u64>,
}

/// The userfaultfd modes of `demand_paging_test`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Userfault {
    /// No page is missing
    None,
    /// userfaultfd missing faults
    Missing,
    /// userfaultfd minor faults; with -k exits by poison, which is registered for them
    Minor,
}

/// `pageferry-bench postcopy-latency`.
#[derive(Debug, Args)]
pub(crate) struct LatencyFlags {
    /// The engine of guests on pages of 4 KiB: kvm, soft, or auto. Guests on pages of 2 MiB run on
    /// kvm
    #[arg(long, default_value = "soft", value_name = "auto|kvm|soft")]
    pub(crate) engine: EngineChoice,
    /// Sizes of the pages behind the guest, at both ends [default: 4k,2m; with --quick 4k]
    #[arg(
        long,
        value_name = "4k,2m",
        value_delimiter = ',',
        value_enum,
        ignore_case = true
    )]
    pub(crate) pages: Vec<PageFlag>,
    /// Numbers of vCPUs
    #[arg(short, long, value_name = "N,..", default_value = "1,16", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=i64::from(LatencySetting::MAX_VCPUS)))]
    pub(crate) vcpus: Vec<u32>,
    /// Congestion controls of TCP, such as cubic,bbr
    #[arg(
        long,
        value_name = "NAME,..",
        default_value = "cubic",
        value_delimiter = ','
    )]
    pub(crate) congestion: Vec<String>,
    /// The rate of the link in each direction: a number with bit, kbit, mbit or gbit. Verdicts are
    /// for 1gbit
    #[arg(long, value_name = "RATE", default_value = "1gbit")]
    pub(crate) rate: Rate,
    /// Guest memory: a whole number and K, M or G (powers of 1024) [default: 256M; with --quick
    /// 32M]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) memory: Option<u64>,
    /// Number of rounds; each measures all rows once, and medians are printed [default: 9; with
    /// --quick 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: Option<u32>,
    /// Measure another hypervisor beside: the same guest program over the same link, emulated, in
    /// columns with 4 KiB pages and without TLS
    #[arg(long, value_name = "qemu", value_enum)]
    pub(crate) peer: Option<PeerFlag>,
    /// The program of the peer
    #[arg(long, value_name = "FILE", default_value = LatencySetting::QEMU, requires = "peer")]
    pub(crate) peer_program: PathBuf,
    /// Some seconds, without a verdict
    #[arg(long)]
    pub(crate) quick: bool,
    #[command(flatten)]
    pub(crate) tls: TlsFlags,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a self-contained HTML page with a histogram for each row
    #[arg(long, value_name = "FILE.html")]
    pub(crate) report: Option<PathBuf>,
}

/// A hypervisor to compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum PeerFlag {
    /// QEMU for RV64
    Qemu,
}

/// A size of the pages behind a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum PageFlag {
    /// 4 KiB
    #[value(name = "4k")]
    Size4K,
    /// 2 MiB
    #[value(name = "2m")]
    Size2M,
}

/// `pageferry-bench linux`.
#[derive(Debug, Args)]
pub(crate) struct LinuxFlags {
    /// The engine: on soft, Linux's speed and its moves; on kvm, its moves beside the test guest's,
    /// and reads of its disk
    #[arg(long, default_value = "soft", value_name = "kvm|soft")]
    pub(crate) engine: Engine,
    /// The kernel: an uncompressed riscv64 Image for RV64IMA, or for kvm a bzImage
    #[arg(long, value_name = "FILE", requires = "initrd")]
    pub(crate) kernel: Option<PathBuf>,
    /// Its initrd, with the first process of lab/guest-linux
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub(crate) initrd: Option<PathBuf>,
    /// Measure another hypervisor beside: the same kernel and initrd, emulated
    #[arg(long, value_name = "qemu", value_enum)]
    pub(crate) peer: Option<PeerFlag>,
    /// The program of the peer [default: qemu-system-riscv64; for kvm qemu-system-x86_64]
    #[arg(long, value_name = "FILE", requires = "peer")]
    pub(crate) peer_program: Option<PathBuf>,
    /// The memory of the guests that move on kvm
    #[arg(long, default_value = "512M", value_name = "SIZE", value_parser = size::parse)]
    pub(crate) memory: u64,
    /// Two taps for Linux's network on kvm, one for each end; an echo server serves port 7777 of
    /// 10.77.0.1 behind them
    #[arg(long, value_name = "TAP,TAP", value_delimiter = ',', num_args = 1)]
    pub(crate) net: Vec<String>,
    /// Number of rounds; each measures all rows once, and medians are printed [default: 7; with
    /// --quick 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: Option<u32>,
    /// Minutes of mixed work at the end, 2 or more: the last one's speed next to the first one's
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=1440))]
    pub(crate) minutes: Option<u32>,
    /// Some seconds, and noisier
    #[arg(long)]
    pub(crate) quick: bool,
    /// Print the rows as a JSON array
    #[arg(long)]
    pub(crate) json: bool,
}

/// `pageferry-bench dirty-log`.
#[derive(Debug, Args)]
pub(crate) struct DirtyLogFlags {
    /// Virtual CPUs, with a thread for each
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) vcpus: u32,
    /// Guest memory for each: a whole number and K, M or G (powers of 1024)
    #[arg(long, default_value = "128M", value_name = "SIZE", value_parser = size::parse)]
    pub(crate) memory: u64,
    /// Find dirty pages by the dirty bits of the tables instead of by write protection
    #[arg(long)]
    pub(crate) dirty_bits: bool,
    /// Number of repetitions of each phase; medians are printed
    #[arg(long, default_value_t = 11, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: u32,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `pageferry-bench tunnel`.
#[derive(Debug, Args)]
pub(crate) struct TunnelFlags {
    /// The program of QEMU for RV64
    #[arg(long, value_name = "FILE", default_value = TunnelSetting::QEMU)]
    pub(crate) peer_program: PathBuf,
    /// The rate of the link in each direction: a number with bit, kbit, mbit or gbit
    #[arg(long, value_name = "RATE", default_value = "1gbit")]
    pub(crate) rate: Rate,
    /// Guest memory: a whole number and K, M or G (powers of 1024) [default: 256M; with --quick
    /// 32M]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) memory: Option<u64>,
    /// The bytes that a tunnel keeps at most until they are acknowledged
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = size::parse)]
    pub(crate) window: u64,
    /// Number of rounds; each measures all rows once, and medians are printed [default: 5; with
    /// --quick 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: Option<u32>,
    /// Some seconds, and noisier
    #[arg(long)]
    pub(crate) quick: bool,
    #[command(flatten)]
    pub(crate) tls: TlsFlags,
    /// Print the rows as a JSON array
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
    fn demand_paging_takes_lists_and_sizes() {
        let parse = |more: &[&str]| {
            let words = ["pageferry-bench", "demand-paging"].iter().chain(more);
            match Cli::try_parse_from(words).ok()?.command {
                Command::DemandPaging(flags) => Some(flags),
                other => panic!("demand-paging is {other:?}"),
            }
        };
        let flags = parse(&["--vcpus", "1,64", "--memory-per-vcpu", "4M", "--overlap"]).unwrap();
        assert_eq!(
            (flags.vcpus, flags.memory_per_vcpu),
            (vec![1, 64], Some(4 << 20))
        );
        assert!(flags.overlap && !flags.model && flags.repeat.is_none());
        let words = "-v 4 -b 4M -s shmem -u MINOR -a -r 2 -o -d 50";
        let flags = parse(&words.split(' ').collect::<Vec<_>>()).unwrap();
        assert_eq!(
            (flags.vcpus, flags.memory_per_vcpu, flags.overlap),
            (vec![4], Some(4 << 20), true)
        );
        let selftest = flags.selftest;
        assert_eq!(selftest.backing, Some(Backing::Shmem));
        assert_eq!(selftest.userfault, Some(Userfault::Minor));
        assert!(selftest.single_userfaultfd && !selftest.kvm_userfault);
        assert_eq!((selftest.readers, selftest.delay_us), (Some(2), Some(50)));
        let flags = parse(&["--model", "--total-memory", "1T", "--seed", "3"]).unwrap();
        assert_eq!((flags.total_memory, flags.seed), (Some(1 << 40), Some(3)));
        for refused in [
            &["--vcpus", "1025"][..],
            &["--vcpus", "1,"],
            &["--memory-per-vcpu", "1K"],
            &["--total-memory", "1T"],
            &["--model", "--engine", "kvm"],
            &["--model", "-k"],
            &["--matrix", "-u", "minor"],
            &["-s", "hugetlb"],
            &["-r", "0"],
            &["-u", "wp"],
        ] {
            assert!(parse(refused).is_none(), "{refused:?}");
        }
    }
}
