#![expect(unsafe_code, reason = "registers guest memory with userfaultfd")]
//! The userfaultfds of a machine's guest mapping.
//!
//! **Guarantee.** Each page of RAM is registered with exactly one userfaultfd: private memory from
//! the start of post-copy on, other memory at once. A call over any pages does what one userfaultfd
//! over all of RAM would do.
//!
//! **Mechanism.** Each userfaultfd has an equal part of RAM, cut at 2 MiB, or at the backing's page
//! if that is larger. So no border divides a huge page. The kernel takes no range that leaves the
//! mapping of one file (`find_dst_vma` in `mm/userfaultfd.c`), and the mappings of a VMM's files
//! may be anywhere. So a call is split at the borders of parts and of files, and stops at the first
//! error. That error counts the bytes done from the start of the whole range.
//!
//! The threads that wait for pages of one userfaultfd share its locks in the kernel. Several
//! userfaultfds divide that load, and their readers need not share a queue of events.
//!
//! **Neighbours.** `install` and `poison` make the calls; `events` reads.

use super::kernel::Kernel;
use super::{features, mappings};
use crate::{ArmOptions, Backing, Delivery, GuestRam, MachineError};
use pageferry_addr::{Hva, PAGE_SIZE, PageSize, RamPage};
use pageferry_userfault::uffd::{RangeError, RegisterMode, Userfaultfd, Wake};
use std::ops::Range;
use std::sync::Arc;

/// The userfaultfds of RAM.
pub(in crate::kvm::x86) struct Watch {
    /// In order of their parts.
    userfaultfds: Box<[Userfaultfd]>,
    /// All of RAM, ascending.
    pieces: Box<[Piece]>,
    mode: RegisterMode,
    /// The owner of the mapping.
    ram: Arc<GuestRam>,
}

/// The share of a file in a part. The mapping has its pages one behind the other.
struct Piece {
    /// The index of its userfaultfd.
    part: usize,
    pages: Range<u64>,
}

impl Watch {
    /// Opens `count` userfaultfds, as [`crate::ArmOptions::check`] allows. Registers all of `ram`
    /// with them, unless it is private.
    pub(super) fn new(
        ram: &Arc<GuestRam>,
        count: u32,
        delivery: Delivery,
    ) -> Result<Self, MachineError> {
        let mode = match delivery {
            Delivery::Missing => RegisterMode::MISSING,
            _ => RegisterMode::MISSING | RegisterMode::MINOR,
        };
        let open = |_| {
            Userfaultfd::open(features(delivery, ram.backing())).map_err(|e| {
                MachineError::EngineUnavailable(format!(
                    "fault delivery '{delivery}' is not usable: {e}"
                ))
            })
        };
        let sizes = ram.files(RamPage(0), ram.pages()).map(|(.., pages)| pages);
        let parts = parts_of(ram.pages(), count, ArmOptions::unit(ram.backing()));
        let pieces = pieces_of(parts, sizes)
            .into_iter()
            .map(|(part, pages)| Piece { part, pages });
        let watch = Self {
            userfaultfds: (0..count).map(open).collect::<Result<_, _>>()?,
            pieces: pieces.collect(),
            mode,
            ram: Arc::clone(ram),
        };
        if ram.backing() != Backing::Anonymous {
            watch.register()?;
        }
        Ok(watch)
    }

    fn register(&self) -> Result<(), MachineError> {
        for Piece { part, pages } in &self.pieces {
            let (uffd, (start, len)) = (&self.userfaultfds[*part], self.range(pages.clone()));
            // SAFETY: (1) vCPUs touch the guest's mapping, and KVM for them. The threads that
            // resolve faults never do: they use the alias, or `UFFDIO_COPY` for private memory,
            // which has none; (2) no Rust reference to guest memory exists; (3) `GuestRam` owns the
            // mapping, or its adopter keeps it. The watch holds that memory as long as it holds
            // this userfaultfd.
            unsafe { uffd.register(start, len, self.mode) }.map_err(|e| {
                MachineError::os("cannot register guest memory with userfaultfd", e)
            })?;
        }
        Ok(())
    }

    /// The userfaultfd of a part.
    pub(in crate::kvm::x86) fn userfaultfd(&self, part: usize) -> &Userfaultfd {
        &self.userfaultfds[part]
    }

    /// The address and the length of pages of one piece.
    fn range(&self, pages: Range<u64>) -> (Hva, u64) {
        let start = self.ram.guest_hva(RamPage(pages.start));
        (start, (pages.end - pages.start) * PAGE_SIZE)
    }

    fn split(
        &self,
        first: RamPage,
        pages: u64,
        mut call: impl FnMut(&Userfaultfd, Hva, u64) -> Result<(), RangeError>,
    ) -> Result<(), RangeError> {
        let end = first.0 + pages;
        let piece = (self.pieces).partition_point(|piece| piece.pages.end <= first.0);
        let touched = self.pieces[piece..].iter();
        for piece in touched.take_while(|piece| piece.pages.start < end) {
            let from = first.0.max(piece.pages.start);
            let (start, len) = self.range(from..end.min(piece.pages.end));
            call(&self.userfaultfds[piece.part], start, len).map_err(|stop| RangeError {
                start: self.ram.guest_hva(first),
                len: pages * PAGE_SIZE,
                done: (from - first.0) * PAGE_SIZE + stop.done,
                ..stop
            })?;
        }
        Ok(())
    }
}

