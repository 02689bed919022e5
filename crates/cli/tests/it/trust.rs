//! TLS between two processes: peers that prove who they are, and peers that do not.

use crate::support::certificates::{Authority, Now, Side, SideFlags};
use crate::support::{
    Destination, Process, Source, assert_whole, held_link, pageferry, status, wait_for_handover,
};
use pageferry_testkit::shaper::Which;

fn refs(flags: &[String]) -> Vec<&str> {
    flags.iter().map(String::as_str).collect()
}

/// A destination with these files, which takes a source named `here`.
fn destination(files: &Side) -> Destination {
    Destination::start_on_tcp(&refs(&files.flags("here")))
}

/// Migrates with these files to a destination named `there`.
fn migrate(source: &Source, to: &str, files: &Side, more: &[&str]) -> Process {
    let mut flags = files.flags("there");
    flags.extend(more.iter().map(ToString::to_string));
    source.migrate_with(to, &refs(&flags))
}

#[test]
fn a_vm_moves_over_tls_and_survives_lost_connections() {
    let authority = Authority::new("test");
    let (here, there) = (
        authority.issue(&["here"], Now),
        authority.issue(&["there"], Now),
    );
    let destination = destination(&there);
    let shaper = held_link(&destination.address);
    let source = Source::start("16M");
    source.wait_until_all_is_written();
    let more = ["--precopy-passes", "0", "--channels", "2"];
    let mut migrate = migrate(&source, &shaper.addr().to_string(), &here, &more);
    wait_for_handover(&mut migrate, &destination.socket);
    shaper.reset(Which::All);
    shaper.throttle(None);
    migrate.end().assert_ok();
    source.process.end().assert_ok();
    source.dir.assert_empty();
    assert_whole(&destination.socket);
    let session = status(&destination.socket).unwrap()["session"].clone();
    assert_eq!(session["stage"], "completed", "{session}");
    assert!(session["reconnects"].as_u64().unwrap() >= 1, "{session}");
    destination.process.interrupt();
    destination.process.end().assert_ok();
}

/// A migration with these files fails for the reasons of both ends, and the VM is untouched.
#[track_caller]
fn assert_untrusted(here: &Side, there: &Side, at_source: &str, at_destination: &str) {
    let destination = destination(there);
    let source = Source::start("16M");
    let refused = migrate(&source, &destination.address, here, &[]);
    refused.end().assert_failed(16, at_source);
    let rest = destination.process.wait_until_said(at_destination);
    assert!(rest.ends_with("still listening"), "{rest}");
    assert_eq!(status(&destination.socket).unwrap()["state"], "waiting");
    source.assert_unharmed();
}

#[test]
fn a_destination_of_another_authority_is_refused() {
    let (ours, other) = (Authority::new("ours"), Authority::new("other"));
    // The destination trusts the source, which does not trust it.
    let there = ours.trusted_by(other.issue(&["there"], Now));
    let here = ours.issue(&["here"], Now);
    let why = "no CA of this side signed the peer's certificate";
    assert_untrusted(&here, &there, why, "no CA of the peer signed it");
}

#[test]
fn a_source_of_another_authority_is_refused() {
    let (ours, other) = (Authority::new("ours"), Authority::new("other"));
    // The source trusts the destination, which does not trust it.
    let here = ours.trusted_by(other.issue(&["here"], Now));
    let there = ours.issue(&["there"], Now);
    let why = "no CA of this side signed the peer's certificate";
    assert_untrusted(&here, &there, "no CA of the peer signed it", why);
}

#[test]
fn a_certificate_for_another_host_is_refused() {
    let authority = Authority::new("test");
    let (here, there) = (
        authority.issue(&["here"], Now),
        authority.issue(&["elsewhere"], Now),
    );
    let why = "the peer's certificate is not for `there`";
    assert_untrusted(
        &here,
        &there,
        why,
        "it is not for the name that the peer expects",
    );
}

#[test]
fn a_side_without_tls_is_refused_by_one_with_it() {
    let authority = Authority::new("test");
    let (here, there) = (
        authority.issue(&["here"], Now),
        authority.issue(&["there"], Now),
    );
    let source = Source::start("16M");
    let with = destination(&there);
    source
        .migrate(&with.address)
        .end()
        .assert_failed(16, "the destination requires TLS");
    let without = Destination::start_on_tcp(&[]);
    migrate(&source, &without.address, &here, &[])
        .end()
        .assert_failed(16, "TLS");
    source.assert_unharmed();
}

#[test]
fn files_that_do_not_serve_are_usage_errors() {
    let authority = Authority::new("test");
    let (here, other) = (
        authority.issue(&["here"], Now),
        authority.issue(&["other"], Now),
    );
    let source = Source::start("16M");
    let mut flags = here.flags("there");
    flags[3] = other.flags("there")[3].clone();
    source
        .migrate_with("127.0.0.1:9", &refs(&flags))
        .end()
        .assert_failed(2, "is not that of the certificate");
    flags[1] = "/no/such/file".into();
    let mut receive = vec!["receive", "--listen", "127.0.0.1:0"];
    receive.extend(refs(&flags));
    pageferry(&receive).assert_failed(2, "cannot read the PEM file /no/such/file");
    pageferry(&["receive", "--listen", "127.0.0.1:0", "--tls-cert", "x"])
        .assert_failed(2, "required arguments");
    source.assert_unharmed();
}

/// The version of TLS, and the peer's name.
fn seen(json: &serde_json::Value) -> [Option<&str>; 2] {
    assert!(
        json["protocol_version"]
            .as_u64()
            .or(json["version"].as_u64())
            > Some(0),
        "{json}"
    );
    [json["tls"].as_str(), json["peer_name"].as_str()]
}

#[test]
fn results_say_whether_tls_was_used_and_with_whom() {
    let authority = Authority::new("test");
    let (here, there) = (
        authority.issue(&["here", "here.example"], Now),
        authority.issue(&["there.example", "there"], Now),
    );
    // The one asked for, and the first of the certificate where none was asked for.
    let flags = there.flags("here.example");
    for (flags, name) in [(&flags[..], "here.example"), (&flags[..6], "here")] {
        let source = Source::start("16M");
        let destination = Destination::start_on_tcp(&[&refs(flags)[..], &["--json"]].concat());
        let sent = migrate(&source, &destination.address, &here, &[]).end();
        sent.assert_ok();
        assert_eq!(seen(&sent.json()), [Some("TLS 1.3"), Some("there")]);
        assert_whole(&destination.socket);
        let session = status(&destination.socket).unwrap()["session"].clone();
        assert_eq!(seen(&session), [Some("TLS 1.3"), Some(name)]);
        destination.process.interrupt();
        let received = destination.process.end();
        received.assert_ok();
        assert_eq!(seen(&received.json()), [Some("TLS 1.3"), Some(name)]);
    }
    let (source, destination) = (Source::start("16M"), Destination::start_on_tcp(&[]));
    let sent = source.migrate(&destination.address).end();
    sent.assert_ok();
    assert_eq!(seen(&sent.json()), [None, None]);
    assert_whole(&destination.socket);
    let session = status(&destination.socket).unwrap()["session"].clone();
    assert_eq!(seen(&session), [None, None]);
}
