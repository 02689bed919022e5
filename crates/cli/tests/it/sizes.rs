//! Impossible sizes: exit code 2 and a sentence with the expected form.

use crate::support::{Dir, pageferry};

#[test]
fn memory_sizes_that_cannot_be_are_usage_errors() {
    for (size, part) in [
        ("0", "a machine needs at least one page of memory"),
        ("0G", "a machine needs at least one page of memory"),
        ("4097", "not a multiple of 4096"),
        ("1K", "try 4K"),
        ("17T", "at most 16T"),
        ("99999999999999G", "at most 16T"),
        ("many", "invalid size"),
        ("-1", "unexpected argument"),
    ] {
        let ended = pageferry(&["demo", "--engine", "soft", "--memory", size]);
        ended.assert_failed(2, "");
        assert!(ended.stderr.contains(part), "{size}: {}", ended.stderr);
    }
}

#[test]
fn a_machine_too_small_for_its_guest_is_told_the_minimum() {
    let ended = pageferry(&[
        "demo", "--engine", "soft", "--vcpus", "8", "--memory", "16K",
    ]);
    ended.assert_failed(2, "at least");
}

#[test]
fn more_memory_than_the_host_has_is_refused_before_anything_starts() {
    let ended = pageferry(&["demo", "--engine", "soft", "--memory", "3T"]);
    ended.assert_failed(2, "available; choose a smaller --memory");
    let dir = Dir::new();
    let socket = dir.path("vm");
    let args = [
        "run",
        "--engine",
        "soft",
        "--memory",
        "3T",
        "--control",
        socket.to_str().unwrap(),
    ];
    pageferry(&args).assert_failed(2, "available; choose a smaller --memory");
    dir.assert_empty();
}

#[test]
fn lists_of_cpus_that_cannot_be_are_usage_errors() {
    for (list, part) in [
        ("", "no CPU is named"),
        ("3-1", "runs backwards: expected 1-3"),
        ("0-1,1", "CPU 1 is named twice"),
        ("all", "'all' is no CPU"),
        ("1023", "this host has no CPU 1023: its CPUs are "),
    ] {
        let ended = pageferry(&["receive", "--listen", "127.0.0.1:0", "--cpus", list]);
        ended.assert_failed(2, part);
    }
}

#[test]
fn vcpus_and_passes_are_bounded() {
    for args in [
        ["--vcpus", "0"],
        ["--vcpus", "1025"],
        ["--precopy-passes", "65"],
        ["--engine", "qemu"],
        ["--delivery", "magic"],
        ["--fault-readers", "0"],
        ["--fault-readers", "1025"],
        ["--userfaultfds", "0"],
        ["--userfaultfds", "65"],
    ] {
        pageferry(&["demo", args[0], args[1]]).assert_failed(2, "invalid value");
    }
}

#[test]
fn more_userfaultfds_than_memory_has_ranges_are_refused() {
    let args = [
        "demo",
        "--engine",
        "soft",
        "--memory",
        "16M",
        "--userfaultfds",
        "9",
    ];
    let why = "cannot serve this RAM by 9 userfaultfds: expected 1 to 8 (each serves whole";
    pageferry(&args).assert_failed(2, why);
}

#[test]
fn a_report_that_could_not_be_written_is_refused_before_the_demo_runs() {
    let args = [
        "demo",
        "--engine",
        "soft",
        "--report",
        "/no/such/directory/r.html",
    ];
    pageferry(&args).assert_failed(2, "its directory does not exist");
}

#[test]
fn help_says_where_the_exit_codes_are() {
    for command in ["demo", "run", "receive", "migrate"] {
        let ended = pageferry(&[command, "--help"]);
        ended.assert_ok();
        assert!(
            ended.stdout.contains("`pageferry help exit-codes`"),
            "{command}"
        );
    }
    let ended = pageferry(&["help", "exit-codes"]);
    ended.assert_ok();
    for code in 0..=15 {
        assert!(ended.stdout.contains(&format!("\n  {code:>2}  ")), "{code}");
    }
}
