//! A Cloud Hypervisor that sends something else: one sentence, and its VM runs on.

use crate::ch::{self, Directory, Hosts, options, sender};
use pageferry_bridge::foreign::{Departure, SourceOptions, VmmError};
use pageferry_testkit::cloud_hypervisor::Quirk;

fn take(directory: &Directory) -> Result<Departure, VmmError> {
    ch::take(options(directory, false), &|| false)
}

#[test]
fn what_is_no_vm_is_refused_in_a_sentence_and_runs_on() {
    for (quirk, sentence) in [
        (Quirk::Version, "migration protocol version 7: expected 0"),
        (Quirk::Command, "unknown command 42: expected 1 to 9"),
        (Quirk::ConfigFirst, "sent Config where Start was due"),
        (Quirk::NotShared, "start it with --memory shared=on"),
        (Quirk::Inline, "start it with --memory shared=on"),
        (
            Quirk::ShortMemfd,
            "its memfd has 4096 bytes, expected 4194304 from 1048576",
        ),
        (Quirk::SealedMemfd, "sealed against writing"),
        (Quirk::NoMemfd, "its descriptor is no memfd"),
        (
            Quirk::NoDescriptor,
            "0 descriptors came with it, expected 1",
        ),
        (Quirk::TwiceMemfd, "the memfd of slot 6: it came twice"),
        (
            Quirk::ExtraMemfd,
            "the memfd of slot 99: Config does not map it",
        ),
        (Quirk::ExtraMapping, "the memfd of slot 77: it did not come"),
        (Quirk::Overlap, "the next mapping begins inside it"),
        (Quirk::NoJson, "Config is no JSON with memory_manager_data"),
        (Quirk::LongConfig, "has a payload of 1099511627776 bytes"),
    ] {
        let directory = Directory::new();
        let Some(mut double) = sender(&directory, quirk) else {
            return;
        };
        double.run();
        let error = take(&directory).err().map(|error| error.to_string());
        let error = error.unwrap_or_default();
        assert!(error.contains(sentence), "{quirk:?}: {error}");
        let status = double.outcome();
        assert!(
            status.outcome.starts_with("failed: "),
            "{quirk:?}: {status:?}"
        );
        assert_eq!(status.state, "Running", "{quirk:?}");
        assert_eq!(double.verify().wrong, 0, "{quirk:?}");
    }
}

#[test]
fn a_vm_that_nobody_moves_runs_on() {
    let directory = Directory::new();
    let Some(mut double) = sender(&directory, Quirk::Right) else {
        return;
    };
    double.run();
    let source = take(&directory).unwrap();
    assert_eq!(source.memory_bytes(), 12 << 20);
    assert_eq!(double.status().state, "Running");
    drop(source);
    assert_eq!(double.outcome().state, "Running");
}

#[test]
fn sockets_without_an_api_are_refused() {
    let directory = Directory::new();
    let options = |name: &str| SourceOptions {
        api: directory.join(name),
        preserve: false,
        keeper: None,
    };
    let refused = |name: &str| {
        let error = ch::take(options(name), &|| false).err();
        error.map(|error| error.to_string()).unwrap_or_default()
    };
    assert!(
        refused("none").contains("cannot reach the API socket"),
        "{}",
        refused("none")
    );
    std::fs::write(directory.join("file"), "").unwrap();
    assert!(
        refused("file").contains("cannot reach the API socket"),
        "{}",
        refused("file")
    );
    let listener = std::os::unix::net::UnixListener::bind(directory.join("other")).unwrap();
    let server = std::thread::spawn(move || {
        use std::io::{Read as _, Write as _};
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"SSH-2.0-no-http\r\n\r\n").unwrap();
        // A close with unread bytes would reset the connection.
        let _ = stream.read(&mut [0; 4096]);
    });
    let error = refused("other");
    assert!(
        error.contains("answered GET /api/v1/vmm.ping by something else"),
        "{error}"
    );
    server.join().unwrap();
}

#[test]
fn a_process_without_a_vm_has_none_to_send() {
    let Some(hosts) = Hosts::start(Quirk::Right, Quirk::Right) else {
        return;
    };
    let error = ch::take(hosts.target_as_source(), &|| false).err();
    let error = error.map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("VM is not created"), "{error}");
}
