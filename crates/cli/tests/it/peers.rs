//! Peers that do not exist, speak another protocol, stop in the middle, or do not fit. Each case
//! has its exit code, and the VM at the source runs on.

use crate::support::peer::{Peer, nobody, once};
use crate::support::{Destination, Dir, Ended, Process, Source, pageferry};
use pageferry_migration::wire::{
    ChannelKey, Frame, FrameHeader, FrameType, HEADER_BYTES, HELLO_BYTES, Hello, HelloReply, Role,
    Setup, Side, Status, VERSION,
};
use pageferry_testkit::{LIMIT, wait_for, wait_until};
use pageferry_transport::address::Address;
use pageferry_transport::channel::{Connection, Wait};
use pageferry_transport::handshake::{HandshakeError, Identity, PlainPolicy, Protection, dial};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

/// A migration to `address` fails with `code`, and the VM is as before.
#[track_caller]
fn assert_refused(address: &str, code: i32, part: &str) {
    let source = Source::start("16M");
    source.migrate(address).end().assert_failed(code, part);
    source.assert_unharmed();
}

#[test]
fn nobody_listens() {
    let (_taken, address) = nobody();
    assert_refused(&address, 6, "nobody listens there");
    assert_refused("unix:/no/such/socket", 6, "no such socket");
    assert_refused("no.such.host.invalid:7", 6, "was not found");
}

#[test]
fn an_address_that_is_none_is_a_usage_error() {
    let ended = pageferry(&["migrate", "--vm", "/x", "--to", "7000"]);
    ended.assert_failed(2, "invalid value");
    assert!(ended.stderr.contains("the port is missing"), "{ended:?}");
}

#[test]
fn a_web_server_is_recognized() {
    let (address, server) = once(|mut stream| {
        let mut hello = [0; HELLO_BYTES];
        stream.read_exact(&mut hello).unwrap();
        stream
            .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            .unwrap();
        let _ = stream.read(&mut hello);
    });
    assert_refused(&address, 7, "HTTP");
    server.join().unwrap();
}

#[test]
fn garbage_is_not_the_protocol() {
    let (address, server) = once(|mut stream| {
        stream.write_all(&[0xa5; 4096]).unwrap();
        let _ = stream.read(&mut [0; 64]);
    });
    assert_refused(&address, 7, "does not speak Pageferry's protocol");
    server.join().unwrap();
}

#[test]
fn another_version_says_so() {
    let (address, server) = once(|mut stream| {
        let mut hello = [0; HELLO_BYTES];
        stream.read_exact(&mut hello).unwrap();
        let hello = Hello::decode(&hello).unwrap();
        let reply = HelloReply {
            version: VERSION + 1,
            ..HelloReply::refuse(hello.session, Status::VersionUnsupported)
        };
        stream.write_all(&reply.encode()).unwrap();
        let _ = stream.read(&mut [0; 64]);
    });
    assert_refused(&address, 7, "version");
    server.join().unwrap();
}

#[test]
fn a_peer_that_stops_in_mid_frame_is_noticed() {
    let (address, server) = Peer::start(|mut peer| {
        peer.skip_frame().unwrap();
        peer.write(b"PGFR\x02\x00");
    });
    assert_refused(&address, 13, "stopped after");
    server.join().unwrap();
}

#[test]
fn a_peer_that_ends_in_precopy_leaves_the_vm_at_the_source() {
    let (address, server) = Peer::start(|mut peer| {
        peer.set_up();
        peer.skip_frame().unwrap();
    });
    assert_refused(&address, 13, "the VM runs on at the source");
    server.join().unwrap();
}

#[test]
fn a_peer_that_ends_in_the_switch_over_leaves_the_vm_at_the_source() {
    let (address, server) = Peer::start(|mut peer| peer.until_switch_over());
    assert_refused(&address, 13, "the VM runs on at the source");
    server.join().unwrap();
}

#[test]
fn a_frame_too_long_or_of_no_type_is_refused() {
    for (bytes, part) in [
        (&[0xff; 32][..], "frame"),
        (
            b"PGFR\x02\x00\x00\x00\xff\xff\xff\xff________________________",
            "SetupAck",
        ),
    ] {
        let (address, server) = Peer::start(move |mut peer| {
            peer.skip_frame().unwrap();
            peer.write(bytes);
            peer.until_closed();
        });
        assert_refused(&address, 7, part);
        server.join().unwrap();
    }
}

