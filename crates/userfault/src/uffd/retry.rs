//! Calls that the kernel asks to repeat (`EAGAIN`).
//!
//! **Guarantee.** A call goes on where it stopped. Without progress it is repeated a bounded number
//! of times, and then fails with `EAGAIN`.

use super::fd::Userfaultfd;
use super::flags::Features;
use super::range_error::{RangeError, RangeOp};
use pageferry_addr::Hva;
use rustix::io::Errno;

/// The number of repetitions of a call that makes no progress (`EAGAIN`), before the caller gets
/// the error.
///
/// Without event features the cause is a page table that vanishes under the call (the kernel makes
/// a huge page), and it passes at once.
const RETRIES: u32 = 32;

impl Userfaultfd {
    /// The repetitions that may help. With event features there is none: the errno may last until
    /// an event is read, perhaps by this thread.
    pub(super) fn retries(&self) -> u32 {
        let events = Features::EVENT_FORK
            | Features::EVENT_REMAP
            | Features::EVENT_REMOVE
            | Features::EVENT_UNMAP;
        if self.features().bits() & events.bits() == 0 {
            RETRIES
        } else {
            0
        }
    }
}

/// Repeats a call that may stop half-way (`EAGAIN` with a count of bytes done) from where it
/// stopped.
pub(super) fn advance(
    op: RangeOp,
    start: Hva,
    len: u64,
    retries: u32,
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
                if stuck == 0 || stuck <= retries {
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
        let result = advance(RangeOp::Continue, Hva(0x1_0000), 0x8000, RETRIES, |done| {
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
