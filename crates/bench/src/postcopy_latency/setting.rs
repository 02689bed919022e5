//! What a run measures.

use crate::BenchError;
use crate::args::{Common, Delay, PeerFlag, time};
use crate::vm::{check_host_memory, isa_of};
use clap::{Args, ValueEnum, value_parser};
use pageferry_guest::MemoryMap;
use pageferry_harness::size;
use pageferry_hosts::Rate;
use pageferry_machine::{Backing, Engine, EngineChoice};
use pageferry_migration::SourceConfig;
use pageferry_testkit::qemu;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// A row: the way of a requested page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Requested pages follow, on the bulk channel, what was sent there before.
    Vanilla,
    /// Requested pages have a channel of their own, and bulk senders give way to them.
    Preempt,
    /// As `Preempt`, without prefetch: pages are pushed in the order of their addresses.
    NoPrefetch,
    /// As `Preempt`, but each vCPU writes its own part of the pages in ascending order.
    InOrder,
    /// As `InOrder`, without prefetch.
    InOrderNoPrefetch,
    /// As `Preempt`, but the guest touches one page.
    NoReaders,
    /// As `Preempt`, while nothing is pushed.
    Idle,
    /// As many bytes as the guest has over a new connection of TCP.
    Bare,
    /// Bare requests and replies on the same link, as many unanswered as there are vCPUs.
    Floor,
    /// QEMU, with one connection.
    Qemu,
    /// As `Qemu`, with TCP_NODELAY on its sockets.
    QemuNoDelay,
    /// QEMU with its capability `postcopy-preempt`.
    QemuPreempt,
    /// As `QemuPreempt`, with TCP_NODELAY on its sockets.
    QemuPreemptNoDelay,
}

impl Mode {
    /// All rows.
    pub(crate) const ALL: [Self; 13] = [
        Self::Vanilla,
        Self::Preempt,
        Self::NoPrefetch,
        Self::InOrder,
        Self::InOrderNoPrefetch,
        Self::NoReaders,
        Self::Idle,
        Self::Bare,
        Self::Floor,
        Self::Qemu,
        Self::QemuNoDelay,
        Self::QemuPreempt,
        Self::QemuPreemptNoDelay,
    ];

    /// The switches of a row of QEMU. `None` for the other rows.
    pub(super) const fn qemu(self) -> Option<QemuSwitches> {
        let (preempt, no_delay) = match self {
            Self::Qemu => (false, false),
            Self::QemuNoDelay => (false, true),
            Self::QemuPreempt => (true, false),
            Self::QemuPreemptNoDelay => (true, true),
            _ => return None,
        };
        Some(QemuSwitches { preempt, no_delay })
    }

    /// The name in tables.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Vanilla => "vanilla",
            Self::Preempt => "preempt",
            Self::NoPrefetch => "no prefetch",
            Self::InOrder => "in order",
            Self::InOrderNoPrefetch => "in order no prefetch",
            Self::NoReaders => "no readers",
            Self::Idle => "idle",
            Self::Bare => "bare TCP",
            Self::Floor => "floor",
            Self::Qemu => "qemu",
            Self::QemuNoDelay => "qemu nodelay",
            Self::QemuPreempt => "qemu preempt",
            Self::QemuPreemptNoDelay => "qemu preempt nodelay",
        }
    }
}

/// The differences between the rows of QEMU.
#[derive(Clone, Copy)]
pub(super) struct QemuSwitches {
    /// Whether its capability `postcopy-preempt` is on.
    pub(super) preempt: bool,
    /// Whether its sockets have TCP_NODELAY.
    pub(super) no_delay: bool,
}

/// The size of the pages behind the guest, at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum HostPage {
    /// 4 KiB of shared memory
    #[value(name = "4k")]
    Size4K,
    /// 2 MiB of the pool of huge pages. Only KVM maps such a page whole
    #[value(name = "2m")]
    Size2M,
}

impl HostPage {
    /// The size in bytes.
    pub(crate) const fn bytes(self) -> u64 {
        self.backing().page_size().bytes()
    }

    /// The name in tables.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Size4K => "4 KiB",
            Self::Size2M => "2 MiB",
        }
    }

    pub(super) const fn backing(self) -> Backing {
        match self {
            Self::Size4K => Backing::Shmem,
            Self::Size2M => Backing::Hugetlb2M,
        }
    }
}

