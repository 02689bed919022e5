//! Connections die, freeze and half-close after the hand-over, and the VM goes on.

use crate::scripted::LONG;
use crate::support::{WorkloadVm, address_of, listen, try_receive_on};
use pageferry_machine::{Backing, Engine};
use pageferry_migration::{
    Destination, DestinationConfig, DestinationFailure, DestinationReport, DestinationVm, Limits,
    Route, SourceConfig, SourceFailure, SourceReport, SourceSession, SourceVm, Switch, Unobserved,
    migrate,
};
use pageferry_testkit::certificates::{Authority, Validity};
use pageferry_testkit::shaper::{Direction, Plan, Schedule, Shaper, Which};
use pageferry_testkit::{rotating_seeds, wait_until};
use pageferry_transport::address::Address;
use pageferry_transport::channel::Listener;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// Schedules mostly wait, so several run at once.
const SCHEDULES_AT_ONCE: usize = 6;

fn limits() -> Limits {
    Limits {
        dead_after: Duration::from_millis(400),
        ..Limits::default()
    }
}

pub(crate) fn source_config() -> SourceConfig {
    SourceConfig {
        settings: Switch::AfterPasses(0).into(),
        bulk_channels: 2,
        urgent_channels: 2,
        limits: limits(),
        ..SourceConfig::default()
    }
}

fn socket_address(address: &Address) -> SocketAddr {
    address
        .to_string()
        .trim_start_matches("tcp:")
        .parse()
        .unwrap()
}

fn route(address: SocketAddr) -> Route {
    Route::To(Address::Tcp {
        host: address.ip().to_string(),
        port: address.port(),
    })
}

/// Both ends of a session, with a shaper between them.
pub(crate) struct Stage {
    pub(crate) shaper: Shaper,
    pub(crate) session: SourceSession,
    pub(crate) destination: Arc<Destination>,
}

/// How a migration ended at its two ends. The destination has a VM if it has heard an offer.
pub(crate) struct Ends {
    pub(crate) sent: Result<SourceReport, SourceFailure>,
    pub(crate) received: Option<(WorkloadVm, Result<DestinationReport, DestinationFailure>)>,
}

/// Moves `vm` through a shaper, while `act` runs.
pub(crate) fn moved(
    vm: &WorkloadVm,
    config: &SourceConfig,
    plan: Plan,
    act: impl FnOnce(&Stage),
) -> Ends {
    moved_to(vm, config, DestinationConfig::default(), plan, act)
}

/// Moves `vm` through a shaper to a destination with this configuration, while `act` runs.
fn moved_to(
    vm: &WorkloadVm,
    config: &SourceConfig,
    to: DestinationConfig,
    plan: Plan,
    act: impl FnOnce(&Stage),
) -> Ends {
    let destination = listen(DestinationConfig {
        limits: config.limits.clone(),
        ..to
    });
    let shaper = Shaper::start(socket_address(&address_of(&destination)), plan).unwrap();
    let stage = Stage {
        session: SourceSession::new().unwrap(),
        shaper,
        destination,
    };
    let failed = AtomicBool::new(false);
    let stop = || failed.load(Ordering::Acquire);
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| try_receive_on(Backing::Shmem, &stage.destination, &stop));
        let sender = scope.spawn(|| {
            let route = route(stage.shaper.addr());
            let running = vm.running();
            let sent = migrate(
                &running,
                &route,
                b"test",
                config,
                &stage.session,
                &Unobserved,
            );
            failed.store(sent.is_err(), Ordering::Release);
            sent
        });
        let unwound = Unwound(&stage, &failed);
        act(&stage);
        drop(unwound);
        Ends {
            sent: sender.join().unwrap(),
            received: receiver.join().unwrap(),
        }
    })
}

/// Ends both sides if the test panics, or else it would wait for them without end.
struct Unwound<'a>(&'a Stage, &'a AtomicBool);

impl Drop for Unwound<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.1.store(true, Ordering::Release);
            self.0.destination.give_up();
            self.0.session.cancel();
            self.0.session.resume_here();
        }
    }
}

/// Waits until the guest runs at the destination.
pub(crate) fn wait_for_handover(stage: &Stage) {
    wait_until("the hand-over", || {
        ["running", "complete", "completed"].contains(&stage.destination.status().stage)
    });
}

