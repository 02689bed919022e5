//! Guards without fences, on this machine's processors and with its `membarrier(2)`.

use pageferry_epoch::{Barrier, Domain, Limbo, Reader};
use pageferry_testkit::{Stop, skip, wait_until};
use rustix::thread::{MembarrierCommand, membarrier};
use std::hint;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The number of calls of the barrier by all tests.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// The process's barrier, which counts its calls. `None` if the kernel has none.
fn barrier() -> Option<Barrier> {
    let registered = membarrier(MembarrierCommand::RegisterPrivateExpedited);
    if let Err(error) = registered {
        skip("membarrier", error);
        return None;
    }
    // SAFETY: the inner barrier reaches all threads of this process.
    Some(unsafe {
        Barrier::new(|| {
            CALLS.fetch_add(1, Ordering::Relaxed);
            membarrier(MembarrierCommand::PrivateExpedited).expect("registered");
        })
    })
}

fn guards(reader: &mut Reader, count: u32) {
    for _ in 0..count {
        hint::black_box(&reader.pin());
    }
}

/// Memory that no cache holds. A store to it takes long, and later stores of the same thread wait
/// behind it in the processor. So announcements become visible late.
struct Far {
    words: Vec<AtomicU64>,
    at: usize,
}

impl Far {
    fn new() -> Self {
        let words = 1 << 23;
        Self {
            words: (0..words).map(AtomicU64::new).collect(),
            at: 0,
        }
    }

    /// Makes more stores than a processor can have outstanding.
    fn write(&mut self) {
        for _ in 0..40 {
            // The stride is an odd number of cache lines, and large.
            self.at = (self.at + 8 * 20_011) % self.words.len();
            self.words[self.at].store(1, Ordering::Relaxed);
        }
    }
}

/// Calls `guard` with the number of the call until `stop`. Some announcements become visible late.
/// Returns the number of calls.
fn until(stop: &Stop, mut guard: impl FnMut(u64)) -> u64 {
    let (mut guards, mut far) = (0_u64, Far::new());
    while !stop.is_stopped() {
        guards += 1;
        if guards.is_multiple_of(16) {
            far.write();
        }
        guard(guards);
    }
    guards
}

/// Pauses for longer than readers need to turn a domain light.
fn pause() {
    let end = Instant::now() + Duration::from_micros(100);
    while Instant::now() < end {
        hint::spin_loop();
    }
}

/// This is one test, because all parts count the same calls.
#[test]
fn light_guards() {
    let Some(barrier) = barrier() else {
        return;
    };
    #[cfg(feature = "membarrier")]
    assert!(Barrier::membarrier().is_some());
    scans_turn_and_quiet_readers_turn_back(barrier);
    shared_and_exclusive_work_do_not_meet(barrier);
    what_is_retired_is_not_read(barrier);
}

/// 1 if readers may be light on this processor, else 0.
const LIGHT: u64 = cfg!(target_arch = "x86_64") as u64;

fn scans_turn_and_quiet_readers_turn_back(barrier: Barrier) {
    let domain = Domain::with_barrier(Some(barrier));
    let mut reader = domain.register();
    let before = CALLS.load(Ordering::Relaxed);
    let calls = || CALLS.load(Ordering::Relaxed) - before;
    guards(&mut reader, 400);
    assert!(domain.try_advance());
    assert_eq!(calls(), 0, "readers fence at first");
    guards(&mut reader, 1000);
    assert!(domain.try_advance() && domain.try_advance() && domain.is_quiet());
    assert_eq!(calls(), LIGHT, "the first scan pays for all");
    guards(&mut reader, 1000);
    drop(domain.exclude(|| panic!("nobody shares")));
    drop(domain.try_exclude().expect("nobody shares"));
    assert_eq!(calls(), 2 * LIGHT);
    for _ in 0..100 {
        guards(&mut reader, 300);
        assert!(domain.try_advance());
    }
    assert_eq!(calls(), 2 * LIGHT, "frequent scans pay nothing");
    let mut holds = domain.register();
    let held = holds.pin();
    assert!(domain.try_advance());
    for _ in 0..100 {
        guards(&mut reader, 300);
        assert!(!domain.try_advance(), "a guard holds the epoch");
    }
    drop(held);
    assert_eq!(calls(), 2 * LIGHT, "nor do those that fail");
    guards(&mut reader, 1000);
    assert!(domain.is_quiet());
    assert_eq!(calls(), 3 * LIGHT, "asking for quiet is a scan");
    let plain = Domain::new();
    guards(&mut plain.register(), 5000);
    assert!(plain.try_advance() && plain.is_quiet());
    assert_eq!(calls(), 3 * LIGHT, "without light guards no barrier");
}