/// The conditions under which all rows are measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Column {
    /// The size of the pages behind the guest.
    pub(crate) host_page: HostPage,
    /// The number of vCPUs, all of which write.
    pub(crate) vcpus: u32,
    /// The congestion control of TCP on both hosts.
    pub(crate) congestion: String,
    /// The delay of the link.
    pub(crate) link: Option<Delay>,
    /// The bulk channels.
    pub(crate) bulk: u16,
    /// The queue that the push may have, if not the default.
    pub(crate) queue: Option<Queue>,
}

/// The congestion control of two hosts, and the delay of their link.
pub(super) type Hosts = (String, Option<Delay>);

/// A value of `--queue`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Queue(pub(super) Duration);

impl FromStr for Queue {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let range = SourceConfig::MIN_QUEUE..=SourceConfig::MAX_QUEUE;
        let queue = time(text)?;
        if !range.contains(&queue) {
            return Err(format!("queue '{text}': expected {range:?}"));
        }
        Ok(Self(queue))
    }
}

impl Column {
    /// The column in words.
    pub(crate) fn name(&self) -> String {
        let mut name = format!(
            "{} pages, {} vCPU{}, plain, {}",
            self.host_page.name(),
            self.vcpus,
            if self.vcpus == 1 { "" } else { "s" },
            self.congestion
        );
        if let Some(link) = self.link {
            name += &format!(", {link}");
        }
        if self.bulk > 1 {
            name += &format!(", {} bulk channels", self.bulk);
        }
        if let Some(Queue(queue)) = self.queue {
            name += &format!(", queue {queue:?}");
        }
        name
    }

    /// The hosts between which it is measured.
    pub(super) fn hosts(&self) -> Hosts {
        (self.congestion.clone(), self.link)
    }

    /// Whether a mode has a row. A delay is for the rates and for what they cost.
    pub(super) fn has(&self, mode: Mode) -> bool {
        match mode {
            Mode::NoReaders | Mode::Bare => self.link.is_some(),
            Mode::Preempt | Mode::Idle => true,
            _ => self.link.is_none(),
        }
    }
}

/// `pageferry-bench postcopy-latency`.
#[derive(Debug, Args)]
pub(crate) struct LatencyFlags {
    /// The engine of guests on pages of 4 KiB. Guests on pages of 2 MiB run on kvm
    #[arg(long, default_value = "soft", value_name = "kvm|soft")]
    engine: Engine,
    /// Sizes of the pages behind the guest, at both ends [default: 4k,2m; with --quick 4k]
    #[arg(long, value_name = "4k,2m", value_delimiter = ',', ignore_case = true)]
    pages: Vec<HostPage>,
    /// Numbers of vCPUs
    #[arg(short, long, value_name = "N,..", default_value = "1,16", value_delimiter = ',', value_parser = value_parser!(u32).range(1..=64))]
    vcpus: Vec<u32>,
    /// Congestion controls of TCP, such as cubic,bbr
    #[arg(
        long,
        value_name = "NAME,..",
        default_value = "cubic",
        value_delimiter = ','
    )]
    congestion: Vec<String>,
    /// The rate of the link in each direction: a number with bit, kbit, mbit or gbit. Verdicts are
    /// for 1gbit
    #[arg(long, value_name = "RATE", default_value = "1gbit")]
    pub(super) rate: Rate,
    /// Delays of the link in each direction, and how much longer a packet may take. The rows are
    /// then of rates, and of what they cost
    #[arg(long, value_name = "DELAY[:JITTER],..", value_delimiter = ',')]
    link: Vec<Delay>,
    /// Numbers of bulk channels
    #[arg(long, value_name = "N,..", default_value = "1", value_delimiter = ',', value_parser = value_parser!(u16).range(1..=i64::from(SourceConfig::MAX_CHANNELS)))]
    bulk: Vec<u16>,
    /// Queues that the push may have beside the free round trip [default: as `migrate`]
    #[arg(long, value_name = "TIME,..", value_delimiter = ',')]
    queue: Vec<Queue>,
    /// Guest memory: a whole number and K, M or G (powers of 1024) [default: 256M; with --quick
    /// 32M]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory: Option<u64>,
    /// Measure another hypervisor beside: the same guest program over the same link, emulated, in
    /// columns with 4 KiB pages
    #[arg(long, value_name = "qemu", value_enum)]
    peer: Option<PeerFlag>,
    /// The program of the peer
    #[arg(long, value_name = "FILE", default_value = qemu::PROGRAM, requires = "peer")]
    peer_program: PathBuf,
    #[command(flatten)]
    pub(crate) common: Common,
}

