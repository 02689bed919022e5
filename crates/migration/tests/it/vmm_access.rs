//! The VMM's own accesses to the memory of a VM that moves, on both engines and by every fault
//! delivery.

use crate::scripted::source::{ScriptedSource, Template};
use crate::scripted::{SOON, ends_soon};
use crate::support::{
    LIMIT, WorkloadVm, address_of, engine_of, kvm_deliveries, kvm_usable, listen, migrate_running,
    receive_as,
};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_guest::{MemoryMap, Touch, TouchAccess, TouchOrder, Toucher};
use pageferry_harness::{Vm, isa_of};
use pageferry_machine::{AccessError, Backing, Delivery, Engine, GuestRam, MachineSpec};
use pageferry_migration::wire::{Frame, FrameType, PAGE_BYTES};
use pageferry_migration::{
    Destination, DestinationConfig, DestinationFailure, DestinationReport, DestinationVm,
    SourceConfig, Switch,
};
use pageferry_testkit::{Random, wait_until};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// Both engines, with all deliveries of this host.
pub(crate) fn engines(test: &str) -> Vec<(Engine, Option<Delivery>)> {
    let mut all = vec![(Engine::Soft, None)];
    if kvm_usable(test) {
        let deliveries = kvm_deliveries(test).into_iter();
        all.extend(deliveries.map(|delivery| (Engine::Kvm, Some(delivery))));
    }
    all
}

fn never() -> bool {
    false
}

/// A VM whose guest writes the first half of its data pages again and again. The VMM has the rest.
fn half_busy(engine: Engine) -> (Vm, Range<u64>) {
    let spec = MachineSpec::new(1, 16 * MIB);
    let map = MemoryMap::new(isa_of(engine), 1, spec.memory_bytes).unwrap();
    let data = map.data();
    let middle = data.start + (data.end - data.start) / 2;
    let busy = data.start..middle;
    let touch = Touch {
        access: TouchAccess::Write,
        order: TouchOrder::Random,
        passes: 0,
    };
    let toucher = Toucher::new(map, vec![busy], touch).unwrap();
    let vm = Vm::create(engine, spec, None).unwrap();
    vm.load(toucher.program()).unwrap();
    (vm, middle..data.end)
}

/// The right bytes of the VMM's pages.
struct Expected {
    first: u64,
    pages: Mutex<Vec<[u8; PAGE_BYTES]>>,
}

impl Expected {
    fn new(own: &Range<u64>, ram: &GuestRam) -> Self {
        let pages: Vec<_> = own
            .clone()
            .map(|page| std::array::from_fn(|at| (page as usize * 13 + at * 7) as u8))
            .collect();
        for (page, bytes) in own.clone().zip(&pages) {
            ram.try_write(RamPage(page), bytes).unwrap();
        }
        Self {
            first: own.start,
            pages: Mutex::new(pages),
        }
    }

    /// Writes some bytes to some page by `write`.
    fn change(
        &self,
        random: &mut Random,
        write: impl FnOnce((RamPage, u64), &[u8]) -> Result<(), AccessError>,
    ) -> Result<(), AccessError> {
        let mut pages = self.pages.lock().unwrap();
        let index = random.below(pages.len() as u64) as usize;
        let (at, value) = (
            random.below(PAGE_SIZE - 8),
            random.below(1 << 60).to_le_bytes(),
        );
        write((RamPage(self.first + index as u64), at), &value)?;
        pages[index][at as usize..][..8].copy_from_slice(&value);
        Ok(())
    }

    fn check(&self, page: u64, ram: &GuestRam) {
        let mut bytes = [0; PAGE_BYTES];
        ram.read(RamPage(page), &mut bytes, &never).unwrap();
        let expected = self.pages.lock().unwrap()[(page - self.first) as usize];
        assert!(bytes == expected, "page {page}");
    }
}

