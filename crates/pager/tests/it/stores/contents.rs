//! A peer's files have the contents that they have at the peer.

use crate::stores::scene::{Scene, memory, read_all, rewrite};
use pageferry_pager::{Format, SourceError, Store, Stores};
use pageferry_snapshot::{Input, Options, Snapshot, pack};
use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

#[test]
fn a_memory_file_is_read_in_parts_of_any_size() {
    let scene = Scene::new("raw");
    let bytes = memory(1, 700);
    std::fs::create_dir(scene.file("web")).unwrap();
    std::fs::write(scene.file("web/memory"), &bytes[..bytes.len() - 100]).unwrap();
    let source = scene.open("web/memory");
    let expected = &bytes[..bytes.len() - 100];
    assert_eq!(source.bytes(), expected.len() as u64);
    for step in [4096, 65_536, 200_000, 2_500_000, 5 << 20] {
        assert!(
            read_all(&*source, step).unwrap() == expected,
            "parts of {step}"
        );
    }
    let end = source.bytes();
    let behind = source.read(end - 10, &mut [0; 11]).unwrap_err();
    assert!(matches!(behind, SourceError::Short { .. }), "{behind}");
    assert!(source.read(u64::MAX, &mut [0; 2]).is_err());
}

#[test]
fn many_threads_read_at_once() {
    let scene = Scene::new("threads");
    let bytes = memory(2, 2048);
    std::fs::write(scene.file("memory"), &bytes).unwrap();
    let source = scene.open("memory");
    std::thread::scope(|scope| {
        for thread in 0..32_usize {
            let (source, bytes) = (&source, &bytes);
            scope.spawn(move || {
                let mut page = [0; 4096];
                for step in 0..100 {
                    let at = (thread * 7919 + step * 104_729) % 2048 * 4096;
                    source.read(at as u64, &mut page).unwrap();
                    assert!(page == bytes[at..at + 4096], "page at {at}");
                }
            });
        }
    });
}

#[test]
fn blocks_that_were_read_are_at_hand() {
    let scene = Scene::new("hand");
    let bytes = memory(3, 256);
    std::fs::write(scene.file("memory"), &bytes).unwrap();
    let source = scene.open("memory");
    let mut page = [0; 4096];
    assert!(!source.read_now(8192, &mut page).unwrap());
    source.read(0, &mut page).unwrap();
    assert!(source.read_now(8192, &mut page).unwrap());
    assert!(page == bytes[8192..12_288]);
    // VMs that start from the same file share them.
    let store = scene.store();
    let first = store.open(&scene.address("memory")).unwrap();
    first.read(0, &mut page).unwrap();
    let second = store.open(&scene.address("memory")).unwrap();
    assert!(second.read_now(0, &mut page).unwrap());
}

#[test]
fn holes_are_known_without_a_read() {
    let mut scene = Scene::new("holes");
    let file = File::create(scene.file("memory")).unwrap();
    file.set_len(64 << 20).unwrap();
    file.write_all_at(&[7; 8192], 32 << 20).unwrap();
    let source = scene.open("memory");
    scene.stop();
    assert!(source.is_zero(0, 32 << 20));
    assert!(source.is_zero((32 << 20) + 8192, (32 << 20) - 8192));
    assert!(!source.is_zero(32 << 20, 4096) && !source.is_zero(0, (32 << 20) + 1));
    assert!(!source.is_zero(64 << 20, 4096), "behind the end");
    assert!(!source.is_zero(u64::MAX, 2));
}

/// A server makes a list of extents of at most 1 MiB.
#[test]
fn more_extents_than_a_reply_has_are_all_known() {
    let scene = Scene::new("extents");
    let count = 70_000_u64;
    let file = File::create(scene.file("memory")).unwrap();
    file.set_len(count * 8192).unwrap();
    for index in 0..count {
        file.write_all_at(&[index as u8 | 1], index * 8192 + 4096)
            .unwrap();
    }
    let here = pageferry_pager::open_source(&scene.file("memory"), Format::Raw).unwrap();
    if !here.is_zero(0, 4096) {
        pageferry_testkit::skip(
            "a file system with holes of 4 KiB",
            "this one has larger blocks",
        );
        return;
    }
    let there = scene.open("memory");
    for index in (0..count).step_by(97).chain(count - 10..count) {
        assert!(there.is_zero(index * 8192, 4096), "hole {index}");
        assert!(!there.is_zero(index * 8192 + 4096, 4096), "data {index}");
    }
}

#[test]
fn a_packed_snapshot_and_a_diff_on_it_are_read_from_a_peer() {
    let scene = Scene::new("packed");
    let mut bytes = memory(4, 1024);
    let on = &mut |_, _| ControlFlow::Continue(());
    let mut pack_to = |bytes: &[u8], name: &str, base: Option<&Snapshot>| {
        std::fs::write(scene.scratch.path("input"), bytes).unwrap();
        let input = File::open(scene.scratch.path("input")).unwrap();
        let options = Options {
            base,
            ..Options::default()
        };
        pack(Input::File(&input), &scene.file(name), options, on).unwrap();
    };
    std::fs::create_dir(scene.file("web")).unwrap();
    pack_to(&bytes, "web/base", None);
    let base = Snapshot::open(&scene.file("web/base")).unwrap();
    let whole = bytes.clone();
    bytes[300 << 12..310 << 12].fill(0xaa);
    pack_to(&bytes, "web/diff", Some(&base));

    let stores = Stores::new([Arc::new(scene.store()) as Arc<dyn Store>]);
    let open = |name: &str| {
        let address = scene.address(name);
        stores.open(Path::new(&address), Format::Packed).unwrap()
    };
    assert!(read_all(&*open("web/base"), 65_536).unwrap() == whole);
    assert!(read_all(&*open("web/diff"), 65_536).unwrap() == bytes);
    let local = Snapshot::open(&scene.file("web/diff")).unwrap();
    assert!(
        open("web/diff")
            .identity()
            .contains(&local.id().to_string())
    );
    std::fs::remove_file(scene.file("web/base")).unwrap();
    let address = scene.address("web/diff");
    let why = stores
        .open(Path::new(&address), Format::Packed)
        .unwrap_err();
    assert!(why.to_string().contains("base"), "{why}");
}

#[test]
fn a_file_that_changes_is_an_error() {
    let mut scene = Scene::new("changed");
    let bytes = memory(5, 600);
    std::fs::write(scene.file("memory"), &bytes).unwrap();
    let store = scene.store();
    let source = store.open(&scene.address("memory")).unwrap();
    let mut page = [0; 4096];
    source.read(0, &mut page).unwrap();
    // In place: the server sees it with the next read.
    std::thread::sleep(Duration::from_millis(20));
    let file = File::options()
        .write(true)
        .open(scene.file("memory"))
        .unwrap();
    file.write_all_at(&[1; 10], 0).unwrap();
    let changed = source.read(1 << 20, &mut page).unwrap_err();
    assert!(matches!(changed, SourceError::Changed { .. }), "{changed}");
    // Another file of the name: new connections see it, and old ones read the old file.
    let source = store.open(&scene.address("memory")).unwrap();
    let before = source.identity();
    rewrite(&scene.file("memory"), &bytes);
    source.read(1 << 20, &mut page).unwrap();
    scene.stop();
    scene.start();
    let changed = source.read(2 << 20, &mut page).unwrap_err();
    assert!(matches!(changed, SourceError::Changed { .. }), "{changed}");
    let fresh = store.open(&scene.address("memory")).unwrap();
    assert_ne!(fresh.identity(), before);
    fresh.read(2 << 20, &mut page).unwrap();
}
