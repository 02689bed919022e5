//! Stores of the VMM: they end LR reservations, and know tracked pages.

use crate::support::fleet::set;
use crate::support::tracked::{MEMORY, One, VALUE};
use crate::support::vm::{HostRam, PAGE, asm::*};
use pageferry_addr::Hva;
use pageferry_hypervisor::{Exit, LrSc, VmConfig};
use std::sync::Arc;

/// LR, then WFI, and at 16 SC, then WFI. The address is in a1, the value in a0.
fn with_code(config: VmConfig, pages: u64) -> One<HostRam> {
    let ram = HostRam::new(pages as usize);
    let code = [
        atomic(LR, D, A2, A1, 0),
        WFI,
        WFI,
        WFI,
        atomic(SC, D, A3, A1, A0),
        WFI,
    ];
    ram.code(0, &code);
    let region = ram.region(1, MEMORY, 0, pages);
    One::of(config, Arc::clone(&ram), region)
}

/// Reservations end by 8 bytes that are aligned: a store to any of them, and to no other byte.
#[test]
fn a_store_of_the_vmm_ends_the_reservations_of_its_bytes() {
    // The first byte of the store, counted from the reserved 8 bytes, and the number of its bytes.
    const STORES: [(i64, u64); 23] = [
        (0, 8),
        (0, 1),
        (3, 1),
        (4, 4),
        (6, 2),
        (7, 1),
        (7, 2),
        (-1, 2),
        (-4, 5),
        (-7, 8),
        (-8, 16),
        (0, 16),
        (-16, 17),
        (-0x20, 0x100),
        (-0x1000, 4 * PAGE),
        (-1, 1),
        (8, 1),
        (-8, 8),
        (8, 8),
        (-16, 16),
        (-0x20, 0x20),
        (8, 0x100),
        (0x1000, 8),
    ];
    for place in [0x1000_u64, 0x1010, 0x1018, 0x1ff8] {
        for (distance, bytes) in STORES {
            let mut one = with_code(VmConfig::default(), 6);
            let at = place.checked_add_signed(distance).unwrap();
            let from = Hva(one.region.hva.0 + at);
            let mut parts = Vec::new();
            let sc = stores_after(&mut one, place, |one| {
                one.vm.stores().store(from, bytes, |part| parts.push(part));
            });
            let mut next = 0;
            for part in parts {
                assert_eq!(part.start, next, "{at:#x}: the parts follow each other");
                let whole = part.start == 0 || (from.0 + part.start).is_multiple_of(8);
                assert!(whole, "{at:#x}: {part:?} tears 8 bytes");
                next = part.end;
            }
            assert_eq!(next, bytes, "{at:#x}");
            let beside = at >= place + 8 || at + bytes <= place;
            assert_eq!(sc, beside, "{bytes} bytes at {at:#x}, LR at {place:#x}");
        }
    }
}

/// Whether an SC to `place` stores, when `act` comes between its LR and it.
fn stores_after(one: &mut One<HostRam>, place: u64, act: impl FnOnce(&mut One<HostRam>)) -> bool {
    let registers = [(A0, VALUE), (A1, MEMORY + place), (A3, 7)];
    set(&mut one.vcpu, MEMORY, &registers);
    assert_eq!(one.vcpu.run(), Exit::Halted);
    act(one);
    set(&mut one.vcpu, MEMORY + 16, &registers);
    assert_eq!(one.vcpu.run(), Exit::Halted);
    one.vcpu.hart().x(13) == 0
}

/// LR.W of either half of 8 bytes, and a store to the other half.
#[test]
fn a_store_of_the_vmm_to_the_other_half_ends_a_reservation_of_4_bytes() {
    for vcpus in [1, 2] {
        let config = VmConfig {
            max_vcpus: vcpus,
            ..VmConfig::default()
        };
        for (reserved, stored) in [(0, 4), (0, 7), (4, 0), (4, 3)] {
            let mut one = with_code(config, 4);
            let code = [atomic(LR, W, A2, A1, 0), WFI, atomic(SC, W, A3, A1, A0)];
            one.ram.code(64, &code);
            let from = one.region.hva.0 + 0x1010;
            let registers = [(A1, MEMORY + 0x1010 + reserved), (A3, 7)];
            for stores in [true, false] {
                set(&mut one.vcpu, MEMORY + 64, &registers);
                assert_eq!(one.vcpu.run(), Exit::Halted);
                if stores {
                    one.vm.stores().store(Hva(from + stored), 1, |_| {});
                }
                assert_eq!(one.vcpu.run(), Exit::Halted);
                let failed = one.vcpu.hart().x(13) == 1;
                assert_eq!(failed, stores, "{stored} after LR.W of {reserved}");
            }
        }
    }
}

