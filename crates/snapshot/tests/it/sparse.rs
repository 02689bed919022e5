//! Sparse files: their bytes and their holes come back.

use crate::support::{Dir, PAGE, all_of, go_on, noise, packed, small, sparse_on, text, try_pack};
use pageferry_snapshot::{Compression, Input, Options, PackError, Snapshot, What, pack, unpack};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use std::fs::File;
use std::path::Path;

/// The pages of a file that are data.
fn data_pages(path: &Path) -> Vec<usize> {
    let file = File::open(path).unwrap();
    let mut pages = Vec::new();
    let mut at = 0;
    loop {
        at = match seek(&file, SeekFrom::Data(at)) {
            Ok(at) => at,
            Err(Errno::NXIO) => return pages,
            Err(why) => panic!("{why}"),
        };
        let end = seek(&file, SeekFrom::Hole(at)).unwrap();
        pages.extend(at as usize / PAGE..(end as usize).div_ceil(PAGE));
        at = end;
    }
}

#[test]
fn a_sparse_diff_comes_back_with_its_holes_and_its_zeros() {
    let dir = Dir::new();
    let old = noise(1, 64 * PAGE);
    packed(
        &dir.write("base.mem", &old),
        &dir.path("base"),
        small(4 * PAGE as u32, Compression::Lz4),
    );
    let base = Snapshot::open(&dir.path("base")).unwrap();
    let mut new = old.clone();
    let pages = [0, 5, 6, 7, 30, 31, 32, 33, 63];
    for page in pages {
        new[page * PAGE..][..PAGE].copy_from_slice(&text(page as u64, PAGE));
    }
    // Zeros that are data, and a page that was written without a change.
    new[30 * PAGE..][..PAGE].fill(0);
    new[5 * PAGE..][..PAGE].copy_from_slice(&old[5 * PAGE..][..PAGE]);
    let file = dir.write_pages("diff.mem", &new, &pages);
    assert_eq!(data_pages(&file), pages, "this file system keeps holes");
    packed(&file, &dir.path("diff"), sparse_on(&base));
    let diff = Snapshot::open(&dir.path("diff")).unwrap();
    assert_eq!(all_of(&diff), new);
    assert_eq!(dir.unpacked(&diff, What::Whole), new);
    let back = dir.path("back.mem");
    let written = unpack(&diff, &back, What::Diff, &mut go_on).unwrap();
    assert_eq!(written, (pages.len() * PAGE) as u64);
    assert_eq!(data_pages(&back), pages);
    assert_eq!(std::fs::read(&back).unwrap(), std::fs::read(&file).unwrap());
}

#[test]
fn without_a_base_holes_are_zeros() {
    let dir = Dir::new();
    let memory = noise(1, 40 * PAGE);
    let pages = [3, 4, 17, 39];
    let file = dir.write_pages("memory", &memory, &pages);
    let bytes = std::fs::read(&file).unwrap();
    let options = Options {
        holes_as_base: true,
        ..small(8 * PAGE as u32, Compression::Lz4)
    };
    let figures = packed(&file, &dir.path("packed"), options);
    assert_eq!((figures.zero, figures.lz4), (2, 3));
    let snapshot = Snapshot::open(&dir.path("packed")).unwrap();
    assert_eq!(all_of(&snapshot), bytes);
    for what in [What::Whole, What::Diff] {
        let back = dir.path(&format!("{what:?}"));
        unpack(&snapshot, &back, what, &mut go_on).unwrap();
        assert_eq!(std::fs::read(&back).unwrap(), bytes);
        assert_eq!(data_pages(&back), pages);
    }
}

#[test]
fn a_file_of_one_hole_is_zero_memory_of_no_size() {
    let dir = Dir::new();
    let file = dir.path("hole");
    File::create(&file).unwrap().set_len(64 << 30).unwrap();
    let figures = packed(&file, &dir.path("packed"), small(1 << 20, Compression::Lz4));
    assert_eq!((figures.chunks, figures.zero), (64 << 10, 64 << 10));
    assert_eq!(figures.stored_bytes, 0);
    let snapshot = Snapshot::open(&dir.path("packed")).unwrap();
    assert!(snapshot.is_zero(0..64 << 30).unwrap());
    unpack(&snapshot, &dir.path("back"), What::Whole, &mut go_on).unwrap();
    assert!(data_pages(&dir.path("back")).is_empty());
    assert_eq!(dir.path("back").metadata().unwrap().len(), 64 << 30);
}

