#![expect(unsafe_code, reason = "adopts memory")]
//! Moves a running VM between kinds of memory, on both engines, without losing a byte.

use crate::scripted::limits;
use crate::scripted::source::{ScriptedSource, Template};
use crate::support::{
    LIMIT, WorkloadVm, address_of, kvm_usable, listen, migrate_to, move_vm, move_vm_to, receive_as,
};
use crate::vmm_access::{engines, receive_beside};
use pageferry_addr::{Gpa, PAGE_SIZE, PageSize, RamPage};
use pageferry_machine::{
    AdoptedRegion, Backing, Collapsed, Delivery, Engine, GuestRam, RamLayout, soft,
};
use pageferry_migration::{DestinationConfig, SourceConfig, Switch, Tracking};
use pageferry_testkit::{AdvisedHugePages, HugePages, rotation, sized, skip, wait_until};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::sync::mpsc::channel;
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// The memory of each side.
fn memory() -> u64 {
    sized(8, 32) * MIB
}

/// The pages of 2 MiB of both sides.
fn larges() -> u64 {
    2 * memory() / (2 * MIB)
}

/// One of `all` for the item of this number in a test, by the commit. All in the slow tests.
fn options<T: Copy>(item: usize, all: &[T]) -> Vec<T> {
    let (first, count) = (rotation() as usize + item, sized(1, all.len() as u64));
    let next = all.iter().cycle().skip(first % all.len());
    next.take(count as usize).copied().collect()
}

/// Moves a VM with all pages, or all but those of a pass, missing at first.
fn run(
    engine: Engine,
    from: Backing,
    to: Backing,
    passes: u32,
    allocate: bool,
    tracking: Tracking,
) {
    let source = WorkloadVm::empty_on(from, engine, 2, memory()).boot();
    source.wait_progress(64);
    let config = SourceConfig {
        settings: Switch::AfterPasses(passes).into(),
        tracking,
        ..SourceConfig::default()
    };
    let destination = DestinationConfig {
        allocate,
        ..DestinationConfig::default()
    };
    let moved = move_vm_to(to, source, &config, destination);
    let (sent, received) = (moved.sent.unwrap(), moved.received.unwrap());
    eprintln!(
        "{engine} {from} to {to}, {passes} passes, {tracking:?}: {}, missing {}, {:?}, stalls p50 {} us p99 {} us over {}",
        received.delivery.delivery,
        sent.missing_at_start,
        received.pages,
        received.stalls.value_at_quantile(0.5) / 1000,
        received.stalls.value_at_quantile(0.99) / 1000,
        received.stalls.len(),
    );
    assert_eq!(sent.pages, received.pages);
    if engine == Engine::Kvm && to.is_hugetlb() {
        assert_eq!(received.delivery.delivery, Delivery::Minor);
        // A stall ends with the last of 512 pieces, so there are few.
        assert!(received.stalls.len() <= larges());
    }
    if engine == Engine::Kvm && to == Backing::Anonymous {
        assert_eq!(received.delivery.delivery, Delivery::Missing);
    }
    assert_eq!(moved.destination.ram().backing(), to);
    let share = moved.destination.workload.memory_map().share_pages();
    moved.destination.wait_progress(2 * share);
    moved.destination.assert_verifies();
}

fn move_to_each(engine: Engine) {
    let pairs = [
        (Backing::Shmem, Backing::ShmemThp),
        (Backing::ShmemThp, Backing::Shmem),
        (Backing::Shmem, Backing::Hugetlb2M),
        (Backing::Hugetlb2M, Backing::Shmem),
        (Backing::Hugetlb2M, Backing::Hugetlb2M),
        (Backing::Shmem, Backing::Anonymous),
        (Backing::Anonymous, Backing::Shmem),
        (Backing::Anonymous, Backing::Anonymous),
    ];
    for (pair, (from, to)) in pairs.into_iter().enumerate() {
        let lacking = [from, to].into_iter().find_map(|backing| {
            let why = backing.check(memory()).err()?;
            Some(skip(backing.name(), why))
        });
        if lacking.is_some() {
            continue;
        }
        let private = to == Backing::Anonymous;
        let all = [
            (2, true, Tracking::Hash),
            (0, true, Tracking::Log),
            (1, false, Tracking::Log),
            (0, false, Tracking::Log),
            (1, true, Tracking::Log),
        ];
        for (passes, allocate, tracking) in options(pair, &all[..if private { 5 } else { 3 }]) {
            run(engine, from, to, passes, allocate, tracking);
        }
    }
}

