//! A server that lies: nothing of it becomes contents.

use crate::stores::scene::{listener, plain_store};
use pageferry_pager::stores::peer::wire::{
    Code, HEADER_BYTES, Kind, Opened, Reply, Request, encode_extents,
};
use pageferry_pager::{Source, SourceError, Store};
use pageferry_testkit::LIMIT;
use pageferry_testkit::handshake::PLAIN;
use pageferry_transport::handshake::{Acceptor, Arrival, Expected, Router, Stranger};
use pageferry_transport::wire::{HELLO_BYTES, Hello, Status};
use pageferry_transport::{OpenError, Stream};
use std::io::{Read, Write};
use std::sync::Arc;

const BYTES: u64 = 1 << 20;

/// The bytes on the connection that answer a request.
type Lie = dyn Fn(&Request) -> Vec<u8> + Send + Sync;

/// What an honest server sends.
fn truth(request: &Request) -> (Reply, Vec<u8>) {
    let body = match request.kind {
        Kind::Open => Opened {
            bytes: BYTES,
            identity: "a file".to_owned(),
        }
        .encode(),
        Kind::Extents => encode_extents(&[(request.offset, BYTES)]),
        Kind::Read => vec![7; request.len as usize],
    };
    (Reply::of(Ok(request.kind), request.number, &body), body)
}

fn frame(reply: &Reply, body: &[u8]) -> Vec<u8> {
    [&reply.encode()[..], body].concat()
}

/// A server of one file that lies. It ends with the process of the test.
struct Liar(Arc<Lie>);

impl Router for Liar {
    fn route(&self, _: &Hello, _: bool) -> Result<Expected, Status> {
        Ok(Expected::New)
    }

    fn accepted(&self, arrival: Arrival) -> Result<(), Box<(Arrival, Status)>> {
        let lie = Arc::clone(&self.0);
        let connection = Arc::new(arrival.welcome().unwrap());
        std::thread::spawn(move || converse(Stream::new(connection, LIMIT), &*lie));
        Ok(())
    }

    fn stranger(&self, _: Stranger) {}

    fn cannot_accept(&self, error: &OpenError) {
        panic!("{error}");
    }
}

/// Starts a server. Returns the address of its file.
fn serve(lie: impl Fn(&Request) -> Vec<u8> + Send + Sync + 'static) -> String {
    let listener = listener();
    let address = listener.local_addr().authority();
    let router = Arc::new(Liar(Arc::new(lie)));
    std::mem::forget(Acceptor::start(listener, PLAIN, router).unwrap());
    format!("pageferry://{address}/memory")
}

fn converse(mut socket: Stream, lie: &Lie) -> Option<()> {
    loop {
        let mut header = [0; HEADER_BYTES];
        socket.read_exact(&mut header).ok()?;
        let request = Request::decode(&header).ok()?;
        if request.kind == Kind::Open {
            socket.read_exact(&mut vec![0; request.len as usize]).ok()?;
        }
        let answer = lie(&request);
        socket.write_all(&answer).ok()?;
        // Less than it announced: it closes.
        let announced = answer
            .as_chunks::<HEADER_BYTES>()
            .0
            .first()
            .map(Reply::decode);
        match announced {
            Some(Ok(reply)) if answer.len() >= HEADER_BYTES + reply.len as usize => {}
            Some(Err(_)) => {}
            _ => return None,
        }
    }
}

fn open(address: &str) -> Result<Arc<dyn Source>, SourceError> {
    plain_store().open(address)
}

/// Lies about requests of this kind, and is honest otherwise.
fn lies_about(kind: Kind, lie: impl Fn(&Request) -> Vec<u8> + Send + Sync + 'static) -> String {
    serve(move |request| {
        if request.kind == kind {
            return lie(request);
        }
        let (reply, body) = truth(request);
        frame(&reply, &body)
    })
}

#[test]
fn the_double_of_a_server_is_read_when_it_is_honest() {
    let address = serve(|request| {
        let (reply, body) = truth(request);
        frame(&reply, &body)
    });
    let source = open(&address).unwrap();
    let mut page = [0; 4096];
    source.read(8192, &mut page).unwrap();
    assert_eq!(page, [7; 4096]);
}

