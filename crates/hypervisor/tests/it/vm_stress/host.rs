//! The host's side of the memory: which slot has which pages, and pages that the host takes and
//! gives back.

use super::guest::{self, HARTS};
use crate::support::fleet::{LARGE, LargeRam};
use crate::support::vm::PAGE;
use pageferry_addr::{Gpa, Hva, RamPage};
use pageferry_hypervisor::{Region, SlotFlags, UserfaultBits, VcpuCore, Vm};
use pageferry_userfault::PageBitmap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Where the guests' memory is.
pub(crate) const MEMORY: u64 = 0x4000_0000;
/// Where a slot goes that is moved.
const ELSEWHERE: u64 = 0x8000_0000;
/// In a page that the host has taken: the words of no hart.
const TAKEN: Words = [0xdead_dead_dead_dead; HARTS];

/// A slot, and the pages of the guests' memory that it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) slot: u16,
    pub(crate) first: u64,
    pub(crate) pages: u64,
}

/// Is logged, and not, in turns.
pub(crate) const LOGGED: Part = Part::new(1, 0, 2 * LARGE);
/// Stays as it is.
const PLAIN: Part = Part::new(2, 2 * LARGE, LARGE);
/// Has pages that are missing.
pub(crate) const MISSING: Part = Part::new(3, 3 * LARGE, 256);
/// Is deleted and made anew.
pub(crate) const DELETED: Part = Part::new(4, 3 * LARGE + 256, 128);
/// Is moved elsewhere and back.
pub(crate) const MOVED: Part = Part::new(5, 3 * LARGE + 384, 128);
/// No hart's.
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

/// The words of pages that the host has taken for longer, by page.
type Away = Vec<Option<Words>>;

pub(crate) struct Host {
    ram: Arc<LargeRam>,
    /// Bit `i` is page `i`; only `MISSING` has any.
    pub(crate) missing: Arc<PageBitmap>,
    /// Who takes and gives pages, or reads them for the log, holds it.
    away: Mutex<Away>,
}

impl Host {
    /// Memory as round 0 leaves it.
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

    /// Has the slot of `part` at its place, with `flags`.
    pub(crate) fn set(&self, vm: &Vm, part: Part, flags: SlotFlags) {
        vm.set_user_memory_region2(self.region(part, flags, MEMORY))
            .unwrap();
    }

    /// Moves it to where no hart looks.
    pub(crate) fn set_elsewhere(&self, vm: &Vm, part: Part) {
        vm.set_user_memory_region2(self.region(part, SlotFlags::EMPTY, ELSEWHERE))
            .unwrap();
    }

    pub(crate) fn hvas(&self, pages: &Range<u64>) -> Range<Hva> {
        self.ram.hvas(pages.start, pages.end - pages.start)
    }

    /// Puts `new` into a page that is the host's alone, and gives what was there.
    fn replace(&self, page: u64, new: &Words) -> Words {
        std::array::from_fn(|id| {
            let offset = page * PAGE + guest::word(id as u64);
            self.ram.replace(offset, new[id])
        })
    }

    /// Puts the words of a page back that the host had taken. Nobody has stored to it meanwhile.
    fn give(&self, page: u64, words: &Words) {
        let found = self.replace(page, words);
        assert_eq!(found, TAKEN, "page {page} was stored to while it was taken");
    }

    /// What a host does in a notifier's call: something else is there for a while, then the old
    /// page again.
    pub(crate) fn take_for_a_while(&self, pages: &Range<u64>, wait: impl FnOnce()) {
        let away = self.away();
        let here = || pages.clone().filter(|&page| away[page as usize].is_none());
        let taken: Vec<_> = here().map(|page| self.replace(page, &TAKEN)).collect();
        wait();
        here()
            .zip(taken)
            .for_each(|(page, words)| self.give(page, &words));
    }

    /// Takes the pages of a part that are not taken yet and for which `which` says so.
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

    /// What is in a page, as the guests left it.
    pub(crate) fn words(&self, page: u64) -> Words {
        let _away = self.away();
        self.read(page)
    }

    /// While `wait` takes its time no hart stores to the pages.
    pub(crate) fn check_still(&self, pages: Range<u64>, wait: impl FnOnce()) {
        let _away = self.away();
        let before: Vec<_> = pages.clone().map(|page| self.read(page)).collect();
        wait();
        for (page, words) in pages.zip(before) {
            assert_eq!(self.read(page), words, "page {page} was stored to");
        }
    }

    /// What is in all of a part's pages.
    pub(crate) fn all(&self, part: Part) -> Vec<Words> {
        part.range().map(|page| self.words(page)).collect()
    }

    /// No hart runs any more: each word is of a round that its hart has made last.
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
