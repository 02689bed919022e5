//! Kicks reach a vCPU in whatever way it sleeps on a missing page.

use crate::kvm_userfault::{CHECK, Source, armed, bytes_of, no_delivery, pages_of};
use crate::place::placing;
use crate::support::{CODE, DATA, TABLES, Watchdog, machine_with, no_kvm, rung, start, word};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_machine::{Delivery, Exit, FaultEvents, Vcpu, kvm};
use pageferry_testkit::{LIMIT, wait_for};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// A kick has no effect for this long: the vCPU sleeps for KVM itself.
const DEAF: Duration = Duration::from_millis(300);

/// The next page that a vCPU sleeps on.
fn next_page(events: &mut dyn FaultEvents) -> RamPage {
    wait_for("an event", || events.next().unwrap()).page
}

/// The guest touches a page of `missing`, and nobody brings it. Kicks the vCPU, and brings the page
/// if that does not help. Then the guest runs to its end. Returns whether the kick ended the sleep.
fn kick_a_sleeper(
    delivery: Delivery,
    irqchip: kvm::Irqchip,
    pages: Range<RamPage>,
) -> Option<bool> {
    let mut new = machine_with(1, DATA.0 + 1, irqchip);
    if no_delivery(new.machine.as_ref(), delivery) {
        return None;
    }
    let ram = Arc::clone(new.machine.ram());
    let (missing, mut events) = armed(new.machine.as_ref(), delivery);
    let vcpu = new.vcpus[0].as_mut();
    let data = [DATA.0, DATA.0 + 1].map(|page| page * PAGE_SIZE);
    start(&ram, vcpu, 0, &CHECK, data);
    placing(&ram).write(DATA, &bytes_of(DATA));
    let low = pages_of(&ram, DATA.0);
    for page in (pages.start.0..pages.end.0).map(RamPage) {
        missing.set(page);
    }
    new.machine.begin_postcopy().unwrap();
    let source = Source::new(Arc::clone(&new.machine), missing, low);
    // The pages that are here do not send events.
    for page in (0..=DATA.0).map(RamPage) {
        if !pages.contains(&page) {
            source.fault(page);
        }
    }
    let (out, exits) = channel();
    std::thread::scope(|scope| {
        let kicker = vcpu.kicker();
        let _watchdog = Watchdog::new(Arc::clone(&kicker), LIMIT);
        scope.spawn(move || {
            loop {
                let exit = vcpu.run().unwrap();
                let over = !matches!(exit, Exit::Kicked);
                if out.send(exit).is_err() || over {
                    return;
                }
            }
        });
        let asleep_on = next_page(events.as_mut());
        assert!(pages.contains(&asleep_on), "{asleep_on:?}");
        kicker.kick();
        let ended = match exits.recv_timeout(DEAF) {
            Ok(exit) => {
                assert_eq!(exit, Exit::Kicked);
                true
            }
            Err(RecvTimeoutError::Timeout) => false,
            Err(gone) => panic!("{gone}"),
        };
        // All are brought, whether the vCPU sleeps on them or comes to them later.
        for page in (pages.start.0..pages.end.0).map(RamPage) {
            source.fault(page);
        }
        if !ended {
            let exit = exits.recv_timeout(LIMIT).expect("the kick is not lost");
            assert_eq!(exit, Exit::Kicked);
        }
        assert_eq!(rung(exits.recv_timeout(LIMIT).unwrap()), 1);
        Some(ended)
    })
}

#[test]
fn a_kick_ends_a_sleep_on_the_guests_own_access() {
    if no_kvm() {
        return;
    }
    for delivery in [Delivery::Minor, Delivery::Missing] {
        for irqchip in [kvm::Irqchip::None, kvm::Irqchip::Kernel] {
            for page in [DATA, CODE] {
                let ended = kick_a_sleeper(delivery, irqchip, page..RamPage(page.0 + 1));
                assert_ne!(ended, Some(false), "{delivery}, {irqchip:?}, {page:?}");
            }
        }
    }
}

/// With shadow paging, KVM itself reads the tables and sleeps deaf. With EPT or NPT the CPU reads
/// them, and the sleep is like any other.
#[test]
fn a_kick_in_a_sleep_on_a_page_table_is_not_lost() {
    if no_kvm() {
        return;
    }
    for delivery in [Delivery::Poison, Delivery::Minor, Delivery::Missing] {
        for irqchip in [kvm::Irqchip::None, kvm::Irqchip::Kernel] {
            let ended = kick_a_sleeper(delivery, irqchip, TABLES);
            println!("{delivery}, {irqchip:?}: the kick ended the sleep: {ended:?}");
        }
    }
}

/// The place of the value of a model-specific register in a state. A `kvm_msr_entry` has the index,
/// a reserved word, and the value.
fn msr_in(state: &[u8], index: u32) -> Range<usize> {
    let entry = u64::from(index).to_le_bytes();
    let at = state.windows(8).position(|bytes| bytes == entry);
    let at = at.expect("the register travels") + 8;
    at..at + 8
}

