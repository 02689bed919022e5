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

/// A bit for each page of a chunk.
type Map = [u8; MAX_MAP];

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
    map: Map,
    /// The pages of zeros that take the place of other pages of the base.
    zeroed: Map,
}

impl Packed {
    pub(super) fn map(&self, geometry: &Geometry) -> &[u8] {
        &self.map[..geometry.map_bytes()]
    }

    /// Whether each page of the chunk is one of zeros that takes the place of another.
    pub(super) fn zeroed(&self, pages: usize) -> impl Iterator<Item = bool> {
        (0..pages).map(|page| has(&self.zeroed, page))
    }

    fn new(row: Row, map: Map) -> Self {
        let zeroed = [0; MAX_MAP];
        Self { row, map, zeroed }
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
                Input::Packed(_) | Input::Blob(_) => None,
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
            (Input::Blob(blob), _) => {
                blob.read_exact_at(chunk, offset).map_err(PackError::Read)?;
                mark(&mut map, &(0..len));
            }
            (Input::File(_), None) => unreachable!("a file has extents"),
        }
        let mut zeroed = [0; MAX_MAP];
        if let Some(base) = self.base {
            let zeros = pages_where(chunk, |_, page| is_zero(page));
            if !self.holes_as_base {
                // Whole memory: only the pages that differ from the base belong to the diff.
                base.read_chunk(index, other)?;
                map = pages_where(chunk, |at, page| page != &other[at..][..page.len()]);
                if map == [0; MAX_MAP] {
                    return Ok(Packed::new(in_base(base.row(index)?), map));
                }
            } else if zeros != [0; MAX_MAP] {
                base.read_chunk(index, other)?;
            }
            if zeros != [0; MAX_MAP] {
                let others = pages_where(other, |_, page| !is_zero(page));
                zeroed = std::array::from_fn(|at| map[at] & zeros[at] & others[at]);
            }
        }
        let packed = |row| Ok(Packed { row, map, zeroed });
        if is_zero(chunk) {
            return packed(Row::ZERO);
        }
        let content = xxh3_128(chunk);
        if let (Some(base), Some(&at)) = (self.base, self.known.0.get(&content))
            && base.chunk_len(at) == len
        {
            base.read_chunk(at, other)?;
            if chunk == other {
                return packed(in_base(base.row(at)?));
            }
        }
        let (kind, bytes) = self.encoder.encode(chunk)?;
        stored.extend_from_slice(bytes);
        packed(Row {
            kind,
            file: 0,
            bytes: bytes.len() as u32,
            place: 0,
            stored: xxh3_64(bytes),
            content,
        })
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
fn mark(map: &mut Map, part: &Range<usize>) {
    let size = PAGE_BYTES as usize;
    for page in part.start / size..part.end.div_ceil(size) {
        map[page / 8] |= 1 << (page % 8);
    }
}

/// Whether a map has a page.
fn has(map: &Map, page: usize) -> bool {
    map[page / 8] >> (page % 8) & 1 != 0
}

/// The pages of a chunk, each with its place, for which `is` holds.
fn pages_where(chunk: &[u8], is: impl Fn(usize, &[u8]) -> bool) -> Map {
    let mut map = [0; MAX_MAP];
    let size = PAGE_BYTES as usize;
    for (page, bytes) in chunk.chunks(size).enumerate() {
        if is(page * size, bytes) {
            mark(&mut map, &(page * size..(page + 1) * size));
        }
    }
    map
}