#[test]
fn an_address_that_cannot_be_listened_on_is_told() {
    for address in ["unix:/no/such/directory/socket", "no.such.host.invalid:0"] {
        let dir = Dir::new();
        let process = Process::start(&["receive", "--listen", address], &dir);
        assert_eq!(process.end().code, Some(5), "{address}");
    }
}

#[test]
fn a_port_in_use_is_told() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    pageferry(&["receive", "--listen", &address]).assert_failed(5, "is in use");
}

#[test]
fn a_control_socket_in_use_is_told() {
    let source = Source::start("16M");
    let socket = source.socket.to_str().unwrap();
    let args = [
        "run",
        "--engine",
        "soft",
        "--memory",
        "16M",
        "--control",
        socket,
    ];
    pageferry(&args).assert_failed(5, "another VM listens there");
    let file = source.dir.path("file");
    std::fs::write(&file, "precious").unwrap();
    let args = [
        "run",
        "--engine",
        "soft",
        "--memory",
        "16M",
        "--control",
        file.to_str().unwrap(),
    ];
    pageferry(&args).assert_failed(5, "a file of that name exists");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
    std::fs::remove_file(file).unwrap();
    source.assert_unharmed();
}

#[test]
fn a_socket_that_was_left_behind_is_taken_over() {
    let dir = Dir::new();
    let socket = dir.path("vm");
    let args = [
        "run",
        "--engine",
        "soft",
        "--memory",
        "16M",
        "--control",
        socket.to_str().unwrap(),
    ];
    let killed = Process::start(&args, &dir);
    wait_for("the VM", || crate::support::status(&socket));
    drop(killed);
    assert!(socket.exists());
    let process = Process::start(&args, &dir);
    wait_for("the VM", || {
        crate::support::status(&socket).filter(|s| s["state"] == "running")
    });
    process.interrupt();
    process.end().assert_ok();
    dir.assert_empty();
}

#[test]
fn no_vm_at_the_socket_is_told() {
    for command in ["status", "pause", "resume", "verify", "quit"] {
        pageferry(&[command, "--vm", "/no/such/socket"])
            .assert_failed(11, "no VM listens on /no/such/socket");
    }
    pageferry(&["migrate", "--vm", "/no/such/socket", "--to", "h:1"])
        .assert_failed(11, "no VM listens");
}

/// A listening destination on TCP.
fn destination(dir: &Dir) -> (Process, String) {
    let process = Process::start(&["receive", "--listen", "127.0.0.1:0"], dir);
    let address = process.wait_until_said("listening on tcp:");
    (process, address)
}

#[test]
fn strangers_do_not_disturb_a_destination() {
    let dir = Dir::new();
    let (process, address) = destination(&dir);
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xa5; 300], b"PGFERRY"] {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all(bytes).unwrap();
    }
    let source = Source::start("16M");
    source.migrate(&address).end().assert_ok();
    source.process.end().assert_ok();
    process.interrupt();
    let ended = process.end();
    ended.assert_ok();
    assert!(ended.stderr.contains("HTTP"), "{ended:?}");
    dir.assert_empty();
}

/// Opens a session with a destination.
fn open(address: &str) -> Connection {
    try_open(address).unwrap()
}

fn try_open(address: &str) -> Result<Connection, HandshakeError> {
    let address: Address = address.parse().unwrap();
    let plain = Protection::Plain(PlainPolicy::LoopbackOnly);
    let identity = Identity::random().unwrap();
    let key = ChannelKey::control(1);
    let opened = dial(&address, &plain, &identity, key, [LIMIT; 2], &|| false);
    opened.map(|opened| opened.connection)
}

/// The set-up that a source sends, for a machine of 16 MiB with 2 vCPUs.
fn setup(change: impl FnOnce(&mut Setup)) -> Vec<u8> {
    use pageferry_migration::wire::{DeviceEntry, Kind, Region};
    let memory_bytes = 16u64 << 20;
    let mut description = b"PFGD\x01\x00\x01\x02\x02\x00\x00\x00".to_vec();
    description.extend(memory_bytes.to_le_bytes());
    let mut setup = Setup {
        kind: Kind {
            engine: "soft".parse().unwrap(),
            isa: "riscv64".parse().unwrap(),
            state_format: "soft-riscv64/1".parse().unwrap(),
        },
        vcpus: 2,
        memory_bytes,
        regions: vec![Region {
            slot: 0,
            gfn: pageferry_addr::Gfn(0),
            pages: memory_bytes / 4096,
        }],
        devices: vec![DeviceEntry {
            name: "console".parse().unwrap(),
            version: 1,
        }],
        description,
        bulk_channels: 1,
        urgent_channels: 1,
    };
    change(&mut setup);
    let mut bytes = Vec::new();
    Frame::Setup(setup).encode(&mut bytes).unwrap();
    bytes
}

