//! The demo workload in plain Rust: the reference for the machine code of both instruction sets.
//!
//! A data page, in 64-bit little-endian words:
//!
//! | word | contents |
//! |---|---|
//! | 0 | tag: magic number in the upper 48 bits, owning vCPU in the lower 16 |
//! | 1 | RAM page index |
//! | 2 | sequence number: the pass that wrote the page |
//! | 3 to 510 | payload: a generator's outputs, seeded by owner, index and sequence |
//! | 511 | checksum over words 0 to 510, in order |
//!
//! Words are written in ascending order. A half rewritten page is therefore a prefix of its new
//! contents and a suffix of its old ones. Its checksum is written last, so it is still the old one.
//! A page that no pass has written (sequence 0) is all zero.
//!
//! The checksum is a polynomial with an odd multiplier modulo 2^64. A change of any one word always
//! changes it. Any other change escapes it with a chance of about 2^-64, unless the contents are
//! made to collide. It guards against lost work, not against an adversary.

use crate::control::{
    DONE, ERROR_EXPECTED, ERROR_FOUND, ERROR_KIND, ERROR_PAGE, ERROR_PASS, ERRORS, IN_PROGRESS,
    MAGIC, PASS, PageBytes, STATE, set_word, word,
};
use crate::params::{
    FILL_INCREMENT, FILL_MULTIPLIER, GOLDEN, HASH_MULTIPLIER, HASH_START, WORD_CHECKSUM,
    WORD_INDEX, WORD_PAYLOAD, WORD_SEQUENCE, WORD_TAG, tag,
};
use crate::{ErrorKind, Order, Workload};
use pageferry_addr::{PAGE_SIZE, RamPage};

/// The first fault that a check found in a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The kind of error.
    pub kind: ErrorKind,
    /// The expected word; see [`ErrorKind`].
    pub expected: u64,
    /// The word found.
    pub found: u64,
}

/// The contents of `owner`'s page `index` after pass `sequence`; all zero for sequence 0.
#[must_use]
pub fn contents(owner: u32, index: RamPage, sequence: u64) -> PageBytes {
    let mut page = [0; PAGE_SIZE as usize];
    if sequence != 0 {
        fill(&mut page, owner, index, sequence);
    }
    page
}

/// Rewrites a page as pass `sequence` does.
pub fn fill(page: &mut PageBytes, owner: u32, index: RamPage, sequence: u64) {
    set_word(page, WORD_TAG * 8, tag(owner));
    set_word(page, WORD_INDEX * 8, index.0);
    set_word(page, WORD_SEQUENCE * 8, sequence);
    let mut value = index
        .0
        .wrapping_mul(GOLDEN)
        .wrapping_add(tag(owner))
        .wrapping_mul(FILL_MULTIPLIER)
        .wrapping_add(sequence)
        .wrapping_mul(GOLDEN);
    value ^= value >> 32;
    for nth in WORD_PAYLOAD..WORD_CHECKSUM {
        value = value
            .wrapping_mul(FILL_MULTIPLIER)
            .wrapping_add(FILL_INCREMENT);
        set_word(page, nth * 8, value);
    }
    let checksum = checksum(page);
    set_word(page, WORD_CHECKSUM * 8, checksum);
}

/// Computes the checksum of a page's contents.
#[must_use]
pub fn checksum(page: &PageBytes) -> u64 {
    (0..WORD_CHECKSUM).fold(HASH_START, |hash, nth| {
        hash.wrapping_mul(HASH_MULTIPLIER)
            .wrapping_add(word(page, nth * 8))
    })
}

/// Checks by header and checksum that a page is `owner`'s page `index` as pass `sequence` left it.
///
/// # Errors
/// The mismatch, if the page differs.
pub fn check(page: &PageBytes, owner: u32, index: RamPage, sequence: u64) -> Result<(), Mismatch> {
    if page.iter().all(|&byte| byte == 0) {
        return if sequence == 0 {
            Ok(())
        } else {
            Err(Mismatch {
                kind: ErrorKind::Lost,
                expected: sequence,
                found: 0,
            })
        };
    }
    let equal = |kind, expected, nth: usize| match word(page, nth * 8) {
        found if found == expected => Ok(()),
        found => Err(Mismatch {
            kind,
            expected,
            found,
        }),
    };
    equal(ErrorKind::Torn, checksum(page), WORD_CHECKSUM)?;
    equal(ErrorKind::Foreign, tag(owner), WORD_TAG)?;
    equal(ErrorKind::Foreign, index.0, WORD_INDEX)?;
    equal(ErrorKind::Stale, sequence, WORD_SEQUENCE)?;
    if sequence == 0 {
        // A page with a valid checksum and sequence 0. No pass writes sequence 0.
        return Err(Mismatch {
            kind: ErrorKind::Stale,
            expected: 0,
            found: 0,
        });
    }
    Ok(())
}

/// One visit in pass `pass` (from 1). It checks that the page is as the pass before left it. Then
/// it rewrites the page, whatever the check found.
///
/// # Errors
/// The mismatch that the check found.
pub fn visit(page: &mut PageBytes, owner: u32, index: RamPage, pass: u64) -> Result<(), Mismatch> {
    let checked = check(page, owner, index, pass - 1);
    fill(page, owner, index, pass);
    checked
}

/// One vCPU of the workload, run in plain Rust over the bytes of a whole RAM.
#[derive(Clone, Debug)]
pub struct ModelVcpu {
    workload: Workload,
    vcpu: u32,
    pass: u64,
    done: u64,
    order: Order,
}

