//! Pages frames: descriptors of page runs, then the bytes of the data pages.
//!
//! The descriptors have a separate checksum in the header's `arg`. So a receiver can verify them
//! before it receives data straight into memory. The checksum of the data follows from its last
//! byte. A receiver must not let a vCPU see the pages before
//! [`FrameHasher::verify`](super::FrameHasher::verify) succeeds.

use pageferry_addr::RamPage;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{
    DESCRIPTOR_BYTES, FrameHasher, FrameHeader, FrameType, HEADER_BYTES, MAX_CONFIRMED_PAGES,
    MAX_DATA_PAGES, MAX_RUNS, PAGE_BYTES, WireError,
};
use super::{Xxh3, check};
use super::{in_range, reserved_zero};

const WHAT: &str = "Pages";
/// The part of the header that the descriptors' checksum covers: all fields before `arg`.
const HEADER_COVERED: usize = 16;

/// The content of a run's pages. The numbers are those on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RunKind {
    /// The bytes of the pages follow.
    Data = 0,
    /// Every byte is zero. Nothing follows.
    Zero = 1,
    /// The receiver has the bytes already. Nothing follows, but the frame's checksum covers them.
    Confirmed = 2,
}

/// Consecutive pages of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The first page.
    pub first: RamPage,
    /// The number of pages, at least 1.
    pub pages: u32,
    /// The content of the pages.
    pub kind: RunKind,
}

impl Run {
    /// Returns the index of the first page behind the run.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.first.0 + self.pages as u64
    }

    /// Returns the number of data bytes of this run.
    #[must_use]
    pub const fn data_bytes(&self) -> usize {
        match self.kind {
            RunKind::Data => self.pages as usize * PAGE_BYTES,
            RunKind::Zero | RunKind::Confirmed => 0,
        }
    }
}

/// The reason why a page was not added to a [`RunList`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RunRefused {
    /// The frame is full. The caller sends it and adds the page to the next.
    #[error("the frame is full")]
    Full,
    /// The page lies before the end of the last run, or past the end of memory.
    #[error("page {page} is not within {min} to {max}")]
    OutOfOrder {
        /// The page.
        page: u64,
        /// The smallest page that may come next.
        min: u64,
        /// The last page of memory.
        max: u64,
    },
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct DescriptorLayout {
    first: U64,
    pages: U32,
    kind: u8,
    reserved: [u8; 3],
}

const _: () = assert!(size_of::<DescriptorLayout>() == DESCRIPTOR_BYTES);

/// The runs of one Pages frame. They ascend, do not overlap and lie inside memory. There are at
/// most [`MAX_RUNS`], with at most [`MAX_DATA_PAGES`] data pages and [`MAX_CONFIRMED_PAGES`]
/// confirmed ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunList {
    runs: Vec<Run>,
    data_pages: u32,
    confirmed_pages: u32,
    memory_pages: u64,
}

impl RunList {
    /// Returns an empty list for a VM of `memory_pages` pages.
    #[must_use]
    pub fn new(memory_pages: u64) -> Self {
        Self {
            runs: Vec::with_capacity(MAX_RUNS),
            data_pages: 0,
            confirmed_pages: 0,
            memory_pages,
        }
    }

    /// Removes all runs and keeps the allocation.
    pub fn clear(&mut self) {
        self.runs.clear();
        (self.data_pages, self.confirmed_pages) = (0, 0);
    }

    /// Returns the runs in ascending order.
    #[must_use]
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Whether there are no runs. Such a frame cannot be sent.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Returns the number of data pages.
    #[must_use]
    pub const fn data_pages(&self) -> u32 {
        self.data_pages
    }

    /// Returns the number of confirmed pages.
    #[must_use]
    pub const fn confirmed_pages(&self) -> u32 {
        self.confirmed_pages
    }