fn send(control: &Connection, bytes: &[u8]) {
    let wait = Wait::block("test").within(LIMIT);
    control.write_all(bytes, &wait).unwrap();
}

#[test]
fn a_source_that_does_not_fit_is_refused() {
    type Change = fn(&mut Setup);
    let cases: [(Change, &str); 5] = [
        (
            |s| s.description.truncate(7),
            "guest description has 7 bytes",
        ),
        (
            |s| s.description[8] = 3,
            "its guest description and its machine differ",
        ),
        (|s| s.description[4] = 9, "version 9"),
        (
            |s| s.kind.state_format = "soft-riscv64/2".parse().unwrap(),
            "format of vCPU states",
        ),
        (|s| s.regions[0].gfn.0 = 1, "memory regions differ"),
    ];
    let dir = Dir::new();
    let (process, address) = destination(&dir);
    for (change, part) in cases {
        let pair = open(&address);
        send(&pair, &setup(change));
        assert_turned_away(&process, part);
    }
    assert_takes(process, &address);
    dir.assert_empty();
}

#[test]
fn a_source_larger_than_this_host_is_refused() {
    let dir = Dir::new();
    let (process, address) = destination(&dir);
    let pair = open(&address);
    let bytes = setup(|s| {
        s.memory_bytes = 2 << 40;
        s.regions[0].pages = (3 << 30) / 4096;
        s.regions.push(pageferry_migration::wire::Region {
            slot: 1,
            gfn: pageferry_addr::Gfn((4 << 30) / 4096),
            pages: ((2u64 << 40) - (3 << 30)) / 4096,
        });
        s.description.truncate(12);
        s.description.extend((2u64 << 40).to_le_bytes());
    });
    send(&pair, &bytes);
    assert_turned_away(&process, "available");
    assert_takes(process, &address);
    dir.assert_empty();
}

#[test]
fn a_source_that_sends_garbage_or_stops_is_told_and_the_next_one_taken() {
    type Act = fn(&Connection);
    let cases: [(Act, &str); 4] = [
        (|pair| send(pair, &[0xff; 64]), "frame"),
        (
            |pair| {
                send(
                    pair,
                    b"PGFR\x01\x00\x00\x00\xff\xff\xff\xff________________________",
                );
            },
            "Setup",
        ),
        (|pair| send(pair, &setup(|_| {})[..40]), "stopped after"),
        (
            |pair| {
                send(pair, &setup(|_| {}));
                // The set-up is done before the destination is left alone.
                let wait = Wait::block("SetupAck").within(LIMIT);
                pair.read_exact(&mut [0; HEADER_BYTES], &wait).unwrap();
            },
            "stays at the source",
        ),
    ];
    let dir = Dir::new();
    let (process, address) = destination(&dir);
    for (act, part) in cases {
        let pair = open(&address);
        act(&pair);
        drop(pair);
        assert_turned_away(&process, part);
    }
    assert_takes(process, &address);
    dir.assert_empty();
}

/// Checks that a VM can migrate to this destination, and that the destination then ends with 0.
#[track_caller]
fn assert_takes(process: Process, address: &str) -> Ended {
    let source = Source::start("16M");
    source.migrate(address).end().assert_ok();
    source.process.end().assert_ok();
    process.interrupt();
    let ended = process.end();
    ended.assert_ok();
    ended
}

/// The destination reports in one line that it turned a source away for `why`, and listens on.
#[track_caller]
fn assert_turned_away(process: &Process, why: &str) {
    let rest = process.wait_until_said(why);
    assert!(rest.ends_with("still listening"), "{why}: {rest}");
}

