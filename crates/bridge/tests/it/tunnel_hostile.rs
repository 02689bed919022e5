//! Peers that are no tunnels, other tunnels, or tunnels that do not keep to the protocol.

use crate::scene::{LIMIT, Log, Scene, Scratch, calm, exchange, loopback, quick, route, window};
use pageferry_bridge::tunnel::record::{Delivered, MAX_STREAMS, Record, Start};
use pageferry_bridge::tunnel::{Config, Event, Failure, Far, Near};
use pageferry_migration::wire::{ChannelKey, Hello};
use pageferry_migration::{
    Connection, Destination, DestinationConfig, Listener, Role, Status, TlsFiles,
};
use pageferry_testkit::certificates::{Authority, Side, Validity};
use pageferry_testkit::wait_until;
use pageferry_transport::channel::{ChannelError, OpenError, Wait};
use pageferry_transport::handshake::{
    Acceptor, Arrival, Expected, HandshakeError, Identity, PlainPolicy, Protection, Router, Secret,
    Stranger, dial,
};
use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const FIRST: ChannelKey = ChannelKey {
    role: Role::Tunnel,
    index: 0,
    generation: 1,
    incarnation: 1,
};

fn dial_as(scene: &Scene, key: ChannelKey) -> Result<Connection, HandshakeError> {
    let identity = Identity::random().unwrap();
    let plain = Protection::Plain(PlainPolicy::LoopbackOnly);
    let address = scene.far.address();
    let opened = dial(address, &plain, &identity, key, [LIMIT; 2], &|| false)?;
    Ok(opened.connection)
}

fn send(connection: &Connection, record: &Record) {
    let payload = record.payload();
    let bytes = [&record.header(&payload)[..], &payload].concat();
    let wait = Wait::block("test").within(LIMIT);
    connection.write_all(&bytes, &wait).unwrap();
}

fn start(route: &str) -> Record {
    Record::Start(Start {
        route: route.parse().unwrap(),
        window: 1 << 20,
        dead_after: Duration::from_secs(5),
    })
}

/// Reads to the end of a connection.
fn end_of(connection: &Connection) {
    let wait = Wait::block("test").within(LIMIT);
    loop {
        match connection.read_exact(&mut [0], &wait) {
            Ok(()) => {}
            Err(ChannelError::TimedOut { .. }) => panic!("it does not end"),
            Err(_) => return,
        }
    }
}

#[test]
fn a_source_of_vms_is_refused() {
    let scene = Scene::new(&quick(), |far| far);
    let refused = dial_as(&scene, ChannelKey::control(1)).unwrap_err();
    let HandshakeError::Refused { status, .. } = refused else {
        panic!("{refused}");
    };
    assert_eq!(status, Status::BadRole);
}

#[test]
fn a_destination_of_vms_is_no_far_end() {
    let listener = loopback();
    let to = listener.local_addr().clone();
    let _vm = Destination::listen(listener, DestinationConfig::default(), |_| ()).unwrap();
    let scratch = Scratch::new();
    let log = Arc::new(Log::default());
    let path = scratch.path("near");
    let _near = Near::listen(&[route("vm", &path)], to, quick(), log.clone()).unwrap();
    let mut stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    let (end, _) = log.end(1);
    let Err(Failure::Refused(why)) = end else {
        panic!("{end:?}");
    };
    assert!(why.contains("pageferry tunnel --accept"), "{why}");
}

