//! The x86-64 code, on `/dev/kvm`, computes what the model computes and reports what it should.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod kvm;

use kvm::{Stop, Vm, reader};
use pageferry_addr::RamPage;
use pageferry_guest::control::{DONE, PASS, STATE};
use pageferry_guest::model::{self, ModelVcpu};
use pageferry_guest::{
    Control, Doorbell, ErrorKind, Event, HOLE_START, Isa, Layout, Order, PageBytes, Spin, Touch,
    TouchAccess, TouchOrder, Toucher, Workload,
};
use std::time::Duration;

const SHORT: Duration = Duration::from_millis(30);
const LONG: Duration = Duration::from_secs(20);

fn control(vm: &Vm, workload: &Workload, vcpu: u32) -> Control {
    Control::parse(&vm.read(workload.control_page(vcpu))).unwrap()
}

/// Runs until every vCPU has completed at least `passes` passes.
fn run_passes(vm: &mut Vm, workload: &Workload, passes: u64) {
    let wanted = passes * workload.layout().share_pages();
    for _ in 0..500 {
        let stops = vm.run(SHORT);
        assert!(stops.iter().all(|stop| *stop == Stop::Kicked), "{stops:?}");
        if (0..stops.len() as u32).all(|vcpu| control(vm, workload, vcpu).done >= wanted) {
            return;
        }
    }
    panic!("{passes} passes are not done after 500 times {SHORT:?}");
}

/// The page a vCPU has chosen last: the one it visits, or has just visited.
fn chosen_page(vm: &Vm, workload: &Workload, vcpu: u32) -> RamPage {
    let pages = workload.layout().share_pages();
    let control = control(vm, workload, vcpu);
    let mut order = Order::new(vcpu, control.pass, pages);
    while let Some(position) = order.next() {
        if order.state() == control.state {
            return RamPage(control.first.0 + position);
        }
    }
    // The pass has just begun and nothing is chosen in it yet.
    let last = Order::new(vcpu, control.pass - 1, pages).last().unwrap();
    RamPage(control.first.0 + last)
}

/// Runs until somebody rings, at most `slices` short times; says who.
fn run_until_doorbell(vm: &mut Vm, slices: u32) -> Vec<Doorbell> {
    for _ in 0..slices {
        let rung: Vec<Doorbell> = vm
            .run(SHORT)
            .into_iter()
            .filter_map(|stop| match stop {
                Stop::Doorbell(rung) => Some(rung),
                Stop::Kicked => None,
            })
            .collect();
        if !rung.is_empty() {
            return rung;
        }
    }
    Vec::new()
}

#[test]
fn some_passes_of_two_vcpus_equal_the_model_byte_for_byte() {
    let Some(kvm) = kvm::open() else { return };
    let workload = Workload::new(Isa::X86_64, 2, 1 << 20).unwrap();
    let mut vm = Vm::boot(&kvm, workload.program());
    let mut expected: Vec<PageBytes> = (0..workload.layout().ram_pages())
        .map(|page| vm.read(RamPage(page)))
        .collect();
    let mut models: Vec<ModelVcpu> = (0..2).map(|vcpu| ModelVcpu::new(&workload, vcpu)).collect();
    for round in 1..=3 {
        run_passes(&mut vm, &workload, 2 * round);
        let verdict = workload.verify(&mut reader(&vm)).unwrap();
        assert!(verdict.holds(), "{verdict:?}");
        assert_eq!(verdict.pages_checked, workload.layout().ram_pages());
        let mut half = Vec::new();
        for (vcpu, model) in (0..).zip(&mut models) {
            let control = control(&vm, &workload, vcpu);
            half.extend(control.in_progress);
            while model.done() < control.done {
                model.visit(&mut expected);
            }
        }
        for (page, expected) in (0..).map(RamPage).zip(&expected) {
            let bytes = vm.read(page);
            if let Some(vcpu) = workload.layout().control_owner(page) {
                let (found, modelled) = (
                    control(&vm, &workload, vcpu),
                    Control::parse(expected).unwrap(),
                );
                assert_eq!((found.done, found.errors), (modelled.done, 0));
                assert_eq!(
                    bytes[DONE..],
                    expected[DONE..],
                    "behind the hints all is equal"
                );
                assert_eq!(bytes[..PASS.min(STATE)], expected[..PASS.min(STATE)]);
            } else if !half.contains(&page) {
                assert!(bytes == *expected, "{page:?}");
            }
        }
    }
}

