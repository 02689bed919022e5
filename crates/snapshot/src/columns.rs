//! The index: what is known of each chunk, in columns.
//!
//! **Guarantee.** A row that a reader gets has the checksums that the details say, and its values
//! are possible ones: its stored bytes lie within the chunks of a file that the snapshot names.
//!
//! **Mechanism.** A column has one value of fixed width for each chunk, so the place of each value
//! is known. A block is the part of all columns for 1024 chunks. Each part of a column has a
//! checksum in the details. A reader loads the blocks that it needs.

use crate::blob::Blob;
use crate::codec::Kind;
use crate::error::Fault;
use crate::header::{Geometry, HEADER_BYTES};
use xxhash_rust::xxh3::xxh3_64;

/// The columns, in the order of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Column {
    Kind,
    File,
    Bytes,
    Place,
    Stored,
    Content,
    Map,
}

impl Column {
    pub(crate) const ALL: [Self; 7] = [
        Self::Kind,
        Self::File,
        Self::Bytes,
        Self::Place,
        Self::Stored,
        Self::Content,
        Self::Map,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Kind => "kind",
            Self::File => "file",
            Self::Bytes => "bytes",
            Self::Place => "place",
            Self::Stored => "stored sum",
            Self::Content => "content sum",
            Self::Map => "map of pages",
        }
    }

    /// Bytes of a value.
    fn width(self, geometry: &Geometry) -> usize {
        match self {
            Self::Kind => 1,
            Self::File => 2,
            Self::Bytes => 4,
            Self::Place | Self::Stored => 8,
            Self::Content => 16,
            Self::Map => geometry.map_bytes(),
        }
    }

    /// Bytes of the columns before this one, for each chunk.
    fn before(self, geometry: &Geometry) -> usize {
        let before = Self::ALL.into_iter().take(self as usize);
        before.map(|column| column.width(geometry)).sum()
    }
}

/// The columns that a [`Block`] has: all but the map of pages.
const LOADED: usize = Column::Map as usize;

/// Bytes of the index.
pub(crate) fn bytes(geometry: &Geometry) -> u64 {
    let row = Column::Map.before(geometry) + Column::Map.width(geometry);
    geometry.chunks() * row as u64
}

/// Bytes of the checksums of the index.
pub(crate) fn sums_bytes(geometry: &Geometry) -> u64 {
    geometry.blocks() * (Column::ALL.len() * 8) as u64
}

/// A chunk's entry in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) kind: Kind,
    /// 0 is the file with the index; others count its bases from 1.
    pub(crate) file: u16,
    pub(crate) bytes: u32,
    pub(crate) place: u64,
    /// XXH3-64 of the stored bytes.
    pub(crate) stored: u64,
    /// XXH3-128 of the bytes in memory.
    pub(crate) content: u128,
}

impl Row {
    pub(crate) const ZERO: Self = Self {
        kind: Kind::Zero,
        file: 0,
        bytes: 0,
        place: 0,
        stored: 0,
        content: 0,
    };

    /// Checks the row of a chunk of `len` bytes. `data_end` is the end of the chunks in a file, if
    /// the snapshot has it.
    ///
    /// # Errors
    /// The fault of the row.
    pub(crate) fn check(
        &self,
        len: usize,
        data_end: impl Fn(u16) -> Option<u64>,
    ) -> Result<(), &'static str> {
        let bytes = self.bytes as usize;
        let fits = match self.kind {
            Kind::Zero => {
                return (*self == Self::ZERO)
                    .then_some(())
                    .ok_or("a zero chunk has values");
            }
            Kind::Raw => bytes == len,
            Kind::Lz4 | Kind::Zstd => (1..len).contains(&bytes),
        };
        if !fits {
            return Err("its stored length does not fit its kind");
        }
        let data_end = data_end(self.file).ok_or("it names a file that the snapshot has not")?;
        let end = self.place.checked_add(self.bytes.into());
        if self.place < HEADER_BYTES as u64 || end.is_none_or(|end| end > data_end) {
            return Err("its stored bytes are not among the chunks of their file");
        }
        Ok(())
    }
}

/// A verified part of the index in memory.
pub(crate) struct Block {
    columns: [Box<[u8]>; LOADED],
}

/// The place of an index, and its checksums.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) file: &'a dyn Blob,
    pub(crate) start: u64,
    pub(crate) sums: &'a [u64],
    pub(crate) geometry: Geometry,
}