#[test]
fn records_that_no_tunnel_sends_end_the_session_and_no_other() {
    let scene = Scene::new(&window(1 << 20), |far| far);
    let delivered = |until, ended| {
        Record::Delivered(Delivered {
            stream: 1,
            until,
            ended,
            stopped: false,
        })
    };
    let data = |stream, at, length, end| Record::Data {
        stream,
        at,
        bytes: vec![0; length].into(),
        end,
    };
    let finished = Some(pageferry_bridge::tunnel::record::Ending::Finished);
    let cases: Vec<(Vec<Record>, &str)> = vec![
        (vec![delivered(1, false)], "of which 0 were sent"),
        (vec![delivered(0, true)], "has none yet"),
        (vec![data(1, 2 << 20, 1, None)], "window"),
        (
            vec![data(1, 0, 4, finished), data(1, 4, 1, None)],
            "a stream of 4 bytes",
        ),
        (
            vec![data(1, 0, 4, None), data(1, 0, 2, finished)],
            "a stream of 2 bytes",
        ),
        (vec![start("other")], "starts again"),
    ];
    for (number, (records, part)) in cases.into_iter().enumerate() {
        let connection = dial_as(&scene, FIRST).unwrap();
        send(&connection, &start("vm"));
        let others = records
            .iter()
            .any(|record| !matches!(record, Record::Start(_)));
        let _stream = others.then(|| {
            send(
                &connection,
                &Record::Received {
                    records: 0,
                    streams: 1,
                },
            );
            scene.accept()
        });
        for record in &records {
            send(&connection, record);
        }
        // The far end waits for this, or for its limit.
        connection.shutdown_write();
        let (end, _) = scene.far_log.end(number + 1);
        let Err(Failure::Protocol(why)) = end else {
            panic!("{part}: {end:?}");
        };
        assert!(why.contains(part), "{part}: {why}");
        end_of(&connection);
    }
    // Others go on.
    let pair = scene.pair();
    exchange(&pair, 1, (100_000, 100_000));
}

#[test]
fn records_before_the_first_one_are_refused() {
    let scene = Scene::new(&quick(), |far| far);
    let connection = dial_as(&scene, FIRST).unwrap();
    send(
        &connection,
        &Record::Received {
            records: 1,
            streams: MAX_STREAMS,
        },
    );
    let (end, _) = scene.far_log.end(1);
    assert!(matches!(end, Err(Failure::Protocol(_))), "{end:?}");
    end_of(&connection);
}

#[test]
fn damaged_bytes_cost_a_connection_only() {
    let scene = Scene::new(&quick(), |far| far);
    let connection = dial_as(&scene, FIRST).unwrap();
    let wait = Wait::block("test").within(LIMIT);
    connection.write_all(&[7; 4096], &wait).unwrap();
    end_of(&connection);
    let pair = scene.pair();
    exchange(&pair, 1, (1000, 1000));
}

/// A far end that proves who it is, and then says nothing.
#[derive(Default)]
struct Mute(Mutex<(Option<Secret>, Vec<Connection>)>);

impl Router for Mute {
    fn route(&self, _: &Hello, _: bool) -> Result<Expected, Status> {
        let secret = self.0.lock().unwrap().0.clone();
        Ok(secret.map_or(Expected::New, Expected::Known))
    }

    fn accepted(&self, arrival: Arrival) -> Result<(), Box<(Arrival, Status)>> {
        let mut kept = self.0.lock().unwrap();
        kept.0.get_or_insert(arrival.secret().clone());
        kept.1.extend(arrival.welcome());
        Ok(())
    }

    fn stranger(&self, _: Stranger) {}
    fn cannot_accept(&self, error: &OpenError) {
        panic!("{error}");
    }
}

#[test]
fn a_far_end_that_says_nothing_is_given_up() {
    let listener = loopback();
    let to = listener.local_addr().clone();
    let mute = Arc::new(Mute::default());
    let plain = Protection::Plain(PlainPolicy::LoopbackOnly);
    let _far = Acceptor::start(listener, plain, mute.clone()).unwrap();
    let scratch = Scratch::new();
    let log = Arc::new(Log::default());
    let path = scratch.path("near");
    let mut config = quick();
    config.patience.give_up_after = Some(Duration::from_secs(2));
    let _near = Near::listen(&[route("vm", &path)], to, config, log.clone()).unwrap();
    let _stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
    let (end, state) = log.end(1);
    let Err(Failure::GaveUp { why, .. }) = end else {
        panic!("{end:?}");
    };
    assert!(why.contains("silent"), "{why}");
    assert_eq!(state.last_loss.as_deref(), Some(&why[..]));
    assert!(mute.0.lock().unwrap().1.len() > 1, "it was dialled again");
    assert!(
        !log.events()
            .iter()
            .any(|event| matches!(event, Event::Back(_)))
    );
}

