//! The state of each page at the source: unsent, in flight, or acknowledged.
//!
//! **Guarantee.** A page is in flight on at most one channel. So an older content of a page never
//! arrives behind a newer one. A page counts as acknowledged only by a receipt of its last sending,
//! or because a peer that lost its channels does not call it missing. A page that is neither unsent
//! nor in flight is acknowledged.
//!
//! **Mechanism.** Two bits a page, in two bitmaps. A page that the guest writes while it is in
//! flight has both bits: its newer content waits for the receipt of the older one.
//!
//! | unsent | in flight | the page is |
//! |---|---|---|
//! | 0 | 0 | acknowledged |
//! | 1 | 0 | unsent |
//! | 0 | 1 | claimed by a thread, or in a message without a receipt |
//! | 1 | 1 | in flight, and changed since |
//!
//! Each channel has a queue of its messages without a receipt, under a lock of its own.
//!
//! **Why this is safe.** All changes of bits are read-modify-writes of one word.
//!
//! 1. The in-flight bit is a lock of the page. The thread that sets it owns the page.
//! 2. A claim sets in-flight bits first. Then it takes the unsent bits of the pages that it owns.
//!    It gives up pages that it owns and that were not unsent. So exactly one thread gets a page.
//! 3. The owner hands the page to the queue of a channel ([`Ledger::sent`]). Only a receipt, the
//!    end of the channel, or an adopted missing set clears the bit then.
//! 4. A page that becomes unsent again gets its unsent bit *before* its in-flight bit is cleared.
//!    So no thread sees it acknowledged in between.
//! 5. A receipt takes messages out of the queue under its lock. So each message is released once.
//!
//! A claim can miss a page that becomes unsent while the claim runs. Such a page stays unsent, and
//! the next search finds it.
//!
//! The counts lag behind a call that is still running, with one exception: [`Ledger::in_flight`] is
//! never less than the number of claimed pages and those in queues. Its operations are sequentially
//! consistent. A thread that claims and then reads a mode, and one that writes the mode and then
//! finds nothing in flight, cannot miss each other.
//!
//! **Neighbours.** The threads of `source/` claim pages and take receipts. The supervisor adds the
//! dirty pages, and ends channels.

mod queue;
#[cfg(all(test, not(shuttle)))]
mod tests;

#[cfg(all(test, shuttle))]
mod model;

pub use queue::ReceiptError;

use crate::sync::{AtomicBool, AtomicI64, AtomicU64, Mutex, MutexGuard, Ordering};
use core::ops::Range;
use pageferry_addr::RamPage;
use pageferry_userfault::{OutOfMemory, PageBitmap};
use queue::Queue;
use std::sync::PoisonError;

/// Pages of a word of a bitmap.
const BITS: usize = u64::BITS as usize;

/// A peer calls a page missing whose receipt it has sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("page {page} was acknowledged by a receipt")]
#[non_exhaustive]
pub struct TakesBack {
    /// The first such page.
    pub page: RamPage,
}

/// The pages that a receipt has released.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Released {
    /// The pages that are in flight no more.
    pub(crate) pages: u64,
    /// Those of them that are unsent, because the guest has written them since. No thread could
    /// claim them before. So threads that wait for unsent pages have to be woken.
    pub(crate) unsent: u64,
}

/// The state of every page of a VM, and the messages without a receipt.
pub(crate) struct Ledger {
    unsent: PageBitmap,
    in_flight: PageBitmap,
    /// Set bits of `unsent`.
    unsent_count: AtomicI64,
    /// Set bits of `in_flight`, and those that a running claim may set.
    in_flight_count: AtomicI64,
    /// Set bits of both. A count of its own, since a page may move while a thread adds two counts.
    unacknowledged: AtomicI64,
    /// The bytes of the pages that the destination has acknowledged, each as often as it was sent.
    /// A figure for people: nothing is decided by it, so its order does not matter.
    acknowledged_bytes: AtomicU64,
    queues: Box<[Mutex<Queue>]>,
    closed: AtomicBool,
}

impl Ledger {
    /// Returns the ledger of `pages` pages and `channels` channels. All pages are acknowledged.
    ///
    /// # Errors
    /// If there is no memory for the bitmaps.
    pub(crate) fn try_new(pages: usize, channels: usize) -> Result<Self, OutOfMemory> {
        Ok(Self {
            unsent: PageBitmap::try_new(pages)?,
            in_flight: PageBitmap::try_new(pages)?,
            unsent_count: AtomicI64::new(0),
            in_flight_count: AtomicI64::new(0),
            unacknowledged: AtomicI64::new(0),
            acknowledged_bytes: AtomicU64::new(0),
            queues: (0..channels).map(|_| Mutex::default()).collect(),
            closed: AtomicBool::new(false),
        })
    }