    /// Returns the number of zero pages.
    #[must_use]
    pub fn zero_pages(&self) -> u64 {
        let zero = self.runs.iter().filter(|run| run.kind == RunKind::Zero);
        zero.map(|run| u64::from(run.pages)).sum()
    }

    /// Returns the number of data bytes after the descriptors.
    #[must_use]
    pub const fn data_bytes(&self) -> usize {
        self.data_pages as usize * PAGE_BYTES
    }

    /// Adds the next page. Extends the last run if the page continues it.
    ///
    /// # Errors
    /// [`RunRefused`]. The list is unchanged then.
    pub fn push(&mut self, page: RamPage, kind: RunKind) -> Result<(), RunRefused> {
        let min = self.runs.last().map_or(0, Run::end);
        if page.0 < min || page.0 >= self.memory_pages {
            return Err(RunRefused::OutOfOrder {
                page: page.0,
                min,
                max: self.memory_pages.saturating_sub(1),
            });
        }
        let full = match kind {
            RunKind::Data => self.data_pages as usize == MAX_DATA_PAGES,
            RunKind::Confirmed => self.confirmed_pages as usize == MAX_CONFIRMED_PAGES,
            RunKind::Zero => false,
        };
        if full {
            return Err(RunRefused::Full);
        }
        let full = self.runs.len() == MAX_RUNS;
        match self.runs.last_mut() {
            Some(last) if last.kind == kind && min == page.0 && last.pages < u32::MAX => {
                last.pages += 1;
            }
            _ if full => return Err(RunRefused::Full),
            _ => self.runs.push(Run {
                first: page,
                pages: 1,
                kind,
            }),
        }
        match kind {
            RunKind::Data => self.data_pages += 1,
            RunKind::Confirmed => self.confirmed_pages += 1,
            RunKind::Zero => {}
        }
        Ok(())
    }

    /// Returns the header of this frame, with checksums of zero.
    fn header(&self) -> FrameHeader {
        let count = self.runs.len();
        let payload_len = count * DESCRIPTOR_BYTES + self.data_bytes();
        FrameHeader::unsealed(FrameType::Pages, payload_len as u32, count as u32, 0)
    }

    /// Clears `out`, writes header and descriptors to it, and returns the hasher for the data. The
    /// caller feeds it the pages' bytes in the runs' order, those of confirmed pages by
    /// [`update_unsent`](FrameHasher::update_unsent). It [`seal`](FrameHasher::seal)s `out`, and
    /// sends `out` and the bytes of the data pages.
    ///
    /// The bytes must not change between hashing and sending, or the receiver refuses them. So the
    /// caller must copy the memory of a running guest first.
    ///
    /// # Panics
    /// If there are no runs.
    pub fn encode_head(&self, out: &mut Vec<u8>) -> FrameHasher {
        assert!(!self.runs.is_empty(), "a Pages frame has at least one run");
        out.clear();
        let mut header = self.header();
        out.extend_from_slice(&header.to_bytes());
        for run in &self.runs {
            let descriptor = DescriptorLayout {
                first: run.first.0.into(),
                pages: run.pages.into(),
                kind: run.kind as u8,
                reserved: [0; 3],
            };
            out.extend_from_slice(descriptor.as_bytes());
        }
        header.arg = descriptors_checksum(&header, &out[HEADER_BYTES..]);
        out[..HEADER_BYTES].copy_from_slice(&header.to_bytes());
        let mut hasher = header.hasher();
        hasher.update(&out[HEADER_BYTES..]);
        hasher
    }

    /// Returns the number of descriptor bytes after the header of a Pages frame.
    ///
    /// # Errors
    /// [`WireError::OutOfRange`] for a count that is not 1 to [`MAX_RUNS`], or exceeds the payload.
    pub fn descriptors_len(header: &FrameHeader) -> Result<usize, WireError> {
        let room = header.payload_len as usize / DESCRIPTOR_BYTES;
        let max = MAX_RUNS.min(room) as u64;
        in_range(WHAT, "count", header.count.into(), 1, max)?;
        Ok(header.count as usize * DESCRIPTOR_BYTES)
    }

