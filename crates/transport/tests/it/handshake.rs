//! The handshake of channels, and strangers that must not disturb it.

use pageferry_testkit::certificates::{Authority, Validity};
use pageferry_testkit::handshake::*;
use pageferry_testkit::netns;
use pageferry_testkit::shaper::{Plan, Shaper};
use pageferry_testkit::two_hosts::{Host, Link, Rate, or_skip};
use pageferry_testkit::{LIMIT, wait_for};
use pageferry_transport::address::Address;
use pageferry_transport::channel::{ChannelError, Connection, Listener, OpenError, Wait};
use pageferry_transport::handshake::*;
use pageferry_transport::wire::*;
use ring::hmac;
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// A limit against hanging, on slow and shared hosts too.
const WAIT: Wait<'static> = Wait::block("test").within(LIMIT);
/// The limit under test for preambles that never come.
const HELLO: Duration = Duration::from_millis(300);
const FIRST: ChannelKey = ChannelKey::control(1);

fn identity() -> Identity {
    Identity::random().unwrap()
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

fn any_hello() -> Hello {
    Hello::ours(FIRST, SessionId::random().unwrap())
}

fn refusal(error: HandshakeError) -> Status {
    match error {
        HandshakeError::Refused { status, .. } => status,
        other => panic!("{other:?}"),
    }
}

#[test]
fn all_channels_of_a_session_open() {
    let destination = Destination::start(PLAIN);
    let ours = identity();
    let urgent = ChannelKey {
        role: Role::Urgent,
        ..bulk(0, 1, 1)
    };
    for key in [FIRST, bulk(0, 1, 1), bulk(1, 1, 1), urgent, bulk(0, 1, 2)] {
        let near = open(&destination.address, &PLAIN, &ours, key).unwrap();
        assert_eq!(near.agreed.version, VERSION);
        assert_eq!(near.agreed.capabilities, Capabilities::SUPPORTED);
        assert_eq!((near.agreed.session, near.agreed.key), (ours.session, key));
        let far = destination.take(key);
        far.write_all(b"there", &WAIT).unwrap();
        near.connection.write_all(b"again", &WAIT).unwrap();
        let mut word = [0; 5];
        near.connection.read_exact(&mut word, &WAIT).unwrap();
        assert_eq!(&word, b"there");
        far.read_exact(&mut word, &WAIT).unwrap();
        assert_eq!(&word, b"again");
    }
    assert!(destination.strangers().is_empty());
}

#[test]
fn a_session_opens_over_a_unix_socket_and_over_one_handed_in() {
    let name = format!("pageferry-handshake-{}", std::process::id());
    let address = Address::unix(&std::env::temp_dir().join(name)).unwrap();
    let destination = Destination::start(PLAIN);
    let also = Listener::bind(&address).unwrap();
    destination.acceptor.listen_also(also);
    assert_eq!(
        destination.acceptor.local_addrs(),
        [destination.address.clone(), address.clone()]
    );
    let ours = identity();
    open(&address, &PLAIN, &ours, FIRST).unwrap();
    let dialled = Connection::connect(&destination.address, &WAIT).unwrap();
    let key = bulk(0, 1, 1);
    open_on(dialled, None, &PLAIN, &ours, key, LIMIT, &|| false).unwrap();
    assert_eq!(destination.channels(), 2);
}

#[test]
fn channels_out_of_turn_are_refused_with_the_reason() {
    let destination = Destination::start(PLAIN);
    let ours = identity();
    let try_open = |identity: &Identity, key| {
        let error = open(&destination.address, &PLAIN, identity, key).unwrap_err();
        refusal(error)
    };
    assert_eq!(try_open(&ours, bulk(0, 1, 1)), Status::UnknownSession);
    open(&destination.address, &PLAIN, &ours, FIRST).unwrap();
    assert_eq!(try_open(&identity(), FIRST), Status::Busy);
    assert_eq!(try_open(&ours, FIRST), Status::ChannelTaken);
    assert_eq!(try_open(&ours, bulk(0, 2, 1)), Status::FutureGeneration);
    assert_eq!(try_open(&ours, bulk(9, 1, 1)), Status::TooManyChannels);
    let third = ChannelKey::control(3);
    open(&destination.address, &PLAIN, &ours, third).unwrap();
    assert_eq!(try_open(&ours, bulk(0, 1, 2)), Status::OldGeneration);
}

#[test]
fn a_source_without_the_secret_is_refused() {
    let destination = Destination::start(PLAIN);
    let ours = identity();
    open(&destination.address, &PLAIN, &ours, FIRST).unwrap();
    let thief = Identity {
        session: ours.session,
        ..identity()
    };
    for key in [ChannelKey::control(2), bulk(0, 1, 1)] {
        let error = open(&destination.address, &PLAIN, &thief, key).unwrap_err();
        assert_eq!(refusal(error), Status::BadProof);
    }
    // It changed nothing.
    open(&destination.address, &PLAIN, &ours, bulk(0, 1, 1)).unwrap();
    open(&destination.address, &PLAIN, &ours, ChannelKey::control(2)).unwrap();
}

/// Forwards one connection, and records the bytes of the source.
fn recorded(destination: &Destination, identity: &Identity, key: ChannelKey) -> Vec<u8> {
    let relay = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = relay.local_addr().unwrap().to_string().parse().unwrap();
    let record = Arc::new(Mutex::new(Vec::new()));
    thread::scope(|scope| {
        let kept = record.clone();
        scope.spawn(move || {
            let (mut source, _) = relay.accept().unwrap();
            let mut target = socket_of(&destination.address);
            let second = (80 + PATH_CHECK_BYTES, 48 + PATH_CHECK_BYTES);
            for (from_source, from_target) in [(HELLO_BYTES, HELLO_BYTES), second] {
                let mut bytes = vec![0; from_source];
                source.read_exact(&mut bytes).unwrap();
                kept.lock().unwrap().extend_from_slice(&bytes);
                target.write_all(&bytes).unwrap();
                let mut bytes = vec![0; from_target];
                target.read_exact(&mut bytes).unwrap();
                source.write_all(&bytes).unwrap();
            }
        });
        open(&address, &PLAIN, identity, key).unwrap();
    });
    Arc::into_inner(record).unwrap().into_inner().unwrap()
}

#[test]
fn a_recorded_preamble_opens_nothing() {
    let ours = identity();
    let destination = Destination::start(PLAIN);
    open(&destination.address, &PLAIN, &ours, FIRST).unwrap();
    let key = bulk(0, 1, 1);
    let record = recorded(&destination, &ours, key);
    let replay = |destination: &Destination| {
        let mut socket = socket_of(&destination.address);
        socket.write_all(&record).unwrap();
        read_to_end(socket)
    };
    // The destination has seen this incarnation.
    let hello = Hello::ours(key, ours.session);
    assert_eq!(
        status_of(&replay(&destination), &hello),
        Status::ChannelTaken
    );
    // One that has not seen it, although it knows the session: the nonce differs.
    let other = Destination::start(PLAIN);
    open(&other.address, &PLAIN, &ours, FIRST).unwrap();
    let answer = replay(&other);
    assert_eq!(status_of(&answer[..HELLO_BYTES], &hello), Status::Accepted);
    let welcome = Welcome::decode(answer[HELLO_BYTES..].try_into().unwrap()).unwrap();
    assert_eq!(welcome.status, Status::BadProof);
    assert_eq!(other.channels(), 1, "only the control channel");
}

#[test]
fn credentials_that_do_not_fit_the_session_are_refused() {
    let destination = Destination::start(PLAIN);
    let hello = any_hello();
    let mut socket = socket_of(&destination.address);
    socket.write_all(&hello.encode()).unwrap();
    socket.read_exact(&mut [0; HELLO_BYTES]).unwrap();
    // The first channel must bring a secret.
    let without = Credentials {
        secret: None,
        proof: [0; 32],
    };
    socket.write_all(&without.encode()).unwrap();
    let answer = read_to_end(socket);
    let welcome = Welcome::decode(answer[..].try_into().unwrap()).unwrap();
    assert_eq!(welcome.status, Status::Malformed);
    assert_eq!(destination.channels(), 0);
}

#[test]
fn strangers_are_sent_away_and_disturb_nobody() {
    let destination = Destination::start(PLAIN);
    let address = &destination.address;
    let began = Instant::now();
    let mut http = socket_of(address);
    http.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    assert_eq!(read_to_end(http), b"", "closed without an answer");
    let _silent = socket_of(address);
    let mut half = socket_of(address);
    half.write_all(&any_hello().encode()[..40]).unwrap();
    drop(half);
    let mut damaged = socket_of(address);
    let hello = any_hello();
    let mut bytes = hello.encode();
    bytes[20] ^= 1;
    damaged.write_all(&bytes).unwrap();
    let answer: [u8; HELLO_BYTES] = read_to_end(damaged)[..].try_into().unwrap();
    assert_eq!(answer[10], Status::Malformed as u8);
    // A source whose bytes come slowly.
    let ours = any_hello();
    let mut slow = socket_of(address);
    for piece in ours.encode().chunks(7) {
        slow.write_all(piece).unwrap();
        thread::sleep(Duration::from_millis(2));
    }
    let mut reply = [0; HELLO_BYTES];
    slow.read_exact(&mut reply).unwrap();
    assert_eq!(status_of(&reply, &ours), Status::Accepted);
    // It has proved nothing yet, so another source opens its session.
    open(address, &PLAIN, &identity(), FIRST).unwrap();
    assert!(began.elapsed() < HELLO_LIMIT, "a stranger delayed a source");
    for text in ["(HTTP?)", "stopped after 40 of 64 bytes", "checksum"] {
        destination.wait_for_stranger(text);
    }
}

#[test]
fn another_version_is_told_which_one_is_spoken() {
    let destination = Destination::start(PLAIN);
    for (version, min_version) in [(9, 8), (2, 1)] {
        let mut hello = any_hello();
        (hello.version, hello.min_version) = (version, min_version);
        let mut other = socket_of(&destination.address);
        other.write_all(&hello.encode()).unwrap();
        let bytes = read_to_end(other);
        let reply = HelloReply::decode(bytes[..].try_into().unwrap(), &hello).unwrap();
        let expected = (Status::VersionUnsupported, VERSION);
        assert_eq!((reply.status, reply.version), expected);
        destination.wait_for_stranger(&format!(
            "protocol versions {min_version} to {version}; this side speaks 7 to 7"
        ));
    }
}

#[test]
fn a_silent_peer_is_dropped_after_the_limit() {
    let destination = Destination::with_limit(PLAIN, HELLO);
    let hello = any_hello().encode();
    let is_dropped = |sent| {
        // Taken before the connection: the destination's limit starts at some moment after it.
        let began = Instant::now();
        let mut silent = socket_of(&destination.address);
        silent.write_all(&hello[..sent]).unwrap();
        let answer = read_to_end(silent);
        let expected = if sent == HELLO_BYTES { HELLO_BYTES } else { 0 };
        assert_eq!(answer.len(), expected);
        assert!(began.elapsed() >= HELLO);
    };
    thread::scope(|scope| {
        for sent in [0, 1, HELLO_BYTES / 2, HELLO_BYTES] {
            scope.spawn(move || is_dropped(sent));
        }
    });
    let silent = "no preamble within 300 ms";
    assert_eq!(destination.strangers(), [silent; 4]);
}

#[test]
fn a_crowd_of_idle_strangers_keeps_nobody_out() {
    for protection in [PLAIN, tls_protection()] {
        let destination = Destination::start(protection.clone());
        let began = Instant::now();
        let crowd: Vec<TcpStream> = (0..160)
            .map(|at| {
                let mut socket = socket_of(&destination.address);
                // Some stop in the middle of TLS, some in the middle of a preamble.
                match at % 3 {
                    0 => {}
                    1 => socket.write_all(&[0x16, 3, 1]).unwrap(),
                    _ => socket.write_all(b"PGFE").unwrap(),
                }
                socket
            })
            .collect();
        let ours = identity();
        open(&destination.address, &protection, &ours, FIRST).unwrap();
        open(&destination.address, &protection, &ours, bulk(0, 1, 1)).unwrap();
        assert!(began.elapsed() < HELLO_LIMIT);
        assert!(destination.strangers().len() >= 32);
        drop(crowd);
    }
}

fn tls_protection() -> Protection {
    let side = Authority::new("CA").issue(&["localhost"], Validity::Now);
    side.protection(Some("localhost"))
}

/// The descriptors of this process that are sockets to `address`, at either end.
fn sockets_of(address: &Address) -> usize {
    let Address::Tcp { port, .. } = address else {
        panic!("a TCP address");
    };
    let hex = format!("0100007F:{port:04X}");
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let inodes: Vec<&str> = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|fields| fields.len() > 9 && (fields[1] == hex || fields[2] == hex))
        .map(|fields| fields[9])
        .collect();
    let ours = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| {
            let target = std::fs::read_link(entry.ok()?.path()).ok()?;
            let target = target.to_str()?.to_owned();
            inodes
                .iter()
                .find(|inode| target == format!("socket:[{inode}]"))?;
            Some(())
        });
    ours.count()
}

