//! Every scheme gives the same answers as a plain scan of the slots.

use super::*;
use crate::kit::Random;
use crate::slots::host;
use crate::slots::input::SlotSet;
use pageferry_addr::PAGE_SIZE;

/// The slots as a list, scanned.
struct Plain(Vec<PlainSlot>);

impl Plain {
    fn by_gfn(&self, gfn: Gfn) -> Option<Hva> {
        self.0.iter().find_map(|slot| slot.hva_of(gfn))
    }

    fn by_hva(&self, hva: Hva) -> Vec<Gfn> {
        let mut all: Vec<Gfn> = self.0.iter().filter_map(|slot| slot.gfn_of(hva)).collect();
        all.sort_unstable();
        all
    }
}

fn frames<L: Lookup>(held: &L, hva: Hva) -> Vec<Gfn> {
    let mut all = Vec::new();
    held.by_hva(hva, |gfn| {
        all.push(gfn);
        ControlFlow::Continue(())
    });
    all.sort_unstable();
    all
}

fn first<L: Lookup>(held: &L, hva: Hva) -> Option<Gfn> {
    let mut found = None;
    held.by_hva(hva, |gfn| {
        assert!(found.is_none(), "went on behind the first");
        found = Some(gfn);
        ControlFlow::Break(())
    });
    found
}

/// Compares the answers at the edges of `slot` and just outside them.
fn compare<R>(reader: &mut R, plain: &Plain, slot: &PlainSlot)
where
    R: Reader,
    for<'a> R::Held<'a>: Lookup,
{
    let held = reader.hold();
    for gfn in [
        slot.start.0 - 1,
        slot.start.0,
        slot.end().0 - 1,
        slot.end().0,
    ] {
        assert_eq!(held.by_gfn(Gfn(gfn)), plain.by_gfn(Gfn(gfn)), "{slot:?}");
    }
    let end = slot.hva.0 + slot.pages * PAGE_SIZE;
    for hva in [slot.hva.0 - 1, slot.hva.0, end - 1, end] {
        let right = plain.by_hva(Hva(hva));
        assert_eq!(frames(&held, Hva(hva)), right, "{slot:?}");
        match first(&held, Hva(hva)) {
            Some(gfn) => assert!(right.contains(&gfn), "{slot:?}"),
            None => assert!(right.is_empty(), "{slot:?}"),
        }
    }
    if <R::Held<'_> as Lookup>::HAS_IDS {
        let right = plain.0.iter().find(|other| other.id == slot.id);
        assert_eq!(held.by_id(slot.id), right.map(|slot| slot.start));
    }
}

/// Builds a set, then deletes, adds and moves slots at random, and compares after each change.
fn agrees<S>()
where
    S: Change,
    for<'a> <S::Reader as Reader>::Held<'a>: Lookup,
{
    let base = host::base().expect("address space");
    for (count, seed) in [(4, 1), (10, 2), (64, 3), (65, 4), (300, 5)] {
        let set = SlotSet::new(count, base, seed);
        let (mut scheme, mut plain) = (S::empty(), Plain(Vec::new()));
        let mut reader = scheme.reader();
        assert_eq!(reader.hold().by_gfn(set.slots()[0].start), None);
        for slot in set.slots() {
            scheme.add(*slot);
            plain.0.push(*slot);
        }
        for slot in set.slots() {
            compare(&mut reader, &plain, slot);
        }
        let (mut random, mut free) = (Random::new(seed), set.free().to_vec());
        for _ in 0..200 {
            let at = random.below(plain.0.len() as u64) as usize;
            let slot = plain.0[at];
            if random.below(2) == 0 {
                scheme.delete(slot);
                plain.0.swap_remove(at);
                compare(&mut reader, &plain, &slot);
                scheme.add(slot);
                plain.0.push(slot);
                compare(&mut reader, &plain, &slot);
            } else {
                let to = random.below(free.len() as u64) as usize;
                let moved = scheme.relocate(slot, free[to]);
                assert_eq!(
                    moved,
                    PlainSlot {
                        start: free[to],
                        ..slot
                    }
                );
                free[to] = slot.start;
                plain.0[at] = moved;
                compare(&mut reader, &plain, &slot);
                compare(&mut reader, &plain, &moved);
            }
        }
        for slot in plain.0.clone() {
            compare(&mut reader, &plain, &slot);
        }
    }
}

#[test]
fn our_memslots_answer_as_a_scan_does() {
    agrees::<Memslots>();
}

#[test]
fn vm_memory_answers_as_a_scan_does() {
    agrees::<VmMemory>();
}

#[test]
fn an_array_that_each_change_copies_answers_as_a_scan_does() {}

#[test]
fn an_array_behind_arc_swap_answers_as_a_scan_does() {
    agrees::<ArcSwapArray>();
}

#[test]
fn a_locked_tree_answers_as_a_scan_does() {
    agrees::<LockedTree>();
}

#[test]
fn a_persistent_map_answers_as_a_scan_does() {
    agrees::<ArcSwapImbl>();
}

#[test]
fn the_floor_answers_as_a_scan_does() {
    let base = host::base().expect("address space");
    for count in [4, 65, 1000] {
        let set = SlotSet::new(count, base, 9);
        let plain = Plain(set.slots().to_vec());
        let mut reader = Floor::new(set.slots()).reader();
        for slot in set.slots() {
            for gfn in [
                slot.start.0 - 1,
                slot.start.0,
                slot.end().0 - 1,
                slot.end().0,
            ] {
                assert_eq!(reader.hold().by_gfn(Gfn(gfn)), plain.by_gfn(Gfn(gfn)));
            }
        }
    }
}
