//! Light guards on processors with store buffers.
//!
//! `RUSTFLAGS="--cfg shuttle --cfg pageferry_tso" cargo test -p pageferry-epoch --profile stress
//! --test tso`
//!
//! The crate's own code runs on the atomics of `src/tso.rs`. Readers turn light after one guard
//! without a scan. Threads and buffers are scheduled at random. So with many runs a model shows
//! that a rule is missing, but not that the rules suffice.
//!
//! Broken rules and the models that fail (tried by hand):
//! - no barrier in `Mode::finish_turn`, or a barrier after `TURNING` was removed: all models that
//!   retire, and some that exclude;
//! - no barrier if the word has `TURNING`: in `fence_before_scan`, all models that retire; in
//!   `fence_after_exclude`, `.._beside_other_scans`;
//! - no second load of the word in `Reader::announce`: all models that exclude, and
//!   `what_is_remembered_is_not_freed`;
//! - no fence in `fence_late`: `what_is_remembered_is_not_freed`;
//! - no fence in `Domain::stamp`: `what_is_stamped_is_not_read_beside_a_thread_that_advances`;
//! - readers that turn light while a thread excludes, `LIGHT` that is not removed, or no barrier
//!   for a `LIGHT` between an excluding thread's scan and its exchange:
//!   `.._beside_guards_that_share_nothing`.
//!
//! If readers turn light while the word has `TURNING`, `what_is_retired_is_not_read` fails only
//! with thirty times as many runs. `tests/it/light.rs` catches that at once. No model here needs
//! the fence in `Mode::fence_before_scan`, as the stamp has fenced on this processor. Models under
//! loom need it.
#![cfg(all(shuttle, pageferry_tso))]

use pageferry_epoch::tso::{self, AtomicU64};
use pageferry_epoch::{Domain, Epoch, Limbo, Reader, TryArc};
use shuttle::thread;
use std::sync::Arc;
use std::sync::atomic::{self, Ordering};

const RUNS: usize = 20_000;

fn domain() -> TryArc<Domain> {
    Domain::with_barrier(Some(tso::barrier()))
}

/// Runs `body` with a random scheduler, and with one that switches threads rarely (PCT).
fn check(body: fn()) {
    shuttle::check_random(body, RUNS);
    shuttle::check_pct(body, RUNS, 4);
}

/// The state that exclusive work protects. It is not part of the modelled memory: it has the actual
/// state, which buffers do not delay.
#[derive(Default)]
struct Room {
    sharers: atomic::AtomicU64,
    excluders: atomic::AtomicU64,
}

impl Room {
    fn share(&self, reader: &mut Reader) {
        let _shared = reader.share(thread::yield_now);
        self.sharers.fetch_add(1, Ordering::SeqCst);
        nobody_comes(&self.excluders, "shared while exclusive");
        self.sharers.fetch_sub(1, Ordering::SeqCst);
    }

    fn exclude(&self, domain: &Domain) {
        let _exclusive = domain.exclude(thread::yield_now);
        self.excluders.fetch_add(1, Ordering::SeqCst);
        nobody_comes(&self.sharers, "exclusive while shared");
        assert_eq!(
            self.excluders.fetch_sub(1, Ordering::SeqCst),
            1,
            "exclusive twice"
        );
    }
}

/// Asserts that there is none of `others`, now and after other threads could run.
fn nobody_comes(others: &atomic::AtomicU64, met: &str) {
    assert_eq!(others.load(Ordering::SeqCst), 0, "{met}");
    thread::sleep(std::time::Duration::ZERO);
    assert_eq!(others.load(Ordering::SeqCst), 0, "{met}");
}

/// Runs sharers with `guards` guards each, beside one thread that excludes.
fn sharers(
    domain: &TryArc<Domain>,
    room: &Arc<Room>,
    guards: &'static [u32],
) -> Vec<thread::JoinHandle<()>> {
    let spawn = |&guards| {
        let (mut reader, room) = (domain.register(), Arc::clone(room));
        thread::spawn(move || (0..guards).for_each(|_| room.share(&mut reader)))
    };
    guards.iter().map(spawn).collect()
}

