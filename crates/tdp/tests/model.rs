//! Random operations against a plain model: a `BTreeMap` from guest frame to host frame and permission.

use pageferry_addr::{Gfn, GfnRange, Pfn};
use pageferry_tdp::{Leaf, MapOutcome, StageTwo, Sv48x4};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// Corners where tables of each level begin; frames are a little above or below one of them, so that ranges
/// cross the borders of every level and absent subtrees lie between.
const CORNERS: [u64; 6] = [0, 512, 1 << 18, (1 << 18) + 512, 1 << 27, (1 << 38) - 1];

#[derive(Clone, Debug)]
enum Step {
    Map { gfn: u64, pfn: u64, writable: bool },
    WriteProtect { start: u64, pages: u64 },
    WriteProtectMask { base: u64, mask: u64 },
    Zap { start: u64, pages: u64 },
}

fn frames() -> impl Strategy<Value = u64> {
    (prop::sample::select(&CORNERS[..]), 0..160u64, any::<bool>()).prop_map(|(corner, off, up)| {
        let gfn = if up {
            corner + off
        } else {
            corner.saturating_sub(off)
        };
        gfn.min(Sv48x4::GFN_LIMIT.0 - 1)
    })
}

fn lengths() -> impl Strategy<Value = u64> {
    prop_oneof![8 => 0..200u64, 2 => 0..2000u64, 1 => Just(1 << 27), 1 => Just(1 << 39)]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let map = (frames(), 0..3u64, any::<bool>()).prop_map(|(gfn, pfn, writable)| Step::Map {
        gfn,
        pfn,
        writable,
    });
    let protect =
        (frames(), lengths()).prop_map(|(start, pages)| Step::WriteProtect { start, pages });
    let mask = (frames(), any::<u64>(), any::<bool>()).prop_map(|(base, mask, all)| {
        Step::WriteProtectMask {
            base,
            mask: if all { u64::MAX } else { mask },
        }
    });
    let zap = (frames(), lengths()).prop_map(|(start, pages)| Step::Zap { start, pages });
    let step = prop_oneof![20 => map, 2 => protect, 2 => mask, 1 => zap];
    prop::collection::vec(step, 1..200)
}

type Model = BTreeMap<u64, (u64, bool)>;

fn map_in_model(model: &mut Model, gfn: u64, pfn: u64, writable: bool) -> Option<(u64, bool)> {
    let before = model.get(&gfn).copied();
    match before {
        Some((existing, _)) if existing != pfn => {}
        Some((_, was)) => {
            model.insert(gfn, (pfn, was || writable));
        }
        None => {
            model.insert(gfn, (pfn, writable));
        }
    }
    before
}

