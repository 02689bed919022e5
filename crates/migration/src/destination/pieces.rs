//! Requests for the pieces of huge pages.
//!
//! **Guarantee.** A touch of a huge page that waits for pieces has all of them requested, in order
//! and without gaps. At most [`WINDOW`] of a fault thread's requests are unanswered, so the
//! socket's buffer always has room.
//!
//! **Mechanism.** The host maps a page of a pool only whole (`Machine::install`), so one missing
//! piece of 4 KiB stops its vCPUs. Each fault thread keeps the huge pages of its events. It
//! requests the pieces of the oldest, and goes on as pieces arrive on either connection.

use super::core::Core;
use crate::error::MigrationError;
use pageferry_addr::RamPage;
use pageferry_userfault::Claim;
use std::collections::VecDeque;
use std::ops::Range;

/// The most requests that are unanswered: 256 KiB of pages, 1 KiB of requests.
const WINDOW: usize = 64;

/// The huge pages that vCPUs wait for.
#[derive(Default)]
pub(super) struct Pieces {
    /// The pieces that are not requested yet, a range for each huge page.
    rest: VecDeque<Range<usize>>,
    unanswered: Vec<RamPage>,
}

impl Pieces {
    /// Adds the huge page of the pieces `page`. It may be there already.
    pub(super) fn add(&mut self, page: Range<usize>) {
        if self.rest.iter().all(|rest| rest.end != page.end) {
            self.rest.push_back(page);
        }
    }

    /// Requests as many pieces as the window allows. Returns whether a piece has arrived or was
    /// requested.
    pub(super) fn advance(&mut self, core: &Core) -> Result<bool, MigrationError> {
        let before = self.unanswered.len();
        self.unanswered
            .retain(|page| core.pages.states.is_missing(*page));
        let mut busy = self.unanswered.len() < before;
        while self.unanswered.len() < WINDOW
            && let Some(rest) = self.rest.front_mut()
        {
            let next = core.pages.states.missing().next_set(rest.start);
            let Some(next) = next.filter(|next| *next < rest.end) else {
                self.rest.pop_front();
                continue;
            };
            rest.start = next + 1;
            let page = RamPage(next as u64);
            if core.pages.states.claim(page) == Claim::Mine {
                core.request(page, page.index());
                self.unanswered.push(page);
                busy = true;
            }
        }
        Ok(busy)
    }
}