impl Kernel for Watch {
    fn continue_unmapped(
        &self,
        first: RamPage,
        pages: u64,
        size: PageSize,
        wake: Wake,
    ) -> Result<(), RangeError> {
        self.split(first, pages, |uffd, start, len| {
            uffd.continue_unmapped(start, len, size, wake).map(drop)
        })
    }

    fn zeropage(&self, first: RamPage, pages: u64, wake: Wake) -> Result<(), RangeError> {
        self.split(first, pages, |uffd, start, len| {
            uffd.zeropage(start, len, wake)
        })
    }

    fn copy(&self, page: RamPage, bytes: &[u8], wake: Wake) -> Result<(), RangeError> {
        self.split(page, 1, |uffd, start, _| uffd.copy(start, bytes, wake))
    }

    fn poison_unmapped(
        &self,
        first: RamPage,
        pages: u64,
        size: PageSize,
        wake: Wake,
    ) -> Result<(), RangeError> {
        self.split(first, pages, |uffd, start, len| {
            uffd.poison_unmapped(start, len, size, wake).map(drop)
        })
    }

    fn wake(&self, first: RamPage, pages: u64) -> Result<(), RangeError> {
        self.split(first, pages, Userfaultfd::wake)
    }

    fn register_private(&self) -> Result<(), MachineError> {
        if self.ram.backing() == Backing::Anonymous {
            self.register()?;
        }
        Ok(())
    }

    /// Goes on after an error, and returns the first one.
    fn unregister(&self) -> Result<(), RangeError> {
        let mut result = Ok(());
        for Piece { part, pages } in &self.pieces {
            let (start, len) = self.range(pages.clone());
            result = result.and(self.userfaultfds[*part].unregister(start, len));
        }
        result
    }

    fn drop_mappings(&self, first: RamPage, pages: u64) -> Result<(), MachineError> {
        mappings::drop_mappings(&self.ram, first, pages)
    }

    fn markers(&self, pages: Range<u64>) -> Result<Option<Vec<bool>>, MachineError> {
        mappings::markers(&self.ram, pages)
    }

    fn populate(&self, page: RamPage) -> Result<(), MachineError> {
        mappings::populate(&self.ram, page)
    }
}

/// The pages of each of `count` parts, cut at multiples of `unit` pages.
fn parts_of(pages: u64, count: u32, unit: u64) -> impl Iterator<Item = Range<u64>> {
    let count = u64::from(count);
    let units = pages.div_ceil(unit);
    let cut = move |part: u64| (units * part / count * unit).min(pages);
    (0..count).map(move |part| cut(part)..cut(part + 1))
}

/// The pieces of these parts, cut where files of these sizes in pages end. Each has the index of
/// its part. Memory without files is not cut.
fn pieces_of(
    parts: impl Iterator<Item = Range<u64>>,
    files: impl Iterator<Item = u64>,
) -> Vec<(usize, Range<u64>)> {
    let ends = files.scan(0, |end, pages| {
        *end += pages;
        Some(*end)
    });
    let ends: Vec<u64> = ends.collect();
    let mut pieces = Vec::new();
    for (index, part) in parts.enumerate() {
        let is_inside = |end: &u64| part.start < *end && *end < part.end;
        let mut from = part.start;
        for to in ends.iter().copied().filter(is_inside).chain([part.end]) {
            pieces.push((index, from..to));
            from = to;
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_end_with_their_part_and_their_file() {
        let cut = |files: &[u64]| pieces_of([0..512, 512..700].into_iter(), files.iter().copied());
        assert_eq!(cut(&[]), [(0, 0..512), (1, 512..700)]);
        assert_eq!(cut(&[700]), cut(&[]));
        assert_eq!(cut(&[512, 188]), cut(&[]));
        let all = [(0, 0..64), (0, 64..512), (1, 512..576), (1, 576..700)];
        assert_eq!(cut(&[64, 512, 124]), all);
    }

    #[test]
    fn parts_are_equal_whole_large_pages_and_cover_ram() {
        let parts = |pages, count| parts_of(pages, count, 512).collect::<Vec<_>>();
        assert_eq!(parts(3 * 512, 3), [0..512, 512..1024, 1024..1536]);
        assert_eq!(parts(5 * 512 + 7, 2), [0..1536, 1536..2567]);
        assert_eq!(parts(7, 1).first(), Some(&(0..7)));
        for count in 1..=9 {
            let parts = parts(9 * 512 - 1, count);
            assert_eq!(parts[0].start, 0);
            assert_eq!(parts.last().unwrap().end, 9 * 512 - 1);
            assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(
                parts
                    .iter()
                    .all(|part| !part.is_empty() && part.start % 512 == 0)
            );
        }
    }
}