/// Moves a VM. A thread of the source's VMM writes until the source is frozen, and a thread of the
/// destination's VMM reads and writes from the start of post-copy on.
fn move_beside_vmm_threads(
    engine: Engine,
    backing: Backing,
    delivery: Option<Delivery>,
    passes: u32,
) {
    let (source, own) = half_busy(engine);
    let expected = Expected::new(&own, source.machine.ram());
    let to = WorkloadVm::empty_on(backing, engine, 1, 16 * MIB);
    let (from_ram, to_ram) = (source.machine.ram(), to.ram());
    let destination = listen(DestinationConfig {
        delivery,
        allocate: backing != Backing::Anonymous,
        ..DestinationConfig::default()
    });
    source.threads.resume();
    std::thread::scope(|scope| {
        let (expected, own) = (&expected, &own);
        let writing = scope.spawn(move || {
            let mut random = Random::new(1);
            for writes in 0.. {
                match expected.change(&mut random, |at, bytes| from_ram.try_write(at, bytes)) {
                    Ok(()) => std::thread::sleep(Duration::from_micros(50)),
                    Err(AccessError::Frozen) => return writes,
                    Err(error) => panic!("{error}"),
                }
            }
            unreachable!("memory is frozen at last")
        });
        let receiving = scope.spawn(|| receive_as(&to.running(), &to.resolver, &destination));
        let reading = scope.spawn(move || {
            // The source freezes its memory after the destination was armed.
            let writes: u64 = writing.join().unwrap();
            wait_until("post-copy", || {
                to_ram.try_read(RamPage(0), &mut [0]) != Err(AccessError::Receiving)
            });
            let mut random = Random::new(2);
            for _ in 0..2 * (own.end - own.start) {
                let page = own.start + random.below(own.end - own.start);
                expected.check(page, to_ram);
                let write = |at, bytes: &[u8]| to_ram.write(at, bytes, &never);
                expected.change(&mut random, write).unwrap();
            }
            writes
        });
        let config = SourceConfig {
            settings: Switch::AfterPasses(passes).into(),
            push_after: Duration::from_millis(300),
            ..SourceConfig::default()
        };
        migrate_running(&source.running(), &address_of(&destination), &config).unwrap();
        let report = receiving.join().unwrap().unwrap();
        let writes = reading.join().unwrap();
        eprintln!(
            "{engine} {backing} {delivery:?} passes {passes}: {writes} writes, {:?}",
            report.pages
        );
        assert!(report.pages.urgent > 0);
    });
    own.clone().for_each(|page| expected.check(page, to.ram()));
    to.threads.pause(LIMIT).unwrap();
}

#[test]
fn vmm_threads_find_and_change_every_byte_of_a_vm_that_moves() {
    for (engine, delivery) in engines("VMM threads beside a move") {
        for passes in [0, 2] {
            move_beside_vmm_threads(engine, Backing::Shmem, delivery, passes);
            if delivery.is_none_or(|delivery| delivery == Delivery::Missing) {
                move_beside_vmm_threads(engine, Backing::Anonymous, delivery, passes);
            }
        }
    }
}

fn without_allocation(delivery: Option<Delivery>) -> DestinationConfig {
    DestinationConfig {
        delivery,
        allocate: false,
        ..DestinationConfig::default()
    }
}