#[test]
fn no_descriptor_stays_open() {
    for protection in [PLAIN, tls_protection()] {
        let destination = Destination::start(protection.clone());
        let address = destination.address.clone();
        for _ in 0..20 {
            let mut http = socket_of(&address);
            http.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            drop(socket_of(&address));
            let unknown = open(&address, &protection, &identity(), bulk(0, 1, 1));
            assert_eq!(refusal(unknown.unwrap_err()), Status::UnknownSession);
        }
        let ours = identity();
        let near = open(&address, &protection, &ours, FIRST).unwrap();
        wait_for("the other descriptors to be closed", || {
            // The listener, and both ends of the channel.
            (sockets_of(&address) == 3).then_some(())
        });
        drop(near);
        let began = Instant::now();
        drop(destination);
        assert!(began.elapsed() < HELLO_LIMIT, "the acceptor ends promptly");
        assert_eq!(sockets_of(&address), 0);
    }
}

#[test]
fn plain_tcp_to_another_host_needs_permission() {
    let mut own = None;
    // An address of this host that is not loopback: the kernel chooses it for a route.
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
    if socket.connect("192.0.2.1:9").is_ok() {
        own = Some(socket.local_addr().unwrap().ip());
    }
    let Some(own) = own.filter(|own| !own.is_loopback() && !own.is_unspecified()) else {
        assert!(pageferry_testkit::skip(
            "network",
            "no address but loopback"
        ));
        return;
    };
    let anywhere = Protection::Plain(PlainPolicy::Anywhere);
    let listen = |protection| {
        let destination = Destination::start(protection);
        let listener = Listener::bind(&format!("{own}:0").parse().unwrap()).unwrap();
        let address = listener.local_addr().clone();
        destination.acceptor.listen_also(listener);
        (destination, address)
    };
    let (destination, address) = listen(PLAIN);
    let error = open(&address, &PLAIN, &identity(), FIRST).unwrap_err();
    assert!(
        matches!(error, HandshakeError::PlainForbidden { .. }),
        "{error:?}"
    );
    let error = open(&address, &anywhere, &identity(), FIRST).unwrap_err();
    assert_eq!(refusal(error), Status::TlsRequired);
    destination.wait_for_stranger("this side requires it");
    let (_destination, address) = listen(anywhere.clone());
    open(&address, &anywhere, &identity(), FIRST).unwrap();
}

