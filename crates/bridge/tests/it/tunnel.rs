//! Streams over a network that works.

use crate::scene::{LIMIT, Scene, calm, exchange, read, route, window, write};
use pageferry_bridge::tunnel::{Event, Kind};
use pageferry_testkit::{wait_for, wait_until};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

#[test]
fn bytes_and_ends_arrive_in_both_directions() {
    let scene = Scene::new(&calm(), |far| far);
    let pair = scene.pair();
    exchange(&pair, 7, (20 << 20, 3 << 20));
    drop(pair);
    let (near, state) = scene.near_log.end(1);
    let (far, other) = scene.far_log.end(1);
    assert_eq!((near, far), (Ok(()), Ok(())));
    assert_eq!(state.bytes(), (20 << 20, 3 << 20));
    assert_eq!(other.bytes(), (3 << 20, 20 << 20));
    assert_eq!(state.session.len(), 32);
    assert_eq!((other.route.as_str(), other.losses), ("vm", 0));
}

#[test]
fn streams_are_opened_in_their_order_and_end_one_by_one() {
    let scene = Scene::new(&calm(), |far| far);
    let near: Vec<_> = (0..12).map(|_| scene.open()).collect();
    let far: Vec<_> = near.iter().map(|_| scene.accept()).collect();
    for (number, stream) in near.iter().enumerate() {
        (&*stream).write_all(&[number as u8]).unwrap();
    }
    for (number, stream) in far.iter().enumerate() {
        let mut byte = [0];
        (&*stream).read_exact(&mut byte).unwrap();
        assert_eq!(byte, [number as u8]);
    }
    let pairs: Vec<_> = near.into_iter().zip(far).collect();
    std::thread::scope(|scope| {
        for (number, pair) in pairs.iter().enumerate() {
            scope.spawn(move || exchange(pair, number as u64 * 2, (1 << 20, number << 10)));
        }
    });
    drop(pairs);
    assert_eq!(scene.near_log.end(1).0, Ok(()));
    // The next stream begins the next session.
    let pair = scene.pair();
    exchange(&pair, 3, (1, 0));
    drop(pair);
    assert_eq!(scene.far_log.end(2).0, Ok(()));
    assert_eq!(scene.near_log.end(2).1.streams.len(), 1);
}

#[test]
fn a_stream_that_nobody_reads_keeps_no_other_and_memory_is_bounded() {
    let config = window(1 << 20);
    let scene = Scene::new(&config, |far| far);
    let stuck: Vec<_> = (0..4).map(|_| scene.pair()).collect();
    let pair = scene.pair();
    std::thread::scope(|scope| {
        let writers: Vec<_> = stuck
            .iter()
            .enumerate()
            .map(|(number, (near, _))| scope.spawn(move || write(near, number as u64, 4 << 20)))
            .collect();
        // They fill the window, and the sockets.
        std::thread::sleep(Duration::from_millis(300));
        assert!(writers.iter().all(|writer| !writer.is_finished()));
        exchange(&pair, 99, (8 << 20, 8 << 20));
        for state in scene
            .near
            .sessions()
            .into_iter()
            .chain(scene.far.sessions())
        {
            let most = (1 << 20) + 5 * (64 << 10) + (1 << 20);
            assert!(state.most_kept <= most, "{} kept", state.most_kept);
        }
        for (number, (near, far)) in stuck.iter().enumerate() {
            read(far, number as u64, 4 << 20);
            far.shutdown(Shutdown::Write).unwrap();
            read(near, 0, 0);
        }
    });
    drop((stuck, pair));
    assert_eq!(scene.near_log.end(1).0, Ok(()));
}

