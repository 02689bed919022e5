//! The behaviour of Linux's `tools/testing/selftests/kvm/mmu_stress_test.c`: all vCPUs fault a
//! large memory of many slots. One pass stores, one loads from read-only slots, and one stores
//! again. Meanwhile a notifier unmaps random parts.

use crate::support::fleet::{LARGE, LargeRam, dirty_log, named, no_exit, run_until_halted};
use crate::support::programs::{self, CHECK, STORE};
use crate::support::vm::PAGE;
use pageferry_addr::Gpa;
use pageferry_hypervisor::{Exit, Region, SlotFlags, VcpuCore, Vm, VmConfig};
use pageferry_testkit::{LIMIT, Random};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The number of vCPUs. There is one slot for each.
const VCPUS: u64 = 8;
const SLOT_PAGES: u64 = 4 * LARGE;
const PAGES: u64 = VCPUS * SLOT_PAGES;
const MEMORY: u64 = 0x8000_0000;
/// The least number of rounds of the three passes.
const ROUNDS: u64 = 2;

struct Test {
    vm: Vm,
    ram: Arc<LargeRam>,
}

impl Test {
    fn new() -> (Self, Vec<VcpuCore>) {
        let code = programs::code();
        let vm = Vm::new(VmConfig::default());
        vm.set_user_memory_region2(code.region(0, 0, 0, 1)).unwrap();
        let vcpus = (0..VCPUS as u32)
            .map(|id| vm.create_vcpu(id).unwrap())
            .collect();
        let ram = LargeRam::new(PAGES / LARGE);
        let test = Self { vm, ram };
        (0..VCPUS).for_each(|id| test.create(id, SlotFlags::EMPTY));
        (test, vcpus)
    }

    /// Gives all slots other flags. It makes them again, because a read-only slot cannot become
    /// writable.
    fn flags(&self, flags: SlotFlags) {
        for id in 0..VCPUS {
            self.vm
                .set_user_memory_region2(Region::delete(slot(id)))
                .unwrap();
            self.create(id, flags);
        }
    }

    fn create(&self, id: u64, flags: SlotFlags) {
        let region = Region {
            gpa: Gpa(gpa(id, 0)),
            hva: self.ram.hva(id * SLOT_PAGES),
            size: SLOT_PAGES * PAGE,
            ..self.ram.region(slot(id), MEMORY, flags)
        };
        self.vm.set_user_memory_region2(region).unwrap();
    }

    /// The tag of the last store to page `page` of slot `id`: its word minus the page's address.
    fn tag(&self, id: u64, page: u64) -> u64 {
        let there = self.ram.get((id * SLOT_PAGES + page) * PAGE);
        there.wrapping_sub(gpa(id, page))
    }
}

const fn slot(id: u64) -> u16 {
    1 + id as u16
}

const fn gpa(id: u64, page: u64) -> u64 {
    MEMORY + (id * SLOT_PAGES + page) * PAGE
}

/// Makes each vCPU begin `program` in the slot of the vCPU's number plus `shift`.
fn start(vcpus: &mut [VcpuCore], program: u64, tag: u64, shift: u64) {
    for (id, vcpu) in (0..).zip(vcpus) {
        let id = (id + shift) % VCPUS;
        programs::begin(vcpu, program, tag, gpa(id, 0), gpa(id, SLOT_PAGES));
    }
}

