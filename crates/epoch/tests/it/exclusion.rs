//! Shared guards and exclusive work: each keeps the other out, holders learn of waiting threads,
//! and all threads get in.

use pageferry_epoch::{Barrier, Domain, Epoch, Limbo, Reader};
use pageferry_testkit::{LIMIT, wait_until};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

/// Returns the `relax` function of these tests. It panics after too long a wait.
fn patience() -> impl FnMut() {
    let begun = Instant::now();
    move || {
        assert!(begun.elapsed() < LIMIT, "waited for {LIMIT:?}");
        thread::yield_now();
    }
}

#[test]
fn shared_guards_keep_exclusive_work_out_and_plain_ones_do_not() {
    let domain = Domain::new();
    let (mut first, mut second, mut third) =
        (domain.register(), domain.register(), domain.register());
    let plain = first.pin();
    drop(domain.try_exclude().expect("a plain guard does not matter"));
    drop(domain.exclude(|| panic!("waits for a plain guard")));
    let shared = [second.try_share().unwrap(), third.share(|| panic!("waits"))];
    assert!(domain.try_exclude().is_none());
    assert!(!domain.is_excluded(), "it lets go");
    assert!(!shared[0].is_wanted());
    drop(shared);
    drop(domain.try_exclude().expect("nobody shares"));
    drop(plain);
}

#[test]
fn exclusive_work_keeps_shared_guards_and_other_exclusive_work_out() {
    let domain = Domain::new();
    let mut reader = domain.register();
    let exclusive = domain.exclude(|| panic!("waits"));
    assert!(domain.is_excluded());
    assert!(reader.try_share().is_none());
    assert!(domain.try_exclude().is_none());
    assert!(
        !exclusive.is_wanted(),
        "a thread that only tries does not wait"
    );
    assert!(domain.is_quiet(), "failed attempts leave nothing behind");
    drop(reader.pin());
    drop(exclusive);
    assert!(!domain.is_excluded());
    drop(reader.try_share().unwrap());
    reader.wait_included(|| panic!("waits"));
}

#[test]
fn who_shares_within_some_turns_waits_no_longer() {
    let domain = Domain::new();
    let mut reader = domain.register();
    let no_turn = || panic!("more turns than allowed");
    drop(reader.share_within(0, no_turn).expect("nobody excludes"));
    let exclusive = domain.exclude(|| panic!("waits"));
    assert!(reader.share_within(0, no_turn).is_none());
    let mut turns = 0;
    let counted = || {
        turns += 1;
        assert!(exclusive.is_wanted(), "it counts as waiting");
    };
    assert!(reader.share_within(3, counted).is_none());
    assert_eq!(turns, 3);
    assert!(!exclusive.is_wanted() && domain.is_quiet(), "it has gone");
    let (mut held, mut turns) = (Some(exclusive), 0);
    let let_in = || {
        turns += 1;
        if turns == 4 {
            held = None;
        }
    };
    let shared = reader.share_within(9, let_in).expect("let in");
    assert_eq!(turns, 4);
    assert!(domain.try_exclude().is_none());
    drop(shared);
}

#[test]
fn who_excludes_gives_way_for_a_moment_only() {
    let domain = Domain::new();
    let mut reader = domain.register();
    let mut held = Some(domain.exclude(|| panic!("waits")));
    // A thread waits whenever this excludes again, and the sharer does not get in.
    let again = || {
        held = None;
        held = Some(domain.exclude(|| panic!("nobody shares")));
    };
    assert!(reader.share_within(5, again).is_none());
    assert!(domain.is_excluded());
}

#[test]
fn a_shared_guard_is_a_guard() {
    let domain = Domain::new();
    let mut reader = domain.register();
    let mut shared = reader.try_share().unwrap();
    let epoch = shared.epoch();
    assert_eq!(epoch, domain.epoch());
    assert!(!domain.is_quiet());
    assert!(domain.try_advance(), "the guard is of this epoch");
    assert!(!domain.try_advance(), "and not of the next");
    shared.refresh();
    assert_eq!(shared.epoch(), epoch.next());
    assert!(domain.try_advance());
    assert!(domain.try_exclude().is_none());
    shared.yield_now(|| panic!("nobody excludes"));
    assert_eq!(shared.epoch(), epoch.next().next());
    assert_ne!(shared.epoch(), Epoch::NEVER);
    assert!(domain.try_exclude().is_none());
    drop(shared);
    assert!(domain.is_quiet());
}

#[test]
fn each_side_is_told_that_the_other_waits() {
    let domain = Domain::new();
    let mut reader = domain.register();
    let mut shared = reader.try_share().unwrap();
    let turns = AtomicU64::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            let exclusive = domain.exclude(patience());
            wait_until("a thread that wants to share", || exclusive.is_wanted());
            turns.store(1, Ordering::Relaxed);
        });
        wait_until("a thread that wants to exclude", || shared.is_wanted());
        assert_eq!(turns.load(Ordering::Relaxed), 0);
        shared.yield_now(patience());
        assert_eq!(turns.load(Ordering::Relaxed), 1);
        assert!(!shared.is_wanted());
    });
}

