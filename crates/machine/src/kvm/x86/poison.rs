//! Poison exits: the choice of missing pages to mark.
//!
//! A marker turns a vCPU's touch of a missing page into an exit on the vCPU's own thread. But it
//! turns the *kernel's* touch into `EFAULT`. On an empty page the kernel would have slept until the
//! page is there. KVM touches guest memory for the guest in two ways:
//!
//! - It walks the guest's page tables: always on a host without EPT or NPT, and elsewhere for the
//!   second operand of an instruction that it emulates (MOVSQ or PUSH from a device). An error in a
//!   walk becomes a page fault inside the guest, which the guest's tables do not justify.
//! - It writes the clock, steal-time and similar pages that the guest has registered. Those of a
//!   machine with interrupt controllers are never missing: they are part of the state, or come
//!   before the guest's write of the register is carried out (`vcpu`).
//!
//! **What may be marked.** Pages of these two kinds stay empty, and faults on them come as
//! userfaultfd events:
//!
//! - Pages named in the vCPUs' model-specific registers.
//! - The guest's page tables. A walk from CR3 finds them. While a table is itself missing, its
//!   entries are unknown, so nothing is marked. The walk finds all tables only for a *confined*
//!   guest, which cannot change CR3 unseen: it runs in ring 3 with no IDT, so any way into ring 0
//!   is a triple fault.
//!
//! For other guests, such as an operating system, nothing is marked: the delivery is then minor.
//! If the caller insists on poison, the host must have EPT or NPT. The tables of the present CR3s
//! stay unmarked. The caller answers for instructions with two operands in memory of which one is a
//! device, should they meet a table of another process.
//!
//! An operand itself may be marked: KVM then reports the access as one outside RAM, and the vCPU
//! carries it out once the page is there.
//!
//! Marking may lag, be partial, or not happen: a page without a marker sends an event instead.
//!
//! **Races**, for a page P whose bit is set when this module reads its run:
//! - P is installed before POISON gets there. POISON acts on empty entries only, and steps over P.
//! - POISON comes between "bytes in place" and CONTINUE. CONTINUE replaces the marker.
//! - P is installed, and the kernel drops its mapping (reclaim) before POISON gets there. P is then
//!   marked although it is present. A vCPU exits for a page whose bit is clear, and installing P
//!   again resolves that. Disarming sweeps the markers that are left.
//! - A vCPU meets such a marker, and the delivery is disarmed before it handles the exit. It lifts
//!   the marker itself, and goes on.
//! - A vCPU already sleeps on P. Marking does *not* wake it (DONTWAKE). Its event is on its way.
//!   Installing P replaces the marker and wakes the vCPU.

use super::device::has_nested_paging;
use super::paging::Known;
use super::userfault::{Armed, FaultPath, Kernel};
use crate::{Delivery, GuestRam, MachineError};
use pageferry_addr::{Gpa, PAGE_SIZE, PageSize, RamPage};
use pageferry_userfault::PageBitmap;
use pageferry_userfault::uffd::Wake;
use std::collections::HashSet;
use std::time::Duration;

/// The maximum number of pages that one call marks: 16 MiB, about 0.1 ms.
const CHUNK_PAGES: usize = 4096;
/// The wait before the next look for missing page tables.
const LOOK_AGAIN: Duration = Duration::from_micros(500);

const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;
/// Bits 51:12 of an entry, and of CR3: a table's address.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
const CR4_LA57: u64 = 1 << 12;

/// The result of a walk of the page tables.
#[derive(Debug, PartialEq, Eq)]
enum Tables {
    /// All page tables; none is missing.
    All(HashSet<RamPage>),
    /// This page table is missing.
    Missing(RamPage),
    /// The caller wants no answer any more.
    Stopped,
}

