//! The RV64 code computes the same as the model, and retires the published number of instructions.

use crate::rv64::{Hart, Stop, boot, load};
use pageferry_addr::RamPage;
use pageferry_guest::control::{DONE, IN_PROGRESS};
use pageferry_guest::model::{self, ModelVcpu};
use pageferry_guest::{
    Control, Doorbell, ErrorKind, Event, HOLE_START, Isa, MemoryMap, PageBytes, Spin, Touch,
    TouchAccess, TouchOrder, Toucher, Workload,
};

/// Far more than any test here needs.
const BUDGET: u64 = 50_000_000;

/// Runs a hart to the end of its next visit. Collects the doorbells on the way.
fn visit(hart: &mut Hart, workload: &Workload, vcpu: u32, ram: &mut [PageBytes]) -> Vec<Doorbell> {
    let control = workload.start(vcpu).args[0];
    hart.watch = Some(control + IN_PROGRESS as u64);
    let mut rung = Vec::new();
    loop {
        match hart.run(ram, BUDGET) {
            Stop::Doorbell(value) => rung.push(Doorbell::parse(value).unwrap()),
            Stop::Watched if in_progress(workload, vcpu, ram).is_none() => return rung,
            Stop::Watched => {}
            Stop::Budget => panic!("no end of a visit"),
        }
    }
}

fn in_progress(workload: &Workload, vcpu: u32, ram: &[PageBytes]) -> Option<RamPage> {
    Control::parse(&ram[workload.control_page(vcpu).index()])
        .unwrap()
        .in_progress
}

fn verify(workload: &Workload, ram: &[PageBytes]) -> pageferry_guest::Verdict {
    workload
        .verify::<std::convert::Infallible>(&mut |page, bytes| {
            *bytes = ram[page.index()];
            Ok(())
        })
        .unwrap()
}

#[test]
fn some_passes_of_two_vcpus_equal_the_model_byte_for_byte() {
    let workload = Workload::new(Isa::Rv64, 2, 40 * 4096).unwrap();
    let mut ram = boot(workload.program());
    let mut expected = ram.clone();
    let mut harts: Vec<Hart> = (0..2)
        .map(|vcpu| Hart::new(workload.program(), vcpu))
        .collect();
    let mut models: Vec<ModelVcpu> = (0..2).map(|vcpu| ModelVcpu::new(&workload, vcpu)).collect();
    for round in 0..100 {
        for vcpu in 0..2 {
            assert_eq!(
                visit(&mut harts[vcpu as usize], &workload, vcpu, &mut ram),
                []
            );
            models[vcpu as usize].visit(&mut expected);
        }
        assert!(ram == expected, "round {round}");
    }
    assert!(verify(&workload, &ram).holds());
}

#[test]
fn a_pause_at_any_instruction_verifies() {
    let workload = Workload::new(Isa::Rv64, 1, 9 * 4096).unwrap();
    let mut ram = boot(workload.program());
    let mut hart = Hart::new(workload.program(), 0);
    let mut half = 0;
    for _ in 0..4000 {
        // A prime, so that the pauses fall everywhere in a visit of about 4600 instructions.
        assert_eq!(hart.run(&mut ram, 29), Stop::Budget);
        let verdict = verify(&workload, &ram);
        assert!(verdict.holds(), "{:?} at {:#x}", verdict.errors, hart.pc);
        half += u64::from(in_progress(&workload, 0, &ram).is_some());
    }
    assert!(half > 500, "{half} of the pauses were in mid-page");
}

#[test]
fn the_guest_reports_every_kind_of_bad_page_once_and_goes_on() {
    for kind in ErrorKind::ALL {
        for passes_before in [0_u64, 3] {
            let workload = Workload::new(Isa::Rv64, 1, 20 * 4096).unwrap();
            let share = workload.share(0);
            let pages = share.end - share.start;
            let mut ram = boot(workload.program());
            let mut hart = Hart::new(workload.program(), 0);
            let mut model = ModelVcpu::new(&workload, 0);
            let mut expected = ram.clone();
            for _ in 0..passes_before * pages {
                visit(&mut hart, &workload, 0, &mut ram);
                model.visit(&mut expected);
            }
            let victim = RamPage(share.start + 5);
            let bad = match kind {
                ErrorKind::Lost if passes_before == 0 => continue,
                ErrorKind::Lost => [0; 4096],
                ErrorKind::Torn => {
                    let mut page = ram[victim.index()];
                    page[3000] ^= 4;
                    page
                }
                ErrorKind::Foreign => {
                    model::contents(0, RamPage(victim.0 + 1), passes_before.max(1))
                }
                ErrorKind::Stale => model::contents(0, victim, passes_before + 1),
            };
            ram[victim.index()] = bad;
            expected[victim.index()] = bad;
            let mut rung = Vec::new();
            for _ in 0..pages {
                rung.extend(visit(&mut hart, &workload, 0, &mut ram));
                model.visit(&mut expected);
            }
            assert_eq!(
                rung,
                [Doorbell {
                    vcpu: 0,
                    event: Event::Error(kind)
                }]
            );
            assert!(
                ram == expected,
                "{kind}: the report is the model's, and the page is whole again"
            );
            let verdict = verify(&workload, &ram);
            assert!(verdict.host_holds() && !verdict.guest_holds());
            assert_eq!(verdict.guest_errors, 1);
            let finding = verdict.first_guest_error.unwrap();
            assert_eq!((finding.report.kind, finding.report.page), (kind, victim));
            assert_eq!(finding.report.pass, passes_before + 1);
        }
    }
}

