//! The calls that resolve faults: they make pages present, set markers, or wake threads.

use super::abi::{self, UffdioFill, UffdioRange, UffdioWriteprotect};
use super::error::{RangeError, RangeOp};
use super::fd::{Userfaultfd, at};
use super::sys;
use pageferry_addr::{Hva, PageSize};
use rustix::io::Errno;

/// The number of repetitions of a call that makes no progress (`EAGAIN`), before the caller gets
/// the error.
///
/// Without event features the cause is a page table that vanishes under the call (the kernel makes
/// a huge page), and it passes at once. With event features it may last until an event is read,
/// perhaps by this thread.
const RETRIES: u32 = 32;

/// The moment at which threads that sleep on a page are woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// The same call wakes them.
    Now,
    /// This call does not wake them (DONTWAKE). A later [`Userfaultfd::wake`] does, if any thread
    /// can sleep there.
    Later,
}

impl Wake {
    fn mode(self) -> u64 {
        match self {
            Self::Now => 0,
            Self::Later => abi::MODE_DONTWAKE,
        }
    }
}

impl Userfaultfd {
    /// Copies `bytes` to the missing pages from `dst` and maps them. Each page appears atomically
    /// to threads that touch it. The length must be a multiple of the page size and not 0.
    ///
    /// The slice must not lie in missing memory. Otherwise the call fails with `EFAULT` or waits
    /// for a fault that no thread may resolve.
    ///
    /// # Errors
    /// [`RangeError`]. Among others `EEXIST`: the page at `done` has contents already.
    pub fn copy(&self, dst: Hva, bytes: &[u8], wake: Wake) -> Result<(), RangeError> {
        let len = bytes.len() as u64;
        advance(RangeOp::Copy, dst, len, |done| {
            let rest = &bytes[done as usize..]; // at most `len`, which came from a usize
            sys::copy(self, dst.0 + done, rest, wake.mode())
        })
    }

    /// Maps zeros at the missing pages of `len` bytes from `start`.
    ///
    /// # Errors
    /// [`RangeError`]. Among others `EEXIST` as in [`Userfaultfd::copy`], and `EINVAL` on
    /// hugetlbfs.
    pub fn zeropage(&self, start: Hva, len: u64, wake: Wake) -> Result<(), RangeError> {
        self.fill(RangeOp::Zeropage, start, len, wake)
    }

    /// Maps the pages of `len` bytes from `start`. They must be in the page cache, written through
    /// another mapping of the same file. The call replaces poison markers.
    ///
    /// # Errors
    /// [`RangeError`]. Among others `EEXIST` (the page at `done` is mapped already,
    /// [`RangeError::is_already_there`]) and `EFAULT` (it is not in the page cache,
    /// [`RangeError::is_not_in_page_cache`]).
    pub fn continue_range(&self, start: Hva, len: u64, wake: Wake) -> Result<(), RangeError> {
        self.fill(RangeOp::Continue, start, len, wake)
    }

    /// Does a [`Userfaultfd::continue_range`] that skips pages which are mapped already. Returns
    /// the number of bytes that it mapped.
    ///
    /// `page` is the mapping's page size. [`Wake::Now`] wakes sleepers on *all* pages, including
    /// pages that other threads had mapped.
    ///
    /// # Errors
    /// [`RangeError`] other than `EEXIST`.
    ///
    /// # Panics
    /// If `len` is not a multiple of `page`.
    pub fn continue_unmapped(
        &self,
        start: Hva,
        len: u64,
        page: PageSize,
        wake: Wake,
    ) -> Result<u64, RangeError> {
        self.fill_over(RangeOp::Continue, start, len, page, wake)
    }