/// Marks missing pages of a machine with this number of vCPUs, whose slots `page_of` knows. See
/// [`crate::Machine::assist_postcopy`].
pub(super) fn assist(
    faults: &FaultPath,
    vcpus: u32,
    mut page_of: impl FnMut(Gpa) -> Option<RamPage>,
    stop: &dyn Fn() -> bool,
    want: &dyn Fn(RamPage),
) -> Result<(), MachineError> {
    let Some(armed) = faults.active() else {
        return Err(MachineError::WrongState(
            "post-copy needs an armed fault delivery",
        ));
    };
    if armed.delivery != Delivery::Poison {
        return Ok(());
    }
    let known = faults.known();
    let confined = known.iter().all(|known| known.paging.is_confined());
    if known.len() != vcpus as usize || !(confined || armed.forced) {
        armed.note_unmarked(
            "poison markers are safe only for a guest that cannot change its page tables unseen",
        );
        return Ok(());
    }
    if !confined && !has_nested_paging() {
        armed.note_unmarked(
            "poison was requested, but KVM walks this guest's tables itself: the host has no EPT or NPT",
        );
        return Ok(());
    }
    let mut spared: HashSet<RamPage> = known
        .iter()
        .flat_map(|k| &k.shared)
        .filter_map(|gpa| page_of(*gpa))
        .collect();
    loop {
        if stop() || !armed.is_active() {
            return Ok(());
        }
        match find_tables(&known, &faults.ram, &armed.missing, &mut page_of, stop) {
            Tables::All(tables) => break spared.extend(tables),
            Tables::Stopped => return Ok(()),
            Tables::Missing(table) => {
                want(table);
                std::thread::sleep(LOOK_AGAIN);
            }
        }
    }
    mark(armed, &spared, stop)
}

pub(super) fn mark(
    armed: &Armed<impl Kernel>,
    spared: &HashSet<RamPage>,
    stop: &dyn Fn() -> bool,
) -> Result<(), MachineError> {
    let mut from = 0;
    while !stop() {
        let _turn = armed.marking();
        let Some(run) = armed.missing.next_run(from, CHUNK_PAGES) else {
            break;
        };
        from = run.end;
        let mut spared_here: Vec<usize> = spared
            .iter()
            .map(|page| page.index())
            .filter(|page| run.contains(page))
            .collect();
        spared_here.sort_unstable();
        let mut start = run.start;
        for end in spared_here.into_iter().chain([run.end]) {
            if start < end {
                let (first, pages) = (RamPage(start as u64), (end - start) as u64);
                armed
                    .watch
                    .poison_unmapped(first, pages, PageSize::Size4K, Wake::Later)
                    .map_err(|e| MachineError::os("cannot mark missing pages", e))?;
            }
            start = end + 1;
        }
    }
    Ok(())
}

/// Finds the page tables of all vCPUs. `page_of` maps an address to its RAM page. It polls `stop`
/// at each table: a guest can make all of its pages tables of each level.
fn find_tables(
    known: &[Known],
    ram: &GuestRam,
    missing: &PageBitmap,
    mut page_of: impl FnMut(Gpa) -> Option<RamPage>,
    stop: &dyn Fn() -> bool,
) -> Tables {
    let mut seen = HashSet::new();
    let mut rest: Vec<(Gpa, u32)> = Vec::new();
    for Known { paging, .. } in known {
        if !paging.is_long_mode() {
            continue;
        }
        rest.push((
            Gpa(paging.cr3 & ADDRESS),
            if paging.cr4 & CR4_LA57 != 0 { 5 } else { 4 },
        ));
    }
    let mut bytes = [0; PAGE_SIZE as usize];
    while let Some((table, level)) = rest.pop() {
        let Some(page) = page_of(table) else {
            continue;
        };
        if !seen.insert((page, level)) {
            continue;
        }
        if stop() {
            return Tables::Stopped;
        }
        if missing.test(page) {
            return Tables::Missing(page);
        }
        if level == 1 {
            continue;
        }
        if ram.try_read(page, &mut bytes).is_err() {
            return Tables::Missing(page);
        }
        let (entries, _) = bytes.as_chunks::<8>();
        for entry in entries.iter().map(|bytes| u64::from_le_bytes(*bytes)) {
            let leaf = entry & LARGE != 0 && level <= 3;
            if entry & PRESENT != 0 && !leaf {
                rest.push((Gpa(entry & ADDRESS), level - 1));
            }
        }
    }
    Tables::All(seen.into_iter().map(|(page, _)| page).collect())
}