    /// Sets whether threads of channels may claim pages. A claim counts as in flight before it
    /// looks whether it may. So once the ledger is closed and nothing is in flight, the unsent
    /// pages are all that is missing. Only the caller changes them.
    pub(crate) fn set_closed(&self, closed: bool) {
        self.closed.store(closed, Ordering::SeqCst);
    }

    /// The unsent pages, for searches. Only the ledger changes the bits: it counts them.
    pub(crate) fn unsent(&self) -> &PageBitmap {
        &self.unsent
    }

    /// Makes pages unsent. Those in flight have to be sent again.
    pub(crate) fn set_unsent(&self, pages: Range<usize>) {
        self.note_unsent(self.unsent.set_range(pages));
    }

    /// Moves the pages of `dirty` to the unsent pages, and leaves `dirty` empty. Calls `newly` with
    /// those that were not unsent, in ascending runs of at most 64 pages.
    ///
    /// A dirty log must not be harvested straight into [`Self::unsent`]. A harvest finds a page
    /// first, and logs its writes again a little later. A thread that copied the page in between
    /// would miss a write.
    pub(crate) fn add_dirty(&self, dirty: &PageBitmap, mut newly: impl FnMut(Range<usize>)) {
        let mut count = 0;
        let mut at = 0;
        while let Some(page) = dirty.next_set(at) {
            let word = page / BITS;
            let mut new = self.unsent.or_word(word, dirty.take_word(word, u64::MAX));
            count += new.count_ones() as usize;
            while new != 0 {
                let (stretch, end) = first_stretch(new);
                new &= !stretch;
                let base = word * BITS;
                newly(base + stretch.trailing_zeros() as usize..base + end);
            }
            at = (word + 1) * BITS;
        }
        self.note_unsent(count);
    }

    /// Claims one page. Returns whether the caller has to send it.
    pub(crate) fn claim(&self, page: RamPage) -> bool {
        self.claim_one(page, self.may_claim())
    }

    /// As [`Self::claim`], for the thread that has closed the ledger.
    pub(crate) fn claim_closed(&self, page: RamPage) -> bool {
        self.claim_one(page, || true)
    }

    fn claim_one(&self, page: RamPage, may: impl Fn() -> bool) -> bool {
        let bit = 1 << (page.index() % BITS);
        self.unsent.test(page) && self.claim_bits(page.index() / BITS, bit, may) != 0
    }

    /// Whether a thread of a channel may claim.
    fn may_claim(&self) -> impl Fn() -> bool {
        move || !self.closed.load(Ordering::SeqCst)
    }

    /// Claims unsent pages that follow each other, at most `limit` (0 counts as 1). They are the
    /// first such pages at or behind `cursor`. Returns `None` if there are none: unsent pages that
    /// are in flight cannot be claimed.
    pub(crate) fn claim_run(&self, cursor: usize, limit: usize) -> Option<Range<usize>> {
        let mut at = cursor;
        loop {
            let run = self.unsent.next_run(at, limit)?;
            match self.claim_first_of(run) {
                Ok(claimed) => return Some(claimed),
                Err(next) => at = next,
            }
        }
    }

    /// Claims the first pages of `run` that it can get. Returns the page behind `run` if it gets
    /// none.
    fn claim_first_of(&self, run: Range<usize>) -> Result<Range<usize>, usize> {
        let mut claimed: Option<Range<usize>> = None;
        let mut at = run.start;
        while at < run.end {
            let (word, mask) = masks(at..run.end).next().expect("not empty");
            let base = word * BITS;
            let (stretch, end) = first_stretch(mask & !self.in_flight.word(word));
            let got = self.claim_bits(word, stretch, self.may_claim());
            let (kept, kept_end) = first_stretch(got);
            self.unclaim_bits(word, got & !kept);
            if kept == 0 {
                if claimed.is_some() {
                    break;
                }
                at = if end == 0 { base + BITS } else { base + end };
                continue;
            }
            let first = base + kept.trailing_zeros() as usize;
            match &mut claimed {
                None => claimed = Some(first..base + kept_end),
                Some(claimed) if claimed.end == first => claimed.end = base + kept_end,
                Some(_) => {
                    self.unclaim_bits(word, kept);
                    break;
                }
            }
            if kept_end < BITS {
                break;
            }
            at = base + BITS;
        }
        claimed.ok_or(run.end)
    }

    /// Gives claimed pages back, which are in no message. They are unsent again.
    pub(crate) fn unclaim(&self, pages: Range<usize>) {
        for (word, mask) in masks(pages) {
            self.unclaim_bits(word, mask);
        }
    }

