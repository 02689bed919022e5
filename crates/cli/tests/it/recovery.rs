//! Connections that break after the hand-over, and the operator's commands.

use crate::support::{
    Destination, Source, assert_runs_on, assert_whole, held_link, pageferry, status, wait_during,
    wait_for_handover,
};
use pageferry_testkit::shaper::Which;
use pageferry_testkit::wait_for;

fn stage(socket: &std::path::Path) -> Option<String> {
    let status = status(socket)?;
    Some(status["session"]["stage"].as_str()?.to_owned())
}

#[test]
fn a_vm_goes_on_when_all_connections_break() {
    let source = Source::start("16M");
    let destination = Destination::start_on_tcp(&[]);
    let shaper = held_link(&destination.address);
    source.wait_until_all_is_written();
    let more = [
        "--precopy-passes",
        "0",
        "--channels",
        "2",
        "--urgent-channels",
        "2",
    ];
    let mut migrate = source.migrate_with(&shaper.addr().to_string(), &more);
    wait_for_handover(&mut migrate, &destination.socket);
    for _ in 0..3 {
        shaper.reset(Which::All);
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    shaper.throttle(None);
    assert_runs_on(&destination.socket);
    let ended = migrate.end();
    ended.assert_ok();
    let report = ended.json();
    assert!(report["reconnects"].as_u64().unwrap() >= 1, "{report}");
    assert!(report["channels_lost"].as_u64().unwrap() >= 1, "{report}");
    source.process.end().assert_ok();
    let session = status(&destination.socket).unwrap()["session"].clone();
    assert!(session["reconnects"].as_u64().unwrap() >= 1, "{session}");
    assert_whole(&destination.socket);
}

#[test]
fn a_stopped_destination_is_left_and_found_again() {
    use rustix::process::Signal;
    let source = Source::start("16M");
    let destination = Destination::start_on_tcp(&[]);
    let shaper = held_link(&destination.address);
    source.wait_until_all_is_written();
    let more = ["--precopy-passes", "0", "--dead-after", "300ms"];
    let mut migrate = source.migrate_with(&shaper.addr().to_string(), &more);
    wait_for_handover(&mut migrate, &destination.socket);
    destination.process.signal(Signal::STOP);
    wait_during(&mut migrate, "the source to notice", || {
        let status = status(&source.socket)?;
        (status["session"]["generation"].as_u64()? > 1).then_some(())
    });
    destination.process.signal(Signal::CONT);
    shaper.throttle(None);
    migrate.end().assert_ok();
    source.process.end().assert_ok();
    assert_whole(&destination.socket);
}

#[test]
fn an_operator_gives_another_way() {
    let source = Source::start("16M");
    let destination = Destination::start_on_tcp(&[]);
    let shaper = held_link(&destination.address);
    let (here, there) = (&source.socket, &destination.socket);
    let vm = |socket: &std::path::Path| socket.to_str().unwrap().to_owned();
    pageferry(&["recover", "--vm", &vm(here), "--to", "127.0.0.1:1"])
        .assert_failed(17, "nothing to recover");
    source.wait_until_all_is_written();
    let mut migrate = source.migrate_with(&shaper.addr().to_string(), &["--precopy-passes", "0"]);
    wait_for_handover(&mut migrate, there);
    shaper.refuse(true);
    shaper.reset(Which::All);
    pageferry(&["recover", "--vm", &vm(here), "--listen", "127.0.0.1:0"])
        .assert_failed(17, "this is the source");
    let listening = pageferry(&["recover", "--vm", &vm(there), "--listen", "127.0.0.1:0"]);
    listening.assert_ok();
    let address = listening.stdout.split_whitespace().nth(2).unwrap();
    pageferry(&["recover", "--vm", &vm(here), "--to", address]).assert_ok();
    migrate.end().assert_ok();
    source.process.end().assert_ok();
    assert_whole(there);
}

#[test]
fn an_operator_ends_it_and_resumes_the_whole_copy() {
    let source = Source::start("16M");
    let destination = Destination::start_on_tcp(&[]);
    let shaper = held_link(&destination.address);
    source.wait_until_all_is_written();
    let vm = source.socket.to_str().unwrap();
    pageferry(&["abandon", "--vm", vm]).assert_failed(17, "nothing to abandon");
    let mut migrate = source.migrate_with(&shaper.addr().to_string(), &["--precopy-passes", "0"]);
    wait_for_handover(&mut migrate, &destination.socket);
    shaper.refuse(true);
    shaper.reset(Which::All);
    let there = destination.socket.to_str().unwrap();
    let ended = pageferry(&["abandon", "--vm", there]);
    ended.assert_ok();
    assert!(
        ended.stdout.contains("of its pages never came"),
        "{ended:?}"
    );
    wait_for("the VM to stand still there", || {
        (status(&destination.socket)?["state"] == "incomplete").then_some(())
    });
    pageferry(&["abandon", "--vm", vm]).assert_ok();
    migrate
        .end()
        .assert_failed(10, "stays paused at the source");
    wait_for("the state given-up", || {
        (status(&source.socket)?["state"] == "given-up").then_some(())
    });
    let resumed = pageferry(&["abandon", "--vm", vm, "--resume-here"]);
    resumed.assert_ok();
    assert!(resumed.stdout.contains("it runs twice now"), "{resumed:?}");
    assert_whole(&source.socket);
}

#[test]
fn an_operator_who_knows_that_the_destination_is_gone_runs_the_vm_at_its_source() {
    let source = Source::start("16M");
    let destination = Destination::start_on_tcp(&[]);
    let shaper = held_link(&destination.address);
    source.wait_until_all_is_written();
    let vm = source.socket.to_str().unwrap();
    let mut migrate = source.migrate_with(&shaper.addr().to_string(), &["--precopy-passes", "0"]);
    wait_for_handover(&mut migrate, &destination.socket);
    pageferry(&["cancel", "--vm", vm]).assert_failed(17, "too late to cancel");
    // Its host loses power.
    drop(destination);
    let resumed = pageferry(&["abandon", "--vm", vm, "--resume-here"]);
    resumed.assert_ok();
    assert!(resumed.stdout.contains("at the destination"), "{resumed:?}");
    migrate
        .end()
        .assert_failed(10, "since an operator resumed it");
    assert_eq!(stage(&source.socket).unwrap(), "resumed-here");
    // It may migrate again, as if nothing had been.
    let other = Destination::start(&[]);
    assert_runs_on(&source.socket);
    source.migrate(&other.address).end().assert_ok();
    source.process.end().assert_ok();
    assert_whole(&other.socket);
}
