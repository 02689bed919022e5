#![expect(
    unsafe_code,
    reason = "maps memfds, and touches the mappings as a vCPU does"
)]
//! Fault delivery over the mappings of a VMM that drives KVM itself. The example `own_kvm` of
//! `migration` has a guest on them.

use crate::adopt::{MIB, adopt, memfd, region};
use crate::place::placing;
use crate::support::{no_kvm, pluggable};
use pageferry_addr::{Gpa, Hva, PAGE_SIZE, RamPage};
use pageferry_machine::kvm::{self, KvmFaults, KvmOptions};
use pageferry_machine::{AdoptedRegion, ArmOptions, Delivery, FaultEvents, GuestRam, MachineError};
use pageferry_testkit::{HugePages, skip, wait_for};
use pageferry_userfault::PageBitmap;
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

/// Maps a part of a memfd. It is never unmapped.
fn map(fd: &OwnedFd, bytes: u64, offset: u64) -> Hva {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let at = std::ptr::null_mut();
    // SAFETY: the kernel chooses an unused address.
    let at = unsafe { mmap(at, bytes as usize, access, MapFlags::SHARED, fd, offset) };
    Hva(at.unwrap() as u64)
}

/// Three regions of 1, 2 and 1 MiB with mappings that are neither adjacent nor ascending.
fn scattered() -> (Arc<GuestRam>, [Hva; 3]) {
    let fd = memfd(5 * MIB, MemfdFlags::empty()).unwrap();
    let parts = [
        (0, MIB, 4 * MIB),
        (64 * MIB, 2 * MIB, 0),
        (1 << 40, MIB, 2 * MIB),
    ];
    let room = map(&fd, 5 * MIB, 0);
    let at = [room.0 + 4 * MIB, room.0, room.0 + 2 * MIB].map(Hva);
    let regions = parts
        .iter()
        .zip(at)
        .map(|(&(start, bytes, offset), at)| region(start, bytes, &fd, offset).mapped_at(at));
    (Arc::new(adopt(regions.collect()).unwrap()), at)
}

/// Reads the first byte of a page through the guest's mapping, as a vCPU would.
fn touch(hva: Hva) -> u8 {
    // SAFETY: the page is in a mapping that stays, and a byte has no wrong values.
    unsafe { (hva.0 as *const u8).read_volatile() }
}

fn next(events: &mut [Box<dyn FaultEvents>]) -> RamPage {
    let mut any = || events.iter_mut().find_map(|stream| stream.next().unwrap());
    wait_for("an event", &mut any).page
}

/// Whether this host lacks a delivery.
fn lacks(faults: &KvmFaults, delivery: Delivery) -> bool {
    let absent = !faults.deliveries().contains(&delivery);
    absent && skip("uffd", format!("no fault delivery '{delivery}'"))
}

#[test]
fn a_page_of_each_region_is_the_one_at_its_own_mapping() {
    let (ram, at) = scattered();
    let pages = [
        (0, at[0].0),
        (255, at[0].0 + 255 * PAGE_SIZE),
        (256, at[1].0),
    ];
    let more = [
        (767, at[1].0 + 511 * PAGE_SIZE),
        (768, at[2].0),
        (1023, at[2].0 + 255 * PAGE_SIZE),
    ];
    for (page, hva) in pages.into_iter().chain(more) {
        assert_eq!(ram.guest_hva(RamPage(page)), Hva(hva), "{page}");
        assert_eq!(ram.page_at_guest_hva(Hva(hva + 4095)), Some(RamPage(page)));
        ram.try_write(RamPage(page), &[page as u8 | 1]).unwrap();
        assert_eq!(touch(Hva(hva)), page as u8 | 1);
    }
    // Between the second region's bytes and the first's is a part of the memfd that is no RAM.
    assert_eq!(ram.page_at_guest_hva(Hva(at[2].0 + MIB)), None);
    assert_eq!(ram.page_at_guest_hva(Hva(at[1].0 - 1)), None);
}

