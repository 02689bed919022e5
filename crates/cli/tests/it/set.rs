//! `pageferry set`, and the flags of `migrate` that it changes.

use crate::support::{Destination, Dir, Source, pageferry, status};
use pageferry_testkit::wait_for;

#[test]
fn settings_that_cannot_be_are_usage_errors() {
    for (flags, part) in [
        (&["--max-bandwidth", "0"][..], "too few to move a VM"),
        (&["--max-bandwidth", "9999G"], "no link carries"),
        (&["--max-postcopy-bandwidth", "fast"], "invalid rate"),
        (&["--max-blackout", "5"], "is no time"),
        (&[], "required arguments"),
    ] {
        let ended = pageferry(&[&["set", "--vm", "/no/such/socket"], flags].concat());
        ended.assert_failed(2, "");
        assert!(ended.stderr.contains(part), "{flags:?}: {ended:?}");
    }
    pageferry(&["set", "--vm", "/no/such/socket", "--switch", "now"])
        .assert_failed(11, "no VM listens");
}

#[test]
fn a_vm_without_a_migration_has_nothing_to_set() {
    let source = Source::start("16M");
    let socket = source.socket.to_str().unwrap();
    let set = ["set", "--vm", socket, "--max-bandwidth", "1gbit"];
    pageferry(&set).assert_failed(17, "no migration is under way");
    let migrate = ["migrate", "--vm", socket, "--to", "h:1"];
    let (passes, auto) = (["--precopy-passes", "2"], ["--switch", "auto"]);
    let above = ["--max-bandwidth", "1M", "--max-postcopy-bandwidth", "2M"];
    let limited = ["--switch", "after-passes", "2", "--max-blackout", "5ms"];
    for (flags, part) in [
        ([&passes[..], &auto].concat(), "give no other"),
        (above.to_vec(), "is above that for all pages"),
        (limited.to_vec(), "counts with `auto` only"),
        (vec!["--switch", "after-passes", "65"], "0 to 64"),
        (vec!["--switch", "later"], "expected auto, manual, now"),
        (vec!["--max-blackout", "0ms"], "1 ms at least"),
    ] {
        pageferry(&[&migrate[..], &flags].concat()).assert_failed(2, part);
    }
    source.assert_unharmed();
}

#[test]
fn an_operator_holds_the_switch_over_back_and_lets_it_go() {
    let source = Source::start("16M");
    let destination = Destination::start(&[]);
    let flags = ["--switch", "manual", "--max-bandwidth", "800mbit"];
    let migrate = source.migrate_with(&destination.address, &flags);
    let forecast = || status(&source.socket)?["session"]["blackout_forecast_us"].as_u64();
    wait_for("the end of a pass", forecast);
    let socket = source.socket.to_str().unwrap();
    let shown = pageferry(&["status", "--vm", socket]);
    shown.assert_ok();
    for part in [
        "switch-over: manual, all pages up to 95.4 MiB/s",
        "ms expected",
        "acknowledged in it",
    ] {
        assert!(shown.stdout.contains(part), "{part} in {shown:?}");
    }
    let wrong = ["set", "--vm", socket, "--max-blackout", "5ms"];
    pageferry(&wrong).assert_failed(2, "counts with `auto` only, not with `manual`");
    let there = destination.socket.to_str().unwrap();
    let wrong = ["set", "--vm", there, "--switch", "now"];
    pageferry(&wrong).assert_failed(17, "set it at the source");
    let set = [
        "set",
        "--vm",
        socket,
        "--switch",
        "now",
        "--max-bandwidth",
        "none",
    ];
    let set = pageferry(&set);
    set.assert_ok();
    assert_eq!(set.stdout, "switch-over: now\n");
    let ended = migrate.end();
    ended.assert_ok();
    let report = ended.json();
    assert!(
        report["blackout_forecast_ms"].as_f64().unwrap() > 0.0,
        "{report}"
    );
    assert_eq!(report["conditions"]["switch"], "manual");
    assert!(report["conditions"]["precopy_passes"].is_null());
    source.process.end().assert_ok();
}

#[test]
fn a_guest_too_fast_for_its_limit_is_told_at_a_pass_end() {
    // On a busy host the guest may hardly run, and the link may be slower than the limit. A lower
    // limit gives both more time.
    let told = ["32", "8", "2"].iter().any(|limit| {
        let source = Source::start("16M");
        source.wait_until_all_is_written();
        let destination = Destination::start(&[]);
        let socket = source.socket.to_str().unwrap();
        let migrate = ["migrate", "--vm", socket, "--to", &destination.address];
        let rate = format!("{limit}M");
        let flags = ["--events", "--switch", "auto", "--max-bandwidth", &rate];
        let tmp = Dir::new();
        let ended = crate::support::Process::start(&[&migrate[..], &flags].concat(), &tmp).end();
        ended.assert_ok();
        source.process.end().assert_ok();
        assert!(ended.stdout.contains("\"pass-ended\":{"), "{ended:?}");
        let note = "\"note\":\"pre-copy does not converge: the guest dirties ";
        let allows = format!("the limit allows {limit}.0 MiB/s");
        let told = [note, &allows]
            .iter()
            .all(|part| ended.stdout.contains(part));
        if !told {
            eprintln!("at {rate}: {ended:?}");
        }
        told
    });
    assert!(told, "no guest was too fast for its limit");
}