/// A process without descriptors, so that the limit disturbs no other test.
#[test]
fn a_lack_of_descriptors_is_reported_and_passes() {
    const CHILD: &str = "handshake::without_descriptors";
    let ended = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", CHILD, "--ignored"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&ended.stdout);
    assert!(
        ended.status.success() && text.contains("1 passed"),
        "{text}"
    );
}

#[test]
#[ignore = "a_lack_of_descriptors_is_reported_and_passes runs this in a process of its own"]
fn without_descriptors() {
    let destination = Destination::start(PLAIN);
    let first = socket_of(&destination.address);
    let mut taken = Vec::new();
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let low = rustix::process::Rlimit {
        current: Some(100),
        ..limit
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, low).unwrap();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        taken.push(file);
    }
    // One descriptor for the source, none for the destination.
    taken.pop();
    let mut second = socket_of(&destination.address);
    wait_for("a report", || destination.failures().pop());
    thread::sleep(Duration::from_millis(300));
    assert_eq!(destination.failures().len(), 1, "reported once");
    taken.clear();
    let hello = any_hello();
    second.write_all(&hello.encode()).unwrap();
    let mut reply = [0; HELLO_BYTES];
    second.read_exact(&mut reply).unwrap();
    assert_eq!(status_of(&reply, &hello), Status::Accepted);
    drop(first);
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
            caller.shutdown_write();
            // Closing with unread bytes would reset the connection.
            let _ = caller.read_exact(&mut [0; 1000], &WAIT);
        });
        open(&address, &PLAIN, &identity(), FIRST).unwrap_err()
    })
}

