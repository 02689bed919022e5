#![expect(unsafe_code, reason = "places slot records in chunks of memory")]
//! The memory of slot records.
//!
//! **Guarantee.** A record keeps its address until it is freed. It begins a cache line, and
//! look-ups read that line only. It costs its size rounded up to lines, and a share of its chunk's
//! head. The slab gives back a chunk without records, unless it is the only one. A chunk has at
//! least 2 KiB and lives as long as any record in it.
//!
//! **Mechanism.** A chunk begins with a bitmap of its free places. Chunks with free places form a
//! list. A record has its place number, from which the slab computes the beginning of the chunk.
//!
//! **Neighbours.** Only the writer allocates and frees, so nothing here is atomic.

use crate::Slot;
use alloc::alloc::{Layout, alloc, dealloc};
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use core::ptr;
use pageferry_epoch::OutOfMemory;

const LINE: usize = 64;

#[repr(C, align(64))]
struct Head<D> {
    /// Bit `i` is set where place `i` is free.
    free: u64,
    previous: *mut Self,
    next: *mut Self,
    records: PhantomData<Slot<D>>,
}

#[repr(C, align(64))]
struct RecordPlace<D>(MaybeUninit<Slot<D>>);

/// The records of one table.
pub(crate) struct Slab<D> {
    /// The list of chunks with free places.
    first: *mut Head<D>,
    chunks: usize,
}

impl<D> Slab<D> {
    const STRIDE: usize = size_of::<RecordPlace<D>>();
    /// The offset of the first place: behind the head, aligned as places are.
    const FIRST: usize = LINE.next_multiple_of(align_of::<RecordPlace<D>>());
    /// At least 2 KiB, and room for at least 8 records.
    const CHUNK: usize = {
        let wanted = Self::FIRST + 8 * Self::STRIDE;
        if wanted <= 2048 { 2048 } else { wanted }
    };
    const PLACES: usize = {
        let places = (Self::CHUNK - Self::FIRST) / Self::STRIDE;
        if places < 64 { places } else { 64 }
    };
    const ALL_FREE: u64 = u64::MAX >> (64 - Self::PLACES);
    const LAYOUT: Layout = {
        assert!(size_of::<Head<D>>() == LINE);
        match Layout::from_size_align(Self::CHUNK, align_of::<RecordPlace<D>>()) {
            Ok(layout) => layout,
            Err(_) => panic!("a record is too large"),
        }
    };

    pub(crate) const fn new() -> Self {
        Self {
            first: ptr::null_mut(),
            chunks: 0,
        }
    }

    /// The bytes of all chunks.
    pub(crate) const fn bytes(&self) -> usize {
        self.chunks * Self::CHUNK
    }

    /// Moves `slot` into a free place.
    pub(crate) fn insert(&mut self, mut slot: Slot<D>) -> Result<*mut Slot<D>, OutOfMemory> {
        if self.first.is_null() {
            self.grow()?;
        }
        let head = self.first;
        // SAFETY: chunks in the list are allocated and have a free place. Nobody else has a
        // reference to a head. Place `i` lies `FIRST + i * STRIDE` bytes into its chunk, for `i`
        // below `PLACES`.
        unsafe {
            let index = (*head).free.trailing_zeros() as usize;
            (*head).free &= (*head).free - 1;
            if (*head).free == 0 {
                self.unlink(head);
            }
            let place = head
                .byte_add(Self::FIRST + index * Self::STRIDE)
                .cast::<Slot<D>>();
            slot.place = index as u32;
            place.write(slot);
            Ok(place)
        }
    }

    /// Drops a record and frees its place.
    ///
    /// # Safety
    /// `slot` is the very pointer that [`insert`](Self::insert) of this slab returned, not one made
    /// from a reference to the record. The record was not removed since, and nobody uses it.
    pub(crate) unsafe fn remove(&mut self, slot: *const Slot<D>) {
        let slot = slot.cast_mut();
        // SAFETY: `insert` wrote the record, and it is read out once. Its place number tells where
        // its chunk begins. The chunk is allocated as long as a record is in it.
        let record = unsafe {
            let record = slot.read();
            let index = record.place as usize;
            let head = slot
                .byte_sub(Self::FIRST + index * Self::STRIDE)
                .cast::<Head<D>>();
            if (*head).free == 0 {
                self.link(head);
            }
            (*head).free |= 1 << index;
            let alone = self.first == head && (*head).next.is_null();
            if (*head).free == Self::ALL_FREE && !alone {
                self.unlink(head);
                self.chunks -= 1;
                dealloc(head.cast(), Self::LAYOUT);
            }
            record
        };
        record.alive.freed();
        // This comes last, because it may run the user's code, which may panic.
        drop(record);
    }