fn join(threads: impl IntoIterator<Item = thread::JoinHandle<()>>) {
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn one_shares_while_another_excludes_again_and_again() {
    check(|| {
        let (domain, room) = (domain(), Arc::new(Room::default()));
        let sharers = sharers(&domain, &room, &[5]);
        for _ in 0..3 {
            room.exclude(&domain);
        }
        join(sharers);
    });
}

#[test]
fn shared_and_exclusive_work_do_not_meet_beside_guards_that_share_nothing() {
    check(|| {
        let (domain, room) = (domain(), Arc::new(Room::default()));
        let sharers = sharers(&domain, &room, &[4, 2]);
        let mut pins = domain.register();
        let pinning = thread::spawn(move || (0..8).for_each(|_| drop(pins.pin())));
        for _ in 0..2 {
            room.exclude(&domain);
        }
        join(sharers.into_iter().chain([pinning]));
    });
}

#[test]
fn shared_and_exclusive_work_do_not_meet_beside_other_scans() {
    check(|| {
        let (domain, room) = (domain(), Arc::new(Room::default()));
        let sharers = sharers(&domain, &room, &[5, 3]);
        let scanning = {
            let domain = domain.clone();
            thread::spawn(move || (0..2).for_each(|_| _ = domain.try_advance()))
        };
        for _ in 0..3 {
            room.exclude(&domain);
        }
        join(sharers.into_iter().chain([scanning]));
    });
}

/// Things that a writer links one after the other.
struct Things {
    /// The number of the linked thing.
    linked: AtomicU64,
    /// Whether each thing is freed. Not part of the modelled memory.
    freed: [atomic::AtomicBool; Self::MOST],
}

impl Things {
    const MOST: usize = 5;

    fn new() -> Arc<Self> {
        Arc::new(Self {
            linked: AtomicU64::new(0),
            freed: Default::default(),
        })
    }

    fn reach(&self) -> usize {
        self.linked.load(Ordering::Acquire) as usize
    }

    fn use_it(&self, thing: usize) {
        thread::sleep(std::time::Duration::ZERO);
        let freed = self.freed[thing].load(Ordering::SeqCst);
        assert!(!freed, "thing {thing} is used, and free");
    }

    /// Links one thing after the other, retires the thing before, and frees expired things.
    fn write(&self, domain: &Domain, by: By) {
        let mut limbo = Limbo::new();
        for thing in 1..Self::MOST {
            self.linked.store(thing as u64, Ordering::Release);
            limbo.retire(domain.stamp(), thing - 1);
            let quiet = match by {
                By::Epochs => {
                    domain.try_advance();
                    false
                }
                By::Quiet => domain.try_advance() && domain.is_quiet(),
            };
            while let Some(thing) = if quiet {
                limbo.take()
            } else {
                limbo.next_expired(domain)
            } {
                self.freed[thing].store(true, Ordering::SeqCst);
            }
        }
    }
}

/// The rule by which a writer frees.
#[derive(Clone, Copy)]
enum By {
    /// The epoch has moved on. Readers fence after that.
    Epochs,
    /// The same, and then the domain was quiet.
    Quiet,
}

/// Runs one writer beside readers that call `read` a few times, and a thread that excludes.
fn beside_a_writer(by: By, read: fn(&Things, &mut Reader, &mut Remembered)) {
    let (domain, things) = (domain(), Things::new());
    let readers = [5, 3].map(|guards| {
        let (mut reader, things) = (domain.register(), Arc::clone(&things));
        thread::spawn(move || {
            let mut remembered = None;
            for _ in 0..guards {
                read(&things, &mut reader, &mut remembered);
            }
        })
    });
    let excluding = {
        let domain = domain.clone();
        thread::spawn(move || drop(domain.exclude(thread::yield_now)))
    };
    things.write(&domain, by);
    join(readers.into_iter().chain([excluding]));
}

type Remembered = Option<(Epoch, usize)>;

fn read(things: &Things, reader: &mut Reader, _: &mut Remembered) {
    let _guard = reader.pin();
    let thing = things.reach();
    things.use_it(thing);
}

/// Acts like a cache: uses a thing that was reached under one guard under others of the same epoch.
fn remember(things: &Things, reader: &mut Reader, remembered: &mut Remembered) {
    let guard = reader.pin();
    let now = guard.epoch();
    let thing = match *remembered {
        Some((epoch, thing)) if epoch == now => thing,
        _ => things.reach(),
    };
    things.use_it(thing);
    *remembered = (now != Epoch::NEVER).then_some((now, thing));
}

#[test]
fn what_is_retired_is_not_read() {
    check(|| beside_a_writer(By::Epochs, read));
}

#[test]
fn what_is_freed_when_it_is_quiet_is_not_read() {
    check(|| beside_a_writer(By::Quiet, read));
}

#[test]
fn what_is_remembered_is_not_freed() {
    check(|| beside_a_writer(By::Epochs, remember));
    check(|| beside_a_writer(By::Quiet, remember));
}

/// The writer stamps and then only loads the epoch, which another thread advances. So only the
/// fence of the stamp empties the writer's buffer.
#[test]
fn what_is_stamped_is_not_read_beside_a_thread_that_advances() {
    check(|| {
        let (domain, things) = (domain(), Things::new());
        let mut reader = domain.register();
        let reading = {
            let things = Arc::clone(&things);
            thread::spawn(move || (0..4).for_each(|_| read(&things, &mut reader, &mut None)))
        };
        let advancing = {
            let domain = domain.clone();
            thread::spawn(move || (0..4).for_each(|_| _ = domain.try_advance()))
        };
        let mut limbo = Limbo::new();
        things.linked.store(1, Ordering::Release);
        limbo.retire(domain.stamp(), 0);
        for _ in 0..6 {
            if let Some(thing) = limbo.next_expired(&domain) {
                things.freed[thing].store(true, Ordering::SeqCst);
            }
            thread::yield_now();
        }
        join([reading, advancing]);
    });
}
