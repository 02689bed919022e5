//! A VM that its owner has paused moves, and arrives paused. The owner pauses and resumes it on
//! either side, but never on both.

use crate::recovery::{Ends, Stage, moved, moved_slowly, source_config, wait_for_handover};
use crate::support::{
    LIMIT, WorkloadVm, address_of, kvm_usable, listen, migrate_running, move_vm, receive_as,
};
use pageferry_machine::{Apply, Device, Engine, MachineError};
use pageferry_migration::{
    Change, DestinationConfig, DestinationVm, MigrationError, RunningVm, SourceConfig,
    SourceSession, SourceVm, Switch,
};
use pageferry_testkit::shaper::{Plan, Which};
use pageferry_testkit::wait_until;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const MIB: u64 = 1 << 20;

/// A VM with data in most of its pages.
fn filled(engine: Engine) -> WorkloadVm {
    let vm = WorkloadVm::booted(engine, 2, 16 * MIB);
    vm.wait_progress(vm.workload.memory_map().share_pages());
    vm
}

fn pause(vm: &WorkloadVm) {
    vm.threads.pause(LIMIT).unwrap();
}

/// The progress of all vCPUs.
fn done(vm: &WorkloadVm) -> Vec<u64> {
    let vcpus = vm.workload.memory_map().vcpus();
    (0..vcpus).map(|vcpu| vm.done(vcpu)).collect()
}

/// The VM is paused, has done nothing since `before`, and every page is right. It runs on when its
/// owner wants.
#[track_caller]
fn assert_paused_and_whole(vm: &WorkloadVm, before: &[u64]) {
    assert!(vm.threads.is_paused());
    assert_eq!(done(vm), before, "the guest ran");
    vm.assert_verifies();
    vm.threads.resume();
    vm.wait_progress(vm.workload.memory_map().share_pages());
    vm.assert_verifies();
}

fn engines(test: &str) -> Vec<Engine> {
    let mut engines = vec![Engine::Soft];
    engines.extend(kvm_usable(test).then_some(Engine::Kvm));
    engines
}

#[test]
fn a_paused_vm_arrives_paused_and_moves_again() {
    for engine in engines("a_paused_vm_arrives_paused_and_moves_again") {
        for passes in [0, 1] {
            let mut vm = filled(engine);
            pause(&vm);
            let before = done(&vm);
            let config = SourceConfig {
                settings: Switch::AfterPasses(passes).into(),
                ..SourceConfig::default()
            };
            for _ in 0..2 {
                let moved = move_vm(vm, &config, DestinationConfig::default());
                let (sent, received) = (moved.sent.unwrap(), moved.received.unwrap());
                assert!(sent.paused && received.paused);
                assert_eq!(received.first_instruction, None);
                assert!(moved.source.threads.is_paused());
                vm = moved.destination;
            }
            assert_paused_and_whole(&vm, &before);
        }
    }
}

#[test]
fn a_vm_that_runs_arrives_running_behind_one_that_was_paused() {
    let vm = filled(Engine::Soft);
    pause(&vm);
    let to = DestinationConfig::default;
    let first = move_vm(vm, &SourceConfig::default(), to());
    first.destination.threads.resume();
    first.destination.wait_progress(10);
    let second = move_vm(first.destination, &SourceConfig::default(), to());
    assert!(!second.sent.unwrap().paused && !second.received.unwrap().paused);
    second.destination.wait_progress(10);
    second.destination.assert_verifies();
}

/// Moves `vm`, and has its owner act in pre-copy.
fn moved_when(vm: &WorkloadVm, act: impl FnOnce(&SourceSession)) -> Ends {
    let config = SourceConfig {
        settings: Switch::Manual.into(),
        ..source_config()
    };
    moved(vm, &config, Plan::default(), |stage| {
        wait_until("a pass", || stage.session.status().passes > 0);
        assert_eq!(stage.destination.after_hand_over(|| ()), None);
        act(&stage.session);
    })
}

fn switch_now(session: &SourceSession) {
    let change = Change {
        switch: Some(Switch::AfterPasses(0)),
        ..Change::default()
    };
    session.set(&change).unwrap();
}

#[test]
fn a_vm_arrives_as_its_owner_leaves_it_in_pre_copy() {
    let vm = filled(Engine::Soft);
    let ends = moved_when(&vm, |session| {
        session.before_switch_over(|| pause(&vm)).unwrap();
        switch_now(session);
    });
    let (there, received) = ends.received.unwrap();
    assert!(ends.sent.unwrap().paused && received.unwrap().paused);
    assert_paused_and_whole(&there, &done(&vm));

    let vm = filled(Engine::Soft);
    pause(&vm);
    let ends = moved_when(&vm, |session| {
        session.before_switch_over(|| vm.threads.resume()).unwrap();
        vm.wait_progress(100);
        switch_now(session);
    });
    let (there, received) = ends.received.unwrap();
    assert!(!ends.sent.unwrap().paused && !received.unwrap().paused);
    there.wait_progress(100);
    there.assert_verifies();
}

#[test]
fn a_cancelled_move_leaves_the_vm_as_its_owner_wants_it() {
    for (before, then) in [(true, None), (false, Some(true)), (true, Some(false))] {
        let vm = filled(Engine::Soft);
        if before {
            pause(&vm);
        }
        let ends = moved_when(&vm, |session| {
            let act = |paused| {
                if paused {
                    pause(&vm);
                } else {
                    vm.threads.resume();
                }
            };
            if let Some(paused) = then {
                session.before_switch_over(|| act(paused)).unwrap();
            }
            session.cancel();
        });
        let failure = ends.sent.unwrap_err();
        assert!(
            matches!(failure.error, MigrationError::Cancelled),
            "{failure}"
        );
        assert_eq!(failure.vm, SourceVm::Runs);
        if then.unwrap_or(before) {
            assert_paused_and_whole(&vm, &done(&vm));
        } else {
            vm.wait_progress(100);
            vm.assert_verifies();
        }
    }
}

