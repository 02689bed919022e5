//! What peers may cost a server.

use crate::stores::scene::{Scene, memory, plain_server, plain_store, socket_address, talk};
use pageferry_pager::Store;
use pageferry_pager::stores::peer::{Limits, Shares, wire};
use pageferry_testkit::handshake::{PLAIN, open};
use pageferry_testkit::wait_until;
use pageferry_transport::handshake::Identity;
use pageferry_transport::wire::ChannelKey;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// The start of a first record of TLS.
const HALF_A_RECORD: &[u8] = &[0x16, 3, 1, 2];

fn connect(address: SocketAddr) -> TcpStream {
    let socket = TcpStream::connect(address).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    socket
}

/// Whether the server closes a connection, instead of an answer.
fn is_closed(socket: &mut impl Read) -> bool {
    match socket.read(&mut [0; 64]) {
        Ok(len) => len == 0,
        Err(why) => why.kind() != ErrorKind::WouldBlock,
    }
}

#[test]
fn silent_connections_keep_nobody_out() {
    let scene = Scene::new("silent");
    std::fs::write(scene.file("memory"), memory(1, 100)).unwrap();
    let source = scene.open("memory");
    let mut silent: Vec<_> = (0..100).map(|_| connect(scene.socket_address())).collect();
    for socket in &mut silent[50..] {
        socket.write_all(HALF_A_RECORD).unwrap();
    }
    scene.open("memory").read(0, &mut [0; 4096]).unwrap();
    source.read(1 << 17, &mut [0; 4096]).unwrap();
    // The oldest went for newer ones.
    assert!(is_closed(&mut silent[0]));
}

#[test]
fn connections_have_their_time_to_prove_who_they_are() {
    let limits = Limits {
        greeting: Duration::from_millis(200),
        ..Limits::default()
    };
    let scene = Scene::with_limits("greeting", limits);
    let mut silent = [(); 2].map(|()| connect(scene.socket_address()));
    silent[1].write_all(HALF_A_RECORD).unwrap();
    assert!(silent.iter_mut().all(is_closed));
}

#[test]
fn full_servers_refuse_and_serve_again() {
    let limits = Limits {
        connections: 4,
        ..Limits::default()
    };
    let scene = Scene::new("full");
    std::fs::write(scene.file("memory"), memory(1, 1)).unwrap();
    let shares = Shares::of_directory(&scene.scratch.path("shared")).unwrap();
    let server = plain_server(shares, limits);
    let talk = || talk(&server);
    let mut guests: Vec<_> = (0..4).map(|_| talk().unwrap()).collect();
    assert!(talk().is_err(), "the fifth");
    assert_eq!(guests[0].open("memory").unwrap().bytes, 4096);
    guests.pop();
    wait_until("a free place", || talk().is_ok());
}

#[test]
fn one_address_does_not_take_all_places() {
    let limits = Limits {
        per_host: 2,
        ..Limits::default()
    };
    let shares = Shares::of_files([]).unwrap();
    let server = plain_server(shares, limits);
    let talk = || talk(&server);
    let guests = [talk().unwrap(), talk().unwrap()];
    assert!(talk().is_err());
    drop(guests);
    wait_until("a free place", || talk().is_ok());
}

#[test]
fn idle_peers_are_dropped() {
    let limits = Limits {
        idle: Duration::from_millis(200),
        ..Limits::default()
    };
    let shares = Shares::of_files([]).unwrap();
    let server = plain_server(shares, limits);
    let mut idle = talk(&server).unwrap();
    assert!(is_closed(idle.stream()));
}