#[test]
fn a_near_end_that_opens_no_stream_keeps_no_session() {
    let mut config = quick();
    config.patience.silence = Duration::from_millis(500);
    let scene = Scene::new(&config, |far| far);
    let connection = dial_as(&scene, FIRST).unwrap();
    send(&connection, &start("vm"));
    let over = AtomicBool::new(false);
    let end = std::thread::scope(|scope| {
        // It only says that it lives.
        scope.spawn(|| {
            let wait = Wait::block("test").within(LIMIT);
            let alive = Record::Received {
                records: 0,
                streams: 0,
            };
            let bytes = alive.header(&alive.payload());
            while !over.load(Ordering::Relaxed) && connection.write_all(&bytes, &wait).is_ok() {
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let (end, _) = scene.far_log.end(1);
        over.store(true, Ordering::Relaxed);
        end
    });
    let Err(Failure::Refused(why)) = end else {
        panic!("{end:?}");
    };
    assert!(why.contains("no stream"), "{why}");
    let pair = scene.pair();
    exchange(&pair, 1, (1000, 1000));
}

#[test]
fn a_far_end_that_is_not_there_is_told_at_once() {
    let listener = loopback();
    let to = listener.local_addr().clone();
    drop(listener);
    let scratch = Scratch::new();
    let log = Arc::new(Log::default());
    let path = scratch.path("near");
    let near = Near::listen(&[route("vm", &path)], to, calm(), log.clone()).unwrap();
    let _stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
    log.wait_for(|event| matches!(event, Event::Unreached(why) if why.contains("refused")));
    wait_until("the status", || {
        let [session] = &near.sessions()[..] else {
            return false;
        };
        session
            .last_loss
            .as_ref()
            .is_some_and(|why| why.contains("refused"))
    });
    // Each reason is told once.
    std::thread::sleep(Duration::from_millis(500));
    let told = log.events().into_iter();
    let told = told.filter(|event| matches!(event, Event::Unreached(_)));
    assert_eq!(told.count(), 1);
}

#[test]
fn a_route_that_is_not_there_is_told_to_both() {
    let scratch = Scratch::new();
    let (near_log, far_log) = (Arc::new(Log::default()), Arc::new(Log::default()));
    let routes = [route("web", &scratch.path("far"))];
    let far = Far::listen(loopback(), &routes, quick(), far_log.clone()).unwrap();
    let path = scratch.path("near");
    let routes = [route("db", &path)];
    let to = far.address().clone();
    let _near = Near::listen(&routes, to, quick(), near_log.clone()).unwrap();
    let _stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
    let (end, _) = near_log.end(1);
    let Err(Failure::Told(why)) = end else {
        panic!("{end:?}");
    };
    assert!(why.contains("no route 'db' here, only web"), "{why}");
    assert!(matches!(far_log.end(1).0, Err(Failure::Refused(_))));
}

#[test]
fn a_vmm_that_does_not_listen_is_told_to_both() {
    let scratch = Scratch::new();
    let (near_log, far_log) = (Arc::new(Log::default()), Arc::new(Log::default()));
    // A file that is no socket.
    std::fs::write(scratch.path("far"), b"").unwrap();
    let routes = [route("vm", &scratch.path("far"))];
    let far = Far::listen(loopback(), &routes, quick(), far_log.clone()).unwrap();
    let path = scratch.path("near");
    let routes = [route("vm", &path)];
    let to = far.address().clone();
    let _near = Near::listen(&routes, to, quick(), near_log.clone()).unwrap();
    let _stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
    let (end, _) = near_log.end(1);
    let Err(Failure::Told(why)) = end else {
        panic!("{end:?}");
    };
    assert!(why.contains("stream 1 cannot be opened"), "{why}");
    assert!(matches!(far_log.end(1).0, Err(Failure::NoVmm(_))));
}

fn with_tls(side: &Side) -> Config {
    Config {
        tls: Some(
            TlsFiles {
                cert: side.path("cert.pem"),
                key: side.path("key.pem"),
                ca: side.path("ca.pem"),
                peer_name: Some("other".into()),
            }
            .into(),
        ),
        ..quick()
    }
}

#[test]
fn two_hosts_prove_who_they_are() {
    let authority = Authority::new("ca");
    let side = authority.issue(&["other"], Validity::Now);
    let config = with_tls(&side);
    let scene = Scene::with(&config, &config, |far| far);
    let pair = scene.pair();
    exchange(&pair, 5, (4 << 20, 1 << 20));
    drop(pair);
    assert_eq!(scene.near_log.end(1).0, Ok(()));
}

#[test]
fn a_host_of_another_authority_is_not_trusted() {
    let ours = Authority::new("ours").issue(&["other"], Validity::Now);
    let theirs = Authority::new("theirs").issue(&["other"], Validity::Now);
    let scene = Scene::with(&with_tls(&ours), &with_tls(&theirs), |far| far);
    let _stream = scene.open();
    let (end, _) = scene.near_log.end(1);
    assert!(matches!(end, Err(Failure::Untrusted(_))), "{end:?}");
    // Without TLS neither.
    let scene = Scene::with(&quick(), &with_tls(&theirs), |far| far);
    let _stream = scene.open();
    let (end, _) = scene.near_log.end(1);
    assert!(matches!(end, Err(Failure::Untrusted(_))), "{end:?}");
}

/// As when a certificate is about to expire: files are replaced, and no tunnel is started again.
#[test]
fn renewed_certificates_are_used_for_the_next_connection() {
    let old = Authority::new("old").issue(&["other"], Validity::Now);
    let authority = Authority::new("new");
    let new = authority.issue(&["other"], Validity::Now);
    let scene = Scene::with(&with_tls(&new), &with_tls(&old), |far| far);
    let stream = scene.open();
    let (end, _) = scene.near_log.end(1);
    assert!(matches!(end, Err(Failure::Untrusted(_))), "{end:?}");
    drop(stream);
    // Half of a change does not serve, and the files of before stay in use.
    old.write("key.pem", &new.read("key.pem"));
    let why = scene.far.read_certificates().unwrap_err().to_string();
    assert!(why.contains("key.pem"), "{why}");
    old.write("cert.pem", &new.read("cert.pem"));
    old.write("ca.pem", &new.read("ca.pem"));
    scene.far.read_certificates().unwrap();
    let pair = scene.pair();
    exchange(&pair, 6, (1 << 20, 1 << 20));
    drop(pair);
    assert_eq!(scene.near_log.end(2).0, Ok(()));
}

#[test]
fn a_socket_that_is_taken_is_told() {
    let scratch = Scratch::new();
    let path = scratch.path("taken");
    let _taken = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let log = Arc::new(Log::default());
    let to = "127.0.0.1:9".parse().unwrap();
    let why = Near::listen(&[route("vm", &path)], to, quick(), log.clone()).unwrap_err();
    assert!(why.to_string().contains("in use"), "{why}");
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    assert!(Listener::bind(listener.local_addr()).is_err());
}

/// As QEMU does that listens at the same path: it removes what it finds there.
#[test]
fn a_near_end_whose_socket_was_removed_makes_it_again() {
    let scene = Scene::new(&calm(), |far| far);
    std::fs::remove_file(&scene.near_path).unwrap();
    let other = std::os::unix::net::UnixListener::bind(&scene.near_path).unwrap();
    // Longer than it takes to look.
    std::thread::sleep(Duration::from_millis(1500));
    other.set_nonblocking(true).unwrap();
    let _theirs = std::os::unix::net::UnixStream::connect(&scene.near_path).unwrap();
    assert!(
        other.accept().is_ok(),
        "a socket of somebody who listens stays"
    );
    drop(other);
    wait_until("the near end's socket", || {
        std::os::unix::net::UnixStream::connect(&scene.near_path).is_ok()
    });
    scene.accept();
}