/// Checks that the source kept the VM, and that it never ran at the destination.
fn assert_kept(name: &str, source: &WorkloadVm, ends: &Ends) {
    let failure = ends.sent.as_ref().expect_err(name);
    assert_eq!(failure.vm, SourceVm::Runs, "{name}: {failure}");
    if let Some((vm, received)) = &ends.received {
        let failure = received.as_ref().expect_err(name);
        assert_eq!(failure.vm, DestinationVm::Discarded, "{name}: {failure}");
        // A busy host may not have run the new threads yet. A VM that runs never gets here.
        wait_until(name, || vm.threads.is_paused());
    }
    source.wait_progress(50);
    source.assert_verifies();
}

/// Checks that the whole VM arrived, and that it never ran at both sides.
pub(crate) fn assert_whole(source: &WorkloadVm, ends: &Ends) {
    let sent = ends.sent.as_ref().unwrap();
    let (vm, received) = ends.received.as_ref().expect("a VM");
    received.as_ref().unwrap();
    assert!(source.threads.is_paused(), "the source never resumes it");
    let share = vm.workload.memory_map().share_pages();
    vm.wait_progress(share);
    vm.assert_verifies();
    assert!(sent.pages.urgent + sent.pages.background + sent.pages.zero >= sent.missing_at_start);
}

/// A link that the pages of no VM here pass within seconds.
fn slow() -> Plan {
    Plan {
        rate: Some(500_000),
        ..Plan::default()
    }
}

/// Moves `vm` over a link that is slow while `act` runs. A busy host then acts before the end.
pub(crate) fn moved_slowly(
    vm: &WorkloadVm,
    config: &SourceConfig,
    act: impl FnOnce(&Stage),
) -> Ends {
    moved_slowly_to(vm, config, DestinationConfig::default(), act)
}

/// As [`moved_slowly`], to a destination with this configuration.
fn moved_slowly_to(
    vm: &WorkloadVm,
    config: &SourceConfig,
    to: DestinationConfig,
    act: impl FnOnce(&Stage),
) -> Ends {
    moved_to(vm, config, to, slow(), |stage| {
        act(stage);
        stage.shaper.throttle(None);
    })
}

#[test]
fn a_vm_survives_the_loss_of_all_channels_again_and_again() {
    let vm = WorkloadVm::booted(Engine::Soft, 2, 32 * MIB);
    vm.wait_progress(3000);
    let ends = moved_slowly(&vm, &source_config(), |stage| {
        wait_for_handover(stage);
        for round in 1..=3 {
            let before = stage.session.status().generation;
            stage.shaper.reset(Which::All);
            wait_until("another generation", || {
                let status = stage.session.status();
                status.generation > before && status.connected || status.stage == "completed"
            });
            eprintln!("round {round}: {:?}", stage.session.status());
        }
    });
    assert_whole(&vm, &ends);
    let reconnects = ends.sent.as_ref().unwrap().reconnects;
    assert!(reconnects >= 1, "{reconnects}");
}

#[test]
fn one_lost_channel_leaves_the_others_working() {
    let vm = WorkloadVm::booted(Engine::Soft, 2, 32 * MIB);
    vm.wait_progress(3000);
    // A busy host must not look like a silent link.
    let config = SourceConfig {
        limits: crate::scripted::limits(LONG),
        ..source_config()
    };
    let ends = moved_slowly(&vm, &config, |stage| {
        wait_for_handover(stage);
        // Connection 0 is the control channel.
        for number in 1..=4 {
            stage.shaper.reset(Which::Number(number));
            std::thread::sleep(Duration::from_millis(30));
        }
        assert_eq!(stage.session.status().generation, 1);
    });
    assert_whole(&vm, &ends);
    assert_eq!(ends.sent.unwrap().reconnects, 0);
}

#[test]
fn a_silent_link_is_noticed_and_left() {
    let vm = WorkloadVm::booted(Engine::Soft, 2, 32 * MIB);
    vm.wait_progress(3000);
    let ends = moved_slowly(&vm, &source_config(), |stage| {
        wait_for_handover(stage);
        for way in [Direction::Forward, Direction::Backward] {
            let before = stage.session.status().generation;
            let frozen: Vec<u64> = stage
                .shaper
                .connections()
                .iter()
                .map(|connection| connection.number)
                .collect();
            for number in frozen {
                stage.shaper.freeze(Which::Number(number), way);
            }
            let began = Instant::now();
            wait_until("another generation", || {
                let status = stage.session.status();
                status.generation > before && status.connected || status.stage == "completed"
            });
            eprintln!("{way:?}: {:?}", began.elapsed());
        }
    });
    assert_whole(&vm, &ends);
}

