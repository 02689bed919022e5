//! Searches that check a block beside sets and clears. One block has all words of these bitmaps.

use loom::sync::atomic::{AtomicU64, Ordering::Relaxed};
use loom::thread;
use pageferry_addr::RamPage;
use pageferry_userfault::PageBitmap;
use std::sync::Arc;

/// A page of the first word.
const LOW: RamPage = RamPage(0);
/// A page of the second word.
const HIGH: RamPage = RamPage(64);

/// A bitmap of two words whose block is called occupied and has no bit.
fn emptied() -> Arc<PageBitmap> {
    let map = Arc::new(PageBitmap::new(65));
    assert!(map.set(LOW) && map.clear(LOW));
    map
}

/// Sets `page`, and finds it.
fn set_and_find(map: &PageBitmap, page: RamPage) {
    assert!(map.set(page));
    assert_eq!(map.next_set(page.index()), Some(page.index()));
    assert_eq!(map.count_range(page.index()..page.index() + 1), 1);
}

#[test]
fn a_check_misses_no_bit_that_is_set_meanwhile() {
    for page in [LOW, HIGH] {
        loom::model(move || {
            let map = emptied();
            let checker = {
                let map = Arc::clone(&map);
                thread::spawn(move || map.next_set(0))
            };
            set_and_find(&map, page);
            let found = checker.join().unwrap();
            assert!(found.is_none_or(|found| found == page.index()));
            assert_eq!(map.next_set(0), Some(page.index()));
        });
    }
}

#[test]
fn a_set_of_the_bit_that_is_being_cleared_is_found() {
    loom::model(|| {
        let map = Arc::new(PageBitmap::new(65));
        assert!(map.set(HIGH));
        let clearer = {
            let map = Arc::clone(&map);
            thread::spawn(move || {
                assert!(map.clear(HIGH));
                map.next_set(0)
            })
        };
        // The bit is set when this returns, unless the clear comes later.
        let newly = map.set(HIGH);
        let found = map.next_set(0);
        assert!(!newly || found == Some(HIGH.index()));
        clearer.join().unwrap();
        assert_eq!(map.next_set(0).is_some(), newly);
    });
}

/// The check of the first thread may span a whole check of the second. Then its own must fail.
#[test]
fn a_check_that_spans_another_misses_no_bit() {
    loom::model(|| {
        let map = emptied();
        let first = {
            let map = Arc::clone(&map);
            thread::spawn(move || {
                let _ = map.next_set(0);
            })
        };
        let second = {
            let map = Arc::clone(&map);
            thread::spawn(move || {
                assert!(map.set(HIGH) && map.clear(HIGH));
                let _ = map.next_set(0);
            })
        };
        set_and_find(&map, LOW);
        first.join().unwrap();
        second.join().unwrap();
        assert_eq!(map.next_set(0), Some(LOW.index()));
    });
}

const BYTES: u64 = 0xb17e5;

/// The check of the main thread alone may learn of the clear, in its second look at the word.
#[test]
fn a_check_shows_the_bytes_of_a_bit_that_came_and_went_meanwhile() {
    loom::model(|| {
        let shared = Arc::new((emptied(), AtomicU64::new(0)));
        let bringer = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.1.store(BYTES, Relaxed);
                shared.0.clear(HIGH);
            })
        };
        let searcher = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                assert!(shared.0.set(HIGH));
                if shared.0.next_set(0).is_none() {
                    assert_eq!(shared.1.load(Relaxed), BYTES, "no bit, and not its bytes");
                }
            })
        };
        let _ = shared.0.next_set(0);
        bringer.join().unwrap();
        searcher.join().unwrap();
    });
}
