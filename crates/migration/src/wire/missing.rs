//! Missing frames: the pages that the destination does not have, as runs.
//!
//! **Guarantee.** Decoded runs ascend, do not touch, are not empty and lie in memory. One list of
//! runs has one encoding for each `base`.
//!
//! **Mechanism.** A run is two LEB128 numbers: the gap before it and its length. A sparse set of a
//! huge memory costs two bytes a run, mostly. A dense set costs a few bytes in all.
//!
//! **Neighbours.** [`Frame`](super::Frame) carries it. The ledger of the source and the page states
//! of the destination produce the runs.

use core::ops::Range;

use super::in_range;
use super::{MAX_MISSING_BYTES, MAX_MISSING_RUNS, WireError};

const WHAT: &str = "Missing";
const GAP: &str = "gap";
const LENGTH: &str = "length";

/// Runs of missing pages: the content of one Missing frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingRuns {
    /// The RAM page from which the first gap counts, at most the first missing page.
    pub base: u64,
    /// The runs of RAM pages, from 1 to [`MAX_MISSING_RUNS`]. They ascend, do not touch and are not
    /// empty. Their encoding has at most [`MAX_MISSING_BYTES`].
    pub runs: Vec<Range<u64>>,
}

impl MissingRuns {
    /// Splits `runs` into as many frames as needed, one after the other. No runs give no frame.
    ///
    /// The runs must ascend and not overlap. Runs that touch are joined, and empty ones are
    /// skipped. Runs out of order give a frame that cannot be encoded.
    pub fn frames(runs: impl IntoIterator<Item = Range<u64>>) -> impl Iterator<Item = Self> {
        let mut runs = joined(runs.into_iter()).peekable();
        core::iter::from_fn(move || {
            let base = runs.peek()?.start;
            let (mut end, mut bytes) = (base, 0);
            let mut taken = Vec::new();
            while let Some(run) = runs.next_if(|run| {
                let with_it = bytes + encoded_len(end, run);
                taken.len() < MAX_MISSING_RUNS && with_it <= MAX_MISSING_BYTES
            }) {
                bytes += encoded_len(end, &run);
                end = run.end;
                taken.push(run);
            }
            Some(Self { base, runs: taken })
        })
    }

    /// Returns the number of missing pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        let lengths = self
            .runs
            .iter()
            .map(|run| run.end.saturating_sub(run.start));
        lengths.fold(0, u64::saturating_add)
    }

    pub(super) fn encode_payload(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        let most = MAX_MISSING_RUNS as u64;
        in_range(WHAT, "count", self.runs.len() as u64, 1, most)?;
        let (mut end, mut min) = (self.base, self.base);
        for run in &self.runs {
            in_range(WHAT, "run.first", run.start, min, u64::MAX - 1)?;
            in_range(WHAT, "run.end", run.end, run.start + 1, u64::MAX)?;
            put(out, run.start - end);
            put(out, run.end - run.start);
            end = run.end;
            min = end.saturating_add(1);
        }
        Ok(())
    }

    /// Decodes the payload of a frame with these fields, for a VM of `memory_pages` pages.
    pub(super) fn decode_payload(
        count: u32,
        base: u64,
        payload: &[u8],
        memory_pages: u64,
    ) -> Result<Self, WireError> {
        in_range(WHAT, "count", count.into(), 1, MAX_MISSING_RUNS as u64)?;
        let last = memory_pages.saturating_sub(1);
        in_range(WHAT, "base", base, 0, last)?;
        let mut numbers = Numbers {
            payload,
            at: 0,
            left: 2 * u64::from(count),
        };
        if (payload.len() as u64) < numbers.left {
            return Err(numbers.too_short());
        }
        let mut runs = Vec::with_capacity(count as usize);
        let (mut end, mut min) = (base, 0);
        for _ in 0..count {
            let gap = numbers.next(GAP)?;
            in_range(WHAT, GAP, gap, min, last.saturating_sub(end))?;
            let first = end + gap;
            let length = numbers.next(LENGTH)?;
            in_range(WHAT, LENGTH, length, 1, memory_pages.saturating_sub(first))?;
            end = first + length;
            min = 1;
            runs.push(first..end);
        }
        if numbers.at != payload.len() {
            return Err(WireError::WrongLength {
                what: WHAT,
                len: payload.len() as u64,
                expected: numbers.at as u64,
            });
        }
        Ok(Self { base, runs })
    }
}

/// Joins runs that touch, and skips empty ones.
fn joined(mut runs: impl Iterator<Item = Range<u64>>) -> impl Iterator<Item = Range<u64>> {
    let mut open: Option<Range<u64>> = None;
    core::iter::from_fn(move || {
        for run in runs.by_ref().filter(|run| !run.is_empty()) {
            match &mut open {
                Some(last) if last.end == run.start => last.end = run.end,
                _ => {
                    if let Some(done) = open.replace(run) {
                        return Some(done);
                    }
                }
            }
        }
        open.take()
    })
}

/// Returns the bytes of a run behind a run that ends at `end`.
fn encoded_len(end: u64, run: &Range<u64>) -> usize {
    leb128_len(run.start.saturating_sub(end)) + leb128_len(run.end - run.start)
}

/// Returns the bytes of a number: one for each seven bits, at least one.
fn leb128_len(number: u64) -> usize {
    (u64::BITS - (number | 1).leading_zeros()).div_ceil(7) as usize
}

/// Appends a number: seven bits a byte, the lowest first. All bytes but the last have bit 7 set.
fn put(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// The numbers of a payload, from the first to the last.
struct Numbers<'a> {
    payload: &'a [u8],
    at: usize,
    /// The numbers that have not been decoded.
    left: u64,
}

impl Numbers<'_> {
    /// Decodes the next number. Its last byte is not zero unless it is the only one.
    fn next(&mut self, field: &'static str) -> Result<u64, WireError> {
        let bad = |byte: u8| WireError::BadField {
            what: WHAT,
            field,
            value: byte.into(),
        };
        let mut number = 0;
        for shift in (0..u64::BITS).step_by(7) {
            let byte = *self.payload.get(self.at).ok_or_else(|| self.too_short())?;
            self.at += 1;
            let bits = u64::from(byte & 0x7f);
            // The tenth byte has one bit of the number. Nothing follows it.
            if shift == 63 && byte > 1 {
                return Err(bad(byte));
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                if byte == 0 && shift > 0 {
                    return Err(bad(byte));
                }
                self.left -= 1;
                return Ok(number);
            }
        }
        unreachable!("the tenth byte returns")
    }

    /// The error of a payload that ends too early, with the least length that the numbers need.
    fn too_short(&self) -> WireError {
        WireError::WrongLength {
            what: WHAT,
            len: self.payload.len() as u64,
            expected: self.at as u64 + self.left,
        }
    }
}