#[test]
fn another_way_is_given_while_the_first_is_gone() {
    let vm = WorkloadVm::booted(Engine::Soft, 2, 32 * MIB);
    vm.wait_progress(3000);
    let ends = moved_slowly(&vm, &source_config(), |stage| {
        wait_for_handover(stage);
        stage.shaper.refuse(true);
        stage.shaper.reset(Which::All);
        wait_until("the loss", || stage.session.status().lost_for.is_some());
        let another = Listener::bind(&Address::Tcp {
            host: "127.0.0.1".into(),
            port: 0,
        })
        .unwrap();
        let address = another.local_addr().clone();
        stage.destination.listen_also(another);
        stage.session.recover(Route::To(address));
    });
    assert_whole(&vm, &ends);
}

#[test]
fn a_vm_of_kvm_survives_the_loss_of_all_channels() {
    const NAME: &str = "a_vm_of_kvm_survives_the_loss_of_all_channels";
    if !crate::support::kvm_usable(NAME) {
        return;
    }
    let vm = WorkloadVm::booted(Engine::Kvm, 2, 64 * MIB);
    vm.wait_progress(3000);
    let ends = moved_slowly(&vm, &source_config(), |stage| {
        wait_for_handover(stage);
        for _ in 0..5 {
            stage.shaper.reset(Which::All);
            std::thread::sleep(Duration::from_millis(150));
        }
    });
    assert_whole(&vm, &ends);
}

#[test]
fn a_vm_that_waits_for_go_never_runs_twice() {
    // Cuts at many points of the switch-over: either the source keeps the VM, or it is moved whole.
    let (mut kept, mut moved_whole) = (0, 0);
    for cut in 0..12 {
        let vm = WorkloadVm::booted(Engine::Soft, 1, 4 * MIB);
        vm.wait_progress(100);
        let ends = moved(&vm, &source_config(), Plan::default(), |stage| {
            wait_until("the switch-over", || {
                !["none", "setup"].contains(&stage.session.status().stage)
            });
            std::thread::sleep(Duration::from_micros(cut * 150));
            stage.shaper.reset(Which::All);
        });
        if ends.sent.is_ok() {
            assert_whole(&vm, &ends);
            moved_whole += 1;
        } else {
            assert_kept("a cut switch-over", &vm, &ends);
            kept += 1;
        }
    }
    eprintln!("kept {kept}, moved {moved_whole}");
}

/// Runs one seeded schedule of faults.
fn play(seed: u64) {
    let vm = WorkloadVm::booted(Engine::Soft, 1, 4 * MIB);
    vm.wait_progress(200);
    let config = SourceConfig {
        settings: Switch::AfterPasses((seed % 3) as u32).into(),
        bulk_channels: 1 + (seed / 3 % 3) as u16,
        urgent_channels: 1 + (seed / 9 % 2) as u16,
        ..source_config()
    };
    let schedule = Schedule::random(seed, Duration::from_millis(500));
    let text = format!("seed {seed}: {schedule}");
    let plan = Plan {
        seed,
        rate: Some(8_000_000),
        ..Plan::default()
    };
    let ends = moved(&vm, &config, plan, |stage| {
        // Some schedules begin with the set-up, and others after the hand-over.
        if !seed.is_multiple_of(4) {
            wait_until("the hand-over", || {
                !["none", "setup", "pre-copy"].contains(&stage.session.status().stage)
            });
        }
        stage.shaper.play(&schedule);
    });
    if ends.sent.is_ok() {
        assert_whole(&vm, &ends);
    } else {
        assert_kept(&text, &vm, &ends);
    }
}

/// Runs ten of a hundred seeded schedules by the commit, or those of `PAGEFERRY_SCHEDULES`.
#[test]
fn seeded_schedules_of_faults_lose_no_page() {
    let seeds = rotating_seeds("PAGEFERRY_SCHEDULES", 10, 100);
    let next = AtomicU64::new(seeds.start);
    std::thread::scope(|scope| {
        for _ in 0..SCHEDULES_AT_ONCE {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    play(seed);
                }
            });
        }
    });
}