#[test]
fn wrong_replies_to_a_read_are_errors() {
    type Change = fn(&mut Reply, &mut Vec<u8>);
    let changes: [(&str, Change); 7] = [
        ("`number` is", |reply, _| reply.number += 1),
        ("`kind` is 2, outside 3 to 3", |reply, _| {
            reply.kind = Ok(Kind::Extents);
        }),
        ("checksum", |reply, _| reply.checksum ^= 1),
        ("checksum", |_, body| body[100] ^= 1),
        ("`length` is", |reply, body| {
            body.pop();
            *reply = Reply::of(reply.kind, reply.number, body);
        }),
        ("`length` is", |reply, body| {
            body.push(0);
            *reply = Reply::of(reply.kind, reply.number, body);
        }),
        ("`length` is 4294967295", |reply, _| reply.len = u32::MAX),
    ];
    for (expected, change) in changes {
        let address = lies_about(Kind::Read, move |request| {
            let (mut reply, mut body) = truth(request);
            change(&mut reply, &mut body);
            frame(&reply, &body)
        });
        let source = open(&address).unwrap();
        let why = source.read(0, &mut [0; 4096]).unwrap_err().to_string();
        assert!(why.contains(expected), "{expected}: {why}");
        assert!(!source.read_now(0, &mut [0; 4096]).unwrap(), "it is kept");
    }
}

#[test]
fn a_reply_that_is_cut_off_is_an_error() {
    for kept in [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 4000] {
        let address = lies_about(Kind::Read, move |request| {
            let (reply, body) = truth(request);
            frame(&reply, &body)[..kept].to_vec()
        });
        let source = open(&address).unwrap();
        let why = source.read(0, &mut [0; 4096]).unwrap_err().to_string();
        assert!(why.contains("the connection is lost"), "{why}");
    }
}

#[test]
fn lies_about_a_file_are_errors_when_it_is_opened() {
    let opened = |bytes: u64, identity: &str| {
        let identity = identity.to_owned();
        Opened { bytes, identity }.encode()
    };
    for (body, expected) in [
        (vec![], "`length` is 0"),
        (vec![0; 8], "`length` is 8"),
        (opened(1, &"x".repeat(257)), "`length` is 265"),
        (opened(1, "\u{1b}[31m"), "`identity` holds"),
        ([&[0; 8][..], &[0xff; 4]].concat(), "`identity` holds"),
    ] {
        let address = lies_about(Kind::Open, move |request| {
            let reply = Reply::of(Ok(request.kind), request.number, &body);
            frame(&reply, &body)
        });
        let why = open(&address).unwrap_err().to_string();
        assert!(why.contains(expected), "{expected}: {why}");
    }
    for extents in [
        vec![(0, 0)],
        vec![(4096, 8192), (0, 4096)],
        vec![(0, BYTES + 1)],
        vec![(u64::MAX, 0)],
    ] {
        let address = lies_about(Kind::Extents, move |request| {
            let body = encode_extents(&extents);
            let reply = Reply::of(Ok(request.kind), request.number, &body);
            frame(&reply, &body)
        });
        let why = open(&address).unwrap_err().to_string();
        assert!(why.contains("`extents` holds"), "{why}");
    }
}

#[test]
fn sentences_of_a_peer_cannot_change_a_terminal() {
    let address = lies_about(Kind::Read, |request| {
        let body = b"no \x1b[31m disk \xff";
        let reply = Reply::of(Err(Code::Failed), request.number, body);
        frame(&reply, body)
    });
    let source = open(&address).unwrap();
    let why = source.read(0, &mut [0; 4096]).unwrap_err().to_string();
    assert!(why.contains("the peer says: no  [31m disk"), "{why}");
}

#[test]
fn a_server_of_another_protocol_is_named() {
    for (answer, expected) in [
        (
            b"SSH-2.0-OpenSSH_9.6\r\n".to_vec(),
            "it began with \"SSH-2.0-\" (SSH?)",
        ),
        (b"HTTP/1.1".to_vec(), "it began with \"HTTP/1.1\" (HTTP?)"),
    ] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            socket.write_all(&answer).unwrap();
            let mut hello = [0; HELLO_BYTES];
            socket.read_exact(&mut hello).unwrap();
        });
        let why = open(&format!("pageferry://{address}/memory")).unwrap_err();
        assert!(why.to_string().contains(expected), "{why}");
        server.join().unwrap();
    }
}
