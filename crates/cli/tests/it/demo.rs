//! The whole demo: it moves a VM, verifies it twice, reports, and finds a wrong page.

use crate::support::{Dir, Process, assert_runs_on, pageferry, status};
use pageferry_testkit::{skip, wait_for};
use serde_json::Value;
use std::process::Command;

#[track_caller]
fn assert_complete(json: &Value, engine: &str) {
    assert_eq!(json["engine"], engine);
    assert_eq!(
        (json["vcpus"].as_u64(), json["memory_bytes"].as_u64()),
        (Some(2), Some(32 << 20))
    );
    for key in ["total_ms", "blackout_ms", "throughput_bytes_per_s"] {
        assert!(
            json[key].as_f64().is_some_and(|v| v > 0.0),
            "{key} in {json}"
        );
    }
    for key in ["precopy", "urgent", "background", "zero"] {
        assert!(json["pages"][key].is_u64(), "{key} in {json}");
    }
    for key in [
        "count", "mean", "p50", "p90", "p99", "p999", "max", "over_2ms",
    ] {
        assert!(json["stall_us"][key].is_number(), "{key} in {json}");
    }
    let sent = ["urgent", "background"]
        .map(|k| json["pages"][k].as_u64().unwrap())
        .iter()
        .sum::<u64>();
    assert!(
        sent <= json["missing_at_start"].as_u64().unwrap(),
        "no page is sent twice after the switch-over: {json}"
    );
    for side in ["source", "destination"] {
        let overhead = json["overhead_bytes"][side].as_u64().unwrap();
        assert!(
            overhead < (64 << 20) + (32 << 20) / 100,
            "{side}: {overhead}"
        );
    }
    assert_eq!(json["verified"]["guest"], true);
    assert_eq!(json["verified"]["host"], true);
}

/// More vCPUs than a destination takes by default on a small host. The whole demo takes too long
/// there.
#[test]
fn a_vm_of_more_vcpus_than_other_destinations_take_is_taken() {
    let vcpus = 8 * std::thread::available_parallelism().unwrap().get().max(8) + 1;
    let dir = Dir::new();
    let vcpus = vcpus.to_string();
    let args = [
        "demo", "--engine", "soft", "--memory", "16M", "--vcpus", &vcpus,
    ];
    let demo = Process::start(&args, &dir);
    demo.wait_until_said("pre-copy");
    demo.interrupt();
    demo.end();
}

#[test]
fn a_vm_moves_on_the_soft_engine() {
    let ended = pageferry(&[
        "demo", "--engine", "soft", "--vcpus", "2", "--memory", "32M", "--json",
    ]);
    ended.assert_ok();
    let json = ended.json();
    assert_complete(&json, "soft");
    assert_eq!(json["delivery"], "exit");
    assert_eq!(json["blackout_exact"], true);
}

#[test]
fn a_vm_moves_without_any_precopy() {
    let args = [
        "demo",
        "--engine",
        "soft",
        "--vcpus",
        "2",
        "--memory",
        "32M",
        "--precopy-passes",
        "0",
        "--json",
    ];
    // If the vCPUs get no time for long, all pages may be there before the first touch.
    let stalled = (0..10).any(|_| {
        let ended = pageferry(&args);
        ended.assert_ok();
        let json = ended.json();
        assert_complete(&json, "soft");
        assert_eq!(json["pages"]["precopy"], 0);
        json["stall_us"]["count"].as_u64().unwrap() > 0
    });
    assert!(stalled, "no vCPU ever waited for a page");
}

#[test]
fn a_demo_ends_precopy_as_it_is_told() {
    const DEMO: [&str; 8] = [
        "demo", "--engine", "soft", "--vcpus", "2", "--memory", "32M", "--json",
    ];
    let passes = |flags: &[&str]| {
        let ended = pageferry(&[&DEMO, flags].concat());
        ended.assert_ok();
        let json = ended.json();
        assert_complete(&json, "soft");
        assert_eq!(json["conditions"]["switch"], flags[1..].join(" "));
        json["passes"].as_array().unwrap().len()
    };
    assert!(passes(&["--switch", "auto"]) >= 1);
    assert!(passes(&["--switch", "after-passes", "2"]) >= 1);
    assert_eq!(passes(&["--switch", "now"]), 0);
    for (flags, part) in [
        (&["--switch", "manual"][..], "nobody can say when a demo"),
        (&["--switch", "later"], "expected auto, manual, now"),
        (&["--switch", "after-passes", "65"], "0 to 64"),
        (
            &["--switch", "auto", "--precopy-passes", "2"],
            "give no other",
        ),
    ] {
        pageferry(&[&DEMO[..7], flags].concat()).assert_failed(2, part);
    }
}