#[test]
fn a_vmm_that_dies_ends_its_streams_at_the_other_side() {
    let scene = Scene::new(&calm(), |far| far);
    let (near, far) = scene.pair();
    (&near).write_all(b"half a message").unwrap();
    // Its socket has bytes that it never reads.
    (&far).write_all(&[1; 1000]).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    drop(near);
    let mut rest = Vec::new();
    (&far).read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"half a message");
    // Nobody takes what it writes now.
    let until = Instant::now() + LIMIT;
    while (&far).write_all(&[2; 4096]).is_ok() {
        assert!(Instant::now() < until, "writing still succeeds");
    }
    drop(far);
    assert_eq!(scene.near_log.end(1).0, Ok(()));
    assert_eq!(scene.far_log.end(1).0, Ok(()));
}

#[test]
fn streams_of_qemu_are_recognised() {
    let scene = Scene::new(&calm(), |far| far);
    let pairs: Vec<_> = (0..3).map(|_| scene.pair()).collect();
    let heads: [&[u8]; 3] = [
        b"QEVM\0\0\0\x03",
        &[0x11, 0x22, 0x33, 0x44],
        &[0, 0, 0, 1, 2, 3, 0, 8],
    ];
    for ((near, far), head) in pairs.iter().zip(heads) {
        (&*near).write_all(head).unwrap();
        let mut got = vec![0; head.len()];
        (&*far).read_exact(&mut got).unwrap();
        assert_eq!(got, head);
    }
    drop(pairs);
    let (end, state) = scene.near_log.end(1);
    assert_eq!(end, Ok(()));
    let kinds: Vec<Kind> = state.streams.iter().map(|stream| stream.kind).collect();
    assert_eq!(
        kinds,
        [Kind::QemuMain, Kind::QemuMultifd, Kind::QemuPreempt]
    );
}

#[test]
fn a_stream_that_cannot_be_opened_ends_alone() {
    let scene = Scene::new(&calm(), |far| far);
    let pair = scene.pair();
    (&pair.0).write_all(b"QEVM").unwrap();
    (&pair.1).read_exact(&mut [0; 4]).unwrap();
    // QEMU listens no more once its streams have come. Something else tries the near end's socket.
    let path = scene.vmm.local_addr().unwrap();
    std::fs::remove_file(path.as_pathname().unwrap()).unwrap();
    let probe = scene.open();
    assert_eq!((&probe).read(&mut [0]).unwrap(), 0);
    let unopened = |event: &Event| matches!(event, Event::Unopened(2, _));
    scene.far_log.wait_for(unopened);
    exchange(&pair, 1, (1 << 20, 1 << 20));
    drop((pair, probe));
    assert_eq!(scene.near_log.end(1).0, Ok(()));
    assert_eq!(scene.far_log.end(1).0, Ok(()));
}

#[test]
fn routes_come_and_go() {
    let scene = Scene::new(&calm(), |far| far);
    let (near, far) = (scene.scratch.path("near2"), scene.scratch.path("far2"));
    let vmm = UnixListener::bind(&far).unwrap();
    let old = scene.pair();
    scene.far.set_routes(&[route("two", &far)]);
    scene.near.set_routes(&[route("two", &near)]);
    let new = wait_for("the new route", || UnixStream::connect(&near).ok());
    (&new).write_all(b"x").unwrap();
    let mut got = [0];
    vmm.accept().unwrap().0.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"x");
    // The session of the route that has gone goes on, and is its last one.
    exchange(&old, 2, (100_000, 100_000));
    drop(old);
    wait_until("the end of the old route", || !scene.near_path.exists());
}

#[test]
fn a_normal_end_has_no_strangers() {
    let scene = Scene::new(&calm(), |far| far);
    // The second connection is being opened when the end comes, or is about to be.
    for number in 1..=40 {
        let pair = scene.pair();
        std::thread::sleep(Duration::from_millis(number % 20));
        drop(pair);
        assert_eq!(scene.far_log.end(number as usize).0, Ok(()));
    }
    let strangers = scene.far_log.events();
    let strangers = strangers
        .iter()
        .filter(|event| matches!(event, Event::Stranger(_)));
    let strangers: Vec<&Event> = strangers.collect();
    assert!(strangers.is_empty(), "{strangers:?}");
}
