#![cfg_attr(
    pageferry_tsan,
    expect(
        unsafe_code,
        reason = "reads words as one may only if nobody writes them"
    )
)]
//! The memory behind the guest: two banks of frames, between which pages move.
//!
//! All state is relaxed atomics of the standard library, so that none of it provides an ordering
//! that the MMU should provide.

use pageferry_addr::{Gfn, Pfn};
use pageferry_tdp::format::Format;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The guest owns the frame.
const GIVEN: u64 = 1;
/// The host owns the frame.
const TAKEN: u64 = 0;
/// In the map: no frame is behind the page now.
const ABSENT: u64 = u64::MAX;

struct Frame {
    state: AtomicU64,
    /// One for each vCPU.
    words: Vec<AtomicU64>,
}

/// The frames, and the place of each page.
pub(crate) struct Host {
    pages: u64,
    /// The distance from one bank's first frame to the next one's.
    stride: u64,
    /// The bank of each page, or [`ABSENT`].
    map: Vec<AtomicU64>,
    frames: Vec<Vec<Frame>>,
}

/// The first frame of bank 0. No guest frame number equals a host's.
const BASE: u64 = 0x100_0000;

impl Host {
    /// All pages in bank 0. `pages` is a multiple of the largest page in use.
    pub(crate) fn new(pages: u64, vcpus: usize) -> Self {
        let frame = |state: u64| Frame {
            state: AtomicU64::new(state),
            words: (0..vcpus).map(|_| AtomicU64::new(0)).collect(),
        };
        Self {
            pages,
            stride: pages.next_power_of_two(),
            map: (0..pages).map(|_| AtomicU64::new(0)).collect(),
            frames: [GIVEN, TAKEN]
                .map(|state| (0..pages).map(|_| frame(state)).collect())
                .into(),
        }
    }

    pub(crate) const fn pages(&self) -> u64 {
        self.pages
    }

    /// The frame behind a page.
    pub(crate) fn pfn(&self, gfn: u64) -> Option<Pfn> {
        match self.map[gfn as usize].load(Relaxed) {
            ABSENT => None,
            bank => Some(Pfn(BASE + bank * self.stride + gfn)),
        }
    }

    /// The first frame of the page of `level` around `gfn`, if all of it is in one piece.
    pub(crate) fn piece<F: Format>(&self, gfn: u64, level: u32) -> Option<Pfn> {
        let frames = F::frames_per_entry(level);
        let first = gfn & !(frames - 1);
        let pfn = self.pfn(first)?;
        let whole = first + frames <= self.pages
            && (1..frames).all(|i| self.pfn(first + i) == Some(Pfn(pfn.0 + i)));
        whole.then_some(pfn)
    }

    fn frame(&self, pfn: Pfn, gfn: Gfn) -> &Frame {
        let place = pfn.0.checked_sub(BASE);
        let place = place.unwrap_or_else(|| panic!("{pfn:?} is no frame of the guest's"));
        assert_eq!(place % self.stride, gfn.0, "{gfn:?} leads to {pfn:?}");
        &self.frames[(place / self.stride) as usize][gfn.0 as usize]
    }

    /// Returns the word of vCPU number `vcpu`. Before that, it stores `new` there, if given.
    pub(crate) fn access(&self, pfn: Pfn, gfn: Gfn, vcpu: usize, new: Option<u64>) -> u64 {
        let frame = self.frame(pfn, gfn);
        let check = || {
            let state = frame.state.load(Relaxed);
            assert_eq!(state, GIVEN, "{gfn:?}: {pfn:?} is used and was taken away");
        };
        check();
        let word = &frame.words[vcpu];
        if let Some(new) = new {
            word.store(new, Relaxed);
        }
        let found = word.load(Relaxed);
        check();
        found
    }

    /// The words of a page, as a reader of the log may see them at any time.
    pub(crate) fn words(&self, gfn: u64) -> Option<Vec<u64>> {
        let pfn = self.pfn(gfn)?;
        let frame = self.frame(pfn, Gfn(gfn));
        let words = frame.words.iter().map(|w| w.load(Relaxed)).collect();
        (self.pfn(gfn) == Some(pfn)).then_some(words)
    }

    /// The first half of a move: nobody uses the frame any more.
    pub(crate) fn take(&self, gfn: u64) -> u64 {
        let bank = self.map[gfn as usize].swap(ABSENT, Relaxed);
        self.frames[bank as usize][gfn as usize]
            .state
            .store(TAKEN, Relaxed);
        bank
    }

    /// The second half, if the page stays in place.
    pub(crate) fn keep(&self, gfn: u64, bank: u64) {
        self.frames[bank as usize][gfn as usize]
            .state
            .store(GIVEN, Relaxed);
        self.map[gfn as usize].store(bank, Relaxed);
    }

    /// The second half: the page is in `to` from now on.
    pub(crate) fn give(&self, gfn: u64, from: u64, to: u64) {
        let old = &self.frames[from as usize][gfn as usize];
        let new = &self.frames[to as usize][gfn as usize];
        for (old, new) in old.words.iter().zip(&new.words) {
            // A plain load, so that ThreadSanitizer checks that it is ordered after all the vCPUs'
            // stores.
            #[cfg(pageferry_tsan)]
            // SAFETY: only this thread uses the word, unless the MMU is wrong. ThreadSanitizer then
            // reports it.
            let word = unsafe { old.as_ptr().read() };
            #[cfg(not(pageferry_tsan))]
            let word = old.load(Relaxed);
            new.store(word, Relaxed);
        }
        new.state.store(GIVEN, Relaxed);
        self.map[gfn as usize].store(to, Relaxed);
    }
}
