//! `--cpus` of `migrate` and `receive`: the threads of two processes that move a VM.

use crate::support::{Destination, Process, Source, assert_whole, pageferry, status};
use pageferry_testkit::{skip, wait_for, wait_until};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The CPUs that a thread may run on.
fn cpus_of(task: &Path) -> Option<String> {
    let status = fs::read_to_string(task.join("status")).ok()?;
    let cpus = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    Some(cpus.trim().to_owned())
}

/// The CPUs of the threads of a process, by name. Checks that the threads of the migration have
/// `pinned`, and the vCPUs have `all`.
fn threads(process: &Process, pinned: &str, all: &str) -> BTreeMap<String, String> {
    // A process that ends has none.
    let tasks = fs::read_dir(format!("/proc/{}/task", process.pid()));
    let threads = tasks.into_iter().flatten().filter_map(|task| {
        let task = task.ok()?.path();
        let name = fs::read_to_string(task.join("comm")).ok()?;
        Some((name.trim_end().to_owned(), cpus_of(&task)?))
    });
    let threads: BTreeMap<_, _> = threads.collect();
    for (name, cpus) in &threads {
        if name.starts_with("pf-") || name == "acceptor" {
            assert_eq!(cpus, pinned, "{name}");
        } else if name.starts_with("vcpu") {
            assert_eq!(cpus, all, "{name}");
        }
    }
    threads
}

#[test]
fn both_sides_pin_the_threads_of_a_migration_and_no_others() {
    let all = cpus_of(Path::new("/proc/thread-self")).unwrap();
    let first = all.split([',', '-']).next().unwrap();
    let last = all.rsplit([',', '-']).next().unwrap();
    if first == last {
        skip("cores", "this process has one CPU only");
        return;
    }
    let source = Source::start("16M");
    source.wait_until_all_is_written();
    let destination = Destination::start(&["--cpus", last]);
    let flags = ["--cpus", first, "--switch", "manual"];
    let mut migrate = source.migrate_with(&destination.address, &flags);
    wait_for("the end of a pass", || {
        status(&source.socket)?["session"]["blackout_forecast_us"].as_u64()
    });
    let here = threads(&source.process, first, &all);
    for name in ["migration", "pf-bulk", "pf-urgent"] {
        assert_eq!(here.get(name).map(String::as_str), Some(first), "{here:?}");
    }
    let there = threads(&destination.process, last, &all);
    for name in ["migration", "acceptor", "pf-bulk"] {
        assert_eq!(there.get(name).map(String::as_str), Some(last), "{there:?}");
    }
    for threads in [&here, &there] {
        assert!(threads.contains_key("vcpu0"), "{threads:?}");
        // The main thread and the control socket's have their own.
        let others = ["pageferry", "control"].map(|name| threads.get(name));
        assert_eq!(others, [Some(&all); 2], "{threads:?}");
    }
    let now = ["set", "--vm", source.socket.to_str().unwrap()];
    pageferry(&[&now[..], &["--switch", "now"]].concat()).assert_ok();
    wait_until("the end of the migration", || {
        threads(&source.process, first, &all);
        threads(&destination.process, last, &all);
        !migrate.is_running()
    });
    migrate.end().assert_ok();
    source.process.end().assert_ok();
    assert_whole(&destination.socket);
    let vm = destination.socket.to_str().unwrap();
    pageferry(&["quit", "--vm", vm]).assert_ok();
    destination.process.end().assert_ok();
    destination.dir.assert_empty();
}

#[test]
fn a_cpu_outside_the_host_is_refused_and_the_vm_runs_on() {
    let source = Source::start("16M");
    let ended = source
        .migrate_with("unix:/nowhere", &["--cpus", "1023"])
        .end();
    ended.assert_failed(2, "this host has no CPU 1023: its CPUs are ");
    source.assert_unharmed();
}
