//! Checks the whole memory of a paused VM against the progress that its vCPUs published.
//!
//! **Guarantee.** A verdict that holds means that every byte of RAM has its only correct value. The
//! correct value is the one that the workload's machine code leaves in memory that keeps every
//! store, given the number of pages done in each control page. Two words of a control page are not
//! judged by their value: the order generator's state, a hint, and the rest, if it is one.
//!
//! **Mechanism.** The number of pages done gives the current pass. Replaying the pass's [`Order`]
//! gives the set of pages already visited in it. Visited pages must have this pass's contents, all
//! others those of the pass before. The next page in the order may be a prefix of its new and a
//! suffix of its old contents, but only if the control page names it as in progress. Code and page
//! tables must be as in the image. Every page that no program writes must be zero.
//!
//! An *older* control page, restored together with equally old data pages, passes this check. The
//! guest's own check catches it, because it compares with counts kept in registers.

mod verdict;

pub use verdict::{GuestFinding, MAX_ERRORS, PageError, PageUse, Verdict};

use crate::control::{
    DONE, ERROR_EXPECTED, ERROR_FOUND, ERROR_KIND, ERROR_PAGE, ERROR_PASS, ERRORS, IN_PROGRESS,
    PASS, PageBytes, REST, STATE, set_word, word,
};
use crate::params::{WORD_SEQUENCE, WORDS};
use crate::{Control, Doorbell, ErrorKind, Order, ProgramKind, Workload, model};
use pageferry_addr::{PAGE_SIZE, RamPage};
use std::collections::BTreeMap;

/// A vCPU's position in its work, from its control page.
struct Place {
    /// The number of completed passes.
    passes: u64,
    /// The positions visited in the current pass.
    visited: Vec<bool>,
    /// The position that may be half rewritten.
    in_progress: Option<u64>,
}

impl Place {
    /// Returns `None` if the fields contradict each other.
    fn of(control: &Control, pages: u64) -> Option<Self> {
        let passes = control.done / pages;
        let in_pass = control.done % pages;
        // A pass number is published at the start of the pass, after the last page of the pass
        // before is done.
        let pass_fits = control.pass == passes + 1 || (in_pass == 0 && control.pass == passes);
        if !pass_fits {
            return None;
        }
        let mut order = Order::new(control.vcpu, passes + 1, pages);
        let mut visited = vec![false; pages as usize];
        let mut last = None;
        for position in order.by_ref().take(in_pass as usize) {
            visited[position as usize] = true;
            last = Some(position);
        }
        if in_pass == 0 && passes > 0 {
            last = Order::new(control.vcpu, passes, pages).last();
        }
        let next = order.next();
        let named = match control.in_progress {
            Some(page) => Some(page.0.checked_sub(control.first.0)?),
            None => None,
        };
        // A page stays published for two stores after it is done. It is whole then.
        if named.is_some() && named != next && named != last {
            return None;
        }
        Some(Self {
            passes,
            visited,
            in_progress: named.filter(|_| named == next),
        })
    }

    fn sequence(&self, position: u64) -> u64 {
        self.passes + u64::from(self.visited[position as usize])
    }
}

impl Workload {
    /// Verifies the memory of a VM whose vCPUs do not run. `read_page` reads the bytes of a RAM
    /// page.
    ///
    /// ```
    /// use pageferry_guest::{Isa, MemoryMap, Workload, model::ModelVcpu};
    ///
    /// let workload = Workload::new(Isa::Rv64, 1, 1 << 20)?;
    /// let mut ram = vec![[0; 4096]; 256];
    /// for (gpa, bytes) in workload.image() {
    ///     ram[gpa.gfn().0 as usize][..bytes.len()].copy_from_slice(&bytes);
    /// }
    /// let mut vcpu = ModelVcpu::new(&workload, 0);
    /// (0..300).for_each(|_| { vcpu.visit(&mut ram); });
    /// let page = workload.share(0).start as usize;
    /// ram[page][100] ^= 1;
    /// let verdict = workload.verify::<std::convert::Infallible>(&mut |page, bytes| {
    ///     *bytes = ram[page.index()];
    ///     Ok(())
    /// }).unwrap();
    /// assert_eq!((verdict.pages_checked, verdict.error_count), (256, 1));
    /// # Ok::<(), pageferry_guest::GuestError>(())
    /// ```
    ///
    /// # Errors
    /// The first error of `read_page`.
    pub fn verify<E>(
        &self,
        read_page: &mut dyn FnMut(RamPage, &mut PageBytes) -> Result<(), E>,
    ) -> Result<Verdict, E> {
        let mut verdict = Verdict::default();
        self.verify_rest(&mut verdict, read_page)?;
        for vcpu in 0..self.memory_map().vcpus() {
            self.verify_vcpu(&mut verdict, vcpu, read_page)?;
        }
        Ok(verdict)
    }

