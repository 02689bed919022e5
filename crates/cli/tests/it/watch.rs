//! `migrate --events`, `watch`, and the commands of an operator to a migration before the
//! hand-over.

use crate::support::peer::Peer;
use crate::support::{Destination, Process, Source, held_link, pageferry, status};
use pageferry_testkit::shaper::Which;
use pageferry_testkit::wait_for;
use serde_json::Value;

/// The lines of NDJSON.
fn lines(text: &str) -> Vec<Value> {
    let parse = |line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e} in {line}"));
    text.lines().map(parse).collect()
}

/// The time is like 2026-01-31T12:00:00.123Z.
fn assert_time(line: &Value) {
    let at = line["at"].as_str().unwrap_or_else(|| panic!("{line}"));
    assert!(at.len() == 24 && at.ends_with('Z'), "{at}");
    assert_eq!(
        (&at[4..5], &at[10..11], &at[19..20]),
        ("-", "T", "."),
        "{at}"
    );
}

#[test]
fn events_have_times_and_tell_of_losses() {
    let source = Source::start("16M");
    let destination = Destination::start_on_tcp(&[]);
    let shaper = held_link(&destination.address);
    source.wait_until_all_is_written();
    let to = shaper.addr().to_string();
    let args = [
        "migrate",
        "--vm",
        source.socket.to_str().unwrap(),
        "--to",
        &to,
    ];
    let args = [&args[..], &["--events", "--precopy-passes", "0"]].concat();
    let migrate = Process::start(&args, &source.dir);
    migrate.wait_until_said("handed-over");
    shaper.reset(Which::All);
    let watch = [
        "watch",
        "--json",
        "--vm",
        destination.socket.to_str().unwrap(),
    ];
    let watch = Process::start(&watch, &destination.dir);
    watch.wait_until_said("stage");
    migrate.wait_until_said("reconnected");
    let rates = |line: &Value| {
        let rates = &line["event"]["session"]["rates"];
        let number = |key: &str| rates[key].as_u64().unwrap_or(0);
        number("page_rate") > 0 && number("bytes_left") > 0 && number("time_left_ms") > 0
    };
    wait_for("rates", || {
        let said = migrate.said();
        let (whole, _) = said.rsplit_once('\n')?;
        lines(whole).iter().any(rates).then_some(())
    });
    shaper.throttle(None);
    let ended = migrate.end();
    ended.assert_ok();
    let told = lines(&ended.stdout);
    told.iter().for_each(assert_time);
    let at = |name: &str, wanted: &dyn Fn(&Value) -> bool| {
        let found = told.iter().position(wanted);
        found.unwrap_or_else(|| panic!("no {name} in {told:?}"))
    };
    let stage = |name: &'static str| move |line: &Value| line["event"]["session"]["stage"] == name;
    let handed_over = at("hand-over", &stage("handed-over"));
    let lost = at("loss", &|line| line["event"]["session"]["lost"].is_object());
    let again = at("return", &|line| {
        line["event"]["session"]["reconnected"].is_object()
    });
    let completed = at("completion", &stage("completed"));
    assert!(
        handed_over < lost && lost < again && again < completed,
        "{told:?}"
    );
    let phase = |line: &Value| line["event"]["phase"]["phase"] == "post-copy";
    at("phase", &phase);
    at("rates", &rates);
    let last = told.last().unwrap();
    assert!(last["result"]["pages"]["urgent"].is_u64(), "{last}");
    source.process.end().assert_ok();

    let watched = watch.end();
    watched.assert_ok();
    let watched = lines(&watched.stdout);
    watched.iter().for_each(assert_time);
    assert_eq!(watched.last().unwrap()["state"], "running", "{watched:?}");
    assert!(watched[0]["session"]["stage"].is_string(), "{watched:?}");
}

#[test]
fn a_log_has_times_levels_and_stages() {
    let demo = |more: &[&str]| {
        let demo = ["demo", "--engine", "soft", "--vcpus", "1"];
        let ended = pageferry(&[&demo[..], &["--memory", "16M"], more].concat());
        ended.assert_ok();
        ended.stderr
    };
    let said = demo(&["--log", "info"]);
    let line = said.lines().find(|line| line.contains("HandedOver"));
    let line = line.unwrap_or_else(|| panic!("no hand-over in {said}"));
    assert_time(&serde_json::json!({"at": &line[..24]}));
    assert!(line[24..].trim_start().starts_with("INFO "), "{line}");
    assert!(line.contains("pageferry_migration::source"), "{line}");
    assert!(!demo(&[]).contains("INFO"), "the default is warn");
    pageferry(&["--log", "loud", "exit-codes"]).assert_failed(2, "expected off, error");
}

#[test]
fn a_failed_migration_ends_its_events_with_the_error() {
    let source = Source::start("16M");
    let (_taken, address) = crate::support::peer::nobody();
    let args = ["migrate", "--vm", source.socket.to_str().unwrap()];
    let args = [&args[..], &["--to", &address, "--events"]].concat();
    let ended = Process::start(&args, &source.dir).end();
    ended.assert_failed(6, "nobody listens there");
    let told = lines(&ended.stdout);
    let last = told.last().unwrap();
    assert_time(last);
    assert_eq!(last["error"]["kind"], "unreachable", "{last}");
    source.assert_unharmed();
}

#[test]
fn a_watch_ends_with_the_migration_or_its_time() {
    let source = Source::start("16M");
    let socket = source.socket.to_str().unwrap();
    let now = pageferry(&["watch", "--vm", socket]);
    now.assert_ok();
    assert_eq!(now.stdout, "running\n", "nothing is under way");
    let (address, server) = Peer::start(|mut peer| {
        peer.set_up_and_take_no_page();
        peer.until_closed();
    });
    let migrate = source.migrate(&address);
    let pre_copy = || {
        let phase = status(&source.socket)?["phase"].clone();
        phase.as_str()?.starts_with("pre-copy").then_some(())
    };
    wait_for("pre-copy", pre_copy);
    let some = pageferry(&["watch", "--vm", socket, "--for", "100ms"]);
    some.assert_ok();
    assert!(some.stdout.starts_with("leaving: pre-copy"), "{some:?}");
    assert!(some.stdout.contains("pages to go"), "{some:?}");
    assert!(some.stdout.contains("16 MiB to go, 0 B/s"), "{some:?}");
    let watch = Process::start(&["watch", "--vm", socket], &source.dir);
    watch.wait_until_said("pages to go");
    let abandon = pageferry(&["abandon", "--vm", socket, "--resume-here"]);
    abandon.assert_failed(17, "use `pageferry cancel`");
    pageferry(&["recover", "--vm", socket, "--to", "127.0.0.1:9"])
        .assert_failed(17, "not handed over yet");
    pageferry(&["cancel", "--vm", socket]).assert_ok();
    migrate
        .end()
        .assert_failed(9, "the VM runs on at the source");
    let watched = watch.end();
    watched.assert_ok();
    assert!(
        watched
            .stdout
            .lines()
            .last()
            .unwrap()
            .starts_with("running"),
        "{watched:?}"
    );
    pageferry(&["cancel", "--vm", socket]).assert_failed(17, "no migration is under way");
    server.join().unwrap();
    source.assert_unharmed();
}
