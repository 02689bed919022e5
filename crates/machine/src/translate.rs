//! The page of RAM behind a guest's address, or a host's.
//!
//! **Guarantee.** The answer comes from the memory slots on which the engine currently runs the
//! guest. An address translates if and only if a slot shows RAM there. A look-up takes no lock and
//! waits for no thread, even while slots are added, moved or removed.
//!
//! **Mechanism.** Each thread has a [`Translator`] with a reader of the engine's slot table, which
//! remembers the last slot that it found. The slot gives the host address. RAM is one mapping
//! without holes, so the distance from its start is the page's index.
//! [`RamLayout`](crate::RamLayout) plans the places of RAM. The slots are its present places.
//!
//! **Neighbours.** Below: `pageferry-memslot`. Only the engines make translators.

use pageferry_addr::{Gfn, Hva, PAGE_SIZE, RamPage};
use pageferry_memslot::{SlotReader, SlotTable};
use std::ops::Range;

/// Translates addresses for one thread.
pub(crate) struct Translator<D> {
    reader: SlotReader<D>,
    /// The mapping of RAM that this engine's slots point at.
    ram: Range<Hva>,
}

impl<D> Translator<D> {
    /// Translates by `table`, whose slots over RAM point into `ram`.
    pub(crate) fn new(table: &SlotTable<D>, ram: Range<Hva>) -> Self {
        Self {
            reader: table.reader(),
            ram,
        }
    }

    /// The page of RAM at a guest frame. `None` where there is no slot, a slot with other memory,
    /// or a slot that is being removed or moved.
    pub(crate) fn page_of(&mut self, gfn: Gfn) -> Option<RamPage> {
        let guard = self.reader.pin();
        let slot = guard.lookup(gfn).filter(|slot| !slot.is_invalid())?;
        page_at(&self.ram, slot.hva_of(gfn)?)
    }

    /// The page of RAM at a host address of the engine's mapping. `None` where no slot shows it to
    /// the guest.
    #[cfg(any(test, all(feature = "kvm", target_arch = "x86_64")))]
    pub(crate) fn page_at_hva(&mut self, hva: Hva) -> Option<RamPage> {
        let page = page_at(&self.ram, hva)?;
        let guard = self.reader.pin();
        let shown = guard.view().iter_hva(hva..hva.checked_add(1)?).next();
        shown.map(|_| page)
    }
}

fn page_at(ram: &Range<Hva>, hva: Hva) -> Option<RamPage> {
    ram.contains(&hva)
        .then(|| RamPage((hva.0 - ram.start.0) / PAGE_SIZE))
}

#[cfg(test)]
mod tests {
    use super::*;

    use pageferry_memslot::{Limits, Request, SlotWriter};

    const RAM: Range<Hva> = Hva(0x10_0000)..Hva(0x10_8000);

    fn request(id: u16, gfn: u64, pages: u64, hva: Hva) -> Request<()> {
        Request {
            gpa: Gfn(gfn).gpa(),
            size: pages * PAGE_SIZE,
            hva,
            ..Request::delete(0, id)
        }
    }

    /// Pages 0 to 3 at frame 0, pages 4 to 7 at frame 0x100, other memory at frame 0x200.
    fn writer() -> SlotWriter<()> {
        let mut writer = SlotWriter::new(Limits::default());
        for (id, gfn, hva) in [
            (0, 0, 0x10_0000),
            (1, 0x100, 0x10_4000),
            (2, 0x200, 0x90_0000),
        ] {
            let _ = writer.set(request(id, gfn, 4, Hva(hva))).unwrap();
        }
        writer
    }

    #[test]
    fn guest_frames_and_host_addresses_lead_to_the_page() {
        let writer = writer();
        let mut translator = Translator::new(&writer.table(), RAM);
        for (gfn, page) in [
            (0, Some(0)),
            (3, Some(3)),
            (4, None),
            (0x100, Some(4)),
            (0x103, Some(7)),
            (0x104, None),
            (0x200, None),
            (Gfn::MAX.0, None),
        ] {
            assert_eq!(translator.page_of(Gfn(gfn)), page.map(RamPage), "{gfn:#x}");
        }
        for (hva, page) in [
            (0x0f_ffff, None),
            (0x10_0000, Some(0)),
            (0x10_4fff, Some(4)),
            (0x10_7fff, Some(7)),
            (0x10_8000, None),
            (0x90_0000, None),
            (u64::MAX, None),
        ] {
            assert_eq!(
                translator.page_at_hva(Hva(hva)),
                page.map(RamPage),
                "{hva:#x}"
            );
        }
    }

    #[test]
    fn answers_follow_the_slots() {
        let mut writer = writer();
        let mut translator = Translator::new(&writer.table(), RAM);
        assert_eq!(translator.page_of(Gfn(0x101)), Some(RamPage(5)));
        let update = writer.begin(request(1, 0x180, 4, Hva(0x10_4000))).unwrap();
        assert_eq!(translator.page_of(Gfn(0x101)), None, "about to move");
        update.commit();
        assert_eq!(translator.page_of(Gfn(0x101)), None);
        assert_eq!(translator.page_of(Gfn(0x181)), Some(RamPage(5)));
        let _ = writer.set(Request::delete(0, 1)).unwrap();
        assert_eq!(translator.page_of(Gfn(0x181)), None);
        assert_eq!(
            translator.page_at_hva(Hva(0x10_5000)),
            None,
            "no guest sees it"
        );
        assert_eq!(translator.page_at_hva(Hva(0x10_0000)), Some(RamPage(0)));
    }
}
