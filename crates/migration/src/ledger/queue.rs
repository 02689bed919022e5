//! The messages of one channel that have no receipt, in the order of their sending.

use core::ops::Range;
use std::collections::VecDeque;

/// A receipt for fewer messages than an earlier one, or for more than were sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is for {upto} messages, where {acknowledged} to {sent} are possible")]
#[non_exhaustive]
pub struct ReceiptError {
    /// The messages that it acknowledges.
    pub upto: u64,
    /// The messages that earlier receipts have acknowledged.
    pub acknowledged: u64,
    /// The messages that were sent.
    pub sent: u64,
}

/// A message without a receipt.
#[derive(Clone, Copy, Debug)]
struct Message {
    runs: usize,
    /// The bytes of its pages.
    bytes: u64,
}

/// The queue of a channel. The runs of all messages are in one list, so that a message needs no
/// allocation of its own.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// The messages with a receipt.
    acknowledged: u64,
    /// Each message without one.
    messages: VecDeque<Message>,
    /// The runs of these messages.
    runs: VecDeque<Range<usize>>,
}

impl Queue {
    /// Appends a message with these runs of pages, of which it has so many bytes.
    pub(super) fn push(&mut self, runs: impl IntoIterator<Item = Range<usize>>, bytes: u64) {
        let before = self.runs.len();
        self.runs.extend(runs);
        let runs = self.runs.len() - before;
        self.messages.push_back(Message { runs, bytes });
    }

    /// The number of messages without a receipt.
    pub(super) fn len(&self) -> usize {
        self.messages.len()
    }

    /// Checks a receipt for the first `upto` messages.
    pub(super) fn check(&self, upto: u64) -> Result<(), ReceiptError> {
        let acknowledged = self.acknowledged;
        let sent = acknowledged + self.messages.len() as u64;
        if (acknowledged..=sent).contains(&upto) {
            return Ok(());
        }
        Err(ReceiptError {
            upto,
            acknowledged,
            sent,
        })
    }

    /// Takes the messages up to `upto` out, and passes their runs to `each`. Returns the bytes of
    /// their pages.
    pub(super) fn take(&mut self, upto: u64, each: impl FnMut(Range<usize>)) -> u64 {
        let messages = (upto - self.acknowledged) as usize;
        let (mut runs, mut bytes) = (0, 0);
        for message in self.messages.drain(..messages) {
            runs += message.runs;
            bytes += message.bytes;
        }
        self.acknowledged = upto;
        self.runs.drain(..runs).for_each(each);
        bytes
    }

    /// The bytes of the messages of which `in_place` holds for every run.
    pub(super) fn bytes_of(&self, in_place: impl Fn(&Range<usize>) -> bool) -> u64 {
        let mut runs = self.runs.iter();
        let whole = self.messages.iter().filter(|message| {
            // Each run is looked at: the next message begins behind the last one.
            let missing = runs
                .by_ref()
                .take(message.runs)
                .filter(|run| !in_place(run));
            missing.count() == 0
        });
        whole.map(|message| message.bytes).sum()
    }

    /// Takes all messages out.
    pub(super) fn take_all(&mut self, each: impl FnMut(Range<usize>)) {
        let sent = self.acknowledged + self.messages.len() as u64;
        self.take(sent, each);
    }
}
