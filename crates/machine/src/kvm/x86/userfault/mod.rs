//! Faults on missing pages: their delivery, and the installation of pages.
//!
//! A machine is armed at most once, before a vCPU has run. So nothing of the guest's mapping is
//! mapped then, and every first touch of a page faults. The missing bitmap is the caller's. This
//! module reads it, and never writes it. A thread that installs a page clears its bit *afterwards*.
//!
//! The mapping is registered with one or more userfaultfds (`watch`). Each stream of their events
//! has one reader. Any thread may install any page.
//!
//! **Minor** and **Poison**: the mapping is registered for minor and missing faults. A touch of a
//! page in the page cache is a minor fault, and a touch of a hole a missing one. Both sleep and
//! send an event. Installing is `UFFDIO_CONTINUE`, which maps the page from the page cache, and
//! `UFFDIO_ZEROPAGE` for holes, which read as zero. Poison also marks missing pages, see `poison`.
//! CONTINUE replaces a marker. Disarming sweeps the mapping, so no marker outlives the delivery.
//!
//! **Userfault**: as *minor*, and KVM has the missing bitmap (`KVM_MEM_USERFAULT`). A vCPU that
//! touches a missing page leaves the guest. KVM's own accesses do not look at the bitmap. They find
//! the page empty, and sleep as with *minor*. The bitmap stays in place as long as the slots have
//! it: `Armed` holds it, and disarming takes the slots' flags off first.
//!
//! **Missing**: the mapping is registered for missing faults only. Missing pages are holes, which
//! [`FaultPath::begin_postcopy`] punches. Present pages are in the page cache, and never fault into
//! userfaultfd. A present page that was zero may be a hole too, and then sends an event. Installing
//! is `UFFDIO_COPY`. It is the only delivery for private memory, which pre-copy fills through the
//! guest's own mapping. That mapping is registered when post-copy begins, before its missing pages
//! are dropped. So nothing can fill them in between, like a huge page for a touch beside them.
//!
//! **Pages of a pool** (hugetlb) come in pieces of 4 KiB, and are mapped whole. Installing a piece
//! maps the page if no other piece is missing, see `whole`. Until then a touch of any piece sleeps
//! with *minor*, the only delivery for them.
//!
//! **A fault on a page whose bit is clear** is no error. It has one of three causes: the first
//! touch of a present page, a mapping that the kernel dropped, or a page that was just installed.
//! The thread that handles the fault installs the page (again). That maps the page, replaces a
//! marker, and wakes the threads that sleep on it.
//!
//! **A sleep that a kick does not end.** KVM itself may touch a missing page for the guest (a guest
//! page table, a clock page). Then the vCPU sleeps inside the kernel until the page is installed,
//! and takes a kick only after that. A kick ends a sleep on the guest's own access at once (Linux
//! 6.1 and later).

mod install;
mod kernel;
mod mappings;
#[cfg(all(test, shuttle))]
mod model;
mod watch;
mod whole;

pub(super) use kernel::Kernel;
#[cfg(test)]
pub(super) use mappings::markers;

use mappings::{punch, sweep_markers};
use watch::Watch;

use super::paging::Known;
use super::sync::Ordering;
use crate::huge::{self, whole_range};
use crate::sync::{AtomicBool, Mutex, MutexGuard};
use crate::{Backing, Collapsed, Delivery, DeliveryInUse, GuestRam, MachineError, RamRegion};
use pageferry_addr::{Hva, RamPage};
use pageferry_userfault::PageBitmap;
use pageferry_userfault::uffd::{Features, UffdSupport};
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, PoisonError};

/// `KVM_MEMORY_EXIT_FLAG_USERFAULT` of the KVM Userfault series (James Houghton, December 2024).
pub(super) const EXIT_FLAG_USERFAULT: u64 = 1 << 4;
/// The number of locks that order the copies of pages.
const COPY_LOCKS: usize = 64;