/// During a scan's barrier readers do not turn the domain light again, for any number of guards.
/// Otherwise two scans could be turning at once, and the first to finish would hide the other's
/// barrier from a third.
#[test]
fn readers_do_not_turn_light_during_a_barrier() {
    const BEFORE: u64 = 1;
    const DURING: u64 = 2;
    const AFTER: u64 = 3;
    static PHASE: AtomicU64 = AtomicU64::new(0);
    static BARRIERS: AtomicU64 = AtomicU64::new(0);
    // SAFETY: only one other thread uses the domain. Before a call that it does not make itself
    // returns, it executes locked instructions: those of its guards and its stores to `PHASE`.
    let barrier = unsafe {
        Barrier::new(|| {
            BARRIERS.fetch_add(1, Ordering::SeqCst);
            if PHASE
                .compare_exchange(BEFORE, DURING, Ordering::SeqCst, Ordering::SeqCst)
                .is_ok()
            {
                wait_until("guards during the barrier", || {
                    PHASE.load(Ordering::SeqCst) == AFTER
                });
            }
        })
    };
    let domain = Domain::with_barrier(Some(barrier));
    let mut reader = domain.register();
    // This turns the domain light, if the processor allows it.
    guards(&mut reader, 2000);
    thread::scope(|scope| {
        PHASE.store(BEFORE, Ordering::SeqCst);
        let scanning = scope.spawn(|| domain.try_advance());
        wait_until("the barrier", || {
            PHASE.load(Ordering::SeqCst) == DURING || scanning.is_finished()
        });
        guards(&mut reader, 2000);
        PHASE.store(AFTER, Ordering::SeqCst);
        assert!(scanning.join().expect("no panic"));
    });
    assert_eq!(BARRIERS.load(Ordering::SeqCst), LIGHT);
    assert!(domain.is_quiet());
    assert_eq!(
        BARRIERS.load(Ordering::SeqCst),
        LIGHT,
        "readers turned light while a scan was turning them"
    );
}

/// The calls since `before` are as many as a test of light readers needs.
fn enough(before: u64) -> bool {
    LIGHT == 0 || CALLS.load(Ordering::Relaxed) - before > 10
}

/// A stress test goes on for 700 ms. On a busy machine the reader may get few turns in which to
/// become light, so it goes on for longer there.
fn goes_on(begun: Instant, before: u64) -> bool {
    let elapsed = begun.elapsed();
    elapsed < Duration::from_millis(700) || !enough(before) && elapsed < Duration::from_secs(20)
}

/// Runs a sharer at full speed, and an excluder that lets it turn light each time. With a barrier
/// that is only a fence this fails within half a second.
fn shared_and_exclusive_work_do_not_meet(barrier: Barrier) {
    let domain = Domain::with_barrier(Some(barrier));
    let (stop, exclusive) = (Stop::new(), AtomicBool::new(false));
    let sharing = AtomicU64::new(0);
    let before = CALLS.load(Ordering::Relaxed);
    let exclusions = thread::scope(|scope| {
        let sharer = {
            let (mut reader, stop, exclusive) = (domain.register(), &stop, &exclusive);
            let sharing = &sharing;
            scope.spawn(move || {
                until(stop, |guards| {
                    let shared = reader.share(thread::yield_now);
                    sharing.store(guards, Ordering::Relaxed);
                    for _ in 0..16 {
                        assert!(!exclusive.load(Ordering::Relaxed), "shared while exclusive");
                    }
                    sharing.store(0, Ordering::Relaxed);
                    drop(shared);
                })
            })
        };
        let stopping = stop.on_drop();
        let (begun, mut exclusions) = (Instant::now(), 0_u64);
        while goes_on(begun, before) {
            let held = domain.exclude(thread::yield_now);
            exclusive.store(true, Ordering::Relaxed);
            for _ in 0..100 {
                hint::spin_loop();
            }
            assert_eq!(sharing.load(Ordering::Relaxed), 0, "exclusive while shared");
            exclusive.store(false, Ordering::Relaxed);
            drop(held);
            exclusions += 1;
            pause();
        }
        drop(stopping);
        assert!(sharer.join().expect("saw nothing exclusive") > 0);
        exclusions
    });
    let calls = CALLS.load(Ordering::Relaxed) - before;
    println!("{exclusions} exclusions, {calls} barriers");
    assert!(calls <= exclusions && enough(before));
}

/// Links things one after the other and frees them. Readers must see no freed thing.
fn what_is_retired_is_not_read(barrier: Barrier) {
    const THINGS: usize = 64;
    let domain = Domain::with_barrier(Some(barrier));
    let linked = AtomicUsize::new(0);
    let freed = [const { AtomicBool::new(true) }; THINGS];
    freed[0].store(false, Ordering::Relaxed);
    let stop = Stop::new();
    let before = CALLS.load(Ordering::Relaxed);
    thread::scope(|scope| {
        let reader = {
            let mut reader = domain.register();
            let (linked, freed, stop) = (&linked, &freed, &stop);
            scope.spawn(move || {
                until(stop, |_| {
                    let guard = reader.pin();
                    let thing = linked.load(Ordering::Acquire);
                    for _ in 0..16 {
                        assert!(!freed[thing].load(Ordering::Relaxed), "{thing} is free");
                    }
                    drop(guard);
                })
            })
        };
        let stopping = stop.on_drop();
        let (begun, mut limbo, mut now, mut uses) = (Instant::now(), Limbo::new(), 0, 0_u64);
        while goes_on(begun, before) {
            // Take a thing that nobody uses any more. There is one soon, as guards are short.
            if let Some(new) = (0..THINGS).find(|&thing| freed[thing].load(Ordering::Relaxed)) {
                freed[new].store(false, Ordering::Relaxed);
                linked.store(new, Ordering::Release);
                limbo.retire(domain.stamp(), now);
                now = new;
                uses += 1;
            }
            if uses.is_multiple_of(4) {
                pause();
            }
            domain.try_advance();
            while let Some(thing) = limbo.next_expired(&domain) {
                freed[thing].store(true, Ordering::Relaxed);
            }
        }
        drop(stopping);
        reader.join().expect("saw nothing that was free");
        println!(
            "{uses} things, {} barriers",
            CALLS.load(Ordering::Relaxed) - before
        );
        assert!(uses > 100);
    });
    assert!(enough(before));
}