impl LatencyFlags {
    /// The number of rounds. Each measures all rows of all columns once.
    pub(super) fn rounds(&self) -> u32 {
        self.common.rounds(9, 1)
    }

    /// The QEMU to measure beside, in columns with 4 KiB pages.
    pub(super) fn qemu(&self) -> Option<&Path> {
        self.peer.map(|_| &*self.peer_program)
    }

    /// Guest memory, in bytes.
    pub(super) fn memory(&self) -> u64 {
        let default = if self.common.quick { 32 } else { 256 };
        self.memory.unwrap_or(default << 20)
    }

    /// All combinations once, in the order of the tables.
    pub(super) fn columns(&self) -> Vec<Column> {
        let pages: &[HostPage] = match (&*self.pages, self.common.quick) {
            ([], false) => &[HostPage::Size4K, HostPage::Size2M],
            ([], true) => &[HostPage::Size4K],
            (named, _) => named,
        };
        let one = Column {
            host_page: HostPage::Size4K,
            vcpus: 1,
            congestion: String::new(),
            link: None,
            bulk: 1,
            queue: None,
        };
        let mut all = vec![one];
        each(&mut all, pages, |column, page| column.host_page = *page);
        each(&mut all, &self.vcpus, |column, vcpus| column.vcpus = *vcpus);
        each(&mut all, &self.congestion, |column, name| {
            column.congestion.clone_from(name);
        });
        each(&mut all, &self.link, |column, link| {
            column.link = Some(*link);
        });
        each(&mut all, &self.bulk, |column, bulk| column.bulk = *bulk);
        each(&mut all, &self.queue, |column, queue| {
            column.queue = Some(*queue);
        });
        let mut once: Vec<Column> = Vec::new();
        for column in all {
            if !once.contains(&column) {
                once.push(column);
            }
        }
        once
    }

    /// The engine of a column's guests.
    pub(super) const fn engine_of(&self, host_page: HostPage) -> Engine {
        match host_page {
            HostPage::Size4K => self.engine,
            HostPage::Size2M => Engine::Kvm,
        }
    }

    /// The memory of a row's guest, in bytes. Without a push every page is a stall, so a part of
    /// the memory gives enough of them.
    pub(super) fn memory_of(&self, host_page: HostPage, mode: Mode) -> u64 {
        let part = match (mode, host_page) {
            (Mode::Idle, HostPage::Size4K) => 8,
            (Mode::Idle, HostPage::Size2M) => 2,
            _ => 1,
        };
        let huge = HostPage::Size2M.bytes();
        (self.memory() / part / huge * huge).max(8 * huge)
    }

    /// # Errors
    /// [`BenchError::Setting`] for memory that is not whole pages of 2 MiB, too small, or too large
    /// for this host or for QEMU's guest.
    pub(super) fn check(&self) -> Result<(), BenchError> {
        pageferry_machine::select(EngineChoice::Only(self.engine))?;
        let (page, memory) = (HostPage::Size2M.bytes(), self.memory());
        let least = 16 * page;
        if memory < least || !memory.is_multiple_of(page) {
            return Err(BenchError::Setting(format!(
                "{memory} bytes of guest memory: expected a multiple of 2 MiB, and {} MiB at least",
                least >> 20
            )));
        }
        if self.peer.is_some() && memory > qemu::MAX_MEMORY {
            return Err(BenchError::Setting(format!(
                "{} MiB of guest memory: a guest on QEMU can have at most {} MiB",
                memory >> 20,
                qemu::MAX_MEMORY >> 20
            )));
        }
        for column in self.columns() {
            let isa = isa_of(self.engine_of(column.host_page));
            let least = self.memory_of(column.host_page, Mode::Idle);
            MemoryMap::new(isa, column.vcpus, least)?;
        }
        check_host_memory(2 * memory)
    }
}