    /// Acknowledges claimed pages that are in no message: the destination has their bytes. Returns
    /// their number.
    pub(crate) fn acknowledge(&self, pages: Range<usize>) -> usize {
        let count = pages.len();
        for (word, mask) in masks(pages) {
            self.in_flight.take_word(word, mask);
        }
        self.in_flight_count
            .fetch_sub(count as i64, Ordering::SeqCst);
        self.unacknowledged
            .fetch_sub(count as i64, Ordering::SeqCst);
        count
    }

    /// The number of messages of `channel` without a receipt.
    pub(crate) fn without_receipt(&self, channel: usize) -> usize {
        self.queue(channel).len()
    }

    /// Notes that the next message of `channel` has these pages, which the caller has claimed, and
    /// so many bytes of them: a zero page has none. The caller writes the message afterwards: its
    /// receipt may come before the write returns.
    ///
    /// # Panics
    /// If there is no such channel. So do all calls that take one.
    pub(crate) fn sent(
        &self,
        channel: usize,
        runs: impl IntoIterator<Item = Range<usize>>,
        bytes: u64,
    ) {
        self.queue(channel).push(runs, bytes);
    }

    /// Takes a receipt: the pages of the first `upto` messages of `channel` are in place.
    ///
    /// # Errors
    /// [`ReceiptError`] for fewer messages than an earlier receipt, or more than were sent. Nothing
    /// has changed then.
    pub(crate) fn receipt(&self, channel: usize, upto: u64) -> Result<Released, ReceiptError> {
        let mut queue = self.queue(channel);
        queue.check(upto)?;
        Ok(self.release(&mut queue, upto))
    }

    /// Ends the numbering of a channel that has ended at both sides. The pages of its first
    /// `placed` messages are in place. The others are unsent again. Returns the number of the
    /// others.
    ///
    /// No thread may call [`Self::sent`] for the ended channel from then on.
    ///
    /// # Errors
    /// As [`Self::receipt`].
    pub(crate) fn reclaim(&self, channel: usize, placed: u64) -> Result<u64, ReceiptError> {
        let mut queue = self.queue(channel);
        queue.check(placed)?;
        self.release(&mut queue, placed);
        let mut pages = 0;
        queue.take_all(|run| {
            pages += run.len() as u64;
            self.unclaim(run);
        });
        *queue = Queue::default();
        Ok(pages)
    }

    /// Forgets all messages: their channels have ended at both sides. The unsent pages are now the
    /// `missing` ones, and all others are acknowledged.
    ///
    /// The guest must have stopped for good. No thread may hold a claim, or change the ledger
    /// meanwhile.
    ///
    /// # Errors
    /// [`TakesBack`] if a missing page was acknowledged. Nothing has changed then.
    ///
    /// # Panics
    /// If a page lies behind the last one.
    pub(crate) fn adopt_missing(
        &self,
        missing: impl Iterator<Item = Range<u64>> + Clone,
    ) -> Result<(), TakesBack> {
        let mut queues: Vec<_> = (0..self.queues.len()).map(|at| self.queue(at)).collect();
        let runs = missing.map(|run| run.start as usize..run.end as usize);
        for (word, mask) in runs.clone().flat_map(masks) {
            let acknowledged = mask & !self.unsent.word(word) & !self.in_flight.word(word);
            if acknowledged != 0 {
                let index = word * BITS + acknowledged.trailing_zeros() as usize;
                let page = RamPage(index as u64);
                return Err(TakesBack { page });
            }
        }
        clear_all(&self.in_flight);
        clear_all(&self.unsent);
        let count: usize = runs.map(|run| self.unsent.set_range(run)).sum();
        for queue in &mut queues {
            // A message whose receipt was lost with its channel.
            self.acknowledge_bytes(queue.bytes_of(|run| self.has_none_unsent(run)));
            **queue = Queue::default();
        }
        self.in_flight_count.store(0, Ordering::SeqCst);
        self.unsent_count.store(count as i64, Ordering::SeqCst);
        self.unacknowledged.store(count as i64, Ordering::SeqCst);
        Ok(())
    }

    /// The runs of unsent pages. While nothing is in flight, these are the missing pages.
    pub(crate) fn unsent_runs(&self) -> impl Iterator<Item = Range<u64>> {
        runs(&self.unsent, 0)
    }

    /// The number of unsent pages, with those that are also in flight.
    pub(crate) fn unsent_count(&self) -> u64 {
        at_least_none(self.unsent_count.load(Ordering::SeqCst))
    }

    /// The number of claimed pages and those in messages without a receipt. Never too small.
    pub(crate) fn in_flight(&self) -> u64 {
        at_least_none(self.in_flight_count.load(Ordering::SeqCst))
    }

    /// The number of pages that are not acknowledged. A page that is in flight and changed since
    /// counts twice.
    pub(crate) fn unacknowledged(&self) -> u64 {
        at_least_none(self.unacknowledged.load(Ordering::SeqCst))
    }

