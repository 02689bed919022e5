//! Small real runs of every way, and settings that are refused.

use super::*;
use pageferry_hypervisor::Vm;
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

fn tiny(vcpus: &[u32]) -> DemandSetting {
    DemandSetting {
        engines: vec![Engine::Soft],
        vcpus: vcpus.to_vec(),
        memory_per_vcpu: Some(64 * PAGE_SIZE),
        overlap: false,
        around: 1,
        repeat: 2,
    }
}

#[test]
fn every_way_of_the_soft_engine_has_its_figures() {
    for (overlap, around) in [(false, 1), (true, 1), (false, 16), (true, 7)] {
        let setting = DemandSetting {
            overlap,
            around,
            ..tiny(&[1, 2, 9])
        };
        let mut told = 0;
        let report = demand_paging(&setting, &mut |_| told += 1).unwrap();
        assert_eq!(told, 3 * 2);
        let seen: BTreeSet<_> = report
            .cells
            .iter()
            .map(|cell| (cell.vcpus, cell.delivery, cell.scheme.map(Scheme::name)))
            .collect();
        for vcpus in [1, 2, 9] {
            for delivery in ["none", "exit"] {
                for scheme in ["parallel", "serialised"] {
                    assert!(seen.contains(&(vcpus, delivery, Some(scheme))));
                }
            }
        }
        for cell in &report.cells {
            let each = if overlap {
                64 * u64::from(cell.vcpus)
            } else {
                64
            };
            assert_eq!(
                (cell.pages_each, cell.pages),
                (each, 64 * u64::from(cell.vcpus))
            );
            let rate = cell.pages_per_s;
            assert!(0.0 < rate.min && rate.min <= rate.median && rate.median <= rate.max);
            assert_eq!(rate.samples, 2);
            assert!(cell.vcpus > 1 || cell.scaling == 1.0);
        }
        assert!(report.unmeasured.is_empty());
        let text = report.to_string();
        assert!(text.contains("serialised") && !report.modelled, "{text}");
    }
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

impl watched::Watch for Looking {
    fn found<R>(&mut self, rest: impl FnOnce() -> R) -> R {
        let mapped = || {
            let vm = LOOKED_AT.lock().unwrap();
            vm.as_ref().unwrap().mapped_pages()
        };
        let before = mapped();
        let result = rest();
        MAPPED_INSIDE.fetch_add(mapped() - before, Ordering::Relaxed);
        result
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
fn the_lock_in_order_is_held_around_that_work() {
    let mut lock = OrderedLock::default();
    let same = lock.clone();
    let inside = watched::Watch::found(&mut lock, || same.is_held());
    assert!(inside && !same.is_held());
}

#[test]
fn leaving_the_guest_takes_time() {
    let plan = Plan::new(isa_of(Engine::Soft), 1, 4, false).unwrap();
    let host = HostRam::new(plan.toucher.memory_map().memory_bytes()).unwrap();
    assert!(exit_and_entry(&host, &plan, 100).unwrap() > 1.0);
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let refused = |setting: DemandSetting| demand_paging(&setting, &mut |_| {}).unwrap_err();
    assert!(
        refused(tiny(&[]))
            .to_string()
            .contains("nothing to measure")
    );
    assert!(refused(tiny(&[0])).to_string().contains("0 vCPUs"));
    assert!(refused(tiny(&[1, 1025])).to_string().contains("1025 vCPUs"));
    let nothing = DemandSetting {
        memory_per_vcpu: Some(0),
        ..tiny(&[1])
    };
    assert!(refused(nothing).to_string().contains("nothing to touch"));
}

#[test]
fn kvm_pages_by_every_delivery_it_has() {
    let kvm = pageferry_machine::EngineChoice::Only(Engine::Kvm);
    if let Err(why) = pageferry_machine::select(kvm) {
        pageferry_testkit::skip("kvm", why);
        return;
    }
    let setting = DemandSetting {
        engines: vec![Engine::Kvm],
        repeat: 1,
        ..tiny(&[2])
    };
    let report = demand_paging(&setting, &mut |_| {}).unwrap();
    assert_eq!(report.cells.len() + report.unmeasured.len(), 4);
    assert_eq!(report.of("kvm", "none", None).count(), 1);
}
