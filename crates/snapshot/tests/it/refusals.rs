//! Work that is refused, fails or is cancelled: nothing is left behind, and nothing is replaced.

use crate::support::{Dir, PAGE, go_on, noise, packed, small, sparse_on, try_pack};
use pageferry_snapshot::{
    Compression, Input, Options, PackError, Snapshot, UnpackError, What, open_input, pack, unpack,
};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::Path;

#[test]
fn lengths_and_chunks_that_do_not_fit_are_refused() {
    let dir = Dir::new();
    let memory = dir.write("memory", &noise(1, 8 * PAGE));
    let options = small(PAGE as u32, Compression::Lz4);
    packed(&memory, &dir.path("base"), options);
    let base = Snapshot::open(&dir.path("base")).unwrap();
    let odd = dir.write("odd", &[0; 5000]);
    let empty = dir.write("empty", &[]);
    let longer = dir.write("longer", &noise(1, 9 * PAGE));
    let out = dir.path("out");
    let refused = |memory: &Path, options| try_pack(memory, &out, options).unwrap_err();
    for (memory, bytes) in [(&odd, 5000), (&empty, 0)] {
        let error = refused(memory, Options::default());
        assert!(
            matches!(error, PackError::Length(found) if found == bytes),
            "{error}"
        );
    }
    // Larger than a file on a disk may be.
    let huge = File::from(memfd_create("huge", MemfdFlags::CLOEXEC).unwrap());
    huge.set_len((16 << 40) + 4096).unwrap();
    let error = pack(Input::File(&huge), &out, Options::default(), &mut go_on).unwrap_err();
    assert!(matches!(error, PackError::Length(_)), "{error}");
    for chunk in [0, 1, 2048, 5000, 2 << 20, 1 << 31] {
        let error = refused(&memory, small(chunk, Compression::Lz4));
        assert!(
            matches!(error, PackError::ChunkBytes(_)),
            "{chunk}: {error}"
        );
    }
    let error = refused(&longer, sparse_on(&base));
    assert!(matches!(error, PackError::BaseLength { .. }), "{error}");
    let options = Options {
        chunk_bytes: Some(8192),
        ..sparse_on(&base)
    };
    let error = refused(&memory, options);
    assert!(matches!(error, PackError::BaseChunks { .. }), "{error}");
    assert!(!out.exists());
}

#[test]
fn a_file_that_is_there_is_never_replaced() {
    let dir = Dir::new();
    let memory = dir.write("memory", &noise(1, PAGE));
    let there = dir.write("there", b"precious");
    let said = try_pack(&memory, &there, Options::default())
        .unwrap_err()
        .to_string();
    assert!(said.contains("there is a file already"), "{said}");
    packed(&memory, &dir.path("packed"), Options::default());
    let snapshot = Snapshot::open(&dir.path("packed")).unwrap();
    unpack(&snapshot, &there, What::Whole, &mut go_on).unwrap_err();

    // One that comes while the work is under way.
    let late = dir.path("late");
    let file = open_input(&memory).unwrap();
    let mut come = |_: u64, _: u64| {
        std::fs::write(&late, b"precious").unwrap();
        ControlFlow::Continue(())
    };
    let said = pack(Input::File(&file), &late, Options::default(), &mut come).unwrap_err();
    assert!(
        said.to_string().contains("there is a file already"),
        "{said}"
    );
    for path in [&there, &late] {
        assert_eq!(std::fs::read(path).unwrap(), b"precious");
    }
    assert_eq!(dir.names(), ["late", "memory", "packed", "there"]);
}

#[test]
fn cancelled_work_leaves_nothing() {
    let dir = Dir::new();
    let bytes = noise(1, 12 << 20);
    let memory = dir.write("memory", &bytes);
    packed(&memory, &dir.path("packed"), Options::default());
    let snapshot = Snapshot::open(&dir.path("packed")).unwrap();
    let file = open_input(&memory).unwrap();
    for end in [0, 4 << 20, 8 << 20] {
        let mut until = |done: u64, _: u64| match done >= end {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        let out = dir.path("out");
        let error = pack(Input::File(&file), &out, Options::default(), &mut until).unwrap_err();
        assert!(matches!(error, PackError::Cancelled), "{error}");
        let error = unpack(&snapshot, &out, What::Whole, &mut until).unwrap_err();
        assert!(matches!(error, UnpackError::Cancelled), "{error}");
        let verified = pageferry_snapshot::verify(&snapshot, &mut until);
        assert_eq!(verified, None);
        assert_eq!(dir.names(), ["memory", "packed"]);
    }
}

#[test]
fn memory_that_changes_meanwhile_is_refused() {
    let dir = Dir::new();
    let memory = dir.write("memory", &noise(1, 64 << 20));
    let file = open_input(&memory).unwrap();
    let write = || File::options().write(true).open(&memory).unwrap();
    let out = dir.path("out");
    let mut change = |_: u64, _: u64| {
        // The time of a change is as coarse as the kernel's tick.
        std::thread::sleep(std::time::Duration::from_millis(20));
        write().write_all_at(b"new", 0).unwrap();
        ControlFlow::Continue(())
    };
    let error = pack(Input::File(&file), &out, Options::default(), &mut change).unwrap_err();
    assert!(matches!(error, PackError::Changed), "{error}");
    let mut shrink = |_: u64, _: u64| {
        write().set_len(4096).unwrap();
        ControlFlow::Continue(())
    };
    let error = pack(Input::File(&file), &out, Options::default(), &mut shrink).unwrap_err();
    // The end of the file within an extent, or a new end that reads as a hole.
    assert!(
        matches!(error, PackError::Read(_) | PackError::Changed),
        "{error}"
    );
    assert_eq!(dir.names(), ["memory"]);
}

#[test]
fn files_that_are_no_regular_files_are_refused() {
    let dir = Dir::new();
    for path in [Path::new("/dev/zero"), &dir.path("")] {
        let why = open_input(path).unwrap_err().to_string();
        assert!(why.contains("not a regular file"), "{why}");
        let why = Snapshot::open(path).unwrap_err().to_string();
        assert!(why.contains("not a regular file"), "{why}");
    }
    let why = Snapshot::open(&dir.path("none")).unwrap_err();
    assert!(!why.is_damage());
    assert!(why.to_string().contains("none"), "{why}");
}

#[test]
fn chains_end_at_their_limit() {
    let dir = Dir::new();
    let memory = dir.write("memory", &noise(1, PAGE));
    let options = small(PAGE as u32, Compression::None);
    packed(&memory, &dir.path("0"), options);
    let mut last = Snapshot::open(&dir.path("0")).unwrap();
    let hole = dir.path("hole");
    File::create(&hole).unwrap().set_len(PAGE as u64).unwrap();
    for depth in 1..=256 {
        let path = dir.path(&format!("{depth}"));
        packed(&hole, &path, sparse_on(&last));
        last = Snapshot::open(&path).unwrap();
    }
    let error = try_pack(&hole, &dir.path("257"), sparse_on(&last)).unwrap_err();
    assert!(matches!(error, PackError::TooDeep(256)), "{error}");
}
