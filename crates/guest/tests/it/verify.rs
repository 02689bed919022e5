//! The host's verification: it accepts correct memory, and finds every kind of corruption anywhere.

use pageferry_addr::RamPage;
use pageferry_guest::control::{DONE, ERRORS, IN_PROGRESS, PASS, VCPU};
use pageferry_guest::model::{self, ModelVcpu};
use pageferry_guest::verify::MAX_ERRORS;
use pageferry_guest::{ErrorKind, Isa, Order, PageBytes, PageUse, Spin, Verdict, Workload};
use proptest::prelude::*;

/// A workload, its RAM, and the number of visits of each vCPU.
struct Vm {
    workload: Workload,
    ram: Vec<PageBytes>,
}

impl Vm {
    fn run(isa: Isa, extra_pages: u64, visits: &[u64]) -> Self {
        let vcpus = visits.len() as u32;
        let bytes = Workload::minimum_memory(isa, vcpus) + extra_pages * 4096;
        let workload = Workload::new(isa, vcpus, bytes).unwrap();
        let mut ram = vec![[0; 4096]; workload.memory_map().ram_pages() as usize];
        for (gpa, bytes) in workload.image() {
            ram[gpa.gfn().0 as usize][..bytes.len()].copy_from_slice(&bytes);
        }
        for (vcpu, &visits) in (0..).zip(visits) {
            let mut model = ModelVcpu::new(&workload, vcpu);
            (0..visits).for_each(|_| {
                model.visit(&mut ram);
            });
        }
        Self { workload, ram }
    }

    fn verify(&self) -> Verdict {
        self.workload
            .verify::<std::convert::Infallible>(&mut |page, bytes| {
                *bytes = self.ram[page.index()];
                Ok(())
            })
            .unwrap()
    }

    /// The only error of a verdict.
    fn only_error(&self) -> (RamPage, PageUse, ErrorKind) {
        let verdict = self.verify();
        assert_eq!(
            (verdict.error_count, verdict.errors.len()),
            (1, 1),
            "{verdict:?}"
        );
        assert!(!verdict.holds() && !verdict.host_holds() && verdict.guest_holds());
        (
            verdict.errors[0].page,
            verdict.errors[0].page_use,
            verdict.errors[0].kind,
        )
    }

    fn control(&mut self, vcpu: u32, offset: usize, value: u64) {
        let page = self.workload.control_page(vcpu).index();
        self.ram[page][offset..offset + 8].copy_from_slice(&value.to_le_bytes());
    }

