#![expect(unsafe_code, reason = "registers guest memory with userfaultfd and drops its mappings")]
//! Faults on missing pages: how they are delivered, and how a page is made present.
//!
//! A machine is armed at most once, before a vCPU has run, so nothing of the guest's mapping is mapped
//! then and every first touch of a page faults. The missing bitmap is the caller's; it is read here, never
//! written. Who installs a page clears its bit *afterwards*.
//!
//! **Minor** and **Poison**: the mapping is registered for minor and missing faults. A touch of a page in
//! the page cache is a minor fault, of a hole a missing one; both sleep and send an event. Installing is
//! `UFFDIO_CONTINUE`, which maps what is in the page cache, and `UFFDIO_ZEROPAGE` for holes, which read as
//! zero. Poison marks missing pages besides, see [`super::poison`]; CONTINUE replaces a marker.
//!
//! **Missing**: registered for missing faults only. Missing pages are holes ([`FaultPath::begin_postcopy`]
//! punches them), present ones are in the page cache and never fault into userfaultfd; a present page
//! that was zero may be a hole too and then sends an event. Installing is `UFFDIO_COPY`.
//!
//! **A fault on a page whose bit is clear** is no error. It is a present page touched for the first time,
//! one whose mapping the kernel has dropped, or one that was installed a moment ago. The answer is to
//! install it (again): that maps it, replaces a marker, and wakes whoever sleeps.

use super::poison::Known;
use super::sync::{AtomicBool, Ordering};
use super::vm::VmShared;
use crate::{Delivery, FaultEvent, FaultEvents, GuestRam, MachineError};
use pageferry_addr::{Hva, PAGE_MASK, PAGE_SIZE, PageSize, RamPage};
use pageferry_userfault::PageBitmap;
use pageferry_userfault::uffd::{Event, Features, RangeError, RegisterMode, UffdSupport, Userfaultfd, Wake};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use rustix::mm::Advice;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// How many locks order the copies of pages.
const COPY_LOCKS: usize = 64;
/// How often a page that changes under an install is tried again.
const TRIES: u32 = 64;

/// What each delivery needs.
fn features(delivery: Delivery) -> Features {
    match delivery {
        Delivery::Exit => Features::empty(),
        Delivery::Poison => Features::POISON | Features::MINOR_SHMEM | Features::MISSING_SHMEM,
        Delivery::Minor => Features::MINOR_SHMEM | Features::MISSING_SHMEM,
        Delivery::Missing => Features::MISSING_SHMEM,
    }
}

/// The deliveries this host can do, best first.
pub(super) fn deliveries() -> Vec<Delivery> {
    static FOUND: OnceLock<Vec<Delivery>> = OnceLock::new();
    FOUND
        .get_or_init(|| {
            let support = UffdSupport::probe();
            let all = [Delivery::Poison, Delivery::Minor, Delivery::Missing];
            all.into_iter().filter(|d| support.serves(features(*d))).collect()
        })
        .clone()
}

/// An armed machine's delivery.
pub(super) struct Armed {
    pub(super) uffd: Userfaultfd,
    pub(super) missing: Arc<PageBitmap>,
    pub(super) delivery: Delivery,
    active: AtomicBool,
    /// Missing only: pages that [`FaultPath::install_copy`] has filled.
    landed: PageBitmap,
    copy_locks: [Mutex<()>; COPY_LOCKS],
}

impl Armed {
    /// Whether faults are still delivered.
    pub(super) fn is_active(&self) -> bool {
        self.active.load(Ordering::Acquire)
    }
}

