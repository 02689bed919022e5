//! The messages that are read from a userfaultfd.

use super::Userfaultfd;
use super::abi;
use pageferry_addr::Hva;
use std::ops::Range;
use std::os::fd::RawFd;

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
/// All events but [`Event::PageFault`] come only if their feature was requested on opening. The
/// thread that changes a mapping sleeps until its event is read. Until that thread runs on, calls
/// that resolve faults fail with `EAGAIN`
/// ([`RangeError::is_changing`](super::RangeError::is_changing)).
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// A thread touched a registered page.
    PageFault(PageFault),
    /// The process has forked ([`Features::EVENT_FORK`](super::Features)).
    Fork {
        /// The child's userfaultfd, with the features of its parent's. It serves the child's
        /// copies of the registered ranges. Dropping it unregisters them.
        child: Userfaultfd,
    },
    /// `mremap` moved a registered range ([`Features::EVENT_REMAP`](super::Features)). The
    /// registration moved with it.
    Remap {
        /// The old address.
        from: Hva,
        /// The new address.
        to: Hva,
        /// Its length in bytes.
        len: u64,
    },
    /// The whole pages in `start..end` are dropped ([`Features::EVENT_REMOVE`](super::Features)).
    /// They are missing again, and their contents are those of an empty page. The kernel drops them
    /// when this event has been read, perhaps a little later.
    ///
    /// In a mapping of huge pages of a pool, the range may begin or end inside a page. The kernel
    /// keeps such a page, and zeroes its bytes in the range. [`Event::dropped`] has the pages that
    /// are missing.
    Remove {
        /// The first byte.
        start: Hva,
        /// The first byte behind the range.
        end: Hva,
    },
    /// The mappings in `start..end` are gone ([`Features::EVENT_UNMAP`](super::Features)). Threads
    /// that slept on their pages were woken.
    Unmap {
        /// The first byte.
        start: Hva,
        /// The first byte behind the range.
        end: Hva,
    },
}

impl Event {
    /// The pages of `page_bytes` bytes that an [`Event::Remove`] makes missing: those that lie
    /// wholly in its range. `None` if there are none, or for another event.
    ///
    /// `page_bytes` is the size of the mapping's pages: that of the pool's for huge pages of a
    /// pool, else 4096. Transparent huge pages are not of a pool. The other events of changed
    /// mappings name whole pages of any mapping.
    ///
    /// ```
    /// use pageferry_addr::Hva;
    /// use pageferry_userfault::uffd::Event;
    ///
    /// let (start, end) = (Hva(0x30_0000), Hva(0x70_0000));
    /// let event = Event::Remove { start, end };
    /// assert_eq!(event.dropped(4096), Some(start..end));
    /// assert_eq!(event.dropped(2 << 20), Some(Hva(0x40_0000)..Hva(0x60_0000)));
    /// assert_eq!(event.dropped(1 << 30), None);
    /// ```
    ///
    /// # Panics
    /// If `page_bytes` is not a power of two.
    #[must_use]
    pub fn dropped(&self, page_bytes: u64) -> Option<Range<Hva>> {
        assert!(
            page_bytes.is_power_of_two(),
            "pages of {page_bytes} bytes: expected a power of two"
        );
        let Self::Remove { start, end } = self else {
            return None;
        };
        let first = start.0.checked_next_multiple_of(page_bytes)?;
        let behind = end.0 & !(page_bytes - 1);
        (first < behind).then_some(Hva(first)..Hva(behind))
    }
}

/// A decoded message: like [`Event`], but the child's descriptor is still a bare number.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Message {
    PageFault(PageFault),
    Fork(RawFd),
    Remap { from: Hva, to: Hva, len: u64 },
    Remove { start: Hva, end: Hva },
    Unmap { start: Hva, end: Hva },
}

impl Message {
    /// Decodes one `struct uffd_msg`. The error is the number of an event that is not known.
    pub(super) fn decode(bytes: &[u8; abi::MSG_BYTES]) -> Result<Self, u8> {
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
        Ok(match bytes[0] {
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
            event => return Err(event),
        })
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
            Ok(Message::PageFault(fault)) => fault,
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
    fn a_removal_drops_the_whole_pages_in_its_range() {
        const HUGE: u64 = 2 << 20;
        let dropped = |start: u64, end: u64| {
            let (start, end) = (Hva(start), Hva(end));
            let range = Event::Remove { start, end }.dropped(HUGE);
            range.map(|range| (range.start.0 / HUGE, range.end.0 / HUGE))
        };
        assert_eq!(dropped(HUGE, 3 * HUGE), Some((1, 3)));
        assert_eq!(dropped(HUGE / 2, 5 * HUGE / 2), Some((1, 2)));
        assert_eq!(dropped(HUGE, 2 * HUGE - 4096), None);
        assert_eq!(dropped(HUGE + 4096, 2 * HUGE), None);
        assert_eq!(dropped(HUGE / 2, 3 * HUGE / 2), None, "parts of two pages");
        assert_eq!(dropped(u64::MAX - 8191, u64::MAX), None, "no wrap");
        let (start, end) = (Hva(0), Hva(2 * HUGE));
        assert_eq!(Event::Unmap { start, end }.dropped(HUGE), None);
    }

    #[test]
    fn the_other_events_have_their_fields() {
        let at = |event| Message::decode(&message(event, [0x1000, 0x3000, 0x2000]));
        assert_eq!(at(0x13), Ok(Message::Fork(0x1000)));
        assert_eq!(
            at(0x14),
            Ok(Message::Remap {
                from: Hva(0x1000),
                to: Hva(0x3000),
                len: 0x2000
            })
        );
        assert_eq!(
            at(0x15),
            Ok(Message::Remove {
                start: Hva(0x1000),
                end: Hva(0x3000)
            })
        );
        assert_eq!(
            at(0x16),
            Ok(Message::Unmap {
                start: Hva(0x1000),
                end: Hva(0x3000)
            })
        );
        assert_eq!((at(0x11), at(0x17), at(0)), (Err(0x11), Err(0x17), Err(0)));
    }
}
