//! Whether another pre-copy pass helps.
//!
//! **Guarantee.** One pass never decides that pre-copy does not converge, and neither does a pass
//! in which the link became slower. A guest that dirties at least twice as fast as the link carries
//! is found within three passes. One that dirties at most half as fast converges.
//!
//! **Mechanism.** A pure function, called at the end of each pass. It compares what is left with
//! the least remainder so far, and with the pages that the pass has sent. A pass that fails both
//! comparisons was in vain. Two passes in vain, with no lower remainder between them, decide.

use crate::settings::Switch;
use pageferry_addr::PAGE_SIZE;
use std::time::Duration;

/// A remainder is little if the link carries it in this time, beyond two round trips.
const LITTLE: Duration = Duration::from_millis(30);
/// A remainder falls usefully if it is below this share of another.
const USEFUL: f64 = 0.75;
/// The link became slower if it carried less than this share of the pass before.
const SLOWER: f64 = 0.7;
/// The passes in vain that decide.
const IN_VAIN: u32 = 2;
/// The passes without a lower remainder that decide, whatever they were.
const PATIENCE: u32 = 6;
/// A pass with fewer bytes says little about the link.
const MEASURABLE: u64 = 1 << 20;

/// A pass that has ended: the destination has all its pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct PassEnd {
    /// Its pages, zero pages included.
    pub(super) pages: u64,
    /// The bytes of its data pages.
    pub(super) bytes: u64,
    /// The time until all were acknowledged.
    pub(super) took: Duration,
    /// The pages that the guest has dirtied meanwhile.
    pub(super) left: u64,
    /// The round trip of the link.
    pub(super) round_trip: Duration,
}

/// The prospect of further passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outlook {
    /// Another pass may help.
    Open,
    /// Little is left.
    Little,
    /// Further passes do not help: the guest dirties too fast.
    Vain,
}

/// The findings of the passes so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Convergence {
    /// The least remainder so far, in pages.
    least: Option<u64>,
    /// The passes since then, and those of them that were in vain.
    since_least: u32,
    in_vain: u32,
    /// Bytes of pages that the guest dirtied a second during the last pass. A page counts once.
    pub(super) dirty_rate: Option<u64>,
    /// Bytes of pages that the link carried a second, in the last pass that says anything about it.
    pub(super) link_rate: Option<u64>,
}

impl PassEnd {
    /// The time in which the link carried the pass.
    fn link_time(&self) -> f64 {
        let took = self.took.as_secs_f64().max(1e-6);
        (took - self.round_trip.as_secs_f64()).max(took / 4.0)
    }
}

impl Convergence {
    /// Takes the end of a pass into account.
    pub(super) fn pass_ended(&mut self, pass: &PassEnd) -> Outlook {
        let took = pass.took.as_secs_f64().max(1e-6);
        self.dirty_rate = Some(((pass.left * PAGE_SIZE) as f64 / took) as u64);
        let measured = pass.bytes as f64 / pass.link_time();
        let known = self.link_rate.map(|rate| rate as f64);
        let says_something = pass.bytes >= MEASURABLE;
        let slower = says_something && known.is_some_and(|known| measured < known * SLOWER);
        if says_something || (known.is_none() && pass.bytes > 0) {
            self.link_rate = Some(measured as u64);
        }
        let left = pass.left as f64;
        let least = self.least.unwrap_or(pass.pages);
        let lower = left < least as f64 * USEFUL;
        if lower {
            self.least = Some(pass.left);
            (self.since_least, self.in_vain) = (0, 0);
        } else {
            self.least = Some(least.min(pass.left));
            self.since_least += 1;
            let helped = left < pass.pages as f64 * USEFUL;
            self.in_vain += u32::from(!helped && !slower);
        }
        if self.is_little(pass) {
            Outlook::Little
        } else if self.in_vain >= IN_VAIN || self.since_least >= PATIENCE {
            Outlook::Vain
        } else {
            Outlook::Open
        }
    }

    fn is_little(&self, pass: &PassEnd) -> bool {
        let within = (LITTLE + 2 * pass.round_trip).as_secs_f64();
        let carried = self.link_rate.unwrap_or(0) as f64 * within;
        pass.left <= Switch::FEW_PAGES || ((pass.left * PAGE_SIZE) as f64) < carried
    }