/// The fault delivery of one VM, armed or not.
pub(super) struct FaultPath {
    armed: OnceLock<Armed>,
    /// Makes arming, disarming and "a vCPU has run" take turns.
    ran: Mutex<bool>,
    /// What is known of each vCPU's use of guest memory, by id.
    known: Mutex<BTreeMap<u32, Known>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn range(ram: &GuestRam, first: RamPage, pages: u64) -> (Hva, u64) {
    (ram.guest_hva(first), pages * PAGE_SIZE)
}

fn check(ram: &GuestRam, first: RamPage, pages: u64) -> Result<(), MachineError> {
    match first.checked_add(pages) {
        Some(end) if end.0 <= ram.pages() => Ok(()),
        _ => Err(MachineError::WrongState("pages behind the end of RAM cannot be installed")),
    }
}

impl FaultPath {
    pub(super) fn new() -> Self {
        Self {
            armed: OnceLock::new(),
            ran: Mutex::new(false),
            known: Mutex::new(BTreeMap::new()),
        }
    }

    /// The delivery, if the machine was ever armed.
    pub(super) fn armed(&self) -> Option<&Armed> {
        self.armed.get()
    }

    /// The delivery, if the machine is armed now.
    pub(super) fn active(&self) -> Option<&Armed> {
        self.armed().filter(|armed| armed.is_active())
    }

    /// Notes that a vCPU is about to run.
    pub(super) fn note_run(&self) {
        *lock(&self.ran) = true;
    }

    /// Notes how a vCPU uses guest memory, once its state is set.
    pub(super) fn note_vcpu(&self, id: u32, known: Known) {
        lock(&self.known).insert(id, known);
    }

    /// What is known of the vCPUs.
    pub(super) fn known(&self) -> Vec<Known> {
        lock(&self.known).values().cloned().collect()
    }

    /// See [`crate::Machine::install`].
    pub(super) fn install(&self, ram: &GuestRam, first: RamPage, pages: u64) -> Result<(), MachineError> {
        check(ram, first, pages)?;
        if pages == 0 {
            return Ok(());
        }
        let Some(armed) = self.armed() else { return Ok(()) };
        let result = match (armed.is_active(), armed.delivery) {
            (true, Delivery::Missing) => fill_holes(armed, ram, first, pages),
            (true, _) => map_present(armed, ram, first, pages),
            (false, _) => Ok(()),
        };
        if armed.is_active() {
            return result;
        }
        // Disarmed before or meanwhile: nothing sleeps any more, but a marker may be left.
        if armed.delivery == Delivery::Poison { lift_markers(ram, first, pages) } else { Ok(()) }
    }

    /// See [`crate::Machine::install_copy`].
    pub(super) fn install_copy(&self, ram: &GuestRam, page: RamPage, bytes: &[u8]) -> Result<(), MachineError> {
        check(ram, page, 1)?;
        let Some(armed) = self.active() else {
            return Err(MachineError::WrongState("a page can be copied in only while fault delivery is armed"));
        };
        if armed.delivery != Delivery::Missing {
            return Err(MachineError::WrongState("this delivery receives pages in place"));
        }
        if bytes.len() as u64 != PAGE_SIZE {
            return Err(MachineError::WrongState("a page has 4096 bytes"));
        }
        let (start, len) = range(ram, page, 1);
        // Two may bring the same page; the second must find what the first did.
        let _turn = lock(&armed.copy_locks[page.index() % COPY_LOCKS]);
        if armed.landed.test(page) {
            return armed.uffd.wake(start, len).map_err(|e| MachineError::os("cannot wake the sleepers of a page", e));
        }
        match armed.uffd.copy(start, bytes, Wake::Now) {
            Ok(()) => {
                armed.landed.set(page);
                Ok(())
            }
            // Present: its bytes are newer than these.
            Err(stop) if stop.is_already_there() && !armed.missing.test(page) => {
                armed.uffd.wake(start, len).map_err(|e| MachineError::os("cannot wake the sleepers of a page", e))
            }
            Err(stop) => Err(MachineError::os("cannot copy a missing page in", stop)),
        }
    }

    /// See [`crate::Machine::begin_postcopy`].
    pub(super) fn begin_postcopy(&self, ram: &GuestRam) -> Result<(), MachineError> {
        let Some(armed) = self.active() else {
            return Err(MachineError::WrongState("post-copy needs an armed fault delivery"));
        };
        if armed.delivery == Delivery::Missing {
            let mut from = 0;
            while let Some(run) = armed.missing.next_run(from, usize::MAX) {
                ram.punch_hole(RamPage(run.start as u64), run.len() as u64)?;
                from = run.end;
            }
        }
        Ok(())
    }

