//! The errors of calls on ranges of addresses.

use core::fmt;
use pageferry_addr::Hva;
use rustix::io::Errno;

/// A call on a range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RangeOp {
    /// `UFFDIO_REGISTER`
    Register,
    /// `UFFDIO_UNREGISTER`
    Unregister,
    /// `UFFDIO_WAKE`
    Wake,
    /// `UFFDIO_COPY`
    Copy,
    /// `UFFDIO_ZEROPAGE`
    Zeropage,
    /// `UFFDIO_MOVE`
    Move,
    /// `UFFDIO_WRITEPROTECT`
    WriteProtect,
    /// `UFFDIO_CONTINUE`
    Continue,
    /// `UFFDIO_POISON`
    Poison,
    /// `PAGEMAP_SCAN`
    Scan,
}

impl fmt::Display for RangeOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Register => "UFFDIO_REGISTER",
            Self::Unregister => "UFFDIO_UNREGISTER",
            Self::Wake => "UFFDIO_WAKE",
            Self::Copy => "UFFDIO_COPY",
            Self::Zeropage => "UFFDIO_ZEROPAGE",
            Self::Move => "UFFDIO_MOVE",
            Self::WriteProtect => "UFFDIO_WRITEPROTECT",
            Self::Continue => "UFFDIO_CONTINUE",
            Self::Poison => "UFFDIO_POISON",
            Self::Scan => "PAGEMAP_SCAN",
        })
    }
}

/// A call on a range that stopped before its end. The message has the errno's meaning for the call.
///
/// ```
/// use pageferry_addr::Hva;
/// use pageferry_userfault::uffd::{RangeError, RangeOp};
/// use rustix::io::Errno;
///
/// let (op, start, errno) = (RangeOp::Move, Hva(0x7000), Errno::BUSY);
/// let error = RangeError { op, start, len: 0x3000, done: 0x1000, errno };
/// let text = error.to_string();
/// assert!(text.starts_with("UFFDIO_MOVE of 0x3000 bytes at 0x7000 stopped after 0x1000 bytes"));
/// assert!(text.ends_with(": the source page is pinned, or a fork made another process share it"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeError {
    /// The call that failed.
    pub op: RangeOp,
    /// The first byte of the range. For `UFFDIO_MOVE` it is that of the destination.
    pub start: Hva,
    /// Its length in bytes.
    pub len: u64,
    /// The number of bytes from the start that are done and stay done. Unless the call was told
    /// otherwise, their sleepers were woken. Always 0 for calls that succeed or fail as a whole:
    /// register, unregister, wake, write-protect.
    pub done: u64,
    /// The kernel's error for the page at `start + done`.
    pub errno: Errno,
}

impl RangeError {
    /// The error of a call that succeeds or fails as a whole.
    pub(super) fn whole(op: RangeOp, start: Hva, len: u64, errno: Errno) -> Self {
        Self {
            op,
            start,
            len,
            done: 0,
            errno,
        }
    }

    /// Whether the page at `start + done` has contents already (`EEXIST`). It is mapped, or it is
    /// in the page cache, or it has a poison marker that the call does not replace. The call
    /// changed nothing there, and woke no thread that sleeps on the page.
    #[must_use]
    pub fn is_already_there(&self) -> bool {
        self.errno == Errno::EXIST
    }

    /// Whether `UFFDIO_CONTINUE` found no page in the page cache at `start + done` (`EFAULT`).
    #[must_use]
    pub fn is_not_in_page_cache(&self) -> bool {
        self.op == RangeOp::Continue && self.errno == Errno::FAULT
    }

    /// Whether the range is not (or no longer) one registered mapping (`ENOENT`). `UFFDIO_MOVE` has
    /// more causes for this errno, so it is `false` there.
    #[must_use]
    pub fn is_not_registered(&self) -> bool {
        self.op != RangeOp::Move && self.errno == Errno::NOENT
    }

    /// Whether the mappings are being changed (`EAGAIN`). The caller may repeat the call from
    /// `start + done` after it has read the event of that change.
    ///
    /// The errno may outlast the read for a moment, until the changing thread has run
    /// (`userfaultfd_event_wait_completion` in `fs/userfaultfd.c`). So the caller must not wait for
    /// a further event without a limit.
    #[must_use]
    pub fn is_changing(&self) -> bool {
        self.errno == Errno::AGAIN
    }

    /// Whether the process that the userfaultfd serves has exited (`ESRCH`).
    #[must_use]
    pub fn is_process_gone(&self) -> bool {
        self.errno == Errno::SRCH
    }

