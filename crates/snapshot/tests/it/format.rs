//! `docs/snapshot-format.md`, byte by byte: a snapshot that is put together from that page alone.

use crate::support::{Dir, PAGE, all_of, noise, packed, small};
use pageferry_snapshot::{
    Compression, Labels, OpenError, Options, Snapshot, StateFile, open_input,
};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// The fields of the header.
#[derive(Clone)]
struct Header {
    version: u16,
    chunk_shift: u8,
    codecs: u8,
    bases: u16,
    states: u16,
    memory_bytes: u64,
    data_bytes: u64,
    state_bytes: u64,
    details_bytes: u32,
    reserved: u32,
}

impl Header {
    fn bytes(&self, details: &[u8]) -> Vec<u8> {
        let mut out = b"PGFSNAP\0".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend([self.chunk_shift, self.codecs]);
        out.extend(self.bases.to_le_bytes());
        out.extend(self.states.to_le_bytes());
        out.extend(self.memory_bytes.to_le_bytes());
        out.extend(self.data_bytes.to_le_bytes());
        out.extend(self.state_bytes.to_le_bytes());
        out.extend(self.details_bytes.to_le_bytes());
        out.extend(self.reserved.to_le_bytes());
        out.extend(xxh3_64(details).to_le_bytes());
        out.extend(xxh3_128(&out).to_le_bytes());
        assert_eq!(out.len(), 72);
        out
    }
}

/// A snapshot of three chunks of 4 KiB, noise, zeros and the same noise, with a state of 5 bytes.
struct Built {
    header: Header,
    noise: Vec<u8>,
    columns: [Vec<u8>; 7],
    details_behind_sums: Vec<u8>,
}