/// Moves a VM in small pages, and waits until most of it is huge again.
fn comes_back(engine: Engine) {
    let source = WorkloadVm::empty(engine, 2, memory()).boot();
    source.wait_progress(64);
    let config = SourceConfig::default();
    let moved = move_vm(source, &config, DestinationConfig::default());
    moved.received.unwrap();
    let machine = &moved.destination.machine;
    if !makes_huge_pages(&moved.destination) {
        return;
    }
    wait_until("huge pages", || {
        machine.host_large_bytes().unwrap() >= memory() / 2
    });
    let share = moved.destination.workload.memory_map().share_pages();
    moved.destination.wait_progress(2 * share);
    println!(
        "{engine}: {} MiB by the host, {:?} bytes by the engine",
        machine.host_large_bytes().unwrap() / MIB,
        machine.engine_large_bytes()
    );
    moved.destination.assert_verifies();
}

#[test]
fn complete_ranges_become_huge_pages_while_other_pages_are_missing() {
    for (engine, delivery) in engines("huge pages in post-copy") {
        let template = Template::new(engine, 1, memory());
        let held = *template.missing.last().unwrap();
        let config = DestinationConfig {
            delivery,
            ..DestinationConfig::default()
        };
        let (go_on, huge) = channel();
        let script = move |peer: &mut ScriptedSource<'_>| {
            peer.start();
            peer.unsent.retain(|page| *page != held);
            peer.push_rest();
            peer.unsent.push(held);
            huge.recv_timeout(LIMIT).expect("huge pages");
            peer.complete();
        };
        let (vm, outcome) = receive_beside(&template, config, script, |vm, _| {
            wait_until("all pages but one", || {
                vm.is_missing(RamPage(held)) && !vm.is_missing(RamPage(held - 3))
            });
            let large = PageSize::Size2M.pages();
            let last = RamPage(held - held % large);
            assert_eq!(vm.machine.collapse(last), Collapsed::Missing);
            if makes_huge_pages(vm) {
                let most = memory() - 2 * PageSize::Size2M.bytes();
                wait_until("huge pages", || {
                    vm.machine.host_large_bytes().unwrap() >= most
                });
            }
            go_on.send(()).unwrap();
        });
        outcome.unwrap();
        vm.wait_progress(64);
        vm.assert_verifies();
    }
}

/// Whether this host makes huge pages of shared memory. It has to when it is asked to.
fn makes_huge_pages(vm: &WorkloadVm) -> bool {
    // Other cores may hold pages that were just written.
    let works = (0..200).any(|_| {
        std::thread::sleep(Duration::from_millis(5));
        vm.machine.collapse(RamPage(0)) == Collapsed::Huge
    });
    works || {
        skip("thp", "this host makes no huge pages of shared memory");
        false
    }
}

#[test]
fn the_memory_of_a_moved_vm_becomes_huge_pages_again() {
    comes_back(Engine::Soft);
    if kvm_usable("the_memory_of_a_moved_vm_becomes_huge_pages_again") {
        comes_back(Engine::Kvm);
    }
}

#[test]
fn a_soft_vm_moves_between_backings() {
    let _host = (HugePages::at_least(larges()), AdvisedHugePages::new());
    move_to_each(Engine::Soft);
}

