#![expect(
    unsafe_code,
    reason = "tests the reads and writes on memory given by address"
)]
//! Sockets: every wait ends, and the errors distinguish the ways in which it ends.

use pageferry_transport::address::Address;
use pageferry_transport::channel::*;
use pageferry_transport::wire::WireError;
use std::cell::Cell;
use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A limit against hanging, on slow and shared hosts too.
const LIMIT: Wait<'static> = Wait::block("test").within(pageferry_testkit::LIMIT);

/// A directory of one test, removed at its end.
struct Directory(PathBuf);

impl Directory {
    fn new(test: &str) -> Self {
        let name = format!("pageferry-{test}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn address(&self, name: &str) -> Address {
        Address::unix(&self.0.join(name)).unwrap()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

fn loopback() -> Address {
    "127.0.0.1:0".parse().unwrap()
}

fn connected(address: &Address) -> (Connection, Connection) {
    let listener = Listener::bind(address).unwrap();
    let near = Connection::connect(listener.local_addr(), &LIMIT).unwrap();
    (near, listener.accept(&LIMIT).unwrap())
}

/// Runs the same test on TCP, on a unix socket and with TLS.
fn on_all(test: &str, run: impl Fn(Connection, Connection)) {
    let directory = Directory::new(test);
    for address in [loopback(), directory.address("socket")] {
        let (near, far) = connected(&address);
        run(near, far);
    }
    let (near, far) = pageferry_testkit::handshake::tls_pair();
    run(near, far);
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + i / 4096) as u8).collect()
}

#[test]
fn megabytes_arrive_in_order_through_small_buffers() {
    on_all("bulk", |near, far| {
        near.set_buffers(Some(8192), None).unwrap();
        // Not smaller than a segment of the loopback device: below that, TCP is very slow.
        far.set_buffers(None, Some(128 << 10)).unwrap();
        let sent = pattern(8 << 20);
        let mut received = vec![0; sent.len()];
        thread::scope(|scope| {
            scope.spawn(|| {
                let pieces: Vec<IoSlice<'_>> = sent.chunks(5000).map(IoSlice::new).collect();
                near.write_all_vectored(&pieces, &LIMIT).unwrap();
            });
            far.read_exact(&mut received, &LIMIT).unwrap();
        });
        assert!(sent == received);
    });
}

#[test]
fn memory_given_by_address_is_sent_and_filled_where_it_lies() {
    on_all("raw", |near, far| {
        let sent = pattern(300 * 4096);
        let mut place = vec![0u8; 600 * 4096];
        let raw = |start: *mut u8, page: usize| RawSlice {
            start: start.wrapping_add(page * 4096),
            len: 4096,
        };
        let from = sent.as_ptr().cast_mut();
        let to = place.as_mut_ptr();
        let source: Vec<RawSlice> = (0..300).map(|page| raw(from, page)).collect();
        // More pieces than one system call takes. They are every second page.
        let target: Vec<RawSlice> = (0..300).map(|page| raw(to, 2 * page)).collect();
        let bytes: Vec<&[u8]> = sent.chunks(4096).collect();
        thread::scope(|scope| {
            let near = &near;
            let sender = scope.spawn(move || {
                let slices: Vec<IoSlice<'_>> = bytes.iter().map(|b| IoSlice::new(b)).collect();
                near.write_all_vectored(&slices, &LIMIT).unwrap();
            });
            // SAFETY: until the call returns, `place` is only reached through `target`.
            unsafe { far.read_exact_raw(&target, &LIMIT).unwrap() };
            sender.join().unwrap();
        });
        for (page, bytes) in place.chunks(4096).enumerate() {
            match page % 2 {
                0 => assert!(bytes == &sent[page / 2 * 4096..][..4096], "page {page}"),
                _ => assert!(bytes.iter().all(|&byte| byte == 0), "page {page}"),
            }
        }
        // SAFETY: `sent` outlives the call and has no other borrow.
        unsafe { near.write_all_raw(&source[..2], &LIMIT).unwrap() };
        let mut two = vec![0; 8192];
        far.read_exact(&mut two, &LIMIT).unwrap();
        assert!(two == sent[..8192]);
    });
}

#[test]
fn an_end_between_messages_is_not_an_end_within_one() {
    on_all("ends", |near, far| {
        near.write_all(b"12345", &LIMIT).unwrap();
        drop(near);
        let mut buf = [0; 4];
        far.read_exact(&mut buf, &LIMIT).unwrap();
        let truncated = |got| WireError::Truncated {
            what: "test",
            needed: 4,
            got,
        };
        let cut = far.read_exact(&mut buf, &LIMIT).unwrap_err();
        assert!(matches!(cut, ChannelError::Wire(error) if error == truncated(1)));
        let end = far.read_exact(&mut buf, &LIMIT).unwrap_err();
        assert!(matches!(end, ChannelError::Closed { .. }));
        let cut = far.read_exact(&mut buf, &LIMIT.mid_message()).unwrap_err();
        assert!(matches!(cut, ChannelError::Wire(error) if error == truncated(0)));
    });
}

#[test]
fn a_dead_peer_is_an_error_of_the_writer_and_no_signal() {
    on_all("dead", |near, far| {
        drop(far);
        let bytes = vec![0; 1 << 20];
        let error = (0..100).find_map(|_| near.write_all(&bytes, &LIMIT).err());
        assert!(
            matches!(error, Some(ChannelError::Lost { .. })),
            "{error:?}"
        );
    });
}

#[test]
fn a_wait_ends_with_its_limit_whatever_the_policy() {
    on_all("limit", |_near, far| {
        let limit = Duration::from_millis(60);
        for micros in [0, 1_000, u32::MAX] {
            let began = Instant::now();
            let wait = Wait::block("test").within(limit).spinning(micros);
            let error = far.read_exact(&mut [0; 4], &wait).unwrap_err();
            assert!(matches!(error, ChannelError::TimedOut { after, .. } if after == limit));
            assert!(began.elapsed() >= limit);
        }
    });
}

/// Takes so many steps with pauses. Returns the longest time without one, from `began` on.
fn slowly(began: Instant, steps: usize, mut step: impl FnMut()) -> Duration {
    let (mut last, mut longest) = (began, Duration::ZERO);
    for _ in 0..steps {
        thread::sleep(Duration::from_millis(20));
        let this = Instant::now();
        step();
        longest = longest.max(last.elapsed());
        last = this;
    }
    longest
}

/// The limit measures silence: a slow peer is not a silent one.
#[test]
fn a_slow_peer_is_waited_for_as_long_as_bytes_come() {
    const LEN: usize = 15;
    let limit = Duration::from_millis(250);
    let wait = Wait::block("test").within(limit);
    let again = Cell::new(true);
    // On a busy host the peer may be silent for longer than the limit.
    let check = |ended: Result<(), ChannelError>, silence| match ended {
        Err(ChannelError::TimedOut { .. }) if silence >= limit => again.set(true),
        ended => ended.unwrap(),
    };
    while again.take() {
        on_all("slow", |near, far| {
            let began = Instant::now();
            thread::scope(|scope| {
                let say = || near.write_all(b"x", &LIMIT).unwrap();
                let peer = scope.spawn(move || slowly(began, LEN, say));
                let read = far.read_exact(&mut [0; LEN], &wait);
                check(read, peer.join().unwrap());
            });
            assert!(began.elapsed() > limit);
        });
        // A writer is not silent either, while the peer takes its bytes.
        on_all("slow", |near, far| {
            let bytes = vec![0; 16 << 20];
            let began = Instant::now();
            thread::scope(|scope| {
                let mut some = vec![0; 1 << 20];
                // It fails after the end of a writer.
                let hear = move || drop(far.read_exact(&mut some, &LIMIT));
                let peer = scope.spawn(move || slowly(began, 16, hear));
                let written = near.write_all(&bytes, &wait);
                if written.is_err() {
                    near.shutdown();
                }
                check(written, peer.join().unwrap());
            });
            assert!(began.elapsed() > limit);
        });
    }
}

#[test]
fn a_full_socket_does_not_hold_a_writer_for_ever() {
    on_all("full", |near, _far| {
        let wait = Wait::block("test").within(Duration::from_millis(60));
        let error = near.write_all(&vec![0; 64 << 20], &wait).unwrap_err();
        assert!(matches!(error, ChannelError::TimedOut { .. }));
    });
}

#[test]
fn a_wait_is_called_off_by_stop() {
    on_all("stop", |_near, far| {
        for micros in [0, u32::MAX] {
            let began = Instant::now();
            let stop = || began.elapsed() >= Duration::from_millis(30);
            let wait = LIMIT.unless(&stop).spinning(micros);
            let error = far.read_exact(&mut [0; 4], &wait).unwrap_err();
            assert!(matches!(error, ChannelError::Interrupted { .. }));
            assert!(began.elapsed() < Duration::from_secs(30));
        }
    });
}

#[test]
fn shutdown_ends_a_read_and_a_write_in_other_threads() {
    on_all("shutdown", |near, _far| {
        const ENDLESS: Wait<'static> = Wait::block("test");
        thread::scope(|scope| {
            let reader = scope.spawn(|| near.read_exact(&mut [0; 4], &ENDLESS));
            let writer = scope.spawn(|| near.write_all(&vec![0; 64 << 20], &ENDLESS));
            thread::sleep(Duration::from_millis(50));
            near.shutdown();
            let read = reader.join().unwrap();
            assert!(matches!(read, Err(ChannelError::Closed { .. })), "{read:?}");
            let written = writer.join().unwrap();
            assert!(
                matches!(written, Err(ChannelError::Lost { .. })),
                "{written:?}"
            );
        });
    });
}

#[test]
fn a_half_closed_connection_still_receives() {
    on_all("half", |near, far| {
        near.shutdown_write();
        let end = far.read_exact(&mut [0; 1], &LIMIT);
        assert!(matches!(end, Err(ChannelError::Closed { .. })));
        far.write_all(b"late", &LIMIT).unwrap();
        let mut word = [0; 4];
        near.read_exact(&mut word, &LIMIT).unwrap();
        assert_eq!(&word, b"late");
    });
}

#[test]
fn what_has_come_is_received_without_waiting() {
    on_all("pending", |near, far| {
        let mut buf = [0; 8];
        assert!(matches!(far.recv_pending(&mut buf, "test"), Ok(None)));
        near.write_all(b"abc", &LIMIT).unwrap();
        far.wait_readable(&LIMIT.spinning(100)).unwrap();
        assert!(matches!(far.recv_pending(&mut buf, "test"), Ok(Some(3))));
        assert_eq!(&buf[..3], b"abc");
        drop(near);
        far.wait_readable(&LIMIT).unwrap();
        let end = far.recv_pending(&mut buf, "test");
        assert!(matches!(end, Err(ChannelError::Closed { .. })));
    });
}

/// A message of several threads is queued under a lock of their own, and sent without waiting.
#[test]
fn queued_messages_are_sent_without_waiting_and_stay_whole() {
    on_all("queued", |near, far| {
        const THREADS: u8 = 4;
        const EACH: usize = 2000;
        near.set_buffers(Some(4096), None).unwrap();
        let queue = Mutex::new(Vec::new());
        let all_queued = AtomicU8::new(0);
        let send = |queue: &mut Vec<u8>| {
            let taken = near.try_send(queue, "test").unwrap();
            queue.drain(..taken);
        };
        thread::scope(|scope| {
            for id in 0..THREADS {
                let (queue, send, all_queued) = (&queue, &send, &all_queued);
                scope.spawn(move || {
                    for _ in 0..EACH {
                        let mut queue = queue.lock().unwrap();
                        queue.extend_from_slice(&[id; 16]);
                        send(&mut queue);
                    }
                    all_queued.fetch_add(1, Ordering::Relaxed);
                });
            }
            scope.spawn(|| {
                // The rest, once there is room.
                loop {
                    let mut queue = queue.lock().unwrap();
                    send(&mut queue);
                    let flushed = near.flush_pending("test").unwrap();
                    if all_queued.load(Ordering::Relaxed) == THREADS && queue.is_empty() && flushed
                    {
                        break;
                    }
                    drop(queue);
                    thread::sleep(Duration::from_millis(1));
                }
            });
            let mut seen = [0; THREADS as usize];
            for _ in 0..usize::from(THREADS) * EACH {
                let mut message = [0; 16];
                far.read_exact(&mut message, &LIMIT).unwrap();
                assert_eq!(message, [message[0]; 16]);
                seen[usize::from(message[0])] += 1;
            }
            assert_eq!(seen, [EACH; THREADS as usize]);
        });
    });
}

#[test]
fn a_full_socket_takes_nothing_more_until_the_peer_reads() {
    on_all("no-room", |near, far| {
        let bytes = pattern(64 << 10);
        let mut sent = Vec::new();
        loop {
            let taken = near.try_send(&bytes, "test").unwrap();
            sent.extend_from_slice(&bytes[..taken]);
            if taken == 0 {
                break;
            }
        }
        assert_eq!(near.try_send(b"x", "test").unwrap(), 0);
        let mut received = vec![0; sent.len()];
        thread::scope(|scope| {
            scope.spawn(|| {
                while !near.flush_pending("test").unwrap() {
                    thread::sleep(Duration::from_millis(1));
                }
            });
            far.read_exact(&mut received, &LIMIT).unwrap();
        });
        assert!(sent == received);
        assert_eq!(near.try_send(b"x", "test").unwrap(), 1);
    });
}

#[test]
fn a_caller_may_hand_in_its_own_sockets() {
    let (a, b) = std::os::unix::net::UnixStream::pair().unwrap();
    let near = Connection::adopt_fd(a.into()).unwrap();
    let far = Connection::adopt_fd(b.into()).unwrap();
    assert!(near.is_local());
    near.write_all(b"word", &LIMIT).unwrap();
    let mut word = [0; 4];
    far.read_exact(&mut word, &LIMIT).unwrap();
    assert_eq!(&word, b"word");

    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = socket.local_addr().unwrap().port();
    let listener = Listener::adopt_fd(socket.into()).unwrap();
    let expected: Address = format!("127.0.0.1:{port}").parse().unwrap();
    assert_eq!(*listener.local_addr(), expected);
    assert!(listener.try_accept().unwrap().is_none());
    let dialled = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    let near = Connection::adopt_fd(dialled.into()).unwrap();
    let far = listener.accept(&LIMIT).unwrap();
    far.write_all(b"back", &LIMIT).unwrap();
    near.read_exact(&mut word, &LIMIT).unwrap();
    assert_eq!(&word, b"back");

    let directory = Directory::new("adopt");
    let path = directory.0.join("socket");
    let listener = Listener::adopt_fd(UnixListener::bind(&path).unwrap().into()).unwrap();
    assert_eq!(*listener.local_addr(), directory.address("socket"));
    drop(listener);
    assert!(path.exists(), "the file is the caller's");
}

/// The most data of one packet that a TCP socket sends now.
fn segment_of(connection: &Connection) -> i32 {
    let (mut bytes, mut len) = (0_i32, size_of::<i32>() as libc::socklen_t);
    // SAFETY: the kernel writes an `int` of this length, and the length.
    let told = unsafe {
        libc::getsockopt(
            connection.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_MAXSEG,
            (&raw mut bytes).cast(),
            &raw mut len,
        )
    };
    assert_eq!((told, len), (0, 4));
    bytes
}

/// The loopback interface has an MTU of 64 KiB. A connection uses it little by little, so its first
/// packets prove nothing of later ones.
#[test]
fn no_packet_is_larger_than_those_that_a_handshake_sends() {
    let theirs = || std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let most = 8960;
    for address in ["127.0.0.1:0", "[::1]:0"] {
        let Ok(listener) = Listener::bind(&address.parse().unwrap()) else {
            assert_ne!(address, "127.0.0.1:0", "IPv4 is everywhere");
            continue;
        };
        // A dialler of another kind, and a listener of another kind: one of ours is enough.
        let port = match listener.local_addr() {
            Address::Tcp { port, .. } => *port,
            Address::Unix(_) => unreachable!("it is TCP"),
        };
        let ip: std::net::IpAddr = address[..address.len() - 2]
            .trim_matches(['[', ']'])
            .parse()
            .unwrap();
        let dialled = std::net::TcpStream::connect((ip, port)).unwrap();
        let near = Connection::adopt_fd(dialled.into()).unwrap();
        let far = listener.accept(&LIMIT).unwrap();
        assert_bounded(&near, &far, most);
    }
    let plain = theirs();
    let to = plain.local_addr().unwrap().to_string().parse().unwrap();
    let near = Connection::connect(&to, &LIMIT).unwrap();
    let far = Connection::adopt_fd(plain.accept().unwrap().0.into()).unwrap();
    assert_bounded(&near, &far, most);
    let adopted = Listener::adopt_fd(theirs().into()).unwrap();
    let to = adopted.local_addr().to_string();
    let dialled = std::net::TcpStream::connect(to.trim_start_matches("tcp:")).unwrap();
    let near = Connection::adopt_fd(dialled.into()).unwrap();
    let far = adopted.accept(&LIMIT).unwrap();
    assert_bounded(&near, &far, most);
}

/// Both send packets of at most this much data, also when their windows have grown.
#[track_caller]
fn assert_bounded(near: &Connection, far: &Connection, most: i32) {
    for (from, to) in [(near, far), (far, near)] {
        assert!(segment_of(from) <= most, "{}", segment_of(from));
        let (sent, mut received) = (pattern(8 << 20), vec![0; 8 << 20]);
        thread::scope(|scope| {
            scope.spawn(|| from.write_all(&sent, &LIMIT).unwrap());
            to.read_exact(&mut received, &LIMIT).unwrap();
        });
        assert!(segment_of(from) <= most, "{}", segment_of(from));
        assert!(segment_of(from) > most / 2, "{}", segment_of(from));
    }
}

#[test]
fn a_descriptor_that_does_not_fit_is_refused_with_the_reason() {
    let file = || std::fs::File::open("/dev/null").unwrap();
    let refused = Connection::adopt_fd(file().into());
    assert!(matches!(refused, Err(AdoptError::NotAStream)));
    let datagram = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let refused = Connection::adopt_fd(datagram.into());
    assert!(matches!(refused, Err(AdoptError::NotAStream)));
    let listening = || std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let refused = Connection::adopt_fd(listening().into());
    assert!(matches!(refused, Err(AdoptError::NotConnected)));
    let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
    let refused = Listener::adopt_fd(a.into());
    assert!(matches!(refused, Err(AdoptError::NotListening)));
}

#[test]
fn loopback_and_unix_addresses_are_local() {
    let local = |text: &str| is_local(&text.parse().unwrap()).unwrap();
    for text in [
        "127.0.0.1:1",
        "127.9.9.9:1",
        "[::1]:1",
        "[::ffff:127.0.0.1]:1",
        "/a/b",
    ] {
        assert!(local(text), "{text}");
    }
    for text in ["192.0.2.1:1", "0.0.0.0:1", "[2001:db8::1]:1"] {
        assert!(!local(text), "{text}");
    }
}

#[test]
fn an_address_in_use_is_told_from_one_left_behind() {
    let taken = Listener::bind(&loopback()).unwrap();
    let error = Listener::bind(taken.local_addr()).unwrap_err();
    assert!(matches!(error, OpenError::InUse { .. }), "{error:?}");

    let directory = Directory::new("in-use");
    let address = directory.address("socket");
    let taken = Listener::bind(&address).unwrap();
    let error = Listener::bind(&address).unwrap_err();
    assert!(matches!(error, OpenError::InUse { .. }), "{error:?}");
    drop(taken);

    // Nobody listens there any more.
    drop(UnixListener::bind(directory.0.join("stale")).unwrap());
    drop(Listener::bind(&directory.address("stale")).unwrap());

    std::fs::write(directory.0.join("file"), "").unwrap();
    let error = Listener::bind(&directory.address("file")).unwrap_err();
    assert!(matches!(error, OpenError::NotASocket { .. }), "{error:?}");
    let error = Listener::bind(&directory.address("no/socket")).unwrap_err();
    assert!(matches!(error, OpenError::NoSuchPath { .. }), "{error:?}");
}

#[test]
fn a_unix_socket_is_its_owners_and_goes_with_its_listener() {
    let directory = Directory::new("owner");
    let (path, address) = (directory.0.join("socket"), directory.address("socket"));
    let listener = Listener::bind(&address).unwrap();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
    drop(listener);
    assert!(!path.exists());
    // A listener leaves a file that replaced its own.
    let listener = Listener::bind(&address).unwrap();
    std::fs::rename(&path, directory.0.join("moved")).unwrap();
    let other = Listener::bind(&address).unwrap();
    drop(listener);
    assert!(path.exists());
    drop(other);
    assert!(!path.exists());
}

#[test]
fn a_connection_nobody_takes_is_refused_at_once() {
    // A bound port without a listener: no other test can get it.
    let taken = rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::STREAM,
        None,
    )
    .unwrap();
    let any = std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, 0);
    rustix::net::bind(&taken, &any).unwrap();
    let port = std::net::SocketAddr::try_from(rustix::net::getsockname(&taken).unwrap())
        .unwrap()
        .port();
    let refused = |address: &Address| Connection::connect(address, &LIMIT).unwrap_err();
    let address = format!("127.0.0.1:{port}").parse().unwrap();
    let error = refused(&address);
    assert!(
        matches!(error, ChannelError::Open(OpenError::Refused { .. })),
        "{error:?}"
    );
    assert!(error.to_string().contains("nobody listens there"));
    let directory = Directory::new("refused");
    drop(UnixListener::bind(directory.0.join("stale")).unwrap());
    let error = refused(&directory.address("stale"));
    assert!(matches!(
        error,
        ChannelError::Open(OpenError::Refused { .. })
    ));
    let error = refused(&directory.address("none"));
    assert!(matches!(
        error,
        ChannelError::Open(OpenError::NoSuchPath { .. })
    ));
    let error = refused(&loopback());
    assert!(matches!(
        error,
        ChannelError::Open(OpenError::PortZero { .. })
    ));
}

#[test]
fn a_listeners_queue_that_is_full_does_not_hold_a_caller_for_ever() {
    let directory = Directory::new("queue");
    let listener = Listener::bind(&directory.address("socket")).unwrap();
    let wait = Wait::block("test").within(Duration::from_millis(50));
    let mut callers = Vec::new();
    let error = loop {
        assert!(callers.len() < 10_000, "the queue has an end");
        match Connection::connect(listener.local_addr(), &wait) {
            Ok(caller) => callers.push(caller),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, ChannelError::TimedOut { .. }), "{error:?}");
}