/// A device whose state cannot be taken. It counts what a migration does to it.
#[derive(Default)]
struct Stuck {
    is_paused: AtomicBool,
}

impl Device for Stuck {
    fn name(&self) -> &str {
        "stuck"
    }

    fn version(&self) -> u32 {
        1
    }

    fn pause(&self) -> Result<(), MachineError> {
        self.is_paused.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn resume(&self) {
        self.is_paused.store(false, Ordering::Relaxed);
    }

    fn save(&self) -> Result<Vec<u8>, MachineError> {
        Err(MachineError::Device("the disk does not answer".into()))
    }

    fn decode<'a>(&'a self, _: u32, _: &[u8]) -> Result<Apply<'a>, MachineError> {
        Ok(Box::new(|| ()))
    }
}

fn with<'a>(vm: &RunningVm<'a>, devices: &'a [Arc<dyn Device>]) -> RunningVm<'a> {
    RunningVm { devices, ..*vm }
}

#[test]
fn a_failed_switch_over_leaves_a_paused_vm_paused() {
    for paused in [true, false] {
        let vm = filled(Engine::Soft);
        if paused {
            pause(&vm);
        }
        let stuck = [Arc::new(Stuck::default()), Arc::new(Stuck::default())];
        let [here, there] = stuck.each_ref().map(|s| [Arc::clone(s) as Arc<dyn Device>]);
        let to = WorkloadVm::empty(Engine::Soft, 2, 16 * MIB);
        let destination = listen(DestinationConfig::default());
        let failure = std::thread::scope(|scope| {
            scope.spawn(|| {
                let vm = to.running();
                let received = receive_as(&with(&vm, &there), &to.resolver, &destination);
                assert_eq!(received.unwrap_err().vm, DestinationVm::Discarded);
            });
            let vm = vm.running();
            let address = address_of(&destination);
            migrate_running(&with(&vm, &here), &address, &source_config()).unwrap_err()
        });
        assert!(failure.to_string().contains("the disk does not answer"));
        assert!(!stuck[0].is_paused.load(Ordering::Relaxed));
        assert!(to.threads.is_paused());
        if paused {
            assert_paused_and_whole(&vm, &done(&vm));
        } else {
            vm.wait_progress(100);
            vm.assert_verifies();
        }
    }
}

/// Loses every connection, and waits for others.
fn lose_all(stage: &Stage) {
    let before = stage.session.status().generation;
    stage.shaper.reset(Which::All);
    wait_until("another generation", || {
        let status = stage.session.status();
        status.generation > before && status.connected || status.stage == "completed"
    });
}

#[test]
fn the_pages_of_a_paused_vm_come_over_lost_connections() {
    let vm = filled(Engine::Soft);
    pause(&vm);
    let ends = moved_slowly(&vm, &source_config(), |stage| {
        wait_for_handover(stage);
        lose_all(stage);
        lose_all(stage);
        assert!(stage.session.status().paused && stage.destination.status().paused);
    });
    let sent = ends.sent.unwrap();
    assert!(sent.reconnects > 0);
    assert_eq!(sent.pages.urgent, 0, "nobody waits for a page");
    let (there, received) = ends.received.unwrap();
    assert!(received.unwrap().paused);
    assert_paused_and_whole(&there, &done(&vm));
}

#[test]
fn only_the_owner_at_the_destination_acts_after_the_hand_over() {
    let vm = filled(Engine::Soft);
    pause(&vm);
    let (before, resumed) = (done(&vm), AtomicBool::new(false));
    let ends = moved_slowly(&vm, &source_config(), |stage| {
        wait_for_handover(stage);
        let here = stage.session.before_switch_over(|| vm.threads.resume());
        assert_eq!(here, None, "the VM is at the destination");
        let act = || resumed.store(true, Ordering::Relaxed);
        stage.destination.after_hand_over(act).unwrap();
        lose_all(stage);
    });
    assert!(resumed.into_inner());
    ends.sent.unwrap();
    assert!(vm.threads.is_paused());
    let (there, _) = ends.received.unwrap();
    assert_paused_and_whole(&there, &before);
}

#[test]
fn a_paused_vm_whose_pages_never_come_stays_paused_at_both_sides() {
    let vm = filled(Engine::Soft);
    pause(&vm);
    let before = done(&vm);
    let ends = moved_slowly(&vm, &source_config(), |stage| {
        wait_for_handover(stage);
        stage.shaper.refuse(true);
        stage.shaper.reset(Which::All);
        stage.destination.give_up();
        wait_until("the end there", || {
            stage.destination.status().stage == "incomplete"
        });
        let late = stage.destination.after_hand_over(|| ());
        assert_eq!(late, None, "it must not run without its pages");
        stage.session.resume_here();
        wait_until("the end here", || stage.session.status().is_over());
        assert_eq!(stage.session.before_switch_over(|| 7), Some(7));
    });
    assert_eq!(ends.sent.unwrap_err().vm, SourceVm::Forced);
    let (there, received) = ends.received.unwrap();
    let failure = received.unwrap_err();
    assert!(
        matches!(
            failure.vm,
            DestinationVm::PausedIncomplete { missing: 1.., .. }
        ),
        "{failure}"
    );
    assert!(there.threads.is_paused());
    assert_paused_and_whole(&vm, &before);
}
