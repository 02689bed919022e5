//! `postcopy-latency`: its output, and what it leaves behind.

use crate::support::{BENCH, Running, bench, ended};
use pageferry_testkit::two_hosts::{Link, Rate, or_skip};
use pageferry_testkit::wait_until;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The shortest run of one column.
pub(crate) const TINY: [&str; 6] = [
    "postcopy-latency",
    "--quick",
    "--vcpus",
    "2",
    "--rate",
    "1gbit",
];

/// Whether this machine cannot make hosts, after it has been reported.
pub(crate) fn skipped() -> bool {
    let link = Link {
        congestion: Some("cubic".into()),
        ..Link::new(Rate::mbit(1000))
    };
    or_skip(&link).is_none()
}

/// The namespaces of a process.
fn namespaces_of(pid: u32) -> Vec<String> {
    let prefix = format!("pageferry-{pid}-");
    let entries = std::fs::read_dir("/run/netns").into_iter().flatten();
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter(|name| name.starts_with(&prefix)).collect()
}

#[test]
fn the_json_and_the_page_have_every_row() {
    if skipped() {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let page = dir.path().join("latency.html");
    let more = ["--json", "--report", page.to_str().expect("a UTF-8 path")];
    let ended = bench(&[&TINY[..], &more].concat());
    ended.assert_ok();
    let json = ended.json();
    let rows = json.as_array().expect("rows");
    let of = |mode: &str, case: &str| {
        let subject = format!("{mode}, 4 KiB pages, 2 vCPUs, plain, cubic");
        let row = rows
            .iter()
            .find(|row| row["case"] == case && row["subject"] == subject);
        row.and_then(|row| row["value"].as_f64())
    };
    for mode in [
        "vanilla",
        "preempt",
        "no prefetch",
        "in order",
        "in order no prefetch",
        "idle",
        "floor",
    ] {
        assert!(of(mode, "latency.mean") > Some(0.0), "{mode} in {json}");
        let pushed = mode != "idle" && mode != "floor";
        assert_eq!(of(mode, "latency.total").is_some(), pushed, "{mode}");
        let busy = of(mode, "latency.link_busy");
        assert_eq!(busy.is_some(), pushed, "{mode}");
        assert!(
            busy.is_none_or(|busy| busy > 1.0 && busy < 110.0),
            "{mode}: {busy:?}"
        );
    }
    assert!(
        rows.iter().all(|row| row["met"].is_null()),
        "one round gives no verdict"
    );
    let page = std::fs::read_to_string(&page).expect("the page was written");
    assert!(page.contains("class=\"bar\"") && page.contains("latency.p99"));
}

#[test]
fn a_link_with_a_delay_has_the_rates_of_the_push_and_of_bare_tcp() {
    if skipped() {
        return;
    }
    let ended = bench(&[&TINY[..], &["--link", "200us:1ms", "--bulk", "2", "--json"]].concat());
    ended.assert_ok();
    let json = ended.json();
    let of = |mode: &str, case: &str| {
        let rows = json.as_array().expect("rows").iter();
        let mut of = rows.filter(|row| row["case"] == case);
        let row = of.find(|row| {
            row["subject"]
                .as_str()
                .is_some_and(|of| of.starts_with(mode))
        });
        row.and_then(|row| row["value"].as_f64())
    };
    for mode in ["preempt", "no readers", "bare TCP"] {
        let rate = of(mode, "latency.bulk").expect(mode);
        assert!(rate > 1e6 && rate < 130e6, "{mode}: {rate}");
    }
    // A request and its answer take the delay.
    let idle = of("idle", "latency.p50").expect("stalls");
    assert!(idle > 400.0, "{idle}");
    assert_eq!(of("idle", "latency.bulk"), None);
    assert!(of("preempt", "latency.sum").is_some() && of("floor", "latency.mean").is_none());
}

#[test]
fn an_interrupt_leaves_nothing_behind() {
    if skipped() {
        return;
    }
    let words = [&TINY[..], &["--repeat", "1000"]].concat();
    let running = Running::until_said(&words, "round 1 of 1000");
    let pid = running.pid();
    let names = namespaces_of(pid);
    assert_eq!(names.len(), 2, "{names:?}");
    let source = format!("pageferry-{pid}-0-a");
    wait_until("the source's process", || {
        let listed = Command::new("ip").args(["netns", "pids", &source]).output();
        listed.is_ok_and(|listed| !listed.stdout.is_empty()) || namespaces_of(pid).is_empty()
    });
    assert_eq!(running.interrupt(), Some(9));
    assert!(namespaces_of(pid).is_empty());
}

#[test]
fn without_the_privilege_one_sentence_says_so() {
    if skipped() {
        return;
    }
    // A copy, as the folder of the build may be closed to others.
    let copy = std::env::temp_dir().join(format!("pageferry-latency-{}", std::process::id()));
    std::fs::copy(BENCH, &copy).expect("a copy");
    let mut command = Command::new(&copy);
    command.args(TINY).current_dir("/").uid(65534).gid(65534);
    let ended = ended(&mut command);
    std::fs::remove_file(&copy).expect("removed");
    ended.assert_failed(12, "needs root");
}

#[test]
fn what_cannot_be_measured_is_a_usage_error() {
    let fails = |more: &[&str], part: &str| {
        bench(&[&["postcopy-latency"], more].concat()).assert_failed(2, part);
    };
    fails(&["--vcpus", "0"], "0 is not in 1..=64");
    fails(&["--rate", "fast"], "expected a whole number with bit");
    fails(&["--pages", "8k"], "8k");
    fails(&["--memory", "3M"], "expected a multiple of 2 MiB");
}
