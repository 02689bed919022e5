//! Looks for damage in all that a snapshot needs.

use crate::Progress;
use crate::header::Geometry;
use crate::reader::Snapshot;

/// The findings of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verified {
    /// The chunks that were read.
    pub chunks: u64,
    /// The chunks and states that cannot be had, and parts of the index.
    pub damaged: u64,
    /// The first of them in words, at most [`Verified::MAX_NAMED`].
    pub named: Vec<String>,
}

impl Verified {
    /// The most damages that are named.
    pub const MAX_NAMED: usize = 16;

    fn add(&mut self, error: impl std::fmt::Display) {
        self.damaged += 1;
        if self.named.len() < Self::MAX_NAMED {
            self.named.push(error.to_string());
        }
    }
}

/// Reads and verifies every chunk, also those in bases, every part of the index, and every state.
///
/// Damage does not end it. `None` if `progress` cancelled it.
pub fn verify(snapshot: &Snapshot, progress: &mut Progress<'_>) -> Option<Verified> {
    let mut found = Verified::default();
    let geometry = snapshot.geometry();
    let mut chunk = vec![0; snapshot.chunk_bytes() as usize];
    for block in 0..geometry.blocks() {
        let (first, rows) = (block * Geometry::BLOCK, geometry.rows(block));
        if progress(geometry.offset(first), snapshot.len()).is_break() {
            return None;
        }
        if let Err(error) = snapshot.maps(block) {
            found.add(error);
        }
        found.chunks += rows;
        // A block that cannot be had is read once, not for each of its chunks.
        if let Err(fault) = snapshot.block(block) {
            found.add(snapshot.error(first, 0, fault));
            found.damaged += rows - 1;
            continue;
        }
        for index in first..first + rows {
            if progress(geometry.offset(index), snapshot.len()).is_break() {
                return None;
            }
            let to = &mut chunk[..snapshot.chunk_len(index)];
            if let Err(error) = snapshot.read_chunk(index, to) {
                found.add(error);
            }
        }
    }
    for index in 0..snapshot.states().len() {
        if let Err(error) = snapshot.read_state(index) {
            found.add(error);
        }
    }
    let _ = progress(snapshot.len(), snapshot.len());
    Some(found)
}
