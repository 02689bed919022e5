//! The switching between light guards and guards that fence, with Miri's weak memory and its checks
//! for races and for uses of freed memory.
//!
//! `cargo +nightly miri test -p pageferry-epoch --test it`; `MIRIFLAGS=-Zmiri-many-seeds=0..32`
//! tries more schedules.
//!
//! Miri has no barrier in all threads. Under it light guards fence all the same (`src/sync.rs`),
//! and one guard without a scan turns the domain light. Without their fence
//! `what_a_guard_reached_is_freed_after_it` fails.

use pageferry_epoch::{Barrier, Domain, Limbo, TryArc};
use std::cell::UnsafeCell;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering, fence};
use std::thread;

static BARRIERS: AtomicU32 = AtomicU32::new(0);

fn domain() -> TryArc<Domain> {
    // SAFETY: under Miri light guards fence, so a fence suffices.
    let barrier = unsafe {
        Barrier::new(|| {
            BARRIERS.fetch_add(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
        })
    };
    Domain::with_barrier(Some(barrier))
}

#[test]
fn what_a_guard_reached_is_freed_after_it() {
    let (domain, linked) = (domain(), AtomicPtr::new(Box::into_raw(Box::new(0_u32))));
    thread::scope(|scope| {
        for _ in 0..2 {
            let (mut reader, linked) = (domain.register(), &linked);
            scope.spawn(move || {
                let mut last = 0;
                for _ in 0..40 {
                    let guard = reader.pin();
                    // SAFETY: a linked thing is freed only after a grace period.
                    let now = unsafe { *linked.load(Ordering::Acquire) };
                    assert!(last <= now);
                    last = now;
                    drop(guard);
                }
            });
        }
        let mut limbo = Limbo::new();
        // SAFETY: this thread linked the thing and has unlinked it, and a grace period is over.
        let free = |thing: *mut u32| drop(unsafe { Box::from_raw(thing) });
        for number in 1..20 {
            let old = linked.swap(Box::into_raw(Box::new(number)), Ordering::AcqRel);
            limbo.retire(domain.stamp(), old);
            domain.try_advance();
            while let Some(thing) = limbo.next_expired(&domain) {
                free(thing);
            }
            thread::yield_now();
        }
        while let Some(thing) = {
            while !limbo.is_empty() && !(domain.try_advance() && domain.is_quiet()) {
                thread::yield_now();
            }
            limbo.take()
        } {
            free(thing);
        }
    });
    // SAFETY: this is the last thing, and no thread reads any more.
    drop(unsafe { Box::from_raw(linked.swap(ptr::null_mut(), Ordering::Relaxed)) });
    assert!(BARRIERS.load(Ordering::Relaxed) > 0, "no guard was light");
}

struct Shared(UnsafeCell<u32>);

// SAFETY: Miri looks for accesses that are not kept apart.
unsafe impl Sync for Shared {}

#[test]
fn shared_and_exclusive_work_do_not_race() {
    let (domain, shared) = (domain(), Shared(UnsafeCell::new(0)));
    let shared = &shared;
    thread::scope(|scope| {
        for _ in 0..2 {
            let mut reader = domain.register();
            scope.spawn(move || {
                for _ in 0..20 {
                    let guard = reader.share(thread::yield_now);
                    // SAFETY: there is no exclusive work.
                    assert!(unsafe { *shared.0.get() } <= 10);
                    drop(guard);
                }
            });
        }
        for _ in 0..10 {
            let exclusive = domain.exclude(thread::yield_now);
            // SAFETY: nobody shares.
            unsafe { *shared.0.get() += 1 };
            drop(exclusive);
            thread::yield_now();
        }
    });
    // SAFETY: nobody else is left.
    assert_eq!(unsafe { *shared.0.get() }, 10);
}