#[test]
fn missing_pages_are_brought_to_scattered_mappings() {
    for delivery in [Delivery::Minor, Delivery::Missing] {
        let (ram, at) = scattered();
        let faults = KvmFaults::new(Arc::clone(&ram), 1);
        if lacks(&faults, delivery) {
            continue;
        }
        // The VMM has touched its mapping before: arming takes such pages away.
        for page in [255, 256] {
            ram.try_write(RamPage(page), &[9]).unwrap();
            assert_eq!(touch(ram.guest_hva(RamPage(page))), 9);
        }
        let missing = Arc::new(PageBitmap::new(1024));
        missing.set_range(250..770);
        let options = ArmOptions {
            userfaultfds: 2,
            ..delivery.into()
        };
        let mut events = faults.arm_userfault(&missing, &options).unwrap();
        assert_eq!(faults.delivery().unwrap().delivery, delivery);
        faults.begin_postcopy().unwrap();
        faults.install(RamPage(0), 250).unwrap();
        let touched = [
            (255, at[0].0 + 255 * PAGE_SIZE),
            (256, at[1].0),
            (767, at[1].0 + 511 * PAGE_SIZE),
            (768, at[2].0),
        ];
        for (page, hva) in touched {
            let vcpu = std::thread::spawn(move || touch(Hva(hva)));
            assert_eq!(next(&mut events), RamPage(page), "{delivery}");
            assert!(!vcpu.is_finished());
            let (page, byte) = (RamPage(page), page as u8 ^ 0x55);
            if faults.receives_in_place() {
                placing(&ram).write(page, &[byte; 4096]);
                faults.install(page, 1).unwrap();
            } else {
                faults.install_copy(page, &[byte; 4096]).unwrap();
            }
            missing.clear(page);
            assert_eq!(vcpu.join().unwrap(), byte, "{delivery}: {page}");
        }
        assert!(faults.disarm_userfault().is_err(), "pages are missing");
        // One run over all three regions, from holes and pages that are there.
        if faults.receives_in_place() {
            (250..770).for_each(|page| {
                placing(&ram).write(RamPage(page), &[7; 4096]);
            });
        }
        let sleepers = [300, 769].map(|page| {
            let hva = ram.guest_hva(RamPage(page)).0;
            (page, std::thread::spawn(move || touch(Hva(hva))))
        });
        let mut asked = [next(&mut events), next(&mut events)];
        asked.sort_unstable();
        assert_eq!(asked, [300, 769].map(RamPage), "{delivery}");
        faults.install(RamPage(250), 520).unwrap();
        let cleared = (250..770).filter(|page| missing.clear(RamPage(*page)));
        assert_eq!(cleared.count(), 520 - touched.len());
        for (page, sleeper) in sleepers {
            let expected = if delivery == Delivery::Minor { 7 } else { 0 };
            assert_eq!(sleeper.join().unwrap(), expected, "{delivery}: {page}");
        }
        faults.disarm_userfault().unwrap();
        // Nothing is registered any more.
        touch(ram.guest_hva(RamPage(1000)));
    }
}

/// Two huge pages, each a region, whose mappings are in the other order.
#[test]
fn huge_pages_of_a_pool_are_brought_to_the_mappings_of_a_vmm() {
    let Some(_pool) = HugePages::at_least(2) else {
        return;
    };
    const LARGE: u64 = 2 * MIB;
    let fd = memfd(2 * LARGE, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB).unwrap();
    let room = map(&fd, 2 * LARGE, 0).0;
    let regions = vec![
        region(0, LARGE, &fd, LARGE).mapped_at(Hva(room + LARGE)),
        region(64 * MIB, LARGE, &fd, 0).mapped_at(Hva(room)),
    ];
    let beside = vec![region(0, LARGE, &fd, 0).mapped_at(Hva(room + PAGE_SIZE))];
    let why = adopt(beside).unwrap_err().to_string();
    assert!(why.contains("begins at no multiple of 2097152"), "{why}");
    let ram = Arc::new(adopt(regions).unwrap());
    let faults = KvmFaults::new(Arc::clone(&ram), 1);
    if lacks(&faults, Delivery::Minor) {
        return;
    }
    let missing = Arc::new(PageBitmap::new(1024));
    missing.set_range(0..1024);
    let mut events = faults
        .arm_userfault(&missing, &Delivery::Minor.into())
        .unwrap();
    faults.begin_postcopy().unwrap();
    let vcpu = std::thread::spawn(move || touch(Hva(room + 5 * PAGE_SIZE)));
    assert_eq!(next(&mut events), RamPage(512 + 5));
    // The run covers the end of one huge page and the start of the other: neither is whole.
    for page in 500..1023 {
        placing(&ram).write(RamPage(page), &[page as u8; 4096]);
    }
    faults.install(RamPage(500), 523).unwrap();
    (500..1023).for_each(|page| assert!(missing.clear(RamPage(page))));
    assert!(!vcpu.is_finished());
    placing(&ram).write(RamPage(1023), &[1; 4096]);
    faults.install(RamPage(1023), 1).unwrap();
    missing.clear(RamPage(1023));
    assert_eq!(vcpu.join().unwrap(), (512 + 5) as u8);
    assert_eq!(faults.host_large_bytes().unwrap(), LARGE);
    faults.install(RamPage(0), 500).unwrap();
    (0..500).for_each(|page| assert!(missing.clear(RamPage(page))));
    faults.disarm_userfault().unwrap();
    assert_eq!(touch(Hva(room + LARGE + 501 * PAGE_SIZE)), 501_u64 as u8);
}