#[cfg(test)]
mod tests {
    use super::super::machine::create;
    use super::super::paging::{CR0_PG, CR4_PAE, EFER_LMA, Paging};
    use super::super::probe::{start_of_guest, write_guest};
    use super::super::state::{Parts, Special};
    use super::super::userfault::markers;
    use super::*;
    use crate::{DeliveryInUse, MachineSpec, RamLayout};
    use std::cell::Cell;
    use std::sync::Arc;

    fn known(cr3: u64) -> Known {
        let paging = Paging {
            cr0: CR0_PG,
            cr3,
            cr4: CR4_PAE,
            efer: EFER_LMA,
            cpl: 3,
            idt_limit: 0,
        };
        Known {
            paging,
            shared: Vec::new(),
        }
    }

    /// Root at page 1 -> 2 -> {large page, 3} -> {4, 4}; page 5 is data that a leaf of 4 points at.
    fn ram() -> GuestRam {
        let ram = GuestRam::new(RamLayout::for_memory(16 * PAGE_SIZE).unwrap()).unwrap();
        let entry = |page: u64, index: u64, value: u64| {
            let bytes = value.to_le_bytes();
            ram.try_write((RamPage(page), index * 8), &bytes).unwrap();
        };
        entry(1, 0, 0x2000 | 7);
        entry(2, 0, 0x8000_0000 | LARGE | 7);
        entry(2, 9, 0x3000 | 7);
        entry(3, 0, 0x4000 | 7);
        entry(3, 511, 0x4000 | 7);
        entry(3, 7, 0x6000); // not present
        entry(4, 0, 0x5000 | 7);
        ram
    }

    fn find(known: &[Known], ram: &GuestRam, missing: &PageBitmap) -> Tables {
        find_until(known, ram, missing, &|| false)
    }

    fn find_until(
        known: &[Known],
        ram: &GuestRam,
        missing: &PageBitmap,
        stop: &dyn Fn() -> bool,
    ) -> Tables {
        let page_of = |gpa: Gpa| ram.layout().page_of(gpa.gfn());
        find_tables(known, ram, missing, page_of, stop)
    }

    /// A guest whose every page is a table, full of entries for all pages.
    #[test]
    fn a_walk_through_any_tables_ends_and_can_be_stopped() {
        const PAGES: u64 = 64;
        let ram = GuestRam::new(RamLayout::for_memory(PAGES * PAGE_SIZE).unwrap()).unwrap();
        let table: Vec<u8> = (0..512)
            .flat_map(|index| (index % PAGES * PAGE_SIZE + 7).to_le_bytes())
            .collect();
        for page in (0..PAGES).map(RamPage) {
            ram.try_write(page, &table).unwrap();
        }
        let missing = PageBitmap::new(PAGES as usize);
        let polls = Cell::new(0);
        let walk = |stop_at: u64| {
            polls.set(0);
            find_until(&[known(0x1000)], &ram, &missing, &|| {
                polls.set(polls.get() + 1);
                polls.get() == stop_at
            })
        };
        let all = (0..PAGES).map(RamPage).collect();
        assert_eq!(walk(u64::MAX), Tables::All(all));
        // One root, and each page once at each of the three levels below.
        assert_eq!(polls.get(), 1 + 3 * PAGES);
        for stop_at in [1, 2, 100] {
            assert_eq!(walk(stop_at), Tables::Stopped);
            assert_eq!(polls.get(), stop_at);
        }
    }

    #[test]
    fn all_tables_are_found_and_nothing_else() {
        let ram = ram();
        let missing = PageBitmap::new(16);
        missing.set(RamPage(5));
        let expected = [1, 2, 3, 4].map(RamPage).into_iter().collect();
        assert_eq!(
            find(&[known(0x1000), known(0x1008)], &ram, &missing),
            Tables::All(expected)
        );
    }

