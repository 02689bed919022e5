//! Decoded code: pages by guest-physical address, and a small table of virtual pages over them.
//!
//! **Guarantee.** Code that a fence has made visible is what the hart executes. There are at most
//! [`MAX_PAGES`] decoded pages. All address spaces share them.
//!
//! **Mechanism.** The hart copies a page when it first enters it, and decodes an instruction when
//! it first executes it. Stores do not change decoded code: in the ISA, only FENCE.I makes stored
//! code visible to fetches.
//!
//! A fence drops no decoded page. It only begins a new generation and empties the virtual table.
//! The next entry into each page compares the page with memory, and decodes again only words that
//! differ. So it does not matter which thread or device stored them.
//!
//! **Neighbours.** The run loop asks for pages. The bus translates and copies them.

use super::bus::PAGE_WORDS;
use super::op::{Kind, Op};
use super::paging::View;
use super::{Mode, paging::ASID_BITS};
use pageferry_addr::{PAGE_MASK, PAGE_SHIFT};
use std::collections::BTreeMap;

/// The maximum number of decoded pages: 12 MiB. Linux with a shell executes about 600.
pub(super) const MAX_PAGES: usize = 1024;

/// The number of entries of the virtual table, a power of two.
const ENTRIES: usize = 256;

/// The tag of an empty entry. Keys never have all low bits set, so no page has it.
const EMPTY: u64 = u64::MAX;

/// The decoded instructions of one page.
pub(super) type CodePage = [Op; PAGE_WORDS];

struct Page {
    gpa: u64,
    /// The generation in which the words were last compared with memory. 0 is none.
    checked: u64,
    ops: CodePage,
    /// The words that `ops` was decoded from.
    words: [u32; PAGE_WORDS],
}

#[derive(Clone, Copy)]
struct CodeEntry {
    /// The virtual page, with the key of its view in the low bits.
    tag: u64,
    page: u32,
}

const NO_ENTRY: CodeEntry = CodeEntry {
    tag: EMPTY,
    page: 0,
};

pub(super) struct CodeCache {
    table: [CodeEntry; ENTRIES],
    /// Distinguishes the views: mode, address space, and whether there is translation.
    key: u64,
    generation: u64,
    pages: Vec<Box<Page>>,
    by_gpa: BTreeMap<u64, u32>,
    /// The page that the next new one replaces, once there are [`MAX_PAGES`].
    next: usize,
}

impl CodeCache {
    pub(super) const fn new() -> Self {
        Self {
            table: [NO_ENTRY; ENTRIES],
            key: 0,
            generation: 1,
            pages: Vec::new(),
            by_gpa: BTreeMap::new(),
            next: 0,
        }
    }

    /// Fetches are made in `view` from now on.
    pub(super) const fn set_view(&mut self, view: View) {
        self.key = if view.satp.is_bare() {
            0
        } else {
            let user = matches!(view.mode, Mode::User) as u64;
            1 | user << 1 | (view.satp.asid() as u64) << 2
        };
        const { assert!(ASID_BITS + 2 < PAGE_SHIFT) };
    }

    const fn slot(&self, pc: u64) -> usize {
        ((pc >> PAGE_SHIFT) ^ self.key) as usize % ENTRIES
    }

    /// The page that contains `pc` in this view, if its translation is known.
    #[inline]
    pub(super) fn page(&mut self, pc: u64) -> Option<&mut CodePage> {
        let entry = self.table[self.slot(pc)];
        if entry.tag != pc & !PAGE_MASK | self.key {
            return None;
        }
        let page = self.pages.get_mut(entry.page as usize)?;
        Some(&mut page.ops)
    }

    /// Makes the page at `gpa` the one that contains `pc` in this view. `read` copies its words, if
    /// they have to be compared with memory.
    pub(super) fn enter<E>(
        &mut self,
        pc: u64,
        gpa: u64,
        read: impl FnOnce(&mut [u32; PAGE_WORDS]) -> Result<(), E>,
    ) -> Result<(), E> {
        let known = self.by_gpa.get(&gpa).copied();
        let current = |at: u32| self.pages[at as usize].checked == self.generation;
        let at = match known {
            Some(at) if current(at) => at,
            _ => {
                let mut words = [0; PAGE_WORDS];
                read(&mut words)?;
                let at = known.unwrap_or_else(|| self.place(gpa, &words));
                let page = &mut self.pages[at as usize];
                if page.words != words {
                    for ((op, old), new) in page.ops.iter_mut().zip(&mut page.words).zip(words) {
                        if *old != new {
                            (*op, *old) = (Op::raw(Kind::Undecoded, new), new);
                        }
                    }
                }
                page.checked = self.generation;
                at
            }
        };
        self.table[self.slot(pc)] = CodeEntry {
            tag: pc & !PAGE_MASK | self.key,
            page: at,
        };
        Ok(())
    }

    /// Finds a place for the page at `gpa`. Returns its index.
    fn place(&mut self, gpa: u64, words: &[u32; PAGE_WORDS]) -> u32 {
        let ops = || words.map(|word| Op::raw(Kind::Undecoded, word));
        let at = if self.pages.len() < MAX_PAGES {
            self.pages.push(Box::new(Page {
                gpa,
                checked: 0,
                ops: ops(),
                words: *words,
            }));
            self.pages.len() - 1
        } else {
            let at = self.next;
            self.next = (at + 1) % MAX_PAGES;
            self.forget_translations();
            let page = &mut self.pages[at];
            self.by_gpa.remove(&page.gpa);
            (page.gpa, page.ops, page.words) = (gpa, ops(), *words);
            at
        };
        self.by_gpa.insert(gpa, at as u32);
        at as u32
    }

    /// The number of decoded pages.
    pub(super) const fn pages(&self) -> usize {
        self.pages.len()
    }

    /// Compares the page at `gpa` with memory when it is next entered.
    pub(super) fn invalidate(&mut self, gpa: u64) {
        if let Some(&at) = self.by_gpa.get(&(gpa & !PAGE_MASK)) {
            self.pages[at as usize].checked = 0;
            self.forget_translations();
        }
    }

    /// Compares each page with memory when it is next entered.
    pub(super) fn fence(&mut self) {
        self.generation += 1;
        self.forget_translations();
    }

    /// Forgets which virtual page is which guest-physical one.
    pub(super) fn forget_translations(&mut self) {
        self.table = [NO_ENTRY; ENTRIES];
    }
}