/// The bytes come with the state, and the guest sleeps for no page.
#[test]
fn the_page_of_a_clock_is_part_of_the_state() {
    if no_kvm() {
        return;
    }
    for delivery in [Delivery::Minor, Delivery::Missing, Delivery::Poison] {
        for index in [0x4b56_4d01, 0x4b56_4d03, 0x4b56_4d04] {
            let mut new = machine_with(1, DATA.0 + 1, kvm::Irqchip::Kernel);
            if no_delivery(new.machine.as_ref(), delivery) {
                continue;
            }
            let mut old = machine_with(1, DATA.0 + 1, kvm::Irqchip::Kernel);
            let vcpu = &mut old.vcpus[0];
            let mut state = vcpu.save().unwrap();
            assert_eq!(old.machine.state_pages(&state), []);
            let place = msr_in(&state.0, index);
            state.0[place].copy_from_slice(&(DATA.byte_offset() | 1).to_le_bytes());
            vcpu.restore(&state).unwrap();
            let bytes = bytes_of(DATA);
            old.machine.ram().try_write(DATA, &bytes).unwrap();
            let state = vcpu.save().unwrap();
            assert_eq!(old.machine.state_pages(&state), [DATA]);

            let (missing, mut events) = armed(new.machine.as_ref(), delivery);
            missing.set_range(0..DATA.index());
            new.machine.begin_postcopy().unwrap();
            new.vcpus[0].restore(&state).unwrap();
            let mut here = [0; PAGE_SIZE as usize];
            new.machine.ram().try_read(DATA, &mut here).unwrap();
            // KVM has written its structure.
            assert_eq!(here[128..], bytes[128..], "{delivery}, {index:#x}");
            assert!(events.next().unwrap().is_none(), "{delivery}, {index:#x}");
        }
    }
}

/// KVM looks for the page of a clock when the register is set, and the page comes only when the
/// guest runs.
#[test]
fn a_clock_whose_page_is_missing_delays_no_restore_and_is_part_of_the_state() {
    if no_kvm() {
        return;
    }
    for delivery in [Delivery::Minor, Delivery::Missing, Delivery::Poison] {
        for index in [0x12, 0x4b56_4d01] {
            let mut new = machine_with(1, DATA.0 + 1, kvm::Irqchip::None);
            if no_delivery(new.machine.as_ref(), delivery) {
                continue;
            }
            let (missing, _events) = armed(new.machine.as_ref(), delivery);
            missing.set(DATA);
            new.machine.begin_postcopy().unwrap();
            let mut vcpu = new.vcpus.remove(0);
            let (out, restored) = channel();
            let value = (DATA.byte_offset() | 1).to_le_bytes();
            std::thread::spawn(move || {
                let mut state = vcpu.save().unwrap();
                let place = msr_in(&state.0, index);
                state.0[place.clone()].copy_from_slice(&value);
                vcpu.restore(&state).unwrap();
                let again = vcpu.save().unwrap();
                let _ = out.send(again.0[msr_in(&again.0, index)].to_vec());
            });
            let again = restored.recv_timeout(LIMIT).expect("no sleep");
            assert_eq!(again, value, "{delivery}, {index:#x}");
        }
    }
}

#[test]
fn a_guest_is_told_that_it_was_paused() {
    /// `PVCLOCK_GUEST_STOPPED` in the flags of `struct pvclock_vcpu_time_info`.
    const STOPPED: u64 = 1 << (8 * 5 + 1);
    if no_kvm() {
        return;
    }
    let mut new = machine_with(1, DATA.0 + 1, kvm::Irqchip::None);
    let ram = Arc::clone(new.machine.ram());
    let vcpu = new.vcpus[0].as_mut();
    // mov ebx, 0xd0000000; l: mov [rbx], rdi; jmp l
    let code = [0xbb, 0, 0, 0, 0xd0, 0x48, 0x89, 0x3b, 0xeb, 0xfb];
    start(&ram, vcpu, 0, &code, [0, 0]);
    let mut state = vcpu.save().unwrap();
    let place = msr_in(&state.0, 0x4b56_4d01);
    state.0[place].copy_from_slice(&(DATA.byte_offset() | 1).to_le_bytes());
    vcpu.restore(&state).unwrap();
    let flags = |vcpu: &mut dyn Vcpu| {
        // KVM writes the clock when it enters the guest.
        rung(vcpu.run().unwrap());
        let flags = word(&ram, DATA, 3) & STOPPED;
        ram.try_write((DATA, 0), &[0; 32]).unwrap();
        flags
    };
    assert_eq!(flags(vcpu), STOPPED, "it was restored");
    assert_eq!(flags(vcpu), 0);
    vcpu.kicker().kick();
    assert_eq!(vcpu.run().unwrap(), Exit::Kicked);
    assert_eq!(flags(vcpu), STOPPED);
}