    /// Marks the pages of `len` bytes from `start` as poisoned (Linux 6.6 and later). A thread that
    /// touches one gets SIGBUS with its address, at once and without an event. A system call gets
    /// `EFAULT`, and a vCPU of KVM leaves the guest with SIGBUS pending for its thread.
    ///
    /// The signal's code is `BUS_MCEERR_AR`. For a direct touch, a kernel without
    /// `CONFIG_MEMORY_FAILURE` uses `BUS_ADRERR` instead (x86: `do_sigbus` in
    /// `arch/x86/mm/fault.c`).
    ///
    /// A [`Userfaultfd::continue_range`] or [`Userfaultfd::copy`] over the marker removes it.
    ///
    /// # Errors
    /// [`RangeError`]. Among others `EEXIST`: the page at `done` is mapped or marked already.
    pub fn poison(&self, start: Hva, len: u64, wake: Wake) -> Result<(), RangeError> {
        self.fill(RangeOp::Poison, start, len, wake)
    }

    /// Does a [`Userfaultfd::poison`] that skips pages which are mapped or marked already. Returns
    /// the number of bytes that it marked.
    ///
    /// The call also marks a page that was mapped before, if the kernel has dropped that mapping. A
    /// thread that touches the page gets SIGBUS. The thread must look up the page's state, and not
    /// assume that the page is missing.
    ///
    /// # Errors
    /// [`RangeError`] other than `EEXIST`.
    ///
    /// # Panics
    /// If `len` is not a multiple of `page`.
    pub fn poison_unmapped(
        &self,
        start: Hva,
        len: u64,
        page: PageSize,
        wake: Wake,
    ) -> Result<u64, RangeError> {
        self.fill_over(RangeOp::Poison, start, len, page, wake)
    }

    /// Wakes all threads that sleep on faults in `len` bytes from `start`. Each repeats its access.
    ///
    /// # Errors
    /// `EINVAL`: the range is not aligned or is empty.
    pub fn wake(&self, start: Hva, len: u64) -> Result<(), RangeError> {
        sys::wake(
            self,
            UffdioRange {
                start: start.0,
                len,
            },
        )
        .map_err(|errno| at(RangeOp::Wake, start, len, errno))
    }

    /// Write-protects `len` bytes from `start`, which are registered with
    /// [`RegisterMode::WP`](super::RegisterMode). A thread that writes there sleeps, and the kernel
    /// sends an event.
    ///
    /// # Errors
    /// [`RangeError`]. Among others `ENOENT`: the range is not registered with that mode.
    pub fn write_protect(&self, start: Hva, len: u64) -> Result<(), RangeError> {
        self.set_write_protection(start, len, abi::WRITEPROTECT_MODE_WP)
    }

    /// Lifts the write protection of `len` bytes from `start`.
    ///
    /// # Errors
    /// As [`Userfaultfd::write_protect`].
    pub fn write_unprotect(&self, start: Hva, len: u64, wake: Wake) -> Result<(), RangeError> {
        let mode = match wake {
            Wake::Now => 0,
            Wake::Later => abi::WRITEPROTECT_MODE_DONTWAKE,
        };
        self.set_write_protection(start, len, mode)
    }

    fn set_write_protection(&self, start: Hva, len: u64, mode: u64) -> Result<(), RangeError> {
        let range = UffdioRange {
            start: start.0,
            len,
        };
        let mut stuck = 0;
        loop {
            match sys::write_protect(self, UffdioWriteprotect { range, mode }) {
                Err(Errno::AGAIN) if stuck < RETRIES => {
                    stuck += 1;
                    std::thread::yield_now();
                }
                result => {
                    return result.map_err(|errno| at(RangeOp::WriteProtect, start, len, errno));
                }
            }
        }
    }

    fn fill(&self, op: RangeOp, start: Hva, len: u64, wake: Wake) -> Result<(), RangeError> {
        let call = match op {
            RangeOp::Zeropage => sys::zeropage,
            RangeOp::Continue => sys::continue_range,
            RangeOp::Poison => sys::poison,
            other => unreachable!("{other} does not fill"),
        };
        advance(op, start, len, |done| {
            let mut argument = UffdioFill {
                range: UffdioRange {
                    start: start.0 + done,
                    len: len - done,
                },
                mode: wake.mode(),
                done: 0,
            };
            let result = call(self, &mut argument);
            (result, argument.done)
        })
    }

