//! Small real runs of every way, and settings that are refused.

use super::*;
use crate::watched::Watch;
use pageferry_addr::Gfn;
use pageferry_hypervisor::{MemslotReader, Memslots, Vm};
use pageferry_machine::Backing;
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Short runs on the soft engine, with 64 pages for each vCPU.
fn tiny(more: &str) -> DemandFlags {
    flags(&format!("--engine soft -b 256K --repeat 2 --quick {more}"))
}

/// As [`tiny`], on KVM, with one round.
fn kvm(more: &str) -> DemandFlags {
    flags(&format!("--engine kvm --repeat 1 --quick {more}"))
}

#[test]
fn every_way_of_the_soft_engine_has_its_figures() {
    for overlap in [false, true] {
        let setting = tiny(if overlap { "-v 1,2,9 -o" } else { "-v 1,2,9" });
        let found = measure(&setting).unwrap();
        let seen: BTreeSet<_> = found
            .cells
            .iter()
            .map(|cell| (cell.vcpus, cell.way.name()))
            .collect();
        let names = [
            "no userfault",
            "no userfault, serialised MMU",
            "exit",
            "exit, serialised MMU",
        ];
        for vcpus in [1, 2, 9] {
            for name in names {
                assert!(seen.contains(&(vcpus, name.to_owned())), "{name}");
            }
        }
        for cell in &found.cells {
            let each = if overlap {
                64 * u64::from(cell.vcpus)
            } else {
                64
            };
            assert_eq!(cell.pages_each, each);
            assert_eq!(cell.samples.rate.len(), 2);
        }
        check_faults(&found, overlap);
        check_rows(&found, &setting);
        assert!(found.lacking.is_empty());
    }
}

/// Only ways with missing pages, and vCPUs with pages of their own, have times of faults.
fn check_faults(found: &Found, overlap: bool) {
    for cell in &found.cells {
        let (p50, p99) = (&cell.samples.fault_us_p50, &cell.samples.fault_us_p99);
        // One vCPU has all pages for itself.
        let untold = cell.way.delivery.is_none() || (overlap && cell.vcpus > 1);
        assert_eq!(p50.is_empty(), untold, "{cell:?}");
        assert_eq!(p99.len(), p50.len());
        assert!(
            untold || 0.0 < p50.median() && p50.median() <= p99.median(),
            "{cell:?}"
        );
    }
}

/// Each cell has a row with its rate, with missing pages a ratio, and a row for each time.
fn check_rows(found: &Found, setting: &DemandFlags) {
    let rows = found.output(setting).rows;
    let rates: Vec<_> = rows
        .iter()
        .filter(|row| row.case == "demand_paging.rate")
        .collect();
    assert_eq!(rates.len(), found.cells.len());
    for (rate, cell) in rates.iter().zip(&found.cells) {
        assert!(
            rate.value > 0.0 && rate.subject.contains(&cell.way.name()),
            "{rate:?}"
        );
        assert_eq!(
            rate.ratio.is_some(),
            cell.way.delivery.is_some(),
            "{rate:?}"
        );
        let delivery = cell.way.delivery.map(|delivery| delivery.to_string());
        assert_eq!(rate.conditions.delivery, delivery);
    }
    let of = |case: &str| rows.iter().filter(|row| row.case == case).count();
    let timed = found
        .cells
        .iter()
        .filter(|cell| !cell.samples.fault_us_p50.is_empty());
    assert_eq!(of("demand_paging.fault_p50"), timed.count());
    let scaled = found
        .cells
        .iter()
        .filter(|cell| cell.vcpus > setting.measured_vcpus()[0]);
    assert_eq!(of("demand_paging.scaling"), scaled.count());
}

#[test]
fn a_delay_slows_every_fault_down() {
    let setting = flags("--engine soft -b 16K --repeat 1 --quick -v 1 -k -d 2000");
    let found = measure(&setting).unwrap();
    assert_eq!(found.cells.len(), 2);
    for cell in &found.cells {
        assert!(cell.samples.rate.quantile(1.0) < 500.0, "{cell:?}");
        assert!(
            cell.samples.fault_us_p50.quantile(0.0) >= 2000.0,
            "{cell:?}"
        );
    }
}