    /// Decodes the descriptors of the frame with this header, for a VM of `memory_pages` pages.
    ///
    /// The returned descriptors are verified by their checksum. The payload's length is that of the
    /// descriptors and the announced data.
    ///
    /// # Errors
    /// [`WireError::OutOfRange`] for counts, and for runs that do not ascend, overlap, or leave
    /// memory; [`WireError::Checksum`], [`WireError::BadField`], [`WireError::TooLong`] for too
    /// many data or confirmed pages, [`WireError::WrongLength`].
    ///
    /// # Panics
    /// If the header is not that of a Pages frame.
    pub fn decode(
        header: &FrameHeader,
        descriptors: &[u8],
        memory_pages: u64,
    ) -> Result<Self, WireError> {
        assert_eq!(header.frame_type, FrameType::Pages);
        let len = Self::descriptors_len(header)?;
        if descriptors.len() != len {
            return Err(WireError::WrongLength {
                what: WHAT,
                len: descriptors.len() as u64,
                expected: len as u64,
            });
        }
        check(
            "Pages descriptors",
            header.arg,
            descriptors_checksum(header, descriptors),
        )?;
        let mut list = Self::new(memory_pages);
        let descriptors = <[DescriptorLayout]>::ref_from_bytes(descriptors)
            .expect("whole descriptors of an unaligned layout");
        let (mut min, mut data_pages, mut confirmed_pages) = (0, 0, 0);
        for descriptor in descriptors {
            let run = decode_run(descriptor, min, memory_pages)?;
            min = run.end();
            match run.kind {
                RunKind::Data => data_pages += u64::from(run.pages),
                RunKind::Confirmed => confirmed_pages += u64::from(run.pages),
                RunKind::Zero => {}
            }
            list.runs.push(run);
        }
        for (what, len, max) in [
            ("Pages data (pages)", data_pages, MAX_DATA_PAGES),
            ("confirmed (pages)", confirmed_pages, MAX_CONFIRMED_PAGES),
        ] {
            let max = max as u64;
            if len > max {
                return Err(WireError::TooLong { what, len, max });
            }
        }
        list.data_pages = data_pages as u32;
        list.confirmed_pages = confirmed_pages as u32;
        let expected = len + list.data_bytes();
        if header.payload_len as usize != expected {
            return Err(WireError::WrongLength {
                what: WHAT,
                len: header.payload_len.into(),
                expected: expected as u64,
            });
        }
        Ok(list)
    }
}

/// Decodes one run, which must not begin before `min` nor end behind `memory_pages`.
fn decode_run(
    descriptor: &DescriptorLayout,
    min: u64,
    memory_pages: u64,
) -> Result<Run, WireError> {
    reserved_zero(WHAT, "run.reserved", &descriptor.reserved)?;
    let kind = match descriptor.kind {
        0 => RunKind::Data,
        1 => RunKind::Zero,
        2 => RunKind::Confirmed,
        other => {
            return Err(WireError::BadField {
                what: WHAT,
                field: "run.kind",
                value: other.into(),
            });
        }
    };
    let (first, pages) = (descriptor.first.get(), descriptor.pages.get());
    let last = memory_pages.saturating_sub(1);
    in_range(WHAT, "run.first", first, min, last)?;
    in_range(WHAT, "run.pages", pages.into(), 1, memory_pages - first)?;
    Ok(Run {
        first: RamPage(first),
        pages,
        kind,
    })
}

/// Returns the xxh3-64 of the header's first 16 bytes and the descriptors.
fn descriptors_checksum(header: &FrameHeader, descriptors: &[u8]) -> u64 {
    let mut state = Xxh3::new();
    state.update(&header.to_bytes()[..HEADER_COVERED]);
    state.update(descriptors);
    state.digest()
}
