//! A recorded stream of this protocol version: today's decoder understands every message of it, and
//! encodes each to the same bytes. So a change of the format that keeps the version fails here.
//!
//! A change that is meant is recorded anew:
//!
//! `PAGEFERRY_RECORD=1 cargo test -p pageferry-migration --test it recorded`

use crate::scripted::source::pages_frame;
use crate::support::{WorkloadVm, address_of, listen, receive_as};
use crate::wire_common::encode;
use pageferry_machine::{Apply, Device, Engine, MachineError};
use pageferry_migration::wire::*;
use pageferry_migration::{
    DestinationConfig, Route, RunningVm, SourceConfig, SourceSession, Unobserved, migrate,
};
use pageferry_transport::address::Address;
use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The size of the VM.
const MEMORY: u64 = 64 << 10;

/// The bytes of each connection: those of the source, and those of the destination.
type Record = Vec<[Vec<u8>; 2]>;

fn path() -> PathBuf {
    let name = format!("version-{VERSION}.stream");
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures")).join(name)
}

/// Forwards one direction of a connection, and records it.
fn forward(mut from: &TcpStream, mut to: &TcpStream, keep: impl Fn(&[u8])) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        keep(&bytes[..count]);
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

/// Forwards and records connections until `over`.
fn relay(listener: &TcpListener, to: &Address, record: &Mutex<Record>, over: &AtomicBool) {
    listener.set_nonblocking(true).unwrap();
    std::thread::scope(|scope| {
        while !over.load(Ordering::Acquire) {
            let source = match listener.accept() {
                Ok((source, _)) => source,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                }
                Err(error) => panic!("{error}"),
            };
            source.set_nonblocking(false).unwrap();
            let destination = pageferry_testkit::handshake::socket_of(to);
            let at = record.lock().unwrap().len();
            record.lock().unwrap().push(Default::default());
            scope.spawn(move || {
                let keep = |side: usize| {
                    move |bytes: &[u8]| record.lock().unwrap()[at][side].extend_from_slice(bytes)
                };
                std::thread::scope(|scope| {
                    scope.spawn(|| forward(&source, &destination, keep(0)));
                    forward(&destination, &source, keep(1));
                });
            });
        }
    });
}

/// A device whose state is five bytes.
struct Fixed;

impl Device for Fixed {
    fn name(&self) -> &str {
        "fixed.0"
    }

    fn version(&self) -> u32 {
        3
    }

    fn pause(&self) -> Result<(), MachineError> {
        Ok(())
    }

    fn resume(&self) {}

    fn save(&self) -> Result<Vec<u8>, MachineError> {
        Ok(b"state".to_vec())
    }

    fn decode<'a>(&'a self, _: u32, bytes: &[u8]) -> Result<Apply<'a>, MachineError> {
        assert_eq!(bytes, b"state");
        Ok(Box::new(|| ()))
    }
}

/// Moves a small VM with a device, and returns all that both sides sent.
fn recorded() -> Record {
    let vm = WorkloadVm::booted(Engine::Soft, 1, MEMORY);
    let destination = listen(DestinationConfig::default());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let route = Route::To(listener.local_addr().unwrap().to_string().parse().unwrap());
    let there = WorkloadVm::empty(Engine::Soft, 1, MEMORY);
    let devices = [Arc::new(Fixed) as Arc<dyn Device>];
    let (record, over) = (Mutex::default(), AtomicBool::new(false));
    let session = SourceSession::new().unwrap();
    // Without a push, vCPUs request what is missing.
    let config = SourceConfig {
        push_after: Duration::from_millis(300),
        ..SourceConfig::default()
    };
    std::thread::scope(|scope| {
        let to = address_of(&destination);
        let (record, over, listener) = (&record, &over, &listener);
        scope.spawn(move || relay(listener, &to, record, over));
        let receiver = scope.spawn(|| {
            let running = RunningVm {
                devices: &devices,
                ..there.running()
            };
            receive_as(&running, &there.resolver, &destination).unwrap();
        });
        let running = RunningVm {
            devices: &devices,
            ..vm.running()
        };
        let sent = migrate(
            &running,
            &route,
            b"recorded",
            &config,
            &session,
            &Unobserved,
        );
        receiver.join().unwrap();
        over.store(true, Ordering::Release);
        sent.unwrap();
    });
    record.into_inner().unwrap()
}

fn write(record: &Record) {
    let mut bytes = Vec::new();
    for stream in record.iter().flatten() {
        bytes.extend((stream.len() as u32).to_le_bytes());
        bytes.extend(stream);
    }
    std::fs::create_dir_all(path().parent().unwrap()).unwrap();
    std::fs::write(path(), bytes).unwrap();
}

