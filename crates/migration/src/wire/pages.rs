//! Pages frames: runs of pages, described first, then the bytes of those that have any.
//!
//! The descriptors have a checksum of their own (in the header's `arg`), so that a receiver knows
//! where the data belongs before it receives the first byte of it, straight into its place. Whether
//! the data is what was sent is known after its last byte: a receiver must not let anybody see the
//! pages before [`FrameHasher::verify`](super::FrameHasher::verify) has agreed.

use pageferry_addr::RamPage;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::checksum::{Xxh3, check};
use super::error::{in_range, reserved_zero};
use super::{
    DESCRIPTOR_BYTES, FrameHasher, FrameHeader, FrameType, HEADER_BYTES, MAX_DATA_PAGES, MAX_RUNS,
    PAGE_BYTES, WireError,
};

const WHAT: &str = "Pages";
/// The part of the header the descriptors' checksum covers: all before the field that holds it.
const HEADER_COVERED: usize = 16;

/// How a run's pages are sent; the number is the wire's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RunKind {
    /// Their bytes follow.
    Data = 0,
    /// Every byte is zero; nothing follows.
    Zero = 1,
}

/// Consecutive pages that are sent in the same way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The first page.
    pub first: RamPage,
    /// How many pages, at least 1.
    pub pages: u32,
    /// How they are sent.
    pub kind: RunKind,
}

impl Run {
    /// The index of the first page behind the run.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.first.0 + self.pages as u64
    }

    /// The bytes that follow for this run.
    #[must_use]
    pub const fn data_bytes(&self) -> usize {
        match self.kind {
            RunKind::Data => self.pages as usize * PAGE_BYTES,
            RunKind::Zero => 0,
        }
    }
}

/// Why a page was not added to a [`RunList`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RunRefused {
    /// The frame has no room for it: send this frame and put the page into the next.
    #[error("the frame is full")]
    Full,
    /// The page lies before the end of the last run, or past the end of memory.
    #[error("page {page} is not within {min} to {max}")]
    OutOfOrder {
        /// The page.
        page: u64,
        /// The smallest page that could come now.
        min: u64,
        /// The last page of memory.
        max: u64,
    },
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Descriptor {
    first: U64,
    pages: U32,
    kind: u8,
    reserved: [u8; 3],
}

const _: () = assert!(size_of::<Descriptor>() == DESCRIPTOR_BYTES);

/// The runs of one Pages frame: strictly ascending, not overlapping, inside memory, at most
/// [`MAX_RUNS`] with at most [`MAX_DATA_PAGES`] data pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunList {
    runs: Vec<Run>,
    data_pages: u32,
    memory_pages: u64,
}

impl RunList {
    /// A list without runs for a VM of `memory_pages` pages.
    #[must_use]
    pub fn new(memory_pages: u64) -> Self {
        Self {
            runs: Vec::with_capacity(MAX_RUNS),
            data_pages: 0,
            memory_pages,
        }
    }

    /// Forgets all runs and keeps the room.
    pub fn clear(&mut self) {
        self.runs.clear();
        self.data_pages = 0;
    }

    /// The runs, in ascending order.
    #[must_use]
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Whether there are none. Such a frame cannot be sent.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// How many pages have their bytes in the frame.
    #[must_use]
    pub const fn data_pages(&self) -> u32 {
        self.data_pages
    }

    /// How many pages are zero.
    #[must_use]
    pub fn zero_pages(&self) -> u64 {
        let zero = self.runs.iter().filter(|run| run.kind == RunKind::Zero);
        zero.map(|run| u64::from(run.pages)).sum()
    }

    /// How many bytes of pages follow the descriptors.
    #[must_use]
    pub const fn data_bytes(&self) -> usize {
        self.data_pages as usize * PAGE_BYTES
    }

