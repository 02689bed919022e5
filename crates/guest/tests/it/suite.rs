//! Tests of a guest that every engine must pass.

use pageferry_addr::RamPage;
use pageferry_guest::control::{DONE, PASS, REST, STATE};
use pageferry_guest::model::{self, ModelVcpu};
use pageferry_guest::{
    Control, Doorbell, ErrorKind, Event, HOLE_START, Isa, MemoryMap, Order, PageBytes, Program,
    Spin, Touch, TouchAccess, TouchOrder, Toucher, Workload,
};
use pageferry_testkit::LIMIT;
use std::convert::Infallible;
use std::time::{Duration, Instant};

/// A VM with a program loaded. Between two calls of [`TestVm::run`] no vCPU runs.
pub(crate) trait TestVm {
    const ISA: Isa;
    fn boot(program: &Program) -> Self;
    fn read(&self, page: RamPage) -> PageBytes;
    fn write(&mut self, page: RamPage, bytes: &PageBytes);
    /// Runs every vCPU on a separate thread until it stores to the doorbell or `limit` has passed.
    fn run(&mut self, limit: Duration) -> Vec<Stop>;
}

/// The reason why [`TestVm::run`] returned, for each vCPU.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The time limit passed.
    Kicked,
    /// The vCPU stored to the doorbell.
    Doorbell(Doorbell),
}

/// RAM in the form that a verification reads.
fn reader(vm: &impl TestVm) -> impl FnMut(RamPage, &mut PageBytes) -> Result<(), Infallible> {
    |page, bytes| {
        *bytes = vm.read(page);
        Ok(())
    }
}

const SHORT: Duration = Duration::from_millis(30);

fn control(vm: &impl TestVm, workload: &Workload, vcpu: u32) -> Control {
    Control::parse(&vm.read(workload.control_page(vcpu))).unwrap()
}

/// Runs until every vCPU has completed at least `passes` passes.
fn run_passes(vm: &mut impl TestVm, workload: &Workload, passes: u64) {
    let wanted = passes * workload.memory_map().share_pages();
    let until = Instant::now() + LIMIT;
    while Instant::now() < until {
        let stops = vm.run(SHORT);
        assert!(stops.iter().all(|stop| *stop == Stop::Kicked), "{stops:?}");
        if (0..stops.len() as u32).all(|vcpu| control(vm, workload, vcpu).done >= wanted) {
            return;
        }
    }
    panic!("{passes} passes are not done after {LIMIT:?}");
}

/// The page that a vCPU chose last: the one it visits or has just visited.
fn chosen_page(vm: &impl TestVm, workload: &Workload, vcpu: u32) -> RamPage {
    let pages = workload.memory_map().share_pages();
    let control = control(vm, workload, vcpu);
    let mut order = Order::new(vcpu, control.pass, pages);
    while let Some(position) = order.next() {
        if order.state() == control.state {
            return RamPage(control.first.0 + position);
        }
    }
    // The pass has just begun, and nothing is chosen in it yet.
    let last = Order::new(vcpu, control.pass - 1, pages).last().unwrap();
    RamPage(control.first.0 + last)
}

