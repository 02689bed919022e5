//! Bases that are elsewhere, missing, or others.

use crate::support::{Dir, PAGE, all_of, noise, packed, small, sparse_on};
use pageferry_snapshot::{Compression, OpenError, Snapshot};

/// Three files, each a diff on the one before, and the memory of the last.
fn chain(dir: &Dir) -> Vec<u8> {
    let mut memory = noise(1, 8 * PAGE);
    let options = small(PAGE as u32, Compression::Lz4);
    packed(&dir.write("memory", &memory), &dir.path("0"), options);
    for depth in 1..3 {
        let base = Snapshot::open(&dir.path(&format!("{}", depth - 1))).unwrap();
        memory[depth * PAGE..][..PAGE].copy_from_slice(&noise(10 + depth as u64, PAGE));
        let file = dir.write_pages("diff.mem", &memory, &[depth]);
        let path = dir.path(&format!("{depth}"));
        packed(&file, &path, sparse_on(&base));
    }
    memory
}

#[test]
fn each_chunk_names_the_file_that_holds_it() {
    let dir = Dir::new();
    chain(&dir);
    let last = Snapshot::open(&dir.path("2")).unwrap();
    let names: Vec<_> = last.bases().iter().map(|base| base.name.clone()).collect();
    assert_eq!(names, ["1", "0"]);
    let files: Vec<_> = (0..4)
        .map(|index| last.chunk(index).unwrap().file)
        .collect();
    assert_eq!(files, [2, 1, 0, 2]);
    assert_eq!(last.file(1).unwrap(), dir.path("1"));
    assert_eq!(last.file(3), None);
}

#[test]
fn a_missing_base_is_named_and_found_in_another_directory() {
    let (dir, elsewhere) = (Dir::new(), Dir::new());
    let memory = chain(&dir);
    let id = Snapshot::open(&dir.path("0")).unwrap().id();
    std::fs::rename(dir.path("0"), elsewhere.path("0")).unwrap();
    let error = Snapshot::open(&dir.path("2")).unwrap_err();
    let said = error.to_string();
    assert!(
        said.contains(&format!("the base {id} is missing")),
        "{said}"
    );
    assert!(
        said.contains("'0'") && said.contains(&*dir.path("2").to_string_lossy()),
        "{said}"
    );
    assert!(!error.is_damage());
    let there = elsewhere.path("");
    let snapshot = Snapshot::open_in(&dir.path("2"), &[&there]).unwrap();
    assert_eq!(all_of(&snapshot), memory);
}

#[test]
fn a_renamed_base_is_found_by_its_id() {
    let dir = Dir::new();
    let memory = chain(&dir);
    std::fs::rename(dir.path("0"), dir.path("another name")).unwrap();
    let snapshot = Snapshot::open(&dir.path("2")).unwrap();
    assert_eq!(all_of(&snapshot), memory);
    assert_eq!(snapshot.file(2).unwrap(), dir.path("another name"));
}

#[test]
fn another_snapshot_in_place_of_a_base_is_named() {
    let dir = Dir::new();
    chain(&dir);
    let expected = Snapshot::open(&dir.path("1")).unwrap().id();
    std::fs::remove_file(dir.path("1")).unwrap();
    let options = small(PAGE as u32, Compression::Lz4);
    packed(
        &dir.write("memory", &noise(9, 8 * PAGE)),
        &dir.path("1"),
        options,
    );
    match Snapshot::open(&dir.path("2")).unwrap_err() {
        OpenError::BaseWrong {
            base, expected: id, ..
        } => {
            assert_eq!((base, id), (dir.path("1"), expected));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_damaged_base_is_named() {
    let dir = Dir::new();
    chain(&dir);
    let mut bytes = std::fs::read(dir.path("0")).unwrap();
    bytes[30] ^= 1;
    std::fs::write(dir.path("0"), &bytes).unwrap();
    match Snapshot::open(&dir.path("1")).unwrap_err() {
        OpenError::Header { file } => assert_eq!(file, dir.path("0")),
        other => panic!("{other}"),
    }
    bytes[30] ^= 1;
    bytes.pop();
    std::fs::write(dir.path("0"), &bytes).unwrap();
    match Snapshot::open(&dir.path("1")).unwrap_err() {
        OpenError::Truncated { file, .. } => assert_eq!(file, dir.path("0")),
        other => panic!("{other}"),
    }
}