#[test]
fn a_vm_moves_on_kvm_by_every_delivery_there_is() {
    let probe = pageferry(&["probe", "--json"]);
    probe.assert_ok();
    let auto = &probe.json()["auto"];
    if auto["engine"] != "kvm" {
        skip("kvm", format!("no KVM: {}", auto["because"]));
        return;
    }
    let deliveries = auto["deliveries"].as_array().unwrap().clone();
    if deliveries.is_empty() {
        skip("uffd", "userfaultfd is not permitted");
        return;
    }
    for delivery in deliveries {
        let delivery = delivery.as_str().unwrap();
        let args = [
            "demo",
            "--engine",
            "kvm",
            "--vcpus",
            "2",
            "--memory",
            "32M",
            "--delivery",
            delivery,
            "--userfaultfds",
            "2",
            "--fault-readers",
            "2",
            "--json",
        ];
        let ended = pageferry(&args);
        ended.assert_ok();
        assert_complete(&ended.json(), "kvm");
        assert_eq!(ended.json()["delivery"], delivery);
    }
}

#[test]
fn a_page_that_was_changed_is_found_by_the_guest_and_by_the_host() {
    let ended = pageferry(&[
        "demo",
        "--engine",
        "soft",
        "--vcpus",
        "2",
        "--memory",
        "32M",
        "--corrupt-page",
        "--json",
    ]);
    ended.assert_failed(1, "verification failed");
    let verified = &ended.json()["verified"];
    assert_eq!(
        (&verified["guest"], &verified["host"]),
        (&Value::Bool(false), &Value::Bool(false)),
        "{verified}"
    );
}

#[test]
fn the_table_and_the_page_are_for_people() {
    let dir = Dir::new();
    let page = dir.path("report.html");
    let args = [
        "demo",
        "--engine",
        "soft",
        "--vcpus",
        "2",
        "--memory",
        "32M",
        "--report",
        page.to_str().unwrap(),
        "--verbose",
    ];
    let ended = pageferry(&args);
    ended.assert_ok();
    for part in [
        "blackout",
        "verified by the guest",
        "holds",
        "pre-copy",
        "stalls",
    ] {
        assert!(ended.stdout.contains(part), "{part} in {}", ended.stdout);
    }
    // On a busy host every page may have come before a vCPU touched it.
    assert!(
        ended.stdout.contains("p99.9") != ended.stdout.contains("no vCPU touched a page"),
        "{}",
        ended.stdout
    );
    let html = std::fs::read_to_string(page).unwrap();
    assert!(html.ends_with("</html>\n"));
    for part in [
        "<svg",
        "vCPU 1",
        "blackout",
        "pages rewritten a second",
        "both verifications hold",
    ] {
        assert!(html.contains(part), "{part}");
    }
}

#[test]
fn a_delivery_of_another_engine_is_not_to_be_had() {
    let args = [
        "demo",
        "--engine",
        "soft",
        "--vcpus",
        "2",
        "--memory",
        "32M",
        "--delivery",
        "poison",
    ];
    pageferry(&args).assert_failed(4, "use exit");
}

/// A command in a mount namespace with another file in the place of `/dev/kvm`.
fn without_kvm(args: &[&str], tmp: &Dir) -> Option<Process> {
    let possible = Command::new("unshare")
        .args(["-m", "true"])
        .output()
        .is_ok_and(|o| o.status.success());
    if !possible || !std::path::Path::new("/dev/kvm").exists() {
        return None;
    }
    let mut command = Command::new("unshare");
    command
        .args([
            "-m",
            "sh",
            "-c",
            "mount --bind /dev/null /dev/kvm && exec \"$0\" \"$@\"",
        ])
        .arg(env!("CARGO_BIN_EXE_pageferry"))
        .args(args)
        .env("TMPDIR", tmp.path(""));
    Some(Process::spawn(command))
}