    fn fill_over(
        &self,
        op: RangeOp,
        start: Hva,
        len: u64,
        page: PageSize,
        wake: Wake,
    ) -> Result<u64, RangeError> {
        assert!(
            len.is_multiple_of(page.bytes()),
            "{op}: {len:#x} bytes are no multiple of the page size {:#x}",
            page.bytes()
        );
        let (mut passed, mut there) = (0, 0);
        loop {
            match self.fill(op, Hva(start.0 + passed), len - passed, wake) {
                Ok(()) => break,
                Err(stop) if stop.is_already_there() => {
                    there += page.bytes();
                    passed += stop.done + page.bytes();
                    if passed == len {
                        break;
                    }
                }
                Err(stop) => {
                    return Err(RangeError {
                        start,
                        len,
                        done: passed + stop.done,
                        ..stop
                    });
                }
            }
        }
        if wake == Wake::Now && there > 0 {
            // The call that mapped the skipped pages may not have woken their sleepers.
            self.wake(start, len)?;
        }
        Ok(len - there)
    }
}

/// Repeats a call that may stop half-way (`EAGAIN` with a count of bytes done) from where it
/// stopped.
fn advance(
    op: RangeOp,
    start: Hva,
    len: u64,
    mut call: impl FnMut(u64) -> (Result<(), Errno>, i64),
) -> Result<(), RangeError> {
    let (mut done, mut stuck) = (0, 0);
    loop {
        let errno = match call(done) {
            (Ok(()), _) => return Ok(()),
            // A negative count repeats the errno.
            (Err(Errno::AGAIN), count) => {
                let count = u64::try_from(count).unwrap_or(0);
                done += count;
                stuck = if count > 0 { 0 } else { stuck + 1 };
                if stuck == 0 || stuck <= RETRIES {
                    if stuck > 0 {
                        std::thread::yield_now();
                    }
                    continue;
                }
                Errno::AGAIN
            }
            (Err(errno), _) => errno,
        };
        return Err(RangeError {
            op,
            start,
            len,
            done,
            errno,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(answers: &[(Result<(), Errno>, i64)]) -> (Result<(), RangeError>, Vec<u64>) {
        let mut offsets = Vec::new();
        let result = advance(RangeOp::Continue, Hva(0x1_0000), 0x8000, |done| {
            offsets.push(done);
            answers[(offsets.len() - 1).min(answers.len() - 1)]
        });
        (result, offsets)
    }

    #[test]
    fn a_partial_call_goes_on_where_it_stopped() {
        let (result, offsets) = run(&[
            (Err(Errno::AGAIN), 0x3000),
            (Err(Errno::AGAIN), 0x1000),
            (Ok(()), 0x4000),
        ]);
        assert_eq!(result, Ok(()));
        assert_eq!(offsets, [0, 0x3000, 0x4000]);
    }

    #[test]
    fn the_error_behind_a_partial_call_says_how_far_it_came() {
        let (result, _) = run(&[
            (Err(Errno::AGAIN), 0x3000),
            (Err(Errno::EXIST), -i64::from(libc::EEXIST)),
        ]);
        let error = result.unwrap_err();
        assert_eq!(
            (error.done, error.errno, error.len),
            (0x3000, Errno::EXIST, 0x8000)
        );
    }

    #[test]
    fn no_headway_is_reported_after_a_bounded_number_of_tries() {
        let (result, offsets) = run(&[(Err(Errno::AGAIN), -i64::from(libc::EAGAIN))]);
        assert!(result.unwrap_err().is_changing());
        assert_eq!(offsets.len(), RETRIES as usize + 1);
    }
}
