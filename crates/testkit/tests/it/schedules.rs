//! Schedules: a seed determines them, they print, and bytes stay whole under them.

use crate::{Shaped, pass};
use pageferry_testkit::shaper::{Direction, Fault, Plan, Schedule, Which};
use pageferry_testkit::{Stop, stress_time, wait_until};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

/// How long a fault lasts.
fn lasts(fault: &Fault) -> Duration {
    match fault {
        Fault::Freeze { lasts, .. }
        | Fault::FreezeAll { lasts }
        | Fault::Throttle { lasts, .. }
        | Fault::Delay { lasts, .. }
        | Fault::Refuse { lasts } => *lasts,
        Fault::Reset(_) | Fault::ResetAll | Fault::Close(_) | Fault::HalfClose { .. } => {
            Duration::ZERO
        }
    }
}

#[test]
fn a_seed_determines_the_schedule() {
    let duration = Duration::from_secs(3);
    let mut kinds = [false; 9];
    let mut doubles = 0;
    for seed in 0..200 {
        let schedule = Schedule::random(seed, duration);
        assert_eq!(schedule, Schedule::random(seed, duration));
        assert_ne!(schedule.events, Schedule::random(seed + 1, duration).events);
        let mut last = Duration::ZERO;
        for (at, fault) in &schedule.events {
            assert!(*at >= last && *at + lasts(fault) <= duration, "{schedule}");
            doubles += u32::from(*at - last < Duration::from_millis(21));
            last = *at;
            let kind = match fault {
                Fault::Reset(_) => 0,
                Fault::ResetAll => 1,
                Fault::Close(_) => 2,
                Fault::Freeze { .. } => 3,
                Fault::FreezeAll { .. } => 4,
                Fault::HalfClose { .. } => 5,
                Fault::Throttle { .. } => 6,
                Fault::Delay { .. } => 7,
                Fault::Refuse { .. } => 8,
            };
            kinds[kind] = true;
        }
    }
    assert!(kinds.iter().all(|seen| *seen), "{kinds:?}");
    assert!(doubles > 300, "{doubles}");
}

#[test]
fn a_schedule_prints_what_repeats_it() {
    let ms = Duration::from_millis;
    let mut schedule = Schedule::from(vec![
        (ms(1), Fault::Reset(Which::Number(3))),
        (
            ms(20),
            Fault::Freeze {
                conn: Which::Open(1),
                direction: Direction::Backward,
                lasts: ms(7),
            },
        ),
    ]);
    schedule.seed = Some(9);
    let wanted = "schedule of seed 9:\n  at 1ms: reset connection 3\n  \
                  at 20ms: freeze open connection 1 (modulo their number) backward for 7ms\n";
    assert_eq!(schedule.to_string(), wanted);
}

#[test]
fn faults_come_at_their_times_and_what_is_left_can_be_dropped() {
    let shaped = Shaped::new(Plan::default());
    let (client, server) = shaped.connect();
    let (lasts, began) = (Duration::from_secs(3600), Instant::now());
    shaped.shaper.play(&Schedule::from(vec![
        (Duration::from_millis(30), Fault::FreezeAll { lasts }),
        (Duration::from_millis(30), Fault::Refuse { lasts }),
        (lasts, Fault::ResetAll),
    ]));
    wait_until("two faults", || shaped.shaper.faults_left() == 1);
    assert!(began.elapsed() >= Duration::from_millis(30));
    (&client).write_all(b"frozen").expect("sent");
    crate::assert_silent(&server);
    shaped.shaper.heal();
    assert_eq!(shaped.shaper.faults_left(), 0);
    let mut got = [0; 6];
    (&server).read_exact(&mut got).expect("received");
    let (client, server) = shaped.connect();
    pass(&client, &server, b"accepted");
}

/// The byte at a position of the stream.
const fn byte(position: u64) -> u8 {
    (position.wrapping_mul(0x9e37_79b9) >> 13) as u8
}

/// Sends the stream, and reads it back from a peer that echoes, until the connection is over.
fn exchange(stream: &TcpStream) -> u64 {
    let mut right = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut sent = 0;
            // A piece at a time: a megabyte in all.
            while sent < 1 << 20 {
                let piece: Vec<u8> = (sent..sent + 4096).map(byte).collect();
                if (&*stream).write_all(&piece).is_err() {
                    return;
                }
                sent += 4096;
            }
            let _ = stream.shutdown(Shutdown::Write);
        });
        let mut buffer = vec![0; 16384];
        while let Ok(count @ 1..) = (&*stream).read(&mut buffer) {
            for got in &buffer[..count] {
                assert_eq!(*got, byte(right), "at {right}");
                right += 1;
            }
        }
        let _ = stream.shutdown(Shutdown::Both);
    });
    right
}

#[test]
fn bytes_stay_whole_under_random_faults_and_all_works_afterwards() {
    let (start, time) = (Instant::now(), stress_time(Duration::ZERO));
    let mut seeds = 0..;
    loop {
        std::thread::scope(|scope| {
            for seed in seeds.by_ref().take(6) {
                scope.spawn(move || under_faults(seed));
            }
        });
        if start.elapsed() >= time {
            return;
        }
    }
}

fn under_faults(seed: u64) {
    let shaped = Shaped::new(Plan {
        seed,
        ..Plan::default()
    });
    let schedule = Schedule::random(seed, Duration::from_millis(1500));
    println!("{schedule}");
    shaped.target.set_nonblocking(true).expect("an option");
    let stop = Stop::new();
    std::thread::scope(|scope| {
        let _stop = stop.on_drop();
        scope.spawn(|| {
            while !stop.is_stopped() {
                let Ok((peer, _)) = shaped.target.accept() else {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                };
                peer.set_nonblocking(false).expect("an option");
                // An end without this limit would need bytes that a half-close has dropped.
                let limit = Some(Duration::from_millis(700));
                peer.set_read_timeout(limit).expect("a limit");
                scope.spawn(move || {
                    let _ = std::io::copy(&mut &peer, &mut &peer);
                });
            }
        });
        shaped.shaper.play(&schedule);
        let (mut whole, mut tries) = (0, 0);
        while shaped.shaper.faults_left() > 0 || whole == 0 {
            let Ok(stream) = TcpStream::connect(shaped.shaper.addr()) else {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            };
            stream
                .set_read_timeout(Some(Duration::from_millis(700)))
                .expect("a limit");
            let right = exchange(&stream);
            tries += 1;
            if right == 1 << 20 {
                whole += 1;
            }
        }
        println!("seed {seed}: {whole} of {tries} connections were whole");
    });
}
