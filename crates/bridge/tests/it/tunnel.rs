//! Streams over a network that works.

use crate::scene::{LIMIT, Scene, calm, exchange, read, window, write};
use pageferry_bridge::tunnel::Kind;
use std::io::{Read, Write};
use std::net::Shutdown;
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
