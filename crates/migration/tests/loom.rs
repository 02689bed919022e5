//! Every interleaving of a waiter that goes to sleep and a bringer of its page.
//! Run with `RUSTFLAGS="--cfg loom" cargo test --release -p pageferry-migration --test loom`.
#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use pageferry_migration::destination::waiters::Waiters;

/// The waiter sleeps only if it must, and is always woken: a lost wake-up would be a deadlock here.
#[test]
fn a_sleeper_is_woken_by_the_arrival_of_its_page() {
    loom::model(|| {
        let waiters = Arc::new(Waiters::new(1));
        let missing = Arc::new(AtomicBool::new(true));
        let sleeper = {
            let (waiters, missing) = (Arc::clone(&waiters), Arc::clone(&missing));
            thread::spawn(move || {
                waiters.announce(0, 7);
                if missing.load(Ordering::Acquire) {
                    thread::park();
                    assert!(!missing.load(Ordering::Acquire), "woken before the page arrived");
                }
                waiters.withdraw(0);
            })
        };
        missing.store(false, Ordering::Release);
        waiters.arrived(7..8, |slot| {
            assert_eq!(slot, 0);
            sleeper.thread().unpark();
        });
        sleeper.join().unwrap();
    });
}

/// Two sleepers on two pages: each is woken by its own, whatever the other does.
#[test]
fn sleepers_do_not_take_each_others_wakes() {
    loom::model(|| {
        let waiters = Arc::new(Waiters::new(2));
        let missing = Arc::new([AtomicBool::new(true), AtomicBool::new(true)]);
        let sleepers: Vec<_> = (0..2)
            .map(|slot| {
                let (waiters, missing) = (Arc::clone(&waiters), Arc::clone(&missing));
                thread::spawn(move || {
                    waiters.announce(slot, slot as u64);
                    while missing[slot].load(Ordering::Acquire) {
                        thread::park();
                    }
                    waiters.withdraw(slot);
                })
            })
            .collect();
        for page in 0..2u64 {
            missing[page as usize].store(false, Ordering::Release);
            waiters.arrived(page..page + 1, |slot| sleepers[slot].thread().unpark());
        }
        for sleeper in sleepers {
            sleeper.join().unwrap();
        }
    });
}
