//! The host's side of the memory: the pages of each slot, and the pages that the host takes and
//! gives back.

use super::guest::{self, HARTS};
use crate::support::fleet::{LARGE, LargeRam};
use crate::support::vm::PAGE;
use pageferry_addr::{Gpa, Hva, RamPage};
use pageferry_hypervisor::{Region, SlotFlags, UserfaultBits, VcpuCore, Vm};
use pageferry_userfault::PageBitmap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The address of the guests' memory.
pub(crate) const MEMORY: u64 = 0x4000_0000;
/// The address of a moved slot.
const ELSEWHERE: u64 = 0x8000_0000;
/// The contents of a page that the host has taken. No hart stores such words.
const TAKEN: Words = [0xdead_dead_dead_dead; HARTS];

/// A slot, and its pages of the guests' memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) slot: u16,
    pub(crate) first: u64,
    pub(crate) pages: u64,
}

/// A slot that is logged for some of the time.
pub(crate) const LOGGED: Part = Part::new(1, 0, 2 * LARGE);
/// A slot that does not change.
const PLAIN: Part = Part::new(2, 2 * LARGE, LARGE);
/// A slot with missing pages.
pub(crate) const MISSING: Part = Part::new(3, 3 * LARGE, 256);
/// A slot that is deleted and made again.
pub(crate) const DELETED: Part = Part::new(4, 3 * LARGE + 256, 128);
/// A slot that is moved elsewhere and back.
pub(crate) const MOVED: Part = Part::new(5, 3 * LARGE + 384, 128);
/// A slot that no hart uses.
pub(crate) const UNUSED_SLOT: u16 = 6;

impl Part {
    pub(crate) const ALL: [Self; 5] = [LOGGED, PLAIN, MISSING, DELETED, MOVED];

    const fn new(slot: u16, first: u64, pages: u64) -> Self {
        Self { slot, first, pages }
    }

    const fn range(self) -> Range<u64> {
        self.first..self.first + self.pages
    }

    pub(crate) fn holds(self, gpa: Gpa) -> bool {
        self.range().contains(&page(gpa))
    }
}

/// The page of an address.
pub(crate) const fn page(gpa: Gpa) -> u64 {
    gpa.0.wrapping_sub(MEMORY) / PAGE
}

/// The page of an address and its part, for messages.
pub(crate) fn page_of(gpa: u64) -> String {
    let part = Part::ALL.into_iter().find(|part| part.holds(Gpa(gpa)));
    format!("page {} of {part:?}", page(Gpa(gpa)))
}

/// The words of a page, one a hart.
pub(crate) type Words = [u64; HARTS];

/// For each page that the host has taken: the words of its harts.
type Away = Vec<Option<Words>>;

pub(crate) struct Host {
    ram: Arc<LargeRam>,
    /// Bit `i` is page `i`. Only pages of `MISSING` can be set.
    pub(crate) missing: Arc<PageBitmap>,
    /// A thread holds it while it takes or gives pages, or reads them for the log.
    away: Mutex<Away>,
}

impl Host {
    /// Makes memory in the state of round 0.
    pub(crate) fn new() -> Self {
        let ram = LargeRam::new(guest::PAGES / LARGE);
        for page in 0..guest::PAGES {
            for id in 0..HARTS as u64 {
                ram.set(page * PAGE + guest::word(id), guest::value(id, page, 0));
            }
        }
        Self {
            ram,
            missing: Arc::new(PageBitmap::new(guest::PAGES as usize)),
            away: Mutex::new(vec![None; guest::PAGES as usize]),
        }
    }

    fn away(&self) -> MutexGuard<'_, Away> {
        self.away.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn region(&self, part: Part, flags: SlotFlags, gpa: u64) -> Region {
        Region {
            gpa: Gpa(gpa + part.first * PAGE),
            hva: self.ram.hva(part.first),
            size: part.pages * PAGE,
            userfault: Some(UserfaultBits {
                bitmap: Arc::clone(&self.missing),
                first: RamPage(part.first),
            }),
            ..self.ram.region(part.slot, 0, flags)
        }
    }

    /// Puts the slot of `part` at its place, with `flags`.
    pub(crate) fn set(&self, vm: &Vm, part: Part, flags: SlotFlags) {
        vm.set_user_memory_region2(self.region(part, flags, MEMORY))
            .unwrap();
    }

