//! What a run measures.

use super::plan::Plan;
use crate::BenchError;
use crate::args::Common;
use crate::vm::{check_host_memory, engines, isa_of};
use clap::{Args, ValueEnum, value_parser};
use pageferry_addr::PAGE_SIZE;
use pageferry_guest::MAX_VCPUS;
use pageferry_harness::size;
use pageferry_machine::{Backing, Delivery, Engine, EngineChoice};
use std::time::Duration;

/// The heading of the options that are those of the kernel's test.
const SELFTEST: &str = "Options of demand_paging_test";

/// `pageferry-bench demand-paging`.
#[derive(Clone, Debug, Args)]
pub(crate) struct DemandFlags {
    /// The engine: kvm, soft, or auto for all that run here
    #[arg(long, default_value = "auto", value_name = "auto|kvm|soft")]
    engine: EngineChoice,
    /// Numbers of vCPUs [default: 1,2,4,8,16,32,64; of the model up to 416]
    #[arg(short, long, value_name = "N,..", value_delimiter = ',', value_parser = value_parser!(u32).range(1..=i64::from(MAX_VCPUS)))]
    pub(crate) vcpus: Vec<u32>,
    /// Guest memory for each vCPU [default: 16M on soft and of the model, 1M on kvm, 4M to compare
    /// readers]
    #[arg(short = 'b', long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) memory_per_vcpu: Option<u64>,
    /// Every vCPU touches the pages of all
    #[arg(short, long)]
    pub(super) overlap: bool,
    /// Compare readers of fault events on kvm: a loop that reads one message at a time and never
    /// spins, one reader that spins, two, and one for each of two userfaultfds
    #[arg(long, conflicts_with_all = ["kvm_userfault", "readers"])]
    pub(super) compare_readers: bool,
    /// The memory behind the guest: shmem, shmem-thp or anonymous [default: shmem]
    #[arg(short = 's', long, value_name = "TYPE", help_heading = SELFTEST)]
    backing: Option<Backing>,
    /// Measure only this userfaultfd mode [default: all modes]
    #[arg(short = 'u', long, value_name = "MODE", ignore_case = true, help_heading = SELFTEST)]
    userfault: Option<Userfault>,
    /// One userfaultfd for all vCPUs: always so here, but with --compare-readers
    #[arg(short = 'a', long, help_heading = SELFTEST)]
    single_userfaultfd: bool,
    /// Threads that read fault events [default: 1]
    #[arg(short = 'r', long, value_name = "N", value_parser = value_parser!(u32).range(1..=1024), help_heading = SELFTEST)]
    pub(super) readers: Option<u32>,
    /// Measure only exits on the vCPU's own thread: by a bitmap, or by poison on kvm
    #[arg(short = 'k', long, help_heading = SELFTEST)]
    kvm_userfault: bool,
    /// Microseconds that a thread sleeps before it installs a page: a simulated fetch [default: 0]
    #[arg(short = 'd', long, value_name = "USEC", value_parser = value_parser!(u64).range(0..=1_000_000), help_heading = SELFTEST)]
    delay_us: Option<u64>,
    /// Model many vCPUs on as many cores, from times measured on the soft engine in this run
    #[arg(long, conflicts_with_all = ["engine", "overlap", "compare_readers", "backing", "userfault", "single_userfaultfd", "readers", "kvm_userfault", "delay_us"])]
    pub(crate) model: bool,
    /// Of the model: memory of all vCPUs together, in a separate table
    #[arg(long, value_name = "SIZE", default_value = "12T", value_parser = size::parse, requires = "model")]
    pub(crate) total_memory: u64,
    /// Of the model: the seed of its random numbers
    #[arg(long, value_name = "N", default_value_t = 2019, requires = "model")]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) common: Common,
}

/// The userfaultfd modes of `demand_paging_test`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Userfault {
    /// No page is missing
    None,
    /// userfaultfd missing faults
    Missing,
    /// userfaultfd minor faults; with -k exits by poison, which is registered for them
    Minor,
}

impl DemandFlags {
    /// The engines to measure. `PAGEFERRY_REQUIRE` makes it an error that KVM cannot be measured.
    pub(super) fn engines(&self) -> Result<Vec<Engine>, BenchError> {
        let required = std::env::var("PAGEFERRY_REQUIRE").unwrap_or_default();
        if self.engine == EngineChoice::Auto && required.split(',').any(|word| word == "kvm") {
            pageferry_machine::select(EngineChoice::Only(Engine::Kvm))?;
        }
        engines(self.engine)
    }

    /// The numbers of vCPUs in order, each once. `default` if none is named.
    pub(crate) fn vcpus(&self, default: &[u32]) -> Vec<u32> {
        let mut vcpus = match &*self.vcpus {
            [] => default.to_vec(),
            named => named.to_vec(),
        };
        vcpus.sort_unstable();
        vcpus.dedup();
        vcpus
    }

    /// The numbers of vCPUs that are measured.
    pub(super) fn measured_vcpus(&self) -> Vec<u32> {
        self.vcpus(&[1, 2, 4, 8, 16, 32, 64])
    }

    /// Bytes for each vCPU on `engine`. Faults on KVM take longer, so they get less.
    pub(super) fn memory_on(&self, engine: Engine) -> u64 {
        self.memory_per_vcpu.unwrap_or(match engine {
            Engine::Soft => 16 << 20,
            // Two userfaultfds need 4 MiB.
            Engine::Kvm if self.compare_readers => 4 << 20,
            Engine::Kvm => 1 << 20,
        })
    }

