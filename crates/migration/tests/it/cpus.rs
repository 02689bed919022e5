//! The threads of a migration run on the CPUs of its configuration, and no other thread does.

use crate::alone::{LeakCheck, runs_in_child};
use crate::support::{WorkloadVm, address_of, listen, receive_on};
use pageferry_machine::{Backing, Engine};
use pageferry_migration::{
    CpuList, DestinationConfig, MigrationError, Observer, Phase, Route, SourceConfig,
    SourceSession, SourceVm, migrate,
};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Mutex;

/// The name of a thread, and the CPUs that it may run on.
fn thread(task: &Path) -> Option<(String, String)> {
    let name = fs::read_to_string(task.join("comm")).ok()?;
    let status = fs::read_to_string(task.join("status")).ok()?;
    let cpus = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    Some((name.trim_end().to_owned(), cpus.trim().to_owned()))
}

fn own_cpus() -> String {
    thread(Path::new("/proc/thread-self")).unwrap().1
}

/// Notes the CPUs of all threads of this process in each phase.
#[derive(Default)]
struct Threads(Mutex<BTreeMap<String, Vec<String>>>);

impl Observer for Threads {
    fn phase(&self, _: Phase) {
        let mut seen = self.0.lock().unwrap();
        let tasks = fs::read_dir("/proc/self/task").unwrap();
        for (name, cpus) in tasks.filter_map(|task| thread(&task.ok()?.path())) {
            seen.entry(name).or_default().push(cpus);
        }
        seen.entry("supervisor".into())
            .or_default()
            .push(own_cpus());
    }

    fn progress(&self, _: Phase, _: u64, _: u64) {}
}

fn vm() -> WorkloadVm {
    let vm = WorkloadVm::booted(Engine::Soft, 2, 16 << 20);
    vm.wait_progress(50);
    vm
}

#[test]
fn the_threads_of_a_migration_are_pinned_and_vcpus_are_not() {
    if runs_in_child() {
        return;
    }
    let _alone = LeakCheck::start();
    let all = own_cpus();
    let cpus: CpuList = all.parse().unwrap();
    // The last CPU: others have both more often.
    let shown = cpus.to_string();
    let one = shown.rsplit([',', '-']).next().unwrap().to_owned();
    if one == all {
        pageferry_testkit::skip("cores", "this process has one CPU only");
        return;
    }
    let cpus: Option<CpuList> = Some(one.parse().unwrap());
    let destination = listen(DestinationConfig {
        cpus: cpus.clone(),
        ..DestinationConfig::default()
    });
    assert_eq!(own_cpus(), all, "the caller has its own again");
    let source = vm();
    let config = SourceConfig {
        cpus,
        ..SourceConfig::default()
    };
    let (session, threads) = (SourceSession::new().unwrap(), Threads::default());
    let there = std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            let (there, received) = receive_on(Backing::Shmem, &destination);
            received.unwrap();
            assert_eq!(own_cpus(), all, "the destination's caller");
            there
        });
        let route = Route::To(address_of(&destination));
        migrate(
            &source.running(),
            &route,
            b"test",
            &config,
            &session,
            &threads,
        )
        .unwrap();
        assert_eq!(own_cpus(), all, "the source's caller");
        receiver.join().unwrap()
    });
    there.wait_progress(16);
    let threads = threads.0.into_inner().unwrap();
    for name in ["supervisor", "pf-bulk", "pf-urgent", "acceptor"] {
        assert!(threads.contains_key(name), "{name} of {:?}", threads.keys());
    }
    for (name, seen) in &threads {
        if name.starts_with("vcpu") {
            assert!(seen.iter().all(|cpus| *cpus == all), "{name}: {seen:?}");
        } else if name.starts_with("pf-") || name == "supervisor" || name == "acceptor" {
            assert!(seen.iter().all(|cpus| *cpus == one), "{name}: {seen:?}");
        }
    }
}

#[test]
fn a_migration_on_cpus_that_are_not_there_leaves_the_vm_alone() {
    let source = vm();
    let config = SourceConfig {
        cpus: Some("1023".parse().unwrap()),
        ..SourceConfig::default()
    };
    let session = SourceSession::new().unwrap();
    let nowhere = listen(DestinationConfig::default());
    let route = Route::To(address_of(&nowhere));
    let running = source.running();
    let failure = migrate(
        &running,
        &route,
        b"",
        &config,
        &session,
        &Threads::default(),
    );
    let failure = failure.unwrap_err();
    assert_eq!(failure.vm, SourceVm::Runs);
    assert!(
        matches!(failure.error, MigrationError::Cpus(_)),
        "{failure}"
    );
    source.wait_progress(50);
}
