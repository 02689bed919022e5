//! Random memories and chains of diffs against plain bytes.

use crate::support::{Dir, PAGE, all_of, compressions, noise, packed, small, sparse_on, text};
use pageferry_snapshot::{Options, Snapshot, What, verify};
use proptest::prelude::*;

/// A page of one of a few kinds, so that pages and chunks repeat.
fn page(kind: u8) -> Vec<u8> {
    match kind {
        0..=3 => vec![0; PAGE],
        4..=9 => text(kind.into(), PAGE),
        _ => noise(kind.into(), PAGE),
    }
}

/// A change of memory.
#[derive(Clone, Debug)]
struct Change {
    pages: Vec<(prop::sample::Index, u8)>,
    /// The diff is a sparse file, rather than the whole memory.
    sparse: bool,
}

fn change() -> impl Strategy<Value = Change> {
    let pages = prop::collection::vec((any::<prop::sample::Index>(), 0..16_u8), 0..12);
    (pages, any::<bool>()).prop_map(|(pages, sparse)| Change { pages, sparse })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn chains_of_diffs_are_the_memory_they_were_made_of(
        first in prop::collection::vec(0..16_u8, 1..70),
        changes in prop::collection::vec(change(), 0..11),
        shift in 12..=16_u32,
        codec in any::<prop::sample::Index>(),
        reads in prop::collection::vec((any::<prop::sample::Index>(), 0..5 * PAGE), 8),
    ) {
        let dir = Dir::new();
        let compressions = compressions();
        let compression = *codec.get(&compressions);
        let mut memory: Vec<u8> = first.iter().flat_map(|kind| page(*kind)).collect();
        let path = dir.path("0");
        packed(&dir.write("memory", &memory), &path, small(1 << shift, compression));
        let mut last = Snapshot::open(&path).unwrap();
        for (depth, change) in changes.iter().enumerate() {
            let mut touched = Vec::new();
            for (at, kind) in &change.pages {
                let at = at.index(first.len());
                memory[at * PAGE..][..PAGE].copy_from_slice(&page(*kind));
                touched.push(at);
            }
            touched.sort_unstable();
            touched.dedup();
            let (file, options) = match change.sparse {
                true => (dir.write_pages("diff.mem", &memory, &touched), sparse_on(&last)),
                false => (
                    dir.write("diff.mem", &memory),
                    Options { base: Some(&last), ..Options::default() },
                ),
            };
            // All pages may be touched, which leaves no hole.
            let options = Options { compression, zeros_are_data: true, ..options };
            let path = dir.path(&format!("{}", depth + 1));
            packed(&file, &path, options);
            last = Snapshot::open(&path).unwrap();
            prop_assert_eq!(last.bases().len(), depth + 1);
            if change.sparse {
                let sparse = std::fs::read(&file).unwrap();
                prop_assert!(dir.unpacked(&last, What::Diff) == sparse);
            }
        }
        prop_assert!(all_of(&last) == memory);
        prop_assert!(dir.unpacked(&last, What::Whole) == memory);
        for (at, bytes) in reads {
            let at = at.index(memory.len());
            let bytes = bytes.min(memory.len() - at);
            let mut found = vec![0xee; bytes];
            last.read_at(at as u64, &mut found).unwrap();
            prop_assert!(found == memory[at..][..bytes]);
            let chunk = 1_usize << shift;
            let around = at / chunk * chunk..(at + bytes).div_ceil(chunk) * chunk;
            let around = &memory[around.start..around.end.min(memory.len())];
            let is_zero = last.is_zero(at as u64..(at + bytes) as u64).unwrap();
            prop_assert_eq!(is_zero, bytes == 0 || around.iter().all(|byte| *byte == 0));
        }
        let verified = verify(&last, &mut crate::support::go_on).unwrap();
        prop_assert_eq!((verified.chunks, verified.damaged), (last.chunks(), 0));
        let figures = last.figures().unwrap();
        let sum = figures.zero + figures.in_bases + figures.repeated
            + figures.raw + figures.lz4 + figures.zstd;
        prop_assert_eq!(sum, figures.chunks);
    }
}