#[test]
fn exclusive_work_that_yields_lets_all_in_who_wait() {
    let domain = Domain::new();
    let mut exclusive = domain.exclude(patience());
    let [came_in, was_excluded, waited] = [const { AtomicU64::new(0) }; 3];
    thread::scope(|scope| {
        let (mut sharer, waiter) = (domain.register(), domain.register());
        let [came_in, excluded, waited] = [&came_in, &was_excluded, &waited];
        scope.spawn(move || {
            drop(sharer.share(patience()));
            came_in.store(1, Ordering::Relaxed);
        });
        scope.spawn(|| {
            drop(domain.exclude(patience()));
            excluded.store(1, Ordering::Relaxed);
        });
        scope.spawn(move || {
            waiter.wait_included(patience());
            waited.store(1, Ordering::Relaxed);
        });
        let mut relax = patience();
        while [came_in, excluded, waited].map(|seen| seen.load(Ordering::Relaxed)) != [1; 3] {
            relax();
            if exclusive.is_wanted() {
                exclusive = exclusive.yield_now(patience());
            }
        }
        assert!(domain.register().try_share().is_none(), "it excludes again");
    });
}

#[test]
fn a_wait_that_panics_leaves_nothing_behind() {
    let domain = Domain::new();
    let (mut reader, mut other) = (domain.register(), domain.register());
    let exclusive = domain.exclude(patience());
    let panics = || panic!("in the wait");
    assert!(catch_unwind(AssertUnwindSafe(|| drop(reader.share(panics)))).is_err());
    assert!(catch_unwind(AssertUnwindSafe(|| reader.wait_included(panics))).is_err());
    assert!(catch_unwind(AssertUnwindSafe(|| drop(domain.exclude(panics)))).is_err());
    assert!(!exclusive.is_wanted() && domain.is_quiet());
    drop(exclusive);
    let shared = other.share(patience());
    assert!(catch_unwind(AssertUnwindSafe(|| drop(domain.exclude(panics)))).is_err());
    assert!(!domain.is_excluded());
    drop(shared);
}

/// A guard whose wait panics is a guard again.
#[test]
fn a_guard_that_yields_is_one_again_also_after_a_panic() {
    let domain = Domain::new();
    let mut reader = domain.register();
    let mut shared = reader.try_share().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let exclusive = domain.exclude(patience());
            wait_until("a thread that wants to share", || exclusive.is_wanted());
        });
        wait_until("a thread that wants to exclude", || shared.is_wanted());
        let yields = || shared.yield_now(|| panic!("in the wait"));
        // Whether it had to wait depends on the speed of the other thread.
        drop(catch_unwind(AssertUnwindSafe(yields)));
        assert!(domain.try_exclude().is_none() && !domain.is_quiet());
    });
}

/// Excluders write two words, and no sharer sees them differ. All waits end.
#[test]
fn many_share_and_some_exclude() {
    const ROUNDS: u64 = if cfg!(miri) { 20 } else { 500 };
    let domain = Domain::new();
    let words = [const { AtomicU64::new(0) }; 2];
    let write = |yields: bool| {
        for _ in 0..ROUNDS {
            let mut exclusive = domain.exclude(patience());
            let value = words[0].load(Ordering::Relaxed) + 1;
            words[0].store(value, Ordering::Relaxed);
            thread::yield_now();
            assert_eq!(words[1].swap(value, Ordering::Relaxed), value - 1);
            if yields && exclusive.is_wanted() {
                exclusive = exclusive.yield_now(patience());
            }
            drop(exclusive);
        }
    };
    let read = |tries: bool| {
        let mut reader = domain.register();
        let both = || words.each_ref().map(|word| word.load(Ordering::Relaxed));
        for round in 0..ROUNDS * 4 {
            if tries && reader.try_share().is_none() {
                reader.wait_included(patience());
            }
            let mut shared = reader.share(patience());
            let [first, second] = both();
            assert_eq!(first, second);
            if round % 8 == 0 {
                shared.refresh();
            }
            if shared.is_wanted() {
                shared.yield_now(patience());
            }
            let [first, second] = both();
            assert_eq!(first, second);
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| write(false));
        scope.spawn(|| write(true));
        scope.spawn(|| read(false));
        scope.spawn(|| read(true));
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                domain.try_advance();
                drop(domain.try_exclude());
                thread::yield_now();
            }
        });
    });
    assert_eq!(words[0].load(Ordering::Relaxed), 2 * ROUNDS);
    assert!(domain.is_quiet() && !domain.is_excluded());
}

/// After a panic of the barrier no thread is kept out, nothing is freed, and the domain works.
#[test]
fn a_barrier_that_panics_leaves_nothing_behind() {
    static FAILS: AtomicU64 = AtomicU64::new(1);
    // SAFETY: one thread uses the domain, and its accesses are in order.
    let barrier = unsafe {
        Barrier::new(|| {
            let failing = FAILS.load(Ordering::Relaxed) != 0;
            assert!(!failing, "no barrier");
        })
    };
    let domain = Domain::with_barrier(Some(barrier));
    let (mut reader, mut limbo) = (domain.register(), Limbo::new());
    let calm = |reader: &mut Reader| (0..1000).for_each(|_| drop(reader.pin()));
    calm(&mut reader);
    limbo.retire(domain.stamp(), "a thing");
    let panics = |f: &dyn Fn()| catch_unwind(AssertUnwindSafe(f)).is_err();
    let may_be_light = cfg!(any(target_arch = "x86_64", miri));
    let epoch = domain.epoch();
    assert_eq!(panics(&|| assert!(domain.try_advance())), may_be_light);
    assert_eq!(panics(&|| drop(domain.exclude(|| ()))), may_be_light);
    assert_eq!(panics(&|| drop(domain.try_exclude())), may_be_light);
    if may_be_light {
        assert_eq!(domain.epoch(), epoch);
        assert_eq!(limbo.next_expired(&domain), None);
    }
    drop(reader.try_share().expect("nobody excludes"));
    FAILS.store(0, Ordering::Relaxed);
    assert!(domain.try_advance() && domain.try_advance());
    drop(domain.try_exclude().expect("nobody shares"));
    assert_eq!(limbo.next_expired(&domain), Some("a thing"));
}