#[test]
fn a_kvm_vm_moves_between_backings() {
    if !kvm_usable("a_kvm_vm_moves_between_backings") {
        return;
    }
    let _host = (HugePages::at_least(larges()), AdvisedHugePages::new());
    move_to_each(Engine::Kvm);
}

/// A VM in memory of two memfds, whose parts follow in another order. The last part is behind a
/// hole, at 4 GiB. No part ends at a border of 2 MiB.
fn adopted(engine: Engine) -> WorkloadVm {
    let file = |bytes| {
        let fd = memfd_create("vmm", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, bytes).unwrap();
        fd
    };
    let (memory, eighth) = (memory(), memory() / 8);
    let (one, two) = (file(memory), file(memory));
    let odd = MIB + MIB / 4;
    let regions = [
        (0, 2 * eighth + odd, &one, 3 * eighth),
        (2 * eighth + odd, 3 * eighth, &two, odd),
        (5 * eighth + odd, 3 * eighth - odd, &one, 0),
        (4 << 30, MIB, &two, 0),
    ];
    let regions = regions.map(|(start, bytes, fd, offset)| {
        AdoptedRegion::new(Gpa(start), bytes, fd.try_clone().unwrap(), offset)
    });
    // SAFETY: nobody else has the memfds.
    let ram = unsafe { GuestRam::adopt(regions.into()) }.unwrap();
    with_ram(engine, ram)
}

/// A VM of two vCPUs in this memory.
fn with_ram(engine: Engine, ram: GuestRam) -> WorkloadVm {
    let new = match engine {
        Engine::Soft => soft::create_on(2, ram, soft::SoftOptions::default()),
        #[cfg(target_arch = "x86_64")]
        Engine::Kvm => {
            use pageferry_machine::kvm::{KvmOptions, create_on};
            create_on(2, ram, KvmOptions::default()).map(|(new, _)| new)
        }
        #[cfg(not(target_arch = "x86_64"))]
        Engine::Kvm => unreachable!("KVM is not usable here"),
    };
    WorkloadVm::on(new.unwrap())
}

#[test]
fn a_vm_moves_between_memories_that_its_vmm_has_made() {
    let high = Gpa((4 << 30) + 5000);
    for (engine, delivery) in engines("memory of a VMM") {
        for passes in [0, 1] {
            let source = adopted(engine).boot();
            source.ram().try_write(high, b"behind the hole").unwrap();
            source.wait_progress(64);
            let config = SourceConfig {
                settings: Switch::AfterPasses(passes).into(),
                ..SourceConfig::default()
            };
            let to = adopted(engine);
            let destination = listen(DestinationConfig {
                delivery,
                userfaultfds: if engine == Engine::Kvm { 3 } else { 1 },
                ..DestinationConfig::default()
            });
            let (sent, received) = std::thread::scope(|scope| {
                let receiver =
                    scope.spawn(|| receive_as(&to.running(), &to.resolver, &destination));
                let sent = migrate_to(&source, &address_of(&destination), &config);
                (sent, receiver.join().unwrap())
            });
            let (sent, received) = (sent.unwrap(), received.unwrap());
            assert_eq!(sent.pages, received.pages);
            assert!(delivery.is_none_or(|asked| received.delivery.delivery == asked));
            let mut bytes = [0; 15];
            to.ram().try_read(high, &mut bytes).unwrap();
            assert_eq!(&bytes, b"behind the hole");
            to.wait_progress(2 * to.workload.memory_map().share_pages());
            to.assert_verifies();
        }
    }
}

