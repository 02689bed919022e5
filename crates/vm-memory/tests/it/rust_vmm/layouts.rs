//! Random layouts under random changes. Both memories must give the same answers, including
//! refusals and errors.

use super::kinds::{Kind, Mmap, PAGE, Slots, region};
use proptest::prelude::*;
use std::fmt::Debug;
use std::sync::Arc;
use vm_memory::{
    Address, Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion,
};

/// Regions lie in the first pages of the address space.
const PAGES: u64 = 48;

#[derive(Clone, Debug)]
enum Step {
    Insert {
        page: u64,
        pages: u64,
    },
    /// The `nth` region, modulo their number.
    Remove {
        nth: usize,
    },
    Relocate {
        nth: usize,
        page: u64,
    },
    Write {
        addr: u64,
        len: usize,
        byte: u8,
    },
    Look {
        addr: u64,
        len: usize,
    },
}

fn addresses() -> impl Strategy<Value = u64> {
    prop_oneof![
        3 => 0..PAGES * PAGE,
        // Addresses at the edges of pages, where regions begin and end.
        2 => (0..=PAGES, -9i64..9).prop_map(|(page, off)| (page * PAGE).saturating_add_signed(off)),
        1 => Just(u64::MAX),
    ]
}

fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![0..20usize, 0..(6 * PAGE as usize)]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..PAGES, 1..6u64).prop_map(|(page, pages)| Step::Insert { page, pages }),
        1 => any::<usize>().prop_map(|nth| Step::Remove { nth }),
        2 => (any::<usize>(), 0..PAGES).prop_map(|(nth, page)| Step::Relocate { nth, page }),
        3 => (addresses(), lengths(), any::<u8>())
            .prop_map(|(addr, len, byte)| Step::Write { addr, len, byte }),
        3 => (addresses(), lengths()).prop_map(|(addr, len)| Step::Look { addr, len }),
    ];
    proptest::collection::vec(step, 1..60)
}

/// The results of all look-ups at `addr` as text, including errors.
fn look<M: GuestMemoryBackend>(memory: &M, addr: u64, len: usize) -> String {
    fn show(answer: impl Debug) -> String {
        format!("{answer:?}; ")
    }
    let at = GuestAddress(addr);
    let mut bytes = vec![0xee; len];
    let read = memory.read(&mut bytes, at);
    let slices = memory.get_slices(at, len);
    [
        show(memory.to_region_addr(at).map(|(r, o)| (r.start_addr(), o))),
        show(memory.check_address(at)),
        show(memory.checked_offset(at, len)),
        show(memory.check_range(at, len)),
        show(read),
        show(bytes),
        show(memory.load::<u32>(at, std::sync::atomic::Ordering::Relaxed)),
        show(slices.map(|s| s.map(|s| s.len())).collect::<Vec<_>>()),
        show(memory.get_slice(at, len).map(|s| s.len())),
    ]
    .concat()
}

/// The layout, and the results of all look-ups at its edges.
fn survey<M: GuestMemoryBackend>(memory: &M) -> String {
    let mut text = format!("{} {:?} ", memory.num_regions(), memory.last_addr());
    for region in memory.iter() {
        let (start, last) = (region.start_addr(), region.last_addr());
        text += &format!("{start:?} {last:?} {}; ", region.len());
        text += &look(memory, start.0, 3);
        text += &look(memory, last.0, 3);
        text += &look(memory, last.unchecked_add(1).0, 3);
    }
    text
}

fn nth<S: GuestAddressSpace>(space: &S, nth: usize) -> Option<(u64, u64)>
where
    S::M: GuestMemoryBackend,
{
    let memory = space.memory();
    let count = memory.num_regions();
    let region = (count > 0).then(|| memory.iter().nth(nth % count))??;
    Some((region.start_addr().0, region.len()))
}

/// Makes the change `step`. Returns its result as text.
fn apply<K: Kind>(space: &K::Space, step: &Step) -> String {
    match *step {
        Step::Insert { page, pages } => {
            let new = region(page * PAGE, pages * PAGE);
            format!("{}", K::insert(space, Arc::new(new)))
        }
        Step::Remove { nth: n } => nth(space, n).map_or(String::new(), |(base, size)| {
            let gone = K::remove(space, base, size);
            format!("{:?}", gone.map(|r| (r.start_addr(), r.len())))
        }),
        Step::Relocate { nth: n, page } => nth(space, n).map_or(String::new(), |(base, size)| {
            format!("{}", K::relocate(space, base, size, page * PAGE))
        }),
        Step::Write { addr, len, byte } => {
            let written = space.memory().write(&vec![byte; len], GuestAddress(addr));
            format!("{written:?}")
        }
        Step::Look { addr, len } => look(&*space.memory(), addr, len),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(160))]

    #[test]
    fn both_memories_answer_alike(steps in steps()) {
        let theirs = Mmap::of(vec![region::<()>(0, PAGE)]).unwrap();
        let ours = Slots::of(vec![region::<()>(0, PAGE)]).unwrap();
        for step in &steps {
            // A snapshot from before the change must not change.
            let before = GuestAddressSpace::memory(&ours);
            let shown = survey(&*before);
            prop_assert_eq!(apply::<Mmap>(&theirs, step), apply::<Slots>(&ours, step), "{:?}", step);
            if !matches!(step, Step::Write { .. }) {
                prop_assert_eq!(shown, survey(&*before), "a held snapshot changed at {:?}", step);
            }
            prop_assert_eq!(
                survey(&*GuestAddressSpace::memory(&theirs)),
                survey(&*GuestAddressSpace::memory(&ours)),
                "after {:?}", step
            );
        }
    }
}