#[test]
fn without_kvm_the_engine_is_named_and_auto_takes_the_soft_one() {
    let tmp = Dir::new();
    let Some(process) = without_kvm(&["demo", "--engine", "kvm", "--memory", "32M"], &tmp) else {
        skip(
            "kvm",
            "there is no /dev/kvm to hide, or no right to hide it",
        );
        return;
    };
    process.end().assert_failed(3, "kvm");
    a_kvm_vm_is_refused_without_kvm();
    let auto = without_kvm(&["demo", "--vcpus", "2", "--memory", "32M", "--json"], &tmp)
        .unwrap()
        .end();
    auto.assert_ok();
    assert_complete(&auto.json(), "soft");
    let why = auto.json()["conditions"]["engine_because"].to_string();
    assert!(why.contains("KVM is not usable"), "{why}");
    tmp.assert_empty();
}

/// A destination without KVM refuses a VM of that engine. The VM runs on at its source.
fn a_kvm_vm_is_refused_without_kvm() {
    if pageferry(&["probe", "--json"]).json()["auto"]["engine"] != "kvm" {
        skip("kvm", "/dev/kvm is there, and no VM runs on it");
        return;
    }
    let dir = Dir::new();
    let (vm, listen) = (dir.path("vm"), dir.path("in"));
    let socket = vm.to_str().unwrap();
    let run = [
        "run",
        "--engine",
        "kvm",
        "--memory",
        "32M",
        "--control",
        socket,
    ];
    let source = Process::start(&run, &dir);
    wait_for("the VM", || status(&vm).filter(|s| s["state"] == "running"));
    let address = format!("unix:{}", listen.display());
    let destination = without_kvm(&["receive", "--listen", &address], &dir).unwrap();
    destination.wait_until_said("listening on ");
    let migrate = ["migrate", "--vm", socket, "--to", &address];
    Process::start(&migrate, &dir)
        .end()
        .assert_failed(8, "--engine soft");
    let told = destination.wait_until_said("--engine soft");
    assert!(told.ends_with("still listening"), "{told}");
    destination.interrupt();
    assert_eq!(destination.end().code, Some(9));
    assert_runs_on(&vm);
    source.interrupt();
    source.end().assert_ok();
    dir.assert_empty();
}

#[test]
fn without_permission_for_userfaultfd_a_kvm_vm_cannot_be_received() {
    let tmp = Dir::new();
    let run = |args: &[&str]| {
        let mut command = Command::new("setpriv");
        command
            .args(["--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace", "unshare", "-m", "sh", "-c"])
            .arg("if [ -e /dev/userfaultfd ]; then mount --bind /dev/null /dev/userfaultfd || exit 99; fi; exec \"$0\" \"$@\"")
            .arg(env!("CARGO_BIN_EXE_pageferry"))
            .args(args)
            .env("TMPDIR", tmp.path(""));
        Process::spawn(command).end()
    };
    let possible = Command::new("setpriv")
        .args(["--bounding-set=-sys_ptrace", "unshare", "-m", "true"])
        .output();
    if !possible.is_ok_and(|o| o.status.success()) {
        skip("uffd", "no right to give the right to userfaultfd up");
        return;
    }
    let probe = run(&["probe", "--json"]).json();
    if probe["findings"]["kvm"]["state"] == "missing"
        || probe["findings"]["userfaultfd"]["state"] != "missing"
    {
        skip("kvm", "no KVM here, or userfaultfd is open to everybody");
        return;
    }
    run(&["demo", "--engine", "kvm", "--memory", "32M"])
        .assert_failed(4, "userfaultfd is needed and not permitted");
    let soft = run(&[
        "demo", "--engine", "soft", "--vcpus", "2", "--memory", "32M", "--json",
    ]);
    soft.assert_ok();
    assert_complete(&soft.json(), "soft");
    tmp.assert_empty();
}

#[test]
fn the_probe_says_what_is_there_and_what_it_means() {
    let ended = pageferry(&["probe"]);
    ended.assert_ok();
    for part in [
        "kvm",
        "userfaultfd",
        "memfd",
        "huge-pages",
        "privileges",
        "cores",
        "memory",
        "auto chooses engine",
    ] {
        assert!(ended.stdout.contains(part), "{part} in {}", ended.stdout);
    }
    let json = pageferry(&["probe", "--json"]).json();
    for finding in json["findings"].as_object().unwrap().values() {
        assert!(
            finding["means"].as_str().is_some_and(|m| !m.is_empty()),
            "{finding}"
        );
        assert!(
            finding["state"] != "missing" || !finding["advice"].is_null(),
            "{finding}"
        );
    }
}