fn parts(leaf: Leaf) -> (u64, bool) {
    (leaf.pfn.0, leaf.writable)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn tables_agree_with_a_map(steps in steps()) {
        let tables = StageTwo::new();
        let mut model = Model::new();
        let mut touched = BTreeSet::new();
        for step in steps {
            match step {
                Step::Map { gfn, pfn, writable } => {
                    touched.insert(gfn);
                    let before = map_in_model(&mut model, gfn, pfn, writable);
                    let outcome = tables.map(Gfn(gfn), Pfn(pfn), writable);
                    match (before, outcome) {
                        (None, MapOutcome::Installed) => {}
                        (Some((old, false)), MapOutcome::Upgraded) => {
                            prop_assert!(old == pfn && writable);
                        }
                        (Some((old, was)), MapOutcome::Spurious) => {
                            prop_assert!(old == pfn && (was || !writable));
                        }
                        (Some(old), MapOutcome::Conflict { existing }) => {
                            prop_assert_eq!(parts(existing), old);
                            prop_assert_ne!(old.0, pfn);
                        }
                        (before, outcome) => prop_assert!(false, "{before:?} gave {outcome:?}"),
                    }
                }
                Step::WriteProtect { start, pages } => {
                    let mut expected = 0;
                    for (_, (_, writable)) in model.range_mut(start..start + pages) {
                        expected += u64::from(std::mem::replace(writable, false));
                    }
                    let range = GfnRange::new(Gfn(start), pages).unwrap();
                    prop_assert_eq!(tables.write_protect(range), expected);
                }
                Step::WriteProtectMask { base, mask } => {
                    let mut expected = 0;
                    for (gfn, (_, writable)) in model.range_mut(base..base + 64) {
                        if mask >> (gfn - base) & 1 != 0 {
                            expected += u64::from(std::mem::replace(writable, false));
                        }
                    }
                    prop_assert_eq!(tables.write_protect_mask(Gfn(base), mask), expected);
                }
                Step::Zap { start, pages } => {
                    let before = model.len();
                    model.retain(|gfn, _| !(start..start + pages).contains(gfn));
                    let range = GfnRange::new(Gfn(start), pages).unwrap();
                    prop_assert_eq!(tables.zap(range), (before - model.len()) as u64);
                }
            }
            prop_assert_eq!(tables.mapped_pages(), model.len() as u64);
            let writable = model.values().filter(|page| page.1).count();
            prop_assert_eq!(tables.writable_pages(), writable as u64);
        }
        for gfn in touched {
            prop_assert_eq!(tables.walk(Gfn(gfn)).map(parts), model.get(&gfn).copied());
            for near in [gfn.wrapping_sub(1), gfn + 1] {
                prop_assert_eq!(tables.walk(Gfn(near)).map(parts), model.get(&near).copied());
            }
        }
        let everything = GfnRange::new(Gfn(0), Gfn::MAX.0 + 1).unwrap();
        prop_assert_eq!(tables.zap(everything), model.len() as u64);
        prop_assert_eq!((tables.mapped_pages(), tables.writable_pages()), (0, 0));
    }
}

#[test]
fn frames_past_the_reach_are_never_mapped() {
    let tables = StageTwo::new();
    let last = Gfn(Sv48x4::GFN_LIMIT.0 - 1);
    tables.map(last, Pfn(Sv48x4::PFN_LIMIT.0 - 1), true);
    let leaf = tables.walk(last).unwrap();
    assert_eq!(leaf.pfn, Pfn(Sv48x4::PFN_LIMIT.0 - 1));
    // The same index bits at every level, one bit above the format.
    assert_eq!(tables.walk(Gfn(last.0 | 1 << 38)), None);
    assert_eq!(tables.walk(Gfn(u64::MAX)), None);
    let behind = GfnRange::new(Sv48x4::GFN_LIMIT, 1 << 30).unwrap();
    assert_eq!(tables.zap(behind) + tables.write_protect(behind), 0);
    assert_eq!(tables.write_protect_mask(Sv48x4::GFN_LIMIT, u64::MAX), 0);
    assert_eq!(tables.write_protect_mask(Gfn(u64::MAX), u64::MAX), 0);
    assert_eq!(tables.write_protect_mask(last, 0b10), 0);
    assert_eq!(tables.write_protect_mask(last, 0b11), 1);
}

#[test]
#[should_panic(expected = "past the tables' reach")]
fn mapping_a_frame_past_the_reach_panics() {
    StageTwo::new().map(Sv48x4::GFN_LIMIT, Pfn(0), false);
}

#[test]
#[should_panic(expected = "does not fit an entry")]
fn mapping_to_a_frame_without_room_panics() {
    StageTwo::new().map(Gfn(0), Sv48x4::PFN_LIMIT, false);
}

#[test]
fn tables_stay_when_their_pages_go() {
    let tables = StageTwo::new();
    assert_eq!(tables.table_bytes(), 16 << 10);
    for gfn in 0..1024 {
        tables.map(Gfn(gfn), Pfn(gfn), true);
    }
    // Levels 3 and 2, and two tables of leaves.
    let full = (16 << 10) + 4 * 4096;
    assert_eq!(tables.table_bytes(), full);
    assert_eq!(tables.zap(GfnRange::new(Gfn(0), 1024).unwrap()), 1024);
    assert_eq!(tables.table_bytes(), full);
    assert_eq!(tables.map(Gfn(5), Pfn(9), false), MapOutcome::Installed);
    assert_eq!(tables.table_bytes(), full);
}