    #[test]
    fn a_missing_table_is_reported_and_its_stale_bytes_are_not_followed() {
        let missing = PageBitmap::new(16);
        missing.set(RamPage(3));
        assert_eq!(
            find(&[known(0x1000)], &ram(), &missing),
            Tables::Missing(RamPage(3))
        );
    }

    #[test]
    fn a_guest_that_could_reach_ring_0_is_not_confined() {
        let mut kernel = known(0x1000);
        kernel.paging.cpl = 0;
        let mut with_idt = known(0x1000);
        with_idt.paging.idt_limit = 0xfff;
        let mut without_paging = known(0x1000);
        without_paging.paging.cr0 = 0;
        assert!(known(0x1000).paging.is_confined());
        for unfit in [kernel, with_idt, without_paging] {
            assert!(!unfit.paging.is_confined(), "{unfit:?}");
        }
    }

    /// Whether the page has a marker.
    fn is_marked(ram: &GuestRam, page: RamPage) -> bool {
        markers(ram, page.0..page.0 + 1).unwrap() == Some(vec![true])
    }

    /// Arms a machine of one vCPU, confined or not. Returns the delivery in use and whether a
    /// missing page was marked, or `None` without poison on this host.
    fn assisted(delivery: Option<Delivery>, confined: bool) -> Option<(DeliveryInUse, bool)> {
        let mut new = create(MachineSpec::new(1, 64 * PAGE_SIZE)).unwrap();
        let ram = Arc::clone(new.machine.ram());
        if !new.machine.deliveries().contains(&Delivery::Poison) {
            return None;
        }
        let vcpu = new.vcpus[0].as_mut();
        write_guest(&ram, &[]).unwrap();
        vcpu.set_start(&start_of_guest([0; 2])).unwrap();
        if !confined {
            let mut parts = Parts::decode(&vcpu.save().unwrap()).unwrap();
            match &mut parts.special {
                Special::V1(sregs) => sregs.idt.limit = 0xfff,
                Special::V2(sregs) => sregs.idt.limit = 0xfff,
            }
            vcpu.restore(&parts.encode()).unwrap();
        }
        let missing = Arc::new(PageBitmap::new(64));
        let page = RamPage(32);
        ram.try_write(page, &[1; PAGE_SIZE as usize]).unwrap();
        missing.set(page);
        let machine = &new.machine;
        machine
            .arm_userfault(Arc::clone(&missing), delivery.into())
            .unwrap();
        machine.begin_postcopy().unwrap();
        machine.assist_postcopy(&|| false, &|_| {}).unwrap();
        Some((machine.delivery().unwrap(), is_marked(&ram, page)))
    }

    #[test]
    fn a_guest_that_may_change_its_tables_unseen_gets_markers_only_by_request() {
        if let Err(why) = crate::kvm::probe_vm() {
            pageferry_testkit::skip("kvm", why);
            return;
        }
        let forced = Some(Delivery::Poison);
        let Some((in_use, marked)) = assisted(forced, true) else {
            pageferry_testkit::skip("poison", "no fault delivery 'poison' on this host");
            return;
        };
        assert_eq!((in_use.delivery, marked), (Delivery::Poison, true));
        assert_eq!(in_use.because, "it was requested");
        let (in_use, marked) = assisted(forced, false).unwrap();
        if has_nested_paging() {
            assert_eq!((in_use.delivery, marked), (Delivery::Poison, true));
        } else {
            assert_eq!((in_use.delivery, marked), (Delivery::Minor, false));
            assert!(in_use.because.contains("no EPT or NPT"), "{in_use:?}");
        }
        // `auto` takes what is fastest here. If that is poison, it comes down to minor.
        let (in_use, marked) = assisted(None, false).unwrap();
        assert!(!marked && in_use.delivery != Delivery::Poison, "{in_use:?}");
    }
}
