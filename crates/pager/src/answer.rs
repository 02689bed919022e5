//! Placing pages, and recording pages that the VM gives back.
//!
//! **Guarantee.** A page gets the snapshot's bytes only if the VM has not given it back. A page
//! that was given back is zero until the VM writes it.
//!
//! **Mechanism.** A removal has three steps in the kernel (`madvise`): a message waits, and placing
//! is refused with `EAGAIN`; a `read(2)` takes the message, and placing is allowed again; the VMM's
//! thread runs on and drops the pages. Bytes that were taken before the removal must not be placed
//! after it. So:
//!
//! 1. Messages are read and their removals recorded under the exclusive side of the gate.
//! 2. A page is tested for `removed` and placed under one hold of the shared side.
//! 3. If the hold of 2 comes before that of 1, the kernel refuses the page or drops it: the message
//!    was not read yet, so the pages are dropped later.
//! 4. If it comes after, it finds the record, and the snapshot's bytes are not used.

use crate::vm::Vm;
use pageferry_addr::Hva;
use pageferry_userfault::uffd::Wake;
use std::ops::Range;
use std::sync::{LazyLock, PoisonError};

/// The end of an attempt to place pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placed {
    /// All are there, or were given back.
    All,
    /// Those from this page on have to be tried again, once a removal was read.
    Changing(u64),
    /// The host refused this page, such as for want of memory.
    Refused(u64),
    /// The VM has ended.
    Gone,
}

/// An attempt to place pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attempt {
    pub(crate) how: Placed,
    /// The pages that this attempt placed.
    pub(crate) fresh: u64,
}

/// The fate of a page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Skipped,
    Zero,
    Data,
}

/// A page of 2 MiB as zeros: pages of a pool have no `UFFDIO_ZEROPAGE`. The program's file does not
/// have it.
static ZEROS: LazyLock<Box<[u8]>> = LazyLock::new(|| vec![0; 2 << 20].into());

impl Vm {
    /// Places pages of one region that are not there and were not given back. `bytes` are those of
    /// the source, or `None` for zeros.
    pub(crate) fn place(&self, pages: Range<u64>, bytes: Option<&[u8]>) -> Attempt {
        let page_bytes = self.regions.page_bytes() as usize;
        let part = |range: &Range<u64>| {
            let at = |page: u64| (page - pages.start) as usize * page_bytes;
            bytes.map(|bytes| &bytes[at(range.start)..at(range.end)])
        };
        let _shared = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        let kind = |page: u64| {
            if self.shared.removed().test(page) || self.shared.placed().test(page) {
                return Kind::Skipped;
            }
            match part(&(page..page + 1)) {
                Some(bytes) if bytes.iter().any(|&byte| byte != 0) => Kind::Data,
                _ => Kind::Zero,
            }
        };
        let mut attempt = Attempt {
            how: Placed::All,
            fresh: 0,
        };
        let mut page = pages.start;
        while page < pages.end {
            let first = kind(page);
            let mut run = page..page + 1;
            while run.end < pages.end && kind(run.end) == first {
                run.end += 1;
            }
            page = run.end;
            let how = match first {
                Kind::Skipped => continue,
                Kind::Zero => self.place_run(run, None, &mut attempt.fresh),
                Kind::Data => self.place_run(run.clone(), part(&run), &mut attempt.fresh),
            };
            if how != Placed::All {
                attempt.how = how;
                break;
            }
        }
        attempt
    }

    /// Places zeros if the page was given back, and nothing otherwise.
    pub(crate) fn place_removed(&self, page: u64) -> Placed {
        let _shared = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        if !self.shared.removed().test(page) {
            return Placed::All;
        }
        self.place_run(page..page + 1, None, &mut 0)
    }

    /// The caller has the gate.
    fn place_run(&self, run: Range<u64>, bytes: Option<&[u8]>, fresh: &mut u64) -> Placed {
        let page_bytes = self.regions.page_bytes();
        let mut page = run.start;
        // There is no longer source of zeros, and no UFFDIO_ZEROPAGE for pages of a pool.
        let mut most = if bytes.is_none() && page_bytes != 4096 {
            1
        } else {
            u64::MAX
        };
        while page < run.end {
            let (address, _) = self.regions.place_of(page);
            let call = most.min(run.end - page);
            let answer = match bytes {
                Some(bytes) => {
                    let at = ((page - run.start) * page_bytes) as usize;
                    let part = &bytes[at..at + (call * page_bytes) as usize];
                    self.uffd.copy(address, part, Wake::Now)
                }
                None if page_bytes == 4096 => {
                    self.uffd.zeropage(address, call * page_bytes, Wake::Now)
                }
                None => self.uffd.copy(address, &ZEROS, Wake::Now),
            };
            let done = match &answer {
                Ok(()) => call,
                Err(stop) => stop.done / page_bytes,
            };
            self.shared.placed().set(page..page + done);
            *fresh += done;
            if bytes.is_none() {
                self.figures.zeros.add(done);
            }
            page += done;
            let Err(stop) = answer else { continue };
            if stop.is_not_registered() && call > 1 {
                // One call serves one mapping, and the VMM may have divided this one (mprotect).
                most = 1;
                continue;
            }
            if stop.is_already_there() || stop.is_not_registered() {
                let (address, _) = self.regions.place_of(page);
                // The failed call has woken nobody. Whatever is there now, its sleepers find it.
                let _ = self.uffd.wake(address, page_bytes);
                self.shared.placed().set(page..page + 1);
                page += 1;
            } else if stop.is_process_gone() {
                return Placed::Gone;
            } else if stop.is_changing() {
                self.figures.repeated.add(1);
                return Placed::Changing(page);
            } else {
                self.host_refused(&stop);
                return Placed::Refused(page);
            }
        }
        Placed::All
    }

    /// Records a range that the VM gives back. The caller has the gate exclusively.
    pub(crate) fn record_removal(&self, range: &Range<Hva>) {
        for pages in self.regions.pages_in(range) {
            self.figures.given_back.add(pages.end - pages.start);
            self.shared.removed().set(pages.clone());
            self.shared.placed().clear(pages);
        }
    }
}
