//! Guards without fences, on this machine's processors and with its `membarrier(2)`.
#![cfg(not(any(loom, shuttle)))]
#![expect(unsafe_code, reason = "a barrier's maker promises that it is one")]

use pageferry_epoch::{Attempt, Barrier, Domain, Limbo, Reader};
use rustix::thread::{MembarrierCommand, membarrier};
use std::hint;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How often the barrier was called, by all tests.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// The process's barrier, counted; none where the kernel has none, which the test then says.
fn barrier() -> Option<Barrier> {
    let registered = membarrier(MembarrierCommand::RegisterPrivateExpedited);
    if let Err(error) = registered {
        let required = std::env::var("PAGEFERRY_REQUIRE").is_ok_and(|all| !all.is_empty());
        assert!(!required, "membarrier: {error}");
        eprintln!("skipped: this kernel refuses membarrier(2): {error}");
        return None;
    }
    // SAFETY: what it calls reaches all threads of this process.
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

/// Memory that no cache holds. Who stores to it has to wait for it, and later stores of the same thread wait behind that
/// one, in the processor: so announcements come to be seen late.
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

    /// More stores than a processor waits for at once.
    fn write(&mut self) {
        for _ in 0..40 {
            // An odd number of lines, and far.
            self.at = (self.at + 8 * 20_011) % self.words.len();
            self.words[self.at].store(1, Ordering::Relaxed);
        }
    }
}

/// Calls `guard` until it is to stop, with the number of the call; now and then announcements come late. Gives how many there were.
fn until(stop: &AtomicBool, mut guard: impl FnMut(u64)) -> u64 {
    let (mut guards, mut far) = (0_u64, Far::new());
    while !stop.load(Ordering::Relaxed) {
        guards += 1;
        if guards.is_multiple_of(16) {
            far.write();
        }
        guard(guards);
    }
    guards
}

/// Longer than readers take to turn a domain light.
fn pause() {
    let end = Instant::now() + Duration::from_micros(100);
    while Instant::now() < end {
        hint::spin_loop();
    }
}

/// Stops the others, also where one panics.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// One test, as all count the same calls.
#[test]
fn light_guards() {
    let Some(barrier) = barrier() else {
        return;
    };
    assert!(Barrier::membarrier().is_some());
    demands_turn_and_calm_readers_turn_back(barrier);
    shared_and_exclusive_work_do_not_meet(barrier);
    what_is_retired_is_not_read(barrier, Domain::try_advance);
    what_is_retired_is_not_read(barrier, |domain| domain.try_advance_seldom().has_moved());
}

fn demands_turn_and_calm_readers_turn_back(barrier: Barrier) {
    let calls = || CALLS.load(Ordering::Relaxed);
    let light = cfg!(any(
        target_arch = "x86_64",
        target_arch = "aarch64",
        target_arch = "riscv64"
    ));
    let domain = Domain::with_barrier(Some(barrier));
    let mut reader = domain.register();
    let before = calls();
    let calls = || calls() - before;
    guards(&mut reader, 400);
    assert!(domain.try_advance());
    assert_eq!(calls(), 0, "readers fence at first");
    guards(&mut reader, 1000);
    assert!(domain.try_advance() && domain.try_advance() && domain.is_quiet());
    assert_eq!(calls(), u64::from(light), "the first demand pays for all");
    guards(&mut reader, 1000);
    drop(domain.exclude(|| panic!("nobody shares")));
    drop(domain.try_exclude().expect("nobody shares"));
    assert_eq!(calls(), 2 * u64::from(light));
    for _ in 0..100 {
        guards(&mut reader, 300);
        assert!(domain.try_advance());
    }
    assert_eq!(
        calls(),
        2 * u64::from(light),
        "frequent demands pay nothing"
    );
    let mut holds = domain.register();
    let held = holds.pin();
    assert!(domain.try_advance());
    for _ in 0..100 {
        guards(&mut reader, 300);
        assert!(!domain.try_advance(), "a guard holds the epoch");
    }
    drop(held);
    let now = 2 * u64::from(light);
    assert_eq!(calls(), now, "nor do those that are in vain");
    guards(&mut reader, 1000);
    for moves in 1..=3 {
        assert_eq!(domain.try_advance_seldom(), Attempt::MovedAlone);
        assert!(domain.is_quiet());
        assert_eq!(
            calls(),
            now + 2 * moves * u64::from(light),
            "readers stay light"
        );
    }
    let held = holds.pin();
    assert_eq!(domain.try_advance_seldom(), Attempt::Moved);
    assert_eq!(domain.try_advance_seldom(), Attempt::Held);
    assert!(!domain.is_quiet());
    drop(held);
    assert!(domain.try_advance());
    let now = now + 10 * u64::from(light);
    assert_eq!(calls(), now, "and fence after a demand that is not seldom");
    assert_eq!(domain.try_advance_seldom(), Attempt::MovedAlone);
    assert!(domain.is_quiet());
    let plain = Domain::new();
    guards(&mut plain.register(), 5000);
    assert!(plain.try_advance() && plain.is_quiet());
    assert_eq!(plain.try_advance_seldom(), Attempt::MovedAlone);
    assert_eq!(calls(), now, "without guards that are light no barrier");
}

/// A sharer as fast as can be, and an excluder who lets it turn light each time. With a barrier that is only a fence this fails within
/// half a second.
fn shared_and_exclusive_work_do_not_meet(barrier: Barrier) {
    let domain = Domain::with_barrier(Some(barrier));
    let (stop, exclusive) = (AtomicBool::new(false), AtomicBool::new(false));
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
        let stopping = Stop(&stop);
        let (begun, mut exclusions) = (Instant::now(), 0_u64);
        while begun.elapsed() < Duration::from_millis(700) {
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
    assert!(calls > 10 && calls <= exclusions);
}

/// Things that are linked one after the other, and freed; readers see none that is free.
fn what_is_retired_is_not_read(barrier: Barrier, try_advance: fn(&Domain) -> bool) {
    const THINGS: usize = 64;
    let domain = Domain::with_barrier(Some(barrier));
    let linked = AtomicUsize::new(0);
    let freed = [const { AtomicBool::new(true) }; THINGS];
    freed[0].store(false, Ordering::Relaxed);
    let stop = AtomicBool::new(false);
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
        let stopping = Stop(&stop);
        let (begun, mut limbo, mut now, mut uses) = (Instant::now(), Limbo::new(), 0, 0_u64);
        while begun.elapsed() < Duration::from_millis(700) {
            // One that nobody uses any more: there is one soon, as guards are short.
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
            try_advance(&domain);
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
    assert!(CALLS.load(Ordering::Relaxed) - before > 10);
}