    /// The meaning of the errno for this call (`fs/userfaultfd.c` and `mm/userfaultfd.c`).
    fn meaning(&self) -> Option<&'static str> {
        use RangeOp::{
            Continue, Copy, Move, Poison, Register, Scan, Unregister, Wake, WriteProtect, Zeropage,
        };
        Some(match (self.op, self.errno) {
            (_, Errno::AGAIN) => {
                "the mappings are changing; read the event of the change, then repeat the call"
            }
            (_, Errno::SRCH) => "the process that the userfaultfd serves has exited",
            (Register | Unregister, Errno::NOMEM) => {
                "no memory is free, or the process that the userfaultfd serves has exited"
            }
            (_, Errno::NOMEM) => "no memory is free",
            (_, Errno::INTR) => "a fatal signal ended the call",
            (Register, Errno::INVAL) => {
                "expected a mapped range of whole pages, and a mode that its mappings support"
            }
            (Register, Errno::BUSY) => "another userfaultfd has the range",
            (Register, Errno::PERM) => "a shared file must be mapped from a writable descriptor",
            (Unregister, Errno::INVAL) => "expected a mapped range of whole pages",
            (Wake, Errno::INVAL) => "expected a range of at least one whole page",
            (Copy | Zeropage | Continue | Poison, Errno::NOENT) => {
                "the range is not (or no longer) one registered mapping"
            }
            (WriteProtect, Errno::NOENT) => "a page of the range is not registered with mode WP",
            (Move, Errno::NOENT) => {
                "the source has a hole, or the source or the destination is not mapped"
            }
            (Copy | Zeropage | Move, Errno::EXIST) => "the page there has contents already",
            (Continue, Errno::EXIST) => "the page there is mapped already",
            (Poison, Errno::EXIST) => "the page there is mapped or marked already",
            (Copy, Errno::FAULT) => {
                "the bytes to copy are not readable, or the page is behind the end of the file"
            }
            (Zeropage, Errno::FAULT) => "the page is behind the end of the file",
            (Continue, Errno::FAULT) => "the page is not in the page cache",
            (Continue, Errno::IO) => "the page in the page cache has a memory error",
            (Move, Errno::FAULT) => "the source page has a marker or a memory error",
            (Move, Errno::BUSY) => {
                "the source page is pinned, or a fork made another process share it"
            }
            (Move, Errno::INVAL) => {
                "expected whole pages of this process, from one private anonymous writable mapping \
                 to another with the same protection, registered with this userfaultfd"
            }
            (Copy | Zeropage | Continue | Poison | WriteProtect, Errno::INVAL) => {
                "expected whole pages, and a call and mode that the registration allows"
            }
            (Scan, Errno::PERM) => {
                "a mapping of the range is not registered with mode WP and feature WP_ASYNC"
            }
            (Scan, Errno::INVAL) => "expected whole pages, of 4 KiB or 2 MiB each",
            (Scan, Errno::NOTTY) => "Linux 6.7 or later is needed",
            _ => return None,
        })
    }
}

impl fmt::Display for RangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            op,
            start,
            len,
            done,
            errno,
        } = self;
        write!(
            f,
            "{op} of {len:#x} bytes at {start} stopped after {done:#x} bytes: {errno}"
        )?;
        self.meaning()
            .map_or(Ok(()), |meaning| write!(f, ": {meaning}"))
    }
}

impl std::error::Error for RangeError {}

impl From<RangeError> for std::io::Error {
    fn from(error: RangeError) -> Self {
        error.errno.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_error_keeps_the_errno() {
        let error = RangeError {
            op: RangeOp::Continue,
            start: Hva(0x7000),
            len: 0x3000,
            done: 0x1000,
            errno: Errno::EXIST,
        };
        assert!(error.is_already_there() && !error.is_not_in_page_cache());
        assert!(
            error.to_string().starts_with(
                "UFFDIO_CONTINUE of 0x3000 bytes at 0x7000 stopped after 0x1000 bytes"
            )
        );
        assert_eq!(
            std::io::Error::from(error).raw_os_error(),
            Some(libc::EEXIST)
        );
    }

    #[test]
    fn an_errno_has_the_meaning_of_its_call() {
        let text = |op, errno| RangeError::whole(op, Hva(0x7000), 0x1000, errno).to_string();
        for (op, errno, meaning) in [
            (
                RangeOp::Copy,
                Errno::NOENT,
                "not (or no longer) one registered mapping",
            ),
            (
                RangeOp::WriteProtect,
                Errno::NOENT,
                "not registered with mode WP",
            ),
            (RangeOp::Move, Errno::NOENT, "the source has a hole"),
            (
                RangeOp::Copy,
                Errno::FAULT,
                "the bytes to copy are not readable",
            ),
            (RangeOp::Continue, Errno::FAULT, "not in the page cache"),
            (RangeOp::Register, Errno::BUSY, "another userfaultfd"),
            (RangeOp::Move, Errno::BUSY, "pinned"),
            (RangeOp::Poison, Errno::SRCH, "has exited"),
            (RangeOp::Unregister, Errno::NOMEM, "has exited"),
            (RangeOp::Scan, Errno::PERM, "WP_ASYNC"),
        ] {
            let text = text(op, errno);
            assert!(text.contains(meaning), "{meaning} is not in: {text}");
            assert!(text.starts_with(&op.to_string()), "{text}");
        }
        // An errno that the kernel does not document has no meaning.
        assert!(text(RangeOp::Wake, Errno::XDEV).ends_with("(os error 18)"));
    }
}