    /// See [`crate::Machine::disarm_userfault`].
    pub(super) fn disarm(&self, ram: &GuestRam) -> Result<(), MachineError> {
        let _turn = lock(&self.ran);
        let Some(armed) = self.active() else {
            return Err(MachineError::WrongState("fault delivery is not armed"));
        };
        if armed.missing.next_set(0).is_some() {
            return Err(MachineError::WrongState("pages are still missing: fault delivery must go on"));
        }
        let (start, len) = range(ram, RamPage(0), ram.pages());
        // Wakes all who sleep. What they find is in the page cache, or a hole that is zero.
        armed
            .uffd
            .unregister(start, len)
            .map_err(|e| MachineError::os("cannot end the registration of guest memory with userfaultfd", e))?;
        armed.active.store(false, Ordering::Release);
        Ok(())
    }
}

/// Arms the machine; see [`crate::Machine::arm_userfault`].
pub(super) fn arm(
    shared: &Arc<VmShared>,
    missing: Arc<PageBitmap>,
    delivery: Delivery,
) -> Result<Box<dyn FaultEvents>, MachineError> {
    let ram = &shared.ram;
    if !deliveries().contains(&delivery) {
        return Err(MachineError::NoDelivery(delivery));
    }
    if missing.pages() as u64 != ram.pages() {
        return Err(MachineError::WrongState("the missing bitmap is not of the machine's size"));
    }
    let ran = lock(&shared.faults.ran);
    if *ran {
        return Err(MachineError::WrongState("fault delivery must be armed before a vCPU has run"));
    }
    if shared.faults.armed().is_some() {
        return Err(MachineError::WrongState("fault delivery was armed before"));
    }
    let uffd = Userfaultfd::open(features(delivery))
        .map_err(|e| MachineError::EngineUnavailable(format!("fault delivery '{delivery}' is not usable: {e}")))?;
    let (start, len) = range(ram, RamPage(0), ram.pages());
    let mode = match delivery {
        Delivery::Missing => RegisterMode::MISSING,
        _ => RegisterMode::MISSING | RegisterMode::MINOR,
    };
    // SAFETY: (1) the guest's mapping is touched by vCPUs and by KVM for them, never by the threads that
    // resolve faults, which use the alias; (2) no Rust reference to guest memory exists; (3) `GuestRam`
    // owns the mapping, and `VmShared` holds it as long as it holds this userfaultfd.
    unsafe { uffd.register(start, len, mode) }
        .map_err(|e| MachineError::os("cannot register guest memory with userfaultfd", e))?;
    // No vCPU has run, so nothing should be mapped; whatever may be is dropped from the mapping.
    drop_mappings(ram, RamPage(0), ram.pages())?;
    let armed = Armed {
        uffd,
        landed: PageBitmap::new(if delivery == Delivery::Missing { missing.pages() } else { 0 }),
        missing,
        delivery,
        active: AtomicBool::new(true),
        copy_locks: std::array::from_fn(|_| Mutex::new(())),
    };
    assert!(shared.faults.armed.set(armed).is_ok(), "arming takes turns");
    drop(ran);
    Ok(Box::new(Events(Arc::clone(shared))))
}

/// Takes pages out of the guest's mapping, not out of the page cache: they and their bytes stay. Poison
/// markers go.
fn drop_mappings(ram: &GuestRam, first: RamPage, pages: u64) -> Result<(), MachineError> {
    let (start, len) = range(ram, first, pages);
    // SAFETY: the range lies in the guest's mapping, which is shared and backed by the memfd, so the
    // bytes are not lost; KVM is told by its MMU notifier and maps them again.
    unsafe { rustix::mm::madvise(start.0 as *mut _, len as usize, Advice::LinuxDontNeed) }
        .map_err(|e| MachineError::os("cannot drop pages from the guest's mapping", e))
}

/// Takes markers away from pages of a machine that is no longer armed.
pub(super) fn lift_markers(ram: &GuestRam, first: RamPage, pages: u64) -> Result<(), MachineError> {
    drop_mappings(ram, first, pages)
}

/// CONTINUE over all of the range; ZEROPAGE where the page cache has a hole.
fn map_present(armed: &Armed, ram: &GuestRam, first: RamPage, pages: u64) -> Result<(), MachineError> {
    let (start, len) = range(ram, first, pages);
    let base = first.byte_offset();
    let (mut done, mut tries) = (0, 0);
    let failed = |e: RangeError| MachineError::os("cannot map a page that has arrived", e);
    while done < len {
        let stop = match armed.uffd.continue_unmapped(Hva(start.0 + done), len - done, PageSize::Size4K, Wake::Now) {
            Ok(_) => break,
            Err(stop) if stop.is_not_in_page_cache() => stop,
            Err(stop) => return Err(failed(stop)),
        };
        tries = if stop.done > 0 { 0 } else { tries + 1 };
        done += stop.done;
        let hole = hole_bytes(ram, base + done).min(len - done);
        match armed.uffd.zeropage(Hva(start.0 + done), hole.max(PAGE_SIZE), Wake::Now) {
            Ok(()) => done += hole.max(PAGE_SIZE),
            // Filled or mapped meanwhile: CONTINUE decides.
            Err(stop) if stop.is_already_there() && (stop.done > 0 || tries < TRIES) => done += stop.done,
            Err(stop) => return Err(failed(stop)),
        }
    }
    if tries > 0 || done > 0 {
        // Calls that stopped half-way did not wake those who sleep on pages that were mapped already.
        armed.uffd.wake(start, len).map_err(failed)?;
    }
    Ok(())
}

/// ZEROPAGE wherever there is a hole; pages of the page cache need nothing but their sleepers woken.
fn fill_holes(armed: &Armed, ram: &GuestRam, first: RamPage, pages: u64) -> Result<(), MachineError> {
    let (start, len) = range(ram, first, pages);
    let failed = |e: RangeError| MachineError::os("cannot map a zero page that has arrived", e);
    let mut done = 0;
    while done < len {
        match armed.uffd.zeropage(Hva(start.0 + done), len - done, Wake::Now) {
            Ok(()) => break,
            Err(stop) if stop.is_already_there() => done += stop.done + PAGE_SIZE,
            Err(stop) => return Err(failed(stop)),
        }
    }
    for page in first.0..first.0 + pages {
        armed.landed.set(RamPage(page));
    }
    armed.uffd.wake(start, len).map_err(failed)
}

/// How many bytes of hole the memfd has from `offset` on; at least 0.
fn hole_bytes(ram: &GuestRam, offset: u64) -> u64 {
    // The descriptor's position is nobody's: all other use of the memfd gives its offsets.
    match rustix::fs::seek(ram.fd(), SeekFrom::Data(offset)) {
        Ok(data) => (data & !PAGE_MASK).saturating_sub(offset),
        Err(Errno::NXIO) => u64::MAX & !PAGE_MASK,
        Err(_) => 0,
    }
}

/// The events of an armed machine.
struct Events(Arc<VmShared>);

impl Events {
    fn uffd(&self) -> &Userfaultfd {
        &self.0.faults.armed().expect("made by arming").uffd
    }
}

impl FaultEvents for Events {
    fn fd(&self) -> BorrowedFd<'_> {
        self.uffd().as_fd()
    }

    fn next(&mut self) -> Result<Option<FaultEvent>, MachineError> {
        loop {
            let event = self
                .uffd()
                .read_event()
                .map_err(|e| MachineError::os("cannot read events of userfaultfd", e))?;
            match event {
                None => return Ok(None),
                Some(Event::PageFault(fault)) => {
                    if let Some(page) = self.0.ram.page_at_guest_hva(fault.address) {
                        return Ok(Some(FaultEvent { page, write: fault.write }));
                    }
                }
                // No other event was asked for.
                Some(_) => {}
            }
        }
    }
}