    /// The time until the destination has all pages, with `left` pages unsent now. `passes` is the
    /// number of passes to come before the switch-over, or `None` for as many as help. `None`
    /// without a measured link.
    pub(super) fn time_left(&self, left: u64, passes: Option<u32>) -> Option<Duration> {
        let link = self.link_rate.filter(|rate| *rate > 0)? as f64;
        let first = (left * PAGE_SIZE) as f64 / link;
        // Each pass leaves this share of what it sends. It cannot leave more than all pages, and
        // later passes leave about as much as this one.
        let share = (self.dirty_rate.unwrap_or(0) as f64 / link).min(1.0);
        let passes = match passes {
            None if share < USEFUL => f64::INFINITY,
            None => f64::from(IN_VAIN),
            Some(passes) => f64::from(passes),
        };
        // The passes, and then the post-copy: 1 + share + share^2 + ... to the power of `passes`.
        let terms = passes + 1.0;
        let sum = if share < 1.0 {
            (1.0 - share.powf(terms)) / (1.0 - share)
        } else {
            terms
        };
        Duration::try_from_secs_f64(first * sum).ok()
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A guest on a link, without threads and clocks.
    struct World {
        /// All pages, and those that the guest writes: a hot set.
        pages: u64,
        hot: u64,
        /// Pages a second.
        dirties: f64,
        /// The round trip in seconds.
        round_trip: f64,
    }

    impl World {
        /// Sends passes over links of these rates (pages a second). Returns the outlook of each, up
        /// to the first that ends pre-copy.
        fn run(&self, links: impl IntoIterator<Item = f64>) -> Vec<Outlook> {
            let mut convergence = Convergence::default();
            let mut left = self.pages;
            let mut all = Vec::new();
            for link in links {
                let took = left as f64 / link + self.round_trip;
                let dirtied = (self.dirties * took).min(self.hot as f64) as u64;
                let outlook = convergence.pass_ended(&PassEnd {
                    pages: left,
                    bytes: left * PAGE_SIZE,
                    took: Duration::from_secs_f64(took),
                    left: dirtied,
                    round_trip: Duration::from_secs_f64(self.round_trip),
                });
                left = dirtied;
                all.push(outlook);
                if outlook != Outlook::Open {
                    break;
                }
            }
            all
        }
    }

    fn mib(rate: f64) -> f64 {
        rate * 256.0
    }

    proptest! {
        #[test]
        fn half_the_rate_converges(
            pages in 10_000u64..4_000_000,
            link in 1.0f64..2000.0,
            share in 0.01f64..0.5,
            hot in 0.05f64..1.0,
            round_trip in 0.0f64..0.2,
            noise in prop::collection::vec(0.85f64..1.15, 64),
        ) {
            let link = mib(link);
            let hot = (pages as f64 * hot) as u64;
            let world = World { pages, hot, dirties: link * share, round_trip };
            let seen = world.run(noise.iter().map(|noise| link * noise));
            prop_assert_eq!(seen.last(), Some(&Outlook::Little), "{:?}", seen);
        }

        /// The drop lasts for one pass, anywhere, and is as deep as it likes.
        #[test]
        fn a_link_that_drops_for_one_pass_does_not_decide(
            pages in 100_000u64..1_000_000,
            link in 50.0f64..500.0,
            share in 0.05f64..0.5,
            at in 0usize..6,
            depth in 0.02f64..0.9,
        ) {
            let link = mib(link);
            let world = World { pages, hot: pages, dirties: link * share, round_trip: 1e-4 };
            let links = (0..64).map(|pass| if pass == at { link * depth } else { link });
            let seen = world.run(links);
            prop_assert_eq!(seen.last(), Some(&Outlook::Little), "{:?}", seen);
        }

        #[test]
        fn twice_the_rate_is_found_within_three_passes(
            pages in 100_000u64..4_000_000,
            link in 1.0f64..2000.0,
            more in 2.0f64..50.0,
            hot in 0.3f64..1.0,
            round_trip in 0.0f64..0.05,
            noise in prop::collection::vec(0.85f64..1.15, 64),
        ) {
            let link = mib(link);
            let hot = (pages as f64 * hot) as u64;
            // Two round trips of the link are little: they must be less than the hot set.
            prop_assume!(hot as f64 > link * 1.15 * (0.03 + 2.0 * round_trip));
            let world = World { pages, hot, dirties: link * more, round_trip };
            let seen = world.run(noise.iter().map(|noise| link * noise));
            prop_assert_eq!(seen.last(), Some(&Outlook::Vain), "{:?}", seen);
            prop_assert!(seen.len() <= 3 && seen.len() >= 2, "{:?}", seen);
        }

        /// Pre-copy always ends, and no first pass is called vain.
        #[test]
        fn passes_end(
            passes in prop::collection::vec((1u64..1_000_000, 0u64..1_000_000, 1u64..10_000), 100),
        ) {
            let mut convergence = Convergence::default();
            let mut ended = None;
            for (at, (pages, left, ms)) in passes.into_iter().enumerate() {
                let outlook = convergence.pass_ended(&PassEnd {
                    pages,
                    bytes: pages * PAGE_SIZE,
                    took: Duration::from_millis(ms),
                    left,
                    round_trip: Duration::ZERO,
                });
                prop_assert!(at > 0 || outlook != Outlook::Vain);
                if outlook != Outlook::Open {
                    ended = Some(at);
                    break;
                }
            }
            prop_assert!(ended.is_some());
        }
    }

    #[test]
    fn a_slow_link_that_stays_slow_decides() {
        let world = World {
            pages: 1_000_000,
            hot: 1_000_000,
            dirties: 20_000.0,
            round_trip: 0.0,
        };
        let links = [50_000.0, 50_000.0].into_iter();
        let seen = world.run(links.chain(std::iter::repeat_n(5_000.0, 9)));
        assert_eq!(seen.last(), Some(&Outlook::Vain), "{seen:?}");
        // Twice in vain before, once for the drop itself, and then two passes.
        assert_eq!(seen.len(), 5, "{seen:?}");
    }

    #[test]
    fn a_remainder_that_goes_up_and_down_does_not_go_on_for_ever() {
        let mut convergence = Convergence::default();
        let ends = (0..).map(|at| (20_000 << (at % 2), 20_000 << ((at + 1) % 2)));
        let passes = ends.take_while(|&(pages, left)| {
            let outlook = convergence.pass_ended(&PassEnd {
                pages,
                bytes: pages * PAGE_SIZE,
                took: Duration::from_secs(1),
                left,
                round_trip: Duration::ZERO,
            });
            outlook == Outlook::Open
        });
        assert!(passes.count() <= PATIENCE as usize);
    }

    #[test]
    fn zero_pages_say_nothing_about_the_link() {
        let mut convergence = Convergence::default();
        let mut pass = PassEnd {
            pages: 1_000_000,
            bytes: 0,
            took: Duration::from_secs(1),
            left: 100_000,
            round_trip: Duration::ZERO,
        };
        assert_eq!(convergence.pass_ended(&pass), Outlook::Open);
        assert_eq!(convergence.link_rate, None);
        assert_eq!(convergence.time_left(100_000, None), None);
        pass.bytes = 256 << 20;
        convergence.pass_ended(&pass);
        assert_eq!(convergence.link_rate, Some(256 << 20));
    }

    #[test]
    fn the_time_left_sums_the_passes() {
        let halves = Convergence {
            dirty_rate: Some(50 << 20),
            link_rate: Some(100 << 20),
            ..Convergence::default()
        };
        // 100 MiB are left: 1 s, 0.5 s and so on.
        let seconds = |passes| halves.time_left(25_600, passes).unwrap().as_secs_f64();
        for (passes, expected) in [(None, 2.0), (Some(0), 1.0), (Some(1), 1.5), (Some(2), 1.75)] {
            let got = seconds(passes);
            assert!((got - expected).abs() < 1e-6, "{passes:?}: {got}");
        }
        let doubles = Convergence {
            dirty_rate: Some(200 << 20),
            ..halves
        };
        let all = doubles.time_left(25_600, Some(1)).unwrap();
        assert_eq!(all, Duration::from_secs(2));
    }
}
