//! Our own memory slots, as a hypervisor uses them: each thread has a reader, which it pins for one
//! look-up or for many.
//!
//! Unlike the peers, this checks every request against the rules of `KVM_SET_USER_MEMORY_REGION2`.
//! It keeps an index by identifier and one by host address. Each reader has a last-used slot.

use super::{ByGfn, Change, Lookup, Reader, Scheme};
use crate::slots::input::PlainSlot;
use pageferry_addr::{Gfn, Hva, PAGE_SIZE};
use pageferry_memslot::{Barrier, Limits, Request, SlotFlags, SlotGuard, SlotReader, SlotWriter};
use std::ops::ControlFlow;

/// `SlotWriter` and its readers, without user data in the slots.
#[derive(Debug)]
pub(crate) struct Memslots(SlotWriter<()>);

/// A reader of [`Memslots`].
#[derive(Debug)]
pub(crate) struct MemslotsReader(SlotReader<()>);

impl Memslots {
    fn set(&mut self, request: Request<()>) {
        if let Err(why) = self.0.set(request) {
            panic!("a request was refused: {why}");
        }
    }
}

fn request(slot: PlainSlot) -> Request<()> {
    Request {
        address_space: 0,
        id: slot.id,
        gpa: slot.start.gpa(),
        size: slot.pages * PAGE_SIZE,
        hva: slot.hva,
        flags: SlotFlags::default(),
        userfault_bitmap: None,
        data: (),
    }
}

impl Scheme for Memslots {
    const NAME: &'static str = "pageferry memslot";
    type Reader = MemslotsReader;

    fn reader(&self) -> MemslotsReader {
        MemslotsReader(self.0.table().reader())
    }
}

impl Change for Memslots {
    fn empty() -> Self {
        let barrier = Barrier::membarrier();
        Self(SlotWriter::with_barrier(Limits::default(), barrier))
    }

    fn add(&mut self, slot: PlainSlot) {
        self.set(request(slot));
    }

    fn delete(&mut self, slot: PlainSlot) {
        self.set(Request::delete(0, slot.id));
    }

    fn relocate(&mut self, slot: PlainSlot, to: Gfn) -> PlainSlot {
        let moved = PlainSlot { start: to, ..slot };
        self.set(request(moved));
        moved
    }
}

impl Reader for MemslotsReader {
    type Held<'a> = SlotGuard<'a, ()>;

    #[inline]
    fn hold(&mut self) -> Self::Held<'_> {
        self.0.pin()
    }
}

impl ByGfn for SlotGuard<'_, ()> {
    #[inline]
    fn by_gfn(&self, gfn: Gfn) -> Option<Hva> {
        self.lookup(gfn)?.hva_of(gfn)
    }
}

impl Lookup for SlotGuard<'_, ()> {
    const HAS_IDS: bool = true;

    #[inline]
    fn by_hva(&self, hva: Hva, mut visit: impl FnMut(Gfn) -> ControlFlow<()>) {
        let byte = hva..Hva(hva.0 + 1);
        for slot in self.view().iter_hva(byte.clone()) {
            if let Some(frames) = slot.frames_in_hva(byte.clone())
                && visit(frames.start()).is_break()
            {
                return;
            }
        }
    }

    #[inline]
    fn by_id(&self, id: u16) -> Option<Gfn> {
        self.view().by_id(id).map(|slot| slot.range.start())
    }
}