impl Built {
    fn new() -> Self {
        let noise = noise(1, PAGE);
        let each = |first: Vec<u8>| [first.clone(), vec![0; first.len()], first].concat();
        let columns = [
            vec![1, 0, 1],
            vec![0; 6],
            each(4096_u32.to_le_bytes().to_vec()),
            each(72_u64.to_le_bytes().to_vec()),
            each(xxh3_64(&noise).to_le_bytes().to_vec()),
            each(xxh3_128(&noise).to_le_bytes().to_vec()),
            vec![1; 3],
        ];
        let mut details = Vec::new();
        for label in ["vmm", "1", ""] {
            details.extend((label.len() as u16).to_le_bytes());
            details.extend(label.as_bytes());
        }
        details.extend([2]);
        details.extend(b"st");
        details.extend(5_u32.to_le_bytes());
        details.extend(xxh3_64(b"state").to_le_bytes());
        let header = Header {
            version: 1,
            chunk_shift: 12,
            codecs: 0,
            bases: 0,
            states: 1,
            memory_bytes: 3 * 4096,
            data_bytes: 4096,
            state_bytes: 5,
            details_bytes: (7 * 8 + details.len()) as u32,
            reserved: 0,
        };
        Self {
            header,
            noise,
            columns,
            details_behind_sums: details,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let sums = self.columns.iter();
        let sums = sums.flat_map(|column| xxh3_64(column).to_le_bytes());
        let mut details: Vec<u8> = sums.collect();
        details.extend(&self.details_behind_sums);
        let mut out = self.header.bytes(&details);
        out.extend(&self.noise);
        out.extend(b"state");
        out.extend(self.columns.concat());
        out.extend(details);
        out
    }

    fn opened(&self, dir: &Dir) -> Result<Snapshot, OpenError> {
        Snapshot::open(&dir.write("built", &self.bytes()))
    }
}

fn packed_the_same(dir: &Dir) -> PathBuf {
    let noise = noise(1, PAGE);
    let memory = dir.write("memory", &[&noise[..], &[0; PAGE], &noise].concat());
    let state = dir.write("state.bin", b"state");
    let options = Options {
        labels: Labels {
            vmm: "vmm".into(),
            version: "1".into(),
            cpu: String::new(),
        },
        states: vec![StateFile {
            name: "st".into(),
            file: open_input(&state).unwrap(),
        }],
        ..small(4096, Compression::None)
    };
    packed(&memory, &dir.path("packed"), options);
    dir.path("packed")
}

#[test]
fn the_bytes_are_those_of_the_document() {
    let dir = Dir::new();
    let built = Built::new();
    assert_eq!(std::fs::read(packed_the_same(&dir)).unwrap(), built.bytes());
    let snapshot = built.opened(&dir).unwrap();
    assert_eq!(all_of(&snapshot)[2 * PAGE..], built.noise);
    assert_eq!(snapshot.read_state(0).unwrap(), b"state");
}

#[test]
fn each_field_of_the_header_has_bounds() {
    let dir = Dir::new();
    let refused = |change: &dyn Fn(&mut Header), part: &str| {
        let mut built = Built::new();
        change(&mut built.header);
        let said = built.opened(&dir).unwrap_err().to_string();
        assert!(said.contains(part), "{part}: {said}");
    };
    refused(&|header| header.version = 0, "version 0");
    refused(&|header| header.chunk_shift = 11, "size of chunks");
    refused(&|header| header.chunk_shift = 21, "size of chunks");
    refused(&|header| header.codecs = 4, "set of codecs");
    refused(&|header| header.reserved = 1, "reserved");
    refused(&|header| header.bases = 257, "number of bases");
    refused(&|header| header.states = 65, "number of states");
    refused(&|header| header.memory_bytes = 0, "length of memory");
    refused(&|header| header.memory_bytes = 4097, "length of memory");
    refused(&|header| header.memory_bytes = 1 << 63, "length of memory");
    refused(&|header| header.memory_bytes = 2 << 40, "length of memory");
    refused(&|header| header.data_bytes = 3 * 4096 + 1, "length of data");
    refused(&|header| header.data_bytes = u64::MAX, "length of data");
    refused(
        &|header| header.state_bytes = (16 << 20) + 1,
        "length of states",
    );
    refused(&|header| header.details_bytes = 55, "length of details");
    refused(
        &|header| header.details_bytes = u32::MAX,
        "length of details",
    );
    // Within their bounds, but not what is in the file.
    refused(&|header| header.memory_bytes = 1 << 40, "length of details");
    refused(&|header| header.memory_bytes = 4 << 20, "truncated");
    refused(&|header| header.data_bytes = 4095, "truncated");
    refused(&|header| header.bases = 1, "details");
    refused(&|header| header.states = 0, "length of states");
    refused(&|header| header.states = 2, "details");
    refused(
        &|header| {
            header.state_bytes = 4;
            header.data_bytes = 4097;
        },
        "their length does not fit",
    );
}

#[test]
fn rows_that_no_packer_writes_are_refused() {
    let dir = Dir::new();
    let refused = |change: &dyn Fn(&mut [Vec<u8>; 7]), part: &str| {
        let mut built = Built::new();
        change(&mut built.columns);
        let snapshot = built.opened(&dir).unwrap();
        let mut chunk = [0xee; PAGE];
        let said = snapshot.read_chunk(0, &mut chunk).unwrap_err().to_string();
        assert!(
            said.contains(part) && said.contains("chunk 0"),
            "{part}: {said}"
        );
        assert_eq!(chunk, [0; PAGE]);
    };
    refused(&|columns| columns[0][0] = 4, "its kind is unknown");
    refused(&|columns| columns[0][0] = 0, "a zero chunk has values");
    refused(&|columns| columns[0][0] = 2, "its stored length");
    refused(&|columns| columns[0][0] = 3, "its stored length");
    refused(
        &|columns| columns[1][0] = 1,
        "a file that the snapshot has not",
    );
    refused(&|columns| columns[2][0] = 1, "its stored length");
    refused(&|columns| columns[3][0] = 71, "not among the chunks");
    refused(&|columns| columns[3][0] = 73, "not among the chunks");
    refused(
        &|columns| columns[3][..8].fill(0xff),
        "not among the chunks",
    );
    refused(&|columns| columns[4][0] ^= 1, "stored bytes are damaged");
    refused(&|columns| columns[5][0] ^= 1, "decompressed bytes");
    refused(
        &|columns| {
            columns[0][0] = 2;
            columns[2][..4].copy_from_slice(&100_u32.to_le_bytes());
            columns[4][..8].copy_from_slice(&xxh3_64(&noise(1, PAGE)[..100]).to_le_bytes());
        },
        "do not decompress",
    );
}

#[test]
fn names_that_leave_their_directory_are_refused() {
    let dir = Dir::new();
    for name in ["..", ".", "a/b", "/etc/passwd", "", "n\0"] {
        let mut built = Built::new();
        built.header.bases = 1;
        let mut base = vec![7; 16];
        base.push(name.len() as u8);
        base.extend(name.as_bytes());
        built.details_behind_sums.splice(0..0, base.clone());
        built.header.details_bytes += base.len() as u32;
        let said = built.opened(&dir).unwrap_err().to_string();
        assert!(said.contains("no file name"), "{name:?}: {said}");
    }
    for name in ["..", "a/b", ".x", "\u{fc}"] {
        let mut built = Built::new();
        let details = &mut built.details_behind_sums;
        let at = details.len() - 15;
        details.splice(
            at..at + 3,
            [&[name.len() as u8][..], name.as_bytes()].concat(),
        );
        built.header.details_bytes = (56 + details.len()) as u32;
        let said = built.opened(&dir).unwrap_err().to_string();
        assert!(said.contains("name of a state"), "{name:?}: {said}");
    }
}

#[test]
fn the_document_has_the_sizes_of_the_code() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/snapshot-format.md");
    let Ok(document) = std::fs::read_to_string(Path::new(path)) else {
        // Outside of the repository there is the crate alone.
        return;
    };
    for row in [
        "| 56 | 16 | id |",
        "| 0 | 8 | magic `PGFSNAP\\0` |",
        "| 48 | 8 | details_sum |",
    ] {
        assert!(document.contains(row), "{row}");
    }
}