#[test]
fn the_notes_have_the_tests_lines() {
    let setting = tiny("-v 1,2");
    let found = measure(&setting).unwrap();
    let output = found.output(&setting);
    let text = output.notes.join("\n");
    // A script takes the number between the tab and the unit.
    let numbers = |words: &str, unit: &str| -> Vec<f64> {
        let lines = text.lines().filter_map(|line| line.strip_prefix(words));
        let numbers = lines.map(|rest| {
            let number = rest.strip_prefix(":\t").unwrap().strip_suffix(unit);
            number.unwrap().parse().unwrap()
        });
        numbers.collect()
    };
    let seconds = numbers("Total guest execution time", "s");
    let each = numbers("Per-vcpu demand paging rate", " pgs/sec/vcpu");
    let all = numbers("Overall demand paging rate", " pgs/sec");
    assert_eq!((seconds.len(), each.len(), all.len()), (8, 8, 8), "{text}");
    for (index, cell) in found.cells.iter().enumerate() {
        let close = |found: f64, wanted: f64| (found / wanted - 1.0).abs() < 1e-3;
        assert!(close(all[index], cell.samples.rate.median()), "{text}");
        assert!(close(all[index], each[index] * f64::from(cell.vcpus)));
        assert!(close(64.0, each[index] * seconds[index]), "{text}");
    }
}

#[test]
fn a_wide_spread_is_said() {
    for (slowest, noisy) in [(71.0, false), (69.0, true)] {
        let setting = tiny("-v 1");
        let mut found = measure(&setting).unwrap();
        found.cells[0].samples.rate = [slowest, 100.0, 100.0].into_iter().collect();
        let note = &found.output(&setting).rows[0].conditions.note;
        assert_eq!(note.contains("disturbed"), noisy, "{note}");
    }
}

#[test]
fn a_delivery_that_no_engine_has_is_refused() {
    let why = measure(&tiny("-v 1 -u minor")).unwrap_err();
    assert!(
        matches!(why, BenchError::Machine(MachineError::NoDelivery(_))),
        "{why}"
    );
}

#[test]
fn a_clock_sees_every_fault() {
    let plan = Plan::new(isa_of(Engine::Soft), 1, 64, false).unwrap();
    let bytes = plan.toucher.memory_map().memory_bytes();
    let host = HostRam::new(bytes).unwrap();
    let present = clocked_touch(&host, &plan, false).unwrap();
    // A fault for each page, some for the code and the control page, and some retries.
    assert!((64..200).contains(&present.len()), "{}", present.len());
    assert!(present.iter().all(|fault| !fault.missing));
    let rest = |faults: &[FaultTimes]| {
        faults
            .iter()
            .map(|fault| u64::from(fault.rest))
            .sum::<u64>()
    };
    assert!(rest(&present) > 0, "the work of a fault is inside");
    let missing = clocked_touch(&host, &plan, true).unwrap();
    let exits = missing.iter().filter(|fault| fault.missing).count();
    assert_eq!(exits, 64, "each page left the guest once");
    assert!(missing.len() >= exits + 64, "and was mapped after that");
}

/// Counts the mapped pages when the slot is found, and again when the fault's work is done.
#[derive(Clone, Default)]
struct Looking;

static LOOKED_AT: Mutex<Option<Vm<Watched<Looking>>>> = Mutex::new(None);
static MAPPED_INSIDE: AtomicU64 = AtomicU64::new(0);

