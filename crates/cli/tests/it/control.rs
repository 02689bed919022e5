//! The control socket: its permissions, and clients that must not harm the VM.

use crate::support::{Source, assert_runs_on, pageferry, pages_done, status, wait_for_no_clients};
use pageferry_testkit::LIMIT;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

fn connect(source: &Source) -> UnixStream {
    let stream = UnixStream::connect(&source.socket).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.set_write_timeout(Some(LIMIT)).unwrap();
    stream
}

fn answer(stream: &mut UnixStream) -> String {
    let mut line = Vec::new();
    let mut byte = [0];
    while stream.read(&mut byte).unwrap() == 1 && byte[0] != b'\n' {
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

#[test]
fn only_its_owner_may_use_it() {
    let source = Source::start("16M");
    let mode = std::fs::metadata(&source.socket)
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    source.assert_unharmed();
}

#[test]
fn several_requests_may_follow_each_other_on_one_connection() {
    let source = Source::start("16M");
    let mut stream = connect(&source);
    stream
        .write_all(b"{\"command\":\"pause\"}\n{\"command\":\"status\"}\n")
        .unwrap();
    assert_eq!(answer(&mut stream), "{\"result\":{\"state\":\"paused\"}}");
    let paused: serde_json::Value = serde_json::from_str(&answer(&mut stream)).unwrap();
    assert_eq!(paused["result"]["state"], "paused");
    let done = pages_done(&source.socket);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(
        pages_done(&source.socket),
        done,
        "a paused guest makes no progress"
    );
    let failed = source.migrate("127.0.0.1:9").end();
    failed.assert_failed(6, "the VM stays paused at the source");
    assert_eq!(status(&source.socket).unwrap()["state"], "paused");
    stream.write_all(b"{\"command\":\"resume\"}\n").unwrap();
    assert_eq!(answer(&mut stream), "{\"result\":{\"state\":\"running\"}}");
    assert_runs_on(&source.socket);
    source.assert_unharmed();
}

#[test]
fn the_commands_for_it_do_what_they_say() {
    let source = Source::start("16M");
    let socket = source.socket.to_str().unwrap().to_owned();
    let run = |command: &str| pageferry(&[command, "--vm", &socket]);
    run("pause").assert_ok();
    let paused = run("status");
    paused.assert_ok();
    assert!(paused.stdout.contains("paused"), "{paused:?}");
    run("verify").assert_ok();
    assert_eq!(
        status(&source.socket).unwrap()["state"],
        "paused",
        "verify leaves it as it was"
    );
    run("resume").assert_ok();
    let json = pageferry(&["status", "--vm", &socket, "--json"]).json();
    assert_eq!(
        (&json["engine"], &json["vcpus"]),
        (&"soft".into(), &2.into())
    );
    assert!(
        json["overhead_bytes"]["total"].as_u64().unwrap() < 64 << 20,
        "{json}"
    );
    source.assert_unharmed();
}

#[test]
fn nonsense_is_answered_with_an_error_and_harms_nothing() {
    let source = Source::start("16M");
    let mut stream = connect(&source);
    for nonsense in [
        &b"\n"[..],
        b"{\n",
        b"null\n",
        b"\x00\xff\xfe\n",
        b"{\"command\":\"explode\"}\n",
        b"{\"command\":\"migrate\"}\n",
        b"{\"command\":\"migrate\",\"to\":7,\"precopy_passes\":1}\n",
        b"{\"command\":\"migrate\",\"to\":\"nowhere\",\"precopy_passes\":1}\n",
        b"{\"command\":\"migrate\",\"to\":\"h:1\",\"precopy_passes\":4000000000}\n",
        b"{\"command\":\"cancel\"}\n",
        b"{\"command\":\"report\"}\n",
    ] {
        stream.write_all(nonsense).unwrap();
        let text = answer(&mut stream);
        let line: serde_json::Value =
            serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text:?}"));
        assert!(
            line["error"]["message"]
                .as_str()
                .is_some_and(|m| !m.is_empty()),
            "{text}"
        );
    }
    source.assert_unharmed();
}

#[test]
fn a_line_without_end_is_cut_off() {
    let source = Source::start("16M");
    let mut stream = connect(&source);
    // The server may close the connection before it has read everything.
    let _ = stream.write_all(&vec![b'x'; 1 << 20]);
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text);
    assert!(
        text.is_empty() || text.contains("at most 65536 bytes"),
        "{text}"
    );
    source.assert_unharmed();
}

#[test]
fn clients_that_vanish_or_do_not_read_harm_nothing() {
    let source = Source::start("16M");
    for _ in 0..50 {
        let mut stream = connect(&source);
        // With one client too many at a time, the server may close this one before the write is
        // done.
        let _ = stream.write_all(b"{\"command\":\"stat");
    }
    let mut deaf = connect(&source);
    for _ in 0..20_000 {
        // Fails once the server has dropped a client that does not read.
        if deaf
            .set_write_timeout(Some(Duration::from_secs(5)))
            .is_err()
            || deaf.write_all(b"{\"command\":\"status\"}\n").is_err()
        {
            break;
        }
    }
    pageferry_testkit::wait_for("others to be served", || status(&source.socket));
    drop(deaf);
    wait_for_no_clients(&source.process);
    source.assert_unharmed();
}

#[test]
fn idle_clients_do_not_keep_others_out() {
    let source = Source::start("16M");
    let idle: Vec<_> = (0..40).map(|_| connect(&source)).collect();
    for _ in 0..3 {
        pageferry(&["status", "--vm", source.socket.to_str().unwrap()]).assert_ok();
    }
    drop(idle);
    wait_for_no_clients(&source.process);
    source.assert_unharmed();
}

#[test]
fn a_result_that_cannot_be_written_is_a_failure() {
    let source = Source::start("16M");
    for json in [true, false] {
        let mut command = std::process::Command::new("sh");
        let json = if json { "--json" } else { "" };
        let line = format!(
            "\"$0\" status {json} --vm {} >/dev/full",
            source.socket.display()
        );
        command.args(["-c", &line, env!("CARGO_BIN_EXE_pageferry")]);
        let ended = crate::support::Process::spawn(command).end();
        ended.assert_failed(12, "cannot write the result");
    }
    source.assert_unharmed();
}

#[test]
fn a_client_that_vanishes_in_a_migration_does_not_stop_it() {
    let source = Source::start("16M");
    let destination = crate::support::Destination::start(&[]);
    let mut stream = connect(&source);
    let request = format!(
        "{{\"command\":\"migrate\",\"to\":\"{}\",\"precopy_passes\":1}}\n",
        destination.address
    );
    stream.write_all(request.as_bytes()).unwrap();
    drop(stream);
    source.process.end().assert_ok();
    assert_runs_on(&destination.socket);
    destination.process.interrupt();
    destination.process.end().assert_ok();
    destination.dir.assert_empty();
}
