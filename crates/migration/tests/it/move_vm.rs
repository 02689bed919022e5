//! Moves a running VM, on both engines and by every fault delivery, without losing a byte.

use crate::support::{
    LIMIT, WorkloadVm, create_pc, kvm_deliveries, kvm_usable, move_vm, move_vm_to,
};
use pageferry_addr::RamPage;
use pageferry_machine::{Backing, Delivery, Engine, MachineSpec, kvm};
use pageferry_migration::{DestinationConfig, SourceConfig, Switch};
use pageferry_testkit::skip;

const MIB: u64 = 1 << 20;

struct Case {
    engine: Engine,
    vcpus: u32,
    memory: u64,
    passes: u32,
    to: DestinationConfig,
}

fn run(case: &Case) {
    run_from(
        WorkloadVm::booted(case.engine, case.vcpus, case.memory),
        case,
    );
}

fn run_from(source: WorkloadVm, case: &Case) {
    // Some pages are written, others never touched: there are data pages, zero pages and holes.
    source.wait_progress(64);
    let config = SourceConfig {
        settings: Switch::AfterPasses(case.passes).into(),
        ..SourceConfig::default()
    };
    let moved = move_vm(source, &config, case.to.clone());
    let (sent, received) = (moved.sent.unwrap(), moved.received.unwrap());
    eprintln!(
        "{} {} passes {}: blackout {} us, missing {}, {:?}, stalls p50 {} us over {}",
        received.engine,
        received.delivery.delivery,
        case.passes,
        received.started.saturating_sub(sent.last_stop).as_micros(),
        sent.missing_at_start,
        received.pages,
        received.stalls.value_at_quantile(0.5) / 1000,
        received.stalls.len(),
    );
    // A guest that hardly ran in a pass leaves few dirty pages. Then no other pass follows.
    if sent.passes.len() < case.passes as usize {
        let last = sent.passes.last().expect("a pass");
        assert!(last.left <= Switch::FEW_PAGES, "{:?}", sent.passes);
    }
    assert_eq!(sent.pages, received.pages);
    assert_eq!(sent.missing_at_start, received.missing_at_start);
    if let Some(delivery) = case.to.delivery {
        assert_eq!(received.delivery.delivery, delivery);
    }
    assert!(
        moved.source.threads.is_paused(),
        "the source never resumes it"
    );
    // The guest visits and checks every page again at the destination.
    let share = moved.destination.workload.memory_map().share_pages();
    moved.destination.wait_progress(2 * share);
    moved.destination.assert_verifies();
}

#[test]
fn a_soft_vm_moves_with_and_without_precopy() {
    for passes in [0, 1, 3] {
        run(&Case {
            engine: Engine::Soft,
            vcpus: 2,
            memory: 16 * MIB,
            passes,
            to: DestinationConfig {
                allocate: passes != 0,
                ..DestinationConfig::default()
            },
        });
    }
}

/// First come, first served: the bulk channels carry the requested pages too.
#[test]
fn a_vm_moves_with_its_requested_pages_in_order() {
    for bulk_channels in [1, 3] {
        let source = WorkloadVm::booted(Engine::Soft, 2, 16 * MIB);
        source.wait_progress(64);
        let config = SourceConfig {
            settings: Switch::NOW.into(),
            preempt: false,
            bulk_channels,
            ..SourceConfig::default()
        };
        let moved = move_vm(source, &config, DestinationConfig::default());
        let (sent, received) = (moved.sent.unwrap(), moved.received.unwrap());
        assert_eq!(sent.pages, received.pages);
        assert!(
            sent.pages.background > sent.pages.urgent,
            "{:?}",
            sent.pages
        );
        moved.destination.wait_progress(64);
        moved.destination.assert_verifies();
    }
}

