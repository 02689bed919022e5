//! Which pages vCPUs will probably touch next, guessed from the pages that they request.
//!
//! **Guarantee.** Prefetch changes the order of the background push and nothing else. It never
//! sends a page that the push would not send, and never delays an answer: the thread of an urgent
//! channel only puts the page into a queue.
//!
//! **Mechanism.** A *cursor* follows one sequence of touches: the last requested page, the distance
//! between pages, and how far the push has gone ahead. A request belongs to the cursor whose
//! sequence it continues, so no request has to name its vCPU. Some fault deliveries do not know it,
//! and a guest moves its threads between vCPUs.
//!
//! | the request | what the cursor does |
//! |---|---|
//! | continues a sequence behind the pages that were pushed ahead | goes [`GROWTH`] times further ahead |
//! | lies near the last page of a cursor, or as far from it as that from the one before | takes this distance as the new stride |
//! | is new | begins a cursor in place of the one that was used least recently |
//!
//! A new cursor pushes the pages behind the requested one: its neighbourhood. A guest that runs
//! into the pages that were pushed ahead requests none of them. So a request behind them confirms
//! that the guest went through them.
//!
//! **Neighbours.** `urgent` reports requests, and `bulk` asks which pages to push.

#[cfg(all(test, not(shuttle)))]
mod tests;

use crate::report::PrefetchCounts;
use crate::sync::Mutex;
use crate::sync::mpsc::{Receiver, SyncSender, sync_channel};
use pageferry_addr::RamPage;
use std::sync::PoisonError;

/// The pages that a new cursor, or one with a new stride, pushes ahead.
const FIRST_AHEAD: u64 = 8;
/// The factor by which a confirmed cursor goes further ahead.
const GROWTH: u64 = 4;
/// The most pages that a cursor goes ahead.
const MOST_AHEAD: u64 = 1 << 20;
/// The distance from the last page, in pages, within which a request belongs to a cursor: 2 MiB.
const NEAR: u64 = 512;
/// Pages behind those that were pushed ahead, which a guest may pass since they came otherwise.
const SLACK: u64 = 64;
/// The numbers of cursors.
const CURSORS: std::ops::RangeInclusive<usize> = 4..=256;
/// The most requests that no call has looked at. While nothing is pushed, none looks at any.
const MAX_REQUESTS: usize = 1024;
/// The pages that one call looks at.
const LOOK: u64 = 512;

/// The cursors of a migration, and the requests that they have not seen.
#[derive(Debug)]
pub(super) struct Prefetch {
    requests: SyncSender<RamPage>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    requests: Receiver<RamPage>,
    cursors: Cursors,
}

impl Prefetch {
    /// Returns a prefetch for a guest with this number of vCPUs.
    pub(super) fn new(vcpus: usize) -> Self {
        let (requests, queue) = sync_channel(MAX_REQUESTS);
        Self {
            requests,
            state: Mutex::new(State {
                requests: queue,
                cursors: Cursors::new(vcpus),
            }),
        }
    }

    /// Notes a request, without waiting.
    pub(super) fn requested(&self, page: RamPage) {
        // The receiver lives as long as this. A queue that is full has enough to guess from.
        let _ = self.requests.try_send(page);
    }

    /// Puts at most `most` pages to push into `out`, in ascending order. There are none if no guest
    /// seems to need any. `is_unsent` says which pages are left.
    pub(super) fn take(
        &self,
        most: usize,
        pages: u64,
        is_unsent: impl Fn(RamPage) -> bool,
        out: &mut Vec<RamPage>,
    ) {
        let state = &mut *self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while let Ok(page) = state.requests.try_recv() {
            state.cursors.requested(page, pages, &is_unsent);
        }
        state.cursors.take(most, pages, &is_unsent, out);
        out.sort_unstable();
    }

    /// The counts, without [`PrefetchCounts::late`].
    pub(super) fn counts(&self) -> PrefetchCounts {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.cursors.counts()
    }
}

/// A sequence of touches.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    /// The page that was requested last.
    last: u64,
    /// The distance of successive pages, never 0.
    stride: i64,
    /// The distance of the last two requested pages.
    distance: i64,
    /// The pages behind `last` that the cursor has gone ahead, and how far it may go.
    ahead: u64,
    limit: u64,
    /// Those of them that were pushed for this cursor.
    pushed: u64,
    /// The time of the last request.
    used: u64,
}

impl Cursor {
    const fn new(page: u64, used: u64) -> Self {
        Self {
            last: page,
            stride: 1,
            distance: 0,
            ahead: 0,
            limit: FIRST_AHEAD,
            pushed: 0,
            used,
        }
    }

    const fn with_stride(page: u64, used: u64, stride: i64) -> Self {
        Self {
            stride,
            distance: stride,
            ..Self::new(page, used)
        }
    }

    /// The number of strides from the last page to `page`, if it is on the way.
    fn steps(&self, page: u64) -> Option<u64> {
        let distance = page.wrapping_sub(self.last).cast_signed();
        let steps = distance / self.stride;
        (distance % self.stride == 0 && steps > 0).then_some(steps.cast_unsigned())
    }

