//! Ends of a session whose VM may run at the destination, or at both hosts.

use crate::scene::{Scene, calm};
use pageferry_bridge::tunnel::{Event, Failure};
use pageferry_testkit::shaper::{Shaper, Which};
use pageferry_testkit::wait_until;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// A VM that is wholly at the destination, over connections that are lost.
fn handed_over() -> (Scene, Shaper, UnixStream, UnixStream) {
    let mut config = calm();
    config.patience.give_up_after = Some(Duration::from_millis(300));
    let (scene, shaper) = Scene::through_shaper(&config, &calm());
    let (near, far) = scene.pair();
    (&near).write_all(b"QEVM and a whole VM").unwrap();
    (&far).read_exact(&mut [0; 19]).unwrap();
    shaper.refuse(true);
    shaper.reset(Which::All);
    // The destination's last word.
    (&far).write_all(b"done").unwrap();
    (scene, shaper, near, far)
}

#[test]
fn no_limit_gives_a_vm_up_that_may_run_at_the_destination() {
    let (scene, shaper, near, far) = handed_over();
    let held = |event: &Event| matches!(event, Event::Held(Failure::GaveUp { .. }));
    scene.near_log.wait_for(held);
    wait_until("the state to say so", || {
        scene.near.sessions()[0].in_doubt && !scene.far.sessions()[0].in_doubt
    });
    shaper.refuse(false);
    let mut word = [0; 4];
    (&near).read_exact(&mut word).unwrap();
    assert_eq!(&word, b"done");
    for stream in [near, far] {
        stream.shutdown(Shutdown::Both).unwrap();
    }
    assert_eq!(scene.near_log.end(1).0, Ok(()));
    let told = scene.near_log.events();
    assert_eq!(told.iter().filter(|event| held(event)).count(), 1);
}

#[test]
fn a_far_end_that_has_forgotten_the_session_does_not_let_the_vm_run_twice() {
    let (scene, shaper, near, far) = handed_over();
    scene.far.cancel(false, |_| true);
    assert_eq!(scene.far_log.end(1).0, Err(Failure::Cancelled));
    shaper.refuse(false);
    let held = |event: &Event| matches!(event, Event::Held(Failure::Refused(_)));
    scene.near_log.wait_for(held);
    // The operator ends the VM at the source, and no bytes are left that matter.
    drop((near, far));
    let (end, _) = scene.near_log.end(1);
    assert!(matches!(end, Err(Failure::Refused(_))), "{end:?}");
}

#[test]
fn only_a_forced_cancel_cuts_a_vm_that_may_run_at_the_destination() {
    let (scene, _shaper, near, _far) = handed_over();
    scene.near.cancel(false, |_| true);
    let held = |event: &Event| matches!(event, Event::Held(Failure::Cancelled));
    scene.near_log.wait_for(held);
    assert_eq!(scene.near.sessions().len(), 1);
    scene
        .near
        .cancel(true, |state| state.route.as_str() == "other");
    scene
        .near
        .cancel(true, |state| state.route.as_str() == "vm");
    let mut rest = Vec::new();
    (&near).read_to_end(&mut rest).unwrap();
    assert_eq!(scene.near_log.end(1).0, Err(Failure::Cancelled));
}

#[test]
fn a_vm_whose_source_still_sends_is_cut_at_once() {
    let scene = Scene::new(&calm(), |far| far);
    let (near, _far) = scene.pair();
    std::thread::scope(|scope| {
        scope.spawn(|| while (&near).write_all(&[1; 4096]).is_ok() {});
        // Nobody reads at the destination: the tunnel is full soon, and reads no more.
        wait_until("some bytes to come", || {
            scene.near.sessions().iter().any(|one| one.kept.0 > 1 << 20)
        });
        std::thread::sleep(Duration::from_millis(1500));
        assert!(!scene.near.sessions()[0].in_doubt);
        scene.near.cancel(false, |_| true);
    });
    assert_eq!(scene.near_log.end(1).0, Err(Failure::Cancelled));
}