#[test]
fn a_kvm_vm_moves_by_every_delivery() {
    const NAME: &str = "a_kvm_vm_moves_by_every_delivery";
    if !kvm_usable(NAME) {
        return;
    }
    for delivery in kvm_deliveries(NAME) {
        for (passes, allocate) in [(0, true), (1, true), (1, false)] {
            run(&Case {
                engine: Engine::Kvm,
                vcpus: 2,
                memory: 32 * MIB,
                passes,
                to: DestinationConfig {
                    delivery: Some(delivery),
                    allocate,
                    ..DestinationConfig::default()
                },
            });
        }
    }
}

/// Small rings are full all the time. Large ones never are.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_kvm_vm_moves_with_dirty_rings() {
    const NAME: &str = "a_kvm_vm_moves_with_dirty_rings";
    if !kvm_usable(NAME) {
        return;
    }
    let Some(most) = kvm::dirty_ring_entries() else {
        let why = format_args!("{NAME}: this host's KVM has no dirty rings");
        skip("dirty-ring", why);
        return;
    };
    for entries in [1024, most] {
        let case = Case {
            engine: Engine::Kvm,
            vcpus: 2,
            memory: 32 * MIB,
            passes: 3,
            to: DestinationConfig::default(),
        };
        let options = kvm::KvmOptions {
            dirty_tracking: kvm::DirtyTracking::Ring(entries),
            ..kvm::KvmOptions::default()
        };
        let spec = MachineSpec::new(case.vcpus, case.memory);
        let new = kvm::create_with(spec, options).unwrap();
        run_from(WorkloadVm::on(new).boot(), &case);
    }
}

#[test]
fn a_kvm_vm_moves_by_several_userfaultfds_and_readers() {
    const NAME: &str = "a_kvm_vm_moves_by_several_userfaultfds_and_readers";
    if !kvm_usable(NAME) {
        return;
    }
    for delivery in kvm_deliveries(NAME) {
        for (userfaultfds, fault_readers) in [(3, 2), (1, 3)] {
            run(&Case {
                engine: Engine::Kvm,
                vcpus: 4,
                memory: 32 * MIB,
                passes: 0,
                to: DestinationConfig {
                    delivery: Some(delivery),
                    userfaultfds,
                    fault_readers,
                    ..DestinationConfig::default()
                },
            });
        }
    }
}

/// KVM writes the guest's clock and steal time when a vCPU enters the guest.
#[test]
fn a_vm_moves_with_pages_that_kvm_itself_accesses() {
    const NAME: &str = "a_vm_moves_with_pages_that_kvm_itself_accesses";
    if !kvm_usable(NAME) {
        return;
    }
    let named = kvm_deliveries(NAME).into_iter().map(Some);
    let mut cases: Vec<_> = [None]
        .into_iter()
        .chain(named)
        .map(|delivery| (Backing::Shmem, delivery))
        .collect();
    // Private memory has no second mapping.
    cases.push((Backing::Anonymous, Some(Delivery::Missing)));
    for (backing, delivery) in cases {
        for passes in [0, 2] {
            let spec = MachineSpec {
                backing,
                ..MachineSpec::new(1, 32 * MIB)
            };
            let source = WorkloadVm::on(create_pc(spec).unwrap()).boot();
            source.threads.pause(LIMIT).unwrap();
            // The guest's stack is at the end of its page.
            let page = source.workload.memory_map().stack_page(0);
            let mut states = source.threads.save().unwrap();
            for (index, address) in [
                (0x4b56_4d01, 1),
                (0x4b56_4d03, 64 | 1),
                (0x4b56_4d04, 128 | 1),
            ] {
                let entry = u64::to_le_bytes(index);
                let at = states[0].0.windows(8).position(|bytes| bytes == entry);
                let value = at.expect("the register travels") + 8;
                let data: u64 = page.byte_offset() + address;
                states[0].0[value..value + 8].copy_from_slice(&data.to_le_bytes());
            }
            source.threads.restore(&states).unwrap();
            let states = source.threads.save().unwrap();
            assert_eq!(source.machine.state_pages(&states[0]), [page]);
            source.threads.resume();
            let config = SourceConfig {
                settings: Switch::AfterPasses(passes).into(),
                ..SourceConfig::default()
            };
            let to = DestinationConfig {
                delivery,
                ..DestinationConfig::default()
            };
            let moved = move_vm_to(backing, source, &config, to);
            let (sent, received) = (moved.sent.unwrap(), moved.received.unwrap());
            let used = received.delivery.delivery;
            assert!(delivery.is_some() || used == Delivery::Minor, "{used}");
            let pages = moved.destination.ram().pages();
            assert!(passes > 0 || sent.missing_at_start == pages - 1);
            moved.destination.wait_progress(64);
            moved.destination.threads.pause(LIMIT).unwrap();
            // KVM has written into the page. The program leaves it zero.
            let mut found = [0; 4096];
            moved.destination.ram().try_read(page, &mut found).unwrap();
            assert!(found[..32].iter().any(|byte| *byte != 0));
            moved.destination.ram().try_write(page, &[0; 4096]).unwrap();
            moved.destination.assert_verifies();
        }
    }
}

