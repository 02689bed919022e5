//! `cargo xtask two-hosts` as a user calls it. The test kit tests the link itself.

use pageferry_testkit::two_hosts::{Link, Rate, or_skip};
use pageferry_testkit::wait_for;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

fn two_hosts(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.arg("two-hosts").args(arguments);
    command
}

/// Whether this machine cannot make hosts, after it has been reported.
fn skipped() -> bool {
    or_skip(&Link::new(Rate::mbit(1000))).is_none()
}

fn exists(name: &str) -> bool {
    Path::new("/run/netns").join(name).exists()
}

#[test]
fn a_command_finds_the_hosts_and_its_exit_code_is_returned() {
    if skipped() {
        return;
    }
    let script = "echo $PAGEFERRY_HOST_A; echo $PAGEFERRY_HOST_B; \
                  ip -n $PAGEFERRY_HOST_B -o addr | grep -q $PAGEFERRY_ADDR_B || exit 1; \
                  ip -n $PAGEFERRY_HOST_A -o addr | grep -q $PAGEFERRY_ADDR_A || exit 2; \
                  ip netns exec $PAGEFERRY_HOST_A sleep 600 & exit 43";
    for queue in [
        &["--queue", "one-fifo"][..],
        &["--queue", "fair", "--rate", "100mbit"],
        &[
            "--queue",
            "per-flow",
            "--flow-rate",
            "50mbit",
            "--limit",
            "256k",
        ],
    ] {
        let arguments = [queue, &["--", "sh", "-c", script]].concat();
        // The hosts' processes are killed, or else this would wait for the end of the pipe.
        let output = two_hosts(&arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(43), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(!text.lines().any(exists), "{text}");
    }
}

#[test]
fn a_command_that_does_not_exist_leaves_nothing() {
    if skipped() {
        return;
    }
    let child = two_hosts(&["--", "/no/such/program"]).spawn().unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(127));
    assert!(!exists(&format!("pageferry-{pid}-0-a")));
}

#[test]
fn signals_end_the_command_and_its_orphans_and_remove_the_hosts() {
    if skipped() {
        return;
    }
    // The second command leaves an orphan.
    let scripts = [
        "echo $PAGEFERRY_HOST_A; echo $$; exec sleep 600",
        "echo $PAGEFERRY_HOST_A; sleep 600 & echo $!; wait",
    ];
    for (signal, script) in ["TERM", "INT"].iter().zip(scripts) {
        let mut child = two_hosts(&["--", "sh", "-c", script])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let name = lines.next().unwrap().unwrap();
        let pid = lines.next().unwrap().unwrap();
        assert!(exists(&name), "{name}");
        let sent = Command::new("kill")
            .args(["-s", signal, &child.id().to_string()])
            .status();
        assert!(sent.unwrap().success());
        let status = wait_for("the end", || child.try_wait().unwrap());
        assert_eq!(status.code(), Some(128 + 15), "{signal}");
        assert!(!exists(&name), "{name}");
        assert!(!Path::new("/proc").join(&pid).exists(), "{pid} lives");
    }
}

#[test]
fn without_the_privilege_it_says_so_in_one_line_and_returns_77() {
    if skipped() {
        return;
    }
    // A copy, as the folder of the build may be closed to others.
    let copy = std::env::temp_dir().join(format!("pageferry-xtask-{}", std::process::id()));
    std::fs::copy(env!("CARGO_BIN_EXE_xtask"), &copy).unwrap();
    let output = Command::new(&copy)
        .args(["two-hosts", "--", "true"])
        .current_dir("/")
        .uid(65534)
        .gid(65534)
        .output();
    std::fs::remove_file(&copy).unwrap();
    let output = output.unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(77), "{text}");
    assert!(
        text.contains("needs root") && text.lines().count() == 1,
        "{text}"
    );
}

#[test]
fn wrong_options_are_refused_before_anything_is_made() {
    for arguments in [
        &["--rate", "fast", "--", "true"][..],
        &["--queue", "per-flow", "--", "true"],
        &["--burst", "1", "--", "true"],
        &["--limit", "4096m", "--", "true"],
        &[],
    ] {
        let output = two_hosts(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
    }
    let output = two_hosts(&["--flow-rate", "1gbit", "--", "true"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(125), "{output:?}");
}