    /// Adds the next page, prolonging the last run where it fits.
    ///
    /// # Errors
    /// [`RunRefused`]; the list is unchanged.
    pub fn push(&mut self, page: RamPage, kind: RunKind) -> Result<(), RunRefused> {
        let min = self.runs.last().map_or(0, Run::end);
        if page.0 < min || page.0 >= self.memory_pages {
            return Err(RunRefused::OutOfOrder {
                page: page.0,
                min,
                max: self.memory_pages.saturating_sub(1),
            });
        }
        if kind == RunKind::Data && self.data_pages as usize == MAX_DATA_PAGES {
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
        if kind == RunKind::Data {
            self.data_pages += 1;
        }
        Ok(())
    }

    /// The header of this frame, its checksum still zero.
    fn header(&self) -> FrameHeader {
        let count = self.runs.len();
        let payload_len = count * DESCRIPTOR_BYTES + self.data_bytes();
        FrameHeader::unsealed(FrameType::Pages, payload_len as u32, count as u32, 0)
    }

    /// Writes header and descriptors to `out` (which is cleared) and returns the hasher for the
    /// data: feed it the pages' bytes in the runs' order, [`seal`](FrameHasher::seal) `out`,
    /// then send `out` and the same bytes.
    ///
    /// The bytes must not change between the hashing and the sending, or the receiver will refuse
    /// them: memory of a running guest has to be copied first.
    ///
    /// # Panics
    /// If there are no runs.
    pub fn encode_head(&self, out: &mut Vec<u8>) -> FrameHasher {
        assert!(!self.runs.is_empty(), "a Pages frame has at least one run");
        out.clear();
        let mut header = self.header();
        out.extend_from_slice(&header.to_bytes());
        for run in &self.runs {
            let descriptor = Descriptor {
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

    /// How many bytes of descriptors follow the header of a Pages frame.
    ///
    /// # Errors
    /// [`WireError::OutOfRange`] for a count that is not 1 to [`MAX_RUNS`] or more than fit the
    /// payload.
    pub fn descriptors_len(header: &FrameHeader) -> Result<usize, WireError> {
        let room = header.payload_len as usize / DESCRIPTOR_BYTES;
        let max = MAX_RUNS.min(room) as u64;
        in_range(WHAT, "count", header.count.into(), 1, max)?;
        Ok(header.count as usize * DESCRIPTOR_BYTES)
    }

    /// Reads the descriptors of the frame with this header, for a VM of `memory_pages` pages.
    ///
    /// What comes out is the sender's word: the descriptors' checksum was compared, and the
    /// payload's length is that of the descriptors and the data they announce.
    ///
    /// # Errors
    /// [`WireError::OutOfRange`] for counts, and for runs that do not ascend, overlap, or leave
    /// memory; [`WireError::Checksum`], [`WireError::BadField`], [`WireError::TooLong`] for too
    /// many data pages, [`WireError::WrongLength`].
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
        let descriptors = <[Descriptor]>::ref_from_bytes(descriptors)
            .expect("whole descriptors of an unaligned layout");
        let (mut min, mut data_pages) = (0, 0);
        for descriptor in descriptors {
            let run = decode_run(descriptor, min, memory_pages)?;
            min = run.end();
            if run.kind == RunKind::Data {
                data_pages += u64::from(run.pages);
            }
            list.runs.push(run);
        }
        if data_pages > MAX_DATA_PAGES as u64 {
            return Err(WireError::TooLong {
                what: "Pages data (pages)",
                len: data_pages,
                max: MAX_DATA_PAGES as u64,
            });
        }
        list.data_pages = data_pages as u32;
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

/// One run, which may not begin before `min` nor end behind `memory_pages`.
fn decode_run(descriptor: &Descriptor, min: u64, memory_pages: u64) -> Result<Run, WireError> {
    reserved_zero(WHAT, "run.reserved", &descriptor.reserved)?;
    let kind = match descriptor.kind {
        0 => RunKind::Data,
        1 => RunKind::Zero,
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

/// xxh3-64 over the header's first 16 bytes and the descriptors.
fn descriptors_checksum(header: &FrameHeader, descriptors: &[u8]) -> u64 {
    let mut state = Xxh3::new();
    state.update(&header.to_bytes()[..HEADER_COVERED]);
    state.update(descriptors);
    state.digest()
}
