#![expect(unsafe_code, reason = "places slot records in chunks of memory")]
//! Where slot records live.
//!
//! **Guarantee.** A record keeps its address until it is freed, begins a cache line (what look-ups read of a record fits
//! into one), and costs no more than its size rounded up to lines, plus a share of its chunk's head. Chunks without
//! records are given back, but for one.
//!
//! **Mechanism.** Chunks of a power of two, aligned to their size, so that a record's address tells its chunk. A chunk
//! begins with the bits of its free places. Those with any are in a list.
//!
//! **Neighbours.** Only the writer allocates and frees, so nothing here is atomic.

use crate::Slot;
use alloc::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use core::ptr;

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
struct Place<D>(MaybeUninit<Slot<D>>);

/// The records of one table.
pub(crate) struct Slab<D> {
    /// A chunk with free places; the others hang on it.
    first: *mut Head<D>,
    chunks: usize,
}

impl<D> Slab<D> {
    const STRIDE: usize = size_of::<Place<D>>();
    /// At least 2 KiB, and room for at least 8 records.
    const CHUNK: usize = {
        let wanted = LINE + 8 * Self::STRIDE;
        if wanted <= 2048 {
            2048
        } else {
            wanted.next_power_of_two()
        }
    };
    const PLACES: usize = {
        let places = (Self::CHUNK - LINE) / Self::STRIDE;
        if places < 64 { places } else { 64 }
    };
    const ALL_FREE: u64 = u64::MAX >> (64 - Self::PLACES);
    const LAYOUT: Layout = {
        assert!(size_of::<Head<D>>() == LINE && align_of::<Place<D>>() <= Self::CHUNK);
        match Layout::from_size_align(Self::CHUNK, Self::CHUNK) {
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

    /// Gives `slot` an address.
    pub(crate) fn insert(&mut self, slot: Slot<D>) -> *mut Slot<D> {
        if self.first.is_null() {
            self.grow();
        }
        let head = self.first;
        // SAFETY: chunks in the list are allocated and have a free place; nobody else has a reference to a head. Place `i`
        // lies `LINE + i * STRIDE` bytes into its chunk, for `i` below `PLACES`.
        unsafe {
            let index = (*head).free.trailing_zeros() as usize;
            (*head).free &= (*head).free - 1;
            if (*head).free == 0 {
                self.unlink(head);
            }
            let place = head.byte_add(LINE + index * Self::STRIDE).cast::<Slot<D>>();
            place.write(slot);
            place
        }
    }

    /// Drops a record and frees its place.
    ///
    /// # Safety
    /// `slot` came from [`insert`](Self::insert) of this slab, was not removed since, and nobody uses it.
    pub(crate) unsafe fn remove(&mut self, slot: *const Slot<D>) {
        let slot = slot.cast_mut();
        let head = slot
            .map_addr(|address| address & !(Self::CHUNK - 1))
            .cast::<Head<D>>();
        // SAFETY: the record was written by `insert` and is read out once; its chunk begins at the multiple of the
        // chunk's size below it, and is allocated as long as a record is in it.
        let record = unsafe {
            let record = slot.read();
            let index = (slot.addr() - head.addr() - LINE) / Self::STRIDE;
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
        // Last, as it may run the user's code, which may panic.
        drop(record);
    }

    #[cold]
    fn grow(&mut self) {
        // SAFETY: the layout's size is not 0.
        let chunk = unsafe { alloc(Self::LAYOUT) };
        #[expect(
            clippy::cast_ptr_alignment,
            reason = "chunks are aligned to their size"
        )]
        let head = chunk.cast::<Head<D>>();
        if head.is_null() {
            handle_alloc_error(Self::LAYOUT);
        }
        self.chunks += 1;
        // SAFETY: just allocated, large and aligned enough for a head.
        unsafe {
            head.write(Head {
                free: Self::ALL_FREE,
                previous: ptr::null_mut(),
                next: ptr::null_mut(),
                records: PhantomData,
            });
            self.link(head);
        }
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
        // Chunks that still hold records are not in the list if they are full; their owner has removed all.
        let mut head = self.first;
        while !head.is_null() {
            // SAFETY: chunks in the list are allocated; each is freed once.
            unsafe {
                debug_assert_eq!((*head).free, Self::ALL_FREE, "a record was left");
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
        let mut random = 1_u64;
        for step in 0..20_000_u64 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let grow = if step < 10_000 { 6 } else { 3 };
            if held.is_empty() || (random >> 33) % 9 < grow {
                let id = (step % 60_000) as u16;
                let record = slab.insert(slot(id, Rc::clone(&counted)));
                assert_eq!(record.addr() % LINE, 0);
                held.push(record);
            } else {
                let victim = held.swap_remove((random >> 40) as usize % held.len());
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
    fn large_records_fit() {
        let mut slab = Slab::new();
        let record = slab.insert(slot(7, Some([3_u64; 500])));
        // SAFETY: just inserted.
        assert_eq!(unsafe { &*record }.data, Some([3; 500]));
        // SAFETY: just inserted, removed once.
        unsafe { slab.remove(record) };
    }
}
