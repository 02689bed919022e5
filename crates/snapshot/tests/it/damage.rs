//! Flipped bits and lost ends: each is found, named, and never becomes memory.

use crate::support::{
    Dir, PAGE, all_of, compressions, go_on, noise, packed, small, sparse_on, text,
};
use pageferry_snapshot::{
    Compression, Fault, Labels, OpenError, Options, Snapshot, StateFile, What, open_input, unpack,
    verify,
};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A small snapshot with all there can be: a diff with a state and labels.
fn everything(dir: &Dir, compression: Compression) -> (PathBuf, Vec<u8>) {
    let old = [text(1, PAGE), noise(2, PAGE), vec![0; PAGE]].concat();
    let options = small(PAGE as u32, compression);
    packed(&dir.write("base.mem", &old), &dir.path("base"), options);
    let base = Snapshot::open(&dir.path("base")).unwrap();
    let mut new = old.clone();
    new[..300].copy_from_slice(&text(3, 300));
    new[2 * PAGE..].copy_from_slice(&text(4, PAGE));
    let file = dir.write_pages("diff.mem", &new, &[0, 2]);
    let state = dir.write("state.bin", b"registers");
    let options = Options {
        compression,
        labels: Labels {
            vmm: "a VMM".into(),
            version: "1.2".into(),
            cpu: "a CPU".into(),
        },
        states: vec![StateFile {
            name: "vmstate".into(),
            file: open_input(&state).unwrap(),
        }],
        ..sparse_on(&base)
    };
    packed(&file, &dir.path("diff"), options);
    (dir.path("diff"), new)
}

/// The bytes as a file in memory.
fn file_of(bytes: &[u8]) -> File {
    let file = File::from(memfd_create("snapshot", MemfdFlags::CLOEXEC).unwrap());
    file.write_all_at(bytes, 0).unwrap();
    file
}

/// The contents that can be had, with an error in place of the rest.
fn read_all(snapshot: &Snapshot, memory: &[u8]) -> u64 {
    let mut errors = 0;
    for index in 0..snapshot.chunks() {
        let mut chunk = vec![0xee; snapshot.chunk_len(index)];
        match snapshot.read_chunk(index, &mut chunk) {
            Ok(()) => assert!(
                chunk == memory[index as usize * PAGE..][..PAGE],
                "wrong bytes"
            ),
            Err(error) => {
                assert!(error.fault.is_damage(), "{error}");
                assert_eq!((error.chunk, error.offset), (index, index * PAGE as u64));
                assert!(
                    chunk.iter().all(|byte| *byte == 0),
                    "damaged bytes came out"
                );
                errors += 1;
            }
        }
    }
    errors
}

#[test]
fn every_flipped_bit_is_found() {
    for compression in compressions() {
        let dir = Dir::new();
        let (path, memory) = everything(&dir, compression);
        let good = std::fs::read(&path).unwrap();
        let (mut refused, mut named) = (0, 0);
        for bit in 0..good.len() * 8 {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let Ok(snapshot) = Snapshot::from_file(file_of(&bytes), &path, &[]) else {
                refused += 1;
                continue;
            };
            read_all(&snapshot, &memory);
            let found = verify(&snapshot, &mut go_on).unwrap();
            assert!(
                found.damaged > 0,
                "{compression:?}: bit {bit} of byte {}",
                bit / 8
            );
            let in_words = found.named.join("\n");
            assert!(in_words.contains(&*path.to_string_lossy()), "{in_words}");
            named += 1;
        }
        assert!(refused > 72 * 8 && named > 1000, "{refused}, {named}");
    }
}

#[test]
fn every_lost_end_is_found() {
    let dir = Dir::new();
    let (path, _) = everything(&dir, Compression::Lz4);
    let good = std::fs::read(&path).unwrap();
    for length in 0..good.len() {
        let opened = Snapshot::from_file(file_of(&good[..length]), &path, &[]);
        let error = opened.expect_err("a shorter file");
        let said = error.to_string();
        match length {
            0 => assert!(matches!(error, OpenError::NotASnapshot { .. }), "{said}"),
            1.. => assert!(
                matches!(error, OpenError::Truncated { found, .. } if found == length as u64),
                "{length}: {said}"
            ),
        }
    }
    let mut longer = good;
    longer.push(0);
    let error = Snapshot::from_file(file_of(&longer), &path, &[]).unwrap_err();
    assert!(matches!(error, OpenError::Truncated { .. }), "{error}");
}