#[test]
fn a_diff_of_whole_memories_has_the_pages_that_differ() {
    let dir = Dir::new();
    let old = [text(1, 20 * PAGE), vec![0; 12 * PAGE]].concat();
    packed(
        &dir.write("a.mem", &old),
        &dir.path("a"),
        small(4 * PAGE as u32, Compression::Lz4),
    );
    let base = Snapshot::open(&dir.path("a")).unwrap();
    let mut new = old.clone();
    new[2 * PAGE] ^= 1;
    new[19 * PAGE..21 * PAGE].fill(0);
    new[31 * PAGE + 7] = 1;
    let changed = [2, 19, 31];
    // As a dense file, as a sparse file whose holes are zeros, and as a packed snapshot.
    let dense = dir.write("dense", &new);
    let nonzero: Vec<_> = (0..19).chain([31]).collect();
    let sparse = dir.write_pages("sparse", &new, &nonzero);
    packed(&dense, &dir.path("b"), Options::default());
    let b = Snapshot::open(&dir.path("b")).unwrap();
    let on_base = || Options {
        base: Some(&base),
        ..Options::default()
    };
    packed(&dense, &dir.path("of-dense"), on_base());
    packed(&sparse, &dir.path("of-sparse"), on_base());
    pack(
        Input::Packed(&b),
        &dir.path("of-packed"),
        on_base(),
        &mut go_on,
    )
    .unwrap();
    for name in ["of-dense", "of-sparse", "of-packed"] {
        let diff = Snapshot::open(&dir.path(name)).unwrap();
        assert_eq!(all_of(&diff), new, "{name}");
        let back = dir.path(&format!("{name}.mem"));
        unpack(&diff, &back, What::Diff, &mut go_on).unwrap();
        assert_eq!(data_pages(&back), changed, "{name}");
        let mut merged = old.clone();
        let bytes = std::fs::read(&back).unwrap();
        for page in changed {
            merged[page * PAGE..][..PAGE].copy_from_slice(&bytes[page * PAGE..][..PAGE]);
        }
        assert_eq!(merged, new, "{name}");
    }
}

/// A memory of noise as a base, and its length in pages.
fn base_of(dir: &Dir, pages: usize) -> Snapshot {
    let memory = dir.write("base.mem", &noise(1, pages * PAGE));
    packed(&memory, &dir.path("base"), Options::default());
    Snapshot::open(&dir.path("base")).unwrap()
}

#[test]
fn a_diff_whose_holes_a_copy_has_filled_is_refused() {
    let dir = Dir::new();
    let base = base_of(&dir, 64);
    let diff = dir.write_pages("diff.mem", &text(2, 64 * PAGE), &[3]);
    let copy = dir.write("copy.mem", &std::fs::read(&diff).unwrap());
    let out = dir.path("out");
    let refused = try_pack(&copy, &out, sparse_on(&base)).unwrap_err();
    assert!(matches!(refused, PackError::NoHoles), "{refused}");
    assert!(refused.to_string().contains("cat, scp"), "{refused}");
    assert!(!out.exists());
    let options = Options {
        zeros_are_data: true,
        ..sparse_on(&base)
    };
    assert_eq!(packed(&copy, &out, options).zeroed_pages, 63);
    let figures = packed(&diff, &dir.path("diff"), sparse_on(&base));
    assert_eq!(figures.zeroed_pages, 0);
}

#[test]
fn a_diff_with_long_runs_of_zeros_over_the_base_is_refused() {
    let dir = Dir::new();
    let base = base_of(&dir, 1100);
    let diff = |name: &str, zeros: std::ops::Range<usize>| {
        dir.write_pages(name, &vec![0; 1100 * PAGE], &zeros.collect::<Vec<_>>())
    };
    let out = dir.path("out");
    // They begin within a chunk, and end in one that another worker has.
    let refused = try_pack(&diff("long", 9..9 + 1025), &out, sparse_on(&base)).unwrap_err();
    assert!(matches!(refused, PackError::LongZeros(_)), "{refused}");
    assert!(!out.exists());
    let figures = packed(&diff("short", 9..9 + 1024), &out, sparse_on(&base));
    assert_eq!(figures.zeroed_pages, 1024);
    // On a base that has zeros there too, they replace nothing.
    let zeros = Snapshot::open(&out).unwrap();
    let again = packed(
        &diff("again.mem", 9..9 + 1024),
        &dir.path("again"),
        sparse_on(&zeros),
    );
    assert_eq!(again.zeroed_pages, 0);
}