/// The features that a delivery needs.
fn features(delivery: Delivery, backing: Backing) -> Features {
    if backing.is_hugetlb() {
        // The exact address says which piece was touched.
        return Features::MINOR_HUGETLBFS | Features::MISSING_HUGETLBFS | Features::EXACT_ADDRESS;
    }
    match delivery {
        Delivery::Exit => Features::empty(),
        Delivery::Poison => Features::POISON | Features::MINOR_SHMEM | Features::MISSING_SHMEM,
        Delivery::Userfault | Delivery::Minor => Features::MINOR_SHMEM | Features::MISSING_SHMEM,
        // userfaultfd serves private memory without one.
        Delivery::Missing if backing == Backing::Anonymous => Features::empty(),
        Delivery::Missing => Features::MISSING_SHMEM,
    }
}

/// The deliveries for memory of `backing` that this host's userfaultfd supports, best first.
/// [`Delivery::Userfault`] is not here, as only a guest shows whether KVM has it.
pub(super) fn userfaultfd_deliveries(backing: Backing) -> Vec<Delivery> {
    static SHARED: OnceLock<Vec<Delivery>> = OnceLock::new();
    let serving = |deliveries: &[Delivery]| -> Vec<Delivery> {
        let support = UffdSupport::probe();
        let serves = |delivery: &&Delivery| support.serves(features(**delivery, backing));
        deliveries.iter().filter(serves).copied().collect()
    };
    match only_delivery(backing) {
        Some((only, _)) => serving(&[only]),
        None => SHARED
            .get_or_init(|| serving(&[Delivery::Poison, Delivery::Minor, Delivery::Missing]))
            .clone(),
    }
}

/// The one delivery that can serve memory of `backing`, and the reason to take it. `None` if all
/// can.
pub(super) fn only_delivery(backing: Backing) -> Option<(Delivery, &'static str)> {
    match backing {
        Backing::Shmem | Backing::ShmemThp => None,
        Backing::Hugetlb2M | Backing::Hugetlb1G => Some((
            Delivery::Minor,
            "it is the only one for huge pages of a pool",
        )),
        Backing::Anonymous => Some((Delivery::Missing, "it is the only one for private memory")),
    }
}

/// Gives KVM the bits of a region's missing pages, or takes them away.
pub(super) type SetBits<'a> = &'a dyn Fn(&RamRegion, Option<Hva>) -> Result<(), MachineError>;

/// Gives KVM the bits of missing pages, slot by slot, or takes them away.
fn set_bitmap(
    ram: &GuestRam,
    missing: Option<&PageBitmap>,
    set: SetBits<'_>,
) -> Result<(), MachineError> {
    for region in ram.layout().regions() {
        let bits = missing.and_then(|missing| missing.address_from(region.first));
        set(region, bits.map(|bits| Hva(bits.addr() as u64)))?;
    }
    Ok(())
}

/// An armed machine's delivery.
pub(super) struct Armed<K = Watch> {
    pub(super) watch: K,
    pub(super) missing: Arc<PageBitmap>,
    pub(super) delivery: Delivery,
    /// The caller named the delivery.
    pub(super) forced: bool,
    in_use: Mutex<DeliveryInUse>,
    active: AtomicBool,
    /// Held while pages are marked, and from the sweep of markers until disarming is done.
    marking: Mutex<()>,
    /// Missing: pages that [`FaultPath::install_copy`] has filled. Pages of a pool: pieces whose
    /// bytes are in place.
    landed: PageBitmap,
    copy_locks: [Mutex<()>; COPY_LOCKS],
}

impl<K> Armed<K> {
    /// Whether faults are still delivered.
    pub(super) fn is_active(&self) -> bool {
        self.active.load(Ordering::Acquire)
    }

    /// The delivery and its reason.
    pub(super) fn in_use(&self) -> DeliveryInUse {
        lock(&self.in_use).clone()
    }

    /// Records that no page is marked, so that poison comes down to minor.
    pub(super) fn note_unmarked(&self, because: &str) {
        *lock(&self.in_use) = DeliveryInUse {
            delivery: Delivery::Minor,
            because: because.into(),
        };
    }

    /// The turn of a thread that marks pages. It reads the missing pages in its turn only, so that
    /// it marks nothing once disarming has swept the markers.
    pub(super) fn marking(&self) -> MutexGuard<'_, ()> {
        lock(&self.marking)
    }
}