#[test]
fn a_damaged_chunk_is_named_in_the_file_that_holds_it() {
    let dir = Dir::new();
    let (path, memory) = everything(&dir, Compression::Lz4);
    let snapshot = Snapshot::open(&path).unwrap();
    let chunk = snapshot.chunk(1).unwrap();
    let base = snapshot.file(chunk.file).unwrap().to_owned();
    assert_eq!(base, dir.path("base"));
    let file = File::options().read(true).write(true).open(&base).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, chunk.place + 100).unwrap();
    file.write_all_at(&[byte[0] ^ 4], chunk.place + 100)
        .unwrap();
    let error = snapshot.read_chunk(1, &mut [0; PAGE]).unwrap_err();
    let expected = format!(
        "chunk 1 (memory offset 0x1000) in {}: its stored bytes are damaged: their checksum is wrong",
        base.display()
    );
    assert_eq!(error.to_string(), expected);
    // Other chunks can be had, and nothing is unpacked.
    assert_eq!(read_all(&snapshot, &memory), 1);
    let to = dir.path("whole.mem");
    unpack(&snapshot, &to, What::Whole, &mut go_on).unwrap_err();
    assert!(!to.exists());
    assert!(dir.names().iter().all(|name| !name.contains(".part")));
    let found = verify(&snapshot, &mut go_on).unwrap();
    assert_eq!(
        (found.chunks, found.damaged, &found.named[..]),
        (3, 1, &[expected][..])
    );
}

#[test]
fn a_file_that_shrinks_while_it_is_open_is_found() {
    let dir = Dir::new();
    let memory = noise(1, 8 * PAGE);
    let path = dir.path("packed");
    let options = small(PAGE as u32, Compression::Lz4);
    packed(&dir.write("memory", &memory), &path, options);
    let snapshot = Snapshot::open(&path).unwrap();
    assert_eq!(all_of(&snapshot), memory);
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(snapshot.chunk(3).unwrap().place + 1).unwrap();
    for index in 0..8 {
        let read = snapshot.read_chunk(index, &mut [0; PAGE]);
        match index {
            0..3 => read.unwrap(),
            _ => assert!(matches!(read.unwrap_err().fault, Fault::Truncated)),
        }
    }
}

#[test]
fn other_files_and_versions_are_refused_in_their_own_words() {
    let dir = Dir::new();
    let (path, _) = everything(&dir, Compression::Lz4);
    let mut bytes = std::fs::read(&path).unwrap();
    let open = |bytes: &[u8]| Snapshot::from_file(file_of(bytes), Path::new("x"), &[]).unwrap_err();
    let said = open(&noise(1, 10_000)).to_string();
    assert!(said.contains("x is not a packed snapshot"), "{said}");
    bytes[8] = 2;
    let error = open(&bytes);
    assert!(error.to_string().contains("version 2"), "{error}");
    assert!(!error.is_damage());
    bytes[8] = 1;
    bytes[20] ^= 1;
    let error = open(&bytes);
    assert!(matches!(error, OpenError::Header { .. }), "{error}");
    assert!(error.is_damage());
}

/// A file that counts its reads.
struct Counted(File, AtomicU64);

impl pageferry_snapshot::Blob for Counted {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.1.fetch_add(1, Ordering::Relaxed);
        FileExt::read_exact_at(&self.0, buffer, offset)
    }
}

#[test]
fn a_damaged_index_is_read_once_and_not_for_each_chunk() {
    let dir = Dir::new();
    let path = dir.path("packed");
    // Two blocks of the index, of zeros, of which the first is damaged.
    let options = small(PAGE as u32, Compression::None);
    packed(&dir.write("memory", &vec![0; 2048 * PAGE]), &path, options);
    let file = File::options().read(true).write(true).open(&path).unwrap();
    file.write_all_at(&[1], 72).unwrap();
    let counted = Arc::new(Counted(file, AtomicU64::new(0)));
    let snapshot = Snapshot::from_blob(counted.clone(), &path, |_| unreachable!()).unwrap();
    let found = verify(&snapshot, &mut go_on).unwrap();
    assert_eq!(
        (found.chunks, found.damaged, found.named.len()),
        (2048, 1024, 1)
    );
    assert!(found.named[0].contains("the column 'kind' is wrong"));
    let reads = counted.1.load(Ordering::Relaxed);
    assert!(reads < 32, "{reads} reads");
}