#[test]
fn all_vcpus_fault_a_large_memory_in_passes_under_a_notifier() {
    let (test, mut vcpus) = Test::new();
    let (vm, ram) = (&test.vm, &test.ram);
    let done = AtomicBool::new(false);
    let unmapped = AtomicU64::new(0);
    let (mut rounds, mut halved) = (0, 0);
    std::thread::scope(|scope| {
        let _done = SetOnDrop(&done);
        let (done, unmapped) = (&done, &unmapped);
        scope.spawn(move || {
            let mut random = Random::new(17);
            while !done.load(Ordering::Relaxed) {
                let first = random.next() % PAGES;
                let pages = (random.next() % 64).min(PAGES - first);
                let zapped = vm.invalidate_hva(ram.hvas(first, pages));
                unmapped.fetch_add(zapped, Ordering::Relaxed);
                std::thread::yield_now();
            }
        });
        let begin = Instant::now();
        while rounds < ROUNDS || halved == 0 || begin.elapsed() < Duration::from_secs(1) {
            assert!(begin.elapsed() < LIMIT, "{rounds} rounds, {halved} halved");
            let tag = 8 * rounds;
            // Each vCPU uses a slot that another vCPU has used before.
            let shift = rounds % VCPUS;
            rounds += 1;

            // 1. All store everywhere.
            test.flags(SlotFlags::EMPTY);
            start(&mut vcpus, STORE, tag + 1, shift);
            run_until_halted(&mut vcpus, no_exit);

            // 2. The slots are read-only: all load everywhere, and no store arrives.
            test.flags(SlotFlags::READONLY);
            start(&mut vcpus, CHECK, tag + 1, shift + 1);
            run_until_halted(&mut vcpus, no_exit);
            let refused: Vec<_> = vcpus.iter().map(|_| Mutex::new(Vec::new())).collect();
            let refuse = |index: usize, vcpu: &mut VcpuCore, exit| match exit {
                Exit::MmioWrite { gpa, size: 8, .. } => refused[index].lock().unwrap().push(gpa.0),
                other => no_exit(index, vcpu, other),
            };
            start(&mut vcpus, STORE, tag + 2, shift + 2);
            run_until_halted(&mut vcpus, refuse);
            for (id, refused) in (0..).zip(&refused) {
                let id = (id + shift + 2) % VCPUS;
                let all: Vec<_> = (0..SLOT_PAGES).map(|page| gpa(id, page)).collect();
                assert_eq!(*refused.lock().unwrap(), all, "slot {id}");
            }
            start(&mut vcpus, CHECK, tag + 1, shift);
            run_until_halted(&mut vcpus, no_exit);

            // 3. The slots are writable again, and logged: all store everywhere, and the log has
            //    all pages.
            test.flags(SlotFlags::LOG_DIRTY_PAGES);
            start(&mut vcpus, STORE, tag + 3, shift + 3);
            let mut logged = vec![false; PAGES as usize];
            std::thread::scope(|scope| {
                let vcpus = scope.spawn(|| run_until_halted(&mut vcpus, no_exit));
                let mut finished = false;
                while !finished {
                    // Fetches once more after they have halted.
                    finished = vcpus.is_finished();
                    for id in 0..VCPUS {
                        let log = dirty_log(vm, slot(id), SLOT_PAGES);
                        for page in named(&log) {
                            logged[(id * SLOT_PAGES + page) as usize] = true;
                        }
                    }
                }
            });
            let missing = logged.iter().position(|logged| !logged);
            assert_eq!(missing, None, "a page that was stored to is in no log");

            // 4. The slots become read-only during the stores: stores arrive until one moment, and
            //    not later.
            test.flags(SlotFlags::EMPTY);
            start(&mut vcpus, STORE, tag + 4, shift);
            let refused: Vec<_> = vcpus.iter().map(|_| Mutex::new(Vec::new())).collect();
            let refuse = |index: usize, vcpu: &mut VcpuCore, exit| match exit {
                Exit::MmioWrite { gpa, size: 8, .. } => refused[index].lock().unwrap().push(gpa.0),
                other => no_exit(index, vcpu, other),
            };
            std::thread::scope(|scope| {
                let running = scope.spawn(|| run_until_halted(&mut vcpus, refuse));
                let arrived = || (0..VCPUS).any(|id| test.tag(id, 16) == tag + 4);
                while !arrived() && !running.is_finished() {
                    std::thread::yield_now();
                }
                test.flags(SlotFlags::READONLY);
            });
            for (id, refused) in (0..).zip(&refused) {
                let (id, refused) = ((id + shift) % VCPUS, refused.lock().unwrap());
                let arrived = SLOT_PAGES - refused.len() as u64;
                let expected: Vec<_> = (arrived..SLOT_PAGES).map(|page| gpa(id, page)).collect();
                assert_eq!(*refused, expected, "slot {id}");
                for page in 0..SLOT_PAGES {
                    let expected = tag + if page < arrived { 4 } else { 3 };
                    assert_eq!(
                        test.tag(id, page),
                        expected,
                        "slot {id}, page {page} of {arrived}"
                    );
                }
                halved += u64::from(arrived != 0 && !refused.is_empty());
            }
        }
    });
    let unmapped = unmapped.into_inner();
    println!("{rounds} rounds, {halved} slots protected under stores, {unmapped} pages unmapped");
    assert!(unmapped > 0);
    assert!(test.vm.mapped_pages() <= PAGES + 1);
}

/// Sets the flag when dropped, also during a panic.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