/// Makes each column one for each value, unless there is none.
fn each<T>(columns: &mut Vec<Column>, values: &[T], set: impl Fn(&mut Column, &T)) {
    if values.is_empty() {
        return;
    }
    let with = |column: Column| {
        let one = |value| {
            let mut column = column.clone();
            set(&mut column, value);
            column
        };
        values.iter().map(one).collect::<Vec<_>>()
    };
    *columns = std::mem::take(columns).into_iter().flat_map(with).collect();
}

/// The flags of a command line.
#[cfg(test)]
pub(super) fn flags(more: &[&str]) -> LatencyFlags {
    use crate::args::{Cli, Command};
    let words = [&["pageferry-bench", "postcopy-latency"], more].concat();
    match clap::Parser::parse_from(words) {
        Cli {
            command: Command::PostcopyLatency(flags),
        } => flags,
        other => panic!("another benchmark: {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_all_combinations() {
        let names = |more: &[&str]| -> Vec<_> {
            let columns = flags(more).columns();
            columns.iter().map(Column::name).collect()
        };
        let all = names(&["--pages", "4k,2M,4k", "--congestion", "cubic,bbr"]);
        assert_eq!(all.len(), 8);
        assert_eq!(all[0], "4 KiB pages, 1 vCPU, plain, cubic");
        assert_eq!(all[7], "2 MiB pages, 16 vCPUs, plain, bbr");
        assert_eq!((names(&[]).len(), names(&["--quick"]).len()), (4, 2));
        let link = ["--link", "100us,5ms:2ms", "--bulk", "1,4", "--queue", "1ms"];
        let all = names(&[&["--quick"], &link[..]].concat());
        let last = "16 vCPUs, plain, cubic, delay 5ms to 7ms, 4 bulk channels, queue 1ms";
        assert_eq!((all.len(), &*all[7]), (8, &*format!("4 KiB pages, {last}")));
    }

    #[test]
    fn a_link_has_rows_of_rates() {
        let column = &flags(&["--link", "1ms"]).columns()[0];
        let modes = Mode::ALL.into_iter().filter(|mode| column.has(*mode));
        let names: Vec<_> = modes.map(Mode::name).collect();
        assert_eq!(names, ["preempt", "no readers", "idle", "bare TCP"]);
        for wrong in ["1", "1s", "-1ms", "1ms:", "1ms:2ms:3ms", ""] {
            assert!(wrong.parse::<Delay>().is_err(), "{wrong}");
        }
        assert!("1us".parse::<Queue>().is_err());
    }

    #[test]
    fn a_full_run_is_larger_than_a_quick_one() {
        let (full, quick) = (flags(&[]), flags(&["--quick"]));
        assert_eq!((full.rounds(), full.memory()), (9, 256 << 20));
        assert_eq!((quick.rounds(), quick.memory()), (1, 32 << 20));
        assert_eq!(full.rate.bytes_per_second(), 125_000_000);
    }

    #[test]
    fn a_guest_on_qemu_has_at_most_3_gib() {
        let most = qemu::MAX_MEMORY.to_string();
        let beside = flags(&["--peer", "qemu", "--memory", &most]);
        assert_eq!(beside.qemu(), Some(Path::new("qemu-system-riscv64")));
        let more = (qemu::MAX_MEMORY + (2 << 20)).to_string();
        let refused = flags(&["--peer", "qemu", "--memory", &more]).check();
        let refused = refused.expect_err("too much").to_string();
        assert!(refused.contains("at most 3072 MiB"), "{refused}");
        assert_eq!(flags(&[]).qemu(), None);
    }

    #[test]
    fn memory_is_whole_huge_pages_for_every_row() {
        for size in ["16M", "65540K"] {
            assert!(flags(&["--memory", size]).check().is_err(), "{size}");
        }
        for size in ["32M", "34M"] {
            let flags = flags(&["--memory", size]);
            flags.check().expect("a good setting");
            for page in [HostPage::Size4K, HostPage::Size2M] {
                assert!(flags.memory_of(page, Mode::Idle).is_multiple_of(2 << 20));
                assert_eq!(flags.memory_of(page, Mode::Preempt), flags.memory());
            }
        }
    }
}
