//! A sample of a recording, which tells how much of a replay was of use.
//!
//! **Guarantee.** No read is added: the replay keeps the bytes of the sample, at most [`MOST`]
//! pages, and a touch of one costs what a page at hand costs.
//!
//! **Mechanism.** A touch of a page that is there cannot be seen from outside the VM. So the replay
//! leaves one page in [`EVERY`] out, in the order of the recording. The share of them that the VM
//! touches is an estimate for all. A page of the sample that came otherwise, such as beside a
//! touched one, says nothing and does not count.

use crate::vm::locked;
use std::collections::HashMap;
use std::sync::Mutex;

/// One page in so many is left out.
const EVERY: usize = 64;
/// The most pages of a sample, which bounds the kept bytes to 4 MiB.
const MOST: usize = 1024;

/// The pages that a replay left out.
#[derive(Debug, Default)]
pub(crate) struct Sample(Mutex<HashMap<u64, Page>>);

#[derive(Debug)]
enum Page {
    /// The replay has not read it yet.
    Unread,
    Kept(Box<[u8]>),
    Touched,
}

impl Sample {
    /// Chooses from the pages of a recording in their order.
    pub(crate) fn choose(&self, pages: impl Iterator<Item = u64>) {
        let chosen = pages.skip(EVERY / 2).step_by(EVERY).take(MOST);
        *locked(&self.0) = chosen.map(|page| (page, Page::Unread)).collect();
    }

    /// Keeps the bytes of a page that belongs to it. Returns whether it does, and then the page
    /// must not be placed.
    pub(crate) fn keep(&self, page: u64, bytes: &[u8]) -> bool {
        match locked(&self.0).get_mut(&page) {
            Some(state @ Page::Unread) => {
                *state = Page::Kept(bytes.into());
                true
            }
            Some(Page::Kept(_) | Page::Touched) => true,
            None => false,
        }
    }

    /// The bytes of a page, if they were kept.
    pub(crate) fn bytes(&self, page: u64, buffer: &mut Vec<u8>) -> bool {
        let pages = locked(&self.0);
        let Some(Page::Kept(bytes)) = pages.get(&page) else {
            return false;
        };
        buffer.clear();
        buffer.extend_from_slice(bytes);
        true
    }

    /// A page was touched. Its bytes are not needed again.
    pub(crate) fn touched(&self, page: u64) {
        if let Some(state) = locked(&self.0).get_mut(&page) {
            *state = Page::Touched;
        }
    }

    /// The pages that say something, and how many of them were touched.
    pub(crate) fn counts(&self, is_missing: impl Fn(u64) -> bool) -> (u64, u64) {
        let pages = locked(&self.0);
        let touched = |page: &Page| matches!(page, Page::Touched);
        let told = |(page, state): &(&u64, &Page)| touched(state) || is_missing(**page);
        let both = pages.iter().filter(told);
        let (mut all, mut used) = (0, 0);
        for (_, state) in both {
            all += 1;
            used += u64::from(touched(state));
        }
        (all, used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_touched_pages_counts_those_that_tell() {
        let sample = Sample::default();
        sample.choose(1000..2000);
        let chosen: Vec<u64> = (1032..2000).step_by(64).collect();
        assert!(!sample.keep(1000, &[1]) && sample.keep(chosen[0], &[7]));
        let mut buffer = Vec::new();
        assert!(sample.bytes(chosen[0], &mut buffer) && buffer == [7]);
        assert!(!sample.bytes(chosen[1], &mut buffer), "it was not read");
        sample.touched(chosen[0]);
        sample.touched(chosen[0]);
        sample.touched(1000);
        assert!(sample.keep(chosen[0], &[7]), "it stays out");
        let all = chosen.len() as u64;
        assert_eq!(sample.counts(|_| true), (all, 1));
        assert_eq!(sample.counts(|page| page != chosen[1]), (all - 1, 1));
        assert_eq!(sample.counts(|_| false), (1, 1));
    }

    #[test]
    fn a_sample_is_bounded() {
        let sample = Sample::default();
        sample.choose(0..1 << 20);
        assert_eq!(sample.counts(|_| true), (MOST as u64, 0));
    }
}
