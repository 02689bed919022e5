//! A connection or a server is lost.

use crate::stores::scene::{PLAIN, Scene, memory, plain_server, read_all, socket_address};
use pageferry_pager::Store;
use pageferry_pager::stores::peer::{Limits, PeerStore, Shares};
use pageferry_testkit::shaper::{Direction, Plan, Shaper, Which};
use pageferry_testkit::wait_until;
use std::time::{Duration, Instant};

#[test]
fn reads_go_on_when_the_server_is_back() {
    let mut scene = Scene::new("back");
    let bytes = memory(1, 1024);
    std::fs::write(scene.file("memory"), &bytes).unwrap();
    let source = scene.open("memory");
    // Idle connections of before are of no use, and the read does not fail because of them.
    std::thread::scope(|scope| {
        for part in 0..8 {
            let source = &source;
            scope.spawn(move || source.read(part << 17, &mut [0; 4096]).unwrap());
        }
    });
    scene.stop();
    scene.start();
    assert!(read_all(&*source, 300_000).unwrap() == bytes);

    scene.stop();
    let began = Instant::now();
    let why = source.read(3 << 20, &mut [0; 4096]).unwrap_err();
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "refused at once: {why}"
    );
    assert!(why.to_string().contains("nobody listens there"), "{why}");
    scene.start();
    assert!(read_all(&*source, 300_000).unwrap() == bytes);
}

#[test]
fn a_host_that_cannot_be_reached_is_not_tried_by_every_request() {
    let mut scene = Scene::new("pauses");
    std::fs::write(scene.file("memory"), memory(1, 1)).unwrap();
    scene.stop();
    let store = scene.store();
    let address = scene.address("memory");
    let first = store.open(&address).unwrap_err().to_string();
    assert!(first.contains("nobody listens there"), "{first}");
    // A slow trial comes behind the pause, but the pauses grow.
    wait_until("a trial within a pause", || {
        let why = store.open(&address).unwrap_err().to_string();
        why.contains("could not be reached a moment ago")
    });
    scene.start();
    wait_until("the next trial", || store.open(&address).is_ok());
}

/// A link that goes silent, as when a host loses its power.
#[test]
fn a_silent_connection_is_an_error_in_time() {
    let scene = Scene::new("silence");
    let bytes = memory(1, 1024);
    std::fs::write(scene.file("memory"), &bytes).unwrap();
    let shares = Shares::of_directory(&scene.scratch.path("shared")).unwrap();
    let server = plain_server(shares, Limits::default());
    let shaper = Shaper::start(socket_address(server.address()), Plan::default()).unwrap();
    let hasty = PeerStore::with_limit(None, PLAIN.1, Duration::from_secs(2));
    let address = format!("pageferry://{}/memory", shaper.addr());
    let source = hasty.open(&address).unwrap();
    source.read(0, &mut [0; 4096]).unwrap();
    shaper.freeze(Which::All, Direction::Both);
    let began = Instant::now();
    std::thread::scope(|scope| {
        for part in 1..21 {
            let source = &source;
            scope.spawn(move || {
                let why = source.read(part << 17, &mut [0; 4096]).unwrap_err();
                assert!(why.to_string().contains("in time"), "{why}");
            });
        }
    });
    // The limit of a read, and some time for a busy machine.
    assert!(
        began.elapsed() < Duration::from_secs(20),
        "{:?}",
        began.elapsed()
    );
    shaper.thaw(Which::All, Direction::Both);
    assert!(read_all(&*source, 300_000).unwrap() == bytes);
}