#[test]
fn the_guest_reports_every_kind_of_bad_page_and_goes_on() {
    let Some(kvm) = kvm::open() else { return };
    let workload = Workload::new(Isa::X86_64, 2, 1 << 20).unwrap();
    for kind in ErrorKind::ALL {
        let mut vm = Vm::boot(&kvm, workload.program());
        run_passes(&mut vm, &workload, 2);
        let owner = 1;
        // Any page but the one under visit, which may have been checked already.
        let chosen = chosen_page(&vm, &workload, owner);
        let victim = workload
            .share(owner)
            .map(RamPage)
            .find(|&page| page != chosen)
            .unwrap();
        let mut page = vm.read(victim);
        let sequence = u64::from_le_bytes(page[16..24].try_into().unwrap());
        match kind {
            ErrorKind::Lost => page = [0; 4096],
            ErrorKind::Torn => page[2047] ^= 0x80,
            ErrorKind::Foreign => page = model::contents(0, victim, sequence),
            ErrorKind::Stale => page = model::contents(owner, victim, sequence - 1),
        }
        let mismatch = model::check(&page, owner, victim, sequence).unwrap_err();
        vm.write(victim, &page);
        let verdict = workload.verify(&mut reader(&vm)).unwrap();
        assert_eq!(
            (verdict.error_count, verdict.guest_errors),
            (1, 0),
            "the host sees it first"
        );
        assert_eq!(
            (verdict.errors[0].page, verdict.errors[0].kind),
            (victim, kind)
        );

        let rung = Doorbell {
            vcpu: owner,
            event: Event::Error(kind),
        };
        assert_eq!(run_until_doorbell(&mut vm, 500), [rung], "{kind}");
        let after = control(&vm, &workload, owner);
        let report = after.first_error.unwrap();
        assert_eq!((after.errors, report.kind, report.page), (1, kind, victim));
        assert_eq!(
            (report.expected, report.found),
            (mismatch.expected, mismatch.found)
        );

        run_passes(
            &mut vm,
            &workload,
            after.done / workload.layout().share_pages() + 3,
        );
        let verdict = workload.verify(&mut reader(&vm)).unwrap();
        assert!(verdict.host_holds(), "the page is whole again: {verdict:?}");
        assert_eq!(verdict.guest_errors, 1);
    }
}

/// Corrupts a control page in a pause and says what the guest rings.
fn corrupt_control(kvm: &kvm_ioctls::Kvm, kind: ErrorKind) -> Option<Doorbell> {
    let workload = Workload::new(Isa::X86_64, 1, 1 << 20).unwrap();
    let mut vm = Vm::boot(kvm, workload.program());
    run_passes(&mut vm, &workload, 2);
    let page = workload.control_page(0);
    let mut bytes = vm.read(page);
    match kind {
        ErrorKind::Lost => bytes = [0; 4096],
        _ => bytes[DONE + 7] ^= 1,
    }
    vm.write(page, &bytes);
    let rung = run_until_doorbell(&mut vm, 20);
    assert_eq!(
        vm.run(SHORT),
        [Stop::Kicked],
        "it goes on and does not ring again"
    );
    rung.into_iter().next()
}

#[test]
fn the_guest_reports_a_lost_and_a_stale_control_page() {
    let Some(kvm) = kvm::open() else { return };
    for kind in [ErrorKind::Lost, ErrorKind::Stale] {
        // A pause between the check of the count and the store of the next one, two instructions of a
        // visit's thousands, hides the corruption: so one of three times is enough.
        let rung = (0..3).find_map(|_| corrupt_control(&kvm, kind));
        assert_eq!(
            rung,
            Some(Doorbell {
                vcpu: 0,
                event: Event::Error(kind)
            })
        );
    }
}

#[test]
fn the_toucher_touches_every_page_on_both_sides_of_the_hole() {
    let Some(kvm) = kvm::open() else { return };
    let layout = Layout::new(Isa::X86_64, 2, HOLE_START + (1 << 20)).unwrap();
    let hole = HOLE_START / 4096;
    let range = hole - 100..hole + 150;
    for order in [TouchOrder::Ascending, TouchOrder::Random] {
        for access in [TouchAccess::Read, TouchAccess::Write] {
            let touch = Touch {
                access,
                order,
                passes: 2,
            };
            let toucher = Toucher::new(layout, vec![range.clone(); 2], touch).unwrap();
            let mut vm = Vm::boot(&kvm, toucher.program());
            for page in range.clone() {
                let mut bytes = [0; 4096];
                bytes[..8].copy_from_slice(&(page * page).to_le_bytes());
                vm.write(RamPage(page), &bytes);
            }
            let finished = |vcpu| {
                Stop::Doorbell(Doorbell {
                    vcpu,
                    event: Event::Finished,
                })
            };
            assert_eq!(vm.run(LONG), [finished(0), finished(1)]);
            assert_eq!(vm.run(LONG), [finished(0), finished(1)], "they ring again");
            let sum: u64 = range.clone().map(|page| page * page).sum();
            for vcpu in 0..2 {
                let control = Control::parse(&vm.read(toucher.control_page(vcpu))).unwrap();
                assert_eq!((control.done, control.pass), (500, 2));
                assert_eq!(
                    control.sum,
                    if access == TouchAccess::Read {
                        2 * sum
                    } else {
                        0
                    }
                );
            }
            for page in range.clone() {
                let expected = if access == TouchAccess::Write {
                    page + 1
                } else {
                    page * page
                };
                assert_eq!(vm.read(RamPage(page))[..8], expected.to_le_bytes());
            }
            assert_eq!(vm.read(RamPage(range.start - 1)), [0; 4096]);
            assert_eq!(vm.read(RamPage(range.end)), [0; 4096]);
        }
    }
}

#[test]
fn the_spinner_counts_between_kicks() {
    let Some(kvm) = kvm::open() else { return };
    let spin = Spin::new(Isa::X86_64, 1, 1 << 20).unwrap();
    let mut vm = Vm::boot(&kvm, spin.program());
    let mut before = 0;
    for _ in 0..5 {
        assert_eq!(vm.run(SHORT), [Stop::Kicked]);
        let done = Control::parse(&vm.read(spin.control_page(0))).unwrap().done;
        assert!(done > before, "{done} after {before}");
        before = done;
    }
}