fn read() -> Record {
    let bytes = std::fs::read(path()).unwrap_or_else(|e| panic!("{}: {e}", path().display()));
    let mut rest = bytes.as_slice();
    let mut record = Record::new();
    while !rest.is_empty() {
        record.push([0, 1].map(|_| {
            let len = u32::from_le_bytes(*take(&mut rest)) as usize;
            let (stream, behind) = rest.split_at(len);
            rest = behind;
            stream.to_vec()
        }));
    }
    record
}

fn take<'a, const N: usize>(rest: &mut &'a [u8]) -> &'a [u8; N] {
    let (head, behind) = rest.split_first_chunk().expect("a whole message");
    *rest = behind;
    head
}

/// Decodes and encodes the handshake. Returns the role of the channel.
fn check_handshake<'a>(source: &mut &'a [u8], destination: &mut &'a [u8]) -> Role {
    let bytes: &[u8; HELLO_BYTES] = take(source);
    let hello = Hello::decode(bytes).unwrap();
    assert_eq!(&hello.encode(), bytes);
    let bytes: &[u8; HELLO_BYTES] = take(destination);
    let reply = HelloReply::decode(bytes, &hello).unwrap();
    assert_eq!(&reply.encode(), bytes);
    let bytes: &[u8; CREDENTIALS_BYTES] = take(source);
    assert_eq!(&Credentials::decode(bytes).unwrap().encode(), bytes);
    let bytes: &[u8; WELCOME_BYTES] = take(destination);
    assert_eq!(&Welcome::decode(bytes).unwrap().encode(), bytes);
    for rest in [source, destination] {
        let bytes: &[u8; PATH_CHECK_BYTES] = take(rest);
        assert_eq!(bytes, path_check());
    }
    hello.key.role
}

/// Decodes and encodes frames. Returns their types.
fn check_frames(mut rest: &[u8], from: Side, on: Role) -> BTreeSet<&'static str> {
    let mut seen = BTreeSet::new();
    while !rest.is_empty() {
        let whole = rest;
        let header = FrameHeader::decode(take(&mut rest), from, on).unwrap();
        let (payload, behind) = rest.split_at(header.payload_len as usize);
        rest = behind;
        let again = if header.frame_type == FrameType::Pages {
            let (descriptors, data) = payload.split_at(RunList::descriptors_len(&header).unwrap());
            let list = RunList::decode(&header, descriptors, MEMORY / PAGE_BYTES as u64).unwrap();
            pages_frame(&list, data)
        } else {
            encode(&Frame::decode(&header, payload, MEMORY / PAGE_BYTES as u64).unwrap())
        };
        let name = header.frame_type.name();
        assert_eq!(again, whole[..whole.len() - rest.len()], "{name}");
        seen.insert(name);
    }
    seen
}

/// Decodes and encodes the messages of an urgent channel. Returns their kinds.
fn check_urgent(mut rest: &[u8], from: Side) -> BTreeSet<&'static str> {
    let mut seen = BTreeSet::new();
    while !rest.is_empty() {
        let head: &[u8; URGENT_BYTES] = take(&mut rest);
        let message = UrgentMessage::decode(head, from, MEMORY / PAGE_BYTES as u64).unwrap();
        let (again, name) = match message.kind {
            UrgentKind::Request => (UrgentMessage::request(message.page), "request"),
            UrgentKind::Receipt => (UrgentMessage::receipt(message.placed), "receipt"),
            UrgentKind::Alive => (UrgentMessage::alive(), "alive"),
            UrgentKind::Zero => (
                urgent_reply(message.page, None, message.at_source),
                "zero page",
            ),
            UrgentKind::Confirmed => panic!("the source has a dirty log"),
            UrgentKind::Page => {
                let bytes = take(&mut rest);
                message.verify_page(bytes).unwrap();
                (
                    urgent_reply(message.page, Some(bytes), message.at_source),
                    "page",
                )
            }
        };
        assert_eq!(&again, head, "{name}");
        seen.insert(name);
    }
    seen
}

#[test]
fn a_recorded_stream_of_this_version_is_understood() {
    if std::env::var_os("PAGEFERRY_RECORD").is_some() {
        write(&recorded());
    }
    let mut seen = BTreeSet::new();
    for [source, destination] in &read() {
        let (mut source, mut destination) = (source.as_slice(), destination.as_slice());
        let role = check_handshake(&mut source, &mut destination);
        for (bytes, from) in [(source, Side::Source), (destination, Side::Destination)] {
            seen.append(&mut match role {
                Role::Urgent => check_urgent(bytes, from),
                on => check_frames(bytes, from, on),
            });
        }
    }
    // A whole migration without a loss.
    for due in [
        "Setup",
        "SetupAck",
        "SetupProgress",
        "Pass",
        "Pages",
        "Receipt",
        "Missing",
        "VcpuState",
        "DeviceState",
        "SwitchOver",
        "Ready",
        "Go",
        "Running",
        "request",
        "page",
        "receipt",
        "Drained",
        "DrainAck",
        "Complete",
    ] {
        assert!(seen.contains(due), "no {due} in {seen:?}");
    }
}