    #[cold]
    fn grow(&mut self) -> Result<(), OutOfMemory> {
        // SAFETY: the layout's size is not 0.
        let chunk = unsafe { alloc(Self::LAYOUT) };
        #[expect(
            clippy::cast_ptr_alignment,
            reason = "chunks are aligned to their size"
        )]
        let head = chunk.cast::<Head<D>>();
        if head.is_null() {
            let bytes = Self::CHUNK;
            return Err(OutOfMemory { bytes });
        }
        self.chunks += 1;
        // SAFETY: the chunk was just allocated, and is large and aligned enough for a head.
        unsafe {
            head.write(Head {
                free: Self::ALL_FREE,
                previous: ptr::null_mut(),
                next: ptr::null_mut(),
                records: PhantomData,
            });
            self.link(head);
        }
        Ok(())
    }

    /// # Safety
    /// `head` is a chunk of this slab that is not in the list.
    unsafe fn link(&mut self, head: *mut Head<D>) {
        // SAFETY: `first` is null or a chunk in the list.
        unsafe {
            (*head).previous = ptr::null_mut();
            (*head).next = self.first;
            if let Some(first) = self.first.as_mut() {
                first.previous = head;
            }
        }
        self.first = head;
    }

    /// # Safety
    /// `head` is in the list.
    unsafe fn unlink(&mut self, head: *mut Head<D>) {
        // SAFETY: neighbours of a chunk in the list are null or in it.
        unsafe {
            let (previous, next) = ((*head).previous, (*head).next);
            if let Some(next) = next.as_mut() {
                next.previous = previous;
            }
            match previous.as_mut() {
                Some(previous) => previous.next = next,
                None => self.first = next,
            }
        }
    }
}

impl<D> Drop for Slab<D> {
    fn drop(&mut self) {
        // The owner has removed all records. (If the drop of a record panicked, the others leak
        // with their memory.)
        let mut head = self.first;
        while !head.is_null() {
            // SAFETY: chunks in the list are allocated, and each is freed once.
            unsafe {
                let next = (*head).next;
                dealloc(head.cast(), Self::LAYOUT);
                head = next;
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    extern crate std;
    use super::*;
    use crate::Request;
    use alloc::rc::Rc;
    use alloc::vec::Vec;
    use pageferry_addr::{Gfn, GfnRange};
    use pageferry_testkit::Random;

    fn slot<D>(id: u16, data: D) -> Slot<D> {
        let none = Request::<()>::delete(0, id);
        let request = Request {
            address_space: 0,
            id,
            gpa: none.gpa,
            size: none.size,
            hva: none.hva,
            flags: none.flags,
            userfault_bitmap: None,
            data,
        };
        Slot::new(request, GfnRange::new(Gfn(id.into()), 1).unwrap())
    }

    #[test]
    fn records_stay_apart_and_chunks_are_given_back() {
        let counted = Rc::new(());
        let mut slab = Slab::new();
        let mut held: Vec<*mut Slot<Rc<()>>> = Vec::new();
        let mut random = Random::new(1);
        let steps = if cfg!(miri) { 400 } else { 20_000 };
        for step in 0..steps {
            let grow = if step < steps / 2 { 6 } else { 3 };
            if held.is_empty() || random.below(9) < grow {
                let id = (step % 60_000) as u16;
                let record = slab.insert(slot(id, Rc::clone(&counted))).unwrap();
                assert_eq!(record.addr() % LINE, 0);
                held.push(record);
            } else {
                let victim = held.swap_remove(random.below(held.len() as u64) as usize);
                // SAFETY: inserted above, removed once.
                unsafe { slab.remove(victim) };
            }
            assert_eq!(Rc::strong_count(&counted), held.len() + 1);
        }
        let mut addresses: Vec<usize> = held.iter().map(|slot| slot.addr()).collect();
        addresses.sort_unstable();
        assert!(
            addresses
                .windows(2)
                .all(|w| w[1] - w[0] >= size_of::<Slot<Rc<()>>>())
        );
        for record in held {
            // SAFETY: as above.
            unsafe { slab.remove(record) };
        }
        assert_eq!(Rc::strong_count(&counted), 1);
        assert_eq!(slab.bytes(), Slab::<Rc<()>>::CHUNK, "one chunk is kept");
    }

    #[test]
    fn records_are_aligned_as_their_data_is() {
        #[derive(Debug, PartialEq)]
        #[repr(align(256))]
        struct Wide(u8);

        let mut slab = Slab::new();
        let records: Vec<_> = (0..40)
            .map(|id| slab.insert(slot(id, Wide(id as u8))).unwrap())
            .collect();
        for (id, &record) in records.iter().enumerate() {
            // SAFETY: just inserted.
            let record = unsafe { &*record };
            assert_eq!((&raw const record.data).addr() % 256, 0);
            assert_eq!((record.id, &record.data), (id as u16, &Wide(id as u8)));
        }
        for record in records {
            // SAFETY: inserted above, removed once.
            unsafe { slab.remove(record) };
        }
        assert_eq!(slab.bytes(), Slab::<Wide>::CHUNK);
    }

    #[test]
    fn large_records_fit() {
        let mut slab = Slab::new();
        let record = slab.insert(slot(7, Some([3_u64; 500]))).unwrap();
        // SAFETY: just inserted.
        assert_eq!(unsafe { &*record }.data, Some([3; 500]));
        // SAFETY: just inserted, removed once.
        unsafe { slab.remove(record) };
    }
}
