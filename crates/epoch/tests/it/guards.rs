//! Guards, epochs and readers of one thread.

use pageferry_epoch::{Domain, Limbo};
use std::sync::Arc;

#[test]
fn a_record_that_a_reader_left_is_taken_again() {
    let domain = Domain::new();
    let first = domain.try_register().expect("memory for a record");
    let mut second = domain.register();
    drop(first);
    let mut third = domain.register();
    let (held, other) = (second.pin(), third.pin());
    assert!(domain.try_advance(), "both guards are of this epoch");
    assert!(!domain.try_advance(), "and not of the next");
    drop((held, other));
    assert!(domain.try_advance() && domain.is_quiet());
}

#[test]
fn a_limbo_with_room_keeps_things_in_order() {
    let (domain, counted) = (Domain::new(), Arc::new(()));
    let mut limbo = Limbo::new();
    limbo.try_reserve(3).expect("room for three");
    for _ in 0..3 {
        limbo.retire(domain.stamp(), Arc::clone(&counted));
    }
    assert!(limbo.try_reserve(usize::MAX).is_err(), "more than memory");
    assert!(limbo.next_expired(&domain).is_none());
    assert!(domain.try_advance() && domain.try_advance());
    while limbo.next_expired(&domain).is_some() {}
    assert!(limbo.is_empty());
    assert_eq!(Arc::strong_count(&counted), 1);
}
