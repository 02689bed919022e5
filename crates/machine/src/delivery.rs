//! The ways to deliver faults on missing pages.

use std::fmt;
use std::str::FromStr;

/// The ways in which a fault on a missing page is delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
    /// userfaultfd missing faults: missing pages are holes in the page cache, filled by
    /// `UFFDIO_COPY`.
    Missing,
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
pub struct DeliveryTrial {
    /// The number of vCPUs.
    pub vcpus: u32,
    /// The number of cores that they shared.
    pub cores: u32,
    /// Microseconds from fault to fault, all vCPUs together, fastest delivery first. A delivery
    /// whose trial failed is not here.
    pub microseconds: Vec<(Delivery, f64)>,
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
