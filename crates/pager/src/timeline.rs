//! When the pages of a VM came, and how: for a chart.
//!
//! **Guarantee.** It has at most [`MOST`] moments, however long a VM lives.
//!
//! **Mechanism.** All moments have the same length. When there are too many, each two become one.

use crate::vm::locked;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The most moments.
const MOST: usize = 512;
/// The length of a moment at first.
const FIRST: Duration = Duration::from_millis(1);

/// How a page came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Came {
    /// A fault, answered by zeros without a read.
    Zero = 0,
    /// A fault whose bytes were at hand.
    AtHand = 1,
    /// A fault that waited for the source.
    Read = 2,
    /// A recording brought it.
    Replayed = 3,
    /// It was loaded in the background.
    Background = 4,
}

impl Came {
    /// All kinds.
    pub const ALL: [Self; 5] = [
        Self::Zero,
        Self::AtHand,
        Self::Read,
        Self::Replayed,
        Self::Background,
    ];

    /// The name for people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Zero => "zero faults",
            Self::AtHand => "faults at hand",
            Self::Read => "faults that read",
            Self::Replayed => "replayed pages",
            Self::Background => "background pages",
        }
    }
}

/// The pages of a VM over time, since it is served by this pager.
#[derive(Debug)]
pub struct Timeline {
    began: Instant,
    moments: Mutex<Moments>,
}

#[derive(Clone, Debug)]
struct Moments {
    length: Duration,
    counts: Vec<[u64; 5]>,
}

impl Timeline {
    pub(crate) fn new() -> Self {
        Self {
            began: Instant::now(),
            moments: Mutex::new(Moments {
                length: FIRST,
                counts: Vec::new(),
            }),
        }
    }

    pub(crate) fn add(&self, came: Came, pages: u64) {
        self.add_at(self.began.elapsed(), came, pages);
    }

    fn add_at(&self, at: Duration, came: Came, pages: u64) {
        let mut moments = locked(&self.moments);
        while at.as_nanos() / moments.length.as_nanos() >= MOST as u128 {
            moments.length *= 2;
            let pairs = moments.counts.chunks(2);
            let sum = |pair: &[[u64; 5]]| {
                std::array::from_fn(|kind| pair.iter().map(|moment| moment[kind]).sum())
            };
            moments.counts = pairs.map(sum).collect();
        }
        let index = (at.as_nanos() / moments.length.as_nanos()) as usize;
        if moments.counts.len() <= index {
            moments.counts.resize(index + 1, [0; 5]);
        }
        moments.counts[index][came as usize] += pages;
    }

    /// The length of a moment, and for each moment from the beginning on the pages of each kind, in
    /// the order of [`Came::ALL`]. Moments without a page at the end are left out.
    #[must_use]
    pub fn moments(&self) -> (Duration, Vec<[u64; 5]>) {
        let moments = locked(&self.moments).clone();
        (moments.length, moments.counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_page_is_lost_and_moments_are_bounded(
            pages in prop::collection::vec((0..200_000_u64, 0..5_usize, 1..9_u64), 0..100),
        ) {
            let timeline = Timeline::new();
            let mut sums = [0; 5];
            for (at_ms, kind, count) in &pages {
                timeline.add_at(Duration::from_millis(*at_ms), Came::ALL[*kind], *count);
                sums[*kind] += count;
            }
            let (length, moments) = timeline.moments();
            prop_assert!(moments.len() <= MOST);
            let found: [u64; 5] = std::array::from_fn(|kind| moments.iter().map(|m| m[kind]).sum());
            prop_assert_eq!(found, sums);
            let last = pages.iter().map(|(at, ..)| Duration::from_millis(*at)).max();
            let index = last.map(|last| (last.as_nanos() / length.as_nanos()) as usize);
            prop_assert_eq!(moments.len(), index.map_or(0, |index| index + 1));
        }
    }
}