/// Receives a VM from `script`, while `vmm` runs.
pub(crate) fn receive_beside(
    template: &Template,
    config: DestinationConfig,
    script: impl FnOnce(&mut ScriptedSource<'_>) + Send,
    vmm: impl FnOnce(&WorkloadVm, &Destination),
) -> (WorkloadVm, Result<DestinationReport, DestinationFailure>) {
    let destination = listen(config);
    let engine = engine_of(&*template.vm.machine);
    let bytes = template.pages() * PAGE_SIZE;
    let vm = WorkloadVm::empty(engine, template.vcpus(), bytes);
    let outcome = std::thread::scope(|scope| {
        let peer = scope.spawn(|| {
            let mut source = ScriptedSource::connect(template, &address_of(&destination));
            script(&mut source);
            source.last_frame();
        });
        let receiving = scope.spawn(|| receive_as(&vm.running(), &vm.resolver, &destination));
        vmm(&vm, &destination);
        peer.join().unwrap();
        receiving.join().unwrap()
    });
    (vm, outcome)
}

/// Starts the guest, and answers its requests until one for `page` comes.
fn start_and_answer_until(peer: &mut ScriptedSource<'_>, page: u64) {
    peer.start();
    loop {
        match peer.request() {
            asked if asked == page => return,
            other => peer.answer(other),
        }
    }
}

#[test]
fn a_vmm_thread_that_waits_for_a_page_ends_its_wait_when_the_vm_is_paused() {
    for (engine, delivery) in engines("a VMM thread's wait and a pause") {
        let template = &Template::new(engine, 1, 8 * MIB);
        let page = template.missing[template.missing.len() / 2];
        let asked = &AtomicBool::new(false);
        let (go_on, paused) = channel();
        let script = move |peer: &mut ScriptedSource<'_>| {
            start_and_answer_until(peer, page);
            asked.store(true, Ordering::Release);
            paused.recv_timeout(LIMIT).expect("the pause");
            peer.complete();
        };
        let (vm, outcome) = receive_beside(
            template,
            without_allocation(delivery),
            script,
            move |vm, _| {
                let mut bytes = [0; PAGE_BYTES];
                wait_until("post-copy", || vm.is_missing(RamPage(page)));
                // The guest may not run yet.
                let pausing = AtomicBool::new(false);
                let (read, began) = std::thread::scope(|scope| {
                    let paused = || pausing.load(Ordering::Acquire) && vm.threads.is_paused();
                    let reading = scope.spawn(move || {
                        let at = RamPage(page);
                        vm.ram().read(at, &mut [0; PAGE_BYTES], &paused)
                    });
                    wait_until("the request", || asked.load(Ordering::Acquire));
                    assert!(!reading.is_finished(), "the page is not here");
                    let began = Instant::now();
                    pausing.store(true, Ordering::Release);
                    vm.threads.pause(LIMIT).unwrap();
                    (reading.join().unwrap(), began)
                });
                assert_eq!(read, Err(AccessError::Stopped(RamPage(page))));
                assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
                go_on.send(()).unwrap();
                // The page was claimed before. A second wait asks for nothing, and finds it.
                vm.ram().read(RamPage(page), &mut bytes, &never).unwrap();
                assert!(bytes == template.page(page));
                vm.threads.resume();
            },
        );
        outcome.unwrap();
        vm.wait_progress(64);
        vm.assert_verifies();
    }
}

#[test]
fn a_session_that_ends_is_an_error_for_a_vmm_thread_that_waits_and_for_the_next() {
    for (engine, delivery) in engines("a VMM thread's wait and the end of a session") {
        let template = Template::new(engine, 1, 8 * MIB);
        let page = RamPage(template.missing[template.missing.len() / 2]);
        let script = |peer: &mut ScriptedSource<'_>| {
            start_and_answer_until(peer, page.0);
            peer.close();
        };
        let config = without_allocation(delivery);
        let (vm, outcome) = receive_beside(&template, config, script, |vm, destination| {
            wait_until("post-copy", || vm.is_missing(page));
            // A lost connection alone only costs waiting.
            let lost = std::thread::scope(|scope| {
                let reading = scope.spawn(|| vm.ram().read(page, &mut [0], &never));
                wait_until("the loss", || {
                    let status = destination.status();
                    status.stage == "running" && !status.connected
                });
                assert!(!reading.is_finished(), "the page is not here");
                destination.give_up();
                ends_soon("a read", || reading.join().unwrap())
            });
            let Err(AccessError::Lost { page: of, why }) = &lost else {
                panic!("{lost:?}");
            };
            assert_eq!(*of, page);
            assert!(
                why.contains("connection") || why.contains("failed"),
                "{why}"
            );
        });
        let failure = outcome.unwrap_err();
        assert!(
            matches!(failure.vm, DestinationVm::PausedIncomplete { .. }),
            "{failure}"
        );
        let later = ends_soon("a read", || vm.ram().write(page, &[0], &never));
        assert!(matches!(later, Err(AccessError::Lost { .. })), "{later:?}");
        // The pages that are here are reached all the same.
        vm.ram().try_read(RamPage(0), &mut [0]).unwrap();
    }
}

/// The ends of a session whose VM has never run here, by either side. The source has said
/// SwitchOver.
#[derive(Clone, Copy, Debug)]
enum Discard {
    /// The source cancels.
    Cancel,
    /// The source comes back, and says that it has cancelled.
    ComesBack,
    /// The destination's operator gives up, and the source hears of it.
    GiveUp,
    /// The destination's operator gives up twice: the source stays away.
    GiveUpAlone,
}

