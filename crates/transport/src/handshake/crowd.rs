//! Which connection gives up its place when there are too many.
//!
//! **Guarantee.** A host that opens many connections takes places from itself first. A connection
//! that came before a crowd keeps its place, however slow it is. One that comes into a crowd keeps
//! its place until half as many places as there are were taken by later ones. So neither a slow
//! source nor a late one is kept out by strangers that say nothing.
//!
//! **Mechanism.** The address with the most connections loses the one in the middle of its own, in
//! the order in which they came. The older half is never in the middle, and the younger half moves
//! through it. Removing the oldest would end slow handshakes, and refusing the newest would let the
//! first strangers keep everyone out.

use std::collections::BTreeMap;

use crate::channel::Origin;

/// Returns the connection that gives up its place. `places` has those that may, in the order in
/// which they came, with the numbers by which the caller knows them.
#[must_use]
pub fn place_to_take(places: &[(usize, Origin)]) -> Option<usize> {
    let mut counts = BTreeMap::new();
    for (_, origin) in places {
        *counts.entry(*origin).or_insert(0) += 1;
    }
    let most = *counts.values().max()?;
    let of_most = places.iter().filter(|(_, origin)| counts[origin] == most);
    let of_most: Vec<usize> = of_most.map(|(at, _)| *at).collect();
    of_most.get(of_most.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(address: &str) -> Origin {
        Origin::new(Some(address.parse().unwrap()))
    }

    #[test]
    fn the_address_with_the_most_places_loses_one() {
        let (one, other) = (origin("192.0.2.1"), origin("192.0.2.2"));
        let places = [(0, other), (1, one), (2, one), (3, one), (4, other)];
        assert_eq!(place_to_take(&places), Some(2));
        assert_eq!(place_to_take(&[(7, one)]), Some(7));
        assert_eq!(place_to_take(&[]), None);
    }

    #[test]
    fn the_older_half_stays_and_the_newest_has_half_the_places() {
        let mut places: Vec<u32> = (0..32).collect();
        let mut lived = 0;
        for newest in 32..1000 {
            let known = places.iter().enumerate();
            let known: Vec<_> = known.map(|(at, _)| (at, Origin::new(None))).collect();
            places.remove(place_to_take(&known).unwrap());
            places.push(newest);
            lived += u32::from(places.contains(&500));
        }
        assert_eq!(places[..16], (0..16).collect::<Vec<_>>());
        assert_eq!(lived, 16);
    }

    #[test]
    fn a_network_of_ipv6_is_one_host_and_a_mapped_address_is_of_ipv4() {
        assert_eq!(origin("2001:db8::1"), origin("2001:db8::ffff:1"));
        assert_ne!(origin("2001:db8::1"), origin("2001:db8:0:1::1"));
        assert_eq!(origin("::ffff:192.0.2.1"), origin("192.0.2.1"));
        assert_ne!(origin("192.0.2.1"), origin("192.0.2.2"));
    }
}
