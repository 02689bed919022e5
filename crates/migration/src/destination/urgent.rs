//! The reader of the urgent connection. Each read takes all replies that have arrived.

use crate::error::MigrationError;
use crate::link::UrgentLink;
use crate::wire::{PAGE_BYTES, Side, URGENT_BYTES, UrgentKind, UrgentMessage};

/// The size of the buffer, in replies with their pages.
const REPLIES: usize = 8;

/// The bytes that were received but not decoded.
pub(super) struct UrgentReader {
    buffer: Box<[u8]>,
    filled: usize,
    /// A reply could not be decoded or placed. The thread that found it ends the migration, and no
    /// thread reads on.
    broken: bool,
    memory_pages: u64,
}

impl UrgentReader {
    pub(super) fn new(memory_pages: u64) -> Self {
        Self {
            buffer: vec![0; REPLIES * (URGENT_BYTES + PAGE_BYTES)].into(),
            filled: 0,
            broken: false,
            memory_pages,
        }
    }

    /// Receives without waiting, and passes each complete reply to `place`. Returns their number.
    pub(super) fn pump(
        &mut self,
        link: &UrgentLink,
        mut place: impl FnMut(&UrgentMessage, Option<&[u8; PAGE_BYTES]>) -> Result<(), MigrationError>,
    ) -> Result<usize, MigrationError> {
        if self.broken {
            return Ok(0);
        }
        let Some(got) = link.receive_pending(&mut self.buffer[self.filled..])? else {
            return Ok(0);
        };
        self.filled += got;
        self.broken = true;
        let mut at = 0;
        let mut placed = 0;
        while let Some(head) = self.buffer[at..self.filled].first_chunk::<URGENT_BYTES>() {
            let message = UrgentMessage::decode(head, Side::Source, self.memory_pages)?;
            let body = &self.buffer[at + URGENT_BYTES..self.filled];
            match message.kind {
                UrgentKind::Page => match body.first_chunk::<PAGE_BYTES>() {
                    Some(bytes) => {
                        place(&message, Some(bytes))?;
                        at += URGENT_BYTES + PAGE_BYTES;
                        placed += 1;
                    }
                    None => break,
                },
                UrgentKind::Zero => {
                    place(&message, None)?;
                    at += URGENT_BYTES;
                    placed += 1;
                }
                // No more replies follow. The stream decides how the migration ends.
                UrgentKind::End => at += URGENT_BYTES,
                UrgentKind::Request => {
                    return Err(super::core::not_a_reply(UrgentKind::Request as u8));
                }
            }
        }
        self.buffer.copy_within(at..self.filled, 0);
        self.filled -= at;
        self.broken = false;
        Ok(placed)
    }
}
