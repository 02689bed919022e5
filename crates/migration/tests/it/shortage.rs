#![expect(unsafe_code, reason = "gives the privileges of root up")]
//! A host that lacks threads or memory once the VM is handed over. The VM runs on, and the session
//! completes when the shortage is over.

use crate::failures_destination::attempt_on;
use crate::failures_machine::{Failing, Fault};
use crate::recovery::{assert_whole, moved_slowly, source_config, wait_for_handover};
use crate::scripted::source::Template;
use crate::scripted::{LONG, limits};
use crate::support::{
    WorkloadVm, address_of, kvm_deliveries, kvm_usable, listen, migrate_to, receive_as, tcp,
};
use pageferry_machine::{Delivery, Engine, Machine};
use pageferry_migration::wire::{Frame, FrameType, Role};
use pageferry_migration::{
    DestinationConfig, DestinationVm, Route, RunningVm, SourceConfig, Switch,
};
use pageferry_testkit::process::runs_in_child;
use pageferry_testkit::wait_until;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::File;
use std::io::{Read, Seek};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// A user of nothing else.
const NOBODY: libc::uid_t = 54_321;

/// Gives the privileges of root up, which no limit of threads holds for. The process must be a
/// child of the test.
fn become_nobody() {
    // SAFETY: the call changes no memory. All threads of the process change their user.
    let became = unsafe { libc::setresuid(NOBODY, NOBODY, NOBODY) };
    // A user who is not root has limits already.
    assert!(became == 0 || rustix::process::getuid().as_raw() != 0);
}

/// Lets nothing more of a kind be made while it lives.
struct Lack(Resource, Rlimit);

impl Lack {
    fn of_threads() -> Self {
        let lack = Self::begin(Resource::Nproc, 0);
        let refused = std::thread::Builder::new().spawn(|| ());
        assert!(refused.is_err(), "the limit holds");
        lack
    }

    /// Descriptors above those that the process has anyway. poll(2) takes no more than the limit.
    fn of_descriptors() -> Self {
        let lack = Self::begin(Resource::Nofile, 8);
        let refused = File::open("/dev/null");
        assert!(refused.is_err(), "the limit holds");
        lack
    }

    fn begin(resource: Resource, most: u64) -> Self {
        let before = getrlimit(resource);
        let few = Rlimit {
            current: Some(most),
            ..before
        };
        setrlimit(resource, few).unwrap();
        Self(resource, before)
    }
}

impl Drop for Lack {
    fn drop(&mut self) {
        setrlimit(self.0, self.1).unwrap();
    }
}

/// Moves a VM, and makes its source open all channels again while the host lacks something.
fn survives(lack: fn() -> Lack, why: &str) {
    let vm = WorkloadVm::booted(Engine::Soft, 2, 64 * MIB);
    vm.wait_progress(2000);
    let ends = moved_slowly(&vm, &source_config(), |stage| {
        wait_for_handover(stage);
        let way = Route::To(stage.shaper.addr().to_string().parse().unwrap());
        let lack = lack();
        stage.session.recover(way);
        wait_until("the loss", || {
            let loss = stage.session.status().last_loss;
            loss.is_some_and(|loss| loss.contains(why))
        });
        std::thread::sleep(Duration::from_millis(300));
        let (here, there) = (stage.session.status(), stage.destination.status());
        assert_eq!((here.stage, there.stage), ("handed-over", "running"));
        assert!(there.pages_left > 0);
        drop(lack);
    });
    assert_whole(&vm, &ends);
}

#[test]
fn a_vm_survives_the_loss_of_all_channels_while_no_thread_can_start() {
    if !runs_in_child() {
        become_nobody();
        survives(Lack::of_threads, "cannot start a thread");
    }
}

#[test]
fn a_vm_survives_the_loss_of_all_channels_while_no_file_can_be_opened() {
    if !runs_in_child() {
        survives(Lack::of_descriptors, "open files");
    }
}

/// The threads of this process that live now, without those of vCPUs, by their open files of
/// procfs: no further one may be opened later.
struct Threads(Vec<File>);

impl Threads {
    fn here() -> Self {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let files = tasks.filter_map(|task| {
            let path = task.ok()?.path();
            let counts = !std::fs::read_to_string(path.join("comm"))
                .ok()?
                .starts_with("vcpu");
            File::open(path.join("schedstat")).ok().filter(|_| counts)
        });
        Self(files.collect())
    }

    /// The time that they have had a core.
    fn core_time(&self) -> Duration {
        let of = |mut file: &File| {
            let mut text = String::new();
            file.rewind().ok()?;
            // A thread that has ended has no time.
            file.read_to_string(&mut text).ok()?;
            Some(Duration::from_nanos(text.split(' ').next()?.parse().ok()?))
        };
        self.0.iter().filter_map(of).sum()
    }