#[test]
fn a_source_recognizes_what_does_not_fit() {
    // A few bytes are enough.
    for text in ["HTTP/1.1 400 Bad Request\r\n", "220 mail"] {
        let error = answered(|_| text.into());
        assert!(
            matches!(error, HandshakeError::Wire(WireError::NotPageferry { .. })),
            "{error:?}"
        );
    }
    let error = answered(|hello| hello.to_vec());
    assert!(matches!(error, HandshakeError::Wire(_)), "{error:?}");
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
    let error = answered(|hello| {
        let session = Hello::decode(&hello).unwrap().session;
        HelloReply::refuse(session, Status::Busy).encode().to_vec()
    });
    assert_eq!(refusal(error), Status::Busy);
    // A destination that does not know the secret.
    let error = answered(|hello| {
        let hello = Hello::decode(&hello).unwrap();
        let mut bytes = HelloReply::accept(&hello, [1; 16]).encode().to_vec();
        bytes.extend_from_slice(&Welcome::accept([2; 32]).encode());
        bytes
    });
    assert!(matches!(error, HandshakeError::BadProof), "{error:?}");
}

/// Opens a session over a relay that passes on so many bytes of each side, and then swallows all.
fn over_a_path_that_carries(
    destination: &Destination,
    of_source: usize,
    of_destination: usize,
    limit: Duration,
) -> HandshakeError {
    let relay = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = relay.local_addr().unwrap().to_string().parse().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            let (source, _) = relay.accept().unwrap();
            let target = socket_of(&destination.address);
            let forward = |mut from: &TcpStream, mut to: &TcpStream, mut left: usize| {
                let mut bytes = [0; 4096];
                while let Ok(count @ 1..) = from.read(&mut bytes) {
                    let passed = count.min(left);
                    left -= passed;
                    if to.write_all(&bytes[..passed]).is_err() {
                        break;
                    }
                }
            };
            thread::scope(|scope| {
                scope.spawn(|| {
                    forward(&source, &target, of_source);
                    let _ = target.shutdown(Shutdown::Both);
                });
                forward(&target, &source, of_destination);
                let _ = source.shutdown(Shutdown::Write);
            });
        });
        dial(&address, &PLAIN, &identity(), FIRST, [limit; 2], &|| false).unwrap_err()
    })
}

