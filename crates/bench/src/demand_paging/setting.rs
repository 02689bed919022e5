//! The settings of the benchmark.

use super::plan::Plan;
use crate::BenchError;
use crate::vm::isa_of;
use pageferry_addr::{PAGE_SIZE, PageSize};
use pageferry_machine::{Backing, Delivery, Engine};
use std::time::Duration;

/// The ways in which pages come that a run measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Paging {
    /// All ways of the engine.
    All,
    /// All ways of the engine. Those with fault events are measured twice: with one reader, and
    /// with a reader for each vCPU. These are the tables of the KVM Userfault series (James
    /// Houghton, kvm mailing list, December 2024).
    Tables,
    /// No page is missing: the `none` of `demand_paging_test`'s `-u`.
    Present,
    /// userfaultfd missing faults, its `MISSING`.
    Missing,
    /// userfaultfd minor faults, its `MINOR`.
    Minor,
    /// Exits on the vCPU's own thread, its `-k`: by the bitmap on the soft engine and where KVM has
    /// it, and by poison on KVM.
    Exits,
}

impl Paging {
    /// The one delivery that this measures. For [`Self::Exits`] it is KVM's, because every soft
    /// engine has its own.
    pub(super) const fn delivery(self) -> Option<Delivery> {
        match self {
            Self::All | Self::Tables | Self::Present => None,
            Self::Missing => Some(Delivery::Missing),
            Self::Minor => Some(Delivery::Minor),
            Self::Exits => Some(Delivery::Poison),
        }
    }

    /// Whether this measures `delivery`; `None`: no page is missing.
    pub(super) fn has(self, delivery: Option<Delivery>) -> bool {
        match self {
            Self::All | Self::Tables => true,
            Self::Present => delivery.is_none(),
            Self::Missing => delivery == Some(Delivery::Missing),
            Self::Minor => delivery == Some(Delivery::Minor),
            Self::Exits => matches!(
                delivery,
                Some(Delivery::Exit | Delivery::Userfault | Delivery::Poison)
            ),
        }
    }
}

/// The settings of the benchmark.
#[derive(Clone, Debug)]
pub(crate) struct DemandSetting {
    /// The engines to measure.
    pub(crate) engines: Vec<Engine>,
    /// The numbers of vCPUs, each from 1 to [`Self::MAX_VCPUS`].
    pub(crate) vcpus: Vec<u32>,
    /// Bytes for each vCPU, a multiple of the page size. By default 16 MiB on the soft engine, and
    /// 1 MiB on KVM, because its faults take longer (4 MiB to compare readers).
    pub(crate) memory_per_vcpu: Option<u64>,
    /// Whether every vCPU touches all pages.
    pub(crate) overlap: bool,
    /// The number of pages that are installed at a fault: the aligned block of this size around the
    /// page, as far as it is missing. From 1 to [`Self::MAX_AROUND`].
    pub(crate) around: u64,
    /// The number of samples of each figure, at least 1.
    pub(crate) repeat: u32,
    /// The least time of a sample: passes are repeated until they have taken it together.
    pub(crate) sample: Duration,
    /// The ways to measure.
    pub(crate) paging: Paging,
    /// The number of threads that read fault events, at least 1. [`Paging::Tables`] chooses its
    /// own.
    pub(crate) readers: u32,
    /// Whether to measure several kinds of readers side by side, each against a loop that reads one
    /// message at a time and never spins. `readers` does not count then.
    pub(crate) compare_readers: bool,
    /// The memory behind the guests. Pages of a pool are not possible: they are mapped whole, and
    /// this brings small ones.
    pub(crate) backing: Backing,
    /// The time that a thread sleeps before it installs a missing page: a simulated fetch.
    pub(crate) delay: Duration,
    /// Whether the text also has the lines of `demand_paging_test`.
    pub(crate) selftest_lines: bool,
}

impl Default for DemandSetting {
    /// All ways on the soft engine, 5 samples of 0.2 s.
    fn default() -> Self {
        Self {
            engines: vec![Engine::Soft],
            vcpus: vec![1, 2, 4, 8, 16, 32, 64],
            memory_per_vcpu: None,
            overlap: false,
            around: 1,
            repeat: 5,
            sample: Duration::from_millis(200),
            paging: Paging::All,
            readers: 1,
            compare_readers: false,
            backing: Backing::Shmem,
            delay: Duration::ZERO,
            selftest_lines: false,
        }
    }
}

impl DemandSetting {
    /// The largest number of vCPUs in a guest.
    pub(crate) const MAX_VCPUS: u32 = pageferry_guest::MAX_VCPUS;

    /// The largest block of pages that are installed together: 2 MiB.
    pub(crate) const MAX_AROUND: u64 = PageSize::Size2M.pages();

    /// Bytes for each vCPU on `engine`.
    #[must_use]
    pub(crate) fn memory_on(&self, engine: Engine) -> u64 {
        self.memory_per_vcpu.unwrap_or(match engine {
            Engine::Soft => 16 << 20,
            // Two userfaultfds need 4 MiB.
            Engine::Kvm if self.compare_readers => 4 << 20,
            Engine::Kvm => 1 << 20,
        })
    }

    /// The size of the largest guest, in bytes.
    ///
    /// # Errors
    /// If that is more than a guest can address.
    pub(crate) fn largest_bytes(&self) -> Result<u64, BenchError> {
        let mut largest = 0;
        for &engine in &self.engines {
            for &vcpus in &self.vcpus {
                let pages = self.memory_on(engine) / PAGE_SIZE;
                largest = largest.max(Plan::memory_bytes(isa_of(engine), vcpus, pages)?);
            }
        }
        Ok(largest)
    }

    pub(super) fn check(&self) -> Result<(), BenchError> {
        let possible = 1..=Self::MAX_VCPUS;
        if self.repeat == 0 || self.vcpus.is_empty() || self.engines.is_empty() {
            return Err(BenchError::Setting(
                "nothing to measure: no engine, no vCPUs or no samples".into(),
            ));
        }
        if let Some(vcpus) = self.vcpus.iter().find(|vcpus| !possible.contains(vcpus)) {
            return Err(BenchError::Setting(format!(
                "cannot measure {vcpus} vCPUs: expected 1 to {}",
                Self::MAX_VCPUS
            )));
        }
        if !(1..=Self::MAX_AROUND).contains(&self.around) {
            return Err(BenchError::Setting(format!(
                "cannot install {} pages at a fault: expected 1 to {}",
                self.around,
                Self::MAX_AROUND
            )));
        }
        if self.backing.is_hugetlb() {
            return Err(BenchError::Setting(format!(
                "this benchmark brings pages of 4 KiB, and {} is mapped whole: use shmem, shmem-thp or anonymous",
                self.backing
            )));
        }
        self.backing.check(self.largest_bytes()?)?;
        if self.readers == 0 {
            return Err(BenchError::Setting(
                "no thread reads fault events: expected at least 1 reader".into(),
            ));
        }
        let least = self.engines.iter().map(|&engine| self.memory_on(engine));
        if least.min().is_none_or(|bytes| bytes < PAGE_SIZE) {
            return Err(BenchError::Setting(
                "nothing to touch: a vCPU needs at least one page".into(),
            ));
        }
        Ok(())
    }
}