impl Place<'_> {
    /// Reads a part of a column, and verifies it.
    fn part(&self, column: Column, block: u64) -> Result<Box<[u8]>, Fault> {
        let geometry = &self.geometry;
        let width = column.width(geometry) as u64;
        let at = geometry.chunks() * column.before(geometry) as u64;
        let at = self.start + at + block * Geometry::BLOCK * width;
        let mut part = vec![0; (geometry.rows(block) * width) as usize];
        self.file
            .read_exact_at(&mut part, at)
            .map_err(Fault::of_read)?;
        let sum = self.sums[block as usize * Column::ALL.len() + column as usize];
        if xxh3_64(&part) != sum {
            self.file.forget(at, part.len() as u64);
            return Err(Fault::Index(column.name()));
        }
        Ok(part.into())
    }

    /// Loads a block.
    pub(crate) fn load(&self, block: u64) -> Result<Block, Fault> {
        let mut columns = [const { Vec::new() }; LOADED].map(Box::from);
        for (column, to) in Column::ALL.into_iter().zip(&mut columns) {
            *to = self.part(column, block)?;
        }
        Ok(Block { columns })
    }

    /// Loads the maps of pages of a block, one behind the other.
    pub(crate) fn maps(&self, block: u64) -> Result<Box<[u8]>, Fault> {
        self.part(Column::Map, block)
    }
}

impl Block {
    /// # Errors
    /// When the kind is unknown. The other values are not checked.
    pub(crate) fn row(&self, at: usize) -> Result<Row, Fault> {
        row(at, |column| &self.columns[column as usize])
    }
}

fn row<'a>(at: usize, column: impl Fn(Column) -> &'a [u8]) -> Result<Row, Fault> {
    fn value<const N: usize>(column: &[u8], at: usize) -> [u8; N] {
        let mut value = [0; N];
        value.copy_from_slice(&column[at * N..][..N]);
        value
    }
    let [kind] = value(column(Column::Kind), at);
    Ok(Row {
        kind: Kind::from_byte(kind).ok_or(Fault::Row("its kind is unknown"))?,
        file: u16::from_le_bytes(value(column(Column::File), at)),
        bytes: u32::from_le_bytes(value(column(Column::Bytes), at)),
        place: u64::from_le_bytes(value(column(Column::Place), at)),
        stored: u64::from_le_bytes(value(column(Column::Stored), at)),
        content: u128::from_le_bytes(value(column(Column::Content), at)),
    })
}

/// The index that a packer makes.
pub(crate) struct Index {
    columns: [Vec<u8>; Column::ALL.len()],
}

impl Index {
    pub(crate) fn new() -> Self {
        Self {
            columns: [const { Vec::new() }; Column::ALL.len()],
        }
    }

    /// The number of rows.
    pub(crate) fn len(&self) -> usize {
        self.columns[Column::Kind as usize].len()
    }

    pub(crate) fn push(&mut self, row: &Row, map: &[u8]) {
        let values: [&[u8]; Column::ALL.len()] = [
            &[row.kind as u8],
            &row.file.to_le_bytes(),
            &row.bytes.to_le_bytes(),
            &row.place.to_le_bytes(),
            &row.stored.to_le_bytes(),
            &row.content.to_le_bytes(),
            map,
        ];
        for (column, value) in self.columns.iter_mut().zip(values) {
            column.extend_from_slice(value);
        }
    }

    pub(crate) fn row(&self, at: usize) -> Row {
        row(at, |column| &self.columns[column as usize]).expect("only rows are pushed")
    }

    /// The columns, in the order of the file.
    pub(crate) fn columns(&self) -> impl Iterator<Item = &[u8]> {
        self.columns.iter().map(Vec::as_slice)
    }

    /// The checksums of all blocks.
    pub(crate) fn sums(&self, geometry: &Geometry) -> Vec<u64> {
        let mut sums = vec![0; geometry.blocks() as usize * Column::ALL.len()];
        for (column, values) in Column::ALL.into_iter().zip(&self.columns) {
            let part = column.width(geometry) * Geometry::BLOCK as usize;
            for (block, part) in values.chunks(part).enumerate() {
                sums[block * Column::ALL.len() + column as usize] = xxh3_64(part);
            }
        }
        sums
    }
}