#[test]
fn a_path_that_loses_large_packets_opens_no_channel() {
    thread::scope(|scope| {
        scope.spawn(loses_large_packets_from_its_source);
        loses_large_packets_to_its_source();
    });
}

/// The destination says so in a small packet.
fn loses_large_packets_from_its_source() {
    let destination = Destination::with_limit(PLAIN, HELLO);
    let error = over_a_path_that_carries(&destination, HELLO_BYTES + 80, usize::MAX, LIMIT);
    assert!(
        matches!(error, HandshakeError::LargePacketsLost { .. }),
        "{error:?}"
    );
    let text = error.to_string();
    for part in [
        "127.0.0.1:",
        "small packets pass and large ones do not",
        "MTU",
    ] {
        assert!(text.contains(part), "{text}");
    }
    destination.wait_for_stranger("large ones do not");
    assert_eq!(destination.channels(), 0);
}

/// The destination's small Welcome comes, and nothing behind it.
fn loses_large_packets_to_its_source() {
    let destination = Destination::start(PLAIN);
    let error = over_a_path_that_carries(&destination, usize::MAX, HELLO_BYTES + 48, 4 * HELLO);
    assert!(
        matches!(error, HandshakeError::LargePacketsLost { .. }),
        "{error:?}"
    );
}

