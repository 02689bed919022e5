//! The handshake of the two connections, and strangers that must not disturb it.

use pageferry_migration::address::Address;
use pageferry_migration::channel::{ChannelError, Connection, Listener, OpenError, Wait};
use pageferry_migration::handshake::*;
use pageferry_migration::wire::*;
use pageferry_testkit::LIMIT;
use std::cell::RefCell;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

/// A limit against hanging, on slow and shared hosts too.
const WAIT: Wait<'static> = Wait::block("test").within(LIMIT);

fn never() -> bool {
    false
}

fn connect(address: &Address) -> Result<Pair, HandshakeError> {
    connect_pair(address, SessionId::random().unwrap(), LIMIT, &never)
}

/// Runs a destination in a thread and `callers` in this one. Returns the results of both, and the
/// reported strangers.
fn with_destination<T>(
    callers: impl FnOnce(&Address) -> T,
) -> (T, Result<Pair, HandshakeError>, Vec<String>) {
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_addr().clone();
    let (sender, strangers) = mpsc::channel();
    thread::scope(|scope| {
        let destination = scope.spawn(move || {
            accept_pair(&listener, Some(LIMIT), &never, &mut |stranger| {
                sender.send(stranger.why.to_string()).unwrap();
            })
        });
        let got = callers(&address);
        (
            got,
            destination.join().unwrap(),
            strangers.into_iter().collect(),
        )
    })
}

fn socket_of(address: &Address) -> TcpStream {
    let Address::Tcp { host, port } = address else {
        panic!("a TCP address");
    };
    let socket = TcpStream::connect((host.as_str(), *port)).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket
}

fn read_to_end(mut socket: TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    socket.read_to_end(&mut bytes).unwrap();
    bytes
}

fn status_of(bytes: &[u8], hello: &Hello) -> Status {
    HelloReply::decode(bytes.try_into().unwrap(), hello)
        .unwrap()
        .status
}

fn stream_hello() -> Hello {
    Hello::ours(Role::Stream, SessionId::random().unwrap())
}

fn assert_pair(source: &Pair, destination: &Pair) {
    assert_eq!(source.agreed, destination.agreed);
    assert_eq!(source.agreed.version, VERSION);
    assert_eq!(source.agreed.capabilities, Capabilities::SUPPORTED);
    for (near, far, word) in [
        (&source.stream, &destination.stream, b"stream"),
        (&destination.urgent, &source.urgent, b"urgent"),
    ] {
        near.write_all(word, &WAIT).unwrap();
        let mut read = [0; 6];
        far.read_exact(&mut read, &WAIT).unwrap();
        assert_eq!(&read, word);
    }
}

#[test]
fn a_pair_is_made_over_tcp() {
    let _parallel = crate::scripted::in_parallel();
    let (source, destination, strangers) = with_destination(|address| connect(address).unwrap());
    assert_pair(&source, &destination.unwrap());
    assert_eq!(strangers, [""; 0]);
}

#[test]
fn a_pair_is_made_over_a_unix_socket() {
    let _parallel = crate::scripted::in_parallel();
    let name = format!("pageferry-handshake-{}", std::process::id());
    let address = Address::unix(&std::env::temp_dir().join(name)).unwrap();
    let listener = Listener::bind(&address).unwrap();
    thread::scope(|scope| {
        let source = scope.spawn(|| connect(&address).unwrap());
        let pair = accept_pair(&listener, Some(LIMIT), &never, &mut |_| {}).unwrap();
        assert_pair(&source.join().unwrap(), &pair);
    });
}

