//! Decoded code, a direct-mapped cache of pages.
//!
//! A page is copied when it is first entered and its instructions are decoded when they are first
//! executed. Stores do not touch it: the ISA makes code that was stored visible to fetches only by
//! FENCE.I, which empties the cache, as do the VMM's invalidations.

use super::bus::PAGE_WORDS;
use super::op::{Kind, Op};
use pageferry_addr::{PAGE_MASK, PAGE_SHIFT};

/// Pages in the cache; a power of two. Each takes 8 KiB once it is used.
const SLOTS: usize = 16;

/// A tag no page has, because it is not page-aligned.
const EMPTY: u64 = 1;

/// The decoded instructions of one page.
pub(super) type CodePage = [Op; PAGE_WORDS];

pub(super) struct CodeCache {
    /// The guest-physical address of the page in each slot, or [`EMPTY`].
    tags: [u64; SLOTS],
    pages: [Option<Box<CodePage>>; SLOTS],
}

impl CodeCache {
    pub(super) const fn new() -> Self {
        Self {
            tags: [EMPTY; SLOTS],
            pages: [const { None }; SLOTS],
        }
    }

    const fn slot(gpa: u64) -> usize {
        (gpa >> PAGE_SHIFT) as usize % SLOTS
    }

    /// The page that `pc` lies in, if it is cached.
    #[inline]
    pub(super) fn page(&mut self, pc: u64) -> Option<&mut CodePage> {
        let slot = Self::slot(pc);
        if self.tags[slot] == pc & !PAGE_MASK {
            self.pages[slot].as_deref_mut()
        } else {
            None
        }
    }

    /// Puts the page that `pc` lies in into the cache, undecoded.
    pub(super) fn fill(&mut self, pc: u64, words: &[u32; PAGE_WORDS]) {
        let slot = Self::slot(pc);
        let page = self.pages[slot]
            .get_or_insert_with(|| Box::new([Op::raw(Kind::Undecoded, 0); PAGE_WORDS]));
        for (op, &word) in page.iter_mut().zip(words) {
            *op = Op::raw(Kind::Undecoded, word);
        }
        self.tags[slot] = pc & !PAGE_MASK;
    }

    /// Forgets the page that `gpa` lies in.
    pub(super) fn invalidate(&mut self, gpa: u64) {
        let slot = Self::slot(gpa);
        if self.tags[slot] == gpa & !PAGE_MASK {
            self.tags[slot] = EMPTY;
        }
    }

    /// Forgets everything.
    pub(super) fn invalidate_all(&mut self) {
        self.tags = [EMPTY; SLOTS];
    }
}