#[test]
fn a_slow_path_is_not_one_that_loses_large_packets() {
    let destination = Destination::with_limit(PLAIN, HELLO);
    let carried = HELLO_BYTES + 80 + 1448;
    let error = over_a_path_that_carries(&destination, carried, usize::MAX, LIMIT);
    assert!(
        matches!(error, HandshakeError::Channel(ChannelError::Closed { .. })),
        "{error:?}"
    );
    destination.wait_for_stranger("no preamble within");
}

/// Opens a session up to its credentials, and sends `bytes` behind them.
fn with_a_path_check(destination: &Destination, bytes: &[u8]) -> TcpStream {
    let hello = any_hello().encode();
    let mut socket = socket_of(&destination.address);
    socket.write_all(&hello).unwrap();
    let mut reply = [0; HELLO_BYTES];
    socket.read_exact(&mut reply).unwrap();
    let secret = [7; SECRET_BYTES];
    let covered = [&b"pageferry 6 source"[..], &hello, &reply, &[0; 32]].concat();
    let proof = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &secret), &covered);
    let credentials = Credentials {
        secret: Some(secret),
        proof: proof.as_ref().try_into().unwrap(),
    };
    socket.write_all(&credentials.encode()).unwrap();
    socket.write_all(bytes).unwrap();
    socket
}

#[test]
fn a_damaged_path_check_is_refused_wherever_it_is_damaged() {
    for at in [0, 8, 4095, PATH_CHECK_BYTES - 1] {
        let destination = Destination::start(PLAIN);
        let mut bytes = *path_check();
        bytes[at] ^= 1;
        let mut answer = Vec::new();
        // It closes, and resets the connection if bytes are unread.
        let _ = with_a_path_check(&destination, &bytes).read_to_end(&mut answer);
        assert_eq!(answer, b"");
        destination.wait_for_stranger("PathCheck");
        assert_eq!(destination.channels(), 0, "{at}");
    }
    // One that comes in pieces counts, and so does nothing but its end.
    let destination = Destination::start(PLAIN);
    let (most, last) = path_check().split_at(PATH_CHECK_BYTES - 1);
    let mut socket = with_a_path_check(&destination, &most[..1]);
    for piece in most[1..].chunks(1000) {
        socket.write_all(piece).unwrap();
    }
    thread::sleep(Duration::from_millis(20));
    assert_eq!(destination.channels(), 0, "a byte is due");
    socket.write_all(last).unwrap();
    let mut answer = vec![0; 48 + PATH_CHECK_BYTES];
    socket.read_exact(&mut answer).unwrap();
    assert_eq!(&answer[48..], path_check());
    assert_eq!(destination.channels(), 1);
}