/// Runs until a vCPU stores to the doorbell, for at most `slices` short times. Returns the stores.
fn run_until_doorbell(vm: &mut impl TestVm, slices: u32) -> Vec<Doorbell> {
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

pub(crate) fn some_passes_of_two_vcpus_equal_the_model_byte_for_byte<V: TestVm>() {
    let workload = Workload::new(V::ISA, 2, 1 << 20).unwrap();
    let mut vm = V::boot(workload.program());
    let mut expected: Vec<PageBytes> = (0..workload.memory_map().ram_pages())
        .map(|page| vm.read(RamPage(page)))
        .collect();
    let mut models: Vec<ModelVcpu> = (0..2).map(|vcpu| ModelVcpu::new(&workload, vcpu)).collect();
    for round in 1..=3 {
        run_passes(&mut vm, &workload, 2 * round);
        let verdict = workload.verify(&mut reader(&vm)).unwrap();
        assert!(verdict.holds(), "{verdict:?}");
        assert_eq!(verdict.pages_checked, workload.memory_map().ram_pages());
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
            if let Some(vcpu) = workload.memory_map().control_owner(page) {
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

pub(crate) fn the_guest_reports_every_kind_of_bad_page_and_goes_on<V: TestVm>() {
    let workload = Workload::new(V::ISA, 2, 1 << 20).unwrap();
    for kind in ErrorKind::ALL {
        let mut vm = V::boot(workload.program());
        run_passes(&mut vm, &workload, 2);
        let owner = 1;
        // Any page but the one under visit, which the guest may have checked already.
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
        assert_eq!(run_until_doorbell(&mut vm, 4000), [rung], "{kind}");
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
            after.done / workload.memory_map().share_pages() + 3,
        );
        let verdict = workload.verify(&mut reader(&vm)).unwrap();
        assert!(verdict.host_holds(), "the page is whole again: {verdict:?}");
        assert_eq!(verdict.guest_errors, 1);
    }
}

/// Corrupts a control page in a pause. Returns the guest's store to the doorbell.
fn corrupt_control<V: TestVm>(kind: ErrorKind) -> Option<Doorbell> {
    let workload = Workload::new(V::ISA, 1, 1 << 20).unwrap();
    let mut vm = V::boot(workload.program());
    run_passes(&mut vm, &workload, 2);
    let page = workload.control_page(0);
    let mut bytes = vm.read(page);
    match kind {
        ErrorKind::Lost => bytes = [0; 4096],
        _ => bytes[DONE + 7] ^= 1,
    }
    vm.write(page, &bytes);
    let rung = run_until_doorbell(&mut vm, 60);
    assert_eq!(
        vm.run(SHORT),
        [Stop::Kicked],
        "it goes on and does not ring again"
    );
    rung.into_iter().next()
}

pub(crate) fn the_guest_reports_a_lost_and_a_stale_control_page<V: TestVm>() {
    for kind in [ErrorKind::Lost, ErrorKind::Stale] {
        // A pause between the check of the count and the store of the next count hides the
        // corruption. That is two instructions of a visit's thousands, so one success in three
        // tries is enough.
        let rung = (0..3).find_map(|_| corrupt_control::<V>(kind));
        assert_eq!(
            rung,
            Some(Doorbell {
                vcpu: 0,
                event: Event::Error(kind)
            })
        );
    }
}

pub(crate) fn a_workload_asks_for_a_rest_after_each_page_and_goes_on<V: TestVm>() {
    let rest = Duration::from_micros(1500);
    let workload = Workload::new(V::ISA, 1, 1 << 20).unwrap();
    let unknown = workload.clone();
    let workload = workload.with_rest(rest).unwrap();
    let mut vm = V::boot(workload.program());
    let rests = Doorbell {
        vcpu: 0,
        event: Event::Rest(rest),
    };
    // The second pass also compares the pages with those of the first.
    for done in 1..=2 * workload.memory_map().share_pages() {
        assert_eq!(run_until_doorbell(&mut vm, 1000), [rests]);
        let control = control(&vm, &workload, 0);
        assert_eq!((control.done, control.in_progress), (done, None));
    }
    // The destination of a VM does not know the rest.
    for workload in [&workload, &unknown] {
        let verdict = workload.verify(&mut reader(&vm)).unwrap();
        assert!(verdict.holds(), "{verdict:?}");
    }
    let page = workload.control_page(0);
    let mut bytes = vm.read(page);
    // The value of another vCPU is no rest of this one.
    bytes[REST] ^= 1;
    vm.write(page, &bytes);
    let verdict = unknown.verify(&mut reader(&vm)).unwrap();
    assert!(!verdict.host_holds(), "{verdict:?}");
}

pub(crate) fn the_toucher_touches_every_page_on_both_sides_of_the_hole<V: TestVm>() {
    let map = MemoryMap::new(V::ISA, 2, HOLE_START + (1 << 20)).unwrap();
    let hole = HOLE_START / 4096;
    let range = hole - 100..hole + 150;
    for order in [TouchOrder::Ascending, TouchOrder::Random] {
        for access in [TouchAccess::Read, TouchAccess::Write] {
            let touch = Touch {
                access,
                order,
                passes: 2,
            };
            let toucher = Toucher::new(map, vec![range.clone(); 2], touch).unwrap();
            let mut vm = V::boot(toucher.program());
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
            assert_eq!(vm.run(LIMIT), [finished(0), finished(1)]);
            assert_eq!(vm.run(LIMIT), [finished(0), finished(1)], "they ring again");
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

pub(crate) fn the_spinner_counts_between_kicks<V: TestVm>() {
    let spin = Spin::new(V::ISA, 1, 1 << 20).unwrap();
    let mut vm = V::boot(spin.program());
    let mut before = 0;
    let until = Instant::now() + LIMIT;
    for _ in 0..5 {
        let mut done = before;
        // Its thread may not have run in a short time.
        while done == before {
            assert!(Instant::now() < until, "it stands still at {before}");
            assert_eq!(vm.run(SHORT), [Stop::Kicked]);
            done = Control::parse(&vm.read(spin.control_page(0))).unwrap().done;
        }
        assert!(done > before, "{done} after {before}");
        before = done;
    }
}

/// Prints the speed of the workload on one vCPU, and of the host's verification.
pub(crate) fn speed<V: TestVm>() {
    let workload = Workload::new(V::ISA, 1, 64 << 20).unwrap();
    let mut vm = V::boot(workload.program());
    run_passes(&mut vm, &workload, 2);
    let before = control(&vm, &workload, 0).done;
    let start = Instant::now();
    assert_eq!(vm.run(Duration::from_secs(1)), [Stop::Kicked]);
    let pages = (control(&vm, &workload, 0).done - before) as f64 / start.elapsed().as_secs_f64();
    println!(
        "{}: {pages:.0} pages/s, {:.2} us a page",
        V::ISA,
        1e6 / pages
    );
    if let Some(instructions) = workload.instructions_per_page() {
        println!(
            "{instructions:.1} instructions a page: {:.1} M instructions/s",
            pages * instructions / 1e6
        );
    }
    let start = Instant::now();
    assert!(workload.verify(&mut reader(&vm)).unwrap().holds());
    let each = start.elapsed().as_secs_f64() / workload.memory_map().ram_pages() as f64;
    println!("verification: {:.2} us a page", each * 1e6);
}