/// All kinds of strangers, before and between the two connections of a pair.
#[test]
fn strangers_are_sent_away_and_disturb_nobody() {
    let _parallel = crate::scripted::in_parallel();
    let calls = |address: &Address| {
        let began = Instant::now();
        let mut http = socket_of(address);
        http.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        assert_eq!(read_to_end(http), b"", "closed without an answer");
        let silent = socket_of(address);
        let mut half = socket_of(address);
        half.write_all(&stream_hello().encode()[..40]).unwrap();
        drop(half);

        let urgent = Hello::ours(Role::Urgent, SessionId::random().unwrap());
        let mut stranger = socket_of(address);
        stranger.write_all(&urgent.encode()).unwrap();
        assert_eq!(
            status_of(&read_to_end(stranger), &urgent),
            Status::UnknownSession
        );

        let hello = stream_hello();
        let mut stream = socket_of(address);
        stream.write_all(&hello.encode()).unwrap();
        let mut reply = [0; HELLO_BYTES];
        stream.read_exact(&mut reply).unwrap();
        assert_eq!(status_of(&reply, &hello), Status::Accepted);
        // As many more sessions as fit are accepted. None of them keeps the first one out.
        let more: Vec<_> = (1..8)
            .map(|_| {
                let other = stream_hello();
                let mut open = socket_of(address);
                open.write_all(&other.encode()).unwrap();
                let mut reply = [0; HELLO_BYTES];
                open.read_exact(&mut reply).unwrap();
                assert_eq!(status_of(&reply, &other), Status::Accepted);
                open
            })
            .collect();
        let mut refused = Vec::new();
        for other in [hello, stream_hello(), urgent] {
            let mut late = socket_of(address);
            late.write_all(&other.encode()).unwrap();
            refused.push(status_of(&read_to_end(late), &other));
        }
        let expected = [Status::BadRole, Status::Busy, Status::UnknownSession];
        assert_eq!(refused, expected);

        let follows = Hello::ours(Role::Urgent, hello.session);
        let mut second = socket_of(address);
        for piece in follows.encode().chunks(7) {
            second.write_all(piece).unwrap();
            thread::sleep(Duration::from_millis(2));
        }
        second.read_exact(&mut reply).unwrap();
        assert_eq!(status_of(&reply, &follows), Status::Accepted);
        assert!(
            began.elapsed() < HELLO_LIMIT,
            "the silent connection delayed another"
        );
        for mut open in more {
            let mut frame = Vec::new();
            open.read_to_end(&mut frame).unwrap();
            let mut header = [0; HEADER_BYTES];
            header.copy_from_slice(&frame[..HEADER_BYTES]);
            let header = FrameHeader::decode(&header, Side::Destination).unwrap();
            let told = Frame::decode(&header, &frame[HEADER_BYTES..], 1).unwrap();
            let Frame::Error(why) = told else {
                panic!("{told:?}")
            };
            assert_eq!(why.code(), ErrorCode::Busy);
        }
        (silent, stream, second, hello.session)
    };
    let ((.., session), destination, strangers) = with_destination(calls);
    assert_eq!(destination.unwrap().agreed.session, session);
    let told = |text: &str| strangers.iter().any(|stranger| stranger.contains(text));
    assert!(told("(HTTP?)"), "{strangers:?}");
    assert!(told("stopped after 40 of 64 bytes"), "{strangers:?}");
    assert!(told("does not know this session"), "{strangers:?}");
    assert!(told("busy"), "{strangers:?}");
    assert_eq!(strangers.len(), 6);
}

#[test]
fn another_version_is_told_which_one_is_spoken() {
    let _parallel = crate::scripted::in_parallel();
    let (status, _, strangers) = with_destination(|address| {
        let mut hello = stream_hello();
        (hello.version, hello.min_version) = (9, 8);
        let mut newer = socket_of(address);
        newer.write_all(&hello.encode()).unwrap();
        let bytes = read_to_end(newer);
        let reply = HelloReply::decode(bytes[..].try_into().unwrap(), &hello).unwrap();
        connect(address).unwrap();
        (reply.status, reply.version)
    });
    assert_eq!(status, (Status::VersionUnsupported, VERSION));
    assert_eq!(
        strangers,
        ["the peer speaks Pageferry protocol versions 8 to 9; this side speaks 2 to 2"]
    );
}

#[test]
fn a_silent_caller_is_sent_away_after_a_while() {
    let _parallel = crate::scripted::in_parallel();
    let (ended, destination, strangers) = with_destination(|address| {
        // Taken before the connection: the destination's limit starts at some moment after it.
        let began = Instant::now();
        let silent = socket_of(address);
        assert_eq!(read_to_end(silent), b"");
        let ended = began.elapsed();
        connect(address).unwrap();
        ended
    });
    assert!(destination.is_ok());
    assert!(ended >= HELLO_LIMIT, "{ended:?}");
    assert_eq!(strangers, ["no preamble within 5000 ms"]);
}

#[test]
fn a_source_that_dies_between_its_connections_keeps_nobody_out() {
    let _parallel = crate::scripted::in_parallel();
    let (_, destination, strangers) = with_destination(|address| {
        let hello = stream_hello();
        let mut dies = socket_of(address);
        dies.write_all(&hello.encode()).unwrap();
        dies.read_exact(&mut [0; HELLO_BYTES]).unwrap();
        // An unread frame after the preamble must not matter.
        dies.write_all(b"PGFR").unwrap();
        drop(dies);
        thread::sleep(Duration::from_millis(100));
        connect(address).unwrap()
    });
    assert!(destination.is_ok());
    assert_eq!(
        strangers,
        ["the urgent connection of the session did not follow"]
    );
}

#[test]
fn a_crowd_of_silent_callers_keeps_nobody_out() {
    let _parallel = crate::scripted::in_parallel();
    let ((), destination, strangers) = with_destination(|address| {
        let crowd: Vec<TcpStream> = (0..100).map(|_| socket_of(address)).collect();
        let began = Instant::now();
        connect(address).unwrap();
        assert!(began.elapsed() < HELLO_LIMIT);
        drop(crowd);
    });
    assert!(destination.is_ok());
    assert!(strangers.len() >= 68, "{}", strangers.len());
}