#[test]
fn a_source_does_not_wait_for_a_silent_destination() {
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_addr();
    let ours = identity();
    let limit = Duration::from_millis(80);
    let began = Instant::now();
    for protection in [PLAIN, tls_protection()] {
        let late = dial(address, &protection, &ours, FIRST, [limit; 2], &|| false);
        assert!(matches!(
            late,
            Err(HandshakeError::Channel(ChannelError::TimedOut { .. }))
        ));
        let stop = || began.elapsed() > Duration::from_millis(250);
        let stopped = dial(address, &protection, &ours, FIRST, [LIMIT; 2], &stop);
        assert!(matches!(
            stopped,
            Err(HandshakeError::Channel(ChannelError::Interrupted { .. }))
        ));
    }
    assert!(began.elapsed() < LIMIT / 2);
}

/// Reads what comes, and answers a byte of `bytes` every 20 ms until the peer closes.
fn drip(listener: &std::net::TcpListener, bytes: &[u8]) {
    let (mut stream, _) = listener.accept().unwrap();
    stream
        .set_read_timeout(Some(Duration::from_millis(20)))
        .unwrap();
    for byte in bytes {
        while stream.read(&mut [0; 512]).is_ok_and(|taken| taken > 0) {}
        if stream.write_all(&[*byte]).is_err() {
            return;
        }
    }
}

#[test]
fn a_destination_that_drips_does_not_postpone_the_end_of_a_handshake() {
    // A record of TLS that announces 16 KiB, and a reply that is right as far as it comes.
    let record = [&[0x16, 3, 3, 0x40, 0][..], &[2; 500]].concat();
    let ours = identity();
    let reply = HelloReply::accept(&Hello::ours(FIRST, ours.session), [1; 16]).encode();
    for (protection, bytes) in [(PLAIN, &reply[..]), (tls_protection(), &record)] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string().parse().unwrap();
        let limit = Duration::from_millis(300);
        thread::scope(|scope| {
            scope.spawn(|| drip(&listener, bytes));
            let began = Instant::now();
            let error =
                dial(&address, &protection, &ours, FIRST, [limit; 2], &|| false).unwrap_err();
            let HandshakeError::Channel(ChannelError::TimedOut { after, .. }) = error else {
                panic!("{error:?} after {:?}", began.elapsed());
            };
            assert_eq!(after, limit);
        });
    }
}

#[test]
fn a_source_without_a_destination_is_refused() {
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_addr().clone();
    drop(listener);
    let error = open(&address, &PLAIN, &identity(), FIRST).unwrap_err();
    assert!(matches!(
        error,
        HandshakeError::Channel(ChannelError::Open(OpenError::Refused { .. }))
    ));
}

#[test]
fn sessions_differ() {
    assert_ne!(identity().session, identity().session);
}

/// Two threads connect from the source's own address without a pause, and hold what they opened.
fn flood(address: &Address, first: &[u8], over: &AtomicBool) -> usize {
    let mut held = VecDeque::new();
    let mut count = 0;
    while !over.load(Ordering::Relaxed) {
        let mut socket = socket_of(address);
        // It may be closed already.
        let _ = socket.write_all(first);
        held.push_back(socket);
        count += 1;
        if held.len() > 200 {
            held.pop_front();
        }
        thread::sleep(Duration::from_millis(2));
    }
    count
}

