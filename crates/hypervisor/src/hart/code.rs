//! Decoded code: a direct-mapped cache of pages.
//!
//! The hart copies a page when it first enters it, and decodes an instruction when it first
//! executes it. Stores do not change the cache: in the ISA, only FENCE.I makes stored code visible
//! to fetches. FENCE.I empties the cache, and so does an invalidation by the VMM.

use super::bus::PAGE_WORDS;
use super::op::{Kind, Op};
use pageferry_addr::{PAGE_MASK, PAGE_SHIFT};

/// The number of pages in the cache, a power of two. Each takes 8 KiB once it is used.
const SLOTS: usize = 16;

/// The tag of an empty slot. It is not page-aligned, so no page has it.
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

    /// The cached page that contains `pc`, if there is one.
    #[inline]
    pub(super) fn page(&mut self, pc: u64) -> Option<&mut CodePage> {
        let slot = Self::slot(pc);
        if self.tags[slot] == pc & !PAGE_MASK {
            self.pages[slot].as_deref_mut()
        } else {
            None
        }
    }

    /// Puts the page that contains `pc` into the cache, undecoded.
    pub(super) fn fill(&mut self, pc: u64, words: &[u32; PAGE_WORDS]) {
        let slot = Self::slot(pc);
        let page = self.pages[slot]
            .get_or_insert_with(|| Box::new([Op::raw(Kind::Undecoded, 0); PAGE_WORDS]));
        for (op, &word) in page.iter_mut().zip(words) {
            *op = Op::raw(Kind::Undecoded, word);
        }
        self.tags[slot] = pc & !PAGE_MASK;
    }

    /// Forgets the page that contains `gpa`.
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
