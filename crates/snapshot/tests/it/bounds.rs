//! Bounded memory, lazy opening, and many readers at once.

use crate::support::{Dir, PAGE, go_on, noise, packed, small, sparse_on, text};
use pageferry_snapshot::{Compression, Fault, Snapshot, What, unpack};
use pageferry_testkit::process::runs_in_child;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// The most bytes that this process has had in memory, without pages of files.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.unwrap().trim().trim_end_matches(" kB");
    kib.parse::<u64>().unwrap() << 10
}

#[test]
fn memory_is_never_held_whole() {
    if runs_in_child() {
        return;
    }
    let dir = Dir::new();
    let path = dir.path("memory");
    let file = File::create(&path).unwrap();
    let bytes = 384_u64 << 20;
    for at in (0..bytes).step_by(1 << 20) {
        file.write_all_at(&noise(at + 1, 1 << 20), at).unwrap();
    }
    let before = peak();
    packed(
        &path,
        &dir.path("packed"),
        small(64 << 10, Compression::Lz4),
    );
    std::fs::remove_file(path).unwrap();
    let snapshot = Snapshot::open(&dir.path("packed")).unwrap();
    unpack(&snapshot, &dir.path("back"), What::Whole, &mut go_on).unwrap();
    let grown = peak() - before;
    assert!(grown < bytes / 6, "{grown} bytes for {bytes}");
}

#[test]
fn threads_read_the_same_snapshot_at_once() {
    let dir = Dir::new();
    let mut memory = [text(1, 300 * PAGE), noise(2, 300 * PAGE)].concat();
    memory[100 * PAGE..200 * PAGE].fill(0);
    let options = small(PAGE as u32, Compression::Lz4);
    packed(&dir.write("a.mem", &memory), &dir.path("a"), options);
    let base = Snapshot::open(&dir.path("a")).unwrap();
    let changed: Vec<_> = (0..600).step_by(7).collect();
    for page in &changed {
        memory[page * PAGE..][..PAGE].copy_from_slice(&noise(100 + *page as u64, PAGE));
    }
    let diff = dir.write_pages("b.mem", &memory, &changed);
    packed(&diff, &dir.path("b"), sparse_on(&base));
    let snapshot = Snapshot::open(&dir.path("b")).unwrap();
    std::thread::scope(|scope| {
        for first in 0..8_usize {
            let (snapshot, memory) = (&snapshot, &memory);
            scope.spawn(move || {
                for step in 0..600 {
                    let index = (first * 75 + step * 7) % 600;
                    let mut page = [0xee; PAGE];
                    snapshot.read_chunk(index as u64, &mut page).unwrap();
                    assert!(page == memory[index * PAGE..][..PAGE], "chunk {index}");
                }
            });
        }
    });
}

#[test]
fn reads_outside_of_memory_are_errors() {
    let dir = Dir::new();
    let memory = noise(1, 3 * PAGE);
    let options = small(8192, Compression::Lz4);
    packed(&dir.write("memory", &memory), &dir.path("packed"), options);
    let snapshot = Snapshot::open(&dir.path("packed")).unwrap();
    assert_eq!((snapshot.chunks(), snapshot.chunk_len(1)), (2, PAGE));
    assert_eq!(snapshot.chunk_len(2), 0);
    let out_of_range = |error: pageferry_snapshot::ChunkError| {
        assert!(matches!(error.fault, Fault::OutOfRange), "{error}");
    };
    out_of_range(snapshot.chunk(2).unwrap_err());
    out_of_range(snapshot.chunk(u64::MAX).unwrap_err());
    out_of_range(snapshot.read_chunk(2, &mut []).unwrap_err());
    let mut bytes = [1; 100];
    out_of_range(
        snapshot
            .read_at(3 * PAGE as u64 - 50, &mut bytes)
            .unwrap_err(),
    );
    assert_eq!(bytes[..50], memory[3 * PAGE - 50..]);
    assert_eq!(bytes[50..], [0; 50]);
    out_of_range(snapshot.read_at(u64::MAX, &mut bytes).unwrap_err());
    snapshot.read_at(u64::MAX, &mut []).unwrap();
    assert!(snapshot.is_zero(5..5).unwrap());
    out_of_range(
        snapshot
            .is_zero(0..u64::MAX)
            .map(|_| ())
            .err()
            .unwrap_or_else(|| {
                // The first chunk is not zero, so the search ended before the end of memory.
                snapshot.chunk(9).unwrap_err()
            }),
    );
}

#[test]
fn opening_reads_no_index() {
    let dir = Dir::new();
    let memory = noise(1, 5 * PAGE);
    let options = small(PAGE as u32, Compression::Lz4);
    let path = dir.path("packed");
    let figures = packed(&dir.write("memory", &memory), &path, options);
    // The index is damaged, which only a look-up can find.
    let file = File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[9], 72 + figures.stored_bytes).unwrap();
    let snapshot = Snapshot::open(&path).unwrap();
    let said = snapshot.chunk(4).unwrap_err().to_string();
    assert!(
        said.contains("chunk 4") && said.contains("column 'kind'"),
        "{said}"
    );
}