#[test]
fn sessions_that_say_nothing_do_not_keep_a_source_out() {
    let dir = Dir::new();
    let (process, address) = destination(&dir);
    // Both connections accepted, or one of them, and then silence.
    let pairs: Vec<_> = (0..3).map(|_| open(&address)).collect();
    let halves: Vec<_> = (0..3)
        .map(|_| {
            let mut stream = TcpStream::connect(&address).unwrap();
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            let hello = Hello::ours(ChannelKey::control(1), Identity::random().unwrap().session);
            stream.write_all(&hello.encode()).unwrap();
            stream.read_exact(&mut [0; HELLO_BYTES]).unwrap();
            stream
        })
        .collect();
    let ended = assert_takes(process, &address);
    // The destination never waits for the offer of one silent session while others connect.
    assert!(!ended.stderr.contains("turned away a source"), "{ended:?}");
    drop((pairs, halves));
    dir.assert_empty();
}

#[test]
fn a_vm_above_the_limits_is_refused_with_the_limit() {
    for (limit, value, why) in [
        ("--max-memory", "8M", "at most 8 MiB (--max-memory)"),
        ("--max-vcpus", "1", "at most 1 (--max-vcpus)"),
    ] {
        let destination = Destination::start(&[limit, value]);
        let source = Source::start("16M");
        source
            .migrate(&destination.address)
            .end()
            .assert_failed(8, why);
        assert_turned_away(&destination.process, why);
        assert_eq!(
            crate::support::status(&destination.socket).unwrap()["state"],
            "waiting"
        );
        source.assert_unharmed();
    }
}

/// Also for the VMs of other VMMs, whose processes are asked for nothing then.
#[test]
fn a_vm_beyond_the_hosts_memory_is_refused() {
    let dir = Dir::new();
    let api = format!("fc:{}", dir.path("none").display());
    for more in [&[][..], &["--for", &api]] {
        let args = [
            &["receive", "--listen", "127.0.0.1:0", "--insecure"][..],
            more,
        ]
        .concat();
        let process = Process::start(&args, &dir);
        let source = open(&process.wait_until_said("listening on "));
        let bytes = 16 << 40;
        send(
            &source,
            &setup(|setup| {
                setup.memory_bytes = bytes;
                setup.regions[0].pages = bytes / 4096;
            }),
        );
        assert_turned_away(
            &process,
            "16 TiB of guest memory need 16 TiB, and this host has",
        );
        process.interrupt();
        process.end();
    }
}

/// A source that has set up its VM, and is then silent: the destination serves it until it leaves.
pub(crate) fn busy(destination: &Destination) -> Connection {
    let source = open(&destination.address);
    send(&source, &setup(|_| {}));
    let wait = Wait::block("SetupAck").within(LIMIT);
    let mut ack = [0; HEADER_BYTES];
    source.read_exact(&mut ack, &wait).unwrap();
    source
}

#[test]
fn a_source_that_meets_a_busy_destination_tries_again() {
    let destination = Destination::start(&[]);
    let first = busy(&destination);
    let source = Source::start("16M");
    let migrate = source.migrate(&destination.address);
    destination.process.wait_until_said("busy");
    drop(first);
    migrate.end().assert_ok();
    source.process.end().assert_ok();
    destination.process.interrupt();
    destination.process.end().assert_ok();
}

#[test]
fn a_destination_whose_source_left_stops_to_allocate() {
    // A busy machine may let this test see and end the allocation too late.
    let stops = (0..5).any(|_| stops_to_allocate_when_its_source_leaves());
    assert!(stops, "it allocated all of it each time");
}

/// Whether neither the progress nor the peak of an allocation was all of it.
fn stops_to_allocate_when_its_source_leaves() -> bool {
    let destination = Destination::start(&[]);
    let pair = open(&destination.address);
    let memory: u64 = 3 << 30;
    let bytes = setup(|s| {
        s.memory_bytes = memory;
        s.regions[0].pages = memory / 4096;
        s.description.truncate(12);
        s.description.extend(memory.to_le_bytes());
    });
    send(&pair, &bytes);
    let wait = Wait::block("SetupAck").within(LIMIT);
    let mut ack = [0; HEADER_BYTES];
    pair.read_exact(&mut ack, &wait).unwrap();
    let header = FrameHeader::decode(&ack, Side::Destination, Role::Control).unwrap();
    assert_eq!(header.frame_type, FrameType::SetupAck);
    // The destination acknowledges at once, and reports the allocation's progress meanwhile.
    let progress = wait_for("the progress of the allocation", || {
        crate::support::status(&destination.socket)?["allocated_bytes"].as_u64()
    });
    drop(pair);
    assert_turned_away(&destination.process, "stays at the source");
    let status = crate::support::status(&destination.socket).unwrap();
    assert_eq!(status["state"], "waiting");
    assert!(status["memory_bytes"].is_null(), "{status}");
    let process = destination.process.pid();
    let kilobytes = |field| -> u64 {
        let memory_use = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
        let value = memory_use.lines().find_map(|l| l.strip_prefix(field));
        let number = value.and_then(|value| value.trim().strip_suffix(" kB"));
        number.unwrap().parse().unwrap()
    };
    // A trial of fault deliveries may have memory for a moment.
    wait_until("the discarded VM's memory to be free", || {
        kilobytes("RssShmem:") == 0
    });
    let peak = kilobytes("VmHWM:") << 10;
    println!("it allocated {peak} of {memory} bytes, {progress} at the look");
    progress < memory && peak < memory
}

