//! The contents of every page, as a function of a seed.
//!
//! **Guarantee.** The contents of a page follow from the seed, its index and its version. So a
//! check needs no copy of the memory file. Different pages and different versions differ.
//!
//! **Mechanism.** Version 0 is the memory file's. It has runs of pages that are holes, and single
//! pages of zeros that are written out. Words 0 and 1 of other pages name the page and the version,
//! so that a check can say which contents it found.

use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The bytes of a page in which contents are counted, also in mappings of huge pages.
pub const PAGE_BYTES: u64 = 4096;

/// The words of a page.
pub(crate) const WORDS: usize = 512;

/// A page as words of the machine's byte order.
pub(crate) type Words = [u64; WORDS];

/// The number of pages that are a hole together.
const RUN: u64 = 8;

/// The part of a memory file that holds a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Data,
    Zeros,
    Hole,
}

fn mix(value: u64) -> u64 {
    crate::Random::new(value).next()
}

fn part(seed: u64, index: u64) -> Part {
    match mix(mix(seed) ^ (index / RUN)) >> 61 {
        0 => Part::Hole,
        1 if index.is_multiple_of(2) => Part::Zeros,
        _ => Part::Data,
    }
}

/// The contents of a page that a thread has written as `version`, which is not 0.
pub(crate) fn written(seed: u64, index: u64, version: u64) -> Words {
    let base = mix(mix(mix(seed) ^ index) ^ version);
    let mut words = [0; WORDS];
    for (place, word) in (0..).zip(words.iter_mut()) {
        *word = match place {
            0 => index,
            1 => version,
            _ => base.wrapping_add(mix(place)),
        };
    }
    words
}

/// The contents of page `index` of the memory file.
pub(crate) fn in_file(seed: u64, index: u64) -> Words {
    match part(seed, index) {
        Part::Data => written(seed, index, 0),
        Part::Zeros | Part::Hole => [0; WORDS],
    }
}

pub(crate) fn bytes(words: &Words) -> [u8; 4096] {
    let mut bytes = [0; 4096];
    for (to, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *to = word.to_ne_bytes();
    }
    bytes
}

/// The contents of page `index` of the memory file of `seed`. Pages of zeros and holes are zeros.
///
/// ```
/// use pageferry_testkit::firecracker::page_contents;
///
/// assert_eq!(page_contents(1, 7), page_contents(1, 7));
/// let zeros = (0..1000).filter(|index| page_contents(1, *index) == [0; 4096]).count();
/// assert!((50..500).contains(&zeros));
/// ```
#[must_use]
pub fn page_contents(seed: u64, index: u64) -> [u8; 4096] {
    bytes(&in_file(seed, index))
}

/// Writes the memory file of `seed` with `pages` pages. Holes of the memory are holes of the file,
/// if the file system has any.
///
/// # Errors
/// Those of creating and writing the file.
pub fn write_memory_file(path: &Path, seed: u64, pages: u64) -> std::io::Result<()> {
    let file = File::create(path)?;
    file.set_len(pages * PAGE_BYTES)?;
    for index in (0..pages).filter(|index| part(seed, *index) != Part::Hole) {
        file.write_all_at(&page_contents(seed, index), index * PAGE_BYTES)?;
    }
    Ok(())
}

/// Which contents a page has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Contents {
    /// Those of the memory file, and not zeros.
    File,
    /// Zeros: the page was removed, or it is zero in the memory file.
    Zeros,
    /// Those that a thread of the double wrote as this version of the page.
    Written(u64),
    /// None of these, such as those of another page or a mixture.
    Other,
}

impl Contents {
    /// The contents that `words` are, for page `index`.
    pub(crate) fn of(seed: u64, index: u64, words: &Words) -> Self {
        match words[1] {
            _ if words.iter().all(|word| *word == 0) => Self::Zeros,
            version if *words != written(seed, index, version) => Self::Other,
            0 => Self::File,
            version => Self::Written(version),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_are_told_apart() {
        let parts: Vec<Part> = (0..4000).map(|index| part(5, index)).collect();
        for expected in [Part::Data, Part::Zeros, Part::Hole] {
            assert!(parts.contains(&expected), "{expected:?}");
        }
        let index = (0..).find(|index| part(5, *index) == Part::Data).unwrap();
        let mut mixture = written(5, index, 3);
        mixture[511] ^= 1;
        for (words, expected) in [
            (in_file(5, index), Contents::File),
            ([0; WORDS], Contents::Zeros),
            (written(5, index, 3), Contents::Written(3)),
            (mixture, Contents::Other),
            (written(5, index + 1, 3), Contents::Other),
            (written(6, index, 3), Contents::Other),
        ] {
            assert_eq!(Contents::of(5, index, &words), expected);
        }
    }
}
