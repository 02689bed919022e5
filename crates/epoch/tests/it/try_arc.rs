//! The reference-counted pointer under which domains are shared.

use pageferry_epoch::{Domain, TryArc};
use std::sync::Arc;
use std::thread;

#[test]
fn the_last_pointer_drops_the_value() {
    let counted = Arc::new(7);
    let shared = TryArc::try_new(Arc::clone(&counted)).expect("memory");
    thread::scope(|scope| {
        for _ in 0..3 {
            let clone = shared.clone();
            scope.spawn(move || assert_eq!(**clone, 7));
        }
        drop(shared);
    });
    assert_eq!(Arc::strong_count(&counted), 1);
}

#[test]
fn a_reader_keeps_its_domain() {
    let domain = Domain::try_with_barrier(None).expect("memory");
    let mut reader = domain.register();
    drop(domain);
    let guard = reader.pin();
    assert!(guard.epoch() > pageferry_epoch::Epoch::NEVER);
}
