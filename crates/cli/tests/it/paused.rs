//! A paused VM moves between processes, and arrives paused. `pause` and `resume` during a
//! migration.

use crate::support::{
    Destination, Source, assert_runs_on, assert_whole, held_link, pageferry, pages_done, status,
    wait_during,
};
use pageferry_testkit::shaper::Which;
use pageferry_testkit::{skip, wait_for};
use std::path::Path;

/// Runs a command for the VM of this socket.
#[track_caller]
fn on(socket: &Path, words: &[&str]) -> crate::support::Ended {
    let mut args = vec![words[0], "--vm", socket.to_str().unwrap()];
    args.extend(&words[1..]);
    pageferry(&args)
}

#[track_caller]
fn wait_for_state(socket: &Path, state: &str) {
    wait_for(state, || (status(socket)?["state"] == state).then_some(()));
}

/// Whether the owner has paused the VM.
fn is_paused(socket: &Path) -> Option<bool> {
    status(socket).unwrap()["paused"].as_bool()
}

/// The VM is here and paused, has done `pages`, is right, and runs on when its owner wants.
#[track_caller]
fn assert_paused_and_whole(socket: &Path, pages: u64) {
    wait_for_state(socket, "paused");
    on(socket, &["verify"]).assert_ok();
    assert_eq!(status(socket).unwrap()["state"], "paused");
    assert_eq!(pages_done(socket), pages, "the guest ran");
    on(socket, &["resume"]).assert_ok();
    assert_whole(socket);
}

#[test]
fn a_paused_vm_arrives_paused_and_moves_on() {
    let mut engines = vec!["soft"];
    match pageferry_machine::kvm::probe_vm() {
        Ok(()) => engines.push("kvm"),
        Err(why) => {
            skip(
                "kvm",
                format_args!("a_paused_vm_arrives_paused_and_moves_on: {why}"),
            );
        }
    }
    for engine in engines {
        let source = Source::start_on(engine, "16M");
        source.wait_until_all_is_written();
        on(&source.socket, &["pause"]).assert_ok();
        let pages = pages_done(&source.socket);
        let (first, second) = (Destination::start(&[]), Destination::start(&[]));
        let moved = source.migrate(&first.address).end();
        moved.assert_ok();
        let report = moved.json();
        assert_eq!(report["paused"], true);
        assert!(report["blackout_ms"].is_null(), "{report}");
        let left = source.process.end();
        left.assert_ok();
        assert!(left.stdout.contains("paused"), "{left:?}");
        wait_for_state(&first.socket, "paused");
        let vm = first.socket.to_str().unwrap();
        let table = pageferry(&["migrate", "--vm", vm, "--to", &second.address]);
        table.assert_ok();
        assert!(table.stdout.contains("paused"), "{table:?}");
        assert!(!table.stdout.contains("the VM runs"), "{table:?}");
        assert_paused_and_whole(&second.socket, pages);
    }
}

#[test]
fn pause_and_resume_count_until_the_switch_over() {
    let source = Source::start("16M");
    let destination = Destination::start(&[]);
    let more = ["--switch", "manual"];
    let migrate = source.migrate_with(&destination.address, &more);
    let in_precopy = || {
        wait_for("a pass", || {
            let session = &status(&source.socket)?["session"];
            // The last migration has a session too.
            let passes = session["passes"].as_u64()?;
            (session["stage"] == "pre-copy" && passes > 0).then_some(())
        });
    };
    in_precopy();
    assert_eq!(is_paused(&source.socket), Some(false));
    on(&destination.socket, &["resume"]).assert_failed(17, "not handed over yet");
    on(&source.socket, &["pause"]).assert_ok();
    assert_eq!(is_paused(&source.socket), Some(true));
    assert_eq!(status(&source.socket).unwrap()["state"], "leaving");
    let pages = pages_done(&source.socket);
    on(&source.socket, &["cancel"]).assert_ok();
    migrate
        .end()
        .assert_failed(9, "the VM stays paused at the source");
    wait_for_state(&source.socket, "paused");

    let migrate = source.migrate_with(&destination.address, &more);
    in_precopy();
    on(&source.socket, &["resume"]).assert_ok();
    wait_for("progress", || {
        (pages_done(&source.socket) > pages).then_some(())
    });
    on(&source.socket, &["set", "--switch", "now"]).assert_ok();
    let moved = migrate.end();
    moved.assert_ok();
    assert_eq!(moved.json()["paused"], false);
    assert_whole(&destination.socket);
}

#[test]
fn the_destination_has_a_paused_vm_from_the_hand_over_on() {
    let source = Source::start("16M");
    let destination = Destination::start_on_tcp(&[]);
    let (here, there) = (&source.socket, &destination.socket);
    let shaper = held_link(&destination.address);
    source.wait_until_all_is_written();
    on(here, &["pause"]).assert_ok();
    let to = shaper.addr().to_string();
    let mut migrate = source.migrate_with(&to, &["--precopy-passes", "0"]);
    wait_during(&mut migrate, "post-copy", || {
        (status(there)?["phase"] == "post-copy").then_some(())
    });
    assert_eq!(is_paused(there), Some(true));
    wait_during(&mut migrate, "the source to know", || {
        is_paused(here)?.then_some(())
    });
    on(here, &["resume"]).assert_failed(17, "pause and resume it at its destination");
    on(there, &["resume"]).assert_ok();
    assert_eq!(is_paused(there), Some(false));
    shaper.reset(Which::All);
    wait_for("progress", || {
        let before = status(there)?["guest"]["pages_done"].clone();
        std::thread::sleep(std::time::Duration::from_millis(50));
        (status(there)?["guest"]["pages_done"] != before).then_some(())
    });
    on(there, &["pause"]).assert_ok();
    shaper.reset(Which::All);
    shaper.throttle(None);
    migrate.end().assert_ok();
    source.process.end().assert_ok();
    wait_for_state(there, "paused");
    assert_paused_and_whole(there, pages_done(there));
}

#[test]
fn a_vm_that_lacks_pages_is_not_one_that_its_owner_has_paused() {
    let source = Source::start("16M");
    let destination = Destination::start_on_tcp(&[]);
    let (here, there) = (&source.socket, &destination.socket);
    let shaper = held_link(&destination.address);
    source.wait_until_all_is_written();
    on(here, &["pause"]).assert_ok();
    let pages = pages_done(here);
    let to = shaper.addr().to_string();
    let mut migrate = source.migrate_with(&to, &["--precopy-passes", "0"]);
    wait_during(&mut migrate, "post-copy", || {
        (status(there)?["phase"] == "post-copy").then_some(())
    });
    shaper.refuse(true);
    shaper.reset(Which::All);
    on(there, &["abandon"]).assert_ok();
    wait_for_state(there, "incomplete");
    assert_eq!(is_paused(there), None);
    on(there, &["resume"]).assert_failed(17, "of its pages never arrived");
    on(here, &["abandon"]).assert_ok();
    migrate
        .end()
        .assert_failed(10, "stays paused at the source");
    wait_for_state(here, "given-up");
    on(here, &["resume"]).assert_failed(17, "may have run there");
    on(here, &["abandon", "--resume-here"]).assert_ok();
    assert_paused_and_whole(here, pages);
    assert_runs_on(here);
}