#[test]
fn a_copy_that_is_discarded_is_an_error_for_a_vmm_thread_that_waits_and_for_the_next() {
    use pageferry_migration::wire::SourceStage;
    for (engine, delivery) in engines("a VMM thread's wait and a discarded copy") {
        let template = Template::new(engine, 1, 8 * MIB);
        let page = RamPage(template.missing[template.missing.len() / 2]);
        for end in [
            Discard::Cancel,
            Discard::ComesBack,
            Discard::GiveUp,
            Discard::GiveUpAlone,
        ] {
            let (go_on, waits) = channel();
            let script = move |peer: &mut ScriptedSource<'_>| {
                peer.until_ready();
                waits.recv_timeout(LIMIT).expect("the wait");
                match end {
                    Discard::Cancel => peer.send(&Frame::Cancel),
                    Discard::ComesBack => {
                        peer.close();
                        peer.resume(SourceStage::Cancelled);
                    }
                    Discard::GiveUp => {}
                    Discard::GiveUpAlone => return peer.close(),
                }
                if !matches!(end, Discard::ComesBack) {
                    peer.expect(FrameType::Discarded);
                }
                peer.send(&Frame::DiscardHeard);
            };
            let config = without_allocation(delivery);
            let (vm, outcome) = receive_beside(&template, config, script, |vm, destination| {
                wait_until("post-copy", || vm.is_missing(page));
                let waiting = || destination.status().waiting_faults > 0;
                std::thread::scope(|scope| {
                    let reading = scope.spawn(|| vm.ram().read(page, &mut [0], &never));
                    wait_until("the wait", waiting);
                    go_on.send(()).unwrap();
                    if matches!(end, Discard::GiveUp | Discard::GiveUpAlone) {
                        destination.give_up();
                    }
                    if matches!(end, Discard::GiveUpAlone) {
                        // Requests that come together count as one: the first must have been taken.
                        wait_until("the loss", || {
                            let status = destination.status();
                            !status.connected && status.stage == "discarded"
                        });
                        destination.give_up();
                    }
                    let read = ends_soon("a read", || reading.join().unwrap());
                    let why = format!("{engine} {delivery:?} {end:?}: {read:?}");
                    assert!(matches!(read, Err(AccessError::Lost { .. })), "{why}");
                    assert!(why.contains("discarded"), "{why}");
                });
            });
            assert_eq!(outcome.unwrap_err().vm, DestinationVm::Discarded, "{end:?}");
            let later = ends_soon("a write", || vm.ram().write(page, &[0], &never));
            assert!(matches!(later, Err(AccessError::Lost { .. })), "{later:?}");
        }
    }
}

#[test]
fn a_vm_whose_pages_are_missing_does_not_move_on() {
    for (engine, delivery) in engines("a VM that is not whole") {
        let template = &Template::new(engine, 1, 8 * MIB);
        let (go_on, tried) = channel();
        let script = move |peer: &mut ScriptedSource<'_>| {
            peer.set_up();
            tried.recv_timeout(LIMIT).expect("the first try");
            peer.send_pass();
            peer.send_states();
            peer.send(&template.switch_over());
            peer.expect(FrameType::Ready);
            peer.go();
            tried.recv_timeout(LIMIT).expect("the second try");
            peer.complete();
        };
        let config = without_allocation(delivery);
        let (vm, outcome) = receive_beside(template, config, script, |vm, destination| {
            let next = listen(DestinationConfig::default());
            for stage in ["receiving", "running"] {
                wait_until(stage, || destination.status().stage == stage);
                let moved =
                    migrate_running(&vm.running(), &address_of(&next), &SourceConfig::default());
                let failure = moved.unwrap_err();
                assert_eq!(failure.vm, pageferry_migration::SourceVm::Runs);
                let why = failure.to_string();
                assert!(why.contains("missing") || why.contains("not here"), "{why}");
                go_on.send(()).unwrap();
            }
        });
        outcome.unwrap();
        vm.wait_progress(64);
        vm.assert_verifies();
    }
}

#[test]
fn the_memory_of_a_discarded_vm_is_never_accessed() {
    for (engine, delivery) in engines("a discarded VM") {
        let template = Template::new(engine, 1, 8 * MIB);
        let script = |peer: &mut ScriptedSource<'_>| {
            peer.set_up();
            peer.send_pass();
            peer.close();
        };
        let (vm, outcome) =
            receive_beside(&template, without_allocation(delivery), script, |_, _| {});
        assert_eq!(outcome.unwrap_err().vm, DestinationVm::Discarded);
        let read = vm.ram().read(RamPage(0), &mut [0], &never);
        assert_eq!(read, Err(AccessError::Receiving));
    }
}