/// The fault delivery of one VM, armed or not.
pub(super) struct FaultPath<K = Watch> {
    pub(super) ram: Arc<GuestRam>,
    armed: OnceLock<Armed<K>>,
    /// Serializes arming, disarming and the note that a vCPU has run.
    ran: Mutex<bool>,
    /// Each vCPU's use of guest memory, by id.
    known: Mutex<BTreeMap<u32, Known>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<K: Kernel> FaultPath<K> {
    pub(super) fn new(ram: Arc<GuestRam>) -> Self {
        Self {
            ram,
            armed: OnceLock::new(),
            ran: Mutex::new(false),
            known: Mutex::new(BTreeMap::new()),
        }
    }

    /// The delivery, if the machine was ever armed.
    pub(super) fn armed(&self) -> Option<&Armed<K>> {
        self.armed.get()
    }

    /// The delivery, if the machine is armed now.
    pub(super) fn active(&self) -> Option<&Armed<K>> {
        self.armed().filter(|armed| armed.is_active())
    }

    /// Whether the guest's mapping may have markers. It has none once disarming has swept them.
    pub(super) fn may_have_markers(&self) -> bool {
        self.active()
            .is_some_and(|armed| armed.delivery == Delivery::Poison)
    }

    /// Records that a vCPU is about to run.
    pub(super) fn note_run(&self) {
        *lock(&self.ran) = true;
    }

    /// Records a vCPU's use of guest memory, when its state is set.
    pub(super) fn note_vcpu(&self, id: u32, known: Known) {
        lock(&self.known).insert(id, known);
    }

    /// The vCPUs' use of guest memory.
    pub(super) fn known(&self) -> Vec<Known> {
        lock(&self.known).values().cloned().collect()
    }

    /// See [`crate::Machine::receives_in_place`].
    pub(super) fn receives_in_place(&self) -> bool {
        self.armed()
            .is_none_or(|armed| armed.delivery != Delivery::Missing)
    }

    /// See [`crate::Machine::begin_postcopy`].
    pub(super) fn begin_postcopy(&self) -> Result<(), MachineError> {
        let Some(armed) = self.active() else {
            return Err(MachineError::WrongState(
                "post-copy needs an armed fault delivery",
            ));
        };
        if armed.delivery == Delivery::Missing {
            armed.watch.register_private()?;
            let mut from = 0;
            while let Some(run) = armed.missing.next_run(from, usize::MAX) {
                punch(&self.ram, RamPage(run.start as u64), run.len() as u64)?;
                from = run.end;
            }
        }
        self.ram.gate.begin();
        Ok(())
    }

    /// Ends delivery, except for the bitmap that KVM may have.
    fn end(
        &self,
        take_bitmap: impl FnOnce() -> Result<(), MachineError>,
    ) -> Result<(), MachineError> {
        let _turn = lock(&self.ran);
        let Some(armed) = self.active() else {
            return Err(MachineError::WrongState("fault delivery is not armed"));
        };
        if armed.missing.next_set(0).is_some() {
            return Err(MachineError::WrongState(
                "pages are still missing: fault delivery must go on",
            ));
        }
        let _no_marking = armed.marking();
        match armed.delivery {
            Delivery::Poison => sweep_markers(&armed.watch, self.ram.pages())?,
            Delivery::Userfault => take_bitmap()?,
            _ => {}
        }
        // Wakes all sleepers. They find the page in the page cache, or a hole that is zero.
        armed.watch.unregister().map_err(|e| {
            MachineError::os(
                "cannot end the registration of guest memory with userfaultfd",
                e,
            )
        })?;
        armed.active.store(false, Ordering::Release);
        self.ram.gate.begin();
        Ok(())
    }

    /// See [`crate::Machine::collapse`].
    pub(super) fn collapse(&self, first: RamPage) -> Collapsed {
        let range = whole_range(&self.ram, first);
        let armed = self.active();
        let missing = armed.and_then(|armed| armed.missing.next_set(range.start));
        match missing {
            Some(missing) if missing < range.end => Collapsed::Missing,
            _ => huge::collapse(&self.ram, self.ram.guest_hva(first), first),
        }
    }

    /// See [`crate::Machine::host_large_bytes`].
    pub(super) fn host_large_bytes(&self) -> Result<u64, MachineError> {
        huge::host_bytes(self.ram.guest_runs(RamPage(0), self.ram.pages()))
    }

    /// See [`crate::Machine::abandon`].
    pub(super) fn abandon(&self) {
        let _turn = lock(&self.ran);
        if let Some(armed) = self.active() {
            // If this fails, the userfaultfd is gone, and so is every sleep on it.
            let _ = armed.watch.unregister();
        }
    }

    /// Decides what a vCPU does that met a marker on `page`. Returns whether it leaves the guest,
    /// so that its thread installs the page. Otherwise delivery has ended; then this removes the
    /// marker, and the vCPU enters the guest again.
    ///
    /// # Errors
    /// When the host has lost the page's memory, so that there was no marker.
    pub(super) fn met_marker(&self, page: RamPage) -> Result<bool, MachineError> {
        let Some(armed) = self.armed() else {
            return Err(MachineError::WrongState("no page was ever marked"));
        };
        if armed.is_active() {
            return Ok(true);
        }
        armed.watch.drop_mappings(page, 1)?;
        armed.watch.populate(page)?;
        Ok(false)
    }

    fn set_armed(
        &self,
        watch: K,
        missing: Arc<PageBitmap>,
        in_use: DeliveryInUse,
        forced: bool,
    ) -> Result<(), MachineError> {
        let delivery = in_use.delivery;
        let landed = match delivery {
            Delivery::Missing => missing.pages(),
            _ if self.ram.backing().is_hugetlb() => missing.pages(),
            _ => 0,
        };
        let armed = Armed {
            watch,
            landed: PageBitmap::try_new(landed)?,
            missing,
            delivery,
            forced,
            in_use: Mutex::new(in_use),
            active: AtomicBool::new(true),
            marking: Mutex::new(()),
            copy_locks: std::array::from_fn(|_| Mutex::new(())),
        };
        assert!(self.armed.set(armed).is_ok(), "arming takes turns");
        Ok(())
    }
}

impl FaultPath {
    /// See [`crate::Machine::disarm_userfault`].
    pub(super) fn disarm(&self, set: SetBits<'_>) -> Result<(), MachineError> {
        self.end(|| set_bitmap(&self.ram, None, set))
    }