/// The first LR in a page waits for stores that found no reservations there.
#[test]
fn a_first_lr_waits_for_the_stores_under_way() {
    let mut one = with_code(VmConfig::default(), 4);
    let (vm, from) = (one.vm.clone(), Hva(one.region.hva.0 + 0x1010));
    set(&mut one.vcpu, MEMORY, &[(A1, MEMORY + 0x1010)]);
    std::thread::scope(|scope| {
        let stores = vm.stores();
        let lr = scope.spawn(|| one.vcpu.run());
        stores.store(from, 8, |_| {
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!lr.is_finished(), "it reserves in the middle of the store");
        });
        drop(stores);
        assert_eq!(lr.join().unwrap(), Exit::Halted);
    });
    assert_eq!(vm.watched_pages(), 1);
}

#[test]
fn the_one_vcpu_of_a_vm_has_exact_reservations_without_a_watched_page() {
    let config = VmConfig {
        max_vcpus: 1,
        ..VmConfig::default()
    };
    let mut one = with_code(config, 4);
    assert!(stores_after(&mut one, 0x1010, |_| {}));
    assert_eq!(one.ram.get(0x1010), VALUE);
    let reads = |one: &mut One<HostRam>| {
        let _ = one.vm.stores().first_tracked(1, 0..4);
    };
    assert!(stores_after(&mut one, 0x1010, reads));
    for (at, bytes) in [(0x1010, 8), (0x1017, 1), (0x0ff0, 0x100), (0, 4 * PAGE)] {
        // It stores the value that is there.
        let sc = stores_after(&mut one, 0x1010, |one| {
            let from = Hva(one.region.hva.0 + at);
            one.vm.stores().store(from, bytes, |_| {});
        });
        assert!(!sc, "{bytes} bytes at {at:#x}");
    }
    assert!(stores_after(&mut one, 0x1010, |_| {}));
    assert_eq!(one.vm.watched_pages(), 0);
}

#[test]
fn an_sc_by_value_finds_other_bytes_only() {
    let config = VmConfig {
        max_vcpus: 2,
        lr_sc: LrSc::ByValue,
        ..VmConfig::default()
    };
    let mut one = with_code(config, 4);
    let put = |one: &mut One<HostRam>, value| {
        let from = Hva(one.region.hva.0 + 0x1010);
        let ram = Arc::clone(&one.ram);
        (one.vm.stores()).store(from, 8, |_| ram.set(0x1010, value));
    };
    assert!(stores_after(&mut one, 0x1010, |_| {}));
    assert_eq!(one.ram.get(0x1010), VALUE);
    assert!(!stores_after(&mut one, 0x1010, |one| put(one, VALUE + 1)));
    assert_eq!(one.ram.get(0x1010), VALUE + 1);
    // Another value, and back: an exact SC would fail.
    assert!(stores_after(&mut one, 0x1010, |one| {
        put(one, 5);
        put(one, VALUE + 1);
    }));
    assert_eq!(one.ram.get(0x1010), VALUE);
    assert_eq!(one.vm.watched_pages(), 0);
}

#[test]
fn tracked_pages_are_known_until_they_are_untracked() {
    let one = with_code(VmConfig::default(), 8);
    let first = |pages| one.vm.stores().first_tracked(1, pages);
    assert_eq!(first(0..8), None);
    one.vm.track_writes(1, 3..5).unwrap();
    assert_eq!(
        (first(0..3), first(0..8), first(4..8)),
        (None, Some(3), Some(4))
    );
    assert_eq!(
        (first(5..8), first(7..99), first(99..200)),
        (None, None, None)
    );
    assert_eq!(one.vm.stores().first_tracked(9, 0..8), None);
    one.vm.untrack_writes(1, 0..8).unwrap();
    assert_eq!(first(0..8), None);
}

#[test]
fn tracking_waits_for_the_stores_under_way() {
    let one = with_code(VmConfig::default(), 8);
    let stores = one.vm.stores();
    std::thread::scope(|scope| {
        let tracked = scope.spawn(|| one.vm.track_writes(1, 0..1));
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!tracked.is_finished());
        assert_eq!(stores.first_tracked(1, 0..1), None);
        drop(stores);
        assert_eq!(tracked.join().unwrap(), Ok(1));
    });
    assert_eq!(one.vm.stores().first_tracked(1, 0..1), Some(0));
}
