//! `migrate --check` proves the way to a destination, and moves nothing.

use crate::support::certificates::{Authority, Now, Side, SideFlags};
use crate::support::peer::nobody;
use crate::support::{Destination, Source, pageferry, status};

/// Checks the way to `to` with more flags.
fn checked(source: &Source, to: &str, more: &[String]) -> crate::support::Ended {
    let socket = source.socket.to_str().unwrap();
    let mut args = vec!["migrate", "--vm", socket, "--to", to, "--check"];
    args.extend(more.iter().map(String::as_str));
    pageferry(&args)
}

/// A destination that was checked is as before, and has said nothing of it. Then the VM moves.
#[track_caller]
fn assert_ready(source: Source, destination: Destination, flags: &[String]) {
    let state = status(&destination.socket).unwrap();
    assert_eq!(state["state"], "waiting", "{state}");
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let to = &destination.address;
    source.migrate_with(to, &flags).end().assert_ok();
    source.process.end().assert_ok();
    destination.process.interrupt();
    let ended = destination.process.end();
    ended.assert_ok();
    for alarm in ["turned away", "error", "failed", "still listening"] {
        assert!(!ended.stderr.contains(alarm), "{alarm}: {ended:?}");
    }
}

#[test]
fn a_plain_destination_is_checked_and_stays_ready() {
    let (source, destination) = (Source::start("16M"), Destination::start_on_tcp(&[]));
    // More often than sessions may wait at a destination.
    for _ in 0..10 {
        let ended = checked(&source, &destination.address, &[]);
        ended.assert_ok();
        let says = format!(
            "{} can take the VM: protocol version 7, plain, without TLS; nothing was moved\n",
            destination.address
        );
        assert_eq!(ended.stdout, says);
    }
    let json = checked(&source, &destination.address, &["--json".into()]).json();
    assert_eq!((&json["version"], &json["tls"]), (&7.into(), &().into()));
    assert_eq!(status(&source.socket).unwrap()["state"], "running");
    assert_ready(source, destination, &[]);
}

fn with_tls(files: &Side) -> Destination {
    let flags = files.flags("here");
    Destination::start_on_tcp(&flags.iter().map(String::as_str).collect::<Vec<_>>())
}

#[test]
fn a_destination_with_tls_is_checked_by_its_name() {
    let authority = Authority::new("test");
    let (here, there) = (
        authority.issue(&["here"], Now),
        authority.issue(&["there"], Now),
    );
    let (source, destination) = (Source::start("16M"), with_tls(&there));
    let flags = here.flags("there");
    let ended = checked(&source, &destination.address, &flags);
    ended.assert_ok();
    let says = "protocol version 7, TLS 1.3 with `there`; nothing was moved";
    assert!(ended.stdout.contains(says), "{ended:?}");
    assert_ready(source, destination, &flags);
}

#[test]
fn a_check_fails_as_the_migration_would() {
    let source = Source::start("16M");
    let (_taken, address) = nobody();
    let ended = checked(&source, &address, &[]);
    ended.assert_failed(6, "nobody listens there; the VM runs on at the source");
    let (ours, other) = (Authority::new("ours"), Authority::new("other"));
    let (here, there) = (ours.issue(&["here"], Now), ours.issue(&["there"], Now));
    let destination = with_tls(&there);
    let stranger = ours.trusted_by(other.issue(&["here"], Now));
    for (flags, says) in [
        (
            here.flags("elsewhere"),
            "the peer's certificate is not for `elsewhere`",
        ),
        (stranger.flags("there"), "no CA of the peer signed it"),
        (Vec::new(), "the destination requires TLS"),
    ] {
        let ended = checked(&source, &destination.address, &flags);
        ended.assert_failed(16, says);
    }
    let socket = source.socket.to_str().unwrap();
    pageferry(&["pause", "--vm", socket]).assert_ok();
    let ended = checked(&source, &address, &[]);
    ended.assert_failed(6, "nobody listens there; the VM stays paused at the source");
    pageferry(&["resume", "--vm", socket]).assert_ok();
    source.assert_unharmed();
}

#[test]
fn a_check_does_not_wait_for_a_busy_destination() {
    let destination = Destination::start(&[]);
    let first = crate::peers::busy(&destination);
    let source = Source::start("16M");
    let ended = checked(&source, &destination.address, &[]);
    ended.assert_failed(8, "the destination is busy with another migration");
    drop(first);
    source.assert_unharmed();
}
