//! A worker of a packer: from memory to chunks that are ready to be written.

use super::{Input, Options};
use crate::codec::Encoder;
use crate::columns::Row;
use crate::error::PackError;
use crate::header::{Geometry, PAGE_BYTES};
use crate::input::Extents;
use crate::reader::Snapshot;
use crate::unpack::is_zero;
use std::collections::HashMap;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// The longest map of a chunk's pages.
const MAX_MAP: usize = (1 << 20) / PAGE_BYTES as usize / 8;

/// The chunks of a base by their contents.
#[derive(Default)]
pub(super) struct Known(HashMap<u128, u64>);

impl Known {
    pub(super) fn of(base: &Snapshot) -> Result<Self, PackError> {
        let mut known = HashMap::new();
        for index in 0..base.chunks() {
            let row = base.row(index)?;
            if row != Row::ZERO {
                known.entry(row.content).or_insert(index);
            }
        }
        Ok(Self(known))
    }
}

/// A chunk of a batch.
pub(super) struct Packed {
    /// A stored chunk that is not in a base has no place yet.
    pub(super) row: Row,
    map: [u8; MAX_MAP],
}

impl Packed {
    pub(super) fn map(&self, geometry: &Geometry) -> &[u8] {
        &self.map[..geometry.map_bytes()]
    }

    fn new(row: Row, map: [u8; MAX_MAP]) -> Self {
        Self { row, map }
    }
}

/// Chunks, one after the other.
pub(super) struct Batch {
    pub(super) chunks: Vec<Packed>,
    /// The bytes of those that are stored, back to back.
    pub(super) stored: Vec<u8>,
    pub(super) geometry: Geometry,
}

pub(super) struct Worker<'a> {
    input: Input<'a>,
    extents: Option<Extents<'a>>,
    geometry: Geometry,
    base: Option<&'a Snapshot>,
    holes_as_base: bool,
    known: &'a Known,
    encoder: Encoder,
    chunk: Vec<u8>,
    /// A chunk of the base.
    other: Vec<u8>,
}

impl<'a> Worker<'a> {
    pub(super) fn new(
        input: Input<'a>,
        geometry: &Geometry,
        options: &Options<'a>,
        known: &'a Known,
    ) -> Result<Self, PackError> {
        let room = geometry.chunk_bytes as usize;
        Ok(Self {
            input,
            extents: match input {
                Input::File(file) => Some(Extents::new(file)),
                Input::Packed(_) => None,
            },
            geometry: *geometry,
            base: options.base,
            holes_as_base: options.holes_as_base && matches!(input, Input::File(_)),
            known,
            encoder: Encoder::new(options.compression, geometry.chunk_bytes)?,
            chunk: vec![0; room],
            other: vec![0; room],
        })
    }

    /// Packs chunks, which come behind all before.
    pub(super) fn pack(&mut self, chunks: Range<u64>) -> Result<Batch, PackError> {
        let mut batch = Batch {
            chunks: Vec::new(),
            stored: Vec::new(),
            geometry: self.geometry,
        };
        for index in chunks {
            let packed = self.pack_chunk(index, &mut batch.stored)?;
            batch.chunks.push(packed);
        }
        Ok(batch)
    }

    fn pack_chunk(&mut self, index: u64, stored: &mut Vec<u8>) -> Result<Packed, PackError> {
        let len = self.geometry.chunk_len(index);
        let offset = self.geometry.offset(index);
        let mut map = [0; MAX_MAP];
        let overlaid = self.base.filter(|_| self.holes_as_base);
        let chunk = &mut self.chunk[..len];
        let other = &mut self.other[..len];
        match (self.input, &mut self.extents) {
            (Input::File(file), Some(extents)) => {
                let parts = extents.of(offset..offset + len as u64)?;
                match (overlaid, &parts[..]) {
                    (Some(base), []) => return Ok(Packed::new(in_base(base.row(index)?), map)),
                    (None, []) if self.base.is_none() => return Ok(Packed::new(Row::ZERO, map)),
                    (_, [part]) if part.end - part.start == len as u64 => {}
                    (Some(base), _) => base.read_chunk(index, chunk)?,
                    (None, _) => chunk.fill(0),
                }
                for part in parts {
                    let part = (part.start - offset) as usize..(part.end - offset) as usize;
                    mark(&mut map, &part);
                    let at = offset + part.start as u64;
                    file.read_exact_at(&mut chunk[part], at)
                        .map_err(PackError::Read)?;
                }
            }
            (Input::Packed(snapshot), _) => {
                snapshot.read_at(offset, chunk)?;
                mark(&mut map, &(0..len));
            }
            (Input::File(_), None) => unreachable!("a file has extents"),
        }
        if let Some(base) = self.base.filter(|_| !self.holes_as_base) {
            // Whole memory: only the pages that differ from the base belong to the diff.
            base.read_chunk(index, other)?;
            map = differences(chunk, other);
            if map == [0; MAX_MAP] {
                return Ok(Packed::new(in_base(base.row(index)?), map));
            }
        }
        if is_zero(chunk) {
            return Ok(Packed::new(Row::ZERO, map));
        }
        let content = xxh3_128(chunk);
        if let (Some(base), Some(&at)) = (self.base, self.known.0.get(&content))
            && base.chunk_len(at) == len
        {
            base.read_chunk(at, other)?;
            if chunk == other {
                return Ok(Packed::new(in_base(base.row(at)?), map));
            }
        }
        let (kind, bytes) = self.encoder.encode(chunk)?;
        stored.extend_from_slice(bytes);
        let row = Row {
            kind,
            file: 0,
            bytes: bytes.len() as u32,
            place: 0,
            stored: xxh3_64(bytes),
            content,
        };
        Ok(Packed::new(row, map))
    }
}

/// The row of a base, as a diff on that base has it.
fn in_base(row: Row) -> Row {
    match row {
        Row::ZERO => row,
        _ => Row {
            file: row.file + 1,
            ..row
        },
    }
}

/// Marks the pages of a part of a chunk.
fn mark(map: &mut [u8; MAX_MAP], part: &Range<usize>) {
    let size = PAGE_BYTES as usize;
    for page in part.start / size..part.end.div_ceil(size) {
        map[page / 8] |= 1 << (page % 8);
    }
}

/// The pages in which two chunks differ.
fn differences(chunk: &[u8], other: &[u8]) -> [u8; MAX_MAP] {
    let mut map = [0; MAX_MAP];
    let size = PAGE_BYTES as usize;
    for (page, (one, two)) in chunk.chunks(size).zip(other.chunks(size)).enumerate() {
        if one != two {
            mark(&mut map, &(page * size..(page + 1) * size));
        }
    }
    map
}