#[test]
fn a_vm_moves_on_again_from_where_it_came() {
    let source = WorkloadVm::booted(Engine::Soft, 1, 8 * MIB);
    source.wait_progress(32);
    let first = move_vm(
        source,
        &SourceConfig::default(),
        DestinationConfig::default(),
    );
    first.sent.unwrap();
    first.received.unwrap();
    let second = move_vm(
        first.destination,
        &SourceConfig::default(),
        DestinationConfig::default(),
    );
    second.sent.unwrap();
    second.received.unwrap();
    let share = second.destination.workload.memory_map().share_pages();
    second.destination.wait_progress(2 * share);
    second.destination.assert_verifies();
}

/// Returns the number of allocated pages of the VM.
fn allocated(vm: &WorkloadVm) -> u64 {
    let mut sum = 0;
    let mut from = 0;
    while let Some(pages) = vm.ram().next_allocated(RamPage(from), 1024).unwrap() {
        sum += pages.end - pages.start;
        from = pages.end;
    }
    sum
}

/// Moves a VM whose guest has written few pages, and checks the source. Returns `None` if the guest
/// has written too many pages on either side. On a busy host it may run for long while the test
/// waits for its turn.
fn moved_sparse(passes: u32) -> Option<crate::support::Moved> {
    let source = WorkloadVm::booted(Engine::Soft, 1, 128 * MIB);
    source.wait_progress(16);
    source.threads.pause(LIMIT).unwrap();
    let written = allocated(&source);
    if written >= 20_000 {
        return None;
    }
    let config = SourceConfig {
        settings: Switch::AfterPasses(passes).into(),
        ..SourceConfig::default()
    };
    let to = DestinationConfig {
        allocate: false,
        ..DestinationConfig::default()
    };
    let moved = move_vm(source, &config, to);
    moved.destination.threads.pause(LIMIT).unwrap();
    let urgent = moved.sent.as_ref().unwrap().pages.urgent;
    moved.received.as_ref().unwrap();
    // Reading a hole would have allocated it. The source reads requested pages.
    let here = allocated(&moved.source);
    assert!(
        here < written + urgent + 2000,
        "{here} pages at the source, {written} were written and {urgent} asked for"
    );
    (allocated(&moved.destination) < 32_000).then_some(moved)
}

#[test]
fn a_sparse_vm_stays_sparse_on_both_sides() {
    for passes in [0, 1] {
        let moved = (0..50)
            .find_map(|_| moved_sparse(passes))
            .expect("a destination with fewer than 32000 of its 32768 pages");
        moved.destination.threads.resume();
        let share = moved.destination.workload.memory_map().share_pages();
        moved.destination.wait_progress(2 * share);
        moved.destination.assert_verifies();
    }
}