    /// The time that they have a core while no descriptor may be opened or waited for.
    fn core_time_without_descriptors(&self, lasts: Duration) -> Duration {
        let _lack = Lack::begin(Resource::Nofile, 0);
        let before = self.core_time();
        std::thread::sleep(lasts);
        self.core_time().saturating_sub(before)
    }
}

/// With a limit below what a thread waits for, poll(2) fails at once. Nobody looks again without a
/// pause: neither a destination that awaits a source, nor both ends of a VM that is handed over.
#[test]
fn threads_that_cannot_wait_for_descriptors_leave_the_cores_to_others() {
    if runs_in_child() {
        return;
    }
    let lasts = Duration::from_secs(1);
    let destination = listen(DestinationConfig::default());
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| destination.accept(&|| over.load(Ordering::Acquire)));
        std::thread::sleep(Duration::from_millis(100));
        let used = Threads::here().core_time_without_descriptors(lasts);
        over.store(true, Ordering::Release);
        assert!(accepting.join().unwrap().is_err());
        assert!(used < lasts / 4, "a waiting destination used {used:?}");
    });
    let vm = WorkloadVm::booted(Engine::Soft, 2, 64 * MIB);
    vm.wait_progress(2000);
    let ends = moved_slowly(&vm, &source_config(), |stage| {
        wait_for_handover(stage);
        let used = Threads::here().core_time_without_descriptors(lasts);
        assert!(stage.destination.status().pages_left > 0);
        assert!(used < lasts / 2, "both ends used {used:?}");
    });
    assert_whole(&vm, &ends);
}

/// Before the hand-over a lack ends the migration, and the source is told what the other host
/// lacks.
#[test]
fn a_source_hears_that_its_destination_can_start_no_thread() {
    if runs_in_child() {
        return;
    }
    become_nobody();
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    let received = attempt_on(tcp(), &template, None, limits(LONG), |p, _, _| {
        p.send(&Frame::Setup(template.setup()));
        p.expect(FrameType::SetupAck);
        let shortage = Lack::of_threads();
        p.open_channels();
        let last = p.last_frame();
        drop(shortage);
        let Some(Frame::Error(why)) = last else {
            panic!("an error was due, not {last:?}");
        };
        assert!(why.message().contains("thread"), "{}", why.message());
    });
    let failure = received.outcome.unwrap_err();
    assert!(failure.to_string().contains("thread"), "{failure}");
    assert_eq!(failure.vm, DestinationVm::Discarded);
}

#[test]
fn channels_of_a_destination_that_can_start_no_thread_are_read_later() {
    if runs_in_child() {
        return;
    }
    become_nobody();
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    let received = attempt_on(
        tcp(),
        &template,
        None,
        limits(LONG),
        |p, vm, destination| {
            p.start();
            let shortage = Lack::of_threads();
            p.close();
            wait_until("the loss", || !destination.status().connected);
            p.recover();
            wait_until("the channels", || destination.status().channels.len() == 2);
            // The guest runs by its requests alone. None comes while it does not wait.
            while p.unsent.len() + 8 > template.missing.len() {
                p.answer(p.request());
            }
            let status = destination.status();
            assert_eq!(status.stage, "running");
            assert!(
                status
                    .channels
                    .iter()
                    .any(|channel| channel.role == Role::Bulk)
            );
            let why = status.last_loss.unwrap();
            assert!(why.contains("thread"), "{why}");
            assert!(vm.threads.failures().is_empty());
            drop(shortage);
            p.complete();
        },
    );
    received.outcome.unwrap();
    received.vm.wait_progress(64);
    received.vm.assert_verifies();
}

/// Moves a VM to a machine that lacks memory for some pages for a while.
fn moves(engine: Engine, delivery: Option<Delivery>) {
    let source = WorkloadVm::booted(engine, 2, 16 * MIB);
    source.wait_progress(64);
    let destination = listen(DestinationConfig {
        delivery,
        ..DestinationConfig::default()
    });
    let config = SourceConfig {
        settings: Switch::AfterPasses(0).into(),
        ..SourceConfig::default()
    };
    let to = WorkloadVm::empty(engine, 2, 16 * MIB);
    let fault = Fault::NoMemory { from: 5, to: 40 };
    let machine: Arc<dyn Machine> = Arc::new(Failing::new(Arc::clone(&to.machine), fault));
    let failing = RunningVm {
        machine: &machine,
        vcpus: &to.threads,
        devices: to.running().devices,
    };
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| receive_as(&failing, &to.resolver, &destination));
        migrate_to(&source, &address_of(&destination), &config).unwrap();
        receiver.join().unwrap().unwrap();
    });
    to.wait_progress(64);
    to.assert_verifies();
}

#[test]
fn a_host_that_lacks_memory_for_a_while_only_delays_a_vm() {
    moves(Engine::Soft, None);
    let test = "a_host_that_lacks_memory_for_a_while_only_delays_a_vm";
    if kvm_usable(test) {
        for delivery in kvm_deliveries(test) {
            moves(Engine::Kvm, Some(delivery));
        }
    }
}
