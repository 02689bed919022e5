//! Each kind of chunk, and chunks that are stored once.

use crate::support::{Dir, all_of, compressions, noise, packed, small, text};
use pageferry_snapshot::{Compression, Input, Kind, Options, Snapshot, pack};

const CHUNK: usize = 16 << 10;

#[test]
fn each_kind_is_chosen_where_it_fits_and_read_back() {
    let dir = Dir::new();
    let memory = [vec![0; CHUNK], noise(1, CHUNK), text(2, CHUNK)].concat();
    let file = dir.write("memory", &memory);
    for compression in compressions() {
        let path = dir.path(&format!("{compression:?}"));
        packed(&file, &path, small(CHUNK as u32, compression));
        let snapshot = Snapshot::open(&path).unwrap();
        let of_text = match compression {
            Compression::None => Kind::Raw,
            Compression::Lz4 => Kind::Lz4,
            _ => Kind::Zstd,
        };
        let kinds: Vec<_> = (0..3)
            .map(|index| snapshot.chunk(index).unwrap().kind)
            .collect();
        assert_eq!(kinds, [Kind::Zero, Kind::Raw, of_text], "{compression:?}");
        assert_eq!(all_of(&snapshot), memory);
    }
}

#[test]
fn equal_chunks_are_stored_once_near_and_far() {
    let dir = Dir::new();
    let one = noise(1, CHUNK);
    let mut memory = one.repeat(3);
    // More than a batch in between, so that the copies are in different batches.
    memory.extend(text(2, 8 << 20));
    memory.extend(&one);
    let file = dir.write("memory", &memory);
    let path = dir.path("packed");
    let figures = packed(&file, &path, small(CHUNK as u32, Compression::Lz4));
    assert_eq!((figures.repeated, figures.raw), (3, 1));
    let snapshot = Snapshot::open(&path).unwrap();
    let place = |index| snapshot.chunk(index).unwrap().place;
    assert_eq!(place(0), place(2));
    assert_eq!(place(0), place(snapshot.chunks() - 1));
    assert_eq!(snapshot.figures().unwrap(), figures);
    assert_eq!(all_of(&snapshot), memory);
}

#[test]
fn a_diff_stores_no_chunk_that_its_base_has_anywhere() {
    let dir = Dir::new();
    let (one, two, new) = (noise(1, CHUNK), text(2, CHUNK), noise(3, CHUNK));
    let base = dir.write("base.mem", &[&one[..], &two, &one].concat());
    let path = dir.path("base");
    packed(&base, &path, small(CHUNK as u32, Compression::Lz4));
    let base = Snapshot::open(&path).unwrap();
    let memory = [&two[..], &new, &two].concat();
    let options = Options {
        base: Some(&base),
        ..Options::default()
    };
    let figures = packed(&dir.write("memory", &memory), &dir.path("diff"), options);
    assert_eq!((figures.in_bases, figures.raw), (2, 1));
    let diff = Snapshot::open(&dir.path("diff")).unwrap();
    assert_eq!(all_of(&diff), memory);
}

#[test]
fn the_same_memory_gives_the_same_file() {
    let dir = Dir::new();
    let memory = [text(1, 9 << 20), noise(2, 1 << 20), text(1, 5 << 20)].concat();
    let file = dir.write("memory", &memory);
    for compression in compressions() {
        let names = ["one", "two"].map(|name| dir.path(&format!("{name}{compression:?}")));
        let files = names.map(|name| {
            packed(&file, &name, small(64 << 10, compression));
            std::fs::read(name).unwrap()
        });
        assert!(files[0] == files[1], "{compression:?}");
    }
}

#[test]
fn a_packed_snapshot_can_be_packed_anew_with_other_chunks() {
    let dir = Dir::new();
    let memory = [noise(1, 3 * CHUNK), vec![0; CHUNK], text(2, CHUNK)].concat();
    packed(
        &dir.write("memory", &memory),
        &dir.path("small"),
        small(4096, Compression::Lz4),
    );
    let from = Snapshot::open(&dir.path("small")).unwrap();
    let to = dir.path("large");
    let options = small(1 << 20, Compression::None);
    pack(
        Input::Packed(&from),
        &to,
        options,
        &mut crate::support::go_on,
    )
    .unwrap();
    let large = Snapshot::open(&to).unwrap();
    assert_eq!((large.chunks(), large.chunk_len(0)), (1, memory.len()));
    assert_eq!(all_of(&large), memory);
}
