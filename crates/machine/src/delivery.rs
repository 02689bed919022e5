//! The ways to deliver faults on missing pages.

use crate::{Backing, MachineError};
use pageferry_addr::PageSize;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The ways in which a fault on a missing page is delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Delivery {
    /// The hypervisor tests the bitmap and the vCPU exits on its own thread (soft engine).
    Exit,
    /// `UFFDIO_POISON` markers: the vCPU exits on its own thread with SIGBUS (Linux 6.6 and later).
    /// Pages not marked yet come as userfaultfd minor events.
    Poison,
    /// KVM Userfault: KVM tests the missing bitmap, and the vCPU exits on its own thread. No
    /// released kernel has it; see `lab/kernel`. KVM's own accesses come as userfaultfd minor
    /// events.
    Userfault,
    /// userfaultfd minor faults: the page's bytes go into the page cache through the second
    /// mapping. `UFFDIO_CONTINUE` makes them visible.
    Minor,
    /// userfaultfd missing faults: missing pages are holes in the page cache or in private memory,
    /// filled by `UFFDIO_COPY`.
    Missing,
}

/// The options of [`crate::Machine::arm_userfault`].
///
/// A delivery gives them; its events then come from one userfaultfd with one reader.
///
/// ```
/// use pageferry_machine::{ArmOptions, Backing, Delivery};
///
/// let options = ArmOptions { userfaultfds: 2, ..Delivery::Minor.into() };
/// assert!(options.check(1024, Backing::Shmem).is_ok()); // 4 MiB of RAM, 2 MiB for each
/// assert!(options.check(512, Backing::Shmem).is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArmOptions {
    /// The delivery, or `None` for the one that is fastest on this host.
    pub delivery: Option<Delivery>,
    /// The number of userfaultfds, 1 to [`Self::MAX_USERFAULTFDS`]. Each serves an equal part of
    /// RAM, cut at 2 MiB, or at the backing's page if that is larger.
    pub userfaultfds: u32,
    /// The number of readers of each userfaultfd, 1 to [`Self::MAX_READERS`].
    pub readers: u32,
}

impl ArmOptions {
    /// The most userfaultfds of a machine.
    pub const MAX_USERFAULTFDS: u32 = 64;
    /// The most readers of a userfaultfd.
    pub const MAX_READERS: u32 = crate::MAX_VCPUS;

    /// The pages of the smallest part of RAM that a userfaultfd may have.
    pub(crate) fn unit(backing: Backing) -> u64 {
        PageSize::Size2M.pages().max(backing.page_size().pages())
    }

    /// Checks the numbers, for a RAM of `pages` pages of 4 KiB.
    ///
    /// # Errors
    /// [`MachineError::Readers`] and [`MachineError::Userfaultfds`].
    pub fn check(&self, pages: u64, backing: Backing) -> Result<(), MachineError> {
        let ranges = pages.div_ceil(Self::unit(backing));
        let most = ranges.min(Self::MAX_USERFAULTFDS.into()) as u32;
        if !(1..=most).contains(&self.userfaultfds) {
            return Err(MachineError::Userfaultfds {
                wanted: self.userfaultfds,
                most,
            });
        }
        if !(1..=Self::MAX_READERS).contains(&self.readers) {
            return Err(MachineError::Readers(self.readers));
        }
        Ok(())
    }
}

impl From<Option<Delivery>> for ArmOptions {
    fn from(delivery: Option<Delivery>) -> Self {
        Self {
            delivery,
            userfaultfds: 1,
            readers: 1,
        }
    }
}

impl From<Delivery> for ArmOptions {
    fn from(delivery: Delivery) -> Self {
        Some(delivery).into()
    }
}

/// The fault delivery of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeliveryInUse {
    /// The delivery.
    pub delivery: Delivery,
    /// The reason for it, as a sentence without its final stop.
    pub because: String,
}

/// The result of a trial of the deliveries on this host.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct DeliveryTrial {
    /// The number of vCPUs.
    pub vcpus: u32,
    /// The number of cores that they shared.
    pub cores: u32,
    /// The time from fault to fault, all vCPUs together, fastest delivery first. A delivery whose
    /// trial failed is not here.
    pub per_fault: Vec<(Delivery, Duration)>,
}

impl Delivery {
    /// The name used in reports and on command lines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exit => "exit",
            Self::Poison => "poison",
            Self::Userfault => "userfault",
            Self::Minor => "minor",
            Self::Missing => "missing",
        }
    }
}

impl fmt::Display for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Delivery {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [
            Self::Exit,
            Self::Userfault,
            Self::Poison,
            Self::Minor,
            Self::Missing,
        ];
        all.into_iter().find(|d| d.name() == text).ok_or_else(|| {
            format!(
                "unknown fault delivery '{text}': expected exit, userfault, poison, minor or missing"
            )
        })
    }
}