#[test]
fn the_guest_reports_a_lost_and_a_stale_control_page() {
    for kind in [ErrorKind::Lost, ErrorKind::Stale] {
        let workload = Workload::new(Isa::Rv64, 1, 20 * 4096).unwrap();
        let mut ram = boot(workload.program());
        let mut hart = Hart::new(workload.program(), 0);
        let control = workload.control_page(0);
        for _ in 0..10 {
            visit(&mut hart, &workload, 0, &mut ram);
        }
        hart.watch = None;
        assert_eq!(
            hart.run(&mut ram, 3000),
            Stop::Budget,
            "somewhere in a visit"
        );
        match kind {
            ErrorKind::Lost => ram[control.index()] = [0; 4096],
            _ => ram[control.index()][DONE] -= 1,
        }
        let Stop::Doorbell(value) = hart.run(&mut ram, 10_000) else {
            panic!("it must ring")
        };
        let rung = Doorbell::parse(value).unwrap();
        assert_eq!(
            rung,
            Doorbell {
                vcpu: 0,
                event: Event::Error(kind)
            }
        );
        assert_eq!(
            hart.run(&mut ram, 200_000),
            Stop::Budget,
            "it goes on and does not ring again"
        );
        assert!(!verify(&workload, &ram).holds());
    }
}

#[test]
fn instructions_per_page_are_as_published() {
    for pages in [8, 21, 33, 64, 127] {
        let minimum = Workload::minimum_memory(Isa::Rv64, 1);
        let workload = Workload::new(Isa::Rv64, 1, minimum + (pages - 1) * 4096).unwrap();
        assert_eq!(workload.memory_map().share_pages(), pages);
        let mut ram = boot(workload.program());
        let mut hart = Hart::new(workload.program(), 0);
        for _ in 0..pages {
            visit(&mut hart, &workload, 0, &mut ram);
        }
        let passes = 8;
        let before = hart.retired;
        for _ in 0..passes * pages {
            visit(&mut hart, &workload, 0, &mut ram);
        }
        let measured = (hart.retired - before) as f64 / (passes * pages) as f64;
        let published = workload.instructions_per_page().unwrap();
        let error = (published - measured) / measured;
        assert!(
            (-1e-4..3e-3).contains(&error),
            "{pages} pages: {measured} measured, {published} published"
        );
        assert!(measured < 10.0 * 512.0, "{measured} instructions a page");
        if pages.is_power_of_two() {
            assert!(
                error.abs() < 1e-9,
                "nothing is skipped: {measured} {published}"
            );
        }
    }
}

#[test]
fn the_toucher_touches_every_page_of_its_range_once_a_pass() {
    let map = MemoryMap::new(Isa::Rv64, 2, 100 * 4096).unwrap();
    for order in [TouchOrder::Ascending, TouchOrder::Random] {
        for access in [TouchAccess::Read, TouchAccess::Write] {
            let toucher = Toucher::partitioned(
                map,
                Touch {
                    access,
                    order,
                    passes: 3,
                },
            );
            let mut ram = boot(toucher.program());
            for page in map.data() {
                ram[page as usize][..8].copy_from_slice(&(page * page).to_le_bytes());
            }
            let mut hart = Hart::new(toucher.program(), 1);
            let Stop::Doorbell(value) = hart.run(&mut ram, BUDGET) else {
                panic!("it must ring")
            };
            let finished = Doorbell {
                vcpu: 1,
                event: Event::Finished,
            };
            assert_eq!(Doorbell::parse(value), Ok(finished));
            assert_eq!(
                hart.run(&mut ram, BUDGET),
                Stop::Doorbell(value),
                "it rings again"
            );
            let control = Control::parse(&ram[toucher.control_page(1).index()]).unwrap();
            assert_eq!((control.done, control.pass), (3 * map.share_pages(), 3));
            let sum: u64 = map.share(1).map(|page| page * page).sum();
            assert_eq!(
                control.sum,
                if access == TouchAccess::Read {
                    3 * sum
                } else {
                    0
                }
            );
            for page in map.data() {
                let touched = access == TouchAccess::Write && map.share(1).contains(&page);
                let expected = if touched { page + 1 } else { page * page };
                assert_eq!(ram[page as usize][..8], expected.to_le_bytes());
            }
        }
    }
}

#[test]
fn the_spinner_counts() {
    let spin = Spin::new(Isa::Rv64, 1, 10 * 4096).unwrap();
    let mut ram = boot(spin.program());
    let mut hart = Hart::new(spin.program(), 0);
    assert_eq!(hart.run(&mut ram, 1 + 3 * 1000), Stop::Budget);
    assert_eq!(
        Control::parse(&ram[spin.control_page(0).index()])
            .unwrap()
            .done,
        1000
    );
}

#[test]
fn the_toucher_steps_over_the_hole() {
    // Mapped lazily: only touched pages take memory.
    let map = MemoryMap::new(Isa::Rv64, 1, HOLE_START + (1 << 20)).unwrap();
    let range = HOLE_START / 4096 - 20..HOLE_START / 4096 + 30;
    let touch = Touch {
        access: TouchAccess::Write,
        order: TouchOrder::Random,
        passes: 1,
    };
    let toucher = Toucher::new(map, vec![range.clone()], touch).unwrap();
    let mut bytes = vec![0; map.memory_bytes() as usize];
    let (ram, _) = bytes.as_chunks_mut();
    load(toucher.program(), ram);
    let mut hart = Hart::new(toucher.program(), 0);
    assert!(matches!(hart.run(ram, BUDGET), Stop::Doorbell(_)));
    for page in range.start - 1..range.end + 1 {
        let expected = if range.contains(&page) { page + 1 } else { 0 };
        assert_eq!(ram[page as usize][..8], expected.to_le_bytes());
    }
}