#[test]
fn a_source_gets_through_a_flood_from_its_own_address() {
    const OPENINGS: usize = 10;
    // Those that have a certificate outrank any stranger. Without TLS a stranger can say all that a
    // source says.
    let hello = Hello::ours(FIRST, SessionId([7; 16])).encode();
    for (protection, first, least) in [
        (PLAIN, &b""[..], OPENINGS),
        (PLAIN, &b"PGFE"[..], OPENINGS / 2),
        (PLAIN, &hello[..], OPENINGS / 2),
        (tls_protection(), &b""[..], OPENINGS),
        (tls_protection(), &[0x16, 3, 1][..], OPENINGS / 2),
    ] {
        let destination = Destination::start(protection.clone());
        let over = AtomicBool::new(false);
        let (passed, floods) = thread::scope(|scope| {
            let to = &destination.address;
            // The source is 10 ms away, and the flood is near.
            let Address::Tcp { host, port } = to else {
                panic!("a TCP address");
            };
            let near = format!("{host}:{port}").parse().unwrap();
            let plan = Plan {
                delay: Duration::from_millis(10),
                ..Plan::default()
            };
            let way = Shaper::start(near, plan).unwrap();
            let far = format!("localhost:{}", way.addr().port()).parse().unwrap();
            let floods = [(); 2].map(|()| scope.spawn(|| flood(to, first, &over)));
            wait_for("a crowd", || {
                (destination.strangers().len() > 64).then_some(())
            });
            let ours = identity();
            let mut keys = (1..).map(ChannelKey::control);
            let passed = (0..OPENINGS).filter(|_| {
                let key = keys.next().expect("there is no end");
                let opened = open(&far, &protection, &ours, key);
                opened.is_ok()
                    && destination.take(key).is_tls() == matches!(protection, Protection::Tls(_))
            });
            let passed = passed.count();
            over.store(true, Ordering::Relaxed);
            (passed, floods.map(|flood| flood.join().unwrap()))
        });
        eprintln!("{first:?}: {passed} of {OPENINGS} beside {floods:?}");
        assert!(passed >= least, "{first:?}: {passed} of {OPENINGS}");
    }
}

/// Two hosts know each other by link-local addresses only: each needs its own zone.
#[test]
fn link_local_addresses_have_their_zones() {
    let Some(hosts) = or_skip(&Link::new(Rate::bits(1_000_000_000))) else {
        return;
    };
    let within = |host: Host, work: &(dyn Fn() + Sync)| {
        netns::within(hosts.name(host), work).unwrap();
    };
    let found = Mutex::new(None);
    within(Host::A, &|| {
        let mine = wait_for("a link-local address", link_local);
        let address: Address = format!("[{mine}]:0").parse().unwrap();
        let listener = wait_for("the address to be usable", || Listener::bind(&address).ok());
        assert!(listener.local_addr().to_string().contains('%'));
        *found.lock().unwrap() = Some(Destination::on(listener, PLAIN_ANYWHERE, HELLO_LIMIT));
    });
    let destination = found.into_inner().unwrap().unwrap();
    let zoned = destination.address.to_string();
    let (ip, port) = (
        zoned.split('%').next().unwrap(),
        zoned.rsplit(':').next().unwrap(),
    );
    within(Host::B, &|| {
        let zone = wait_for("a link-local address", link_local);
        let zone = zone.split_once('%').unwrap().1.to_owned();
        let there: Address = format!("{ip}%{zone}]:{port}").parse().unwrap();
        let opened = open(&there, &PLAIN_ANYWHERE, &identity(), FIRST).unwrap();
        assert!(opened.connection.peer().contains(&format!("%{zone}]")));
    });
    let taken = destination.take(FIRST);
    assert!(taken.peer().contains('%'), "{}", taken.peer());
}

const PLAIN_ANYWHERE: Protection = Protection::Plain(PlainPolicy::Anywhere);

/// The first link-local address of this host that may be used, with its zone.
fn link_local() -> Option<String> {
    let table = std::fs::read_to_string("/proc/thread-self/net/if_inet6").ok()?;
    table.lines().find_map(|line| {
        let parts: Vec<&str> = line.split_whitespace().collect();
        // 0x20 is the scope of a link, 0x40 says that it is still being checked.
        let flags = u32::from_str_radix(parts[4], 16).ok()?;
        let usable = parts[3] == "20" && flags & 0x40 == 0;
        let bits = u128::from_str_radix(parts[0], 16).ok()?;
        let ip = std::net::Ipv6Addr::from_bits(bits);
        usable.then(|| format!("{ip}%{}", parts[5]))
    })
}