    /// The page that vCPU 0 visits next after `done` visits, and its sequence after that.
    fn next_page(&self, done: u64) -> (RamPage, u64) {
        let share = self.workload.share(0);
        let pages = share.end - share.start;
        let pass = done / pages + 1;
        let position = Order::new(0, pass, pages)
            .nth((done % pages) as usize)
            .unwrap();
        (RamPage(share.start + position), pass - 1)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_the_model_has_done_verifies(
        extra in 0..60_u64, visits in proptest::collection::vec(0..200_u64, 1..4), x64 in any::<bool>(),
    ) {
        let isa = if x64 { Isa::X86_64 } else { Isa::Rv64 };
        let vm = Vm::run(isa, extra, &visits);
        let verdict = vm.verify();
        prop_assert!(verdict.holds(), "{:?}", verdict);
        prop_assert_eq!(verdict.pages_checked, vm.workload.memory_map().ram_pages());
        prop_assert_eq!(verdict.pages_done, visits.iter().sum::<u64>());
    }

    #[test]
    fn any_flipped_bit_anywhere_is_found(
        visits in 0..150_u64, page in 0..50_usize, bit in 0..4096 * 8_usize,
    ) {
        let mut vm = Vm::run(Isa::X86_64, 50, &[visits, 77]);
        let (page, control) = (page % vm.ram.len(), 2..4);
        // Three parts of a control page are not judged: the state, the error record, and the name
        // of a page in progress that is whole.
        prop_assume!(!control.contains(&page) || !(0x48..0x58).contains(&(bit / 8)) && !(0x88..0xb0).contains(&(bit / 8)));
        vm.ram[page][bit / 8] ^= 1 << (bit % 8);
        let verdict = vm.verify();
        prop_assert!(!verdict.holds(), "page {} bit {}", page, bit);
    }

    #[test]
    fn a_page_in_progress_may_be_any_prefix_of_the_new_and_suffix_of_the_old(
        extra in 0..40_u64, done in 0..200_u64, cut in 0..=512_usize,
    ) {
        let mut vm = Vm::run(Isa::Rv64, extra, &[done]);
        let (page, old) = vm.next_page(done);
        let new = model::contents(0, page, old + 1);
        vm.ram[page.index()][..cut * 8].copy_from_slice(&new[..cut * 8]);
        vm.control(0, PASS, old + 1);
        vm.control(0, IN_PROGRESS, page.0 + 1);
        prop_assert!(vm.verify().holds());
        // The same bytes are wrong if no page is in progress,
        vm.control(0, IN_PROGRESS, 0);
        let unchanged = vm.ram[page.index()] == model::contents(0, page, old);
        prop_assert_eq!(vm.verify().holds(), unchanged);
        // and so is a mixture the other way round, or with a hole.
        vm.control(0, IN_PROGRESS, page.0 + 1);
        let mut odd = new;
        odd[..cut * 8].copy_from_slice(&model::contents(0, page, old)[..cut * 8]);
        vm.ram[page.index()] = odd;
        let legal = odd == new || odd == model::contents(0, page, old);
        prop_assert_eq!(vm.verify().holds(), legal);
    }
}

#[test]
fn every_kind_of_bad_data_page_is_named() {
    for (visits, sequence) in [(40, 2), (50, 2), (59, 2)] {
        for kind in ErrorKind::ALL {
            let mut vm = Vm::run(Isa::Rv64, 19, &[visits]);
            assert_eq!(vm.workload.memory_map().share_pages(), 20);
            let (victim, _) = vm.next_page(visits);
            vm.ram[victim.index()] = match kind {
                ErrorKind::Lost => [0; 4096],
                ErrorKind::Torn => {
                    let mut page = vm.ram[victim.index()];
                    page[9] ^= 32;
                    page
                }
                ErrorKind::Foreign => model::contents(1, victim, sequence),
                ErrorKind::Stale => model::contents(0, victim, sequence - 1),
            };
            assert_eq!(vm.only_error(), (victim, PageUse::Data(0), kind));
            let error = vm.verify().errors[0];
            assert_eq!(error.expected_sequence, sequence);
            let found = if kind == ErrorKind::Lost {
                0
            } else {
                sequence - u64::from(kind == ErrorKind::Stale)
            };
            assert_eq!(error.found_sequence, found);
        }
    }
}

#[test]
fn a_page_that_only_looks_right_is_found() {
    let mut vm = Vm::run(Isa::Rv64, 19, &[40]);
    let victim = RamPage(vm.workload.share(0).start);
    let page = &mut vm.ram[victim.index()];
    page[100] ^= 1;
    let sum = model::checksum(page).to_le_bytes();
    page[4088..].copy_from_slice(&sum);
    assert_eq!(
        model::check(page, 0, victim, 2),
        Ok(()),
        "the guest could not see it"
    );
    assert_eq!(vm.only_error(), (victim, PageUse::Data(0), ErrorKind::Torn));
}

#[test]
fn other_pages_must_stay_as_they_are() {
    let vm = || Vm::run(Isa::X86_64, 20, &[30, 30]);
    let map = *vm().workload.memory_map();
    let tables = map.table_pages();
    for (page, page_use) in [
        (0, PageUse::Unused),
        (map.code_page().0, PageUse::Constant),
        (map.stack_page(1).0, PageUse::Unused),
        (tables.start, PageUse::Constant),
        (tables.end - 1, PageUse::Constant),
    ] {
        let mut vm = vm();
        vm.ram[page as usize][4095] ^= 1;
        assert_eq!(vm.only_error(), (RamPage(page), page_use, ErrorKind::Torn));
        if page_use == PageUse::Constant {
            vm.ram[page as usize] = [0; 4096];
            assert_eq!(vm.only_error(), (RamPage(page), page_use, ErrorKind::Lost));
        }
    }
    let mut odd = Vm::run(Isa::Rv64, 1, &[3, 3]);
    let last = odd.ram.len() - 1;
    assert!(
        !odd.workload.is_data(RamPage(last as u64)),
        "one page is left over"
    );
    odd.ram[last][0] = 1;
    assert_eq!(
        odd.only_error(),
        (RamPage(last as u64), PageUse::Unused, ErrorKind::Torn)
    );
}

#[test]
fn a_bad_control_page_is_named() {
    let vm = || Vm::run(Isa::Rv64, 40, &[30, 30]);
    let check = |vm: Vm, kind| {
        let page = vm.workload.control_page(1);
        assert_eq!(vm.only_error(), (page, PageUse::Control(1), kind));
        let share = vm.workload.memory_map().share_pages();
        assert_eq!(
            vm.verify().pages_checked,
            vm.ram.len() as u64 - share,
            "its share is not judged"
        );
    };
    let at = vm().workload.control_page(1).index();
    let mut lost = vm();
    lost.ram[at] = [0; 4096];
    check(lost, ErrorKind::Lost);
    let mut swapped = vm();
    swapped.ram[at] = swapped.ram[at - 1];
    check(swapped, ErrorKind::Foreign);
    let mut other = vm();
    let spin = Spin::new(Isa::Rv64, 2, other.workload.memory_map().memory_bytes()).unwrap();
    other.ram[at][..].copy_from_slice(&spin.image().last().unwrap().1);
    check(other, ErrorKind::Foreign);
    for (offset, value) in [
        (0, 7),
        (VCPU, 5000),
        (PASS, 9),
        (IN_PROGRESS, 3),
        (DONE, 10_000),
        (0x38, 1),
        (4088, 1),
    ] {
        let mut torn = vm();
        torn.control(1, offset, value);
        check(torn, ErrorKind::Torn);
    }
}

#[test]
fn a_control_page_older_than_its_pages_is_found_in_the_pages() {
    let mut vm = Vm::run(Isa::Rv64, 40, &[30, 30]);
    vm.control(0, DONE, 29);
    let verdict = vm.verify();
    assert_eq!(
        (verdict.error_count, verdict.errors[0].kind),
        (1, ErrorKind::Stale)
    );
    assert_eq!(
        verdict.errors[0].found_sequence,
        verdict.errors[0].expected_sequence + 1
    );
}

#[test]
fn what_the_guest_found_is_told_apart_from_what_the_host_found() {
    let mut vm = Vm::run(Isa::Rv64, 40, &[30, 30]);
    let victim = RamPage(vm.workload.share(1).start);
    vm.ram[victim.index()][77] ^= 1;
    let mut model = ModelVcpu::new(&vm.workload, 1);
    let mut fresh = Vm::run(Isa::Rv64, 40, &[30, 0]);
    (0..30).for_each(|_| {
        model.visit(&mut fresh.ram);
    });
    fresh.ram[victim.index()] = vm.ram[victim.index()];
    (0..30).for_each(|_| {
        model.visit(&mut fresh.ram);
    });
    let verdict = fresh.verify();
    assert!(verdict.host_holds() && !verdict.guest_holds() && !verdict.holds());
    let finding = verdict.first_guest_error.unwrap();
    assert_eq!((verdict.guest_errors, finding.vcpu), (1, 1));
    assert_eq!(
        (finding.report.kind, finding.report.page),
        (ErrorKind::Torn, victim)
    );
    fresh.control(1, ERRORS, 0);
    assert!(fresh.verify().holds());
}

#[test]
fn many_errors_are_counted_and_the_first_are_described() {
    let mut vm = Vm::run(Isa::Rv64, 199, &[400]);
    for page in vm.workload.share(0) {
        vm.ram[page as usize] = [0; 4096];
    }
    let verdict = vm.verify();
    assert_eq!(
        (verdict.error_count, verdict.errors.len()),
        (200, MAX_ERRORS)
    );
}

#[test]
fn an_error_of_the_reader_is_passed_on() {
    let vm = Vm::run(Isa::Rv64, 10, &[5]);
    let result = vm.workload.verify(&mut |page, _| {
        if page.0 == 3 {
            Err("unreadable")
        } else {
            Ok(())
        }
    });
    assert_eq!(result, Err("unreadable"));
}