#[test]
fn a_delivery_the_destination_does_not_have_is_told_to_both() {
    let source = Source::start("16M");
    let destination = Destination::start(&["--delivery", "poison"]);
    source
        .migrate(&destination.address)
        .end()
        .assert_failed(8, "fault delivery poison is not available");
    assert_turned_away(&destination.process, "use exit");
    destination.process.interrupt();
    destination.process.end();
    destination.dir.assert_empty();
    source.assert_unharmed();
}

#[test]
fn too_many_userfaultfds_for_an_offered_vm_are_told_to_both() {
    let source = Source::start("16M");
    let destination = Destination::start(&["--userfaultfds", "9"]);
    source
        .migrate(&destination.address)
        .end()
        .assert_failed(8, "cannot serve this RAM by 9 userfaultfds");
    assert_turned_away(&destination.process, "expected 1 to 8");
    destination.process.interrupt();
    destination.process.end();
    destination.dir.assert_empty();
    source.assert_unharmed();
}

#[test]
fn a_vm_whose_destination_is_lost_in_postcopy_is_kept_paused_until_it_is_ended() {
    let (address, peer) = Peer::start(|mut peer| {
        peer.until_handed_over();
        // Gone, as after a power failure of its host.
    });
    let source = Source::start("16M");
    let ended = source
        .migrate_with(&address, &["--give-up-after", "1s"])
        .end();
    ended.assert_failed(10, "stays paused at the source");
    peer.join().unwrap();
    let status = wait_for("the state given-up", || {
        crate::support::status(&source.socket).filter(|status| status["state"] == "given-up")
    });
    assert_eq!(status["to"], format!("tcp:{address}"));
    let done = crate::support::pages_done(&source.socket);
    let refused = crate::support::ask(&source.socket, "{\"command\":\"resume\"}\n").unwrap();
    assert!(
        refused["error"]["message"]
            .as_str()
            .is_some_and(|text| text.contains("may have run there")),
        "{refused}"
    );
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(
        crate::support::pages_done(&source.socket),
        done,
        "it ran on"
    );
    source.process.interrupt();
    source
        .process
        .end()
        .assert_failed(10, "stays paused at the source");
    source.dir.assert_empty();
}

/// Each of these sources opens a session, and says something that is no offer, or one of a machine
/// that nobody has.
#[test]
fn sources_without_an_end_write_few_lines() {
    let destination = Destination::start(&[]);
    let began = std::time::Instant::now();
    let garbage = [0xa5; 64];
    let strange = setup(|setup| setup.vcpus = 4000);
    for number in 0..2000 {
        // It is busy while it looks at an offer.
        let source = wait_for("a place", || try_open(&destination.address).ok());
        let said: &[u8] = if number % 20 == 0 { &strange } else { &garbage };
        let wait = Wait::block("what is said").within(LIMIT);
        // It may be turned away already.
        let _ = source.write_all(said, &wait);
        // Until it is: sources that have spoken have the places.
        let _ = source.read_exact(&mut [0], &wait);
    }
    // Some are strangers, whose lines have a bound of their own.
    let allowed = 2 * (32 + 1 + began.elapsed().as_secs() as usize);
    let text = destination.process.said_on_stderr();
    let lines = text
        .lines()
        .filter(|line| line.contains("still listening"))
        .count();
    assert!(
        (32..=allowed).contains(&lines),
        "{lines} lines, at most {allowed}"
    );
    // The next note says how many there were.
    std::thread::sleep(Duration::from_millis(1100));
    send(&open(&destination.address), &garbage);
    destination
        .process
        .wait_until_said(" others since the last of these messages)");
    destination.process.interrupt();
    destination.process.end();
}