    /// The least time of a sample: passes are repeated until they have taken it together.
    pub(super) fn sample(&self) -> Duration {
        Duration::from_millis(if self.common.quick { 0 } else { 200 })
    }

    /// The memory behind the guests.
    pub(super) fn backing(&self) -> Backing {
        self.backing.unwrap_or(Backing::Shmem)
    }

    /// The time that a thread sleeps before it installs a missing page: a simulated fetch.
    pub(super) fn delay(&self) -> Duration {
        Duration::from_micros(self.delay_us.unwrap_or(0))
    }

    /// Whether the text also has the lines of `demand_paging_test`.
    pub(super) fn has_selftest_lines(&self) -> bool {
        !self.vcpus.is_empty()
            || self.memory_per_vcpu.is_some()
            || self.overlap
            || self.backing.is_some()
            || self.userfault.is_some()
            || self.single_userfaultfd
            || self.readers.is_some()
            || self.kvm_userfault
            || self.delay_us.is_some()
    }

    /// Whether this run measures `delivery`; `None`: no page is missing.
    pub(super) fn wants(&self, delivery: Option<Delivery>) -> bool {
        match self.userfault {
            _ if self.kvm_userfault => matches!(
                delivery,
                Some(Delivery::Exit | Delivery::Userfault | Delivery::Poison)
            ),
            None => true,
            Some(Userfault::None) => delivery.is_none(),
            Some(Userfault::Missing) => delivery == Some(Delivery::Missing),
            Some(Userfault::Minor) => delivery == Some(Delivery::Minor),
        }
    }

    /// The one delivery that is wanted. Of exits it is KVM's, because every soft engine has its own.
    pub(super) fn wanted(&self) -> Option<Delivery> {
        match self.userfault {
            _ if self.kvm_userfault => Some(Delivery::Poison),
            Some(Userfault::Missing) => Some(Delivery::Missing),
            Some(Userfault::Minor) => Some(Delivery::Minor),
            None | Some(Userfault::None) => None,
        }
    }

    pub(super) fn check(&self) -> Result<(), BenchError> {
        if (self.userfault, self.kvm_userfault) == (Some(Userfault::Missing), true) {
            let why = "exits (-k) need memory without missing faults: leave out -u missing";
            return Err(BenchError::Setting(why.into()));
        }
        let backing = self.backing();
        if backing.is_hugetlb() {
            return Err(BenchError::Setting(format!(
                "this benchmark brings pages of 4 KiB, and {backing} is mapped whole: use shmem, shmem-thp or anonymous"
            )));
        }
        let mut largest = 0;
        for engine in self.engines()? {
            let pages = self.memory_on(engine) / PAGE_SIZE;
            let most = *self.measured_vcpus().last().unwrap_or(&1);
            largest = largest.max(Plan::memory_bytes(isa_of(engine), most, pages)?);
        }
        backing.check(largest)?;
        check_host_memory(largest)
    }
}

/// The flags of a command line.
#[cfg(test)]
pub(crate) fn flags(words: &str) -> DemandFlags {
    use crate::args::{Cli, Command};
    let words = format!("pageferry-bench demand-paging {words}");
    match clap::Parser::parse_from(words.split_whitespace()) {
        Cli {
            command: Command::DemandPaging(flags),
        } => flags,
        other => panic!("another benchmark: {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::Parser;

    #[test]
    fn lists_and_sizes_are_taken() {
        let short = flags("-v 4 -b 4M -s shmem -u MINOR -a -r 2 -o -d 50");
        assert_eq!((short.measured_vcpus(), short.overlap), (vec![4], true));
        assert_eq!(short.memory_on(Engine::Kvm), 4 << 20);
        assert_eq!(short.userfault, Some(Userfault::Minor));
        assert_eq!((short.readers, short.delay().as_micros()), (Some(2), 50));
        let model = flags("--model --total-memory 1T --seed 3");
        assert_eq!((model.total_memory, model.seed), (1 << 40, 3));
        for refused in [
            "--vcpus 1025",
            "--vcpus 1,",
            "--memory-per-vcpu 1K",
            "--total-memory 1T",
            "--model --engine kvm",
            "--model -k",
            "-s hugetlb",
            "-r 0",
            "-u wp",
        ] {
            let words = format!("pageferry-bench demand-paging {refused}");
            assert!(Cli::try_parse_from(words.split(' ')).is_err(), "{refused}");
        }
    }

    #[test]
    fn numbers_of_vcpus_are_put_in_order() {
        let named = flags("-v 8,1,8");
        assert_eq!(named.measured_vcpus(), [1, 8]);
        assert!(named.has_selftest_lines());
        assert_eq!(named.sample(), Duration::from_millis(200));
        let all = flags("");
        assert_eq!(all.measured_vcpus(), [1, 2, 4, 8, 16, 32, 64]);
        assert!(!all.has_selftest_lines());
    }

    #[test]
    fn the_options_of_the_kernels_test_choose_the_ways() {
        let all = [
            None,
            Some(Delivery::Exit),
            Some(Delivery::Poison),
            Some(Delivery::Minor),
            Some(Delivery::Missing),
        ];
        let check = |words, from: usize, to: usize| {
            let flags = flags(words);
            let wanted: Vec<_> = all.into_iter().filter(|&one| flags.wants(one)).collect();
            assert_eq!(wanted, all[from..to], "{words}");
        };
        check("", 0, 5);
        check("-u none", 0, 1);
        check("-u missing", 4, 5);
        check("-u minor", 3, 4);
        check("-k", 1, 3);
        check("-k -u minor", 1, 3);
        let refused = flags("-k -u missing").check().unwrap_err();
        assert_eq!(refused.exit_code(), 2);
    }
}
