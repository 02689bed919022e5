//! Streams over a network that fails, by seeded schedules and at chosen moments.

use crate::scene::{Scene, calm, exchange, quick};
use pageferry_bridge::tunnel::{Event, Failure, SessionState};
use pageferry_testkit::shaper::{Schedule, Which};
use pageferry_testkit::{rotating_seeds, wait_until};
use std::io::{Read, Write};
use std::time::Duration;

#[test]
fn seeded_schedules_lose_no_byte() {
    for seed in rotating_seeds("PAGEFERRY_TUNNEL_SCHEDULES", 2, 30) {
        let (scene, shaper) = Scene::through_shaper(&quick(), &quick());
        // Enough for the whole schedule at the rate that the faults leave.
        shaper.throttle(Some(20 << 20));
        let pairs: Vec<_> = (0..3).map(|_| scene.pair()).collect();
        let schedule = Schedule::random(seed, Duration::from_secs(2));
        shaper.play(&schedule);
        std::thread::scope(|scope| {
            for (number, pair) in pairs.iter().enumerate() {
                let seed = seed * 100 + number as u64 * 10;
                scope.spawn(move || exchange(pair, seed, (8 << 20, 1 << 20)));
            }
        });
        drop(pairs);
        let ends = (scene.near_log.end(1).0, scene.far_log.end(1).0);
        assert_eq!(ends, (Ok(()), Ok(())), "seed {seed}: {schedule:?}");
    }
}

#[test]
fn a_frozen_network_is_left_and_found_again() {
    let (scene, shaper) = Scene::through_shaper(&quick(), &quick());
    let (near, far) = scene.pair();
    (&near).write_all(b"before").unwrap();
    let mut got = [0; 6];
    (&far).read_exact(&mut got).unwrap();
    shaper.freeze(Which::All, pageferry_testkit::shaper::Direction::Both);
    (&near).write_all(b"during").unwrap();
    // A busy machine may lose it earlier, and find it again.
    wait_until("the loss", || {
        let ends = [&scene.near.sessions()[0], &scene.far.sessions()[0]];
        let is_lost = |end: &SessionState| end.losses > 0 && end.lost_for.is_some();
        ends.iter().all(|end| is_lost(end) && end.links.0 == 0)
    });
    shaper.heal();
    (&far).read_exact(&mut got).unwrap();
    assert_eq!(&got, b"during");
    drop((near, far));
    let (end, state) = scene.near_log.end(1);
    assert_eq!(end, Ok(()));
    assert!(state.longest_loss > Duration::ZERO);
}

#[test]
fn a_far_end_that_is_gone_for_good_is_given_up() {
    let mut config = calm();
    config.patience.give_up_after = Some(Duration::from_millis(600));
    let (scene, shaper) = Scene::through_shaper(&config, &config);
    let (near, far) = scene.pair();
    shaper.refuse(true);
    shaper.reset(Which::All);
    let mut rest = Vec::new();
    (&near).read_to_end(&mut rest).unwrap();
    (&far).read_to_end(&mut rest).unwrap();
    for log in [&scene.near_log, &scene.far_log] {
        let (end, _) = log.end(1);
        assert!(matches!(end, Err(Failure::GaveUp { .. })), "{end:?}");
    }
    assert!(rest.is_empty());
}

#[test]
fn a_far_end_that_was_never_there_is_told_to_the_vmm() {
    let mut config = calm();
    config.patience.connect = Duration::from_millis(1500);
    let (scene, shaper) = Scene::through_shaper(&config, &config);
    shaper.refuse(true);
    let mut rest = Vec::new();
    (&scene.open()).read_to_end(&mut rest).unwrap();
    let (end, _) = scene.near_log.end(1);
    assert!(matches!(end, Err(Failure::Unreachable(_))), "{end:?}");
    // The next attempt finds it.
    shaper.refuse(false);
    let pair = scene.pair();
    exchange(&pair, 1, (1000, 1000));
    drop(pair);
    assert_eq!(scene.near_log.end(2).0, Ok(()));
}

#[test]
fn a_far_end_that_was_started_again_has_forgotten_the_session() {
    let (scene, shaper) = Scene::through_shaper(&calm(), &calm());
    let (near, _far) = scene.pair();
    wait_until("both ends to have met", || {
        let now = &scene.near.sessions()[0];
        now.links == (2, 2) && now.lost_for.is_none()
    });
    let Scene {
        far,
        near_log,
        near: end,
        ..
    } = scene;
    shaper.refuse(true);
    shaper.reset(Which::All);
    near_log.wait_for(|event| matches!(event, Event::Lost(_)));
    drop(far);
    let again = Scene::new(&calm(), |far| far);
    shaper.point_to(crate::scene::socket_of(again.far.address()));
    shaper.refuse(false);
    let (failed, _) = near_log.end(1);
    let Err(Failure::Refused(why)) = failed else {
        panic!("{failed:?}");
    };
    assert!(why.contains("forgotten"), "{why}");
    let mut rest = Vec::new();
    (&near).read_to_end(&mut rest).unwrap();
    drop(end);
}