#[test]
fn slow_readers_are_dropped() {
    let limits = Limits {
        exchange: Duration::from_secs(1),
        connections: 2,
        ..Limits::default()
    };
    let scene = Scene::new("slow");
    std::fs::write(scene.file("memory"), memory(1, 4096)).unwrap();
    let shares = Shares::of_directory(&scene.scratch.path("shared")).unwrap();
    let server = plain_server(shares, limits);
    // It asks for more than buffers hold, and reads nothing.
    let mut slow = talk(&server).unwrap();
    slow.open("memory").unwrap();
    let request = wire::Request {
        kind: wire::Kind::Read,
        number: 9,
        offset: 0,
        len: wire::MAX_BODY,
    };
    for _ in 0..16 {
        // The server may have dropped it before the last ones.
        let _ = slow.stream().write_all(&request.encode());
    }
    let store = plain_store();
    let source = store
        .open(&format!(
            "pageferry://{}/memory",
            server.address().authority()
        ))
        .unwrap();
    source.read(0, &mut [0; 4096]).unwrap();
    wait_until("its place", || talk(&server).is_ok());
    let mut left = 0;
    let mut part = vec![0; 1 << 16];
    while let Ok(len @ 1..) = slow.stream().read(&mut part) {
        left += len;
    }
    assert!(left < 16 << 20, "it got all {left} bytes");
}

#[test]
fn malformed_requests_are_told_and_end_the_connection() {
    let scene = Scene::new("malformed");
    std::fs::write(scene.file("memory"), memory(1, 4)).unwrap();
    let shares = Shares::of_directory(&scene.scratch.path("shared")).unwrap();
    let server = plain_server(shares, Limits::default());
    let valid = wire::Request {
        kind: wire::Kind::Read,
        number: 7,
        offset: 0,
        len: 1,
    };
    let with = |at: usize, byte: u8| {
        let mut bytes = valid.encode();
        bytes[at] = byte;
        bytes
    };
    for (request, expected) in [
        (valid.encode(), "no file is open"),
        (with(0, 9), "`kind` holds 0x9"),
        (with(1, 1), "`reserved` holds 0x1"),
        (with(23, 1), "`reserved` holds 0x1"),
        (with(16, 0), "`length` is 0, outside 1 to 524288"),
        (with(19, 0xff), "outside 1 to 524288"),
    ] {
        let mut talk = talk(&server).unwrap();
        let socket = talk.stream();
        socket.write_all(&request).unwrap();
        let mut header = [0; wire::HEADER_BYTES];
        socket.read_exact(&mut header).unwrap();
        let reply = wire::Reply::decode(&header).unwrap();
        assert_eq!((reply.kind, reply.number), (Err(wire::Code::Malformed), 7));
        let mut sentence = vec![0; reply.len as usize];
        socket.read_exact(&mut sentence).unwrap();
        let sentence = String::from_utf8(sentence).unwrap();
        assert!(sentence.contains(expected), "{sentence}");
        if expected == "no file is open" {
            assert_eq!(talk.open("memory").unwrap().bytes, 4 * 4096);
        } else {
            assert!(is_closed(socket));
        }
    }
    // Behind the end of the file: an answer, and the connection goes on.
    let mut talk = talk(&server).unwrap();
    talk.open("memory").unwrap();
    for offset in [4 * 4096 - 1, u64::MAX] {
        let why = talk.read(offset, &mut [0; 2]).unwrap_err();
        assert!(
            why.to_string().contains("the file ends at byte 16384"),
            "{why}"
        );
    }
    talk.read(4 * 4096 - 2, &mut [0; 2]).unwrap();
}

#[test]
fn other_protocols_and_other_channels_get_nothing() {
    let server = plain_server(Shares::of_files([]).unwrap(), Limits::default());
    let mut socket = connect(socket_address(server.address()));
    socket.write_all(b"GET /memory HTTP/1.1\r\n\r\n").unwrap();
    assert!(is_closed(&mut socket));
    let key = ChannelKey::control(1);
    let why = open(server.address(), &PLAIN, &Identity::random().unwrap(), key);
    let why = why.unwrap_err().to_string();
    assert!(why.contains("does not know the role"), "{why}");
}