#[test]
fn a_vm_moves_over_tls_and_survives_losses() {
    let authority = Authority::new("CA");
    let side = authority.issue(&["localhost"], Validity::Now);
    let files = side.files(Some("localhost"));
    let memory = files.read().unwrap();
    // The destination takes the certificates from memory, as from a store of secrets.
    // A pass over the slow link takes 8 s.
    let vm = WorkloadVm::booted(Engine::Soft, 2, 4 * MIB);
    vm.wait_progress(500);
    let config = SourceConfig {
        tls: Some(files.into()),
        settings: Switch::AfterPasses(1).into(),
        ..source_config()
    };
    let to = DestinationConfig {
        tls: Some(memory.into()),
        ..DestinationConfig::default()
    };
    let ends = moved_slowly_to(&vm, &config, to, |stage| {
        wait_for_handover(stage);
        for _ in 0..3 {
            stage.shaper.reset(Which::All);
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    assert_whole(&vm, &ends);
}

#[test]
fn a_destination_of_another_ca_gets_no_vm() {
    let files = |authority: &Authority| authority.issue(&["localhost"], Validity::Now);
    let (ours, theirs) = (
        files(&Authority::new("ours")),
        files(&Authority::new("theirs")),
    );
    let vm = WorkloadVm::booted(Engine::Soft, 1, 4 * MIB);
    vm.wait_progress(50);
    let config = SourceConfig {
        tls: Some(ours.files(Some("localhost")).into()),
        ..source_config()
    };
    let to = DestinationConfig {
        tls: Some(theirs.files(Some("localhost")).into()),
        ..DestinationConfig::default()
    };
    let ends = moved_to(&vm, &config, to, Plan::default(), |_| {});
    assert_kept("another CA", &vm, &ends);
    assert!(ends.received.is_none(), "it never heard an offer");
    let failure = ends.sent.unwrap_err().to_string();
    let sentence = "no CA of this side signed the peer's certificate";
    assert!(failure.contains(sentence), "{failure}");
}

#[test]
fn an_operator_ends_a_session_whose_other_side_is_gone() {
    let vm = WorkloadVm::booted(Engine::Soft, 1, 16 * MIB);
    vm.wait_progress(2000);
    let ends = moved_slowly(&vm, &source_config(), |stage| {
        wait_for_handover(stage);
        stage.session.cancel();
        stage.shaper.refuse(true);
        stage.shaper.reset(Which::All);
        wait_until("the loss", || {
            stage.session.status().lost_for.is_some()
                && stage.destination.status().lost_for.is_some()
        });
        let status = stage.session.status();
        assert!(
            status.stage == "handed-over" && status.last_loss.is_some(),
            "{status:?}"
        );
        stage.session.give_up();
        stage.destination.give_up();
    });
    let failure = ends.sent.unwrap_err();
    assert_eq!(failure.vm, SourceVm::GivenUp);
    assert!(
        vm.threads.is_paused(),
        "a cancel after the hand-over means nothing"
    );
    let (there, received) = ends.received.unwrap();
    let failure = received.unwrap_err();
    let DestinationVm::PausedIncomplete { missing, .. } = failure.vm else {
        panic!("{failure}");
    };
    assert!(missing > 0 && there.threads.is_paused(), "{failure}");
    // The source's copy is whole: it is as it was at the switch-over.
    vm.threads.resume();
    vm.wait_progress(50);
    vm.assert_verifies();
}

#[test]
fn an_operator_who_knows_better_resumes_the_vm_at_the_source() {
    let vm = WorkloadVm::booted(Engine::Soft, 1, 16 * MIB);
    vm.wait_progress(2000);
    let ends = moved_slowly(&vm, &source_config(), |stage| {
        wait_for_handover(stage);
        stage.shaper.refuse(true);
        stage.shaper.reset(Which::All);
        wait_until("the loss", || stage.session.status().lost_for.is_some());
        stage.destination.give_up();
        stage.session.resume_here();
    });
    assert_eq!(ends.sent.unwrap_err().vm, SourceVm::Forced);
    vm.wait_progress(50);
    vm.assert_verifies();
    assert!(ends.received.unwrap().0.threads.is_paused());
}

#[test]
fn a_vm_that_lacks_no_page_stays_whole_when_its_source_is_gone() {
    let vm = WorkloadVm::booted(Engine::Soft, 1, 4 * MIB);
    vm.wait_progress(500);
    let ends = moved_slowly(&vm, &source_config(), |stage| {
        wait_for_handover(stage);
        // The pages come. The source's word that these are all does not.
        stage.shaper.freeze(Which::Number(0), Direction::Both);
        stage.shaper.throttle(None);
        wait_until("the last page", || {
            let status = stage.destination.status();
            status.pages_left == 0 || status.stage == "completed"
        });
        stage.shaper.refuse(true);
        stage.shaper.reset(Which::All);
        stage.destination.give_up();
        stage.session.give_up();
    });
    let (there, received) = ends.received.expect("a VM");
    received.unwrap();
    there.wait_progress(50);
    there.assert_verifies();
    assert!(vm.threads.is_paused(), "the source never resumes it");
}
