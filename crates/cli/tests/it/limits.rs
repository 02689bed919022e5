//! Limits of the host that are too low for a VM: each is a sentence before the VM starts.

use crate::support::{Dir, PAGEFERRY, Process, status};
use pageferry_testkit::{HugePages, skip, wait_for};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The exit code for a limit that is too low.
const LIMIT_TOO_LOW: i32 = 4;

/// Starts a VM on the soft engine by a script, which ends with `exec "$@"`.
fn start(script: &str, more: &str, dir: &Dir) -> Process {
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh", PAGEFERRY]);
    let control = dir.path("vm");
    let control = control.to_str().unwrap();
    let words = format!("run --engine soft --vcpus 1 --control {control} {more}");
    Process::start_by(command, &words.split(' ').collect::<Vec<_>>(), dir)
}

/// Waits for the VM, and ends it.
#[track_caller]
fn assert_runs(process: Process, dir: &Dir) {
    wait_for("the VM", || {
        status(&dir.path("vm")).filter(|status| status["state"] == "running")
    });
    process.interrupt();
    process.end().assert_ok();
    dir.assert_empty();
}

#[test]
fn limits_of_the_process_are_told_at_the_start() {
    let dir = Dir::new();
    for (limit, why) in [
        // In units of 512 bytes or of 1 KiB: less than 64 MiB.
        ("ulimit -f 20000", "RLIMIT_FSIZE"),
        ("ulimit -v 300000", "RLIMIT_AS"),
        ("ulimit -n 40", "RLIMIT_NOFILE"),
    ] {
        let script = format!("{limit}; exec \"$@\"");
        let ended = start(&script, "--memory 64M", &dir).end();
        ended.assert_failed(LIMIT_TOO_LOW, why);
        dir.assert_empty();
    }
    let enough = "ulimit -f 200000; ulimit -n 256; exec \"$@\"";
    assert_runs(start(enough, "--memory 64M", &dir), &dir);
}

#[test]
fn a_command_that_serves_says_how_many_descriptors_it_needs() {
    let dir = Dir::new();
    for words in [
        "receive --listen 127.0.0.1:0",
        "tunnel --accept 127.0.0.1:0 --connect unix:/x",
    ] {
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -n 8; exec \"$@\"", "sh", PAGEFERRY]);
        let process = Process::start_by(command, &words.split(' ').collect::<Vec<_>>(), &dir);
        process.end().assert_failed(LIMIT_TOO_LOW, "RLIMIT_NOFILE");
    }
}

#[test]
fn a_file_beyond_the_limit_is_an_error_of_a_write_and_ends_no_process() {
    let dir = Dir::new();
    let script = "ulimit -f 64; exec \"$@\"";
    let with = |words: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh", PAGEFERRY]);
        Process::start_by(command, &words.split(' ').collect::<Vec<_>>(), &dir)
    };
    // Its trials of deliveries make a memfd.
    with("probe").end().assert_ok();
    let page = dir.path("page").display().to_string();
    let words =
        format!("demo --engine soft --vcpus 1 --memory 16M --ignore-limits --report {page}");
    let ended = with(&words).end();
    assert!(ended.code.is_some(), "a signal ended it: {}", ended.stderr);
}

/// The limit counts the threads of a user who is not root.
#[test]
fn a_limit_of_the_users_threads_is_told_at_the_start() {
    /// A user of nothing else.
    const NOBODY: u32 = 54_322;
    let dir = Dir::new();
    // The user must reach the program, and make the socket.
    let program = dir.path("program");
    fs::copy(PAGEFERRY, &program).unwrap();
    let all = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
    fs::set_permissions(program.parent().unwrap(), all(0o777)).unwrap();
    let start = |most: &str| {
        let script = format!("ulimit -u {most}; exec \"$@\"");
        // Not every `sh` knows this limit.
        let mut command = Command::new("bash");
        command.args(["-c", &script, "bash"]).arg(&program);
        if rustix::process::getuid().is_root() {
            command.uid(NOBODY);
        }
        let control = dir.path("vm").display().to_string();
        let words = format!("run --engine soft --vcpus 1 --memory 16M --control {control}");
        Process::start_by(command, &words.split(' ').collect::<Vec<_>>(), &dir)
    };
    let ended = start("20").end();
    ended.assert_failed(LIMIT_TOO_LOW, "RLIMIT_NPROC");
    assert!(
        ended.stderr.contains("is 20, 49 threads are needed"),
        "{ended:?}"
    );
    if !rustix::process::getuid().is_root() {
        return;
    }
    let process = start("60");
    wait_for("the VM", || {
        status(&dir.path("vm")).filter(|status| status["state"] == "running")
    });
    process.interrupt();
    process.end().assert_ok();
}

