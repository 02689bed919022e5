//! Writes a snapshot from its beginning to its end, and finds repeated chunks.

use super::worker::Batch;
use crate::codec::Kind;
use crate::columns::{Index, Row};
use crate::error::PackError;
use crate::figures::Figures;
use crate::header::PAGE_BYTES;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

pub(super) struct Writer<'a> {
    file: &'a File,
    path: &'a Path,
    /// Bytes that are written.
    at: u64,
    /// Bytes of the current batch, to be written at `at`.
    pending: Vec<u8>,
    pub(super) index: Index,
    pub(super) figures: Figures,
    /// The codecs of all chunks, also of those in bases.
    pub(super) codecs: u8,
    /// The row of the first chunk with each content in this file.
    seen: HashMap<u128, u32>,
    /// The longest run of pages of zeros that may replace pages of the base, and the present one.
    most_zeroed: u64,
    zeroed: u64,
}

impl<'a> Writer<'a> {
    pub(super) fn new(file: &'a File, path: &'a Path, most_zeroed: u64) -> Self {
        Self {
            file,
            path,
            at: 0,
            pending: Vec::new(),
            index: Index::new(),
            figures: Figures::default(),
            codecs: 0,
            seen: HashMap::new(),
            most_zeroed,
            zeroed: 0,
        }
    }

    fn failed(&self, why: io::Error) -> PackError {
        PackError::Write {
            file: self.path.to_owned(),
            why,
        }
    }

    /// Leaves room for bytes that are written last.
    pub(super) fn skip(&mut self, bytes: usize) {
        self.at += bytes as u64;
    }

    /// Writes `bytes` behind all before.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), PackError> {
        self.file
            .write_all_at(bytes, self.at)
            .map_err(|why| self.failed(why))?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Adds the chunks of a batch.
    pub(super) fn add(&mut self, batch: &Batch) -> Result<(), PackError> {
        let mut stored = &batch.stored[..];
        for chunk in &batch.chunks {
            let mut row = chunk.row;
            if row.kind != Kind::Zero && row.file == 0 {
                let bytes;
                (bytes, stored) = stored.split_at(row.bytes as usize);
                row.place = self.place(&row, bytes)?;
            }
            let index = self.index.len() as u64;
            let pages = batch.geometry.chunk_len(index) / PAGE_BYTES as usize;
            for is_zeroed in chunk.zeroed(pages) {
                self.zeroed = if is_zeroed { self.zeroed + 1 } else { 0 };
                self.figures.zeroed_pages += u64::from(is_zeroed);
                if self.zeroed > self.most_zeroed {
                    return Err(PackError::LongZeros(batch.geometry.offset(index)));
                }
            }
            self.codecs |= row.kind.codec();
            self.figures.count(&row);
            self.index.push(&row, chunk.map(&batch.geometry));
        }
        let pending = std::mem::take(&mut self.pending);
        self.write(&pending)?;
        self.pending = pending;
        self.pending.clear();
        Ok(())
    }

    /// The place of a chunk's stored bytes: that of an equal chunk, or the end.
    fn place(&mut self, row: &Row, bytes: &[u8]) -> Result<u64, PackError> {
        let next = self.index.len() as u32;
        match self.seen.get(&row.content) {
            Some(&at) => {
                let place = self.index.row(at as usize).place;
                let same = Row { place, ..*row };
                // Equal stored bytes decompress to equal chunks. Equal checksums prove nothing.
                if self.index.row(at as usize) == same && self.is_at(place, bytes)? {
                    return Ok(place);
                }
            }
            None => drop(self.seen.insert(row.content, next)),
        }
        let place = self.at + self.pending.len() as u64;
        self.pending.extend_from_slice(bytes);
        Ok(place)
    }

    /// Whether the file, with the pending bytes, has these bytes there.
    fn is_at(&self, place: u64, bytes: &[u8]) -> Result<bool, PackError> {
        if let Some(at) = place.checked_sub(self.at) {
            return Ok(self.pending[at as usize..].starts_with(bytes));
        }
        let mut there = vec![0; bytes.len()];
        self.file
            .read_exact_at(&mut there, place)
            .map_err(|why| self.failed(why))?;
        Ok(there == bytes)
    }

    /// Writes the columns of the index.
    pub(super) fn write_index(&mut self) -> Result<(), PackError> {
        let index = std::mem::replace(&mut self.index, Index::new());
        index.columns().try_for_each(|column| self.write(column))
    }

    /// Writes the header, which makes the file a snapshot.
    pub(super) fn finish(mut self, header: &[u8]) -> Result<Figures, PackError> {
        self.file
            .write_all_at(header, 0)
            .map_err(|why| self.failed(why))?;
        self.figures.file_bytes = self.at;
        Ok(self.figures)
    }
}
