//! Messages in memory that the caller chooses, such as memory that outlives the process.
//!
//! **Guarantee.** One `read(2)` puts the messages where the caller wants them, and nowhere else. A
//! reader that is killed inside the call leaves either whole messages there or unread ones in the
//! kernel, since a fatal signal acts only when the call returns.
//!
//! **Neighbours.** [`EventReader`](super::EventReader) is for readers whose messages may be lost
//! with them.

use super::abi;
use super::event::{Event, Message};
use super::fd::Userfaultfd;
use super::read::{self, ReadError};

/// The size of a message in bytes (`struct uffd_msg`).
pub const MESSAGE_BYTES: usize = abi::MSG_BYTES;

impl Userfaultfd {
    /// Reads as many messages as wait and fit, by one `read(2)`. Returns their number, 0 if none
    /// waits. It never blocks.
    ///
    /// The kernel regards the messages as read, and removes ranges or lets calls go on because of
    /// them. So the caller acts on all of them, in the order that
    /// [`EventReader`](super::EventReader) has: changed mappings before faults.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/uffd/example.rs"));
    /// # fn main() { example(Features::empty(), |uffd| {
    /// let mut messages = [[0; MESSAGE_BYTES]; 16];
    /// assert_eq!(uffd.read_messages(&mut messages)?, 0);
    /// assert!(decode_message(&messages[0]).is_none());
    /// # Ok(()) }) }
    /// ```
    ///
    /// # Errors
    /// [`ReadError`], but for an unknown event.
    pub fn read_messages(&self, messages: &mut [[u8; MESSAGE_BYTES]]) -> Result<usize, ReadError> {
        let bytes = read::read(self, messages)?;
        if !bytes.is_multiple_of(MESSAGE_BYTES) {
            return Err(ReadError::Short { bytes });
        }
        Ok(bytes / MESSAGE_BYTES)
    }
}

/// The event of a message. `None` for an empty one, for an event that is not known, and for a fork:
/// its descriptor belongs to the process that read the message.
#[must_use]
pub fn decode_message(message: &[u8; MESSAGE_BYTES]) -> Option<Event> {
    Some(match Message::decode(message).ok()? {
        Message::PageFault(fault) => Event::PageFault(fault),
        Message::Remap { from, to, len } => Event::Remap { from, to, len },
        Message::Remove { start, end } => Event::Remove { start, end },
        Message::Unmap { start, end } => Event::Unmap { start, end },
        Message::Fork(_) => return None,
    })
}