impl ModelVcpu {
    /// The vCPU before its first instruction.
    ///
    /// # Panics
    /// When there is no such vCPU.
    #[must_use]
    pub fn new(workload: &Workload, vcpu: u32) -> Self {
        let pages = workload.memory_map().share_pages();
        assert!(vcpu < workload.memory_map().vcpus(), "no vCPU {vcpu}");
        Self {
            workload: workload.clone(),
            vcpu,
            pass: 0,
            done: 0,
            order: Order::new(vcpu, 0, pages).finished(),
        }
    }

    /// The number of visits done.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.done
    }

    /// The number of steps that the order generator has taken in the current pass.
    #[must_use]
    pub fn order_steps(&self) -> u64 {
        self.order.steps()
    }

    /// One visit, exactly as in the machine code: finds the next page in `ram` (indexed by RAM
    /// page), visits it, and updates the control page. Returns the page.
    ///
    /// # Panics
    /// When `ram` is shorter than the workload's memory.
    pub fn visit(&mut self, ram: &mut [PageBytes]) -> RamPage {
        let share = self.workload.share(self.vcpu);
        let control_page = self.workload.control_page(self.vcpu);
        let at = control_page.index();
        let position = match self.order.next() {
            Some(position) => position,
            None => {
                self.pass += 1;
                set_word(&mut ram[at], PASS, self.pass);
                self.order = Order::new(self.vcpu, self.pass, share.end - share.start);
                self.order.next().expect("a share has a page")
            }
        };
        let page = RamPage(share.start + position);
        set_word(&mut ram[at], STATE, self.order.state());
        if let Err(mismatch) = visit(&mut ram[page.index()], self.vcpu, page, self.pass) {
            self.report(&mut ram[at], page, mismatch);
        }
        let published = word(&ram[at], DONE);
        if published != self.done {
            let kind = if word(&ram[at], MAGIC) == 0 {
                ErrorKind::Lost
            } else {
                ErrorKind::Stale
            };
            let mismatch = Mismatch {
                kind,
                expected: self.done,
                found: published,
            };
            self.report(&mut ram[at], control_page, mismatch);
        }
        self.done += 1;
        set_word(&mut ram[at], DONE, self.done);
        set_word(&mut ram[at], IN_PROGRESS, 0);
        page
    }

    fn report(&self, control: &mut PageBytes, page: RamPage, mismatch: Mismatch) {
        let errors = word(control, ERRORS);
        if errors == 0 {
            set_word(control, ERROR_KIND, mismatch.kind.code());
            set_word(control, ERROR_PAGE, page.0);
            set_word(control, ERROR_EXPECTED, mismatch.expected);
            set_word(control, ERROR_FOUND, mismatch.found);
            set_word(control, ERROR_PASS, self.pass);
        }
        set_word(control, ERRORS, errors.wrapping_add(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_page_checks_as_what_it_is() {
        for (owner, index, sequence) in [(0, 0, 1), (3, 77, 5), (1023, 1 << 29, u64::MAX)] {
            let page = contents(owner, RamPage(index), sequence);
            assert_eq!(check(&page, owner, RamPage(index), sequence), Ok(()));
            let kind = |owner, index, sequence| {
                check(&page, owner, RamPage(index), sequence)
                    .unwrap_err()
                    .kind
            };
            assert_eq!(kind(owner ^ 1, index, sequence), ErrorKind::Foreign);
            assert_eq!(kind(owner, index + 1, sequence), ErrorKind::Foreign);
            assert_eq!(kind(owner, index, sequence - 1), ErrorKind::Stale);
        }
        let lost = Mismatch {
            kind: ErrorKind::Lost,
            expected: 9,
            found: 0,
        };
        assert_eq!(check(&[0; 4096], 0, RamPage(4), 9), Err(lost));
        assert_eq!(check(&[0; 4096], 0, RamPage(4), 0), Ok(()));
    }

    #[test]
    fn a_forged_page_of_sequence_zero_is_not_an_untouched_one() {
        let mut page = contents(1, RamPage(9), 1);
        set_word(&mut page, 16, 0);
        let sum = checksum(&page);
        set_word(&mut page, WORD_CHECKSUM * 8, sum);
        assert_eq!(
            check(&page, 1, RamPage(9), 0).unwrap_err().kind,
            ErrorKind::Stale
        );
    }

    proptest! {
        #[test]
        fn any_flipped_bit_is_torn(bit in 0..4096 * 8_usize, sequence in 1..100_u64) {
            let mut page = contents(2, RamPage(50), sequence);
            page[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(check(&page, 2, RamPage(50), sequence).unwrap_err().kind, ErrorKind::Torn);
        }

        #[test]
        fn any_true_mixture_of_two_passes_is_torn(cut in 1..512_usize, sequence in 2..100_u64) {
            let old = contents(2, RamPage(50), sequence - 1);
            let mut page = contents(2, RamPage(50), sequence);
            page[cut * 8..].copy_from_slice(&old[cut * 8..]);
            if page != old {
                prop_assert_eq!(check(&page, 2, RamPage(50), sequence).unwrap_err().kind, ErrorKind::Torn);
            }
        }

        #[test]
        fn swapped_words_are_torn(a in 0..512_usize, b in 0..512_usize) {
            let mut page = contents(2, RamPage(50), 7);
            let (left, right) = (word(&page, a * 8), word(&page, b * 8));
            set_word(&mut page, a * 8, right);
            set_word(&mut page, b * 8, left);
            prop_assert_eq!(check(&page, 2, RamPage(50), 7).is_err(), a != b);
        }
    }
}
