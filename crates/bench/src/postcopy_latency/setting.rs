//! What a run measures.

use crate::BenchError;
use crate::channels::TlsFlags;
use crate::vm::isa_of;
use pageferry_guest::MemoryMap;
use pageferry_hosts::Rate;
use pageferry_machine::{Backing, Engine};
use std::path::PathBuf;

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
    /// As `Preempt`, while nothing is pushed.
    Idle,
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
    pub(crate) const ALL: [Self; 11] = [
        Self::Vanilla,
        Self::Preempt,
        Self::NoPrefetch,
        Self::InOrder,
        Self::InOrderNoPrefetch,
        Self::Idle,
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
    #[must_use]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Vanilla => "vanilla",
            Self::Preempt => "preempt",
            Self::NoPrefetch => "no prefetch",
            Self::InOrder => "in order",
            Self::InOrderNoPrefetch => "in order no prefetch",
            Self::Idle => "idle",
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostPage {
    /// 4 KiB of shared memory.
    Size4K,
    /// 2 MiB of the pool of huge pages. Only KVM maps such a page whole.
    Size2M,
}

impl HostPage {
    /// The size in bytes.
    #[must_use]
    pub(crate) const fn bytes(self) -> u64 {
        self.backing().page_size().bytes()
    }

    /// The name in tables.
    #[must_use]
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
    /// Whether the channels use TLS. The floor never does.
    pub(crate) tls: bool,
    /// The congestion control of TCP on both hosts.
    pub(crate) congestion: String,
}

impl Column {
    /// The column in words.
    #[must_use]
    pub(crate) fn name(&self) -> String {
        format!(
            "{} pages, {} vCPU{}, {}, {}",
            self.host_page.name(),
            self.vcpus,
            if self.vcpus == 1 { "" } else { "s" },
            if self.tls { "TLS" } else { "plain" },
            self.congestion
        )
    }
}

/// The settings of a run.
#[derive(Clone, Debug)]
pub(crate) struct LatencySetting {
    /// The engine of guests on pages of 4 KiB. Guests on pages of 2 MiB run on KVM.
    pub(crate) engine: Engine,
    /// The columns.
    pub(crate) columns: Vec<Column>,
    /// The rate of the link, in each direction.
    pub(crate) rate: Rate,
    /// Guest memory, in bytes.
    pub(crate) memory_bytes: u64,
    /// The number of rounds. Each measures all rows of all columns once.
    pub(crate) rounds: u32,
    /// The files for columns with TLS, the same at both ends.
    pub(crate) tls: Option<TlsFlags>,
    /// The QEMU to measure beside, in columns with 4 KiB pages and without TLS.
    pub(crate) qemu: Option<PathBuf>,
}

impl LatencySetting {
    /// QEMU's name in the search path.
    pub(crate) const QEMU: &str = pageferry_testkit::qemu::PROGRAM;
    /// The rounds of a full run.
    pub(crate) const ROUNDS: u32 = 9;
    /// Guest memory of a full run, in bytes.
    pub(crate) const MEMORY: u64 = 256 << 20;
    /// Guest memory of a quick run, in bytes.
    pub(crate) const QUICK_MEMORY: u64 = 32 << 20;
    /// The most vCPUs.
    pub(crate) const MAX_VCPUS: u32 = 64;

    /// All combinations, in the order of the tables.
    #[must_use]
    pub(crate) fn columns(
        host_pages: &[HostPage],
        vcpus: &[u32],
        tls: &[bool],
        congestion: &[String],
    ) -> Vec<Column> {
        let mut columns = Vec::new();
        for &host_page in host_pages {
            for &vcpus in vcpus {
                for &tls in tls {
                    columns.extend(congestion.iter().map(|congestion| Column {
                        host_page,
                        vcpus,
                        tls,
                        congestion: congestion.clone(),
                    }));
                }
            }
        }
        columns
    }

    /// The engine of a column's guests.
    #[must_use]
    pub(crate) const fn engine_of(&self, host_page: HostPage) -> Engine {
        match host_page {
            HostPage::Size4K => self.engine,
            HostPage::Size2M => Engine::Kvm,
        }
    }

    /// The memory of a row's guest, in bytes. Without a push every page is a stall, so a part of
    /// the memory gives enough of them.
    #[must_use]
    pub(super) fn memory_of(&self, host_page: HostPage, mode: Mode) -> u64 {
        let part = match (mode, host_page) {
            (Mode::Idle, HostPage::Size4K) => 8,
            (Mode::Idle, HostPage::Size2M) => 2,
            _ => 1,
        };
        let huge = HostPage::Size2M.bytes();
        (self.memory_bytes / part / huge * huge).max(8 * huge)
    }

    /// # Errors
    /// [`BenchError::Setting`] for memory that is not whole pages of 2 MiB, too small, or too large
    /// for QEMU's guest.
    pub(super) fn check(&self) -> Result<(), BenchError> {
        let page = HostPage::Size2M.bytes();
        let least = 16 * page;
        if self.memory_bytes < least || !self.memory_bytes.is_multiple_of(page) {
            return Err(BenchError::Setting(format!(
                "{} bytes of guest memory: expected a multiple of 2 MiB, and {} MiB at least",
                self.memory_bytes,
                least >> 20
            )));
        }
        if self.qemu.is_some() && self.memory_bytes > pageferry_testkit::qemu::MAX_MEMORY {
            return Err(BenchError::Setting(format!(
                "{} MiB of guest memory: a guest on QEMU can have at most {} MiB",
                self.memory_bytes >> 20,
                pageferry_testkit::qemu::MAX_MEMORY >> 20
            )));
        }
        for column in &self.columns {
            let isa = isa_of(self.engine_of(column.host_page));
            MemoryMap::new(
                isa,
                column.vcpus,
                self.memory_of(column.host_page, Mode::Idle),
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(memory_bytes: u64) -> LatencySetting {
        let congestion = ["cubic".to_owned(), "bbr".to_owned()];
        let pages = [HostPage::Size4K, HostPage::Size2M];
        LatencySetting {
            engine: Engine::Soft,
            columns: LatencySetting::columns(&pages, &[1, 16], &[false], &congestion),
            rate: Rate::mbit(1000),
            memory_bytes,
            rounds: 1,
            tls: None,
            qemu: None,
        }
    }

    #[test]
    fn columns_are_all_combinations() {
        let columns = setting(0).columns;
        let names: Vec<_> = columns.iter().map(Column::name).collect();
        assert_eq!(names.len(), 8);
        assert_eq!(names[0], "4 KiB pages, 1 vCPU, plain, cubic");
        assert_eq!(names[7], "2 MiB pages, 16 vCPUs, plain, bbr");
    }

    #[test]
    fn a_guest_on_qemu_has_at_most_3_gib() {
        let mut beside = setting(pageferry_testkit::qemu::MAX_MEMORY);
        beside.qemu = Some(PathBuf::new());
        beside.check().expect("a good setting");
        beside.memory_bytes += 2 << 20;
        let refused = beside.check().expect_err("too much").to_string();
        assert!(refused.contains("at most 3072 MiB"), "{refused}");
        beside.qemu = None;
        beside.check().expect("no guest on QEMU");
    }

    #[test]
    fn memory_is_whole_huge_pages_for_every_row() {
        for bytes in [0, 16 << 20, (64 << 20) + 4096] {
            assert!(setting(bytes).check().is_err(), "{bytes}");
        }
        for bytes in [
            LatencySetting::QUICK_MEMORY,
            LatencySetting::MEMORY,
            34 << 20,
        ] {
            let setting = setting(bytes);
            setting.check().expect("a good setting");
            for page in [HostPage::Size4K, HostPage::Size2M] {
                assert!(setting.memory_of(page, Mode::Idle).is_multiple_of(2 << 20));
                assert_eq!(setting.memory_of(page, Mode::Preempt), bytes);
            }
        }
    }
}
