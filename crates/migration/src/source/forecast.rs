//! The expected blackout of a switch-over.
//!
//! **Mechanism.** The forecast adds the parts of a blackout. The source measures what it can while
//! the guest runs: a harvest of the dirty log, the round trip, the rate of the link, and the runs
//! that the guest dirties right after a harvest. The rest is what the machine says of itself
//! ([`BlackoutCost`]): what the two sides took on cores that nobody else used. On busy cores each
//! of the threads that wake in the blackout may wait for a core, which takes longer than forecast.

use pageferry_machine::BlackoutCost;
use std::time::Duration;

/// The bytes of a run of missing pages: two short numbers.
const RUN_BYTES: f64 = 3.0;

/// The basis of a forecast.
#[derive(Clone, Copy, Debug)]
pub(super) struct Basis {
    /// The parts of the machine.
    pub(super) cost: BlackoutCost,
    pub(super) vcpus: usize,
    /// The least round trip to the destination's threads and back.
    pub(super) round_trip: Duration,
    /// The least harvest of the dirty log right after another. Zero if there is no log.
    pub(super) harvest: Duration,
    /// The runs of pages that the guest dirtied between the two.
    pub(super) runs: u64,
    /// Bytes a second, if a pass has measured it.
    pub(super) link_rate: Option<u64>,
}

/// From the last guest instruction at the source to the first at the destination.
pub(super) fn blackout(basis: &Basis) -> Duration {
    // SwitchOver, `Ready` and `Go` each cross the link once.
    let crossings = basis.round_trip * 3 / 2;
    let runs = match basis.link_rate {
        Some(rate @ 1..) => basis.runs as f64 * RUN_BYTES / rate as f64,
        _ => 0.0,
    };
    basis.cost.of(basis.vcpus) + basis.harvest + crossings + Duration::from_secs_f64(runs)
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn each_part_counts() {
        let ms = Duration::from_millis;
        let least = Basis {
            cost: BlackoutCost::new(Duration::from_micros(500), Duration::from_micros(7)),
            vcpus: 1,
            round_trip: Duration::ZERO,
            harvest: Duration::ZERO,
            runs: 0,
            link_rate: None,
        };
        let floor = blackout(&least);
        assert_eq!(floor, Duration::from_micros(507));
        let more = |change: fn(&mut Basis)| {
            let mut basis = least;
            change(&mut basis);
            blackout(&basis) - floor
        };
        assert_eq!(more(|b| b.round_trip = Duration::from_millis(100)), ms(150));
        assert_eq!(more(|b| b.harvest = Duration::from_millis(2)), ms(2));
        // 30 000 bytes at 1 MB/s, and a link that is not measured.
        let runs = |b: &mut Basis| (b.runs, b.link_rate) = (10_000, Some(1_000_000));
        assert_eq!(more(runs), ms(30));
        assert_eq!(more(|b| b.runs = 10_000), Duration::ZERO);
        assert_eq!(more(|b| b.vcpus = 9), Duration::from_micros(7 * 8));
        assert_eq!(more(|b| b.cost.fixed += Duration::from_millis(3)), ms(3));
    }
}