#[test]
fn deliveries_that_need_more_of_the_vmm_are_refused() {
    let (ram, _) = scattered();
    let faults = KvmFaults::new(ram, 1);
    let missing = Arc::new(PageBitmap::new(1024));
    for delivery in [Delivery::Poison, Delivery::Userfault, Delivery::Exit] {
        assert!(!faults.deliveries().contains(&delivery));
        let refused = faults.arm_userfault(&missing, &delivery.into());
        let Err(MachineError::NoDelivery(named)) = refused else {
            panic!("{delivery}");
        };
        assert_eq!(named, delivery);
    }
    assert!(faults.delivery().is_none());
    assert_eq!(faults.page_of_exit(1 << 4, Gpa(0)), None, "not armed");
}

/// KVM need not have the flag for this: the VMM's function is asked, and its refusal is passed on.
#[test]
fn the_vmm_gives_kvm_the_bits_of_each_region() {
    let (ram, _) = scattered();
    let calls = Arc::new(Mutex::new(Vec::new()));
    let missing = Arc::new(PageBitmap::new(1024));
    let of_kvm = Arc::clone(&calls);
    let faults = KvmFaults::new(ram, 1).with_userfault(move |region, bits| {
        of_kvm.lock().unwrap().push((region.slot, bits));
        Ok(())
    });
    if lacks(&faults, Delivery::Minor) {
        return;
    }
    let armed = faults.arm_userfault(&missing, &Delivery::Userfault.into());
    drop(armed.unwrap());
    let bits = |page| {
        Some(Hva(
            missing.address_from(RamPage(page)).unwrap().addr() as u64
        ))
    };
    let given = [(0, bits(0)), (1, bits(256)), (2, bits(768))];
    assert_eq!(*calls.lock().unwrap(), given);
    let exit = |flags, gpa| faults.page_of_exit(flags, Gpa(gpa));
    assert_eq!(exit(1 << 4, 64 * MIB + 4096), Some(RamPage(257)));
    assert_eq!(exit(1 << 4 | 8, (1 << 40) + MIB - 1), Some(RamPage(1023)));
    assert_eq!(exit(1 << 3, 64 * MIB), None, "another reason");
    assert_eq!(exit(1 << 4, 32 * MIB), None, "not RAM");
    faults.begin_postcopy().unwrap();
    faults.disarm_userfault().unwrap();
    let taken = [(0, None), (1, None), (2, None)];
    assert_eq!(calls.lock().unwrap()[3..], taken);
}

#[test]
fn mappings_that_cannot_be_the_guests_are_refused() {
    let fd = memfd(2 * MIB, MemfdFlags::empty()).unwrap();
    let at = map(&fd, 2 * MIB, 0).0;
    let both = |low: Option<u64>, high: Option<u64>| {
        let with = |region: AdoptedRegion, at: Option<u64>| match at {
            Some(at) => region.mapped_at(Hva(at)),
            None => region,
        };
        let low = with(region(0, MIB, &fd, 0), low);
        let high = with(region(MIB, MIB, &fd, MIB), high);
        adopt(vec![low, high]).map(drop).map_err(|e| e.to_string())
    };
    both(Some(at), Some(at + MIB)).unwrap();
    for (low, high, says) in [
        (Some(at), None, "for all regions, or for none"),
        (None, Some(at), "for all regions, or for none"),
        (
            Some(at),
            Some(at + MIB - PAGE_SIZE),
            "in part that of the region at 0x0",
        ),
        (Some(at + 8), Some(at + MIB + 8), "no multiple of 4096"),
        (
            Some(0),
            Some(at),
            "no mapping of 1048576 bytes begins at 0x0",
        ),
        (
            Some(u64::MAX - 4095),
            Some(at),
            "no mapping of 1048576 bytes",
        ),
    ] {
        let why = both(low, high).unwrap_err();
        assert!(why.contains(says), "{why}");
    }
}

#[test]
fn the_engine_does_not_take_memory_that_the_vmm_has_mapped() {
    if no_kvm() {
        return;
    }
    let (ram, _) = scattered();
    let (_machine, plug) = pluggable(1, 16);
    // A slot over it would show what lies behind the first region's mapping.
    let plugged = plug.plug(7, Gpa(1 << 30), Arc::clone(&ram), false);
    let why = plugged.unwrap_err().to_string();
    assert!(why.contains("without `mapped_at`"), "{why}");
    let ram = Arc::into_inner(ram).unwrap();
    let Err(refused) = kvm::create_on(1, ram, KvmOptions::default()) else {
        panic!("taken");
    };
    assert!(
        refused.to_string().contains("without `mapped_at`"),
        "{refused}"
    );
}