    /// Verifies code, page tables, and the pages that no program writes.
    fn verify_rest<E>(
        &self,
        verdict: &mut Verdict,
        read_page: &mut dyn FnMut(RamPage, &mut PageBytes) -> Result<(), E>,
    ) -> Result<(), E> {
        let map = self.memory_map();
        // The constant pages lie below the hole, where RAM page indices are frame numbers.
        let constant: BTreeMap<u64, Vec<u8>> = self
            .program()
            .constant_pages()
            .into_iter()
            .map(|(gpa, bytes)| (gpa.gfn().0, bytes))
            .collect();
        let data = map.data();
        let mut bytes = [0; PAGE_SIZE as usize];
        for page in (0..data.start)
            .chain(data.end..map.ram_pages())
            .map(RamPage)
        {
            if map.control_owner(page).is_some() {
                continue;
            }
            read_page(page, &mut bytes)?;
            verdict.pages_checked += 1;
            let expected = constant.get(&page.0);
            let content = expected.map_or(&[][..], Vec::as_slice);
            let (head, tail) = bytes.split_at(content.len());
            if head != content || tail.iter().any(|&byte| byte != 0) {
                verdict.error(PageError {
                    page,
                    page_use: if expected.is_some() {
                        PageUse::Constant
                    } else {
                        PageUse::Unused
                    },
                    kind: if is_zero(&bytes) {
                        ErrorKind::Lost
                    } else {
                        ErrorKind::Torn
                    },
                    expected_sequence: 0,
                    found_sequence: 0,
                });
            }
        }
        Ok(())
    }

    /// Verifies a vCPU's control page and its share.
    fn verify_vcpu<E>(
        &self,
        verdict: &mut Verdict,
        vcpu: u32,
        read_page: &mut dyn FnMut(RamPage, &mut PageBytes) -> Result<(), E>,
    ) -> Result<(), E> {
        let page = self.control_page(vcpu);
        let mut bytes = [0; PAGE_SIZE as usize];
        read_page(page, &mut bytes)?;
        verdict.pages_checked += 1;
        if let Ok(control) = Control::parse(&bytes) {
            verdict.guest_errors = verdict.guest_errors.saturating_add(control.errors);
            verdict.pages_done = verdict.pages_done.saturating_add(control.done);
            if let Some(report) = control.first_error {
                verdict
                    .first_guest_error
                    .get_or_insert(GuestFinding { vcpu, report });
            }
        }
        let place = match self.place(vcpu, &bytes) {
            Ok(place) => place,
            Err(kind) => {
                verdict.error(PageError {
                    page,
                    page_use: PageUse::Control(vcpu),
                    kind,
                    expected_sequence: 0,
                    found_sequence: 0,
                });
                return Ok(());
            }
        };
        let share = self.share(vcpu);
        for (position, page) in (0..).zip(share.map(RamPage)) {
            read_page(page, &mut bytes)?;
            verdict.pages_checked += 1;
            let sequence = place.sequence(position);
            let half = place.in_progress == Some(position);
            if let Some(kind) = judge(&bytes, vcpu, page, sequence, half) {
                verdict.error(PageError {
                    page,
                    page_use: PageUse::Data(vcpu),
                    kind,
                    expected_sequence: sequence,
                    found_sequence: word(&bytes, WORD_SEQUENCE * 8),
                });
            }
        }
        Ok(())
    }

    /// Returns a vCPU's position in its work, or the kind of error of its control page.
    fn place(&self, vcpu: u32, bytes: &PageBytes) -> Result<Place, ErrorKind> {
        if is_zero(bytes) {
            return Err(ErrorKind::Lost);
        }
        let control = Control::parse(bytes).map_err(|_| ErrorKind::Torn)?;
        if control.program != ProgramKind::Workload || control.vcpu != vcpu {
            return Err(ErrorKind::Foreign);
        }
        // All fields that the guest does not write must be as in the image.
        let mut constant = *bytes;
        for offset in [
            PASS,
            STATE,
            IN_PROGRESS,
            DONE,
            ERRORS,
            ERROR_KIND,
            ERROR_PAGE,
            ERROR_EXPECTED,
            ERROR_FOUND,
            ERROR_PASS,
        ] {
            set_word(&mut constant, offset, 0);
        }
        let mut planned = self.program().control(vcpu);
        // The VMM that started the guest has chosen the rest.
        if Doorbell::is_rest(vcpu, word(bytes, REST)) {
            set_word(&mut planned, REST, word(bytes, REST));
        }
        if constant != planned {
            return Err(ErrorKind::Torn);
        }
        Place::of(&control, self.memory_map().share_pages()).ok_or(ErrorKind::Torn)
    }
}

fn is_zero(bytes: &PageBytes) -> bool {
    bytes.iter().all(|&byte| byte == 0)
}

/// Returns the error of a data page that pass `sequence` wrote last. If `half`, the next pass may
/// have rewritten a prefix of it.
fn judge(
    bytes: &PageBytes,
    vcpu: u32,
    page: RamPage,
    sequence: u64,
    half: bool,
) -> Option<ErrorKind> {
    let old = model::contents(vcpu, page, sequence);
    if *bytes == old {
        return None;
    }
    if half {
        let new = model::contents(vcpu, page, sequence + 1);
        let equal = |nth: &usize| bytes[nth * 8..nth * 8 + 8] == new[nth * 8..nth * 8 + 8];
        let cut = (0..WORDS).take_while(equal).count() * 8;
        if bytes[cut..] == old[cut..] {
            return None;
        }
    }
    // Header and checksum are right, but the guest never writes these contents: someone forged
    // them.
    let checked = model::check(bytes, vcpu, page, sequence);
    Some(checked.map_or_else(|mismatch| mismatch.kind, |()| ErrorKind::Torn))
}