    /// The bytes of pages that the destination has acknowledged so far. Bytes that were sent and
    /// got lost do not count.
    pub(crate) fn acknowledged_bytes(&self) -> u64 {
        self.acknowledged_bytes.load(Ordering::Relaxed)
    }

    fn acknowledge_bytes(&self, bytes: u64) {
        self.acknowledged_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn has_none_unsent(&self, run: &Range<usize>) -> bool {
        self.unsent
            .next_run(run.start, 1)
            .is_none_or(|unsent| unsent.start >= run.end)
    }

    fn queue(&self, channel: usize) -> MutexGuard<'_, Queue> {
        let queue = self.queues[channel].lock();
        queue.unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims those of `bits` that are unsent and not in flight, if the caller `may`. Returns them.
    fn claim_bits(&self, word: usize, bits: u64, may: impl Fn() -> bool) -> u64 {
        if bits == 0 {
            return 0;
        }
        let wanted = i64::from(bits.count_ones());
        self.in_flight_count.fetch_add(wanted, Ordering::SeqCst);
        let bits = if may() { bits } else { 0 };
        let owned = self.in_flight.or_word(word, bits);
        let claimed = self.unsent.take_word(word, owned);
        if owned != claimed {
            self.in_flight.take_word(word, owned & !claimed);
        }
        let got = i64::from(claimed.count_ones());
        self.unsent_count.fetch_sub(got, Ordering::SeqCst);
        self.in_flight_count
            .fetch_sub(wanted - got, Ordering::SeqCst);
        claimed
    }

    /// Makes `bits`, which the caller owns, unsent again.
    fn unclaim_bits(&self, word: usize, bits: u64) {
        if bits == 0 {
            return;
        }
        let owned = i64::from(bits.count_ones());
        let newly = i64::from(self.unsent.or_word(word, bits).count_ones());
        self.unsent_count.fetch_add(newly, Ordering::SeqCst);
        self.in_flight.take_word(word, bits);
        self.in_flight_count.fetch_sub(owned, Ordering::SeqCst);
        // Pages that were changed since have counted twice.
        self.unacknowledged
            .fetch_sub(owned - newly, Ordering::SeqCst);
    }

    fn note_unsent(&self, newly: usize) {
        self.unacknowledged
            .fetch_add(newly as i64, Ordering::SeqCst);
        self.unsent_count.fetch_add(newly as i64, Ordering::SeqCst);
    }

    /// Acknowledges the pages of the messages up to `upto`.
    fn release(&self, queue: &mut Queue, upto: u64) -> Released {
        let mut released = Released::default();
        let bytes = queue.take(upto, |run| {
            for (word, mask) in masks(run) {
                self.in_flight.take_word(word, mask);
                released.pages += u64::from(mask.count_ones());
                released.unsent += u64::from((self.unsent.word(word) & mask).count_ones());
            }
        });
        let pages = released.pages as i64;
        self.in_flight_count.fetch_sub(pages, Ordering::SeqCst);
        self.unacknowledged.fetch_sub(pages, Ordering::SeqCst);
        self.acknowledge_bytes(bytes);
        released
    }
}

/// The runs of pages from `at` on whose bits are set.
pub(crate) fn runs(pages: &PageBitmap, mut at: usize) -> impl Iterator<Item = Range<u64>> + Clone {
    core::iter::from_fn(move || {
        let run = pages.next_run(at, usize::MAX)?;
        at = run.end;
        Some(run.start as u64..run.end as u64)
    })
}

/// A count that lags behind may be below zero for a moment.
fn at_least_none(count: i64) -> u64 {
    count.max(0).unsigned_abs()
}

/// The words that have bits of `pages`, each with the mask of these bits.
fn masks(pages: Range<usize>) -> impl Iterator<Item = (usize, u64)> {
    let words = match pages.is_empty() {
        true => 0..0,
        false => pages.start / BITS..pages.end.div_ceil(BITS),
    };
    words.map(move |word| {
        let low = pages.start.max(word * BITS) - word * BITS;
        let high = pages.end.min((word + 1) * BITS) - word * BITS;
        (word, u64::MAX >> (BITS - (high - low)) << low)
    })
}

/// The lowest stretch of set bits, and the position behind it. Of 0: no bits, and 0.
fn first_stretch(bits: u64) -> (u64, usize) {
    if bits == 0 {
        return (0, 0);
    }
    let low = bits.trailing_zeros() as usize;
    let len = (bits >> low).trailing_ones() as usize;
    (u64::MAX >> (BITS - len) << low, low + len)
}

/// Clears all bits. It loads no word of a part that has none.
pub(crate) fn clear_all(bitmap: &PageBitmap) {
    let mut at = 0;
    while let Some(run) = bitmap.next_run(at, usize::MAX) {
        bitmap.clear_range(run.clone());
        at = run.end;
    }
}