    /// Moves the slot to an address that no hart uses.
    pub(crate) fn set_elsewhere(&self, vm: &Vm, part: Part) {
        vm.set_user_memory_region2(self.region(part, SlotFlags::EMPTY, ELSEWHERE))
            .unwrap();
    }

    pub(crate) fn hvas(&self, pages: &Range<u64>) -> Range<Hva> {
        self.ram.hvas(pages.start, pages.end - pages.start)
    }

    /// Puts `new` into a page, and returns its old words. No guest may access the page.
    fn replace(&self, page: u64, new: &Words) -> Words {
        std::array::from_fn(|id| {
            let offset = page * PAGE + guest::word(id as u64);
            self.ram.replace(offset, new[id])
        })
    }

    /// Puts the words of a taken page back. Checks that no store reached the page meanwhile.
    fn give(&self, page: u64, words: &Words) {
        let found = self.replace(page, words);
        assert_eq!(found, TAKEN, "page {page} was stored to while it was taken");
    }

    /// The host's change inside a notifier's call: the pages have other contents for a while, then
    /// the old ones again.
    pub(crate) fn take_for_a_while(&self, pages: &Range<u64>, wait: impl FnOnce()) {
        let away = self.away();
        let here = || pages.clone().filter(|&page| away[page as usize].is_none());
        let taken: Vec<_> = here().map(|page| self.replace(page, &TAKEN)).collect();
        wait();
        here()
            .zip(taken)
            .for_each(|(page, words)| self.give(page, &words));
    }

    /// Takes the pages of a part that are not taken yet, if `which` returns true for them.
    fn take(&self, part: Part, which: impl Fn(u64) -> bool) {
        let mut away = self.away();
        for page in part.range().filter(|&page| which(page)) {
            away[page as usize].get_or_insert_with(|| self.replace(page, &TAKEN));
        }
    }

    /// Takes the pages of a part that no guest can reach.
    pub(crate) fn take_all(&self, part: Part) {
        self.take(part, |_| true);
    }

    /// Takes the pages of `MISSING` whose bits are still set.
    pub(crate) fn take_missing(&self) {
        self.take(MISSING, |page| self.missing.test(RamPage(page)));
    }

    /// Brings a page, if it is missing.
    pub(crate) fn bring(&self, page: u64) -> bool {
        let mut away = self.away();
        if let Some(words) = away[page as usize].take() {
            self.give(page, &words);
        }
        self.missing.clear(RamPage(page))
    }

    /// Gives all pages of a part back.
    pub(crate) fn bring_all(&self, part: Part) {
        part.range().for_each(|page| {
            self.bring(page);
        });
    }

    fn read(&self, page: u64) -> Words {
        std::array::from_fn(|id| self.ram.get(page * PAGE + guest::word(id as u64)))
    }

    /// The guests' words of a page, also if the host has taken it.
    pub(crate) fn words(&self, page: u64) -> Words {
        let _away = self.away();
        self.read(page)
    }

    /// Checks that no hart stores to the pages during `wait`.
    pub(crate) fn check_still(&self, pages: Range<u64>, wait: impl FnOnce()) {
        let _away = self.away();
        let before: Vec<_> = pages.clone().map(|page| self.read(page)).collect();
        wait();
        for (page, words) in pages.zip(before) {
            assert_eq!(self.read(page), words, "page {page} was stored to");
        }
    }

    /// The guests' words of all pages of a part.
    pub(crate) fn all(&self, part: Part) -> Vec<Words> {
        part.range().map(|page| self.words(page)).collect()
    }

    /// Checks that each word is of its hart's last rounds. No hart may run any more.
    pub(crate) fn check(&self, vcpus: &[VcpuCore]) {
        for page in 0..guest::PAGES {
            for (id, (word, vcpu)) in (0..).zip(self.read(page).into_iter().zip(vcpus)) {
                let mut possible = guest::rounds_now(vcpu).map(|r| guest::value(id, page, r));
                assert!(
                    possible.any(|value| value == word),
                    "page {page}, hart {id}: {word:#x} is of no round of {:?}",
                    guest::rounds_now(vcpu)
                );
            }
        }
    }
}