/// The memories that both sides of a move can have: one that a VMM has made, and those of ours that
/// the delivery serves. Ours have a part that the workload does not use, behind a hole.
fn memories(engine: Engine, delivery: Option<Delivery>) -> Vec<(String, WorkloadVm)> {
    let mut all = vec![("adopted".to_owned(), adopted(engine))];
    for (backing, only) in [
        (Backing::Shmem, None),
        (Backing::ShmemThp, None),
        (Backing::Hugetlb2M, Some(Delivery::Minor)),
        (Backing::Anonymous, Some(Delivery::Missing)),
    ] {
        if delivery.is_some() && only.is_some() && delivery != only {
            continue;
        }
        let layout = RamLayout::new(&[(Gpa(0), memory()), (Gpa(4 << 30), 2 * MIB)]).unwrap();
        match GuestRam::with_backing(layout, backing) {
            Ok(ram) => all.push((backing.to_string(), with_ram(engine, ram))),
            Err(why) => {
                skip(backing.name(), why);
            }
        }
    }
    all
}

/// The contract forbids it, and KVM refuses such a machine. On the soft engine nothing is lost.
#[test]
fn a_soft_vm_that_runs_already_becomes_the_one_that_comes() {
    for passes in [0, 2] {
        let to = WorkloadVm::booted(Engine::Soft, 2, memory());
        to.wait_progress(to.workload.memory_map().share_pages());
        let source = WorkloadVm::booted(Engine::Soft, 2, memory());
        source.wait_progress(64);
        // Both guests leave little of a busy host's cores to the session.
        let limits = limits(LIMIT);
        let destination = listen(DestinationConfig {
            limits: limits.clone(),
            ..DestinationConfig::default()
        });
        let config = SourceConfig {
            settings: Switch::AfterPasses(passes).into(),
            limits,
            ..SourceConfig::default()
        };
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| receive_as(&to.running(), &to.resolver, &destination));
            migrate_to(&source, &address_of(&destination), &config).unwrap();
            receiver.join().unwrap().unwrap();
        });
        to.wait_progress(2 * to.workload.memory_map().share_pages());
        to.assert_verifies();
    }
}

#[test]
fn bytes_that_the_memory_held_before_do_not_survive_a_move() {
    let _host = (HugePages::at_least(4 * larges()), AdvisedHugePages::new());
    for (engine, delivery) in engines("memory that is not fresh") {
        for first in options(0, &[0, 1]) {
            for (item, (name, to)) in memories(engine, delivery).into_iter().enumerate() {
                let (passes, allocate) = [(0, false), (1, true)][(first + item) % 2];
                let name = format!("{engine} {delivery:?} {name}, {passes} passes");
                let pages = to.ram().pages();
                let bytes = to.ram().layout().bytes() - PAGE_SIZE;
                for at in [0, bytes / 2, bytes] {
                    // The rest of the memory may be holes.
                    to.ram()
                        .try_write(RamPage(at / PAGE_SIZE), &[0xaa; 4096])
                        .unwrap();
                }
                let high = pages - 200..pages;
                for page in high.clone() {
                    to.ram().try_write(RamPage(page), &[0xaa; 4096]).unwrap();
                }
                let source =
                    with_ram(engine, GuestRam::new(to.ram().layout().clone()).unwrap()).boot();
                let data = RamPage(high.start + 100);
                source.ram().try_write(data, b"from the source").unwrap();
                source.wait_progress(64);
                let destination = listen(DestinationConfig {
                    delivery,
                    allocate,
                    ..DestinationConfig::default()
                });
                let config = SourceConfig {
                    settings: Switch::AfterPasses(passes).into(),
                    ..SourceConfig::default()
                };
                std::thread::scope(|scope| {
                    let receiver =
                        scope.spawn(|| receive_as(&to.running(), &to.resolver, &destination));
                    migrate_to(&source, &address_of(&destination), &config).unwrap();
                    receiver.join().unwrap().unwrap();
                });
                to.wait_progress(64);
                to.assert_verifies();
                for page in high {
                    let (mut here, mut there) = ([0; 4096], [0; 4096]);
                    source.ram().try_read(RamPage(page), &mut here).unwrap();
                    to.ram().try_read(RamPage(page), &mut there).unwrap();
                    assert!(here == there, "{name}: page {page} has {:x?}", &there[..4]);
                }
            }
        }
    }
}