    /// The page that is this number of strides away. `None` outside of memory.
    fn at(&self, steps: u64, pages: u64) -> Option<RamPage> {
        let strides = self.stride.checked_mul(i64::try_from(steps).ok()?)?;
        let page = self.last.checked_add_signed(strides)?;
        (page < pages).then_some(RamPage(page))
    }

    /// As [`Self::steps`], if a guest that follows the sequence comes to `page` without a request
    /// on the way.
    fn leads_to(&self, page: u64, pages: u64, is_unsent: &impl Fn(RamPage) -> bool) -> Option<u64> {
        let steps = self.steps(page)?;
        let passes = |steps| self.at(steps, pages).is_some_and(|page| !is_unsent(page));
        (steps <= self.ahead + SLACK && (self.ahead + 1..steps).all(passes)).then_some(steps)
    }
}

/// All cursors.
#[derive(Debug)]
struct Cursors {
    cursors: Vec<Cursor>,
    most: usize,
    /// The cursor that is next in turn.
    turn: usize,
    clock: u64,
    in_time: u64,
    /// Pages that were pushed for cursors that are gone, or changed their mind.
    unconfirmed: u64,
}

impl Cursors {
    fn new(vcpus: usize) -> Self {
        Self {
            cursors: Vec::new(),
            // A vCPU's code may read one sequence and write another.
            most: vcpus
                .saturating_mul(2)
                .clamp(*CURSORS.start(), *CURSORS.end()),
            turn: 0,
            clock: 0,
            in_time: 0,
            unconfirmed: 0,
        }
    }

    fn requested(&mut self, page: RamPage, pages: u64, is_unsent: &impl Fn(RamPage) -> bool) {
        let page = page.0;
        self.clock += 1;
        let clock = self.clock;
        let mut cursors = self.cursors.iter_mut();
        let on_track = cursors.find_map(|cursor| {
            let steps = cursor.leads_to(page, pages, is_unsent)?;
            Some((cursor, steps))
        });
        if let Some((cursor, steps)) = on_track {
            let passed = (steps - 1).min(cursor.pushed);
            self.in_time += passed;
            cursor.pushed -= passed;
            let distance = page.wrapping_sub(cursor.last).cast_signed();
            if distance == cursor.distance && distance != cursor.stride {
                // The guest skips pages, and is faster than a push of all.
                self.unconfirmed += cursor.pushed;
                *cursor = Cursor::with_stride(page, clock, distance);
                return;
            }
            // A request for a page that was pushed ahead came too early for it.
            if steps > cursor.ahead {
                cursor.limit = (cursor.limit * GROWTH).min(MOST_AHEAD);
            }
            cursor.distance = distance;
            cursor.last = page;
            cursor.ahead = cursor.ahead.saturating_sub(steps);
            cursor.used = clock;
            return;
        }
        let near = self
            .cursors
            .iter_mut()
            .filter(|cursor| cursor.last.abs_diff(page) <= NEAR)
            .min_by_key(|cursor| cursor.last.abs_diff(page));
        if let Some(cursor) = near {
            let stride = page.wrapping_sub(cursor.last).cast_signed();
            if stride != 0 {
                self.unconfirmed += cursor.pushed;
                *cursor = Cursor::with_stride(page, clock, stride);
            }
            cursor.used = clock;
            return;
        }
        let new = Cursor::new(page, clock);
        if self.cursors.len() < self.most {
            return self.cursors.push(new);
        }
        let oldest = self.cursors.iter_mut().min_by_key(|cursor| cursor.used);
        let oldest = oldest.expect("there are some");
        self.unconfirmed += oldest.pushed;
        *oldest = new;
    }

    /// Puts pages to push into `out`. The cursors take turns. Each call serves one of them, or more
    /// if it has little left.
    fn take(
        &mut self,
        most: usize,
        pages: u64,
        is_unsent: &impl Fn(RamPage) -> bool,
        out: &mut Vec<RamPage>,
    ) {
        out.clear();
        let mut look = LOOK;
        for _ in 0..self.cursors.len() {
            self.turn = (self.turn + 1) % self.cursors.len();
            let cursor = &mut self.cursors[self.turn];
            while out.len() < most && cursor.ahead < cursor.limit && look > 0 {
                look -= 1;
                let Some(page) = cursor.at(cursor.ahead + 1, pages) else {
                    cursor.limit = cursor.ahead;
                    break;
                };
                cursor.ahead += 1;
                if is_unsent(page) && !out.contains(&page) {
                    cursor.pushed += 1;
                    out.push(page);
                }
            }
            if out.len() == most || look == 0 {
                return;
            }
        }
    }

    fn counts(&self) -> PrefetchCounts {
        let open: u64 = self.cursors.iter().map(|cursor| cursor.pushed).sum();
        PrefetchCounts {
            in_time: self.in_time,
            unconfirmed: self.unconfirmed + open,
            late: 0,
        }
    }
}