#[test]
fn a_destination_waits_no_longer_than_it_is_told() {
    let _parallel = crate::scripted::in_parallel();
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let limit = Duration::from_millis(80);
    let late = accept_pair(&listener, Some(limit), &never, &mut |_| {});
    assert!(matches!(
        late,
        Err(HandshakeError::Channel(ChannelError::TimedOut { .. }))
    ));
    let asked = RefCell::new(0);
    let stop = || {
        *asked.borrow_mut() += 1;
        *asked.borrow() == 3
    };
    let stopped = accept_pair(&listener, None, &stop, &mut |_| {});
    assert!(matches!(
        stopped,
        Err(HandshakeError::Channel(ChannelError::Interrupted { .. }))
    ));
}

/// Returns the source's error if a destination answers its first preamble with `answer` and closes.
fn answered(answer: impl FnOnce([u8; HELLO_BYTES]) -> Vec<u8> + Send) -> HandshakeError {
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_addr().clone();
    thread::scope(|scope| {
        scope.spawn(move || {
            let caller: Connection = listener.accept(&WAIT).unwrap();
            let mut hello = [0; HELLO_BYTES];
            caller.read_exact(&mut hello, &WAIT).unwrap();
            caller.write_all(&answer(hello), &WAIT).unwrap();
        });
        connect(&address).unwrap_err()
    })
}

#[test]
fn a_source_recognizes_what_does_not_fit() {
    let _parallel = crate::scripted::in_parallel();
    let error = answered(|_| b"HTTP/1.1 400 Bad Request\r\n".to_vec());
    assert!(
        matches!(error, HandshakeError::Wire(WireError::NotPageferry { .. })),
        "{error:?}"
    );
    // A few bytes are enough.
    let error = answered(|_| b"220 mail".to_vec());
    assert!(matches!(
        error,
        HandshakeError::Wire(WireError::NotPageferry { .. })
    ));
    let error = answered(|hello| hello.to_vec());
    assert!(matches!(
        error,
        HandshakeError::Wire(WireError::BadField { .. })
    ));
    let error = answered(|_| Vec::new());
    assert!(matches!(
        error,
        HandshakeError::Channel(ChannelError::Closed { .. })
    ));
    let error = answered(|hello| hello[..10].to_vec());
    assert!(matches!(
        error,
        HandshakeError::Channel(ChannelError::Wire(WireError::Truncated { got: 10, .. }))
    ));
    let refusal = |hello: [u8; HELLO_BYTES]| {
        let hello = Hello::decode(&hello).unwrap();
        HelloReply::refuse(hello.session, Status::Busy)
            .encode()
            .to_vec()
    };
    let error = answered(refusal);
    assert!(matches!(
        error,
        HandshakeError::Refused {
            status: Status::Busy,
            version: VERSION
        }
    ));
    // A destination that accepts more than was offered.
    let error = answered(|hello| {
        let mut reply = HelloReply::accept(&Hello::decode(&hello).unwrap()).encode();
        reply[32] = 7;
        let checksum = xxh3_64(&reply[..56]);
        reply[56..].copy_from_slice(&checksum.to_le_bytes());
        reply.to_vec()
    });
    assert!(matches!(
        error,
        HandshakeError::Wire(WireError::BadField { .. })
    ));
}

#[test]
fn a_source_waits_no_longer_than_it_is_told() {
    let _parallel = crate::scripted::in_parallel();
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let session = SessionId::random().unwrap();
    let limit = Duration::from_millis(80);
    let began = Instant::now();
    let late = connect_pair(listener.local_addr(), session, limit, &never);
    assert!(matches!(
        late,
        Err(HandshakeError::Channel(ChannelError::TimedOut { .. }))
    ));
    assert!(began.elapsed() < LIMIT / 2);
    let stop = || began.elapsed() > Duration::from_millis(150);
    let stopped = connect_pair(listener.local_addr(), session, LIMIT, &stop);
    assert!(matches!(
        stopped,
        Err(HandshakeError::Channel(ChannelError::Interrupted { .. }))
    ));
}

#[test]
fn a_source_without_a_destination_is_refused() {
    let _parallel = crate::scripted::in_parallel();
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_addr().clone();
    drop(listener);
    let error = connect(&address).unwrap_err();
    assert!(matches!(
        error,
        HandshakeError::Channel(ChannelError::Open(OpenError::Refused { .. }))
    ));
}

#[test]
fn sessions_differ() {
    let _parallel = crate::scripted::in_parallel();
    assert_ne!(SessionId::random().unwrap(), SessionId::random().unwrap());
}