impl Watch for Looking {
    fn fault<R>(
        &mut self,
        reader: &mut <Scalable as Memslots>::Reader,
        gfn: Gfn,
        rest: impl FnOnce(pageferry_hypervisor::Found<'_>) -> R,
    ) -> R {
        let mapped = || {
            let vm = LOOKED_AT.lock().unwrap();
            vm.as_ref().unwrap().mapped_pages()
        };
        reader.lookup(gfn, |found| {
            let before = mapped();
            let result = rest(found);
            MAPPED_INSIDE.fetch_add(mapped() - before, Ordering::Relaxed);
            result
        })
    }
}

#[test]
fn the_work_of_a_fault_is_where_lock_and_clock_stand() {
    let plan = Plan::new(isa_of(Engine::Soft), 1, 64, false).unwrap();
    let host = HostRam::new(plan.toucher.memory_map().memory_bytes()).unwrap();
    let mut prepared = soft::PreparedVm::<Watched<Looking>>::new(&host, &plan, None).unwrap();
    *LOOKED_AT.lock().unwrap() = Some(prepared.vm.clone());
    let exit = prepared.vcpus[0].run();
    assert!(
        matches!(exit, pageferry_hypervisor::Exit::MmioWrite { .. }),
        "{exit:?}"
    );
    let mapped = LOOKED_AT.lock().unwrap().take().unwrap().mapped_pages();
    assert!(mapped >= 64, "{mapped}");
    assert_eq!(MAPPED_INSIDE.load(Ordering::Relaxed), mapped);
}

#[test]
fn leaving_the_guest_takes_time() {
    let plan = Plan::new(isa_of(Engine::Soft), 1, 4, false).unwrap();
    let host = HostRam::new(plan.toucher.memory_map().memory_bytes()).unwrap();
    assert!(exit_and_entry(&host, &plan, 100).unwrap() > 1.0);
}

/// Whether KVM has `delivery` on this host.
fn has(backing: Backing, delivery: Delivery) -> bool {
    pageferry_harness::deliveries_of(Engine::Kvm, backing).contains(&delivery)
}

/// Whether this host has no KVM.
fn no_kvm() -> bool {
    let kvm = pageferry_machine::EngineChoice::Only(Engine::Kvm);
    pageferry_machine::select(kvm)
        .err()
        .is_some_and(|why| pageferry_testkit::skip("kvm", why))
}

#[test]
fn kvm_serves_events_with_several_readers() {
    if no_kvm() {
        return;
    }
    let found = measure(&kvm("-b 256K -v 3 -o -r 3")).unwrap();
    for delivery in [Delivery::Minor, Delivery::Missing] {
        let of = found
            .cells
            .iter()
            .filter(|cell| cell.way.delivery == Some(delivery));
        let names: Vec<_> = of.map(|cell| cell.way.name()).collect();
        let all = [format!("{delivery}, 3 readers")];
        let lacks = found.lacking.iter().any(|one| one.1 == delivery);
        assert!(lacks || names == all, "{names:?}");
    }
    check_faults(&found, true);
}

#[test]
fn kvms_readers_are_compared_with_a_plain_loop() {
    if no_kvm() {
        return;
    }
    let setting = kvm("-v 1 -u minor --compare-readers");
    if has(Backing::Shmem, Delivery::Minor) {
        let found = measure(&setting).unwrap();
        let modes: Vec<_> = found.cells.iter().map(|cell| cell.way.name()).collect();
        let compared = ["1 reader", "2 readers", "2 userfaultfds, 1 reader"];
        assert_eq!(modes[0], "minor, plain loop");
        assert_eq!(modes[1..], compared.map(|mode| format!("minor, {mode}")));
        let rows = found.output(&setting).rows;
        let compared = rows
            .iter()
            .filter(|row| row.baseline.as_deref() == Some("minor, plain loop"));
        assert_eq!(compared.count(), 4, "the loop itself too");
        check_faults(&found, false);
    }
}

#[test]
fn private_memory_is_paged_by_missing_faults_and_on_the_soft_engine() {
    let setting = tiny("-v 1 -s anonymous");
    let found = measure(&setting).unwrap();
    assert_eq!(found.cells.len(), 4, "both schemes, with and without exits");
    let note = &found.output(&setting).rows[0].conditions.note;
    assert!(note.contains("anonymous"), "{note}");
    if no_kvm() || !has(Backing::Anonymous, Delivery::Missing) {
        return;
    }
    let found = measure(&kvm("-b 256K -v 1 -s anonymous")).unwrap();
    let modes: Vec<_> = found.cells.iter().map(|cell| cell.way.name()).collect();
    assert_eq!(modes, ["no userfault", "missing, 1 reader"]);
    check_faults(&found, false);
    assert!(measure(&kvm("-b 256K -v 1 -s anonymous -u minor")).is_err());
}

#[test]
fn kvm_pages_by_every_delivery_it_has() {
    if no_kvm() {
        return;
    }
    let found = measure(&kvm("-b 256K -v 2")).unwrap();
    // A kernel without KVM Userfault is not said to lack it.
    let ways = 4 + usize::from(has(Backing::Shmem, Delivery::Userfault));
    assert_eq!(found.cells.len() + found.lacking.len(), ways);
    check_faults(&found, false);
}