/// A control group that is removed at the end of its test.
struct Group(PathBuf);

impl Group {
    /// A group of a version 2 with the controller, or of a version 1. `None` after a skip.
    fn new(controller: &str, name: &str) -> Option<(Self, bool)> {
        let name = format!("pf-test-{}-{name}", std::process::id());
        for root in ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"] {
            let root = Path::new(root);
            let has = fs::read_to_string(root.join("cgroup.controllers"));
            if has.is_ok_and(|has| has.split_whitespace().any(|one| one == controller)) {
                let all = fs::write(
                    root.join("cgroup.subtree_control"),
                    format!("+{controller}"),
                );
                let made = all.and_then(|()| fs::create_dir(root.join(&name)));
                return made.map_or_else(
                    |why| none(controller, &why),
                    |()| Some((Self(root.join(&name)), true)),
                );
            }
        }
        let path = Path::new("/sys/fs/cgroup").join(controller).join(name);
        fs::create_dir(&path)
            .map_or_else(|why| none(controller, &why), |()| Some((Self(path), false)))
    }

    fn set(&self, file: &str, value: &str) {
        fs::write(self.0.join(file), value).unwrap();
    }

    /// A script that goes into the group, does `before`, and starts a VM.
    fn script(&self, before: &str) -> String {
        let procs = self.0.join("cgroup.procs");
        format!("echo $$ > {}; {before} exec \"$@\"", procs.display())
    }
}

fn none<T>(controller: &str, why: &std::io::Error) -> Option<T> {
    skip(
        "cgroup",
        format!("no group of {controller} can be made: {why}"),
    );
    None
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn huge_pages_that_a_control_group_refuses_are_no_signal() {
    let Some(_pool) = HugePages::at_least(48) else {
        return;
    };
    let Some((group, v2)) = Group::new("hugetlb", "huge") else {
        return;
    };
    let file = match v2 {
        true => "hugetlb.2MB.max",
        false => "hugetlb.2MB.limit_in_bytes",
    };
    let dir = Dir::new();
    group.set(file, "33554432");
    let more = "--memory 64M --backing hugetlb-2m";
    let ended = start(&group.script(""), more, &dir).end();
    ended.assert_failed(LIMIT_TOO_LOW, file);
    assert!(ended.stderr.contains("leaves 32 MiB"), "{ended:?}");
    dir.assert_empty();
    group.set(file, "67108864");
    assert_runs(start(&group.script(""), more, &dir), &dir);
}

#[test]
fn page_cache_does_not_count_against_a_vm() {
    let Some((group, v2)) = Group::new("memory", "cache") else {
        return;
    };
    let file = match v2 {
        true => "memory.max",
        false => "memory.limit_in_bytes",
    };
    group.set(file, "167772160");
    let dir = Dir::new();
    // In the target directory, since a temporary one may be in memory.
    let cached =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cache-{}", std::process::id()));
    let read = format!(
        "dd if=/dev/zero of={0} bs=1M count=130 2>/dev/null; sync {0}; cat {0} >/dev/null;",
        cached.display()
    );
    let process = start(&group.script(&read), "--memory 96M", &dir);
    wait_for("an answer", || {
        fs::exists(&cached).is_ok_and(|is| is).then_some(())
    });
    assert_runs(process, &dir);
    fs::remove_file(&cached).unwrap();
    // Memory that is in use does count, unless the user says otherwise.
    let ended = start(&group.script(""), "--memory 192M", &dir).end();
    ended.assert_failed(2, "available");
    assert_runs(
        start(&group.script(""), "--memory 192M --ignore-limits", &dir),
        &dir,
    );
}