    /// Arms the machine by `userfaultfds` userfaultfds; see [`crate::Machine::arm_userfault`].
    pub(super) fn arm(
        &self,
        missing: Arc<PageBitmap>,
        in_use: DeliveryInUse,
        forced: bool,
        userfaultfds: u32,
        set: SetBits<'_>,
    ) -> Result<(), MachineError> {
        let (ram, delivery) = (&self.ram, in_use.delivery);
        // KVM's own accesses come as minor faults. The rest KVM itself refuses where it lacks it.
        let needed = match (delivery, only_delivery(ram.backing())) {
            (Delivery::Userfault, None) => Delivery::Minor,
            _ => delivery,
        };
        if !userfaultfd_deliveries(ram.backing()).contains(&needed) {
            return Err(MachineError::NoDelivery(delivery));
        }
        if missing.pages() as u64 != ram.pages() {
            return Err(MachineError::WrongState(
                "the missing bitmap is not of the machine's size",
            ));
        }
        let ran = lock(&self.ran);
        if *ran {
            return Err(MachineError::WrongState(
                "fault delivery must be armed before a vCPU has run",
            ));
        }
        if self.armed().is_some() {
            return Err(MachineError::WrongState("fault delivery was armed before"));
        }
        let watch = Watch::new(ram, userfaultfds, delivery)?;
        // No vCPU has run, so nothing should be mapped. Any page that is mapped is dropped from the
        // mapping. Private memory is mapped by the VMM, and its registration does not need that.
        if ram.backing() != Backing::Anonymous {
            watch.drop_mappings(RamPage(0), ram.pages())?;
        }
        if delivery == Delivery::Userfault && set_bitmap(ram, Some(&missing), set).is_err() {
            // The first slots may have the bitmap, which goes with this call.
            set_bitmap(ram, None, set)?;
            return Err(MachineError::NoDelivery(delivery));
        }
        self.set_armed(watch, missing, in_use, forced)?;
        drop(ran);
        Ok(())
    }
}
