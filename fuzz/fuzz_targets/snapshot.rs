//! Packed snapshots of any bytes: no panic, no large allocation, and a chunk that is read has the
//! checksum of its row.

use pageferry_snapshot::{
    Compression, Input, Labels, Options, Snapshot, StateFile, open_input, pack, verify,
};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::ops::{ControlFlow, Range};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::OnceLock;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

fn go_on(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Snapshots of four chunks, of all kinds, with a state.
fn templates() -> &'static [Vec<u8>; 2] {
    static TEMPLATES: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
    TEMPLATES.get_or_init(|| {
        let dir = std::env::temp_dir().join(format!("pf-fuzz-{}", std::process::id()));
        std::fs::create_dir(&dir).expect("a directory");
        let noise = (0..512_u64).flat_map(|n| xxh3_64(&n.to_le_bytes()).to_le_bytes());
        let text = b"a guest's page; ".repeat(256);
        let memory: Vec<u8> = noise
            .chain(text.clone())
            .chain([0; 4096])
            .chain(text)
            .collect();
        std::fs::write(dir.join("memory"), memory).expect("memory");
        std::fs::write(dir.join("state"), b"state").expect("a state");
        let made = [Compression::Lz4, Compression::Zstd(1)].map(|compression| {
            let file = open_input(&dir.join("memory")).expect("memory");
            let state = open_input(&dir.join("state")).expect("a state");
            let options = Options {
                chunk_bytes: Some(4096),
                compression,
                labels: Labels {
                    vmm: "vmm".into(),
                    ..Labels::default()
                },
                states: vec![StateFile {
                    name: "state".into(),
                    file: state,
                }],
                ..Options::default()
            };
            let path = dir.join(format!("{compression:?}"));
            pack(Input::File(&file), &path, options, &mut go_on).expect("packed");
            std::fs::read(path).expect("a snapshot")
        });
        std::fs::remove_dir_all(dir).expect("removed");
        made
    })
}

pub(crate) fn run(data: &[u8]) {
    read(data);
    let Some((&how, edits)) = data.split_first() else {
        return;
    };
    let mut bytes = templates()[usize::from(how & 1)].clone();
    let sections = sections(&bytes);
    for edit in edits.chunks_exact(3) {
        let at = usize::from(u16::from_le_bytes([edit[0], edit[1]])) % bytes.len();
        bytes[at] = edit[2];
    }
    // Checksums that fit, so that every check behind them is reached.
    if how & 2 != 0 {
        seal_index(&mut bytes, &sections);
    }
    if how & 4 != 0 {
        let sum = xxh3_64(&bytes[sections.details.clone()]);
        bytes[48..56].copy_from_slice(&sum.to_le_bytes());
    }
    if how & 8 != 0 {
        let id = xxh3_128(&bytes[..56]);
        bytes[56..72].copy_from_slice(&id.to_le_bytes());
    }
    // Without an edit it is still a snapshot, also with its checksums made anew.
    assert!(read(&bytes) || edits.len() >= 3);
}

/// The places of the index and of the details.
struct Sections {
    index: Range<usize>,
    details: Range<usize>,
}

fn word(bytes: &[u8], at: usize) -> usize {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes")) as usize
}

fn sections(bytes: &[u8]) -> Sections {
    let index = 72 + word(bytes, 24) + word(bytes, 32);
    let details = bytes.len() - (word(bytes, 40) & 0xffff_ffff);
    Sections {
        index: index..details,
        details: details..bytes.len(),
    }
}

/// Seals the columns of the four rows.
fn seal_index(bytes: &mut [u8], sections: &Sections) {
    let mut at = sections.index.start;
    for (number, width) in [1, 2, 4, 8, 8, 16, 1].into_iter().enumerate() {
        let sum = xxh3_64(&bytes[at..at + 4 * width]);
        let to = sections.details.start + 8 * number;
        bytes[to..to + 8].copy_from_slice(&sum.to_le_bytes());
        at += 4 * width;
    }
}

/// Reads all that can be had. Returns whether the bytes are a snapshot.
fn read(bytes: &[u8]) -> bool {
    static FILE: OnceLock<File> = OnceLock::new();
    let file = FILE.get_or_init(|| {
        memfd_create("fuzz", MemfdFlags::CLOEXEC)
            .expect("memfd")
            .into()
    });
    file.set_len(bytes.len() as u64).expect("a length");
    file.write_all_at(bytes, 0).expect("written");
    let file = file.try_clone().expect("a descriptor");
    let snapshot = match Snapshot::from_file(file, Path::new("/nowhere/snapshot"), &[]) {
        Ok(snapshot) => snapshot,
        Err(error) => return error.to_string().is_empty(),
    };
    let contents = sections(bytes).index.start + snapshot.chunks() as usize * (1 + 2 + 4 + 8 + 8);
    for index in 0..snapshot.chunks().min(64) {
        let mut chunk = vec![0xee; snapshot.chunk_len(index)];
        match snapshot.read_chunk(index, &mut chunk) {
            Ok(()) => {
                let at = contents + 16 * index as usize;
                let zero = snapshot.chunk(index).expect("a row").is_zero();
                let expected = match zero {
                    true => chunk.iter().all(|byte| *byte == 0),
                    false => bytes[at..at + 16] == xxh3_128(&chunk).to_le_bytes(),
                };
                assert!(expected, "chunk {index}");
            }
            Err(error) => {
                assert!(
                    chunk.iter().all(|byte| *byte == 0),
                    "damaged bytes came out"
                );
                drop(error.to_string());
            }
        }
    }
    if snapshot.chunks() <= 64 {
        let verified = verify(&snapshot, &mut go_on).expect("not cancelled");
        if verified.damaged == 0 {
            snapshot.figures().expect("a good index");
        }
    }
    true
}
