//! The messages that are read from a userfaultfd.

use super::abi;
use pageferry_addr::Hva;
use std::os::fd::{OwnedFd, RawFd};

/// A page fault. Its thread sleeps until the page is present or the thread is woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageFault {
    /// The address of the base page. With [`Features::EXACT_ADDRESS`](super::Features) it is the
    /// exact address of the access.
    pub address: Hva,
    /// Whether the access was a write.
    pub write: bool,
    /// Whether the page is present but write-protected.
    pub write_protected: bool,
    /// Whether the page is in the page cache but not mapped.
    pub minor: bool,
    /// The thread's id with [`Features::THREAD_ID`](super::Features), else 0.
    pub thread: u32,
}

/// An event of a userfaultfd.
///
/// All events but [`Event::PageFault`] come only if their feature was requested on opening.
#[derive(Debug)]
pub enum Event {
    /// A thread touched a registered page.
    PageFault(PageFault),
    /// The process has forked. The userfaultfd of this event serves the child's ranges.
    Fork {
        /// The child's userfaultfd, owned by the reader of the event.
        child: OwnedFd,
    },
    /// `mremap` moved a registered range.
    Remap {
        /// The old address.
        from: Hva,
        /// The new address.
        to: Hva,
        /// Its length in bytes.
        len: u64,
    },
    /// Pages in `start..end` were dropped. They are missing again.
    Remove {
        /// The first byte.
        start: Hva,
        /// The first byte behind the range.
        end: Hva,
    },
    /// The mappings in `start..end` are gone.
    Unmap {
        /// The first byte.
        start: Hva,
        /// The first byte behind the range.
        end: Hva,
    },
    /// A message that this crate does not know. The kernel sends such messages only for requested
    /// features that this crate does not know either. The reader may ignore it.
    Unknown {
        /// The kernel's number of the event.
        event: u8,
    },
}

/// A decoded message: like [`Event`], but the child's descriptor is still a bare number.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Message {
    PageFault(PageFault),
    Fork(RawFd),
    Remap { from: Hva, to: Hva, len: u64 },
    Remove { start: Hva, end: Hva },
    Unmap { start: Hva, end: Hva },
    Unknown { event: u8 },
}

impl Message {
    /// Decodes one `struct uffd_msg`.
    pub(super) fn decode(bytes: &[u8; abi::MSG_BYTES]) -> Self {
        let word = |index: usize| {
            let at = abi::MSG_ARG + 8 * index;
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            word
        };
        let long = |index| u64::from_ne_bytes(word(index));
        let int = |index| {
            let [a, b, c, d, ..] = word(index);
            [a, b, c, d]
        };
        match bytes[0] {
            abi::EVENT_PAGEFAULT => Self::PageFault(PageFault {
                address: Hva(long(1)),
                write: long(0) & abi::PAGEFAULT_FLAG_WRITE != 0,
                write_protected: long(0) & abi::PAGEFAULT_FLAG_WP != 0,
                minor: long(0) & abi::PAGEFAULT_FLAG_MINOR != 0,
                thread: u32::from_ne_bytes(int(2)),
            }),
            abi::EVENT_FORK => Self::Fork(RawFd::from_ne_bytes(int(0))),
            abi::EVENT_REMAP => Self::Remap {
                from: Hva(long(0)),
                to: Hva(long(1)),
                len: long(2),
            },
            abi::EVENT_REMOVE => Self::Remove {
                start: Hva(long(0)),
                end: Hva(long(1)),
            },
            abi::EVENT_UNMAP => Self::Unmap {
                start: Hva(long(0)),
                end: Hva(long(1)),
            },
            event => Self::Unknown { event },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(event: u8, words: [u64; 3]) -> [u8; abi::MSG_BYTES] {
        let mut bytes = [0xee; abi::MSG_BYTES];
        bytes[0] = event;
        for (index, word) in words.into_iter().enumerate() {
            bytes[8 + 8 * index..16 + 8 * index].copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    #[test]
    fn a_page_fault_has_address_flags_and_thread() {
        let fault = |flags| match Message::decode(&message(0x12, [flags, 0x7f00_0000_1000, 4711])) {
            Message::PageFault(fault) => fault,
            other => panic!("{other:?}"),
        };
        let base = PageFault {
            address: Hva(0x7f00_0000_1000),
            write: false,
            write_protected: false,
            minor: false,
            thread: 4711,
        };
        assert_eq!(fault(0), base);
        assert_eq!(
            fault(1),
            PageFault {
                write: true,
                ..base
            }
        );
        assert_eq!(
            fault(2),
            PageFault {
                write_protected: true,
                ..base
            }
        );
        assert_eq!(
            fault(5),
            PageFault {
                write: true,
                minor: true,
                ..base
            }
        );
    }

    #[test]
    fn the_other_events_have_their_fields() {
        let at = |event| Message::decode(&message(event, [0x1000, 0x3000, 0x2000]));
        assert_eq!(at(0x13), Message::Fork(0x1000));
        assert_eq!(
            at(0x14),
            Message::Remap {
                from: Hva(0x1000),
                to: Hva(0x3000),
                len: 0x2000
            }
        );
        assert_eq!(
            at(0x15),
            Message::Remove {
                start: Hva(0x1000),
                end: Hva(0x3000)
            }
        );
        assert_eq!(
            at(0x16),
            Message::Unmap {
                start: Hva(0x1000),
                end: Hva(0x3000)
            }
        );
        assert_eq!(at(0x17), Message::Unknown { event: 0x17 });
    }
}
