//! The worker of a device under a scheduler that decides every step (the `shuttle` crate), beside a
//! driver, pauses, resets and moves. Memory and queues are the real ones.
//!
//! ```sh
//! RUSTFLAGS="--cfg shuttle" cargo test -p pageferry-devices --profile stress --test shuttle
//! ```
//!
//! `PAGEFERRY_SHUTTLE_SECONDS` is the time for all scenarios together, 40 by default. Waits have no
//! limits here, so a request that takes longer than a pause waits is not in the model.
//!
//! # Caught faults
//!
//! Each was found within some thousand schedules of the scenarios that it concerns.
//!
//! - A resume does not ring, leaves the stop, or brings no edge for what was answered before it.
//! - A pause or a reset does not wait for the worker, or the worker does not look for a pause.
//! - The worker says without the lock that it is busy, or does not say that it is idle.
//! - A notification, or the end of the device, does not wake the worker.
//!
//! Thousands of schedules do not catch an edge that comes just after the lock, so during a pause.
#![cfg(shuttle)]

#[path = "../driver/mod.rs"]
mod driver;

use driver::{Driver, FIRST, ram};
use pageferry_devices::{Chain, Fault, VirtioDevice};
use pageferry_machine::Device;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, MaxSteps, Runner, thread};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

const SCENARIOS: u32 = 5;
const ANSWER: u64 = 0x4000;

fn check(scenario: fn()) {
    let seconds = std::env::var("PAGEFERRY_SHUTTLE_SECONDS");
    let seconds: u64 = seconds.map_or(40, |s| s.parse().expect("a number of seconds"));
    let mut config = Config::new();
    config.max_time = Some(Duration::from_secs(seconds) / SCENARIOS / 2);
    config.max_steps = MaxSteps::FailAfter(20_000); // A request that is never answered.
    config.silence_warnings = true;
    let random = Runner::new(RandomScheduler::new(usize::MAX), config.clone()).run(scenario);
    let ordered = Runner::new(PctScheduler::new(3, usize::MAX), config).run(scenario);
    println!("{random} and {ordered} schedules");
    assert!(random > 0 && ordered > 0);
}

/// Answers each request at its second try, and counts the answers.
struct Slow {
    answers: Arc<AtomicU64>,
    tried: bool,
}

impl VirtioDevice for Slow {
    fn id(&self) -> u32 {
        4
    }

    fn serve(&mut self, _: usize, chain: &Chain) -> Result<Option<u32>, Fault> {
        self.tried = !self.tried;
        thread::yield_now();
        if self.tried {
            return Err(Fault::Later);
        }
        let count = self.answers.fetch_add(1, SeqCst) + 1;
        thread::yield_now();
        chain.write(0, &count.to_le_bytes())?;
        Ok(Some(8))
    }
}

/// A driver of a device that counts its answers, and the count.
fn slow() -> (Driver, Arc<AtomicU64>) {
    let answers = Arc::new(AtomicU64::new(0));
    let device = Slow {
        answers: Arc::clone(&answers),
        tried: false,
    };
    let driver = Driver::of(device, &ram());
    driver.start();
    driver.descriptor(0, ANSWER, 8, 2, 0);
    (driver, answers)
}

fn wait(driver: &Driver) {
    while driver.answered() != driver.next {
        thread::yield_now();
    }
}

/// Pauses and resumes the device of `driver` twice. Nothing happens during a pause.
fn pause_twice(driver: &Driver, answers: &Arc<AtomicU64>) -> thread::JoinHandle<()> {
    let (device, line) = (Arc::clone(&driver.device), Arc::clone(&driver.line));
    let answers = Arc::clone(answers);
    thread::spawn(move || {
        let now = || (line.0.load(SeqCst), answers.load(SeqCst));
        for _ in 0..2 {
            device.pause().unwrap();
            let before = now();
            for _ in 0..4 {
                thread::yield_now();
            }
            assert_eq!(now(), before, "it works while it is paused");
            device.resume();
        }
    })
}

#[test]
fn requests_are_answered_once_around_pauses() {
    check(|| {
        let (mut driver, answers) = slow();
        let pauses = pause_twice(&driver, &answers);
        for _ in 0..3 {
            driver.offer();
        }
        wait(&driver);
        pauses.join().unwrap();
        assert_eq!(answers.load(SeqCst), 3);
        // Each answer has an edge behind it.
        while driver.line.0.load(SeqCst) < 3 {
            thread::yield_now();
        }
        assert_eq!(driver.get(0x60), 1);
    });
}

#[test]
fn a_reset_takes_the_memory_back() {
    check(|| {
        let (mut driver, answers) = slow();
        let pauses = pause_twice(&driver, &answers);
        driver.offer();
        driver.set(0x70, 0);
        // The guest uses the memory for something else.
        driver.put(ANSWER, &[7; 8]);
        driver.put(FIRST.used, &[7; 12]);
        for _ in 0..4 {
            thread::yield_now();
        }
        assert_eq!(driver.bytes::<8>(ANSWER), [7; 8]);
        assert_eq!(driver.bytes::<12>(FIRST.used), [7; 12]);
        pauses.join().unwrap();
        // And then for the device again.
        driver.put(FIRST.used, &[0; 12]);
        driver.put(FIRST.available, &[0; 4]);
        driver.next = 0;
        driver.start();
        driver.offer();
        wait(&driver);
        let count = u64::from_le_bytes(driver.bytes(ANSWER));
        assert_eq!(count, answers.load(SeqCst));
    });
}

/// Moves a device with two requests. `answered` before the pause, or at any time.
fn moves(answered: bool) {
    let (mut here, answers) = slow();
    here.offer();
    here.offer();
    if answered {
        wait(&here);
    }
    here.device.pause().unwrap();
    let device = Slow {
        answers: Arc::clone(&answers),
        tried: false,
    };
    let there = Driver::of(device, &here.ram);
    there.device.pause().unwrap();
    let state = here.device.save().unwrap();
    there.device.decode(1, &state).unwrap()();
    there.device.resume();
    drop(here);
    // The edges of both answers may have stayed at the source.
    while there.answered() != 2 || there.line.0.load(SeqCst) == 0 {
        thread::yield_now();
    }
    assert_eq!(answers.load(SeqCst), 2);
}

#[test]
fn requests_are_answered_once_around_a_move() {
    check(|| moves(false));
}

#[test]
fn the_edges_of_a_device_that_moves_come_once_more() {
    check(|| moves(true));
}

#[test]
fn a_device_ends_in_the_middle_of_a_request() {
    check(|| {
        let (mut driver, answers) = slow();
        driver.offer();
        let pauses = pause_twice(&driver, &answers);
        pauses.join().unwrap();
        drop(driver);
        assert!(answers.load(SeqCst) <= 1);
    });
}
